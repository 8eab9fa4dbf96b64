//! The flows of sampled packets, and the watch that a worker gets (docs/internals/decisions/0169). A packet of another
//! worker's flow is sampled there.
//!
//! **Invariant:** a packet leaves as any other. Without a watch nothing here runs.
//!
//! Not here: which packets are sampled (`observer::watching`).

use std::sync::Arc;

use crate::flow::{FlowView, FlowWatch, Tick};
use crate::forward::decide::FlowFamily;
use crate::forward::engine::Engine;
use crate::forward::observer::Watching;
use crate::port::{Arrival, Burst, Port};
use crate::wire::{Buffer, Headers, Parsed, Tags, parse};

impl<P: Port, O> Engine<P, O> {
    /// Writes to this watch from now on, or to none. Returns the one before.
    pub(super) fn watch(&mut self, watch: Option<Arc<FlowWatch>>) -> Option<Arc<FlowWatch>> {
        self.tables.v4.watch(watch.clone());
        self.tables.v6.watch(watch.clone());
        let before = self.watching.take().map(Watching::into_watch);
        let seed = self.worker as u64;
        self.watching = watch.map(|watch| Watching::new(watch, seed));
        before
    }

    /// Samples packets of a burst that has arrived.
    pub(super) fn sample(&mut self, arrival: Arrival, burst: &mut Burst<P::Buffer>) {
        let Some(mut watching) = self.watching.take() else { return };
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
                Some(Parsed::V4(headers)) => self.sample_one(&watching, &headers, now),
                Some(Parsed::V6(headers)) => self.sample_one(&watching, &headers, now),
                Some(Parsed::Arp | Parsed::Other) | None => {}
            }
        }
        self.watching = Some(watching);
    }

    fn sample_one<A: FlowFamily>(&self, watching: &Watching, headers: &Headers<A>, now: Tick) {
        let table = A::table(&self.tables);
        if let Some((index, direction)) = table.search(table.hash(&headers.tuple), &headers.tuple) {
            watching.sampled(direction, headers.packet_len, FlowView::of(&table.get(index), now));
        }
    }
}
