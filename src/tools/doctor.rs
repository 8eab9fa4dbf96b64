//! `sluiced doctor`: what this machine has and lacks, and what to do about it.
//!
//! Invariant: the examination only reads, and only below one root directory, so that a test examines a machine made of
//! files; what only the kernel can tell is asked before, and given to it. What the configuration needs and the machine has not is *missing*; what would merely be better is a *note*.
//!
//! Not here: changing anything, and trying a device out.

mod cores;
mod devices;
mod memory;
mod network;
mod root;

use std::io;
use std::path::Path;

use core_affinity::CoreId;
pub use root::Root;

use crate::ports::dpdk;
use crate::settings::{Hugepages, Poll, Settings, SourceChoice, Twin};
use crate::workers::{self, WorkerError};

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub enum DoctorError {
    /// The configuration is wrong: exit 2.
    #[error(transparent)]
    Invalid(#[from] control::config::Invalid),
    /// The output could not be written: exit 1.
    #[error("cannot write the table: {0}")]
    Output(#[from] io::Error),
}

/// What a configuration asks of the machine. The default asks nothing: `doctor` without a configuration.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    /// The devices of the ports, as configured.
    pub devices: Vec<String>,
    /// Whether a port has a Linux twin.
    pub twins: bool,
    /// Whether packet memory must be in hugepages.
    pub hugepages_required: bool,
    /// How much packet memory, MB.
    pub memory_mb: u64,
    /// The workers' cores.
    pub cores: Vec<usize>,
    /// Whether workers poll without ever sleeping.
    pub polls_busy: bool,
}

impl Needs {
    /// What a configuration asks.
    #[must_use]
    pub fn of(settings: &Settings) -> Self {
        Self {
            devices: settings.ports.iter().flat_map(|port| port.device.parts()).map(|device| device.to_string()).collect(),
            twins: settings.ports.iter().any(|port| port.twin == Twin::Tap),
            hugepages_required: settings.hugepages == Hugepages::Require,
            memory_mb: dpdk::plan(settings).map_or(0, |(eal, _)| eal.memory_mb),
            cores: settings.cores.clone(),
            polls_busy: settings.poll == Poll::Busy,
        }
    }

    fn pci_devices(&self) -> impl Iterator<Item = &str> {
        self.devices.iter().map(String::as_str).filter(|device| !device.starts_with("net_"))
    }

    fn has_device(&self, driver: &str) -> bool {
        self.devices.iter().any(|device| device.starts_with(driver))
    }
}

/// How a finding weighs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// As it should be, or just a fact.
    Ok,
    /// It would be better otherwise.
    Note,
    /// The configuration needs it.
    Missing,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its weight.
    pub level: Level,
    /// What was looked at.
    pub subject: String,
    /// What was found.
    pub found: String,
    /// What to do; empty: nothing.
    pub advice: String,
}

impl Finding {
    fn ok(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self { level: Level::Ok, subject: subject.into(), found: found.into(), advice: String::new() }
    }

    fn note(subject: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Note, subject: subject.into(), found: found.into(), advice: advice.into() }
    }

    fn missing(subject: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Missing, subject: subject.into(), found: found.into(), advice: advice.into() }
    }

    /// Missing if it is needed, else a note.
    fn lacking(needed: bool, subject: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        let level = if needed { Level::Missing } else { Level::Note };
        Self { level, subject: subject.into(), found: found.into(), advice: advice.into() }
    }
}

/// Examines this machine, with the needs of `config` if there is one, and prints the table. True: all that is needed is there.
///
/// # Errors
/// The configuration is wrong, or `out` cannot be written.
pub fn run(config: Option<&Path>, out: &mut impl io::Write) -> Result<bool, DoctorError> {
    let needs = match config {
        // As in `replay`, the source of Services is not asked for: it may be given by a flag of `run`.
        Some(file) => Needs::of(&Settings::read(file, &SourceChoice::Replay("/".into()))?),
        None => Needs::default(),
    };
    let findings = examine(&Root::new("/"), &needs, &dpdk_sys::version(), &refused_cores(&needs.cores));
    print(&findings, out)?;
    Ok(is_ready(&findings))
}

/// The cores to which the kernel pins no thread of this process, each with the reason.
fn refused_cores(cores: &[usize]) -> Vec<(usize, String)> {
    let tried = |id: usize| std::thread::spawn(move || workers::pin(CoreId { id })).join();
    let why = |id| match tried(id) {
        Ok(Err(WorkerError::Refused { source, .. })) => Some(source.to_string()),
        _ => None,
    };
    cores.iter().filter_map(|&core| Some((core, why(core)?))).collect()
}

