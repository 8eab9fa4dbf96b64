//! The SCTP common header and what every chunk begins with (RFC 9260 section 3).

use zerocopy::network_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The common header, 12 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Sctp {
    /// From.
    pub source_port: U16,
    /// To.
    pub destination_port: U16,
    /// What the receiver told its peer to write here; 0 with INIT.
    pub tag: U32,
    /// CRC32c over the packet with zeros here. Unlike all other numbers its lowest byte comes first (RFC 9260 appendix A).
    pub checksum: zerocopy::little_endian::U32,
}

/// What a chunk begins with, 4 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Chunk {
    /// See [`crate::sctp_chunk`].
    pub kind: u8,
    /// By kind.
    pub flags: u8,
    /// Bytes of the chunk, these included, the up to three bytes of padding behind it not.
    pub len: U16,
}

impl Sctp {
    /// Bytes of the common header.
    pub const BYTES: u16 = 12;
}

impl Chunk {
    /// Bytes that every chunk has.
    pub const BYTES: u16 = 4;
    /// Flag T of ABORT and SHUTDOWN COMPLETE: the tag is the receiver's peer's, who has no association (section 8.5.1).
    pub const REFLECTED: u8 = 0x01;
}
