//! The needs of the ports and addresses of a configuration, and the capabilities for them.
//!
//! Not here: taking the others away (`privileges`).

use control::config::settings::ControllerSettings;
use dpdk_sys::Device;
use rustix::thread::CapabilitySet;

use crate::machine::{Root, needs_raw_io};
use crate::settings::{Settings, StateSource};

/// The names of AF_XDP's driver, which loads a BPF program.
const AF_XDP: &str = "net_af_xdp";
/// Ports below need a capability.
const UNPRIVILEGED_PORT_MIN: u16 = 1024;

/// What ports of this configuration need beyond packet sockets and taps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PortNeeds {
    /// BPF programs.
    pub(super) bpf: bool,
    /// Pinned memory that devices write to.
    pub(super) pinned_memory: bool,
    /// I/O ports and physical addresses: PCI without an IOMMU, and UIO drivers.
    pub(super) raw_io: bool,
    /// Ports below 1024.
    pub(super) low_ports: bool,
}

impl PortNeeds {
    /// What `settings` need on a machine.
    pub(super) fn of(settings: &Settings, machine: &Root) -> Self {
        let devices: Vec<Device> = settings.ports.iter().flat_map(|port| port.device.parts()).collect();
        let (has_pci, bpf) = (devices.iter().any(Device::is_pci), devices.iter().any(|device| device.has_driver(AF_XDP)));
        let raw_io = needs_raw_io(&devices, machine);
        let controller = embedded(settings).and_then(|controller| controller.listen.tcp.as_ref()).map(|tcp| tcp.address);
        let admin = settings.admin_listen.tcp.as_ref().map(|(address, _)| *address);
        let replication = settings.replication.as_ref().map(|replication| replication.listen);
        let listening = [settings.metrics_listen, controller, admin, replication];
        let low_ports = listening.iter().flatten().any(|at| at.port() < UNPRIVILEGED_PORT_MIN);
        Self { bpf, pinned_memory: has_pci || bpf, raw_io, low_ports }
    }

    /// The capabilities that stay.
    pub(super) fn capabilities(self) -> CapabilitySet {
        // Interfaces, routes, neighbours; packet sockets and probes by ICMP; files of other users: kubeconfigs,
        // certificates, manifests; the group of sockets.
        let always = CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW | CapabilitySet::DAC_OVERRIDE | CapabilitySet::CHOWN;
        let rows = [
            // The kernel finds a loaded program by its number only for CAP_SYS_ADMIN, and libxdp asks for it.
            (self.bpf, CapabilitySet::BPF | CapabilitySet::SYS_ADMIN),
            (self.pinned_memory, CapabilitySet::IPC_LOCK),
            // VFIO without IOMMU, UIO, and physical addresses in /proc/self/pagemap.
            (self.raw_io, CapabilitySet::SYS_RAWIO | CapabilitySet::SYS_ADMIN),
            (self.low_ports, CapabilitySet::NET_BIND_SERVICE),
        ];
        rows.into_iter().filter(|(is_needed, _)| *is_needed).fold(always, |all, (_, more)| all | more)
    }
}

/// The settings of the embedded controller.
pub(super) fn embedded(settings: &Settings) -> Option<&ControllerSettings> {
    match &settings.source {
        StateSource::Embedded(controller, _) => Some(controller),
        StateSource::Remote(..) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::machine::Machine;
    use crate::settings::SourceChoice;

    const IOMMU: (&str, &str) = ("/sys/kernel/iommu_groups/1/type", "DMA\n");
    const NO_IOMMU: (&str, &str) = ("/sys/kernel/iommu_groups/0/name", "vfio-noiommu\n");
    const UIO: (&str, &str) = ("/sys/bus/pci/devices/0000:3b:00.0/driver", "-> ../../drivers/uio_pci_generic");

    fn needs(device: &str, more: &str, machine: &[(&str, &str)]) -> PortNeeds {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sluice.yaml");
        let port = format!("ports:\n  - {{name: uplink, device: \"{device}\", addresses: [192.0.2.2/24]}}\n");
        fs::write(&file, format!("name: edge\n{port}manifests: m\nlisten: unix:c.sock\n{more}")).unwrap();
        PortNeeds::of(&Settings::read(&file, &SourceChoice::File).unwrap(), &Machine::new(machine).root())
    }

    #[test]
    fn raw_input_and_output_are_kept_for_pci_ports_without_an_iommu_or_with_uio_alone() {
        type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], bool);
        let rows: [Row<'_>; 7] = [
            ("0000:3b:00.0", &[], true),
            ("0000:3b:00.0", &[NO_IOMMU], true),
            ("0000:3b:00.0", &[IOMMU], false),
            ("0000:3b:00.0", &[IOMMU, UIO], true),
            ("0000:3b:00.1", &[IOMMU, UIO], false),
            ("net_bonding0,mode=1,slave=0000:3b:00.0", &[IOMMU, UIO], true),
            ("net_af_packet0,iface=eth1", &[], false),
        ];
        for (device, machine, raw_io) in rows {
            let kept = needs(device, "", machine).capabilities();
            assert_eq!(kept.contains(CapabilitySet::SYS_RAWIO), raw_io, "{device} {machine:?}");
            assert_eq!(kept.contains(CapabilitySet::SYS_ADMIN), raw_io, "{device} {machine:?}");
        }
    }

    #[test]
    fn each_kind_of_port_keeps_what_it_needs() {
        let always = CapabilitySet::NET_ADMIN | CapabilitySet::NET_RAW | CapabilitySet::DAC_OVERRIDE | CapabilitySet::CHOWN;
        for device in ["net_af_packet0,iface=eth1", "net_tap0", "net_bonding0,mode=1,slave=(net_tap1,iface=a)"] {
            assert_eq!(needs(device, "", &[]).capabilities(), always, "{device}");
        }
        assert_eq!(needs("0000:3b:00.0", "", &[IOMMU]).capabilities(), always | CapabilitySet::IPC_LOCK);
        let af_xdp = CapabilitySet::BPF | CapabilitySet::SYS_ADMIN | CapabilitySet::IPC_LOCK;
        assert_eq!(needs("net_af_xdp0,iface=eth1", "", &[IOMMU]).capabilities(), always | af_xdp);
        let metrics = "metrics: {listen: \"127.0.0.1:80\"}\n";
        let admin = "admin: {listen: ['unix:/a', '[::]:443'], tls: {ca: a, cert: b, key: c}}\n";
        for more in [metrics, admin] {
            assert_eq!(needs("net_tap0", more, &[IOMMU]).capabilities(), always | CapabilitySet::NET_BIND_SERVICE, "{more}");
        }
    }
}
