//! What owners of objects should know: a word for the cause, and a sentence for a person.
//!
//! Invariant: one cause, one word; the word is the `reason` of the Event, so that a filter on it finds all of its kind. No
//! sentence is longer than [`TEXT_CHARS_MAX`], and what somebody else wrote takes a small part of it.
//! Deliberately not here: when a note is told, and how often.

use proto::{Reason, ServiceName};

/// Characters of a sentence: an Event takes 1,024 bytes.
pub const TEXT_CHARS_MAX: usize = 1_000;
/// Characters of a foreign text that a sentence shows.
const QUOTED_CHARS_MAX: usize = 80;

/// A text that somebody else wrote, in quotes, cut: what was expected and what to do must still be read after it.
#[must_use]
pub fn quoted(text: &str) -> String {
    let mut shown: String = text.chars().take(QUOTED_CHARS_MAX).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    format!("{shown:?}")
}

/// At most so many remarks; the last one tells how many more there would be.
#[must_use]
pub fn bounded(mut remarks: Vec<Remark>, max: usize) -> Vec<Remark> {
    if remarks.len() > max {
        let left_out = remarks.split_off(max.saturating_sub(1));
        let cause = left_out[0].cause;
        remarks.push(Remark::new(cause, format!("{} more remarks of such kinds are left out", left_out.len())));
    }
    remarks
}

/// Why something is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// The Service is not served, or not as it should be.
    Reason(Reason),
    /// An annotation has no effect, or a value that is none: the default is used.
    AnnotationIgnored,
    /// Two annotations, or one and a field, that mean the same differ.
    AnnotationsDiffer,
    /// A field has no effect, or a value that is none: the default is used.
    FieldIgnored,
    /// The source ranges leave a family without any client.
    FamilyDenied,
    /// A Service of a kind that has no frontend: headless, or `ExternalName`.
    NeverServed,
    /// An EndpointSlice is not used at all.
    SliceIgnored,
    /// A port of an EndpointSlice is not used.
    SlicePortIgnored,
    /// An endpoint of an EndpointSlice is not used.
    EndpointIgnored,
    /// A backend is left out: it lies where tenants must not reach through us, or there are too many.
    BackendRefused,
    /// An address is asked for that cannot be had; the Service keeps what it holds.
    AddressKept,
    /// An address is left to others, with whom it cannot be shared.
    AddressLost,
    /// An object cannot be read; its last good version stays in use.
    Undecodable,
    /// No gateway finds a healthy backend.
    NoHealthyBackend,
    /// No endpoint takes new connections.
    NoEndpoints,
    /// No EndpointSlice has a port of the name and protocol that the Service asks for.
    NoMatchingPort,
    /// The Service has its addresses.
    AddressAssigned,
    /// Gateways forward for the Service.
    Programmed,
    /// Gateways do not forward for it any more, and its object is free of us.
    Released,
}

impl Cause {
    /// The word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Reason(reason) => reason.as_str(),
            Self::AnnotationIgnored => "AnnotationIgnored",
            Self::AnnotationsDiffer => "AnnotationsDiffer",
            Self::FieldIgnored => "FieldIgnored",
            Self::FamilyDenied => "FamilyDenied",
            Self::NeverServed => "NeverServed",
            Self::SliceIgnored => "SliceIgnored",
            Self::SlicePortIgnored => "SlicePortIgnored",
            Self::EndpointIgnored => "EndpointIgnored",
            Self::BackendRefused => "BackendRefused",
            Self::AddressKept => "AddressKept",
            Self::AddressLost => "AddressLost",
            Self::Undecodable => "Undecodable",
            Self::NoHealthyBackend => "NoHealthyBackend",
            Self::NoEndpoints => "NoEndpoints",
            Self::NoMatchingPort => "NoMatchingPort",
            Self::AddressAssigned => "AddressAssigned",
            Self::Programmed => "Programmed",
            Self::Released => "Released",
        }
    }

    /// Those that say that all is as it should be.
    pub const ORDINARY: [Self; 3] = [Self::AddressAssigned, Self::Programmed, Self::Released];

    /// Whether all is as it should be; else somebody should look.
    #[must_use]
    pub const fn is_ordinary(self) -> bool {
        matches!(self, Self::AddressAssigned | Self::Programmed | Self::Released)
    }

    /// What was done when it came up, in a word: the `action` of an Event.
    #[must_use]
    pub const fn action(self) -> &'static str {
        match self {
            Self::Reason(_) | Self::NeverServed => "Serve",
            Self::SlicePortIgnored | Self::EndpointIgnored | Self::BackendRefused | Self::NoEndpoints | Self::NoMatchingPort => {
                "SelectBackends"
            }
            Self::AddressKept | Self::AddressAssigned => "AssignAddress",
            Self::NoHealthyBackend => "ProbeBackends",
            Self::Programmed => "Program",
            Self::Released => "Release",
            _ => "Read",
        }
    }
}

/// A cause and a sentence, about an object that the context names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remark {
    /// The word.
    pub cause: Cause,
    /// What, where, and what to do.
    pub text: String,
}

impl Remark {
    /// A remark.
    #[must_use]
    pub fn new(cause: Cause, text: impl Into<String>) -> Self {
        let mut text = text.into();
        if let Some((end, _)) = text.char_indices().nth(TEXT_CHARS_MAX) {
            text.truncate(end);
        }
        Self { cause, text }
    }
}

/// What a note is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Subject {
    /// A Service.
    Service(ServiceName),
    /// An EndpointSlice: its namespace and name.
    Slice(ServiceName),
    /// A Node: its name.
    Node(String),
    /// A Namespace: its name.
    Namespace(String),
    /// An `AddressPool`: its name.
    Pool(String),
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Service(name) => write!(f, "Service {name}"),
            Self::Slice(name) => write!(f, "EndpointSlice {name}"),
            Self::Node(name) => write!(f, "Node {name}"),
            Self::Namespace(name) => write!(f, "Namespace {name}"),
            Self::Pool(name) => write!(f, "AddressPool {name}"),
        }
    }
}

/// A remark about one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The object.
    pub subject: Subject,
    /// What is said.
    pub remark: Remark,
}
