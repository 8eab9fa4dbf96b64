//! Sessions of the routing daemon beside the gateway, BIRD or FRR, as its sockets report them.
//!
//! Invariant: a daemon is only asked, never changed, and one that is not there is no error. When a daemon that had
//! sessions does not answer any more, they are shown as down: nobody announces the VIPs then.
//! Not here: routes to VIPs (`netlink::announce`), and who uses the sessions (`status`).

mod bird;
mod frr;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use proto::limits::FLEET_ROWS_MAX;
use proto::{Announce, GatewayState, RoutingSession, SessionHealth, SessionProtocol};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::agent::supervisor::Failure;
use crate::agent::watch::send_if_changed;
use crate::settings::{DaemonSockets, RoutingDaemon};

/// How often daemons are asked: an answer costs them about a millisecond, and people look once in a while.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// A daemon that is busy with a full table answers later; it is asked again.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum length of an answer: 1.6 kB for each protocol of BIRD, of which 64 are routers.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Default sockets.
const BIRD_SOCKET: &str = "/run/bird/bird.ctl";
const FRR_DIR: &str = "/run/frr";
/// The state of sessions of a daemon that does not answer.
const NO_ANSWER: &str = "no answer";

/// A program with a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Program {
    Bird,
    Bgpd,
    Bfdd,
}

impl Program {
    const fn name(self) -> &'static str {
        match self {
            Self::Bird => "BIRD",
            Self::Bgpd => "bgpd of FRR",
            Self::Bfdd => "bfdd of FRR",
        }
    }
}

/// A program, and the sessions that it reported.
#[derive(Debug)]
struct Asked {
    program: Program,
    socket: PathBuf,
    /// Whether the configuration names it, so that its absence is reported.
    is_expected: bool,
    sessions: BTreeMap<(SessionProtocol, String), RoutingSession>,
    /// The last error that was logged.
    logged: String,
}

/// The task that asks routing daemons for their sessions. Cloned for each start.
#[derive(Clone, Debug)]
pub struct SessionMonitor {
    /// Key `routing`: the daemon, and its sockets.
    pub sockets: DaemonSockets,
    /// The current state: its pools.
    pub state: watch::Receiver<Option<GatewayState>>,
    /// Output.
    pub sessions: watch::Sender<Vec<RoutingSession>>,
}

impl SessionMonitor {
    /// Asks the daemons again and again, those of `auto` while a pool is `routed`. Returns only with an error.
    ///
    /// # Errors
    /// Never: it is an endless loop.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { sockets, state, sessions } = self;
        let mut programs = programs(&sockets);
        let mut tick = interval(ASK_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let is_routed = state.borrow().as_ref().is_some_and(announces_routes);
            if sockets.daemon == RoutingDaemon::Auto && !is_routed {
                programs.iter_mut().for_each(|asked| asked.sessions.clear());
            } else {
                for asked in &mut programs {
                    let timed_out = |_| Err(io::Error::new(ErrorKind::TimedOut, format!("no answer within {ANSWER_TIMEOUT:?}")));
                    let answer = timeout(ANSWER_TIMEOUT, ask(asked.program, &asked.socket)).await.unwrap_or_else(timed_out);
                    asked.take(answer, now_s());
                }
            }
            let all = programs.iter().flat_map(|asked| asked.sessions.values()).take(FLEET_ROWS_MAX).cloned().collect();
            send_if_changed(&sessions, all);
        }
    }
}

