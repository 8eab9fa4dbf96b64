//! The counters of a worker. Each has one writer and any number of readers: the worker writes it by a relaxed store (a
//! plain move on every processor), and readers sum over the workers.
//!
//! **Invariant:** the account of a worker balances exactly at rest: received + handed in + originated = transmitted +
//! handed out + drops of every reason + held.
//!
//! Not here: rates, and names of metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use super::drop_reason::DropReason;

/// Number of backends whose traffic is counted separately: the slots of a snapshot, as many as there may be targets.
/// 131,072 * 64 bytes = 8 MiB per worker.
pub(crate) const BACKEND_SLOTS: usize = 131_072;

/// A counter that one worker writes and any thread reads.
#[derive(Debug, Default)]
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

/// Traffic of one backend slot on one worker: one cache line. A slot may be reassigned later: readers pair the counts
/// with the backend that the snapshot names.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct BackendCounters {
    /// Packets towards the backend, and towards clients: side by side, so that the direction scales an address.
    packets: [Counter; 2],
    /// Bytes of these IP packets.
    bytes: [Counter; 2],
    /// Current number of flows.
    pub flows: Counter,
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
    drops: [Counter; DropReason::ALL.len()],
    backends: BackendSlots,
}

/// The counters of all backends, by slot. Of a constant length, so that no slot needs to be checked.
#[derive(Debug)]
struct BackendSlots(Box<[BackendCounters; BACKEND_SLOTS]>);

impl Default for BackendSlots {
    fn default() -> Self {
        let counters: Box<[_]> = (0..BACKEND_SLOTS).map(|_| BackendCounters::default()).collect();
        // There are as many as counted.
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
        &self.drops[reason as usize]
    }

    /// Traffic of a backend slot; none past the last slot.
    #[must_use]
    pub fn backend(&self, slot: u32) -> Option<&BackendCounters> {
        self.backends.0.get(slot as usize)
    }

    /// Number of flows of a backend slot on this worker; 0 past the last slot.
    #[must_use]
    pub fn flows_of(&self, slot: u32) -> u64 {
        let flows = self.backend(slot).map_or(0, |counters| counters.flows.get());
        // A negative count is no count: a scheduler must not take it for 2^64 flows.
        if flows > u64::MAX / 2 { 0 } else { flows }
    }

    /// Counts a packet of this many bytes, from its network header on, that was sent for a backend slot, towards
    /// the client or the backend.
    pub fn forwarded(&self, slot: u32, is_to_client: bool, packet_len: u16) {
        if let Some(counters) = self.backend(slot) {
            counters.forwarded(is_to_client, packet_len);
        }
    }

    /// Traffic of all backend slots.
    #[inline]
    pub(crate) fn by_backend(&self) -> &[BackendCounters; BACKEND_SLOTS] {
        &self.backends.0
    }

    /// Decrements the number of flows of a backend slot.
    pub fn flow_ended(&self, slot: u32) {
        if let Some(counters) = self.backend(slot) {
            counters.flows.set(counters.flows.get().wrapping_sub(1));
        }
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
            dropped: self.drops.iter().map(Counter::get).sum(),
            held: self.held.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
