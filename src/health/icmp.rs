//! ICMP echo requests from datagram sockets, for which the kernel chooses the identifier, computes checksums and selects
//! the reply. The caller bounds the time.
//!
//! Such sockets need no capability, but a group in `net.ipv4.ping_group_range`.

use std::io;
use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
use tokio::net::UdpSocket;

/// Types of the messages (RFC 792, RFC 4443).
const ECHO_V4: (u8, u8) = (8, 0);
const ECHO_V6: (u8, u8) = (128, 129);
/// Sequence number of the only request of a probe.
const SEQUENCE: [u8; 2] = [0, 1];

/// Opens a socket for echo requests to addresses of the family of `to`.
///
/// # Errors
/// The kernel's, of which none says anything of the target: this process may not send any, with the remedy; or the
/// machine lacks memory, descriptors or the family.
pub(super) fn open(to: IpAddr) -> io::Result<UdpSocket> {
    let (family, protocol) = match to {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6),
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::DGRAM, flags, Some(protocol)).map_err(|error| {
        if error != Errno::ACCESS {
            return error.into();
        }
        let group = rustix::process::getegid().as_raw();
        let remedy = format!("run: sysctl -w net.ipv4.ping_group_range='{group} {group}'");
        io::Error::other(format!("group {group} may not send echo requests ({error}); {remedy}"))
    })?;
    UdpSocket::from_std(socket.into())
}

/// Sends an echo request and waits for the reply.
///
/// # Errors
/// The kernel's. `PermissionDenied` is an answer about the target: a route of type `prohibit`, or a filter of packets.
pub(super) async fn echo(socket: &UdpSocket, to: IpAddr) -> io::Result<()> {
    let (request, reply) = if to.is_ipv4() { ECHO_V4 } else { ECHO_V6 };
    socket.connect(SocketAddr::new(to, 0)).await?;
    // Type, code, checksum, identifier, sequence number; the kernel fills in checksum and identifier.
    socket.send(&[request, 0, 0, 0, 0, 0, SEQUENCE[0], SEQUENCE[1]]).await?;
    let mut answer = [0; 64];
    loop {
        let length = socket.recv(&mut answer).await?;
        if length >= 8 && answer[0] == reply && answer[6..8] == SEQUENCE {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without the sysctl the outcome says how to set it, which is all that can be shown here; the end-to-end test sets
    /// it in a namespace of its own.
    #[tokio::test]
    async fn this_machine_answers_or_says_what_it_lacks() {
        for ip in ["127.0.0.1", "::1"] {
            let to = ip.parse().unwrap();
            match open(to) {
                Ok(socket) => {
                    let answer = echo(&socket, to).await;
                    assert!(answer.is_ok() || ip == "::1", "{answer:?}");
                }
                Err(error) => {
                    assert!(error.to_string().contains("sysctl -w net.ipv4.ping_group_range") || ip == "::1", "{error}");
                }
            }
        }
    }
}
