//! Conditions of an `EdgeGateway`.
//!
//! Invariant: reasons are words of this file; only messages have names and addresses. No condition changes with a figure,
//! so that figures cause no write.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use objects::text;
use proto::{FleetStatus, SessionHealth};

/// Maximum number of names in a message.
const NAMED_MAX: usize = 8;

/// The conditions of a connected gateway, each as of the beginning of time. Those of an election, of partners and of
/// routing sessions exist only with them. `is_ready`: every worker forwards by a state of this controller; `is_drained`: an
/// operator has drained it.
pub(super) fn of_connected(is_ready: bool, is_drained: bool, fleet: Option<&FleetStatus>) -> Vec<Condition> {
    let mut all = vec![
        if is_ready {
            condition("Ready", true, "Forwarding", "every worker forwards by the state of the controller".to_owned())
        } else {
            condition("Ready", false, "NoState", "not every worker forwards by a state of this controller yet".to_owned())
        },
        if is_drained {
            condition("Draining", true, "Drained", "an operator has drained it: sluicectl overrides".to_owned())
        } else {
            condition("Draining", false, "NotDrained", String::new())
        },
    ];
    let Some(fleet) = fleet else { return all };
    let others = named(fleet.duplicates.iter().map(|(vip, station)| format!("{vip} ({station})")));
    all.push(if others.is_empty() {
        condition("DuplicateVIP", false, "NoOtherStation", String::new())
    } else {
        condition("DuplicateVIP", true, "OtherStation", format!("other stations announce VIPs of the gateway: {others}"))
    });
    if let Some(election) = &fleet.election {
        all.push(match &election.unfit {
            None => condition("Eligible", true, "StandsForElection", String::new()),
            Some(why) => condition("Eligible", false, "Unfit", format!("it leaves its VIPs to other gateways: {why}")),
        });
    }
    if !fleet.partners.is_empty() {
        let behind = named(fleet.partners.iter().filter(|one| !one.is_in_sync).map(|one| one.name.clone()));
        all.push(if behind.is_empty() {
            condition("InSync", true, "AllInSync", "its partners have all its flows".to_owned())
        } else {
            condition("InSync", false, "PartnerBehind", format!("partners that lack flows: {behind}"))
        });
    }
    if !fleet.sessions.is_empty() {
        let down = fleet.sessions.iter().filter(|session| session.health == SessionHealth::Down);
        let down = named(down.map(|session| format!("{} with {}", session.protocol.as_str(), session.peer)));
        all.push(if down.is_empty() {
            condition("SessionsUp", true, "AllUp", "its routing sessions are up".to_owned())
        } else {
            condition("SessionsUp", false, "SessionDown", format!("routing sessions that are down: {down}"))
        });
    }
    all
}

/// The conditions of a gateway that has left, of which only these `types` were known.
pub(super) fn of_disconnected(old: &[Condition]) -> Vec<Condition> {
    let gone = |type_: &str, status: &str| Condition {
        status: status.to_owned(),
        ..condition(type_, false, "NotConnected", "the gateway is not connected to the controller".to_owned())
    };
    let others = old.iter().filter(|old| old.type_ != "Ready").map(|old| gone(&old.type_, "Unknown"));
    std::iter::once(gone("Ready", "False")).chain(others).collect()
}

/// Sets the times of the last transitions: conditions that `old` has with the same status keep theirs.
pub(super) fn dated(mut conditions: Vec<Condition>, old: &[Condition], now: Timestamp) -> Vec<Condition> {
    for one in &mut conditions {
        let same = old.iter().find(|old| old.type_ == one.type_ && old.status == one.status);
        one.last_transition_time = same.map_or(Time(now), |old| old.last_transition_time.clone());
    }
    conditions
}

