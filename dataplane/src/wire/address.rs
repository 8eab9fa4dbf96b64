//! The engine's representation of an IP address, a number in host order with one type per address family, and of the
//! addresses and ports of a packet.
//!
//! **Invariant:** an address of this type is in host order.
//!
//! Not here: the role of an address for the gateway (`snapshot`).

use std::fmt::Debug;
use std::hash::Hash;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proto::Family;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// An address of one family in host order: `u32` for IPv4, `u128` for IPv6. Code that is the same for both families is
/// generic over this trait and compiled once for each.
pub trait Address: Copy + Eq + Ord + Hash + Debug + Default + FromZeros + Send + Sync + 'static {
    /// The family.
    const FAMILY: Family;
    /// Bytes of an address.
    const BYTES: usize;
    /// The smallest MTU that a link may have (RFC 791, RFC 8200 section 5), bytes.
    const MTU_MIN: u16;
    /// Addresses and ports of a packet of the family as they stand in its headers.
    type Key: TupleKey<Address = Self>;

    /// Converts to the standard library's type.
    fn ip(self) -> IpAddr;
    /// Converts from the standard library's type; `None` for an address of the other family.
    fn from_ip(address: IpAddr) -> Option<Self>;
    /// The address as 128 bits, for hashes and sums; IPv4 in the low 32 bits.
    fn wide(self) -> u128;
    /// The part that identifies one client: an IPv4 address, or the upper 64 bits of an IPv6 address, since a site has
    /// all addresses below them.
    fn site(self) -> u64;
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
    const MTU_MIN: u16 = 68;
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

    #[inline(always)]
    fn site(self) -> u64 {
        self.into()
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
    const MTU_MIN: u16 = 1280;
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

    #[inline(always)]
    fn site(self) -> u64 {
        (self >> 64) as u64
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

/// Source and destination of a packet, as in its headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tuple<A> {
    /// Source address.
    pub source: A,
    /// Destination address.
    pub destination: A,
    /// Source port; 0 where the transport has none.
    pub source_port: u16,
    /// Destination port; 0 where the transport has none.
    pub destination_port: u16,
    /// Transport protocol number (the last IPv6 next header).
    pub protocol: u8,
}

/// Addresses and ports of a packet as they stand in its headers: source and destination address, source and destination
/// port, in network byte order. 12 bytes for IPv4, 36 for IPv6. It is compared, hashed and rewritten a word at a time.
#[derive(Clone, Copy, Debug, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(transparent)]
pub struct WireKey<const WORDS: usize>([u32; WORDS]);

/// Two words at a time, without a branch for each of them, and without a call, which the comparison of long arrays is.
impl<const WORDS: usize> PartialEq for WireKey<WORDS> {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        let ((pairs, ports), (other_pairs, other_ports)) = (self.0.as_chunks::<2>(), other.0.as_chunks::<2>());
        let pairs = pairs.iter().zip(other_pairs).fold(0, |bits, (a, b)| bits | (pair(*a) ^ pair(*b)));
        let ports = ports.iter().zip(other_ports).fold(0, |bits, (a, b)| bits | (a ^ b));
        pairs | u64::from(ports) == 0
    }
}

/// Two words as one.
#[inline(always)]
const fn pair([low, high]: [u32; 2]) -> u64 {
    (high as u64) << 32 | low as u64
}

/// The [`WireKey`] of one address family.
pub trait TupleKey: Copy + Eq + std::fmt::Debug + FromZeros + Send + Sync + 'static {
    /// The address type of the family.
    type Address;
    /// Words that complete two keys and two more words to a multiple of half a cache line.
    type Filler: Copy + std::fmt::Debug + FromZeros + AsRef<[u32]> + AsMut<[u32]> + Send + Sync;

    /// The key of a packet with this tuple; the protocol is not part of it.
    fn of(tuple: &Tuple<Self::Address>) -> Self;
    /// The tuple of packets with this key and protocol.
    fn tuple(&self, protocol: u8) -> Tuple<Self::Address>;
    /// The key of packets in the opposite direction.
    #[must_use]
    fn reversed(self) -> Self;
    /// The words of the addresses, source first, and the word of the ports.
    fn words(&self) -> (&[u32], u32);
    /// Whether the source address is 0.
    fn has_no_source(&self) -> bool;

    /// The sum of their words, in the byte order of the machine, as a checksum over them adds it.
    #[inline(always)]
    fn sum(&self) -> u64 {
        let (addresses, ports) = self.words();
        addresses.iter().fold(ports.into(), |sum, word| sum + u64::from(*word))
    }
}

impl<const WORDS: usize> WireKey<WORDS> {
    /// The key in the bytes from an offset on: that of the source address in an IPv4 header without options, or in an
    /// IPv6 header, before the ports.
    #[inline(always)]
    #[must_use]
    pub(crate) fn read_at(head: &[u8], at: usize) -> Self {
        let mut key = Self([0; WORDS]);
        let bytes = key.as_mut_bytes();
        bytes.copy_from_slice(&head[at..at + bytes.len()]);
        key
    }
}

impl WireKey<3> {
    /// All words.
    #[inline(always)]
    pub(crate) const fn all(&self) -> [u32; 3] {
        self.0
    }

    /// The word of the source address.
    #[inline(always)]
    pub(crate) const fn source(&self) -> u32 {
        self.0[0]
    }

