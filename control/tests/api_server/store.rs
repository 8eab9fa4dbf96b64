//! Objects, their versions, and the history that watches read.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::answer::Answer;
use super::merge::{Strategy, merge};
use super::service;

/// The kinds of objects that are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Service,
    EndpointSlice,
    Node,
    Namespace,
    AddressPool,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::Service, Self::EndpointSlice, Self::Node, Self::Namespace, Self::AddressPool];

    pub fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Node => "Node",
            Self::Namespace => "Namespace",
            Self::AddressPool => "AddressPool",
        }
    }

    pub fn plural(self) -> &'static str {
        match self {
            Self::Service => "services",
            Self::EndpointSlice => "endpointslices",
            Self::Node => "nodes",
            Self::Namespace => "namespaces",
            Self::AddressPool => "addresspools",
        }
    }

    pub fn group(self) -> &'static str {
        match self {
            Self::Service | Self::Node | Self::Namespace => "",
            Self::EndpointSlice => "discovery.k8s.io",
            Self::AddressPool => "sluice.dev",
        }
    }

    pub fn api_version(self) -> &'static str {
        match self {
            Self::Service | Self::Node | Self::Namespace => "v1",
            Self::EndpointSlice => "discovery.k8s.io/v1",
            Self::AddressPool => "sluice.dev/v1beta1",
        }
    }
}

/// Which part of an object a request changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All but the status.
    Main,
    /// The status and the metadata.
    Status,
}

/// Namespace and name within a kind.
type Key = (Kind, String, String);

/// One event that watches deliver.
#[derive(Clone, Debug)]
pub struct Record {
    pub revision: u64,
    pub kind: Kind,
    pub namespace: String,
    pub event: &'static str,
    pub object: Value,
}

pub struct Store {
    revision: u64,
    compacted: u64,
    objects: BTreeMap<Key, Value>,
    history: Vec<Record>,
}

impl Store {
    pub fn new() -> Self {
        Self { revision: 100, compacted: 0, objects: BTreeMap::new(), history: Vec::new() }
    }

    pub fn revision(&self) -> u64 {
        self.revision
    }

    pub fn compacted(&self) -> u64 {
        self.compacted
    }

    /// Forgets all events so far. Something else moved the version on, as in any real cluster.
    pub fn compact(&mut self) {
        self.revision += 1;
        self.compacted = self.revision;
        self.history.clear();
    }

    /// Events of a kind after a version; an empty namespace is all of them.
    pub fn since(&self, kind: Kind, namespace: &str, revision: u64) -> Vec<Record> {
        let is_wanted = |record: &&Record| {
            record.revision > revision && record.kind == kind && (namespace.is_empty() || record.namespace == namespace)
        };
        self.history.iter().filter(is_wanted).cloned().collect()
    }

    /// Objects of a kind ordered by namespace and name; an empty namespace is all of them.
    pub fn list(&self, kind: Kind, namespace: &str) -> Vec<&Value> {
        let is_wanted = |key: &Key| key.0 == kind && (namespace.is_empty() || key.1 == namespace);
        self.objects.iter().filter(|(key, _)| is_wanted(key)).map(|(_, object)| object).collect()
    }

    pub fn get(&self, kind: Kind, namespace: &str, name: &str) -> Result<&Value, Answer> {
        self.objects.get(&key(kind, namespace, name)).ok_or_else(|| Answer::not_found(kind.plural(), name))
    }

