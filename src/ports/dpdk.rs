//! The engine's [`Port`] over DPDK: a worker's receive and transmit queue, and the pool that its packets come from.
//!
//! Invariant: nothing here reads packet contents. Each packet has one segment: scattered reception is not requested,
//! buffers hold the longest frame of any port, and `ffi` copies frames that a driver delivers in segments
//! (docs/internals/decisions/0025).
//!
//! Deliberately not here: the configured devices (`settings`), and threads (`worker_threads`).

use std::sync::Arc;

use dataplane::{BURST, Buffer, Burst, Port};
use dpdk_sys::{Descriptors, Device, Eal, EalConfig, Mbuf, Mempool, MempoolConfig, NoSpread, RxQueue, Spread, Spreading};

use super::queue_handover::{QueuePair, QueueReceiver};
use crate::settings::{Hugepages, PortSettings, Settings};
use crate::worker_threads::Sleep;

/// Packets per port, unless its descriptors hold more: the queues of the largest driver (af_xdp, 2,048 + 2,048).
const PACKETS_PER_PORT: u32 = 4096;
/// Packets that up to eight other workers may hand over to one worker (see [`dataplane::Peers`]).
const PACKETS_HANDED: u32 = 4096;
/// Packets per worker: its cache (384), its held packets (1,024), and the rings to and from the twin thread.
const PACKETS_PER_WORKER: u32 = 4096;
/// Ethernet header, two VLAN tags and frame check sequence, in bytes, which drivers include when they check whether a
/// frame fits a buffer.
const LINK_BYTES: u16 = 26;
/// Memory of EAL without packets, in MB: its tables, descriptors, and driver state per port.
const EAL_MB: u64 = 32;
/// See [`EAL_MB`].
const PORT_MB: u64 = 8;

/// A packet in DPDK's memory, as the engine handles it.
#[derive(Debug)]
#[repr(transparent)]
pub struct Packet(Mbuf);

impl From<Mbuf> for Packet {
    #[inline]
    fn from(mbuf: Mbuf) -> Self {
        Self(mbuf)
    }
}

impl From<Packet> for Mbuf {
    #[inline]
    fn from(packet: Packet) -> Self {
        packet.0
    }
}

impl Buffer for Packet {
    #[inline(always)]
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    #[inline(always)]
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }

    #[inline(always)]
    fn prefetch_metadata(&self) {
        dataplane::prefetch_to_write(self.0.metadata());
    }

    #[inline]
    fn resize(&mut self, len: usize) -> bool {
        self.0.resize(len)
    }

    #[inline(always)]
    fn prepend(&mut self, len: usize) -> bool {
        self.0.prepend(len)
    }

    #[inline]
    fn rss_hash(&self) -> Option<u32> {
        self.0.rss_hash()
    }

    #[inline]
    fn trim_front(&mut self, len: usize) {
        self.0.trim_front(len);
    }
}

/// A port as one worker sees it: its queues while the device is there, and the pool that packets come from.
#[derive(Debug)]
pub struct DpdkPort {
    receiver: QueueReceiver,
    pool: Mempool,
}

impl DpdkPort {
    /// A port that gets and returns its queues by a hand-over.
    #[must_use]
    pub fn new(receiver: QueueReceiver, pool: Mempool) -> Self {
        Self { receiver, pool }
    }

    /// Arms what wakes a worker that sleeps, or disarms it.
    pub fn arm(&mut self, armed: bool) {
        if let Some(rx) = self.receiver.same_queues().and_then(|queues| queues.rx.as_mut()) {
            rx.arm(armed);
        }
    }

    /// Adds what ends a sleep: a packet, or the time that a packet may wait where it wakes nobody.
    pub fn prepare(&mut self, sleep: &mut Sleep) {
        match self.receiver.same_queues().and_then(|queues| queues.rx.as_ref()).map(RxQueue::readable) {
            Some(Some(readable)) => sleep.wake_on(Arc::clone(readable)),
            Some(None) => sleep.at_most(Sleep::POLLED),
            None => {}
        }
    }
}

impl Port for DpdkPort {
    type Buffer = Packet;

    #[inline]
    fn receive(&mut self, burst: &mut Burst<Packet>) {
        if let Some(rx) = self.receiver.queues().and_then(|queues| queues.rx.as_mut()) {
            rx.receive(burst);
        }
    }

    /// Without a device every packet is refused.
    #[inline]
    fn transmit(&mut self, burst: &mut Burst<Packet>) {
        if let Some(tx) = self.receiver.same_queues().and_then(|queues| queues.tx.as_mut()) {
            tx.transmit(burst);
        }
    }

    fn allocate(&mut self) -> Option<Packet> {
        self.pool.allocate().map(Packet)
    }

