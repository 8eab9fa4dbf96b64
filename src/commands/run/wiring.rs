//! Wiring of the tasks: the list of what a gateway does beside forwarding, with the inputs and outputs of each.
//!
//! Invariant: the order is that of the start. A task reads and writes only the channels that it is given here.
//! Not here: what tasks do, the workers, and the end of the gateway.

use std::sync::{Arc, Mutex as StdMutex};

use control::controller::Running;
use control::gateways::listener::{KeyCertificates, ServerTls};
use control::healthz::systemd;
use objects::scalar::url::ServerUrl;
use proto::v1::question::Query;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use super::channels::Channels;
use super::election;
use super::embedded_controller::EmbeddedController;
use super::network::{NetworkMerge, PortMonitor};
use super::probes::ProbeTask;
use super::watchdog::SystemdReport;
use super::workers::FlowOutlets;
use crate::admin::Sources;
use crate::admin::api::AdminServer;
use crate::admin::metrics::{GatewayPages, PagesServer, StatusPage, WorkerLoads};
use crate::admin::troubles::TroubleMonitor;
use crate::agent::backend_history::{HistoryFile, HistoryKeeper};
use crate::agent::compile_loop::{CompileLoop, Inputs, SnapshotPipeline};
use crate::agent::persist::directories::StateDirs;
use crate::agent::persist::{StateFile, StateWriter};
use crate::agent::state_age::StateAge;
use crate::agent::supervisor::Supervisor;
use crate::agent::zone::ZoneFilter;
use crate::controller_client::{ClientChannels, ClientSettings, ControllerClient, Facts};
use crate::fleet::election::{Candidacy, DuplicateWatch};
use crate::fleet::gateway_drain::{AnnouncePolicy, GatewayDrain};
use crate::fleet::replication::FlowReplicator;
use crate::fleet::routing_sessions::SessionMonitor;
use crate::fleet::service_limits::{LimitMonitor, WorkerRoom};
use crate::fleet::status::FleetMonitor;
use crate::flow_records::FlowExporter;
use crate::netlink::{NetlinkFollower, RouteAnnouncer, VipRoutes};
use crate::ports::Ports;
use crate::settings::{Elector, Replication, Settings, StateSource, Twin};
use crate::worker_threads;

/// What the tasks are made of.
pub(super) struct Wiring<'a> {
    pub(super) settings: &'a Settings,
    pub(super) channels: &'a Channels,
    pub(super) ports: &'a Ports,
    pub(super) dirs: &'a StateDirs,
    /// What operators see; also the workers and the reload.
    pub(super) sources: &'a Sources,
    pub(super) outlets: &'a FlowOutlets,
    pub(super) loads: Arc<WorkerLoads>,
    pub(super) routes: &'a VipRoutes,
    /// Whether routes of the last process stand.
    pub(super) is_restart: bool,
    /// Ends the election, while the other tasks go on.
    pub(super) election_shutdown: &'a CancellationToken,
    /// Ends all tasks.
    pub(super) shutdown: &'a CancellationToken,
}

