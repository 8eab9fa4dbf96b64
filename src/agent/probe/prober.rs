//! Probes through Linux: they leave through a twin and follow the routes of Linux.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::pin::pin;
use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustix::io::Errno;
use tokio::net::{TcpSocket, TcpStream};

use super::{Outcome, Target};

/// File descriptors reserved for the rest of the program: sockets, taps, files, epoll (about 60 in use with eight
/// ports).
const DESCRIPTORS_KEPT: u64 = 256;
/// Maximum number of concurrent probes. 100,000 targets at an interval of 1 s, of which 4 % take the whole 500 ms, need
/// 2,000.
const CONCURRENCY_MAX: u64 = 4096;
/// Minimum number of concurrent probes, however few descriptors there are.
const CONCURRENCY_MIN: u64 = 16;

/// Number of concurrent probes for a limit of `descriptors` open files: one each, after the reserve for the rest of the
/// program.
#[must_use]
pub fn concurrency(descriptors: u64) -> usize {
    let probes = descriptors.saturating_sub(DESCRIPTORS_KEPT).clamp(CONCURRENCY_MIN, CONCURRENCY_MAX);
    usize::try_from(probes).unwrap_or(usize::MAX)
}

/// Probes `target` from `source_port`, or from any port, for `timeout` at most: a TCP connection, which is reset
/// afterwards. A reset leaves no TIME_WAIT behind, of which one probe per second would accumulate 60 per target.
pub async fn probe(target: Target, source_port: Option<u16>, timeout: Duration) -> Outcome {
    let answer = tokio::time::timeout(timeout, ask(target, source_port));
    answer.await.unwrap_or_else(|_| Outcome::Failed(format!("no answer within {timeout:?}")))
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
        (Ok(()), Target::NodeHealth(_)) => ask_node_health(stream, address).await,
        (Ok(()), Target::Tcp(_) | Target::Vip { .. }) => Outcome::Passed,
    }
}

/// Concurrent probes of one backend through several VIPs use the same source port. Linux distinguishes them by the VIP,
/// and permits this for sockets with SO_REUSEADDR.
async fn connect(address: SocketAddr, source_port: Option<u16>) -> io::Result<TcpStream> {
    let Some(port) = source_port else { return TcpStream::connect(address).await };
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::new(any_address(address), port))?;
    socket.connect(address).await
}

/// Asks kube-proxy for the health of its node: `GET /healthz` at the `healthCheckNodePort` of a Service. It answers 200
/// while the node has ready endpoints of the Service and kube-proxy is healthy. The caller bounds the time; the body is
/// not read.
async fn ask_node_health(stream: TcpStream, target: SocketAddr) -> Outcome {
    let request = Request::get("/healthz").header("host", target.to_string()).header("connection", "close");
    let Ok(request) = request.body(Empty::<Bytes>::new()) else {
        return Outcome::NotAsked("the request cannot be written".to_owned());
    };
    let failed = |error: hyper::Error| Outcome::Failed(format!("no HTTP answer: {error}"));
    let (mut sender, connection) = match http1::handshake(TokioIo::new(stream)).await {
        Ok(both) => both,
        Err(error) => return failed(error),
    };
    let mut connection = pin!(connection);
    let mut answer = pin!(sender.send_request(request));
    let answer = tokio::select! {
        answer = &mut answer => answer,
        // The connection task may end first if the server closes at once; the answer was received before.
        _ = &mut connection => answer.await,
    };
    match answer {
        Ok(answer) if answer.status() == StatusCode::OK => Outcome::Passed,
        Ok(answer) => Outcome::Failed(format!("answered {}, expected 200", answer.status().as_u16())),
        Err(error) => failed(error),
    }
}

/// Whether Linux has a route to an address; connecting a UDP socket sends nothing. Packets of clients to a VIP do not
/// use routes of Linux, so a gateway without a route to the VIP, which is possible for a `routed` pool, must not blame
/// backends. An unreachable message of a node for the VIP still counts.
fn has_route(to: SocketAddr) -> bool {
    UdpSocket::bind((any_address(to), 0)).is_ok_and(|socket| socket.connect(to).is_ok())
}

/// The unspecified address of the same family, to bind to.
fn any_address(to: SocketAddr) -> IpAddr {
    if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// Whether an error means that this machine lacks a resource. "Unreachable" is not one of them: forwarding to an
/// unreachable target fails as well.
fn is_ours(error: &io::Error) -> bool {
    let lacking = [Errno::NOMEM, Errno::NFILE, Errno::MFILE, Errno::ADDRINUSE, Errno::ADDRNOTAVAIL, Errno::NOBUFS];
    Errno::from_io_error(error).is_some_and(|error| lacking.contains(&error))
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
        assert_eq!(probe(Target::Tcp(open), None, LONG).await, Outcome::Passed);
        assert!(matches!(probe(Target::Tcp(closed), None, LONG).await, Outcome::Failed(_)));
    }

    /// Answers every connection with `answer` and closes it; requests go to the channel.
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
            let outcome = probe(Target::NodeHealth(address), None, LONG).await;
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
        let outcome = probe(target, None, Duration::from_millis(50)).await;
        assert!(matches!(outcome, Outcome::Failed(why) if why.contains("no answer")));
    }

    /// Without a scope there is no route to a link-local address.
    #[tokio::test]
    async fn a_vip_that_the_gateway_has_no_way_to_says_nothing_of_the_backend() {
        let nowhere: SocketAddr = "[fe80::1]:80".parse().unwrap();
        let outcome = probe(Target::Vip { vip: nowhere, backend: nowhere.ip() }, Some(0), LONG).await;
        assert!(matches!(outcome, Outcome::NotAsked(why) if why.contains("no route to the VIP")));
        assert!(matches!(probe(Target::Tcp(nowhere), None, LONG).await, Outcome::Failed(_)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let closed = listener.local_addr().unwrap();
        drop(listener);
        let outcome = probe(Target::Vip { vip: closed, backend: closed.ip() }, Some(0), LONG).await;
        assert!(matches!(outcome, Outcome::Failed(_)), "{outcome:?}");
    }

    #[tokio::test]
    async fn probes_of_one_backend_through_two_vips_leave_from_its_port_again_and_again() {
        let [one, two] = [TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap()];
        // Kept open so that no other process gets the port; sockets with SO_REUSEADDR may share it.
        let held = TcpSocket::new_v4().unwrap();
        held.set_reuseaddr(true).unwrap();
        held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let free = held.local_addr().unwrap().port();
        let vip =
            |listener: &TcpListener| Target::Vip { vip: listener.local_addr().unwrap(), backend: "10.0.0.1".parse().unwrap() };
        for _ in 0..3 {
            let both = tokio::join!(probe(vip(&one), Some(free), LONG), probe(vip(&two), Some(free), LONG));
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
