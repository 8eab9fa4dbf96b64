//! The walk over IPv6 extension headers, with a bound.

use crate::DropReason;
use crate::wire::{Extension, FragmentHeader, RoutingHeader, next_header, take};

/// Extension headers that are walked over, at most. RFC 8200 section 4.1 has each of the 4 kinds once, destination
/// options twice: 5, and some room.
const EXTENSION_HEADERS_MAX: usize = 8;

/// Bytes of extension headers that are walked over, at most: 32 for each header.
const EXTENSION_BYTES_MAX: u16 = 256;

/// Where the extension headers lead to.
pub(crate) struct Chain {
    pub(crate) protocol: u8,
    /// Bytes of extension headers before what `end` tells of.
    pub(crate) extension_bytes: u16,
    pub(crate) end: ChainEnd,
}

#[derive(PartialEq, Eq)]
pub(crate) enum ChainEnd {
    /// A transport header, or any other protocol.
    Transport,
    /// A part of a datagram.
    Fragment,
    /// Something that must not be rewritten, whatever it is.
    Opaque,
}

/// Walks over IPv6 extension headers (RFC 8200 section 4).
pub(crate) fn walk(first: u8, payload: &[u8]) -> Result<Chain, DropReason> {
    let mut next = first;
    let mut end = ChainEnd::Transport;
    let mut offset: u16 = 0;
    for position in 0..=EXTENSION_HEADERS_MAX {
        let rest = payload.get(usize::from(offset)..).ok_or(DropReason::Malformed)?;
        let header_len = match next {
            // Only right after the IPv6 header (RFC 8200 section 4.1).
            next_header::HOP_BY_HOP if position > 0 => return Err(DropReason::Malformed),
            next_header::HOP_BY_HOP | next_header::DESTINATION_OPTIONS => {
                let (extension, _) = take::<Extension>(rest).ok_or(DropReason::Malformed)?;
                next = extension.next_header;
                extension.header_len()
            }
            next_header::ROUTING => {
                let (routing, _) = take::<RoutingHeader>(rest).ok_or(DropReason::Malformed)?;
                if routing.kind == 0 {
                    return Err(DropReason::SourceRoute); // RFC 5095
                }
                if routing.segments_left > 0 {
                    // Checksums count the last destination, and it is not in the IPv6 header yet (RFC 8200 section 8.1).
                    end = ChainEnd::Opaque;
                }
                next = routing.extension.next_header;
                routing.extension.header_len()
            }
            next_header::FRAGMENT => {
                let (fragment, _) = take::<FragmentHeader>(rest).ok_or(DropReason::Malformed)?;
                next = fragment.next_header;
                if !fragment.is_atomic() {
                    let extension_bytes = offset + FragmentHeader::BYTES;
                    return Ok(Chain { protocol: next, extension_bytes, end: ChainEnd::Fragment });
                }
                FragmentHeader::BYTES // RFC 6946: a whole datagram
            }
            _ => return Ok(Chain { protocol: next, extension_bytes: offset, end }),
        };
        offset += header_len;
        if offset > EXTENSION_BYTES_MAX {
            return Err(DropReason::Malformed);
        }
    }
    Err(DropReason::Malformed)
}
