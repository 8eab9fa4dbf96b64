//! VLAN tags (IEEE 802.1Q and 802.1ad), as identifiers and in the bytes of frames. The engine works on frames without
//! tags: they are removed when a frame arrives and added when it leaves, so no code in between handles them.
//!
//! **Invariant:** removing the tags of a frame and adding them again gives the same frame, bit for bit.
//!
//! Not here: which VLANs exist.

use std::fmt;

use zerocopy::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::ethernet::{Ethernet, ether_type};
use crate::wire::buffer::{Buffer, take};

/// Bytes of a tag with its EtherType.
pub(crate) const TAG_BYTES: u16 = 4;
/// Maximum number of tags that are parsed (QinQ has two).
const TAGS_MAX: usize = 2;
/// Offset of the tags in a frame: after the two addresses.
const TAGS_AT: usize = 12;
/// The VLAN identifier within a tag's control word; the rest is priority and drop eligibility.
const ID_MASK: u16 = 0x0fff;

/// A tag: its EtherType, 0 for none, and its control word with the priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tag {
    ether_type: u16,
    control: u16,
}

/// The tags of a frame, outer first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tags([Tag; TAGS_MAX]);

impl Tags {
    /// No tags.
    pub(crate) const NONE: Self = Self([Tag { ether_type: 0, control: 0 }; TAGS_MAX]);

    /// The tags of a frame, at most two.
    pub(crate) fn of(frame: &[u8]) -> Self {
        let mut tags = Self::NONE;
        let Some((ethernet, mut rest)) = take::<Ethernet>(frame) else { return tags };
        let mut ether_type = ethernet.ether_type.get();
        for tag in &mut tags.0 {
            let Some((found, behind)) = take::<VlanTag>(rest).filter(|_| TagKind::of(ether_type).is_some()) else { break };
            *tag = Tag { ether_type, control: found.control.get() };
            (ether_type, rest) = (found.ether_type.get(), behind);
        }
        tags
    }

    /// The tags of a VLAN, with priority 0.
    pub(crate) fn of_vlan(vlan: Vlan) -> Self {
        let mut tags = Self::NONE;
        for (tag, (kind, id)) in tags.0.iter_mut().zip(vlan.tags()) {
            *tag = Tag { ether_type: kind.ether_type(), control: id };
        }
        tags
    }

    pub(crate) fn is_none(self) -> bool {
        self.0[0].ether_type == 0
    }

    fn all(self) -> impl Iterator<Item = Tag> {
        self.0.into_iter().filter(|tag| tag.ether_type != 0)
    }

    /// Bytes that the tags take in a frame.
    pub(crate) fn bytes(self) -> u16 {
        self.all().map(|_| TAG_BYTES).sum()
    }

    /// The VLAN of a frame with these tags. `None` when an identifier is reserved. A tag with identifier 0 carries only
    /// a priority (IEEE 802.1Q section 6.9): the frame belongs to the VLAN without it.
    pub(crate) fn vlan(self) -> Option<Vlan> {
        let mut vlan = Vlan::NONE;
        for Tag { ether_type, control } in self.all() {
            let id = control & ID_MASK;
            if id != 0 {
                vlan = vlan.with(TagKind::of(ether_type)?, id)?;
            }
        }
        Some(vlan)
    }

    /// The tags as they stand in a frame after the Ethernet addresses, and the number of bytes that they take.
    pub(crate) fn to_bytes(self) -> ([u8; TAGS_MAX * TAG_BYTES as usize], u8) {
        let mut bytes = [0; TAGS_MAX * TAG_BYTES as usize];
        for (field, tag) in bytes.chunks_exact_mut(usize::from(TAG_BYTES)).zip(self.all()) {
            field[..2].copy_from_slice(&tag.ether_type.to_be_bytes());
            field[2..].copy_from_slice(&tag.control.to_be_bytes());
        }
        (bytes, (self.bytes() & 0xff) as u8)
    }

    /// Removes these tags, which [`Tags::of`] found, from a frame.
    pub(crate) fn take_off(self, buffer: &mut impl Buffer) {
        let bytes = usize::from(self.bytes());
        if bytes + TAGS_AT <= buffer.bytes().len() {
            buffer.bytes_mut().copy_within(..TAGS_AT, bytes);
            buffer.trim_front(bytes);
        }
    }

    /// Adds the tags to a frame. Returns false, and changes nothing, when the buffer has no room in front.
    #[inline]
    pub(crate) fn put_on(self, buffer: &mut impl Buffer) -> bool {
        self.is_none() || self.put_some_on(buffer)
    }

    /// The same for tags that there are.
    fn put_some_on(self, buffer: &mut impl Buffer) -> bool {
        let (tags, bytes) = self.to_bytes();
        let bytes = usize::from(bytes);
        if buffer.bytes().len() < TAGS_AT || !buffer.prepend(bytes) {
            return false;
        }
        let frame = buffer.bytes_mut();
        frame.copy_within(bytes..bytes + TAGS_AT, 0);
        frame[TAGS_AT..TAGS_AT + bytes].copy_from_slice(&tags[..bytes]);
        true
    }
}

