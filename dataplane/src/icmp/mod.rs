//! ICMP: the errors that the gateway sends, quotes of packets in received errors, the mapping of forwarded errors, echo
//! replies, and the rate limit of answers.
//!
//! Not here: where an ICMP error of a flow is forwarded (`forward::related`), and neighbour discovery (`neighbours`).

mod answer;
mod echo;
mod error;
pub mod error_mapping;
mod limiter;
mod quote;
mod tunnel_quote;

pub use answer::may_answer;
pub use echo::echo_reply;
pub use error::{IcmpError, icmp_error, icmp_error_about_inner};
pub use error_mapping::ErrorRewrite;
pub use limiter::{ANSWERS_PER_SECOND, ANSWERS_PER_SECOND_AND_NETWORK, AnswerLimiter};
pub use quote::{Quote, QuotedChecksum};
pub use tunnel_quote::{Inner, TunnelErrorKind, TunnelQuote};
