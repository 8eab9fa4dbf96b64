//! Objects, their versions, and the history from which watches and pages are answered.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::{Value, json};

use super::clock::Clock;
use super::item_texts::ItemTexts;
use super::kind::Kind;
use super::merge::{Strategy, merge};
use super::responses::ApiResponse;
use super::{managed_fields, objects, service};

/// The part of an object that a request changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Everything except the status.
    Main,
    /// The status, and for built-in kinds the metadata.
    Status,
}

/// Identity of an object. The namespace is empty for cluster-scoped kinds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    pub kind: Kind,
    pub namespace: String,
    pub name: String,
}

impl ObjectKey {
    pub fn new(kind: Kind, namespace: &str, name: &str) -> Self {
        Self { kind, namespace: namespace.to_owned(), name: name.to_owned() }
    }

    fn of(kind: Kind, object: &Value) -> Self {
        let text = |field| object["metadata"][field].as_str().unwrap_or_default();
        Self::new(kind, if kind.is_namespaced() { text("namespace") } else { "" }, text("name"))
    }
}

/// The change that a request makes to an object.
pub struct Change<'a> {
    pub body: &'a Value,
    /// `None`: the object is replaced.
    pub strategy: Option<Strategy>,
    pub part: Part,
    pub manager: &'a str,
}

/// One event that watches deliver.
#[derive(Clone, Debug)]
pub struct Record {
    pub revision: u64,
    pub key: ObjectKey,
    pub event: &'static str,
    pub object: Value,
    pub at: Instant,
}

pub struct Store {
    revision: u64,
    compacted: u64,
    objects: BTreeMap<ObjectKey, Value>,
    /// The complete history: open watches still deliver events that are expired for new ones.
    history: Vec<Record>,
    /// Whether the next page that is not the last one expires immediately.
    pub compact_before_next_page: bool,
    /// The current objects as lists show them.
    pub texts: RefCell<ItemTexts>,
    pub clock: Clock,
}

impl Store {
    pub fn new() -> Self {
        Self {
            revision: 100,
            compacted: 0,
            objects: BTreeMap::new(),
            history: Vec::new(),
            compact_before_next_page: false,
            texts: RefCell::default(),
            clock: Clock::at("2026-01-01T00:00:00Z"),
        }
    }

    pub fn revision(&self) -> u64 {
        self.revision
    }

    pub fn compacted(&self) -> u64 {
        self.compacted
    }

    /// Expires all events so far for clients with an older version. The version itself also grows, because in a real
    /// cluster other objects change.
    pub fn compact(&mut self) {
        self.revision += 1;
        self.compacted = self.revision;
    }

