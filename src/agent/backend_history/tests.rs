//! Tests: what is noted, kept and forgotten.

use std::fs;

use proto::{Protocol, ServiceName};

use super::*;
use crate::agent::persist::directories::StateDirs;
use crate::agent::persist::sealed::{Moment, seal};
use crate::agent::served::tests::view;

const NOON_S: u64 = 20_000 * DAY_S + DAY_S / 2;

fn services(backends: &[(&str, bool, bool)]) -> Views {
    let web = view("web", backends);
    Views::unit(Arc::clone(&web.name), Arc::new(web))
}

fn subject(address: &str) -> Subject {
    let service = Arc::new(ServiceName::new("default", "web"));
    Subject { service, protocol: Protocol::Tcp, address: address.parse().unwrap() }
}

fn causes(address: &str) -> Causes {
    Causes::unit(subject(address), "tcp 10.0.0.1:80 refused".into())
}

fn history(histories: &BackendHistories, address: &str) -> BackendHistory {
    histories.of([&subject(address)]).remove(0).0.unwrap()
}

fn turns(histories: &BackendHistories, address: &str) -> Vec<String> {
    let text = |turn: &BackendTurn| format!("{} {}: {}", turn.at_s - NOON_S, turn.to.as_str(), turn.cause);
    history(histories, address).changes.iter().map(text).collect()
}

const ONE: &str = "10.0.0.1:80";
const HEALTHY: (&str, bool, bool) = (ONE, true, false);
const FAILING: (&str, bool, bool) = (ONE, false, false);
const DRAINING: (&str, bool, bool) = (ONE, true, true);
const AT_START: &str = "0 healthy: the gateway started; nothing earlier is known";

#[test]
fn each_change_is_noted_once_with_its_cause() {
    let histories = BackendHistories::default();
    let mut now_s = NOON_S;
    let mut follow = |backends: &[(&str, bool, bool)], causes: &Causes| {
        histories.follow(&services(backends), causes, now_s);
        now_s += 10;
    };
    follow(&[HEALTHY], &Causes::new());
    follow(&[HEALTHY], &Causes::new());
    follow(&[FAILING], &causes(ONE));
    follow(&[HEALTHY], &Causes::new());
    follow(&[DRAINING], &Causes::new());
    follow(&[HEALTHY], &Causes::new());
    follow(&[("10.0.0.2:80", true, false)], &Causes::new());
    let expected = [
        AT_START,
        "20 unhealthy: tcp 10.0.0.1:80 refused",
        "30 healthy: its probes pass",
        "40 draining: it drains: its endpoint ends, or it is drained by hand",
        "50 healthy: it no longer drains",
        "60 removed: its Service no longer lists it",
    ];
    assert_eq!(turns(&histories, ONE), expected);
    assert_eq!(turns(&histories, "10.0.0.2:80"), ["60 healthy: its Service lists it"]);
    assert_eq!(history(&histories, ONE).down_today_s(NOON_S + 100), 10);
    assert_eq!(histories.removed().keys().collect::<Vec<_>>(), [&subject(ONE)]);
}

#[test]
fn a_service_that_is_created_after_the_start_lists_its_backends() {
    let histories = BackendHistories::default();
    histories.follow(&Views::new(), &Causes::new(), NOON_S);
    histories.follow(&services(&[HEALTHY]), &Causes::new(), NOON_S + 10);
    assert_eq!(turns(&histories, ONE), ["10 healthy: its Service lists it"]);
    assert_eq!(histories.since_s([&subject(ONE), &subject("10.0.0.2:80")]), [Some(NOON_S + 10), None]);
}

#[test]
fn a_cause_that_comes_after_the_change_is_added_to_it() {
    let histories = BackendHistories::default();
    let failing = services(&[FAILING]);
    histories.follow(&failing, &Causes::new(), NOON_S);
    assert_eq!(turns(&histories, ONE), ["0 unhealthy: "]);
    histories.follow(&failing, &causes(ONE), NOON_S + 1);
    assert_eq!(turns(&histories, ONE), ["0 unhealthy: tcp 10.0.0.1:80 refused"]);
}

#[test]
fn the_last_ten_changes_are_kept_and_many_of_them_are_flapping() {
    let histories = BackendHistories::default();
    for n in 0..20 {
        let backend = if n % 2 == 0 { HEALTHY } else { FAILING };
        histories.follow(&services(&[backend]), &causes(ONE), NOON_S + n * 60);
    }
    assert_eq!(history(&histories, ONE).changes.len(), CHANGES_MAX);
    let flapping = |after_s| histories.flapping(NOON_S + after_s).get(&subject(ONE)).copied();
    // What the first of ten was before is not known any more.
    assert_eq!((flapping(19 * 60), flapping(24 * 60), flapping(25 * 60)), (Some(9), Some(6), None));
    assert_eq!(flapping(10 * 60), None, "changes of the future are of a clock that was wrong");
    histories.follow(&services(&[("10.0.0.2:80", true, false)]), &Causes::new(), NOON_S + 19 * 60);
    assert_eq!(flapping(19 * 60), None, "it is gone");
}

#[test]
fn downtime_of_today_begins_at_midnight() {
    let histories = BackendHistories::default();
    let late_s = (NOON_S / DAY_S + 1) * DAY_S - 100;
    histories.follow(&services(&[HEALTHY]), &Causes::new(), NOON_S);
    histories.follow(&services(&[FAILING]), &Causes::new(), NOON_S + 10);
    histories.follow(&services(&[HEALTHY]), &Causes::new(), NOON_S + 70);
    histories.follow(&services(&[FAILING]), &Causes::new(), late_s);
    let down = |now_s| history(&histories, ONE).down_today_s(now_s);
    assert_eq!([down(late_s), down(late_s + 99), down(late_s + 130)], [60, 159, 30]);
}

