//! The first stage over a burst: parse each packet, hash its tuple, and sort the headers by family.
//!
//! **Invariant:** every packet of the burst has one kind; headers are stored in the order of the packets of their
//! family.
//!
//! Not here: what happens to a packet of each kind (`burst`).

mod steer;

pub(super) use steer::{may_have_flow, observe_plain, other_owner, owner_of_first, sample_queue, steer};

use arrayvec::ArrayVec;

use crate::flow::{Candidate, FlowTable};
use crate::forward::decide::FlowTables;
use crate::port::{Arrival, BURST, Burst, FrameFilter, SentTo};
use crate::snapshot::Snapshot;
use crate::stats::DropReason;
use crate::wire::{Address, Buffer, Carried, Headers, ParseError, Parsed, Tags, Transport, carried, icmpv6, ipv4, ipv6, parse};

/// What the packets of a burst have in common: where and when they arrived, and the tables of that time.
#[derive(Clone, Copy)]
pub(super) struct Ingress<'s> {
    pub(super) snapshot: &'s Snapshot,
    pub(super) arrival: Arrival,
}

/// The kind of a packet in a burst.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    V4,
    V6,
    /// A neighbour solicitation, which is IPv6 too.
    Solicitation,
    Arp,
    /// A frame with VLAN tags.
    Tagged,
    Other,
    /// A frame for another station.
    Foreign,
    Bad(DropReason),
}

pub(super) type Lookups<A> = ArrayVec<Lookup<A>, BURST>;

/// A burst after the first stage: the kinds of its packets; headers and hashes of each family separately, in the same
/// order.
#[derive(Default)]
pub(crate) struct Sorted {
    pub(crate) kinds: ArrayVec<Kind, BURST>,
    pub(crate) v4: Lookups<u32>,
    pub(crate) v6: Lookups<u128>,
}

/// A run of packets of a burst that are handled alike, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunKind {
    Tagged,
    Fragments,
    Others,
}

impl Sorted {
    /// Whether some packets of a flow may be handled by another stage than others, so that these might overtake them: frames
    /// with VLAN tags return to this stage without, and fragments go to other workers (`has_peers`) by other rules.
    pub(crate) fn is_mixed(&self, has_peers: bool) -> bool {
        let (mut has_fragments, mut has_others) = (false, false);
        if has_peers {
            let mut note = |transport: Transport| match transport {
                Transport::Fragment => has_fragments = true,
                _ => has_others = true,
            };
            self.v4.iter().for_each(|lookup| note(lookup.headers.transport));
            self.v6.iter().for_each(|lookup| note(lookup.headers.transport));
        }
        has_fragments && has_others || self.kinds.iter().any(|kind| matches!(kind, Kind::Tagged))
    }

    /// The kind of run of each packet.
    pub(crate) fn runs(&self) -> impl Iterator<Item = RunKind> {
        let (mut v4, mut v6) = (self.v4.iter(), self.v6.iter());
        self.kinds.iter().map(move |kind| {
            let transport = match kind {
                Kind::V4 => v4.next().map(|lookup| lookup.headers.transport),
                Kind::V6 | Kind::Solicitation => v6.next().map(|lookup| lookup.headers.transport),
                Kind::Tagged => return RunKind::Tagged,
                Kind::Arp | Kind::Other | Kind::Foreign | Kind::Bad(_) => None,
            };
            if transport == Some(Transport::Fragment) { RunKind::Fragments } else { RunKind::Others }
        })
    }
}

impl From<ParseError> for DropReason {
    fn from(error: ParseError) -> Self {
        match error {
            ParseError::Malformed => Self::Malformed,
            ParseError::Truncated => Self::Truncated,
            ParseError::Ipv4Checksum => Self::Ipv4Checksum,
            ParseError::SourceRoute => Self::SourceRoute,
            ParseError::MartianSource => Self::MartianSource,
            ParseError::SameSourceDestination => Self::SameSourceDestination,
        }
    }
}

/// The first stage. Each loop over a burst is a function of its own: together they would not fit into the registers.
#[inline(never)]
pub(super) fn sort<B: Buffer>(tables: &FlowTables, filter: FrameFilter, burst: &Burst<B>, sorted: &mut Sorted) {
    let Sorted { kinds, v4, v6 } = sorted;
    for buffer in burst {
        let frame = buffer.bytes();
        if !filter.is_for_port(frame) {
            kinds.push(unusual(tables, filter, frame, v4, v6));
            continue;
        }
        let found = match carried(frame, false) {
            Ok(Carried::V4(packet, group)) => ipv4(packet, group, |headers| look(&tables.v4, headers, v4, |_| Kind::V4)),
            Ok(Carried::V6(packet, group)) => ipv6(packet, group, |headers| look(&tables.v6, headers, v6, kind_v6)),
            Ok(Carried::Arp) => Ok(Some(Kind::Arp)),
            Ok(Carried::Tagged) => Ok(Some(Kind::Tagged)),
            Ok(Carried::Other) => Ok(None),
            Err(error) => Err(error),
        };
        kinds.push(match found {
            Ok(Some(kind)) => kind,
            Ok(None) => Kind::Other,
            Err(error) => Kind::Bad(error.into()),
        });
    }
}

/// The kind of a frame that is not addressed to the port alone. Kept out of the fast path.
#[cold]
#[inline(never)]
fn unusual(tables: &FlowTables, filter: FrameFilter, frame: &[u8], v4: &mut Lookups<u32>, v6: &mut Lookups<u128>) -> Kind {
    match filter.sent_to(frame) {
        Ok(SentTo::OtherStation) => return Kind::Foreign,
        Ok(SentTo::Group | SentTo::Port) if !Tags::of(frame).is_none() => return Kind::Tagged,
        Ok(SentTo::Group | SentTo::Port) => {}
        Err(reason) => return Kind::Bad(reason),
    }
    match parse(frame) {
        Ok(Parsed::V4(headers)) => look(&tables.v4, headers, v4, |_| Kind::V4),
        Ok(Parsed::V6(headers)) => look(&tables.v6, headers, v6, kind_v6),
        Ok(Parsed::Arp) => Kind::Arp,
        Ok(Parsed::Other) => Kind::Other,
        Err(error) => Kind::Bad(error.into()),
    }
}

fn kind_v6(transport: Transport) -> Kind {
    match transport {
        Transport::Icmp { kind: icmpv6::NEIGHBOUR_SOLICITATION, .. } => Kind::Solicitation,
        _ => Kind::V6,
    }
}

/// Stores the headers of a packet, hashes its tuple and prefetches its flow bucket.
#[inline(always)]
fn look<A: Address>(table: &FlowTable<A>, headers: Headers<A>, lookup: &mut Lookups<A>, kind: fn(Transport) -> Kind) -> Kind {
    let hash = table.hash(&headers.tuple);
    table.prefetch(hash);
    lookup.push(Lookup { headers, hash, candidate: Candidate::NONE });
    kind(headers.transport)
}

/// The result of the first two stages for one packet.
pub(crate) struct Lookup<A> {
    pub(crate) headers: Headers<A>,
    pub(crate) hash: u64,
    pub(crate) candidate: Candidate,
}
