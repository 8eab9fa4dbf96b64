//! One packet: a pointer to an `rte_mbuf`, owned.
//!
//! Invariants: an [`Mbuf`] is the only reference to its `rte_mbuf`. Dropping it returns the packet to its pool, which
//! lives as long as the process. Length and data are read through a view of the struct, so no function is called per
//! packet; compile-time assertions check the view against the DPDK in use.
//!
//! Not here: frames in several segments, which a receive queue linearises. One that a test makes ([`Mbuf::append`]) can
//! be passed on or dropped as a whole, but not read beyond its first segment, and not resized.

use std::fmt;
use std::mem::{ManuallyDrop, offset_of};
use std::ptr::NonNull;
use std::slice;

use arrayvec::ArrayVec;

use crate::raw;

/// The fields in use, at their offsets in every DPDK since 22.11.
#[repr(C, align(64))]
struct View {
    buf_addr: *mut u8,
    iova_or_next: u64,
    data_off: u16,
    refcnt: u16,
    nb_segs: u16,
    port: u16,
    ol_flags: u64,
    packet_type: u32,
    pkt_len: u32,
    data_len: u16,
    vlan_tci: u16,
    hash: [u32; 2],
    vlan_tci_outer: u16,
    buf_len: u16,
}

const _: () = {
    assert!(offset_of!(View, buf_addr) == raw::SLUICE_MBUF_BUF_ADDR as usize);
    assert!(offset_of!(View, data_off) == raw::SLUICE_MBUF_DATA_OFF as usize);
    assert!(offset_of!(View, nb_segs) == raw::SLUICE_MBUF_NB_SEGS as usize);
    assert!(offset_of!(View, ol_flags) == raw::SLUICE_MBUF_OL_FLAGS as usize);
    assert!(offset_of!(View, hash) == raw::SLUICE_MBUF_RSS_HASH as usize);
    assert!(offset_of!(View, pkt_len) == raw::SLUICE_MBUF_PKT_LEN as usize);
    assert!(offset_of!(View, data_len) == raw::SLUICE_MBUF_DATA_LEN as usize);
    assert!(offset_of!(View, buf_len) == raw::SLUICE_MBUF_BUF_LEN as usize);
    assert!(align_of::<View>() == raw::SLUICE_MBUF_ALIGN as usize);
    assert!(size_of::<View>() <= raw::SLUICE_MBUF_SIZE as usize);
    assert!(size_of::<Option<Mbuf>>() == size_of::<*mut raw::rte_mbuf>());
};

/// A packet in DPDK's memory. Dropping it frees it; a burst is freed faster by [`release`].
#[repr(transparent)]
pub struct Mbuf(NonNull<raw::rte_mbuf>);

// SAFETY: an mbuf is plain memory that is not bound to a thread, and pools accept it from any thread.
unsafe impl Send for Mbuf {}

impl Mbuf {
    /// Takes ownership.
    ///
    /// # Safety
    /// `raw` points to an mbuf of a pool with consistent fields, and nothing else refers to it.
    #[inline]
    pub(crate) unsafe fn from_raw(raw: NonNull<raw::rte_mbuf>) -> Self {
        Self(raw)
    }

    /// Gives up ownership.
    #[inline]
    pub(crate) fn into_raw(self) -> *mut raw::rte_mbuf {
        ManuallyDrop::new(self).0.as_ptr()
    }

    #[inline(always)]
    fn view(&self) -> &View {
        // SAFETY: points to a live rte_mbuf, which is at least as large and aligned as View and has its fields at the
        // same offsets (asserted above); `&self` excludes a writer, as there is no other reference to it.
        unsafe { self.0.cast::<View>().as_ref() }
    }

    #[inline(always)]
    fn view_mut(&mut self) -> &mut View {
        // SAFETY: as in `view`, and `&mut self` excludes every other reader.
        unsafe { self.0.cast::<View>().as_mut() }
    }

    /// The address of what tells where the frame is, which is not in the frame.
    #[inline(always)]
    #[must_use]
    pub fn metadata(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }

