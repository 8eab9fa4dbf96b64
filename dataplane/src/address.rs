//! An IP address as the engine holds it: a number in host order, one type per family.

use std::fmt::Debug;
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proto::Family;
use zerocopy::FromZeros;

use crate::snapshot::{FamilyTables, Snapshot};
use crate::source_ranges::{Intervals, SourceRanges};
use crate::{Headers, Parsed};

/// An address of one family, in host order: `u32` for IPv4, `u128` for IPv6. Code that is the same for both families
/// is generic over it and compiled once for each.
pub trait Address: Copy + Eq + Ord + Hash + Debug + Default + FromZeros + Send + Sync + 'static {
    /// The family.
    const FAMILY: Family;
    /// Bytes of one address.
    const BYTES: usize;

    /// The standard library's type.
    fn ip(self) -> IpAddr;
    /// From the standard library's type, if it is of this family.
    fn from_ip(address: IpAddr) -> Option<Self>;
    /// Widened, for hashing and for sums; IPv4 in the low 32 bits.
    fn wide(self) -> u128;
    /// Out of its widened form; what an IPv4 address has no room for is left out.
    fn from_wide(wide: u128) -> Self;
    /// The headers, if they are of this family.
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
