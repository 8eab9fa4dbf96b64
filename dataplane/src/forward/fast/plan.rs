//! The plan of a packet in the fast path: what is known of it, and what is to be done with it. Each stage fills a part of it;
//! `execute` and `eight` write packets by it, and the last stage sends them by it.
//!
//! **Invariant:** a packet whose plan has a port leaves by it; nothing that is planned can be refused later, but for want of
//! room in its buffer.
//!
//! Not here: how a plan is made (`hits` for packets of known flows, `open` for SYNs that open connections), and packets that
//! the fast path leaves: the slow path has a `Verdict` of `decide` in place of a plan.

use zerocopy::{FromBytes, Immutable, IntoBytes, transmute};

use crate::flow::{Candidate, UDP_SIGNAL};
use crate::port::{Link, PortIndex};
use crate::snapshot::Exit;
use crate::wire::processor::{Avx2, Lanes};
use crate::wire::{Shape, tcp_flags};

/// What is done with a packet that leaves: bits of [`PlanHead::operations`]. Each of them loses one hop.
pub(super) mod operation {
    /// The hop limit is lowered and the link header written.
    pub(in crate::forward) const HOP: u8 = 1;
    /// Addresses and ports become those of the flow's other side.
    pub(in crate::forward) const TRANSLATE: u8 = 2;
    /// Outer headers are put before the packet.
    pub(in crate::forward) const ENCAPSULATE: u8 = 4;
    /// One of the outer headers is of UDP.
    pub(in crate::forward) const IN_UDP: u8 = 8;
}

/// The plan of a packet. 24 bytes:
///
/// | bytes | what | filled by |
/// |---|---|---|
/// | 0 to 7 | hash of addresses and ports | recognition |
/// | 8 to 13 | length, offset, kind, padding | recognition |
/// | 14, 15 | port, operations | `hits`, `eight` or `open` |
/// | 16 to 19 | flow and direction | the lookup |
/// | 20 to 23 | link of arrival | recognition |
///
/// The exit stands beside the plan until the packet is written. The counter and the difference of checksums are in the flow,
/// whose line is in the cache by then.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Plan {
    pub(super) head: PlanHead,
    pub(super) flow: Candidate,
    pub(super) link: Link,
}

/// The first 16 bytes of a plan, which one store sets: those of a row that `wire` recognises.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct PlanHead {
    pub(super) hash: u64,
    pub(super) shape: Shape,
    /// The port by which it leaves; [`PlanHead::STAYS`] at first.
    pub(super) port: u8,
    /// See [`operation`]; 0 at first.
    pub(super) operations: u8,
}

const _: () = assert!(size_of::<Plan>() == 24 && size_of::<PlanHead>() == 16);
const _: () = assert!(Shape::UDP == UDP_SIGNAL && UDP_SIGNAL < Shape::V4);

impl PlanHead {
    /// In place of a port, of which there are fewer.
    const STAYS: u8 = u8::MAX;
    /// Port and operations of a packet of which nothing is decided.
    pub(super) const UNDECIDED: [u8; 2] = [Self::STAYS, 0];

    /// Of a packet that is recognised.
    #[inline(always)]
    pub(super) fn recognised(hash: u64, shape: Shape) -> Self {
        Self { hash, shape, port: Self::STAYS, operations: 0 }
    }
}

impl Plan {
    /// A packet of which nothing is known.
    pub(super) fn unknown() -> Self {
        let head = PlanHead { hash: 0, shape: Shape::UNKNOWN, port: PlanHead::STAYS, operations: 0 };
        Self { head, flow: Candidate::NONE, link: PortIndex(0).into() }
    }

    /// The head as bytes.
    #[inline(always)]
    pub(super) fn row(&self) -> [u8; 16] {
        transmute!(self.head)
    }

    /// Sets the head from its bytes, and the link.
    #[inline(always)]
    pub(super) fn set(&mut self, row: [u8; 16], link: Link) {
        (self.head, self.link) = (transmute!(row), link);
    }

    /// The packet is not recognised, or left as if it were not.
    #[inline(always)]
    pub(super) fn forget(&mut self) {
        self.head = PlanHead { shape: Shape::UNKNOWN, port: PlanHead::STAYS, operations: 0, ..self.head };
    }

    /// The packet stays after all.
    #[inline(always)]
    pub(super) fn stays(&mut self) {
        self.head.port = PlanHead::STAYS;
    }

    /// Plans that the packet leaves by an exit.
    #[inline(always)]
    pub(super) fn leaves(&mut self, exit: &Exit, operations: u8) {
        (self.head.port, self.head.operations) = (exit.port.0, operations);
    }

    /// As [`Plan::leaves`], for eight packets by the measures of their exits ([`Exit::measures`]); for [`Plan::depart`].
    #[inline(always)]
    pub(super) fn departures(avx2: Avx2, measures: Lanes, operations: u8) -> Lanes {
        measures.right::<16>() & avx2.splat(0xff) | avx2.splat(u32::from(operations) << 8)
    }

    /// Plans that the packet leaves so.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // of 16 bits
    pub(super) fn depart(&mut self, departure: u32) {
        [self.head.port, self.head.operations] = (departure as u16).to_le_bytes();
    }

    /// Whether the packet leaves.
    #[inline(always)]
    pub(super) fn is_planned(&self) -> bool {
        self.head.port != PlanHead::STAYS
    }

    /// Whether the packet opens a TCP connection.
    #[inline(always)]
    pub(super) fn opens(&self) -> bool {
        const OTHERS: u8 = Shape::UDP | tcp_flags::ACK | tcp_flags::RST | tcp_flags::FIN;
        self.head.shape.kind & (OTHERS | tcp_flags::SYN) == tcp_flags::SYN
    }

    /// The bit of the packet's flow and direction among those of which a packet stays.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // the lower six bits
    pub(super) fn flow_bit(&self) -> u64 {
        1_u64.rotate_left((self.head.hash & 63) as u32)
    }
}
