//! `managedFields`: the last writer of each field of an object, and the subresource of its write.
//!
//! As recorded, with one simplification: fields that the server fills in count as the writer's.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// Field names from the root, as in `fieldsV1`.
type Path = Vec<String>;

/// Records in `new` that a manager made it from `old`. Entries of other managers lose the fields that it changed.
pub fn record_change(old: &Value, new: &mut Value, manager: &str, subresource: &str, time: &str, api_version: &str) {
    let (before, after) = (fields(old), fields(new));
    let is_same = |path: &Path| before.get(path) == after.get(path);
    let changed: Vec<_> = after.keys().filter(|path| !is_same(path)).cloned().collect();
    if changed.is_empty() && before.keys().all(is_same) {
        return;
    }
    let mut entries: Vec<Value> = old["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
    let is_own = |entry: &Value| entry["manager"] == manager && entry["subresource"].as_str().unwrap_or_default() == subresource;
    let mut own = entries.iter().find(|entry| is_own(entry)).map(|entry| paths(&entry["fieldsV1"])).unwrap_or_default();
    own.extend(changed);
    own.retain(|path| after.contains_key(path));
    entries.retain(|entry| !is_own(entry));
    for entry in &mut entries {
        let kept = paths(&entry["fieldsV1"]).into_iter().filter(is_same);
        entry["fieldsV1"] = tree(kept);
    }
    let mut entry = json!({
        "manager": manager, "operation": "Update", "apiVersion": api_version, "time": time, "fieldsType": "FieldsV1",
        "fieldsV1": tree(own.into_iter()),
    });
    if !subresource.is_empty() {
        entry["subresource"] = subresource.into();
    }
    entries.push(entry);
    entries.retain(|entry| entry["fieldsV1"].as_object().is_some_and(|fields| !fields.is_empty()));
    new["metadata"]["managedFields"] = entries.into();
}

/// Every field that can have an owner, with its value.
fn fields(object: &Value) -> BTreeMap<Path, Value> {
    let mut found = BTreeMap::new();
    for (key, value) in object.as_object().into_iter().flatten() {
        match key.as_str() {
            "kind" | "apiVersion" => {}
            "metadata" => {
                for key in ["labels", "annotations", "finalizers", "ownerReferences"] {
                    collect(
                        &value[key],
                        &format!("metadata.{key}"),
                        vec!["f:metadata".to_owned(), format!("f:{key}")],
                        &mut found,
                    );
                }
            }
            key => collect(value, key, vec![format!("f:{key}")], &mut found),
        }
    }
    found
}

fn collect(value: &Value, name: &str, at: Path, found: &mut BTreeMap<Path, Value>) {
    let is_atomic = ["status.loadBalancer.ingress", "spec.selector"].contains(&name);
    let mut inside = |element: String, value: &Value, name: &str| {
        let mut path = at.clone();
        path.push(element);
        collect(value, name, path, found);
    };
    match value {
        Value::Null => {}
        Value::Object(map) if !is_atomic => {
            for (key, value) in map {
                inside(format!("f:{key}"), value, &format!("{name}.{key}"));
            }
            if ["metadata.labels", "metadata.annotations"].contains(&name) {
                inside(".".to_owned(), &json!({}), "");
            }
        }
        Value::Array(items) if name == "metadata.finalizers" => {
            items.iter().for_each(|item| inside(format!("v:{item}"), &json!(true), ""));
        }
        Value::Array(items) if name == "status.conditions" => {
            for item in items {
                inside(format!("k:{}", json!({"type": item["type"]})), item, "status.conditions[]");
            }
        }
        Value::Array(items) if name == "spec.ports" => {
            for item in items {
                let key = json!({"port": item["port"], "protocol": item["protocol"]});
                inside(format!("k:{key}"), item, "spec.ports[]");
            }
        }
        value => {
            found.insert(at, value.clone());
        }
    }
}

fn paths(fields: &Value) -> Vec<Path> {
    let mut found = Vec::new();
    walk(fields, &mut Vec::new(), &mut found);
    found
}

fn walk(fields: &Value, at: &mut Path, found: &mut Vec<Path>) {
    for (key, inner) in fields.as_object().into_iter().flatten() {
        at.push(key.clone());
        if inner.as_object().is_some_and(|inner| !inner.is_empty()) {
            walk(inner, at, found);
        } else {
            found.push(at.clone());
        }
        at.pop();
    }
}

fn tree(paths: impl Iterator<Item = Path>) -> Value {
    let mut root = Value::Object(Map::new());
    for path in paths {
        let mut at = &mut root;
        for element in path {
            at = &mut at[element];
            if at.is_null() {
                *at = json!({});
            }
        }
    }
    root
}
