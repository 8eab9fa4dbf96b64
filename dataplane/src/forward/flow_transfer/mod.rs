//! Flows that come from elsewhere, and the flows that a worker passes on: saved flows, from one process to the next,
//! and shadow flows, which are replicated between gateways. Either may leave a flow split between two workers.
//!
//! Not here: the queues and times of replication (`flow::storage`), the file of saved flows and the connections between
//! gateways (the root package).

mod restore;
mod saved_flows;
mod shadow_flows;
mod split_flows;

pub(super) use restore::save;
pub use saved_flows::{FlowFate, RestoreReport, SavedAt, SavedFlows, SavedFlowsError};
pub(super) use shadow_flows::{Owned, ReceivingFlows, Replicating, is_sent_by};
pub(super) use split_flows::visit_halves;
