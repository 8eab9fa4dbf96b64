//! The fields of a Service that say who may connect, and which backend a client gets.
//!
//! Invariant: a field that decides who may connect is read whole or is an error; nobody is let in by a typing error.

use std::time::Duration;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::ServiceSpec as ServiceFields;
use proto::Family;

use super::service::{SpecError, word};
use crate::note::{Cause, Remark};

/// The API server's default for `sessionAffinityConfig.clientIP.timeoutSeconds`.
const AFFINITY_DEFAULT_S: i32 = 10_800;
/// The longest that the API server takes: a day.
const AFFINITY_MAX_S: i32 = 86_400;

/// Prefixes of clients, blanks around them trimmed: the API server keeps those of `loadBalancerSourceRanges`.
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

/// `spec.loadBalancerSourceRanges`, or what the annotation says while that is empty.
pub(super) fn clients(
    fields: &ServiceFields,
    annotated: Option<Vec<IpNet>>,
    notes: &mut Vec<Remark>,
) -> Result<Option<Vec<IpNet>>, SpecError> {
    let texts = fields.load_balancer_source_ranges.as_deref().unwrap_or_default();
    if texts.is_empty() {
        return Ok(annotated);
    }
    let ranges = source_ranges("spec.loadBalancerSourceRanges", texts.iter().map(String::as_str))?;
    if annotated.is_some_and(|annotated| annotated != ranges) {
        let text = "spec.loadBalancerSourceRanges and the annotation for it differ; the field is used";
        notes.push(Remark::new(Cause::AnnotationsDiffer, text));
    }
    Ok(Some(ranges))
}

/// What an owner who knows kube-proxy may not expect: there, a family without a range is open.
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

/// `sessionAffinity: ClientIP` and how long a client keeps its backend.
pub(super) fn affinity(fields: &ServiceFields, notes: &mut Vec<Remark>) -> Result<Option<Duration>, SpecError> {
    match fields.session_affinity.as_deref() {
        None | Some("" | "None") => return Ok(None),
        Some("ClientIP") => {}
        Some(other) => return Err(word("spec.sessionAffinity", other, "None or ClientIP")),
    }
    let client_ip = fields.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    let asked = client_ip.and_then(|config| config.timeout_seconds).unwrap_or(AFFINITY_DEFAULT_S);
    let seconds = if (1..=AFFINITY_MAX_S).contains(&asked) {
        asked
    } else {
        let place = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
        let text = format!("{place} is {asked}, expected 1 to {AFFINITY_MAX_S}; {AFFINITY_DEFAULT_S} is used");
        notes.push(Remark::new(Cause::FieldIgnored, text));
        AFFINITY_DEFAULT_S
    };
    Ok(Some(Duration::from_secs(seconds.unsigned_abs().into())))
}

/// `externalTrafficPolicy: Local`.
pub(super) fn is_local(fields: &ServiceFields) -> Result<bool, SpecError> {
    match fields.external_traffic_policy.as_deref() {
        None | Some("" | "Cluster") => Ok(false),
        Some("Local") => Ok(true),
        Some(other) => Err(word("spec.externalTrafficPolicy", other, "Cluster or Local")),
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
        let annotated = annotated.map(|text| source_ranges("", text.split(',')).unwrap());
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
    fn a_family_without_a_range_is_denied_and_that_is_said() {
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

    #[test]
    fn affinity_has_the_api_servers_default_and_bounds() {
        let with =
            |seconds| json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}});
        let rows = [
            (json!({}), None, 0),
            (json!({"sessionAffinity": "None"}), None, 0),
            (json!({"sessionAffinity": "ClientIP"}), Some(10_800), 0),
            (with(60), Some(60), 0),
            (with(86_400), Some(86_400), 0),
            (with(0), Some(10_800), 1),
            (with(86_401), Some(10_800), 1),
        ];
        for (value, seconds, noted) in rows {
            let mut notes = Vec::new();
            let affinity = affinity(&fields(value.clone()), &mut notes).unwrap();
            assert_eq!((affinity, notes.len()), (seconds.map(Duration::from_secs), noted), "{value}");
        }
        assert!(affinity(&fields(json!({"sessionAffinity": "Cookie"})), &mut Vec::new()).is_err());
    }

    #[test]
    fn a_traffic_policy_is_cluster_or_local() {
        for (text, expected) in [("Cluster", Some(false)), ("Local", Some(true)), ("Nearby", None)] {
            assert_eq!(is_local(&fields(json!({"externalTrafficPolicy": text}))).ok(), expected);
        }
        assert_eq!(is_local(&fields(json!({}))), Ok(false));
    }
}
