//! Tells clients what routers inside a tunnel say about the packets that carried theirs.

use super::{Arrival, Engine, Tables};
use crate::answer::{self, IcmpError};
use crate::decide::{Obstacle, Packet, follow_tunnel_error};
use crate::lanes::Lanes;
use crate::observe::{Fate, Observe};
use crate::quote::{Inner, Trouble, TunnelQuote};
use crate::snapshot::{Exit, Snapshot};
use crate::tags::Tags;
use crate::{Address, Buffer, DropReason, Port, Tuple};

impl<B: Buffer, O: Observe<B>> Engine<B, O> {
    /// Ends an ICMP error about a packet of a tunnel.
    ///
    /// # Errors
    /// It is none: gives it back.
    pub(super) fn tunnel_error<'s, A: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        snapshot: &Snapshot,
        arrival: Arrival,
        buffer: B,
        packet: &Packet<'_, A>,
    ) -> Result<(), (B, Obstacle<'s>)>
    where
        Self: Tables<A>,
    {
        let Some(quote) = TunnelQuote::of(buffer.bytes(), packet.headers, &snapshot.tunnels) else {
            return Err((buffer, Obstacle::NoFlow));
        };
        let followed = match &quote.inner {
            Inner::V4(inner) => follow_tunnel_error(packet, &quote, inner, snapshot, &self.v4),
            Inner::V6(inner) => follow_tunnel_error(packet, &quote, inner, snapshot, &self.v6),
        };
        let Some(followed) = followed else { return Err((buffer, Obstacle::NoFlow)) };
        self.tally.hits += 1;
        match (followed, &quote.inner) {
            (Err(verdict), _) => self.apply(lanes, snapshot, arrival, buffer, packet.headers, verdict),
            (Ok(exit), Inner::V4(inner)) => self.tell_client(lanes, arrival, buffer, &quote, inner, exit),
            (Ok(exit), Inner::V6(inner)) => self.tell_client(lanes, arrival, buffer, &quote, inner, exit),
        }
        Ok(())
    }

    fn tell_client<A: Address, I: Address, P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        arrival: Arrival,
        mut buffer: B,
        quote: &TunnelQuote<A>,
        inner: &Tuple<I>,
        exit: &Exit,
    ) {
        let error = match quote.trouble {
            Trouble::TooBig { mtu } => IcmpError::TooBig { mtu },
            Trouble::Unreachable => IcmpError::HostUnreachable,
        };
        let told = self.limiter.allow(inner.source, arrival.now_ns)
            && answer::icmp_error_about_inner(&mut buffer, quote.inner_range.clone(), inner, error, exit);
        if !told {
            return self.drop(lanes, buffer, DropReason::AnswerLimited);
        }
        self.observer.observe(&buffer, Fate::Reply(exit.port), || None);
        self.tally.replies += 1;
        lanes.leave(exit.port, Tags::on(exit.link), buffer, &mut self.tally);
    }
}
