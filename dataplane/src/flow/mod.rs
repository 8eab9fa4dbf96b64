//! Flows: their table, their states, idle limits, SNAT ports, affinity, and the order in which flows yield.
//!
//! Not here: which packet creates or ends a flow (`forward`).

mod affinity;
mod entry;
mod idle;
mod index;
mod shares;
mod snat;
mod state;
mod storage;
mod table;
mod tick;
mod transitions;
mod yield_order;

pub use crate::wire::processor::{prefetch, prefetch_at, prefetch_to_write};
pub(crate) use affinity::AffinityTable;
pub(crate) use entry::{BACKEND_SLOTS, flow_of};
pub use entry::{BackendId, Flow, FlowBackend, FlowView, ROUTE_EPOCHS, UNRESOLVED, VerificationTags};
pub(crate) use idle::refresh_interval;
pub use idle::{FlowLimits, IdleLimits};
pub(crate) use index::IndexSlot;
pub(crate) use shares::{FLOWS_FACTOR, PORTS_FACTOR, may_grow};
pub(crate) use transitions::tags_of_first;
pub use transitions::{Segment, advance};

pub use snat::{
    LeaseOffer, PoolId, PortShare, SNAT_ADDRESSES_MAX, SnatAddress, SnatLease, SnatPorts, SnatTarget, TARGETS_MAX, TargetSlot,
};
pub(crate) use snat::{PortSpread, TrialPorts, UsedPort};
pub(crate) use state::{Admission, UDP_SIGNAL};
pub use state::{BackendStep, ClientStep, ClockShift, HeaderStage, LastSaid, NumberShift, SegmentHead, Shift, StreamShift};
pub use state::{Direction, FlowMode, FlowState, YieldClass, begins, is_mid_stream, is_opening, is_plain, next_state};
pub(crate) use storage::WATCH_WINDOW_NS;
pub use storage::{
    ACTIVE_TIMEOUT, FlowEnd, FlowEvent, FlowRecord, FlowRecords, FlowReplica, FlowReplication, FlowTraffic, FlowWatch,
    ReplicaEvent, SampledPacket, ShiftReplica, Watched, WatchedEnds, WatchedEvent,
};
pub(crate) use storage::{BegunFlow, ClientRoutes, FlowGroups, GroupHolder, GroupHoldings, HotFlow, HotFlows, SeenWords};
pub use table::{Candidate, FlowIndex, FlowTable, Full};
pub(crate) use table::{CandidateSearch, Fate, PortUse, SweepRules};
pub use tick::{Tick, Ticks};
