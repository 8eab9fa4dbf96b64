//! The tasks that learn what operators want to know of other gateways and of routers.
//!
//! Not here: what they do (`agent::fleet`).

use proto::{FleetStatus, GatewayState};
use tokio::sync::watch;

use crate::agent::served::Served;
use crate::agent::supervisor::Supervisor;
use crate::fleet::election::ElectionStatus;
use crate::fleet::replication::ReplicationStatus;
use crate::fleet::routing_sessions;
use crate::fleet::service_limits::{self, WorkerRoom};
use crate::fleet::status::{self, FleetSources};
use crate::settings::Settings;

/// Supervises the questions to the routing daemon, and what keeps `fleet` current.
pub(super) fn supervise(
    supervisor: &mut Supervisor,
    settings: &Settings,
    known: watch::Receiver<Option<GatewayState>>,
    (election, replication): (watch::Receiver<ElectionStatus>, watch::Receiver<ReplicationStatus>),
    (served, room): (watch::Receiver<Served>, WorkerRoom),
    fleet: watch::Sender<FleetStatus>,
) {
    let (sessions, limits) = (watch::Sender::default(), watch::Sender::default());
    let sources = FleetSources { election, replication, sessions: sessions.subscribe(), limits: limits.subscribe() };
    let inputs = (served, room, limits);
    supervisor.run("service-limits", inputs, |(served, room, limits)| service_limits::run(served, room, limits));
    let inputs = (settings.daemon_sockets.clone(), known, sessions);
    supervisor.run("routing-sessions", inputs, |(sockets, known, sessions)| routing_sessions::run(sockets, known, sessions));
    supervisor.run("fleet", (sources, fleet), |(sources, fleet)| status::run(sources, fleet));
}
