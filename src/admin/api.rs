//! The admin API: `sluice.v1.Admin` on unix sockets and over TCP, with server reflection and the health service.
//!
//! It reads the published values of the tasks and the workers' counters. Its only change is a reload of the configuration.
//! Requests about the group of gateways go to the embedded controller. Invariant: a slow reader keeps no snapshot alive;
//! an explanation holds one for at most as long as workers may take to answer.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;

use control::admin::{AdminSockets, Caller, View};
use control::config::settings::AdminListen;
use control::gateways::listener::ServerTls;
use dataplane::WorkerCounters;
use dataplane::snapshot::ServiceView;
use proto::trouble::Trouble;
use proto::v1::admin_server::Admin;
use proto::v1::{answer::Reply, question::Query};
use proto::{FleetStatus, GatewayState, Generation, Origin, v1};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::capture::{self, Captures};
use super::watch::{WatchReply, Watches};
use super::{ended_flows, explanation, flows, history, tables};
use crate::agent::backend_health::Causes;
use crate::agent::backend_history::BackendHistories;
use crate::agent::served::Served;
use crate::agent::supervisor::{Failure, Tasks};
use crate::fleet::election::ElectionStatus;
use crate::fleet::replication::ReplicationStatus;
use crate::ports::ReadPorts;
use crate::settings::reload::Reload;
use crate::worker_threads::Load;
use crate::worker_threads::inquiries::Inquiries;

/// The controller as seen by the admin API.
#[derive(Clone, Debug)]
pub enum ControllerAccess {
    /// In this process; `None` while it starts.
    Embedded(watch::Receiver<Option<View>>),
    /// In another process; the URLs that the gateway dials.
    Remote(Vec<String>),
}

impl ControllerAccess {
    /// The state of the embedded controller.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` with its address if it is not embedded, `UNAVAILABLE` while it starts.
    pub fn view(&self) -> Result<View, Status> {
        match self {
            Self::Embedded(view) => {
                view.borrow().clone().ok_or_else(|| Status::unavailable("the embedded controller starts; try again"))
            }
            Self::Remote(urls) => Err(Status::failed_precondition(format!(
                "this gateway follows the controller at {}, which alone knows this; give its admin socket (key `admin.listen` of \
                 its file) as --server unix:PATH",
                urls.join(", ")
            ))),
        }
    }
}

/// What the gateway has from controllers.
#[derive(Clone, Debug)]
pub struct StateSources {
    /// The current state.
    pub current: watch::Receiver<Option<GatewayState>>,
    /// The generation that every worker has applied.
    pub applied: watch::Receiver<Option<Generation>>,
    /// Whether a controller is connected.
    pub connected: watch::Receiver<bool>,
    /// Whether the gateway is drained.
    pub draining: watch::Receiver<bool>,
}

/// The part of this gateway in the fleet.
#[derive(Clone, Debug)]
pub struct FleetSources {
    /// The election of the owners of VIPs.
    pub election: watch::Receiver<ElectionStatus>,
    /// The replication of flows.
    pub replication: watch::Receiver<ReplicationStatus>,
    /// All of it, as it is reported.
    pub status: watch::Receiver<FleetStatus>,
}

/// The workers.
#[derive(Clone, Debug)]
pub struct WorkerSources {
    /// Their counters, in their order.
    pub counters: Vec<Arc<WorkerCounters>>,
    /// Their loads.
    pub loads: Vec<Arc<Load>>,
    /// Flows that each of them has room for.
    pub flows_max: u64,
    /// Inquiries to them.
    pub inquiries: Arc<Inquiries>,
}

/// Inputs of the API.
#[derive(Clone)]
pub struct Sources {
    /// The gateway's name.
    pub gateway: String,
    /// This program's version.
    pub version: String,
    /// What the gateway has from controllers.
    pub state: StateSources,
    /// The newest published snapshot data.
    pub served: watch::Receiver<Served>,
    /// Why backends are unhealthy.
    pub causes: watch::Receiver<Causes>,
    /// How backends were.
    pub histories: BackendHistories,
    /// The troubles of the gateway, the worst first.
    pub troubles: watch::Receiver<Vec<Trouble>>,
    /// The part of this gateway in the fleet.
    pub fleet: FleetSources,
    /// The controller.
    pub controller: ControllerAccess,
    /// The tasks beside the workers.
    pub tasks: Tasks,
    /// The workers.
    pub workers: WorkerSources,
    /// Captures of packets.
    pub captures: Arc<Captures>,
    /// Watches of flows and packets.
    pub watches: Arc<Watches>,
    /// The ports, in the order of the configuration.
    pub ports: ReadPorts,
    /// The configuration.
    pub reload: Arc<Reload>,
}

