//! Objects of lists and watches, decoded one by one, so that one that is malformed hides no other.
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

/// An object, or why it is none, with its metadata.
#[derive(Clone, Debug)]
pub(super) struct DecodedObject<K>(pub(super) Result<K, InvalidObject>);

impl<K> From<DeserializeGuard<K>> for DecodedObject<K> {
    fn from(guard: DeserializeGuard<K>) -> Self {
        Self(guard.0)
    }
}

impl<'de, K: DeserializeOwned + Resource> Deserialize<'de> for DecodedObject<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_newtype_struct(AS_TEXT, TextOrTree(PhantomData))
    }
}

struct TextOrTree<K>(PhantomData<K>);

impl<'de, K: DeserializeOwned + Resource> Visitor<'de> for TextOrTree<K> {
    type Value = DecodedObject<K>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        map.next_key::<IgnoredAny>()?;
        let Text(text) = map.next_value()?;
        let decoded = serde_json::from_str(&text).map(|object| DecodedObject(Ok(object)));
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

impl<K: Resource> Resource for DecodedObject<K> {
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
        self.0.as_ref().map_or_else(|invalid| &invalid.metadata, K::meta)
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.as_mut().map_or_else(|invalid| &mut invalid.metadata, K::meta_mut)
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;
    use kube::core::{ObjectList, WatchEvent};

    use super::*;

    const GOOD: &str = r#"{"metadata": {"name": "good", "namespace": "a"}, "spec": {"ports": [{"port": 80}]}}"#;
    const BAD: &str = r#"{"metadata": {"name": "bad", "namespace": "a"}, "spec": {"ports": "no list"}}"#;

    fn names(objects: &[DecodedObject<Service>]) -> Vec<(&str, bool)> {
        objects.iter().map(|object| (object.meta().name.as_deref().unwrap(), object.0.is_ok())).collect()
    }

    #[test]
    fn a_malformed_object_hides_no_other_of_its_list() {
        let list = format!(r#"{{"kind": "ServiceList", "apiVersion": "v1", "metadata": {{}}, "items": [{BAD}, {GOOD}]}}"#);
        let list: ObjectList<DecodedObject<Service>> = serde_json::from_str(&list).unwrap();
        assert_eq!(names(&list.items), [("bad", false), ("good", true)]);
        let ports = |service: &Service| service.spec.clone().unwrap().ports.unwrap()[0].port;
        assert_eq!(list.items[1].0.as_ref().map(ports).unwrap(), 80);
    }

    #[test]
    fn a_malformed_object_of_a_watch_has_the_error_of_the_guard_whatever_the_order_of_fields() {
        let guard: DeserializeGuard<Service> = serde_json::from_str(BAD).unwrap();
        let error = guard.0.unwrap_err().error;
        let ordered = |object: &str| {
            [format!(r#""type": "MODIFIED", "object": {object}"#), format!(r#""object": {object}, "type": "MODIFIED""#)]
        };
        for event in ordered(BAD).iter().chain(&ordered(GOOD)) {
            let event = serde_json::from_str::<WatchEvent<DecodedObject<Service>>>(&format!("{{{event}}}")).unwrap();
            let WatchEvent::Modified(object) = event else { panic!("{event:?}") };
            let (is_good, name) = (object.0.is_ok(), object.meta().name.clone().unwrap());
            assert_eq!((name.as_str(), is_good), if is_good { ("good", true) } else { ("bad", false) });
            assert!(object.0.err().is_none_or(|invalid| invalid.error == error));
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
        assert!(serde_json::from_str::<DecodedObject<Service>>("[1, 2]").is_err());
    }
}
