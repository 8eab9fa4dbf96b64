//! Frames in the order in which they are fed. They come from one source, or from several in a random order; each source
//! has its own frames in random order, and begins anew after the last one. Of most frames only bytes that differ between
//! flows are stored, 32 in one stream. The others come from a template, which stays in the nearest cache. So the measurement
//! shows the memory accesses of the engine rather than of the trace.
//!
//! **Invariant:** what [`Trace::fill`] writes is the frame that the source was made from, but for its padding.
//!
//! Not here: what frames say (`traffic`), and which of them are fed (`measure::traces`).

use std::ops::Range;

use dataplane::{BURST, Burst, prefetch};
use proto::Family;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::error::BenchError;
use super::frame::{self, FrameFields};
use super::scenario::Part;
use super::traffic::{self, Stage};

/// A cache line of a trace. The alignment puts a large trace into huge pages, so that the harness does not measure the
/// TLB.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C, align(64))]
struct TraceLine([u8; 64]);

/// What is stored of a frame.
type Stored = [u8; 32];

/// Which bytes of a family's frames are stored, and where the others come from. A frame is written up to behind the TCP
/// header for each packet; data behind is never written again.
trait Layout {
    /// Where in a packet the three pieces begin that are stored, of [`PIECES`] bytes.
    const STORED_AT: [usize; 3];
    /// Bytes of a packet that are written.
    const WRITTEN: usize;
}

/// Bytes of the stored pieces.
const PIECES: [usize; 3] = [8, 20, 4];

/// IPv4: everything from the header checksum on.
struct LayoutV4;

impl Layout for LayoutV4 {
    const STORED_AT: [usize; 3] = [10, 18, 38];
    const WRITTEN: usize = 42;
}

/// IPv6: the lower halves of the addresses, and of TCP what differs between segments of one size. The upper halves of the
/// addresses are the same in all packets of a source.
struct LayoutV6;

impl Layout for LayoutV6 {
    /// The source; the destination, the ports, the sequence number and the acknowledgement; the checksum.
    const STORED_AT: [usize; 3] = [16, 32, 56];
    const WRITTEN: usize = 60;
}

/// Where the stored pieces are in a frame, and where its written bytes end.
#[derive(Clone, Copy, Debug)]
struct Places {
    stored_at: [usize; 3],
    end: usize,
}

impl Places {
    /// Those of frames whose IP packet begins at byte `AT`.
    #[inline(always)]
    const fn of<const AT: usize, L: Layout>() -> Self {
        let [first, second, third] = L::STORED_AT;
        Self { stored_at: [AT + first, AT + second, AT + third], end: AT + L::WRITTEN }
    }

    /// Those of a part's frames.
    const fn of_part(family: Family, is_tagged: bool) -> Self {
        match (family, is_tagged) {
            (Family::V4, false) => Self::of::<UNTAGGED, LayoutV4>(),
            (Family::V4, true) => Self::of::<TAGGED, LayoutV4>(),
            (Family::V6, false) => Self::of::<UNTAGGED, LayoutV6>(),
            (Family::V6, true) => Self::of::<TAGGED, LayoutV6>(),
        }
    }

    /// The stored pieces in the head of a frame, each with its place in what is stored. The minimum changes no place; it
    /// tells the compiler that all are within a head.
    #[inline(always)]
    fn pieces(&self) -> [(Range<usize>, Range<usize>); 3] {
        let mut end = 0;
        std::array::from_fn(|n| {
            let (at, len) = (self.stored_at[n].min(HEAD_BYTES - PIECES[n]), PIECES[n]);
            end += len;
            (at..at + len, end - len..end)
        })
    }

    fn stored(&self, head: &Head) -> Stored {
        let mut stored = Stored::default();
        self.pieces().into_iter().for_each(|(in_head, in_stored)| stored[in_stored].copy_from_slice(&head[in_head]));
        stored
    }

    /// Writes a frame, of which the template has all but the stored pieces.
    #[inline(always)]
    fn write(&self, head: &mut Head, template: &Head, stored: &Stored) {
        let [first, second, third] = self.pieces();
        for gap in [0..first.0.start, first.0.end..second.0.start, second.0.end..third.0.start, third.0.end..self.end] {
            head[gap.clone()].copy_from_slice(&template[gap]);
        }
        if (first.0.end, second.0.end) == (second.0.start, third.0.start) {
            // In one piece: half as many moves.
            head[first.0.start..third.0.end].copy_from_slice(stored);
        } else {
            self.put(head, stored);
        }
    }