/// The server of the API. Cloned for each start.
#[derive(Clone)]
pub struct AdminServer {
    /// Key `admin.listen`.
    pub listen: AdminListen,
    /// The certificates for TCP, if it listens there.
    pub tls: Option<Arc<ServerTls>>,
    /// What it answers from.
    pub sources: Sources,
    /// Cancelled at the end.
    pub shutdown: CancellationToken,
}

impl AdminServer {
    /// Serves the API until `shutdown`.
    ///
    /// # Errors
    /// If a unix socket is in use or cannot be created, or the server fails.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { listen, tls, sources, shutdown } = self;
        let sockets = AdminSockets::listen(&listen, tls).await?;
        let (captures, watches) = (Arc::clone(&sources.captures), Arc::clone(&sources.watches));
        let stop = async move {
            shutdown.cancelled().await;
            // The server waits for the end of streams.
            captures.end();
            watches.end();
        };
        Ok(control::admin::serve(sockets, sources, stop).await?)
    }
}

impl Sources {
    fn services(&self, request: v1::ListServicesRequest) -> v1::ListServicesResponse {
        let services = self.served.borrow().services.clone();
        let limits = self.fleet.status.borrow().limits.clone();
        let rows = |service: &ServiceView| tables::frontend_rows(&self.gateway, service, &self.workers.counters);
        let row = |service: &Arc<ServiceView>| {
            let drops = if request.counters { tables::drops_of(service) } else { BTreeMap::new() };
            let traffic = if request.counters { rows(service) } else { Vec::new() };
            v1::ServiceStatus { drops, traffic, ..tables::limited(tables::service(&self.gateway, service), &limits) }
        };
        v1::ListServicesResponse { services: services.values().map(row).collect(), silent: Vec::new() }
    }

    fn backends(&self, request: &v1::ListBackendsRequest) -> Result<v1::ListBackendsResponse, Status> {
        let query = tables::BackendQuery::try_from(request).map_err(Status::invalid_argument)?;
        let Served { services, removed, .. } = self.served.borrow().clone();
        let causes = self.causes.borrow().clone();
        let rows = |service| tables::backends(&self.gateway, service, &self.workers.counters, &causes, &query);
        let mut backends: Vec<_> = services.values().flat_map(|service| rows(service)).collect();
        let removed = tables::removed_backends(&self.gateway, &removed, &services, &self.workers.counters, &query);
        backends.extend(removed);
        history::add(&self.gateway, &mut backends, &self.histories, request);
        Ok(v1::ListBackendsResponse { backends, silent: Vec::new() })
    }

    fn ports(&self) -> v1::ListPortsResponse {
        v1::ListPortsResponse { ports: (self.ports)(), silent: Vec::new() }
    }

    pub(crate) fn drops(&self) -> v1::ListDropsResponse {
        v1::ListDropsResponse { drops: tables::drops(&self.gateway, &self.workers.counters), silent: Vec::new() }
    }

    pub(crate) fn status(&self) -> v1::GetStatusResponse {
        v1::GetStatusResponse {
            gateway: self.gateway.clone(),
            version: self.version.clone(),
            generation: self.state.applied.borrow().as_ref().map(v1::Generation::from),
            ready: self.served.borrow().ready,
            controller_connected: *self.state.connected.borrow(),
            accounts: tables::accounts(&self.workers.counters, &self.workers.loads, self.workers.flows_max),
            tasks: self.tasks.status(),
            draining: *self.state.draining.borrow(),
            state_expired: self.state.current.borrow().as_ref().is_some_and(|known| known.origin == Origin::Expired),
        }
    }

