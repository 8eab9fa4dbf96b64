//! Objects in one YAML text.

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube_core::Resource;
use proto::ServiceName;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::crd::AddressPool;
use crate::service::unknown_fields;
use crate::spelling;

/// The kinds that are read.
const KINDS: [&str; 5] = ["Service", "Node", "EndpointSlice", "AddressPool", "List"];
/// Maximum length of a Kubernetes name, in characters.
const NAME_MAX: usize = 253;

/// An object in a manifest.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// A Service.
    Service(Box<Service>),
    /// An EndpointSlice.
    Slice(Box<EndpointSlice>),
    /// A Node. Its status comes from the author, because there is no kubelet.
    Node(Box<Node>),
    /// An `AddressPool`.
    Pool(Box<AddressPool>),
}

/// One document, or an item of one that is a list: an object or an error, and warnings for its author.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// Counted from 1.
    pub number: usize,
    /// Of an item its position, from 0.
    pub item: Option<usize>,
    /// Its name and content; `None` for ignored kinds.
    pub object: Option<(ServiceName, Object)>,
    /// Fields without effect.
    pub notes: Vec<String>,
    /// The paths of unknown fields, which `notes` name, too.
    pub unknown: Vec<String>,
}

impl Document {
    /// Its place in the file, in words.
    #[must_use]
    pub fn place(&self) -> String {
        let Self { number, item, .. } = self;
        item.map_or_else(|| format!("document {number}"), |item| format!("document {number}, items[{item}]"))
    }
}

/// Why a text cannot be parsed.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("line {line} (document {number}): {message}")]
pub struct DocumentError {
    /// Which document, counted from 1.
    pub number: usize,
    /// Which line of the file.
    pub line: u64,
    /// What is wrong.
    pub message: String,
}

/// Fields of every object.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
}

/// Objects in one, as `kubectl get -o yaml` writes them.
#[derive(serde::Deserialize)]
struct ObjectList {
    #[serde(default)]
    items: Vec<Value>,
}

/// An object as it is written: a document, or an item of one that is a list.
#[derive(Clone, Copy)]
enum Written<'a> {
    Document(usize, &'a DocumentText),
    Item { number: usize, part: &'a DocumentText, item: usize, value: &'a Value },
}

impl Written<'_> {
    fn parse<T: DeserializeOwned>(self) -> Result<T, DocumentError> {
        match self {
            Self::Document(number, part) => parse(number, part),
            Self::Item { value, .. } => T::deserialize(value).map_err(|error| self.error(error.to_string())),
        }
    }

    /// An error in it. Items have no lines of their own.
    fn error(self, message: String) -> DocumentError {
        match self {
            Self::Document(number, part) => DocumentError { number, line: part.first_line, message },
            Self::Item { number, part, item, .. } => {
                DocumentError { number, line: part.first_line, message: format!("items[{item}]: {message}") }
            }
        }
    }
}

/// Reads all documents of `text`.
///
/// # Errors
/// If one of them cannot be parsed; then the whole file is unused.
pub fn documents(text: &str) -> Result<Vec<Document>, DocumentError> {
    let mut all = Vec::new();
    for (number, part) in (1..).zip(&split(text)) {
        let written = Written::Document(number, part);
        let header: Header = written.parse()?;
        if (header.api_version.as_str(), header.kind.as_str()) != ("v1", "List") {
            all.push(document(written, &header)?);
            continue;
        }
        let list: ObjectList = written.parse()?;
        for (item, value) in list.items.iter().enumerate() {
            let written = Written::Item { number, part, item, value };
            all.push(document(written, &written.parse()?)?);
        }
    }
    Ok(all)
}

/// A document and its first line in the file.
pub struct DocumentText {
    /// Its text, after as many empty lines as precede it in the file.
    pub text: String,
    /// Counted from 1.
    pub first_line: u64,
}

/// Splits a text at document markers, which end a document everywhere, so that a search by lines suffices. Lines before
/// a document are left blank, so that positions in it are those of the file. A document may begin on the line of its
/// marker, as in `--- {kind: List}`.
pub fn split(text: &str) -> Vec<DocumentText> {
    let mut parts = vec![DocumentText { text: String::new(), first_line: 1 }];
    for (index, line) in (1u64..).zip(text.lines()) {
        let after = |marker| line.strip_prefix(marker).filter(|rest| rest.is_empty() || rest.starts_with([' ', '\t']));
        if let Some(rest) = after("---").or_else(|| after("...")) {
            let has_content = line.starts_with("---") && !is_blank(rest);
            let before = if has_content { index - 1 } else { index };
            let mut text = "\n".repeat(usize::try_from(before).unwrap_or_default());
            if has_content {
                text.push_str(line);
                text.push('\n');
            }
            parts.push(DocumentText { text, first_line: before + 1 });
        } else if let Some(part) = parts.last_mut() {
            part.text.push_str(line);
            part.text.push('\n');
        }
    }
    parts.retain(|part| !part.text.lines().all(|line| is_blank(line) || line.starts_with('%')));
    parts
}

