//! The probe that opens a TCP connection, through Linux: it leaves by the twin and takes the way that Linux' routes say.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;

use super::{Outcome, Prober};

/// File descriptors that the rest of the program may need: sockets, taps, files, epoll (about 60 in use with eight ports).
const DESCRIPTORS_KEPT: u64 = 256;
/// Probes at once, at most. 100,000 targets at an interval of 1 s of which 4 % take the whole 500 ms need 2,000.
const CONCURRENCY_MAX: u64 = 4096;
/// Probes at once, at least, however few descriptors there are.
const CONCURRENCY_MIN: u64 = 16;

/// How many probes may be under way when the process may have `descriptors` files open: one each, after what the rest
/// of the program needs.
#[must_use]
pub fn concurrency(descriptors: u64) -> usize {
    let probes = descriptors.saturating_sub(DESCRIPTORS_KEPT).clamp(CONCURRENCY_MIN, CONCURRENCY_MAX);
    usize::try_from(probes).unwrap_or(usize::MAX)
}

/// Probes by a TCP connection that is opened and at once reset: a reset leaves no TIME_WAIT behind, of which one probe a
/// second would pile up 60 per target.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpProber;

impl Prober for TcpProber {
    async fn probe(&self, target: SocketAddr, timeout: Duration) -> Outcome {
        match tokio::time::timeout(timeout, TcpStream::connect(target)).await {
            Err(_) => Outcome::Failed(format!("no answer within {timeout:?}")),
            Ok(Err(error)) if is_ours(&error) => Outcome::NotAsked(error.to_string()),
            Ok(Err(error)) => Outcome::Failed(error.to_string()),
            Ok(Ok(stream)) => match stream.set_zero_linger() {
                Ok(()) => Outcome::Passed,
                Err(error) => Outcome::NotAsked(error.to_string()),
            },
        }
    }
}

/// Whether an error says that this machine lacks something. "Unreachable" is not among them: a target that cannot be
/// reached from here cannot be forwarded to either.
fn is_ours(error: &io::Error) -> bool {
    /// Linux' numbers, the same on every architecture that DPDK runs on.
    const ENOMEM: i32 = 12;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const EADDRNOTAVAIL: i32 = 99;
    const ENOBUFS: i32 = 105;
    matches!(error.raw_os_error(), Some(ENOMEM | ENFILE | EMFILE | EADDRNOTAVAIL | ENOBUFS))
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    #[tokio::test]
    async fn a_listener_passes_and_a_port_without_one_fails() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let bound = TcpSocket::new_v4().unwrap();
        bound.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let [open, closed] = [listener.local_addr().unwrap(), bound.local_addr().unwrap()];
        assert_eq!(TcpProber.probe(open, Duration::from_secs(5)).await, Outcome::Passed);
        assert!(matches!(TcpProber.probe(closed, Duration::from_secs(5)).await, Outcome::Failed(_)));
    }

    #[test]
    fn a_lack_of_descriptors_says_nothing_of_the_target() {
        assert!(is_ours(&io::Error::from_raw_os_error(24)));
        assert!(!is_ours(&io::Error::from_raw_os_error(111)));
    }

    #[test]
    fn probes_at_once_follow_the_descriptor_limit() {
        assert_eq!(concurrency(0), 16);
        assert_eq!(concurrency(1024), 768);
        assert_eq!(concurrency(1 << 20), 4096);
    }
}