    /// Answers a request that the controller forwards for an operator.
    #[must_use]
    pub fn answer(&self, query: &Query) -> Reply {
        match query {
            Query::Services(request) => Reply::Services(self.services(*request)),
            Query::Backends(request) => self.backends(request).map_or_else(failure, Reply::Backends),
            Query::Ports(_) => Reply::Ports(self.ports()),
            Query::Drops(_) => Reply::Drops(self.drops()),
            Query::Troubles(_) => Reply::Troubles(self.own_troubles()),
            Query::Flows(request) => self.flows(request).map_or_else(failure, Reply::Flows),
            Query::Explain(request) => self.explanation(request).map_or_else(failure, Reply::Explanation),
            Query::Heaviest(request) => self.heaviest_blocking(request).map_or_else(failure, Reply::Heaviest),
            Query::EndFlows(request) => self.end_flows(request, &request.caller).map_or_else(failure, Reply::EndedFlows),
        }
    }

    /// A page of flows. Waits for workers.
    fn flows(&self, request: &v1::ListFlowsRequest) -> Result<v1::ListFlowsResponse, Status> {
        self.check_name(&request.gateway)?;
        flows::page(&self.gateway, &self.workers.inquiries, request)
    }

    /// Ends flows, or counts them. Waits for workers.
    fn end_flows(&self, request: &v1::EndFlowsRequest, caller: &impl Display) -> Result<v1::EndFlowsResponse, Status> {
        self.check_name(request.flows.as_ref().map_or("", |flows| flows.gateway.as_str()))?;
        ended_flows::end_page(&self.gateway, &self.workers.inquiries, request, caller)
    }

    /// The heaviest flows and clients. To be called from a thread that may wait.
    fn heaviest_blocking(&self, request: &v1::ListHeaviestRequest) -> Result<v1::ListHeaviestResponse, Status> {
        let runtime = Handle::try_current().map_err(|error| Status::internal(error.to_string()))?;
        runtime.block_on(self.heaviest(request))
    }

    async fn heaviest(&self, request: &v1::ListHeaviestRequest) -> Result<v1::ListHeaviestResponse, Status> {
        self.check_name(&request.gateway)?;
        self.watches.heaviest(request).await
    }

    /// An explanation. Waits for a worker.
    fn explanation(&self, request: &v1::ExplainRequest) -> Result<v1::Explanation, Status> {
        self.check_name(&request.gateway)?;
        explanation::explain(&self.gateway, &self.workers.inquiries, request)
    }

    /// A request may name this gateway.
    fn check_name(&self, name: &str) -> Result<(), Status> {
        if name.is_empty() || name == self.gateway {
            return Ok(());
        }
        let message = format!("this is gateway {}, not {name}; ask that gateway, or a controller for all of them", self.gateway);
        Err(Status::not_found(message))
    }
}

#[tonic::async_trait]
impl Admin for Sources {
    async fn list_services(
        &self,
        request: Request<v1::ListServicesRequest>,
    ) -> Result<Response<v1::ListServicesResponse>, Status> {
        let mut answer = self.services(request.into_inner());
        if let ControllerAccess::Embedded(view) = &self.controller
            && let Some(view) = &*view.borrow()
        {
            view.add_causes(&mut answer.services);
        }
        Ok(Response::new(answer))
    }

    async fn list_backends(
        &self,
        request: Request<v1::ListBackendsRequest>,
    ) -> Result<Response<v1::ListBackendsResponse>, Status> {
        self.backends(request.get_ref()).map(Response::new)
    }

    async fn list_ports(&self, _: Request<v1::ListPortsRequest>) -> Result<Response<v1::ListPortsResponse>, Status> {
        Ok(Response::new(self.ports()))
    }

    async fn list_drops(&self, _: Request<v1::ListDropsRequest>) -> Result<Response<v1::ListDropsResponse>, Status> {
        Ok(Response::new(self.drops()))
    }

    async fn list_flows(&self, request: Request<v1::ListFlowsRequest>) -> Result<Response<v1::ListFlowsResponse>, Status> {
        let sources = self.clone();
        blocking(move || sources.flows(request.get_ref())).await
    }

