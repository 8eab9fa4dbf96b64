//! A network port: attaches a device, configures its queues (as many as wanted, at most those that the device has), and
//! starts it. The port is stopped and closed when its last part is dropped.
//!
//! No offload is requested that changes packets, so received frames are those on the wire. Requested are the RSS hash of
//! received packets, and the fast release of transmitted ones where its condition holds ([`PortConfig::fast_free`]).

use std::cell::Cell;
use std::ffi::CStr;
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

use super::hotplug::{attach, attached_members};
use super::owned_port::OwnedPort;
use super::queue::{RxQueue, TxQueue};
use super::queue_mode::QueueModes;
use super::rss::{self, NoSpread, Spread, Spreading};
use super::wakeup::{self, Wakeup};
use crate::device::{AF_PACKET, Device};
use crate::eal::{Eal, device_requests, log};
use crate::error::Error;
use crate::mempool::Mempool;
use crate::raw;
use linux::interface;

/// Descriptors of each queue of a port. Drivers adjust the numbers to what their devices take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// Of a receive queue: frames that may wait for the worker.
    pub rx: u16,
    /// Of a transmit queue: frames that may wait for the device.
    pub tx: u16,
}

impl Default for Descriptors {
    /// 1,024 frames of 64 B at 100 Gbit/s take 7 microseconds, more than a burst.
    fn default() -> Self {
        Self { rx: 1024, tx: 1024 }
    }
}

/// What a driver reports about a device that has to be opened anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// The device was reset: by the driver of its physical function, or since it stopped working (ena, iavf, igb and
    /// ixgbe as virtual functions).
    Reset,
    /// The driver reports that the device is gone.
    Removed,
    /// The kernel asks this process to release the device, and waits for it.
    Requested,
}

/// Configuration of a port.
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// The device.
    pub device: Device,
    /// Largest IP packet, bytes.
    pub mtu_bytes: u16,
    /// Ethernet address of the port; none: that of the device.
    pub mac: Option<[u8; 6]>,
    /// Wanted number of receive queues and of transmit queues: one of each per worker.
    pub queues: u16,
    /// Distribution of received packets over several queues; none: the choice of the device.
    pub spread: Option<Spread>,
    /// Descriptors of each queue.
    pub descriptors: Descriptors,
    /// Whether receive queues shall wake threads that sleep, where the device can ([`RxQueue::readable`]).
    pub wakes: bool,
    /// Whether all packets that the port sends come from one pool, in one segment each, with one reference, and without
    /// memory of others attached. Drivers that offer it then return them to the pool without a look at them
    /// (`RTE_ETH_TX_OFFLOAD_MBUF_FAST_FREE`).
    pub fast_free: bool,
}

/// A started port with its queues.
#[derive(Debug)]
pub struct StartedPort {
    /// The port.
    pub port: Port,
    /// Its receive queues: at least one, at most as many as wanted.
    pub rx: Vec<RxQueue>,
    /// Its transmit queues, likewise.
    pub tx: Vec<TxQueue>,
    /// How the device reports that it distributes received packets, or why not as configured.
    pub spread: Result<Spreading, NoSpread>,
}

/// Counters of the driver, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortStats {
    /// Packets received.
    pub rx_packets: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Bytes of the packets received, as the driver counts them.
    pub rx_bytes: u64,
    /// Bytes of the packets sent.
    pub tx_bytes: u64,
    /// Packets that arrived while the queue was full.
    pub rx_missed: u64,
    /// Packets received with errors.
    pub rx_errors: u64,
    /// Packets that could not be sent.
    pub tx_errors: u64,
    /// Packets not received because the pool was empty.
    pub rx_no_buffer: u64,
}

/// State of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Whether the link is up.
    pub is_up: bool,
    /// None: unknown.
    pub speed_mbps: Option<u32>,
}

/// The control handle of a port. Packets pass through its queues.
#[derive(Debug)]
pub struct Port {
    owned: Arc<OwnedPort>,
    /// The members of a bond, with their port numbers.
    members: Vec<(u16, Device)>,
    driver: String,
    mac: [u8; 6],
    rx_queues: u16,
    tx_queues: u16,
    descriptors: Descriptors,
    modes: QueueModes,
    /// What the sockets of af_packet have reported as missed so far: each report starts them anew.
    missed_by_sockets: Cell<u64>,
    // DPDK does not allow concurrent control calls on one port.
    not_sync: PhantomData<Cell<()>>,
}

