//! The engine's representation of an IP address: a number in host order, one type per address family.
//!
//! **Invariant:** an address of this type is in host order.
//!
//! Not here: what an address is to the gateway (`snapshot`).

use std::fmt::Debug;
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proto::Family;
use zerocopy::FromZeros;

use super::headers::{TupleKey, WireKey};

/// An address of one family in host order: `u32` for IPv4, `u128` for IPv6. Code that is the same for both families is
/// generic over this trait and compiled once for each.
pub trait Address: Copy + Eq + Ord + Hash + Debug + Default + FromZeros + Send + Sync + 'static {
    /// The family.
    const FAMILY: Family;
    /// Bytes of an address.
    const BYTES: usize;
    /// Addresses and ports of a packet of the family as they stand in its headers.
    type Key: TupleKey<Address = Self>;

    /// Converts to the standard library's type.
    fn ip(self) -> IpAddr;
    /// Converts from the standard library's type; `None` for an address of the other family.
    fn from_ip(address: IpAddr) -> Option<Self>;
    /// The address as 128 bits, for hashes and sums; IPv4 in the low 32 bits.
    fn wide(self) -> u128;
    /// The address from its 128 bits; for IPv4 the upper 96 bits are dropped.
    fn from_wide(wide: u128) -> Self;
    /// The half of this family.
    fn of<T: ByFamily>(both: &T) -> &T::Of<Self>;
}

/// Something that exists once for each family, such as the two halves of a table.
pub trait ByFamily {
    /// The half of one family.
    type Of<A: Address>;
    /// The half of IPv4.
    fn v4(&self) -> &Self::Of<u32>;
    /// The half of IPv6.
    fn v6(&self) -> &Self::Of<u128>;
}

impl Address for u32 {
    const FAMILY: Family = Family::V4;
    const BYTES: usize = 4;
    type Key = WireKey<3>;

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

    #[inline(always)]
    fn of<T: ByFamily>(both: &T) -> &T::Of<Self> {
        both.v4()
    }
}

impl Address for u128 {
    const FAMILY: Family = Family::V6;
    const BYTES: usize = 16;
    type Key = WireKey<9>;

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

    #[inline(always)]
    fn of<T: ByFamily>(both: &T) -> &T::Of<Self> {
        both.v6()
    }
}

/// Whether an address is multicast (RFC 1112, RFC 4291 section 2.7) or, in IPv4, in 240/4, which contains broadcast.
pub(crate) fn is_group_address<A: Address>(address: A) -> bool {
    match A::FAMILY {
        Family::V4 => address.wide() >> 28 >= 0xe,
        Family::V6 => address.wide() >> 120 == 0xff,
    }
}

/// An IPv4 address from its 128-bit form, which holds it in the low 32 bits.
#[inline(always)]
pub(crate) fn low_half<A: Address>(address: A) -> u32 {
    (address.wide() & 0xffff_ffff) as u32
}
