//! Checksums of eight packets, in the lower halves of words, in the byte order of the machine (RFC 1071 section 2.B).
//!
//! **Invariant:** they equal those of the loop for one packet at a time bit for bit.

use crate::wire::processor::{Avx2, Lanes};

/// The lower halves.
const HALF: u32 = 0xffff;

/// The sums of both halves of words.
#[inline(always)]
pub(super) fn halves(avx2: Avx2, words: Lanes) -> Lanes {
    (words & avx2.splat(HALF)) + words.right::<16>()
}

/// What other words add to the sums of checksums.
#[inline(always)]
pub(super) fn changed(avx2: Avx2, old: Lanes, new: Lanes) -> Lanes {
    halves(avx2, new) + halves(avx2, old ^ avx2.splat(u32::MAX))
}

/// The checksums for sums of few halves.
#[inline(always)]
pub(super) fn finished(avx2: Avx2, sums: Lanes) -> Lanes {
    halves(avx2, halves(avx2, sums)) ^ avx2.splat(HALF)
}

/// Checksums of UDP as they are sent: in place of a computed 0, which would mean "none", 0xffff (RFC 768).
#[inline(always)]
pub(super) fn sent(avx2: Avx2, computed: Lanes) -> Lanes {
    computed.or_where(computed.equals(avx2.splat(0)), avx2.splat(HALF))
}

/// The checksums of TCP or UDP after changes that add `sums`. A UDP checksum of 0 means "none" and stays.
#[inline(always)]
pub(super) fn updated(avx2: Avx2, checksums: Lanes, sums: Lanes, is_udp: Lanes) -> Lanes {
    let (zero, half) = (avx2.splat(0), avx2.splat(HALF));
    let computed = finished(avx2, sums + (checksums ^ half));
    let of_udp = sent(avx2, computed).or_where(checksums.equals(zero), zero);
    computed.or_where(is_udp, of_udp)
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)] // halves of random words
mod tests {
    use super::super::super::nat;
    use super::*;
    use crate::wire::checksum::difference;
    use crate::wire::processor::LANES;
    use crate::wire::{TupleKey, WireKey, split_mix};

    /// The header of IPv6 and the start of the next one.
    type Head = [u8; 60];
    const TCP_CHECKSUM: usize = 56;
    const UDP_CHECKSUM: usize = 46;

    /// Any addresses and ports, or in some rounds those of `other` with source and destination exchanged.
    fn key(round: u64, number: u64, other: Option<WireKey<9>>) -> WireKey<9> {
        if let Some(other) = other.filter(|_| round.is_multiple_of(8)) {
            return other.reversed();
        }
        let words: [[u8; 8]; 5] = std::array::from_fn(|at| split_mix(round << 16 | number << 8 | at as u64).to_le_bytes());
        WireKey::read_at(words.as_flattened(), 0)
    }

    /// The checksum, of TCP or UDP, after a packet with `old` got the addresses and ports of `new`, one packet at a time.
    fn one_by_one(from: &WireKey<9>, to: &WireKey<9>, old: u16, is_udp: bool) -> u16 {
        let mut head: Head = [1; 60];
        let at = if is_udp { UDP_CHECKSUM } else { TCP_CHECKSUM };
        head[at..at + 2].copy_from_slice(&old.to_ne_bytes());
        nat::rewrite_v6(&mut head, &to.reversed(), difference(from.sum(), to.sum()).into(), is_udp);
        u16::from_ne_bytes([head[at], head[at + 1]])
    }

    /// Checksums of which one becomes 0, and the other extremes.
    fn olds(round: u64, after_1: u16) -> [u16; 4] {
        // The checksum that becomes 0: what the change takes away, of 16 bits in one's complement.
        let becomes_zero = ((1 + 0xffff - u32::from(after_1)) % 0xffff) as u16;
        [0, u16::MAX, if becomes_zero == 0 { u16::MAX } else { becomes_zero }, split_mix(round) as u16]
    }

    #[test]
    fn eight_checksums_are_those_of_one_at_a_time_whatever_they_were() {
        let Some(avx2) = Avx2::detect() else { return };
        let mut sent_for_zero = 0;
        for round in 0..2_000 {
            let from = key(round, 0, None);
            let to = key(round, 1, Some(from));
            let is_udp = std::array::from_fn::<_, LANES, _>(|lane| lane % 2 == 0);
            let olds: [u16; LANES] = std::array::from_fn(|lane| {
                let after_1 = one_by_one(&from, &to, 1, is_udp[lane]);
                olds(round, after_1)[lane / 2]
            });
            let expected: [u32; LANES] = std::array::from_fn(|lane| one_by_one(&from, &to, olds[lane], is_udp[lane]).into());
            sent_for_zero += usize::from(expected[4] == 0xffff);
            let udp = avx2.lanes(is_udp.map(u32::from)).equals(avx2.splat(1));
            let checksums = avx2.lanes(olds.map(u32::from));
            // As for IPv4: of words, and as for IPv6: of the change that a flow has, in both directions.
            let words = |key: &WireKey<9>| {
                let (addresses, ports) = key.words();
                [addresses, &[ports]].concat()
            };
            let of_words = words(&from).into_iter().zip(words(&to));
            let sums = of_words.fold(avx2.splat(0), |sums, (a, b)| sums + changed(avx2, avx2.splat(a), avx2.splat(b)));
            let half = avx2.splat(HALF);
            let there = avx2.splat(difference(from.sum(), to.sum()).into());
            let back = avx2.splat(difference(to.sum(), from.sum()).into()) ^ half;
            for sums in [sums, there + half, back + half] {
                assert_eq!(updated(avx2, checksums, sums, udp).to_array(), expected, "round {round}");
            }
        }
        assert!(sent_for_zero >= 1_500, "{sent_for_zero} computed checksums of 0");
    }
}
