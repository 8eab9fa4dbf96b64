//! The stages of a burst: parse, sort by kind, look up flows, and process packet by packet. Bursts of tagged frames
//! return here without their tags.
//!
//! **Invariant:** a burst is empty afterwards; every packet went to exactly one function of the engine.
//!
//! Not here: the verdict on a packet.

use arrayvec::ArrayVec;

use super::engine::{Engine, Tables};
use super::observer::Observe;
use super::steer::steer;
use crate::flow::{Candidate, FlowTable};
use crate::port::{Arrival, BURST, Burst, FrameFilter, Link, Origin, Port, SentTo};
use crate::snapshot::{Place, Snapshot};
use crate::stats::DropReason;
use crate::wire::{
    Address, Buffer, Carried, Headers, Parsed, Tags, Transport, Tuple, carried, ipv4, ipv6, is_group_address, parse,
};
use crate::workers::Lanes;

/// ICMPv6 neighbour solicitation (RFC 4861 section 4.3).
const NEIGHBOUR_SOLICITATION: u8 = 135;
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
type AllLooked<A> = ArrayVec<Looked<A>, BURST>;
/// A burst after the first stage: the kinds of its packets; headers and hashes of each family separately, in the same
/// order.
#[derive(Default)]
pub(crate) struct Sorted {
    pub(crate) kinds: ArrayVec<Kind, BURST>,
    pub(crate) v4: AllLooked<u32>,
    pub(crate) v6: AllLooked<u128>,
}
/// The three stages of a burst.
pub(super) fn process<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    burst: &mut Burst<P::Buffer>,
) {
    let mut sorted = Sorted { kinds: ArrayVec::new(), v4: AllLooked::new(), v6: AllLooked::new() };
    let filter = FrameFilter::new(snapshot.port(arrival.link.port()).mac);
    sort(engine, filter, burst, &mut sorted);
    if arrival.origin == Origin::Port && lanes.peers.is_some() {
        steer(lanes, snapshot, arrival, burst, &mut sorted, &mut engine.tally);
    }
    sorted.v4.iter_mut().for_each(|looked| looked.candidate = engine.v4.candidate(looked.hash));
    sorted.v6.iter_mut().for_each(|looked| looked.candidate = engine.v6.candidate(looked.hash));
    if sorted.v4.len() == burst.len() {
        return dispose_all(engine, lanes, snapshot, arrival, burst, &sorted.v4);
    }
    if sorted.kinds.iter().all(|kind| matches!(kind, Kind::V6)) {
        return dispose_all(engine, lanes, snapshot, arrival, burst, &sorted.v6);
    }
    let (mut v4, mut v6) = (sorted.v4.iter(), sorted.v6.iter());
    let mut tagged = Burst::new();
    for (buffer, kind) in burst.drain(..).zip(sorted.kinds) {
        match kind {
            Kind::V4 => {
                if let Some(looked) = v4.next() {
                    engine.dispose(lanes, snapshot, arrival, buffer, looked);
                }
            }
            Kind::V6 => {
                if let Some(looked) = v6.next() {
                    engine.dispose(lanes, snapshot, arrival, buffer, looked);
                }
            }
            Kind::Solicitation => {
                if let Some(looked) = v6.next() {
                    engine.solicited(lanes, snapshot, arrival, buffer, &looked.headers);
                }
            }
            Kind::Arp => engine.arp(lanes, snapshot, arrival, buffer),
            Kind::Tagged => tagged.push(buffer),
            Kind::Other => engine.give_to_linux(lanes, snapshot, arrival, buffer),
            Kind::Foreign => foreign(engine, lanes, snapshot, arrival, buffer),
            Kind::Bad(reason) => engine.drop(lanes, buffer, reason),
        }
    }
    if !tagged.is_empty() {
        process_tagged(engine, lanes, snapshot, arrival, &mut tagged);
    }
}
/// Removes the VLAN tags from frames, and processes the frames of one link after another as bursts of their own. Frames
/// with a third tag go to the kernel, so the recursion ends.
#[inline(never)]
fn process_tagged<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    burst: &mut Burst<P::Buffer>,
) {
    let mut run = Burst::new();
    let mut at = arrival;
    for mut buffer in burst.drain(..) {
        if !arrival.tags.is_none() {
            engine.give_to_linux(lanes, snapshot, arrival, buffer);
            continue;
        }
        let tags = Tags::of(buffer.bytes());
        let Some(link) = tags.vlan().map(|vlan| Link::new(arrival.link.port(), vlan)).filter(|link| snapshot.knows(*link)) else {
            unknown_link(engine, lanes, snapshot, arrival, buffer);
            continue;
        };
        if tags != at.tags {
            process_run(engine, lanes, snapshot, at, &mut run);
            at = Arrival { link, tags, ..arrival };
        }
        tags.take_off(&mut buffer);
        run.push(buffer);
    }
    process_run(engine, lanes, snapshot, at, &mut run);
}
fn process_run<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    run: &mut Burst<P::Buffer>,
) {
    if !run.is_empty() {
        process(engine, lanes, snapshot, arrival, run);
    }
}
/// A frame of a VLAN that the kernel has no interface for. It goes to the kernel unchanged, unless it is for an address
/// of the engine: on that VLAN the owner of the address is unknown.
fn unknown_link<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    buffer: P::Buffer,
) {
    match destination(buffer.bytes(), snapshot) {
        Ok(Some(Place::Vip | Place::PoolUnused)) => engine.drop(lanes, buffer, DropReason::UnknownVip),
        Ok(Some(Place::Snat)) => engine.drop(lanes, buffer, DropReason::SnatWrongPort),
        // As for untagged packets: VIPs are not known yet, nor the set of VLANs.
        Ok(Some(_)) if !snapshot.ready() => engine.drop(lanes, buffer, DropReason::UnknownVip),
        Ok(_) => engine.give_to_linux(lanes, snapshot, arrival, buffer),
        Err(reason) => engine.drop(lanes, buffer, reason),
    }
}
/// A frame for another station. The kernel may have an interface with that address on top of the twin, or a bridge;
/// then it gets the frame, unless it is for an address or frontend of the gateway.
#[cold]
fn foreign<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    buffer: P::Buffer,
) {
    let may_be_linuxs = || match parse(buffer.bytes()) {
        Ok(Parsed::V4(headers)) => is_linuxs(&headers, snapshot),
        Ok(Parsed::V6(headers)) => is_linuxs(&headers, snapshot),
        Ok(Parsed::Arp | Parsed::Other) => true,
        Err(_) => false,
    };
    if snapshot.is_promiscuous(arrival.link.port()) && may_be_linuxs() {
        engine.give_to_linux(lanes, snapshot, arrival, buffer);
    } else {
        engine.drop(lanes, buffer, DropReason::NotOurMac);
    }
}
/// Whether a packet is for no address or frontend of the engine.
fn is_linuxs<A: Address>(headers: &Headers<A>, snapshot: &Snapshot) -> bool {
    let Tuple { destination, destination_port, protocol, .. } = headers.tuple;
    let is_frontend = || snapshot.frontend(destination, protocol, destination_port).is_some();
    is_group_address(destination)
        || match snapshot.place(destination) {
            Place::Elsewhere | Place::Broadcast => true,
            Place::Twin(_) => !is_frontend(),
            Place::Vip | Place::Snat | Place::PoolUnused => false,
        }
}
/// The classification of a frame's destination address; `None` for a group, and for frames without IP.
fn destination(frame: &[u8], snapshot: &Snapshot) -> Result<Option<Place>, DropReason> {
    fn place<A: Address>(headers: &Headers<A>, snapshot: &Snapshot) -> Option<Place> {
        let address = headers.tuple.destination;
        (!is_group_address(address)).then(|| snapshot.place(address))
    }
    Ok(match parse(frame)? {
        Parsed::V4(headers) => place(&headers, snapshot),
        Parsed::V6(headers) => place(&headers, snapshot),
        Parsed::Arp | Parsed::Other => None,
    })
}
/// The first stage. Each loop over a burst is a function of its own: together they would not fit into the registers.
#[inline(never)]
fn sort<B: Buffer, O>(engine: &Engine<B, O>, filter: FrameFilter, burst: &Burst<B>, sorted: &mut Sorted) {
    let Sorted { kinds, v4, v6 } = sorted;
    for buffer in burst {
        let frame = buffer.bytes();
        if !filter.is_for_port(frame) {
            kinds.push(unusual(engine, filter, frame, v4, v6));
            continue;
        }
        let found = match carried(frame, false) {
            Ok(Carried::V4(packet, group)) => ipv4(packet, group, |headers| look(&engine.v4, headers, v4, |_| Kind::V4)),
            Ok(Carried::V6(packet, group)) => ipv6(packet, group, |headers| look(&engine.v6, headers, v6, kind_v6)),
            Ok(Carried::Arp) => Ok(Some(Kind::Arp)),
            Ok(Carried::Tagged) => Ok(Some(Kind::Tagged)),
            Ok(Carried::Other) => Ok(None),
            Err(reason) => Err(reason),
        };
        kinds.push(match found {
            Ok(Some(kind)) => kind,
            Ok(None) => Kind::Other,
            Err(reason) => Kind::Bad(reason),
        });
    }
}
/// The kind of a frame that is not addressed to the port alone. Kept out of the fast path.
#[cold]
#[inline(never)]
fn unusual<B: Buffer, O>(
    engine: &Engine<B, O>,
    filter: FrameFilter,
    frame: &[u8],
    v4: &mut AllLooked<u32>,
    v6: &mut AllLooked<u128>,
) -> Kind {
    match filter.sent_to(frame) {
        Ok(SentTo::OtherStation) => return Kind::Foreign,
        Ok(SentTo::Group | SentTo::Port) if !Tags::of(frame).is_none() => return Kind::Tagged,
        Ok(SentTo::Group | SentTo::Port) => {}
        Err(reason) => return Kind::Bad(reason),
    }
    match parse(frame) {
        Ok(Parsed::V4(headers)) => look(&engine.v4, headers, v4, |_| Kind::V4),
        Ok(Parsed::V6(headers)) => look(&engine.v6, headers, v6, kind_v6),
        Ok(Parsed::Arp) => Kind::Arp,
        Ok(Parsed::Other) => Kind::Other,
        Err(reason) => Kind::Bad(reason),
    }
}
/// The third stage for a burst of one family, which most bursts are.
#[inline(never)]
fn dispose_all<A: Address, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P::Buffer, O>,
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    burst: &mut Burst<P::Buffer>,
    looked: &AllLooked<A>,
) where
    Engine<P::Buffer, O>: Tables<A>,
{
    for (buffer, looked) in burst.drain(..).zip(looked) {
        engine.dispose(lanes, snapshot, arrival, buffer, looked);
    }
}
fn kind_v6(transport: Transport) -> Kind {
    match transport {
        Transport::Icmp { kind: NEIGHBOUR_SOLICITATION, .. } => Kind::Solicitation,
        _ => Kind::V6,
    }
}
/// Stores the headers of a packet, hashes its tuple and prefetches its flow bucket.
#[inline(always)]
fn look<A: Address>(table: &FlowTable<A>, headers: Headers<A>, looked: &mut AllLooked<A>, kind: fn(Transport) -> Kind) -> Kind {
    let hash = table.hash(&headers.tuple);
    table.prefetch(hash);
    looked.push(Looked { headers, hash, candidate: Candidate::NONE });
    kind(headers.transport)
}
/// The result of the first two stages for one packet.
pub(crate) struct Looked<A> {
    pub(crate) headers: Headers<A>,
    pub(crate) hash: u64,
    pub(crate) candidate: Candidate,
}
