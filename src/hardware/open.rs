//! The start: all ports whose devices are there, every twin, the pool.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use dataplane::{Mac, TwinQueues};
use dpdk_sys::{Eal, Mempool};

use super::attend::Attended;
use super::{HardwareError, Opened, WorkerPort, restore};
use crate::af_packet::{self, Prepared};
use crate::berth::{Queues, berth};
use crate::dpdk::{self, DpdkPort, Packet};
use crate::settings::{PortSettings, Settings, Twin};
use crate::twin::{Interface, TwinConfig, TwinCounters, TwinError, TwinPort, TwinThread};

/// What a start has taken.
pub(super) struct Taken {
    pub(super) eal: Eal,
    pub(super) ports: Vec<Opened>,
    pub(super) attended: Vec<Attended>,
    pub(super) thread: Option<TwinThread>,
    pub(super) worker: Vec<WorkerPort>,
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

pub(super) async fn open(settings: &Settings, prepared: Vec<Option<Prepared>>) -> Result<Taken, HardwareError> {
    match open_all(settings).await {
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

async fn open_all(settings: &Settings) -> Result<Taken, HardwareError> {
    let (config, pool) = dpdk::plan(settings).map_err(dpdk_sys::Error::from)?;
    let eal = Eal::start(&config)?;
    let pool = Mempool::new(eal, &pool)?;
    let mut taken = Taken { eal, ports: Vec::new(), attended: Vec::new(), thread: None, worker: Vec::new() };
    let (mut taps, mut absences) = (Vec::new(), Vec::new());
    for port in &settings.ports {
        let device = dpdk::device(port).map_err(dpdk_sys::Error::from)?;
        let presence = device.presence();
        let (handle, queues) = match open_port(eal, port, pool) {
            Ok((handle, queues)) => (Some(handle), Some(queues)),
            Err(error) if error.is_absence() => {
                absences.push(error);
                (None, None)
            }
            Err(error) => return Err(error),
        };
        let mac = handle.as_ref().map(|handle| Mac(handle.mac())).or(port.mac);
        let (berth, moored) = berth();
        let mut attended = Attended::new(eal, pool, port.clone(), device, vec![berth]);
        if let Some(queues) = queues {
            attended.presence = presence;
            attended.hand_over(queues)?;
        }
        let mut rings = None;
        if port.twin == Twin::Tap {
            let (interface, tap) = open_twin(port, mac).await?;
            let queues = Arc::new(TwinQueues::new());
            taps.push(TwinPort::new(tap, Arc::clone(&queues), Arc::new(TwinCounters::default()), port.mtu_bytes));
            attended.twin = Some(interface);
            rings = Some(queues);
        }
        taken.ports.push(Opened { name: port.name.clone(), device: port.device.as_str().to_owned(), mac, port: handle });
        taken.attended.push(attended);
        taken.worker.push((DpdkPort::new(moored, pool), rings));
    }
    weigh(settings, absences)?;
    if !taps.is_empty() {
        let allocate = move || pool.allocate().map(Packet::from);
        taken.thread = Some(TwinThread::start(taps, allocate).map_err(HardwareError::Thread)?);
    }
    Ok(taken)
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

fn open_port(eal: Eal, port: &PortSettings, pool: Mempool) -> Result<(dpdk_sys::Port, Vec<Queues>), HardwareError> {
    Ok(dpdk::open(eal, port, pool)?)
}

async fn open_twin(port: &PortSettings, mac: Option<Mac>) -> Result<(Interface, OwnedFd), TwinError> {
    let config = TwinConfig { name: port.name.clone(), mac, mtu: port.mtu_bytes, addresses: port.addresses.clone() };
    Interface::open(&config).await
}
