//! The engine's [`Port`] over DPDK: one receive and one transmit queue, and the pool that its packets come from.
//!
//! Invariant: nothing here looks at a packet. A frame in several segments cannot arrive, as scattered receive is not asked
//! for; from a driver that delivers one all the same, the engine sees the first segment, whose IP length then does not fit.
//!
//! Not here: which devices there are (settings), the threads (`workers`).

use dataplane::{BURST, Buffer, Burst, Port};
use dpdk_sys::{BadDevice, Device, Eal, EalConfig, Mbuf, Mempool, MempoolConfig};

use crate::berth::{Moored, Queues};
use crate::settings::{Hugepages, PortSettings, Settings};

/// Packets for each port: what the receive and transmit queues of the greediest driver (af_xdp, 2,048 + 2,048) can hold.
const PACKETS_PER_PORT: u32 = 4096;
/// Packets for each worker: its cache (384), its held packets (1,024), and the rings to and from the twin thread.
const PACKETS_PER_WORKER: u32 = 4096;
/// Ethernet header and two VLAN tags, bytes.
const LINK_BYTES: u16 = 22;
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
    fn rss_hash(&self) -> Option<u32> {
        self.0.rss_hash()
    }

    #[inline]
    fn prepend(&mut self, len: usize) -> bool {
        self.0.prepend(len)
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
        if let Some(queues) = self.moored.queues() {
            queues.rx.receive(burst);
        }
    }

    /// Without a device everything is refused.
    #[inline]
    fn transmit(&mut self, burst: &mut Burst<Packet>) {
        if let Some(queues) = self.moored.same_queues() {
            queues.tx.transmit(burst);
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
    let devices = settings.ports.iter().map(device).collect::<Result<Vec<_>, _>>()?;
    let largest_mtu_bytes = settings.ports.iter().map(|port| port.mtu_bytes).max().unwrap_or_default();
    let ports = u32::try_from(devices.len()).unwrap_or(u32::MAX);
    let pool = size_pool(ports, 1, largest_mtu_bytes);
    let memory_mb = memory_mb(&pool, ports, &devices);
    let hugepages = match settings.hugepages {
        Hugepages::Auto => dpdk_sys::Hugepages::Auto,
        Hugepages::Require => dpdk_sys::Hugepages::Require,
        Hugepages::Off => dpdk_sys::Hugepages::Off,
    };
    // EAL's own threads keep off the worker's core where there is another; with none named they run where we may.
    let allowed = core_affinity::get_core_ids().unwrap_or_default();
    let cores = allowed.iter().map(|core| core.id).filter(|&core| core != settings.core).collect();
    Ok((EalConfig { hugepages, memory_mb, devices, cores }, pool))
}

/// Opens a configured port whose device is there. Its queues are for the workers, in their order.
///
/// # Errors
/// The device does not exist or is in use, a privilege is missing, the driver refuses.
pub fn open(eal: Eal, port: &PortSettings, pool: Mempool) -> Result<(dpdk_sys::Port, Vec<Queues>), dpdk_sys::Error> {
    let mac = port.mac.map(|mac| mac.0);
    let config = dpdk_sys::PortConfig { device: device(port)?, mtu_bytes: port.mtu_bytes, mac, queues: 1, spread: None };
    let dpdk_sys::StartedPort { port, rx, tx, .. } = dpdk_sys::Port::start(eal, &config, pool)?;
    Ok((port, rx.into_iter().zip(tx).map(|(rx, tx)| Queues { rx, tx }).collect()))
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
    let packets = PACKETS_PER_PORT * ports + PACKETS_PER_WORKER * workers;
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
        assert_eq!((pool.packets, pool.frame_bytes), (16383, 1522));
        assert!((80..120).contains(&memory_mb), "{memory_mb}");
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
        assert_eq!(pool.frame_bytes, 9022);
        assert!(memory_mb > size_memory(2, 1, 1500).1 + 90, "{memory_mb}");
    }
}
