//! Where packets live.
//!
//! A pool is made once and lives as long as the process: an [`Mbuf`] is one pointer and could not keep it alive.
//!
//! Any thread may allocate and free. One that is registered ([`crate::Eal::register_thread`]) has a cache of its own; one that
//! is not goes to the shared ring, which DPDK makes safe for many producers and consumers. The ring is of the kind `mt_rts`
//! (relaxed tail sync), because threads that are not pinned use it too: in the default kind a thread preempted in the middle
//! of an operation makes all others wait for it.

use std::ptr;
use std::ptr::NonNull;

use arrayvec::ArrayVec;

use crate::device::Device;
use crate::eal::Eal;
use crate::error::Error;
use crate::mbuf::{self, Mbuf, RawBurst};
use crate::{log, raw};

/// Packets that a registered thread keeps for itself: 8 bursts, so that a thread that receives on one port and sends on
/// another goes to the ring once in eight bursts at most.
const CACHE: u32 = 256;
/// Room of the smallest buffer, bytes: what NIC drivers take as the least for unsplit frames.
const FRAME_BYTES_MIN: u16 = 2048;
/// Frames' room grows in these steps, bytes: some cards (ixgbe) are told the size of buffers in them, rounded down, and would
/// scatter a longer frame over two.
const FRAME_STEP_BYTES: u16 = 1024;
/// What DPDK adds to a packet: the object header (64), and padding that spreads packets over memory channels (at most 64).
const OVERHEAD_BYTES: u64 = 128;
/// SOCKET_ID_ANY.
const ANY_NODE: i32 = -1;
/// Page size of ordinary memory, bytes.
const PAGE_BYTES: u64 = 4096;

/// What a pool is made with.
#[derive(Clone, Debug)]
pub struct MempoolConfig {
    /// Name, unique in the process, at most 25 characters.
    pub name: String,
    /// Packets. Enough for all receive and transmit descriptors of the ports, 384 for each thread's cache, and those in hand.
    pub packets: u32,
    /// Largest frame, bytes, from the Ethernet header on. Frames have room for 2048 at least, and a multiple of 1024.
    pub frame_bytes: u16,
    /// The NUMA node to lie on, where it has memory; none: any.
    pub node: Option<u32>,
}

impl MempoolConfig {
    fn room_bytes(&self) -> u16 {
        let frame_bytes = self.frame_bytes.max(FRAME_BYTES_MIN).checked_next_multiple_of(FRAME_STEP_BYTES).unwrap_or(u16::MAX);
        frame_bytes.saturating_add(HEADROOM_BYTES)
    }

    /// Memory that such a pool takes at most, bytes, its ring and padding included. af_xdp on ordinary pages lets no packet lie
    /// across pages, so each takes whole pages then.
    #[must_use]
    pub fn memory_bytes(&self, devices: &[Device]) -> u64 {
        let ring = 8 * u64::from(self.packets + 1).next_power_of_two();
        let packet = u64::from(self.room_bytes()) + u64::from(raw::SLUICE_MBUF_SIZE) + OVERHEAD_BYTES;
        let packet = if devices.iter().any(Device::shares_packet_memory) { packet.next_multiple_of(PAGE_BYTES) } else { packet };
        u64::from(self.packets) * packet + ring
    }
}

#[allow(clippy::cast_possible_truncation)] // 128 in every build of DPDK known; asserted below.
const HEADROOM_BYTES: u16 = raw::SLUICE_HEADROOM as u16;
const _: () = assert!(raw::SLUICE_HEADROOM <= 1024);

/// A handle to a pool; copies refer to the same pool.
#[derive(Clone, Copy, Debug)]
pub struct Mempool {
    raw: NonNull<raw::rte_mempool>,
    packets: u32,
}

// SAFETY: the pool is never freed, and its operations are safe for many threads at once (see the module's text).
unsafe impl Send for Mempool {}
// SAFETY: as for Send; no method needs exclusive access.
unsafe impl Sync for Mempool {}

impl Mempool {
    /// Makes a pool.
    ///
    /// # Errors
    /// Not enough of the memory that EAL was started with, or the name is taken or too long.
    pub fn new(eal: Eal, config: &MempoolConfig) -> Result<Self, Error> {
        let name = raw::c_string(&config.name);
        // DPDK refuses a cache of more than two thirds of the pool.
        let cache = CACHE.min(config.packets / 2);
        let packed = i32::from(eal.packs_packets());
        let node = config.node.and_then(|node| i32::try_from(node).ok()).unwrap_or(ANY_NODE);
        // SAFETY: EAL runs; the name is terminated and copied by DPDK.
        let pool = unsafe { raw::sluice_pool_create(name.as_ptr(), config.packets, cache, config.room_bytes(), packed, node) };
        match NonNull::new(pool) {
            Some(raw) => Ok(Self { raw, packets: config.packets }),
            None => Err(Error::Mempool {
                name: config.name.clone(),
                packets: config.packets,
                frame_bytes: config.frame_bytes,
                reason: raw::error_text(raw::errno()),
                said: log::take_complaints(),
            }),
        }
    }

    pub(crate) fn as_ptr(self) -> *mut raw::rte_mempool {
        self.raw.as_ptr()
    }

    /// How many packets it was made with.
    #[must_use]
    pub fn packets(self) -> u32 {
        self.packets
    }

    /// How many packets are free, those in caches included. Counts under way elsewhere may blur it.
    #[must_use]
    pub fn available(self) -> u32 {
        // SAFETY: the pool is never freed; the call only reads.
        unsafe { raw::rte_mempool_avail_count(self.raw.as_ptr()) }
    }

    /// An empty packet, or none when all are in use.
    #[must_use]
    pub fn allocate(self) -> Option<Mbuf> {
        let mut packet = ptr::null_mut();
        // SAFETY: the pool is never freed, and there is room for one pointer.
        let failed = unsafe { raw::sluice_alloc_bulk(self.raw.as_ptr(), &raw mut packet, 1) };
        let packet = NonNull::new(packet).filter(|_| failed == 0)?;
        // SAFETY: DPDK has just reset it to an empty packet and given it to us.
        Some(unsafe { Mbuf::from_raw(packet) })
    }

    /// Fills a burst with empty packets. False, and nothing changed, when there are too few.
    #[must_use]
    pub fn fill<B: From<Mbuf>, const N: usize>(self, burst: &mut ArrayVec<B, N>) -> bool {
        let mut packets = RawBurst::<N>::new();
        let wanted = burst.remaining_capacity();
        let count = u32::try_from(wanted).unwrap_or(u32::MAX);
        // SAFETY: the pool is never freed, and there is room for N pointers, of which `wanted` is at most all. DPDK gives all
        // or none; all are ours then, empty, and the burst has room for them.
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
