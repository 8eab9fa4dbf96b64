//! The first stage of the fast path: recognises the packets of a burst, hashes their addresses and ports, and prefetches the
//! lines of tags of their flows. Eight packets at a time where the processor has AVX2, whatever families and tags are mixed.
//!
//! Not here: what makes a packet plain (`wire::plain`), and whether it has a flow (`hits`).

use super::plan::{Plan, PlanHead};
use crate::flow::FlowTable;
use crate::forward::decide::{FlowFamily, FlowTables};
use crate::port::{FrameFilter, Link, PortIndex};
use crate::snapshot::Snapshot;
use crate::wire::plain::head::{TAGGED, UNTAGGED, starts_read};
use crate::wire::processor::{Avx2, LANES, Vectorised};
use crate::wire::{
    Buffer, ExpectedLink, Ipv4, Plain, Recognised, Shape, TagKind, Tags, Tuple, WideFamily, recognise, recognise_eight,
};

/// EtherType, then version and header length of IPv4, or the version of IPv6, then bits that do not matter.
const V4_MASK: u32 = u32::from_ne_bytes([0xff, 0xff, 0xff, 0]);
const V4_START: u32 = u32::from_ne_bytes([0x08, 0x00, Ipv4::PLAIN, 0]);
const V6_MASK: u32 = u32::from_ne_bytes([0xff, 0xff, 0xf0, 0]);
const V6_START: u32 = u32::from_ne_bytes([0x86, 0xdd, 0x60, 0]);
/// All of a tag but its priority.
const TAG_MASK: u32 = u32::from_ne_bytes([0xff, 0xff, 0x0f, 0xff]);

/// Frames that are recognised together: of one family, without tags or with the known one.
#[derive(Clone, Copy)]
enum Layout {
    V4,
    V6,
    TaggedV4,
    TaggedV6,
}

impl Layout {
    /// The bits of those with a tag.
    const TAGGED: u8 = Self::TaggedV4.bit() | Self::TaggedV6.bit();
    /// A bit beside those of layouts: the next packet that is looked at alone may replace the known tag.
    const REPLACED: u8 = 0x80;

    /// Its bit among layouts.
    #[inline(always)]
    const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// What the recognition of a burst depends on and knows so far.
pub(super) struct Recognition<'s> {
    snapshot: &'s Snapshot,
    filter: FrameFilter,
    /// The link of frames without tags.
    link: Link,
    /// Whether lines of tags of flows are prefetched: not while many packets may be of other workers.
    pub(super) prefetches_tags: bool,
    /// The tag of the last frame with one known tag, which most tagged frames of a burst share, as it stands in the frame,
    /// without priority. All bits are set if there was none: the mask leaves no tag all bits.
    vlan_tag: u32,
    tagged_link: Link,
    /// Whether there was any frame that is not recognised.
    pub(super) any_unrecognised: bool,
    /// The families that were recognised.
    pub(super) families: u8,
    /// Number of packets that were looked at alone.
    #[cfg(test)]
    alone: usize,
}

impl<'s> Recognition<'s> {
    /// For frames that arrive on a port, or that did and whose tags of this link were removed.
    pub(super) fn new(snapshot: &'s Snapshot, link: Link) -> Self {
        Self {
            snapshot,
            filter: FrameFilter::new(snapshot.port(link.port()).mac),
            link,
            prefetches_tags: true,
            vlan_tag: u32::MAX,
            tagged_link: PortIndex(0).into(),
            any_unrecognised: false,
            families: 0,
            #[cfg(test)]
            alone: 0,
        }
    }

    /// Recognises the packets of a part of a burst.
    #[inline(always)]
    pub(super) fn part<B: Buffer>(&mut self, avx2: Option<Avx2>, tables: &FlowTables, part: &[B], plans: &mut [Plan]) {
        match avx2 {
            Some(avx2) => avx2.run(RecognisePart { recognition: self, tables, part, plans }),
            None => self.each(tables, part, plans),
        }
    }

    #[inline(never)]
    fn each<B: Buffer>(&mut self, tables: &FlowTables, part: &[B], plans: &mut [Plan]) {
        part.iter().zip(plans).for_each(|(buffer, plan)| self.one(tables, buffer.bytes(), plan));
    }

    /// Recognises one packet.
    #[inline(never)]
    fn one(&mut self, tables: &FlowTables, frame: &[u8], plan: &mut Plan) {
        #[cfg(test)]
        {
            self.alone += 1;
        }
        let plain = if self.filter.is_for_port(frame) { recognise(frame) } else { None };
        let is_recognised = match plain {
            Some(Plain::V4(shape, tuple)) => self.set(&tables.v4, frame, shape, &tuple, plan),
            Some(Plain::V6(shape, tuple)) => self.set(&tables.v6, frame, shape, &tuple, plan),
            None => None,
        };
        if is_recognised.is_none() {
            plan.forget();
            self.any_unrecognised = true;
        }
    }

