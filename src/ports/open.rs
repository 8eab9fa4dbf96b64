//! Opens DPDK, the packet pool, all ports whose devices are present, and every twin at the start.

use std::sync::Arc;
use std::time::Duration;

use control::config::logging;
use dataplane::workers::{Steering, WORKERS_MAX};
use dataplane::{Mac, Peers, TwinQueues};
use dpdk_port::{DpdkPort, Packet, channel};
use dpdk_sys::{Device, Eal, Mempool};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::af_packet::{self, PreparedInterface};
use super::dpdk::{self, OpenedPort, QueueRequest};
use super::error::PortsError;
use super::handle::PortHandle;
use super::hotplug::{self, CallState, DeviceState, HotplugPort, OpeningCall};
use super::numa;
use super::steering::{self, KindState};
use super::twin::{Interface, TwinConfig, TwinCounters, TwinPort, TwinReconciler, TwinThread};
use crate::settings::{Poll, PortSettings, Settings, Twin};
use crate::worker_threads::Bell;

/// Time after which a start of DPDK counts as hanging. Its probes of cards with firmware take some seconds each.
const EAL_LIMIT: Duration = Duration::from_secs(60);
/// And after a signal to stop.
const EAL_GRACE: Duration = Duration::from_secs(5);
/// Exit code if it hangs.
const EAL_HANGS: i32 = 1;

/// What a worker polls: a port, and the rings of its twin.
pub type WorkerPort = (DpdkPort, Option<Arc<TwinQueues<Packet>>>);

/// The part of one worker.
#[derive(Debug)]
pub struct WorkerPorts {
    /// The ports.
    pub ports: Vec<WorkerPort>,
    /// The other workers, if there are any.
    pub peers: Option<Peers<Packet>>,
    /// Its bell, if it sleeps when nothing arrives.
    pub bell: Option<Bell>,
}

/// The opened resources.
pub(super) struct OpenedPorts {
    pub(super) eal: Eal,
    pub(super) handles: Vec<PortHandle>,
    pub(super) ports: Vec<HotplugPort>,
    pub(super) thread: Option<TwinThread>,
    pub(super) workers: Vec<WorkerPorts>,
    pub(super) steering: Arc<Steering>,
}

/// Opens the configured ports. After an error nothing stays open.
///
/// EAL starts first: until then nothing has to be given back, so a start that never ends can end the process.
pub(super) async fn open(settings: &Settings, seed: u64, stop: &CancellationToken) -> Result<OpenedPorts, PortsError> {
    let (eal, pool) = start_eal(settings, stop)?;
    let prepared = prepare(settings).await?;
    match open_all(settings, seed, eal, pool, stop).await {
        Ok(mut opened) => {
            for (port, prepared) in opened.ports.iter_mut().zip(prepared) {
                port.prepared = prepared;
            }
            Ok(opened)
        }
        Err(error) => {
            restore(prepared.into_iter().flatten()).await;
            Err(error)
        }
    }
}

/// Prepares the existing interfaces of af_packet ports, by port.
async fn prepare(settings: &Settings) -> Result<Vec<Option<PreparedInterface>>, PortsError> {
    let mut prepared = Vec::new();
    for port in &settings.ports {
        match af_packet::prepare(&port.device).await.map_err(PortsError::from) {
            Ok(interface) => prepared.push(interface),
            Err(error) if error.is_absence() => prepared.push(None),
            Err(error) => {
                restore(prepared.into_iter().flatten()).await;
                return Err(error);
            }
        }
    }
    Ok(prepared)
}

/// Restores interfaces to their former state.
pub(super) async fn restore(prepared: impl Iterator<Item = PreparedInterface>) {
    for interface in prepared {
        if let Err(error) = interface.restore().await {
            tracing::warn!(%error, "an interface could not be given back to Linux as it was");
        }
    }
}

/// Starts DPDK, which probes the PCI devices of the ports. It does so on this thread, from which the threads of DPDK and
/// of the workers inherit the right to use I/O ports. A driver may never return from that, so the process ends then.
fn start_eal(settings: &Settings, stop: &CancellationToken) -> Result<(Eal, Mempool), PortsError> {
    let (config, pool) = dpdk::plan(settings);
    let pci: Vec<_> = config.devices.iter().filter(|device| device.is_pci()).map(Device::port_name).collect();
    let pci = pci.join(" ");
    tracing::info!(pci, "starting DPDK, which probes the PCI devices of the ports");
    let guard = end_unless_aborted(pci, stop.clone(), EAL_LIMIT, EAL_GRACE);
    let started = Eal::start(&config);
    guard.abort();
    let eal = started?;
    Ok((eal, Mempool::new(eal, &pool)?))
}

