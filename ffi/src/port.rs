//! A network port: attaches a device, configures its queues (as many as wanted, at most those that the device has), and
//! starts it. The port is stopped and closed when its last part is dropped.
//!
//! Virtual devices are attached one by one after EAL's start instead of on its command line, so that an error names its
//! device. No offload is requested in either direction, so received frames are those on the wire.

use std::cell::Cell;
use std::ffi::CStr;
use std::marker::PhantomData;
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use crate::device::Device;
use crate::eal::Eal;
use crate::error::Error;
use crate::interface;
use crate::mempool::Mempool;
use crate::queue::{RxQueue, TxQueue};
use crate::{log, raw};

/// Descriptors per queue. 1,024 x 64 B at 100 Gbit/s take 7 microseconds, more than a burst; drivers adjust the number.
const DESCRIPTORS: u16 = 1024;

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
}

/// Receive side scaling: the key of the Toeplitz hash, and the queues for its low seven bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spread {
    /// The key.
    pub key: [u8; raw::SLUICE_RSS_KEY_BYTES as usize],
    /// The queues, each below [`PortConfig::queues`].
    pub queues: [u16; raw::SLUICE_RETA_ENTRIES as usize],
}

/// Why a device does not distribute received packets as configured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSpread {
    /// It was not configured.
    #[error("not asked for")]
    NotAsked,
    /// There are fewer receive queues than workers.
    #[error("{driver} has {found} receive queues")]
    Queues {
        /// The driver.
        driver: String,
        /// Number of its receive queues.
        found: u16,
    },
    /// The device does not hash TCP and UDP of both address families, or not with our key.
    #[error("{driver} offers no Toeplitz hash over TCP and UDP")]
    NoHash {
        /// The driver.
        driver: String,
    },
    /// The device refused the table, or does not report it.
    #[error("{driver} does not take a redirection table: {reason}")]
    NoTable {
        /// The driver.
        driver: String,
        /// The cause.
        reason: String,
    },
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
    /// Whether the device reports that it distributes received packets as configured.
    pub spread: Result<(), NoSpread>,
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

/// A started port, shared by the handle and the queues. Dropping the last of them stops the port.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) id: u16,
    device: Device,
    /// The device's original Ethernet address, to be restored if it was changed: drivers over a Linux interface change
    /// it there.
    own_mac: Option<[u8; 6]>,
}

/// The control handle of a port. Packets pass through its queues.
#[derive(Debug)]
pub struct Port {
    started: Arc<Started>,
    driver: String,
    mac: [u8; 6],
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
        let mut started = Started { id, device: config.device.clone(), own_mac: None };
        let mut setup = raw::sluice_port_setup {
            pool: pool.as_ptr(),
            mtu_bytes: config.mtu_bytes,
            rx_descriptors: DESCRIPTORS,
            tx_descriptors: DESCRIPTORS,
            rx_queues: config.queues,
            tx_queues: config.queues,
            rss_key: config.spread.as_ref().map_or(ptr::null(), |spread| spread.key.as_ptr()),
            spreads: 0,
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
        started.check(step_name(setup.step), code)?;
        let wanted = started.take_mac(config.mac)?;
        // SAFETY: `id` is configured with all its queues.
        started.check("start", unsafe { raw::rte_eth_dev_start(id) })?;
        let mac = started.open_filter(wanted)?;
        let started = Arc::new(started);
        let port = Self { driver: driver(id), mac, started: Arc::clone(&started), not_sync: PhantomData };
        let spread = port.spread(config, &setup);
        let rx = (0..setup.rx_queues).map(|queue| RxQueue::new(Arc::clone(&started), queue, pool)).collect();
        let tx = (0..setup.tx_queues).map(|queue| TxQueue::new(Arc::clone(&started), queue)).collect();
        Ok(StartedPort { port, rx, tx, spread })
    }

    /// Configures the distribution of received packets, and reads back whether the device uses it.
    fn spread(&self, config: &PortConfig, setup: &raw::sluice_port_setup) -> Result<(), NoSpread> {
        let driver = || self.driver.clone();
        let spread = config.spread.as_ref().ok_or(NoSpread::NotAsked)?;
        if setup.rx_queues < config.queues {
            return Err(NoSpread::Queues { driver: driver(), found: setup.rx_queues });
        }
        if setup.spreads == 0 {
            return Err(NoSpread::NoHash { driver: driver() });
        }
        // SAFETY: the port is started; key and table have the expected lengths and outlive the call.
        match unsafe { raw::sluice_port_spread(self.started.id, spread.key.as_ptr(), spread.queues.as_ptr()) } {
            0 => Ok(()),
            code => Err(NoSpread::NoTable { driver: driver(), reason: raw::error_text(code) }),
        }
    }