    /// The same where the places are not constants: as many moves for each layout.
    #[inline(always)]
    fn write_any(&self, head: &mut Head, template: &Head, stored: &Stored) {
        head[..WRITTEN_MAX].copy_from_slice(&template[..WRITTEN_MAX]);
        self.put(head, stored);
    }

    #[inline(always)]
    fn put(&self, head: &mut Head, stored: &Stored) {
        self.pieces().into_iter().for_each(|(in_head, in_stored)| head[in_head].copy_from_slice(&stored[in_stored]));
    }
}

/// Where the packet begins in a frame, without tag and with one.
const UNTAGGED: usize = frame::ETHERNET;
const TAGGED: usize = UNTAGGED + frame::TAG;

/// Where the written bytes end in the longest frame.
const WRITTEN_MAX: usize = Places::of::<TAGGED, LayoutV6>().end;

/// How many frames ahead a trace of one source is fetched. The processor fetches only within a page, and reads two traces in
/// turn.
const FRAMES_AHEAD: usize = 2 * BURST;
/// The same for each of several sources: at most some hundred packets of all sources.
const FRAMES_AHEAD_OF_SOURCE: usize = 32;

/// Bytes at the start of a frame that are written for each packet, at most; the headers are there.
pub(super) const HEAD_BYTES: usize = 128;
type Head = [u8; HEAD_BYTES];

/// The bytes of a frame from its start on, as far as all frames have them in common.
pub(super) type Pattern = [u8; 2048];

/// A buffer that a frame is written into.
pub(super) trait FrameRoom {
    /// The first bytes of a frame of `len` bytes, which are to be written.
    fn begin(&mut self, len: u16) -> Option<&mut Head>;

    /// Completes the frame from a position on, by what all frames have there.
    fn complete(&mut self, len: u16, from: usize, pattern: &Pattern);
}

/// The bytes that frames of one size have in common.
#[derive(Clone, Copy, Debug)]
struct Template {
    head: Head,
    len: u16,
}

/// Frames that are fed in their order, again and again.
#[derive(Debug)]
pub(super) struct Source {
    frames: Frames,
    next: usize,
}

#[derive(Debug)]
enum Frames {
    Stored(StoredFrames),
    /// Short frames with all their bytes: so rare that it does not matter.
    Whole(Vec<Template>),
}

/// Frames of a part.
#[derive(Debug)]
struct StoredFrames {
    lines: Vec<TraceLine>,
    /// For each frame the number of its template, unless there is one only.
    sizes: Vec<u8>,
    templates: Vec<Template>,
    family: Family,
    is_tagged: bool,
    places: Places,
    count: usize,
}

impl Source {
    /// A frame for each flow, in this order.
    pub(super) fn new(
        part: &Part,
        flows: &[u32],
        frame: impl Fn(u32) -> Result<FrameFields, BenchError>,
    ) -> Result<Self, BenchError> {
        let (family, is_tagged) = (part.family, part.is_tagged);
        let places = Places::of_part(family, is_tagged);
        let bytes = flows.len() * size_of::<Stored>();
        let too_much = |_| BenchError::Trace(bytes);
        let mut lines = TraceLine::new_vec_zeroed(bytes.div_ceil(size_of::<TraceLine>())).map_err(too_much)?;
        let (mut sizes, mut templates, mut written) = (Vec::with_capacity(flows.len()), Vec::<Template>::new(), Vec::new());
        for (flow, stored) in flows.iter().zip(lines.as_mut_bytes().as_chunks_mut().0) {
            frame(*flow)?.write(&mut written);
            let frame = Template::of(&written);
            *stored = places.stored(&frame.head);
            let size = templates.iter().position(|template| template.len == frame.len).unwrap_or_else(|| {
                templates.push(frame);
                templates.len() - 1
            });
            sizes.push(u8::try_from(size).unwrap_or(u8::MAX));
        }
        if templates.len() < 2 {
            sizes = Vec::new();
        }
        let frames = Frames::Stored(StoredFrames { lines, sizes, templates, family, is_tagged, places, count: flows.len() });
        Ok(Self { frames, next: 0 })
    }

    /// The same for frames of at most [`HEAD_BYTES`] that differ in other bytes.
    pub(super) fn whole(flows: &[u32], frame: impl Fn(u32) -> FrameFields) -> Self {
        let mut written = Vec::new();
        let whole = |flow: &u32| {
            frame(*flow).write(&mut written);
            Template::of(&written)
        };
        Self { frames: Frames::Whole(flows.iter().map(whole).collect()), next: 0 }
    }

