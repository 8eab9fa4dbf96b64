//! One packet: a pointer to an `rte_mbuf`, owned.
//!
//! Invariants: an [`Mbuf`] is the only reference to its `rte_mbuf`, and whoever drops it gives it back to its pool, which
//! lives as long as the process. Length and data are read through a view of the struct that is asserted, at compile time, to
//! agree with the DPDK that is linked, so no function is called per packet.
//!
//! Not here: chains. A receive queue puts a frame in several segments together; one that a test makes ([`Mbuf::append`]) can be
//! passed on or dropped whole, but neither read beyond its first segment nor resized.

use std::fmt;
use std::mem::{ManuallyDrop, offset_of};
use std::ptr::NonNull;
use std::slice;

use arrayvec::ArrayVec;

use crate::raw;

/// The fields that are used here, where every DPDK from 22.11 on has them.
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

// SAFETY: an mbuf is plain memory without ties to a thread, and pools take it back from any thread.
unsafe impl Send for Mbuf {}

impl Mbuf {
    /// Takes ownership.
    ///
    /// # Safety
    /// `raw` points to an mbuf of a pool, whose fields agree with each other, and nothing else refers to it.
    #[inline]
    pub(crate) unsafe fn from_raw(raw: NonNull<raw::rte_mbuf>) -> Self {
        Self(raw)
    }

    /// Gives ownership away.
    #[inline]
    pub(crate) fn into_raw(self) -> *mut raw::rte_mbuf {
        ManuallyDrop::new(self).0.as_ptr()
    }

    #[inline]
    fn view(&self) -> &View {
        // SAFETY: points to a live rte_mbuf, which is at least as large and aligned as View and has its fields at the same
        // offsets (asserted above); `&self` excludes a writer, as there is no other reference to it.
        unsafe { self.0.cast::<View>().as_ref() }
    }

    #[inline]
    fn view_mut(&mut self) -> &mut View {
        // SAFETY: as in `view`, and `&mut self` excludes every other reader.
        unsafe { self.0.cast::<View>().as_mut() }
    }

    /// The frame; of a frame in several segments the first.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let view = self.view();
        // SAFETY: DPDK keeps data_off + data_len within the buffer, which is initialized memory (mapped zeroed) that only
        // this mbuf refers to.
        unsafe { slice::from_raw_parts(view.buf_addr.add(usize::from(view.data_off)), usize::from(view.data_len)) }
    }

    /// The frame, to be changed in place; of a frame in several segments the first.
    #[inline]
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let view = self.view_mut();
        // SAFETY: as in `bytes`, and `&mut self` excludes every other reader.
        unsafe { slice::from_raw_parts_mut(view.buf_addr.add(usize::from(view.data_off)), usize::from(view.data_len)) }
    }

    /// Makes the frame `len` bytes long, keeping its start. False, and nothing changed, if the buffer is smaller or the frame
    /// has several segments.
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

    /// The hash by which the device chose a receive queue, if it says so.
    #[inline]
    #[must_use]
    pub fn rss_hash(&self) -> Option<u32> {
        let view = self.view();
        (view.ol_flags & u64::from(raw::SLUICE_MBUF_HAS_RSS_HASH) != 0).then_some(view.hash[0])
    }

    /// Makes room for `len` bytes before the frame, out of the headroom. False, and nothing changed, if that is smaller.
    #[inline]
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

    /// Takes `len` bytes off the front of the frame; of a frame in several segments at most what the first has.
    #[inline]
    pub fn trim_front(&mut self, len: usize) {
        let view = self.view_mut();
        let len = u16::try_from(len).unwrap_or(u16::MAX).min(view.data_len);
        view.data_off += len;
        view.data_len -= len;
        view.pkt_len -= u32::from(len);
    }

    /// Makes `segment` the continuation of the frame, as drivers do that scatter long frames. What they do is tried with it.
    ///
    /// # Errors
    /// There would be more segments than DPDK counts: gives it back.
    pub fn append(&mut self, segment: Self) -> Result<(), Self> {
        let raw = segment.into_raw();
        // SAFETY: both are live packets that we own, and different ones. If it succeeds the second belongs to the first.
        if unsafe { raw::sluice_append(self.0.as_ptr(), raw) } == 0 {
            return Ok(());
        }
        // SAFETY: it came from a packet that we own, which nothing has taken.
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
        // SAFETY: we own the mbuf and do not use it again. Its pool is still there and takes it from any thread.
        unsafe { raw::rte_pktmbuf_free_bulk(&raw mut raw, 1) }
    }
}

impl fmt::Debug for Mbuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mbuf").field("len", &self.bytes().len()).field("contiguous", &self.is_contiguous()).finish()
    }
}

/// Frees a burst at once.
pub fn release<B: Into<Mbuf>, const N: usize>(burst: &mut ArrayVec<B, N>) {
    let mut packets = take::<B, N>(burst);
    let count = u32::try_from(packets.len()).unwrap_or(u32::MAX);
    // SAFETY: `packets` holds exactly `count` mbufs that we own and do not use again.
    unsafe { raw::rte_pktmbuf_free_bulk(packets.as_mut_ptr(), count) }
}

/// Packets in the form that DPDK takes and gives.
pub(crate) type RawBurst<const N: usize> = ArrayVec<*mut raw::rte_mbuf, N>;

/// Empties a burst into the form that DPDK takes. A plain loop over two arrays, so that for a newtype of [`Mbuf`] it compiles
/// to a copy; with `drain` and `collect` it was 1 ns a packet.
#[inline]
pub(crate) fn take<B: Into<Mbuf>, const N: usize>(burst: &mut ArrayVec<B, N>) -> RawBurst<N> {
    let mut packets = RawBurst::new();
    let count = burst.len();
    let (from, to) = (burst.as_ptr(), packets.as_mut_ptr());
    // SAFETY: the burst forgets its packets before they are moved out, each once, so a panic in `into` only leaks. Both arrays
    // have room for N, and `count` is at most N; the first `count` pointers are written before `packets` claims them.
    unsafe {
        burst.set_len(0);
        for i in 0..count {
            to.add(i).write(from.add(i).read().into().into_raw());
        }
        packets.set_len(count);
    }
    packets
}

/// Appends to a burst what DPDK gave.
///
/// # Safety
/// Ownership of the mbufs passes to the burst: each pointer is not null and satisfies [`Mbuf::from_raw`]. There is room for
/// all of them.
#[inline]
pub(crate) unsafe fn put<B: From<Mbuf>, const N: usize>(burst: &mut ArrayVec<B, N>, packets: &[*mut raw::rte_mbuf]) {
    debug_assert!(packets.len() <= burst.remaining_capacity());
    let len = burst.len();
    // SAFETY: the caller promises room and ownership. The burst claims the packets after all are written, so a panic in
    // `from` only leaks.
    unsafe {
        let to = burst.as_mut_ptr().add(len);
        for (i, &raw) in packets.iter().enumerate() {
            to.add(i).write(B::from(Mbuf::from_raw(NonNull::new_unchecked(raw))));
        }
        burst.set_len(len + packets.len());
    }
}
