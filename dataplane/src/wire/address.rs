//! The engine's representation of an IP address: a number in host order, one type per address family.

use std::fmt::Debug;
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proto::Family;
use zerocopy::FromZeros;

use super::headers::{Headers, Parsed};
use crate::choose::{Intervals, SourceRanges};
use crate::snapshot::{FamilyTables, Snapshot};

/// An address of one family in host order: `u32` for IPv4, `u128` for IPv6. Code that is the same for both families is
/// generic over this trait and compiled once for each.
pub trait Address: Copy + Eq + Ord + Hash + Debug + Default + FromZeros + Send + Sync + 'static {
    /// The family.
    const FAMILY: Family;
    /// Bytes of an address.
    const BYTES: usize;

    /// Converts to the standard library's type.
    fn ip(self) -> IpAddr;
    /// Converts from the standard library's type; `None` for an address of the other family.
    fn from_ip(address: IpAddr) -> Option<Self>;
    /// The address as 128 bits, for hashes and sums; IPv4 in the low 32 bits.
    fn wide(self) -> u128;
    /// The address from its 128 bits; for IPv4 the upper 96 bits are dropped.
    fn from_wide(wide: u128) -> Self;
    /// The parsed headers, if they are of this family.
    fn headers(parsed: Parsed) -> Option<Headers<Self>>;
    /// The tables of this family.
    fn tables(snapshot: &Snapshot) -> &FamilyTables<Self>;
    /// The source ranges of this family.
    fn intervals(ranges: &SourceRanges) -> &Intervals<Self>;
}

impl Address for u32 {
    const FAMILY: Family = Family::V4;
    const BYTES: usize = 4;

    fn ip(self) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from(self))
    }

    fn from_ip(address: IpAddr) -> Option<Self> {
        match address {
            IpAddr::V4(a) => Some(a.into()),
            IpAddr::V6(_) => None,
        }
    }

    #[inline]
    fn wide(self) -> u128 {
        u128::from(self)
    }

    #[inline]
    fn from_wide(wide: u128) -> Self {
        (wide & 0xffff_ffff) as Self
    }

    fn headers(parsed: Parsed) -> Option<Headers<Self>> {
        match parsed {
            Parsed::V4(headers) => Some(headers),
            _ => None,
        }
    }

    #[inline]
    fn tables(snapshot: &Snapshot) -> &FamilyTables<Self> {
        &snapshot.v4
    }

    #[inline]
    fn intervals(ranges: &SourceRanges) -> &Intervals<Self> {
        &ranges.v4
    }
}

impl Address for u128 {
    const FAMILY: Family = Family::V6;
    const BYTES: usize = 16;

    fn ip(self) -> IpAddr {
        IpAddr::V6(Ipv6Addr::from(self))
    }

    fn from_ip(address: IpAddr) -> Option<Self> {
        match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(a) => Some(a.into()),
        }
    }

    #[inline]
    fn wide(self) -> u128 {
        self
    }

    #[inline]
    fn from_wide(wide: u128) -> Self {
        wide
    }

    fn headers(parsed: Parsed) -> Option<Headers<Self>> {
        match parsed {
            Parsed::V6(headers) => Some(headers),
            _ => None,
        }
    }

    #[inline]
    fn tables(snapshot: &Snapshot) -> &FamilyTables<Self> {
        &snapshot.v6
    }

    #[inline]
    fn intervals(ranges: &SourceRanges) -> &Intervals<Self> {
        &ranges.v6
    }
}

/// Whether an address is multicast (RFC 1112, RFC 4291 section 2.7) or, in IPv4, in 240/4, which contains broadcast.
pub(crate) fn is_group_address<A: Address>(address: A) -> bool {
    match A::FAMILY {
        Family::V4 => address.wide() >> 28 >= 0xe,
        Family::V6 => address.wide() >> 120 == 0xff,
    }
}
