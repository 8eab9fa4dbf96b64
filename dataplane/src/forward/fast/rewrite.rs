//! Checks a packet against its flow (`follow`), rewrites it, and counts it.
//!
//! **Invariant:** a packet whose bytes cannot be rewritten is left unchanged.
//!
//! Not here: the loops over packets (`forward`), checksums (`nat`) and outer headers (`outer`, `forward::rewrite`).

use std::net::{Ipv4Addr, Ipv6Addr};

use super::follow::{FastFamily, Follow, InPlaceScope, PacketHead, Passage, Rewrites, Scope};
use super::nat;
use super::outer::{self, OuterFields};
use super::progress::Passed;
use super::record::{HEAD_V4, HEAD_V6, Record, UNTAGGED, bit_of};
use crate::flow::{BackendId, Direction, FlowMode, HotFlow, HotFlows};
use crate::forward::observer::{Observe, PacketFlow, PacketOutcome};
use crate::forward::rewrite::{InnerPacket, Outer, bytes_of_same_sum, encapsulate};
use crate::fragment::Identifications;
use crate::port::PortIndex;
use crate::snapshot::{Exit, Snapshot, Tunnels, source_of};
use crate::stats::{BackendCounters, COUNTER_SLOTS};
use crate::wire::{Buffer, Ipv4, Ipv6, TupleKey, WireKey};

/// How the packets of a family are rewritten.
pub(super) trait Rewritten: FastFamily {
    /// Replaces addresses and ports by those of packets in the opposite direction to `replies`, and the identification if
    /// there is another one, decrements the hop limit, and updates all checksums. `change` is [`HotFlow::change_of_sum`].
    fn rewrite(
        head: &mut Self::Head,
        replies: &Self::Key,
        change: impl FnOnce() -> u64,
        is_udp: bool,
        identification: Option<u16>,
    );
    /// Decrements the hop limit only.
    fn lower_hop_limit(head: &mut Self::Head);

    /// Whether routers fragment packets that permit it.
    const ROUTERS_FRAGMENT: bool;
    /// The IP header of an outer packet, bytes.
    const HEADER: usize;
    /// An outer source address of a tunnel.
    type Source: Copy;
    /// Those of tunnels through a port, of which [`source_of`] selects one.
    fn tunnel_sources(tunnels: &Tunnels, port: PortIndex) -> &[Self::Source];
    /// The [`bytes_of_same_sum`] of a packet; `None` if there are none but outer headers need them.
    fn inner_sum(head: &Self::Head) -> Option<[u8; 8]>;
    /// Writes the outer headers before a packet to the source of a key, see `outer`.
    fn write_outer(frame: &mut [u8], source: Self::Source, to: &Self::Key, fields: &OuterFields) -> Option<()>;
}

impl Rewritten for u32 {
    #[inline(always)]
    fn rewrite(
        head: &mut [u8; HEAD_V4],
        replies: &WireKey<3>,
        _: impl FnOnce() -> u64,
        is_udp: bool,
        identification: Option<u16>,
    ) {
        nat::rewrite_v4(head, replies, is_udp, identification);
    }

    #[inline(always)]
    fn lower_hop_limit(head: &mut [u8; HEAD_V4]) {
        nat::lower_ttl(head);
    }

    const ROUTERS_FRAGMENT: bool = true;
    const HEADER: usize = Ipv4::BYTES as usize;
    type Source = Ipv4Addr;

    #[inline(always)]
    fn tunnel_sources(tunnels: &Tunnels, port: PortIndex) -> &[Ipv4Addr] {
        tunnels.sources_v4(port)
    }

    #[inline(always)]
    fn inner_sum(_: &[u8; HEAD_V4]) -> Option<[u8; 8]> {
        Some([0; 8])
    }

    #[inline(always)]
    fn write_outer(frame: &mut [u8], source: Ipv4Addr, to: &WireKey<3>, fields: &OuterFields) -> Option<()> {
        outer::write_v4(frame, source.octets(), to.source(), fields)
    }
}

impl Rewritten for u128 {
    #[inline(always)]
    fn rewrite(head: &mut [u8; HEAD_V6], replies: &WireKey<9>, change: impl FnOnce() -> u64, is_udp: bool, _: Option<u16>) {
        nat::rewrite_v6(head, replies, change(), is_udp);
    }

