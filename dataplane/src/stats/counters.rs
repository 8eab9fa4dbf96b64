//! The counters of a worker. Each has one writer and any number of readers: the worker writes it by a relaxed store (a
//! plain move on every processor), and readers sum over the workers.
//!
//! **Invariant:** the account of a worker balances exactly at rest: received + handed in + originated = transmitted +
//! handed out + drops of every reason + held.
//!
//! Not here: rates, and names of metrics.

use std::alloc::{Layout, handle_alloc_error};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use zerocopy::FromZeros;

use super::counter_slot::{COUNTER_SLOTS, CounterSlot, FrontendNumber, FrontendNumberSet};
use super::drop_reason::{ByReason, DropReason};
use super::service_flows::{FlowCount, ServiceFlows, ServiceNumber};

/// A counter that one worker writes and any thread reads.
#[derive(Debug, Default, FromZeros)]
#[repr(transparent)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds, as the only writer.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Replaces the value, as the only writer.
    #[inline]
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// The value.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Traffic of one counter slot on one worker: 64 bytes. The slot of a backend may be reassigned later: readers pair the
/// counts with the backend that the snapshot names.
///
/// Not aligned to a cache line: memory that is never written is free only if it comes from `calloc`, which aligns to 16
/// bytes. The fields that packets and new flows write come first; in a mapping of glibc, which starts with 16 bytes of
/// its own, these 48 bytes lie in one line.
#[derive(Debug, Default, FromZeros)]
#[repr(C)]
pub struct BackendCounters {
    /// Packets towards the backend, and towards clients: side by side, so that the direction scales an address.
    packets: [Counter; 2],
    /// Bytes of these IP packets.
    bytes: [Counter; 2],
    /// Current number of flows.
    pub flows: FlowCount,
    /// Number of flows ever created.
    pub new_flows: Counter,
    /// Two-way connections (TCP, SCTP) whose time ended before both sides had confirmed them.
    pub failed: Counter,
    /// Confirmed TCP connections that a RST ended.
    pub reset: Counter,
}

impl BackendCounters {
    /// Counts a packet of this many bytes, from its network header on, towards the client or the backend.
    #[inline(always)]
    pub(crate) fn forwarded(&self, is_to_client: bool, packet_len: u16) {
        self.packets[usize::from(is_to_client)].add(1);
        self.bytes[usize::from(is_to_client)].add(packet_len.into());
    }

    /// Packets towards the client, or towards the backend.
    #[must_use]
    pub fn packets(&self, is_to_client: bool) -> u64 {
        self.packets[usize::from(is_to_client)].get()
    }

    /// Bytes of these IP packets.
    #[must_use]
    pub fn bytes(&self, is_to_client: bool) -> u64 {
        self.bytes[usize::from(is_to_client)].get()
    }
}

/// All counters of one worker. Padded, so that no worker writes into another's cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct WorkerCounters {
    /// Packets received from ports and twins.
    pub received: Counter,
    /// Packets that other workers handed to this one.
    pub handed_in: Counter,
    /// Packets that this worker handed to others.
    pub handed_out: Counter,
    /// Packets that the engine created without turning a received packet into them: announcements, RSTs whose cause is
    /// a drop, and fragments after the first of a packet that was fragmented.
    pub originated: Counter,
    /// Packets that ports accepted or that were passed to twins.
    pub transmitted: Counter,
    /// Packets that wait for a next hop, or for the first fragment of their datagram.
    pub held: Counter,
    /// Highest number of them at the end of a poll so far.
    pub held_peak: Counter,
    /// Packets that were turned into an answer; included in `transmitted`.
    pub replies: Counter,
    /// Packets of known flows.
    pub hits: Counter,
    /// Packets without a flow.
    pub misses: Counter,
    /// Flows created.
    pub new_flows: Counter,
    /// Current number of flows.
    pub flows: Counter,
    /// Highest number of flows so far.
    pub flows_peak: Counter,
    /// SNAT ports that flows hold, each counted once for every target that it is used towards.
    pub snat_ports: Counter,
    /// Highest number of them so far.
    pub snat_ports_peak: Counter,
    /// SNAT ports reused before they had rested.
    pub snat_port_reused_early: Counter,
    /// Unconfirmed flows and single exchanges that yielded to new ones.
    pub reclaimed: Counter,
    /// Flows that operators ended.
    pub ended_on_request: Counter,
    /// Address parameters of SCTP's INIT and INIT ACK that became padding.
    pub sctp_hidden_addresses: Counter,
    /// PROXY headers sent to backends: the first one of each connection, and that of each datagram.
    pub proxy_headers_sent: Counter,
    /// PROXY headers that were repeated, because the backend had not acknowledged them.
    pub proxy_headers_again: Counter,
    /// Connections that a backend closed or reset after their PROXY header without having sent a byte of data, before the
    /// client closed: the backend may not expect the protocol.
    pub proxy_headers_refused: Counter,
    drops: ByReason<Counter>,
    /// The highest number of a frontend so far. The compiler writes it.
    highest_number: AtomicU8,
    slots: CounterSlots,
    services: ServiceFlows,
}