    fn len(&self) -> usize {
        match &self.frames {
            Frames::Stored(frames) => frames.count,
            Frames::Whole(frames) => frames.len(),
        }
    }

    /// Writes the next frame into a buffer.
    #[inline(always)]
    fn fill_one<B: FrameRoom>(&mut self, buffer: &mut B, pattern: &Pattern) {
        let number = self.next;
        self.next = if number + 1 >= self.len() { 0 } else { number + 1 };
        match &self.frames {
            Frames::Stored(frames) => frames.fill_one(number, buffer, pattern),
            Frames::Whole(frames) => {
                let Some(frame) = frames.get(number) else { return };
                let Some(head) = buffer.begin(frame.len) else { return };
                *head = frame.head;
                buffer.complete(frame.len, HEAD_BYTES, pattern);
            }
        }
    }
}

impl Template {
    fn of(written: &[u8]) -> Self {
        let mut head = [0; HEAD_BYTES];
        head.iter_mut().zip(written).for_each(|(to, from)| *to = *from);
        Self { head, len: u16::try_from(written.len()).unwrap_or(u16::MAX) }
    }
}

impl StoredFrames {
    #[inline(always)]
    fn fill_one<B: FrameRoom>(&self, number: usize, buffer: &mut B, pattern: &Pattern) {
        let (frames, _) = self.lines.as_bytes().as_chunks();
        frames.get(number + FRAMES_AHEAD_OF_SOURCE).inspect(|frame| prefetch(*frame));
        let template = self.templates.get(self.sizes.get(number).map_or(0, |size| usize::from(*size)));
        let (Some(stored), Some(template)) = (frames.get(number), template) else { return };
        let Some(head) = buffer.begin(template.len) else { return };
        self.places.write_any(head, &template.head, stored);
        buffer.complete(template.len, self.places.end, pattern);
    }

    #[inline]
    fn fill<B: FrameRoom>(&self, range: Range<usize>, burst: &mut Burst<B>, pattern: &Pattern) {
        match (self.family, self.is_tagged) {
            (Family::V4, false) => self.fill_each::<UNTAGGED, LayoutV4, B>(range, burst, pattern),
            (Family::V4, true) => self.fill_each::<TAGGED, LayoutV4, B>(range, burst, pattern),
            (Family::V6, false) => self.fill_each::<UNTAGGED, LayoutV6, B>(range, burst, pattern),
            (Family::V6, true) => self.fill_each::<TAGGED, LayoutV6, B>(range, burst, pattern),
        }
    }

    #[inline(always)]
    fn fill_each<const AT: usize, L: Layout, B: FrameRoom>(&self, range: Range<usize>, burst: &mut Burst<B>, pattern: &Pattern) {
        let (flows, _) = self.lines.as_bytes().as_chunks();
        let ahead = flows.get(range.start + FRAMES_AHEAD..range.end + FRAMES_AHEAD);
        let Some(flows) = flows.get(range.clone()) else { return };
        let flows = flows.iter().zip(ahead.unwrap_or(flows));
        if let [template] = self.templates.as_slice() {
            let template = *template;
            for (buffer, (flow, ahead)) in burst.iter_mut().zip(flows) {
                prefetch(ahead);
                write::<AT, L, B>(buffer, &template, flow, pattern);
            }
        } else {
            let sizes = self.sizes.get(range).unwrap_or(&[]);
            for ((buffer, (flow, ahead)), size) in burst.iter_mut().zip(flows).zip(sizes) {
                prefetch(ahead);
                if let Some(template) = self.templates.get(usize::from(*size)) {
                    write::<AT, L, B>(buffer, template, flow, pattern);
                }
            }
        }
    }
}

/// Sources, each with the number of frames that are taken of it before the order repeats.
#[derive(Debug, Default)]
pub(super) struct Mixture {
    sources: Vec<Source>,
    /// Numbers of sources.
    order: Vec<u8>,
    /// Sources whose every second frame comes from the next one instead.
    in_turn: Vec<u8>,
}

impl Mixture {
    /// Adds a source.
    pub(super) fn add(&mut self, source: Source, frames: usize) {
        let number = u8::try_from(self.sources.len()).unwrap_or(u8::MAX);
        self.sources.push(source);
        self.order.extend(std::iter::repeat_n(number, frames));
    }

