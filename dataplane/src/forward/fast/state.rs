//! What the fast path of a worker keeps from burst to burst: memory for plans, what the last burst of each port needed, and
//! what is known of backends.
//!
//! Not here: the stages (`fast`).

use super::open::backends::OpeningBackends;
use super::plan::{Plan, operation};
use crate::port::BURST;
use crate::wire::plain::head;
use crate::wire::processor::Avx2;
use crate::wire::{Buffer, Shape};

/// What the fast path of a worker keeps from burst to burst.
pub(in crate::forward) struct FastPath {
    /// Of the packets of the present burst.
    pub(super) plans: Box<[Plan]>,
    /// By port.
    pub(super) last_bursts: Box<[LastBurst]>,
    /// Whether it may work on eight packets at a time.
    pub(super) avx2: Option<Avx2>,
    /// What new flows need of the backends that they were sent to.
    pub(super) backends: OpeningBackends,
}

impl FastPath {
    /// For a worker with this number of ports.
    pub(in crate::forward) fn new(ports: usize) -> Self {
        Self {
            plans: vec![Plan::unknown(); BURST].into(),
            last_bursts: vec![LastBurst::default(); ports].into(),
            avx2: Avx2::detect(),
            backends: OpeningBackends::new(),
        }
    }

    /// Works as on processors without AVX2.
    #[cfg(feature = "testing")]
    pub(in crate::forward) fn forgo_avx2(&mut self) {
        self.avx2 = None;
    }
}

/// What the last burst of a port needed: for the prefetches of the next one, and for the order of its stages. Which packets
/// leave, and as which bytes, does not depend on it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LastBurst {
    /// [`Shape::V6`], if there were packets of IPv6: their headers end in the second cache line.
    pub(super) kinds: u8,
    /// [`operation::ENCAPSULATE`], if packets went into tunnels: outer headers are
    /// written into the line before the frame.
    pub(super) operations: u8,
    /// Whether the route that is stored for any flow was needed.
    pub(super) reads_routes: bool,
    /// Whether a quarter or more of the packets that arrived at the port belonged to other workers: then owners are computed
    /// before flows are looked up.
    pub(super) has_others: bool,
}

impl LastBurst {
    /// Prefetches the first cache line of each frame, which a network card or another worker wrote, and the lines that packets
    /// of the last burst needed.
    #[inline(always)]
    pub(super) fn prefetch<B: Buffer>(self, burst: &[B]) {
        burst.iter().for_each(|buffer| buffer.prefetch(0));
        if self.kinds & Shape::V6 != 0 {
            burst.iter().for_each(|buffer| buffer.prefetch(END_V6));
        }
        if self.operations & operation::ENCAPSULATE != 0 {
            burst.iter().for_each(|buffer| buffer.prefetch(-1));
        }
    }
}

/// The last byte of an untagged frame that the fast path reads of IPv6.
#[allow(clippy::cast_possible_wrap)] // far below 2^31
const END_V6: isize = (head::UNTAGGED + size_of::<head::HeadV6>() - 1) as isize;
