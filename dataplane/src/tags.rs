//! VLAN tags as they stand in frames. The engine works on frames without tags: they are taken off where a frame comes in
//! and put on where it leaves, so that nothing between knows of them.
//!
//! **Invariant:** a frame whose tags were taken off and put on again is the same, bit for bit.

use crate::link::{Link, TagKind, Vlan};
use crate::wire::{Ethernet, VlanTag, take};
use crate::{Buffer, PortIndex};

/// Bytes of a tag with its EtherType.
const TAG_BYTES: u16 = 4;
/// Tags that are looked through, at most (QinQ has two).
const TAGS_MAX: usize = 2;
/// Where tags stand in a frame: after the two addresses.
const TAGS_AT: usize = 12;
/// The VLAN identifier within a tag's control word; the rest is priority and drop eligibility.
const ID_MASK: u16 = 0x0fff;

/// A tag: the EtherType before it, 0 where there is none, and its control word with the priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tag {
    ether_type: u16,
    control: u16,
}

/// The tags of a frame, the outer first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tags([Tag; TAGS_MAX]);

impl Tags {
    /// No tags.
    pub(crate) const NONE: Self = Self([Tag { ether_type: 0, control: 0 }; TAGS_MAX]);

    /// Those of a frame, two at most.
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

    /// Those that frames of a link leave with. Their priority is 0, as of Linux's own: it is a matter of one link, and what
    /// goes from link to link is the DSCP.
    pub(crate) fn on(link: Link) -> Self {
        let mut tags = Self::NONE;
        for (tag, (kind, id)) in tags.0.iter_mut().zip(link.vlan().tags()) {
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

    /// Bytes that they take in a frame.
    pub(crate) fn bytes(self) -> u16 {
        self.all().map(|_| TAG_BYTES).sum()
    }

    /// The link of a frame with these tags. None when an identifier is reserved. A tag of identifier 0 only carries a
    /// priority (IEEE 802.1Q section 6.9): the frame is of the link without it.
    pub(crate) fn link(self, port: PortIndex) -> Option<Link> {
        let mut vlan = Vlan::NONE;
        for Tag { ether_type, control } in self.all() {
            let id = control & ID_MASK;
            if id != 0 {
                vlan = vlan.with(TagKind::of(ether_type)?, id)?;
            }
        }
        Some(Link::new(port, vlan))
    }

    /// Takes the first tags off a frame, these, which [`Tags::of`] found there.
    pub(crate) fn take_off(self, buffer: &mut impl Buffer) {
        let bytes = usize::from(self.bytes());
        if bytes + TAGS_AT <= buffer.bytes().len() {
            buffer.bytes_mut().copy_within(..TAGS_AT, bytes);
            buffer.trim_front(bytes);
        }
    }

    /// Puts them on a frame. False, and nothing changed, when the buffer has no room before the frame.
    pub(crate) fn put_on(self, buffer: &mut impl Buffer) -> bool {
        let bytes = usize::from(self.bytes());
        if bytes == 0 {
            return true;
        }
        if buffer.bytes().len() < TAGS_AT || !buffer.prepend(bytes) {
            return false;
        }
        let frame = buffer.bytes_mut();
        frame.copy_within(bytes..bytes + TAGS_AT, 0);
        for (place, tag) in frame[TAGS_AT..].chunks_exact_mut(usize::from(TAG_BYTES)).zip(self.all()) {
            place[..2].copy_from_slice(&tag.ether_type.to_be_bytes());
            place[2..].copy_from_slice(&tag.control.to_be_bytes());
        }
        true
    }
}

/// What follows the tags of a frame, two at most: its EtherType, and the rest with the bytes that tags take before it.
pub(crate) fn behind(frame: &[u8]) -> Option<(u16, &[u8], u16)> {
    let bytes = Tags::of(frame).bytes();
    let ether_type = frame.get(TAGS_AT + usize::from(bytes)..)?.first_chunk()?;
    let rest = frame.get(usize::from(Ethernet::BYTES + bytes)..)?;
    Some((u16::from_be_bytes(*ether_type), rest, bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::MemoryBuffer;

    proptest! {
        #[test]
        fn what_is_taken_off_and_put_on_again_is_the_same(
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
        assert_eq!(Tags::of(&frame).link(PortIndex(3)).unwrap().vlan().to_string(), "5");
    }
}