fn announces_routes(current: &GatewayState) -> bool {
    current.state.pools.iter().any(|pool| pool.announce == Announce::Routed)
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The programs that are asked.
fn programs(sockets: &DaemonSockets) -> Vec<Asked> {
    let is_expected = sockets.daemon != RoutingDaemon::Auto;
    let path = |default: &str| sockets.socket.clone().unwrap_or_else(|| default.into());
    let bird = || (Program::Bird, path(BIRD_SOCKET));
    let frr = || [(Program::Bgpd, path(FRR_DIR).join("bgpd.vty")), (Program::Bfdd, path(FRR_DIR).join("bfdd.vty"))];
    let asked: Vec<_> = match sockets.daemon {
        RoutingDaemon::None => Vec::new(),
        RoutingDaemon::Bird => vec![bird()],
        RoutingDaemon::Frr => frr().into(),
        RoutingDaemon::Auto => [bird()].into_iter().chain(frr()).collect(),
    };
    let of = |(program, socket)| Asked {
        program,
        socket,
        // FRR runs bfdd only if it is asked to.
        is_expected: is_expected && program != Program::Bfdd,
        sessions: BTreeMap::new(),
        logged: String::new(),
    };
    asked.into_iter().map(of).collect()
}

impl Asked {
    /// Takes over what the program answered.
    fn take(&mut self, answer: io::Result<Vec<RoutingSession>>, now_s: u64) {
        let new = match answer {
            Ok(sessions) => {
                if !std::mem::take(&mut self.logged).is_empty() {
                    tracing::info!(socket = %self.socket.display(), "{} answers", self.program.name());
                }
                sessions
            }
            Err(error) => {
                let is_absent = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused);
                let text = error.to_string();
                if self.logged != text && (self.is_expected || !is_absent || !self.sessions.is_empty()) {
                    tracing::warn!(socket = %self.socket.display(), error = text, "{} does not tell its sessions", self.program.name());
                    self.logged = text;
                }
                self.sessions.values().map(without_answer).collect()
            }
        };
        let before = std::mem::take(&mut self.sessions);
        for session in new {
            let key = (session.protocol, session.peer.clone());
            let old = before.get(&key);
            let since_s = old.filter(|old| old.health == session.health).map_or(now_s, |old| old.since_s);
            if old.is_some_and(|old| old.health != session.health) {
                let (protocol, peer, state) = (session.protocol.as_str(), &session.peer, &session.state);
                tracing::info!(protocol, peer, state, "a routing session is {}", session.health.as_str());
            }
            self.sessions.insert(key, RoutingSession { since_s, ..session });
        }
    }
}

/// A session whose daemon does not answer.
fn without_answer(session: &RoutingSession) -> RoutingSession {
    let health = match session.health {
        SessionHealth::Disabled => SessionHealth::Disabled,
        SessionHealth::Up | SessionHealth::Down => SessionHealth::Down,
    };
    RoutingSession { health, state: NO_ANSWER.to_owned(), ..session.clone() }
}

/// The sessions that a program tells.
async fn ask(program: Program, socket: &Path) -> io::Result<Vec<RoutingSession>> {
    let mut stream = UnixStream::connect(socket).await?;
    match program {
        Program::Bird => {
            // A greeting comes unasked.
            for question in ["", bird::RESTRICT] {
                exchange(&mut stream, question, bird::is_complete).await?;
            }
            let mut sessions = bird::bgp_sessions(&exchange(&mut stream, bird::PROTOCOLS, bird::is_complete).await?);
            sessions.extend(bird::bfd_sessions(&exchange(&mut stream, bird::BFD, bird::is_complete).await?));
            Ok(sessions)
        }
        Program::Bgpd => Ok(frr::bgp_sessions(&exchange(&mut stream, frr::BGP, frr::is_complete).await?)?),
        Program::Bfdd => {
            exchange(&mut stream, frr::ENABLE, frr::is_complete).await?;
            Ok(frr::bfd_sessions(&exchange(&mut stream, frr::BFD, frr::is_complete).await?)?)
        }
    }
}

