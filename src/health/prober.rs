//! Probes through Linux: they leave through a twin and follow the routes of Linux.
//!
//! Invariant: a probe opens a connection of its own and resets it at the end, within its timeout. A reset leaves no
//! TIME_WAIT behind, of which one probe per second would accumulate 60 per target.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use objects::text::without_os_errors;
use proto::{ProxyProtocol, StatusRanges};
use rustix::io::Errno;
use rustix::net::sockopt::set_tcp_quickack;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, timeout_at};

use super::http_request::Request;
use super::tls::TlsClients;
use super::{HttpQuestion, Outcome, Question, Target, grpc, http_request, icmp};
use crate::netlink::RouteQuery;

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

/// Makes probes.
#[derive(Debug, Default)]
pub struct Prober {
    tls: TlsClients,
    routes: RouteQuery,
}

impl Prober {
    /// Probes `target` from `source_port`, or from any port, unless Linux would send elsewhere than to the ports of the
    /// gateway, whose interfaces these are: the address may be one of another network then, and the request may do harm
    /// there.
    pub async fn probe_by(&self, interfaces: &[u32], target: Target, source_port: Option<u16>) -> Outcome {
        match self.routes.interface_to(target.address.ip()).await {
            Ok(Some(index)) if !interfaces.contains(&index) => {
                Outcome::NotAsked("Linux sends to it by an interface that is no port; add a route by a port".to_owned())
            }
            // Without any route the probe fails by itself.
            Ok(_) => plain(self.probe(target, source_port).await),
            Err(error) => plain(Outcome::NotAsked(error.to_string())),
        }
    }

    /// Probes `target` from `source_port`, or from any port, for its timeout at most.
    async fn probe(&self, target: Target, source_port: Option<u16>) -> Outcome {
        let timeout = target.settings.timeout;
        let deadline = Instant::now() + timeout;
        let late = |what: &str| Outcome::Failed(format!("{what} within {timeout:?}"));
        if target.question == Question::Icmp {
            let to = target.address.ip();
            return match icmp::open(to) {
                Ok(socket) => timeout_at(deadline, icmp::echo(&socket, to)).await.map_or_else(|_| late("gave no answer"), echoed),
                Err(error) => Outcome::NotAsked(error.to_string()),
            };
        }
        let Ok(stream) = timeout_at(deadline, open(&target, source_port)).await else {
            return late("accepted no connection");
        };
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) if is_ours(&error) => return Outcome::NotAsked(error.to_string()),
            Err(error) if target.behind_vip.is_some() && !has_route(target.address) => {
                return Outcome::NotAsked(format!("the gateway itself has no route to the VIP, add one: {error}"));
            }
            Err(error) => return Outcome::Failed(format!("failed: {error}")),
        };
        let answer = timeout_at(deadline, self.ask(stream, &target, source_port)).await;
        answer.unwrap_or_else(|_| late("accepted the connection and gave no answer"))
    }

    async fn ask(&self, stream: TcpStream, target: &Target, source_port: Option<u16>) -> Outcome {
        let authority = |host: &Option<String>| host.clone().unwrap_or_else(|| target.address.to_string());
        match &target.question {
            Question::Route | Question::Tcp | Question::Icmp => Outcome::Passed,
            Question::NodeHealth => {
                let (authority, status) = (target.address.to_string(), StatusRanges::only(200));
                http_request::ask(stream, &Request { authority: &authority, path: "/healthz", status: &status }).await
            }
            Question::Http(asked) => {
                let HttpQuestion { tls, path, host, status } = &**asked;
                let request = Request { authority: &authority(host), path, status };
                let Some(trust) = tls else { return http_request::ask(stream, &request).await };
                let (host, ip) = (host.as_deref(), target.address.ip());
                let failure = match self.tls.connect(stream, *trust, host, ip).await {
                    Ok(stream) => return http_request::ask(stream, &request).await,
                    Err(failure) => failure,
                };
                if !failure.may_succeed_otherwise {
                    return failure.outcome;
                }
                let Ok(again) = open(target, source_port).await else {
                    return failure.outcome;
                };
                match self.tls.connect_naming_more_groups(again, host, ip).await {
                    Ok(stream) => http_request::ask(stream, &request).await,
                    Err(_) => failure.outcome,
                }
            }
            Question::Grpc(asked) => grpc::ask(stream, &authority(&asked.host), &asked.service).await,
        }
    }
}

