//! Who replicates flows with whom, and the key by which gateways of a group know each other.
//!
//! Invariant: nothing prints a key. Not here: how gateways prove that they have it (the gateway's agent).

use std::fmt;
use std::net::SocketAddr;

/// Bytes of a key: AES-256, and the output of SHA-256.
pub const KEY_BYTES: usize = 32;

/// The secret that gateways of a group share.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GroupKey([u8; KEY_BYTES]);

impl GroupKey {
    /// The key of these bytes, which should be random.
    #[must_use]
    pub const fn new(bytes: [u8; KEY_BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes, not to be shown.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl fmt::Debug for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupKey(..)")
    }
}

/// A gateway that replicates flows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Member {
    /// Its name.
    pub gateway: String,
    /// Where it replicates flows.
    pub replication: SocketAddr,
}

/// What a gateway needs to replicate flows, as its controller says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The key of the group.
    pub key: GroupKey,
    /// The other gateways.
    pub others: Vec<Member>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_not_printed() {
        let membership = Membership { key: GroupKey::new([7; KEY_BYTES]), others: Vec::new() };
        assert_eq!(format!("{membership:?}"), "Membership { key: GroupKey(..), others: [] }");
    }
}
