//! Pools of packet memory.
//!
//! A pool lives as long as the process: an [`Mbuf`] is one pointer and cannot keep its pool alive.
//!
//! Any thread may allocate and free. A registered thread ([`crate::Eal::register_thread`]) has its own cache; other
//! threads use the shared ring, which is safe for many producers and consumers. The ring is of the kind `mt_rts`
//! (relaxed tail sync), because threads that are not pinned use it too: in the default kind, a thread that is preempted
//! during an operation makes all others wait.

use std::ptr;
use std::ptr::NonNull;

use arrayvec::ArrayVec;

use crate::device::Device;
use crate::eal::{Eal, log};
use crate::error::Error;
use crate::mbuf::{self, Mbuf, RawBurst};
use crate::raw;

/// Cache of a registered thread, packets: 4 bursts, so that a thread that receives on one port and sends on another
/// uses the ring at most once in four bursts.
const CACHE: u32 = 256;
/// Smallest buffer, bytes: the minimum of NIC drivers for frames that are not split.
const FRAME_BYTES_MIN: u16 = 2048;
/// Buffer sizes are multiples of this, bytes. Some cards (ixgbe) take the size in this unit, rounded down, and would
/// scatter a longer frame over two buffers.
const FRAME_STEP_BYTES: u16 = 1024;
/// Overhead of DPDK per packet: the object header (64), and padding that spreads packets over memory channels (at most
/// 64).
const OVERHEAD_BYTES: u64 = 128;
/// SOCKET_ID_ANY.
const ANY_NODE: i32 = -1;
/// Page size of ordinary memory, bytes.
const PAGE_BYTES: u64 = 4096;

/// Configuration of a pool.
#[derive(Clone, Debug)]
pub struct MempoolConfig {
    /// Name, unique in the process, at most 25 characters.
    pub name: String,
    /// Number of packets: enough for all receive and transmit descriptors, 384 per thread's cache, and those being
    /// processed.
    pub packets: u32,
    /// Largest frame, bytes, from the Ethernet header on. Buffers have at least 2048 bytes, and a multiple of 1024.
    pub frame_bytes: u16,
    /// Preferred NUMA node, used if it has memory; none: any.
    pub node: Option<u32>,
}

impl MempoolConfig {
    fn room_bytes(&self) -> u16 {
        let frame_bytes = self.frame_bytes.max(FRAME_BYTES_MIN).checked_next_multiple_of(FRAME_STEP_BYTES).unwrap_or(u16::MAX);
        frame_bytes.saturating_add(HEADROOM_BYTES)
    }

    /// Maximum memory of the pool, bytes, including its ring and padding. With af_xdp on ordinary pages no packet may
    /// cross a page boundary, so each takes whole pages.
    #[must_use]
    pub fn memory_bytes(&self, devices: &[Device]) -> u64 {
        let ring = 8 * u64::from(self.packets + 1).next_power_of_two();
        let packet = u64::from(self.room_bytes()) + u64::from(raw::SLUICE_MBUF_SIZE) + OVERHEAD_BYTES;
        let packet = if devices.iter().any(Device::shares_packet_memory) { packet.next_multiple_of(PAGE_BYTES) } else { packet };
        u64::from(self.packets) * packet + ring
    }
}

#[allow(clippy::cast_possible_truncation)] // 128 in every known build of DPDK; asserted below.
const HEADROOM_BYTES: u16 = raw::SLUICE_HEADROOM as u16;
const _: () = assert!(raw::SLUICE_HEADROOM <= 1024);

/// A handle of a pool; copies refer to the same pool.
#[derive(Clone, Copy, Debug)]
pub struct Mempool {
    raw: NonNull<raw::rte_mempool>,
    packets: u32,
}

// SAFETY: the pool is never freed, and its operations are safe for many threads at once (see the module documentation).
unsafe impl Send for Mempool {}
// SAFETY: as for Send; no method needs exclusive access.
unsafe impl Sync for Mempool {}

impl Mempool {
    /// Creates a pool.
    ///
    /// # Errors
    /// The memory with which EAL was started is too small, or the name is in use or too long.
    pub fn new(eal: Eal, config: &MempoolConfig) -> Result<Self, Error> {
        let name = raw::c_string(&config.name);
        // DPDK refuses a cache of more than two thirds of the pool.
        let cache = CACHE.min(config.packets / 2);
        let packed = i32::from(eal.packs_packets());
        let node = config.node.and_then(|node| i32::try_from(node).ok()).unwrap_or(ANY_NODE);
        // SAFETY: EAL runs; the name is terminated and copied by DPDK.
        let pool = unsafe { raw::sluice_pool_create(name.as_ptr(), config.packets, cache, config.room_bytes(), packed, node) };
        match NonNull::new(pool) {
            Some(raw) => {
                // SAFETY: the pool was just created and is never freed; the call only reads.
                let found = unsafe { raw::sluice_pool_node(pool) };
                if found >= 0 && node >= 0 && found != node {
                    tracing::warn!(
                        node,
                        found,
                        "packets live on another NUMA node than the ports: each of them crosses the link between processors"
                    );
                }
                Ok(Self { raw, packets: config.packets })
            }
            None => Err(Error::Mempool {
                name: config.name.clone(),
                packets: config.packets,
                frame_bytes: config.frame_bytes,
                reason: raw::error_text(raw::errno()),
                logged: log::take_errors(),
            }),
        }
    }

    pub(crate) fn as_ptr(self) -> *mut raw::rte_mempool {
        self.raw.as_ptr()
    }

    /// The number of packets.
    #[must_use]
    pub fn packets(self) -> u32 {
        self.packets
    }

    /// The number of free packets, including those in caches. Approximate while other threads allocate or free.
    #[must_use]
    pub fn available(self) -> u32 {
        // SAFETY: the pool is never freed; the call only reads.
        unsafe { raw::rte_mempool_avail_count(self.raw.as_ptr()) }
    }

    /// An empty packet, or none if all are in use.
    #[must_use]
    pub fn allocate(self) -> Option<Mbuf> {
        let mut packet = ptr::null_mut();
        // SAFETY: the pool is never freed, and there is room for one pointer.
        let failed = unsafe { raw::sluice_alloc_bulk(self.raw.as_ptr(), &raw mut packet, 1) };
        let packet = NonNull::new(packet).filter(|_| failed == 0)?;
        // SAFETY: DPDK has just reset it to an empty packet and passed ownership of it.
        Some(unsafe { Mbuf::from_raw(packet) })
    }

    /// Fills a burst with empty packets. False, without any change, if there are too few.
    #[must_use]
    pub fn fill<B: From<Mbuf>, const N: usize>(self, burst: &mut ArrayVec<B, N>) -> bool {
        let mut packets = RawBurst::<N>::new();
        let wanted = burst.remaining_capacity();
        let count = u32::try_from(wanted).unwrap_or(u32::MAX);
        // SAFETY: the pool is never freed, and there is room for N pointers; `wanted` is at most N. DPDK allocates all
        // or none; if all, we own them, they are empty, and the burst has room for them.
        unsafe {
            if raw::sluice_alloc_bulk(self.raw.as_ptr(), packets.as_mut_ptr(), count) != 0 {
                return false;
            }
            packets.set_len(wanted);
            mbuf::put(burst, &packets);
        }
        true
    }
}
