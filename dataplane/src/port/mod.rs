//! Packet I/O: the interface of ports, links, how packets arrive, the filter of received frames, capture filters, the
//! rings to the Linux twins with their rate limit, and the doorbells of threads that sleep.
//!
//! Not here: DPDK and taps, which the root package connects.

mod arrival;
mod capture_filter;
mod doorbell;
mod frame_filter;
mod io;
mod kernel_exchanges;
mod link;
mod memory;
mod token_bucket;
mod twin;
mod twin_rate;

pub(crate) use arrival::{Arrival, Origin};
pub use capture_filter::{FILTER_INSTRUCTIONS_MAX, FilterError, FilterInstruction, PacketFilter};
pub use doorbell::Doorbell;
pub(crate) use frame_filter::{FrameFilter, SentTo};
pub use io::{BURST, Burst, Port};
pub(crate) use kernel_exchanges::ForeignExchange;
pub use link::{Link, PortIndex};
pub use memory::{MemoryBuffer, MemoryPort};
pub(crate) use token_bucket::TokenBucket;
pub use twin::{FROM_LINUX_BURSTS, TO_LINUX_BURSTS, TwinQueues};
pub(crate) use twin_rate::{Class, TwinRate, class};
