//! `sluicectl reload` and SIGHUP: reads the configuration again and applies the keys that can change while packets
//! flow.
//!
//! Invariant: an invalid file changes nothing, and every key that is reported as applied is in effect. Keys that differ
//! and cannot change while packets flow are reported, and take effect at the next start: they concern ports, memory and
//! sockets. Keys of the embedded controller are applied by a restart of the controller, while workers keep forwarding.
//! Not here: reading the file (`settings`), and what a key means.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use control::config::Invalid;
use control::config::settings::ControllerSettings;
use control::healthz::systemd::Reloading;
use dataplane::Tunables;
use proto::trouble::ReloadOutcome;
use proto::{GatewayProfile, GroupKey};
use tokio::sync::watch;

use crate::agent::watch::send_if_changed;
use crate::settings::{Settings, SourceChoice, StateSource};

/// The configuration that the gateway runs with, and its origin.
#[derive(Debug)]
pub struct Reload {
    file: PathBuf,
    choice: SourceChoice,
    running: Mutex<Settings>,
    controller: watch::Sender<Option<ControllerSettings>>,
    tunables: watch::Sender<Tunables>,
    profile: watch::Sender<GatewayProfile>,
    fleet_keys: watch::Sender<Vec<GroupKey>>,
    reloads: watch::Sender<u64>,
    outcome: Mutex<ReloadOutcome>,
}

/// The result of a reload: top-level keys, in the order in which `sluiced check` prints them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Keys that differed and are in effect now.
    pub applied: Vec<String>,
    /// Keys that differ and take effect at the next start.
    pub at_next_start: Vec<String>,
    /// Which part of key `snat` is in effect, and which is not.
    pub snat: SnatChange,
}

/// A change of `snat.addresses`: an address by which flows may exist stays until the next start, and one that finds no room
/// beside it waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnatChange {
    /// In use from now on.
    pub added: Vec<IpAddr>,
    /// Removed from the file, and in use until the next start.
    pub kept: Vec<IpAddr>,
    /// Added to the file, and in use from the next start on.
    pub waiting: Vec<IpAddr>,
}

impl SnatChange {
    /// From the addresses in use `before`, those in use `now` and those of the file.
    fn between(before: &[IpAddr], now: &[IpAddr], file: &[IpAddr]) -> Self {
        let without = |all: &[IpAddr], some: &[IpAddr]| all.iter().filter(|one| !some.contains(one)).copied().collect();
        Self { added: without(now, before), kept: without(now, file), waiting: without(file, now) }
    }

    /// What is in effect, in words.
    fn applied(&self) -> String {
        texts([("added", &self.added)])
    }

    /// What is not, in words.
    fn at_next_start(&self) -> String {
        let all = texts([("removed", &self.kept), ("added", &self.waiting)]);
        if all.is_empty() { " (order)".to_owned() } else { all }
    }
}

/// ` (added 192.0.2.5, removed 192.0.2.3)`.
fn texts<const N: usize>(all: [(&str, &Vec<IpAddr>); N]) -> String {
    let of = |(what, addresses): (&str, &Vec<IpAddr>)| {
        let list: Vec<_> = addresses.iter().map(ToString::to_string).collect();
        (!list.is_empty()).then(|| format!("{what} {}", list.join(" ")))
    };
    let all: Vec<_> = all.into_iter().filter_map(of).collect();
    if all.is_empty() { String::new() } else { format!(" ({})", all.join(", ")) }
}

impl fmt::Display for Reloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |keys: &[String], of_snat: &str| {
            let text = |key: &String| if key == "snat" { format!("{key}{of_snat}") } else { key.clone() };
            keys.iter().map(text).collect::<Vec<_>>().join(", ")
        };
        let applied = named(&self.applied, &self.snat.applied());
        let later = named(&self.at_next_start, &self.snat.at_next_start());
        match (applied.as_str(), later.as_str()) {
            ("", "") => write!(f, "nothing has changed"),
            (applied, "") => write!(f, "in effect: {applied}"),
            ("", later) => write!(f, "nothing can change while the gateway runs; restart sluiced for: {later}"),
            (applied, later) => write!(f, "in effect: {applied}; restart sluiced for: {later}"),
        }
    }
}

