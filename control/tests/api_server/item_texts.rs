//! The text of each object as an item of a list. A benchmark lists 20,000 objects, and this server shares a core with the
//! programs that it measures: each version of an object is written once.

use std::collections::HashMap;

use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

/// Texts by the versions of their objects.
#[derive(Default)]
pub struct ItemTexts(HashMap<String, Box<RawValue>>);

impl ItemTexts {
    /// The text of a stored object.
    pub fn of(&mut self, object: &Value) -> Box<RawValue> {
        self.0.entry(version(object).to_owned()).or_insert_with(|| to_raw_value(&Item(object)).unwrap()).clone()
    }

    /// Forgets a version that is no longer the current one.
    pub fn forget(&mut self, object: &Value) {
        self.0.remove(version(object));
    }
}

fn version(object: &Value) -> &str {
    object["metadata"]["resourceVersion"].as_str().unwrap()
}

/// An object without kind and apiVersion.
struct Item<'a>(&'a Value);

impl Serialize for Item<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let fields = self.0.as_object().into_iter().flatten();
        serializer.collect_map(fields.filter(|(key, _)| !["kind", "apiVersion"].contains(&key.as_str())))
    }
}
