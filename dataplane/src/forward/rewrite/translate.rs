//! Addresses, ports, hop limit and checksums of packets of flows: of one packet by words, of eight with a word of each in one
//! register. Words and sums are in the byte order of the machine: one's complement addition does not depend on it (RFC
//! 1071 section 2.B).
//!
//! **Invariant:** checksums equal those of a full computation bit for bit, a wrong checksum stays wrong (see
//! `wire::checksum`), and eight packets at a time get the bytes that each gets alone.
//!
//! Not here: which addresses and ports, the link header, and SCTP (`nat`).

use crate::flow::{Direction, HotFlow};
use crate::fragment::Identifications;
use crate::wire::checksum::{HOP_DELTA, finish};
use crate::wire::plain::head::{HeadV4, HeadV6, Starts, tcp, udp, v4, v6};
use crate::wire::processor::{Avx2, LANES, Lanes};
use crate::wire::{TupleKey, WideFamily, WireKey};

/// What a decremented hop limit adds to the sum of an IPv4 header, in the byte order of the machine.
const HOP: u16 = u16::from_ne_bytes(HOP_DELTA.to_be_bytes());

/// The identification that a packet gets in place of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::forward) struct NewIdentification(pub(in crate::forward) Option<u16>);

/// A family whose packets are rewritten where they are.
pub(in crate::forward) trait Translated: WideFamily {
    /// Gives a packet the addresses and ports of packets in the opposite direction to `replies`, decrements its hop limit, and
    /// updates all checksums. The IP header has at least 20 bytes in IPv4, 40 in IPv6, the transport header at least 20 in TCP,
    /// 8 in UDP. `change` is [`HotFlow::change_of_sum`].
    fn translate(
        network: &mut [u8],
        transport: &mut [u8],
        replies: &Self::Key,
        change: impl FnOnce() -> u64,
        is_udp: bool,
        identification: NewIdentification,
    );
    /// Decrements the hop limit only, in an IP header.
    fn lower_hop_limit(network: &mut [u8]);
}

impl Translated for u32 {
    #[inline(always)]
    fn translate(
        network: &mut [u8],
        transport: &mut [u8],
        replies: &WireKey<3>,
        _: impl FnOnce() -> u64,
        is_udp: bool,
        identification: NewIdentification,
    ) {
        let mut old = [0; 8];
        old.copy_from_slice(&network[v4::KEY..v4::TRANSPORT]);
        let old_ports = u32::from_ne_bytes([transport[0], transport[1], transport[2], transport[3]]);
        let (new, new_ports) = replies.halves();
        let (new, new_ports) = (new.rotate_left(32), new_ports.rotate_left(16));
        let addresses = folded(add(!u64::from_ne_bytes(old), new));
        let sum = addresses + change_header(network, identification) + u64::from(!word(network, v4::CHECKSUM));
        set_word(network, v4::CHECKSUM, finish(sum));
        network[v4::KEY..v4::TRANSPORT].copy_from_slice(&new.to_ne_bytes());
        transport[..4].copy_from_slice(&new_ports.to_ne_bytes());
        let ports = u64::from(!old_ports) + u64::from(new_ports);
        update_transport(transport, addresses + ports, is_udp);
    }

    #[inline(always)]
    fn lower_hop_limit(network: &mut [u8]) {
        let change = change_header(network, NewIdentification(None));
        let checksum = finish(change + u64::from(!word(network, v4::CHECKSUM)));
        set_word(network, v4::CHECKSUM, checksum);
    }
}

impl Translated for u128 {
    /// Routers never fragment packets, so none gets an identification.
    #[inline(always)]
    fn translate(
        network: &mut [u8],
        transport: &mut [u8],
        replies: &WireKey<9>,
        change: impl FnOnce() -> u64,
        is_udp: bool,
        _: NewIdentification,
    ) {
        Self::lower_hop_limit(network);
        let (addresses, ports) = replies.reversed().halves();
        network[v6::KEY..v6::TRANSPORT].copy_from_slice(&addresses);
        transport[..4].copy_from_slice(&ports.to_ne_bytes());
        update_transport(transport, change(), is_udp);
    }

