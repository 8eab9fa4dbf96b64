//! Notes for owners of objects: a cause as one word, and a message.
//!
//! Invariant: each cause has its own word, which is the `reason` of the Event, so that Events can be filtered by it. No
//! message is longer than [`TEXT_CHARS_MAX`], and foreign text takes only a small part of it.
//! Deliberately not here: when and how often a note is reported.

use proto::{LimitKind, Reason, ServiceName};

use crate::text::cut_chars;

/// Maximum length of a message, in characters: an Event accepts 1,024 bytes.
pub const TEXT_CHARS_MAX: usize = 1_000;
/// Maximum length of foreign text in a message, in characters.
const QUOTED_CHARS_MAX: usize = 80;

/// Quotes and truncates foreign text, so that the rest of the message remains readable.
#[must_use]
pub fn quoted(text: &str) -> String {
    format!("{:?}", cut_chars(text, QUOTED_CHARS_MAX))
}

/// Limits the number of remarks; the last one has the number of omitted ones.
#[must_use]
pub fn bounded(mut remarks: Vec<Remark>, max: usize) -> Vec<Remark> {
    if remarks.len() > max {
        let left_out = remarks.split_off(max.saturating_sub(1));
        let cause = left_out[0].cause;
        remarks.push(Remark::new(cause, format!("{} more remarks of such kinds are left out", left_out.len())));
    }
    remarks
}

/// Cause of a note.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// The Service is not served, or only in part.
    Reason(Reason),
    /// An annotation has no effect, or an invalid value: the previous value stays in force, else the default.
    AnnotationIgnored,
    /// Two annotations with the same meaning, or an annotation and a field, differ.
    AnnotationsDiffer,
    /// A field has no effect or an invalid value; the default is used.
    FieldIgnored,
    /// The source ranges admit no client of one family.
    FamilyDenied,
    /// A Service of a kind that has no frontend: headless, or `ExternalName`.
    NeverServed,
    /// An EndpointSlice is not used at all.
    SliceIgnored,
    /// A port of an EndpointSlice is not used.
    SlicePortIgnored,
    /// An endpoint of an EndpointSlice is not used.
    EndpointIgnored,
    /// A backend is excluded: its address is forbidden, or there are too many backends.
    BackendRefused,
    /// A requested address is unavailable; the Service keeps its address.
    AddressKept,
    /// An installation does not use a pool, because it names no class.
    PoolOfDefaultClass,
    /// The Service lost an address to other Services that do not share it.
    AddressLost,
    /// An object cannot be decoded; its last valid version stays in use.
    Undecodable,
    /// No gateway has a healthy backend.
    NoHealthyBackend,
    /// More backends of the Service fail their probes on a gateway.
    BackendsUnhealthy,
    /// Fewer do.
    BackendsReturned,
    /// No endpoint accepts new connections.
    NoEndpoints,
    /// No EndpointSlice has a port with the name and protocol of the Service.
    NoMatchingPort,
    /// The Service has its addresses.
    AddressAssigned,
    /// Gateways forward for the Service.
    Programmed,
    /// Gateways no longer forward for it, and its object contains nothing of ours.
    Released,
    /// The API server refuses the status of the Service.
    StatusRefused,
    /// Backends do not see the address of the client that the Service asks for.
    ClientAddressLost,
    /// A gateway owns more groups of VIPs.
    TookOver,
    /// A gateway owns fewer groups of VIPs.
    OwnershipLost,
    /// A gateway leaves its VIPs to others.
    Unfit,
    /// Another station announces a VIP.
    DuplicateVip,
    /// A partner has all flows of a gateway.
    PartnerInSync,
    /// A partner lacks flows of a gateway.
    PartnerOutOfSync,
    /// A routing session is established.
    SessionUp,
    /// A routing session is down.
    SessionDown,
    /// A gateway does not serve all new flows of a Service.
    Limited(LimitKind),
}

impl Cause {
    /// The cause as a word.
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
            Self::PoolOfDefaultClass => "PoolOfDefaultClass",
            Self::AddressLost => "AddressLost",
            Self::Undecodable => "Undecodable",
            Self::NoHealthyBackend => "NoHealthyBackend",
            Self::BackendsUnhealthy => "BackendsUnhealthy",
            Self::BackendsReturned => "BackendsReturned",
            Self::NoEndpoints => "NoEndpoints",
            Self::NoMatchingPort => "NoMatchingPort",
            Self::AddressAssigned => "AddressAssigned",
            Self::Programmed => "Programmed",
            Self::Released => "Released",
            Self::StatusRefused => "StatusRefused",
            Self::ClientAddressLost => "ClientAddressLost",
            Self::TookOver => "TookOver",
            Self::OwnershipLost => "OwnershipLost",
            Self::Unfit => "Unfit",
            Self::DuplicateVip => "DuplicateVIP",
            Self::PartnerInSync => "PartnerInSync",
            Self::PartnerOutOfSync => "PartnerOutOfSync",
            Self::SessionUp => "SessionUp",
            Self::SessionDown => "SessionDown",
            Self::Limited(kind) => kind.as_str(),
        }
    }

    /// Causes of normal notes.
    pub const ORDINARY: [Self; 9] = [
        Self::BackendsReturned,
        Self::PoolOfDefaultClass,
        Self::AddressAssigned,
        Self::Programmed,
        Self::Released,
        Self::TookOver,
        Self::OwnershipLost,
        Self::PartnerInSync,
        Self::SessionUp,
    ];

    /// Whether the note is normal rather than a warning.
    #[must_use]
    pub fn is_ordinary(self) -> bool {
        Self::ORDINARY.contains(&self)
    }

    /// The `action` of the Event: what sluice did, as a word.
    #[must_use]
    pub const fn action(self) -> &'static str {
        match self {
            Self::Reason(_) | Self::NeverServed => "Serve",
            Self::SlicePortIgnored | Self::EndpointIgnored | Self::BackendRefused | Self::NoEndpoints | Self::NoMatchingPort => {
                "SelectBackends"
            }
            Self::AddressKept | Self::AddressAssigned => "AssignAddress",
            Self::NoHealthyBackend | Self::BackendsUnhealthy | Self::BackendsReturned => "ProbeBackends",
            Self::Programmed | Self::ClientAddressLost => "Program",
            Self::StatusRefused => "WriteStatus",
            Self::Released => "Release",
            Self::TookOver | Self::OwnershipLost | Self::Unfit => "Elect",
            Self::DuplicateVip | Self::SessionUp | Self::SessionDown => "Announce",
            Self::PartnerInSync | Self::PartnerOutOfSync => "Replicate",
            Self::Limited(_) => "Limit",
            _ => "Read",
        }
    }
}

/// A cause and a message about an object that the context names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Remark {
    /// The cause as a word.
    pub cause: Cause,
    /// The message: what, where, and what to do.
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

/// The object of a note.
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
    /// A gateway, as its `EdgeGateway`: its name.
    Gateway(String),
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Service(name) => write!(f, "Service {name}"),
            Self::Slice(name) => write!(f, "EndpointSlice {name}"),
            Self::Node(name) => write!(f, "Node {name}"),
            Self::Namespace(name) => write!(f, "Namespace {name}"),
            Self::Pool(name) => write!(f, "AddressPool {name}"),
            Self::Gateway(name) => write!(f, "EdgeGateway {name}"),
        }
    }
}

/// A remark about one object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Note {
    /// The object.
    pub subject: Subject,
    /// The remark.
    pub remark: Remark,
}
