//! The history of backends in their rows.
//!
//! Not here: the history itself (`agent::backend_history`).

use std::collections::BTreeSet;
use std::sync::Arc;

use objects::text::of_time;
use proto::{ServiceName, v1};

use crate::agent::backend_health::Subject;
use crate::agent::backend_history::{BackendHistories, BackendHistory, BackendTurn, LastCheck, now_s};

/// Adds to rows what is known of their backends. If asked for, adds rows of removed backends.
pub(super) fn add(
    gateway: &str,
    rows: &mut Vec<v1::BackendStatus>,
    histories: &BackendHistories,
    request: &v1::ListBackendsRequest,
) {
    let now_s = now_s();
    let subjects: Vec<Option<Subject>> = rows.iter().map(subject).collect();
    // Every row that the gateway makes names a backend.
    let with_subject = rows.iter_mut().zip(&subjects).filter_map(|(row, subject)| subject.is_some().then_some(row));
    if !request.history {
        for (row, since_s) in with_subject.zip(histories.since_s(subjects.iter().flatten())) {
            row.since = since_s.map(of_time).unwrap_or_default();
        }
        return;
    }
    for (row, (history, check)) in with_subject.zip(histories.of(subjects.iter().flatten())) {
        if let Some(history) = history {
            tell(row, &history, now_s);
        }
        row.last_check = check.map(|check| message(&check));
    }
    let listed: BTreeSet<Subject> = subjects.into_iter().flatten().collect();
    let is_asked = |of: &Subject| request.addresses.is_empty() || request.addresses.contains(&of.address.ip().to_string());
    let removed = histories.removed().into_iter().filter(|(of, _)| !listed.contains(of) && is_asked(of));
    rows.extend(removed.map(|(Subject { service, protocol, address }, history)| {
        let mut row = v1::BackendStatus {
            service: service.to_string(),
            address: address.to_string(),
            protocol: protocol.to_string(),
            state: "removed".to_owned(),
            gateway: gateway.to_owned(),
            ..v1::BackendStatus::default()
        };
        tell(&mut row, &history, now_s);
        row
    }));
}

fn subject(row: &v1::BackendStatus) -> Option<Subject> {
    let (namespace, name) = row.service.split_once('/')?;
    let service = Arc::new(ServiceName::new(namespace, name));
    Some(Subject { service, protocol: row.protocol.parse().ok()?, address: row.address.parse().ok()? })
}

fn tell(row: &mut v1::BackendStatus, history: &BackendHistory, now_s: u64) {
    row.since = history.changes.back().map_or_else(String::new, |last| of_time(last.at_s));
    row.down_today_s = Some(history.down_today_s(now_s));
    let change = |turn: &BackendTurn| v1::BackendChange {
        at: of_time(turn.at_s),
        state: turn.to.as_str().to_owned(),
        cause: turn.cause.as_ref().to_owned(),
    };
    row.changes = history.changes.iter().rev().map(change).collect();
}

fn message(check: &LastCheck) -> v1::LastCheck {
    v1::LastCheck {
        at: of_time(check.at_s),
        passed: check.found.is_ok(),
        duration_us: u64::try_from(check.took.as_micros()).unwrap_or(u64::MAX),
        found: check.found.as_ref().err().map(ToString::to_string).unwrap_or_default(),
        contrary: check.contrary,
        needed: check.needed,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dataplane::snapshot::Views;

    use super::*;
    use crate::agent::backend_health::Causes;
    use crate::agent::served::tests::view;

    #[test]
    fn rows_tell_since_when_and_removed_backends_are_listed_on_request() {
        let histories = BackendHistories::default();
        let services = |backends: &[(&str, bool, bool)]| {
            Views::unit(Arc::new(ServiceName::new("default", "web")), Arc::new(view("web", backends)))
        };
        histories.follow(&services(&[("10.0.0.1:80", true, false), ("10.0.0.2:80", true, false)]), &Causes::new(), 1_800_000_000);
        histories.follow(&services(&[("10.0.0.1:80", false, false)]), &Causes::new(), 1_800_000_060);
        let row = v1::BackendStatus {
            service: "default/web".into(),
            address: "10.0.0.1:80".into(),
            protocol: "tcp".into(),
            ..Default::default()
        };
        let found = Err("tcp 10.0.0.1:80 refused".into());
        let check = LastCheck { at_s: 1_800_000_061, took: Duration::from_micros(1500), found, contrary: 0, needed: 2 };
        histories.check([&subject(&row).unwrap()], &check);
        let rows = |history: bool, addresses: &[&str]| {
            let mut rows = vec![row.clone()];
            let addresses = addresses.iter().map(|address| (*address).to_owned()).collect();
            add("edge-1", &mut rows, &histories, &v1::ListBackendsRequest { history, addresses, ..Default::default() });
            rows
        };
        let plain = rows(false, &[]);
        assert_eq!((plain.len(), plain[0].since.as_str(), plain[0].changes.len()), (1, "2027-01-15T08:01:00Z", 0));
        assert_eq!((plain[0].down_today_s, &plain[0].last_check), (None, &None));
        let whole = rows(true, &[]);
        let last = whole[0].last_check.as_ref().unwrap();
        assert_eq!((last.passed, last.duration_us, last.found.as_str()), (false, 1500, "tcp 10.0.0.1:80 refused"));
        let states: Vec<_> =
            whole.iter().map(|row| row.changes.iter().map(|change| change.state.as_str()).collect::<Vec<_>>()).collect();
        assert_eq!(states, [["unhealthy", "healthy"], ["removed", "healthy"]]);
        assert_eq!(whole[1].gateway, "edge-1");
        assert_eq!(rows(true, &["10.0.0.1"]).len(), 1);
    }
}
