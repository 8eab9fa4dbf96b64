//! Protocols, families and ranges of addresses.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Transport protocol of a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// RFC 9293.
    Tcp,
    /// RFC 768.
    Udp,
    /// RFC 9260.
    Sctp,
}

impl Protocol {
    /// The number in the IPv4 protocol and IPv6 next header fields.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }

    /// The protocol with this number, if frontends support it.
    #[must_use]
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            132 => Some(Self::Sctp),
            _ => None,
        }
    }

    /// Lower-case name, as commands and JSON write it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The name is not that of a supported protocol.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("protocol {0:?} is none of TCP, UDP, SCTP")]
pub struct ParseProtocolError(String);

impl FromStr for Protocol {
    type Err = ParseProtocolError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name.to_ascii_lowercase().as_str() {
            "tcp" => Ok(Self::Tcp),
            "udp" => Ok(Self::Udp),
            "sctp" => Ok(Self::Sctp),
            _ => Err(ParseProtocolError(name.to_owned())),
        }
    }
}

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Family {
    /// IPv4.
    #[serde(rename = "v4")]
    V4,
    /// IPv6.
    #[serde(rename = "v6")]
    V6,
}

impl Family {
    /// The family of an address.
    #[must_use]
    pub const fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// The addresses from `first` to `last`, inclusive, of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AddressRange {
    first: IpAddr,
    last: IpAddr,
}

/// Errors of a text that is not an address range.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum AddressRangeError {
    /// The text is neither an address, nor a CIDR, nor FIRST-LAST.
    #[error("{0:?} is neither an address, a CIDR nor a range FIRST-LAST")]
    Malformed(String),
    /// One end is an IPv4 address, the other an IPv6 address.
    #[error("the ends of {0:?} are of different families")]
    Families(String),
    /// The first address is above the last.
    #[error("{0:?} is reversed: the first address lies above the last")]
    Reversed(String),
    /// A CIDR that is not that of a network.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

/// Errors of a text that is not the CIDR of a network.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum NetworkError {
    /// The text is no CIDR.
    #[error("expected a CIDR such as 10.0.0.0/8")]
    Malformed,
    /// The address has bits beyond the length: either of the two may be wrong.
    #[error("{found} has bits set beyond /{length}: expected {network} for the network, or {address} for the address", length = .network.prefix_len())]
    HostBits {
        /// As it was written.
        found: IpNet,
        /// The network of this address and length.
        network: IpNet,
        /// The address.
        address: IpAddr,
    },
}

/// Parses the CIDR of a network. One whose address lies within the network is refused, because a typo in the address and
/// one in the length look the same.
///
/// # Errors
/// If it is none.
pub fn network(text: &str) -> Result<IpNet, NetworkError> {
    let found: IpNet = text.parse().map_err(|_| NetworkError::Malformed)?;
    let network = found.trunc();
    if found == network { Ok(network) } else { Err(NetworkError::HostBits { found, network, address: found.addr() }) }
}

impl AddressRange {
    /// The range between two addresses of one family.
    ///
    /// # Errors
    /// When the families differ or the range is reversed.
    pub fn new(first: IpAddr, last: IpAddr) -> Result<Self, AddressRangeError> {
        let text = || format!("{first}-{last}");
        if Family::of(first) != Family::of(last) {
            return Err(AddressRangeError::Families(text()));
        }
        if first > last {
            return Err(AddressRangeError::Reversed(text()));
        }
        Ok(Self { first, last })
    }

    /// The lowest address.
    #[must_use]
    pub const fn first(&self) -> IpAddr {
        self.first
    }

    /// The highest address.
    #[must_use]
    pub const fn last(&self) -> IpAddr {
        self.last
    }

    /// The family of all its addresses.
    #[must_use]
    pub const fn family(&self) -> Family {
        Family::of(self.first)
    }

