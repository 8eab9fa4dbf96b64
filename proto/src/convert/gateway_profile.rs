//! Conversions of what a gateway says about itself in its hello.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use super::error::ConvertError;
use super::{address, address_bytes};
use crate::{GatewayProfile, v1};

/// A hello with the profile of a gateway, apart from its prefixes, which reports have.
#[must_use]
pub fn with_profile(hello: v1::Hello, profile: &GatewayProfile) -> v1::Hello {
    let bytes = |addresses: &[IpAddr]| addresses.iter().copied().map(address_bytes).collect();
    v1::Hello {
        // Earlier controllers know only this list.
        reserved: bytes(&profile.reserved()),
        next_hops: bytes(&profile.next_hops),
        serves_node_ports: profile.serves_node_ports,
        max_state_age_s: profile.max_state_age.map_or(0, |age| age.as_secs()),
        ..hello
    }
}

/// The profile in a hello.
///
/// # Errors
/// If an address has neither 4 nor 16 bytes.
pub fn profile(hello: &v1::Hello) -> Result<GatewayProfile, ConvertError> {
    let addresses = |list: &[Vec<u8>]| list.iter().map(|bytes| address(bytes)).collect::<Result<BTreeSet<IpAddr>, _>>();
    let (reserved, next_hops) = (addresses(&hello.reserved)?, addresses(&hello.next_hops)?);
    Ok(GatewayProfile {
        serves_node_ports: hello.serves_node_ports,
        max_state_age: (hello.max_state_age_s > 0).then(|| Duration::from_secs(hello.max_state_age_s)),
        ..GatewayProfile::new(reserved.difference(&next_hops).copied(), next_hops.iter().copied())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_survives_and_earlier_controllers_and_gateways_know_one_list() {
        let [own, hop] = ["192.0.2.2", "192.0.2.1"].map(|text| text.parse::<IpAddr>().unwrap());
        let sent = GatewayProfile {
            serves_node_ports: Some(false),
            max_state_age: Some(Duration::from_secs(60)),
            ..GatewayProfile::new([own], [hop])
        };
        let hello = with_profile(v1::Hello::default(), &sent);
        assert_eq!(profile(&hello).unwrap(), sent);
        assert_eq!(hello.reserved, [hop, own].map(address_bytes));
        let earlier = v1::Hello { reserved: hello.reserved, ..v1::Hello::default() };
        assert_eq!(profile(&earlier).unwrap(), GatewayProfile::new([own, hop], []));
        assert!(profile(&v1::Hello { next_hops: vec![vec![1]], ..v1::Hello::default() }).is_err());
    }
}