    #[inline(always)]
    fn lower_hop_limit(head: &mut [u8; HEAD_V6]) {
        nat::lower_hop_limit(head);
    }

    const ROUTERS_FRAGMENT: bool = false;
    const HEADER: usize = Ipv6::BYTES as usize;
    type Source = Ipv6Addr;

    #[inline(always)]
    fn tunnel_sources(tunnels: &Tunnels, port: PortIndex) -> &[Ipv6Addr] {
        tunnels.sources_v6(port)
    }

    #[inline(always)]
    fn inner_sum(head: &[u8; HEAD_V6]) -> Option<[u8; 8]> {
        bytes_of_same_sum(head)
    }

    #[inline(always)]
    fn write_outer(frame: &mut [u8], source: Ipv6Addr, to: &WireKey<9>, fields: &OuterFields) -> Option<()> {
        outer::write_v6(frame, source.octets(), to.source(), fields)
    }
}

/// What rewriting a packet anywhere needs.
pub(super) struct Writer<'e, O> {
    pub(super) snapshot: &'e Snapshot,
    pub(super) identifications: &'e mut Identifications,
    pub(super) counters: &'e [BackendCounters; COUNTER_SLOTS],
    pub(super) observer: &'e mut O,
}

impl<O> Writer<'_, O> {
    /// Rewrites a packet and counts it. Returns the port by which it leaves; `None` if it is left, unchanged.
    #[inline(always)]
    pub(super) fn packet<A: Rewritten, B: Buffer>(
        &mut self,
        buffer: &mut B,
        record: &Record,
        &Passage { flow, direction, exit }: &Passage<'_, '_, A::Key>,
    ) -> Option<PortIndex>
    where
        O: Observe<B>,
    {
        if flow.mode().is_tunnel() {
            let backend = flow.key(Direction::ToClient).tuple(record.protocol()).source;
            into_tunnel::<A>(self.snapshot, self.identifications, buffer, record, (flow.mode(), backend), exit)?;
        } else {
            let head = framed::<A>(buffer, exit, record)?;
            match flow.mode() {
                FlowMode::Dsr => A::lower_hop_limit(head),
                _ => {
                    let replies = flow.key(direction.opposite());
                    let identification = identification::<A>(self.identifications, replies, record);
                    A::rewrite(head, replies, || flow.change_of_sum(direction), record.is_udp(), identification);
                }
            }
            buffer.truncate(exit.link_bytes() + usize::from(record.shape.packet_len));
        }
        count::<A>(self.counters, flow, direction, record);
        self.observer.observe(buffer, PacketOutcome::Forward(exit.port), || Some(belongs::<A>(flow, record)));
        Some(exit.port)
    }
}

/// What the third loop needs of the engine.
pub(super) struct Forwarding<'e, A: FastFamily, O> {
    /// A copy, so that a loop keeps its fields in registers, or loads each by one instruction.
    pub(super) follow: Follow<'e>,
    pub(super) flows: HotFlows<'e, A::Key>,
    pub(super) counters: &'e [BackendCounters; COUNTER_SLOTS],
    pub(super) identifications: &'e mut Identifications,
    pub(super) observer: &'e mut O,
}

