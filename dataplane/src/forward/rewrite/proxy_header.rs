//! The header of the PROXY protocol (haproxy's `doc/proxy-protocol.txt`, 2026): tells a backend the addresses and ports
//! that the client's packets have.
//!
//! **Invariant:** a flow has one header, of the same bytes whenever it is written: it follows from addresses, ports,
//! protocol and version.
//!
//! Not here: type-length-value fields (none are sent), and where the header goes.

use std::io::Write;
use std::net::IpAddr;

use arrayvec::ArrayVec;
use proto::ProxyProtocol;

use crate::flow::{HeaderStage, Shift};
use crate::wire::{Address, Tuple, protocol};

/// Bytes of the longest header: a line of version 1 for IPv6, as the specification bounds it (section 2.1).
pub const PROXY_HEADER_MAX: usize = 107;

/// A header.
pub type ProxyHeader = ArrayVec<u8, PROXY_HEADER_MAX>;

/// What version 2 begins with (section 2.2).
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Version 2, command PROXY.
const VERSION_AND_COMMAND: u8 = 0x21;

/// The version of the header for a protocol: version 1 is for TCP only.
const fn version_for(version: ProxyProtocol, protocol: u8) -> ProxyProtocol {
    if protocol == protocol::UDP { ProxyProtocol::V2 } else { version }
}

/// The header of a flow whose client's packets have this tuple: 28 bytes (IPv4) or 52 (IPv6) of version 2, a line of at
/// most 56 or 104 of version 1.
#[must_use]
pub fn proxy_header<A: Address>(version: ProxyProtocol, tuple: &Tuple<A>) -> ProxyHeader {
    let mut header = ProxyHeader::new();
    let written = match version_for(version, tuple.protocol) {
        ProxyProtocol::V1 => write_line(&mut header, tuple),
        ProxyProtocol::V2 => write_binary(&mut header, tuple),
    };
    // The longest header fits, see the tests.
    debug_assert!(written.is_ok());
    header
}

/// The shift of a flow that begins with this sequence number, or as a datagram, and whose client's packets have this tuple.
#[must_use]
pub fn shift_between<A: Address>(version: ProxyProtocol, tuple: &Tuple<A>, initial_sequence: u32) -> Shift {
    let header_len = u8::try_from(proxy_header(version, tuple).len()).unwrap_or(u8::MAX);
    let stage = if tuple.protocol == protocol::TCP { HeaderStage::Owed } else { HeaderStage::Settled };
    Shift::new(version_for(version, tuple.protocol), header_len, stage, initial_sequence)
}

fn write_line<A: Address>(header: &mut ProxyHeader, tuple: &Tuple<A>) -> std::io::Result<()> {
    let (source, destination) = (tuple.source.ip(), tuple.destination.ip());
    let family = if source.is_ipv4() { "TCP4" } else { "TCP6" };
    write!(header, "PROXY {family} {source} {destination} {} {}\r\n", tuple.source_port, tuple.destination_port)
}

fn write_binary<A: Address>(header: &mut ProxyHeader, tuple: &Tuple<A>) -> std::io::Result<()> {
    let stream_or_datagram = if tuple.protocol == protocol::UDP { 2 } else { 1 };
    header.write_all(&SIGNATURE)?;
    match (tuple.source.ip(), tuple.destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            header.write_all(&[VERSION_AND_COMMAND, 0x10 | stream_or_datagram, 0, 12])?;
            header.write_all(&source.octets())?;
            header.write_all(&destination.octets())?;
        }
        (source, destination) => {
            header.write_all(&[VERSION_AND_COMMAND, 0x20 | stream_or_datagram, 0, 36])?;
            for address in [source, destination] {
                let IpAddr::V6(address) = address else { continue };
                header.write_all(&address.octets())?;
            }
        }
    }
    header.write_all(&tuple.source_port.to_be_bytes())?;
    header.write_all(&tuple.destination_port.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    fn header(version: ProxyProtocol, from: &str, to: &str, protocol: u8) -> Vec<u8> {
        let (from, to): (SocketAddr, SocketAddr) = (from.parse().unwrap(), to.parse().unwrap());
        let (source_port, destination_port) = (from.port(), to.port());
        match (from.ip(), to.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let (source, destination) = (source.into(), destination.into());
                proxy_header::<u32>(version, &Tuple { source, destination, source_port, destination_port, protocol }).to_vec()
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let (source, destination) = (source.into(), destination.into());
                proxy_header::<u128>(version, &Tuple { source, destination, source_port, destination_port, protocol }).to_vec()
            }
            _ => panic!("one family"),
        }
    }

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    }

    #[test]
    fn headers_are_those_of_the_specification() {
        let (v4, v6) = (("198.51.100.7:5555", "192.0.2.100:80"), ("[2001:db8::7]:5555", "[2001:db8::1:0]:443"));
        let signature = "0d0a0d0a000d0a515549540a";
        let ends_v6 = "20010db8000000000000000000000007".to_owned() + "20010db8000000000000000000010000" + "15b301bb";
        let rows: [(ProxyProtocol, _, u8, Vec<u8>); 6] = [
            (ProxyProtocol::V1, v4, 6, b"PROXY TCP4 198.51.100.7 192.0.2.100 5555 80\r\n".to_vec()),
            (ProxyProtocol::V1, v6, 6, b"PROXY TCP6 2001:db8::7 2001:db8::1:0 5555 443\r\n".to_vec()),
            (ProxyProtocol::V2, v4, 6, hex(&format!("{signature}2111000cc6336407c000026415b30050"))),
            (ProxyProtocol::V2, v4, 17, hex(&format!("{signature}2112000cc6336407c000026415b30050"))),
            (ProxyProtocol::V2, v6, 6, hex(&format!("{signature}21210024{ends_v6}"))),
            (ProxyProtocol::V1, v6, 17, hex(&format!("{signature}21220024{ends_v6}"))),
        ];
        for (version, (from, to), protocol, expected) in rows {
            assert_eq!(header(version, from, to, protocol), expected, "{version:?} {from} protocol {protocol}");
        }
    }

    #[test]
    fn the_longest_headers_fit() {
        let longest_v4 = header(ProxyProtocol::V1, "255.255.255.255:65535", "255.255.255.254:65535", 6);
        assert_eq!(longest_v4.len(), 56);
        let address = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535";
        let longest_v6 = header(ProxyProtocol::V1, address, address, 6);
        assert_eq!(longest_v6.len(), 104);
        let mapped = "[::ffff:255.255.255.255]:65535";
        assert!(header(ProxyProtocol::V1, mapped, address, 6).ends_with(b"\r\n"));
        assert_eq!(header(ProxyProtocol::V2, address, address, 6).len(), 52);
    }
}
