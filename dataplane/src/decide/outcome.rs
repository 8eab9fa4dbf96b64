//! What a decision can come to: verdicts, what is in a packet's way, and what changed besides.

use arrayvec::ArrayVec;

use super::one_way::Delivery;
use super::reclaim::Reset;
use crate::flow::{BackendId, Direction, FlowIndex};
use crate::held::Awaited;
use crate::snapshot::Exit;
use crate::{DropReason, Link};

/// What decisions changed besides their verdicts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The packet's flow was known.
    pub hit: bool,
    /// The flow that was made.
    pub made: Option<BackendId>,
    /// The flow that was ended.
    pub ended: Option<BackendId>,
    /// Another flow that was ended, to make room for this one.
    pub displaced: Option<BackendId>,
    /// Flows that yielded to it: for want of a port, and for want of memory.
    pub reclaimed: ArrayVec<BackendId, 2>,
    /// RSTs that go out besides the packet, before it: for a handshake that is forgotten, one that is displaced, two flows
    /// that yield, and the other side of a connection that had ended.
    pub resets: ArrayVec<Reset, 5>,
    /// A SNAT port was taken before it had rested.
    pub reused_early: bool,
    /// An on-link client of a new flow that Linux does not know yet.
    pub ask: Option<Awaited>,
}

/// How to answer a packet with itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// TCP RST (RFC 9293 section 3.10.7.1), or SCTP's ABORT (RFC 9260 section 8.4).
    Reset,
    /// ICMP port unreachable (RFC 792; RFC 4443 section 3.1).
    PortUnreachable,
    /// ICMP time exceeded in transit.
    TimeExceeded,
    /// Fragmentation needed, or packet too big, with the MTU of the way on.
    TooBig {
        /// Largest IP packet that would fit, bytes.
        mtu: u16,
    },
    /// ICMP echo reply.
    Echo,
}

/// A packet's flow and its way on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Passage<'s> {
    /// The flow, which says what the packet carries when it leaves.
    pub flow: FlowIndex,
    /// Its direction.
    pub direction: Direction,
    /// How it leaves.
    pub exit: &'s Exit,
}

/// Why a packet does not just follow a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle<'s> {
    /// It has no flow.
    NoFlow,
    /// It has one and may change it: begin, confirm or close it, or find that it has ended.
    Event(FlowIndex, Direction),
    /// It is of a flow whose backend answers its client directly, and leaves it where it is.
    OneWay(FlowIndex),
    /// It is of a flow, and must not go on.
    Known(Stop),
    /// It is of a flow and goes on, but not as it is: in pieces, or with VLAN tags.
    NotPlain(Passage<'s>),
}

/// Why a packet that has a flow does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A reply by a link that is not its backend's.
    WrongPort,
    /// The next hop's Ethernet address is unknown.
    Unresolved(Awaited),
    /// There is no route.
    NoRoute,
    /// It would leave for a VIP by a router, who would send it back.
    VipLoop,
    /// Its hop limit ends here.
    HopLimit,
    /// It does not fit, and may not be cut.
    TooBig {
        /// Largest IP packet that would fit, bytes.
        mtu: u16,
    },
}

/// What happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Verdict<'s> {
    /// Rewritten and sent.
    Forward(Passage<'s>),
    /// Sent, as it is or inside another packet, to a backend that answers the client directly.
    Deliver(Delivery<'s>),
    /// Held until Linux knows the next hop.
    Wait(Awaited),
    /// Given to the Linux twin of the port it came in by.
    Linux,
    /// Given to Linux as if it had come in by this link.
    LinuxAt(Link),
    /// Turned into an answer.
    Reply(Answer),
    /// Dropped, and a RST or ABORT sent to where it came from: mid-stream without a flow (FORWARDING 4).
    Reset(DropReason),
    /// Dropped.
    Drop(DropReason),
}
