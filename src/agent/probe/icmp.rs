//! ICMP echo requests from datagram sockets, for which the kernel chooses the identifier, computes checksums and selects
//! the reply. The caller bounds the time.
//!
//! Such sockets need no capability, but a group in `net.ipv4.ping_group_range`.

use std::io;
use std::net::{IpAddr, SocketAddr};

use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
use tokio::net::UdpSocket;

/// Types of the messages (RFC 792, RFC 4443).
const ECHO_V4: (u8, u8) = (8, 0);
const ECHO_V6: (u8, u8) = (128, 129);
/// Sequence number of the only request of a probe.
const SEQUENCE: [u8; 2] = [0, 1];

/// Sends an echo request and waits for the reply.
///
/// # Errors
/// `PermissionDenied`, with the remedy, if this process may not send any; otherwise the kernel's.
pub(super) async fn echo(to: IpAddr) -> io::Result<()> {
    exchange(to).await.map_err(|error| {
        if error.kind() != io::ErrorKind::PermissionDenied {
            return error;
        }
        let group = rustix::process::getegid().as_raw();
        let remedy = format!("run: sysctl -w net.ipv4.ping_group_range='{group} {group}'");
        io::Error::new(error.kind(), format!("group {group} may not send echo requests ({error}); {remedy}"))
    })
}

async fn exchange(to: IpAddr) -> io::Result<()> {
    let (family, protocol, (request, reply)) = match to {
        IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP, ECHO_V4),
        IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6, ECHO_V6),
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::DGRAM, flags, Some(protocol))?;
    let socket = UdpSocket::from_std(socket.into())?;
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
            match echo(ip.parse().unwrap()).await {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    assert!(error.to_string().contains("sysctl -w net.ipv4.ping_group_range"), "{error}");
                }
                Err(error) => assert!(ip == "::1", "{error}"),
            }
        }
    }
}
