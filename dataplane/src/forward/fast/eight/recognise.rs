//! Recognises eight packets of IPv4 at a time.
//!
//! **Invariant:** it recognises those untagged packets that [`Recognise::frame`] recognises, as the same records; all other
//! frames it leaves to that.
//!
//! Not here: frames of other kinds (`record`).

use super::super::record::{FramesSoFar, HEAD_V4, Recognise, Record, STAYS, Shape, StartV4, UNTAGGED};
use crate::flow::UDP_SIGNAL;
use crate::forward::decide::FlowTables;
use crate::wire::processor::{Avx2, LANES, Lanes, Vectorised};
use crate::wire::{Buffer, Ipv4, protocol};

/// In place of a frame that is shorter than [`StartV4`].
static SHORT: StartV4 = [0; UNTAGGED + HEAD_V4];

/// The first loop for bursts of which most packets are untagged and of IPv4.
pub(in crate::forward::fast) struct RecogniseByEight<'a, B> {
    pub(in crate::forward::fast) recognise: Recognise<'a>,
    pub(in crate::forward::fast) tables: &'a FlowTables,
    pub(in crate::forward::fast) frames: &'a mut FramesSoFar,
    pub(in crate::forward::fast) part: (&'a [B], &'a mut [Record]),
}

impl<B: Buffer> Vectorised for RecogniseByEight<'_, B> {
    type Output = u8;

    /// Returns the kinds of all packets together, as [`Recognise::burst`].
    #[inline(always)]
    fn run(self, avx2: Avx2) -> u8 {
        let Self { recognise, tables, frames, part: (burst, records) } = self;
        let ((groups, rest), (records, rest_of_records)) = (burst.as_chunks(), records.as_chunks_mut());
        let mut kinds = 0;
        for (group, records) in groups.iter().zip(records) {
            kinds |= eight(avx2, &recognise, tables, frames, group, records);
        }
        kinds | recognise.burst(tables, frames, (rest, rest_of_records))
    }
}

#[inline(always)]
fn eight<B: Buffer>(
    avx2: Avx2,
    recognise: &Recognise<'_>,
    tables: &FlowTables,
    frames: &mut FramesSoFar,
    group: &[B; LANES],
    records: &mut [Record; LANES],
) -> u8 {
    let starts = group.each_ref().map(|buffer| buffer.bytes().first_chunk().unwrap_or(&SHORT));
    let EightHeaders { known, fragmentable, shapes, key, protocol } =
        EightHeaders::of(avx2, recognise, starts, group.each_ref().map(|buffer| buffer.bytes().len()));
    let [lower, upper] = tables.v4.hash_eight(avx2, key, protocol);
    frames.note_fragmentable((fragmentable & known).bits() != 0);
    let rows = Lanes::rows([lower, upper, shapes[0], shapes[1]]);
    for (record, row) in records.iter_mut().zip(rows) {
        record.set(row.bytes(), recognise.link());
    }
    let kinds = folded_kinds((shapes[1] & known).to_array());
    match known.bits() {
        u8::MAX => kinds,
        known => kinds | others(recognise, tables, frames, (group, records), known),
    }
}

/// Recognises those of eight packets that are not bits of `known`. Returns their kinds.
#[inline(never)]
fn others<B: Buffer>(
    recognise: &Recognise<'_>,
    tables: &FlowTables,
    frames: &mut FramesSoFar,
    (group, records): (&[B; LANES], &mut [Record; LANES]),
    known: u8,
) -> u8 {
    let all = (0..).zip(group.iter().zip(records)).filter(|(lane, _)| known >> lane & 1 == 0);
    all.fold(0, |kinds, (_, (buffer, record))| kinds | recognise.one(tables, frames, buffer.bytes(), record))
}

/// The bits of the lowest bytes of all words.
#[inline(always)]
fn folded_kinds(words: [u32; LANES]) -> u8 {
    let [kinds, ..] = words.into_iter().fold(0, |all, word| all | word).to_le_bytes();
    kinds
}

/// What the headers of eight packets say.
struct EightHeaders {
    /// All ones for packets that are recognised.
    known: Lanes,
    /// All ones for packets that routers may fragment.
    fragmentable: Lanes,
    /// The words of their [`Shape`]s.
    shapes: [Lanes; 2],
    /// Their addresses and ports.
    key: [Lanes; 3],
    /// Their transport protocol numbers.
    protocol: Lanes,
}