/// Whether a line, or the rest of one, is empty or a comment.
fn is_blank(line: &str) -> bool {
    line.trim().is_empty() || line.trim_start().starts_with('#')
}

fn document(written: Written<'_>, header: &Header) -> Result<Document, DocumentError> {
    let (mut notes, mut unknown) = (Vec::new(), Vec::new());
    let object = match (header.api_version.as_str(), header.kind.as_str()) {
        ("v1", "Service") => {
            let (name, service) = named::<Service>(written, &mut unknown)?;
            Some((name, Object::Service(Box::new(Service { status: None, ..service }))))
        }
        ("discovery.k8s.io/v1", "EndpointSlice") => {
            let (name, slice) = named(written, &mut unknown)?;
            Some((name, Object::Slice(Box::new(slice))))
        }
        ("sluice.dev/v1beta1", "AddressPool") => {
            let (name, mut pool) = named::<AddressPool>(written, &mut unknown)?;
            pool.metadata.namespace = None;
            pool.status = None;
            Some((name, Object::Pool(Box::new(pool))))
        }
        ("v1", "Node") => {
            let (name, mut node) = named::<Node>(written, &mut unknown)?;
            node.metadata.namespace = None;
            Some((name, Object::Node(Box::new(node))))
        }
        ("", _) | (_, "") => {
            return Err(written.error("expected apiVersion and kind, as in `apiVersion: v1`, `kind: Service`".to_owned()));
        }
        (version, kind) => {
            let meant = spelling::nearest(kind, KINDS).filter(|known| *known != kind);
            let meant = meant.map(|known| format!(", did you mean `{known}`?")).unwrap_or_default();
            notes.push(format!(
                "{kind} of {version} has no effect{meant}; Service and Node (v1), EndpointSlice (discovery.k8s.io/v1), \
                 AddressPool (sluice.dev/v1beta1) and a List (v1) of them are read"
            ));
            None
        }
    };
    let message: fn(&str) -> String = match object {
        Some((_, Object::Service(_))) => unknown_fields::message,
        _ => |field| format!("field {field} is unknown and has no effect; check its spelling"),
    };
    notes.extend(unknown.iter().map(|field| message(field)));
    let (number, item) = match written {
        Written::Document(number, _) => (number, None),
        Written::Item { number, item, .. } => (number, Some(item)),
    };
    Ok(Document { number, item, object, notes, unknown })
}

/// Parses the text of a document. An error has its line, or `first_line`, and a message.
///
/// # Errors
/// If it is no YAML, or not of type `T`.
pub fn from_yaml<T: DeserializeOwned>(text: &str, first_line: u64) -> Result<T, (u64, String)> {
    serde_saphyr::from_str(text).map_err(|error| {
        let line = error.location().map_or(first_line, |location| location.line());
        let message = match error.without_snippet() {
            serde_saphyr::Error::DuplicateMappingKey { key: Some(key), .. } => {
                format!("found key {key:?} a second time in the same mapping, expected it once; remove one of them")
            }
            // The first line is the message; the others show the position, which the line number already gives.
            other => other.to_string().lines().next().unwrap_or_default().to_owned(),
        };
        (line, message)
    })
}

fn parse<T: DeserializeOwned>(number: usize, part: &DocumentText) -> Result<T, DocumentError> {
    from_yaml(&part.text, part.first_line).map_err(|(line, message)| DocumentError { number, line, message })
}

/// Parses an object and its name, with the path of every unknown field, so that a misspelt restriction is noticed.
fn named<K: Resource + DeserializeOwned + serde::Serialize>(
    written: Written<'_>,
    unknown: &mut Vec<String>,
) -> Result<(ServiceName, K), DocumentError> {
    let mut object: K = written.parse()?;
    let value: Value = written.parse()?;
    if let Ok(read) = serde_json::to_value(&object) {
        lost_fields(&value, &read, "", unknown);
    }
    let name = name(object.meta()).map_err(|message| written.error(message))?;
    *object.meta_mut() = own(object.meta());
    Ok((name, object))
}

fn lost_fields(written: &Value, read: &Value, path: &str, lost: &mut Vec<String>) {
    match (written, read) {
        (Value::Object(written), Value::Object(read)) => {
            for (key, value) in written.iter().filter(|(_, value)| !value.is_null()) {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                match read.get(key) {
                    Some(read) => lost_fields(value, read, &path, lost),
                    None => {
                        unknown_fields::add_restrictions(value, &path, lost);
                        lost.push(path);
                    }
                }
            }
        }
        (Value::Array(written), Value::Array(read)) => {
            for (index, (written, read)) in written.iter().zip(read).enumerate() {
                lost_fields(written, read, &format!("{path}[{index}]"), lost);
            }
        }
        _ => {}
    }
}

