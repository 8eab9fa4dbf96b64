//! What a configuration needs of the machine.

use dpdk_sys::Device;

use crate::ports::dpdk;
use crate::settings::{Hugepages, Poll, Settings, Twin};

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

    pub(super) fn has_pci_device(&self) -> bool {
        self.devices.iter().any(Device::is_pci)
    }

    pub(super) fn has_driver(&self, driver: &str) -> bool {
        self.devices.iter().any(|device| device.has_driver(driver))
    }
}
