//! Questions to FRR's daemons on their vty sockets, and what their answers say about sessions.
//!
//! A question ends with a zero byte, an answer with three and a status byte. Tried with FRR 8.4, whose answers are in
//! `recorded/`. Not here: the sockets.

use std::collections::BTreeMap;

use proto::{RoutingSession, SessionHealth, SessionProtocol};
use serde::Deserialize;

/// `bfdd` answers the next question only afterwards. It changes no setting.
pub(super) const ENABLE: &str = "enable\0";
pub(super) const BGP: &str = "show bgp summary json\0";
pub(super) const BFD: &str = "show bfd peers json\0";

/// The end of an answer, before its status.
const END: [u8; 3] = [0; 3];

/// Whether these bytes are an answer, to its end.
pub(super) fn is_complete(bytes: &[u8]) -> bool {
    bytes.split_last().is_some_and(|(_, rest)| rest.ends_with(&END))
}

/// One family of an answer to [`BGP`].
#[derive(Deserialize)]
struct FamilySummary {
    #[serde(default)]
    peers: BTreeMap<String, PeerSummary>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PeerSummary {
    state: String,
    #[serde(default)]
    peer_state: String,
}

#[derive(Deserialize)]
struct BfdPeer {
    peer: String,
    #[serde(default)]
    interface: Option<String>,
    status: String,
}

/// The BGP sessions of an answer to [`BGP`]. A session of several families is one.
///
/// # Errors
/// If it is not the answer to that question.
pub(super) fn bgp_sessions(answer: &str) -> Result<Vec<RoutingSession>, serde_json::Error> {
    let families: BTreeMap<String, FamilySummary> = serde_json::from_str(text(answer))?;
    let mut sessions = BTreeMap::new();
    for (peer, PeerSummary { state, peer_state }) in families.into_values().flat_map(|family| family.peers) {
        let health = match state.as_str() {
            "Established" => SessionHealth::Up,
            _ if peer_state == "Admin" => SessionHealth::Disabled,
            _ => SessionHealth::Down,
        };
        let session = RoutingSession { protocol: SessionProtocol::Bgp, peer: peer.clone(), health, state, since_s: 0 };
        // A family that the router has not negotiated is not established.
        if health == SessionHealth::Up || !sessions.contains_key(&peer) {
            sessions.insert(peer, session);
        }
    }
    Ok(sessions.into_values().collect())
}

/// The sessions of an answer to [`BFD`].
///
/// # Errors
/// If it is not the answer to that question.
pub(super) fn bfd_sessions(answer: &str) -> Result<Vec<RoutingSession>, serde_json::Error> {
    let peers: Vec<BfdPeer> = serde_json::from_str(text(answer))?;
    let session = |BfdPeer { peer, interface, status }: BfdPeer| {
        let health = match status.as_str() {
            "up" => SessionHealth::Up,
            "shutdown" => SessionHealth::Disabled,
            _ => SessionHealth::Down,
        };
        let peer = match interface {
            Some(interface) if peer.starts_with("fe80:") => format!("{peer}%{interface}"),
            _ => peer,
        };
        RoutingSession { protocol: SessionProtocol::Bfd, peer, health, state: status, since_s: 0 }
    };
    Ok(peers.into_iter().map(session).collect())
}

/// An answer without its end.
fn text(answer: &str) -> &str {
    answer.split('\0').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With two sessions, one that nobody answers, and one that is switched off.
    const BGP_UP: &str = include_str!("recorded/frr-bgp.json");
    const BGP_DOWN: &str = include_str!("recorded/frr-bgp-down.json");
    /// With two sessions and one that is switched off.
    const BFD_UP: &str = include_str!("recorded/frr-bfd.json");
    const BFD_DOWN: &str = include_str!("recorded/frr-bfd-down.json");

    fn rows(sessions: &[RoutingSession]) -> Vec<(&str, SessionHealth, &str)> {
        sessions.iter().map(|session| (session.peer.as_str(), session.health, session.state.as_str())).collect()
    }

    #[test]
    fn bgp_sessions_are_read() {
        let (up, down) = (bgp_sessions(BGP_UP).unwrap(), bgp_sessions(BGP_DOWN).unwrap());
        let expected = [
            ("192.0.3.1", SessionHealth::Up, "Established"),
            ("192.0.3.98", SessionHealth::Disabled, "Idle (Admin)"),
            ("192.0.3.99", SessionHealth::Down, "Active"),
            ("2001:db8:3::1", SessionHealth::Up, "Established"),
        ];
        assert_eq!(rows(&up), expected);
        assert_eq!(rows(&down)[0], ("192.0.3.1", SessionHealth::Down, "Active"));
        assert_eq!(bgp_sessions("{}\n\0\0\0\u{1}").unwrap(), [], "no BGP is configured");
        assert!(bgp_sessions("% [BGP] Unknown command: show bgp summary json\n\0\0\0\u{2}").is_err());
    }

    #[test]
    fn a_session_of_two_families_is_up_if_one_of_them_is() {
        let peer = |state: &str| format!("{{\"peers\": {{\"192.0.2.1\": {{\"state\": \"{state}\", \"peerState\": \"OK\"}}}}}}");
        for (v4, v6) in [("Established", "NoNeg"), ("NoNeg", "Established")] {
            let text = format!("{{\"ipv4Unicast\": {}, \"ipv6Unicast\": {}}}", peer(v4), peer(v6));
            assert_eq!(rows(&bgp_sessions(&text).unwrap()), [("192.0.2.1", SessionHealth::Up, "Established")]);
        }
    }

    #[test]
    fn bfd_sessions_are_read() {
        let (up, down) = (bfd_sessions(BFD_UP).unwrap(), bfd_sessions(BFD_DOWN).unwrap());
        let expected = [
            ("192.0.3.1", SessionHealth::Up, "up"),
            ("2001:db8:3::1", SessionHealth::Up, "up"),
            ("192.0.3.77", SessionHealth::Disabled, "shutdown"),
        ];
        assert_eq!(rows(&up), expected);
        let expected = [("192.0.3.1", SessionHealth::Down, "down"), ("2001:db8:3::1", SessionHealth::Down, "down")];
        assert_eq!(rows(&down), expected);
        assert!(bfd_sessions("% [BFD] Unknown command: show bfd peers json\n\0\0\0\u{2}").is_err());
    }

    #[test]
    fn an_answer_ends_with_three_zero_bytes_and_a_status() {
        let answer = b"{}\n\0\0\0\x01";
        assert!(is_complete(answer) && is_complete(b"\0\0\0\0"));
        assert!((0..answer.len()).all(|end| !is_complete(&answer[..end])));
    }
}
