//! What the loops of the fast path have come to: of a burst, and of the packets of one of its parts.
//!
//! Not here: what becomes of a packet (`rewrite`, `open`).

use super::follow::{FRAGMENTABLE, ForwardLoop, GROUPS, LastBurst, TAGS};
use super::record::{Record, STAYS, bit_of};
use crate::port::PortIndex;
use crate::snapshot::Snapshot;

/// What a burst has come to so far.
#[derive(Default)]
pub(super) struct Progress {
    /// Flows, by some bits of the hash, of which a packet was left: later packets must not overtake it.
    pub(super) left: u64,
    /// Number of packets that leave and opened a connection.
    pub(super) opened: u64,
    /// For each family, the loop that took most of its packets in the last part, and probably takes those of the next.
    pub(super) most: [ForwardLoop; 2],
    /// Kinds of packets that may be among those of the burst: [`GROUPS`], [`TAGS`], [`FRAGMENTABLE`].
    pub(super) kinds: u8,
    /// The ports by which packets leave.
    ports: LeavingPorts,
}

/// The ports by which packets leave: all bits that any of them has, and those that any of them lacks.
#[derive(Clone, Copy, Default)]
pub(super) struct LeavingPorts {
    set: u8,
    clear: u8,
}

impl LeavingPorts {
    #[inline(always)]
    pub(super) fn add(&mut self, port: u8) {
        self.set |= port;
        self.clear |= !port;
    }
}

impl Progress {
    pub(super) fn new(snapshot: &Snapshot, last: LastBurst) -> Self {
        let kinds = if snapshot.backends.any_behind_groups() { GROUPS } else { 0 };
        // Packets that need the longest loop are rare, so a burst never begins with it.
        let most = last.most.map(|most| if most == ForwardLoop::Others { ForwardLoop::default() } else { most });
        Self { kinds, most, ..Self::default() }
    }

    /// What the next burst should know of this one.
    pub(super) fn end(&self, (families, is_tagged): (u8, bool), reads_routes: bool, has_others: bool) -> LastBurst {
        LastBurst { families, is_tagged, reads_routes, has_others, most: self.most }
    }

    /// Notes that packets with VLAN tags, or packets that routers may fragment, are among those of the burst.
    #[inline(always)]
    pub(super) fn note(&mut self, any_tagged: bool, any_fragmentable: bool) {
        self.kinds |= if any_tagged { TAGS } else { 0 } | if any_fragmentable { FRAGMENTABLE } else { 0 };
    }

    /// The port by which all packets leave, if there is one.
    pub(super) fn only_port(&self) -> Option<PortIndex> {
        let LeavingPorts { set, clear } = self.ports;
        (set == !clear && set != STAYS).then_some(PortIndex(set))
    }

    /// What a loop over a part continues.
    #[inline(always)]
    pub(super) fn passed(&self) -> Passed {
        Passed { others: 0, left: self.left, ports: self.ports }
    }

    /// Takes over what a loop over a part has come to. Returns the positions of the packets that do not pass, whose flows
    /// the next loop notes if it leaves them too.
    #[inline(always)]
    pub(super) fn take(&mut self, passed: &Passed) -> u32 {
        self.ports = passed.ports;
        passed.others
    }

    /// Leaves the packets of a part, of which none has a flow here.
    #[inline(never)] // a single worker has no such parts
    pub(super) fn leave(&mut self, records: &[Record]) {
        let recognised = records.iter().filter(|record| record.family() != 0);
        self.left = recognised.fold(self.left, |left, record| left | bit_of(record.hash));
        self.ports.add(STAYS);
    }

    /// Leaves a packet with this hash.
    #[inline(always)]
    pub(super) fn leave_one(&mut self, hash: u64) {
        self.left |= bit_of(hash);
        self.ports.add(STAYS);
    }

    #[inline(always)]
    pub(super) fn add_port(&mut self, port: u8) {
        self.ports.add(port);
    }
}

/// What became of the packets of a part so far.
pub(super) struct Passed {
    /// Positions of those that do not pass, as bits.
    pub(super) others: u32,
    /// See [`Progress::left`]; with those of `others`.
    pub(super) left: u64,
    /// The ports by which the others leave.
    pub(super) ports: LeavingPorts,
}
