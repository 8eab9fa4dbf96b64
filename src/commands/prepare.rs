//! `sluiced prepare`: gives the ports' PCI devices to DPDK and reserves huge pages, as a configuration needs them. Both are
//! lost at a boot: the unit `sluiced-prepare` runs this before the gateway.
//!
//! Invariants: a device whose Linux interface is in use (it has a route, or carries a VLAN, bridge or bond) is left alone,
//! because it may be the way by which an operator is logged in. At a boot no interface is in use yet: then only devices are
//! bound that a run by hand has bound or kept (decision 113). A device that DPDK can take is not touched, and one that cannot
//! be bound is given back to Linux.
//!
//! Deliberately not here: which devices can be used, and how much memory is needed (`doctor`).

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::process::Command;

use dpdk_sys::pci::{self, Verdict};

use crate::commands::cli::{DRIVERS, PrepareArgs};
use crate::machine::{Needs, Root};
use crate::settings::Settings;

mod memory;
mod step;

pub use step::PrepareStep;

/// The file in `stateDir` with the devices that are bound at a boot.
const LIST: &str = "prepared-devices";
/// First line of the list.
const TITLE: &str = "# PCI devices that `sluiced prepare --boot` binds, each with its driver. Written by `sluiced prepare`.\n";

/// What is to be prepared, and how.
#[derive(Clone, Copy, Debug)]
pub struct Preparation<'a> {
    /// What the configuration needs.
    pub needs: &'a Needs,
    /// The file of the configuration, by which a running gateway of it is known.
    pub config: &'a Path,
    /// The directory with the list of devices that are bound at a boot.
    pub state_dir: &'a Path,
    /// The kernel driver that was asked for. None: the first of [`DRIVERS`], and what DPDK can take keeps its driver.
    pub driver: Option<&'a str>,
    /// Whether only devices of the list are bound, by the driver in it.
    pub boot: bool,
}

/// Prepares this machine for a configuration, and prints a line for each need. Returns whether all are met.
///
/// # Errors
/// `out` cannot be written.
pub fn run(settings: &Settings, args: &PrepareArgs, out: &mut impl io::Write) -> io::Result<bool> {
    let needs = Needs::of(settings);
    let PrepareArgs { config, driver, boot } = args;
    let preparation =
        Preparation { needs: &needs, config, state_dir: &settings.state_dir, driver: driver.as_deref(), boot: *boot };
    let load = |driver: &str| {
        // Without the driver the next step says so.
        let _ = Command::new("modprobe").args(["--quiet", driver]).status();
    };
    let steps = preparation.prepare(&Root::new("/"), &load);
    for step in &steps {
        writeln!(out, "{step}")?;
    }
    Ok(!steps.iter().any(|step| matches!(step, PrepareStep::Failed(_))))
}