impl EightHeaders {
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // frames are shorter than 2^31 bytes
    fn of(avx2: Avx2, recognise: &Recognise<'_>, starts: [&StartV4; LANES], frame_lens: [usize; LANES]) -> Self {
        let word = |value| avx2.splat(value);
        let frame_len = avx2.lanes(frame_lens.map(|len| len as u32));
        let [to, to_from, ..] = avx2.columns(starts.map(bytes_at::<0>));
        let [before_type, first, fragment, hops_and_protocol] = avx2.columns(starts.map(bytes_at::<10>));
        let [source, destination, ports, _] = avx2.columns(starts.map(bytes_at::<26>));
        let [udp, _, tcp, _] = avx2.columns(starts.map(bytes_at::<38>));
        // Words in which each bit but those of the masks must be 0.
        let [port, port_end] = recognise.destination();
        let start = (before_type ^ word(TYPE)).right::<16>() | (first ^ word(Ipv4::PLAIN.into())) & word(0xff);
        let wrong = (to ^ word(port)) | (to_from ^ word(port_end)) & word(STATION) | start | fragment & word(PART_OF_DATAGRAM);
        let len = first.upper_number();
        let sum_holds = folded([first, fragment, hops_and_protocol, source, destination], avx2).equals(word(0xffff));
        let has_hops = (hops_and_protocol & word(0xff)).exceeds(word(1));
        let fits = frame_len.exceeds(len + word(UNTAGGED as u32 - 1));
        // The headers of TCP and UDP.
        let number = hops_and_protocol & word(0xff00);
        let tcp_len = tcp.right::<2>() & word(0x3c);
        let tcp_is_whole = tcp_len.exceeds(word(19)) & (len + word(1)).exceeds(tcp_len + word(20));
        let is_tcp = number.equals(word(u32::from(protocol::TCP) << 8)) & tcp_is_whole;
        let udp_len = udp.lower_number();
        let udp_is_whole = udp_len.exceeds(word(7)) & (len + word(1)).exceeds(udp_len + word(20));
        let is_udp = number.equals(word(u32::from(protocol::UDP) << 8)) & udp_is_whole;
        let known = wrong.equals(word(0)) & sum_holds & has_hops & fits & (is_tcp | is_udp);
        let tcp_kind = tcp.right::<8>() & word(u32::from(UDP_SIGNAL) - 1);
        let kind = tcp_kind.or_where(is_udp, word(UDP_SIGNAL.into())) | word(Record::V4.into());
        let fragmentable = (fragment & word(DONT_FRAGMENT)).equals(word(0));
        let is_whole_frame = frame_len.equals(len + word(UNTAGGED as u32));
        let padded = word(Shape::PADDED.into()) ^ is_whole_frame & word(Shape::PADDED.into());
        let more = fragmentable & word(Shape::FRAGMENTABLE.into()) | padded;
        let shapes = [len | word((UNTAGGED as u32) << 16 | u32::from(STAYS) << 24), kind | more.left::<8>()];
        Self { known, fragmentable, shapes, key: [source, destination, ports], protocol: number.right::<8>() }
    }
}

/// The EtherType of IPv4 as the upper half of a word.
const TYPE: u32 = u32::from_le_bytes([0, 0, 0x08, 0x00]);
/// The end of the destination address, and the bit of group addresses in the source address.
const STATION: u32 = u32::from_le_bytes([0xff, 0xff, 0x01, 0]);
/// "More fragments", and the fragment offset.
const PART_OF_DATAGRAM: u32 = u32::from_le_bytes([0, 0, 0x3f, 0xff]);
const DONT_FRAGMENT: u32 = u32::from_le_bytes([0, 0, 0x40, 0]);

/// Sixteen bytes of the start of a frame.
#[inline(always)]
pub(super) fn bytes_at<const OFFSET: usize>(start: &StartV4) -> [u8; 16] {
    start[OFFSET..].first_chunk().copied().unwrap_or_default()
}

/// The sums of the halves of some words, folded once: 0xffff where 0xffff divides a sum of few words that is not 0.
#[inline(always)]
fn folded<const WORDS: usize>(words: [Lanes; WORDS], avx2: Avx2) -> Lanes {
    let (zero, half) = (avx2.splat(0), avx2.splat(0xffff));
    let lower = words.iter().fold(zero, |sum, word| sum + (*word & half));
    let sum = words.iter().fold(lower, |sum, word| sum + word.right::<16>());
    (sum & half) + sum.right::<16>()
}
