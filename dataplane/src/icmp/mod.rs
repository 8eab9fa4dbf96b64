//! ICMP and neighbour protocols: errors that the gateway sends and maps, echo, ARP, neighbour discovery, announcements,
//! the neighbour queue, and the rate limit of answers.
//!
//! Not here: where an ICMP error of a flow is forwarded (`forward::icmp_errors`).

mod announce;
mod answer;
mod arp_ndp;
mod echo;
mod error;
pub mod error_mapping;
mod limiter;
mod neighbour_queue;
mod quote;
mod tunnel_quote;
mod vip_ownership;

pub(crate) use announce::Announcements;
pub use answer::may_answer;
pub use arp_ndp::{
    announcement, arp_claim, arp_probe, arp_question, arp_reply, neighbour_advertisement, neighbour_asker, neighbour_claim,
    neighbour_question, probe, solicitation,
};
pub use echo::echo_reply;
pub use error::{IcmpError, icmp_error, icmp_error_about_inner};
pub use error_mapping::ErrorRewrite;
pub use limiter::{ANSWERS_PER_SECOND, ANSWERS_PER_SECOND_AND_NETWORK, AnswerLimiter};
pub(crate) use neighbour_queue::{NeighbourQueue, QueuedPacket};
pub use neighbour_queue::{NeighbourRequest, UnresolvedNeighbour};
pub use quote::{Quote, QuotedChecksum};
pub use tunnel_quote::{Inner, TunnelErrorKind, TunnelQuote};
pub(crate) use vip_ownership::Permission;
pub use vip_ownership::{GroupsClaimed, LEASE_INTERVALS, VipClaim, VipOwnership};
