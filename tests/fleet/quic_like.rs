//! A protocol that needs its flow as QUIC does: a server knows a connection by the addresses and ports with which it was
//! opened, and answers all others with a reset.
//!
//! A datagram of a client is a byte and a sequence number. The answer repeats both, or has [`RESET`] as its byte, and adds
//! the name of the server.

use std::collections::HashSet;
use std::net::UdpSocket;

use super::edge::peers::in_namespace;

/// Opens a connection.
pub(crate) const OPEN: u8 = b'o';
/// Belongs to an open connection.
pub(crate) const DATA: u8 = b'd';
/// The server does not know the connection.
pub(crate) const RESET: u8 = b'r';
/// A byte, and a sequence number of 8 bytes.
pub(crate) const HEADER: usize = 9;

/// Starts a server in a namespace, until the test's process ends.
pub(crate) fn serve(namespace: &str, address: &str, port: u16, name: &str) {
    let socket = in_namespace(namespace, || UdpSocket::bind((address, port)).unwrap());
    let name = name.to_owned();
    std::thread::spawn(move || {
        let mut known = HashSet::new();
        let mut buffer = [0; 64];
        while let Ok((length, client)) = socket.recv_from(&mut buffer) {
            if length != HEADER {
                continue;
            }
            if buffer[0] == OPEN {
                known.insert(client);
            } else if !known.contains(&client) {
                buffer[0] = RESET;
            }
            let _ = socket.send_to(&[&buffer[..HEADER], name.as_bytes()].concat(), client);
        }
    });
}

/// A datagram of a client.
pub(crate) fn datagram(kind: u8, sequence: u64) -> [u8; HEADER] {
    let mut bytes = [kind; HEADER];
    bytes[1..].copy_from_slice(&sequence.to_be_bytes());
    bytes
}

/// The kind, sequence number and server of an answer.
pub(crate) fn parse(answer: &[u8]) -> Option<(u8, u64, String)> {
    let (header, name) = answer.split_at_checked(HEADER)?;
    let sequence = u64::from_be_bytes(header[1..].try_into().ok()?);
    Some((header[0], sequence, String::from_utf8_lossy(name).into_owned()))
}
