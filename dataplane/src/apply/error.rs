//! Carries ICMP errors to the ends of their flows.

use super::{Arrival, Engine, Tables};
use crate::decide::{Obstacle, Packet, Passage, follow_error, follow_one_way_error};
use crate::flow::{Direction, Way};
use crate::lanes::Lanes;
use crate::observe::Observe;
use crate::rewrite::{self, ErrorRewrite};
use crate::snapshot::Snapshot;
use crate::tick::Tick;
use crate::{Address, Buffer, Headers, Port, Quote};

impl<B: Buffer, O: Observe<B>> Engine<B, O> {
    /// Ends an ICMP error about a packet of a flow, or of a tunnel that carried one.
    ///
    /// # Errors
    /// It is none, or must not go on: gives it back with the reason.
    pub(super) fn error<'s, A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &'s Snapshot,
        arrival: Arrival,
        buffer: B,
        packet: &Packet<'_, A>,
    ) -> Result<(), (B, Obstacle<'s>)>
    where
        Self: Tables<A>,
    {
        let Some(quote) = Quote::of(buffer.bytes(), packet.headers) else {
            return self.tunnel_error(lanes, snapshot, arrival, buffer, packet);
        };
        let asked = quote.tuple.reversed();
        if let Some(verdict) = follow_one_way_error(packet, &asked, snapshot, self.flows().0) {
            self.tally.hits += 1;
            self.apply(lanes, snapshot, arrival, buffer, packet.headers, verdict);
            return Ok(());
        }
        let (table, limits) = self.flows();
        match follow_error(packet, &quote.tuple, snapshot, table, limits, Tick::at(arrival.now_ns)) {
            Ok(passage) => {
                self.tally.hits += 1;
                self.forward_error(lanes, buffer, packet.headers, &quote, passage);
                Ok(())
            }
            Err(Obstacle::NoFlow) => self.tunnel_error(lanes, snapshot, arrival, buffer, packet),
            Err(obstacle) => Err((buffer, obstacle)),
        }
    }

    fn forward_error<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        mut buffer: B,
        headers: &Headers<A>,
        quote: &Quote<A>,
        passage: Passage<'_>,
    ) where
        Self: Tables<A>,
    {
        let Passage { flow, direction, exit } = passage;
        let flow = *self.flows().0.get(flow);
        // As packets of the flow in the error's direction come from one address, whoever tells of them: the client knows
        // no other, and what lies behind us has addresses that its network may filter (docs/adr/0009).
        let (source, destination, quoted) = match direction {
            Direction::ToBackend if flow.way == Way::Dnat => {
                (headers.tuple.source, flow.backend_address, flow.tuple(Direction::ToClient))
            }
            Direction::ToBackend => (flow.snat, flow.backend_address, flow.tuple(Direction::ToClient)),
            Direction::ToClient => (flow.vip, flow.client, flow.tuple(Direction::ToBackend)),
        };
        let (source_mac, destination_mac) = (exit.source_mac, exit.destination_mac);
        let rewrite = ErrorRewrite { source, destination, quoted, source_mac, destination_mac };
        rewrite::error(buffer.bytes_mut(), headers, quote, &rewrite);
        if !headers.dont_fragment {
            self.renumber(&mut buffer, headers);
        }
        self.send_of_flow(lanes, buffer, headers, &flow, exit);
    }
}
