//! Probes through Linux: they leave by a twin and take the way that Linux' routes say.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use tokio::net::{TcpSocket, TcpStream};

use super::{Outcome, Prober, Target, node_health};

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

/// Probes by TCP connections that are reset: a reset leaves no TIME_WAIT behind, of which one probe a second would pile
/// up 60 per target.
#[derive(Clone, Copy, Debug, Default)]
pub struct NetworkProber;

impl Prober for NetworkProber {
    async fn probe(&self, target: Target, source_port: Option<u16>, timeout: Duration) -> Outcome {
        let answer = tokio::time::timeout(timeout, ask(target, source_port));
        answer.await.unwrap_or_else(|_| Outcome::Failed(format!("no answer within {timeout:?}")))
    }
}

async fn ask(target: Target, source_port: Option<u16>) -> Outcome {
    let address = match target {
        Target::Tcp(address) | Target::NodeHealth(address) | Target::Vip { vip: address, .. } => address,
    };
    let stream = match connect(address, source_port).await {
        Ok(stream) => stream,
        Err(error) if is_ours(&error) => return Outcome::NotAsked(error.to_string()),
        Err(error) if matches!(target, Target::Vip { .. }) && !has_route(address) => {
            return Outcome::NotAsked(format!("the gateway itself has no route to the VIP, add one: {error}"));
        }
        Err(error) => return Outcome::Failed(error.to_string()),
    };
    match (stream.set_zero_linger(), target) {
        (Err(error), _) => Outcome::NotAsked(error.to_string()),
        (Ok(()), Target::NodeHealth(_)) => node_health::ask(stream, address).await,
        (Ok(()), Target::Tcp(_) | Target::Vip { .. }) => Outcome::Passed,
    }
}

/// Probes of one backend through several VIPs leave from one port at once; Linux tells them apart by the VIP, and allows it
/// to sockets that all reuse addresses.
async fn connect(address: SocketAddr, source_port: Option<u16>) -> io::Result<TcpStream> {
    let Some(port) = source_port else { return TcpStream::connect(address).await };
    let (socket, any) = match address {
        SocketAddr::V4(_) => (TcpSocket::new_v4()?, IpAddr::from(Ipv4Addr::UNSPECIFIED)),
        SocketAddr::V6(_) => (TcpSocket::new_v6()?, IpAddr::from(Ipv6Addr::UNSPECIFIED)),
    };
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::new(any, port))?;
    socket.connect(address).await
}

/// Whether Linux would send to an address; connecting a UDP socket sends nothing. Clients' packets to a VIP do not ask Linux
/// for its way, so that a gateway without a route to it, which one of a `routed` pool may be, finds no fault with backends.
/// What a node says of the VIP being unreachable is another matter.
fn has_route(to: SocketAddr) -> bool {
    let any = if to.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { IpAddr::from(Ipv6Addr::UNSPECIFIED) };
    UdpSocket::bind((any, 0)).is_ok_and(|socket| socket.connect(to).is_ok())
}

