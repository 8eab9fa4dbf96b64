//! A parsed request, in the terms of RBAC and of the store.

use std::collections::BTreeMap;

use hyper::http::request::Parts;
use serde_json::Value;

use super::accounts::Attributes;
use super::kind::Kind;
use super::store::ObjectKey;

pub struct ApiRequest {
    pub method: String,
    /// The name is empty for lists, watches and creation.
    pub key: ObjectKey,
    pub is_status: bool,
    pub query: BTreeMap<String, String>,
    pub content_type: String,
    /// The writer, as in `managedFields`.
    pub manager: String,
    pub body: Vec<u8>,
}

impl ApiRequest {
    /// `None` if the server does not know the path.
    pub fn parse(head: &Parts, body: Vec<u8>) -> Option<Self> {
        let header = |name| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let (key, is_status) = route(head.uri.path())?;
        let query = parse_query(head.uri.query().unwrap_or_default());
        let program = header("user-agent").split('/').next().filter(|name| !name.is_empty()).unwrap_or("unknown");
        let manager = query.get("fieldManager").map_or(program, String::as_str).to_owned();
        let (method, content_type) = (head.method.to_string(), header("content-type").to_owned());
        Some(Self { method, key, is_status, query, content_type, manager, body })
    }

    pub fn is_watch(&self) -> bool {
        self.method == "GET" && matches!(self.query.get("watch").map(String::as_str), Some("1" | "true"))
    }

    /// The object that a list or watch selects, if it selects only one.
    pub fn selected_name(&self) -> Option<&str> {
        self.query.get("fieldSelector")?.strip_prefix("metadata.name=")
    }

    pub fn attributes(&self) -> Attributes {
        let has_name = !self.key.name.is_empty();
        let verb = match self.method.as_str() {
            "GET" if self.is_watch() => "watch",
            "GET" if has_name => "get",
            "GET" => "list",
            "POST" => "create",
            "PUT" => "update",
            "DELETE" if has_name => "delete",
            "DELETE" => "deletecollection",
            _ => "patch",
        };
        let ObjectKey { kind, namespace, name } = &self.key;
        let resource = format!("{}{}", kind.plural(), if self.is_status { "/status" } else { "" });
        let name = self.selected_name().unwrap_or(name).to_owned();
        // For RBAC, a Namespace is in itself.
        let namespace = if *kind == Kind::Namespace { &name } else { namespace };
        Attributes { verb, group: kind.group(), resource, namespace: namespace.clone(), name }
    }

    /// A field of the options in the body, for example of a deletion.
    pub fn option(&self, pointer: &str) -> Option<Value> {
        serde_json::from_slice::<Value>(&self.body).ok()?.pointer(pointer).cloned()
    }
}

/// The object of a path, and whether the path is that of its status.
fn route(path: &str) -> Option<(ObjectKey, bool)> {
    Kind::ALL.into_iter().find_map(|kind| {
        let parts: Vec<_> = path.strip_prefix(&kind.prefix())?.split('/').collect();
        let (namespace, parts) = match parts.as_slice() {
            ["namespaces", namespace, rest @ ..] if kind.is_namespaced() => (*namespace, rest),
            rest => ("", rest),
        };
        let (name, is_status) = match parts {
            [plural] if *plural == kind.plural() => ("", false),
            [plural, name] if *plural == kind.plural() => (*name, false),
            [plural, name, "status"] if *plural == kind.plural() && kind.has_status() => (*name, true),
            _ => return None,
        };
        Some((ObjectKey::new(kind, namespace, name), is_status))
    })
}

fn parse_query(query: &str) -> BTreeMap<String, String> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.map(|(key, value)| (decoded(key), decoded(value))).collect()
}

/// Decodes percent-encoding.
fn decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => bytes.push(byte),
            None => bytes.extend_from_slice(part.get(..2).unwrap_or(part).as_bytes()),
        }
        bytes.extend_from_slice(part.get(2..).unwrap_or_default().as_bytes());
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
