//! What the gateway takes of the machine, and gives back: DPDK's memory, the ports, their Linux twins, and the interfaces
//! that Linux is kept off.
//!
//! Invariant: whatever was taken when a step fails is given back. Twins stay (`twin`): so do their routes and sessions.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dataplane::{Mac, PortIndex, TwinQueues};
use dpdk_sys::{Eal, Mempool};
use tokio::sync::watch;

use crate::admin::PortReading;
use crate::af_packet::{self, AfPacketError, Prepared};
use crate::dpdk::{self, DpdkPort, Packet};
use crate::settings::{PortSettings, Settings, Twin};
use crate::twin::{Interface, TwinConfig, TwinCounters, TwinError, TwinPort, TwinThread};

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
}

/// How often the links are looked at.
const LINKS_EVERY: Duration = Duration::from_millis(250);

/// A port.
struct Opened {
    name: String,
    device: String,
    mac: Mac,
    port: dpdk_sys::Port,
}

/// Twins, each with the position of its port.
type Twins = Arc<tokio::sync::Mutex<Vec<(usize, Interface)>>>;

/// What a worker polls: a port, and the rings of its twin.
pub type WorkerPort = (DpdkPort, Option<Arc<TwinQueues<Packet>>>);

/// The machine's part of a running gateway.
pub struct Hardware {
    eal: Eal,
    prepared: Vec<Prepared>,
    /// DPDK's control calls on one port may not run at the same time.
    ports: Arc<Mutex<Vec<Opened>>>,
    twins: Twins,
    thread: Option<TwinThread>,
}

impl Hardware {
    /// Takes all that the settings name. The ports are the worker's.
    ///
    /// # Errors
    /// See [`HardwareError`]; nothing stays taken.
    pub async fn take(settings: &Settings) -> Result<(Self, Vec<WorkerPort>), HardwareError> {
        let prepared = prepare(settings).await?;
        match open(settings).await {
            Ok(Taken { eal, ports, twins, thread, worker }) => {
                let (ports, twins) = (Arc::new(Mutex::new(ports)), Arc::new(tokio::sync::Mutex::new(twins)));
                Ok((Self { eal, prepared, ports, twins, thread }, worker))
            }
            Err(error) => {
                restore(prepared).await;
                Err(error)
            }
        }
    }

    /// DPDK.
    #[must_use]
    pub fn eal(&self) -> Eal {
        self.eal
    }

    /// The Ethernet addresses of the ports.
    #[must_use]
    pub fn macs(&self) -> Vec<Mac> {
        lock(&self.ports).iter().map(|opened| opened.mac).collect()
    }

    /// Reads all ports, whoever asks and whenever.
    pub fn read_ports(&self) -> crate::admin::ReadPorts {
        let ports = Arc::clone(&self.ports);
        Arc::new(move || lock(&ports).iter().map(read).collect())
    }

    /// The links of the ports, to be followed.
    #[must_use]
    pub fn links(&self) -> Links {
        Links { ports: Arc::clone(&self.ports), twins: Arc::clone(&self.twins) }
    }