/// Looks at the machine below `root` (`/`, but for tests) with the needs of a configuration in mind. `refused_cores`: those
/// to which the kernel pins no thread, each with the reason.
#[must_use]
pub fn examine(root: &Root, needs: &Needs, dpdk_version: &str, refused_cores: &[(usize, String)]) -> Vec<Finding> {
    let mut findings = vec![devices::dpdk(root, dpdk_version)];
    findings.extend(memory::examine(root, needs));
    findings.extend(cores::examine(root, needs, refused_cores));
    findings.extend(devices::examine(root, needs));
    findings.extend(network::examine(root, needs));
    findings
}

/// Whether all that the configuration needs is there: exit code 0.
#[must_use]
pub fn is_ready(findings: &[Finding]) -> bool {
    findings.iter().all(|finding| finding.level != Level::Missing)
}

/// Prints the table, advice below the line that it is about, and a last line that sums up.
///
/// # Errors
/// Those of `out`.
pub fn print(findings: &[Finding], out: &mut impl io::Write) -> io::Result<()> {
    let width = findings.iter().map(|finding| finding.subject.len()).max().unwrap_or(0);
    for Finding { level, subject, found, advice } in findings {
        let level = match level {
            Level::Ok => "ok",
            Level::Note => "note",
            Level::Missing => "missing",
        };
        writeln!(out, "{level:<8} {subject:<width$}  {found}")?;
        if !advice.is_empty() {
            writeln!(out, "{:8} {:width$}  -> {advice}", "", "")?;
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    writeln!(out, "missing: {}, notes: {}", count(Level::Missing), count(Level::Note))
}

#[cfg(test)]
mod tests {
    use super::root::tests::Machine;
    use super::*;

    #[test]
    fn a_machine_of_nothing_lacks_only_what_is_needed() {
        let machine = Machine::new(&[]);
        let findings = examine(&machine.root(), &Needs::default(), "DPDK 22.11", &[]);
        assert!(is_ready(&findings), "{findings:?}");
        let needs = Needs { devices: vec!["net_af_packet0,iface=eth1".into()], twins: true, cores: vec![1], ..Needs::default() };
        assert!(!is_ready(&examine(&machine.root(), &needs, "DPDK 22.11", &[])));
    }

    #[test]
    fn needs_are_taken_from_the_configuration() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "ports: [{name: uplink, device: 'net_af_packet0,iface=eth1', addresses: [192.0.2.2/24]}]\n\
                    workers: {cores: [3], poll: busy}\nsnat: {addresses: [192.0.2.3]}\n";
        std::fs::write(file.path(), text).unwrap();
        let needs = Needs::of(&Settings::read(file.path(), &SourceChoice::Replay("/".into())).unwrap());
        assert_eq!(
            (needs.devices.as_slice(), needs.cores.as_slice()),
            (["net_af_packet0,iface=eth1".to_owned()].as_slice(), [3].as_slice())
        );
        assert!(needs.twins && needs.polls_busy && !needs.hugepages_required && needs.memory_mb > 32);
    }

    #[test]
    fn the_members_of_a_bond_are_looked_at_like_ports() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "ports: [{name: uplink, device: 'net_bonding0,mode=1,slave=3b:00.0,slave=3b:00.1', addresses: [192.0.2.2/24]}]\n\
                    workers: {cores: [3]}\nsnat: {addresses: [192.0.2.3]}\n";
        std::fs::write(file.path(), text).unwrap();
        let needs = Needs::of(&Settings::read(file.path(), &SourceChoice::Replay("/".into())).unwrap());
        assert_eq!(needs.devices[1..], ["0000:3b:00.0", "0000:3b:00.1"]);
        let findings = examine(&Machine::new(&[]).root(), &needs, "DPDK 22.11", &[]);
        let of = |subject: &str| findings.iter().find(|f| f.subject == subject).map(|f| (f.level, f.found.as_str()));
        assert_eq!(of("net_bonding0"), Some((Level::Ok, "a bond of 0000:3b:00.0 0000:3b:00.1")));
        assert_eq!(of("0000:3b:00.1"), Some((Level::Missing, "not on the PCI bus")));
        let alone = Needs { devices: vec!["net_bonding0,mode=1,slave=net_tap1".into()], ..Needs::default() };
        let findings = examine(&Machine::new(&[]).root(), &alone, "DPDK 22.11", &[]);
        assert!(findings.iter().any(|f| f.subject == "net_bonding0" && f.level == Level::Note), "{findings:?}");
    }

    #[test]
    fn the_table_puts_advice_below_its_line_and_ends_with_a_sum() {
        let findings = [
            Finding::ok("dpdk", "22.11"),
            Finding::note("cores", "none isolated", "isolate some"),
            Finding::missing("hugepages", "none", "reserve some"),
        ];
        let mut out = Vec::new();
        print(&findings, &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "ok       dpdk       22.11\n\
             note     cores      none isolated\n                    -> isolate some\n\
             missing  hugepages  none\n                    -> reserve some\n\
             missing: 1, notes: 1\n"
        );
    }
}