    /// Name of the driver.
    #[must_use]
    pub fn driver(&self) -> &str {
        &self.driver
    }

    /// The device as configured.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.started.device
    }

    /// Its Ethernet address: the configured one, or else that of the device.
    #[must_use]
    pub fn mac(&self) -> [u8; 6] {
        self.mac
    }

    /// Largest IP packet, bytes.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn mtu_bytes(&self) -> Result<u16, Error> {
        let mut mtu = 0;
        // SAFETY: the port is started, and `mtu` is written only in this call.
        let code = unsafe { raw::rte_eth_dev_get_mtu(self.started.id, &raw mut mtu) };
        self.started.check("read the MTU", code)?;
        Ok(mtu)
    }

    /// The counters of the driver.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn stats(&self) -> Result<PortStats, Error> {
        let mut now = raw::sluice_port_stats::default();
        // SAFETY: the port is started, and `now` is written only in this call. Queues may run concurrently.
        let code = unsafe { raw::sluice_port_stats(self.started.id, &raw mut now) };
        self.started.check("read counters", code)?;
        Ok(PortStats {
            rx_packets: now.rx_packets,
            tx_packets: now.tx_packets,
            rx_bytes: now.rx_bytes,
            tx_bytes: now.tx_bytes,
            rx_missed: now.rx_missed,
            rx_errors: now.rx_errors,
            tx_errors: now.tx_errors,
            rx_no_buffer: now.rx_no_buffer,
        })
    }

    /// The active member of a bond, or the last active one while no member has a link. None if the port is not a bond.
    #[must_use]
    pub fn active_member(&self) -> Option<Device> {
        if !self.started.device.is_bond() {
            return None;
        }
        // SAFETY: the port is started, and is a bond.
        let active = u16::try_from(unsafe { raw::sluice_bond_active_member(self.started.id) }).ok()?;
        self.started.device.members().into_iter().find(|member| id_of(member) == Some(active))
    }

    /// State of the link. Drivers over a Linux interface always report it as up, with an invented speed; for these the
    /// state comes from Linux.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn link(&self) -> Result<Link, Error> {
        if let Some(is_up) = self.started.device.interface().and_then(interface::is_running) {
            return Ok(Link { is_up, speed_mbps: None });
        }
        let mut now = raw::sluice_link::default();
        // SAFETY: the port is started, and `now` is written only in this call.
        let code = unsafe { raw::sluice_port_link(self.started.id, &raw mut now) };
        self.started.check("read the link state", code)?;
        Ok(Link { is_up: now.up != 0, speed_mbps: Some(now.speed_mbps).filter(|&speed| speed != 0) })
    }
}

/// -ENOTSUP
const NOT_SUPPORTED: i32 = -libc::ENOTSUP;
/// -EFAULT: what `rte_dev_probe` returns for a name that no driver takes.
const NO_SUCH_DRIVER: i32 = -libc::EFAULT;

impl Started {
    /// Sets the wanted Ethernet address, if there is one.
    fn take_mac(&mut self, wanted: Option<[u8; 6]>) -> Result<Option<[u8; 6]>, Error> {
        let own = self.known_mac()?;
        let Some(mac) = wanted.filter(|mac| *mac != own) else { return Ok(wanted) };
        // SAFETY: the port is configured; six bytes are read.
        let code = unsafe {
            match self.device.is_bond() {
                // A bond loses an address that is set only on the port when it starts.
                true => raw::sluice_bond_set_mac(self.id, mac.as_ptr()),
                false => raw::sluice_port_set_mac(self.id, mac.as_ptr()),
            }
        };
        match code {
            // Such a port (af_xdp) receives promiscuously, so frames to an address that the device does not know arrive
            // as well.
            NOT_SUPPORTED => {}
            code => {
                self.check("set the Ethernet address", code)?;
                self.own_mac = Some(own);
            }
        }
        Ok(wanted)
    }

    /// The current Ethernet address of the device.
    fn known_mac(&self) -> Result<[u8; 6], Error> {
        let mut mac = [0; 6];
        // SAFETY: the port is configured; six bytes are written.
        let code = unsafe { raw::sluice_port_mac(self.id, mac.as_mut_ptr()) };
        self.check("read the Ethernet address", code)?;
        Ok(mac)
    }