    /// Gives everything back. The worker's ports must be gone by now.
    pub async fn give_back(mut self) {
        drop(self.thread.take());
        lock(&self.ports).clear();
        restore(std::mem::take(&mut self.prepared)).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn prepare(settings: &Settings) -> Result<Vec<Prepared>, HardwareError> {
    let mut prepared = Vec::new();
    for port in &settings.ports {
        match af_packet::prepare(port.device.as_str()).await {
            Ok(one) => prepared.extend(one),
            Err(error) => {
                restore(prepared).await;
                return Err(error.into());
            }
        }
    }
    Ok(prepared)
}

async fn restore(prepared: Vec<Prepared>) {
    for one in prepared {
        if let Err(error) = one.restore().await {
            tracing::warn!(%error, "an interface could not be given back to Linux as it was");
        }
    }
}

/// What a start has taken.
struct Taken {
    eal: Eal,
    ports: Vec<Opened>,
    twins: Vec<(usize, Interface)>,
    thread: Option<TwinThread>,
    worker: Vec<WorkerPort>,
}

async fn open(settings: &Settings) -> Result<Taken, HardwareError> {
    let (config, pool) = dpdk::plan(settings).map_err(dpdk_sys::Error::from)?;
    let eal = Eal::start(&config)?;
    let pool = Mempool::new(eal, &pool)?;
    let mut taken = Taken { eal, ports: Vec::new(), twins: Vec::new(), thread: None, worker: Vec::new() };
    let mut taps = Vec::new();
    for (n, port) in settings.ports.iter().enumerate() {
        let (handle, queues) = dpdk::open(eal, port, pool)?;
        let mac = Mac(handle.mac());
        taken.ports.push(Opened { name: port.name.clone(), device: port.device.as_str().to_owned(), mac, port: handle });
        let mut rings = None;
        if port.twin == Twin::Tap {
            let (interface, tap) = open_twin(port, mac).await?;
            let queues = Arc::new(TwinQueues::new());
            taps.push(TwinPort::new(tap, Arc::clone(&queues), Arc::new(TwinCounters::default()), port.mtu_bytes));
            taken.twins.push((n, interface));
            rings = Some(queues);
        }
        taken.worker.push((queues, rings));
    }
    if !taps.is_empty() {
        let allocate = move || pool.allocate().map(Packet::from);
        taken.thread = Some(TwinThread::start(taps, allocate).map_err(HardwareError::Thread)?);
    }
    Ok(taken)
}

/// The links of the ports, and the twins whose carriers follow them.
#[derive(Clone)]
pub struct Links {
    ports: Arc<Mutex<Vec<Opened>>>,
    twins: Twins,
}

impl Links {
    /// Tells which ports have no link, and makes the carriers of twins follow, until its future is dropped.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn follow(self, down: watch::Sender<Vec<PortIndex>>) -> Result<(), TwinError> {
        let mut twins = self.twins.lock().await;
        let mut before: Vec<Option<bool>> = Vec::new();
        let mut ticks = tokio::time::interval(LINKS_EVERY);
        loop {
            ticks.tick().await;
            let is_up = |opened: &Opened| (opened.name.clone(), opened.port.link().is_ok_and(|link| link.is_up));
            let links: Vec<(String, bool)> = lock(&self.ports).iter().map(is_up).collect();
            before.resize(links.len(), None);
            for (n, interface) in twins.iter_mut() {
                let Some(((port, is_up), before)) = links.get(*n).zip(before.get_mut(*n)) else { continue };
                if *before != Some(*is_up) {
                    tracing::info!(port, link = if *is_up { "up" } else { "down" }, "the port's link");
                    interface.set_carrier(*is_up).await?;
                    *before = Some(*is_up);
                }
            }
            let without = (0..=u8::MAX).zip(&links).filter(|(_, (_, is_up))| !is_up).map(|(n, _)| PortIndex(n)).collect();
            down.send_if_modified(|last| {
                *last != without && {
                    *last = without;
                    true
                }
            });
        }
    }
}

async fn open_twin(port: &PortSettings, mac: Mac) -> Result<(Interface, std::os::fd::OwnedFd), TwinError> {
    let config = TwinConfig { name: port.name.clone(), mac, mtu: port.mtu_bytes, addresses: port.addresses.clone() };
    Interface::open(&config).await
}

fn read(opened: &Opened) -> PortReading {
    let stats = opened.port.stats().unwrap_or_default();
    PortReading {
        name: opened.name.clone(),
        device: opened.device.clone(),
        is_up: opened.port.link().is_ok_and(|link| link.is_up),
        rx_packets: stats.rx_packets,
        tx_packets: stats.tx_packets,
        rx_missed: stats.rx_missed,
    }
}
