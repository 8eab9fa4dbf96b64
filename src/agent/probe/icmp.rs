//! ICMP echo requests from datagram sockets, for which the kernel chooses the identifier, computes checksums and selects
//! the reply. The caller bounds the time.
//!
//! Such sockets need no capability, but a group in `net.ipv4.ping_group_range`.

use std::io;
use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
use tokio::net::UdpSocket;

use super::Outcome;
use super::prober::is_ours;

/// Types of the messages (RFC 792, RFC 4443).
const ECHO_V4: (u8, u8) = (8, 0);
const ECHO_V6: (u8, u8) = (128, 129);
/// Sequence number of the only request of a probe.
const SEQUENCE: [u8; 2] = [0, 1];

/// Sends an echo request and waits for the reply.
pub(super) async fn echo(to: IpAddr) -> Outcome {
    match exchange(to).await {
        Ok(()) => Outcome::Passed,
        Err(error) if [Some(Errno::ACCESS), Some(Errno::PERM)].contains(&Errno::from_io_error(&error)) => {
            let group = rustix::process::getegid().as_raw();
            Outcome::NotAsked(format!(
                "group {group} may not send echo requests ({error}); run: sysctl -w net.ipv4.ping_group_range='{group} {group}'"
            ))
        }
        Err(error) if is_ours(&error) => Outcome::NotAsked(error.to_string()),
        Err(error) => Outcome::Failed(format!("failed: {error}")),
    }
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
                Outcome::Passed => {}
                Outcome::NotAsked(why) => assert!(why.contains("sysctl -w net.ipv4.ping_group_range"), "{why}"),
                Outcome::Failed(why) => assert!(ip == "::1", "{why}"),
            }
        }
    }
}
