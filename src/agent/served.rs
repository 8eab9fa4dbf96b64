//! What the workers were last given to forward by, as far as somebody asks: a copy, so that nobody who asks keeps a
//! snapshot alive.

use std::net::SocketAddr;

use proto::{Protocol, Refusal, ServiceName};

/// A backend that a snapshot knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedBackend {
    /// The service it serves.
    pub service: ServiceName,
    /// Protocol of its frontend.
    pub protocol: Protocol,
    /// Where its packets go.
    pub address: SocketAddr,
    /// Its slot, by which workers count.
    pub slot: u32,
    /// Whether it takes new flows, if healthy; not, when it was removed and its flows may still go on.
    pub active: bool,
}

/// The part of a snapshot that is told to an operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Whether it was made of a complete state, live or persisted.
    pub ready: bool,
    /// The backends.
    pub backends: Vec<ServedBackend>,
    /// Services that this gateway cannot serve, beyond those that the controller refused.
    pub refused: Vec<(ServiceName, Refusal)>,
}