#[test]
fn removed_backends_are_forgotten_when_there_are_too_many() {
    let histories = BackendHistories::default();
    for n in 0..u64::try_from(REMOVED_MAX).unwrap() + 10 {
        let address = format!("10.0.{}.{}:80", n / 250, n % 250 + 1);
        histories.follow(&services(&[(&address, true, false)]), &Causes::new(), NOON_S + n);
    }
    assert_eq!(histories.removed().len(), REMOVED_MAX);
    assert!(!histories.removed().contains_key(&subject("10.0.0.1:80")), "the oldest one");
}

#[test]
fn a_restart_keeps_the_history_and_notes_only_what_changed_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let file = HistoryFile::new(StateDirs::with_runtime(dir.path(), None));
    let before = BackendHistories::default();
    let two = "10.0.0.2:80";
    before.follow(&services(&[HEALTHY, (two, true, false)]), &Causes::new(), NOON_S);
    before.follow(&services(&[FAILING, (two, true, false)]), &causes(ONE), NOON_S + 10);
    file.save(&before);
    let written = fs::metadata(dir.path().join("history")).unwrap().modified().unwrap();
    file.save(&before);
    assert_eq!(fs::metadata(dir.path().join("history")).unwrap().modified().unwrap(), written, "nothing has changed");
    let after = BackendHistories::default();
    file.restore(&after);
    assert_eq!(history(&after, ONE), history(&before, ONE));
    after.follow(&services(&[FAILING]), &causes(ONE), NOON_S + 30);
    assert_eq!(turns(&after, ONE), [AT_START, "10 unhealthy: tcp 10.0.0.1:80 refused"]);
    assert_eq!(turns(&after, two), [AT_START, "30 removed: its Service no longer lists it"]);
}

#[test]
fn what_could_not_be_written_is_written_by_the_next_call_and_a_cause_that_comes_later_too() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("state");
    fs::write(&disk, "no directory").unwrap();
    let file = HistoryFile::new(StateDirs::with_runtime(&disk, None));
    let (histories, failing) = (BackendHistories::default(), services(&[FAILING]));
    let saved = || {
        file.save(&histories);
        let after = BackendHistories::default();
        file.restore(&after);
        after.of([&subject(ONE)]).remove(0).0.map(|history| history.changes[0].cause.to_string())
    };
    histories.follow(&failing, &Causes::new(), NOON_S);
    assert_eq!(saved(), None);
    fs::remove_file(&disk).unwrap();
    assert_eq!(saved().as_deref(), Some(""), "nothing has changed since");
    histories.follow(&failing, &causes(ONE), NOON_S + 1);
    assert_eq!(saved().as_deref(), Some("tcp 10.0.0.1:80 refused"));
}

#[test]
fn the_file_has_the_backends_that_changed_last() {
    let dir = tempfile::tempdir().unwrap();
    let file = HistoryFile::new(StateDirs::with_runtime(dir.path(), None));
    let address = |n: u64| subject(&format!("10.0.{}.{}:80", n / 250, n % 250 + 1));
    let before = BackendHistories::default();
    let mut known = before.lock();
    known.is_unsaved = true;
    for n in 0..10_002 {
        known.all.entry(address(n)).or_default().turn(BackendCondition::Healthy, "its probes pass", NOON_S + n);
    }
    drop(known);
    file.save(&before);
    let after = BackendHistories::default();
    file.restore(&after);
    assert_eq!(after.lock().all.len(), 10_000);
    assert_eq!(after.since_s([&address(1), &address(2), &address(10_001)]), [None, Some(NOON_S + 2), Some(NOON_S + 10_001)]);
}

#[test]
fn a_damaged_file_is_an_empty_history() {
    let dir = tempfile::tempdir().unwrap();
    let file = HistoryFile::new(StateDirs::with_runtime(dir.path(), None));
    let before = BackendHistories::default();
    before.follow(&services(&[HEALTHY]), &Causes::new(), NOON_S);
    file.save(&before);
    let path = dir.path().join("history");
    let good = fs::read(&path).unwrap();
    let mut modified = good.clone();
    *modified.last_mut().unwrap() ^= 1;
    let sealed = |content: &[u8]| seal("sluice history ", Moment::now(), content);
    for bytes in [modified, good[..good.len() / 2].to_vec(), b"something else".to_vec(), Vec::new(), sealed(b"[{}]")] {
        fs::write(&path, &bytes).unwrap();
        let after = BackendHistories::default();
        file.restore(&after);
        assert!(after.removed().is_empty() && after.lock().all.is_empty());
    }
    fs::write(&path, good).unwrap();
    let after = BackendHistories::default();
    file.restore(&after);
    assert_eq!(after.lock().all.len(), 1, "the same file without damage is used");
}

#[test]
fn checks_are_of_backends_that_are_checked() {
    let histories = BackendHistories::default();
    let check = LastCheck { at_s: NOON_S, took: Duration::from_millis(2), found: Ok(()), contrary: 1, needed: 2 };
    histories.check([&subject(ONE)], &check);
    assert_eq!(histories.of([&subject(ONE)]), [(None, Some(check))]);
    histories.retain_checks(|_| false);
    assert_eq!(histories.of([&subject(ONE)]), [(None, None)]);
}
