//! Settings as keys with values, in the order of the file: what `check` prints and what `reload` compares.
//!
//! Invariant: the printed YAML is read back as the same keys and values.

use std::fmt;

use serde::Serialize;
use serde_json::Value as Json;
use serde_saphyr::{FlowMap, FlowSeq};

/// The keys of a mapping and their values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeyValues(Vec<(&'static str, KeyValue)>);

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
enum KeyValue {
    Plain(Json),
    List(FlowSeq<Vec<Json>>),
    Map(FlowMap<serde_json::Map<String, Json>>),
    Section(FlowMap<KeyValues>),
    Block(KeyValues),
    Items(Vec<KeyValues>),
}

impl KeyValues {
    fn push(mut self, key: &'static str, value: KeyValue) -> Self {
        self.0.push((key, value));
        self
    }

    /// Adds a key. An absent value is printed as `null`; a list or a mapping on one line.
    #[must_use]
    pub fn with(self, key: &'static str, value: impl Serialize) -> Self {
        // Only a map with keys that are no texts, or a path that is no UTF-8, cannot be converted; settings have
        // neither.
        let value = match serde_json::to_value(value).unwrap_or_default() {
            // An empty `FlowSeq` would make serde-saphyr 2.0 print the next list on one line too.
            Json::Array(items) if !items.is_empty() => KeyValue::List(FlowSeq(items)),
            Json::Object(keys) if !keys.is_empty() => KeyValue::Map(FlowMap(keys)),
            other => KeyValue::Plain(other),
        };
        self.push(key, value)
    }

    /// Adds a key with a list of values that are printed as text.
    #[must_use]
    pub fn with_texts<T: fmt::Display>(self, key: &'static str, values: impl IntoIterator<Item = T>) -> Self {
        self.with(key, values.into_iter().map(|value| value.to_string()).collect::<Vec<_>>())
    }

    /// Adds a mapping that is printed on one line.
    #[must_use]
    pub fn section(self, key: &'static str, keys: Self) -> Self {
        self.push(key, KeyValue::Section(FlowMap(keys)))
    }

    /// Adds a mapping that is printed with one line for each key.
    #[must_use]
    pub fn block(self, key: &'static str, keys: Self) -> Self {
        self.push(key, KeyValue::Block(keys))
    }

    /// Adds a list of mappings.
    #[must_use]
    pub fn items(self, key: &'static str, items: impl IntoIterator<Item = Self>) -> Self {
        self.push(key, KeyValue::Items(items.into_iter().collect()))
    }

    /// Adds the keys of another mapping behind its own.
    #[must_use]
    pub fn then(mut self, others: Self) -> Self {
        self.0.extend(others.0);
        self
    }

    /// The keys, in their order.
    #[must_use]
    pub fn names(&self) -> Vec<&'static str> {
        self.0.iter().map(|(key, _)| *key).collect()
    }

    /// The keys whose values differ between the two, those of `self` first, in their order.
    #[must_use]
    pub fn differing(&self, other: &Self) -> Vec<&'static str> {
        let value = |keys: &'_ Self, key| keys.0.iter().find(|(name, _)| *name == key).map(|(_, value)| value.clone());
        let changed = self.0.iter().filter(|(key, this)| value(other, *key).as_ref() != Some(this));
        let removed = other.0.iter().filter(|(key, _)| value(self, *key).is_none());
        changed.chain(removed).map(|(key, _)| *key).collect()
    }
}

impl Serialize for KeyValues {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl fmt::Display for KeyValues {
    /// As YAML.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = serde_saphyr::ser_options! { prefer_block_scalars: false, compact_list_indent: false };
        serde_saphyr::to_fmt_writer_with_options(f, self, options).map_err(|_| fmt::Error)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::yaml_tree::{Value, parse};
    use super::*;

    #[test]
    fn sections_and_lists_of_values_are_printed_on_one_line() {
        let port = |name| {
            KeyValues::default().with("name", name).with_texts("addresses", ["192.0.2.2/24", "::1"]).with("mac", None::<&str>)
        };
        let keys = KeyValues::default()
            .items("ports", [port("a"), port("off")])
            .section("snat", KeyValues::default().with("addresses", [""; 0]))
            .section("tls", KeyValues::default())
            .items("pools", [KeyValues::default().with("name", "p").with("selector", BTreeMap::from([("team", "edge")]))])
            .section("workers", KeyValues::default().with("cores", [1, 2]).with("poll", "busy"))
            .block("static", KeyValues::default().items("routes", []));
        let expected = "\
ports:
  - name: a
    addresses: [192.0.2.2/24, \"::1\"]
    mac: null
  - name: \"off\"
    addresses: [192.0.2.2/24, \"::1\"]
    mac: null
snat: {addresses: []}
tls: {}
pools:
  - name: p
    selector: {team: edge}
workers: {cores: [1, 2], poll: busy}
static:
  routes: []
";
        assert_eq!(keys.to_string(), expected);
    }

    #[test]
    fn changed_added_and_removed_keys_differ() {
        let old = KeyValues::default().with("a", 1).with("b", 2).with("removed", 3);
        let new = KeyValues::default().with("added", 4).with("a", 1).with("b", "2");
        assert_eq!(new.differing(&old), ["added", "b", "removed"]);
        assert_eq!(new.differing(&new), [""; 0]);
    }

    proptest! {
        #[test]
        fn printed_text_parses_to_the_same_values(text in any::<String>(), flow in any::<bool>()) {
            let keys = KeyValues::default().with("k", &text);
            let keys = if flow { KeyValues::default().section("s", keys) } else { KeyValues::default().block("s", keys) };
            let Ok((root, _)) = parse(&keys.to_string()) else { panic!("no YAML: {keys}") };
            let Value::Map(top) = root.value else { panic!("{keys}") };
            let Value::Map(section) = &top[0].node.value else { panic!("{keys}") };
            prop_assert_eq!(&section[0].node.value, &Value::Scalar(text));
        }
    }
}