    fn release(&mut self, burst: &mut Burst<Packet>) {
        dpdk_sys::release(burst);
    }
}

// The burst size of the engine equals that of the driver.
const _: () = assert!(BURST == dpdk_sys::BURST);

/// Requested configuration of a device.
#[derive(Clone, Debug)]
pub(super) struct QueueRequest {
    /// Number of queues per direction: one per worker.
    pub(super) queues: u16,
    /// Requested distribution of received packets.
    pub(super) spread: Option<Spread>,
    /// Whether packets shall wake workers that sleep.
    pub(super) wakes: bool,
    /// Whether no port receives packets with memory that is not the pool's ([`attaches_memory`]).
    pub(super) is_one_pool: bool,
}

/// Actual configuration of a device.
#[derive(Clone, Debug)]
pub(super) struct DeviceQueues {
    /// Transmit queues.
    pub(super) transmit: usize,
    /// How it distributes packets.
    pub(super) spread: Result<Spreading, NoSpread>,
}

/// The requirements of a configuration: arguments of EAL, and the packet pool.
#[must_use]
pub fn plan(settings: &Settings) -> (EalConfig, MempoolConfig) {
    let devices: Vec<Device> = settings.ports.iter().flat_map(|port| port.device.parts()).collect();
    let largest_mtu_bytes = settings.ports.iter().map(|port| port.mtu_bytes).max().unwrap_or_default();
    let ports = u32::try_from(devices.len()).unwrap_or(u32::MAX);
    let workers = u32::try_from(settings.cores.len()).unwrap_or(u32::MAX);
    let pair = settings.ports.iter().map(|port| packets_of_pair(port.descriptors)).max().unwrap_or_default();
    let mut pool = size_pool(ports, workers, largest_mtu_bytes, pair);
    pool.node = common_node(devices.iter().map(Device::node));
    let memory_mb = memory_mb(&pool, ports, &devices);
    let hugepages = match settings.hugepages {
        Hugepages::Auto => dpdk_sys::Hugepages::Auto,
        Hugepages::Require => dpdk_sys::Hugepages::Require,
        Hugepages::Off => dpdk_sys::Hugepages::Off,
    };
    // EAL's own threads stay off the workers' cores if there is another core; without an argument they may run
    // anywhere.
    let allowed = core_affinity::get_core_ids().unwrap_or_default();
    let cores = allowed.iter().map(|core| core.id).filter(|core| !settings.cores.contains(core)).collect();
    (EalConfig { hugepages, memory_mb, node: pool.node, devices, cores }, pool)
}

/// Whether a device receives packets with memory that is not the pool's: mlx5 with several packets in one buffer. Drivers
/// must then look at each packet that they release, on other ports too.
pub(super) fn attaches_memory(device: &Device) -> bool {
    let is_set = |argument: &str| argument.strip_prefix("mprq_en=").is_some_and(|value| value != "0");
    device.to_string().split(',').any(is_set)
}

/// Packets that a queue pair holds.
fn packets_of_pair(descriptors: Descriptors) -> u32 {
    u32::from(descriptors.rx) + u32::from(descriptors.tx)
}

/// The common NUMA node of all devices that report one; `None` if they differ.
fn common_node(nodes: impl Iterator<Item = Option<u32>>) -> Option<u32> {
    let mut nodes = nodes.flatten();
    let first = nodes.next()?;
    nodes.all(|node| node == first).then_some(first)
}

/// An opened port.
pub(super) struct OpenedPort {
    /// For control calls.
    pub(super) port: dpdk_sys::Port,
    /// Queues by worker.
    pub(super) queues: Vec<QueuePair>,
    /// What the device has.
    pub(super) found: DeviceQueues,
}

/// Opens a configured port whose device exists. Its queues are ordered by worker.
///
/// # Errors
/// The device does not exist or is in use, a privilege is missing, the driver refuses.
pub(super) fn open(
    eal: Eal,
    settings: &PortSettings,
    pool: Mempool,
    request: &QueueRequest,
) -> Result<OpenedPort, dpdk_sys::Error> {
    let mac = settings.mac.map(|mac| mac.0);
    let QueueRequest { queues, spread, wakes, is_one_pool } = request.clone();
    // A bond sends LACP frames of a pool of its own, and its members may be of several drivers.
    let fast_free = is_one_pool && !settings.device.is_bond();
    let device = settings.device.clone().with_queues(queues);
    let descriptors = settings.descriptors;
    let mtu_bytes = settings.mtu_bytes;
    let config = dpdk_sys::PortConfig { device, mtu_bytes, mac, queues, spread, descriptors, wakes, fast_free };
    let dpdk_sys::StartedPort { port, rx, tx, spread } = dpdk_sys::Port::start(eal, &config, pool)?;
    if port.descriptors() != descriptors {
        let (port, Descriptors { rx, tx }) = (&settings.name, port.descriptors());
        tracing::info!(port, rx, tx, "the driver adjusted the descriptors of each queue");
    }
    let found = DeviceQueues { transmit: tx.len(), spread };
    if wakes && rx.iter().any(|rx| rx.readable().is_none()) {
        let (port, driver) = (&settings.name, port.driver());
        tracing::info!(port, driver, "packets of this driver cannot wake an adaptive worker: it looks for them every 50 us");
    }
    let (mut rx, mut tx) = (rx.into_iter(), tx.into_iter());
    let queues = (0..queues).map(|_| QueuePair { rx: rx.next(), tx: tx.next() }).collect();
    Ok(OpenedPort { port, queues, found })
}

