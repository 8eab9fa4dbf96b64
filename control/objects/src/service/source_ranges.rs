//! The clients that may connect to a Service.
//!
//! Invariant: a field that decides who may connect is parsed completely or is an error; a typo admits no
//! client.

use ipnet::IpNet;
use k8s_openapi::api::core::v1::ServiceSpec as ServiceFields;
use proto::Family;

use super::error::SpecError;
use crate::note::{Cause, Remark};

/// Parses client prefixes, with blanks trimmed: the API server keeps blanks in `loadBalancerSourceRanges`.
pub(super) fn source_ranges<'a>(place: &str, texts: impl Iterator<Item = &'a str>) -> Result<Vec<IpNet>, SpecError> {
    let parse = |text: &str| {
        let wrong = || SpecError::SourceRange { place: place.to_owned(), found: text.chars().take(80).collect() };
        text.trim().parse::<IpNet>().map(|net| net.trunc()).map_err(|_| wrong())
    };
    let mut ranges = texts.map(parse).collect::<Result<Vec<_>, _>>()?;
    ranges.sort_unstable();
    ranges.dedup();
    Ok(ranges)
}

/// `spec.loadBalancerSourceRanges`, or the annotation if that is empty. An annotation beside the field decides nothing,
/// so that an invalid one refuses no Service.
pub(super) fn clients(
    fields: &ServiceFields,
    annotated: Result<Option<Vec<IpNet>>, SpecError>,
    notes: &mut Vec<Remark>,
) -> Result<Option<Vec<IpNet>>, SpecError> {
    let texts = fields.load_balancer_source_ranges.as_deref().unwrap_or_default();
    if texts.is_empty() {
        return annotated;
    }
    let ranges = source_ranges("spec.loadBalancerSourceRanges", texts.iter().map(String::as_str))?;
    if annotated.map_or(true, |annotated| annotated.is_some_and(|annotated| annotated != ranges)) {
        let text = "spec.loadBalancerSourceRanges and the annotation for it differ; the field is used";
        notes.push(Remark::new(Cause::AnnotationsDiffer, text));
    }
    Ok(Some(ranges))
}

/// Warns about a difference from kube-proxy, where a family without a range is open.
pub(super) fn note_denied_families(ranges: Option<&[IpNet]>, families: &[Family], notes: &mut Vec<Remark>) {
    let Some(ranges) = ranges else { return };
    for family in families.iter().filter(|family| !ranges.iter().any(|net| Family::of(net.addr()) == **family)) {
        let all = if *family == Family::V4 { "0.0.0.0/0" } else { "::/0" };
        let text = format!(
            "the source ranges name no {family} prefix, so that no {family} client may connect (kube-proxy leaves it open); \
             add {all} to let all in"
        );
        notes.push(Remark::new(Cause::FamilyDenied, text));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn fields(value: Value) -> ServiceFields {
        serde_json::from_value(value).unwrap()
    }

    fn clients_of(value: Value, annotated: Option<&str>) -> (Result<Option<Vec<IpNet>>, SpecError>, usize) {
        let annotated = annotated.map(|text| source_ranges("", text.split(','))).transpose();
        let mut notes = Vec::new();
        (clients(&fields(value), annotated, &mut notes), notes.len())
    }

    #[test]
    fn source_ranges_are_trimmed_whole_and_the_field_wins_over_the_annotation() {
        let nets = |list: &[&str]| Some(list.iter().map(|net| net.parse().unwrap()).collect());
        let spec = json!({"loadBalancerSourceRanges": [" 10.1.2.3/8", "192.0.2.0/24 ", "10.0.0.0/8"]});
        assert_eq!(clients_of(spec.clone(), None), (Ok(nets(&["10.0.0.0/8", "192.0.2.0/24"])), 0));
        assert_eq!(clients_of(spec, Some("0.0.0.0/0")), (Ok(nets(&["10.0.0.0/8", "192.0.2.0/24"])), 1));
        assert_eq!(clients_of(json!({"loadBalancerSourceRanges": []}), Some("::/0")), (Ok(nets(&["::/0"])), 0));
        assert_eq!(clients_of(json!({}), None), (Ok(None), 0));
        for wrong in ["10.0.0.0", "10.0.0.0/33", "", "10.0.0.0/8,192.0.2.0/24"] {
            assert!(clients_of(json!({"loadBalancerSourceRanges": ["10.0.0.0/8", wrong]}), None).0.is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn an_invalid_annotation_beside_the_field_is_noted_and_refuses_nothing() {
        let nets = Some(vec!["10.0.0.0/8".parse().unwrap()]);
        let spec = json!({"loadBalancerSourceRanges": ["10.0.0.0/8"]});
        assert_eq!(clients_of(spec.clone(), Some("10.0.0.0/8")), (Ok(nets.clone()), 0));
        assert_eq!(clients_of(spec, Some("10.0.0.300/8")), (Ok(nets), 1));
        assert!(clients_of(json!({}), Some("10.0.0.300/8")).0.is_err());
    }

    #[test]
    fn a_family_without_a_range_is_denied_and_noted() {
        let (v4, any): (IpNet, IpNet) = ("10.0.0.0/8".parse().unwrap(), "::/0".parse().unwrap());
        let both = [Family::V4, Family::V6];
        let one = [Family::V4];
        let rows = [(None, &both[..], 0), (Some(vec![v4]), &both, 1), (Some(vec![v4]), &one, 0), (Some(vec![v4, any]), &both, 0)];
        for (ranges, families, expected) in rows {
            let mut notes = Vec::new();
            note_denied_families(ranges.as_deref(), families, &mut notes);
            assert_eq!(notes.len(), expected, "{ranges:?}: {notes:?}");
            assert!(notes.iter().all(|note| note.text.contains("kube-proxy") && note.text.contains("IPv6")));
        }
    }
}
