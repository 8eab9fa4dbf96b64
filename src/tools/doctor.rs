//! `sluiced doctor`: what this machine has and lacks, and what to do about it.
//!
//! Invariant: the examination only reads, and only below one root directory, so that a test can examine a machine made of
//! files. Facts that only the kernel knows are collected before and passed in. A requirement of the configuration that the
//! machine does not meet is *missing*; a possible improvement is a *note*.
//!
//! Deliberately not here: changing anything, and trying out a device.

mod cores;
mod devices;
mod memory;
mod network;
mod root;

use std::io;
use std::path::Path;

use core_affinity::CoreId;
use dpdk_sys::Device;

pub use root::Root;

use crate::ports::dpdk;
use crate::settings::{Hugepages, Poll, Settings, SourceChoice, Twin};
use crate::workers::{self, WorkerError};

/// Why `doctor` failed.
#[derive(Debug, thiserror::Error)]
pub enum DoctorError {
    /// The configuration is invalid: exit code 2.
    #[error(transparent)]
    Invalid(#[from] control::config::Invalid),
    /// The output could not be written: exit code 1.
    #[error("cannot write the table: {0}")]
    Output(#[from] io::Error),
}

/// Requirements of a configuration. The default requires nothing: `doctor` without a configuration.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    /// The devices of the ports, as configured.
    pub devices: Vec<Device>,
    /// Whether a port has a Linux twin.
    pub twins: bool,
    /// Whether packet memory requires hugepages.
    pub hugepages_required: bool,
    /// Packet memory in MB.
    pub memory_mb: u64,
    /// The workers' cores.
    pub cores: Vec<usize>,
    /// Whether workers poll without ever sleeping.
    pub polls_busy: bool,
}

impl Needs {
    /// The requirements of a configuration.
    #[must_use]
    pub fn of(settings: &Settings) -> Self {
        Self {
            devices: settings.ports.iter().flat_map(|port| port.device.parts()).collect(),
            twins: settings.ports.iter().any(|port| port.twin == Twin::Tap),
            hugepages_required: settings.hugepages == Hugepages::Require,
            memory_mb: dpdk::plan(settings).0.memory_mb,
            cores: settings.cores.clone(),
            polls_busy: settings.poll == Poll::Busy,
        }
    }

    fn has_pci_device(&self) -> bool {
        self.devices.iter().any(Device::is_pci)
    }

    fn has_driver(&self, driver: &str) -> bool {
        self.devices.iter().any(|device| device.has_driver(driver))
    }
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Good, or merely a fact.
    Ok,
    /// It could be better.
    Note,
    /// The configuration needs it.
    Missing,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its severity.
    pub level: Level,
    /// The item.
    pub subject: String,
    /// What was found.
    pub found: String,
    /// What to do; empty if nothing.
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

    /// Missing if it is required, else a note.
    fn lacking(needed: bool, subject: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        let level = if needed { Level::Missing } else { Level::Note };
        Self { level, subject: subject.into(), found: found.into(), advice: advice.into() }
    }
}

/// Examines this machine with the requirements of `config`, if given, and prints the table. Returns whether all requirements
/// are met.
///
/// # Errors
/// The configuration is invalid, or `out` cannot be written.
pub fn run(config: Option<&Path>, out: &mut impl io::Write) -> Result<bool, DoctorError> {
    let needs = match config {
        // As in `replay`, the source of Services is not required: it may be given by a flag of `run`.
        Some(file) => Needs::of(&Settings::read(file, &SourceChoice::Replay("/".into()))?),
        None => Needs::default(),
    };
    let findings = examine(&Root::new("/"), &needs, &dpdk_sys::version(), &refused_cores(&needs.cores));
    print(&findings, out)?;
    Ok(is_ready(&findings))
}

/// The cores to which the kernel refuses to pin threads of this process, each with the reason.
fn refused_cores(cores: &[usize]) -> Vec<(usize, String)> {
    let tried = |id: usize| std::thread::spawn(move || workers::pin(CoreId { id })).join();
    let why = |id| match tried(id) {
        Ok(Err(WorkerError::Refused { source, .. })) => Some(source.to_string()),
        _ => None,
    };
    cores.iter().filter_map(|&core| Some((core, why(core)?))).collect()
}

/// Examines the machine below `root` (`/` except in tests) for the requirements of a configuration. `refused_cores` are those
/// to which the kernel refuses to pin threads, each with the reason.
#[must_use]
pub fn examine(root: &Root, needs: &Needs, dpdk_version: &str, refused_cores: &[(usize, String)]) -> Vec<Finding> {
    let mut findings = vec![devices::dpdk(root, dpdk_version)];
    findings.extend(memory::examine(root, needs));
    findings.extend(cores::examine(root, needs, refused_cores));
    findings.extend(devices::examine(root, needs));
    findings.extend(network::examine(root, needs));
    findings
}

/// Whether all requirements are met: exit code 0.
#[must_use]
pub fn is_ready(findings: &[Finding]) -> bool {
    findings.iter().all(|finding| finding.level != Level::Missing)
}

/// Prints the table, with advice below each line, and a summary.
///
/// # Errors
/// Errors of `out`.
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
        let needs = Needs {
            devices: vec!["net_af_packet0,iface=eth1".parse().unwrap()],
            twins: true,
            cores: vec![1],
            ..Needs::default()
        };
        assert!(!is_ready(&examine(&machine.root(), &needs, "DPDK 22.11", &[])));
    }

    fn texts(needs: &Needs) -> Vec<String> {
        needs.devices.iter().map(Device::to_string).collect()
    }

    #[test]
    fn needs_are_taken_from_the_configuration() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "ports: [{name: uplink, device: 'net_af_packet0,iface=eth1', addresses: [192.0.2.2/24]}]\n\
                    workers: {cores: [3], poll: busy}\nsnat: {addresses: [192.0.2.3]}\n";
        std::fs::write(file.path(), text).unwrap();
        let needs = Needs::of(&Settings::read(file.path(), &SourceChoice::Replay("/".into())).unwrap());
        assert_eq!((texts(&needs), needs.cores.as_slice()), (vec!["net_af_packet0,iface=eth1".to_owned()], [3].as_slice()));
        assert!(needs.twins && needs.polls_busy && !needs.hugepages_required && needs.memory_mb > 32);
    }

    #[test]
    fn the_members_of_a_bond_are_looked_at_like_ports() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "ports: [{name: uplink, device: 'net_bonding0,mode=1,slave=3b:00.0,slave=3b:00.1', addresses: [192.0.2.2/24]}]\n\
                    workers: {cores: [3]}\nsnat: {addresses: [192.0.2.3]}\n";
        std::fs::write(file.path(), text).unwrap();
        let needs = Needs::of(&Settings::read(file.path(), &SourceChoice::Replay("/".into())).unwrap());
        assert_eq!(texts(&needs)[1..], ["0000:3b:00.0", "0000:3b:00.1"]);
        let findings = examine(&Machine::new(&[]).root(), &needs, "DPDK 22.11", &[]);
        let of = |subject: &str| findings.iter().find(|f| f.subject == subject).map(|f| (f.level, f.found.as_str()));
        assert_eq!(of("net_bonding0"), Some((Level::Ok, "a bond of 0000:3b:00.0 0000:3b:00.1")));
        assert_eq!(of("0000:3b:00.1"), Some((Level::Missing, "not on the PCI bus")));
        let alone = Needs { devices: vec!["net_bonding0,mode=1,slave=net_tap1".parse().unwrap()], ..Needs::default() };
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
