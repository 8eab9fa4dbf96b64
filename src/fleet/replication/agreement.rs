//! The agreement of a group: settings that all its gateways share, so that each SNAT address has one owner.
//!
//! **Invariant:** two gateways with the same digest give each group the same SNAT addresses and the same VRID. Not here:
//! the handshake, which compares the digests (`channel`).

use std::net::IpAddr;

use ring::digest::{SHA256, digest};

/// Bytes of a digest: SHA-256.
pub(super) const DIGEST: usize = 32;

/// The settings of the election.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Agreement {
    /// Number of groups of VIPs.
    pub(super) groups: u8,
    /// VRID of the first group.
    pub(super) first_vrid: u8,
}

impl Agreement {
    /// The digest of these, and of the SNAT addresses of the groups: of each family as many as there are groups, in their
    /// order. Those beyond are each gateway's own.
    pub(super) fn digest(self, snat: &[IpAddr]) -> [u8; DIGEST] {
        let mut bytes = vec![self.groups, self.first_vrid];
        for is_ipv4 in [true, false] {
            let of_family = snat.iter().filter(|address| address.is_ipv4() == is_ipv4).take(self.groups.into());
            for address in of_family {
                match address {
                    IpAddr::V4(address) => bytes.extend([&[4][..], &address.octets()].concat()),
                    IpAddr::V6(address) => bytes.extend([&[6][..], &address.octets()].concat()),
                }
            }
        }
        let mut all = [0; DIGEST];
        all.copy_from_slice(digest(&SHA256, &bytes).as_ref());
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_vrids_and_the_addresses_of_groups_in_their_order_count_and_nothing_else() {
        let of = |groups, first_vrid, snat: &[&str]| {
            let snat: Vec<_> = snat.iter().map(|ip| ip.parse().unwrap()).collect();
            Agreement { groups, first_vrid }.digest(&snat)
        };
        let base = of(2, 101, &["10.0.0.3", "10.0.0.4", "fd00::3", "fd00::4"]);
        let same = [
            of(2, 101, &["10.0.0.3", "fd00::3", "fd00::4", "10.0.0.4"]),
            of(2, 101, &["10.0.0.3", "10.0.0.4", "10.0.0.9", "fd00::3", "fd00::4", "fd00::9"]),
        ];
        let others = [
            of(1, 101, &["10.0.0.3", "10.0.0.4", "fd00::3", "fd00::4"]),
            of(2, 102, &["10.0.0.3", "10.0.0.4", "fd00::3", "fd00::4"]),
            of(2, 101, &["10.0.0.4", "10.0.0.3", "fd00::3", "fd00::4"]),
            of(2, 101, &["10.0.0.3", "10.0.0.5", "fd00::3", "fd00::4"]),
            of(2, 101, &["10.0.0.3", "10.0.0.4", "fd00::3", "fd00::5"]),
            of(2, 101, &["10.0.0.3", "10.0.0.4"]),
        ];
        assert!(same.iter().all(|digest| *digest == base));
        assert!(others.iter().all(|digest| *digest != base));
    }
}
