//! `sluice.v1.Admin` of `sluice-controller`.

use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use proto::limits::MESSAGE_BYTES_MAX;
use proto::v1;
use proto::v1::admin_server::{Admin, AdminServer};
use proto::v1::{answer::Reply, question::Query};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status};

use super::caller::{Caller, ReadOnly, admit};
use super::fleet;
use super::sockets::{AdminSockets, listen_patiently};
use super::view::View;
use crate::gateways::listener::Listeners;
use crate::gateways::local_connections::incoming;
use crate::gateways::server::{ServeError, with_health_and_reflection};

/// Interval of keep-alive pings. A dead connection over TCP is noticed within twice this time.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Maximum number of connections to each unix socket: a dozen operators with a few programs each.
const LOCAL_MAX: usize = 32;

/// Time after a stop at which open connections are dropped.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// The API of a controller.
#[derive(Clone, Debug)]
pub struct ControllerAdmin {
    /// What it knows.
    pub view: View,
    /// The settings in effect, as YAML.
    pub config: String,
}

/// Serves the API of a controller or a gateway on its sockets, with server reflection and the health service, until
/// `stop` completes.
///
/// # Errors
/// If the transport fails.
pub async fn serve<A: Admin>(sockets: AdminSockets, admin: A, stop: impl Future<Output = ()>) -> Result<(), ServeError> {
    let AdminSockets { all, read_only, tcp, guards } = sockets;
    let (admin, stopping) = (Arc::new(admin), CancellationToken::new());
    let of_all = serve_on(incoming(all, LOCAL_MAX), Arc::clone(&admin), Ok, stopping.clone());
    let of_viewers = async {
        let Some(listener) = read_only else { return Ok(()) };
        let mark = |mut request: Request<()>| {
            request.extensions_mut().insert(ReadOnly);
            Ok(request)
        };
        serve_on(incoming(listener, LOCAL_MAX), Arc::clone(&admin), mark, stopping.clone()).await
    };
    let over_tcp = async {
        let Some((address, tls)) = tcp else { return Ok(()) };
        let Some(listener) = stopping.run_until_cancelled(listen_patiently(address)).await else { return Ok(()) };
        let listeners = Listeners { unix: None, tcp: Some((listener, tls)) };
        serve_on(listeners.incoming(), Arc::clone(&admin), admit, stopping.clone()).await
    };
    let mut servers = pin!(async { tokio::try_join!(of_all, of_viewers, over_tcp) });
    tokio::select! {
        ended = &mut servers => return ended.map(drop),
        () = stop => stopping.cancel(),
    }
    // A peer that does not close its connection delays the end no longer.
    let ended = tokio::time::timeout(SHUTDOWN_GRACE, servers).await;
    drop(guards);
    ended.unwrap_or(Ok(((), (), ()))).map(drop)
}

/// Serves on one socket. `admit` passes over each request.
async fn serve_on<A: Admin, C>(
    connections: impl Stream<Item = io::Result<C>>,
    admin: Arc<A>,
    admit: impl FnMut(Request<()>) -> Result<Request<()>, Status> + Clone + Send + Sync + 'static,
    stopping: CancellationToken,
) -> Result<(), ServeError>
where
    C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let admin = AdminServer::from_arc(admin).max_encoding_message_size(MESSAGE_BYTES_MAX);
    let server = Server::builder().http2_keepalive_interval(Some(KEEP_ALIVE)).http2_keepalive_timeout(Some(KEEP_ALIVE));
    with_health_and_reflection::<AdminServer<A>>(server)
        .await?
        .add_service(InterceptedService::new(admin, admit))
        .serve_with_incoming_shutdown(connections, stopping.cancelled_owned())
        .await?;
    Ok(())
}

impl ControllerAdmin {
    /// The error that names the gateways, of requests about packets.
    fn only_gateways(&self) -> Status {
        let gateways = self.view.gateways.borrow();
        let names: BTreeSet<&str> = gateways.iter().map(|gateway| gateway.name.as_str()).collect();
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        Status::failed_precondition(format!(
            "only gateways have packets; ask one of them ({names}) by its admin API (key `admin.listen` of its file)"
        ))
    }