impl Preparation<'_> {
    /// Prepares the machine below `root` (`/` except in tests). `load` loads a driver into the kernel.
    #[must_use]
    pub fn prepare(&self, root: &Root, load: &dyn Fn(&str)) -> Vec<PrepareStep> {
        let listed = self.listed(root);
        let mut next = BTreeMap::new();
        let mut steps = Vec::new();
        for device in self.needs.devices.iter().filter(|device| device.is_pci()) {
            let address = device.port_name();
            let before = listed.get(&address).map(String::as_str);
            let step = self.bind(root, &address, before, load);
            if !matches!(step, PrepareStep::Failed(_)) {
                // An absent device stays in the list, and does not come into it.
                let driver = pci::driver(root.directory(), &address).or_else(|| before.map(str::to_owned));
                next.extend(driver.map(|driver| (address, driver)));
            }
            steps.push(step);
        }
        if self.needs.hugepages_required || !steps.is_empty() {
            steps.push(memory::reserve(root, self.needs, self.config));
        }
        if !self.boot && next != listed {
            steps.push(self.list(root, &next));
        }
        steps
    }

    fn list_file(&self) -> String {
        self.state_dir.join(LIST).display().to_string()
    }

    /// The devices that are bound at a boot, with their drivers.
    fn listed(&self, root: &Root) -> BTreeMap<String, String> {
        let text = root.text(&self.list_file()).unwrap_or_default();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.filter_map(|line| line.split_once(' ')).map(|(address, driver)| (address.to_owned(), driver.to_owned())).collect()
    }

    fn list(&self, root: &Root, devices: &BTreeMap<String, String>) -> PrepareStep {
        let file = self.list_file();
        let lines: String = devices.iter().map(|(address, driver)| format!("{address} {driver}\n")).collect();
        let names: Vec<&str> = devices.keys().map(String::as_str).collect();
        let names = if names.is_empty() { "none".to_owned() } else { names.join(" ") };
        match root.replace(&file, &format!("{TITLE}{lines}")) {
            Ok(()) => PrepareStep::Done(format!("devices that sluiced-prepare.service binds: {names} ({file})")),
            Err(error) => PrepareStep::Failed(format!(
                "{file}: cannot be written, so sluiced-prepare.service does not bind {names}: {error}"
            )),
        }
    }

    /// Gives a device to a driver; `listed` is the one in the list.
    fn bind(&self, root: &Root, address: &str, listed: Option<&str>, load: &dyn Fn(&str)) -> PrepareStep {
        let directory = format!("/sys/bus/pci/devices/{address}");
        if !root.exists(&directory) {
            return PrepareStep::Kept(format!("{address}: not on the PCI bus; run this again once it is plugged in"));
        }
        let before = pci::driver(root.directory(), address);
        let Verdict { is_usable, found, advice } = pci::judge(root.directory(), address);
        let hands_over = before.as_deref().is_some_and(|before| DRIVERS.contains(&before));
        let is_other = hands_over && self.driver.is_some() && self.driver != before.as_deref();
        if is_usable && !is_other {
            return PrepareStep::Kept(format!("{address}: {found}"));
        }
        let driver = match (self.boot, listed) {
            (false, _) => self.driver.unwrap_or(DRIVERS[0]),
            (true, Some(driver)) => driver,
            (true, None) => {
                return PrepareStep::Failed(format!(
                    "{address}: it is {found}, and no run by hand has bound it; run `sluiced prepare` once, which leaves an \
                     interface in use alone"
                ));
            }
        };
        if before.as_deref() == Some(driver) {
            return PrepareStep::Failed(format!("{address}: {found}; {advice}"));
        }
        if let Some((interface, use_)) = interfaces(root, &directory).into_iter().find_map(|name| in_use(root, name)) {
            return PrepareStep::Failed(format!(
                "{address}: its interface {interface} {use_}; take it out of use (`ip addr flush dev {interface}`, `ip link`), \
                 or choose another port"
            ));
        }
        load(driver);
        if !root.exists(&format!("/sys/bus/pci/drivers/{driver}")) {
            return PrepareStep::Failed(format!("{address}: the kernel has no driver {driver}; `modprobe {driver}` says why"));
        }
        hand_over(root, address, before, driver)
    }
}

/// Takes a device from its driver and gives it to another one, or back if that does not take it. `driver_override` comes
/// first, so that no other driver takes the device in between (Linux, Documentation/ABI/testing/sysfs-bus-pci).
fn hand_over(root: &Root, address: &str, before: Option<String>, driver: &str) -> PrepareStep {
    let directory = format!("/sys/bus/pci/devices/{address}");
    let probe = |driver: &str| {
        root.write(&format!("{directory}/driver_override"), driver)?;
        if pci::driver(root.directory(), address).is_some_and(|now| now != driver) {
            root.write(&format!("{directory}/driver/unbind"), address)?;
        }
        root.write("/sys/bus/pci/drivers_probe", address)
    };
    let (written, now) = (probe(driver), pci::driver(root.directory(), address));
    if written.is_ok() && now.as_deref() == Some(driver) {
        let before = before.map(|name| format!(", before to {name}")).unwrap_or_default();
        return PrepareStep::Done(format!("{address}: bound to {driver}{before}"));
    }
    let why = match written {
        Err(error) => format!("cannot be bound to {driver}: {error}"),
        Ok(()) => format!(
            "{driver} does not take it; `dmesg | tail` says why, `sluiced doctor --config F` what the machine lacks (vfio-pci \
             needs an IOMMU, or its mode without one)"
        ),
    };
    give_back(root, address, before.as_deref());
    let now = pci::driver(root.directory(), address).map_or_else(|| "no driver".to_owned(), |name| format!("driver {name}"));
    PrepareStep::Failed(format!("{address}: {why}; it has {now} now"))
}

