//! The ports as the admin API and the hotplug task share them: DPDK's control calls, and what is known of each port.
//!
//! Invariant: DPDK's control calls on one port never run at the same time: whoever makes one holds the lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dataplane::Mac;
use dpdk_sys::Device;

use super::steering::{PortSteering, ProofState};

/// One port.
#[derive(Debug)]
pub(super) struct PortHandle {
    pub(super) name: String,
    pub(super) device: Device,
    /// The last one known.
    pub(super) mac: Option<Mac>,
    /// None: the device is not there.
    pub(super) port: Option<dpdk_sys::Port>,
    pub(super) steering: PortSteering,
    /// The state of the proof that was logged last.
    pub(super) logged: ProofState,
}

/// All ports, in the order of the configuration.
pub(super) type PortHandles = Arc<Mutex<Vec<PortHandle>>>;

/// A port at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortReading {
    /// Its name.
    pub name: String,
    /// PCI address or virtual device.
    pub device: String,
    /// Whether the link is up.
    pub is_up: bool,
    /// Whether the device is there.
    pub is_there: bool,
    /// Rate of the link, where it is known.
    pub speed_mbps: Option<u32>,
    /// Largest IP packet, as the driver says.
    pub mtu_bytes: Option<u16>,
    /// What the driver has counted since the device was attached.
    pub stats: dpdk_sys::PortStats,
    /// How its packets come to their workers, and why.
    pub steering: String,
}

/// Reads all ports.
pub type ReadPorts = Arc<dyn Fn() -> Vec<PortReading> + Send + Sync>;

pub(super) fn lock(handles: &Mutex<Vec<PortHandle>>) -> MutexGuard<'_, Vec<PortHandle>> {
    handles.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PortHandle {
    pub(super) fn read(&self) -> PortReading {
        let port = self.port.as_ref();
        let stats = port.and_then(|port| port.stats().ok()).unwrap_or_default();
        let link = port.and_then(|port| port.link().ok());
        PortReading {
            name: self.name.clone(),
            device: self.device.to_string(),
            is_up: link.is_some_and(|link| link.is_up),
            is_there: port.is_some(),
            speed_mbps: link.filter(|link| link.is_up).and_then(|link| link.speed_mbps),
            mtu_bytes: port.and_then(|port| port.mtu_bytes().ok()),
            stats,
            steering: self.steering.text(),
        }
    }

    /// Whether the device is there and has a link.
    pub(super) fn is_up(&self) -> bool {
        self.port.as_ref().is_some_and(|port| port.link().is_ok_and(|link| link.is_up))
    }

    /// The active member, where the port is a bond.
    pub(super) fn active_member(&self) -> Option<Device> {
        self.port.as_ref()?.active_member()
    }
}
