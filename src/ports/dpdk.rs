//! The DPDK devices of the configured ports, and the memory of DPDK that a configuration needs.
//!
//! Deliberately not here: a worker's view of a port (`dpdk_port`), and when devices come and go (`hotplug`).

use dpdk_port::{QueuePair, memory_mb, packets_of_pair, size_pool};
use dpdk_sys::{Descriptors, Device, Eal, EalConfig, Mempool, MempoolConfig, NoSpread, Spread, Spreading};

use crate::settings::{Hugepages, PortSettings, Settings};

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
pub(crate) fn plan(settings: &Settings) -> (EalConfig, MempoolConfig) {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