    /// Sets what is known of a plain packet, unless its link is unknown.
    #[inline(always)]
    fn set<A: FlowFamily>(
        &mut self,
        table: &FlowTable<A>,
        frame: &[u8],
        shape: Shape,
        tuple: &Tuple<A>,
        plan: &mut Plan,
    ) -> Option<()> {
        plan.link = if usize::from(shape.network_offset) == UNTAGGED { self.link } else { self.link_of_tags(frame)? };
        plan.head = PlanHead::recognised(table.hash(tuple), shape);
        self.families |= shape.family();
        table.prefetch(plan.head.hash);
        Some(())
    }

    /// The link of a frame with VLAN tags; `None` if it is unknown.
    #[inline(never)]
    fn link_of_tags(&mut self, frame: &[u8]) -> Option<Link> {
        let tags = Tags::of(frame);
        let link = Link::new(self.link.port(), tags.vlan()?);
        if self.link.is_tagged() || !self.snapshot.knows(link) {
            return None;
        }
        if usize::from(tags.bytes()) == TAGGED - UNTAGGED {
            (self.vlan_tag, self.tagged_link) = (word_at(frame, UNTAGGED)? & TAG_MASK, link);
        }
        Some(link)
    }

    /// How a frame is laid out; `None` if it is recognised alone.
    #[inline(always)]
    fn layout(&self, frame: &[u8]) -> Option<Layout> {
        let word = word_at(frame, UNTAGGED)?;
        if word & V4_MASK == V4_START {
            return Some(Layout::V4);
        }
        if word & V6_MASK == V6_START {
            return Some(Layout::V6);
        }
        let word = word_at(frame, TAGGED).filter(|_| word & TAG_MASK == self.vlan_tag)?;
        match (word & V4_MASK == V4_START, word & V6_MASK == V6_START) {
            (true, _) => Some(Layout::TaggedV4),
            (_, true) => Some(Layout::TaggedV6),
            _ => None,
        }
    }
}

/// The word that begins with the EtherType before the packet at an offset.
#[inline(always)]
fn word_at(frame: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*frame.get(offset - 2..)?.first_chunk()?))
}

/// The packets of a part of a burst, to be recognised eight at a time.
struct RecognisePart<'a, 's, B> {
    recognition: &'a mut Recognition<'s>,
    tables: &'a FlowTables,
    part: &'a [B],
    plans: &'a mut [Plan],
}

impl<B: Buffer> Vectorised for RecognisePart<'_, '_, B> {
    type Output = ();

    #[inline(always)]
    fn run(self, avx2: Avx2) {
        let Self { recognition, tables, part, plans } = self;
        let ((groups, rest), (of_groups, of_rest)) = (part.as_chunks(), plans.as_chunks_mut());
        for (group, plans) in groups.iter().zip(of_groups) {
            recognition.eight(avx2, tables, group, plans);
        }
        recognition.each(tables, rest, of_rest);
    }
}