    async fn end_flows(&self, request: Request<v1::EndFlowsRequest>) -> Result<Response<v1::EndFlowsResponse>, Status> {
        let caller = Caller::changing(&request)?;
        let sources = self.clone();
        blocking(move || Sources::end_flows(&sources, request.get_ref(), &caller)).await
    }

    async fn explain(&self, request: Request<v1::ExplainRequest>) -> Result<Response<v1::Explanation>, Status> {
        let sources = self.clone();
        blocking(move || sources.explanation(request.get_ref())).await
    }

    async fn list_explanations(
        &self,
        request: Request<v1::ExplainRequest>,
    ) -> Result<Response<v1::ListExplanationsResponse>, Status> {
        let explanations = vec![self.explain(request).await?.into_inner()];
        Ok(Response::new(v1::ListExplanationsResponse { explanations, silent: Vec::new() }))
    }

    type CaptureStream = ReceiverStream<capture::Reply>;

    async fn capture(&self, request: Request<v1::CaptureRequest>) -> Result<Response<Self::CaptureStream>, Status> {
        let caller = Caller::seeing_packets(&request)?;
        let (place, runtime) = (self.captures.place(&caller).await?, Handle::current());
        blocking(move || place.begin(request.get_ref(), &runtime).map(ReceiverStream::new)).await
    }

    type WatchFlowsStream = ReceiverStream<WatchReply>;

    async fn watch_flows(&self, request: Request<v1::WatchFlowsRequest>) -> Result<Response<Self::WatchFlowsStream>, Status> {
        self.watches.events(request.into_inner()).await.map(|replies| Response::new(ReceiverStream::new(replies)))
    }

    async fn list_heaviest(
        &self,
        request: Request<v1::ListHeaviestRequest>,
    ) -> Result<Response<v1::ListHeaviestResponse>, Status> {
        self.heaviest(request.get_ref()).await.map(Response::new)
    }

    async fn get_status(&self, _: Request<v1::GetStatusRequest>) -> Result<Response<v1::GetStatusResponse>, Status> {
        Ok(Response::new(self.status()))
    }

    async fn list_troubles(&self, _: Request<v1::ListTroublesRequest>) -> Result<Response<v1::ListTroublesResponse>, Status> {
        self.all_troubles().await.map(Response::new)
    }

    async fn list_gateways(&self, _: Request<v1::ListGatewaysRequest>) -> Result<Response<v1::ListGatewaysResponse>, Status> {
        self.controller.view()?.list_gateways().map(Response::new)
    }

    async fn list_pools(&self, _: Request<v1::ListPoolsRequest>) -> Result<Response<v1::ListPoolsResponse>, Status> {
        self.controller.view()?.list_pools().map(Response::new)
    }

    async fn list_vips(&self, _: Request<v1::ListVipsRequest>) -> Result<Response<v1::ListVipsResponse>, Status> {
        self.controller.view()?.list_vips().map(Response::new)
    }

    async fn list_events(&self, _: Request<v1::ListEventsRequest>) -> Result<Response<v1::ListEventsResponse>, Status> {
        self.controller.view()?.list_events().map(Response::new)
    }

    async fn list_overrides(&self, _: Request<v1::ListOverridesRequest>) -> Result<Response<v1::ListOverridesResponse>, Status> {
        self.controller.view()?.list_overrides().await.map(Response::new)
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        let caller = Caller::changing(&request)?;
        self.controller.view()?.drain(request.into_inner(), &caller).await.map(Response::new)
    }

    async fn undrain(&self, request: Request<v1::UndrainRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        let caller = Caller::changing(&request)?;
        self.controller.view()?.undrain(request.into_inner(), &caller).await.map(Response::new)
    }

    async fn set_weight(&self, request: Request<v1::SetWeightRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        let caller = Caller::changing(&request)?;
        self.controller.view()?.set_weight(request.into_inner(), &caller).await.map(Response::new)
    }

