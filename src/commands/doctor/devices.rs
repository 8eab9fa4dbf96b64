//! The ports' devices: kernel drivers, VFIO and IOMMU, NUMA nodes, interfaces; and the machine's other network devices.

use dpdk_sys::Device;
use dpdk_sys::pci::{self, NoIommuMode, Verdict};

use super::finding::Finding;
use super::unit;
use crate::machine::{Needs, Root, show_list};

/// Directories into which distributions and `ninja install` put DPDK's drivers.
const LIBRARY_DIRS: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu/dpdk",
    "/usr/lib/aarch64-linux-gnu/dpdk",
    "/usr/lib64/dpdk",
    "/usr/lib/dpdk",
    "/usr/local/lib/x86_64-linux-gnu/dpdk",
    "/usr/local/lib/aarch64-linux-gnu/dpdk",
    "/usr/local/lib64/dpdk",
    "/usr/local/lib/dpdk",
];

/// DPDK's version and the directory of its drivers.
pub(super) fn dpdk(root: &Root, version: &str) -> Finding {
    let dirs: Vec<String> = LIBRARY_DIRS
        .iter()
        .flat_map(|parent| root.names(parent).into_iter().map(move |name| format!("{parent}/{name}")))
        .filter(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with("pmds-")))
        .collect();
    if dirs.is_empty() {
        let advice = "fine if DPDK is linked statically; else install its drivers (Debian: apt-get install dpdk)";
        return Finding::note("dpdk", format!("{version}, no directory of drivers found"), advice);
    }
    Finding::ok("dpdk", format!("{version}, drivers in {}", dirs.join(" ")))
}

pub(super) fn examine(root: &Root, needs: &Needs) -> Vec<Finding> {
    let mut findings = Vec::new();
    for device in &needs.devices {
        if device.is_pci() {
            findings.extend(on_pci(root, needs, &device.port_name()));
        } else if device.is_bond() {
            findings.push(bond(device));
        } else {
            findings.extend(over_interface(root, device));
        }
    }
    findings.extend(needs.changed_tags.iter().map(|(port, tags)| {
        let found = format!("tags {tags}: the driver of af_packet replaces an outer 802.1ad tag by 802.1Q, so no frame arrives");
        Finding::missing(format!("link of {port}"), found, "use 802.1Q tags, or a port of another driver")
    }));
    findings.extend([vfio(root, needs), iommu(root, needs)]);
    findings.extend(unit::examine(root, needs));
    findings.extend(network_devices(root));
    findings
}

fn bond(device: &Device) -> Finding {
    let names: Vec<String> = device.members().iter().map(Device::port_name).collect();
    let found = format!("a bond of {}", names.join(" "));
    if names.len() > 1 {
        return Finding::ok(device.port_name(), found);
    }
    Finding::note(device.port_name(), found, "with a second member it would survive the loss of one")
}

fn over_interface(root: &Root, device: &Device) -> Vec<Finding> {
    let family = match device {
        _ if device.has_driver("net_af_packet") => "PACKET",
        _ if device.has_driver("net_af_xdp") => "XDP",
        _ => return Vec::new(),
    };
    let subject = device.port_name();
    let mut findings = Vec::new();
    // Sockets of a family that is a module not loaded yet are not listed, so this is only a note.
    let listed = root.text("/proc/net/protocols").unwrap_or_default();
    if !listed.lines().any(|line| line.split_whitespace().next() == Some(family)) {
        let advice = format!("the kernel needs AF_{family} sockets, built in or as a module");
        findings.push(Finding::note(subject.clone(), format!("AF_{family} is not among the kernel's protocols"), advice));
    }
    findings.push(match device.interface() {
        None => Finding::missing(subject.clone(), "no interface given", format!("write {subject},iface=NAME")),
        Some(name) if root.exists(&format!("/sys/class/net/{name}")) => Finding::ok(subject, format!("interface {name}")),
        Some(name) => Finding::missing(subject, format!("interface {name} does not exist"), "see `ip link`"),
    });
    findings
}

fn on_pci(root: &Root, needs: &Needs, address: &str) -> Vec<Finding> {
    let Verdict { is_usable, found, advice } = pci::judge(root.directory(), address);
    let bound = if is_usable { Finding::ok(address, found) } else { Finding::missing(address, found, advice) };
    let mut findings = vec![bound];
    findings.extend(numa(root, needs, address, &format!("/sys/bus/pci/devices/{address}")));
    findings
}