    #[inline(always)]
    fn lower_hop_limit(network: &mut [u8]) {
        network[v6::HOP_LIMIT] = network[v6::HOP_LIMIT].wrapping_sub(1);
    }
}

/// The word at an offset, in the byte order of the machine.
#[inline(always)]
fn word(head: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([head[at], head[at + 1]])
}

#[inline(always)]
fn set_word(head: &mut [u8], at: usize, word: u16) {
    [head[at], head[at + 1]] = word.to_ne_bytes();
}

/// The sum of the halves of a sum.
#[inline(always)]
const fn folded(sum: u64) -> u64 {
    (sum & u32::MAX as u64) + (sum >> 32)
}

/// The sum in which the carry counts as 1.
#[inline(always)]
fn add(a: u64, b: u64) -> u64 {
    let (sum, carry) = a.overflowing_add(b);
    // After a carry the sum is below 2^64 - 1.
    sum + u64::from(carry)
}

/// Decrements the TTL and sets the identification. Returns what both add to the sum of the header.
#[inline(always)]
fn change_header(head: &mut [u8], NewIdentification(identification): NewIdentification) -> u64 {
    head[v4::HOPS] = head[v4::HOPS].wrapping_sub(1);
    let Some(identification) = identification else { return HOP.into() };
    let (old, new) = (word(head, v4::IDENTIFICATION), u16::from_ne_bytes(identification.to_be_bytes()));
    set_word(head, v4::IDENTIFICATION, new);
    u64::from(HOP) + u64::from(!old) + u64::from(new)
}

/// Updates the checksum of TCP or UDP. A UDP checksum of 0 means "none" and stays; a computed 0 is sent as 0xffff (RFC
/// 768).
#[inline(always)]
fn update_transport(head: &mut [u8], change: u64, is_udp: bool) {
    let updated = |old: u16| finish(change + u64::from(!old));
    if !is_udp {
        return set_word(head, tcp::CHECKSUM, updated(word(head, tcp::CHECKSUM)));
    }
    match word(head, udp::CHECKSUM) {
        0 => {}
        old => set_word(
            head,
            udp::CHECKSUM,
            match updated(old) {
                0 => 0xffff,
                new => new,
            },
        ),
    }
}

/// The lower halves.
const HALF: u32 = 0xffff;

/// Eight packets of flows of one family.
pub(in crate::forward) struct EightOfFlows<'f, K: TupleKey> {
    pub(in crate::forward) flows: [&'f HotFlow<K>; LANES],
    /// All ones for packets to the client.
    pub(in crate::forward) are_to_client: Lanes,
    /// All ones for packets of UDP.
    pub(in crate::forward) is_udp: Lanes,
    /// All ones for packets that get another identification.
    pub(in crate::forward) is_renumbered: Lanes,
}

impl<K: TupleKey> EightOfFlows<'_, K> {
    /// The direction of a packet.
    #[inline(always)]
    fn direction(&self, lane: usize) -> Direction {
        if self.are_to_client.bits() >> lane & 1 == 0 { Direction::ToBackend } else { Direction::ToClient }
    }
}

/// A family of which eight packets are compared with their flows and rewritten at a time.
pub(in crate::forward) trait TranslatedEight: Translated {
    /// What is read of eight packets and of their flows.
    type Read: Copy;

