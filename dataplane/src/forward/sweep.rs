//! The sweep: ends idle flows, frees the memory of idle SNAT pools and expired affinity entries, a bounded number per
//! poll.
//!
//! Not here: idle limits (`flow`).

use crossbeam_queue::ArrayQueue;

use super::engine::Engine;
use super::observer::Observe;
use crate::flow::{Flow, FlowTable, IdleLimits, SnatPorts, Tick, Ticks};
use crate::icmp::Ask;
use crate::snapshot::Snapshot;
use crate::stats::WorkerCounters;
use crate::wire::{Address, Buffer, protocol};

/// The sweep: expiry by bounded work. The tables are visited once every [`Sweep::TICKS`], a few entries per poll.
#[derive(Debug, Default)]
pub(super) struct Sweep {
    /// When it last ran; the first poll only records the time.
    last: Option<Tick>,
    /// Number of entries that are due for a visit.
    owed: u32,
}
impl Sweep {
    /// Ticks in which each entry is visited once: about 8.6 s, below the shortest idle limit of 10 s.
    const TICKS: u32 = 64;
    /// Maximum number of entries per poll, so that a poll stays short: 64 * 5 ns.
    const ENTRIES: u32 = 64;
    /// SNAT pools visited per tick: 65,536 in 34 s.
    const POOLS: u32 = 256;

    pub(super) fn run<B: Buffer, O: Observe<B>>(&mut self, engine: &mut Engine<B, O>, snapshot: &Snapshot, now: Tick) {
        let elapsed = now.since(*self.last.get_or_insert(now)).0.min(Self::TICKS);
        if elapsed > 0 {
            self.last = Some(now);
            let entries = engine.entries_used();
            self.owed = (self.owed + entries.div_ceil(Self::TICKS) * elapsed).min(entries);
            engine.sweep_pools(Self::POOLS, now);
            if engine.worker == 0 {
                snapshot.sweep_affinity(now);
            }
        }
        let entries = self.owed.min(Self::ENTRIES);
        if entries > 0 {
            self.owed -= entries;
            engine.expire(entries, snapshot, now);
        }
    }
}
/// Where the next sweeps start.
#[derive(Debug, Default)]
pub(crate) struct Swept {
    pub(super) v4: u32,
    pub(super) v6: u32,
    pub(super) pools: u32,
}
/// The context of a sweep over flows.
pub(super) struct Look<'a> {
    limits: &'a IdleLimits,
    snapshot: &'a Snapshot,
    asks: &'a ArrayQueue<Ask>,
    now: Tick,
}
impl Look<'_> {
    /// Whether the flow exceeded its idle limit, or its backend's drain has ended.
    fn ended<A: Address>(&self, flow: &Flow<A>) -> bool {
        let Some(backend) = self.snapshot.backend(flow.backend) else {
            // The sides of a connection that is still in use get a RST in answer to the next packet.
            return flow.protocol != protocol::TCP || self.limits.is_silent(flow.last_seen, self.now);
        };
        self.limits.is_over(flow.state, backend.idle_timeout, flow.last_seen, self.now)
    }

    /// Requests the resolution of an on-link client while its flow is in use; otherwise the kernel would forget the
    /// neighbour, since it sees none of its packets. The kernel side resolves each at most every 30 s; a request that
    /// finds the queue full is repeated by the next sweep.
    fn keep_client<A: Address>(&self, flow: &Flow<A>) {
        let is_used = self.now.since(flow.last_seen) <= USED_WITHIN;
        if let Some(hop) = self.snapshot.next_hop(flow.route_to_client).filter(|_| is_used)
            && hop.address == flow.client.ip()
        {
            let _ = self.asks.push((hop.link, hop.address));
        }
    }
}
/// A flow is in use if its last packet is at most this old: 75 ticks are 10 s, a little more than a sweep takes.
const USED_WITHIN: Ticks = Ticks(75);
/// Visits `entries` entries from `start` on. Returns where to continue.
pub(super) fn sweep<A: Address>(
    table: &mut FlowTable<A>,
    start: u32,
    entries: u32,
    ports: &mut SnatPorts,
    counters: &WorkerCounters,
    look: &Look<'_>,
) -> u32 {
    table.sweep(start, entries, |flow| {
        let ended = look.ended(flow);
        if ended {
            if let Some(lease) = flow.snat_lease() {
                ports.release(lease.pool, lease.port, look.now);
            }
            counters.flow_ended(flow.backend.slot);
        } else {
            look.keep_client(flow);
        }
        ended
    })
}

impl<B: Buffer, O: Observe<B>> Engine<B, O> {
    /// Number of entries ever used in the larger of the two flow tables.
    pub(crate) fn entries_used(&self) -> u32 {
        self.v4.high_water().max(self.v6.high_water())
    }

    /// Visits the next entries of both tables and ends flows that exceeded their idle limit, or whose backend's drain
    /// has ended, since its SNAT ports will soon belong to another target.
    pub(crate) fn expire(&mut self, entries: u32, snapshot: &Snapshot, now: Tick) {
        let Self { v4, v6, ports, limits, counters, swept, asks, .. } = self;
        let look = Look { limits, snapshot, asks, now };
        swept.v4 = sweep(v4, swept.v4, entries, ports, counters, &look);
        swept.v6 = sweep(v6, swept.v6, entries, ports, counters, &look);
    }

    /// Visits the next SNAT pools, to free the memory of idle ones.
    pub(crate) fn sweep_pools(&mut self, pools: u32, now: Tick) {
        self.swept.pools = self.ports.sweep(self.swept.pools, pools, now);
    }
}
