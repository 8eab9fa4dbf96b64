//! What a configuration needs of the machine.

use dataplane::Link;
use dpdk_sys::{Device, pci};

use super::root::Root;
use crate::ports::{af_packet, dpdk};
use crate::settings::{Hugepages, Poll, Settings, Twin};

/// Requirements of a configuration. The default requires nothing: `doctor` without a configuration.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    /// The devices of the ports, as configured.
    pub devices: Vec<Device>,
    /// Links of the configuration whose frames do not arrive, because the driver of their port changes the outer tag: port
    /// and tags.
    pub changed_tags: Vec<(String, String)>,
    /// Whether a port has a Linux twin.
    pub twins: bool,
    /// Whether packet memory requires hugepages.
    pub hugepages_required: bool,
    /// Packet memory in MB.
    pub memory_mb: u64,
    /// The NUMA node on which EAL wants it: that of the ports.
    pub node: Option<u32>,
    /// The workers' cores.
    pub cores: Vec<usize>,
    /// Whether workers poll without ever sleeping.
    pub polls_busy: bool,
}

fn changed_tags(settings: &Settings) -> Vec<(String, String)> {
    let links = settings.fixed_network().vlans.into_iter().map(|vlan| vlan.link);
    let port = |link: Link| settings.ports.get(usize::from(link.port().0));
    links
        .filter_map(|link| Some((port(link)?, link)))
        .filter(|(port, link)| af_packet::changes_outer_tag(&port.device, *link))
        .map(|(port, link)| (port.name.clone(), link.vlan().to_string()))
        .collect()
}

/// Whether a device comes by UIO, or by VFIO without an IOMMU.
pub(crate) fn needs_raw_io(devices: &[Device], root: &Root) -> bool {
    devices.iter().any(|device| device.is_pci() && pci::needs_raw_io(root.directory(), &device.port_name()))
}

impl Needs {
    /// The requirements of a configuration.
    #[must_use]
    pub fn of(settings: &Settings) -> Self {
        let (eal, _) = dpdk::plan(settings);
        Self {
            devices: settings.ports.iter().flat_map(|port| port.device.parts()).collect(),
            changed_tags: changed_tags(settings),
            twins: settings.ports.iter().any(|port| port.twin == Twin::Tap),
            hugepages_required: settings.hugepages == Hugepages::Require,
            memory_mb: eal.memory_mb,
            node: eal.node,
            cores: settings.cores.clone(),
            polls_busy: settings.poll == Poll::Busy,
        }
    }

    pub(crate) fn has_pci_device(&self) -> bool {
        self.devices.iter().any(Device::is_pci)
    }

    /// Whether a port's device comes by UIO, or by VFIO without an IOMMU.
    pub(crate) fn raw_io(&self, root: &Root) -> bool {
        needs_raw_io(&self.devices, root)
    }

    pub(crate) fn has_driver(&self, driver: &str) -> bool {
        self.devices.iter().any(|device| device.has_driver(driver))
    }
}