/// Access to memory and cores of another node is a third slower.
fn numa(root: &Root, needs: &Needs, address: &str, directory: &str) -> Option<Finding> {
    let node: usize = root.number(&format!("{directory}/numa_node"))?;
    let near = root.list(&format!("/sys/devices/system/node/node{node}/cpulist"));
    let far: Vec<usize> = needs.cores.iter().copied().filter(|core| !near.contains(core)).collect();
    let subject = format!("{address} NUMA");
    if far.is_empty() {
        return Some(Finding::ok(subject, format!("node {node}")));
    }
    let found = format!("node {node}; of the workers' cores {} on another", show_list(&far));
    Some(Finding::note(subject, found, format!("choose from {}", show_list(&near))))
}

/// Whether a port's device comes by VFIO, or would if it were bound as `doctor` advises.
fn needs_vfio(root: &Root, needs: &Needs) -> bool {
    needs.devices.iter().any(|device| device.is_pci() && pci::needs_vfio(root.directory(), &device.port_name()))
}

fn vfio(root: &Root, needs: &Needs) -> Finding {
    if root.exists("/dev/vfio/vfio") {
        return Finding::ok("vfio", "/dev/vfio/vfio");
    }
    Finding::lacking(needs_vfio(root, needs), "vfio", "no /dev/vfio/vfio", "for PCI ports: modprobe vfio-pci")
}

/// Only VFIO needs an IOMMU, unless its mode without one is on.
fn iommu(root: &Root, needs: &Needs) -> Finding {
    if pci::has_iommu(root.directory()) {
        return Finding::ok("iommu", "on");
    }
    let advice = pci::without_iommu(root.directory());
    let is_needed = needs_vfio(root, needs) && pci::no_iommu_mode(root.directory()) != NoIommuMode::On;
    if needs.has_pci_device() && !is_needed {
        return Finding::note("iommu", "off; the ports' devices do without", advice);
    }
    Finding::lacking(is_needed, "iommu", "off", format!("for PCI ports: {advice}"))
}

