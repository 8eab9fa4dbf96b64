//! The Internet checksum: computed in full (RFC 1071) for packets that the engine writes, updated by differences (RFC
//! 1624) for packets that it rewrites.
//!
//! **Invariant:** a difference is never 0; "no change" is 0xffff. The sum of a checksum and a difference is therefore
//! never 0 either, and the result equals that of a full computation bit for bit, never the other zero of one's
//! complement. A wrong checksum stays wrong: the engine never repairs one. SCTP's checksum, a CRC32c, is a module of its own.

pub mod crc32c;

use super::address::{Address, Tuple};

/// The difference that decrementing the TTL makes to the checksum of an IPv4 header: the word of TTL and protocol
/// decreases by 0x0100.
pub const HOP_DELTA: u16 = !0x0100;

/// The differences that a rewrite makes to the checksums of every packet of a flow in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deltas {
    /// Change of the addresses, for the checksum of the IPv4 header.
    pub l3: u16,
    /// Change of the addresses (part of the pseudo header) and of the ports, for the checksums of TCP and UDP.
    pub l4: u16,
}

/// The differences between two tuples of one protocol.
#[must_use]
pub fn delta<A: Address>(old: &Tuple<A>, new: &Tuple<A>) -> Deltas {
    let addresses = |t: &Tuple<A>| address_sum(t.source) + address_sum(t.destination);
    let ports = |t: &Tuple<A>| u64::from(t.source_port) + u64::from(t.destination_port);
    let (old_addresses, new_addresses) = (addresses(old), addresses(new));
    Deltas {
        l3: difference(old_addresses, new_addresses),
        l4: difference(old_addresses + ports(old), new_addresses + ports(new)),
    }
}

/// The checksum after a difference is applied (RFC 1624 equation 3).
#[inline]
#[must_use]
pub fn apply(checksum: u16, delta: u16) -> u16 {
    let (sum, carry) = (!checksum).overflowing_add(delta);
    // After a carry the sum is at most 0xfffe, so there is no second carry.
    !(sum.wrapping_add(u16::from(carry)))
}

/// As [`apply`], for UDP: 0 means "none computed" (RFC 768; RFC 6935 permits it for IPv6 tunnels) and stays; a computed
/// 0 is sent as 0xffff.
#[inline(always)]
#[must_use]
pub fn apply_udp(checksum: u16, delta: u16) -> u16 {
    if checksum == 0 {
        return 0;
    }
    match apply(checksum, delta) {
        0 => 0xffff,
        changed => changed,
    }
}

/// The difference between one 16-bit word and its replacement.
#[must_use]
pub fn word_delta(old: u16, new: u16) -> u16 {
    difference(u64::from(old), u64::from(new))
}

/// Sum of the bytes as big-endian words; an odd last byte is padded with 0. Sums of pieces may be added if every piece
/// but the last has an even length.
#[must_use]
#[inline]
pub fn sum(bytes: &[u8]) -> u64 {
    let (words, odd) = bytes.as_chunks::<2>();
    let words: u64 = words.iter().map(|w| u64::from(u16::from_be_bytes(*w))).sum();
    words + odd.first().map_or(0, |b| u64::from(*b) << 8)
}

/// Sum of the pseudo header of IPv4 (RFC 9293 section 3.1) or IPv6 (RFC 8200 section 8.1). `len` counts the bytes of
/// the transport header and its data.
#[must_use]
pub fn pseudo_sum<A: Address>(source: A, destination: A, protocol: u8, len: usize) -> u64 {
    address_sum(source) + address_sum(destination) + u64::from(protocol) + len as u64
}

/// The checksum for a sum.
#[must_use]
#[inline]
pub fn finish(sum: u64) -> u16 {
    !fold(sum)
}