/// How the next start differs from this one, as far as the end of this process depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextStart {
    /// Whether its routes to VIPs have the same table and protocol.
    pub keeps_routes: bool,
}

impl Reload {
    /// For a gateway that runs with `settings`, which were read from `file` with this `choice`.
    #[must_use]
    pub fn new(file: PathBuf, choice: SourceChoice, settings: Settings) -> Self {
        let controller = watch::Sender::new(embedded(&settings).cloned());
        let tunables = watch::Sender::new(settings.tunables());
        let profile = watch::Sender::new(settings.profile.clone());
        let (fleet_keys, reloads) = (watch::Sender::new(settings.fleet_keys()), watch::Sender::new(0));
        let (running, outcome) = (Mutex::new(settings), Mutex::default());
        Self { file, choice, running, controller, tunables, profile, fleet_keys, reloads, outcome }
    }

    /// The engine's part of the settings as it changes.
    #[must_use]
    pub fn tunables(&self) -> watch::Receiver<Tunables> {
        self.tunables.subscribe()
    }

    /// What the gateway says about itself, as it changes.
    #[must_use]
    pub fn profile(&self) -> watch::Receiver<GatewayProfile> {
        self.profile.subscribe()
    }

    /// The keys of `fleet.key` as they change, the preferred one first; none without such a file.
    #[must_use]
    pub fn fleet_keys(&self) -> watch::Receiver<Vec<GroupKey>> {
        self.fleet_keys.subscribe()
    }

    /// The embedded controller's settings as they change; none with a remote controller.
    #[must_use]
    pub fn controller(&self) -> watch::Receiver<Option<ControllerSettings>> {
        self.controller.subscribe()
    }

    /// How often the configuration was reloaded.
    #[must_use]
    pub fn reloads(&self) -> watch::Receiver<u64> {
        self.reloads.subscribe()
    }

    /// The settings in effect, as `sluiced check` prints them.
    #[must_use]
    pub fn effective(&self) -> String {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).effective()
    }

    /// What the last reload has left to do.
    #[must_use]
    pub fn outcome(&self) -> ReloadOutcome {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the file as the next start will, and changes nothing.
    ///
    /// # Errors
    /// All problems of the file: the next start will fail.
    pub fn check(&self) -> Result<NextStart, Invalid> {
        let next = Settings::read(&self.file, &self.choice)?;
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(NextStart { keeps_routes: next.announce == running.announce })
    }

    /// Reads the file again.
    ///
    /// # Errors
    /// All problems of the file; nothing has changed then.
    pub fn reload(&self) -> Result<Reloaded, Invalid> {
        let _reloading = Reloading::begin();
        let result = self.take_over();
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        match &result {
            Ok(reloaded) => {
                *outcome = ReloadOutcome { failure: String::new(), at_next_start: reloaded.at_next_start.clone() };
            }
            Err(errors) => outcome.failure = first_line(&errors.to_string()),
        }
        drop(outcome);
        result
    }

    fn take_over(&self) -> Result<Reloaded, Invalid> {
        let new = Settings::read(&self.file, &self.choice)?;
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let next = running.reloaded(&new);
        let owned = |keys: Vec<&str>| keys.into_iter().map(str::to_owned).collect::<Vec<_>>();
        let mut applied = owned(next.key_values().differing(&running.key_values()));
        if next.replication != running.replication {
            note_fleet_key(&mut applied, &next.key_values().names());
        }
        let mut at_next_start = owned(new.key_values().differing(&next.key_values()));
        // The rest of the key is in effect.
        let flows = at_next_start.iter_mut().filter(|key| *key == "flows");
        flows.for_each(|key| "flows.maxPerWorker".clone_into(key));
        let snat = SnatChange::between(&running.snat, &next.snat, &new.snat);
        if next.logs != running.logs {
            control::config::logging::change(next.logs);
        }
        send_if_changed(&self.tunables, next.tunables());
        send_if_changed(&self.profile, next.profile.clone());
        send_if_changed(&self.fleet_keys, next.fleet_keys());
        send_if_changed(&self.controller, embedded(&next).cloned());
        self.reloads.send_modify(|reloads| *reloads += 1);
        *running = next;
        Ok(Reloaded { applied, at_next_start, snat })
    }
}