    /// The bytes of the frame; of a frame in several segments, those of the first.
    #[inline(always)]
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let view = self.view();
        // SAFETY: DPDK keeps data_off + data_len within the buffer, which is initialized memory (mapped zeroed) that
        // only this mbuf refers to.
        unsafe { slice::from_raw_parts(view.buf_addr.add(usize::from(view.data_off)), usize::from(view.data_len)) }
    }

    /// The mutable bytes of the frame; of a frame in several segments, those of the first.
    #[inline(always)]
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let view = self.view_mut();
        // SAFETY: as in `bytes`, and `&mut self` excludes every other reader.
        unsafe { slice::from_raw_parts_mut(view.buf_addr.add(usize::from(view.data_off)), usize::from(view.data_len)) }
    }

    /// Sets the length of the frame, keeping its start. False, without any change, if the buffer is smaller or the
    /// frame has several segments.
    #[inline]
    #[must_use]
    pub fn resize(&mut self, len: usize) -> bool {
        let room = usize::from(self.view().buf_len.saturating_sub(self.view().data_off));
        let Some(data_len) = u16::try_from(len).ok().filter(|_| len <= room && self.is_contiguous()) else { return false };
        let view = self.view_mut();
        view.data_len = data_len;
        view.pkt_len = u32::from(data_len);
        true
    }

    /// The hash by which the device chose a receive queue, if the device reports it.
    #[inline]
    #[must_use]
    pub fn rss_hash(&self) -> Option<u32> {
        let view = self.view();
        (view.ol_flags & u64::from(raw::SLUICE_MBUF_HAS_RSS_HASH) != 0).then_some(view.hash[0])
    }

    /// Extends the frame by `len` bytes at its front. False, without any change, if the headroom is smaller.
    #[inline(always)]
    #[must_use]
    pub fn prepend(&mut self, len: usize) -> bool {
        let view = self.view_mut();
        let Some(len) = u16::try_from(len).ok().filter(|len| *len <= view.data_off) else { return false };
        let Some(data_len) = view.data_len.checked_add(len) else { return false };
        view.data_off -= len;
        view.data_len = data_len;
        view.pkt_len += u32::from(len);
        true
    }

    /// Removes `len` bytes from the front of the frame; of a frame in several segments, at most those of the first.
    #[inline]
    pub fn trim_front(&mut self, len: usize) {
        let view = self.view_mut();
        let len = u16::try_from(len).unwrap_or(u16::MAX).min(view.data_len);
        view.data_off += len;
        view.data_len -= len;
        view.pkt_len -= u32::from(len);
    }

    /// Appends a segment to the frame, like a driver that scatters long frames. For tests.
    ///
    /// # Errors
    /// Returns the segment if the frame has the maximum number of segments.
    pub fn append(&mut self, segment: Self) -> Result<(), Self> {
        let raw = segment.into_raw();
        // SAFETY: both are live, different packets that we own. On success the second belongs to the first.
        if unsafe { raw::sluice_append(self.0.as_ptr(), raw) } == 0 {
            return Ok(());
        }
        // SAFETY: the pointer is that of a packet that we own, and nothing has taken it.
        Err(Self(unsafe { NonNull::new_unchecked(raw) }))
    }

    /// Whether the whole frame is in one segment.
    #[inline]
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.view().nb_segs == 1
    }
}

impl Drop for Mbuf {
    fn drop(&mut self) {
        let mut raw = self.0.as_ptr();
        // SAFETY: we own the mbuf and do not use it again. Its pool still exists and accepts it from any thread.
        unsafe { raw::rte_pktmbuf_free_bulk(&raw mut raw, 1) }
    }
}

impl fmt::Debug for Mbuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mbuf").field("len", &self.bytes().len()).field("contiguous", &self.is_contiguous()).finish()
    }
}

/// Frees all packets of a burst in one call.
pub fn release<B: Into<Mbuf>, const N: usize>(burst: &mut ArrayVec<B, N>) {
    let mut packets = take::<B, N>(burst);
    let count = u32::try_from(packets.len()).unwrap_or(u32::MAX);
    // SAFETY: `packets` holds exactly `count` mbufs that we own and do not use again.
    unsafe { raw::rte_pktmbuf_free_bulk(packets.as_mut_ptr(), count) }
}

/// Packets as the pointers that DPDK takes and returns.
pub(crate) type RawBurst<const N: usize> = ArrayVec<*mut raw::rte_mbuf, N>;

/// Moves a burst into the form that DPDK takes. A plain loop over two arrays, which for a newtype of [`Mbuf`] compiles
/// to a copy; `drain` and `collect` cost 1 ns per packet.
#[inline]
pub(crate) fn take<B: Into<Mbuf>, const N: usize>(burst: &mut ArrayVec<B, N>) -> RawBurst<N> {
    let mut packets = RawBurst::new();
    let count = burst.len();
    let (from, to) = (burst.as_ptr(), packets.as_mut_ptr());
    // SAFETY: the burst gives up its packets before each is moved out once, so a panic in `into` only leaks. Both
    // arrays have room for N, and `count` is at most N; the first `count` pointers are written before the length of
    // `packets` is set.
    unsafe {
        burst.set_len(0);
        for i in 0..count {
            to.add(i).write(from.add(i).read().into().into_raw());
        }
        packets.set_len(count);
    }
    packets
}

/// Appends packets that DPDK returned to a burst.
///
/// # Safety
/// Ownership of the mbufs passes to the burst: each pointer is not null and satisfies [`Mbuf::from_raw`]. There is room
/// for all of them.
#[inline]
pub(crate) unsafe fn put<B: From<Mbuf>, const N: usize>(burst: &mut ArrayVec<B, N>, packets: &[*mut raw::rte_mbuf]) {
    debug_assert!(packets.len() <= burst.remaining_capacity());
    let len = burst.len();
    // SAFETY: the caller promises room and ownership. The length of the burst is set after all packets are written, so
    // a panic in `from` only leaks.
    unsafe {
        let to = burst.as_mut_ptr().add(len);
        for (i, &raw) in packets.iter().enumerate() {
            to.add(i).write(B::from(Mbuf::from_raw(NonNull::new_unchecked(raw))));
        }
        burst.set_len(len + packets.len());
    }
}
