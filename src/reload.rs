//! `sluicectl reload` and SIGHUP: reads the configuration again and applies the keys that can change while packets
//! flow.
//!
//! Invariant: an invalid file changes nothing, and every key that is reported as applied is in effect. Keys of the
//! embedded controller and of its source are applied: the controller restarts while workers keep forwarding. Another
//! `statusDir` outside the old one and outside `stateDir` needs a restart. All other
//! keys concern the machine (ports, memory, workers, tables); those that differ are reported and take effect at the
//! next start.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use control::config::Invalid;
use control::config::controller::KEYS;
use control::config::settings::{ControllerSettings, Source};
use control::healthz::systemd::Reloading;
use tokio::sync::watch;

use crate::settings::{Settings, SourceChoice, StateSource};

/// The configuration that the gateway runs with, and its origin.
#[derive(Debug)]
pub struct Reload {
    file: PathBuf,
    choice: SourceChoice,
    running: Mutex<Settings>,
    controller: watch::Sender<Option<ControllerSettings>>,
}

/// The result of a reload: top-level keys, in the order in which `sluiced check` prints them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Keys that differed and are in effect now.
    pub applied: Vec<String>,
    /// Keys that differ and take effect at the next start.
    pub at_next_start: Vec<String>,
}

impl fmt::Display for Reloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.applied.as_slice(), self.at_next_start.as_slice()) {
            ([], []) => write!(f, "nothing has changed"),
            (applied, []) => write!(f, "in effect: {}", applied.join(", ")),
            ([], later) => write!(f, "nothing can change while the gateway runs; restart sluiced for: {}", later.join(", ")),
            (applied, later) => write!(f, "in effect: {}; restart sluiced for: {}", applied.join(", "), later.join(", ")),
        }
    }
}

impl Reload {
    /// For a gateway that runs with `settings`, which were read from `file` with this `choice`.
    #[must_use]
    pub fn new(file: PathBuf, choice: SourceChoice, settings: Settings) -> Self {
        let controller = match &settings.source {
            StateSource::Embedded(controller, _) => Some((**controller).clone()),
            StateSource::Remote(..) => None,
        };
        Self { file, choice, running: Mutex::new(settings), controller: watch::Sender::new(controller) }
    }

    /// The embedded controller's settings as they change; none with a remote controller.
    #[must_use]
    pub fn controller(&self) -> watch::Receiver<Option<ControllerSettings>> {
        self.controller.subscribe()
    }

    /// The settings in effect, as `sluiced check` prints them.
    #[must_use]
    pub fn effective(&self) -> String {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).effective()
    }

    /// Reads the file again.
    ///
    /// # Errors
    /// All problems of the file; nothing has changed then.
    pub fn reload(&self) -> Result<Reloaded, Invalid> {
        let _reloading = Reloading::begin();
        let new = Settings::read(&self.file, &self.choice)?;
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = new.key_values().differing(&running.key_values());
        // The gateway itself is connected to the socket, a source of another kind needs other tasks, and another
        // directory cannot be written to (`run::privileges`): all need a restart.
        let stays = match (&running.source, &new.source) {
            (StateSource::Embedded(old, _), StateSource::Embedded(new, _)) => {
                old.listen == new.listen && is_writable(status_dir(new), status_dir(old), &running.state_dir)
            }
            _ => false,
        };
        let live = |key: &String| stays && KEYS.contains(&key.as_str());
        let (applied, at_next_start): (Vec<_>, Vec<_>) = changed.into_iter().map(str::to_owned).partition(live);
        if let (StateSource::Embedded(now, _), StateSource::Embedded(controller, _), false) =
            (&mut running.source, new.source, applied.is_empty())
        {
            self.controller.send_replace(Some((*controller).clone()));
            *now = controller;
        }
        Ok(Reloaded { applied, at_next_start })
    }
}

fn status_dir(controller: &ControllerSettings) -> Option<&Path> {
    match &controller.source {
        Source::Manifests { status_dir, .. } => Some(status_dir),
        Source::Kubernetes { .. } => None,
    }
}

/// Whether a gateway that was started with these directories may write to a new one.
fn is_writable(new: Option<&Path>, old: Option<&Path>, state_dir: &Path) -> bool {
    new.is_none_or(|new| new.starts_with(state_dir) || old.is_some_and(|old| new.starts_with(old)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;

    use super::*;

    const BASE: &str = "name: edge\nports:\n  - {name: uplink, device: net_tap0, addresses: [192.0.2.2/24]}\n\
        pools: [{name: default, addresses: [192.0.2.100-192.0.2.119]}]\nmanifests: m\nstatusDir: s\nlisten: unix:c.sock\n";

    /// A gateway that runs by [`BASE`].
    pub(crate) fn reload() -> Reload {
        reloaded(BASE).0
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

    fn keys(keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| (*key).to_owned()).collect()
    }

    #[test]
    fn what_changed_is_in_effect_or_named_for_the_next_start() {
        let more_pool = BASE.replace("192.0.2.119", "192.0.2.120");
        let more_flows = format!("{BASE}flows: {{udp: 1m}}\n");
        let moved = BASE.replace("c.sock", "d.sock");
        let rows = [
            (BASE.to_owned(), keys(&[]), keys(&[]), "nothing has changed"),
            (more_pool.clone(), keys(&["pools"]), keys(&[]), "in effect: pools"),
            (more_flows, keys(&[]), keys(&["flows"]), "restart sluiced for: flows"),
            (format!("{more_pool}flows: {{udp: 1m}}\n"), keys(&["pools"]), keys(&["flows"]), "; restart sluiced for: flows"),
            (moved, keys(&[]), keys(&["listen"]), "restart sluiced for: listen"),
        ];
        for (text, applied, at_next_start, said) in rows {
            let result = reloaded(&text).1.unwrap();
            assert!(result.to_string().contains(said), "{result}");
            assert_eq!(result, Reloaded { applied, at_next_start }, "{text}");
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
    fn a_file_that_is_not_valid_changes_nothing() {
        let (reload, result) = reloaded(&BASE.replace("192.0.2.119", "192.0.2.300"));
        assert!(result.unwrap_err().to_string().contains("pools[0].addresses[0]"));
        assert!(!reload.controller().has_changed().unwrap());
        assert!(reload.effective().contains("192.0.2.119"));
    }
}
