//! The ports as the admin API and the hotplug task share them: DPDK's control calls, and the state of each port.
//!
//! Invariant: DPDK's control calls on one port never run at the same time: the caller holds the lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dataplane::Mac;
use dpdk_sys::{Device, QueueMode};
use objects::text::without_os_errors;
use proto::v1;

use super::steering::{KindState, PortSteering};

/// One port.
#[derive(Debug)]
pub(super) struct PortHandle {
    pub(super) name: String,
    pub(super) device: Device,
    /// The last known Ethernet address.
    pub(super) mac: Option<Mac>,
    /// `None` while the device is absent, or its driver opens or closes it.
    pub(super) port: Option<dpdk_sys::Port>,
    /// Why a device that exists is not attached, or why its driver keeps it.
    pub(super) failure: Option<String>,
    pub(super) steering: PortSteering,
    /// The states of the proof that were logged last, by kind of packets.
    pub(super) logged: [KindState; 4],
}

/// All ports, in the order of the configuration.
pub(super) type PortHandles = Arc<Mutex<Vec<PortHandle>>>;

/// Reads all ports; a row for operators each.
pub type ReadPorts = Arc<dyn Fn() -> Vec<v1::PortStatus> + Send + Sync>;

pub(super) fn lock(handles: &Mutex<Vec<PortHandle>>) -> MutexGuard<'_, Vec<PortHandle>> {
    handles.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PortHandle {
    /// The row of the port for operators (DESIGN section 8).
    pub(super) fn status(&self, gateway: &str) -> v1::PortStatus {
        let port = self.port.as_ref();
        let stats = port.and_then(|port| port.stats().ok()).unwrap_or_default();
        let link = port.map(|port| port.link().ok());
        v1::PortStatus {
            name: self.name.clone(),
            device: self.device.to_string(),
            link: match link {
                None if self.failure.is_some() => "failed".to_owned(),
                None => "absent".to_owned(),
                Some(None) => "unknown".to_owned(),
                Some(Some(link)) if link.is_up => "up".to_owned(),
                Some(Some(_)) => "down".to_owned(),
            },
            rx_packets: stats.rx_packets,
            tx_packets: stats.tx_packets,
            rx_missed: stats.rx_missed,
            rx_bytes: stats.rx_bytes,
            tx_bytes: stats.tx_bytes,
            rx_errors: stats.rx_errors + stats.rx_no_buffer,
            tx_errors: stats.tx_errors,
            speed_mbps: link.flatten().filter(|link| link.is_up).and_then(|link| link.speed_mbps),
            mtu: port.and_then(|port| port.mtu_bytes().ok()).map(u32::from),
            steering: self.steering.text(),
            rss: self.steering.rows(),
            gateway: gateway.to_owned(),
            reason: without_os_errors(self.failure.as_deref().unwrap_or_default()).into_owned(),
            driver: port.map(|port| port.driver().to_owned()).unwrap_or_default(),
            rx: port.map(|port| queues(port.queue_counts().0, port.descriptors().rx, &port.modes().rx)),
            tx: port.map(|port| queues(port.queue_counts().1, port.descriptors().tx, &port.modes().tx)),
            rss_table: port.map_or(0, |_| self.steering.table_entries().into()),
        }
    }

    /// Whether the device is present and has a link; none if the driver does not say.
    pub(super) fn is_up(&self) -> Option<bool> {
        let Some(port) = &self.port else { return Some(false) };
        port.link().ok().map(|link| link.is_up)
    }

    /// The active member, if the port is a bond.
    pub(super) fn active_member(&self) -> Option<Device> {
        self.port.as_ref()?.active_member()
    }
}

/// The queues of a port in one direction, for operators.
fn queues(queues: usize, descriptors: u16, mode: &QueueMode) -> v1::QueueStatus {
    v1::QueueStatus {
        queues: u32::try_from(queues).unwrap_or(u32::MAX),
        descriptors: descriptors.into(),
        burst_mode: mode.burst.clone().unwrap_or_default(),
        offloads: mode.offloads.clone(),
    }
}
