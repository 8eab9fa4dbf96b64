//! Channels between the tasks of a gateway, by the task that writes them.
//!
//! Invariant: they outlive the failure of a task, so that it continues with what it had found, and readers keep the last
//! value. Not here: which task reads which channel (`wiring`).

use std::net::IpAddr;
use std::sync::Arc;

use control::admin::View;
use crossbeam_queue::ArrayQueue;
use dataplane::{Link, Network, VipAnswers, VipOwnership};
use proto::trouble::Trouble;
use proto::{Arbitration, FleetStatus, GatewayState, Membership, RoutingSession, ServiceLimit};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::election;
use super::flow_transfer::FirstState;
use super::probes::ProbeResults;
use crate::agent::backend_history::now_s;
use crate::agent::compile_loop::Outputs;
use crate::fleet::election::{ElectionStatus, VrrpClaims};
use crate::fleet::replication::ReplicationStatus;
use crate::netlink::{Announcement, REQUESTS_MAX};
use crate::ports::PortStates;
use crate::settings::Settings;

/// All channels.
pub(super) struct Channels {
    /// Of the embedded controller, and the client of the controller.
    pub(super) controller: ControllerChannels,
    /// The state as used in this gateway's zone; without a zone the channel of the controller's state.
    pub(super) zone_state: watch::Sender<Option<GatewayState>>,
    /// Whether the state on disk is from a controller that sent it to this process.
    pub(super) is_persisted: watch::Sender<bool>,
    /// Of the network.
    pub(super) network: NetworkChannels,
    /// Of the probes.
    pub(super) health: ProbeResults,
    /// Of the compile loop.
    pub(super) snapshots: Outputs,
    /// Of the tasks that deal with other gateways.
    pub(super) fleet: FleetChannels,
    /// What is not as it should be.
    pub(super) troubles: watch::Sender<Vec<Trouble>>,
    /// What routers are to learn.
    pub(super) announced: watch::Sender<Announcement>,
    /// Cancelled when the gateway is about to end: it gives its VIPs away and withdraws its routes.
    pub(super) terminating: CancellationToken,
}

/// What a gateway has from controllers.
pub(super) struct ControllerChannels {
    /// The current state.
    pub(super) state: watch::Sender<Option<GatewayState>>,
    /// Whether a controller is connected.
    pub(super) connected: watch::Sender<bool>,
    /// Whether the gateway is drained.
    pub(super) draining: watch::Sender<bool>,
    /// With whom flows are replicated.
    pub(super) membership: watch::Sender<Option<Membership>>,
    /// Decisions about groups of VIPs that several gateways claim.
    pub(super) arbitration: watch::Sender<Arbitration>,
    /// What the embedded controller knows; `None` while it starts.
    pub(super) view: watch::Sender<Option<View>>,
}

/// The network and its parts.
pub(super) struct NetworkChannels {
    /// The tables of Linux.
    pub(super) linux: watch::Sender<Network>,
    /// The states of the ports.
    pub(super) port_states: watch::Sender<PortStates>,
    /// Both, with static entries of the configuration.
    pub(super) merged: watch::Sender<Network>,
    /// Clients whose neighbour entries workers need.
    pub(super) neighbour_requests: Arc<ArrayQueue<(Link, IpAddr)>>,
}

/// What this gateway knows of other gateways and of routers.
pub(super) struct FleetChannels {
    /// The leases of groups of VIPs, which workers read.
    pub(super) ownership: Arc<VipOwnership>,
    /// The VIPs that snapshots answer for.
    pub(super) answers: watch::Sender<VipAnswers>,
    /// The election as operators see it.
    pub(super) election: watch::Sender<ElectionStatus>,
    /// The groups that VRRP gives this gateway.
    pub(super) claimed: watch::Sender<VrrpClaims>,
    /// The replication as operators see it.
    pub(super) replication: watch::Sender<ReplicationStatus>,
    /// Sessions of the routing daemon.
    pub(super) sessions: watch::Sender<Vec<RoutingSession>>,
    /// Services at their limits.
    pub(super) limits: watch::Sender<Vec<ServiceLimit>>,
    /// All of it, for reports.
    pub(super) status: watch::Sender<FleetStatus>,
}

impl Channels {
    /// Channels with what is known at the start.
    pub(super) fn new(settings: &Settings, first: FirstState) -> Self {
        let state = watch::Sender::new(first.state);
        Self {
            zone_state: if settings.zone.is_some() { watch::Sender::new(None) } else { state.clone() },
            controller: ControllerChannels {
                state,
                connected: watch::Sender::new(false),
                draining: watch::Sender::new(first.draining),
                membership: watch::Sender::default(),
                arbitration: watch::Sender::default(),
                view: watch::Sender::new(None),
            },
            is_persisted: watch::Sender::new(false),
            network: NetworkChannels {
                linux: watch::Sender::default(),
                port_states: watch::Sender::default(),
                merged: watch::Sender::new(settings.fixed_network()),
                neighbour_requests: Arc::new(ArrayQueue::new(REQUESTS_MAX)),
            },
            health: ProbeResults::default(),
            snapshots: Outputs::default(),
            fleet: FleetChannels {
                ownership: election::ownership(settings),
                answers: watch::Sender::new(election::first_answers(settings)),
                election: watch::Sender::new(election::first_status(settings)),
                claimed: watch::Sender::default(),
                replication: watch::Sender::new(ReplicationStatus::at_start(settings.replication.as_ref())),
                sessions: watch::Sender::default(),
                limits: watch::Sender::default(),
                status: watch::Sender::default(),
            },
            troubles: watch::Sender::new(vec![Trouble::starting(&settings.name, now_s())]),
            announced: watch::Sender::default(),
            terminating: CancellationToken::new(),
        }
    }
}