/// What operators read of an outcome has words and no numbers of the system's errors.
fn plain(outcome: Outcome) -> Outcome {
    let plain = |text: String| without_os_errors(&text).into_owned();
    match outcome {
        Outcome::Passed => Outcome::Passed,
        Outcome::Failed(why) => Outcome::Failed(plain(why)),
        Outcome::NotAsked(why) => Outcome::NotAsked(plain(why)),
    }
}

/// The outcome of an echo request that was sent, or that the kernel refused to send to this target.
fn echoed(answer: io::Result<()>) -> Outcome {
    match answer {
        Ok(()) => Outcome::Passed,
        Err(error) if is_ours(&error) => Outcome::NotAsked(error.to_string()),
        Err(error) => Outcome::Failed(format!("failed: {error}")),
    }
}

/// Opens a connection that ends by a reset, with the header that the target expects.
async fn open(target: &Target, source_port: Option<u16>) -> io::Result<TcpStream> {
    let speaks_first = target.question != Question::Tcp || target.header.is_some();
    let mut stream = connect(target.address, source_port, speaks_first).await?;
    stream.set_zero_linger()?;
    if let Some(version) = target.header {
        let header = proxy_header(version, stream.local_addr()?, stream.peer_addr()?);
        stream.write_all(&header).await?;
    }
    Ok(stream)
}

/// The PROXY header of a connection that this machine opens for itself. Version 2 says so (LOCAL, no addresses: haproxy,
/// doc/proxy-protocol.txt, 2.2), and servers do not log it as a client. Version 1 has no word for it that all servers
/// take, so it names the ends of the connection.
fn proxy_header(version: ProxyProtocol, from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    match version {
        ProxyProtocol::V1 => {
            let family = if from.is_ipv4() { "TCP4" } else { "TCP6" };
            format!("PROXY {family} {} {} {} {}\r\n", from.ip(), to.ip(), from.port(), to.port()).into_bytes()
        }
        ProxyProtocol::V2 => b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0".to_vec(),
    }
}

