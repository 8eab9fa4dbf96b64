//! CRC32c (RFC 9260 appendix A, RFC 3720 section 12.1), the checksum of SCTP: computed in full for the few bytes that
//! the engine writes, updated by differences for packets that it rewrites.
//!
//! A CRC is linear: the difference that a change of the first four bytes makes depends on the change and on the number
//! of bytes that follow, not on their values. So the engine never reads a payload, and a wrong checksum stays wrong.
//!
//! Polynomials are *reflected*: bit 31 is the coefficient of x^0, bit 0 that of x^31.
//!
//! **Invariant:** a difference has the effect of a full computation, for every length of an IP packet.
//!
//! Not here: where the checksum is in a frame.

/// The Castagnoli polynomial, reflected.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// x^0.
const ONE: u32 = 1 << 31;

/// x^(8n) for n below 256.
const BYTES: [u32; 256] = powers(times_x8(ONE));

/// x^(8 * 256 n) for n below 256. With [`BYTES`], two multiplications cover every length of an IP packet. Each table
/// takes 1 KiB.
const PAGES: [u32; 256] = powers(times_x8(BYTES[255]));

const fn powers(base: u32) -> [u32; 256] {
    let mut table = [ONE; 256];
    let mut n = 1;
    while n < table.len() {
        table[n] = product(table[n - 1], base);
        n += 1;
    }
    table
}

const fn times_x(a: u32) -> u32 {
    // Without a branch: the bits of checksums are close to random, so a branch would be mispredicted.
    a >> 1 ^ POLYNOMIAL & (a & 1).wrapping_neg()
}

const fn times_x8(mut a: u32) -> u32 {
    let mut n = 0;
    while n < 8 {
        a = times_x(a);
        n += 1;
    }
    a
}

/// The product of two polynomials modulo the generator.
const fn product(a: u32, mut b: u32) -> u32 {
    let mut sum = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        sum ^= b & (a >> bit & 1).wrapping_neg();
        b = times_x(b);
    }
    sum
}

/// The CRC of the bytes, computed bit by bit.
#[must_use]
pub(crate) fn full(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| times_x8(crc ^ u32::from(*byte)))
}

/// The exclusive-or difference that a change of source and destination port, the first four bytes, makes to the CRC of
/// an SCTP packet of `len` bytes.
#[must_use]
pub(crate) fn difference(old: [u16; 2], new: [u16; 2], len: u16) -> u32 {
    let [page, byte] = len.to_be_bytes();
    let bits = |[source, destination]: [u16; 2]| u32::from(source.swap_bytes()) | u32::from(destination.swap_bytes()) << 16;
    let change = bits(old) ^ bits(new);
    product(product(change, BYTES[usize::from(byte)]), PAGES[usize::from(page)])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::slow_crc32c;

    #[test]
    fn known_answers() {
        // RFC 3720 appendix B.4, and the check value of the CRC catalogues.
        let rising: Vec<u8> = (0..32).collect();
        let falling: Vec<u8> = (0..32).rev().collect();
        let rows: [(&[u8], u32); 5] = [
            (&[0; 32], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&rising, 0x46dd_794e),
            (&falling, 0x113f_db5c),
            (b"123456789", 0xe306_9283),
        ];
        for (bytes, expected) in rows {
            assert_eq!((full(bytes), slow_crc32c(bytes)), (expected, expected), "{bytes:02x?}");
        }
    }

    fn ports([a, b, c, d]: [u8; 4]) -> [u16; 2] {
        [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])]
    }

    #[test]
    fn a_change_counts_as_in_full_at_every_length() {
        let (old, new) = ([0x15, 0xb3, 0x00, 0x50], [0x04, 0x01, 0x1f, 0x90]);
        // The difference of the change, extended by one zero byte at a time.
        let mut carried = full(&old) ^ full(&new);
        for len in 4..=u16::MAX {
            assert_eq!(difference(ports(old), ports(new), len), carried, "{len}");
            carried = times_x8(carried);
        }
    }

    proptest! {
        #[test]
        fn a_change_counts_as_in_full(
            old in any::<[u8; 4]>(), new in any::<[u8; 4]>(), rest in prop::collection::vec(any::<u8>(), 0..3000),
        ) {
            let message = |head: [u8; 4]| [&head[..], &rest].concat();
            let len = u16::try_from(rest.len() + 4).unwrap_or(u16::MAX);
            let expected = slow_crc32c(&message(old)) ^ slow_crc32c(&message(new));
            prop_assert_eq!(difference(ports(old), ports(new), len), expected);
        }
    }
}
