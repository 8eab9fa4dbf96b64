//! TODO: docs.

mod address;
mod buffer;
pub mod checksum;
pub mod crc32c;
mod ethernet;
mod hash;
mod headers;
mod icmp;
mod ip;
mod parse;
mod transport;
mod vlan;

pub use address::Address;
pub(crate) use address::is_group_address;
pub use buffer::{Buffer, take, take_mut};
pub(crate) use ethernet::turn_link;
pub use ethernet::{Arp, Ethernet, Mac, ether_type};
pub use hash::TupleHash;
pub(crate) use hash::{TableHash, split_mix};
pub(crate) use headers::{FrontendKey, transport_bytes};
pub use headers::{Headers, Parsed, Transport, Tuple, sctp_chunk, tcp_flags};
pub use icmp::{Icmp, LinkLayerOption, NeighbourMessage, icmpv4, icmpv6, neighbour};
pub(crate) use ip::{ChainEnd, HOP_LIMIT, NetworkHeader, network_len, walk, written_transport_offset};
pub use ip::{Extension, FragmentHeader, Ipv4, Ipv6, RoutingHeader, next_header, protocol};
pub use parse::parse;
pub(crate) use parse::{Carried, carried, ipv4, ipv6, is_link_local, is_martian, sctp_first_chunk_kind};
pub use transport::{Chunk, Sctp, Tcp, Udp};
pub(crate) use vlan::{TAG_BITS, Tags};
pub use vlan::{TagKind, Vlan, VlanTag};