/// Concurrent probes of one backend through several VIPs use the same source port. Linux distinguishes them by the VIP,
/// and permits this for sockets with SO_REUSEADDR. A probe that `speaks_first` acknowledges the connection by its request,
/// which saves a packet, and wakes the server once; a kernel that refuses this sends both.
async fn connect(address: SocketAddr, source_port: Option<u16>, speaks_first: bool) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    if speaks_first {
        let _ = set_tcp_quickack(&socket, false);
    }
    if let Some(port) = source_port {
        socket.set_reuseaddr(true)?;
        socket.bind(SocketAddr::new(any_address(address), port))?;
    }
    socket.connect(address).await
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
pub(super) mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::super::ProbeSettings;
    use super::super::target::tests::{at, node_health, tcp};
    use super::*;

    pub(crate) const LONG: Duration = Duration::from_secs(20);

    pub(crate) async fn probe(target: Target, source_port: Option<u16>, timeout: Duration) -> Outcome {
        let settings = Arc::new(ProbeSettings { timeout, ..ProbeSettings::clone(&target.settings) });
        Prober::default().probe(Target { settings, ..target }, source_port).await
    }

    /// The text of a failure.
    pub(crate) fn failure(outcome: Outcome) -> String {
        let Outcome::Failed(why) = outcome else { panic!("{outcome:?}") };
        why
    }

    #[tokio::test]
    async fn a_listener_passes_and_a_port_without_one_fails() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let bound = TcpSocket::new_v4().unwrap();
        bound.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let [open, closed] = [listener.local_addr().unwrap(), bound.local_addr().unwrap()];
        assert_eq!(probe(at(open, Question::Tcp), None, LONG).await, Outcome::Passed);
        assert!(failure(probe(at(closed, Question::Tcp), None, LONG).await).contains("refused"));
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
            let outcome = probe(node_health(&address.to_string()), None, LONG).await;
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
    async fn an_http_probe_asks_for_its_path_and_host_and_judges_by_the_status_alone() {
        let rows = [
            ("HTTP/1.1 204 No Content\r\n\r\n", "200-399", Ok(())),
            ("HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\n\r\n", "200-399", Ok(())),
            ("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "200-299,404", Ok(())),
            ("HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n", "200-399", Err("answered 500, expected 200-399")),
            ("HTTP/1.1 200 OK\r\n\r\n", "204", Err("answered 200, expected 204")),
            ("SSH-2.0-OpenSSH_9.2\r\n", "200-399", Err("gave no HTTP answer")),
        ];
        for (answer, status, expected) in rows {
            let (address, mut asked) = server(answer).await;
            let question = HttpQuestion {
                tls: None,
                path: "/healthz?full=1".to_owned(),
                host: Some("shop.example".to_owned()),
                status: status.parse().unwrap(),
            };
            let outcome = probe(at(address, Question::Http(Arc::new(question))), None, LONG).await;
            match expected {
                Ok(()) => assert_eq!(outcome, Outcome::Passed, "{answer:?}"),
                Err(why) => assert!(failure(outcome).starts_with(why), "{answer:?}"),
            }
            let request = asked.recv().await.unwrap();
            assert!(
                request.starts_with("GET /healthz?full=1 HTTP/1.1\r\n") && request.contains("host: shop.example\r\n"),
                "{request}"
            );
        }
    }

    #[test]
    fn the_header_of_a_probe_is_local_or_names_its_ends() {
        let of = |version, from: &str, to: &str| proxy_header(version, from.parse().unwrap(), to.parse().unwrap());
        let second = of(ProxyProtocol::V2, "10.0.0.2:1", "10.0.0.1:80");
        assert_eq!(second, [0x0d, 0x0a, 0x0d, 0x0a, 0, 0x0d, 0x0a, 0x51, 0x55, 0x49, 0x54, 0x0a, 0x20, 0, 0, 0]);
        assert_eq!(of(ProxyProtocol::V1, "10.0.0.2:1", "10.0.0.1:80"), b"PROXY TCP4 10.0.0.2 10.0.0.1 1 80\r\n");
        assert_eq!(of(ProxyProtocol::V1, "[fd00::2]:1", "[fd00::1]:80"), b"PROXY TCP6 fd00::2 fd00::1 1 80\r\n");
    }

    /// Reads the header of a probe, as a server that expects one does, and answers the request behind it.
    #[tokio::test]
    async fn a_header_comes_before_the_request_and_by_itself_in_a_tcp_probe() {
        let request = Arc::new(HttpQuestion { tls: None, path: "/".to_owned(), host: None, status: StatusRanges::default() });
        for version in ProxyProtocol::ALL {
            for question in [Question::Tcp, Question::Http(Arc::clone(&request))] {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let address = listener.local_addr().unwrap();
                let expects_request = question != Question::Tcp;
                let answering = async {
                    let (mut stream, from) = listener.accept().await.unwrap();
                    let mut header = vec![0; proxy_header(*version, from, address).len()];
                    stream.read_exact(&mut header).await.unwrap();
                    assert_eq!(header, proxy_header(*version, from, address));
                    if expects_request {
                        let mut word = [0; 3];
                        stream.read_exact(&mut word).await.unwrap();
                        assert_eq!(&word, b"GET");
                        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
                    }
                };
                let target = Target { header: Some(*version), ..at(address, question) };
                let (outcome, ()) = tokio::join!(probe(target, None, LONG), answering);
                assert_eq!(outcome, Outcome::Passed, "{version}");
            }
        }
    }

    #[tokio::test]
    async fn a_request_ends_by_a_reset_alone() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = node_health(&listener.local_addr().unwrap().to_string());
        let answering = async {
            let mut stream = listener.accept().await.unwrap().0;
            let mut bytes = [0; 512];
            assert!(stream.read(&mut bytes).await.unwrap() > 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            stream.read(&mut bytes).await
        };
        let (outcome, end) = tokio::join!(probe(target, None, LONG), answering);
        assert_eq!(outcome, Outcome::Passed);
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::ConnectionReset, "no FIN before");
    }

    #[tokio::test]
    async fn a_node_that_accepts_and_says_nothing_fails_in_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = node_health(&listener.local_addr().unwrap().to_string());
        let outcome = probe(target, None, Duration::from_millis(50)).await;
        assert_eq!(failure(outcome), "accepted the connection and gave no answer within 50ms");
    }

    #[tokio::test]
    async fn nothing_is_sent_where_linux_would_send_by_an_interface_that_is_no_port() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = at(listener.local_addr().unwrap(), Question::Tcp);
        let prober = Prober::default();
        let lo = prober.routes.interface_to(target.address.ip()).await.unwrap().unwrap();
        let refused = prober.probe_by(&[lo + 1], target.clone(), None).await;
        assert!(matches!(&refused, Outcome::NotAsked(why) if why.contains("an interface that is no port")), "{refused:?}");
        assert_eq!(prober.probe_by(&[lo], target, None).await, Outcome::Passed);
        let from = listener.accept().await.unwrap().1;
        let more = tokio::time::timeout(Duration::from_millis(50), listener.accept()).await;
        assert!(more.is_err(), "the refused probe connected too, besides {from}");
    }

    /// Without a scope there is no route to a link-local address.
    #[tokio::test]
    async fn a_vip_that_the_gateway_has_no_way_to_says_nothing_of_the_backend() {
        let through = |vip: SocketAddr| Target { behind_vip: Some(vip.ip()), ..at(vip, Question::Tcp) };
        let nowhere: SocketAddr = "[fe80::1]:80".parse().unwrap();
        let outcome = probe(through(nowhere), Some(0), LONG).await;
        assert!(matches!(outcome, Outcome::NotAsked(why) if why.contains("no route to the VIP")));
        failure(probe(tcp("[fe80::1]:80"), None, LONG).await);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let closed = listener.local_addr().unwrap();
        drop(listener);
        failure(probe(through(closed), Some(0), LONG).await);
    }

    #[tokio::test]
    async fn probes_of_one_backend_through_two_vips_leave_from_its_port_again_and_again() {
        let [one, two] = [TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap()];
        // Kept open so that no other process gets the port; sockets with SO_REUSEADDR may share it.
        let held = TcpSocket::new_v4().unwrap();
        held.set_reuseaddr(true).unwrap();
        held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let free = held.local_addr().unwrap().port();
        let vip = |listener: &TcpListener| Target {
            behind_vip: Some("10.0.0.1".parse().unwrap()),
            ..at(listener.local_addr().unwrap(), Question::Tcp)
        };
        for _ in 0..3 {
            let both = tokio::join!(probe(vip(&one), Some(free), LONG), probe(vip(&two), Some(free), LONG));
            assert_eq!(both, (Outcome::Passed, Outcome::Passed));
            assert_eq!(one.accept().await.unwrap().1.port(), free);
            assert_eq!(two.accept().await.unwrap().1.port(), free);
        }
    }

    /// EPERM of a packet filter, EACCES of a route of type `prohibit`, ENETUNREACH; and ENOBUFS of a full queue.
    #[test]
    fn an_echo_request_that_may_not_reach_the_target_is_a_failure() {
        for refused in [1, 13, 101] {
            assert!(failure(echoed(Err(io::Error::from_raw_os_error(refused)))).starts_with("failed: "), "{refused}");
        }
        assert!(matches!(echoed(Err(io::Error::from_raw_os_error(105))), Outcome::NotAsked(_)));
        assert_eq!(echoed(Ok(())), Outcome::Passed);
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
