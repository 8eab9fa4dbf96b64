//! Hides the further addresses of SCTP peers (RFC 9260 section 5.1.2): the address parameters of INIT and INIT ACK
//! become padding parameters (RFC 4820), which receivers skip. An association through the gateway then has one path: a
//! second one would lead past the gateway, or to an end that answers with ABORT.
//!
//! **Invariant:** only the types of these parameters and the CRC32c change; a wrong CRC32c stays wrong. The state cookie
//! of an INIT ACK stays as it is.
//!
//! Not here: one-way modes, whose packets are not changed, and ASCONF (RFC 5061), which peers authenticate.

use zerocopy::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::wire::{Address, Chunk, Headers, Sctp, Transport, crc32c, sctp_chunk, take, take_mut};

/// The header of a parameter (RFC 9260 section 3.2.1), 4 bytes.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Parameter {
    kind: U16,
    /// Bytes of the parameter including this header, without the up to three bytes of padding after it.
    len: U16,
}

/// Bytes of a parameter's header, and what parameters are aligned to.
const ALIGNMENT: usize = 4;
/// IPv4 address, IPv6 address, host name address.
const ADDRESSES: [u16; 3] = [5, 6, 11];
/// Padding; its upper bits tell receivers that do not know it to skip it without a report.
const PADDING: u16 = 0x8005;
/// Bytes before the parameters of INIT and INIT ACK: the common header, and a chunk header with five fields.
const FIXED: usize = 12 + 20;

/// Hides the addresses of a packet, and returns their number: 0 for other packets than INIT and INIT ACK. Parameters from
/// the first one on that does not end within the chunk stay as they are; receivers refuse them.
#[inline]
pub fn hide_addresses<A: Address>(frame: &mut [u8], headers: &Headers<A>) -> u16 {
    match headers.transport {
        Transport::Sctp { chunk: sctp_chunk::INIT | sctp_chunk::INIT_ACK } => try_hide(frame, headers).unwrap_or(0),
        _ => 0,
    }
}

