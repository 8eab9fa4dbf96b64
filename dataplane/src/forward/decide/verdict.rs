//! Results of decisions: the verdict, and the changes that the decision made to flows. Data only.

use arrayvec::ArrayVec;

use crate::flow::{BackendId, Direction, FlowIndex};
use crate::forward::rewrite::{Outer, Reset};
use crate::neighbours::UnresolvedNeighbour;
use crate::port::Link;
use crate::snapshot::Exit;
use crate::stats::{CounterSlot, DropReason, FrontendNumber, ServiceNumber};

/// Maximum number of RSTs that one decision causes.
pub(crate) const RESETS_MAX: usize = 3 + YIELDED_MAX;
/// Maximum number of flows that yield to one new flow: to a client that has its share of the ports, for want of a port, and
/// for want of memory or to a Service that has its share of it.
const YIELDED_MAX: usize = 3;

/// Changes that a decision made besides its verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changes {
    /// Whether the packet's flow was known.
    pub hit: bool,
    /// Where a confirmed flow is counted that the packet, a RST, began to close.
    pub reset: Option<CounterSlot>,
    /// Where the flow is counted that was created.
    pub made: Option<CounterSlot>,
    /// The Service of that flow.
    pub service: ServiceNumber,
    /// Where the flow is counted that was ended.
    pub ended: Option<CounterSlot>,
    /// The same of another flow that was ended to make room for this one.
    pub displaced: Option<CounterSlot>,
    /// The same of flows that yielded.
    pub reclaimed: ArrayVec<CounterSlot, YIELDED_MAX>,
    /// RSTs to send before the packet: for an abandoned handshake, a displaced one, flows that yielded, and the other side of
    /// a connection that had ended.
    pub resets: ArrayVec<Reset, RESETS_MAX>,
    /// Whether a SNAT port was reused before it had rested.
    pub reused_early: bool,
    /// An on-link client of a new flow whose neighbour the kernel has not resolved.
    pub ask: Option<UnresolvedNeighbour>,
}

/// The kind of answer that a packet is turned into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// TCP RST (RFC 9293 section 3.10.7.1), or SCTP's ABORT (RFC 9260 section 8.4).
    Reset,
    /// ICMP port unreachable (RFC 792; RFC 4443 section 3.1).
    PortUnreachable,
    /// ICMP time exceeded in transit.
    TimeExceeded,
    /// Fragmentation needed, or packet too big, with the next-hop MTU.
    TooBig {
        /// Largest IP packet that would fit, bytes.
        mtu: u16,
    },
    /// ICMP echo reply.
    Echo,
}

/// The flow of a packet, and its exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NatForward<'s> {
    /// The flow, which determines the rewrite.
    pub flow: FlowIndex,
    /// Its direction.
    pub direction: Direction,
    /// How the packet leaves.
    pub exit: &'s Exit,
}

/// What happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Verdict<'s> {
    /// Rewritten and sent.
    Forward(NatForward<'s>),
    /// Sent, as it is or inside another packet, to a backend that answers the client directly.
    ForwardDirect(DirectForward<'s>),
    /// Held until the kernel has resolved the next hop.
    Wait(UnresolvedNeighbour),
    /// Passed to the kernel through the twin of the port on which it arrived.
    Linux,
    /// Passed to the kernel as if it had arrived on this link.
    LinuxAt(Link),
    /// Turned into an answer.
    Reply(Answer),
    /// Dropped; a RST or ABORT is sent to its source: mid-stream without a flow (FORWARDING 4).
    Reset(DropReason),
    /// Dropped.
    Drop(DropReason),
}

/// Why a packet has no exit: what happens to it instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoExit {
    /// As [`Verdict::Wait`].
    Unresolved(UnresolvedNeighbour),
    /// As [`Verdict::Reply`]: it is too long, or has no hop left.
    Refused(Answer),
    /// As [`Verdict::Drop`].
    Dropped(DropReason),
}

impl From<NoExit> for Verdict<'_> {
    fn from(none: NoExit) -> Self {
        match none {
            NoExit::Unresolved(neighbour) => Self::Wait(neighbour),
            NoExit::Refused(answer) => Self::Reply(answer),
            NoExit::Dropped(reason) => Self::Drop(reason),
        }
    }
}

impl Verdict<'_> {
    /// The same for a packet of this flow.
    pub(super) fn of_flow(mut self, index: FlowIndex) -> Self {
        if let Self::ForwardDirect(direct) = &mut self {
            direct.flow = Some(index);
        }
        self
    }
}

/// How a packet reaches a backend that answers its client directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirectForward<'s> {
    /// The backend.
    pub backend: BackendId,
    /// The frontend, for the counters.
    pub frontend: FrontendNumber,
    /// The frontend's port.
    pub port: u16,
    /// The frontend's protocol number.
    pub protocol: u8,
    /// How the packet leaves.
    pub exit: &'s Exit,
    /// The outer header; `None` in mode `dsr`.
    pub outer: Option<Outer>,
    /// The flow of the packet, if it has one.
    pub flow: Option<FlowIndex>,
}
