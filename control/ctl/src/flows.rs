//! `sluicectl flows`: the flows of a gateway, or of all gateways of a controller, fetched page by page.
//!
//! Invariant: a list that was cut off says so.

use std::cell::Cell;
use std::io::Write;

use objects::text::listed;
use proto::v1;
use proto::v1::admin_client::AdminClient;
use tonic::Status;
use tonic::transport::Channel;

use crate::args::FlowsArguments;
use crate::client::Server;
use crate::error::CtlError;
use crate::list::{Screen, follow_by};

/// Services that an error names.
const SERVICES_LISTED_MAX: usize = 10;
/// Rows of a page.
const PAGE_ROWS: u32 = 5_000;

/// Prints the flows that match.
pub(super) async fn list(
    server: &Server,
    arguments: &FlowsArguments,
    out: &mut impl Write,
    notes: &mut impl Write,
    screen: Screen,
) -> Result<(), CtlError> {
    let limit = if arguments.limit == 0 { usize::MAX } else { arguments.limit };
    let (is_cut, has_asked) = (Cell::new(false), Cell::new(false));
    let listed = follow_by::<v1::FlowStatus>(server, &arguments.list, out, notes, screen, async |client| {
        let mut request = v1::ListFlowsRequest {
            service: arguments.service.clone(),
            backend: arguments.backend.clone(),
            client: arguments.client.clone(),
            protocol: arguments.protocol.clone().unwrap_or_default(),
            state: arguments.state.clone(),
            page_size: u32::try_from(limit).unwrap_or(u32::MAX).min(PAGE_ROWS),
            page_token: String::new(),
            gateway: arguments.gateway.clone(),
        };
        let (mut flows, mut silent) = (Vec::new(), Vec::new());
        let is_first = !has_asked.replace(true);
        loop {
            let page = client.list_flows(request.clone()).await?.into_inner();
            flows.extend(page.flows);
            silent.extend(page.silent);
            request.page_token = page.next_page_token;
            if flows.len() >= limit || request.page_token.is_empty() {
                break;
            }
        }
        if is_first && flows.is_empty() && !arguments.service.is_empty() {
            expect_service(client, &arguments.service).await?;
        }
        is_cut.set(flows.len() > limit || !request.page_token.is_empty());
        flows.truncate(limit);
        Ok((flows, silent))
    })
    .await;
    if is_cut.get() {
        writeln!(notes, "the list ends after {limit} flows, there may be more; --limit 0 lists all of them")?;
    }
    listed
}

/// Checks that there is a Service of a name, so that a list without flows is not taken for one of a Service without any.
async fn expect_service(client: &mut AdminClient<Channel>, name: &str) -> Result<(), Status> {
    let services = client.list_services(v1::ListServicesRequest::default()).await?.into_inner().services;
    let full = |service: &v1::ServiceStatus| format!("{}/{}", service.namespace, service.name);
    if services.iter().any(|service| service.name == name || full(service) == name) {
        return Ok(());
    }
    let mut names: Vec<_> = services.iter().map(full).collect();
    names.sort();
    names.dedup();
    Err(Status::not_found(format!("no Service {name:?}; there are: {}", listed(names, SERVICES_LISTED_MAX))))
}
