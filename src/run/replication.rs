//! What workers tell about their flows beside the packets: records, and replicas for partners.
//!
//! Not here: what becomes of them (`agent::flow_records`, `agent::fleet::replication`).

use std::sync::Arc;

use tokio::sync::watch;

use crate::agent::supervisor::Supervisor;
use crate::fleet::replication::{self, ReplicaExchange, ReplicationInputs, ReplicationStatus};
use crate::flow_records::FlowExport;
use crate::settings::Settings;

/// The queues of the workers for it.
pub(super) struct FlowOutlets {
    pub(super) export: Arc<FlowExport>,
    pub(super) exchange: Arc<ReplicaExchange>,
}

impl FlowOutlets {
    /// Of this number of workers, as far as `settings` ask for records and replicas.
    pub(super) fn new(settings: &Settings, workers: usize) -> Self {
        Self {
            export: Arc::new(FlowExport::new(settings.flow_records.as_ref(), workers)),
            exchange: Arc::new(ReplicaExchange::new(settings.replication.as_ref(), workers)),
        }
    }
}

/// The status at the start: flows of partners are awaited, if there are any.
pub(super) fn first_status(settings: &Settings) -> watch::Sender<ReplicationStatus> {
    watch::Sender::new(ReplicationStatus { awaits_copies: settings.replication.is_some(), ..ReplicationStatus::default() })
}

/// Supervises the replication of flows, if they are replicated.
pub(super) fn supervise(supervisor: &mut Supervisor, inputs: Option<ReplicationInputs>) {
    if let Some(inputs) = inputs {
        supervisor.run("replication", inputs, replication::run);
    }
}