/// Sends a question, and reads until the answer is complete.
async fn exchange(stream: &mut UnixStream, question: &str, is_complete: fn(&[u8]) -> bool) -> io::Result<String> {
    stream.write_all(question.as_bytes()).await?;
    let mut answer = Vec::new();
    while !is_complete(&answer) {
        if answer.len() >= ANSWER_BYTES_MAX {
            let message = format!("found an answer of {} bytes, expected at most {ANSWER_BYTES_MAX}", answer.len());
            return Err(io::Error::new(ErrorKind::InvalidData, message));
        }
        if stream.read_buf(&mut answer).await? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    fn session(peer: &str, health: SessionHealth) -> RoutingSession {
        let (peer, state) = (peer.to_owned(), "of the daemon".to_owned());
        RoutingSession { protocol: SessionProtocol::Bgp, peer, health, state, since_s: 0 }
    }

    fn asked() -> Asked {
        programs(&DaemonSockets { daemon: RoutingDaemon::Bird, socket: None }).remove(0)
    }

    fn shown(asked: &Asked) -> Vec<(&str, SessionHealth, u64)> {
        asked.sessions.values().map(|session| (session.peer.as_str(), session.health, session.since_s)).collect()
    }

    #[test]
    fn a_session_keeps_its_time_until_it_changes_and_goes_with_its_configuration() {
        let mut asked = asked();
        asked.take(Ok(vec![session("a", SessionHealth::Up), session("b", SessionHealth::Down)]), 1);
        asked.take(Ok(vec![session("a", SessionHealth::Up), session("b", SessionHealth::Up)]), 2);
        assert_eq!(shown(&asked), [("a", SessionHealth::Up, 1), ("b", SessionHealth::Up, 2)]);
        asked.take(Ok(vec![session("b", SessionHealth::Up)]), 3);
        assert_eq!(shown(&asked), [("b", SessionHealth::Up, 2)]);
    }

    #[test]
    fn sessions_of_a_daemon_that_has_gone_are_down_and_one_that_was_never_there_has_none() {
        let mut asked = asked();
        let gone = || Err(io::Error::from(ErrorKind::ConnectionRefused));
        asked.take(gone(), 1);
        assert_eq!(shown(&asked), []);
        asked.take(Ok(vec![session("a", SessionHealth::Up), session("b", SessionHealth::Disabled)]), 2);
        asked.take(gone(), 3);
        asked.take(gone(), 4);
        assert_eq!(shown(&asked), [("a", SessionHealth::Down, 3), ("b", SessionHealth::Disabled, 2)]);
        assert!(asked.sessions.values().all(|session| session.state == NO_ANSWER));
        asked.take(Ok(vec![session("a", SessionHealth::Up)]), 5);
        assert_eq!(shown(&asked), [("a", SessionHealth::Up, 5)]);
    }

    #[test]
    fn the_configuration_says_who_is_asked() {
        let paths = |daemon, socket: Option<&str>| {
            let asked = programs(&DaemonSockets { daemon, socket: socket.map(PathBuf::from) });
            asked.into_iter().map(|one| one.socket.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(paths(RoutingDaemon::None, None), Vec::<String>::new());
        assert_eq!(paths(RoutingDaemon::Auto, None), ["/run/bird/bird.ctl", "/run/frr/bgpd.vty", "/run/frr/bfdd.vty"]);
        assert_eq!(paths(RoutingDaemon::Bird, Some("/b.ctl")), ["/b.ctl"]);
        assert_eq!(paths(RoutingDaemon::Frr, Some("/f")), ["/f/bgpd.vty", "/f/bfdd.vty"]);
    }

    /// A daemon that answers each question with the next text, in two pieces.
    fn daemon(socket: &Path, questions: &'static [(&str, &str)]) -> tokio::task::JoinHandle<()> {
        let listener = UnixListener::bind(socket).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            for (question, answer) in questions {
                let mut read = vec![0; question.len()];
                stream.read_exact(&mut read).await.unwrap();
                assert_eq!(String::from_utf8(read).unwrap(), *question);
                let (first, rest) = answer.as_bytes().split_at(answer.len() / 2);
                stream.write_all(first).await.unwrap();
                tokio::task::yield_now().await;
                stream.write_all(rest).await.unwrap();
            }
        })
    }

    #[tokio::test]
    async fn bird_is_asked_on_a_restricted_connection() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("bird.ctl");
        let answers: &[(&str, &str)] = &[
            ("", "0001 BIRD 2.0.12 ready.\n"),
            (bird::RESTRICT, "0016 Access restricted\n"),
            (bird::PROTOCOLS, include_str!("routing_sessions/recorded/bird-protocols.txt")),
            (bird::BFD, include_str!("routing_sessions/recorded/bird-bfd.txt")),
        ];
        let bird = daemon(&socket, answers);
        let sessions = ask(Program::Bird, &socket).await.unwrap();
        bird.await.unwrap();
        let count = |protocol| sessions.iter().filter(|session| session.protocol == protocol).count();
        assert_eq!((count(SessionProtocol::Bgp), count(SessionProtocol::Bfd)), (5, 2));
    }

    #[tokio::test]
    async fn an_answer_that_is_none_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let [unknown, endless, absent] = ["unknown", "endless", "absent"].map(|name| dir.path().join(name));
        let _bgpd = daemon(&unknown, &[(frr::BGP, "% [BGP] Unknown command\n\0\0\0\u{2}")]);
        assert_eq!(ask(Program::Bgpd, &unknown).await.unwrap_err().kind(), ErrorKind::InvalidData);
        let listener = UnixListener::bind(&endless).unwrap();
        let writer = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            while stream.write_all(&[b'x'; 4096]).await.is_ok() {}
        });
        assert_eq!(ask(Program::Bird, &endless).await.unwrap_err().kind(), ErrorKind::InvalidData);
        writer.await.unwrap();
        assert_eq!(ask(Program::Bird, &absent).await.unwrap_err().kind(), ErrorKind::NotFound);
    }
}
