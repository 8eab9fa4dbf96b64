//! What the gateway takes of the machine, and gives back: DPDK's memory, the ports, their Linux twins, and the interfaces
//! that Linux is kept off.
//!
//! Invariant: whatever was taken when a step fails is given back. Twins stay (`twin`): so do their routes and sessions. A
//! port whose device is not there stops nothing as long as another's is: it is attended to (`attend`) until it comes.

pub mod af_packet;
pub mod dpdk;
pub mod handover;
mod hotplug;
mod numa;
mod open;
pub(crate) mod steering;
pub mod twin;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use dataplane::{Mac, Peers, PortIndex, TwinQueues};
use dpdk_sys::Eal;

use crate::admin::PortReading;
use crate::ports::af_packet::{AfPacketError, Prepared};
use crate::ports::dpdk::{DpdkPort, Packet};
use crate::ports::twin::{TwinError, TwinThread};
use crate::settings::Settings;
pub use hotplug::Attendant;
use hotplug::Attended;
use steering::{PortSteering, Standing};

/// Why the machine's part could not be had.
#[derive(Debug, thiserror::Error)]
pub enum HardwareError {
    /// DPDK refused.
    #[error("{0}")]
    Dpdk(#[from] dpdk_sys::Error),
    /// The interface of an af_packet port could not be prepared.
    #[error(transparent)]
    AfPacket(#[from] AfPacketError),
    /// A twin could not be made.
    #[error(transparent)]
    Twin(#[from] TwinError),
    /// The twin thread could not be started.
    #[error("the twin thread cannot be started: {0}")]
    Thread(io::Error),
    /// It would leave workers that count on a transmit queue without one.
    #[error("the device has {found} transmit queues, and {needed} workers count on one of their own; restart the gateway")]
    TransmitQueues {
        /// What it has.
        found: usize,
        /// What the workers were told.
        needed: u8,
    },
    /// A worker does not poll.
    #[error("the worker did not take the port's queues")]
    Worker,
}

impl HardwareError {
    /// Whether the device is just not there, and may come.
    fn is_absence(&self) -> bool {
        match self {
            Self::AfPacket(AfPacketError::NoInterface { .. }) | Self::Dpdk(dpdk_sys::Error::NoInterface { .. }) => true,
            Self::Dpdk(dpdk_sys::Error::NoSuchDevice { device, .. }) => !device.starts_with("net_"),
            _ => false,
        }
    }
}

/// A port, as those see it who ask.
#[derive(Debug)]
struct Opened {
    name: String,
    device: String,
    /// The last one known.
    mac: Option<Mac>,
    /// None: the device is not there.
    port: Option<dpdk_sys::Port>,
    steering: PortSteering,
    /// As it was told of last.
    standing: Standing,
}

/// DPDK's control calls on one port may not run at the same time.
type Ports = Arc<Mutex<Vec<Opened>>>;

/// What a worker polls: a port, and the rings of its twin.
pub type WorkerPort = (DpdkPort, Option<Arc<TwinQueues<Packet>>>);

/// What is a worker's.
#[derive(Debug)]
pub struct WorkerShare {
    /// The ports.
    pub ports: Vec<WorkerPort>,
    /// The other workers, if there are any.
    pub peers: Option<Peers<Packet>>,
}

/// The ports as the engine must know them, beside what Linux and the configuration say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortsNow {
    /// Those without link, or without device.
    pub down: Vec<PortIndex>,
    /// How often the bond that a port is has changed its active member, by port.
    pub moves: Vec<u64>,
    /// Ethernet addresses of those whose device is there.
    pub macs: Vec<(PortIndex, Mac)>,
}

/// The machine's part of a running gateway.
pub struct Hardware {
    eal: Eal,
    ports: Ports,
    attended: Arc<tokio::sync::Mutex<Vec<Attended>>>,
    thread: Option<TwinThread>,
}

impl Hardware {
    /// Takes all that the settings name. What is each worker's comes in their order. `seed` is that of their tables.
    ///
    /// # Errors
    /// See [`HardwareError`]; nothing stays taken.
    pub async fn take(settings: &Settings, seed: u64) -> Result<(Self, Vec<WorkerShare>), HardwareError> {
        let prepared = open::prepare(settings).await?;
        let taken = open::open(settings, prepared, seed).await?;
        let (ports, attended) = (Arc::new(Mutex::new(taken.ports)), Arc::new(tokio::sync::Mutex::new(taken.attended)));
        Ok((Self { eal: taken.eal, ports, attended, thread: taken.thread }, taken.workers))
    }

    /// DPDK.
    #[must_use]
    pub fn eal(&self) -> Eal {
        self.eal
    }

    /// The Ethernet addresses of the ports; 00:00:00:00:00:00 where the device is not there to tell.
    #[must_use]
    pub fn macs(&self) -> Vec<Mac> {
        lock(&self.ports).iter().map(|opened| opened.mac.unwrap_or_default()).collect()
    }

    /// Reads all ports, whoever asks and whenever.
    pub fn read_ports(&self) -> crate::admin::ReadPorts {
        let ports = Arc::clone(&self.ports);
        Arc::new(move || lock(&ports).iter().map(read).collect())
    }

    /// Who attends to the ports.
    #[must_use]
    pub fn attendant(&self) -> Attendant {
        Attendant { ports: Arc::clone(&self.ports), attended: Arc::clone(&self.attended) }
    }

    /// Gives everything back. The worker's ports must be gone by now.
    pub async fn give_back(mut self) {
        drop(self.thread.take());
        let mut attended = std::mem::take(&mut *self.attended.lock().await);
        let prepared = attended.iter_mut().filter_map(|attended| attended.prepared.take()).collect();
        // With the last queues, which wait in a berth if a worker ended first, the port stops.
        drop(attended);
        lock(&self.ports).clear();
        restore(prepared).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn restore(prepared: Vec<Prepared>) {
    for one in prepared {
        if let Err(error) = one.restore().await {
            tracing::warn!(%error, "an interface could not be given back to Linux as it was");
        }
    }
}

fn read(opened: &Opened) -> PortReading {
    let port = opened.port.as_ref();
    let stats = port.and_then(|port| port.stats().ok()).unwrap_or_default();
    let link = port.and_then(|port| port.link().ok());
    PortReading {
        name: opened.name.clone(),
        device: opened.device.clone(),
        is_up: link.is_some_and(|link| link.is_up),
        is_there: port.is_some(),
        speed_mbps: link.filter(|link| link.is_up).and_then(|link| link.speed_mbps),
        mtu_bytes: port.and_then(|port| port.mtu_bytes().ok()),
        stats,
        steering: opened.steering.text(),
    }
}
