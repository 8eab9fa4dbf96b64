//! The forwarding engine of sluice: packets in, verdicts and packets out.
//!
//! It knows neither DPDK nor tokio nor Kubernetes. A [`Port`] moves bursts of [`Buffer`]s; the same engine runs over
//! memory in unit tests, over capture files in `replay`, and over a NIC. Time and randomness are arguments everywhere.

mod address;
mod affinity;
mod announce;
pub mod answer;
mod apply;
pub mod checksum;
mod compile;
mod counters;
mod crc32c;
mod cut;
mod datagrams;
pub mod decide;
pub mod encapsulate;
pub mod flow;
mod fragment;
mod hash;
mod headers;
mod held;
mod identification;
mod input;
mod lanes;
mod limiter;
mod link;
pub mod maglev;
mod memory;
mod mss;
mod observe;
mod parse;
mod peers;
mod port;
pub mod prefetch;
mod publish;
mod quote;
pub mod rewrite;
mod schedule;
pub mod snapshot;
pub mod snat;
mod source_ranges;
pub mod steering;
mod tags;
mod tally;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tick;
mod twin;
mod twin_rate;
mod verdict;
pub mod wire;
mod worker;

pub use address::Address;
pub use compile::Compiler;
pub use counters::{Account, BackendCounters, Counter, WorkerCounters};
pub use flow::{BackendId, FlowTable};
pub use fragment::{Datagram, Fragment, Part};
pub use hash::TupleHash;
pub use headers::{Headers, Parsed, Transport, Tuple, sctp_chunk, tcp_flags};
pub use held::Awaited;
pub use input::{Config, FlowLimits, GUE_PORT, Health, Mac, Neighbour, Network, PortConfig, PortIndex, Route, Tunnel, VlanLink};
pub use limiter::{ANSWERS_PER_SECOND, ANSWERS_PER_SECOND_AND_NETWORK, AnswerLimiter};
pub use link::{Link, TagKind, Vlan};
pub use memory::{MemoryBuffer, MemoryPort};
pub use observe::{Belongs, Fate, Observe};
pub use parse::parse;
pub use peers::{Handed, Peers, PortQueues};
pub use port::{BURST, Buffer, Burst, Port};
pub use publish::{Publisher, Subscriber};
pub use quote::Quote;
pub use schedule::Chooser;
pub use snapshot::{BackendView, PortView, ServiceView, Snapshot};
pub use source_ranges::{Intervals, SourceRanges};
pub use twin::{FROM_LINUX_BURSTS, TO_LINUX_BURSTS, TwinQueues};
pub use verdict::DropReason;
pub use worker::{Ask, NoMemory, Parts, PortWithTwin, Worker};
