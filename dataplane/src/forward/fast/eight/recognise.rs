//! Recognises eight packets of one family at a time, without VLAN tags or with the same one.
//!
//! **Invariant:** it recognises of those packets the ones that [`Recognise::frame`] recognises, as the same records; all
//! other frames it leaves to that.
//!
//! Not here: the headers of each family (`headers`).

use std::marker::PhantomData;

use super::super::follow::LastBurst;
use super::super::record::{FramesSoFar, Recognise, Record, STAYS, Shape, UNTAGGED};
use super::headers::{Arrived, EightHeaders, HeadersOfEight};
use super::start::{Start, TAGGED, starts_read};
use crate::flow::UDP_SIGNAL;
use crate::forward::decide::FlowTables;
use crate::wire::Buffer;
use crate::wire::processor::{Avx2, LANES, Lanes, Vectorised};

/// The end of the destination address, and the bit of group addresses in the source address.
const STATION: u32 = u32::from_le_bytes([0xff, 0xff, 0x01, 0]);

/// The first loop, for bursts whose packets are probably of the family of the last burst, and with a tag or without as its
/// last packet. Returns the kinds of all packets together, as [`Recognise::burst`].
#[inline(always)]
pub(in crate::forward::fast) fn recognise_by_eight<B: Buffer>(
    avx2: Avx2,
    last_burst: LastBurst,
    recognise: Recognise<'_>,
    (tables, frames): (&FlowTables, &mut FramesSoFar),
    part: (&[B], &mut [Record]),
) -> u8 {
    match (last_burst.families == Record::V6, last_burst.is_tagged) {
        (false, false) => avx2.run(RecogniseByEight::<_, u32, UNTAGGED>::new(recognise, tables, frames, part)),
        (true, false) => avx2.run(RecogniseByEight::<_, u128, UNTAGGED>::new(recognise, tables, frames, part)),
        (false, true) => avx2.run(RecogniseByEight::<_, u32, TAGGED>::new(recognise, tables, frames, part)),
        (true, true) => avx2.run(RecogniseByEight::<_, u128, TAGGED>::new(recognise, tables, frames, part)),
    }
}

/// The loop for frames with a packet of a family at the offset `AT`.
struct RecogniseByEight<'a, B, A, const AT: usize> {
    recognise: Recognise<'a>,
    tables: &'a FlowTables,
    frames: &'a mut FramesSoFar,
    part: (&'a [B], &'a mut [Record]),
    family: PhantomData<A>,
}

impl<B: Buffer, A: HeadersOfEight, const AT: usize> Vectorised for RecogniseByEight<'_, B, A, AT> {
    type Output = u8;

    #[inline(always)]
    fn run(mut self, avx2: Avx2) -> u8 {
        let (burst, records) = std::mem::take(&mut self.part);
        let ((groups, rest), (records, rest_of_records)) = (burst.as_chunks(), records.as_chunks_mut());
        let mut kinds = 0;
        for (group, records) in groups.iter().zip(records) {
            kinds |= self.eight(avx2, group, records);
        }
        kinds | self.recognise.burst(self.tables, self.frames, (rest, rest_of_records))
    }
}

impl<'a, B: Buffer, A: HeadersOfEight, const AT: usize> RecogniseByEight<'a, B, A, AT> {
    #[inline(always)]
    fn new(
        recognise: Recognise<'a>,
        tables: &'a FlowTables,
        frames: &'a mut FramesSoFar,
        part: (&'a [B], &'a mut [Record]),
    ) -> Self {
        Self { recognise, tables, frames, part, family: PhantomData }
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // frames are shorter than 2^31 bytes
    fn eight(&mut self, avx2: Avx2, group: &[B; LANES], records: &mut [Record; LANES]) -> u8 {
        let mut kinds = 0;
        if AT == TAGGED && !self.frames.knows_tag() {
            let [first, ..] = group;
            let [record, ..] = &mut *records;
            kinds |= self.recognise.one(self.tables, self.frames, first.bytes(), record);
        }
        let word = |value| avx2.splat(value);
        let Some(starts) = starts_read(group) else { return self.others(group, records, 0) };
        let room = avx2.lanes(group.each_ref().map(|buffer| buffer.bytes().len() as u32)) - word(AT as u32);
        let headers = A::of_eight(avx2, self.tables, Arrived { starts, wrong: self.unexpected(avx2, starts), room });
        let EightHeaders { len, kind, fragmentable, hash: [lower, upper], known } = headers;
        if self.recognise.prefetches_tags() {
            A::table(self.tables).prefetch_eight(avx2, upper);
        }
        let padded = word(Shape::PADDED.into()) ^ room.equals(len) & word(Shape::PADDED.into());
        let more = fragmentable & word(Shape::FRAGMENTABLE.into()) | padded;
        let place = len | word((AT as u32) << 16 | u32::from(STAYS) << 24);
        let kinds_and_more = kind | word(A::RECORD.into()) | more.left::<8>();
        let link = self.frames.link_of(&self.recognise, AT);
        for (record, row) in records.iter_mut().zip(Lanes::rows([lower, upper, place, kinds_and_more])) {
            record.set(row.bytes(), link);
        }
        self.frames.note_fragmentable((fragmentable & known).bits() != 0);
        self.frames.any_tagged |= AT == TAGGED && known.bits() != 0;
        kinds |= folded_kinds((kinds_and_more & known).to_array());
        match known.bits() {
            u8::MAX => kinds,
            known => kinds | self.others(group, records, known),
        }
    }

    /// Words that are 0 where frames are for the port and, if they have a tag, have the known one.
    #[inline(always)]
    fn unexpected(&self, avx2: Avx2, starts: [&Start<AT, A::Head>; LANES]) -> Lanes {
        let [to, to_from, _, tag] = avx2.columns(starts.map(|start| start.bytes_at(0)));
        let [port, port_end] = self.recognise.destination();
        let unexpected = (to ^ avx2.splat(port)) | (to_from ^ avx2.splat(port_end)) & avx2.splat(STATION);
        if AT == UNTAGGED {
            return unexpected;
        }
        let [known, mask] = self.frames.tag_and_mask();
        unexpected | tag & avx2.splat(mask) ^ avx2.splat(known)
    }

    /// Recognises those of eight packets that are not bits of `known`. Returns their kinds.
    #[inline(never)]
    fn others(&mut self, group: &[B; LANES], records: &mut [Record; LANES], known: u8) -> u8 {
        let all = (0..).zip(group.iter().zip(records)).filter(|(lane, _)| known >> lane & 1 == 0);
        let (recognise, tables, frames) = (self.recognise, self.tables, &mut *self.frames);
        all.fold(0, |kinds, (_, (buffer, record))| kinds | recognise.one(tables, frames, buffer.bytes(), record))
    }
}

/// The bits of the lowest bytes of all words.
#[inline(always)]
fn folded_kinds(words: [u32; LANES]) -> u8 {
    let [kinds, ..] = words.into_iter().fold(0, |all, word| all | word).to_le_bytes();
    kinds
}

const _: () = assert!(UDP_SIGNAL < Record::V4);
