//! The loop of the fast way for packets that open connections: of those the index shows that they have no flow. It
//! takes what most of them are: SYNs to a frontend of mode `nat` that chooses backends by hash, while there is room
//! for their flows and a rested port. It creates the flow, and the next loop rewrites the packet like any other. All
//! other packets are left, and nothing is changed for them.
//!
//! The first half of the loop decides on each packet of a part and prefetches what the second half writes.
//!
//! **Invariant:** for each packet that it takes, `decide` would create the same flow and forward the same bytes
//! (`tests/openings.rs`).
//!
//! Not here: packets that begin flows otherwise (`decide::new_flow`).

use arrayvec::ArrayVec;

use super::follow::{FastFamily, PacketHead};
use super::record::{Record, RecordKind};
use super::{PART, STAYS};
use crate::flow::{BegunFlow, Candidate, Direction, FlowMode, SnatTarget, Tick};
use crate::forward::decide::{refused_source, unresolved_client};
use crate::forward::engine::Engine;
use crate::forward::observer::Observe;
use crate::forward::sort::owns;
use crate::port::{Arrival, Origin, Port};
use crate::snapshot::{AddressRole, Backend, Frontend, Snapshot};
use crate::wire::{Address, Buffer, Ethernet, Tuple, TupleKey, is_martian, protocol};

/// Packets of a part that open connections and have no flow: their positions and kinds.
pub(super) type Aside = ArrayVec<(u8, RecordKind), PART>;

/// Takes the packets that may open connections out of the other loops.
#[inline(never)]
pub(super) fn set_aside(records: &mut [Record]) -> Aside {
    let mut aside = Aside::new();
    for (at, record) in (0..).zip(records) {
        if record.opens() && record.candidate == Candidate::NONE {
            aside.push((at, record.set_aside()));
        }
    }
    aside
}

/// What the loop depends on besides packets and flows, and what it knows of the burst.
pub(super) struct Opening<'s> {
    snapshot: &'s Snapshot,
    arrival: Arrival,
    /// Packets that were left, as a bit by their hash: later packets of their flows must not overtake them.
    pub(super) left: u64,
    /// Packets that were taken, likewise. Their flows are not in the index when later packets are looked up.
    taken: [u64; 16],
    /// The frontend of the packet before, which most often is that of the next.
    last: Option<(FrontendOf, &'s Frontend)>,
}

/// Address, as [`Address::wide`], and port of a frontend.
type FrontendOf = (u128, u16);

/// A packet that will open a connection.
struct Opens<K> {
    at: u8,
    kind: RecordKind,
    /// Slot of its next hop.
    exit: u32,
    flow: BegunFlow<K>,
    port: u16,
}

impl<'s> Opening<'s> {
    pub(super) fn new(snapshot: &'s Snapshot, arrival: Arrival) -> Self {
        Self { snapshot, arrival, left: 0, taken: [0; 16], last: None }
    }