/// The first line of a text, and how many follow.
fn first_line(text: &str) -> String {
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default();
    match lines.count() {
        0 => first.to_owned(),
        more => format!("{first} (+{more} more)"),
    }
}

/// Names `fleet.key` in place of `fleet`, of which nothing else changes at a reload. Where only the content of its file has
/// changed, it stands where `names`, in the order of the file, have `fleet`.
fn note_fleet_key(applied: &mut Vec<String>, names: &[&str]) {
    applied.retain(|key| key != "fleet");
    let before: Vec<_> = names.iter().take_while(|name| **name != "fleet").collect();
    let at = applied.iter().take_while(|key| before.iter().any(|name| **name == key.as_str())).count();
    applied.insert(at, "fleet.key".to_owned());
}

/// The settings of the embedded controller; none with a remote one.
fn embedded(settings: &Settings) -> Option<&ControllerSettings> {
    match &settings.source {
        StateSource::Embedded(controller, _) => Some(controller),
        StateSource::Remote(..) => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    const BASE: &str = "name: edge\nports:\n  - {name: uplink, device: net_tap0, addresses: [192.0.2.2/24]}\n\
        pools: [{name: default, addresses: [192.0.2.100-192.0.2.119]}]\nmanifests: m\nstatusDir: s\nlisten: unix:c.sock\n";

    /// A gateway that runs by [`BASE`].
    pub(crate) fn reload() -> Reload {
        reloaded(BASE).0
    }

    /// The same with its file, which the directory holds.
    pub(crate) fn with_file() -> (Reload, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sluice.yaml");
        fs::write(&file, BASE).unwrap();
        (Reload { file, ..reload() }, dir)
    }

    /// A gateway that runs by [`BASE`], and what it says when `text` takes the place of that.
    fn reloaded(text: &str) -> (Reload, Result<Reloaded, Invalid>) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sluice.yaml");
        fs::write(&file, BASE).unwrap();
        let settings = Settings::read(&file, &SourceChoice::File).unwrap();
        let reload = Reload::new(file.clone(), SourceChoice::File, settings);
        fs::write(&file, text).unwrap();
        let result = reload.reload();
        (reload, result)
    }

    /// What it says when `text` takes the place of its file, in the same directory: keys with paths stay the same.
    fn reloaded_again(reload: &Reload, text: &str) -> Reloaded {
        let dir = reload.file.parent().unwrap();
        fs::create_dir_all(dir).unwrap();
        fs::write(&reload.file, text).unwrap();
        let result = reload.reload();
        fs::remove_dir_all(dir).unwrap();
        result.unwrap()
    }

    #[test]
    fn what_a_reload_has_not_taken_over_is_known_until_the_next_one() {
        let (reload, result) = reloaded(&BASE.replace("192.0.2.2/24", "192.0.2.9/24"));
        result.unwrap();
        assert_eq!(reload.outcome().at_next_start, ["ports"]);
        let (reload, result) = reloaded(&BASE.replace("name: edge", "nam: edge"));
        let errors = result.unwrap_err().to_string();
        assert!(errors.starts_with(reload.outcome().failure.split(" (+").next().unwrap()), "{errors}");
        assert!(!reload.outcome().failure.is_empty());
        reloaded_again(&reload, BASE);
        assert_eq!(reload.outcome(), ReloadOutcome::default());
    }

    fn keys(keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| (*key).to_owned()).collect()
    }

    #[test]
    fn what_changed_is_in_effect_or_named_for_the_next_start() {
        let more_pool = BASE.replace("192.0.2.119", "192.0.2.120");
        let moved = BASE.replace("c.sock", "d.sock");
        let with = |keys: &str| format!("{BASE}{keys}\n");
        let rows = [
            (BASE.to_owned(), keys(&[]), keys(&[]), "nothing has changed"),
            (more_pool.clone(), keys(&["pools"]), keys(&[]), "in effect: pools"),
            (with("flows: {udp: 1m}"), keys(&["flows"]), keys(&[]), "in effect: flows"),
            (with("limits: {targets: 100}"), keys(&["limits"]), keys(&[]), "in effect: limits"),
            (
                with("flows: {maxPerWorker: 9}"),
                keys(&[]),
                keys(&["flows.maxPerWorker"]),
                "restart sluiced for: flows.maxPerWorker",
            ),
            (
                with("flows: {maxPerWorker: 9, udp: 1m}"),
                keys(&["flows"]),
                keys(&["flows.maxPerWorker"]),
                "in effect: flows; restart sluiced for: flows.maxPerWorker",
            ),
            (
                with("logs: {level: debug}\nnodePortAddresses: [192.0.2.2]\nzone: a"),
                keys(&["nodePortAddresses", "logs"]),
                keys(&["zone"]),
                "in effect: nodePortAddresses, logs; restart sluiced for: zone",
            ),
            (
                format!("{moved}snat: {{addresses: [192.0.2.3]}}\n"),
                keys(&["snat"]),
                keys(&["listen"]),
                "restart sluiced for: listen",
            ),
        ];
        for (text, applied, at_next_start, said) in rows {
            let result = reloaded(&text).1.unwrap();
            assert!(result.to_string().contains(said), "{result}");
            assert_eq!((result.applied, result.at_next_start), (applied, at_next_start), "{text}");
        }
    }

    #[test]
    fn the_controller_gets_its_new_settings_and_the_effective_ones_are_reported() {
        let (reload, result) = reloaded(&BASE.replace("192.0.2.119", "192.0.2.120"));
        result.unwrap();
        let pools = reload.controller().borrow().clone().unwrap().pools;
        assert_eq!(pools[0].ranges[0].last().to_string(), "192.0.2.120");
        assert!(reload.effective().contains("192.0.2.120"), "{}", reload.effective());
    }

    #[test]
    fn snat_addresses_are_added_at_once_and_removed_at_the_next_start() {
        let with = |addresses: &str| format!("{BASE}snat: {{addresses: [{addresses}]}}\n");
        let (reload, result) = reloaded(&with("192.0.2.3, 192.0.2.4"));
        assert_eq!(result.unwrap().applied, ["snat"]);
        let addresses = |last: &[u8]| last.iter().map(|n| IpAddr::from([192, 0, 2, *n])).collect::<Vec<_>>();
        assert_eq!(reload.tunables().borrow().snat, addresses(&[3, 4]));
        assert_eq!(reload.profile().borrow().own, addresses(&[2, 3, 4]));
        assert_eq!(reload.controller().borrow().as_ref().unwrap().profile.own, addresses(&[2, 3, 4]), "never VIPs");
        let again = reloaded_again(&reload, &with("192.0.2.5, 192.0.2.4"));
        let said = "in effect: snat (added 192.0.2.5); restart sluiced for: snat (removed 192.0.2.3)";
        assert_eq!(again.to_string(), said);
        assert_eq!((again.applied, again.at_next_start), (keys(&["snat"]), keys(&["snat"])));
        assert_eq!(reload.tunables().borrow().snat, addresses(&[3, 4, 5]), "flows hold ports of 192.0.2.3");
    }

    #[test]
    fn snat_addresses_are_added_up_to_the_limit_of_a_family() {
        let addresses = |first: u8| (first..first + 8).map(|n| format!("192.0.2.{n}")).collect::<Vec<_>>();
        let with = |v4: &[String], v6: &str| format!("{BASE}snat: {{addresses: [{}{v6}]}}\n", v4.join(", "));
        let (reload, result) = reloaded(&with(&addresses(3), ""));
        assert!(result.unwrap().at_next_start.is_empty());
        let again = reloaded_again(&reload, &with(&addresses(6), ", 'fd00::1'"));
        let waiting = "192.0.2.11 192.0.2.12 192.0.2.13)";
        assert!(
            again
                .to_string()
                .ends_with(&format!("restart sluiced for: snat (removed 192.0.2.3 192.0.2.4 192.0.2.5, added {waiting}")),
            "{again}"
        );
        assert_eq!((again.applied, again.at_next_start), (keys(&["snat"]), keys(&["snat"])));
        let used: Vec<_> = reload.tunables().borrow().snat.iter().map(ToString::to_string).collect();
        assert_eq!(used, [addresses(3), vec!["fd00::1".to_owned()]].concat(), "the old ones first, the rest at the next start");
    }

    #[test]
    fn the_keys_of_a_fleet_change_and_its_other_keys_wait_for_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        let (file, key_file) = (dir.path().join("sluice.yaml"), dir.path().join("fleet.key"));
        let write_keys = |keys: &[u8]| {
            let lines: String = keys.iter().map(|key| format!("{}\n", STANDARD.encode([*key; 32]))).collect();
            fs::write(&key_file, lines).unwrap();
            fs::set_permissions(&key_file, Permissions::from_mode(0o600)).unwrap();
        };
        let write = |partners: &str| {
            let more = format!(
                "snat: {{addresses: [192.0.2.3]}}\nannounce: {{election: keepalived, groups: 1}}\n\
                 fleet: {{listen: 192.0.2.2:9437, key: fleet.key, partners: [{partners}]}}\n"
            );
            fs::write(&file, format!("{BASE}{more}")).unwrap();
        };
        write_keys(&[1]);
        write("'192.0.2.4:9437'");
        let settings = Settings::read(&file, &SourceChoice::File).unwrap();
        let reload = Reload::new(file.clone(), SourceChoice::File, settings);
        let fleet_keys = reload.fleet_keys();
        assert_eq!(reload.reload().unwrap(), Reloaded::default());
        write_keys(&[2, 1]);
        let reloaded = reload.reload().unwrap();
        assert_eq!((reloaded.applied, reloaded.at_next_start), (keys(&["fleet.key"]), keys(&[])));
        assert_eq!(*fleet_keys.borrow(), [2, 1].map(|key| GroupKey::new([key; 32])));
        write_keys(&[2]);
        write("'192.0.2.5:9437'");
        let reloaded = reload.reload().unwrap();
        assert_eq!((reloaded.applied, reloaded.at_next_start), (keys(&["fleet.key"]), keys(&["fleet"])));
        write_keys(&[3]);
        let text = fs::read_to_string(&file).unwrap().replace("192.0.2.119", "192.0.2.118");
        fs::write(&file, text + "logs: {level: debug}\n").unwrap();
        let reloaded = reload.reload().unwrap();
        assert_eq!(reloaded.applied, keys(&["logs", "fleet.key", "pools"]), "in the order of the file");
        write_keys(&[2, 2]);
        assert!(reload.reload().unwrap_err().to_string().contains("whose two lines are the same key"));
        assert_eq!(*fleet_keys.borrow(), [GroupKey::new([3; 32])], "an invalid file changes nothing");
    }

    #[test]
    fn every_reload_has_the_manifests_read_again_even_without_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sluice.yaml");
        fs::write(&file, BASE).unwrap();
        let settings = Settings::read(&file, &SourceChoice::File).unwrap();
        let reload = Reload::new(file, SourceChoice::File, settings);
        let mut reloads = reload.reloads();
        for _ in 0..2 {
            assert!(reload.reload().unwrap().applied.is_empty());
            assert!(reloads.has_changed().unwrap());
            reloads.mark_unchanged();
        }
        assert!(!reload.controller().has_changed().unwrap(), "the controller goes on");
    }

    #[test]
    fn a_file_that_is_not_valid_changes_nothing() {
        let (reload, result) = reloaded(&BASE.replace("192.0.2.119", "192.0.2.300"));
        assert!(result.unwrap_err().to_string().contains("pools[0].addresses[0]"));
        assert!(!reload.controller().has_changed().unwrap());
        assert!(reload.effective().contains("192.0.2.119"));
        let dir = tempfile::tempdir().unwrap();
        let reload = Reload { file: dir.path().join("sluice.yaml"), ..reload };
        for (text, is_valid) in [(BASE.to_owned(), true), (BASE.replace("192.0.2.119", "192.0.2.300"), false)] {
            fs::write(&reload.file, text).unwrap();
            assert_eq!(reload.check().is_ok(), is_valid);
        }
    }
}