    async fn reload(&self, request: Request<v1::ReloadRequest>) -> Result<Response<v1::ReloadResponse>, Status> {
        let caller = Caller::changing(&request)?;
        let reload = Arc::clone(&self.reload);
        let result = tokio::task::spawn_blocking(move || reload.reload()).await;
        let reloaded = result.map_err(|error| Status::internal(format!("the reload failed: {error}")))?.map_err(|errors| {
            tracing::error!(%errors, %caller, "the configuration is invalid; nothing was changed");
            Status::invalid_argument(errors.to_string())
        })?;
        let summary = reloaded.to_string();
        tracing::info!(summary, %caller, "the configuration was reloaded");
        Ok(Response::new(v1::ReloadResponse { applied: reloaded.applied, at_next_start: reloaded.at_next_start, summary }))
    }

    async fn get_config(&self, _: Request<v1::GetConfigRequest>) -> Result<Response<v1::GetConfigResponse>, Status> {
        let pools = self.state.current.borrow().as_ref().map(|known| known.state.pools.iter().map(v1::Pool::from).collect());
        let (has_state, pools) = (pools.is_some(), pools.unwrap_or_default());
        Ok(Response::new(v1::GetConfigResponse { yaml: self.reload.effective(), pools, has_state }))
    }
}

fn failure(status: Status) -> Reply {
    Reply::Failure(v1::Failure { code: i32::from(status.code()).cast_unsigned(), message: status.message().to_owned() })
}

/// Runs what waits for workers on a thread that may wait.
async fn blocking<T: Send + 'static>(run: impl FnOnce() -> Result<T, Status> + Send + 'static) -> Result<Response<T>, Status> {
    let result = tokio::task::spawn_blocking(run).await;
    result.map_err(|error| Status::internal(format!("the request failed: {error}")))?.map(Response::new)
}

#[cfg(test)]
pub(crate) mod tests {
    use proto::v1::admin_client::AdminClient;
    use tonic::transport::{Channel, Endpoint};
    use tonic_health::pb::health_client::HealthClient;
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

    use super::*;
    pub(crate) use tables::tests::{counted, web};

    pub(crate) fn sources() -> Sources {
        let counters = WorkerCounters::default();
        counters.received.add(10);
        counters.transmitted.add(9);
        counters.drops(dataplane::DropReason::NoFlow).add(1);
        let applied = watch::channel(Some(Generation { epoch: "e".to_owned(), counter: 4 })).1;
        let port = v1::PortStatus {
            name: "uplink".to_owned(),
            link: "up".to_owned(),
            steering: "one worker".to_owned(),
            ..v1::PortStatus::default()
        };
        Sources {
            gateway: "edge-1".to_owned(),
            version: "0.1.0".to_owned(),
            state: StateSources {
                current: watch::channel(None).1,
                applied,
                connected: watch::channel(true).1,
                draining: watch::channel(false).1,
            },
            served: watch::channel(Served {
                ready: true,
                services: dataplane::snapshot::Views::unit(Arc::clone(&web().name), Arc::new(web())),
                ..Served::default()
            })
            .1,
            causes: watch::channel(Causes::new()).1,
            histories: BackendHistories::default(),
            troubles: watch::channel(Vec::new()).1,
            fleet: FleetSources {
                election: watch::channel(ElectionStatus::default()).1,
                replication: watch::channel(ReplicationStatus::default()).1,
                status: watch::channel(FleetStatus::default()).1,
            },
            controller: ControllerAccess::Remote(vec!["unix:/c.sock".to_owned()]),
            tasks: Tasks::default(),
            workers: WorkerSources {
                counters: vec![Arc::new(counters)],
                loads: vec![Arc::default()],
                flows_max: 100,
                inquiries: Arc::new(crate::worker_threads::inquiries::tests::without_workers()),
            },
            captures: Arc::new(Captures::new(Arc::new(crate::worker_threads::inquiries::tests::without_workers()))),
            watches: Arc::new(Watches::new("edge-1", Arc::new(crate::worker_threads::inquiries::tests::without_workers()))),
            ports: Arc::new(move || vec![port.clone()]),
            reload: Arc::new(crate::settings::reload::tests::reload()),
        }
    }