    /// Events of a kind after a version. An empty namespace selects all namespaces.
    pub fn since<'a>(&'a self, kind: Kind, namespace: &str, revision: u64) -> impl Iterator<Item = &'a Record> {
        let first = self.history.partition_point(|record| record.revision <= revision);
        self.history[first..].iter().filter(move |record| is_in(&record.key, kind, namespace))
    }

    /// Objects of a kind, ordered by namespace and name. An empty namespace selects all namespaces.
    pub fn list(&self, kind: Kind, namespace: &str) -> Vec<&Value> {
        let first = ObjectKey::new(kind, namespace, "");
        let all = self.objects.range(first..).take_while(|(key, _)| is_in(key, kind, namespace));
        all.map(|(_, object)| object).collect()
    }

    /// Whether there is an object of a kind.
    pub fn has_any(&self, kind: Kind) -> bool {
        self.objects.range(ObjectKey::new(kind, "", "")..).next().is_some_and(|(key, _)| key.kind == kind)
    }

    /// [`Store::list`] at a version that is not expired.
    pub fn list_at<'a>(&'a self, kind: Kind, namespace: &str, revision: u64) -> Vec<&'a Value> {
        if self.since(kind, namespace, revision).next().is_none() {
            return self.list(kind, namespace);
        }
        let mut then = BTreeMap::new();
        for record in self.since(kind, namespace, 0).take_while(|record| record.revision <= revision) {
            if record.event == "DELETED" {
                then.remove(&record.key);
            } else {
                then.insert(&record.key, &record.object);
            }
        }
        then.into_values().collect()
    }

    pub fn get(&self, key: &ObjectKey) -> Result<&Value, ApiResponse> {
        self.objects.get(key).ok_or_else(|| ApiResponse::not_found(key.kind, &key.name))
    }

    /// When an object was created, on the clock of the test.
    pub fn added_at(&self, key: &ObjectKey) -> Option<Instant> {
        self.history.iter().rev().find(|record| record.event == "ADDED" && record.key == *key).map(|record| record.at)
    }

    pub fn create(&mut self, kind: Kind, mut object: Value, manager: &str) -> Result<Value, ApiResponse> {
        let number = self.revision + 1;
        if let (Some(prefix), None) = (object["metadata"]["generateName"].as_str(), object["metadata"]["name"].as_str()) {
            object["metadata"]["name"] = format!("{prefix}{number:05}").into();
        }
        let key = ObjectKey::of(kind, &object);
        if kind.is_namespaced() {
            let namespace = self.get(&ObjectKey::new(Kind::Namespace, "", &key.namespace))?;
            if is_terminating(namespace) {
                return Err(ApiResponse::terminating(kind, &key.name, &key.namespace));
            }
        }
        if self.objects.contains_key(&key) {
            return Err(ApiResponse::already_exists(kind, &key.name));
        }
        object["kind"] = kind.name().into();
        object["apiVersion"] = kind.api_version().into();
        object["metadata"]["uid"] = format!("00000000-0000-4000-8000-{number:012}").into();
        object["metadata"]["creationTimestamp"] = self.clock.now().into();
        objects::set_defaults(kind, &mut object, number);
        objects::check(kind, &object)?;
        managed_fields::record_change(&json!({}), &mut object, manager, "", &self.clock.now(), &kind.api_version());
        Ok(self.put("ADDED", &key, object))
    }

    pub fn put_raw(&mut self, kind: Kind, object: Value) {
        let key = ObjectKey::of(kind, &object);
        let event = if self.objects.contains_key(&key) { "MODIFIED" } else { "ADDED" };
        self.put(event, &key, object);
    }

    /// Patches or replaces an object.
    pub fn change(&mut self, key: &ObjectKey, change: &Change<'_>) -> Result<Value, ApiResponse> {
        let kind = key.kind;
        let old = self.get(key)?.clone();
        let mut new = changed(key, &old, change)?;
        check_guards(key, &old, &new)?;
        check_finalizers(key, &old, &new)?;
        match change.part {
            Part::Main if kind.has_status() => new["status"] = old["status"].clone(),
            Part::Main => {}
            Part::Status => {
                new["spec"] = old["spec"].clone();
                if kind.is_custom() {
                    new["metadata"] = old["metadata"].clone();
                }
            }
        }
        drop_nulls(&mut new, &old);
        if kind == Kind::Service {
            if change.part == Part::Main {
                service::clear_after_type_change(&mut new);
            }
            service::check_status(&mut new)?;
        }
        objects::check_patched(kind, &new)?;
        if new == old {
            return Ok(old);
        }
        if kind.has_generation() && change.part == Part::Main && new["spec"] != old["spec"] {
            new["metadata"]["generation"] = (old["metadata"]["generation"].as_u64().unwrap_or(0) + 1).into();
        }
        let subresource = if change.part == Part::Status { "status" } else { "" };
        managed_fields::record_change(&old, &mut new, change.manager, subresource, &self.clock.now(), &kind.api_version());
        if is_terminating(&new) && kind != Kind::Namespace && has_no_finalizers(&new) {
            // The response contains the requested object, the event the last stored one.
            self.remove(key, old);
            return Ok(new);
        }
        Ok(self.put("MODIFIED", key, new))
    }

    /// Deletes an object, or marks it as deleted while it has finalizers. A Pod on a node is removed when its kubelet
    /// deletes it without grace period.
    pub fn delete(&mut self, key: &ObjectKey, has_grace: bool) -> Result<Value, ApiResponse> {
        let mut object = self.get(key)?.clone();
        let waits_for_kubelet = key.kind == Kind::Pod && object["spec"]["nodeName"].is_string() && has_grace;
        if has_no_finalizers(&object) && !waits_for_kubelet && key.kind != Kind::Namespace {
            return Ok(self.remove(key, object));
        }
        if is_terminating(&object) {
            return Ok(object);
        }
        object["metadata"]["deletionTimestamp"] = self.clock.now().into();
        if key.kind == Kind::Namespace {
            object["status"]["phase"] = "Terminating".into();
        } else {
            object["metadata"]["deletionGracePeriodSeconds"] = if waits_for_kubelet { 30 } else { 0 }.into();
        }
        Ok(self.put("MODIFIED", key, object))
    }

    /// Simulates the namespace controller: once the Pods of a deleted namespace are gone, it deletes everything
    /// else in it, and then the namespace.
    pub fn empty_namespaces(&mut self) {
        let ending = self.list(Kind::Namespace, "").into_iter().filter(|object| is_terminating(object));
        let ending: Vec<_> = ending.map(|object| ObjectKey::of(Kind::Namespace, object)).collect();
        for namespace in ending {
            let content = |store: &Self, is_wanted: &dyn Fn(Kind) -> bool| -> Vec<ObjectKey> {
                let all = store.objects.keys().filter(|key| key.namespace == namespace.name && is_wanted(key.kind));
                all.cloned().collect()
            };
            for pod in content(self, &|kind| kind == Kind::Pod) {
                self.delete(&pod, true).ok();
            }
            if content(self, &|kind| kind == Kind::Pod).is_empty() {
                for key in content(self, &|_| true) {
                    self.delete(&key, true).ok();
                }
            }
            if content(self, &|_| true).is_empty()
                && let Some(object) = self.objects.get(&namespace).cloned()
            {
                self.remove(&namespace, object);
            }
        }
    }

    fn put(&mut self, event: &'static str, key: &ObjectKey, object: Value) -> Value {
        let object = self.record(event, key, object);
        self.objects.insert(key.clone(), object.clone());
        object
    }

    fn remove(&mut self, key: &ObjectKey, object: Value) -> Value {
        let object = self.record("DELETED", key, object);
        self.objects.remove(key);
        object
    }

    fn record(&mut self, event: &'static str, key: &ObjectKey, mut object: Value) -> Value {
        self.revision += 1;
        let revision = self.revision;
        object["metadata"]["resourceVersion"] = revision.to_string().into();
        if let Some(before) = self.objects.get(key) {
            self.texts.get_mut().forget(before);
        }
        self.history.push(Record { revision, key: key.clone(), event, object: object.clone(), at: Instant::now() });
        object
    }
}

