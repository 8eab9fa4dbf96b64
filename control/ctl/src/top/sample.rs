//! A sample: the answers of a gateway or a controller to all questions of one round.
//!
//! Not here: what follows from two samples (`figures`).

use std::time::Duration;

use proto::limits::HEAVIEST_MAX;
use proto::v1;
use proto::v1::admin_client::AdminClient;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::client::{self, ClientError, Server};

/// Flows that are fetched at most. A person reads a page; `sluicectl flows` lists all.
const FLOWS_MAX: usize = 1_000;
/// Pages that are fetched at most in search of them: a page may be empty.
const FLOW_PAGES_MAX: usize = 20;

/// The flows to fetch; an empty text selects all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FlowQuery {
    pub(super) service: String,
    pub(super) backend: String,
}

/// What a view needs beside what every view does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) flows: Option<FlowQuery>,
    /// The heaviest flows and clients: while they are asked for, workers sample packets.
    pub(super) heaviest: bool,
}

/// The heaviest flows and clients.
#[derive(Clone, Debug, Default)]
pub(super) struct HeaviestSample {
    pub(super) rows: Vec<v1::HeavyTraffic>,
    /// Why there are none to see.
    pub(super) refusal: Option<String>,
}

/// Flows, as far as they were fetched.
#[derive(Clone, Debug, Default)]
pub(super) struct FlowSample {
    pub(super) query: FlowQuery,
    pub(super) rows: Vec<v1::FlowStatus>,
    pub(super) is_cut: bool,
    /// Why there are none to see.
    pub(super) refusal: Option<String>,
}

/// All answers.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// When they came, on a monotonic clock.
    pub(super) at: Duration,
    pub(super) status: v1::GetStatusResponse,
    pub(super) services: Vec<v1::ServiceStatus>,
    pub(super) backends: Vec<v1::BackendStatus>,
    pub(super) drops: Vec<v1::DropCount>,
    pub(super) ports: Vec<v1::PortStatus>,
    pub(super) gateways: Vec<v1::GatewayStatus>,
    /// Why the gateways are not known here.
    pub(super) gateways_refusal: Option<String>,
    /// `None`: not asked for.
    pub(super) flows: Option<FlowSample>,
    /// `None`: not asked for.
    pub(super) heaviest: Option<HeaviestSample>,
    /// Gateways that did not answer the controller, each with the reason.
    pub(super) silent: Vec<v1::Silent>,
}

/// Asks all questions at once. A connection is kept in `client` from one round to the next.
///
/// # Errors
/// If one that both programs answer got no answer.
pub(super) async fn fetch(
    server: &Server,
    client: &mut Option<AdminClient<Channel>>,
    wanted: Wanted,
) -> Result<Sample, ClientError> {
    let has_answered = client.is_some();
    let admin = match client.take() {
        Some(admin) => admin,
        None => client::connect(server).await?,
    };
    let asked = ask(admin.clone(), wanted).await;
    let sample = asked.map_err(|status| ClientError::from_status(server, &status, has_answered))?;
    *client = Some(admin);
    Ok(sample)
}

async fn ask(admin: AdminClient<Channel>, wanted: Wanted) -> Result<Sample, Status> {
    let [mut a, mut b, mut c, mut d, mut e, mut f] = std::array::from_fn(|_| admin.clone());
    let (status, services, backends, drops, ports, gateways, flows, heaviest) = tokio::join!(
        a.get_status(v1::GetStatusRequest {}),
        b.list_services(v1::ListServicesRequest { counters: true }),
        c.list_backends(v1::ListBackendsRequest { counters: true, ..Default::default() }),
        d.list_drops(v1::ListDropsRequest {}),
        e.list_ports(v1::ListPortsRequest {}),
        f.list_gateways(v1::ListGatewaysRequest {}),
        async {
            match wanted.flows {
                Some(query) => list_flows(admin.clone(), query).await.map(Some),
                None => Ok(None),
            }
        },
        async { if wanted.heaviest { list_heaviest(admin.clone()).await.map(Some) } else { Ok(None) } },
    );
    let services = services?.into_inner();
    let (gateways, gateways_refusal) = match gateways {
        Ok(answer) => (answer.into_inner().gateways, None),
        Err(status) => (Vec::new(), Some(refusal(status)?)),
    };
    Ok(Sample {
        at: Duration::ZERO,
        status: status?.into_inner(),
        services: services.services,
        backends: backends?.into_inner().backends,
        drops: drops?.into_inner().drops,
        ports: ports?.into_inner().ports,
        gateways,
        gateways_refusal,
        flows: flows?,
        heaviest: heaviest?,
        silent: services.silent,
    })
}

/// The text of a refusal, of one program, of what the other one answers. Other errors are returned.
fn refusal(status: Status) -> Result<String, Status> {
    match status.code() {
        Code::FailedPrecondition | Code::Unavailable | Code::Unimplemented if !status.message().is_empty() => {
            Ok(status.message().to_owned())
        }
        _ => Err(status),
    }
}

/// Flows and then clients; of a client the fields of a flow are empty.
async fn list_heaviest(mut admin: AdminClient<Channel>) -> Result<HeaviestSample, Status> {
    let limit = u32::try_from(HEAVIEST_MAX).unwrap_or_default();
    match admin.list_heaviest(v1::ListHeaviestRequest { limit, ..Default::default() }).await {
        Ok(answer) => {
            let v1::ListHeaviestResponse { flows, clients, .. } = answer.into_inner();
            Ok(HeaviestSample { rows: flows.into_iter().chain(clients).collect(), refusal: None })
        }
        Err(status) => Ok(HeaviestSample { rows: Vec::new(), refusal: Some(refusal(status)?) }),
    }
}

async fn list_flows(mut admin: AdminClient<Channel>, query: FlowQuery) -> Result<FlowSample, Status> {
    let mut sample = FlowSample { query, ..FlowSample::default() };
    let mut request = v1::ListFlowsRequest {
        service: sample.query.service.clone(),
        backend: sample.query.backend.clone(),
        page_size: 1_000,
        ..v1::ListFlowsRequest::default()
    };
    for _ in 0..FLOW_PAGES_MAX {
        let page = match admin.list_flows(request.clone()).await {
            Ok(page) => page.into_inner(),
            Err(status) => {
                sample.refusal = Some(refusal(status)?);
                return Ok(sample);
            }
        };
        sample.rows.extend(page.flows);
        request.page_token = page.next_page_token;
        if sample.rows.len() >= FLOWS_MAX || request.page_token.is_empty() {
            break;
        }
    }
    sample.is_cut = sample.rows.len() > FLOWS_MAX || !request.page_token.is_empty();
    sample.rows.truncate(FLOWS_MAX);
    Ok(sample)
}
