//! Objects of lists and watches, decoded one by one, so that one that is malformed hides no other, and reduced at once to
//! what is kept of them: a page of complete objects would take more memory than what is kept of all.
//!
//! Does what [`DeserializeGuard`] does, from the JSON text of each object. That type makes a tree of values of every object
//! first, and a copy of the tree. What is malformed, or not there as text, is left to it.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use kube::Resource;
use kube::core::error_boundary::InvalidObject;
use kube::core::{DeserializeGuard, ObjectMeta};
use serde::de::{DeserializeOwned, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The name by which [`RawValue`](serde_json::value::RawValue) asks `serde_json` for the text of a value. If a version of
/// `serde_json` does not know the name, the guard decodes every object; so it does in a watch event whose field `type` comes
/// after `object`.
const AS_TEXT: &str = "$serde_json::private::RawValue";

/// What is kept of an object of kind `K`, or why it is none.
#[derive(Clone, Debug)]
pub(super) struct DecodedObject<K, R> {
    pub(super) read: Result<R, String>,
    /// Name, namespace and resource version.
    metadata: Box<ObjectMeta>,
    kind: PhantomData<fn() -> K>,
}

impl<K: Resource, R: From<K>> From<K> for DecodedObject<K, R> {
    fn from(object: K) -> Self {
        let metadata = identity(object.meta());
        Self { read: Ok(object.into()), metadata, kind: PhantomData }
    }
}

impl<K: Resource, R: From<K>> From<DeserializeGuard<K>> for DecodedObject<K, R> {
    fn from(guard: DeserializeGuard<K>) -> Self {
        match guard.0 {
            Ok(object) => object.into(),
            Err(InvalidObject { error, metadata }) => Self { read: Err(error), metadata: identity(&metadata), kind: PhantomData },
        }
    }
}

fn identity(metadata: &ObjectMeta) -> Box<ObjectMeta> {
    Box::new(ObjectMeta {
        name: metadata.name.clone(),
        namespace: metadata.namespace.clone(),
        resource_version: metadata.resource_version.clone(),
        ..ObjectMeta::default()
    })
}

impl<'de, K: DeserializeOwned + Resource, R: From<K>> Deserialize<'de> for DecodedObject<K, R> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_newtype_struct(AS_TEXT, TextOrTree(PhantomData))
    }
}

struct TextOrTree<K, R>(PhantomData<(K, R)>);

impl<'de, K: DeserializeOwned + Resource, R: From<K>> Visitor<'de> for TextOrTree<K, R> {
    type Value = DecodedObject<K, R>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        map.next_key::<IgnoredAny>()?;
        let Text(text) = map.next_value()?;
        let decoded = serde_json::from_str::<K>(&text).map(DecodedObject::from);
        let guarded = |_| serde_json::from_str::<DeserializeGuard<K>>(&text).map(Into::into);
        decoded.or_else(guarded).map_err(A::Error::custom)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        DeserializeGuard::deserialize(deserializer).map(Into::into)
    }
}

/// The text of a value; a part of the text of the whole, where that is in memory.
#[derive(Deserialize)]
#[serde(transparent)]
struct Text<'t>(#[serde(borrow)] Cow<'t, str>);

impl<K: Resource, R> Resource for DecodedObject<K, R> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::kind(dynamic)
    }

    fn group(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::group(dynamic)
    }

    fn version(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::version(dynamic)
    }

    fn plural(dynamic: &K::DynamicType) -> Cow<'_, str> {
        K::plural(dynamic)
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;
    use kube::core::{ObjectList, WatchEvent};

    use super::*;

    const GOOD: &str = r#"{"metadata": {"name": "good", "namespace": "a"}, "spec": {"ports": [{"port": 80}]}}"#;
    const BAD: &str = r#"{"metadata": {"name": "bad", "namespace": "a"}, "spec": {"ports": "no list"}}"#;

    fn names(objects: &[DecodedObject<Service, Service>]) -> Vec<(&str, bool)> {
        objects.iter().map(|object| (object.meta().name.as_deref().unwrap(), object.read.is_ok())).collect()
    }

    #[test]
    fn a_malformed_object_hides_no_other_of_its_list() {
        let list = format!(r#"{{"kind": "ServiceList", "apiVersion": "v1", "metadata": {{}}, "items": [{BAD}, {GOOD}]}}"#);
        let list: ObjectList<DecodedObject<Service, Service>> = serde_json::from_str(&list).unwrap();
        assert_eq!(names(&list.items), [("bad", false), ("good", true)]);
        let ports = |service: &Service| service.spec.clone().unwrap().ports.unwrap()[0].port;
        assert_eq!(list.items[1].read.as_ref().map(ports).unwrap(), 80);
    }

    #[test]
    fn a_malformed_object_of_a_watch_has_the_error_of_the_guard_whatever_the_order_of_fields() {
        let guard: DeserializeGuard<Service> = serde_json::from_str(BAD).unwrap();
        let error = guard.0.unwrap_err().error;
        let ordered = |object: &str| {
            [format!(r#""type": "MODIFIED", "object": {object}"#), format!(r#""object": {object}, "type": "MODIFIED""#)]
        };
        for event in ordered(BAD).iter().chain(&ordered(GOOD)) {
            let event = serde_json::from_str::<WatchEvent<DecodedObject<Service, Service>>>(&format!("{{{event}}}")).unwrap();
            let WatchEvent::Modified(object) = event else { panic!("{event:?}") };
            let (is_good, name) = (object.read.is_ok(), object.meta().name.clone().unwrap());
            assert_eq!((name.as_str(), is_good), if is_good { ("good", true) } else { ("bad", false) });
            assert!(object.read.err().is_none_or(|found| found == error));
        }
    }

    #[test]
    fn serde_json_gives_the_text_of_an_object() {
        struct IsText;
        impl<'de> Visitor<'de> for IsText {
            type Value = String;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(formatter, "text")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<String, A::Error> {
                map.next_key::<IgnoredAny>()?;
                map.next_value::<Text<'_>>().map(|Text(text)| text.into_owned())
            }
        }
        let mut deserializer = serde_json::Deserializer::from_str(GOOD);
        assert_eq!(deserializer.deserialize_newtype_struct(AS_TEXT, IsText).unwrap(), GOOD);
    }

    #[test]
    fn what_is_no_object_is_an_error() {
        assert!(serde_json::from_str::<DecodedObject<Service, Service>>("[1, 2]").is_err());
    }
}
