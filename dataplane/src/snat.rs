//! SNAT ports.

use zerocopy::FromZeros;

/// The ports of one SNAT address towards one target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromZeros)]
#[repr(transparent)]
pub struct PoolId(pub u32);
