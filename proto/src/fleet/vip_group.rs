//! The group of a VIP: gateways elect one owner for each group of VIPs, not for each VIP.
//!
//! Invariant: the group of an address never changes from release to release, because gateways of different releases
//! must agree on it. Not here: the election.

use std::net::IpAddr;

use crate::limits::VIP_GROUPS_MAX;

/// Parameters of FNV-1a with 64 bits (RFC 9923).
const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

/// FNV-1a with 64 bits over these bytes.
#[must_use]
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(OFFSET_BASIS, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
}

/// The group of a VIP among `groups`, from 0: FNV-1a with 64 bits over the address's 4 or 16 bytes in network order,
/// modulo the number of groups (1 to [`VIP_GROUPS_MAX`]; a number outside is taken as the nearest of these).
#[must_use]
pub fn vip_group(vip: IpAddr, groups: u8) -> u8 {
    let hash = match vip {
        IpAddr::V4(address) => fnv1a(&address.octets()),
        IpAddr::V6(address) => fnv1a(&address.octets()),
    };
    u8::try_from(hash % u64::from(groups.clamp(1, VIP_GROUPS_MAX))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_the_rfc() {
        assert_eq!(fnv1a(b""), OFFSET_BASIS);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn an_address_has_the_same_group_in_every_release() {
        let rows = [("192.0.2.100", 16, 11), ("192.0.2.101", 16, 8), ("2001:db8::1:0", 16, 12), ("192.0.2.100", 1, 0)];
        for (address, groups, group) in rows {
            assert_eq!(vip_group(address.parse().unwrap(), groups), group, "{address} of {groups}");
        }
    }

    #[test]
    fn neighbouring_addresses_are_in_different_groups() {
        let mut counts = [0; 16];
        for last in 0..=255 {
            counts[usize::from(vip_group(IpAddr::from([192, 0, 2, last]), 16))] += 1;
        }
        assert_eq!(counts, [16; 16]);
    }
}
