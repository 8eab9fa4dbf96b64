//! Sends packets to backends that answer their clients directly.

use super::{Engine, trim};
use crate::cut::cut;
use crate::decide::Delivery;
use crate::encapsulate::{Outer, encapsulate};
use crate::lanes::Lanes;
use crate::observe::{Belongs, Fate, Observe};
use crate::snapshot::Ends;
use crate::tags::Tags;
use crate::{Address, Buffer, Burst, DropReason, Headers, Port, rewrite};

impl<B: Buffer, O: Observe<B>> Engine<B, O> {
    /// Sends a packet as it is, or inside another.
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
        let tags = Tags::on(exit.link);
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

    /// Readies a packet, or a piece cut from it, for its way. False when a tunnel's headers find no room.
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

    /// What an outer packet is numbered by that may be fragmented on its way; all come from a few addresses of ours.
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
