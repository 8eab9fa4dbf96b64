//! Combines alternative selectors into the single selector of our pools.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

/// Label with the name of a namespace.
pub(super) const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// A selector of the namespaces with these names.
pub(super) fn named(namespaces: &[String]) -> LabelSelector {
    one_of(NAMESPACE_NAME.to_owned(), namespaces.iter().cloned().collect())
}

fn one_of(key: String, values: BTreeSet<String>) -> LabelSelector {
    let requirement = LabelSelectorRequirement { key, operator: "In".to_owned(), values: Some(values.into_iter().collect()) };
    LabelSelector { match_expressions: Some(vec![requirement]), match_labels: None }
}

/// The alternatives cannot be expressed as one selector.
pub(super) struct NotOne;

/// The selector that matches if any of `selectors` does; `None` if it matches everything.
pub(super) fn any_of(mut selectors: Vec<LabelSelector>) -> Result<Option<LabelSelector>, NotOne> {
    if selectors.iter().any(is_everything) {
        return Ok(None);
    }
    match selectors.len() {
        0 => Ok(None),
        1 => Ok(selectors.pop()),
        _ => union(&selectors).map(Some).ok_or(NotOne),
    }
}

fn is_everything(selector: &LabelSelector) -> bool {
    selector.match_labels.as_ref().is_none_or(BTreeMap::is_empty) && selector.match_expressions.as_ref().is_none_or(Vec::is_empty)
}

/// Combines selectors that all require values of the same label.
fn union(selectors: &[LabelSelector]) -> Option<LabelSelector> {
    let mut key: Option<String> = None;
    let mut values = BTreeSet::new();
    for selector in selectors {
        let (label, wanted) = values_of_one_label(selector)?;
        if key.get_or_insert_with(|| label.to_owned()) != label {
            return None;
        }
        values.extend(wanted);
    }
    Some(one_of(key?, values))
}

fn values_of_one_label(selector: &LabelSelector) -> Option<(&str, Vec<String>)> {
    let labels = selector.match_labels.iter().flatten().map(|(key, value)| (key.as_str(), vec![value.clone()]));
    let mut all: Vec<_> = labels.collect();
    for requirement in selector.match_expressions.iter().flatten() {
        if requirement.operator != "In" {
            return None;
        }
        all.push((&requirement.key, requirement.values.clone().unwrap_or_default()));
    }
    if all.len() == 1 { all.pop() } else { None }
}
