//! Delivery of packets to backends that answer their clients directly (modes `dsr`, `ipip`, `gue`), in fragments if
//! they do not fit.
//!
//! Not here: packets that a flow rewrites, which the engine sends.

use super::engine::{Engine, trim};
use super::observer::{Belongs, Fate, Observe};
use crate::forward::decide::Delivery;
use crate::forward::rewrite;
use crate::forward::rewrite::{Outer, encapsulate};
use crate::fragment::cut;
use crate::port::{Burst, Port};
use crate::snapshot::Ends;
use crate::stats::DropReason;
use crate::wire::{Address, Buffer, Headers};
use crate::workers::Lanes;

impl<B: Buffer, O: Observe<B>> Engine<B, O> {
    /// Sends a packet as it is, or encapsulated.
    pub(super) fn deliver<A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        mut buffer: B,
        headers: &Headers<A>,
        delivery: &Delivery<'_>,
    ) {
        let &Delivery { backend, port, protocol, exit, outer } = delivery;
        let mtu = outer.map_or(exit.mtu, |outer| outer.mtu);
        let mut rest = Burst::new();
        if headers.packet_len > mtu {
            match cut(&mut buffer, usize::from(headers.network_offset), mtu, || lanes.allocate(exit.port)) {
                Some(pieces) => rest = pieces,
                None => return self.drop(lanes, buffer, DropReason::TooBig),
            }
        }
        if !self.send_off(&mut buffer, headers, delivery) {
            rest.into_iter().for_each(|piece| lanes.discard(piece));
            return self.drop(lanes, buffer, DropReason::TooBig);
        }
        self.counters.forwarded(backend.slot, headers.packet_len);
        let belongs = || Some(Belongs { vip: headers.tuple.destination.ip(), port, protocol, backend });
        self.observer.observe(&buffer, Fate::Forward(exit.port), belongs);
        let tags = exit.link.tags();
        lanes.leave(exit.port, tags, buffer, &mut self.tally);
        for mut piece in rest {
            if self.send_off(&mut piece, headers, delivery) {
                self.tally.originated += 1;
                lanes.leave(exit.port, tags, piece, &mut self.tally);
            } else {
                lanes.discard(piece);
            }
        }
    }

    /// Prepares a packet, or a fragment of it, for sending. Returns false when there is no room for the headers of a
    /// tunnel.
    fn send_off<A: Address>(&mut self, buffer: &mut B, headers: &Headers<A>, delivery: &Delivery<'_>) -> bool {
        let exit = delivery.exit;
        let Some(outer) = delivery.outer else {
            trim(buffer, headers);
            rewrite::hop(buffer.bytes_mut(), headers, exit);
            return true;
        };
        let identification = self.identification_of(headers, &outer);
        let len = buffer.bytes().len().saturating_sub(usize::from(headers.network_offset));
        let packet_len = u16::try_from(len).map_or(headers.packet_len, |len| headers.packet_len.min(len));
        encapsulate(buffer, &Headers { packet_len, ..*headers }, &outer, exit, identification)
    }

    /// The identification of an outer packet that may be fragmented on its way; all of them come from a few addresses
    /// of the gateway.
    #[allow(clippy::cast_possible_truncation)] // of an IPv4 packet 16 bits
    fn identification_of<A: Address>(&mut self, headers: &Headers<A>, outer: &Outer) -> u16 {
        match outer.ends {
            Ends::V4(source, destination) if !headers.dont_fragment => {
                self.identifications.next(source, destination, headers.tuple.protocol) as u16
            }
            _ => 0,
        }
    }
}