/// The object's name. It becomes a file name, so only names that Kubernetes allows are accepted.
fn name(metadata: &ObjectMeta) -> Result<ServiceName, String> {
    let name = metadata.name.as_deref().ok_or("metadata.name is missing")?;
    let namespace = metadata.namespace.as_deref().unwrap_or("default");
    for (field, text) in [("name", name), ("namespace", namespace)] {
        let is_edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
        let edges = is_edge(text.chars().next()) && is_edge(text.chars().next_back());
        if !edges || !text.chars().all(is_inner) || text.len() > NAME_MAX {
            return Err(format!(
                "metadata.{field} is {text:?}, expected lower-case letters, digits, `-` and `.`, at most {NAME_MAX}"
            ));
        }
    }
    Ok(ServiceName::new(namespace, name))
}

/// The metadata that the author of a manifest sets. Times, versions and status would come from an API server.
fn own(metadata: &ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        name: metadata.name.clone(),
        namespace: Some(metadata.namespace.clone().unwrap_or_else(|| "default".to_owned())),
        labels: metadata.labels.clone(),
        annotations: metadata.annotations.clone(),
        ..ObjectMeta::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVICE: &str =
        "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n  type: LoadBalancer\n  ports: [{port: 80}]\n";

    #[test]
    fn documents_are_objects_with_names_in_their_namespace() {
        let slice = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: web-1, namespace: shop}\naddressType: IPv4\nendpoints: []\n";
        let read = documents(&format!("# a comment\n---\n{SERVICE}---\n{slice}...\n---\n# nothing\n")).unwrap();
        let names: Vec<String> = read.iter().map(|d| d.object.as_ref().unwrap().0.to_string()).collect();
        assert_eq!(names, ["default/web", "shop/web-1"]);
        assert!(read.iter().all(|document| document.notes.is_empty()), "{read:?}");
    }

    #[test]
    fn the_items_of_a_list_are_objects_and_their_errors_name_the_item() {
        let list = "apiVersion: v1\nkind: List\nmetadata: {resourceVersion: ''}\nitems:\n\
            - apiVersion: v1\n  kind: Service\n  metadata: {name: web, uid: u}\n  spec: {type: LoadBalancer, ports: [{port: 80}]}\n\
            - apiVersion: discovery.k8s.io/v1\n  kind: EndpointSlice\n  metadata: {name: web-1}\n  addressType: IPv4\n  endpoints: []\n\
            - {apiVersion: apps/v1, kind: Deployment, metadata: {name: web}}\n";
        let read = documents(&format!("{SERVICE}---\n{list}")).unwrap();
        let names: Vec<_> = read.iter().map(|d| (d.place(), d.object.as_ref().map(|(name, _)| name.to_string()))).collect();
        let expected = [
            ("document 1", Some("default/web")),
            ("document 2, items[0]", Some("default/web")),
            ("document 2, items[1]", Some("default/web-1")),
            ("document 2, items[2]", None),
        ];
        assert_eq!(names, expected.map(|(place, name)| (place.to_owned(), name.map(str::to_owned))));
        assert!(read[3].notes[0].contains("Deployment") && read[1].notes.is_empty(), "{read:?}");
        let error = documents(&list.replace("port: 80", "port: eighty")).unwrap_err();
        assert!(error.number == 1 && error.message.starts_with("items[0]: "), "{error}");
        let misspelt = documents(&list.replace("addressType", "adressType")).unwrap();
        assert!(misspelt[1].notes[0].contains("field adressType is unknown"), "{misspelt:?}");
        assert!(documents("apiVersion: v1\nkind: List\n").unwrap().is_empty());
        assert!(documents("apiVersion: v1\nkind: List\nitems: [{kind: Service}]\n").unwrap_err().message.contains("apiVersion"));
    }

    #[test]
    fn a_document_that_begins_on_the_line_of_its_marker_is_read() {
        let pool = |name: &str| {
            format!(
                "{{apiVersion: sluice.dev/v1beta1, kind: AddressPool, metadata: {{name: {name}}}, spec: {{addresses: [192.0.2.1]}}}}"
            )
        };
        let text = format!("--- {}\n--- # a comment\n{SERVICE}---\t{}\n... # the end\n--- # nothing\n", pool("a"), pool("b"));
        let names = |text: &str| -> Vec<String> {
            let read = documents(text).unwrap();
            read.iter().map(|document| document.object.as_ref().unwrap().0.name.clone()).collect()
        };
        assert_eq!(names(&text), ["a", "web", "b"]);
        assert_eq!(names(&format!("--- # {}\n{SERVICE}", pool("none"))), ["web"]);
        let error = documents(&format!("{SERVICE}--- {{kind: [}}\n")).unwrap_err();
        let lines = u64::try_from(SERVICE.lines().count()).unwrap();
        assert_eq!((error.number, error.line), (2, lines + 1), "{error}");
        let dashes = documents("apiVersion: v1\nkind: Service\nmetadata: {name: ---a}\n");
        assert!(dashes.is_err_and(|error| error.message.contains("metadata.name")), "no marker within a line");
    }

    #[test]
    fn a_key_that_stands_twice_is_named() {
        let error = documents(&format!("{SERVICE}  type: NodePort\n")).unwrap_err();
        assert_eq!(error.line, 7);
        assert!(error.message.contains("found key \"type\" a second time"), "{error}");
    }

    #[test]
    fn an_error_names_document_and_line() {
        let error = documents(&format!("{SERVICE}---\n{SERVICE}  sessionAffinity: [\n")).unwrap_err();
        assert_eq!(error.number, 2);
        assert!(error.line >= 13, "{error}");
        let error = documents(&SERVICE.replace("port: 80", "port: eighty")).unwrap_err();
        assert_eq!((error.number, error.line), (1, 6), "{error}");
        assert!(!error.message.contains('\n'));
    }

    #[test]
    fn names_that_would_escape_the_status_directory_are_refused() {
        for name in ["../etc", "..", "a/b", "A", ""] {
            let error = documents(&SERVICE.replace("name: web", &format!("name: {name:?}"))).unwrap_err();
            assert!(error.message.contains("metadata.name"), "{error}");
        }
    }

    #[test]
    fn fields_that_only_an_api_server_sets_are_ignored_in_files() {
        let text = SERVICE
            .replace("name: web", "name: web, uid: u, resourceVersion: '4', creationTimestamp: 2020-01-01T00:00:00Z")
            + "status: {loadBalancer: {ingress: [{ip: 192.0.2.1}]}}\n";
        let Some((_, Object::Service(service))) = documents(&text).unwrap().remove(0).object else { panic!() };
        assert_eq!((service.status, service.metadata.uid, service.metadata.resource_version), (None, None, None));
        assert_eq!(service.metadata.creation_timestamp, None);
    }

    #[test]
    fn a_misspelt_field_is_noted() {
        let read = documents(&format!("{SERVICE}  sessionAffinty: ClientIP\n")).unwrap();
        assert!(read[0].notes[0].contains("spec.sessionAffinty"), "{:?}", read[0].notes);
        assert_eq!(read[0].unknown, ["spec.sessionAffinty"]);
        for (text, unknown) in [
            ("loadBalancerSourceRanges: [10.0.0.0/8]\n", &["loadBalancerSourceRanges"][..]),
            ("  x: {loadBalancerSourceRanges: [10.0.0.0/8]}\n", &["spec.x.loadBalancerSourceRanges", "spec.x"]),
        ] {
            assert_eq!(documents(&format!("{SERVICE}{text}")).unwrap()[0].unknown, unknown);
        }
    }

    #[test]
    fn other_kinds_have_no_effect_and_a_note() {
        let deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\n";
        let read = documents(deployment).unwrap();
        assert!(read[0].object.is_none() && read[0].notes[0].contains("Deployment"));
        let misspelt = documents(&SERVICE.replace("kind: Service", "kind: Servcie")).unwrap();
        assert!(misspelt[0].notes[0].contains("did you mean `Service`?"), "{misspelt:?}");
        let pool = "apiVersion: sluice.dev/v1beta1\nkind: AddressPool\nmetadata: {name: a}\nspec: {addresses: [192.0.2.1], avoidBuggyIPs: true}\n";
        let read = documents(pool).unwrap().remove(0);
        assert!(read.notes.is_empty(), "{:?}", read.notes);
        assert!(
            matches!(read.object, Some((_, Object::Pool(pool))) if pool.spec.avoid_buggy_ips && pool.metadata.namespace.is_none())
        );
        let node =
            "apiVersion: v1\nkind: Node\nmetadata: {name: a}\nstatus: {addresses: [{type: InternalIP, address: 10.0.1.1}]}\n";
        let read = documents(node).unwrap().remove(0);
        assert!(read.notes.is_empty(), "{:?}", read.notes);
        assert!(
            matches!(read.object, Some((_, Object::Node(node))) if node.status.is_some() && node.metadata.namespace.is_none())
        );
        assert!(documents("hello: world\n").unwrap_err().message.contains("apiVersion"));
    }
}