    /// Both addresses as they stand in the header, and both ports, each in one word. A rotation by half of its bits
    /// swaps source and destination.
    #[inline(always)]
    #[must_use]
    pub(crate) fn halves(&self) -> (u64, u32) {
        let [a, b, c, d, e, f, g, h, i, j, k, l]: [u8; 12] = zerocopy::transmute!(self.0);
        (u64::from_ne_bytes([a, b, c, d, e, f, g, h]), u32::from_ne_bytes([i, j, k, l]))
    }
}

impl WireKey<9> {
    /// The bytes of both addresses, and the word of the ports.
    #[inline(always)]
    pub(crate) fn halves(&self) -> ([u8; 32], u32) {
        let [a, b, c, d, e, f, g, h, ports] = self.0;
        (zerocopy::transmute!([a, b, c, d, e, f, g, h]), ports)
    }

    /// The bytes of the source address.
    #[inline(always)]
    pub(crate) fn source(&self) -> [u8; 16] {
        let [a, b, c, d, ..] = self.0;
        zerocopy::transmute!([a, b, c, d])
    }
}

/// The word of two ports in network byte order.
#[inline]
fn port_word(source: u16, destination: u16) -> u32 {
    (u32::from(source) << 16 | u32::from(destination)).to_be()
}

/// The two ports of a word.
#[inline]
fn ports_of(word: u32) -> (u16, u16) {
    let [a, b, c, d] = word.to_ne_bytes();
    (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))
}

impl TupleKey for WireKey<3> {
    type Address = u32;
    type Filler = [u32; 0];

    #[inline]
    fn of(tuple: &Tuple<u32>) -> Self {
        Self([tuple.source.to_be(), tuple.destination.to_be(), port_word(tuple.source_port, tuple.destination_port)])
    }

    #[inline]
    fn tuple(&self, protocol: u8) -> Tuple<u32> {
        let [source, destination, ports] = self.0;
        let (source_port, destination_port) = ports_of(ports);
        let (source, destination) = (u32::from_be(source), u32::from_be(destination));
        Tuple { source, destination, source_port, destination_port, protocol }
    }

    #[inline(always)]
    fn reversed(self) -> Self {
        let [source, destination, ports] = self.0;
        Self([destination, source, ports.rotate_left(16)])
    }

    #[inline(always)]
    fn words(&self) -> (&[u32], u32) {
        (&self.0[..2], self.0[2])
    }

    #[inline(always)]
    fn has_no_source(&self) -> bool {
        self.source() == 0
    }
}

impl TupleKey for WireKey<9> {
    type Address = u128;
    type Filler = [u32; 4];

    #[inline]
    fn of(tuple: &Tuple<u128>) -> Self {
        let ports = port_word(tuple.source_port, tuple.destination_port);
        let bytes: [[u8; 16]; 2] = [tuple.source.to_be_bytes(), tuple.destination.to_be_bytes()];
        let [a, b, c, d, e, f, g, h]: [u32; 8] = zerocopy::transmute!(bytes);
        Self([a, b, c, d, e, f, g, h, ports])
    }

    #[inline]
    fn tuple(&self, protocol: u8) -> Tuple<u128> {
        let [a, b, c, d, e, f, g, h, ports] = self.0;
        let (source_port, destination_port) = ports_of(ports);
        let [source, destination]: [[u8; 16]; 2] = zerocopy::transmute!([a, b, c, d, e, f, g, h]);
        let (source, destination) = (u128::from_be_bytes(source), u128::from_be_bytes(destination));
        Tuple { source, destination, source_port, destination_port, protocol }
    }

    #[inline(always)]
    fn reversed(self) -> Self {
        let [a, b, c, d, e, f, g, h, ports] = self.0;
        Self([e, f, g, h, a, b, c, d, ports.rotate_left(16)])
    }

    #[inline(always)]
    fn words(&self) -> (&[u32], u32) {
        (&self.0[..8], self.0[8])
    }

    #[inline(always)]
    fn has_no_source(&self) -> bool {
        self.0[..4] == [0; 4]
    }
}

impl<A: Address> Tuple<A> {
    /// The tuple of a packet in the opposite direction.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
            protocol: self.protocol,
        }
    }
}

/// Whether an address is multicast (RFC 1112, RFC 4291 section 2.7) or, in IPv4, broadcast. The rest of 240.0.0.0/4 is
/// unicast, as in Linux.
pub(crate) fn is_group_address<A: Address>(address: A) -> bool {
    match A::FAMILY {
        Family::V4 => address.wide() >> 28 == 0xe || address.wide() == u128::from(u32::MAX),
        Family::V6 => address.wide() >> 120 == 0xff,
    }
}

/// An IPv4 address from its 128-bit form, which holds it in the low 32 bits.
#[inline(always)]
pub(crate) fn low_half<A: Address>(address: A) -> u32 {
    (address.wide() & 0xffff_ffff) as u32
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    #[test]
    fn groups_are_multicast_and_the_broadcast_address_and_the_rest_of_240_is_unicast() {
        let v4 = |text: &str| is_group_address(u32::from(text.parse::<Ipv4Addr>().unwrap()));
        for text in ["224.0.0.1", "239.255.255.255", "255.255.255.255"] {
            assert!(v4(text), "{text}");
        }
        for text in ["223.255.255.255", "240.0.0.0", "240.0.0.1", "255.255.255.254"] {
            assert!(!v4(text), "{text}");
        }
        let v6 = |text: &str| is_group_address(u128::from(text.parse::<Ipv6Addr>().unwrap()));
        assert_eq!(["ff02::1", "fe80::1", "2001:db8::1"].map(v6), [true, false, false]);
    }
}
