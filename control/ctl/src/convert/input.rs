//! The objects in texts of YAML: documents, and the items of the lists that `kubectl get -o yaml` prints.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use objects::documents::{DocumentText, from_yaml, split};

/// A text of YAML documents, and its name for messages.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// A file's name, or `-`.
    pub name: &'a str,
    /// Its content.
    pub text: &'a str,
}

/// The input is invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {message}")]
pub struct ConvertError {
    place: SourcePosition,
    message: String,
}

/// Position of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SourcePosition {
    input: String,
    /// Counted from 1.
    document: usize,
    /// Counted from 1, of the whole text.
    line: u64,
}

impl fmt::Display for SourcePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} line {} (document {})", self.input, self.line, self.document)
    }
}

impl SourcePosition {
    pub(super) fn error(&self, message: impl Into<String>) -> ConvertError {
        ConvertError { place: self.clone(), message: message.into() }
    }
}

/// Fields of every object.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    items: Option<Vec<serde_saphyr::Spanned<Value>>>,
}

/// An untyped object.
pub(super) struct Found {
    pub(super) place: SourcePosition,
    /// `metallb.io` of `metallb.io/v1beta1`; empty for Kubernetes' core.
    pub(super) group: String,
    pub(super) kind: String,
    pub(super) metadata: ObjectMeta,
    content: Content,
}

/// Parses an object that is a whole document from its text, so that errors have a line.
enum Content {
    Text(String),
    Item(Value),
}

impl Found {
    /// Kind and name for messages.
    pub(super) fn title(&self) -> String {
        let name = self.metadata.name.as_deref().unwrap_or_default();
        match &self.metadata.namespace {
            Some(namespace) => format!("{} {namespace}/{name}", self.kind),
            None => format!("{} {name}", self.kind),
        }
    }

    /// A note about the object: its position, kind and name, and a text that begins with a blank or a colon.
    pub(super) fn note(&self, text: impl fmt::Display) -> String {
        format!("{}: {}{text}", self.place, self.title())
    }

    pub(super) fn is(&self, group: &str, kind: &str) -> bool {
        self.group == group && self.kind == kind
    }

    /// Parses the field `spec` of the object into its type.
    pub(super) fn spec<T: DeserializeOwned>(&self) -> Result<T, ConvertError> {
        self.typed::<WithSpec<T>>().map(|object| object.spec)
    }

    /// Parses the object into its type.
    pub(super) fn typed<T: DeserializeOwned>(&self) -> Result<T, ConvertError> {
        match &self.content {
            Content::Text(text) => parse(&self.place, text),
            Content::Item(value) => {
                serde_json::from_value(value.clone()).map_err(|e| self.place.error(format!("{}: {e}", self.title())))
            }
        }
    }
}

/// An object as far as its converter reads it.
#[derive(Deserialize)]
struct WithSpec<T> {
    spec: T,
}

/// Every object of `input`.
pub(super) fn read(input: &Input<'_>) -> Result<Vec<Found>, ConvertError> {
    let mut found = Vec::new();
    for (index, part) in split(input.text).into_iter().enumerate() {
        let place = SourcePosition { input: input.name.to_owned(), document: index + 1, line: part.first_line };
        document(&place, part, &mut found)?;
    }
    Ok(found)
}

fn document(place: &SourcePosition, part: DocumentText, found: &mut Vec<Found>) -> Result<(), ConvertError> {
    let header: Header = parse(place, &part.text)?;
    let Some(items) = header.items else {
        found.push(object(place.clone(), header, Content::Text(part.text))?);
        return Ok(());
    };
    for item in items {
        let place = SourcePosition { line: item.defined.line(), ..place.clone() };
        let header = Header::deserialize(&item.value).map_err(|error| place.error(format!("in an item: {error}")))?;
        found.push(object(place, header, Content::Item(item.value))?);
    }
    Ok(())
}

fn object(place: SourcePosition, header: Header, content: Content) -> Result<Found, ConvertError> {
    if header.api_version.is_empty() || header.kind.is_empty() {
        return Err(place.error("expected an object of Kubernetes with `apiVersion` and `kind`, or a list of them"));
    }
    let metadata = header.metadata;
    if metadata.name.as_deref().is_none_or(str::is_empty) {
        return Err(place.error(format!("{} without metadata.name", header.kind)));
    }
    let group = header.api_version.rsplit_once('/').map_or("", |(group, _)| group).to_owned();
    Ok(Found { place, group, kind: header.kind, metadata, content })
}

fn parse<T: DeserializeOwned>(place: &SourcePosition, text: &str) -> Result<T, ConvertError> {
    from_yaml(text, place.line).map_err(|(line, message)| SourcePosition { line, ..place.clone() }.error(message))
}
