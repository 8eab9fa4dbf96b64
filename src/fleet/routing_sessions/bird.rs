//! Questions to BIRD on its control socket, and what its answers say about sessions.
//!
//! An answer is lines, each with a number of four digits and `-`, or a blank on the last one; a line that begins with a
//! blank has the number of the one before. Tried with BIRD 2.0.12, whose answers are in `recorded/`.
//! Not here: the socket.

use std::net::IpAddr;

use proto::{RoutingSession, SessionHealth, SessionProtocol};

/// From here on the connection can only ask.
pub(super) const RESTRICT: &str = "restrict\n";
pub(super) const PROTOCOLS: &str = "show protocols all\n";
pub(super) const BFD: &str = "show bfd sessions\n";

/// Rows of protocols, and rows of BFD sessions.
const PROTOCOL_ROW: &str = "1002";
const BFD_ROW: &str = "1020";
/// The state of a BGP protocol that is switched off, or that an error has stopped.
const STOPPED: &str = "Down";

/// Whether these bytes are an answer, to its last line.
pub(super) fn is_complete(bytes: &[u8]) -> bool {
    let Some(lines) = bytes.strip_suffix(b"\n") else { return false };
    let last = lines.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
    last.len() >= 5 && last[..4].iter().all(u8::is_ascii_digit) && last[4] == b' '
}

/// The numbers and texts of the lines of an answer.
fn numbered(answer: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut number = "";
    answer.lines().map(move |line| match (line.get(..4), line.get(4..5)) {
        (Some(new), Some("-" | " ")) if new.bytes().all(|byte| byte.is_ascii_digit()) => {
            number = new;
            (number, &line[5..])
        }
        _ => (number, line),
    })
}

/// A BGP protocol, as far as it was read.
#[derive(Default)]
struct BgpProtocol<'a> {
    is_bgp: bool,
    peer: Option<&'a str>,
    state: Option<&'a str>,
    has_failed: bool,
}

impl BgpProtocol<'_> {
    /// Its session. A protocol for a range of neighbours has none itself.
    fn session(&self) -> Option<RoutingSession> {
        let (peer, state) = (self.peer.filter(|_| self.is_bgp)?, self.state?);
        let health = match state {
            "Established" => SessionHealth::Up,
            STOPPED if !self.has_failed => SessionHealth::Disabled,
            _ => SessionHealth::Down,
        };
        Some(session(SessionProtocol::Bgp, peer.to_owned(), health, state))
    }
}

/// The BGP sessions of an answer to [`PROTOCOLS`].
pub(super) fn bgp_sessions(answer: &str) -> Vec<RoutingSession> {
    let (mut sessions, mut protocol) = (Vec::new(), BgpProtocol::default());
    for (number, line) in numbered(answer) {
        if number == PROTOCOL_ROW {
            sessions.extend(protocol.session());
            protocol = BgpProtocol { is_bgp: line.split_whitespace().nth(1) == Some("BGP"), ..BgpProtocol::default() };
        } else if let Some((key, value)) = line.split_once(':') {
            match key.trim() {
                "Neighbor address" => protocol.peer = Some(value.trim()),
                "BGP state" => protocol.state = Some(value.trim()),
                "Last error" => protocol.has_failed = true,
                _ => {}
            }
        }
    }
    sessions.extend(protocol.session());
    sessions
}

/// The sessions of an answer to [`BFD`]; none if BIRD has no BFD.
pub(super) fn bfd_sessions(answer: &str) -> Vec<RoutingSession> {
    let row = |(number, line): (&str, &str)| {
        let mut words = line.split_whitespace().take_while(|_| number == BFD_ROW);
        let (address, interface, state) = (words.next()?, words.next()?, words.next()?);
        let peer = match address.parse().ok()? {
            IpAddr::V6(v6) if v6.is_unicast_link_local() => format!("{address}%{interface}"),
            _ => address.to_owned(),
        };
        let health = match state {
            "Up" => SessionHealth::Up,
            "AdminDown" => SessionHealth::Disabled,
            _ => SessionHealth::Down,
        };
        Some(session(SessionProtocol::Bfd, peer, health, state))
    };
    numbered(answer).filter_map(row).collect()
}

fn session(protocol: SessionProtocol, peer: String, health: SessionHealth, state: &str) -> RoutingSession {
    RoutingSession { protocol, peer, health, state: state.to_owned(), since_s: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With two sessions, one that nobody answers, one on a link, one that is switched off, and a range of neighbours.
    const PROTOCOLS_UP: &str = include_str!("recorded/bird-protocols.txt");
    const PROTOCOLS_DOWN: &str = include_str!("recorded/bird-protocols-down.txt");
    const BFD_UP: &str = include_str!("recorded/bird-bfd.txt");

    fn rows(sessions: Vec<RoutingSession>) -> Vec<(String, SessionHealth, String)> {
        sessions.into_iter().map(|session| (session.peer, session.health, session.state)).collect()
    }

    fn row(peer: &str, health: SessionHealth, state: &str) -> (String, SessionHealth, String) {
        (peer.to_owned(), health, state.to_owned())
    }

    #[test]
    fn bgp_sessions_are_read() {
        let expected = [
            row("192.0.2.1", SessionHealth::Up, "Established"),
            row("2001:db8::1", SessionHealth::Up, "Established"),
            row("192.0.2.99", SessionHealth::Down, "Connect"),
            row("fe80::99%up", SessionHealth::Down, "Connect"),
            row("192.0.2.98", SessionHealth::Disabled, "Down"),
        ];
        assert_eq!(rows(bgp_sessions(PROTOCOLS_UP)), expected);
        let down = rows(bgp_sessions(PROTOCOLS_DOWN));
        assert_eq!(down[..2], [row("192.0.2.1", SessionHealth::Down, "Idle"), row("2001:db8::1", SessionHealth::Down, "Active")]);
        assert_eq!(bgp_sessions("9001 syntax error\n"), []);
    }

    #[test]
    fn a_session_that_an_error_has_stopped_is_not_switched_off() {
        let stopped = PROTOCOLS_UP.replace("192.0.2.98\n", "192.0.2.98\n     Last error:       Route limit exceeded\n");
        assert_eq!(rows(bgp_sessions(&stopped))[4], row("192.0.2.98", SessionHealth::Down, "Down"));
    }

    #[test]
    fn bfd_sessions_are_read() {
        let sessions = rows(bfd_sessions(BFD_UP));
        assert_eq!(sessions, [row("2001:db8::1", SessionHealth::Up, "Up"), row("192.0.2.1", SessionHealth::Up, "Up")]);
        let down = BFD_UP.replace("Up  ", "Down").replace("2001:db8::1", "fe80::1    ");
        let expected = [row("fe80::1%up", SessionHealth::Down, "Down"), row("192.0.2.1", SessionHealth::Down, "Down")];
        assert_eq!(rows(bfd_sessions(&down)), expected);
        assert_eq!(bfd_sessions("9001 There is no BFD protocol running\n"), []);
    }

    #[test]
    fn an_answer_ends_with_a_line_whose_number_has_no_hyphen() {
        for answer in [PROTOCOLS_UP, BFD_UP, "0001 BIRD 2.0.12 ready.\n", "0016 Access restricted\n"] {
            assert!(is_complete(answer.as_bytes()), "{answer}");
            assert!((0..answer.len()).all(|end| !is_complete(&answer.as_bytes()[..end])), "the beginning of {answer}");
        }
    }
}
