//! The filter of received frames by Ethernet address (FORWARDING 9).
//!
//! **Invariant:** one comparison identifies the frames that are addressed to the port alone, which nearly all are.
//!
//! Not here: which groups a protocol uses, and which frames for other stations go to the kernel.

use crate::stats::DropReason;
use crate::wire::{Ethernet, Mac, take};

/// Mask of the compared bits in the first 8 bytes of a frame: the destination, and the group bit of the source.
const COMPARED: u64 = u64::from_ne_bytes([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0]);

/// Kind of the destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SentTo {
    /// The port alone.
    Port,
    /// A group, broadcast included.
    Group,
    /// Another station.
    OtherStation,
}

/// The Ethernet address of a port, prepared for the comparison.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrameFilter {
    port: u64,
}

impl FrameFilter {
    pub(crate) fn new(mac: Mac) -> Self {
        let [a, b, c, d, e, f] = mac.0;
        Self { port: u64::from_ne_bytes([a, b, c, d, e, f, 0, 0]) }
    }

    /// Whether a frame goes to the port alone and comes from a station: the only test that each frame takes.
    #[inline(always)]
    pub(crate) fn is_for_port(self, frame: &[u8]) -> bool {
        frame.first_chunk().is_some_and(|first| (u64::from_ne_bytes(*first) ^ self.port) & COMPARED == 0)
    }

    /// The address of the port: the first six bytes of two words whose first byte is the lowest.
    #[inline(always)]
    pub(crate) fn destination(self) -> [u32; 2] {
        zerocopy::transmute!(self.port)
    }

    /// The kind of destination of a frame that arrived on the port.
    ///
    /// `not_our_mac`: the source is a group address, which no station has (IEEE 802.3 clause 3.2.3). `malformed`: the
    /// frame is too short.
    pub(crate) fn sent_to(self, frame: &[u8]) -> Result<SentTo, DropReason> {
        let (ethernet, _) = take::<Ethernet>(frame).ok_or(DropReason::Malformed)?;
        match ethernet {
            Ethernet { source: [first, ..], .. } if first & 1 != 0 => Err(DropReason::NotOurMac),
            _ if ethernet.is_group() => Ok(SentTo::Group),
            _ if self.is_for_port(frame) => Ok(SentTo::Port),
            _ => Ok(SentTo::OtherStation),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_destination_of_a_frame_follows_from_its_addresses(port in any::<[u8; 6]>(), other in any::<[u8; 6]>(), source in any::<[u8; 6]>(), ours in any::<bool>()) {
            let port = [port[0] & !1, port[1], port[2], port[3], port[4], port[5]];
            let destination = if ours { port } else { other };
            let expected = match (source[0] & 1, destination[0] & 1) {
                (1, _) => Err(DropReason::NotOurMac),
                (_, 1) => Ok(SentTo::Group),
                _ if destination == port => Ok(SentTo::Port),
                _ => Ok(SentTo::OtherStation),
            };
            let (frame, filter) = ([&destination[..], &source, &[8, 0]].concat(), FrameFilter::new(Mac(port)));
            prop_assert_eq!(filter.sent_to(&frame), expected);
            prop_assert_eq!(filter.is_for_port(&frame), expected == Ok(SentTo::Port));
            for len in 0..14 {
                prop_assert_eq!(filter.sent_to(&frame[..len]), Err(DropReason::Malformed));
            }
        }
    }

    #[test]
    fn each_bit_of_the_address_counts() {
        let port = Mac([2, 0, 0, 0, 0xaa, 1]);
        for bit in 1..48 {
            let mut destination = port.0;
            destination[bit / 8] ^= 1 << (bit % 8);
            let frame = [&destination[..], &[2; 6], &[8, 0]].concat();
            assert_eq!(FrameFilter::new(port).sent_to(&frame), Ok(SentTo::OtherStation), "bit {bit}");
        }
    }
}
