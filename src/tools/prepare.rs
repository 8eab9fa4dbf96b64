//! `sluiced prepare`: gives the ports' PCI devices to DPDK and reserves huge pages, as a configuration needs them. Both are
//! lost at a boot: the unit `sluiced-prepare` runs this before the gateway.
//!
//! Invariant: a device whose Linux interface is in use (it has a route, or belongs to a bridge or bond) is left alone,
//! because it may be the way by which an operator is logged in. What is prepared already is not touched.
//!
//! Deliberately not here: which devices can be used, and how much memory is needed (`doctor`).

use std::io;
use std::process::Command;

use dpdk_sys::pci;

use super::doctor::{Needs, Root};
use crate::settings::Settings;

/// Kernel drivers that share their devices with DPDK (`mlx4`, `mlx5`): these keep them.
const SHARING: [&str; 2] = ["mlx4_core", "mlx5_core"];
/// Size of the huge pages that are reserved, KB: the only size that can be reserved after a boot without much luck.
const PAGE_KB: u64 = 2048;
const PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// What was found or done about one need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// It was as it must be.
    Kept(String),
    /// It was changed.
    Done(String),
    /// It could not be changed: why, and what to do.
    Failed(String),
}

/// Prepares this machine for a configuration, and prints a line for each need. Returns whether all are met.
///
/// # Errors
/// `out` cannot be written.
pub fn run(settings: &Settings, driver: &str, out: &mut impl io::Write) -> io::Result<bool> {
    let needs = Needs::of(settings);
    if needs.devices.iter().any(dpdk_sys::Device::is_pci) {
        // Without the module the next steps say what is missing.
        let _ = Command::new("modprobe").args(["--quiet", driver]).status();
    }
    let steps = prepare(&Root::new("/"), &needs, driver);
    for step in &steps {
        match step {
            Step::Kept(text) => writeln!(out, "ok       {text}")?,
            Step::Done(text) => writeln!(out, "done     {text}")?,
            Step::Failed(text) => writeln!(out, "failed   {text}")?,
        }
    }
    Ok(!steps.iter().any(|step| matches!(step, Step::Failed(_))))
}

/// Prepares the machine below `root` (`/` except in tests), with this kernel driver for PCI devices.
#[must_use]
pub fn prepare(root: &Root, needs: &Needs, driver: &str) -> Vec<Step> {
    let devices = needs.devices.iter().filter(|device| device.is_pci());
    let mut steps: Vec<Step> = devices.map(|device| bind(root, &device.port_name(), driver)).collect();
    if needs.hugepages_required || !steps.is_empty() {
        steps.push(reserve(root, needs.memory_mb));
    }
    steps
}