/// Ends the process after `limit`, or `grace` after `stop`, unless the task is aborted before.
fn end_unless_aborted(pci: String, stop: CancellationToken, limit: Duration, grace: Duration) -> JoinHandle<()> {
    tokio::spawn(async move {
        tokio::select! {
            () = stop.cancelled() => sleep(grace).await,
            () = sleep(limit) => {}
        }
        let last = dpdk_sys::last_message();
        tracing::error!(
            pci,
            last,
            "DPDK does not start: a device does not answer its driver, so the gateway ends; the last message of DPDK shows which"
        );
        logging::flush();
        std::process::exit(EAL_HANGS);
    })
}

async fn open_all(
    settings: &Settings,
    seed: u64,
    eal: Eal,
    pool: Mempool,
    stop: &CancellationToken,
) -> Result<OpenedPorts, PortsError> {
    let workers = u8::try_from(settings.cores.len()).unwrap_or(WORKERS_MAX);
    let by_nic = Steering::toeplitz(workers, seed);
    let mut request = QueueRequest {
        wakes: settings.poll == Poll::Adaptive,
        is_one_pool: !settings.ports.iter().flat_map(|port| port.device.parts()).any(|device| dpdk::attaches_memory(&device)),
        ..steering::request(workers, &by_nic)
    };
    let presences = presences(&settings.ports)?;
    let opened = open_devices(eal, settings, pool, &request, stop).await?;
    let found = opened.iter().map(|port| port.opened().map(|port| port.found.clone())).collect();
    let (owners, steerings) = steering::choose(workers, by_nic, Steering::own_hash(workers, seed), found);
    if owners.rss_key().is_none() {
        request.spread = None; // of devices that come later
    }
    let (bells, twin_bell) = bells(settings)?;
    let doorbells: Vec<_> = bells.iter().flatten().map(Bell::doorbell).cloned().collect();
    let owners = Arc::new(owners);
    let peers = steering::peers(&owners, &steerings, &doorbells);
    let workers = peers.into_iter().zip(bells).map(|(peers, bell)| WorkerPorts { ports: Vec::new(), peers, bell }).collect();
    let mut all = OpenedPorts { eal, steering: owners, handles: Vec::new(), ports: Vec::new(), thread: None, workers };
    let mut taps = Vec::new();
    for (((settings, opened), steering), presence) in settings.ports.iter().zip(opened).zip(steerings).zip(presences) {
        let mac = opened.opened().map(|opened| Mac(opened.port.mac())).or(settings.mac);
        let (senders, receivers): (Vec<_>, Vec<_>) = all.workers.iter().map(|_| channel()).unzip();
        let mut port = HotplugPort {
            eal,
            pool,
            settings: settings.clone(),
            senders,
            request: request.clone(),
            transmit: steering.transmit(),
            prepared: None,
            twin: None,
            presence: presence.filter(|_| opened.opened().is_some()),
            state: DeviceState::default(),
        };
        let mut handle = PortHandle {
            name: settings.name.clone(),
            device: settings.device.clone(),
            mac,
            port: None,
            failure: None,
            steering,
            logged: [KindState::Settled; 4],
        };
        opened.give_to(&mut port, &mut handle, presence)?;
        let mut rings = None;
        if settings.twin == Twin::Tap {
            let config = twin_config(settings, mac);
            let (interface, tap) = Interface::open(&config).await?;
            let queues = Arc::new(TwinQueues::new().keyed(seed).with_doorbell(twin_bell.as_ref().map(Bell::doorbell).cloned()));
            let (tap, new_tap) = TwinPort::new(tap, Arc::clone(&queues), Arc::new(TwinCounters::default()), settings.mtu_bytes);
            taps.push(tap.waking(doorbells.get(all.ports.len() % all.workers.len()).cloned()));
            port.twin = Some(TwinReconciler::new(config, interface, new_tap));
            rings = Some(queues);
        }
        all.handles.push(handle);
        all.ports.push(port);
        for (worker, receiver) in all.workers.iter_mut().zip(receivers) {
            worker.ports.push((DpdkPort::new(receiver, pool), rings.clone()));
        }
    }
    if !taps.is_empty() {
        let allocate = move || pool.allocate().map(Packet::from);
        all.thread = Some(TwinThread::start(taps, twin_bell, allocate).map_err(PortsError::Thread)?);
    }
    Ok(all)
}

/// The [`Device::presence`](dpdk_sys::Device::presence) of each port's device.
fn presences(ports: &[PortSettings]) -> Result<Vec<Option<u64>>, PortsError> {
    let presence = |port: &PortSettings| {
        port.device.presence().map_err(|source| PortsError::Presence { device: port.device.to_string(), source })
    };
    ports.iter().map(presence).collect()
}