/// Every network device on the PCI bus, as candidates for ports.
fn network_devices(root: &Root) -> Vec<Finding> {
    let on_pci = |address: &String| {
        root.text(&format!("/sys/bus/pci/devices/{address}/class")).is_some_and(|class| class.starts_with("0x02"))
    };
    let describe = |address: String| {
        let driver = pci::driver(root.directory(), &address).unwrap_or_else(|| "no driver".into());
        let node = root.text(&format!("/sys/bus/pci/devices/{address}/numa_node")).filter(|node| !node.starts_with('-'));
        let node = node.map(|node| format!(", NUMA node {node}")).unwrap_or_default();
        Finding::ok("network device", format!("{address}, {driver}{node}"))
    };
    root.names("/sys/bus/pci/devices").into_iter().filter(on_pci).map(describe).collect()
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;
    use crate::machine::Machine;

    fn machine(driver: &str) -> Machine {
        Machine::new(&[
            ("/sys/bus/pci/devices/0000:3b:00.0/class", "0x020000\n"),
            ("/sys/bus/pci/devices/0000:3b:00.0/driver", &format!("-> ../../drivers/{driver}")),
            ("/sys/bus/pci/devices/0000:3b:00.0/numa_node", "1\n"),
            ("/sys/devices/system/node/node1/cpulist", "4-7\n"),
            ("/sys/class/net/eth1/mtu", "1500\n"),
            ("/proc/net/protocols", "protocol  size sockets\nPACKET    1600      0\n"),
            ("/dev/vfio/vfio", ""),
            ("/sys/kernel/iommu_groups/1/type", "DMA\n"),
        ])
    }

    fn level_of(findings: &[Finding], subject: &str) -> Option<Level> {
        findings.iter().find(|finding| finding.subject == subject).map(|finding| finding.level)
    }

    fn needs(device: &str) -> Needs {
        Needs { devices: vec![device.parse().unwrap()], cores: vec![3, 4], ..Needs::default() }
    }

    #[test]
    fn a_pci_port_must_be_bound_to_a_driver_that_hands_it_over() {
        for (driver, level) in [("vfio-pci", Level::Ok), ("mlx5_core", Level::Ok), ("ixgbe", Level::Missing)] {
            let findings = examine(&machine(driver).root(), &needs("3B:00.0,dv_flow_en=0"));
            assert_eq!(level_of(&findings, "0000:3b:00.0"), Some(level), "{driver}");
        }
        let findings = examine(&machine("vfio-pci").root(), &needs("0000:3c:00.0"));
        assert_eq!(level_of(&findings, "0000:3c:00.0"), Some(Level::Missing));
    }

    #[test]
    fn workers_on_another_node_than_the_device_are_a_note() {
        let findings = examine(&machine("vfio-pci").root(), &needs("0000:3b:00.0"));
        let numa = findings.iter().find(|finding| finding.subject == "0000:3b:00.0 NUMA").unwrap();
        assert_eq!((numa.level, numa.found.as_str()), (Level::Note, "node 1; of the workers' cores 3 on another"));
        assert_eq!(numa.advice, "choose from 4-7");
    }

    #[test]
    fn an_interface_must_exist_for_af_packet_but_not_for_tap() {
        let machine = machine("ixgbe");
        let level = |device: &str| {
            level_of(&over_interface(&machine.root(), &device.parse().unwrap()), device.split(',').next().unwrap())
        };
        assert_eq!(level("net_af_packet0,iface=eth1"), Some(Level::Ok));
        assert_eq!(level("net_af_packet0,iface=eth9"), Some(Level::Missing));
        assert_eq!(level("net_af_packet0"), Some(Level::Missing));
        assert_eq!(level("net_af_xdp0,iface=eth1"), Some(Level::Note), "AF_XDP is not listed");
        assert_eq!(level("net_tap0,iface=dtap0"), None);
    }

    #[test]
    fn vfio_and_iommu_are_needed_by_pci_ports_that_are_not_shared_with_the_kernel() {
        let bare = |driver: &str| Machine::new(&[("/sys/bus/pci/devices/0000:3b:00.0/driver", &format!("-> ../{driver}"))]);
        let level = |driver: &str| level_of(&examine(&bare(driver).root(), &needs("0000:3b:00.0")), "vfio");
        assert_eq!(level("vfio-pci"), Some(Level::Missing));
        assert_eq!(level("mlx5_core"), Some(Level::Note));
        assert_eq!(level_of(&examine(&bare("x").root(), &Needs::default()), "iommu"), Some(Level::Note));
    }

    #[test]
    fn vfio_without_an_iommu_is_no_iommu() {
        let unsafe_mode = ("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y\n");
        let machine = Machine::new(&[unsafe_mode, ("/sys/kernel/iommu_groups/0/name", "vfio-noiommu\n")]);
        let found = iommu(&machine.root(), &Needs::default());
        assert_eq!((found.level, found.found.as_str()), (Level::Note, "off"));
        assert!(found.advice.contains("VFIO runs without one"), "{found:?}");
    }

    #[test]
    fn an_iommu_is_missing_only_where_vfio_needs_one() {
        let address = "/sys/bus/pci/devices/0000:3b:00.0";
        let bound = |driver: &str, more: &[(&str, &str)]| {
            let (class, link, target) = (format!("{address}/class"), format!("{address}/driver"), format!("-> ../{driver}"));
            let files = [&[(class.as_str(), "0x020000\n"), (link.as_str(), target.as_str())], more].concat();
            examine(&Machine::new(&files).root(), &needs("0000:3b:00.0"))
        };
        let levels = |driver: &str, more: &[(&str, &str)]| {
            let findings = bound(driver, more);
            ["0000:3b:00.0", "iommu"].map(|subject| level_of(&findings, subject).unwrap())
        };
        let mode = "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode";
        let (on, off) = ([(mode, "Y\n")], [(mode, "N\n")]);
        for driver in ["uio_pci_generic", "igb_uio", "mlx5_core"] {
            assert_eq!(levels(driver, &[]), [Level::Ok, Level::Note], "{driver}");
        }
        assert_eq!(levels("vfio-pci", &on), [Level::Ok, Level::Note]);
        assert_eq!(levels("igb", &on), [Level::Missing, Level::Note]);
        assert_eq!(levels("igb", &off), [Level::Missing, Level::Missing]);
        let without_mode = bound("igb", &[("/sys/module/vfio/srcversion", "1\n")]);
        let iommu = without_mode.iter().find(|finding| finding.subject == "iommu").unwrap();
        assert!(iommu.advice.contains("uio_pci_generic") && !iommu.advice.contains("echo"), "{iommu:?}");
    }

    #[test]
    fn network_devices_are_listed_with_driver_and_node() {
        let findings = network_devices(&machine("ixgbe").root());
        assert_eq!(findings, [Finding::ok("network device", "0000:3b:00.0, ixgbe, NUMA node 1")]);
    }
}