/// Gives a device to a driver. `driver_override` comes first, so that no other driver takes the device in between (Linux,
/// Documentation/ABI/testing/sysfs-bus-pci).
fn bind(root: &Root, address: &str, driver: &str) -> Step {
    let directory = format!("/sys/bus/pci/devices/{address}");
    if !root.exists(&directory) {
        return Step::Kept(format!("{address}: not on the PCI bus; it is bound when this runs after it was plugged in"));
    }
    let before = pci::driver(root.directory(), address);
    match before.as_deref() {
        Some(now) if now == driver => return Step::Kept(format!("{address}: bound to {driver}")),
        Some(now) if SHARING.contains(&now) => return Step::Kept(format!("{address}: {now} shares it with DPDK")),
        _ => {}
    }
    if let Some((interface, use_)) = interfaces(root, &directory).into_iter().find_map(|name| in_use(root, name)) {
        return Step::Failed(format!(
            "{address}: its interface {interface} {use_}; take it out of use (`ip addr flush dev {interface}`) or choose \
             another port"
        ));
    }
    let written = (|| {
        root.write(&format!("{directory}/driver_override"), driver)?;
        if before.is_some() {
            root.write(&format!("{directory}/driver/unbind"), address)?;
        }
        root.write("/sys/bus/pci/drivers_probe", address)
    })();
    match (written, pci::driver(root.directory(), address)) {
        (Ok(()), Some(now)) if now == driver => {
            let before = before.map(|name| format!(", before to {name}")).unwrap_or_default();
            Step::Done(format!("{address}: bound to {driver}{before}"))
        }
        (Err(error), _) => Step::Failed(format!("{address}: cannot be bound to {driver}: {error}")),
        (Ok(()), now) => {
            let now = now.map_or_else(|| "no driver".to_owned(), |name| format!("driver {name}"));
            Step::Failed(format!(
                "{address}: {driver} does not take it, it has {now}; `dmesg | tail` says why, `sluiced doctor --config F` \
                 what the machine lacks (vfio-pci needs an IOMMU, or its mode without one)"
            ))
        }
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
    if let Some(master) = root.link(&format!("/sys/class/net/{name}/master")) {
        return Some((name, format!("belongs to {master}")));
    }
    // A route for each IPv4 prefix, and each IPv6 address.
    if has("/proc/net/route", 0) || has("/proc/net/if_inet6", 5) {
        return Some((name, "has addresses or routes".to_owned()));
    }
    None
}

/// Reserves as many huge pages as `megabytes` still need.
fn reserve(root: &Root, megabytes: u64) -> Step {
    let read = |name: &str| root.number::<u64>(&format!("{PAGES}/{name}")).unwrap_or(0);
    let wanted = (megabytes * 1024).div_ceil(PAGE_KB);
    let (free, total) = (read("free_hugepages"), read("nr_hugepages"));
    if free >= wanted {
        return Step::Kept(format!("huge pages: {free} of 2 MB are free, {wanted} are needed"));
    }
    let asked = total + wanted - free;
    if let Err(error) = root.write(&format!("{PAGES}/nr_hugepages"), &asked.to_string()) {
        return Step::Failed(format!("huge pages: {wanted} of 2 MB are needed, and cannot be reserved: {error}"));
    }
    let now = read("nr_hugepages");
    if now < asked {
        return Step::Failed(format!(
            "huge pages: {asked} of 2 MB were asked for, memory in one piece was left for {now}; reserve them by the kernel's \
             command line: hugepages={asked}"
        ));
    }
    Step::Done(format!("huge pages: {asked} of 2 MB, before {total}"))
}

#[cfg(test)]
mod tests {
    use super::super::doctor::Machine;
    use super::*;

    const DEVICE: &str = "/sys/bus/pci/devices/0000:3b:00.0";

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
            ("/sys/bus/pci/drivers/igb/unbind", ""),
            ("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "10\n"),
            ("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "4\n"),
        ];
        files.extend_from_slice(more);
        Machine::new(&files)
    }

    fn needs(memory_mb: u64) -> Needs {
        Needs { devices: vec!["0000:3b:00.0".parse().unwrap()], memory_mb, ..Needs::default() }
    }

    fn text(step: &Step) -> &str {
        let (Step::Kept(text) | Step::Done(text) | Step::Failed(text)) = step;
        text
    }

    #[test]
    fn what_is_prepared_already_is_kept() {
        let machine = machine("vfio-pci", &[]);
        let steps = prepare(&machine.root(), &needs(8), "vfio-pci");
        assert!(steps.iter().all(|step| matches!(step, Step::Kept(_))), "{steps:?}");
        assert_eq!(machine.root().text(&format!("{DEVICE}/driver_override")).as_deref(), Some("(null)"));
        let shared = prepare(&super::tests::machine("mlx5_core", &[]).root(), &needs(8), "vfio-pci");
        assert_eq!(text(&shared[0]), "0000:3b:00.0: mlx5_core shares it with DPDK");
    }

    #[test]
    fn an_interface_in_use_is_left_alone() {
        let route = "Iface Destination Gateway\neth7 00000000 010200C0 0003\n";
        let address = "20010db8000000000000000000000002 02 40 00 80 eth7\n";
        for more in [("/proc/net/route", route), ("/proc/net/if_inet6", address), ("/sys/class/net/eth7/master", "-> ../br0")] {
            let machine = machine("igb", &[more]);
            let steps = prepare(&machine.root(), &needs(8), "vfio-pci");
            assert!(matches!(&steps[0], Step::Failed(why) if why.contains("its interface eth7 ")), "{steps:?}");
            assert_eq!(machine.root().text(&format!("{DEVICE}/driver_override")).as_deref(), Some("(null)"));
        }
        let local = machine("igb", &[("/proc/net/if_inet6", "fe80000000000000000000000000beef 02 40 20 80 eth7\n")]);
        let steps = prepare(&local.root(), &needs(8), "vfio-pci");
        assert!(!text(&steps[0]).contains("eth7"), "a link-local address is no use: {steps:?}");
    }

    #[test]
    fn the_override_comes_first_and_a_driver_that_refuses_is_named() {
        let machine = machine("igb", &[]);
        let steps = prepare(&machine.root(), &needs(8), "vfio-pci");
        assert!(text(&steps[0]).starts_with("0000:3b:00.0: vfio-pci does not take it, it has driver igb"), "{steps:?}");
        let root = machine.root();
        assert_eq!(root.text(&format!("{DEVICE}/driver_override")).as_deref(), Some("vfio-pci"));
        assert_eq!(root.text("/sys/bus/pci/drivers/igb/unbind").as_deref(), Some("0000:3b:00.0"));
        assert_eq!(root.text("/sys/bus/pci/drivers_probe").as_deref(), Some("0000:3b:00.0"));
    }

    #[test]
    fn huge_pages_that_others_use_are_not_counted() {
        let machine = machine("vfio-pci", &[]);
        let steps = prepare(&machine.root(), &needs(100), "vfio-pci");
        assert_eq!(steps[1], Step::Done("huge pages: 56 of 2 MB, before 10".into()));
        let none =
            prepare(&Machine::new(&[]).root(), &Needs { hugepages_required: true, memory_mb: 8, ..Needs::default() }, "vfio-pci");
        assert!(matches!(&none[..], [Step::Failed(_)]), "{none:?}");
    }

    #[test]
    fn a_configuration_of_vdevs_needs_nothing_and_a_device_that_is_absent_waits() {
        let vdevs = Needs { devices: vec!["net_null0".parse().unwrap()], memory_mb: 100, ..Needs::default() };
        assert_eq!(prepare(&Machine::new(&[]).root(), &vdevs, "vfio-pci"), []);
        let steps = prepare(&Machine::new(&[]).root(), &needs(0), "vfio-pci");
        assert!(matches!(&steps[0], Step::Kept(text) if text.contains("not on the PCI bus")), "{steps:?}");
    }
}