    /// Adds two sources, of which each gives as many frames: a frame of the second follows one of the first.
    pub(super) fn add_in_turn(&mut self, [first, second]: [Source; 2], pairs: usize) {
        self.in_turn.push(u8::try_from(self.sources.len()).unwrap_or(u8::MAX));
        self.add(first, 2 * pairs);
        self.add(second, 0);
    }

    /// A trace that takes frames of the sources in a random order.
    pub(super) fn into_trace(self, seed: u64, pattern: Pattern) -> Trace {
        let Self { sources, mut order, in_turn } = self;
        if sources.len() == 1 {
            order = Vec::new();
        }
        shuffle(&mut order, seed);
        for first in in_turn {
            order.iter_mut().filter(|number| **number == first).skip(1).step_by(2).for_each(|number| *number = first + 1);
        }
        Trace { sources, order, next: 0, pattern: Box::new(pattern) }
    }
}

/// Frames in the order in which they are fed.
#[derive(Debug)]
pub(super) struct Trace {
    sources: Vec<Source>,
    /// The source of each frame; empty if there is one only.
    order: Vec<u8>,
    /// Position in the order.
    next: usize,
    pattern: Box<Pattern>,
}

impl Trace {
    /// Number of frames that the next burst has: those up to the end of the only source, or of the order, at most.
    #[inline]
    pub(super) fn next_count(&self) -> usize {
        match self.sources.as_slice() {
            [source] => BURST.min(source.len() - source.next),
            _ => BURST.min(self.order.len() - self.next),
        }
    }

    /// Writes the next frames of the trace into the buffers of a burst, which are at most [`Trace::next_count`].
    #[inline]
    pub(super) fn fill<B: FrameRoom>(&mut self, burst: &mut Burst<B>) {
        if let [Source { frames: Frames::Stored(frames), next }] = self.sources.as_mut_slice() {
            let range = *next..*next + burst.len();
            *next = if range.end >= frames.count { 0 } else { range.end };
            frames.fill(range, burst, &self.pattern);
        } else {
            self.fill_mixed(burst);
        }
    }

    #[inline(never)]
    fn fill_mixed<B: FrameRoom>(&mut self, burst: &mut Burst<B>) {
        let range = self.next..self.next + burst.len();
        self.next = if range.end >= self.order.len() { 0 } else { range.end };
        for (buffer, number) in burst.iter_mut().zip(self.order.get(range).unwrap_or(&[])) {
            if let Some(source) = self.sources.get_mut(usize::from(*number)) {
                source.fill_one(buffer, &self.pattern);
            }
        }
    }
}

/// Writes the head of a frame: a few moves of constant length.
#[inline(always)]
fn write<const AT: usize, L: Layout, B: FrameRoom>(buffer: &mut B, template: &Template, stored: &Stored, pattern: &Pattern) {
    let Some(head) = buffer.begin(template.len) else { return };
    let places = Places::of::<AT, L>();
    places.write(head, &template.head, stored);
    buffer.complete(template.len, places.end, pattern);
}

/// The bytes that are the same in the frames of all flows and sizes: data behind the headers.
pub(super) fn pattern(part: &Part) -> Pattern {
    let mut bytes = [0; size_of::<Pattern>()];
    let data_at = traffic::from_client(part, Stage::Ack, 0).data_at();
    bytes.iter_mut().skip(data_at).enumerate().for_each(|(at, byte)| *byte = frame::pattern(at));
    bytes
}

/// Fisher-Yates shuffle with a 64-bit linear congruential generator (Knuth's MMIX): repeatable, and random enough to
/// defeat prefetching.
pub(super) fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut random = Random(seed);
    for (i, end) in (1..items.len()).zip(2..) {
        items.swap(i, random.below(end) as usize);
    }
}

