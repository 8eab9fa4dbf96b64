//! The gateway's network ports: DPDK's memory and devices, their Linux twins, and interfaces whose frames are hidden
//! from Linux.
//!
//! Invariant: when a step of opening fails, all that was opened before is closed. Twins stay (`twin`), and with them
//! their routes and sessions. A missing device is no error as long as another port has one: the hotplug task attaches
//! it when it appears.

pub mod af_packet;
pub(crate) mod dpdk;
mod error;
mod handle;
mod hotplug;
mod numa;
mod open;
mod retry;
mod setting;
mod steering;
pub mod twin;

use std::sync::{Arc, Mutex};

use dataplane::Mac;
use dataplane::workers::Steering;
use dpdk_sys::Eal;
use tokio_util::sync::CancellationToken;

pub use error::PortsError;
pub use handle::ReadPorts;
use handle::{PortHandles, lock};
use hotplug::HotplugPort;
pub use hotplug::{Hotplug, PortStates};
pub use open::{WorkerPort, WorkerPorts};
pub use setting::{SETTING_ROOTS, SettingError};
use twin::TwinThread;

use crate::settings::Settings;

/// The ports of a running gateway.
pub struct Ports {
    eal: Eal,
    handles: PortHandles,
    ports: Arc<tokio::sync::Mutex<Vec<HotplugPort>>>,
    thread: Option<TwinThread>,
    steering: Arc<Steering>,
}

impl Ports {
    /// Opens the configured ports. Also returns the part of each worker, in their order. `seed` is that of the workers'
    /// tables. A device whose driver does not return is left to the hotplug task. If DPDK itself does not start within a
    /// minute, or within seconds after `stop`, the process ends.
    ///
    /// # Errors
    /// See [`PortsError`]; nothing stays open. After `stop` it is [`PortsError::Stopped`].
    pub async fn open(settings: &Settings, seed: u64, stop: &CancellationToken) -> Result<(Self, Vec<WorkerPorts>), PortsError> {
        let opened = open::open(settings, seed, stop).await?;
        let (handles, ports) = (Arc::new(Mutex::new(opened.handles)), Arc::new(tokio::sync::Mutex::new(opened.ports)));
        Ok((Self { eal: opened.eal, handles, ports, thread: opened.thread, steering: opened.steering }, opened.workers))
    }

    /// DPDK.
    #[must_use]
    pub fn eal(&self) -> Eal {
        self.eal
    }

    /// The function that determines which worker owns a flow.
    #[must_use]
    pub fn steering(&self) -> &Steering {
        &self.steering
    }

    /// The Ethernet addresses of the ports; 00:00:00:00:00:00 while it is unknown.
    #[must_use]
    pub fn macs(&self) -> Vec<Mac> {
        lock(&self.handles).iter().map(|handle| handle.mac.unwrap_or_default()).collect()
    }

    /// Reads all ports of this gateway at any time, from any thread.
    pub fn read_ports(&self, gateway: String) -> ReadPorts {
        let handles = Arc::clone(&self.handles);
        Arc::new(move || lock(&handles).iter().map(|handle| handle.status(&gateway)).collect())
    }

    /// The task that attaches and detaches devices.
    #[must_use]
    pub fn hotplug(&self) -> Hotplug {
        Hotplug { handles: Arc::clone(&self.handles), ports: Arc::clone(&self.ports) }
    }

    /// Closes everything. The workers must have dropped their ports before. Does not wait for a driver that hangs.
    pub async fn close(mut self) {
        drop(self.thread.take());
        let mut ports = std::mem::take(&mut *self.ports.lock().await);
        let prepared: Vec<_> = ports.iter_mut().filter_map(|port| port.prepared.take()).collect();
        let handles = std::mem::take(&mut *lock(&self.handles));
        hotplug::close(ports, handles).await;
        open::restore(prepared.into_iter()).await;
    }
}
