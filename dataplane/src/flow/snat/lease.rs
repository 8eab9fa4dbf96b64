//! SNAT targets, the pools of ports towards them, and the leases that flows hold.
//!
//! Not here: the state of ports (`ports`).

use zerocopy::FromZeros;

/// A target in the snapshots: an address, port and protocol that one or more backends share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TargetSlot {
    /// Position among the targets, below [`TARGETS_MAX`].
    pub index: u32,
    /// Which of the slot's successive targets this is, modulo [`TargetSlot::GENERATIONS`].
    pub generation: u16,
}

impl TargetSlot {
    /// Number of distinct generations. Each lasts at least two minutes, so they repeat after 5 days.
    pub const GENERATIONS: u16 = 4095;

    /// The slot for the next target.
    #[must_use]
    pub const fn next(self) -> Self {
        Self { index: self.index, generation: (self.generation + 1) % Self::GENERATIONS }
    }
}

/// The target that a port is allocated towards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnatTarget<A> {
    /// The target.
    pub slot: TargetSlot,
    /// Its address.
    pub address: A,
    /// Its port.
    pub port: u16,
    /// Its transport protocol number.
    pub protocol: u8,
}

/// A pool, the ports of one SNAT address towards one target: its position among all pools in the lower 20 bits, the
/// target's generation in the upper 12.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromZeros)]
#[repr(transparent)]
pub struct PoolId(pub u32);

impl PoolId {
    /// No pool: the flow holds no SNAT port. Releasing a port to it does nothing.
    pub const NONE: Self = Self(u32::MAX);
    pub(super) const INDEX_BITS: u32 = 20;

    /// The pool of a SNAT address, given by its position among those of its family, towards a target.
    #[must_use]
    pub const fn new(target: TargetSlot, address: u16) -> Self {
        if target.index >= TARGETS_MAX || address >= SNAT_ADDRESSES_MAX {
            return Self::NONE;
        }
        let index = target.index * SNAT_ADDRESSES_MAX as u32 + address as u32;
        Self((target.generation as u32) << Self::INDEX_BITS | index)
    }

    /// Its position among all pools; `usize::MAX` for [`PoolId::NONE`].
    #[must_use]
    pub const fn index(self) -> usize {
        if self.0 == Self::NONE.0 { usize::MAX } else { (self.0 & ((1 << Self::INDEX_BITS) - 1)) as usize }
    }

    pub(super) const fn generation(self) -> u16 {
        (self.0 >> Self::INDEX_BITS) as u16
    }

    /// The position of its target among the targets.
    #[inline(always)]
    pub(in crate::flow) const fn target_index(self) -> u32 {
        (self.0 & ((1 << Self::INDEX_BITS) - 1)) / SNAT_ADDRESSES_MAX as u32
    }

    /// The target, and the position of the SNAT address. [`PoolId::NONE`] gives ones that do not exist.
    #[allow(clippy::cast_possible_truncation)] // the addresses of a target
    pub(crate) const fn parts(self) -> (TargetSlot, u16) {
        let position = self.0 & ((1 << Self::INDEX_BITS) - 1);
        let index = position / SNAT_ADDRESSES_MAX as u32;
        (TargetSlot { index, generation: self.generation() }, (position % SNAT_ADDRESSES_MAX as u32) as u16)
    }
}

// No valid pool has the number of `NONE`.
const _: () = assert!(TARGETS_MAX * SNAT_ADDRESSES_MAX as u32 == 1 << PoolId::INDEX_BITS);
const _: () = assert!((TargetSlot::GENERATIONS as u32 - 1) < u32::MAX >> PoolId::INDEX_BITS);

/// One SNAT address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnatAddress<A> {
    /// The address.
    pub address: A,
    /// Its position among the SNAT addresses of its family.
    pub index: u16,
}

/// A SNAT port that a flow holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnatLease<A> {
    /// The SNAT address.
    pub address: A,
    /// The SNAT port.
    pub port: u16,
    /// The pool that the port is returned to.
    pub pool: PoolId,
}

/// Maximum number of targets: 100,000 backends (DESIGN section 11), rounded up to a power of two.
pub const TARGETS_MAX: u32 = 131_072;
/// Maximum number of SNAT addresses of one family: 8 x 64,512 flows towards one target.
pub const SNAT_ADDRESSES_MAX: u16 = 8;
