//! The forwarding engine of sluice: packets in, verdicts and packets out.
//!
//! The engine does not depend on DPDK, tokio or Kubernetes. A [`Port`] moves bursts of [`Buffer`]s; the same engine
//! runs over memory in unit tests, over capture files in `replay`, and over a NIC. Time and randomness are arguments
//! everywhere.
//!
//! - [`wire`]: header views, parsing, checksums, VLAN tags, hashes of tuples
//! - [`port`]: the interface to packet I/O, links, and the Linux twins
//! - [`stats`]: counters and drop reasons
//! - [`flow`]: flow tables, flow states, idle limits, SNAT ports, affinity
//! - [`choose`]: Maglev tables, schedulers, source ranges
//! - [`snapshot`]: the tables that workers forward by, and their publication
//! - [`compiler`]: builds snapshots
//! - [`fragment`]: fragmentation, and the fragments of received datagrams
//! - [`icmp`]: ICMP errors and echo
//! - [`neighbours`]: ARP, neighbour discovery, announcements, leases of VIPs, packets that wait for a neighbour
//! - [`workers`]: which worker owns a packet, and its hand-over
//! - [`forward`]: the path of a packet through a worker
//! - `testing`: frames for tests

pub mod choose;
pub mod compiler;
pub mod flow;
pub mod forward;
pub mod fragment;
pub mod icmp;
pub mod neighbours;
pub mod port;
pub mod snapshot;
pub mod stats;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod wire;
pub mod workers;

pub use choose::{Chooser, Intervals, SourceRanges};
pub use compiler::Compiler;
pub use flow::{BackendId, FlowLimits, FlowTable, prefetch, prefetch_at, prefetch_to_write};
pub use forward::{
    FlowFate, Metered, NoMemory, Observe, PacketFlow, PacketOutcome, Parts, PortWithTwin, RestoreReport, SWEEP_TICKS,
    SWEPT_PER_POLL, SavedAt, SavedFlows, SavedFlowsError, Worker,
};
pub use fragment::{Datagram, Fragment, Part};
pub use icmp::{ANSWERS_PER_SECOND, ANSWERS_PER_SECOND_AND_NETWORK, AnswerLimiter, Quote, QuotedChecksum};
pub use neighbours::{GroupsClaimed, LEASE_INTERVALS, NeighbourRequest, UnresolvedNeighbour, VipClaim, VipOwnership};
pub use port::{
    BURST, Burst, Doorbell, FROM_LINUX_BURSTS, Link, MemoryBuffer, MemoryPort, Port, PortIndex, TO_LINUX_BURSTS, TwinQueues,
};
pub use snapshot::{
    BackendView, Config, GUE_PORT, Health, Neighbour, Network, OwnedGroups, PortConfig, PortView, Publisher, Route, RouteLookup,
    ServiceView, Snapshot, Subscriber, Tunables, Tunnel, VipAnswers, VlanLink,
};
pub use stats::{
    Account, BackendCounters, Counter, CounterSlot, DropReason, FlowCount, FrontendCounters, FrontendNumber, FrontendTotals,
    ServiceDrops, ServiceNumber, WorkerCounters,
};
pub use wire::{Address, Buffer, Headers, Mac, Parsed, TagKind, Transport, Tuple, TupleHash, Vlan, parse, sctp_chunk, tcp_flags};
pub use workers::{Inboxes, Peers, PortQueues};