fn condition(type_: &str, holds: bool, reason: &str, message: String) -> Condition {
    Condition {
        type_: type_.to_owned(),
        status: if holds { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
        observed_generation: None,
    }
}

/// Some of these names, and the number of the others.
pub(super) fn named(names: impl Iterator<Item = String>) -> String {
    text::shortened(names, NAMED_MAX, ", ", " and ")
}

#[cfg(test)]
mod tests {
    use proto::{FleetPartner, RoutingSession, SessionProtocol, VipElection};

    use super::*;

    fn summary(conditions: &[Condition]) -> Vec<(&str, &str, &str)> {
        conditions.iter().map(|one| (one.type_.as_str(), one.status.as_str(), one.reason.as_str())).collect()
    }

    fn session(health: SessionHealth) -> RoutingSession {
        let (peer, state) = ("192.0.2.1".to_owned(), String::new());
        RoutingSession { protocol: SessionProtocol::Bgp, peer, health, state, since_s: 0 }
    }

    #[test]
    fn conditions_say_what_is_wrong_and_whom_it_concerns() {
        let partner = |name: &str, is_in_sync| FleetPartner { name: name.into(), address: "a".into(), is_in_sync, lag_ms: None };
        let fleet = FleetStatus {
            election: Some(VipElection { groups: 16, unfit: Some("a port has no link".to_owned()), ..VipElection::default() }),
            duplicates: [("192.0.2.100".parse().unwrap(), "02:00:00:00:00:09".to_owned())].into(),
            partners: vec![partner("edge-2", true), partner("edge-3", false)],
            sessions: vec![session(SessionHealth::Up), session(SessionHealth::Down), session(SessionHealth::Disabled)],
            ..FleetStatus::default()
        };
        let all = of_connected(false, true, Some(&fleet));
        let expected = [
            ("Ready", "False", "NoState"),
            ("Draining", "True", "Drained"),
            ("DuplicateVIP", "True", "OtherStation"),
            ("Eligible", "False", "Unfit"),
            ("InSync", "False", "PartnerBehind"),
            ("SessionsUp", "False", "SessionDown"),
        ];
        assert_eq!(summary(&all), expected);
        for (place, text) in [(2, "192.0.2.100 (02:00:00:00:00:09)"), (3, "a port has no link"), (4, "edge-3"), (5, "192.0.2.1")]
        {
            assert!(all[place].message.contains(text), "{:?}", all[place]);
        }
        let gone = of_disconnected(&all);
        assert_eq!(summary(&gone)[..2], [("Ready", "False", "NotConnected"), ("Draining", "Unknown", "NotConnected")]);
        assert_eq!(gone.len(), all.len());
    }

    #[test]
    fn a_gateway_that_works_has_nothing_to_say_and_an_older_one_says_less() {
        let fleet = FleetStatus {
            election: Some(VipElection::default()),
            sessions: vec![session(SessionHealth::Up)],
            ..FleetStatus::default()
        };
        let all = of_connected(true, false, Some(&fleet));
        let statuses: Vec<_> = all.iter().map(|one| (one.type_.as_str(), one.status.as_str())).collect();
        let expected =
            [("Ready", "True"), ("Draining", "False"), ("DuplicateVIP", "False"), ("Eligible", "True"), ("SessionsUp", "True")];
        assert_eq!(statuses, expected);
        assert_eq!(of_connected(true, false, None).len(), 2);
    }

    #[test]
    fn a_condition_keeps_its_time_while_its_status_stays() {
        let (early, late) = (Timestamp::from_second(1).unwrap(), Timestamp::from_second(2).unwrap());
        let of = |is_ready| of_connected(is_ready, false, None);
        let old = dated(of(false), &[], early);
        let new = dated(of(true), &old, late);
        let times: Vec<_> = new.iter().map(|one| one.last_transition_time.0.as_second()).collect();
        assert_eq!(times, [2, 1]);
    }

    #[test]
    fn a_message_names_some_and_counts_the_rest() {
        assert_eq!(named((0..2).map(|n| n.to_string())), "0, 1");
        assert!(named((0..11).map(|n| n.to_string())).ends_with("7 and 3 more"));
    }
}
