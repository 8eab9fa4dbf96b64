//! Changes to the bytes of packets: rewriting by a flow, encapsulation, clamping of the maximum segment size, and
//! resets.
//!
//! **Invariant:** each function changes a packet completely or not at all.
//!
//! Not here: whether a packet is rewritten, and ICMP errors (`icmp`).

pub(super) mod encapsulate;
mod hop;
pub mod mss;
mod nat;
mod prefix;
mod proxy_header;
mod reset;
mod sctp_addresses;
mod shift;
pub(super) mod translate;

pub use encapsulate::{InnerPacket, Outer, encapsulate};
pub use hop::hop;
pub(crate) use nat::rewrite_of;
pub(super) use nat::whole;
pub use nat::{Rewrite, later_fragment, renumber};
pub use prefix::{HeaderSegment, cut_data, prefix, write_header_segment};
pub use proxy_header::{PROXY_HEADER_MAX, ProxyHeader, proxy_header, shift_between};
pub use reset::{Reset, reset, sctp_abort, tcp_reset, write_probe, write_reset};
pub use sctp_addresses::hide_addresses;
pub use shift::{
    Timestamps, remove_sack, remove_unshiftable, renumber as renumber_segment, segment_head, shrink_window, timestamps,
    window_scale,
};