impl Port {
    /// Attaches the device and starts it. It receives into `pool` the frames to its Ethernet address and to groups, or
    /// all frames if it has no such filter.
    ///
    /// # Errors
    /// The device or its interface does not exist or is in use, a privilege is missing, or the driver refuses.
    pub fn start(_eal: Eal, config: &PortConfig, pool: Mempool) -> Result<StartedPort, Error> {
        log::take_errors();
        let id = attach(&config.device)?;
        // Errors logged during a successful attach do not explain a later failure.
        log::take_errors();
        Self::configure(id, config, pool)
    }

    /// Configures and starts a device that is attached.
    pub(crate) fn configure(id: u16, config: &PortConfig, pool: Mempool) -> Result<StartedPort, Error> {
        let mut owned = OwnedPort::new(id, config.device.clone());
        let mut setup = raw::sluice_port_setup {
            pool: pool.as_ptr(),
            mtu_bytes: config.mtu_bytes,
            rx_descriptors: config.descriptors.rx,
            tx_descriptors: config.descriptors.tx,
            rx_queues: config.queues,
            tx_queues: config.queues,
            rss_key: config.spread.as_ref().map_or(ptr::null(), |spread| spread.key.as_ptr()),
            spreads: 0,
            interrupts: (config.wakes && wakeup::may_interrupt(&config.device)).into(),
            fast_free: config.fast_free.into(),
            mtu_min: 0,
            mtu_max: 0,
            step: 0,
        };
        // SAFETY: `id` is attached and not started, and only this thread uses it; the pool is never freed; the key, if
        // there is one, has the expected length and outlives the call.
        let code = unsafe { raw::sluice_port_configure(id, &raw mut setup) };
        if code != 0 && u32::from(config.mtu_bytes) > setup.mtu_max {
            return Err(mtu_refused(config, &setup));
        }
        owned.check(step_name(setup.step), code)?;
        let wanted = owned.set_mac(config.mac)?;
        // SAFETY: `id` is configured with all its queues.
        let mut code = unsafe { raw::rte_eth_dev_start(id) };
        if code != 0 && setup.interrupts != 0 {
            // It may lack interrupts for its queues, as over UIO.
            setup.interrupts = 0;
            // SAFETY: as above; the port is not started.
            code = unsafe { raw::sluice_port_configure(id, &raw mut setup) };
            owned.check(step_name(setup.step), code)?;
            // SAFETY: as above.
            code = unsafe { raw::rte_eth_dev_start(id) };
        }
        owned.check("start", code)?;
        let members = attached_members(&config.device);
        let mac = owned.open_filter(wanted, &members)?;
        let owned = Arc::new(owned);
        let port = Self {
            members,
            driver: driver(id),
            mac,
            rx_queues: setup.rx_queues,
            tx_queues: setup.tx_queues,
            descriptors: Descriptors { rx: setup.rx_descriptors, tx: setup.tx_descriptors },
            modes: QueueModes::of(&owned),
            missed_by_sockets: Cell::new(0),
            owned: Arc::clone(&owned),
            not_sync: PhantomData,
        };
        port.warn_of_reassembly();
        let spread = rss::distribute(&owned, &port.driver, config.spread.as_ref(), config.queues, &setup);
        let wakeup = |queue| config.wakes.then(|| Wakeup::of(&owned, queue, setup.interrupts != 0)).flatten();
        let rx = (0..setup.rx_queues).map(|queue| RxQueue::new(Arc::clone(&owned), queue, pool, wakeup(queue))).collect();
        let tx = (0..setup.tx_queues).map(|queue| TxQueue::new(Arc::clone(&owned), queue)).collect();
        Ok(StartedPort { port, rx, tx, spread })
    }

    /// Warns if the kernel reassembles fragments before af_packet gets them (see `setsockopt` in the shim).
    fn warn_of_reassembly(&self) {
        let device = &self.owned.device;
        // SAFETY: the port is started and has the queues; its driver is the one that the call expects.
        let reassembles = |queue| unsafe { raw::sluice_af_packet_reassembles(self.owned.id, queue) != 0 };
        if device.has_driver(AF_PACKET) && (0..self.rx_queues).any(reassembles) {
            tracing::warn!(
                %device,
                "the kernel reassembles IPv4 fragments of this port, and datagrams longer than a frame of its ring are dropped \
                 (truncated): this build could not clear the flag of DPDK's driver"
            );
        }
    }

