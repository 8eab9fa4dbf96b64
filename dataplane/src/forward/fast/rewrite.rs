//! The fourth loop of the fast way: rewrites packets, and counts them.
//!
//! **Invariant:** a packet whose bytes cannot be rewritten is left unchanged.
//!
//! Not here: checksums (`nat`) and outer headers (`forward::rewrite`).

use super::follow::{FastFamily, PacketHead};
use super::nat;
use super::record::{HEAD_V4, HEAD_V6, Record};
use crate::flow::{BackendId, Direction, FlowMode, HotFlow, HotFlows};
use crate::forward::engine::Engine;
use crate::forward::observer::{Observe, PacketFlow, PacketOutcome};
use crate::forward::rewrite::{InnerPacket, Outer, encapsulate};
use crate::fragment::Identifications;
use crate::port::Port;
use crate::snapshot::{Exit, Snapshot};
use crate::wire::{Buffer, TupleKey, WireKey};

/// How the packets of a family are rewritten.
pub(super) trait Rewritten: FastFamily {
    /// Whether routers may fragment the packet.
    fn may_fragment(head: &Self::Head) -> bool;
    /// Replaces addresses and ports, and the identification if there is another one, decrements the hop limit, and
    /// updates all checksums.
    fn rewrite(head: &mut Self::Head, to: &Self::Key, is_udp: bool, identification: Option<u16>);
    /// Decrements the hop limit only.
    fn lower_hop_limit(head: &mut Self::Head);
}

impl Rewritten for u32 {
    #[inline(always)]
    fn may_fragment(head: &[u8; HEAD_V4]) -> bool {
        head[6] & 0x40 == 0
    }

    #[inline(always)]
    fn rewrite(head: &mut [u8; HEAD_V4], to: &WireKey<3>, is_udp: bool, identification: Option<u16>) {
        let from = Self::key(head);
        nat::rewrite_v4(head, &from, to, is_udp, identification);
    }

    #[inline(always)]
    fn lower_hop_limit(head: &mut [u8; HEAD_V4]) {
        nat::lower_ttl(head);
    }
}

impl Rewritten for u128 {
    #[inline(always)]
    fn may_fragment(_: &[u8; HEAD_V6]) -> bool {
        false
    }

    #[inline(always)]
    fn rewrite(head: &mut [u8; HEAD_V6], to: &WireKey<9>, is_udp: bool, _: Option<u16>) {
        let from = Self::key(head);
        nat::rewrite_v6(head, &from, to, is_udp);
    }

    #[inline(always)]
    fn lower_hop_limit(head: &mut [u8; HEAD_V6]) {
        nat::lower_hop_limit(head);
    }
}

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// The fourth loop, for the packets of one family.
    #[inline(never)]
    pub(super) fn rewrite<A: Rewritten>(
        &mut self,
        snapshot: &Snapshot,
        burst: &mut [P::Buffer],
        records: &[Record],
        ways: &mut [u8],
    ) {
        let mut hits = 0;
        let counters = self.counters.by_backend();
        let flows = A::split(&mut self.tables).0.hot_parts();
        let routes = snapshot.routes();
        for ((buffer, record), way) in burst.iter_mut().zip(records).zip(ways) {
            if record.family() != A::RECORD {
                continue;
            }
            let Some(exit) = routes.exit(record.exit) else { continue };
            if one::<A>(&flows, snapshot, &mut self.identifications, buffer, record, exit).is_none() {
                continue;
            }
            if let Some(counters) = counters.get(BackendId::unpacked(record.backend).slot as usize) {
                counters.forwarded(record.candidate.entry().1 == Direction::ToClient, record.packet_len);
            }
            self.observer.observe(buffer, PacketOutcome::Forward(exit.port), || belongs::<A>(&flows, record));
            hits += 1;
            *way = exit.port.0;
        }
        self.tally.hits += hits;
    }
}

/// The flow of a packet, for observers.
fn belongs<A: FastFamily>(flows: &HotFlows<'_, A::Key>, record: &Record) -> Option<PacketFlow> {
    let flow = flows.flows.get(record.candidate.entry().0)?;
    let tuple = flow.key(Direction::ToBackend).tuple(record.protocol());
    Some(PacketFlow {
        vip: tuple.destination.ip(),
        port: tuple.destination_port,
        protocol: tuple.protocol,
        backend: BackendId::unpacked(record.backend),
    })
}