    /// Whether the range contains `address`.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        Family::of(address) == self.family() && self.first <= address && address <= self.last
    }

    /// Whether the ranges have an address in common.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.family() == other.family() && self.first <= other.last && other.first <= self.last
    }

    /// The number of addresses; saturates at `u128::MAX` (only for `::/0`).
    #[must_use]
    pub fn count(&self) -> u128 {
        (number(self.last) - number(self.first)).saturating_add(1)
    }

    /// The addresses, lowest first. There may be up to 2^128: take only as many as needed.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let family = self.family();
        (number(self.first)..=number(self.last)).map(move |n| match family {
            Family::V4 => IpAddr::V4(Ipv4Addr::from(u32::try_from(n).unwrap_or(u32::MAX))),
            Family::V6 => IpAddr::V6(Ipv6Addr::from(n)),
        })
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(a) => u128::from(u32::from(a)),
        IpAddr::V6(a) => u128::from(a),
    }
}

impl FromStr for AddressRange {
    type Err = AddressRangeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || AddressRangeError::Malformed(text.to_owned());
        if let Some((first, last)) = text.split_once('-') {
            let parse = |s: &str| s.trim().parse::<IpAddr>().map_err(|_| malformed());
            return Self::new(parse(first)?, parse(last)?);
        }
        if text.contains('/') {
            let net = match network(text.trim()) {
                Err(NetworkError::Malformed) => return Err(malformed()),
                net => net?,
            };
            return Self::new(net.network(), net.broadcast());
        }
        let address = text.trim().parse().map_err(|_| malformed())?;
        Self::new(address, address)
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last { write!(f, "{}", self.first) } else { write!(f, "{}-{}", self.first, self.last) }
    }
}

/// `ip:port` or `[ip]:port`: the form of an endpoint in all commands and JSON.
#[must_use]
pub fn endpoint(address: IpAddr, port: u16) -> String {
    SocketAddr::new(address, port).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_an_address_a_cidr_or_first_last() {
        let range: AddressRange = "192.0.2.100-192.0.2.199".parse().unwrap();
        assert_eq!(range.count(), 100);
        assert!(range.contains("192.0.2.150".parse().unwrap()));
        assert!(!range.contains("192.0.2.200".parse().unwrap()));
        assert!(!range.contains("::1".parse().unwrap()));
        let cidr: AddressRange = "2001:db8::1:0/112".parse().unwrap();
        assert_eq!(cidr.count(), 65_536);
        assert_eq!("192.0.2.1".parse::<AddressRange>().unwrap().to_string(), "192.0.2.1");
        assert_eq!(cidr.addresses().nth(1), Some("2001:db8::1:1".parse().unwrap()));
    }

    #[test]
    fn wrong_ranges_say_what_is_wrong() {
        assert!(matches!("10.0.0.9-10.0.0.1".parse::<AddressRange>(), Err(AddressRangeError::Reversed(_))));
        assert!(matches!("10.0.0.9-::1".parse::<AddressRange>(), Err(AddressRangeError::Families(_))));
        assert!(matches!("10.0.0.300".parse::<AddressRange>(), Err(AddressRangeError::Malformed(_))));
        assert!(matches!("10.0.0.0/33".parse::<AddressRange>(), Err(AddressRangeError::Malformed(_))));
    }

    #[test]
    fn a_cidr_with_bits_beyond_its_length_is_refused_with_both_corrections() {
        for (text, corrections) in [
            ("198.51.100.129/25", "expected 198.51.100.128/25 for the network, or 198.51.100.129 for the address"),
            ("2001:db8::1/64", "expected 2001:db8::/64 for the network, or 2001:db8::1 for the address"),
        ] {
            let error = network(text).unwrap_err().to_string();
            assert!(error.contains(corrections), "{error}");
            assert_eq!(text.parse::<AddressRange>().unwrap_err().to_string(), error);
        }
        assert_eq!(network("10.0.0.0/33"), Err(NetworkError::Malformed));
        assert_eq!(network("192.0.2.1/32").unwrap().to_string(), "192.0.2.1/32");
    }

    #[test]
    fn endpoints_are_written_as_the_contract_says() {
        assert_eq!(endpoint("192.0.2.1".parse().unwrap(), 80), "192.0.2.1:80");
        assert_eq!(endpoint("2001:db8::1".parse().unwrap(), 80), "[2001:db8::1]:80");
    }
}