    /// Queries every connected gateway if this controller leads. Returns the rows of all, and the gateways that did not
    /// answer. `rows` extracts the rows from an answer. The gateway's name replaces whatever it sent in the field
    /// `name` of its rows.
    async fn gather<R>(
        &self,
        query: Query,
        rows: fn(Reply) -> Option<Vec<R>>,
        name: fn(&mut R) -> &mut String,
    ) -> Result<(Vec<R>, Vec<v1::Silent>), Status> {
        self.view.leads()?;
        let names = self.view.connected();
        let (mut all, mut silent) = (Vec::new(), Vec::new());
        for (gateway, answer) in self.view.fleet.ask(names.into_iter().collect(), &query).await {
            let reason = match answer.map(rows) {
                Ok(Some(mut rows)) => {
                    rows.iter_mut().for_each(|row| gateway.clone_into(name(row)));
                    all.extend(rows);
                    continue;
                }
                Ok(None) => "its answer belongs to another request".to_owned(),
                Err(error) => error.to_string(),
            };
            silent.push(v1::Silent { gateway, reason });
        }
        Ok((all, silent))
    }
}

#[tonic::async_trait]
impl Admin for ControllerAdmin {
    async fn list_services(
        &self,
        request: Request<v1::ListServicesRequest>,
    ) -> Result<Response<v1::ListServicesResponse>, Status> {
        let rows = |reply| if let Reply::Services(answer) = reply { Some(answer.services) } else { None };
        let query = Query::Services(request.into_inner());
        let (mut services, silent) = self.gather(query, rows, |row| &mut row.gateway).await?;
        self.view.add_causes(&mut services);
        Ok(Response::new(v1::ListServicesResponse { services, silent }))
    }

    async fn list_backends(
        &self,
        request: Request<v1::ListBackendsRequest>,
    ) -> Result<Response<v1::ListBackendsResponse>, Status> {
        let rows = |reply| if let Reply::Backends(answer) = reply { Some(answer.backends) } else { None };
        let query = Query::Backends(request.into_inner());
        let (backends, silent) = self.gather(query, rows, |row| &mut row.gateway).await?;
        Ok(Response::new(v1::ListBackendsResponse { backends, silent }))
    }

    async fn list_ports(&self, _: Request<v1::ListPortsRequest>) -> Result<Response<v1::ListPortsResponse>, Status> {
        let rows = |reply| if let Reply::Ports(answer) = reply { Some(answer.ports) } else { None };
        let query = Query::Ports(v1::ListPortsRequest {});
        let (ports, silent) = self.gather(query, rows, |row| &mut row.gateway).await?;
        Ok(Response::new(v1::ListPortsResponse { ports, silent }))
    }

    async fn list_drops(&self, _: Request<v1::ListDropsRequest>) -> Result<Response<v1::ListDropsResponse>, Status> {
        let rows = |reply| if let Reply::Drops(answer) = reply { Some(answer.drops) } else { None };
        let query = Query::Drops(v1::ListDropsRequest {});
        let (drops, silent) = self.gather(query, rows, |row| &mut row.gateway).await?;
        Ok(Response::new(v1::ListDropsResponse { drops, silent }))
    }

    async fn list_flows(&self, request: Request<v1::ListFlowsRequest>) -> Result<Response<v1::ListFlowsResponse>, Status> {
        fleet::list_flows(&self.view, request.into_inner()).await.map(Response::new)
    }

    async fn end_flows(&self, request: Request<v1::EndFlowsRequest>) -> Result<Response<v1::EndFlowsResponse>, Status> {
        let caller = Caller::changing(&request)?;
        fleet::end_flows(&self.view, request.into_inner(), &caller).await.map(Response::new)
    }