/// The payload after at most two tags of a frame: its EtherType, its bytes, and the number of bytes that the tags take.
pub(crate) fn behind(frame: &[u8]) -> Option<(u16, &[u8], u16)> {
    let bytes = Tags::of(frame).bytes();
    let ether_type = frame.get(TAGS_AT + usize::from(bytes)..)?.first_chunk()?;
    let rest = frame.get(usize::from(Ethernet::BYTES + bytes)..)?;
    Some((u16::from_be_bytes(*ether_type), rest, bytes))
}

/// The tag without its own EtherType.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct VlanTag {
    /// Priority (3 bits), drop eligibility (1 bit), VLAN identifier (12 bits).
    pub control: U16,
    /// EtherType of the payload after the tag.
    pub ether_type: U16,
}

/// The two kinds of tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TagKind {
    /// A customer tag, EtherType 0x8100 (IEEE 802.1Q).
    Customer,
    /// A service tag, EtherType 0x88a8 (IEEE 802.1ad).
    Service,
}
impl TagKind {
    /// The EtherType before the tag.
    #[must_use]
    pub const fn ether_type(self) -> u16 {
        match self {
            Self::Customer => ether_type::VLAN,
            Self::Service => ether_type::SERVICE_VLAN,
        }
    }

    /// The kind of tag that follows this EtherType.
    #[must_use]
    pub const fn of(ether_type: u16) -> Option<Self> {
        match ether_type {
            ether_type::VLAN => Some(Self::Customer),
            ether_type::SERVICE_VLAN => Some(Self::Service),
            _ => None,
        }
    }
}
/// Bits of one tag: identifier (12) and kind (1). 0 means no tag, since identifier 0 names no VLAN (IEEE 802.1Q table
/// 9-2).
const TAG_BITS: u32 = 13;
const SERVICE: u32 = 1 << 12;
const TAG: u32 = (1 << TAG_BITS) - 1;
/// The highest valid VLAN identifier; 4095 is reserved.
const ID_MAX: u16 = 4094;
/// No tag, one tag, or two with the outer one in the high bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vlan(u32);
impl Vlan {
    /// Untagged.
    pub const NONE: Self = Self(0);
    /// Bits of [`Vlan::bits`].
    pub(crate) const BITS: u32 = 2 * TAG_BITS;

    /// The tags in one number; 0 is untagged.
    pub(crate) const fn bits(self) -> u32 {
        self.0
    }

    /// The VLAN of the lower [`Vlan::BITS`] of a number from [`Vlan::bits`].
    pub(crate) const fn from_bits(bits: u32) -> Self {
        Self(bits & ((1 << Self::BITS) - 1))
    }

    /// Adds an inner tag. `None` when there are two already, or when the identifier is not in 1-4094.
    #[must_use]
    pub const fn with(self, kind: TagKind, id: u16) -> Option<Self> {
        if id == 0 || id > ID_MAX {
            return None;
        }
        let tag = match kind {
            TagKind::Customer => id as u32,
            TagKind::Service => SERVICE | id as u32,
        };
        match (self.0 >> TAG_BITS, self.0 & TAG) {
            (0, _) => Some(Self(tag << TAG_BITS)),
            (outer, 0) => Some(Self(outer << TAG_BITS | tag)),
            _ => None,
        }
    }

    /// The tags, outer first.
    pub fn tags(self) -> impl Iterator<Item = (TagKind, u16)> {
        [self.0 >> TAG_BITS, self.0 & TAG].into_iter().filter(|tag| *tag != 0).map(|tag| {
            let kind = if tag & SERVICE == 0 { TagKind::Customer } else { TagKind::Service };
            (kind, (tag & (SERVICE - 1)) as u16)
        })
    }
}
/// As Linux tools print it: `100`, or `100.7` for two tags.
impl fmt::Display for Vlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tags().enumerate().try_for_each(|(n, (_, id))| if n == 0 { write!(f, "{id}") } else { write!(f, ".{id}") })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::port::MemoryBuffer;

    proptest! {
        #[test]
        fn removing_and_adding_tags_gives_the_same_frame(
            addresses in any::<[u8; 12]>(), tags in prop::collection::vec((any::<bool>(), any::<u16>()), 0..4),
            rest in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut frame = addresses.to_vec();
            for (service, control) in &tags {
                frame.extend(if *service { [0x88, 0xa8] } else { [0x81, 0] });
                frame.extend(control.to_be_bytes());
            }
            frame.extend([8, 0]);
            frame.extend(rest);
            let found = Tags::of(&frame);
            prop_assert_eq!(usize::from(found.bytes()), tags.len().min(2) * 4);
            let mut buffer = MemoryBuffer::new(&frame, 0);
            found.take_off(&mut buffer);
            let mut bare = addresses.to_vec();
            bare.extend(&frame[12 + usize::from(found.bytes())..]);
            prop_assert_eq!(buffer.bytes(), &bare);
            prop_assert!(found.put_on(&mut buffer));
            prop_assert_eq!(buffer.bytes(), &frame);
        }
    }

    #[test]
    fn a_frame_cut_within_a_tag_has_none() {
        let frame = [&[2; 12][..], &[0x81, 0, 0, 5, 8, 0]].concat();
        for len in 0..frame.len() {
            assert_eq!(Tags::of(&frame[..len]), Tags::NONE, "{len} bytes");
        }
        assert_eq!(Tags::of(&frame).vlan().unwrap().to_string(), "5");
    }
}
