//! How the VIPs of a `routed` pool are announced by BGP: communities, preferences and aggregation.
//!
//! Invariant: an aggregate holds addresses of its pool only, so that no gateway attracts packets to others. Not here: the
//! routes, and the configuration of the routing daemon that announces them.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Serialize, Serializer};

use crate::{AddressRange, Family};

/// Names of well-known communities and their values (IANA, "BGP Well-known Communities"). GRACEFUL_SHUTDOWN is missing: a
/// gateway that drains sends it, and routers would avoid one that always does.
const WELL_KNOWN: [(&str, (u16, u16)); 4] = [
    ("no-export", (65535, 65281)),
    ("no-advertise", (65535, 65282)),
    ("no-export-subconfed", (65535, 65283)),
    ("no-peer", (65535, 65284)),
];
/// GRACEFUL_SHUTDOWN (RFC 8326).
const GRACEFUL_SHUTDOWN: (u16, u16) = (65535, 0);

/// A BGP community.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Community {
    /// RFC 1997: two numbers of 16 bits.
    Standard(u16, u16),
    /// RFC 8092: three numbers of 32 bits.
    Large(u32, u32, u32),
}

/// The text is not a community that a pool may have.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
pub enum CommunityError {
    /// It is none.
    #[error(
        "expected A:B with numbers up to 65535, A:B:C with numbers up to 4294967295, or one of {names}",
        names = WELL_KNOWN.map(|(name, _)| name).join(", ")
    )]
    Malformed,
    /// It belongs to drains.
    #[error("expected another one: this is GRACEFUL_SHUTDOWN, which a gateway sends only while it drains")]
    GracefulShutdown,
}

impl FromStr for Community {
    type Err = CommunityError;

    fn from_str(text: &str) -> Result<Self, CommunityError> {
        if let Some((_, (a, b))) = WELL_KNOWN.iter().find(|(name, _)| *name == text) {
            return Ok(Self::Standard(*a, *b));
        }
        let numbers: Vec<&str> = text.split(':').collect();
        // A number may not have a sign, which `parse` would accept.
        if numbers.iter().any(|number| !number.bytes().all(|byte| byte.is_ascii_digit())) && text != "graceful-shutdown" {
            return Err(CommunityError::Malformed);
        }
        let community = match numbers[..] {
            ["graceful-shutdown"] => Some(Self::Standard(GRACEFUL_SHUTDOWN.0, GRACEFUL_SHUTDOWN.1)),
            [a, b] => a.parse().ok().zip(b.parse().ok()).map(|(a, b)| Self::Standard(a, b)),
            [a, b, c] => a.parse().ok().zip(b.parse().ok()).zip(c.parse().ok()).map(|((a, b), c)| Self::Large(a, b, c)),
            _ => None,
        };
        match community.ok_or(CommunityError::Malformed)? {
            Self::Standard(a, b) if (a, b) == GRACEFUL_SHUTDOWN => Err(CommunityError::GracefulShutdown),
            community => Ok(community),
        }
    }
}

impl fmt::Display for Community {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Standard(a, b) => write!(f, "{a}:{b}"),
            Self::Large(a, b, c) => write!(f, "{a}:{b}:{c}"),
        }
    }
}

impl Serialize for Community {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// How the VIPs of a `routed` pool are announced. Names and defaults of the fields are those of MetalLB's
/// BGPAdvertisement, which has no MED.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolBgp {
    /// Communities of the routes, each once.
    pub communities: Vec<Community>,
    /// Multi-exit discriminator (MED); unset: that of the routing daemon's configuration.
    pub med: Option<u32>,
    /// Local preference, for peers of the same autonomous system; unset: that of the routing daemon.
    pub local_pref: Option<u32>,
    /// Length of the prefixes by which IPv4 VIPs are announced, in bits; 32: each VIP on its own.
    pub aggregation_length: u8,
    /// The same for IPv6; 128: each VIP on its own.
    #[serde(rename = "aggregationLengthV6")]
    pub aggregation_length_v6: u8,
}

impl Default for PoolBgp {
    fn default() -> Self {
        Self {
            communities: Vec::new(),
            med: None,
            local_pref: None,
            aggregation_length: bits(Family::V4),
            aggregation_length_v6: bits(Family::V6),
        }
    }
}

/// Why VIPs of a pool cannot be aggregated.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum AggregationError {
    /// The length is not that of a prefix.
    #[error("found {found}, expected 1 to {most}")]
    Length {
        /// The field.
        field: &'static str,
        /// Its value.
        found: u8,
        /// Its highest value.
        most: u8,
    },
    /// An aggregate would hold addresses beside the pool.
    #[error(
        "found {length}, but {aggregate} has addresses outside of {range}, which the gateways would attract; expected \
         {range} to consist of whole /{length}"
    )]
    Outside {
        /// The field.
        field: &'static str,
        /// Its value.
        length: u8,
        /// The aggregate.
        aggregate: IpNet,
        /// The range of the pool.
        range: AddressRange,
    },
}

impl AggregationError {
    /// The wrong field.
    #[must_use]
    pub const fn field(&self) -> &'static str {
        match self {
            Self::Length { field, .. } | Self::Outside { field, .. } => field,
        }
    }
}

impl PoolBgp {
    /// The same with each VIP on its own.
    #[must_use]
    pub fn without_aggregation(self) -> Self {
        let Self { aggregation_length, aggregation_length_v6, .. } = Self::default();
        Self { aggregation_length, aggregation_length_v6, ..self }
    }

