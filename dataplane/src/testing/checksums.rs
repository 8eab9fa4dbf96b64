//! Checksums by their definitions, for tests. They share no code with the engine.
#![allow(clippy::expect_used, clippy::panic, reason = "a test that asks for an impossible frame shall fail there")]

use std::net::IpAddr;

/// Panics unless every checksum of an untagged IP frame without extension headers is correct: that of IPv4, and of TCP,
/// UDP, SCTP or ICMP. A UDP checksum of 0 counts as correct.
pub fn assert_checksums(frame: &[u8]) {
    let packet = &frame[14..];
    let (source, destination, protocol, transport): (IpAddr, IpAddr, u8, &[u8]) = if packet[0] >> 4 == 4 {
        let (header, rest) = packet.split_at(usize::from(packet[0] & 15) * 4);
        assert_eq!(slow_checksum(header), 0, "IPv4 header checksum");
        let total_len = usize::from(u16::from_be_bytes([packet[2], packet[3]]));
        let address = |at: usize| <[u8; 4]>::try_from(&header[at..at + 4]).expect("4 bytes");
        (address(12).into(), address(16).into(), header[9], &rest[..total_len - header.len()])
    } else {
        let address = |at: usize| <[u8; 16]>::try_from(&packet[at..at + 16]).expect("16 bytes");
        let payload_len = usize::from(u16::from_be_bytes([packet[4], packet[5]]));
        (address(8).into(), address(24).into(), packet[6], &packet[40..40 + payload_len])
    };
    if protocol == 132 {
        let zeroed = [&transport[..8], &[0; 4], &transport[12..]].concat();
        assert_eq!(transport[8..12], slow_crc32c(&zeroed).to_le_bytes(), "CRC32c of SCTP");
    }
    if matches!(protocol, 6 | 58 | 1) || protocol == 17 && transport[6..8] != [0, 0] {
        assert_eq!(transport_checksum(source, destination, protocol, transport), 0, "checksum of protocol {protocol}");
    }
}

/// The checksum over a transport header and its data, including the checksum field as it is.
#[must_use]
pub fn transport_checksum(source: IpAddr, destination: IpAddr, protocol: u8, bytes: &[u8]) -> u16 {
    let mut all = Vec::new();
    match (source, destination) {
        (IpAddr::V4(_), IpAddr::V4(_)) if protocol == 1 => {} // ICMP has no pseudo header
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            all.extend([source.octets(), destination.octets()].concat());
            all.extend([0, protocol]);
            all.extend(len16(bytes.len()).to_be_bytes());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            all.extend([source.octets(), destination.octets()].concat());
            all.extend([0, 0]);
            all.extend(len16(bytes.len()).to_be_bytes());
            all.extend([0, 0, 0, protocol]);
        }
        _ => panic!("one family"),
    }
    all.extend(bytes);
    slow_checksum(&all)
}

/// CRC32c by the definition in RFC 9260 appendix A: a division of polynomials, where the first bit of the first byte is
/// its lowest.
#[must_use]
pub fn slow_crc32c(bytes: &[u8]) -> u32 {
    let bits = bytes.iter().flat_map(|byte| (0..8).map(move |n| byte >> n & 1 == 1));
    let mut remainder = u32::MAX;
    for bit in bits {
        let is_divisible = (remainder >> 31 == 1) != bit;
        remainder = remainder << 1 ^ if is_divisible { 0x1edc_6f41 } else { 0 };
    }
    !remainder.reverse_bits()
}

/// The checksum by the definition in RFC 1071: word by word, each carry added at once.
pub(super) fn slow_checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u16;
    for pair in bytes.chunks(2) {
        let word = u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
        let (added, carry) = sum.overflowing_add(word);
        sum = added + u16::from(carry);
    }
    !sum
}

pub(super) fn len16(len: usize) -> u16 {
    u16::try_from(len).expect("a length of 16 bits")
}