/// A sequence of random numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    /// The next number, of which the upper bits are the more random ones.
    #[inline(always)]
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0
    }

    /// A number below `end`, which is at most 2^31.
    #[allow(clippy::cast_possible_truncation)] // 31 bits
    pub(super) fn below(&mut self, end: u32) -> u32 {
        (self.next() >> 33) as u32 % end
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::Piece;
    use super::super::scenario::Scenario;
    use super::*;
    use crate::args::BenchArgs;

    /// The head of a frame, with what all frames have in common.
    struct Room(Head);

    impl FrameRoom for Room {
        fn begin(&mut self, _: u16) -> Option<&mut Head> {
            Some(&mut self.0)
        }

        fn complete(&mut self, _: u16, _: usize, _: &Pattern) {}
    }

    fn head(bytes: &[u8]) -> Head {
        std::array::from_fn(|at| bytes.get(at).copied().unwrap_or(0))
    }

    fn room(trace: &Trace) -> Burst<Room> {
        (0..trace.next_count()).map(|_| Room(head(trace.pattern.as_slice()))).collect()
    }

    /// Whether the head of a frame is that of these fields.
    fn assert_written(Room(filled): &Room, fields: &FrameFields, what: &str) {
        let mut bytes = Vec::new();
        fields.write(&mut bytes);
        let len = (fields.data_at() + fields.data_len).min(HEAD_BYTES);
        assert_eq!(filled[..len], bytes[..len], "{what}");
    }

    fn check(args: &[&str]) {
        let scenario = Scenario::new(&BenchArgs::parsed(args));
        let [part] = &scenario.parts[..] else { panic!("one part") };
        let flows: Vec<u32> = (0..).step_by(77_777).take(BURST).collect();
        let from_client = |flow| traffic::from_client(part, Stage::Ack, flow);
        let from_backend = |flow| {
            let backend = part.backend(part.service_of(flow), 3);
            traffic::from_backend(part, Stage::Ack, flow, backend, part.client(flow))
        };
        for frame in [&from_client as &dyn Fn(u32) -> FrameFields, &from_backend] {
            let mut mixture = Mixture::default();
            mixture.add(Source::new(part, &flows, |flow| Ok(frame(flow))).unwrap(), 0);
            let mut trace = mixture.into_trace(1, pattern(part));
            let mut burst = room(&trace);
            trace.fill(&mut burst);
            for (filled, flow) in burst.iter().zip(&flows) {
                assert_written(filled, &frame(*flow), &format!("{args:?}, flow {flow}"));
            }
        }
    }

    #[test]
    fn what_is_filled_in_is_the_frame_that_the_trace_was_made_from() {
        for family in ["v4", "v6"] {
            for protocol in ["tcp", "udp"] {
                for args in [&["--size", "64"][..], &["--size", "imix"], &["--vlan"]] {
                    check(&[args, &["--protocol", protocol, "--family", family]].concat());
                }
            }
        }
        check(&["--no-df"]);
    }

    /// Every frame of every source comes as often as the order says, in the order of its source, and is what it was made
    /// from; a frame of the second of two sources in turn follows one of the first.
    #[test]
    fn frames_of_several_sources_come_in_a_random_order() {
        let scenario = Scenario::new(&BenchArgs::parsed(&["--mix", "--flows", "2000"]));
        let (mut mixture, mut expected) = (Mixture::default(), Vec::new());
        for part in &scenario.parts {
            let flows: Vec<u32> = part.flows.clone().take(40).collect();
            let whole = |flow| traffic::from_client(part, Stage::Ack, flow);
            let piece = |piece| move |flow| traffic::fragment(whole(flow), piece);
            mixture.add(Source::new(part, &flows, |flow| Ok(whole(flow))).unwrap(), 300);
            mixture.add_in_turn([Piece::First, Piece::Later].map(|of| Source::whole(&flows, piece(of))), 50);
            expected.push(flows.iter().map(|flow| whole(*flow)).collect::<Vec<_>>());
            expected.extend([Piece::First, Piece::Later].map(|of| flows.iter().map(|flow| piece(of)(*flow)).collect()));
        }
        let mut trace = mixture.into_trace(7, pattern(&scenario.parts[0]));
        assert_eq!(trace.order.len(), scenario.parts.len() * 400);
        let order = trace.order.clone();
        assert!(order.windows(2).filter(|pair| pair[0] == pair[1]).count() < order.len() / 8, "sources are not mixed");
        let mut counts = vec![0; expected.len()];
        for rest in order.chunks(BURST) {
            let mut burst = room(&trace);
            assert_eq!(burst.len(), rest.len());
            trace.fill(&mut burst);
            for (filled, source) in burst.iter().zip(rest.iter().map(|source| usize::from(*source))) {
                let frames = &expected[source];
                assert_written(filled, &frames[counts[source] % frames.len()], &format!("source {source}"));
                counts[source] += 1;
                assert!(source % 3 == 0 || counts[source / 3 * 3 + 1] - counts[source / 3 * 3 + 2] <= 1, "not in turn");
            }
        }
        assert!(counts.chunks(3).all(|counts| *counts == [300, 50, 50]), "{counts:?}");
        assert_eq!(trace.next_count(), BURST, "it begins anew");
    }
}