    #[inline(always)]
    fn frontend<A: Address>(&mut self, tuple: &Tuple<A>) -> Option<&'s Frontend> {
        let of = (tuple.destination.wide(), tuple.destination_port);
        match self.last {
            Some((last, frontend)) if last == of => Some(frontend),
            _ => {
                let frontend = self.snapshot.frontend(tuple.destination, protocol::TCP, tuple.destination_port)?;
                self.last = Some((of, frontend));
                Some(frontend)
            }
        }
    }

    /// Whether no packet with this hash was left or, as far as some bits of it tell, taken before.
    fn is_first(&self, hash: u64) -> bool {
        self.left >> (hash & 63) & 1 == 0 && self.taken[(hash >> 6 & 15) as usize] >> (hash & 63) & 1 == 0
    }

    fn take(&mut self, hash: u64) {
        self.taken[(hash >> 6 & 15) as usize] |= 1 << (hash & 63);
    }
}

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// The loop, for the packets of one family.
    #[inline(never)]
    pub(super) fn open<A: FastFamily>(
        &mut self,
        aside: &Aside,
        burst: &[P::Buffer],
        records: &mut [Record],
        opening: &mut Opening<'_>,
    ) {
        let now = Tick::at(opening.arrival.now_ns);
        let room = self.max_flows.saturating_sub(self.tables.v4.len() + self.tables.v6.len());
        let mut opens: ArrayVec<Opens<A::Key>, PART> = ArrayVec::new();
        for &(at, kind) in aside {
            let (Some(record), Some(buffer)) = (records.get(usize::from(at)), burst.get(usize::from(at))) else { continue };
            if kind.family() != A::RECORD {
                continue;
            }
            let opened = match opens.len() < room as usize {
                true => self.opened::<A>((at, kind), buffer, record, opening),
                false => None,
            };
            match opened {
                Some(open) => {
                    opening.take(record.hash);
                    opens.push(open);
                }
                None => opening.left |= 1 << (record.hash & 63),
            }
        }
        for open in &opens {
            let Some(record) = records.get_mut(usize::from(open.at)) else { continue };
            match A::split(&mut self.tables).0.begin(&open.flow, now) {
                Ok(candidate) => {
                    (record.candidate, record.exit, record.backend) = (candidate, open.exit, open.flow.backend.packed());
                    record.take_back(open.kind);
                    self.tally.new_flows += 1;
                    if let Some(counters) = self.counters.backend(open.flow.backend.slot) {
                        counters.flows.add(1);
                        counters.new_flows.add(1);
                    }
                }
                // The index has no room: the slow way says so.
                Err(_) => self.ports.release(open.flow.pool, open.port, now),
            }
        }
    }

    /// Counts the packets of a part that opened connections: rewritten, they were counted as hits.
    #[inline(always)]
    pub(super) fn count_opened(&mut self, aside: &Aside, ways: &[u8]) {
        let opened = aside.iter().filter(|(at, _)| ways.get(usize::from(*at)).is_some_and(|way| *way != STAYS)).count() as u64;
        self.tally.hits -= opened;
        self.tally.misses += opened;
    }

    /// Decides on one packet, and takes a SNAT port for it. `None`: it is left.
    #[inline(always)]
    fn opened<A: FastFamily>(
        &mut self,
        (at, kind): (u8, RecordKind),
        buffer: &P::Buffer,
        record: &Record,
        opening: &mut Opening<'_>,
    ) -> Option<Opens<A::Key>> {
        let head = A::Head::of(buffer.bytes(), record.network_offset.into())?;
        let (key, snapshot) = (A::key(head), opening.snapshot);
        let tuple = key.tuple(protocol::TCP);
        if !opening.is_first(record.hash) || tuple.source == tuple.destination || is_martian(tuple.source) {
            return None;
        }
        let frontend = opening.frontend(&tuple)?;
        if frontend.mode() != FlowMode::Nat || !frontend.is_hashed() || !frontend.allows(tuple.source) {
            return None;
        }
        let id = frontend.choose_by_hash(&tuple)?;
        let backend = snapshot.backend(id)?;
        let target = reachable::<A>(snapshot, backend)?;
        if refused_source(tuple.source, snapshot).is_some() {
            return None;
        }
        let exit = snapshot.routes().slot_of(backend.next_hop, record.hash);
        let way = snapshot.routes().exit(exit)?;
        if record.packet_len > way.mtu || snapshot.mtu(record.link) != way.mtu {
            return None;
        }
        if !self.owns::<A>(opening, buffer, record, &tuple) {
            return None;
        }
        let port = backend.address.port();
        let towards = SnatTarget { slot: backend.target, address: target, port, protocol: protocol::TCP };
        let now = Tick::at(opening.arrival.now_ns);
        let lease = self.ports.allocate_rested(towards, snapshot.snat::<A>(way.link), record.hash >> 40, now)?;
        if let Some(neighbour) = unresolved_client(snapshot, &tuple) {
            self.ask(neighbour);
        }
        let reply = Tuple {
            source: target,
            destination: lease.address,
            source_port: port,
            destination_port: lease.port,
            protocol: protocol::TCP,
        };
        let keys = [key, A::Key::of(&reply)];
        let table = A::split(&mut self.tables).0;
        let hashes = [record.hash, table.hash_key(&keys[Direction::ToClient as usize], protocol::TCP)];
        table.prefetch(hashes[Direction::ToClient as usize]);
        let initial_sequence = A::sequence(head);
        let flow = BegunFlow { keys, hashes, backend: id, pool: lease.pool, initial_sequence };
        Some(Opens { at, kind, exit, flow, port: lease.port })
    }

    /// Whether this worker owns the flow of a packet.
    fn owns<A: Address>(&mut self, opening: &Opening<'_>, buffer: &P::Buffer, record: &Record, tuple: &Tuple<A>) -> bool {
        let Some(peers) = self.egress.peers.as_mut().filter(|_| opening.arrival.origin == Origin::Port) else { return true };
        let tag_bytes = u16::from(record.network_offset).saturating_sub(Ethernet::BYTES);
        owns(peers, opening.snapshot, (record.link.port(), tag_bytes), buffer, (tuple, record.hash))
    }
}

/// The address of a backend, unless packets to it would return to the gateway.
#[inline(always)]
fn reachable<A: Address>(snapshot: &Snapshot, backend: &Backend) -> Option<A> {
    let target = A::from_ip(backend.address.ip())?;
    match snapshot.role(target) {
        AddressRole::Vip | AddressRole::Snat | AddressRole::PoolUnused => None,
        AddressRole::Twin(_) | AddressRole::Broadcast | AddressRole::Elsewhere => Some(target),
    }
}
