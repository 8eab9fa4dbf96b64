//! The final outcome of a packet, and the flow that it belongs to.

use std::net::IpAddr;

use crate::flow::BackendId;
use crate::port::PortIndex;
use crate::stats::DropReason;

/// The final outcome of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketOutcome {
    /// Forwarded by this port.
    Forward(PortIndex),
    /// Passed to the Linux twin of this port.
    Linux(PortIndex),
    /// Turned into an answer that leaves by this port.
    Reply(PortIndex),
    /// Dropped.
    Drop(DropReason),
}

/// The flow that a packet belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketFlow {
    /// The frontend's address.
    pub vip: IpAddr,
    /// The frontend's port.
    pub port: u16,
    /// The frontend's protocol number.
    pub protocol: u8,
    /// The backend.
    pub backend: BackendId,
}
