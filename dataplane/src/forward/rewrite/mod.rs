//! TODO: docs.

mod encapsulate;
mod fragment;
mod hop;
pub mod mss;
mod nat;
mod reset;
mod sctp;

pub use encapsulate::{Outer, encapsulate};
pub use fragment::{later_fragment, renumber};
pub use hop::hop;
pub(crate) use nat::low_half;
pub use nat::{Rewrite, nat, whole};
pub use reset::{Reset, reset, sctp_abort, tcp_reset, write_reset};