/// A change costs about 95 ns (measured), so the most of a packet of 1,500 bytes, 362 empty parameters, about 35 us.
#[cold]
fn try_hide<A: Address>(frame: &mut [u8], headers: &Headers<A>) -> Option<u16> {
    let start = usize::from(headers.transport_offset);
    let end = usize::from(headers.network_offset) + usize::from(headers.packet_len);
    let packet = frame.get_mut(start..end)?;
    let (chunk, _) = take::<Chunk>(packet.get(usize::from(Sctp::BYTES)..)?)?;
    let chunk_end = usize::from(Sctp::BYTES) + usize::from(chunk.len.get());
    let packet_len = packet.len();
    let (mut offset, mut hidden, mut change) = (FIXED, 0, 0);
    while let Some((parameter, _)) = packet.get_mut(offset..chunk_end).and_then(take_mut::<Parameter>) {
        let len = usize::from(parameter.len.get());
        if len < ALIGNMENT || offset + len > chunk_end {
            break;
        }
        let kind = parameter.kind.get();
        if ADDRESSES.contains(&kind) {
            let rest = u16::try_from(packet_len - offset).ok()?;
            change ^= crc32c::difference([kind, parameter.len.get()], [PADDING, parameter.len.get()], rest);
            parameter.kind.set(PADDING);
            hidden += 1;
        }
        offset += len.next_multiple_of(ALIGNMENT);
    }
    let (sctp, _) = take_mut::<Sctp>(packet)?;
    sctp.checksum.set(sctp.checksum.get() ^ change);
    Some(hidden)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Packet, Segment, assert_checksums};
    use crate::wire::{Parsed, parse};

    /// A parameter with its padding.
    fn parameter(kind: u16, data: &[u8]) -> Vec<u8> {
        let len = u16::try_from(data.len() + 4).unwrap();
        let mut bytes = [&kind.to_be_bytes()[..], &len.to_be_bytes(), data].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// A chunk with these parameters. As RFC 9260 section 3.2 has it, its length does not count the last padding.
    fn chunk(kind: u8, parameters: &[u8], unpadded: usize) -> Vec<u8> {
        let len = u16::try_from(20 + parameters.len() - unpadded).unwrap();
        [&[kind, 0][..], &len.to_be_bytes(), b"tag windstreamsn", parameters].concat()
    }

    fn packet(client: &str, vip: &str, payload: &[u8]) -> Packet {
        let mut packet = Packet::sctp(client, vip).payload(payload);
        if let Segment::Sctp { tag, .. } = &mut packet.segment {
            *tag = u32::from(payload[0] != sctp_chunk::INIT) * 7;
        }
        packet
    }

    /// The frame of the packet with hidden addresses, and their number.
    fn hidden(packet: &Packet) -> (u16, Vec<u8>) {
        let mut frame = packet.build();
        let count = match parse(&frame).unwrap() {
            Parsed::V4(headers) => hide_addresses(&mut frame, &headers),
            Parsed::V6(headers) => hide_addresses(&mut frame, &headers),
            other => panic!("{other:?}"),
        };
        (count, frame)
    }

    const ENDS: [(&str, &str); 2] = [("198.51.100.7:5555", "192.0.2.100:80"), ("[2001:db8::7]:5555", "[2001:db8::1:0]:80")];

    /// Every kind of parameter of Linux, and those that a peer may add.
    fn parameters(kind_of_address: impl Fn(u16) -> u16) -> Vec<u8> {
        let cookie = [&[0, 5, 0, 8, 10, 0, 0, 11][..], &[0, 6, 0, 20], &[0xfd; 16]].concat();
        [
            parameter(kind_of_address(5), &[10, 0, 0, 11]),
            parameter(kind_of_address(6), &[0xfd; 16]),
            parameter(12, &[0, 5, 0, 6]),
            parameter(0x8000, &[]),
            parameter(kind_of_address(11), b"a.example\0"),
            parameter(7, &cookie),
            parameter(kind_of_address(5), &[192, 0, 2, 9]),
            parameter(0xc000, &[0, 0, 0, 1]),
            parameter(0x8008, &[0xc1, 0x80, 0]),
        ]
        .concat()
    }

    #[test]
    fn address_parameters_of_init_and_init_ack_become_padding_and_nothing_else_changes() {
        for (client, vip) in ENDS {
            for kind in [sctp_chunk::INIT, sctp_chunk::INIT_ACK] {
                let with = |of: &dyn Fn(u16) -> u16| packet(client, vip, &chunk(kind, &parameters(of), 1));
                let (count, frame) = hidden(&with(&|kind| kind));
                assert_checksums(&frame);
                assert_eq!((count, frame), (4, with(&|_| PADDING).build()), "chunk {kind}");
            }
        }
    }

    #[test]
    fn other_chunks_and_parameters_that_do_not_end_in_the_chunk_stay() {
        let address = parameter(5, &[10, 0, 0, 11]);
        let beyond = [&[0, 5, 0, 200][..], &[0; 8]].concat();
        let short = [0, 5, 0, 3, 0, 5, 0, 8, 10, 0, 0, 1];
        let rows: [(&str, Vec<u8>); 7] = [
            ("an INIT without parameters", chunk(sctp_chunk::INIT, &[], 0)),
            ("a cookie echo", chunk(sctp_chunk::COOKIE_ECHO, &address, 0)),
            ("an ASCONF", chunk(0xc1, &address, 0)),
            ("a parameter beyond the chunk", chunk(sctp_chunk::INIT, &beyond, 0)),
            ("a parameter of 3 bytes", chunk(sctp_chunk::INIT_ACK, &short, 0)),
            ("half a header", chunk(sctp_chunk::INIT_ACK, &[0, 5, 0, 8], 2)),
            ("an INIT ACK longer than its packet", {
                let mut chunk = chunk(sctp_chunk::INIT_ACK, &address, 0);
                chunk[3] = 200;
                chunk
            }),
        ];
        for (sentence, payload) in rows {
            let packet = packet(ENDS[0].0, ENDS[0].1, &payload);
            assert_eq!(hidden(&packet), (0, packet.build()), "{sentence}");
        }
        // Those before it are hidden.
        let packet = packet(ENDS[0].0, ENDS[0].1, &chunk(sctp_chunk::INIT, &[&address[..], &beyond].concat(), 0));
        assert_eq!(hidden(&packet).0, 1);
    }

    #[test]
    fn a_wrong_checksum_stays_wrong_by_the_same_difference() {
        let packet = packet(ENDS[0].0, ENDS[0].1, &chunk(sctp_chunk::INIT, &parameter(5, &[10, 0, 0, 11]), 0));
        let (_, right) = hidden(&packet);
        let mut frame = packet.build();
        frame[42] ^= 0x55;
        let Ok(Parsed::V4(headers)) = parse(&frame) else { panic!("not IPv4") };
        hide_addresses(&mut frame, &headers);
        frame[42] ^= 0x55;
        assert_eq!(frame, right);
    }

    proptest! {
        /// Against a model that walks the parameters and builds the packet anew.
        #[test]
        fn only_whole_address_parameters_change_whatever_a_chunk_holds(
            list in prop::collection::vec((0_u16..16, prop::collection::vec(any::<u8>(), 0..40)), 0..30),
            tail in prop::collection::vec(any::<u8>(), 0..3), is_answer in any::<bool>(),
        ) {
            let kind = if is_answer { sctp_chunk::INIT_ACK } else { sctp_chunk::INIT };
            let is_address = |kind: u16| matches!(kind, 5 | 6 | 11);
            let build = |padded: bool| {
                let of = |kind: u16| if padded && is_address(kind) { PADDING } else { kind };
                let bytes: Vec<u8> = list.iter().flat_map(|(kind, data)| parameter(of(*kind), data)).chain(tail.clone()).collect();
                packet(ENDS[1].0, ENDS[1].1, &chunk(kind, &bytes, 0))
            };
            let expected = list.iter().filter(|(kind, _)| is_address(*kind)).count();
            prop_assert_eq!(hidden(&build(false)), (u16::try_from(expected).unwrap(), build(true).build()));
        }

        #[test]
        fn no_bytes_change_the_length_or_the_validity_of_the_checksum(noise in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut frame = packet(ENDS[0].0, ENDS[0].1, &chunk(sctp_chunk::INIT_ACK, &noise, 0)).build();
            let len = frame.len();
            let Ok(Parsed::V4(headers)) = parse(&frame) else { panic!("not IPv4") };
            hide_addresses(&mut frame, &headers);
            assert_checksums(&frame);
            prop_assert_eq!(frame.len(), len);
        }
    }
}
