//! The start: all ports whose devices are there, every twin, the pool.

use std::sync::Arc;

use dataplane::steering::{Steering, WORKERS_MAX};
use dataplane::{Mac, TwinQueues};
use dpdk_sys::{Eal, Mempool};

use super::hotplug::Attended;
use super::steering::{self, Standing, Wanted};
use super::twin::AttendedTwin;
use super::{HardwareError, Opened, WorkerShare, numa, restore};
use crate::ports::af_packet::{self, Prepared};
use crate::ports::dpdk::{self, DpdkPort, OpenedPort, Packet};
use crate::ports::handover::berth;
use crate::ports::twin::{Interface, TwinConfig, TwinCounters, TwinPort, TwinThread};
use crate::settings::{PortSettings, Settings, Twin};

/// What a start has taken.
pub(super) struct Taken {
    pub(super) eal: Eal,
    pub(super) ports: Vec<Opened>,
    pub(super) attended: Vec<Attended>,
    pub(super) thread: Option<TwinThread>,
    pub(super) workers: Vec<WorkerShare>,
}

/// Keeps Linux off the interfaces of the ports, as far as they are there; by port.
pub(super) async fn prepare(settings: &Settings) -> Result<Vec<Option<Prepared>>, HardwareError> {
    let mut prepared = Vec::new();
    for port in &settings.ports {
        match af_packet::prepare(port.device.as_str()).await.map_err(HardwareError::from) {
            Ok(one) => prepared.push(one),
            Err(error) if error.is_absence() => prepared.push(None),
            Err(error) => {
                restore(prepared.into_iter().flatten().collect()).await;
                return Err(error);
            }
        }
    }
    Ok(prepared)
}

pub(super) async fn open(settings: &Settings, prepared: Vec<Option<Prepared>>, seed: u64) -> Result<Taken, HardwareError> {
    match open_all(settings, seed).await {
        Ok(mut taken) => {
            for (attended, prepared) in taken.attended.iter_mut().zip(prepared) {
                attended.prepared = prepared;
            }
            Ok(taken)
        }
        Err(error) => {
            restore(prepared.into_iter().flatten().collect()).await;
            Err(error)
        }
    }
}

/// What opening the ports gave, by port; none where the device is not there.
type AllOpened = Vec<Option<OpenedPort>>;

async fn open_all(settings: &Settings, seed: u64) -> Result<Taken, HardwareError> {
    let (config, pool) = dpdk::plan(settings).map_err(dpdk_sys::Error::from)?;
    let eal = Eal::start(&config)?;
    let pool = Mempool::new(eal, &pool)?;
    let workers = u8::try_from(settings.cores.len()).unwrap_or(WORKERS_MAX);
    let by_cards = Steering::toeplitz(workers, seed);
    let mut wanted = steering::wanted(workers, &by_cards);
    let presences: Vec<Option<u64>> =
        settings.ports.iter().map(|port| dpdk::device(port).ok().and_then(|device| device.presence())).collect();
    let opened = open_devices(eal, settings, pool, &wanted)?;
    let found = opened.iter().map(|port| port.as_ref().map(|port| port.found.clone())).collect();
    let (owners, ports) = steering::choose(workers, by_cards, Steering::own_hash(workers, seed), found);
    if owners.rss_key().is_none() {
        wanted.spread = None; // of devices that come later
    }
    let shares = steering::peers(&Arc::new(owners), &ports).into_iter().map(|peers| WorkerShare { ports: Vec::new(), peers });
    let mut taken = Taken { eal, ports: Vec::new(), attended: Vec::new(), thread: None, workers: shares.collect() };
    let mut taps = Vec::new();
    for (((port, opened), steering), presence) in settings.ports.iter().zip(opened).zip(ports).zip(presences) {
        let device = dpdk::device(port).map_err(dpdk_sys::Error::from)?;
        let mac = opened.as_ref().map(|opened| Mac(opened.port.mac())).or(port.mac);
        let (berths, moored): (Vec<_>, Vec<_>) = taken.workers.iter().map(|_| berth()).unzip();
        let mut attended = Attended::new(eal, pool, port.clone(), device, berths, wanted.clone(), steering.transmit());
        let handle = match opened {
            Some(OpenedPort { port, queues, .. }) => {
                attended.presence = presence;
                attended.hand_over(queues)?;
                Some(port)
            }
            None => None,
        };
        let mut rings = None;
        if port.twin == Twin::Tap {
            let config = twin_config(port, mac);
            let (interface, tap) = Interface::open(&config).await?;
            let queues = Arc::new(TwinQueues::new());
            let (tap, new_tap) = TwinPort::new(tap, Arc::clone(&queues), Arc::new(TwinCounters::default()), port.mtu_bytes);
            taps.push(tap);
            attended.twin = Some(AttendedTwin::new(config, interface, new_tap));
            rings = Some(queues);
        }
        let (name, device) = (port.name.clone(), port.device.as_str().to_owned());
        taken.ports.push(Opened { name, device, mac, port: handle, steering, standing: Standing::Settled });
        taken.attended.push(attended);
        for (worker, moored) in taken.workers.iter_mut().zip(moored) {
            worker.ports.push((DpdkPort::new(moored, pool), rings.clone()));
        }
    }
    if !taps.is_empty() {
        let allocate = move || pool.allocate().map(Packet::from);
        taken.thread = Some(TwinThread::start(taps, allocate).map_err(HardwareError::Thread)?);
    }
    Ok(taken)
}

/// Opens the ports whose devices are there.
fn open_devices(eal: Eal, settings: &Settings, pool: Mempool, wanted: &Wanted) -> Result<AllOpened, HardwareError> {
    let (mut opened, mut absences) = (Vec::new(), Vec::new());
    for port in &settings.ports {
        match dpdk::open(eal, port, pool, wanted).map_err(HardwareError::from) {
            Ok(port) => opened.push(Some(port)),
            Err(error) if error.is_absence() => {
                absences.push(error);
                opened.push(None);
            }
            Err(error) => return Err(error),
        }
    }
    weigh(settings, absences)?;
    numa::warn_of_distance(settings);
    Ok(opened)
}

/// A gateway without any port is misconfigured rather than early.
fn weigh(settings: &Settings, mut absences: Vec<HardwareError>) -> Result<(), HardwareError> {
    if absences.len() == settings.ports.len() && !absences.is_empty() {
        return Err(absences.remove(0));
    }
    for error in absences {
        tracing::warn!(%error, "a port's device is not there; the others run, and it is attached when it comes");
    }
    Ok(())
}

fn twin_config(port: &PortSettings, mac: Option<Mac>) -> TwinConfig {
    TwinConfig { name: port.name.clone(), mac, mtu: port.mtu_bytes, addresses: port.addresses.clone() }
}