    pub(super) fn owned(&self) -> Arc<OwnedPort> {
        Arc::clone(&self.owned)
    }

    /// The members of a bond, with their port numbers.
    pub(super) fn members(&self) -> &[(u16, Device)] {
        &self.members
    }

    pub(super) fn members_mut(&mut self) -> &mut Vec<(u16, Device)> {
        &mut self.members
    }

    /// How its queues move packets, since its start.
    #[must_use]
    pub fn modes(&self) -> &QueueModes {
        &self.modes
    }

    /// Number of receive queues and of transmit queues.
    #[must_use]
    pub fn queue_counts(&self) -> (usize, usize) {
        (self.rx_queues.into(), self.tx_queues.into())
    }

    /// Name of the driver.
    #[must_use]
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// The device as configured.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.owned.device
    }

    /// Its Ethernet address: the configured one, or else that of the device.
    #[must_use]
    pub fn mac(&self) -> [u8; 6] {
        self.mac
    }

    /// The descriptors of each queue, as adjusted by the driver.
    #[must_use]
    pub fn descriptors(&self) -> Descriptors {
        self.descriptors
    }

    /// What the kernel or the driver has reported since the port was opened; the last event of the driver if there were
    /// several.
    #[must_use]
    pub fn event(&self) -> Option<DeviceEvent> {
        if device_requests::contains(&self.owned.device.port_name()) {
            return Some(DeviceEvent::Requested);
        }
        // SAFETY: reads an atomic byte of static memory.
        match u32::try_from(unsafe { raw::sluice_port_event(self.owned.id) }) {
            Ok(raw::SLUICE_EVENT_RESET) => Some(DeviceEvent::Reset),
            Ok(raw::SLUICE_EVENT_REMOVED) => Some(DeviceEvent::Removed),
            _ => None,
        }
    }

    /// Whether the driver keeps its watchdogs in DPDK's timers, which an application runs ([`RxQueue::run_timers`]).
    #[must_use]
    pub fn needs_timers(&self) -> bool {
        self.driver == DRIVER_WITH_TIMERS
    }

    /// Largest IP packet, bytes.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn mtu_bytes(&self) -> Result<u16, Error> {
        let mut mtu = 0;
        // SAFETY: the port is started, and `mtu` is written only in this call.
        let code = unsafe { raw::rte_eth_dev_get_mtu(self.owned.id, &raw mut mtu) };
        self.owned.check("read the MTU", code)?;
        Ok(mtu)
    }

    /// The counters of the driver.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn stats(&self) -> Result<PortStats, Error> {
        let mut now = raw::sluice_port_stats::default();
        // SAFETY: the port is started, and `now` is written only in this call. Queues may run concurrently.
        let code = unsafe { raw::sluice_port_stats(self.owned.id, &raw mut now) };
        self.owned.check("read counters", code)?;
        Ok(PortStats {
            rx_packets: now.rx_packets,
            tx_packets: now.tx_packets,
            rx_bytes: now.rx_bytes,
            tx_bytes: now.tx_bytes,
            rx_missed: now.rx_missed + self.missed_by_sockets(),
            rx_errors: now.rx_errors,
            tx_errors: now.tx_errors,
            rx_no_buffer: now.rx_no_buffer,
        })
    }

    /// Frames that af_packet has lost because a ring was full; 0 of other drivers.
    fn missed_by_sockets(&self) -> u64 {
        if self.owned.device.has_driver(AF_PACKET) {
            // SAFETY: the port is started, and has these queues; its driver is the one that the call expects.
            let missed = unsafe { raw::sluice_af_packet_missed(self.owned.id, self.rx_queues) };
            self.missed_by_sockets.set(self.missed_by_sockets.get() + missed);
        }
        self.missed_by_sockets.get()
    }

    /// The active member of a bond, or the last active one while no member has a link. None if the port is not a bond.
    #[must_use]
    pub fn active_member(&self) -> Option<Device> {
        if !self.owned.device.is_bond() {
            return None;
        }
        // SAFETY: the port is started, and is a bond.
        let active = u16::try_from(unsafe { raw::sluice_bond_active_member(self.owned.id) }).ok()?;
        self.members.iter().find(|(id, _)| *id == active).map(|(_, member)| member.clone())
    }

    /// State of the link. Drivers over a Linux interface always report it as up, with an invented speed; for these the
    /// state comes from Linux.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn link(&self) -> Result<Link, Error> {
        if let Some(interface) = self.owned.device.interface() {
            let is_up = interface::is_running(interface)
                .or_else(|error| self.owned.check("read the link state", -error.raw_os_error()).map(|()| false))?;
            return Ok(Link { is_up, speed_mbps: None });
        }
        let mut now = raw::sluice_link::default();
        // SAFETY: the port is started, and `now` is written only in this call.
        let code = unsafe { raw::sluice_port_link(self.owned.id, &raw mut now) };
        self.owned.check("read the link state", code)?;
        Ok(Link { is_up: now.up != 0, speed_mbps: Some(now.speed_mbps).filter(|&speed| speed != 0) })
    }
}

