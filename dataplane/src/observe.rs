//! Seeing the end of each packet: `replay` prints it, workers that carry traffic look away at no cost.

use std::net::IpAddr;

use crate::{BackendId, DropReason, PortIndex};

/// What became of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Forwarded by this port.
    Forward(PortIndex),
    /// Given to the Linux twin of this port.
    Linux(PortIndex),
    /// Turned into an answer that leaves by this port.
    Reply(PortIndex),
    /// Dropped.
    Drop(DropReason),
}

/// The flow that a packet belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Belongs {
    /// The frontend's address.
    pub vip: IpAddr,
    /// The frontend's port.
    pub port: u16,
    /// The frontend's protocol number.
    pub protocol: u8,
    /// The backend.
    pub backend: BackendId,
}

/// Is told of each packet's final verdict, once.
pub trait Observe<B> {
    /// `buffer` met its `fate`. Its bytes may have been rewritten by now.
    fn observe(&mut self, buffer: &B, fate: Fate, belongs: impl FnOnce() -> Option<Belongs>);
}

/// Looks away.
impl<B> Observe<B> for () {
    #[inline]
    fn observe(&mut self, _: &B, _: Fate, _: impl FnOnce() -> Option<Belongs>) {}
}