    /// Reads eight packets and their flows.
    fn read<const AT: usize>(avx2: Avx2, eight: &EightOfFlows<'_, Self::Key>, starts: &Starts<'_, AT, Self::Head>) -> Self::Read;
    /// All ones in all lanes if all packets have the addresses and ports of their flows.
    fn are_of_flows(avx2: Avx2, read: &Self::Read) -> Lanes;
    /// See [`HotFlow::seen_word`].
    fn seen(read: &Self::Read) -> Lanes;
    /// As [`Translated::translate`].
    fn translate_eight<const AT: usize>(
        avx2: Avx2,
        eight: &EightOfFlows<'_, Self::Key>,
        read: &Self::Read,
        starts: &mut Starts<'_, AT, Self::Head>,
        identifications: &mut Identifications,
    );
    /// As [`Translated::lower_hop_limit`].
    fn lower_hop_limits<const AT: usize>(avx2: Avx2, read: &Self::Read, starts: &mut Starts<'_, AT, Self::Head>);
}

/// The sums of both halves of words.
#[inline(always)]
pub(in crate::forward) fn halves(avx2: Avx2, words: Lanes) -> Lanes {
    (words & avx2.splat(HALF)) + words.right::<16>()
}

/// What other words add to the sums of checksums.
#[inline(always)]
fn changed(avx2: Avx2, old: Lanes, new: Lanes) -> Lanes {
    halves(avx2, new) + halves(avx2, old ^ avx2.splat(u32::MAX))
}

/// The checksums for sums of few halves.
#[inline(always)]
pub(in crate::forward) fn finished(avx2: Avx2, sums: Lanes) -> Lanes {
    halves(avx2, halves(avx2, sums)) ^ avx2.splat(HALF)
}

/// Checksums of UDP as they are sent: in place of a computed 0, which would mean "none", 0xffff (RFC 768).
#[inline(always)]
pub(in crate::forward) fn sent(avx2: Avx2, computed: Lanes) -> Lanes {
    computed.or_where(computed.equals(avx2.splat(0)), avx2.splat(HALF))
}

/// The checksums of TCP or UDP after changes that add `sums`. A UDP checksum of 0 means "none" and stays.
#[inline(always)]
fn updated(avx2: Avx2, checksums: Lanes, sums: Lanes, is_udp: Lanes) -> Lanes {
    let (zero, half) = (avx2.splat(0), avx2.splat(HALF));
    let computed = finished(avx2, sums + (checksums ^ half));
    let of_udp = sent(avx2, computed).or_where(checksums.equals(zero), zero);
    computed.or_where(is_udp, of_udp)
}

/// TTL and protocol with one hop less, and the checksum of the header with it and with other changes.
#[inline(always)]
fn hops_after(avx2: Avx2, hops: Lanes, changes: Lanes) -> Lanes {
    let before = (hops ^ avx2.splat(u32::MAX)).right::<16>();
    let checksum = finished(avx2, changes + before + avx2.splat(HOP.into()));
    (hops - avx2.splat(1)).with_upper(checksum.left::<16>())
}

/// Addresses and ports of eight packets as they stand in these.
#[derive(Clone, Copy)]
struct Keys {
    source: Lanes,
    destination: Lanes,
    ports: Lanes,
}

impl Keys {
    /// Those of another key where a mask has all ones.
    #[inline(always)]
    fn or_where(self, mask: Lanes, other: Self) -> Self {
        Self {
            source: self.source.or_where(mask, other.source),
            destination: self.destination.or_where(mask, other.destination),
            ports: self.ports.or_where(mask, other.ports),
        }
    }

    #[inline(always)]
    fn equals(self, other: Self) -> Lanes {
        self.source.equals(other.source) & self.destination.equals(other.destination) & self.ports.equals(other.ports)
    }
}

/// See [`TranslatedEight::Read`].
#[derive(Clone, Copy)]
pub(in crate::forward) struct ReadV4 {
    /// TTL, protocol and checksum.
    hops: Lanes,
    keys: Keys,
    /// The checksums of TCP or UDP, in the lower halves.
    checksums: Lanes,
    /// The keys of the flows in the direction of each packet, and in the other one.
    same: Keys,
    replies: Keys,
    seen: Lanes,
}

impl TranslatedEight for u32 {
    type Read = ReadV4;

