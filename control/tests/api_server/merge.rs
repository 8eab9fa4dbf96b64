//! JSON merge patches (RFC 7396), and strategic merge patches with the strategies that Services declare.

use serde_json::{Map, Value};

/// What a list in a patch does to the existing list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// It replaces the list.
    Merge,
    /// It is merged if the type declares it: finalizers as a set, conditions by `type`.
    Strategic,
}

/// Applies a patch to an object.
pub fn merge(target: &mut Value, patch: &Value, strategy: Strategy) {
    merge_at(target, patch, strategy, "");
}

fn merge_at(target: &mut Value, patch: &Value, strategy: Strategy, path: &str) {
    let Value::Object(patch) = patch else {
        *target = merged_list(target, patch, strategy, path);
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else { return };
    for (key, value) in patch {
        if strategy == Strategy::Strategic
            && let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/")
        {
            remove_all(target.get_mut(list), value);
        } else if value.is_null() {
            target.remove(key);
        } else {
            merge_at(target.entry(key.as_str()).or_insert(Value::Null), value, strategy, &format!("{path}.{key}"));
        }
    }
}

fn merged_list(target: &Value, patch: &Value, strategy: Strategy, path: &str) -> Value {
    let (Strategy::Strategic, Value::Array(old), Value::Array(new)) = (strategy, target, patch) else {
        return patch.clone();
    };
    match path {
        ".metadata.finalizers" => {
            let mut all = old.clone();
            all.extend(new.iter().filter(|entry| !old.contains(entry)).cloned());
            Value::Array(all)
        }
        ".status.conditions" => {
            let mut all = old.clone();
            for condition in new {
                all.retain(|other| other["type"] != condition["type"]);
                if condition["$patch"] != "delete" {
                    all.push(condition.clone());
                }
            }
            Value::Array(all)
        }
        // `status.loadBalancer.ingress` is atomic.
        _ => patch.clone(),
    }
}

fn remove_all(list: Option<&mut Value>, removed: &Value) {
    if let (Some(Value::Array(list)), Value::Array(removed)) = (list, removed) {
        list.retain(|entry| !removed.contains(entry));
    }
}
