//! `sluice.v1.Admin` of `sluice-controller`.

use std::collections::BTreeSet;
use std::future::Future;

use proto::limits::MESSAGE_BYTES_MAX;
use proto::v1;
use proto::v1::admin_server::{Admin, AdminServer};
use proto::v1::{answer::Reply, question::Query};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use super::view::View;

/// Why the API ended.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The descriptors for server reflection are invalid.
    #[error("server reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The transport failed.
    #[error("the admin API failed: {0}")]
    Transport(#[from] tonic::transport::Error),
}

/// The API of a controller.
#[derive(Clone, Debug)]
pub struct ControllerAdmin {
    /// What it knows.
    pub view: View,
    /// The settings in effect, as YAML.
    pub config: String,
}

/// Serves the API of a controller or a gateway on a socket, with server reflection and the health service, until `stop`
/// completes.
///
/// # Errors
/// If the transport fails.
pub async fn serve<A: Admin>(listener: UnixListener, admin: A, stop: impl Future<Output = ()>) -> Result<(), AdminError> {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<AdminServer<A>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(v1::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    tonic::transport::Server::builder()
        .add_service(health)
        .add_service(reflection)
        .add_service(AdminServer::new(admin).max_encoding_message_size(MESSAGE_BYTES_MAX))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop)
        .await?;
    Ok(())
}

/// The rows of all gateways, and the gateways that did not answer.
struct Gathered<R> {
    rows: Vec<R>,
    silent: Vec<v1::Silent>,
}

impl ControllerAdmin {
    /// Queries every connected gateway if this controller leads. `rows` extracts the rows from an answer, with the gateway's
    /// name in each.
    async fn gather<R>(&self, query: Query, rows: impl Fn(Reply, &str) -> Option<Vec<R>>) -> Result<Gathered<R>, Status> {
        self.view.leads()?;
        let names: BTreeSet<String> = self.view.gateways.borrow().iter().map(|gateway| gateway.name.clone()).collect();
        let mut gathered = Gathered { rows: Vec::new(), silent: Vec::new() };
        for (gateway, answer) in self.view.fleet.ask(names.into_iter().collect(), &query).await {
            let silent = |reason: String| v1::Silent { gateway: gateway.clone(), reason };
            match answer.map(|said| rows(said, &gateway)) {
                Ok(Some(rows)) => gathered.rows.extend(rows),
                Ok(None) => gathered.silent.push(silent("it answered another question".to_owned())),
                Err(error) => gathered.silent.push(silent(error.to_string())),
            }
        }
        Ok(gathered)
    }
}

/// Sets the name of the gateway in its rows, regardless of what it sent.
fn of<R>(gateway: &str, mut rows: Vec<R>, field: impl Fn(&mut R) -> &mut String) -> Vec<R> {
    rows.iter_mut().for_each(|row| gateway.clone_into(field(row)));
    rows
}

#[tonic::async_trait]
impl Admin for ControllerAdmin {
    async fn list_services(&self, _: Request<v1::ListServicesRequest>) -> Result<Response<v1::ListServicesResponse>, Status> {
        let Gathered { rows, silent } = self
            .gather(Query::Services(v1::ListServicesRequest {}), |said, gateway| match said {
                Reply::Services(answer) => Some(of(gateway, answer.services, |row| &mut row.gateway)),
                _ => None,
            })
            .await?;
        Ok(Response::new(v1::ListServicesResponse { services: rows, silent }))
    }

    async fn list_backends(&self, _: Request<v1::ListBackendsRequest>) -> Result<Response<v1::ListBackendsResponse>, Status> {
        let Gathered { rows, silent } = self
            .gather(Query::Backends(v1::ListBackendsRequest {}), |said, gateway| match said {
                Reply::Backends(answer) => Some(of(gateway, answer.backends, |row| &mut row.gateway)),
                _ => None,
            })
            .await?;
        Ok(Response::new(v1::ListBackendsResponse { backends: rows, silent }))
    }

    async fn list_ports(&self, _: Request<v1::ListPortsRequest>) -> Result<Response<v1::ListPortsResponse>, Status> {
        let Gathered { rows, silent } = self
            .gather(Query::Ports(v1::ListPortsRequest {}), |said, gateway| match said {
                Reply::Ports(answer) => Some(of(gateway, answer.ports, |row| &mut row.gateway)),
                _ => None,
            })
            .await?;
        Ok(Response::new(v1::ListPortsResponse { ports: rows, silent }))
    }

    async fn list_drops(&self, _: Request<v1::ListDropsRequest>) -> Result<Response<v1::ListDropsResponse>, Status> {
        let Gathered { rows, silent } = self
            .gather(Query::Drops(v1::ListDropsRequest {}), |said, gateway| match said {
                Reply::Drops(answer) => Some(of(gateway, answer.drops, |row| &mut row.gateway)),
                _ => None,
            })
            .await?;
        Ok(Response::new(v1::ListDropsResponse { drops: rows, silent }))
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

    async fn reload(&self, _: Request<v1::ReloadRequest>) -> Result<Response<v1::ReloadResponse>, Status> {
        Err(Status::failed_precondition(
            "sluice-controller reads its configuration when it starts; restart it, gateways go on meanwhile",
        ))
    }

    async fn get_config(&self, _: Request<v1::GetConfigRequest>) -> Result<Response<v1::GetConfigResponse>, Status> {
        Ok(Response::new(v1::GetConfigResponse { yaml: self.config.clone() }))
    }

    async fn list_gateways(&self, _: Request<v1::ListGatewaysRequest>) -> Result<Response<v1::ListGatewaysResponse>, Status> {
        self.view.list_gateways().map(Response::new)
    }

    async fn list_pools(&self, _: Request<v1::ListPoolsRequest>) -> Result<Response<v1::ListPoolsResponse>, Status> {
        self.view.list_pools().map(Response::new)
    }

    async fn list_events(&self, _: Request<v1::ListEventsRequest>) -> Result<Response<v1::ListEventsResponse>, Status> {
        self.view.list_events().map(Response::new)
    }

    async fn list_overrides(&self, _: Request<v1::ListOverridesRequest>) -> Result<Response<v1::ListOverridesResponse>, Status> {
        self.view.list_overrides().map(Response::new)
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        self.view.drain(request.into_inner()).await.map(Response::new)
    }

    async fn undrain(&self, request: Request<v1::UndrainRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        self.view.undrain(request.into_inner()).await.map(Response::new)
    }

    async fn set_weight(&self, request: Request<v1::SetWeightRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        self.view.set_weight(request.into_inner()).await.map(Response::new)
    }
}