impl Wiring<'_> {
    /// Starts all tasks. `running` is the embedded controller, if it has started.
    pub(super) fn start(&self, supervisor: &mut Supervisor, running: Option<Running>, pipeline: SnapshotPipeline) {
        // From Kubernetes to the workers.
        if matches!(self.settings.source, StateSource::Embedded(..)) {
            supervisor.run_to_its_end("controller", self.embedded_controller(running), EmbeddedController::run);
        }
        supervisor.run("config", self.controller_client(), ControllerClient::run);
        supervisor.run("state age", self.state_age(), StateAge::run);
        supervisor.run("persist", self.state_writer(), StateWriter::run);
        if let Some(zone) = self.settings.zone.clone() {
            supervisor.run("zone", self.zone_filter(zone), ZoneFilter::run);
        }
        supervisor.run("probe", self.probes(), ProbeTask::run);
        supervisor.run("history", self.history_keeper(), HistoryKeeper::run);
        supervisor.run("compile", self.compile_loop(pipeline), CompileLoop::run);
        // Flows of other gateways.
        if let Some(replication) = self.settings.replication.clone() {
            supervisor.run("replication", self.flow_replicator(replication), FlowReplicator::run);
        }
        // The network around the workers. Without any twin it comes from the configuration.
        if self.settings.ports.iter().any(|port| port.twin == Twin::Tap) {
            supervisor.run("netlink", self.netlink_follower(), NetlinkFollower::run);
        }
        supervisor.run("ports", self.port_monitor(), PortMonitor::run);
        supervisor.run("network", self.network_merge(), NetworkMerge::run);
        // Who gets packets to the VIPs: routers, and other gateways on the link.
        supervisor.run("drain", self.gateway_drain(), GatewayDrain::run);
        supervisor.run("announce", self.route_announcer(), RouteAnnouncer::run);
        match self.settings.election.elector {
            Elector::None => supervisor.run("duplicates", self.duplicate_watch(), DuplicateWatch::run),
            Elector::Keepalived => {
                let shutdown = self.election_shutdown.clone();
                supervisor.run_to_an_earlier_end("election", shutdown, self.candidacy(), Candidacy::run);
            }
        }
        // Reports.
        supervisor.run("service-limits", self.limit_monitor(), LimitMonitor::run);
        supervisor.run("routing-sessions", self.session_monitor(), SessionMonitor::run);
        supervisor.run("fleet", self.fleet_monitor(), FleetMonitor::run);
        if systemd::listens() {
            supervisor.run("systemd", self.systemd_report(), SystemdReport::run);
        }
        // Interfaces for operators. An address of metrics that is in use is tried again: forwarding does not need it.
        if let Some(exporter) = self.flow_exporter() {
            supervisor.run_to_its_end("flow-records", exporter, FlowExporter::run);
        }
        let admin_tls = ServerTls::of_admin(&self.settings.admin_listen);
        supervisor.run("troubles", self.trouble_monitor(admin_tls.clone()), TroubleMonitor::run);
        if let Some(server) = self.pages_server(admin_tls.clone()) {
            supervisor.run("metrics", server, PagesServer::run);
        }
        supervisor.run("admin", self.admin_server(admin_tls), AdminServer::run);
    }

    fn embedded_controller(&self, running: Option<Running>) -> EmbeddedController {
        EmbeddedController {
            first: Arc::new(StdMutex::new(running)),
            settings: self.sources.reload.controller(),
            reloads: self.sources.reload.reloads(),
            view: self.channels.controller.view.clone(),
            shutdown: self.shutdown.clone(),
        }
    }

    fn controller_client(&self) -> ControllerClient {
        let (settings, channels, sources) = (self.settings, self.channels, self.sources);
        let (urls, certificates, group) = match &settings.source {
            StateSource::Embedded(controller, certificates) => {
                let own = controller.listen.unix.iter().cloned().map(ServerUrl::Unix).collect();
                (own, certificates, Some(controller.group.clone()))
            }
            StateSource::Remote(urls, certificates) => (urls.clone(), certificates, None),
        };
        let (claimed, arbitration) = (&channels.fleet.claimed, &channels.controller.arbitration);
        let answers = sources.clone();
        ControllerClient {
            settings: ClientSettings {
                urls,
                certificates: certificates.clone(),
                group,
                gateway: settings.name.clone(),
                version: sources.version.clone(),
                profile: sources.reload.profile(),
                replication: settings.replication.as_ref().map(|replication| replication.listen),
                needs_membership: settings.replication.as_ref().is_some_and(Replication::needs_membership),
            },
            channels: ClientChannels {
                state: channels.controller.state.clone(),
                connected: channels.controller.connected.clone(),
                draining: channels.controller.draining.clone(),
                membership: channels.controller.membership.clone(),
                contender: election::contender(settings, claimed, arbitration, Arc::clone(&sources.ports)),
                answering: Arc::new(move |query: &Query| answers.answer(query)),
                facts: Facts {
                    served: channels.snapshots.served.subscribe(),
                    applied: channels.snapshots.applied.subscribe(),
                    fleet: channels.fleet.status.subscribe(),
                    workers: sources.workers.counters.clone(),
                },
            },
        }
    }

    fn state_age(&self) -> StateAge {
        StateAge {
            file: StateFile::new(self.dirs.clone()),
            state: self.channels.controller.state.clone(),
            connected: self.channels.controller.connected.subscribe(),
            max_age: self.settings.max_state_age,
        }
    }

    fn state_writer(&self) -> StateWriter {
        StateWriter {
            file: StateFile::new(self.dirs.clone()),
            state: self.channels.controller.state.subscribe(),
            draining: self.channels.controller.draining.subscribe(),
            connected: self.channels.controller.connected.subscribe(),
            applied: self.channels.snapshots.applied.subscribe(),
            is_persisted: self.channels.is_persisted.clone(),
        }
    }

    fn zone_filter(&self, zone: String) -> ZoneFilter {
        let state = self.channels.controller.state.subscribe();
        ZoneFilter { zone, state, zone_state: self.channels.zone_state.clone() }
    }

    fn probes(&self) -> ProbeTask {
        ProbeTask {
            state: self.channels.zone_state.subscribe(),
            routes: self.channels.snapshots.routes.subscribe(),
            tunables: self.sources.reload.tunables(),
            served: self.channels.snapshots.served.subscribe(),
            workers: self.sources.workers.counters.clone(),
            saved: self.channels.health.read_saved(self.dirs),
            results: self.channels.health.clone(),
        }
    }

    fn history_keeper(&self) -> HistoryKeeper {
        let (histories, file) = (self.channels.health.findings.histories.clone(), HistoryFile::new(self.dirs.clone()));
        file.restore(&histories);
        HistoryKeeper {
            served: self.channels.snapshots.served.subscribe(),
            causes: self.channels.health.findings.causes.subscribe(),
            histories,
            file,
        }
    }

    fn compile_loop(&self, pipeline: SnapshotPipeline) -> CompileLoop {
        CompileLoop {
            pipeline: Arc::new(Mutex::new(pipeline)),
            inputs: Inputs {
                state: self.channels.zone_state.subscribe(),
                network: self.channels.network.merged.subscribe(),
                health: self.channels.health.findings.health.subscribe(),
                tags: self.channels.health.findings.tags.subscribe(),
                tunables: self.sources.reload.tunables(),
                answers: self.channels.fleet.answers.subscribe(),
                clock: worker_threads::now_ns,
            },
            outputs: self.channels.snapshots.clone(),
        }
    }

    fn flow_replicator(&self, settings: Replication) -> FlowReplicator {
        FlowReplicator {
            gateway: self.settings.name.clone(),
            settings,
            keys: self.sources.reload.fleet_keys(),
            groups: self.settings.election.groups,
            first_vrid: self.settings.election.first_vrid,
            exchange: Arc::clone(&self.outlets.exchange),
            inquiries: Arc::clone(&self.sources.workers.inquiries),
            answers: self.channels.fleet.answers.subscribe(),
            tunables: self.sources.reload.tunables(),
            membership: self.channels.controller.membership.subscribe(),
            state: self.channels.controller.state.subscribe(),
            applied: self.channels.snapshots.applied.subscribe(),
            status: self.channels.fleet.replication.clone(),
        }
    }

    fn netlink_follower(&self) -> NetlinkFollower {
        NetlinkFollower {
            ports: self.settings.ports.iter().map(|port| port.name.clone()).collect(),
            next_hops: self.channels.snapshots.next_hops.subscribe(),
            answered: self.channels.snapshots.answered.subscribe(),
            requests: Arc::clone(&self.channels.network.neighbour_requests),
            network: self.channels.network.linux.clone(),
        }
    }

    fn port_monitor(&self) -> PortMonitor {
        PortMonitor { hotplug: self.ports.hotplug(), port_states: self.channels.network.port_states.clone() }
    }

    fn network_merge(&self) -> NetworkMerge {
        NetworkMerge {
            linux: self.channels.network.linux.subscribe(),
            port_states: self.channels.network.port_states.subscribe(),
            fixed: self.settings.fixed_network(),
            ports: self.settings.ports.clone(),
            network: self.channels.network.merged.clone(),
        }
    }

    fn gateway_drain(&self) -> GatewayDrain {
        GatewayDrain {
            policy: AnnouncePolicy {
                without_backends: self.settings.without_backends,
                drain_on_stop: self.settings.drain_on_stop,
            },
            routed: self.channels.snapshots.routed.subscribe(),
            served: self.channels.snapshots.served.subscribe(),
            draining: self.channels.controller.draining.subscribe(),
            terminating: self.channels.terminating.clone(),
            announced: self.channels.announced.clone(),
        }
    }

    fn route_announcer(&self) -> RouteAnnouncer {
        let announced = self.channels.announced.subscribe();
        RouteAnnouncer { routes: self.routes.clone(), announced, is_restart: self.is_restart }
    }

    fn duplicate_watch(&self) -> DuplicateWatch {
        let fleet = &self.channels.fleet;
        DuplicateWatch { ownership: Arc::clone(&fleet.ownership), answers: fleet.answers.clone(), status: fleet.election.clone() }
    }

    fn candidacy(&self) -> Candidacy {
        let (channels, fleet) = (self.channels, &self.channels.fleet);
        Candidacy {
            settings: Arc::new(self.settings.clone()),
            ownership: Arc::clone(&fleet.ownership),
            loads: self.sources.workers.loads.clone(),
            served: channels.snapshots.served.subscribe(),
            network: channels.network.merged.subscribe(),
            next_hops: channels.snapshots.next_hops.subscribe(),
            replication: fleet.replication.subscribe(),
            draining: channels.controller.draining.subscribe(),
            arbitration: channels.controller.arbitration.subscribe(),
            claimed: fleet.claimed.clone(),
            terminating: channels.terminating.clone(),
            shutdown: self.election_shutdown.clone(),
            answers: fleet.answers.clone(),
            status: fleet.election.clone(),
            clock: worker_threads::now_ns,
            first_fit_ns: None,
        }
    }

    fn limit_monitor(&self) -> LimitMonitor {
        let workers = &self.sources.workers;
        LimitMonitor {
            served: self.channels.snapshots.served.subscribe(),
            room: WorkerRoom { workers: workers.counters.clone(), flows_max: workers.flows_max },
            limits: self.channels.fleet.limits.clone(),
        }
    }

    fn trouble_monitor(&self, admin_tls: Option<Arc<ServerTls>>) -> TroubleMonitor {
        TroubleMonitor {
            sources: self.sources.clone(),
            certificates: self.shown_certificates(admin_tls),
            troubles: self.channels.troubles.clone(),
        }
    }

    fn session_monitor(&self) -> SessionMonitor {
        SessionMonitor {
            sockets: self.settings.daemon_sockets.clone(),
            state: self.channels.controller.state.subscribe(),
            sessions: self.channels.fleet.sessions.clone(),
        }
    }

    fn fleet_monitor(&self) -> FleetMonitor {
        let fleet = &self.channels.fleet;
        FleetMonitor {
            election: fleet.election.subscribe(),
            replication: fleet.replication.subscribe(),
            sessions: fleet.sessions.subscribe(),
            limits: fleet.limits.subscribe(),
            fleet: fleet.status.clone(),
        }
    }

    fn systemd_report(&self) -> SystemdReport {
        SystemdReport {
            served: self.channels.snapshots.served.subscribe(),
            applied: self.channels.snapshots.applied.subscribe(),
            connected: self.channels.controller.connected.subscribe(),
        }
    }

    fn flow_exporter(&self) -> Option<FlowExporter> {
        Some(FlowExporter {
            gateway: self.settings.name.clone(),
            target: self.settings.flow_records.clone()?,
            export: Arc::clone(&self.outlets.export),
            inquiries: Arc::clone(&self.sources.workers.inquiries),
            shutdown: self.shutdown.clone(),
        })
    }

    fn pages_server(&self, admin_tls: Option<Arc<ServerTls>>) -> Option<PagesServer> {
        let address = self.settings.metrics_listen?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let pages = GatewayPages {
            sources: self.sources.clone(),
            workers: Arc::clone(&self.loads),
            export: Arc::clone(&self.outlets.export),
            exchange: Arc::clone(&self.outlets.exchange),
            status_page: Arc::new(StatusPage::new(vec![self.settings.name.clone(), host])),
            certificates: self.shown_certificates(admin_tls),
            terminating: self.channels.terminating.clone(),
        };
        Some(PagesServer { address, pages, shutdown: self.shutdown.clone() })
    }

    /// Those of this gateway, without those of an embedded controller.
    fn shown_certificates(&self, admin_tls: Option<Arc<ServerTls>>) -> Vec<KeyCertificates> {
        self.settings.certificates().into_iter().chain(admin_tls.map(KeyCertificates::of_admin)).collect()
    }

    fn admin_server(&self, tls: Option<Arc<ServerTls>>) -> AdminServer {
        let listen = self.settings.admin_listen.clone();
        AdminServer { listen, tls, sources: self.sources.clone(), shutdown: self.shutdown.clone() }
    }
}