/// All counter slots. Of a constant length, so that no index needs to be checked.
#[derive(Debug)]
struct CounterSlots(Box<[BackendCounters; COUNTER_SLOTS]>);

impl Default for CounterSlots {
    fn default() -> Self {
        let counters = <[BackendCounters]>::new_box_zeroed_with_elems(COUNTER_SLOTS);
        let counters = counters.unwrap_or_else(|_| handle_alloc_error(Layout::new::<[BackendCounters; COUNTER_SLOTS]>()));
        // There are as many as asked for.
        Self(counters.try_into().unwrap_or_else(|_| unreachable!()))
    }
}

/// The account of a worker at one point in time (DESIGN 3.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Received from ports and twins.
    pub received: u64,
    /// Handed in by other workers.
    pub handed_in: u64,
    /// Created by the engine without a received packet.
    pub originated: u64,
    /// Transmitted to ports and twins.
    pub transmitted: u64,
    /// Handed out to other workers.
    pub handed_out: u64,
    /// Drops of all reasons.
    pub dropped: u64,
    /// Waiting for a next hop or a first fragment.
    pub held: u64,
}

impl Account {
    /// Whether every packet is accounted for.
    #[must_use]
    pub const fn closes(&self) -> bool {
        self.received + self.handed_in + self.originated == self.transmitted + self.handed_out + self.dropped + self.held
    }
}

impl WorkerCounters {
    /// Drops for one reason.
    #[must_use]
    pub fn drops(&self, reason: DropReason) -> &Counter {
        self.drops.of(reason)
    }

    /// The counters of a backend and a frontend.
    #[must_use]
    #[inline]
    pub fn at(&self, slot: CounterSlot) -> &BackendCounters {
        &self.slots.0[slot.index()]
    }

    /// A count of the backend in a slot, over all frontends.
    #[must_use]
    pub fn sum_of(&self, backend_slot: u32, of: impl Fn(&BackendCounters) -> u64) -> u64 {
        let numbers = 0..=u32::from(self.highest_number.load(Ordering::Relaxed));
        let counts = numbers.map(|number| of(self.at(CounterSlot::new(backend_slot, FrontendNumber::new(number)))));
        counts.fold(0, u64::wrapping_add)
    }

    /// Number of flows of the backend in a slot on this worker.
    #[must_use]
    pub fn flows_of(&self, backend_slot: u32) -> u64 {
        not_negative(self.sum_of(backend_slot, |counters| counters.flows.get()))
    }

    /// Number of flows of the backend in a slot on this worker, by the frontends with these numbers: each takes a line
    /// of memory.
    pub(crate) fn flows_by(&self, backend_slot: u32, numbers: &FrontendNumberSet) -> u64 {
        let flows = numbers.iter().map(|number| self.at(CounterSlot::new(backend_slot, number)).flows.get());
        not_negative(flows.fold(0, u64::wrapping_add))
    }

    /// Counts a packet of this many bytes, from its network header on, that was sent for a backend and a frontend,
    /// towards the client or the backend.
    pub fn forwarded(&self, slot: CounterSlot, is_to_client: bool, packet_len: u16) {
        self.at(slot).forwarded(is_to_client, packet_len);
    }

    /// All counter slots, by [`CounterSlot::index`].
    #[inline]
    pub(crate) fn all_slots(&self) -> &[BackendCounters; COUNTER_SLOTS] {
        &self.slots.0
    }

    /// Counts a flow of a backend and a frontend of this Service that begins.
    #[inline(always)]
    pub(crate) fn flow_began(&self, slot: CounterSlot, service: ServiceNumber) {
        let counters = self.at(slot);
        self.services.began(&counters.flows, service);
        counters.new_flows.add(1);
    }

