//! The flows of sampled packets, and the watch that a worker gets (docs/internals/decisions/0169). A packet of another
//! worker's flow is sampled there.
//!
//! **Invariant:** a packet leaves as any other. Without a watch nothing here runs.
//!
//! Not here: which packets are sampled (`observer::watching`).

use std::sync::Arc;

use crate::flow::{FlowView, FlowWatch, Tick};
use crate::forward::decide::{FlowFamily, FlowTables};
use crate::forward::engine::Engine;
use crate::forward::observer::Watching;
use crate::port::{Arrival, Burst, Port};
use crate::wire::{Buffer, Headers, Parsed, Tags, parse};

/// Writes to this watch from now on, or to none. Returns the one before.
pub(super) fn swap_watch<P: Port, O>(engine: &mut Engine<P, O>, watch: Option<Arc<FlowWatch>>) -> Option<Arc<FlowWatch>> {
    engine.flows.tables.v4.watch(watch.clone());
    engine.flows.tables.v6.watch(watch.clone());
    let before = engine.output.watching.take().map(Watching::into_watch);
    let seed = engine.output.worker as u64;
    engine.output.watching = watch.map(|watch| Watching::new(watch, seed));
    before
}

/// Samples packets of a burst that has arrived.
pub(super) fn sample<P: Port, O>(engine: &mut Engine<P, O>, arrival: Arrival, burst: &mut Burst<P::Buffer>) {
    let Some(mut watching) = engine.output.watching.take() else { return };
    let tables = &engine.flows.tables;
    let now = Tick::at(arrival.now_ns);
    while let Some(buffer) = watching.next_sample(burst.len()).and_then(|at| burst.get_mut(at)) {
        let tags = Tags::of(buffer.bytes());
        let is_tagged = !tags.is_none() && arrival.tags.is_none();
        if is_tagged {
            tags.take_off(buffer);
        }
        let parsed = parse(buffer.bytes()).ok();
        if is_tagged {
            // There is room: they have just been taken off.
            let _ = tags.put_on(buffer);
        }
        match parsed {
            Some(Parsed::V4(headers)) => sample_one(tables, &watching, &headers, now),
            Some(Parsed::V6(headers)) => sample_one(tables, &watching, &headers, now),
            Some(Parsed::Arp | Parsed::Other) | None => {}
        }
    }
    engine.output.watching = Some(watching);
}

fn sample_one<A: FlowFamily>(tables: &FlowTables, watching: &Watching, headers: &Headers<A>, now: Tick) {
    let table = A::table(tables);
    if let Some((index, direction)) = table.search(table.hash(&headers.tuple), &headers.tuple) {
        watching.sampled(direction, headers.packet_len, FlowView::of(&table.get(index), now));
    }
}