/// Rewrites one packet.
#[inline(always)]
fn one<A: Rewritten>(
    flows: &HotFlows<'_, A::Key>,
    snapshot: &Snapshot,
    identifications: &mut Identifications,
    buffer: &mut impl Buffer,
    record: &Record,
    exit: &Exit,
) -> Option<()> {
    let (index, direction) = record.candidate.entry();
    let flow = flows.flows.get(index)?;
    match flow.mode() {
        FlowMode::Nat | FlowMode::Dnat => {
            let head = framed::<A>(buffer, exit, record)?;
            let identification = match A::may_fragment(head) {
                true => Some(identification::<A>(identifications, flow, record)),
                false => None,
            };
            let to = flow.key(direction.opposite()).reversed();
            A::rewrite(head, &to, record.is_udp(), identification);
            Some(())
        }
        FlowMode::Dsr => {
            A::lower_hop_limit(framed::<A>(buffer, exit, record)?);
            Some(())
        }
        mode => {
            let backend = flow.key(Direction::ToClient).tuple(record.protocol()).source;
            into_tunnel::<A>(snapshot, identifications, buffer, record, (mode, backend), exit)
        }
    }
}

/// The identification of a packet that may be fragmented on its way: the gateway's own, since packets of many clients
/// have one source (RFC 6864 section 5.3).
#[inline(never)]
#[allow(clippy::cast_possible_truncation)] // of IPv4 16 bits
fn identification<A: FastFamily>(identifications: &mut Identifications, flow: &HotFlow<A::Key>, record: &Record) -> u16 {
    let (_, direction) = record.candidate.entry();
    let to = flow.key(direction.opposite()).reversed().tuple(record.protocol());
    identifications.next(to.source, to.destination, to.protocol) as u16
}

/// Puts the link header of the exit before a packet, and removes the bytes after it: with them it might exceed the MTU.
/// Returns the head of the packet.
#[inline(always)]
fn framed<'b, A: FastFamily>(buffer: &'b mut impl Buffer, exit: &Exit, record: &Record) -> Option<&'b mut A::Head> {
    let (offset, wanted) = (usize::from(record.network_offset), exit.link_bytes());
    if wanted != offset {
        move_start(buffer, offset, wanted)?;
    }
    if usize::from(record.frame_len) > offset + usize::from(record.packet_len) {
        let _ = buffer.resize(wanted + usize::from(record.packet_len)); // it gets shorter, so there is room
    }
    let frame = buffer.bytes_mut();
    exit.write_link(frame);
    A::Head::of_mut(frame, wanted)
}

/// Moves the start of a frame, so that a link header of `wanted` bytes fits before the packet at `offset`.
#[inline(never)]
fn move_start(buffer: &mut impl Buffer, offset: usize, wanted: usize) -> Option<()> {
    match wanted.checked_sub(offset) {
        // A received frame has room for tags.
        Some(more) => buffer.prepend(more).then_some(()),
        None => {
            buffer.trim_front(offset - wanted);
            Some(())
        }
    }
}

/// Encapsulates a packet to a backend at an address, which is 0 where it is of the other family.
#[inline(never)]
fn into_tunnel<A: Rewritten>(
    snapshot: &Snapshot,
    identifications: &mut Identifications,
    buffer: &mut impl Buffer,
    record: &Record,
    (mode, backend): (FlowMode, A),
    exit: &Exit,
) -> Option<()> {
    if backend == A::default() {
        return None;
    }
    let outer = Outer::towards(backend.ip(), mode, exit, record.hash, &snapshot.tunnels)?;
    if record.packet_len > outer.mtu {
        return None;
    }
    let may_fragment = A::may_fragment(A::Head::of_mut(buffer.bytes_mut(), record.network_offset.into())?);
    let identification = outer.identification(may_fragment, record.protocol(), identifications);
    let (network_offset, packet_len) = (record.network_offset.into(), record.packet_len);
    let inner = InnerPacket { network_offset, packet_len, identification };
    encapsulate::<A>(buffer, inner, &outer, exit).then_some(())
}