    /// Counts a flow of a backend and a frontend that began elsewhere.
    pub(crate) fn flow_joined(&self, slot: CounterSlot) {
        self.services.joined(&self.at(slot).flows);
    }

    /// Counts the end of a flow of a backend and a frontend.
    pub fn flow_ended(&self, slot: CounterSlot) {
        self.services.ended(&self.at(slot).flows);
    }

    /// Number of flows of a Service on this worker.
    #[must_use]
    #[inline]
    pub fn flows_of_service(&self, service: ServiceNumber) -> u32 {
        self.services.get(service)
    }

    /// Number of flows of the Service to which the flows of a backend and a frontend belong.
    pub(crate) fn flows_of_same_service(&self, slot: CounterSlot) -> u32 {
        self.services.get(self.at(slot).flows.service())
    }

    /// Prepares for flows of a backend and a frontend, before any worker knows of them: the memory is there when the
    /// first packet is counted, and [`WorkerCounters::sum_of`] counts the number. Called by the compiler, whose
    /// exchange of 0 for 0 changes nothing.
    pub(crate) fn prepare(&self, backend_slot: u32, frontend: FrontendNumber) {
        self.highest_number.fetch_max(frontend.get(), Ordering::Relaxed);
        self.at(CounterSlot::new(backend_slot, frontend)).flows.touch();
    }

    /// Sets the current numbers of flows, of SNAT ports that they hold, and of held packets, with their peaks.
    pub(crate) fn set_use(&self, flows: u64, snat_ports: u64, held: u64) {
        let all = [
            (&self.flows, &self.flows_peak, flows),
            (&self.snat_ports, &self.snat_ports_peak, snat_ports),
            (&self.held, &self.held_peak, held),
        ];
        for (counter, peak, now) in all {
            counter.set(now);
            if now > peak.get() {
                peak.set(now);
            }
        }
    }

    /// The account. It balances exactly when the worker is at rest.
    #[must_use]
    pub fn account(&self) -> Account {
        Account {
            received: self.received.get(),
            handed_in: self.handed_in.get(),
            originated: self.originated.get(),
            transmitted: self.transmitted.get(),
            handed_out: self.handed_out.get(),
            dropped: self.drops.all().iter().map(Counter::get).sum(),
            held: self.held.get(),
        }
    }
}

/// A negative count is no count: a scheduler must not take it for 2^64 flows.
pub(super) const fn not_negative(count: u64) -> u64 {
    if count > u64::MAX / 2 { 0 } else { count }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_counts_the_traffic_of_all_frontends_and_each_frontend_its_own() {
        let counters = WorkerCounters::default();
        let [one, two] = [1, 2].map(|number| CounterSlot::new(7, FrontendNumber::new(number)));
        for number in [1, 2] {
            counters.prepare(7, FrontendNumber::new(number));
        }
        counters.forwarded(one, false, 100);
        counters.forwarded(two, false, 60);
        counters.at(two).flows.add(3);
        counters.flow_ended(one);
        assert_eq!((counters.at(one).bytes(false), counters.at(two).bytes(false)), (100, 60));
        assert_eq!(counters.sum_of(7, |of| of.packets(false)), 2);
        let numbers = FrontendNumberSet::default();
        assert_eq!((counters.flows_of(7), counters.flows_by(7, &numbers)), (2, 0), "of all frontends, and of none");
        numbers.set([one, two].map(|slot| FrontendNumber::new(u32::try_from(slot.index() >> 17).unwrap())).into_iter());
        assert_eq!((counters.flows_by(7, &numbers), counters.flows_by(8, &numbers)), (2, 0));
        counters.at(two).flows.set(0);
        assert_eq!(counters.flows_by(7, &numbers), 0, "not 2^64 - 1");
    }

    #[test]
    fn the_account_closes_when_each_packet_is_counted_once() {
        let counters = WorkerCounters::default();
        counters.received.add(5);
        counters.originated.add(1);
        counters.transmitted.add(3);
        counters.drops(DropReason::NoFlow).add(2);
        assert!(!counters.account().closes());
        counters.held.set(1);
        assert!(counters.account().closes());
        counters.drops(DropReason::TxFull).add(1);
        assert!(!counters.account().closes());
    }
}