    #[inline(always)]
    fn read<const AT: usize>(avx2: Avx2, eight: &EightOfFlows<'_, WireKey<3>>, starts: &Starts<'_, AT, HeadV4>) -> ReadV4 {
        let [hops, source, destination, ports] = avx2.columns(starts.each_ref().map(|start| start.bytes_at(AT + v4::HOPS)));
        let [of_udp, _, _, of_tcp] = avx2.columns(starts.each_ref().map(|start| start.bytes_at(AT + v4::TRANSPORT + 4)));
        let checksums = (of_tcp & avx2.splat(HALF)).or_where(eight.is_udp, of_udp.right::<16>());
        let parts = eight.flows.map(|flow| {
            let ([a, b, c], [d, e, f]) = (flow.key(Direction::ToBackend).all(), flow.key(Direction::ToClient).all());
            [[a, b, c, d], [e, f, flow.backend(), flow.seen_word()]]
        });
        let [a, b, c, d] = avx2.columns(parts.map(|[part, _]| zerocopy::transmute!(part)));
        let [e, f, _, seen] = avx2.columns(parts.map(|[_, part]| zerocopy::transmute!(part)));
        let to_backend = Keys { source: a, destination: b, ports: c };
        let to_client = Keys { source: d, destination: e, ports: f };
        ReadV4 {
            hops,
            keys: Keys { source, destination, ports },
            checksums,
            same: to_backend.or_where(eight.are_to_client, to_client),
            replies: to_client.or_where(eight.are_to_client, to_backend),
            seen,
        }
    }

    #[inline(always)]
    fn are_of_flows(_: Avx2, read: &ReadV4) -> Lanes {
        read.keys.equals(read.same)
    }

    #[inline(always)]
    fn seen(read: &ReadV4) -> Lanes {
        read.seen
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // the lower half of a word
    fn translate_eight<const AT: usize>(
        avx2: Avx2,
        eight: &EightOfFlows<'_, WireKey<3>>,
        read: &ReadV4,
        starts: &mut Starts<'_, AT, HeadV4>,
        identifications: &mut Identifications,
    ) {
        const TCP: usize = v4::TRANSPORT + tcp::CHECKSUM;
        const UDP: usize = v4::TRANSPORT + udp::CHECKSUM;
        let ReadV4 { hops, keys, checksums, replies, .. } = *read;
        let new = Keys { source: replies.destination, destination: replies.source, ports: replies.ports.exchanged() };
        let changes = if eight.is_renumbered.bits() == 0 {
            avx2.splat(0)
        } else {
            let protocol = hops.right::<8>() & avx2.splat(0xff);
            renumber(avx2, [new.source, new.destination, protocol], eight.is_renumbered, starts, identifications)
        };
        let addresses = changed(avx2, keys.source, new.source) + changed(avx2, keys.destination, new.destination);
        let hops = hops_after(avx2, hops, addresses + changes);
        let sums = addresses + changed(avx2, keys.ports, new.ports);
        let checksums = updated(avx2, checksums, sums, eight.is_udp).to_array();
        let rows = Lanes::rows([hops, new.source, new.destination, new.ports]);
        for (start, row) in starts.iter_mut().zip(rows) {
            start.head[v4::HOPS..v4::HOPS + 16].copy_from_slice(&row.bytes());
        }
        let udp = eight.is_udp.bits();
        let any_udp = udp != 0; // so that there is a loop for TCP alone
        for (lane, start) in starts.iter_mut().enumerate() {
            let place = if any_udp && udp >> lane & 1 != 0 { UDP } else { TCP };
            start.head[place..place + 2].copy_from_slice(&(checksums[lane] as u16).to_le_bytes());
        }
    }

    #[inline(always)]
    fn lower_hop_limits<const AT: usize>(avx2: Avx2, read: &ReadV4, starts: &mut Starts<'_, AT, HeadV4>) {
        let hops = hops_after(avx2, read.hops, avx2.splat(0)).to_array();
        for (start, hops) in starts.iter_mut().zip(hops) {
            start.head[v4::HOPS..v4::HOPS + 4].copy_from_slice(&hops.to_le_bytes());
        }
    }
}

/// Gives some of eight packets of IPv4 the identifications of their new source, destination and protocol. Returns what that
/// adds to the sums of their headers.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // the lower half of a word
fn renumber<const AT: usize>(
    avx2: Avx2,
    [source, destination, protocol]: [Lanes; 3],
    is_renumbered: Lanes,
    starts: &mut Starts<'_, AT, HeadV4>,
    identifications: &mut Identifications,
) -> Lanes {
    let wanted = is_renumbered.bits();
    let numbers = identifications.next_of_eight(avx2, [source, destination], protocol, wanted).lower_number();
    let (mut olds, news) = ([0; LANES], numbers.to_array());
    for (lane, start) in starts.iter_mut().enumerate().filter(|(lane, _)| wanted >> lane & 1 != 0) {
        let place = &mut start.head[v4::IDENTIFICATION..v4::IDENTIFICATION + 2];
        olds[lane] = u32::from(u16::from_le_bytes([place[0], place[1]]));
        place.copy_from_slice(&(news[lane] as u16).to_le_bytes());
    }
    (numbers + (avx2.lanes(olds) ^ avx2.splat(HALF))) & is_renumbered
}

/// See [`TranslatedEight::Read`].
#[derive(Clone, Copy)]
pub(in crate::forward) struct ReadV6 {
    /// Bits in which the addresses of any packet differ from those of its flow: a word of all packets in each lane.
    other_addresses: Lanes,
    /// Those of the ports: a packet in each lane. All bits of both must be 0.
    other_ports: Lanes,
    seen: Lanes,
}

impl TranslatedEight for u128 {
    type Read = ReadV6;