    /// Waits until the server listens.
    async fn connect(path: &std::path::Path) -> Channel {
        let endpoint = Endpoint::from_shared(format!("unix:{}", path.display())).unwrap();
        let connected = async {
            loop {
                match endpoint.connect().await {
                    Ok(channel) => return channel,
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(20), connected).await.unwrap()
    }

    #[tokio::test]
    async fn the_api_answers_over_its_socket_and_takes_it_away_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let stop = CancellationToken::new();
        let listen = AdminListen::unix(path.clone());
        let server = tokio::spawn(AdminServer { listen, tls: None, sources: sources(), shutdown: stop.clone() }.run());
        let channel = connect(&path).await;
        let mut admin = AdminClient::new(channel.clone());
        let status = admin.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
        assert_eq!(status.generation, Some(v1::Generation { epoch: "e".to_owned(), counter: 4 }));
        assert!(status.ready && status.controller_connected);
        let account = status.accounts[0];
        assert_eq!((account.received, account.transmitted, account.dropped), (10, 9, 1));
        let services = admin.list_services(v1::ListServicesRequest::default()).await.unwrap().into_inner().services;
        assert_eq!((services[0].name.as_str(), services[0].healthy), ("web", 1));
        let backends = admin.list_backends(v1::ListBackendsRequest::default()).await.unwrap().into_inner().backends;
        assert_eq!((backends[0].address.as_str(), backends[0].gateway.as_str()), ("10.0.0.1:80", "edge-1"));
        let at = |address: &str| v1::ListBackendsRequest { addresses: vec![address.to_owned()], ..Default::default() };
        let some = admin.list_backends(at("10.0.0.2")).await.unwrap().into_inner().backends;
        assert_eq!(some.into_iter().map(|backend| backend.address).collect::<Vec<_>>(), ["10.0.0.2:80"]);
        let none = admin.list_backends(at("10.0.0.2:80")).await.unwrap_err();
        assert!(none.message().contains("found \"10.0.0.2:80\", expected IP addresses"), "{none}");
        let elsewhere = admin.drain(v1::DrainRequest::default()).await.unwrap_err();
        assert_eq!(elsewhere.code(), tonic::Code::FailedPrecondition);
        assert!(elsewhere.message().contains("unix:/c.sock"), "{elsewhere}");
        let ports = admin.list_ports(v1::ListPortsRequest {}).await.unwrap().into_inner().ports;
        assert_eq!((ports[0].link.as_str(), ports[0].steering.as_str()), ("up", "one worker"));
        let drops = admin.list_drops(v1::ListDropsRequest {}).await.unwrap().into_inner().drops;
        assert_eq!(drops.iter().map(|d| d.packets).sum::<u64>(), 1);
        let request = HealthCheckRequest { service: "sluice.v1.Admin".to_owned() };
        let health = HealthClient::new(channel).check(request).await.unwrap().into_inner();
        assert_eq!(health.status(), ServingStatus::Serving);
        let mut viewer = AdminClient::new(connect(&control::admin::read_only_path(&path)).await);
        assert!(viewer.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner().ready);
        assert!(viewer.list_flows(v1::ListFlowsRequest::default()).await.unwrap().into_inner().flows.is_empty());
        let mut capture = admin.capture(v1::CaptureRequest::default()).await.unwrap().into_inner();
        assert!(capture.message().await.unwrap().is_some(), "a capture runs when the API ends");
        let refused = [
            viewer.reload(v1::ReloadRequest {}).await.unwrap_err(),
            viewer.capture(v1::CaptureRequest::default()).await.unwrap_err(),
            viewer.drain(v1::DrainRequest::default()).await.unwrap_err(),
            viewer.undrain(v1::UndrainRequest::default()).await.unwrap_err(),
            viewer.set_weight(v1::SetWeightRequest::default()).await.unwrap_err(),
        ];
        for refused in refused {
            assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused}");
        }
        stop.cancel();
        server.await.unwrap().unwrap();
        assert!(!path.exists() && !control::admin::read_only_path(&path).exists());
    }

    #[tokio::test]
    async fn a_socket_in_use_is_an_error_that_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let _other = control::gateways::socket::listen(&path).await.unwrap();
        let (listen, shutdown) = (AdminListen::unix(path), CancellationToken::new());
        let error = AdminServer { listen, tls: None, sources: sources(), shutdown }.run().await.unwrap_err();
        assert!(error.to_string().contains("is in use"), "{error}");
    }
}
