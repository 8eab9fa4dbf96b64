//! Flows that an operator ends: a page of the listing is filtered as `sluicectl flows` does, and the workers end what
//! matches.
//!
//! Invariant: without any filter no flow ends. Who asks is logged with the filters, at the first page and at each that ends
//! flows. Not here: how a flow ends (`dataplane::forward`).

use std::fmt;

use dataplane::forward::EndedFlow;
use proto::v1;
use tonic::Status;

use super::flows::{Filter, position, row, token};
use crate::worker_threads::inquiries::Inquiries;

/// Flows that end for one request: at 800 a second 1.3 s, and the walk to them takes 0.13 s at most; a controller waits
/// 3 s for the answer.
const ENDS_MAX: usize = 1_000;

/// Ends the flows of a page, or counts them. Waits for workers.
pub(super) fn end_page(
    gateway: &str,
    inquiries: &Inquiries,
    request: &v1::EndFlowsRequest,
    caller: &impl fmt::Display,
) -> Result<v1::EndFlowsResponse, Status> {
    let asked = request.flows.clone().unwrap_or_default();
    let filter = Filter::try_from(&asked).map_err(Status::invalid_argument)?;
    if filter.is_empty() {
        return Err(Status::invalid_argument(
            "flows: found no filter, which would end all flows; expected service, namespace, backend, client, protocol or state",
        ));
    }
    let from = position(&asked.page_token).map_err(Status::invalid_argument)?;
    let mut found: Vec<(usize, EndedFlow)> = Vec::new();
    let next = inquiries.flows(from, ENDS_MAX, |worker, flow| {
        let matches = filter.matches(flow, &row(gateway, worker, flow, &inquiries.snapshot()));
        if matches {
            let (protocol, client, frontend, backend) = (flow.protocol, flow.client, flow.frontend, flow.backend);
            found.push((worker, EndedFlow { protocol, client, frontend, backend }));
        }
        matches
    });
    let unavailable = |error: crate::worker_threads::inquiries::NoAnswer| Status::unavailable(error.to_string());
    let next_page_token = next.map_err(unavailable)?.map_or_else(String::new, token);
    let mut ended = 0;
    if !request.count_only {
        for of_worker in found.chunk_by(|(one, _), (other, _)| one == other) {
            let worker = of_worker.first().map_or(0, |(worker, _)| *worker);
            let flows: Vec<_> = of_worker.iter().map(|(_, flow)| *flow).collect();
            ended += inquiries.end_flows(worker, &flows).map_err(unavailable)?;
        }
        if ended > 0 || asked.page_token.is_empty() {
            let v1::ListFlowsRequest { service, namespace, backend, client, protocol, state, .. } = &asked;
            tracing::warn!(%caller, service, namespace, backend, client, protocol, state, ended, "flows were ended on request");
        }
    }
    Ok(v1::EndFlowsResponse { matched: found.len() as u64, ended, next_page_token, silent: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_needs_a_filter() {
        let inquiries = crate::worker_threads::inquiries::tests::without_workers();
        let end = |flows| {
            let request = v1::EndFlowsRequest { flows: Some(flows), ..Default::default() };
            end_page("edge-1", &inquiries, &request, &"alice")
        };
        for without in [v1::ListFlowsRequest::default(), v1::ListFlowsRequest { page_size: 5, ..Default::default() }] {
            let refused = end(without).unwrap_err();
            assert!(refused.message().contains("found no filter"), "{refused}");
        }
        let answer = end(v1::ListFlowsRequest { namespace: "shop".to_owned(), ..Default::default() }).unwrap();
        assert_eq!(answer, v1::EndFlowsResponse::default());
    }
}
