//! Receive side scaling of a network card in software: the Toeplitz hash, computed bit by bit as published, and a
//! redirection table. No driver that tests can use has one.

/// How a card spreads frames over its receive queues.
#[derive(Clone, Debug)]
pub struct Rss {
    /// The secret key.
    pub key: [u8; 40],
    /// Redirection table: queues by the low bits of the hash; its length is a power of two.
    pub reta: Vec<u8>,
}

impl Rss {
    /// The queue of a frame, and the hash that is reported with it. Queue 0 and no hash for frames that are not hashed:
    /// anything but TCP and UDP in untagged whole packets without options or extension headers.
    #[must_use]
    pub fn queue(&self, frame: &[u8]) -> (u8, Option<u32>) {
        let Some(input) = input(frame) else { return (0, None) };
        let hash = toeplitz(&self.key, &input);
        (self.reta[hash as usize % self.reta.len()], Some(hash))
    }
}

/// Addresses and ports in the order of the frame.
fn input(frame: &[u8]) -> Option<Vec<u8>> {
    let is_spread = |protocol: u8| matches!(protocol, 6 | 17);
    match frame.get(12..15)? {
        [0x08, 0x00, 0x45] if is_spread(frame[23]) && frame[20] & 0x3f == 0 && frame[21] == 0 => Some(frame[26..38].to_vec()),
        [0x86, 0xdd, _] if is_spread(frame[20]) => Some(frame[22..58].to_vec()),
        _ => None,
    }
}

/// For each bit of the input that is set, adds the leftmost 32 bits of the key; after each bit the key moves left by
/// one.
fn toeplitz(key: &[u8; 40], input: &[u8]) -> u32 {
    let key_bit = |n: usize| key.get(n / 8).is_some_and(|byte| byte >> (7 - n % 8) & 1 == 1);
    let mut hash = 0;
    for bit in 0..8 * input.len() {
        if input[bit / 8] >> (7 - bit % 8) & 1 == 1 {
            hash ^= (0..32).fold(0_u32, |word, n| word << 1 | u32::from(key_bit(bit + n)));
        }
    }
    hash
}
