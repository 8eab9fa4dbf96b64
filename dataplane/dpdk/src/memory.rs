//! The size of the pool of packets, and of DPDK's memory.

use dpdk_sys::{Descriptors, Device, MempoolConfig};

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

/// Packets that a queue pair holds.
#[must_use]
pub fn packets_of_pair(descriptors: Descriptors) -> u32 {
    u32::from(descriptors.rx) + u32::from(descriptors.tx)
}

/// The pool for a number of ports and workers, and the memory of EAL in MB if no port is af_xdp.
#[must_use]
pub fn size_memory(ports: u32, workers: u32, largest_mtu_bytes: u16) -> (MempoolConfig, u64) {
    let pool = size_pool(ports, workers, largest_mtu_bytes, packets_of_pair(Descriptors::default()));
    let memory_mb = memory_mb(&pool, ports, &[]);
    (pool, memory_mb)
}

/// The pool for a number of ports and workers. `pair`: packets that the largest queue pair holds.
#[must_use]
pub fn size_pool(ports: u32, workers: u32, largest_mtu_bytes: u16, pair: u32) -> MempoolConfig {
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

/// The memory of EAL with this pool, in MB.
#[must_use]
pub fn memory_mb(pool: &MempoolConfig, ports: u32, devices: &[Device]) -> u64 {
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
