//! Fragmentation and reassembly for tests, for untagged frames without IPv4 options or other IPv6 extension headers.
//! Shares no code with the engine.
#![allow(clippy::expect_used, clippy::panic, reason = "a test that asks for an impossible frame shall fail there")]

use super::checksums::{len16, slow_checksum};

/// Offset of the end of an IPv4 header.
const V4_END: usize = 34;
/// Offset of the end of an IPv6 header.
const V6_END: usize = 54;

fn is_v4(frame: &[u8]) -> bool {
    frame[12..14] == [8, 0]
}

fn word(frame: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

fn set_word(frame: &mut [u8], at: usize, word: u16) {
    frame[at..at + 2].copy_from_slice(&word.to_be_bytes());
}

/// Writes the checksum of an IPv4 header.
fn sum_up(head: &mut [u8]) {
    set_word(head, 24, 0);
    let sum = slow_checksum(&head[14..V4_END]);
    set_word(head, 24, sum);
}

/// The fragments of a packet, in order, with `bytes` bytes of data (a multiple of 8) in each but the last.
#[must_use]
pub fn fragments(frame: &[u8], bytes: usize, identification: u32) -> Vec<Vec<u8>> {
    assert_eq!(bytes % 8, 0, "a multiple of 8");
    let (head, data) = frame.split_at(if is_v4(frame) { V4_END } else { V6_END });
    let piece = |(n, piece): (usize, &[u8])| {
        let (offset, more) = (n * bytes, (n + 1) * bytes < data.len());
        let mut head = head.to_vec();
        if is_v4(&head) {
            set_word(&mut head, 16, len16(20 + piece.len()));
            head[18..20].copy_from_slice(&identification.to_be_bytes()[2..]);
            set_word(&mut head, 20, len16(offset / 8) | u16::from(more) << 13);
            sum_up(&mut head);
        } else {
            set_word(&mut head, 18, len16(8 + piece.len()));
            let next = std::mem::replace(&mut head[20], 44);
            head.extend([next, 0]);
            head.extend((len16(offset) | u16::from(more)).to_be_bytes());
            head.extend(identification.to_be_bytes());
        }
        [head, piece.to_vec()].concat()
    };
    data.chunks(bytes).enumerate().map(piece).collect()
}

/// The identification in a fragment or, for IPv4, in a whole packet.
#[must_use]
pub fn identification(frame: &[u8]) -> u32 {
    if is_v4(frame) { word(frame, 18).into() } else { u32::from(word(frame, 58)) << 16 | u32::from(word(frame, 60)) }
}

fn offset(frame: &[u8]) -> usize {
    usize::from(if is_v4(frame) { (word(frame, 20) & 0x1fff) << 3 } else { word(frame, 56) & 0xfff8 })
}

/// The packet that a receiver reassembles from these fragments. Panics unless they are of one datagram, cover it
/// without a hole, and overlap only as exact copies.
#[must_use]
pub fn reassembled(fragments: &[Vec<u8>]) -> Vec<u8> {
    let mut ordered: Vec<_> = fragments.iter().collect();
    ordered.sort_by_key(|fragment| offset(fragment));
    ordered.dedup();
    let first = ordered.first().expect("fragments");
    let mut data = Vec::new();
    for fragment in &ordered {
        assert_eq!(identification(fragment), identification(first), "one datagram");
        assert_eq!(offset(fragment), data.len(), "no hole");
        data.extend(&fragment[if is_v4(first) { V4_END } else { V6_END + 8 }..]);
    }
    let mut head = first[..if is_v4(first) { V4_END } else { V6_END }].to_vec();
    if is_v4(first) {
        set_word(&mut head, 16, len16(20 + data.len()));
        set_word(&mut head, 20, 0);
        sum_up(&mut head);
    } else {
        set_word(&mut head, 18, len16(data.len()));
        head[20] = first[54];
    }
    [head, data].concat()
}
