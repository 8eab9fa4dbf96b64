//! How a packet reached the engine: link, tags, time and origin. Data only.

use super::link::Link;
use crate::wire::Tags;

/// Origin of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A receive queue of a port: the packet may belong to another worker.
    Port,
    /// Another worker, which does not know the owner: this worker determines it, of a fragment for example.
    OwnerUnknown,
    /// Another worker: the packet begins a new flow in place of one in two halves, of which this worker has one.
    Begun,
    /// Another worker, or the packets that waited here: this worker owns the packet.
    Owned,
}
/// How a packet arrived: its link, VLAN tags, time and origin. The tags have been removed from the frame; a packet that
/// is sent back, or passed to the kernel, gets them again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) link: Link,
    pub(crate) tags: Tags,
    pub(crate) now_ns: u64,
    pub(crate) origin: Origin,
}