/// The pool for a number of ports and workers, and the memory of EAL in MB if no port is af_xdp.
#[must_use]
pub fn size_memory(ports: u32, workers: u32, largest_mtu_bytes: u16) -> (MempoolConfig, u64) {
    let pool = size_pool(ports, workers, largest_mtu_bytes, packets_of_pair(Descriptors::default()));
    let memory_mb = memory_mb(&pool, ports, &[]);
    (pool, memory_mb)
}

/// `pair`: packets that the largest queue pair holds.
fn size_pool(ports: u32, workers: u32, largest_mtu_bytes: u16, pair: u32) -> MempoolConfig {
    let further = workers.saturating_sub(1);
    let handed = if further > 0 { PACKETS_HANDED * workers } else { 0 };
    let packets = (PACKETS_PER_PORT.max(pair) + pair * further) * ports + PACKETS_PER_WORKER * workers + handed;
    MempoolConfig {
        name: "packets".into(),
        // A DPDK ring holds one less than a power of two without waste.
        packets: packets.next_power_of_two() - 1,
        frame_bytes: largest_mtu_bytes.saturating_add(LINK_BYTES),
        node: None,
    }
}

fn memory_mb(pool: &MempoolConfig, ports: u32, devices: &[Device]) -> u64 {
    pool.memory_bytes(devices).div_ceil(1024 * 1024) + EAL_MB + PORT_MB * u64::from(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_of_two_ports_needs_about_a_hundred_megabytes() {
        let (pool, memory_mb) = size_memory(2, 1, 1500);
        assert_eq!((pool.packets, pool.frame_bytes), (16383, 1526));
        assert!((80..120).contains(&memory_mb), "{memory_mb}");
    }

    #[test]
    fn two_workers_need_room_for_their_queues_and_for_what_they_hand_over() {
        let (pool, _) = size_memory(2, 2, 1500);
        assert!(pool.packets >= 2 * (4096 + 2048) + 2 * (4096 + 4096), "{}", pool.packets);
    }

    #[test]
    fn more_descriptors_need_more_packets() {
        let pair = packets_of_pair(Descriptors { rx: 4096, tx: 4096 });
        let pool = size_pool(2, 2, 1500, pair);
        assert!(pool.packets >= 2 * (8192 + 8192) + 2 * 4096, "{}", pool.packets);
    }

    #[test]
    fn memory_lies_on_the_node_of_the_ports_where_they_share_one() {
        assert_eq!(common_node([None, Some(1), Some(1)].into_iter()), Some(1));
        assert_eq!(common_node([Some(0), Some(1)].into_iter()), None);
        assert_eq!(common_node([None].into_iter()), None);
    }

    #[test]
    fn packets_of_several_in_one_buffer_carry_memory_of_the_driver() {
        let rows = [
            ("0000:3b:00.0", false),
            ("0000:3b:00.0,mprq_en=0,dv_flow_en=2", false),
            ("0000:3b:00.0,dv_flow_en=2,mprq_en=1", true),
            ("net_af_packet0,iface=mprq_en", false),
        ];
        for (device, expected) in rows {
            assert_eq!(attaches_memory(&device.parse().unwrap()), expected, "{device}");
        }
    }

    #[test]
    fn af_xdp_takes_a_page_a_packet() {
        let (pool, others_mb) = size_memory(2, 1, 1500);
        let more = memory_mb(&pool, 2, &["net_af_xdp0,iface=eth1".parse().unwrap()]) - others_mb;
        assert!((20..40).contains(&more), "{more}");
    }

    #[test]
    fn jumbo_frames_take_more() {
        let (pool, memory_mb) = size_memory(2, 1, 9000);
        assert_eq!(pool.frame_bytes, 9026);
        assert!((190..210).contains(&memory_mb), "{memory_mb}");
    }
}
