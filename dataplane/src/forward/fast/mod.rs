//! The fast way: packets of live flows that change nothing but their bytes, which are almost all. Short loops over a
//! burst, each with few values to keep in registers: recognise packets and prefetch the lines of tags of their flows
//! (`record`); prefetch the flows; check each flow (`follow`); create flows of connections (`open`); rewrite the
//! packets (`rewrite`); send them.
//!
//! What the fast way takes: IPv4 without options and IPv6 without extension headers, TCP or UDP, sent to the port's
//! own address, with up to two VLAN tags; in any mode, in either direction. It leaves every other packet in the burst,
//! unchanged: one that ends or changes a flow, or begins one otherwise than most SYNs do, needs an answer, fragments,
//! a new route, or a longer look. A packet whose flow and direction had an earlier packet left in the same burst is
//! left too, so packets of a flow keep their order.
//!
//! **Invariant:** whatever it forwards, the slow way would forward as the same bytes by the same port
//! (`tests/fast_way.rs`, `tests/openings.rs`). A flow is only in the table of the worker that owns it, so a packet
//! that is found here needs no steering.
//!
//! Not here: what happens to the packets that are left (`burst`).

mod follow;
mod nat;
mod open;
mod record;
mod rewrite;

use follow::Follow;
use open::{Aside, Opening, set_aside};
use record::Recognise;
pub(super) use record::Record;

use super::engine::Engine;
use super::observer::Observe;
use crate::flow::{Candidate, Tick};
use crate::forward::decide::FlowTables;
use crate::port::{Arrival, BURST, Burst, Port, PortIndex};
use crate::snapshot::Snapshot;

/// Records for the packets of one burst.
pub(super) fn records() -> Vec<Record> {
    vec![Record::left(); BURST]
}

/// The port by which each packet of a burst leaves, or [`STAYS`].
type Ways = [u8; BURST];
/// Packets of a burst that a loop handles at a time.
const PART: usize = 8;
/// The packet stays in the burst. There are fewer ports.
const STAYS: u8 = u8::MAX;

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// Forwards the packets that the fast way takes; the others stay in the burst, in order.
    ///
    /// The loops run over parts of the burst in turn: while one part is recognised, the flows of the part before are
    /// fetched, and those of the part before that have arrived. So requests to memory spread evenly over the work.
    pub(super) fn forward_known(&mut self, snapshot: &Snapshot, arrival: Arrival, burst: &mut Burst<P::Buffer>) {
        let mut records = std::mem::take(&mut self.records);
        let follow = Follow { snapshot, now: Tick::at(arrival.now_ns), shortest: self.limits.shortest() };
        let recognise = Recognise::new(snapshot, arrival.link);
        let mut ways = [STAYS; BURST];
        let mut opening = Opening::new(snapshot, arrival);
        let mut recognised = 0;
        let len = burst.len();
        let part = |number: usize| (number * PART).min(len)..((number + 1) * PART).min(len);
        for turn in 0..len.div_ceil(PART) + 2 {
            let range = part(turn);
            recognised |= recognise.burst(&self.tables, &burst[range.clone()], &mut records[range]);
            if recognised == 0 {
                continue;
            }
            if let Some(before) = turn.checked_sub(1) {
                locate(&self.tables, &mut records[part(before)]);
            }
            let Some(range) = turn.checked_sub(2).map(part) else { continue };
            let (buffers, records, ways) = (&mut burst[range.clone()], &mut records[range.clone()], &mut ways[range]);
            let syns = if recognised & Record::SYN != 0 { set_aside(records) } else { Aside::new() };
            if recognised & Record::V4 != 0 {
                follow.burst(&mut self.tables.v4, buffers, records, &mut opening.left);
                if !syns.is_empty() {
                    self.open::<u32>(&syns, buffers, records, &mut opening);
                }
                self.rewrite::<u32>(snapshot, buffers, records, ways);
            }
            if recognised & Record::V6 != 0 {
                follow.burst(&mut self.tables.v6, buffers, records, &mut opening.left);
                if !syns.is_empty() {
                    self.open::<u128>(&syns, buffers, records, &mut opening);
                }
                self.rewrite::<u128>(snapshot, buffers, records, ways);
            }
            if !syns.is_empty() {
                self.count_opened(&syns, ways);
            }
        }
        self.records = records;
        if recognised != 0 {
            self.send_all(burst, &ways);
        }
    }

    /// The last loop: sends what was rewritten, and keeps the rest in the burst.
    fn send_all(&mut self, burst: &mut Burst<P::Buffer>, ways: &Ways) {
        let first = ways[0];
        if first != STAYS && ways[..burst.len()].iter().all(|way| *way == first) {
            self.egress.send_burst(PortIndex(first), burst, &mut self.tally);
        } else {
            self.send_some(burst, ways);
        }
    }

    #[inline(never)]
    fn send_some(&mut self, burst: &mut Burst<P::Buffer>, ways: &Ways) {
        let mut rest = Burst::new();
        for (buffer, way) in burst.drain(..).zip(ways) {
            match *way {
                STAYS => rest.push(buffer),
                port => self.egress.send(PortIndex(port), buffer, &mut self.tally),
            }
        }
        *burst = rest;
    }
}

/// The second loop: finds the probable flow of each packet, and prefetches it.
#[inline(never)]
fn locate(tables: &FlowTables, records: &mut [Record]) {
    let mut any_away = false;
    for record in records.iter_mut() {
        record.candidate = match record.family() {
            Record::V4 => tables.v4.candidate(record.hash),
            Record::V6 => tables.v6.candidate(record.hash),
            _ => Candidate::NONE,
        };
        any_away |= record.candidate == Candidate::AWAY;
    }
    if any_away {
        locate_away(tables, records);
    }
}

/// The same for those that may be found in another line of tags: in a full table one packet in fifteen.
#[inline(never)]
fn locate_away(tables: &FlowTables, records: &mut [Record]) {
    for record in records.iter_mut().filter(|record| record.candidate == Candidate::AWAY) {
        record.candidate = match record.family() {
            Record::V4 => tables.v4.candidate_away(record.hash),
            _ => tables.v6.candidate_away(record.hash),
        };
    }
}