    /// The addresses of each packet are in one register.
    #[inline(always)]
    fn read<const AT: usize>(avx2: Avx2, eight: &EightOfFlows<'_, WireKey<9>>, starts: &Starts<'_, AT, HeadV6>) -> ReadV6 {
        let mut other_addresses = avx2.splat(0);
        let mut other_ports = [0; LANES];
        for (lane, start) in starts.iter().enumerate() {
            let (addresses, ports) = WireKey::<9>::read_at(&start.head, v6::KEY).halves();
            let (of_flow, ports_of_flow) = eight.flows[lane].key(eight.direction(lane)).halves();
            other_addresses = other_addresses | avx2.words(addresses) ^ avx2.words(of_flow);
            other_ports[lane] = ports ^ ports_of_flow;
        }
        let seen = avx2.lanes(eight.flows.map(HotFlow::seen_word));
        ReadV6 { other_addresses, other_ports: avx2.lanes(other_ports), seen }
    }

    #[inline(always)]
    fn are_of_flows(avx2: Avx2, read: &ReadV6) -> Lanes {
        (read.other_addresses | read.other_ports).equals(avx2.splat(0))
    }

    #[inline(always)]
    fn seen(read: &ReadV6) -> Lanes {
        read.seen
    }

    /// There is no checksum of the header.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // the lower half of a word
    fn translate_eight<const AT: usize>(
        avx2: Avx2,
        eight: &EightOfFlows<'_, WireKey<9>>,
        _: &ReadV6,
        starts: &mut Starts<'_, AT, HeadV6>,
        _: &mut Identifications,
    ) {
        const TCP: usize = v6::TRANSPORT + tcp::CHECKSUM;
        const UDP: usize = v6::TRANSPORT + udp::CHECKSUM;
        let udp = eight.is_udp.bits();
        let any_udp = udp != 0; // so that there are loops for TCP alone
        let place = |lane: usize| if any_udp && udp >> lane & 1 != 0 { UDP } else { TCP };
        let mut checksums = [0; LANES];
        for (lane, start) in starts.iter().enumerate() {
            let at = place(lane);
            checksums[lane] = u32::from(u16::from_le_bytes([start.head[at], start.head[at + 1]]));
        }
        let half = avx2.splat(HALF);
        // 0xffff is 0 in one's complement. Added, it keeps the sum above 0, as for one packet: both fold to the same zero.
        let sums = avx2.lanes(eight.flows.map(HotFlow::checksum_change)) ^ eight.are_to_client & half;
        let checksums = updated(avx2, avx2.lanes(checksums), sums + half, eight.is_udp).to_array();
        for (lane, start) in starts.iter_mut().enumerate() {
            let (addresses, ports) = eight.flows[lane].key(eight.direction(lane).opposite()).halves();
            let (head, at) = (&mut start.head, place(lane));
            head[v6::HOP_LIMIT] = head[v6::HOP_LIMIT].wrapping_sub(1);
            head[v6::KEY..v6::KEY + 32].copy_from_slice(&avx2.words(addresses).rotated().to_bytes());
            head[v6::TRANSPORT..v6::TRANSPORT + 4].copy_from_slice(&ports.rotate_left(16).to_ne_bytes());
            head[at..at + 2].copy_from_slice(&(checksums[lane] as u16).to_le_bytes());
        }
    }