    /// Opens the receive filter for frames to our address and to groups (neighbour discovery). Frames for others, which
    /// a switch floods, stay outside. If the device does not know our address or has no filter for groups, it receives
    /// all frames. Returns our address: the wanted one, or else that of the device. (A bond takes that of its first
    /// member when it starts.)
    fn open_filter(&self, wanted: Option<[u8; 6]>) -> Result<[u8; 6], Error> {
        let known = self.known_mac()?;
        let mac = wanted.unwrap_or(known);
        // SAFETY: the port is started.
        if known == mac && unsafe { raw::rte_eth_allmulticast_enable(self.id) } == 0 {
            return Ok(mac);
        }
        // SAFETY: the port is started.
        match unsafe { raw::rte_eth_promiscuous_enable(self.id) } {
            // A virtual device without promiscuous mode has no filter.
            NOT_SUPPORTED => {}
            code => self.check("receive promiscuously", code)?,
        }
        Ok(mac)
    }

    fn check(&self, step: &'static str, code: i32) -> Result<(), Error> {
        if code == 0 { Ok(()) } else { Err(refused(&self.device, step, code)) }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // SAFETY: the port is attached, and no queue or handle of it remains. Stopping a port that did not start is an
        // error without effect. Packets of its pool that others hold stay valid, because pools are never freed.
        unsafe {
            // A driver over a Linux interface sets both there, where they would remain.
            raw::rte_eth_promiscuous_disable(self.id);
            raw::rte_eth_allmulticast_disable(self.id);
            if let Some(mac) = self.own_mac {
                raw::sluice_port_set_mac(self.id, mac.as_ptr());
            }
            close(self.id, &self.device);
        }
        drop(Members::left_by(&self.device));
    }
}

