//! Frames and headers: views of protocol headers over the bytes of a frame, parsing, checksums, VLAN tags, addresses
//! and hashes of tuples.
//!
//! **Invariant:** a view exists only over bytes that hold the whole header, so no access to it can fail. Fields are in
//! network byte order in the bytes and are read in host order.
//!
//! Not here: the verdict on a packet.

mod address;
mod buffer;
pub mod checksum;
mod hash;
mod headers;
mod icmp;
mod ip;
mod link;
mod parse;
pub(crate) mod plain;
pub(crate) mod processor;
mod transport;

pub(crate) use address::is_group_address;
pub use address::{Address, ByFamily, Tuple, TupleKey, WireKey};
pub use buffer::{Buffer, take, take_mut};
pub use checksum::crc32c;
pub use hash::{KEY_BYTES, RETA_ENTRIES, RssKey, Toeplitz, TupleHash};
pub(crate) use hash::{TableHash, rss_keys, split_mix};
pub(crate) use headers::{FrontendKey, transport_bytes};
pub use headers::{Headers, Parsed, Transport, sctp_chunk, tcp_flags};
pub use icmp::{Icmp, LinkLayerOption, NeighbourMessage, icmpv4, icmpv6, neighbour};
pub(crate) use ip::{
    ChainEnd, HOP_LIMIT, NetworkHeader, ether_type_of, forward_header, lower_hop_limit, network_len, set_addresses, walk,
    written_transport_offset,
};
pub use ip::{Extension, FragmentHeader, Ipv4, Ipv6, ParseError, RoutingHeader, next_header, protocol};
pub use link::{Arp, Ethernet, Mac, TagKind, Vlan, VlanTag, ether_type};
pub(crate) use link::{TAG_BYTES, Tags, behind, turn_link};
pub use parse::parse;
pub(crate) use parse::{Carried, carried, ipv4, ipv6, is_link_local, is_martian, never_sources, sctp_first_chunk_kind};
pub(crate) use plain::{ExpectedLink, Plain, Recognised, Shape, WideFamily, recognise, recognise_eight};
pub use transport::{Chunk, Sctp, Tcp, Udp, tcp_option};