    #[inline(always)]
    fn lower_hop_limits<const AT: usize>(_: Avx2, _: &ReadV6, starts: &mut Starts<'_, AT, HeadV6>) {
        for start in starts {
            start.head[v6::HOP_LIMIT] = start.head[v6::HOP_LIMIT].wrapping_sub(1);
        }
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)] // bits of random words
mod tests {
    use zerocopy::{FromBytes, FromZeros, IntoBytes};

    use super::*;
    use crate::wire::plain::head::{Start, UNTAGGED};
    use crate::wire::{Address, Tuple, split_mix};
    use crate::workers::IdentificationBlocks;

    const ROUNDS: u64 = 2_000;

    /// A packet of a flow.
    #[derive(Clone, Copy)]
    struct OfFlow<A: TranslatedEight> {
        head: A::Head,
        is_to_client: bool,
        is_udp: bool,
        /// The checksum becomes 0, of UDP 0xffff.
        becomes_zero: bool,
    }

    impl<A: TranslatedEight> OfFlow<A> {
        fn direction(&self) -> Direction {
            if self.is_to_client { Direction::ToClient } else { Direction::ToBackend }
        }

        /// The place of the checksum in the head.
        fn place(&self) -> usize {
            A::NETWORK + if self.is_udp { udp::CHECKSUM } else { tcp::CHECKSUM }
        }

        fn checksum(&self) -> u16 {
            word(self.head.as_bytes(), self.place())
        }

        fn with_checksum(mut self, checksum: u16) -> Self {
            let place = self.place();
            set_word(self.head.as_mut_bytes(), place, checksum);
            self
        }

        /// The packet as one alone is translated.
        fn translated(mut self, flow: &HotFlow<A::Key>) -> Self {
            let direction = self.direction();
            let (network, transport) = A::parts(&mut self.head);
            let (replies, change) = (flow.key(direction.opposite()), || flow.change_of_sum(direction));
            A::translate(network, transport, replies, change, self.is_udp, NewIdentification(None));
            self
        }
    }

    fn bytes_of<const BYTES: usize>(seed: u64) -> [u8; BYTES] {
        std::array::from_fn(|at| split_mix(seed << 8 | at as u64) as u8)
    }

    fn key<A: Address>(seed: u64) -> A::Key {
        let [source, destination] = [0, 1].map(|end| A::from_wide(u128::from_le_bytes(bytes_of(seed << 4 | end))));
        let [source_port, destination_port] = [2, 3].map(|end| split_mix(seed << 4 | end) as u16);
        A::Key::of(&Tuple { source, destination, source_port, destination_port, protocol: 0 })
    }

    /// A flow, in one of four cases with the same sum on both sides, so that checksums change from one zero to the other at most.
    fn flow<A: Address>(seed: u64) -> HotFlow<A::Key> {
        let [to_backend, other] = [0, 1].map(|side| key::<A>(seed << 1 | side));
        HotFlow::between([&to_backend, &if seed.is_multiple_of(4) { to_backend.reversed() } else { other }])
    }