/// Lets the kernel choose a driver again. Those for DPDK take only what is overridden.
fn give_back(root: &Root, address: &str, before: Option<&str>) {
    let override_ = before.filter(|before| DRIVERS.contains(before)).unwrap_or("\n");
    let directory = format!("/sys/bus/pci/devices/{address}");
    // The error of the first attempt says more.
    let _ = root.write(&format!("{directory}/driver_override"), override_);
    if pci::driver(root.directory(), address).is_none() {
        let _ = root.write("/sys/bus/pci/drivers_probe", address);
    }
}

/// The Linux interfaces of a device; those of virtio devices are a level deeper.
fn interfaces(root: &Root, directory: &str) -> Vec<String> {
    let deeper = root.names(directory).into_iter().filter(|name| name.starts_with("virtio"));
    let mut names: Vec<String> = deeper.flat_map(|name| root.names(&format!("{directory}/{name}/net"))).collect();
    names.extend(root.names(&format!("{directory}/net")));
    names
}

/// How an interface is in use, if it is.
fn in_use(root: &Root, name: String) -> Option<(String, String)> {
    let has = |file: &str, column: usize| {
        let text = root.text(file).unwrap_or_default();
        text.lines().any(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let is_link_local = words.first().is_some_and(|address| address.starts_with("fe80"));
            words.get(column) == Some(&name.as_str()) && !is_link_local
        })
    };
    // A bridge, bond, VLAN, macvlan or ipvlan.
    let above = root.names(&format!("/sys/class/net/{name}"));
    if let Some(upper) = above.iter().find_map(|entry| entry.strip_prefix("upper_")) {
        return Some((name, format!("carries {upper}")));
    }
    // A route for each IPv4 prefix, and each IPv6 address.
    if has("/proc/net/route", 0) || has("/proc/net/if_inet6", 5) {
        return Some((name, "has addresses or routes".to_owned()));
    }
    has("/proc/net/pppoe", 2).then(|| (name.clone(), "carries PPPoE".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;

    const DEVICE: &str = "/sys/bus/pci/devices/0000:3b:00.0";
    const LISTED: &str = "/var/lib/sluice/prepared-devices";
    const IOMMU: (&str, &str) = ("/sys/bus/pci/devices/0000:3b:00.0/iommu_group", "-> ../../../kernel/iommu_groups/1");

    /// A machine with a device of a driver, and more files. Its kernel binds nothing: what is written stays in files.
    fn machine(driver: &str, more: &[(&str, &str)]) -> Machine {
        let device = |file: &str| format!("{DEVICE}/{file}");
        let driver = format!("-> ../../../../bus/pci/drivers/{driver}");
        let (override_, link, interface) = (device("driver_override"), device("driver"), device("net/eth7/mtu"));
        let mut files: Vec<(&str, &str)> = vec![
            (&override_, "(null)\n"),
            (&link, &driver),
            (&interface, "1500\n"),
            ("/sys/bus/pci/drivers_probe", ""),
            ("/sys/bus/pci/drivers/vfio-pci/unbind", ""),
            ("/sys/bus/pci/drivers/uio_pci_generic/unbind", ""),
            ("/sys/bus/pci/drivers/igb/unbind", ""),
            ("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "10\n"),
            ("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "4\n"),
        ];
        files.extend_from_slice(more);
        Machine::new(&files)
    }

    fn needs() -> Needs {
        Needs { devices: vec!["0000:3b:00.0".parse().unwrap()], memory_mb: 8, ..Needs::default() }
    }

    /// The steps by hand or at a boot.
    fn prepare(machine: &Machine, driver: Option<&str>, boot: bool) -> Vec<PrepareStep> {
        let (config, state_dir) = (Path::new("/etc/sluice/sluice.yaml"), Path::new("/var/lib/sluice"));
        Preparation { needs: &needs(), config, state_dir, driver, boot }.prepare(&machine.root(), &|_| {})
    }

    fn by_hand(machine: &Machine) -> Vec<PrepareStep> {
        prepare(machine, None, false)
    }

    fn text(step: &PrepareStep) -> &str {
        let (PrepareStep::Kept(text) | PrepareStep::Done(text) | PrepareStep::Failed(text)) = step;
        text
    }

    fn override_of(machine: &Machine) -> String {
        machine.root().text(&format!("{DEVICE}/driver_override")).unwrap()
    }

    #[test]
    fn a_device_that_dpdk_can_take_keeps_its_driver() {
        for driver in ["vfio-pci", "uio_pci_generic", "igb_uio", "mlx5_core"] {
            let machine = machine(driver, &[]);
            let steps = by_hand(&machine);
            assert!(matches!(&steps[0], PrepareStep::Kept(text) if text.contains(driver)), "{steps:?}");
            assert_eq!(override_of(&machine), "(null)");
        }
        let uio = machine("uio_pci_generic", &[]);
        let steps = prepare(&uio, Some("vfio-pci"), false);
        assert!(text(&steps[0]).starts_with("0000:3b:00.0: vfio-pci does not take it"), "another one was asked for: {steps:?}");
        let shared = machine("mlx5_core", &[]);
        assert!(
            matches!(prepare(&shared, Some("vfio-pci"), false)[0], PrepareStep::Kept(_)),
            "DPDK takes it by its own driver only"
        );
        let translated = machine("uio_pci_generic", &[IOMMU, ("/sys/kernel/iommu_groups/1/type", "DMA\n")]);
        let steps = prepare(&translated, Some("uio_pci_generic"), false);
        assert!(matches!(&steps[0], PrepareStep::Failed(why) if why.contains("iommu=pt")), "{steps:?}");
    }

    #[test]
    fn an_interface_in_use_is_left_alone() {
        let route = "Iface Destination Gateway\neth7 00000000 010200C0 0003\n";
        let address = "20010db8000000000000000000000002 02 40 00 80 eth7\n";
        let pppoe = "Id       Address              Device\n00000001 02:00:00:00:00:01     eth7\n";
        let uses = [
            ("/proc/net/route", route),
            ("/proc/net/if_inet6", address),
            ("/proc/net/pppoe", pppoe),
            ("/sys/class/net/eth7/upper_br0", "-> ../br0"),
            ("/sys/class/net/eth7/upper_eth7.100", "-> ../eth7.100"),
        ];
        for more in uses {
            for boot in [false, true] {
                let machine = machine("igb", &[more, (LISTED, "0000:3b:00.0 vfio-pci\n")]);
                let steps = prepare(&machine, None, boot);
                assert!(matches!(&steps[0], PrepareStep::Failed(why) if why.contains("its interface eth7 ")), "{steps:?}");
                assert_eq!(override_of(&machine), "(null)");
            }
        }
        let local = machine("igb", &[("/proc/net/if_inet6", "fe80000000000000000000000000beef 02 40 20 80 eth7\n")]);
        let steps = by_hand(&local);
        assert!(!text(&steps[0]).contains("eth7"), "a link-local address is no use: {steps:?}");
    }

    #[test]
    fn the_override_comes_first() {
        let machine = machine("igb", &[]);
        std::fs::remove_file(machine.root().directory().join(DEVICE.trim_start_matches('/')).join("driver_override")).unwrap();
        let steps = by_hand(&machine);
        assert!(matches!(&steps[0], PrepareStep::Failed(why) if why.contains("driver_override")), "{steps:?}");
        assert_eq!(machine.root().text("/sys/bus/pci/drivers/igb/unbind").as_deref(), Some(""), "it keeps its driver");
    }

    #[test]
    fn a_device_that_cannot_be_bound_is_given_back() {
        let linux = machine("igb", &[]);
        let steps = by_hand(&linux);
        let why = "0000:3b:00.0: vfio-pci does not take it; ";
        assert!(matches!(&steps[0], PrepareStep::Failed(text) if text.starts_with(why) && text.ends_with("has driver igb now")));
        assert_eq!(linux.root().text("/sys/bus/pci/drivers/igb/unbind").as_deref(), Some("0000:3b:00.0"));
        assert_eq!(linux.root().text("/sys/bus/pci/drivers_probe").as_deref(), Some("0000:3b:00.0"));
        assert_eq!(override_of(&linux), "", "Linux chooses");
        let uio = machine("uio_pci_generic", &[]);
        prepare(&uio, Some("vfio-pci"), false);
        assert_eq!(override_of(&uio), "uio_pci_generic", "that driver takes only what is overridden");
        let untouched = machine("igb", &[]);
        let steps = prepare(&untouched, Some("igb_uio"), false);
        assert_eq!(text(&steps[0]), "0000:3b:00.0: the kernel has no driver igb_uio; `modprobe igb_uio` says why");
        assert_eq!(override_of(&untouched), "(null)");
    }

    #[test]
    fn a_boot_binds_only_what_a_run_by_hand_has_bound_or_kept() {
        let unknown = machine("igb", &[(LISTED, "0000:3b:00.1 vfio-pci\n")]);
        let steps = prepare(&unknown, None, true);
        assert!(matches!(&steps[0], PrepareStep::Failed(why) if why.contains("run `sluiced prepare` once")), "{steps:?}");
        assert_eq!(override_of(&unknown), "(null)");
        assert_eq!(unknown.root().text(LISTED).as_deref(), Some("0000:3b:00.1 vfio-pci"), "a boot approves nothing");

        let bound = machine("uio_pci_generic", &[(LISTED, "0000:3b:00.1 vfio-pci\n")]);
        assert!(matches!(&by_hand(&bound)[2], PrepareStep::Done(text) if text.contains(": 0000:3b:00.0 (")));
        let list = bound.root().text(LISTED).unwrap();
        assert!(list.ends_with("\n0000:3b:00.0 uio_pci_generic") && !list.contains("00.1"), "{list}");
        assert_eq!(by_hand(&bound).len(), 2, "the list is as it must be");

        let booted = machine("igb", &[(LISTED, &list)]);
        let steps = prepare(&booted, None, true);
        assert!(text(&steps[0]).starts_with("0000:3b:00.0: uio_pci_generic does not take it"), "tried by the same: {steps:?}");
        let failed = by_hand(&booted);
        assert!(matches!(&failed[2], PrepareStep::Done(text) if text.contains(": none (")), "not bound any longer: {failed:?}");
    }

    #[test]
    fn an_absent_device_waits_and_comes_into_no_list() {
        for listed in [None, Some("0000:3b:00.0 vfio-pci\n")] {
            let files: Vec<_> = listed.iter().map(|listed| (LISTED, *listed)).collect();
            let machine = Machine::new(&files);
            let steps = by_hand(&machine);
            assert!(matches!(&steps[0], PrepareStep::Kept(text) if text.contains("not on the PCI bus")), "{steps:?}");
            assert_eq!((steps.len(), machine.root().text(LISTED)), (2, listed.map(|listed| listed.trim_end().to_owned())));
        }
    }

    #[test]
    fn a_configuration_of_vdevs_needs_nothing() {
        let needs = Needs { devices: vec!["net_null0".parse().unwrap()], memory_mb: 100, ..Needs::default() };
        let preparation =
            Preparation { needs: &needs, config: Path::new("F"), state_dir: Path::new("/S"), driver: None, boot: false };
        assert_eq!(preparation.prepare(&Machine::new(&[]).root(), &|_| {}), []);
    }
}
