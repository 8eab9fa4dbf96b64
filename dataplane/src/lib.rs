//! The forwarding engine of sluice: packets in, verdicts and packets out.
//!
//! It knows neither DPDK nor tokio nor Kubernetes. A [`Port`] moves bursts of [`Buffer`]s; the same engine runs over
//! memory in unit tests, over capture files in `replay`, and over a NIC. Time and randomness are arguments everywhere.

pub mod choose;
pub mod compiler;
pub mod flow;
pub mod forward;
pub mod fragment;
pub mod icmp;
pub mod port;
pub mod snapshot;
pub mod stats;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod wire;
pub mod workers;

pub use choose::{Chooser, Intervals, SourceRanges};
pub use compiler::Compiler;
pub use flow::{BackendId, FlowLimits, FlowTable};
pub use forward::{Belongs, Fate, NoMemory, Observe, Parts, PortWithTwin, Worker};
pub use fragment::{Datagram, Fragment, Part};
pub use icmp::{ANSWERS_PER_SECOND, ANSWERS_PER_SECOND_AND_NETWORK, AnswerLimiter, Ask, Awaited, Quote, QuotedChecksum};
pub use port::{BURST, Burst, FROM_LINUX_BURSTS, Link, MemoryBuffer, MemoryPort, Port, PortIndex, TO_LINUX_BURSTS, TwinQueues};
pub use snapshot::{
    BackendView, Config, GUE_PORT, Health, Neighbour, Network, PortConfig, PortView, Publisher, Route, ServiceView, Snapshot,
    Subscriber, Tunnel, VlanLink,
};
pub use stats::{Account, BackendCounters, Counter, DropReason, WorkerCounters};
pub use wire::{Address, Buffer, Headers, Mac, Parsed, TagKind, Transport, Tuple, TupleHash, Vlan, parse, sctp_chunk, tcp_flags};
pub use workers::{Handed, Peers, PortQueues};