/// The driver of Amazon's cards: the only one of DPDK 22.11's network drivers that uses the timer library.
const DRIVER_WITH_TIMERS: &str = "net_ena";

/// The error of an MTU beyond the limits of the driver; drivers themselves name other numbers, such as the frame
/// length.
fn mtu_refused(config: &PortConfig, setup: &raw::sluice_port_setup) -> Error {
    let &raw::sluice_port_setup { mtu_min, mtu_max, .. } = setup;
    Error::Device {
        device: config.device.to_string(),
        step: "set the MTU",
        reason: format!("its driver takes {mtu_min} to {mtu_max} bytes, and {} are wanted", config.mtu_bytes),
        logged: log::take_errors(),
    }
}

fn step_name(step: i32) -> &'static str {
    match u32::try_from(step) {
        Ok(raw::SLUICE_STEP_INFO) => "ask the driver what it can do",
        Ok(raw::SLUICE_STEP_MTU) => "set the MTU",
        Ok(raw::SLUICE_STEP_CONFIGURE) => "configure its queues",
        Ok(raw::SLUICE_STEP_RX_QUEUE) => "set up a receive queue",
        Ok(raw::SLUICE_STEP_TX_QUEUE) => "set up a transmit queue",
        _ => "set it up",
    }
}

fn driver(id: u16) -> String {
    let mut name = [0; 64];
    // SAFETY: the port is started; at most 64 bytes are written, terminated.
    unsafe {
        raw::sluice_port_driver(id, name.as_mut_ptr(), name.len());
        CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::{EalConfig, Hugepages, MempoolConfig};

    #[test]
    fn a_detached_device_can_return_on_any_bus() {
        const CHILD: &str = "SLUICE_PORT_TEST";
        if std::env::var_os(CHILD).is_none() {
            // EAL starts once per process.
            let module = module_path!().split_once("::").map_or("", |(_, path)| path);
            let name = format!("{module}::a_detached_device_can_return_on_any_bus");
            let child =
                Command::new(std::env::current_exe().unwrap()).args(["--exact", "--nocapture", &name]).env(CHILD, "1").output();
            let output = child.unwrap();
            let text = [output.stdout, output.stderr].concat();
            assert!(output.status.success(), "{}\n{}", output.status, String::from_utf8_lossy(&text));
            return;
        }
        let eal = Eal::start(&EalConfig { hugepages: Hugepages::Off, memory_mb: 32, node: None, devices: vec![], cores: vec![] })
            .unwrap();
        let config = MempoolConfig { name: "test".into(), packets: 1023, frame_bytes: 1518, node: None };
        let pool = Mempool::new(eal, &config).unwrap();
        for name in ["0000:3b:00.0", "net_null0"] {
            // The device is on the virtual bus, even if the port believes that it is on the PCI bus.
            let config = PortConfig {
                device: name.parse().unwrap(),
                mtu_bytes: 1500,
                mac: None,
                queues: 1,
                spread: None,
                descriptors: Descriptors::default(),
                wakes: false,
                fast_free: false,
            };
            for _ in 0..3 {
                let id = attach(&"net_null0".parse().unwrap()).unwrap();
                drop(Port::configure(id, &config, pool).unwrap());
            }
        }
    }
}
