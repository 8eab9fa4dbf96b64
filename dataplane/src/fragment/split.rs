//! Fragments an IPv4 packet that exceeds the MTU of its exit, as a router does when the sender permits it (RFC 791
//! section 3.2, RFC 1812 section 5.3.1).
//!
//! **Invariant:** fragments have the packet's identification and hop limit and correct header checksums; together they
//! contain its data once, in order.
//!
//! Not here: packets with options, only some of which belong into every fragment. They are rare, and dropped.

use crate::port::Burst;
use crate::wire::checksum::{apply, word_delta};
use crate::wire::{Buffer, Ipv4, take, take_mut};

/// A part of a packet's data, in bytes.
#[derive(Clone, Copy)]
struct SplitPiece {
    begins_at: usize,
    len: usize,
    is_last: bool,
}

/// Turns the packet in `buffer`, whose IP header begins at `network_offset`, into a first fragment of at most `mtu`
/// bytes. Returns the other fragments, in order, in buffers from `allocate`. `None`, and no change, when the packet has
/// options, fits whole, would take more than a burst of fragments, or there are no buffers.
#[must_use]
pub(crate) fn split<B: Buffer>(
    buffer: &mut B,
    network_offset: usize,
    mtu: u16,
    mut allocate: impl FnMut() -> Option<B>,
) -> Option<Burst<B>> {
    let head_len = network_offset + usize::from(Ipv4::BYTES);
    let (ip, _) = buffer.bytes().get(network_offset..).and_then(take::<Ipv4>)?;
    let data_len = usize::from(ip.total_len.get().checked_sub(Ipv4::BYTES)?);
    // All fragments but the last end where another can begin.
    let piece_len = usize::from(mtu.checked_sub(Ipv4::BYTES)? & !7);
    let is_plain = ip.version_ihl == Ipv4::PLAIN && ip.fragmentation.get() & Ipv4::DONT_FRAGMENT == 0;
    if !is_plain || piece_len == 0 || data_len <= piece_len {
        return None;
    }
    let mut rest = Burst::new();
    for begins_at in (piece_len..data_len).step_by(piece_len) {
        let len = piece_len.min(data_len - begins_at);
        let mut piece = allocate().filter(|_| !rest.is_full())?;
        let head = buffer.bytes().get(..head_len)?;
        let data = buffer.bytes().get(head_len + begins_at..head_len + begins_at + len)?;
        if !piece.resize(head_len + len) {
            return None;
        }
        let (head_place, data_place) = piece.bytes_mut().split_at_mut_checked(head_len)?;
        head_place.copy_from_slice(head);
        data_place.copy_from_slice(data);
        mark(&mut piece, network_offset, SplitPiece { begins_at, len, is_last: begins_at + len == data_len })?;
        rest.push(piece);
    }
    // The packet gets shorter, so there is room.
    mark(buffer, network_offset, SplitPiece { begins_at: 0, len: piece_len, is_last: false })?;
    buffer.resize(head_len + piece_len).then_some(rest)
}

/// Writes length and position into the header of a fragment.
fn mark<B: Buffer>(buffer: &mut B, network_offset: usize, piece: SplitPiece) -> Option<()> {
    let (ip, _) = buffer.bytes_mut().get_mut(network_offset..).and_then(take_mut::<Ipv4>)?;
    let (old_len, old_field) = (ip.total_len.get(), ip.fragmentation.get());
    let total_len = Ipv4::BYTES + u16::try_from(piece.len).ok()?;
    // The packet may be a fragment itself: its offset and "more fragments" carry over into the new ones.
    let more = if piece.is_last { 0 } else { Ipv4::MORE_FRAGMENTS };
    let field = (old_field + u16::try_from(piece.begins_at / 8).ok()?) | more;
    ip.total_len.set(total_len);
    ip.fragmentation.set(field);
    ip.checksum.set(apply(apply(ip.checksum.get(), word_delta(old_len, total_len)), word_delta(old_field, field)));
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::MemoryBuffer;
    use crate::testing::{Packet, fragments};
    use proptest::prelude::*;

    fn pieces(frame: &[u8], mtu: u16) -> Option<Vec<Vec<u8>>> {
        let mut buffer = MemoryBuffer::new(frame, 1);
        let Some(rest) = split(&mut buffer, 14, mtu, || Some(MemoryBuffer::default())) else {
            assert_eq!(buffer.bytes(), frame, "unchanged");
            return None;
        };
        Some([&buffer].into_iter().chain(&rest).map(|buffer| buffer.bytes().to_vec()).collect())
    }

    fn datagram(len: usize) -> Vec<u8> {
        let data: Vec<u8> = (0..=250).cycle().take(len).collect();
        Packet { fragmentation: 0, ..Packet::udp("198.51.100.7:5555", "192.0.2.101:53").payload(&data) }.build()
    }

    proptest! {
        #[test]
        fn pieces_are_the_fragments_that_a_sender_would_have_made(len in 0_usize..4000, eights in 25_u16..200) {
            let frame = datagram(len);
            let mtu = 20 + eights * 8 + 5; // the rest of the division by eight stays unused
            let expected = fragments(&frame, usize::from(eights) * 8, 0x1234);
            match pieces(&frame, mtu) {
                Some(found) => prop_assert_eq!(found, expected),
                None => prop_assert_eq!(expected.len(), 1),
            }
        }

        #[test]
        fn a_fragment_that_is_fragmented_again_gives_fragments_of_the_whole(len in 1000_usize..3000) {
            let frame = datagram(len);
            let again: Vec<_> = fragments(&frame, 800, 0x1234)
                .iter()
                .flat_map(|piece| pieces(piece, 220).unwrap_or_else(|| vec![piece.clone()]))
                .collect();
            prop_assert_eq!(again, fragments(&frame, 200, 0x1234));
        }
    }

    #[test]
    fn what_cannot_be_cut_stays_whole() {
        let mut forbidden = datagram(1000);
        forbidden[20] |= 0x40;
        let options = Packet { fragmentation: 0, options: vec![1; 4], ..Packet::udp("198.51.100.7:5", "192.0.2.101:53") };
        let rows = [
            ("it says so", forbidden, 500),
            ("options", options.payload(&[0; 1000]).build(), 500),
            ("more pieces than a burst", datagram(8000), 68),
            ("no room for data", datagram(1000), 27),
        ];
        for (sentence, frame, mtu) in rows {
            assert_eq!(pieces(&frame, mtu), None, "{sentence}");
        }
        let mut buffer = MemoryBuffer::new(&datagram(1000), 1);
        assert!(split(&mut buffer, 14, 500, || None).is_none(), "no buffers");
    }
}