    /// A packet of the flow with any bytes but for the key and the checksum of TCP or UDP: each of its extremes, one that
    /// becomes 0, and any.
    fn packet<A: TranslatedEight>(seed: u64, flow: &HotFlow<A::Key>) -> OfFlow<A> {
        let [bits, old, ..] = bytes_of::<4>(seed);
        let mut bytes: [u8; 64] = bytes_of(seed << 1 | 1);
        // No hop limit of 0 arrives here.
        bytes[v4::HOPS] |= 1;
        bytes[v6::HOP_LIMIT] |= 1;
        let (is_to_client, is_udp) = (bits & 1 != 0, bits & 2 != 0);
        let mut packet = OfFlow { head: A::Head::new_zeroed(), is_to_client, is_udp, becomes_zero: false };
        let (addresses, ports) = flow.key(packet.direction()).words();
        let words = addresses.iter().chain([&ports]).flat_map(|word| word.to_ne_bytes());
        let end = A::NETWORK + size_of::<u32>();
        bytes[end - 4 * (addresses.len() + 1)..end].iter_mut().zip(words).for_each(|(byte, new)| *byte = new);
        packet.head = A::Head::read_from_prefix(&bytes).unwrap().0;
        match old % 4 {
            0 => packet.with_checksum(0),
            1 => packet.with_checksum(u16::MAX),
            2 => {
                // The one that the change takes away, of 16 bits in one's complement.
                let after_1 = packet.with_checksum(1).translated(flow).checksum();
                let becomes_zero = ((1 + 0xffff - u32::from(after_1)) % 0xffff) as u16;
                packet.becomes_zero = true;
                packet.with_checksum(if becomes_zero == 0 { u16::MAX } else { becomes_zero })
            }
            _ => packet,
        }
    }

    fn mask(avx2: Avx2, lanes: [bool; LANES]) -> Lanes {
        avx2.lanes(lanes.map(u32::from)).equals(avx2.splat(1))
    }

    /// Compares eight packets at a time with one at a time. Returns the number of checksums that became 0, of TCP and of UDP.
    fn compare<A: TranslatedEight>(avx2: Avx2) -> [usize; 2] {
        let mut identifications = Identifications::new(7, 0, 1, IdentificationBlocks::default());
        let mut zeros = [0; 2];
        for round in 0..ROUNDS {
            let flows: [_; LANES] = std::array::from_fn(|lane| flow::<A>(round << 3 | split_mix(round << 3 | lane as u64) & 7));
            let packets: [_; LANES] = std::array::from_fn(|lane| packet::<A>(round << 3 | lane as u64, &flows[lane]));
            let eight = EightOfFlows {
                flows: flows.each_ref(),
                are_to_client: mask(avx2, packets.map(|packet| packet.is_to_client)),
                is_udp: mask(avx2, packets.map(|packet| packet.is_udp)),
                is_renumbered: avx2.splat(0),
            };
            let mut starts = packets.map(|packet| Start { link: [0; UNTAGGED], head: packet.head });
            let read = A::read(avx2, &eight, &starts.each_mut());
            assert_eq!(A::are_of_flows(avx2, &read).bits(), u8::MAX, "round {round}");
            A::translate_eight(avx2, &eight, &read, &mut starts.each_mut(), &mut identifications);
            for (lane, packet) in packets.iter().enumerate() {
                let expected = packet.translated(&flows[lane]);
                assert_eq!(starts[lane].head.as_bytes(), expected.head.as_bytes(), "round {round}, lane {lane}");
                if packet.becomes_zero {
                    assert_eq!(expected.checksum(), if packet.is_udp { u16::MAX } else { 0 }, "round {round}, lane {lane}");
                    zeros[usize::from(packet.is_udp)] += 1;
                }
                if packet.is_udp && packet.checksum() == 0 {
                    assert_eq!(expected.checksum(), 0, "round {round}, lane {lane}");
                }
            }
        }
        zeros
    }

    #[test]
    fn eight_packets_are_translated_as_one_at_a_time_whatever_their_checksums() {
        let Some(avx2) = Avx2::detect() else { return };
        for zeros in [compare::<u32>(avx2), compare::<u128>(avx2)] {
            assert!(zeros.iter().all(|zeros| *zeros >= 1_500), "{zeros:?} checksums of TCP and of UDP became 0");
        }
    }
}