    pub fn create(&mut self, kind: Kind, mut object: Value) -> Result<Value, Answer> {
        let (namespace, name) = names(&object);
        if self.objects.contains_key(&key(kind, &namespace, &name)) {
            return Err(Answer::already_exists(kind.plural(), &name));
        }
        let number = self.revision + 1;
        object["kind"] = kind.name().into();
        object["apiVersion"] = kind.api_version().into();
        object["metadata"]["uid"] = format!("00000000-0000-4000-8000-{number:012}").into();
        object["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
        if kind == Kind::Service {
            service::set_defaults(&mut object, number);
        }
        Ok(self.put(kind, "ADDED", object))
    }

    pub fn put_raw(&mut self, kind: Kind, object: Value) {
        let (namespace, name) = names(&object);
        let is_known = self.objects.contains_key(&key(kind, &namespace, &name));
        self.put(kind, if is_known { "MODIFIED" } else { "ADDED" }, object);
    }

    pub fn patch(
        &mut self,
        kind: Kind,
        namespace: &str,
        name: &str,
        patch: &Value,
        strategy: Strategy,
        part: Part,
    ) -> Result<Value, Answer> {
        let old = self.get(kind, namespace, name)?.clone();
        let mut new = old.clone();
        merge(&mut new, patch, strategy);
        check_guards(kind, name, &old, &new)?;
        match part {
            Part::Main => new["status"] = old["status"].clone(),
            Part::Status => new["spec"] = old["spec"].clone(),
        }
        drop_nulls(&mut new, &old);
        if kind == Kind::Service {
            if part == Part::Main {
                service::clear_after_type_change(&mut new);
            }
            service::check_status(&mut new)?;
        }
        if new == old {
            return Ok(old);
        }
        let is_finished = new["metadata"]["deletionTimestamp"].is_string() && has_no_finalizers(&new);
        Ok(if is_finished { self.remove(kind, namespace, name, new) } else { self.put(kind, "MODIFIED", new) })
    }

    pub fn delete(&mut self, kind: Kind, namespace: &str, name: &str) -> Result<Value, Answer> {
        let mut object = self.get(kind, namespace, name)?.clone();
        if has_no_finalizers(&object) {
            return Ok(self.remove(kind, namespace, name, object));
        }
        object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:01Z".into();
        Ok(self.put(kind, "MODIFIED", object))
    }

    fn put(&mut self, kind: Kind, event: &'static str, object: Value) -> Value {
        let object = self.record(kind, event, object);
        let (namespace, name) = names(&object);
        self.objects.insert(key(kind, &namespace, &name), object.clone());
        object
    }

    fn remove(&mut self, kind: Kind, namespace: &str, name: &str, object: Value) -> Value {
        self.objects.remove(&key(kind, namespace, name));
        self.record(kind, "DELETED", object)
    }

    fn record(&mut self, kind: Kind, event: &'static str, mut object: Value) -> Value {
        self.revision += 1;
        object["metadata"]["resourceVersion"] = self.revision.to_string().into();
        let (namespace, _) = names(&object);
        self.history.push(Record { revision: self.revision, kind, namespace, event, object: object.clone() });
        object
    }
}

fn key(kind: Kind, namespace: &str, name: &str) -> Key {
    (kind, namespace.to_owned(), name.to_owned())
}

fn names(object: &Value) -> (String, String) {
    let text = |field| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    (text("namespace"), text("name"))
}

fn has_no_finalizers(object: &Value) -> bool {
    object["metadata"]["finalizers"].as_array().is_none_or(Vec::is_empty)
}

/// A stale version is a conflict, another uid an invalid object.
fn check_guards(kind: Kind, name: &str, old: &Value, new: &Value) -> Result<(), Answer> {
    if new["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"] {
        return Err(Answer::conflict(kind.plural(), name));
    }
    if new["metadata"]["uid"] == old["metadata"]["uid"] {
        return Ok(());
    }
    let uid = new["metadata"]["uid"].as_str().unwrap_or_default();
    let message = format!("Invalid value: \"{uid}\": field is immutable");
    let cause = json!({"reason": "FieldValueInvalid", "message": message, "field": "metadata.uid"});
    let details = json!({"name": name, "kind": kind.name(), "causes": [cause.clone(), cause]});
    let message = format!("{} \"{name}\" is invalid: metadata.uid: {message}", kind.name());
    Err(Answer::status(422, "Invalid", message, Some(details)))
}

/// Indexing for assignment leaves nulls where nothing was; emptied finalizers vanish.
fn drop_nulls(new: &mut Value, old: &Value) {
    for part in ["status", "spec"] {
        if old[part].is_null()
            && let Some(object) = new.as_object_mut()
        {
            object.remove(part);
        }
    }
    if has_no_finalizers(new)
        && let Some(metadata) = new["metadata"].as_object_mut()
    {
        metadata.remove("finalizers");
    }
}