impl<A: Rewritten, O> Forwarding<'_, A, O> {
    /// Forwards those packets of a part, from a position on, that can be rewritten where they are.
    #[inline(always)]
    pub(super) fn each_in_place<B: Buffer, S: InPlaceScope>(
        &mut self,
        (part, records, position): (&mut [B], &mut [Record], usize),
        passed: &mut Passed,
    ) where
        O: Observe<B>,
    {
        let (mut left, mut others, mut ports) = (passed.left, 0, passed.ports);
        for (position, (buffer, record)) in (position..).zip(part.iter_mut().zip(records)) {
            let is_next = record.is_of(A::RECORD) && left >> (record.hash & 63) & 1 == 0;
            if is_next && let Some(port) = self.in_place::<_, S>(buffer, record) {
                record.shape.way = port;
                ports.add(port);
            } else {
                // Of a packet that is not recognised, the flow is not known.
                left |= if record.is_of(A::RECORD) { bit_of(record.hash) } else { 0 };
                others |= 1 << position;
            }
        }
        *passed = Passed { others: passed.others | others, left, ports };
    }

    /// Decides on one packet that can be rewritten where it is, rewrites it and counts it. Returns the port by which it
    /// leaves; `None` if it does not pass or needs a call, unchanged.
    #[inline(always)]
    fn in_place<B: Buffer, S: InPlaceScope>(&mut self, buffer: &mut B, record: &Record) -> Option<u8>
    where
        O: Observe<B>,
    {
        if !S::TAGS && usize::from(record.shape.network_offset) != UNTAGGED {
            return None;
        }
        let offset = if S::TAGS { record.shape.network_offset.into() } else { UNTAGGED };
        let (link, packet) = buffer.bytes_mut().split_at_mut_checked(offset)?;
        let head = A::Head::of_mut(packet, 0)?;
        let Passage { flow, direction, exit } = self.follow.packet::<A, S>(&mut self.flows, Some(head), record)?;
        if offset != exit.link_bytes() {
            return None;
        }
        if S::REWRITES == Rewrites::None {
            A::lower_hop_limit(head);
        } else {
            let replies = flow.key(direction.opposite());
            let is_fragmentable = S::FRAGMENTABLE && record.shape.may_fragment();
            let identification = if is_fragmentable { identification::<A>(self.identifications, replies, record) } else { None };
            A::rewrite(head, replies, || flow.change_of_sum(direction), record.is_udp(), identification);
        }
        if S::TAGS {
            exit.write_link(link);
        } else {
            let _ = exit.write_addresses(link); // a link header without tags has room for them
        }
        if record.shape.is_padded() {
            buffer.truncate(offset + usize::from(record.shape.packet_len));
        }
        count::<A>(self.counters, flow, direction, record);
        self.observer.observe(buffer, PacketOutcome::Forward(exit.port), || Some(belongs::<A>(flow, record)));
        meter::<A, B, O>(&mut self.flows, record, direction);
        Some(exit.port.0)
    }

    /// Forwards those packets of a part, from a position on, that go into tunnels, at the positions that are bits of
    /// `positions`, of which the lowest is the first one's.
    #[inline(always)]
    pub(super) fn each_into_tunnels<B: Buffer, S: Scope>(
        &mut self,
        (part, records, position): (&mut [B], &mut [Record], usize),
        positions: u32,
        passed: &mut Passed,
    ) where
        O: Observe<B>,
    {
        for (at, (buffer, record)) in part.iter_mut().zip(records).enumerate() {
            if positions >> at & 1 == 0 {
                continue;
            }
            let is_next = record.is_of(A::RECORD) && passed.left >> (record.hash & 63) & 1 == 0;
            if is_next && let Some(port) = self.through_tunnel::<_, S>(buffer, record) {
                record.shape.way = port;
                passed.ports.add(port);
            } else {
                // Of a packet that is not recognised, the flow is not known.
                passed.left |= if record.is_of(A::RECORD) { bit_of(record.hash) } else { 0 };
                passed.others |= 1 << (position + at);
            }
        }
    }

    /// As [`Forwarding::in_place`], for a packet into a tunnel to an address of its own family, over an untagged link.
    #[inline(always)]
    fn through_tunnel<B: Buffer, S: Scope>(&mut self, buffer: &mut B, record: &Record) -> Option<u8>
    where
        O: Observe<B>,
    {
        let offset = usize::from(record.shape.network_offset);
        let head = A::Head::of(buffer.bytes(), offset)?;
        let Passage { flow, direction, exit } = self.follow.packet::<A, S>(&mut self.flows, Some(head), record)?;
        let (is_udp, to) = (flow.mode() == FlowMode::Gue, flow.key(Direction::ToClient));
        let tunnels = &self.follow.snapshot.tunnels;
        let source = tunnel_source(A::tunnel_sources(tunnels, exit.port), record, is_udp)?;
        let before = outer::bytes_before(A::HEADER, is_udp);
        let is_too_long = usize::from(record.shape.packet_len) + before - UNTAGGED > usize::from(exit.mtu);
        if is_too_long || exit.link_bytes() != UNTAGGED || record.shape.may_fragment() || to.has_no_source() {
            return None;
        }
        let inner_sum = if is_udp { A::inner_sum(head)? } else { [0; 8] };
        if !buffer.prepend(before.checked_sub(offset)?) {
            return None;
        }
        let fields = outer_fields(tunnels, record, is_udp, inner_sum);
        let frame = buffer.bytes_mut();
        exit.write_addresses(frame)?;
        A::write_outer(frame, source, to, &fields)?;
        // Not earlier: a short datagram has the length of a head by its padding only.
        if record.shape.is_padded() {
            buffer.truncate(before + usize::from(record.shape.packet_len));
        }
        count::<A>(self.counters, flow, direction, record);
        self.observer.observe(buffer, PacketOutcome::Forward(exit.port), || Some(belongs::<A>(flow, record)));
        meter::<A, B, O>(&mut self.flows, record, direction);
        Some(exit.port.0)
    }
}