    /// Field and value of the aggregation length of a family.
    #[must_use]
    pub const fn length(&self, family: Family) -> (&'static str, u8) {
        match family {
            Family::V4 => ("aggregationLength", self.aggregation_length),
            Family::V6 => ("aggregationLengthV6", self.aggregation_length_v6),
        }
    }

    /// The prefix by which a VIP is announced.
    #[must_use]
    pub fn announced(&self, vip: IpAddr) -> IpNet {
        let (_, length) = self.length(Family::of(vip));
        IpNet::new(vip, length).map_or(IpNet::from(vip), |net| net.trunc())
    }

    /// Checks that both lengths are legal, and that every aggregate holds addresses of one of `ranges` only.
    ///
    /// # Errors
    /// The first violation.
    pub fn check(&self, ranges: &[AddressRange]) -> Result<(), AggregationError> {
        for family in [Family::V4, Family::V6] {
            let ((field, length), most) = (self.length(family), bits(family));
            if !(1..=most).contains(&length) {
                return Err(AggregationError::Length { field, found: length, most });
            }
            for range in ranges.iter().filter(|range| range.family() == family) {
                let ends = [self.announced(range.first()), self.announced(range.last())];
                let outside = |net: &IpNet| !range.contains(net.network()) || !range.contains(net.broadcast());
                if let Some(aggregate) = ends.into_iter().find(outside) {
                    return Err(AggregationError::Outside { field, length, aggregate, range: *range });
                }
            }
        }
        Ok(())
    }
}

/// Bits of an address.
const fn bits(family: Family) -> u8 {
    match family {
        Family::V4 => 32,
        Family::V6 => 128,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_community_is_two_or_three_numbers_or_a_well_known_name() {
        let rows = [
            ("65000:100", Community::Standard(65000, 100), "65000:100"),
            ("65000:1:4294967295", Community::Large(65000, 1, u32::MAX), "65000:1:4294967295"),
            ("no-export", Community::Standard(65535, 65281), "65535:65281"),
            ("no-peer", Community::Standard(65535, 65284), "65535:65284"),
        ];
        for (text, community, shown) in rows {
            assert_eq!(text.parse(), Ok(community), "{text}");
            assert_eq!(community.to_string(), shown);
        }
        let wrong =
            ["", "65000", "65536:1", "1:65536", "1:2:4294967296", "1:2:3:4", "+1:2", "1: 2", ":", "1:", "no-such", "NO-EXPORT"];
        for text in wrong {
            assert_eq!(text.parse::<Community>(), Err(CommunityError::Malformed), "{text}");
        }
        for text in ["graceful-shutdown", "65535:0"] {
            assert_eq!(text.parse::<Community>(), Err(CommunityError::GracefulShutdown));
        }
    }

    #[test]
    fn a_vip_is_announced_alone_or_by_its_aggregate() {
        let announced = |bgp: &PoolBgp, vip: &str| bgp.announced(vip.parse().unwrap()).to_string();
        let alone = PoolBgp::default();
        assert_eq!(
            (announced(&alone, "203.0.113.7"), announced(&alone, "2001:db8::7")),
            ("203.0.113.7/32".into(), "2001:db8::7/128".into())
        );
        let aggregated = PoolBgp { aggregation_length: 24, aggregation_length_v6: 112, ..PoolBgp::default() };
        assert_eq!(announced(&aggregated, "203.0.113.7"), "203.0.113.0/24");
        assert_eq!(announced(&aggregated, "2001:db8::1:7"), "2001:db8::1:0/112");
    }

    #[test]
    fn an_aggregate_lies_inside_the_pool() {
        let check = |v4, v6, ranges: &[&str]| {
            let bgp = PoolBgp { aggregation_length: v4, aggregation_length_v6: v6, ..PoolBgp::default() };
            let ranges: Vec<AddressRange> = ranges.iter().map(|text| text.parse().unwrap()).collect();
            bgp.check(&ranges).map_err(|error| format!("{}: {error}", error.field()))
        };
        let fits: [(u8, u8, &[&str]); 6] = [
            (32, 128, &["192.0.2.100-192.0.2.199", "2001:db8::1"]),
            (24, 128, &["203.0.113.0/24", "2001:db8::1-2001:db8::9"]),
            (26, 112, &["203.0.113.64-203.0.113.191", "2001:db8::1:0/112"]),
            (24, 128, &["2001:db8::1"]),
            (1, 1, &["128.0.0.0/1", "8000::/1"]),
            (8, 128, &[]),
        ];
        for (v4, v6, ranges) in fits {
            assert_eq!(check(v4, v6, ranges), Ok(()), "{ranges:?}");
        }
        let rows: [(u8, u8, &[&str], &str); 6] = [
            (0, 128, &[], "aggregationLength: found 0, expected 1 to 32"),
            (33, 128, &[], "aggregationLength: found 33, expected 1 to 32"),
            (32, 129, &[], "aggregationLengthV6: found 129, expected 1 to 128"),
            (24, 128, &["203.0.113.0/25"], "203.0.113.0/24 has addresses outside of 203.0.113.0-203.0.113.127"),
            (26, 128, &["203.0.113.0/24", "192.0.2.100-192.0.2.127"], "192.0.2.64/26 has addresses outside of 192.0.2.100"),
            (32, 64, &["2001:db8::/65"], "aggregationLengthV6: found 64, but 2001:db8::/64 has addresses outside"),
        ];
        for (v4, v6, ranges, part) in rows {
            let error = check(v4, v6, ranges).unwrap_err();
            assert!(error.contains(part), "{ranges:?}: {error}");
        }
    }
}
