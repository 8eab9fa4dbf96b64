//! Changes to the bytes of packets: rewriting by a flow, encapsulation, clamping of the maximum segment size, and
//! resets.
//!
//! **Invariant:** each function changes a packet completely or not at all.
//!
//! Not here: whether a packet is rewritten, and ICMP errors (`icmp`).

mod encapsulate;
mod hop;
pub mod mss;
mod nat;
pub(super) mod outers;
mod reset;
mod sctp_addresses;
pub(super) mod translate;

pub(crate) use encapsulate::bytes_of_same_sum;
pub use encapsulate::{InnerPacket, Outer, encapsulate};
pub use hop::hop;
pub(crate) use nat::rewrite_of;
pub(super) use nat::whole;
pub use nat::{Rewrite, later_fragment, renumber};
pub use reset::{Reset, reset, sctp_abort, tcp_reset, write_probe, write_reset};
pub use sctp_addresses::hide_addresses;