/// The bits of a packet's hash by which its tunnel is chosen.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // some bits of a hash
fn entropy(record: &Record) -> u32 {
    (record.hash >> 32) as u32
}

/// The outer source address of a packet, of those of the port by which it leaves. Ports vary in UDP, addresses otherwise.
#[inline(always)]
pub(super) fn tunnel_source<S: Copy>(of_port: &[S], record: &Record, in_udp: bool) -> Option<S> {
    source_of(of_port, if in_udp { 0 } else { entropy(record) })
}

/// What the outer headers of a packet say.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // 14 bits
fn outer_fields(tunnels: &Tunnels, record: &Record, in_udp: bool, inner_sum: [u8; 8]) -> OuterFields {
    let entropy = entropy(record);
    OuterFields {
        packet_len: record.shape.packet_len,
        ports: in_udp.then_some([0xc000 | (entropy >> 18) as u16, tunnels.gue_destination_port]),
        flow_label: entropy & 0xf_ffff,
        inner_sum,
    }
}

/// Counts a packet that is forwarded.
#[inline(always)]
pub(super) fn count<A: FastFamily>(
    counters: &[BackendCounters; COUNTER_SLOTS],
    flow: &HotFlow<A::Key>,
    direction: Direction,
    record: &Record,
) {
    if let Some(counters) = counters.get(BackendId::counter_slot(flow.backend()).index()) {
        counters.forwarded(direction == Direction::ToClient, record.shape.packet_len);
    }
}

/// Counts a packet for its flow, if flows are metered.
#[inline(always)]
pub(super) fn meter<A: FastFamily, B, O: Observe<B>>(flows: &mut HotFlows<'_, A::Key>, record: &Record, direction: Direction) {
    if O::METERS {
        flows.meters.count(record.candidate.entry().0, direction, record.shape.packet_len);
    }
}

/// The flow of a packet, for observers.
pub(super) fn belongs<A: FastFamily>(flow: &HotFlow<A::Key>, record: &Record) -> PacketFlow {
    let tuple = flow.key(Direction::ToBackend).tuple(record.protocol());
    PacketFlow {
        vip: tuple.destination.ip(),
        port: tuple.destination_port,
        protocol: tuple.protocol,
        backend: BackendId::unpacked(flow.backend()),
    }
}

/// The new identification of a packet that may be fragmented on its way: the gateway's own, since packets of many clients
/// have one source (RFC 6864 section 5.3). `None` for other packets. It is sent in the opposite direction to `replies`.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // of IPv4 16 bits
pub(super) fn identification<A: Rewritten>(
    identifications: &mut Identifications,
    replies: &A::Key,
    record: &Record,
) -> Option<u16> {
    if !A::ROUTERS_FRAGMENT || !record.shape.may_fragment() {
        return None;
    }
    let replies = replies.tuple(record.protocol());
    Some(identifications.next(replies.destination, replies.source, replies.protocol) as u16)
}

/// Puts the link header of the exit before a packet. Returns the head of the packet.
#[inline(always)]
pub(super) fn framed<'b, A: FastFamily>(buffer: &'b mut impl Buffer, exit: &Exit, record: &Record) -> Option<&'b mut A::Head> {
    let (offset, wanted) = (usize::from(record.shape.network_offset), exit.link_bytes());
    if wanted != offset {
        move_start(buffer, offset, wanted)?;
    }
    let frame = buffer.bytes_mut();
    exit.write_link(frame);
    A::Head::of_mut(frame, wanted)
}

/// Moves the start of a frame, so that a link header of `wanted` bytes fits before the packet at `offset`.
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
    if record.shape.packet_len > outer.mtu {
        return None;
    }
    let identification = outer.identification(record.shape.may_fragment(), record.protocol(), identifications);
    let (network_offset, packet_len) = (record.shape.network_offset.into(), record.shape.packet_len);
    let inner = InnerPacket { network_offset, packet_len, identification };
    encapsulate::<A>(buffer, inner, &outer, exit).then_some(())
}
