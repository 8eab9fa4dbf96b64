//! `sluiced doctor`: findings about this machine, each with its remedy.
//!
//! Invariant: the examination only reads, and only below one root directory, so that a test can examine a machine made
//! of files. Facts that only the kernel knows are collected before and passed in. A requirement of the configuration
//! that the machine does not meet is *missing*; a possible improvement is a *note*.
//!
//! Deliberately not here: changing anything, and trying out a device.

mod cores;
mod devices;
mod finding;
mod memory;
mod network;
mod unit;

use std::io;

use core_affinity::CoreId;

pub use finding::{Finding, Level, is_ready, print};

use crate::machine::{Needs, Root};
use crate::settings::Settings;
use crate::worker_threads::{self, WorkerError};

/// Examines this machine with the requirements of a configuration, if given, and prints the table with `named`, what was
/// found about what the configuration names. Returns whether all requirements are met.
///
/// # Errors
/// `out` cannot be written.
pub fn run(settings: Option<&Settings>, named: Vec<Finding>, out: &mut impl io::Write) -> io::Result<bool> {
    let needs = settings.map(Needs::of).unwrap_or_default();
    let mut findings = examine(&Root::new("/"), &needs, &dpdk_sys::version(), &refused_cores(&needs.cores));
    findings.extend(named);
    print(&findings, out)?;
    Ok(is_ready(&findings))
}

/// The cores to which the kernel refuses to pin threads of this process, each with the reason.
fn refused_cores(cores: &[usize]) -> Vec<(usize, String)> {
    let tried = |id: usize| std::thread::spawn(move || worker_threads::pin(CoreId { id })).join();
    let why = |id| match tried(id) {
        Ok(Err(WorkerError::Refused { source, .. })) => Some(source.to_string()),
        _ => None,
    };
    cores.iter().filter_map(|&core| Some((core, why(core)?))).collect()
}

/// Examines the machine below `root` (`/` except in tests) for the requirements of a configuration. `refused_cores` are
/// those to which the kernel refuses to pin threads, each with the reason.
#[must_use]
pub fn examine(root: &Root, needs: &Needs, dpdk_version: &str, refused_cores: &[(usize, String)]) -> Vec<Finding> {
    let mut findings = vec![devices::dpdk(root, dpdk_version)];
    findings.extend(memory::examine(root, needs));
    findings.extend(cores::examine(root, needs, refused_cores));
    findings.extend(devices::examine(root, needs));
    findings.extend(network::examine(root, needs));
    findings
}

#[cfg(test)]
mod tests {
    use dpdk_sys::Device;

    use super::*;
    use crate::machine::Machine;
    use crate::settings::SourceChoice;

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

    #[test]
    fn a_service_tag_over_af_packet_is_missing_and_over_tap_it_is_not() {
        let findings = |device: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let text = format!(
                "ports: [{{name: uplink, device: '{device}', addresses: [192.0.2.2/24]}}]\n\
                 static: {{links: [{{port: uplink, tags: [802.1ad:7, 200], addresses: [10.9.0.2/24]}}]}}\n\
                 workers: {{cores: [3]}}\nsnat: {{addresses: [192.0.2.3]}}\n"
            );
            std::fs::write(file.path(), text).unwrap();
            let needs = Needs::of(&Settings::read(file.path(), &SourceChoice::Replay("/".into())).unwrap());
            examine(&Machine::new(&[]).root(), &needs, "DPDK 22.11", &[])
        };
        let level = |device: &str| findings(device).into_iter().find(|f| f.subject == "link of uplink").map(|f| f.level);
        assert_eq!(level("net_af_packet0,iface=eth1"), Some(Level::Missing));
        assert_eq!(level("net_tap0"), None);
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
}
