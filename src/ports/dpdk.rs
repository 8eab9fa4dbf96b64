//! The engine's [`Port`] over DPDK: a worker's receive and transmit queue, and the pool that its packets come from.
//!
//! Invariant: nothing here looks at a packet. Each is in one segment: scattered receive is not asked for, buffers hold the longest
//! frame of any port, and what a driver delivers in segments all the same is put together before (docs/adr/0025).
//!
//! Not here: which devices there are (settings), the threads (`workers`).

use dataplane::{BURST, Buffer, Burst, Port};
use dpdk_sys::{BadDevice, Device, Eal, EalConfig, Mbuf, Mempool, MempoolConfig};

use crate::ports::handover::{Moored, Queues};
use crate::ports::steering::{Found, Wanted};
use crate::settings::{Hugepages, PortSettings, Settings};

/// Packets for each port: what the receive and transmit queues of the greediest driver (af_xdp, 2,048 + 2,048) can hold.
const PACKETS_PER_PORT: u32 = 4096;
/// Packets for each further queue pair of a port: 1,024 descriptors each way.
const PACKETS_PER_QUEUE_PAIR: u32 = 2048;
/// Packets that other workers may hand to one (see [`dataplane::Peers`]).
const PACKETS_HANDED: u32 = 4096;
/// Packets for each worker: its cache (384), its held packets (1,024), and the rings to and from the twin thread.
const PACKETS_PER_WORKER: u32 = 4096;
/// Ethernet header, two VLAN tags and the checksum, which drivers count in when they decide whether a frame fits a buffer, bytes.
const LINK_BYTES: u16 = 26;
/// Memory of EAL and of each port beside the packets, MB: EAL's own tables, descriptors, drivers' bookkeeping.
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
    #[inline]
    fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    #[inline]
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }

    #[inline]
    fn resize(&mut self, len: usize) -> bool {
        self.0.resize(len)
    }

    #[inline]
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
    moored: Moored,
    pool: Mempool,
}

impl DpdkPort {
    /// A port whose queues come and go by a berth.
    #[must_use]
    pub fn new(moored: Moored, pool: Mempool) -> Self {
        Self { moored, pool }
    }
}

impl Port for DpdkPort {
    type Buffer = Packet;

    #[inline]
    fn receive(&mut self, burst: &mut Burst<Packet>) {
        if let Some(rx) = self.moored.queues().and_then(|queues| queues.rx.as_mut()) {
            rx.receive(burst);
        }
    }

    /// Without a device everything is refused.
    #[inline]
    fn transmit(&mut self, burst: &mut Burst<Packet>) {
        if let Some(tx) = self.moored.same_queues().and_then(|queues| queues.tx.as_mut()) {
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

// A burst of the engine is a burst of the driver.
const _: () = assert!(BURST == dpdk_sys::BURST);

/// What EAL is to be started with, and the pool to be made, for a configuration.
///
/// # Errors
/// A device that is none.
pub fn plan(settings: &Settings) -> Result<(EalConfig, MempoolConfig), BadDevice> {
    let mut devices = settings.ports.iter().map(device).collect::<Result<Vec<_>, _>>()?;
    let members: Vec<Device> = devices.iter().flat_map(Device::members).collect();
    devices.extend(members);
    let largest_mtu_bytes = settings.ports.iter().map(|port| port.mtu_bytes).max().unwrap_or_default();
    let ports = u32::try_from(devices.len()).unwrap_or(u32::MAX);
    let workers = u32::try_from(settings.cores.len()).unwrap_or(u32::MAX);
    let mut pool = size_pool(ports, workers, largest_mtu_bytes);
    pool.node = common_node(devices.iter().map(Device::node));
    let memory_mb = memory_mb(&pool, ports, &devices);
    let hugepages = match settings.hugepages {
        Hugepages::Auto => dpdk_sys::Hugepages::Auto,
        Hugepages::Require => dpdk_sys::Hugepages::Require,
        Hugepages::Off => dpdk_sys::Hugepages::Off,
    };
    // EAL's own threads keep off the workers' cores where there is another; with none named they run where we may.
    let allowed = core_affinity::get_core_ids().unwrap_or_default();
    let cores = allowed.iter().map(|core| core.id).filter(|core| !settings.cores.contains(core)).collect();
    Ok((EalConfig { hugepages, memory_mb, devices, cores }, pool))
}

/// The node that all devices are on which tell theirs.
fn common_node(nodes: impl Iterator<Item = Option<u32>>) -> Option<u32> {
    let mut nodes = nodes.flatten();
    let first = nodes.next()?;
    nodes.all(|node| node == first).then_some(first)
}

/// A configured port that was opened.
pub(crate) struct OpenedPort {
    /// To ask and to tell it.
    pub(crate) port: dpdk_sys::Port,
    /// By worker.
    pub(crate) queues: Vec<Queues>,
    /// What the device has.
    pub(crate) found: Found,
}

/// Opens a configured port whose device is there. Its queues are for the workers, in their order.
///
/// # Errors
/// The device does not exist or is in use, a privilege is missing, the driver refuses.
pub(crate) fn open(eal: Eal, port: &PortSettings, pool: Mempool, wanted: &Wanted) -> Result<OpenedPort, dpdk_sys::Error> {
    let mac = port.mac.map(|mac| mac.0);
    let Wanted { queues, spread } = wanted.clone();
    let device = device(port)?.with_queues(queues);
    let config = dpdk_sys::PortConfig { device, mtu_bytes: port.mtu_bytes, mac, queues, spread };
    let dpdk_sys::StartedPort { port, rx, tx, spread } = dpdk_sys::Port::start(eal, &config, pool)?;
    let found = Found { transmit: tx.len(), spread };
    let (mut rx, mut tx) = (rx.into_iter(), tx.into_iter());
    let queues = (0..queues).map(|_| Queues { rx: rx.next(), tx: tx.next() }).collect();
    Ok(OpenedPort { port, queues, found })
}

/// The device of a configured port.
///
/// # Errors
/// It is none.
pub fn device(port: &PortSettings) -> Result<Device, BadDevice> {
    port.device.as_str().parse()
}

/// The pool that so many ports and workers need, and the memory to start EAL with, MB, where none of the ports is af_xdp.
#[must_use]
pub fn size_memory(ports: u32, workers: u32, largest_mtu_bytes: u16) -> (MempoolConfig, u64) {
    let pool = size_pool(ports, workers, largest_mtu_bytes);
    let memory_mb = memory_mb(&pool, ports, &[]);
    (pool, memory_mb)
}

fn size_pool(ports: u32, workers: u32, largest_mtu_bytes: u16) -> MempoolConfig {
    let further = workers.saturating_sub(1);
    let handed = if further > 0 { PACKETS_HANDED * workers } else { 0 };
    let packets = (PACKETS_PER_PORT + PACKETS_PER_QUEUE_PAIR * further) * ports + PACKETS_PER_WORKER * workers + handed;
    MempoolConfig {
        name: "packets".into(),
        // One less than a power of two is what DPDK's ring holds without waste.
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
    fn memory_lies_on_the_node_of_the_ports_where_they_share_one() {
        assert_eq!(common_node([None, Some(1), Some(1)].into_iter()), Some(1));
        assert_eq!(common_node([Some(0), Some(1)].into_iter()), None);
        assert_eq!(common_node([None].into_iter()), None);
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