/// Whether an error says that this machine lacks something. "Unreachable" is not among them: a target that cannot be
/// reached from here cannot be forwarded to either.
fn is_ours(error: &io::Error) -> bool {
    /// Linux' numbers, the same on every architecture that DPDK runs on.
    const ENOMEM: i32 = 12;
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const EADDRINUSE: i32 = 98;
    const EADDRNOTAVAIL: i32 = 99;
    const ENOBUFS: i32 = 105;
    matches!(error.raw_os_error(), Some(ENOMEM | ENFILE | EMFILE | EADDRINUSE | EADDRNOTAVAIL | ENOBUFS))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn a_listener_passes_and_a_port_without_one_fails() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let bound = TcpSocket::new_v4().unwrap();
        bound.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let [open, closed] = [listener.local_addr().unwrap(), bound.local_addr().unwrap()];
        assert_eq!(NetworkProber.probe(Target::Tcp(open), None, LONG).await, Outcome::Passed);
        assert!(matches!(NetworkProber.probe(Target::Tcp(closed), None, LONG).await, Outcome::Failed(_)));
    }

    /// Answers every connection by `answer` and closes it; what was asked comes by the channel.
    async fn server(answer: &'static str) -> (SocketAddr, tokio::sync::mpsc::Receiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (asked, requests) = tokio::sync::mpsc::channel(16);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = String::new();
                while !request.contains("\r\n\r\n") {
                    let mut bytes = [0; 512];
                    let read = stream.read(&mut bytes).await.unwrap();
                    assert_ne!(read, 0, "an unfinished request: {request}");
                    request.push_str(std::str::from_utf8(&bytes[..read]).unwrap());
                }
                asked.send(request).await.unwrap();
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        (address, requests)
    }

    #[tokio::test]
    async fn a_node_is_well_when_kube_proxy_answers_200_and_in_no_other_case() {
        let rows = [
            ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", true),
            ("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", false),
            ("HTTP/1.1 204 No Content\r\n\r\n", false),
            ("hello\r\n\r\n", false),
            ("", false),
        ];
        for (answer, passes) in rows {
            let (address, mut asked) = server(answer).await;
            let outcome = NetworkProber.probe(Target::NodeHealth(address), None, LONG).await;
            assert_eq!(outcome == Outcome::Passed, passes, "{answer:?}: {outcome:?}");
            assert!(!matches!(outcome, Outcome::NotAsked(_)), "{outcome:?}");
            let request = asked.recv().await.unwrap();
            assert!(
                request.starts_with("GET /healthz HTTP/1.1\r\n") && request.contains(&format!("host: {address}")),
                "{request}"
            );
        }
    }

    #[tokio::test]
    async fn a_node_that_accepts_and_says_nothing_fails_in_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = Target::NodeHealth(listener.local_addr().unwrap());
        let outcome = NetworkProber.probe(target, None, Duration::from_millis(50)).await;
        assert!(matches!(outcome, Outcome::Failed(why) if why.contains("no answer")));
    }

    /// Without a scope nobody has a route to a link-local address of no link.
    #[tokio::test]
    async fn a_vip_that_the_gateway_has_no_way_to_says_nothing_of_the_backend() {
        let nowhere: SocketAddr = "[fe80::1]:80".parse().unwrap();
        let outcome = NetworkProber.probe(Target::Vip { vip: nowhere, backend: nowhere.ip() }, Some(0), LONG).await;
        assert!(matches!(outcome, Outcome::NotAsked(why) if why.contains("no route to the VIP")));
        assert!(matches!(NetworkProber.probe(Target::Tcp(nowhere), None, LONG).await, Outcome::Failed(_)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let closed = listener.local_addr().unwrap();
        drop(listener);
        let outcome = NetworkProber.probe(Target::Vip { vip: closed, backend: closed.ip() }, Some(0), LONG).await;
        assert!(matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
    }

    #[tokio::test]
    async fn probes_of_one_backend_through_two_vips_leave_from_its_port_again_and_again() {
        let [one, two] = [TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap()];
        // Held, so that nobody else gets it; sockets that reuse addresses may share it with us.
        let held = TcpSocket::new_v4().unwrap();
        held.set_reuseaddr(true).unwrap();
        held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let free = held.local_addr().unwrap().port();
        let vip =
            |listener: &TcpListener| Target::Vip { vip: listener.local_addr().unwrap(), backend: "10.0.0.1".parse().unwrap() };
        for _ in 0..3 {
            let both =
                tokio::join!(NetworkProber.probe(vip(&one), Some(free), LONG), NetworkProber.probe(vip(&two), Some(free), LONG));
            assert_eq!(both, (Outcome::Passed, Outcome::Passed));
            assert_eq!(one.accept().await.unwrap().1.port(), free);
            assert_eq!(two.accept().await.unwrap().1.port(), free);
        }
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