fn is_in(key: &ObjectKey, kind: Kind, namespace: &str) -> bool {
    key.kind == kind && (namespace.is_empty() || key.namespace == namespace)
}

fn is_terminating(object: &Value) -> bool {
    object["metadata"]["deletionTimestamp"].is_string()
}

fn has_no_finalizers(object: &Value) -> bool {
    object["metadata"]["finalizers"].as_array().is_none_or(Vec::is_empty)
}

/// The object after a request. Fields that only the server writes keep their values.
fn changed(key: &ObjectKey, old: &Value, change: &Change<'_>) -> Result<Value, ApiResponse> {
    let kind = key.kind;
    let mut new = match change.strategy {
        Some(strategy) => {
            let mut new = old.clone();
            merge(&mut new, change.body, strategy);
            new
        }
        None => change.body.clone(),
    };
    if change.strategy.is_none() {
        new["kind"] = old["kind"].clone();
        new["apiVersion"] = old["apiVersion"].clone();
        let version = &new["metadata"]["resourceVersion"];
        if version.as_str().is_none_or(str::is_empty) {
            if kind.needs_version() {
                let message = "Invalid value: 0: must be specified for an update";
                return Err(ApiResponse::invalid(
                    kind.name(),
                    &key.name,
                    "FieldValueInvalid",
                    "metadata.resourceVersion",
                    message,
                ));
            }
            new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
        }
        if new["metadata"]["uid"].is_null() {
            new["metadata"]["uid"] = old["metadata"]["uid"].clone();
        }
    }
    for field in [
        "name",
        "namespace",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "managedFields",
    ] {
        let kept = &old["metadata"][field];
        if kept.is_null() {
            new["metadata"].as_object_mut().map(|metadata| metadata.remove(field));
        } else {
            new["metadata"][field] = kept.clone();
        }
    }
    Ok(new)
}

/// A stale version is a conflict; another UID is an invalid object.
fn check_guards(key: &ObjectKey, old: &Value, new: &Value) -> Result<(), ApiResponse> {
    if new["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"] {
        return Err(ApiResponse::conflict(key.kind, &key.name));
    }
    if new["metadata"]["uid"] == old["metadata"]["uid"] {
        return Ok(());
    }
    let message = format!("Invalid value: \"{}\": field is immutable", new["metadata"]["uid"].as_str().unwrap_or_default());
    Err(ApiResponse::invalid_metadata(key.kind, &key.name, "FieldValueInvalid", "metadata.uid", &message))
}

/// An object that is being deleted gets no new finalizers.
fn check_finalizers(key: &ObjectKey, old: &Value, new: &Value) -> Result<(), ApiResponse> {
    let all = |object: &Value| object["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
    let before = all(old);
    let added: Vec<_> = all(new).iter().filter(|entry| !before.contains(entry)).map(Value::to_string).collect();
    if !is_terminating(old) || added.is_empty() {
        return Ok(());
    }
    let message = format!(
        "Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
        added.join(", ")
    );
    Err(ApiResponse::invalid_metadata(key.kind, &key.name, "FieldValueForbidden", "metadata.finalizers", &message))
}

/// Assignment by index leaves nulls in place of missing fields. Empty finalizers and conditions are removed.
fn drop_nulls(new: &mut Value, old: &Value) {
    for part in ["status", "spec"] {
        if old[part].is_null()
            && new[part].is_null()
            && let Some(object) = new.as_object_mut()
        {
            object.remove(part);
        }
    }
    if new["status"]["conditions"].as_array().is_some_and(Vec::is_empty)
        && let Some(status) = new["status"].as_object_mut()
    {
        status.remove("conditions");
    }
    if has_no_finalizers(new)
        && let Some(metadata) = new["metadata"].as_object_mut()
    {
        metadata.remove("finalizers");
    }
}
