//! Receive side scaling of a network card in software: the Toeplitz hash, computed bit by bit as published, and a
//! redirection table, for tests of the engine alone.

use crate::wire::RssKey;
use crate::workers::RssKind;

/// How a card spreads frames over its receive queues.
#[derive(Clone, Debug)]
pub struct Rss {
    /// The secret keys by kind of packets, in the order of [`RssKind::ALL`]: on a card without faults the same; `None`
    /// of a kind that the card does not hash.
    pub keys: [Option<RssKey>; 4],
    /// Redirection table: queues by the low bits of the hash; its length is a power of two.
    pub reta: Vec<u8>,
}

impl Rss {
    /// A card that hashes all kinds by this key.
    #[must_use]
    pub fn new(key: RssKey, reta: Vec<u8>) -> Self {
        Self { keys: [Some(key); 4], reta }
    }

    /// The same card with this key for some kinds of packets; `None`: it does not hash them.
    #[must_use]
    pub fn with_key(mut self, key: Option<RssKey>, kinds: &[RssKind]) -> Self {
        kinds.iter().for_each(|kind| self.keys[*kind as usize] = key);
        self
    }

    /// The queue of a frame, and the hash that is reported with it. Queue 0 and no hash for frames that are not hashed:
    /// anything but TCP and UDP in untagged whole packets without options or extension headers, and other kinds than
    /// those with a key.
    #[must_use]
    pub fn queue(&self, frame: &[u8]) -> (u8, Option<u32>) {
        let input = input(frame).and_then(|(kind, input)| Some((self.keys[kind as usize]?, input)));
        let Some((key, input)) = input else { return (0, None) };
        let hash = toeplitz(&key, &input);
        (self.reta[hash as usize % self.reta.len()], Some(hash))
    }
}

/// The kind of a packet; addresses and ports in the order of the frame.
fn input(frame: &[u8]) -> Option<(RssKind, Vec<u8>)> {
    let kind = |protocol: u8, [tcp, udp]: [RssKind; 2]| match protocol {
        6 => Some(tcp),
        17 => Some(udp),
        _ => None,
    };
    match frame.get(12..15)? {
        [0x08, 0x00, 0x45] if frame[20] & 0x3f == 0 && frame[21] == 0 => {
            Some((kind(frame[23], [RssKind::TcpV4, RssKind::UdpV4])?, frame[26..38].to_vec()))
        }
        [0x86, 0xdd, _] => Some((kind(frame[20], [RssKind::TcpV6, RssKind::UdpV6])?, frame[22..58].to_vec())),
        _ => None,
    }
}

/// For each bit of the input that is set, adds the leftmost 32 bits of the key; after each bit the key moves left by
/// one.
fn toeplitz(key: &RssKey, input: &[u8]) -> u32 {
    let key_bit = |n: usize| key.get(n / 8).is_some_and(|byte| byte >> (7 - n % 8) & 1 == 1);
    let (mut hash, mut leftmost) = (0, u32::from_be_bytes([key[0], key[1], key[2], key[3]]));
    for bit in 0..8 * input.len() {
        if input[bit / 8] >> (7 - bit % 8) & 1 == 1 {
            hash ^= leftmost;
        }
        leftmost = leftmost << 1 | u32::from(key_bit(bit + 32));
    }
    hash
}
