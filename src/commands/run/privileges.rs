//! Privileges that the configuration never needs are given up before the first thread starts: capabilities, new
//! privileges through programs, dangerous system calls, and writing outside a few directories
//! (docs/operate/privileges.md).
//!
//! Invariant: what is given up is a function of the configuration, of the IOMMU and of UIO drivers, not of whether a
//! device is present, so that ports that appear later, reloads and restarts of the embedded controller have what they
//! need. A kernel that lacks a mechanism is reported and does not keep the gateway from running.
//! Not here: the restrictions of the unit (deploy/sluiced.service).

mod files;
mod needs;
mod system_calls;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};

use crate::machine::Root;
use crate::settings::Settings;
use needs::PortNeeds;

/// Gives up what `settings` do not need, for the calling thread and all that it starts. Returns the mechanisms that the
/// kernel refused, and why.
pub(super) fn drop_unneeded(settings: &Settings) -> Vec<(&'static str, String)> {
    let needs = PortNeeds::of(settings, &Root::new("/"));
    let outcomes = [
        ("capabilities", keep_capabilities(needs.capabilities()).map_err(|error| error.to_string())),
        ("no_new_privs", set_no_new_privs(true).map_err(|error| error.to_string())),
        ("landlock", files::restrict(settings, needs)),
        ("seccomp", system_calls::forbid(needs)),
    ];
    tracing::debug!(?needs, "privileges that are not needed are given up");
    outcomes.into_iter().filter_map(|(mechanism, outcome)| Some((mechanism, outcome.err()?))).collect()
}

/// Keeps these capabilities, as far as the process has them.
fn keep_capabilities(kept: CapabilitySet) -> rustix::io::Result<()> {
    let permitted = capabilities(None)?.permitted;
    // Without this capability the set stays as the unit or the container bounded it.
    if permitted.contains(CapabilitySet::SETPCAP) {
        for dropped in (CapabilitySet::all() - kept).iter() {
            // The kernel may be older than a capability.
            let _ = remove_capability_from_bounding_set(dropped);
        }
    }
    clear_ambient_capability_set()?;
    let kept = kept & permitted;
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() })
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::fs;
    use std::path::Path;
    use std::process::Command;

    use super::*;
    use crate::settings::SourceChoice;

    /// The variable with a directory, in a process that gives up its privileges.
    const CHILD: &str = "SLUICE_GIVES_UP_PRIVILEGES";

    /// Gives up privileges, and tries what is allowed and what is not in a thread that starts later.
    fn attempt(dir: &Path) {
        let settings = Settings::read(&dir.join("sluice.yaml"), &SourceChoice::File).unwrap();
        let before = capabilities(None).unwrap().permitted;
        let kept = before & PortNeeds::of(&settings, &Root::new("/")).capabilities();
        let refused = drop_unneeded(&settings);
        let has_landlock = refused.iter().all(|(mechanism, _)| *mechanism != "landlock");
        assert!(refused.iter().all(|(mechanism, _)| *mechanism == "landlock"), "{refused:?}");
        let dir = dir.to_owned();
        let thread = std::thread::spawn(move || {
            assert_eq!(capabilities(None).unwrap().permitted, kept);
            assert!(rustix::thread::no_new_privs().unwrap());
            fs::write(dir.join("d/state/here"), "").unwrap();
            fs::write(dir.join("d/status/here"), "").unwrap();
            assert_eq!(fs::write(dir.join("elsewhere"), "").is_err(), has_landlock, "outside the directories");
            assert!(fs::read(dir.join("sluice.yaml")).is_ok(), "reading is free");
            let run = |arguments: &[&str]| Command::new(arguments[0]).args(&arguments[1..]).output().unwrap();
            assert!(run(&["true"]).status.success(), "programs of the system run");
            let unshare = run(&["unshare", "--user", "true"]);
            assert!(String::from_utf8_lossy(&unshare.stderr).contains("not permitted"), "{unshare:?}");
        });
        thread.join().unwrap();
    }

    #[test]
    fn a_process_that_gave_up_privileges_does_its_work_and_nothing_else() {
        if let Some(dir) = env::var_os(CHILD) {
            return attempt(Path::new(&dir));
        }
        let dir = tempfile::tempdir().unwrap();
        let text = "name: edge\nports: [{name: uplink, device: net_tap0, addresses: [192.0.2.2/24]}]\nmanifests: m\n\
                    statusDir: d/status\nstateDir: d/state\nlisten: unix:d/c.sock\nadmin: {listen: \"unix:d/a.sock\"}\n";
        fs::write(dir.path().join("sluice.yaml"), text).unwrap();
        let module = module_path!().split_once("::").map_or("", |(_, path)| path);
        let test = format!("{module}::a_process_that_gave_up_privileges_does_its_work_and_nothing_else");
        let mut child = Command::new(env::current_exe().unwrap());
        let output = child.args(["--exact", "--nocapture", &test]).env(CHILD, dir.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