    async fn list_heaviest(
        &self,
        request: Request<v1::ListHeaviestRequest>,
    ) -> Result<Response<v1::ListHeaviestResponse>, Status> {
        fleet::list_heaviest(&self.view, request.into_inner()).await.map(Response::new)
    }

    async fn explain(&self, request: Request<v1::ExplainRequest>) -> Result<Response<v1::Explanation>, Status> {
        fleet::explain(&self.view, request.into_inner()).await.map(Response::new)
    }

    async fn list_explanations(
        &self,
        request: Request<v1::ExplainRequest>,
    ) -> Result<Response<v1::ListExplanationsResponse>, Status> {
        fleet::list_explanations(&self.view, request.into_inner()).await.map(Response::new)
    }

    type CaptureStream = futures::stream::Empty<Result<v1::CaptureReply, Status>>;

    async fn capture(&self, _: Request<v1::CaptureRequest>) -> Result<Response<Self::CaptureStream>, Status> {
        Err(self.only_gateways())
    }

    type WatchFlowsStream = futures::stream::Empty<Result<v1::WatchFlowsReply, Status>>;

    async fn watch_flows(&self, _: Request<v1::WatchFlowsRequest>) -> Result<Response<Self::WatchFlowsStream>, Status> {
        Err(self.only_gateways())
    }

    async fn get_status(&self, _: Request<v1::GetStatusRequest>) -> Result<Response<v1::GetStatusResponse>, Status> {
        let state = self.view.state();
        Ok(Response::new(v1::GetStatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            generation: state.as_ref().map(|state| v1::Generation::from(&state.generation)),
            ready: state.is_some(),
            ..v1::GetStatusResponse::default()
        }))
    }

    async fn list_troubles(&self, _: Request<v1::ListTroublesRequest>) -> Result<Response<v1::ListTroublesResponse>, Status> {
        self.view.list_troubles(None).await.map(Response::new)
    }

    async fn reload(&self, request: Request<v1::ReloadRequest>) -> Result<Response<v1::ReloadResponse>, Status> {
        Caller::changing(&request)?;
        Err(Status::failed_precondition(
            "sluice-controller reads its configuration when it starts; restart it, gateways keep forwarding meanwhile",
        ))
    }

    async fn get_config(&self, _: Request<v1::GetConfigRequest>) -> Result<Response<v1::GetConfigResponse>, Status> {
        Ok(Response::new(v1::GetConfigResponse { yaml: self.config.clone(), ..Default::default() }))
    }

    async fn list_gateways(&self, _: Request<v1::ListGatewaysRequest>) -> Result<Response<v1::ListGatewaysResponse>, Status> {
        self.view.list_gateways().map(Response::new)
    }

    async fn list_pools(&self, _: Request<v1::ListPoolsRequest>) -> Result<Response<v1::ListPoolsResponse>, Status> {
        self.view.list_pools().map(Response::new)
    }

    async fn list_vips(&self, _: Request<v1::ListVipsRequest>) -> Result<Response<v1::ListVipsResponse>, Status> {
        self.view.list_vips().map(Response::new)
    }

    async fn list_events(&self, _: Request<v1::ListEventsRequest>) -> Result<Response<v1::ListEventsResponse>, Status> {
        self.view.list_events().map(Response::new)
    }

    async fn list_overrides(&self, _: Request<v1::ListOverridesRequest>) -> Result<Response<v1::ListOverridesResponse>, Status> {
        self.view.list_overrides().await.map(Response::new)
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        let caller = Caller::changing(&request)?;
        self.view.drain(request.into_inner(), &caller).await.map(Response::new)
    }

    async fn undrain(&self, request: Request<v1::UndrainRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        let caller = Caller::changing(&request)?;
        self.view.undrain(request.into_inner(), &caller).await.map(Response::new)
    }

    async fn set_weight(&self, request: Request<v1::SetWeightRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        let caller = Caller::changing(&request)?;
        self.view.set_weight(request.into_inner(), &caller).await.map(Response::new)
    }
}