/// The error of an MTU beyond the limits of the driver; drivers themselves name other numbers, such as the frame
/// length.
fn mtu_refused(config: &PortConfig, setup: &raw::sluice_port_setup) -> Error {
    let &raw::sluice_port_setup { mtu_min, mtu_max, .. } = setup;
    Error::Device {
        device: config.device.to_string(),
        step: "set the MTU",
        reason: format!("its driver takes {mtu_min} to {mtu_max} bytes, and {} are wanted", config.mtu_bytes),
        said: log::take_errors(),
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

/// DPDK's port number of an attached device. EAL must run.
fn id_of(device: &Device) -> Option<u16> {
    let (name, mut id) = (raw::c_string(&device.port_name()), 0);
    // SAFETY: EAL runs, because an `Eal` or a port exists; the name is terminated; `id` is written only in this call.
    (unsafe { raw::rte_eth_dev_get_port_by_name(name.as_ptr(), &raw mut id) } == 0).then_some(id)
}

fn attach(device: &Device) -> Result<u16, Error> {
    let name = device.port_name();
    let find = || id_of(device);
    if let Device::Pci { .. } = device {
        return attach_pci(device, &name, find);
    }
    if find().is_some() {
        return Err(Error::DeviceInUse { device: device.to_string(), name });
    }
    if let Some(interface) = device.interface()
        && interface::index(interface).is_none()
    {
        return Err(Error::NoInterface { device: device.to_string(), interface: interface.to_owned() });
    }
    let members = Members::attach(device)?;
    let arguments = raw::c_string(&device.to_attach());
    // SAFETY: EAL runs; the string is terminated and copied by DPDK.
    let code = unsafe { raw::rte_dev_probe(arguments.as_ptr()) };
    if code != 0 {
        return Err(refused(device, "attach it", code));
    }
    let id = find().ok_or_else(|| refused(device, "find the port that it should have made", -libc::ENODEV))?;
    members.keep();
    Ok(id)
}

/// Attached members of a bond. Dropping this closes them.
struct Members(Vec<(u16, Device)>);

impl Members {
    fn attach(bond: &Device) -> Result<Self, Error> {
        let mut attached = Self(Vec::new());
        for member in bond.members() {
            let id = attach(&member)?;
            if member.is_silent_about_its_link() {
                // SAFETY: the port is attached and not configured, and only this thread uses it.
                unsafe { raw::sluice_port_disclaim_link_interrupt(id) };
            }
            attached.0.push((id, member));
        }
        Ok(attached)
    }

    /// Leaves the members to the bond.
    fn keep(mut self) {
        self.0.clear();
    }

    /// The members of a closed bond.
    fn left_by(bond: &Device) -> Self {
        Self(bond.members().into_iter().filter_map(|member| Some((id_of(&member)?, member))).collect())
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        for (id, member) in &self.0 {
            // SAFETY: the port is attached, no bond owns it, and nothing else uses it.
            unsafe { close(*id, member) };
        }
    }
}

/// Stops and closes a port, and removes its device from its bus. A device that returns while its bus still holds the
/// old one would be refused as already attached. Other ports of the device are removed with it; nothing uses them,
/// because no two ports are configured with one device.
///
/// # Safety
/// The port is attached, and no queue or handle of it remains.
unsafe fn close(id: u16, device: &Device) {
    // SAFETY: as the caller promises. Stopping a port that did not start is an error without effect.
    unsafe {
        raw::rte_eth_dev_stop(id);
        let on_bus = raw::sluice_port_device(id);
        raw::rte_eth_dev_close(id);
        let code = if on_bus.is_null() { 0 } else { raw::rte_dev_remove(on_bus) };
        if code < 0 {
            let reason = raw::error_text(code);
            tracing::warn!(%device, reason, "the device stays on its bus; if it returns, it cannot be attached before a restart of the gateway");
        }
    }
}

/// Finds the port that EAL created at its start, or probes the bus for a device that was added later.
fn attach_pci(device: &Device, name: &str, find: impl Fn() -> Option<u16>) -> Result<u16, Error> {
    if let Some(id) = find() {
        return Ok(id);
    }
    if device.presence().is_some() {
        let arguments = raw::c_string(&device.to_string());
        // SAFETY: EAL runs; the string is terminated and copied by DPDK. Success is checked below.
        unsafe { raw::rte_dev_probe(arguments.as_ptr()) };
    }
    find().ok_or_else(|| Error::NoSuchDevice { device: name.to_owned(), found: pci_state(Path::new("/sys"), name) })
}

/// Why DPDK has no port for a PCI address.
fn pci_state(sys: &Path, address: &str) -> String {
    let device = sys.join("bus/pci/devices").join(address);
    if !device.exists() {
        return "there is no such device on the PCI bus; see `lspci -D`".into();
    }
    match std::fs::read_link(device.join("driver")) {
        Ok(driver) => format!(
            "it is bound to the kernel driver {}, and no DPDK driver took it; bind it to vfio-pci (`dpdk-devbind.py -b vfio-pci {address}`)",
            driver.file_name().unwrap_or_default().to_string_lossy()
        ),
        Err(_) => format!("it is bound to no kernel driver; bind it to vfio-pci (`dpdk-devbind.py -b vfio-pci {address}`)"),
    }
}

/// The error of a refusal: a missing privilege, if the process lacks one that the driver needs.
fn refused(device: &Device, step: &'static str, code: i32) -> Error {
    let said = log::take_errors();
    if matches!(device, Device::Virtual { .. }) && code == NO_SUCH_DRIVER {
        let found = "DPDK has no driver of that name; `sluiced doctor` shows where drivers are looked for".into();
        return Error::NoSuchDevice { device: device.to_string(), found };
    }
    match missing_capability(device) {
        Some(capability) => Error::Privilege { device: device.to_string(), capability, said },
        // Drivers return -1 for any error that they have logged.
        None if code == -1 => Error::Device { device: device.to_string(), step, reason: "the driver refuses".into(), said },
        None => Error::Device { device: device.to_string(), step, reason: raw::error_text(code), said },
    }
}

/// The capability that the driver needs and this thread lacks.
fn missing_capability(device: &Device) -> Option<&'static str> {
    use rustix::thread::{CapabilitySet, capabilities};
    let Device::Virtual { name, .. } = device else { return None };
    let (needed, text) = match name {
        _ if name.starts_with("net_af_packet") => (CapabilitySet::NET_RAW, "CAP_NET_RAW"),
        _ if name.starts_with("net_af_xdp") => (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF"),
        _ if name.starts_with("net_tap") => (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN"),
        _ => return None,
    };
    capabilities(None).is_ok_and(|sets| !sets.effective.contains(needed)).then_some(text)
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
            let name = "port::tests::a_detached_device_can_return_on_any_bus";
            let child =
                Command::new(std::env::current_exe().unwrap()).args(["--exact", "--nocapture", name]).env(CHILD, "1").output();
            let output = child.unwrap();
            let said = [output.stdout, output.stderr].concat();
            assert!(output.status.success(), "{}\n{}", output.status, String::from_utf8_lossy(&said));
            return;
        }
        let eal = Eal::start(&EalConfig { hugepages: Hugepages::Off, memory_mb: 32, devices: vec![], cores: vec![] }).unwrap();
        let config = MempoolConfig { name: "test".into(), packets: 1023, frame_bytes: 1518, node: None };
        let pool = Mempool::new(eal, &config).unwrap();
        for name in ["0000:3b:00.0", "net_null0"] {
            // The device is on the virtual bus, even if the port believes that it is on the PCI bus.
            let config = PortConfig { device: name.parse().unwrap(), mtu_bytes: 1500, mac: None, queues: 1, spread: None };
            for _ in 0..3 {
                let id = attach(&"net_null0".parse().unwrap()).unwrap();
                drop(Port::configure(id, &config, pool).unwrap());
            }
        }
    }
}