/// The bells of the workers, in their order, and of the twin thread, if workers sleep when nothing arrives.
fn bells(settings: &Settings) -> Result<(Vec<Option<Bell>>, Option<Bell>), PortsError> {
    let bell = || (settings.poll == Poll::Adaptive).then(Bell::new).transpose().map_err(PortsError::Thread);
    let of_workers = settings.cores.iter().map(|_| bell()).collect::<Result<_, _>>()?;
    Ok((of_workers, bell()?))
}

/// A port's device at the start.
enum DeviceAtStart {
    Opened(OpenedPort),
    Absent,
    /// Its driver has not returned yet; the error says so.
    Late(OpeningCall, PortsError),
}

impl DeviceAtStart {
    fn opened(&self) -> Option<&OpenedPort> {
        match self {
            Self::Opened(port) => Some(port),
            Self::Absent | Self::Late(..) => None,
        }
    }

    /// Gives its queues to the workers, or leaves it to the hotplug task.
    fn give_to(self, port: &mut HotplugPort, handle: &mut PortHandle, presence: Option<u64>) -> Result<(), PortsError> {
        match self {
            Self::Opened(OpenedPort { port: opened, queues, .. }) => {
                port.hand_over(queues)?;
                handle.port = Some(opened);
            }
            Self::Late(call, error) => {
                port.state = DeviceState::opening(call, presence);
                handle.failure = Some(error.to_string());
            }
            Self::Absent => {}
        }
        Ok(())
    }
}

/// Opens the devices that are present, by port, one after the other.
async fn open_devices(
    eal: Eal,
    settings: &Settings,
    pool: Mempool,
    request: &QueueRequest,
    stop: &CancellationToken,
) -> Result<Vec<DeviceAtStart>, PortsError> {
    let (mut opened, mut absences) = (Vec::new(), Vec::new());
    for port in &settings.ports {
        let mut call = hotplug::start_opening(eal, port, pool, request)?;
        let Some(state) = stop.run_until_cancelled(call.wait()).await else { return Err(PortsError::Stopped) };
        match state {
            CallState::Returned(Ok(port)) => opened.push(DeviceAtStart::Opened(port)),
            CallState::Returned(Err(error)) => {
                let error = PortsError::from(error);
                if !error.is_absence() {
                    return Err(error);
                }
                absences.push(error);
                opened.push(DeviceAtStart::Absent);
            }
            CallState::Panicked => return Err(PortsError::DriverPanicked),
            CallState::Running | CallState::BecameLate => {
                let error = hotplug::is_late(&port.device, "open");
                tracing::error!(port = port.name, %error, "the port has failed");
                opened.push(DeviceAtStart::Late(call, error));
            }
        }
    }
    check_absences(settings, absences)?;
    numa::warn_of_distance(settings);
    Ok(opened)
}

/// A gateway without any device is misconfigured. With one at least, the others may come later.
fn check_absences(settings: &Settings, mut absences: Vec<PortsError>) -> Result<(), PortsError> {
    if absences.len() == settings.ports.len() && !absences.is_empty() {
        return Err(absences.remove(0));
    }
    for error in absences {
        tracing::warn!(%error, "the device of a port is missing; the other ports run, and it is attached when it appears");
    }
    Ok(())
}

fn twin_config(port: &PortSettings, mac: Option<Mac>) -> TwinConfig {
    TwinConfig { name: port.name.clone(), mac, mtu: port.mtu_bytes, addresses: port.addresses.clone() }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Blocks the thread of the runtime, as a driver does, with the task of `limit_s` and `stop`.
    fn hang(limit_s: u64, is_stopped: bool) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let stop = CancellationToken::new();
            let _guard = end_unless_aborted(String::new(), stop.clone(), Duration::from_secs(limit_s), Duration::ZERO);
            if is_stopped {
                stop.cancel();
            }
            // In the end the test fails by another exit code.
            std::thread::sleep(Duration::from_secs(60));
        });
        std::process::exit(7);
    }

    #[test]
    fn a_start_of_dpdk_that_hangs_ends_at_its_limit_or_when_the_gateway_is_stopped() {
        const CHILD: &str = "SLUICE_START_TEST";
        let module = module_path!().split_once("::").map_or("", |(_, path)| path);
        let name = format!("{module}::a_start_of_dpdk_that_hangs_ends_at_its_limit_or_when_the_gateway_is_stopped");
        match std::env::var(CHILD).as_deref() {
            Ok("limit") => return hang(0, false),
            Ok(_) => return hang(3600, true),
            Err(_) => {}
        }
        for case in ["limit", "stop"] {
            let child =
                Command::new(std::env::current_exe().unwrap()).args(["--exact", &name]).env(CHILD, case).output().unwrap();
            assert_eq!(child.status.code(), Some(EAL_HANGS), "{case}");
        }
    }
}