impl Recognition<'_> {
    /// Recognises eight packets: those laid out as the first that is not recognised yet, until all are or were looked at alone.
    /// Frames with the known tag come before one with another tag, which replaces it.
    #[inline(always)]
    fn eight<B: Buffer>(&mut self, avx2: Avx2, tables: &FlowTables, group: &[B; LANES], plans: &mut [Plan; LANES]) {
        let (mut unknown, mut tried, mut of_other_tags) = (u8::MAX, 0_u8, 0_u8);
        while unknown != 0 {
            let lane = unknown.trailing_zeros() as usize;
            let Some((first, plan)) = group.get(lane).zip(plans.get_mut(lane)) else { return };
            match self.layout(first.bytes()).filter(|layout| tried & layout.bit() == 0) {
                Some(layout) => {
                    tried |= layout.bit();
                    unknown = match layout {
                        Layout::V4 => self.alike::<u32, UNTAGGED, B>(avx2, &tables.v4, group, plans, unknown),
                        Layout::V6 => self.alike::<u128, UNTAGGED, B>(avx2, &tables.v6, group, plans, unknown),
                        Layout::TaggedV4 => self.alike::<u32, TAGGED, B>(avx2, &tables.v4, group, plans, unknown),
                        Layout::TaggedV6 => self.alike::<u128, TAGGED, B>(avx2, &tables.v6, group, plans, unknown),
                    };
                }
                None => {
                    if tried & Layout::REPLACED == 0 && self.has_other_tag(first.bytes()) {
                        of_other_tags |= 1 << lane;
                    } else {
                        let before = self.vlan_tag;
                        self.one(tables, first.bytes(), plan);
                        if self.vlan_tag != before {
                            tried &= !Layout::REPLACED;
                        }
                    }
                    unknown &= unknown - 1;
                }
            }
            if unknown == 0 && of_other_tags != 0 {
                // The first of them replaces the known tag.
                (unknown, of_other_tags) = (of_other_tags, 0);
                tried = tried & !Layout::TAGGED | Layout::REPLACED;
            }
        }
    }

    /// Whether a frame has another tag than the known one.
    #[inline(never)]
    fn has_other_tag(&self, frame: &[u8]) -> bool {
        let Some(word) = word_at(frame, UNTAGGED).filter(|word| word & TAG_MASK != self.vlan_tag) else { return false };
        let [first, second, ..] = word.to_ne_bytes();
        self.vlan_tag != u32::MAX && TagKind::of(u16::from_be_bytes([first, second])).is_some()
    }

    /// Recognises those of eight packets that have one layout, among those that are not known yet. Returns the others.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // frames are shorter than 2^31 bytes
    fn alike<A: FlowFamily + WideFamily, const AT: usize, B: Buffer>(
        &mut self,
        avx2: Avx2,
        table: &FlowTable<A>,
        group: &[B; LANES],
        plans: &mut [Plan; LANES],
        unknown: u8,
    ) -> u8 {
        let Some(starts) = starts_read::<AT, A::Head, B>(group, unknown.trailing_zeros() as usize) else { return unknown };
        let lens = group.each_ref().map(|buffer| buffer.bytes().len() as u32);
        let [tag, tag_mask] = [self.vlan_tag, TAG_MASK].map(|word| u32::from_le_bytes(word.to_ne_bytes()));
        let expected = ExpectedLink { port: self.filter.destination(), tag, tag_mask };
        let Recognised { rows, upper, known } =
            recognise_eight::<A, AT>(avx2, table.tuple_hash(), starts, lens, expected, PlanHead::UNDECIDED);
        if self.prefetches_tags {
            table.prefetch_eight(avx2, upper);
        }
        let link = if AT == UNTAGGED { self.link } else { self.tagged_link };
        self.families |= A::KIND;
        if known & unknown == u8::MAX {
            for (plan, row) in plans.iter_mut().zip(rows) {
                plan.set(row.bytes(), link);
            }
            return 0;
        }
        for (lane, (plan, row)) in plans.iter_mut().zip(rows).enumerate() {
            if known & unknown & 1 << lane != 0 {
                plan.set(row.bytes(), link);
            }
        }
        unknown & !known
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::compiler::Compiler;
    use crate::flow::FlowLimits;
    use crate::port::MemoryBuffer;
    use crate::snapshot::{Config, PortConfig, Tunnel};
    use crate::testing::{OUR_MAC, Packet};
    use crate::wire::Vlan;

    /// A port with two VLANs.
    fn snapshot(vlans: &[Vlan]) -> Snapshot {
        let ports = vec![PortConfig { name: "p".to_owned(), mac: OUR_MAC, mtu: 1500, addresses: Vec::new(), twin: true }];
        let config = Config {
            ports,
            snat: Vec::new(),
            shared_snat: true,
            targets_max: crate::flow::TARGETS_MAX,
            tunnel: Tunnel::default(),
            node_port_addresses: Vec::new(),
            flows: FlowLimits::default(),
        };
        let mut snapshot = Compiler::new(config).initial();
        snapshot.vlans = vlans.iter().map(|vlan| Link::new(PortIndex(0), *vlan)).collect();
        snapshot
    }

    #[test]
    fn of_two_vlans_in_turn_one_frame_in_eight_is_looked_at_alone() {
        let Some(avx2) = Avx2::detect() else { return };
        let vlans = [7, 9].map(|id| Vlan::NONE.with(TagKind::Customer, id).unwrap());
        let snapshot = snapshot(&vlans);
        let tables = FlowTables { v4: FlowTable::new(64, 7).unwrap(), v6: FlowTable::new(64, 7).unwrap() };
        let frame = |number: usize| {
            let port = 5000 + number;
            let plain = match number % 3 {
                0 => Packet::tcp(&format!("[2001:db8:1::7]:{port}"), "[2001:db8::1:0]:80").build(),
                _ => Packet::tcp(&format!("198.51.100.7:{port}"), "192.0.2.100:80").build(),
            };
            let mut buffer = MemoryBuffer::new(&plain, 0);
            assert!(Link::new(PortIndex(0), vlans[number % 2]).tags().put_on(&mut buffer));
            buffer
        };
        let burst: Vec<MemoryBuffer> = (0..64).map(frame).collect();
        let mut recognition = Recognition::new(&snapshot, PortIndex(0).into());
        let mut plans = vec![Plan::unknown(); burst.len()];
        recognition.part(Some(avx2), &tables, &burst, &mut plans);
        assert!(!recognition.any_unrecognised);
        assert_eq!(recognition.alone, 9, "one of each group, and in the first group that of the first tag");
        for (number, plan) in plans.iter().enumerate() {
            let link = Link::new(PortIndex(0), vlans[number % 2]);
            assert_eq!(
                (plan.link, plan.head.shape.family()),
                (link, if number % 3 == 0 { Shape::V6 } else { Shape::V4 }),
                "{number}"
            );
        }
    }
}
