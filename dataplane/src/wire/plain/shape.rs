//! The form of a plain packet, as its head says it.
//!
//! Not here: how it is found out (`recognise`).

use std::mem::offset_of;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::wire::ip::protocol;

/// The form of a plain packet. 6 bytes, which stand behind the hash in a row ([`Recognised`](super::Recognised)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Shape {
    /// Bytes of the packet from its IP header on.
    pub(crate) packet_len: u16,
    /// Offset of its IP header in the frame.
    pub(crate) network_offset: u8,
    /// The lower five TCP flags or [`Shape::UDP`]; [`Shape::V4`] or [`Shape::V6`]. 0 for a packet that is not recognised.
    pub(crate) kind: u8,
    /// [`Shape::PADDED`] and [`Shape::FRAGMENTABLE`].
    pub(super) more: u8,
    pub(super) _rest: u8,
}

// Eight shapes are made and read as words.
const _: () = {
    assert!(size_of::<Shape>() == 6 && offset_of!(Shape, network_offset) == 2 && offset_of!(Shape, kind) == 3);
    assert!(offset_of!(Shape, more) == 4);
};

impl Shape {
    /// A packet of UDP; no TCP flag of the lower five.
    pub(crate) const UDP: u8 = 0x20;
    pub(crate) const V4: u8 = 0x40;
    pub(crate) const V6: u8 = 0x80;
    pub(crate) const FAMILY: u8 = Self::V4 | Self::V6;
    /// Bytes follow the packet, to be removed: with them it might exceed the MTU.
    pub(crate) const PADDED: u8 = 1;
    /// Routers may fragment the packet.
    pub(crate) const FRAGMENTABLE: u8 = 2;

    /// A packet that is not recognised.
    pub(crate) const UNKNOWN: Self = Self { packet_len: 0, network_offset: 0, kind: 0, more: 0, _rest: 0 };

    /// See [`Shape::PADDED`].
    #[inline(always)]
    pub(crate) fn is_padded(self) -> bool {
        self.more & Self::PADDED != 0
    }

    /// See [`Shape::FRAGMENTABLE`].
    #[inline(always)]
    pub(crate) fn may_fragment(self) -> bool {
        self.more & Self::FRAGMENTABLE != 0
    }

    /// [`Shape::V4`], [`Shape::V6`], or 0 for a packet that is not recognised.
    #[inline(always)]
    pub(crate) fn family(self) -> u8 {
        self.kind & Self::FAMILY
    }

    /// The lower five TCP flags or [`Shape::UDP`].
    #[inline(always)]
    pub(crate) fn signal(self) -> u8 {
        self.kind & !Self::FAMILY
    }

    #[inline(always)]
    pub(crate) fn is_udp(self) -> bool {
        self.kind & Self::UDP != 0
    }

    /// The transport protocol number.
    #[inline(always)]
    pub(crate) fn protocol(self) -> u8 {
        if self.is_udp() { protocol::UDP } else { protocol::TCP }
    }
}
