//! The Toeplitz hash, by which network cards spread packets over receive queues (Microsoft, "RSS hashing types"). The
//! input is source address, destination address, source port, destination port in network order. For each bit that is
//! set, the 32 bits of the key that begin at its position are added by exclusive-or.
//!
//! **Invariant:** the hash is linear: the hash of a tuple is the hash of the tuple without its destination port,
//! exclusive-or the hash of the port alone. The choice of SNAT ports relies on it.
//!
//! Not here: which queue a hash leads to.

use super::tuple_hash::split_mix;
use crate::wire::address::{Address, Tuple};

/// Bytes of a key: IPv6 addresses and ports take 36 bytes, and each bit needs the 32 bits that follow it.
pub const KEY_BYTES: usize = 40;
/// A key as a device takes it.
pub type RssKey = [u8; KEY_BYTES];

/// Entries of the redirection table (RETA), a power of two: the smallest table of common network cards. In larger
/// tables it is repeated, so that the same bits of a hash decide.
pub const RETA_ENTRIES: usize = 128;

/// Half bytes of the longest input (36 bytes).
const NIBBLES: usize = 72;

/// The hash function of one key. 72 tables of 16 words take 4.6 KiB and stay in the L1 cache; tables by whole bytes
/// would take 36 KiB.
#[derive(Clone, Debug)]
pub struct Toeplitz {
    tables: Box<[[u32; 16]; NIBBLES]>,
}

impl Toeplitz {
    /// Builds the tables of this key.
    #[must_use]
    pub fn new(key: &RssKey) -> Self {
        let mut tables = Box::new([[0; 16]; NIBBLES]);
        for (nibble, table) in tables.iter_mut().enumerate() {
            for (value, entry) in (0_u8..).zip(table.iter_mut()) {
                let set = (0..4).filter(|bit| value >> (3 - bit) & 1 == 1);
                *entry = set.fold(0, |hash, bit| hash ^ window(key, nibble * 4 + bit));
            }
        }
        Self { tables }
    }

    /// The hash of a tuple with its ports. The protocol is not hashed.
    #[must_use]
    #[inline]
    pub fn hash<A: Address>(&self, tuple: &Tuple<A>) -> u32 {
        let (source, destination) = (tuple.source.wide().to_be_bytes(), tuple.destination.wide().to_be_bytes());
        self.part(0, &source[16 - A::BYTES..])
            ^ self.part(A::BYTES, &destination[16 - A::BYTES..])
            ^ self.part(2 * A::BYTES, &tuple.source_port.to_be_bytes())
            ^ self.part(2 * A::BYTES + 2, &tuple.destination_port.to_be_bytes())
    }

    /// The share of a destination port in the hash of a tuple of this family.
    #[must_use]
    pub fn of_destination_port<A: Address>(&self, port: u16) -> u32 {
        self.part(2 * A::BYTES + 2, &port.to_be_bytes())
    }

    /// The share in the hash of these bytes at byte `at` of the input.
    #[inline(always)]
    fn part(&self, at: usize, bytes: &[u8]) -> u32 {
        let tables = self.tables.get(2 * at..2 * (at + bytes.len())).unwrap_or(&[]);
        let of_byte = |(tables, byte): (&[[u32; 16]], &u8)| match tables {
            [high, low] => high[usize::from(byte >> 4)] ^ low[usize::from(byte & 15)],
            _ => 0,
        };
        tables.chunks_exact(2).zip(bytes).map(of_byte).fold(0, |hash, share| hash ^ share)
    }
}

/// The 32 bits of the key from bit `at` on.
#[allow(clippy::cast_possible_truncation)] // the last 32 of 33 to 40 bits
fn window(key: &RssKey, at: usize) -> u32 {
    let byte = |n: usize| u64::from(key.get(n).copied().unwrap_or(0));
    let five = (0..5).fold(0, |bits, n| bits << 8 | byte(at / 8 + n));
    (five >> (8 - at % 8)) as u32
}

/// An endless, fixed sequence of keys from a seed.
pub(crate) fn rss_keys(seed: u64) -> impl Iterator<Item = RssKey> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        let mut key = [0; KEY_BYTES];
        for bytes in key.chunks_mut(8) {
            state = split_mix(state);
            bytes.copy_from_slice(&state.to_be_bytes());
        }
        key
    })
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    /// The key of Microsoft's verification suite.
    const KEY: RssKey = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca, 0x2b, 0xcb,
        0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ];

    fn tuple<A: Address>(source: &str, source_port: u16, destination: &str, destination_port: u16) -> Tuple<A> {
        let address = |text: &str| A::from_ip(text.parse::<IpAddr>().unwrap()).unwrap();
        Tuple { source: address(source), destination: address(destination), source_port, destination_port, protocol: 6 }
    }

    #[test]
    fn the_hash_is_that_of_the_published_verification_suite() {
        let rows = [
            ("66.9.149.187", 2794, "161.142.100.80", 1766, 0x51cc_c178),
            ("199.92.111.2", 14230, "65.69.140.83", 4739, 0xc626_b0ea),
            ("24.19.198.95", 12898, "12.22.207.184", 38024, 0x5c2b_394a),
            ("38.27.205.30", 48228, "209.142.163.6", 2217, 0xafc7_327f),
            ("153.39.163.191", 44251, "202.188.127.2", 1303, 0x10e8_28a2),
        ];
        let toeplitz = Toeplitz::new(&KEY);
        for (source, source_port, destination, destination_port, hash) in rows {
            assert_eq!(toeplitz.hash(&tuple::<u32>(source, source_port, destination, destination_port)), hash, "{source}");
        }
        let rows = [
            ("3ffe:2501:200:1fff::7", 2794, "3ffe:2501:200:3::1", 1766, 0x4020_7d3d),
            ("3ffe:501:8::260:97ff:fe40:efab", 14230, "ff02::1", 4739, 0xdde5_1bbf),
            ("3ffe:1900:4545:3:200:f8ff:fe21:67cf", 44251, "fe80::200:f8ff:fe21:67cf", 38024, 0x02d1_feef),
        ];
        for (source, source_port, destination, destination_port, hash) in rows {
            assert_eq!(toeplitz.hash(&tuple::<u128>(source, source_port, destination, destination_port)), hash, "{source}");
        }
    }

    #[test]
    fn the_destination_port_can_be_added_later() {
        let toeplitz = Toeplitz::new(&KEY);
        for port in [1, 0x8000, 1766, 65_535] {
            let whole = tuple::<u32>("66.9.149.187", 2794, "161.142.100.80", port);
            let partial = toeplitz.hash(&Tuple { destination_port: 0, ..whole });
            assert_eq!(partial ^ toeplitz.of_destination_port::<u32>(port), toeplitz.hash(&whole));
            let whole = tuple::<u128>("3ffe:2501:200:1fff::7", 2794, "3ffe:2501:200:3::1", port);
            let partial = toeplitz.hash(&Tuple { destination_port: 0, ..whole });
            assert_eq!(partial ^ toeplitz.of_destination_port::<u128>(port), toeplitz.hash(&whole));
        }
    }
}
