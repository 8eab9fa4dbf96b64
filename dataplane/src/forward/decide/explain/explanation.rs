//! The explanation of a packet, and the packet to explain. Data only.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use proto::{Protocol, ProxyProtocol, Scheduler, ServiceName};

use crate::flow::{BackendId, FlowMode, FlowView};
use crate::port::Link;
use crate::stats::DropReason;
use crate::wire::Mac;

/// A packet to explain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExplainedPacket {
    /// Its protocol.
    pub protocol: Protocol,
    /// Its source.
    pub source: SocketAddr,
    /// Its destination, of the same family.
    pub destination: SocketAddr,
    /// Its place in its connection. `None`: later if there is a flow, otherwise first.
    pub kind: Option<PacketKind>,
    /// The link on which it arrives. `None`: the one towards its source.
    pub link: Option<Link>,
}

/// The place of a packet in its connection. It makes no difference to UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketKind {
    /// It opens the connection: a TCP SYN, an SCTP INIT.
    First,
    /// A TCP ACK, an SCTP packet with data.
    Later,
}

/// What happens to the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is forwarded.
    Forward,
    /// It waits until Linux has resolved this neighbour.
    Wait(Link, IpAddr),
    /// It is passed to Linux by the twin of this link's port.
    Linux(Link),
    /// It is answered with a TCP RST or SCTP ABORT.
    RefusedByReset,
    /// It is answered with ICMP port unreachable.
    RefusedByIcmp,
    /// It is answered with another ICMP message: it is too long, or its hop limit is too low.
    OtherIcmp,
    /// It is dropped, and its source gets a TCP RST or SCTP ABORT.
    Reset(DropReason),
    /// It is dropped.
    Drop(DropReason),
}

/// What the packet does to its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowEffect {
    /// There is no flow, and none begins.
    None,
    /// It belongs to the flow.
    Continues,
    /// It begins a flow.
    Begins,
    /// It ends the flow.
    Ends,
    /// It ends the flow and begins another one.
    Replaces,
}

/// The outer addresses of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelEnds {
    /// Outer source.
    pub source: IpAddr,
    /// Outer destination.
    pub destination: IpAddr,
    /// Outer UDP source and destination port, in mode `gue`.
    pub ports: Option<(u16, u16)>,
}

/// How the packet leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaves {
    /// The link.
    pub link: Link,
    /// Ethernet address of the next hop.
    pub mac: Mac,
    /// Address of the next hop.
    pub next_hop: Option<IpAddr>,
    /// Source after the rewrite.
    pub source: SocketAddr,
    /// Destination after the rewrite.
    pub destination: SocketAddr,
    /// The tunnel, if the packet is encapsulated.
    pub tunnel: Option<TunnelEnds>,
    /// The backend of the flow.
    pub backend: BackendId,
    /// Whether the SNAT port of a new flow has not rested, because ports are scarce.
    pub is_port_early: bool,
}

/// The frontend of the packet, and what it says about the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExplainedFrontend {
    /// The service.
    pub service: Arc<ServiceName>,
    /// Its address and port.
    pub address: SocketAddr,
    /// Its mode.
    pub mode: FlowMode,
    /// Its scheduler.
    pub scheduler: Scheduler,
    /// Why packets from this source are never forwarded.
    pub refused_source: Option<DropReason>,
    /// Whether only some clients may connect.
    pub has_source_ranges: bool,
    /// Whether this client may connect.
    pub is_allowed: bool,
    /// Whether clients keep their backends.
    pub has_affinity: bool,
    /// The backend that the client keeps.
    pub remembered: Option<BackendId>,
    /// Entry of the Maglev table, number of entries, backend of the entry.
    pub entry: Option<(u32, u32, BackendId)>,
    /// The backend of the packet's flow, or that of a flow which would begin now.
    pub backend: Option<BackendId>,
    /// The PROXY header that its backends get.
    pub proxy_protocol: Option<ProxyProtocol>,
}

/// The explanation of one packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// Its place in its connection.
    pub kind: PacketKind,
    /// The link on which it arrives.
    pub link: Link,
    /// The worker that owns it.
    pub worker: usize,
    /// Its frontend.
    pub frontend: Option<ExplainedFrontend>,
    /// Its flow as it is now.
    pub flow: Option<FlowView>,
    /// What happens to it.
    pub outcome: Outcome,
    /// How it leaves, if it is forwarded.
    pub leaves: Option<Leaves>,
    /// What it does to its flow.
    pub effect: FlowEffect,
}

/// Why there is no explanation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExplainError<E> {
    /// Source and destination are of different families.
    #[error("the addresses are of different families; a packet has two IPv4 addresses, or two IPv6 addresses")]
    Families,
    /// A worker could not be asked.
    #[error("{0}")]
    Asking(E),
    /// There is no memory for the tables of a trial.
    #[error("no memory for the tables of a trial")]
    NoMemory,
}