/// Whether the checksum of an IPv4 header of whole 32-bit words is correct. The sum uses the byte order of the machine:
/// whether it is all ones does not depend on the order.
#[inline]
#[must_use]
pub fn header_holds(header: &[u8]) -> bool {
    let (pairs, last) = header.as_chunks::<8>();
    let last = last.first_chunk().map_or(0, |word| u64::from(u32::from_ne_bytes(*word)));
    // 2^64 leaves 1 when divided by 0xffff, so each carry counts as 1.
    let sum = pairs.iter().map(|pair| u64::from_ne_bytes(*pair)).fold(last, |sum, pair| {
        let (sum, carry) = sum.overflowing_add(pair);
        sum + u64::from(carry)
    });
    // The first word is not 0. A sum above 0 folds to 0xffff exactly if 0xffff divides it, and a product with the inverse
    // of an odd divisor modulo 2^64 is small exactly if the divisor divides the number (Hacker's Delight, section 10-17).
    sum.wrapping_mul(INVERSE) <= u64::MAX / 0xffff
}

/// The inverse of 0xffff modulo 2^64.
const INVERSE: u64 = 0xfffe_fffe_fffe_ffff;
const _: () = assert!(INVERSE.wrapping_mul(0xffff) == 1);

/// The sum of an address. 2^16 counts as 1 in one's complement, so adding 32-bit words is correct.
fn address_sum<A: Address>(address: A) -> u64 {
    let wide = address.wide();
    let words = |pair: u64| (pair >> 32) + (pair & 0xffff_ffff);
    words((wide >> 64) as u64) + words((wide & 0xffff_ffff_ffff_ffff) as u64)
}

/// The difference that a change of some bytes, summed before and after, makes to a checksum over them.
pub(crate) fn difference(old: u64, new: u64) -> u16 {
    nonzero(fold(u64::from(!fold(old)) + u64::from(fold(new))))
}

#[inline]
fn nonzero(delta: u16) -> u16 {
    if delta == 0 { 0xffff } else { delta }
}

#[inline]
#[allow(clippy::cast_possible_truncation)] // the halves
fn fold(sum: u64) -> u16 {
    let (half, carry) = (sum as u32).overflowing_add((sum >> 32) as u32);
    // After a carry the sum is at most 2^32 - 2, so there is no second carry.
    let half = half + u32::from(carry);
    // Both halves of this sum are the sum of both halves; the carry out of the lower one enters the upper one.
    (half.wrapping_add(half.rotate_left(16)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_difference_is_never_zero() {
        let same = Tuple { source: 1_u32, destination: 2, source_port: 3, destination_port: 4, protocol: 6 };
        assert_eq!(delta(&same, &same), Deltas { l3: 0xffff, l4: 0xffff });
        assert_eq!(word_delta(0xffff, 0), 0xffff);
    }

    #[test]
    fn an_update_gives_the_same_zero_as_a_full_computation() {
        // The pitfall of RFC 1624 section 3: the older method gave 0xffff here.
        assert_eq!(apply(0xdd2f, word_delta(0x5555, 0x3285)), 0x0000);
        assert_eq!(apply(0xffff, 0xffff), 0x0000);
    }

    proptest! {
        #[test]
        fn sums_in_pieces_are_sums_of_the_whole(bytes in prop::collection::vec(any::<u8>(), 0..100), at in 0_usize..50) {
            let (head, tail) = bytes.split_at((at * 2).min(bytes.len() & !1));
            prop_assert_eq!(finish(sum(head) + sum(tail)), finish(sum(&bytes)));
        }

        #[test]
        fn the_difference_of_the_way_back_restores_the_checksum(
            old in any::<[u32; 3]>(), new in any::<[u32; 3]>(), checksum in 0_u16..0xffff,
        ) {
            let tuple = |t: [u32; 3]| Tuple {
                source: t[0], destination: t[1], source_port: (t[2] >> 16) as u16, destination_port: (t[2] & 0xffff) as u16,
                protocol: 6,
            };
            let there = delta(&tuple(old), &tuple(new));
            let back = delta(&tuple(new).reversed(), &tuple(old).reversed());
            prop_assert_eq!(apply(apply(checksum, there.l4), back.l4), checksum);
            prop_assert_eq!(apply(apply(checksum, there.l3), back.l3), checksum);
        }
    }
}
