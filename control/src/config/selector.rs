//! Label selectors in the configuration, in the form of Kubernetes with `matchLabels` and `matchExpressions`, or as
//! labels alone, such as `{team: edge}`. An empty selector selects everything.
//!
//! Invariant: what the API server would refuse is refused here.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use kube::core::Selector;

use super::section::{Field, Section, alternatives};
use objects::scalar::{is_label_key, is_label_value};

const EXPECTED_KEY: &str = "a label's key such as team or example.com/team";
const EXPECTED_VALUE: &str = "a label's value: letters, digits, `-`, `_` and `.`, at most 63";

impl Section<'_> {
    /// A label selector. It selects everything if the key is absent or empty.
    pub fn selector(&mut self, key: &'static str) -> Selector {
        self.field(key).map(|field| selector(&field)).unwrap_or_default()
    }
}

/// Reads a selector without its invalid parts, which are recorded as problems.
fn selector(field: &Field<'_>) -> Selector {
    let entries = field.entries();
    let is_long = entries.iter().any(|(key, _)| matches!(*key, "matchLabels" | "matchExpressions"));
    let mut read = LabelSelector::default();
    if is_long {
        let mut section = field.section();
        read.match_labels = section.field("matchLabels").map(|labels| labels_of(&labels.entries()));
        let expressions = section.items("matchExpressions", "expressions");
        read.match_expressions = Some(expressions.iter().filter_map(requirement).collect());
        section.finish();
    } else {
        read.match_labels = Some(labels_of(&entries));
    }
    // The conversion fails only for operators that `requirement` does not accept.
    Selector::try_from(read).unwrap_or_default()
}

fn labels_of(entries: &[(&str, Field<'_>)]) -> BTreeMap<String, String> {
    let label = |(key, field): &(&str, Field<'_>)| {
        if !is_label_key(key) {
            field.problem(format!("found `{key}`, expected {EXPECTED_KEY}"));
            return None;
        }
        let value = field.parse(EXPECTED_VALUE, |text| is_label_value(text).then(|| text.to_owned()))?;
        Some(((*key).to_owned(), value))
    };
    entries.iter().filter_map(label).collect()
}

fn requirement(field: &Field<'_>) -> Option<LabelSelectorRequirement> {
    let mut section = field.section();
    let key = section.parse_required("key", EXPECTED_KEY, |text| is_label_key(text).then(|| text.to_owned()));
    let operators = ["In", "NotIn", "Exists", "DoesNotExist"];
    let expected = alternatives(&operators);
    let operator = section.parse_required("operator", expected, |text| operators.into_iter().find(|name| *name == text));
    let listed = section.field("values");
    let items = listed.as_ref().map(|field| field.items("values")).unwrap_or_default();
    let parse = |text: &str| is_label_value(text).then(|| text.to_owned());
    let values: Vec<String> = items.iter().filter_map(|item| item.parse(EXPECTED_VALUE, parse)).collect();
    section.finish();
    let (key, operator) = (key?, operator?);
    let takes_values = matches!(operator, "In" | "NotIn");
    if takes_values && items.is_empty() {
        field.problem(format!("operator {operator} has no `values`; list at least one"));
    } else if !takes_values && !items.is_empty() {
        field.problem(format!("operator {operator} takes no `values`; leave them out"));
    }
    Some(LabelSelectorRequirement { key, operator: operator.to_owned(), values: takes_values.then_some(values) })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use kube::core::SelectorExt;

    use super::super::Reader;
    use super::*;

    fn read(text: &str) -> Result<Selector, String> {
        read_file(&format!("s: {text}\n"))
    }

    fn read_file(text: &str) -> Result<Selector, String> {
        let (reader, root) = Reader::parse(Path::new("f"), text).unwrap();
        let mut top = reader.section(&root);
        let selector = top.selector("s");
        top.finish();
        reader.finish().map(|_| selector).map_err(|invalid| invalid.to_string())
    }

    fn labels(text: &str) -> BTreeMap<String, String> {
        let pair = |word: &str| word.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).unwrap();
        text.split_whitespace().map(pair).collect()
    }

    #[test]
    fn a_selector_selects_as_in_kubernetes_in_long_and_short_form() {
        let long = "{matchLabels: {team: edge}, matchExpressions: [{key: tier, operator: In, values: [a, b]}, \
                    {key: x/old, operator: DoesNotExist}, {key: zone, operator: NotIn, values: [c]}, {key: team, operator: Exists}]}";
        let rows = [
            ("{}", "", true),
            ("", "a=b", true),
            ("{team: edge}", "team=edge tier=a", true),
            ("{team: edge}", "team=core", false),
            ("{matchLabels: {team: edge}}", "team=edge", true),
            ("{matchLabels: {}}", "team=edge", true),
            (long, "team=edge tier=a", true),
            (long, "team=edge tier=b zone=d", true),
            (long, "team=edge tier=c", false),
            (long, "team=edge", false),
            (long, "team=edge tier=a zone=c", false),
            (long, "team=edge tier=a x/old=", false),
        ];
        for (text, given, expected) in rows {
            assert_eq!(read(text).unwrap().matches(&labels(given)), expected, "{text} over {given:?}");
        }
    }

    #[test]
    fn a_printed_selector_parses_to_the_same_selector() {
        let long = "{matchExpressions: [{key: b, operator: In, values: [y, x, y]}, {key: a, operator: Exists}], matchLabels: {z: '1', a: ''}}";
        for text in ["{}", "{team: edge, example.com/tier: 'on'}", long] {
            let selector = read(text).unwrap();
            let written = super::super::KeyValues::default().with("s", LabelSelector::from(selector.clone())).to_string();
            assert_eq!(read_file(&written), Ok(selector), "{written}");
        }
    }

    #[test]
    fn selectors_that_the_api_server_would_refuse_are_refused_with_their_key() {
        let rows = [
            ("edge", "key `s`: found `edge`, expected a mapping"),
            ("{matchlabels: {a: b}}", "key `s.matchlabels`: found a mapping, expected a label's value"),
            ("{matchLabels: {a: b}, team: c}", "unknown key `team`"),
            ("{-a: b}", "found `-a`, expected a label's key"),
            ("{a/b/c: d}", "found `a/b/c`, expected a label's key"),
            ("{a: 'b c'}", "key `s.a`: found `b c`, expected a label's value"),
            (
                "{matchExpressions: [{key: a, operator: Like, values: [b]}]}",
                "found `Like`, expected In, NotIn, Exists or DoesNotExist",
            ),
            ("{matchExpressions: [{key: a, operator: In}]}", "operator In has no `values`"),
            ("{matchExpressions: [{key: a, operator: Exists, values: [b]}]}", "operator Exists takes no `values`"),
            ("{matchExpressions: [{operator: Exists}]}", "matchExpressions[0].key`: missing"),
        ];
        for (text, expected) in rows {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
