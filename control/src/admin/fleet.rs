//! Flows, the heaviest of them, and explanations of all gateways, which answer from their workers.
//!
//! Invariant: a page holds flows of one gateway, so that no more than a page of one gateway is in memory for a request.
//! A token begins with the gateway it continues; the controller keeps nothing between pages. A gateway that does not
//! answer is named, and the next page goes on with the gateway after it.

use std::cmp::Reverse;

use objects::text::listed;
use proto::limits::HEAVIEST;
use proto::v1;
use proto::v1::{answer::Reply, question::Query};
use tonic::Status;

use super::caller::Caller;
use super::view::View;
use crate::gateways::fleet_queries::SilentError;

/// Maximum number of gateways in a message; a group has about a dozen.
const GATEWAYS_LISTED_MAX: usize = 20;
/// Between the name of a gateway and its own token; a gateway's name has none.
const SEPARATOR: char = '/';

/// The connected gateways, or the one of this name.
fn selected(view: &View, name: &str) -> Result<Vec<String>, Status> {
    view.leads()?;
    let all = view.connected();
    if name.is_empty() {
        return Ok(all);
    }
    if all.iter().any(|one| one == name) {
        return Ok(vec![name.to_owned()]);
    }
    Err(Status::not_found(format!("no gateway {name:?} is connected; there are: {}", listed(&all, GATEWAYS_LISTED_MAX))))
}

/// The gateway of a page, its own token, and what leads to the page of the gateway after it.
struct PageOfGateway {
    gateway: String,
    token: String,
    after: String,
}

impl PageOfGateway {
    /// `None`: there is no gateway.
    fn of(view: &View, name: &str, page_token: &str) -> Result<Option<Self>, Status> {
        let names = selected(view, name)?;
        let (gateway, token) = match page_token.split_once(SEPARATOR) {
            Some((gateway, token)) => (gateway.to_owned(), token.to_owned()),
            None if page_token.is_empty() => match names.first() {
                Some(first) => (first.clone(), String::new()),
                None => return Ok(None),
            },
            None => {
                return Err(Status::invalid_argument(format!(
                    "page_token: found {page_token:?}, expected the next_page_token of an earlier page"
                )));
            }
        };
        let after = names.into_iter().find(|name| *name > gateway).map_or_else(String::new, |name| format!("{name}{SEPARATOR}"));
        Ok(Some(Self { gateway, token, after }))
    }

    /// The token of the page after an answer with this token.
    fn next(&self, token: &str) -> String {
        if token.is_empty() { self.after.clone() } else { format!("{}{SEPARATOR}{token}", self.gateway) }
    }
}

/// The answer of one gateway, or that it gives none.
async fn ask_one(view: &View, gateway: &str, query: &Query) -> Result<Result<Reply, v1::Silent>, Status> {
    let answer = view.fleet.ask(vec![gateway.to_owned()], query).await.pop().map(|(_, answer)| answer);
    match answer {
        Some(Ok(reply)) => Ok(Ok(reply)),
        Some(Err(SilentError::Invalid(message))) => Err(Status::invalid_argument(message)),
        Some(Err(error)) => Ok(Err(silent(gateway.to_owned(), error.to_string()))),
        None => Ok(Err(silent(gateway.to_owned(), OTHER_ANSWER.to_owned()))),
    }
}

/// A page of the flows of one gateway.
pub(super) async fn list_flows(view: &View, request: v1::ListFlowsRequest) -> Result<v1::ListFlowsResponse, Status> {
    let Some(page) = PageOfGateway::of(view, &request.gateway, &request.page_token)? else {
        return Ok(v1::ListFlowsResponse::default());
    };
    let query = Query::Flows(v1::ListFlowsRequest { page_token: page.token.clone(), ..request });
    let silent = match ask_one(view, &page.gateway, &query).await? {
        Ok(Reply::Flows(mut answer)) => {
            answer.flows.iter_mut().for_each(|flow| flow.gateway.clone_from(&page.gateway));
            let next_page_token = page.next(&answer.next_page_token);
            return Ok(v1::ListFlowsResponse { flows: answer.flows, next_page_token, silent: Vec::new() });
        }
        Ok(_) => silent(page.gateway, OTHER_ANSWER.to_owned()),
        Err(silent) => silent,
    };
    Ok(v1::ListFlowsResponse { flows: Vec::new(), next_page_token: page.after, silent: vec![silent] })
}

/// Ends the flows of a page of one gateway.
pub(super) async fn end_flows(
    view: &View,
    request: v1::EndFlowsRequest,
    caller: &Caller,
) -> Result<v1::EndFlowsResponse, Status> {
    let flows = request.flows.unwrap_or_default();
    let Some(page) = PageOfGateway::of(view, &flows.gateway, &flows.page_token)? else {
        return Ok(v1::EndFlowsResponse::default());
    };
    let flows = Some(v1::ListFlowsRequest { page_token: page.token.clone(), ..flows });
    let query = Query::EndFlows(v1::EndFlowsRequest { flows, caller: format!("{caller}, at a controller"), ..request });
    let silent = match ask_one(view, &page.gateway, &query).await? {
        Ok(Reply::EndedFlows(answer)) => {
            let next_page_token = page.next(&answer.next_page_token);
            return Ok(v1::EndFlowsResponse { next_page_token, ..answer });
        }
        Ok(_) => silent(page.gateway, OTHER_ANSWER.to_owned()),
        Err(silent) => silent,
    };
    Ok(v1::EndFlowsResponse { next_page_token: page.after, silent: vec![silent], ..Default::default() })
}

/// The heaviest flows and clients of all gateways, merged: a client of two gateways has a row for each.
pub(super) async fn list_heaviest(view: &View, request: v1::ListHeaviestRequest) -> Result<v1::ListHeaviestResponse, Status> {
    let names = selected(view, &request.gateway)?;
    let mut all = v1::ListHeaviestResponse::default();
    for (gateway, answer) in view.fleet.ask(names, &Query::Heaviest(request.clone())).await {
        match answer {
            Ok(Reply::Heaviest(mut answer)) => {
                let rows = answer.flows.iter_mut().chain(&mut answer.clients);
                rows.for_each(|row| row.gateway.clone_from(&gateway));
                all.flows.append(&mut answer.flows);
                all.clients.append(&mut answer.clients);
            }
            Ok(_) => all.silent.push(silent(gateway, OTHER_ANSWER.to_owned())),
            Err(SilentError::Invalid(message)) => return Err(Status::invalid_argument(message)),
            Err(error) => all.silent.push(silent(gateway, error.to_string())),
        }
    }
    let limit = match request.limit {
        0 => HEAVIEST,
        limit => limit as usize,
    };
    for rows in [&mut all.flows, &mut all.clients] {
        rows.sort_by_key(|row| Reverse((row.bits_per_second, row.packets_per_second)));
        rows.truncate(limit);
    }
    Ok(all)
}

/// The explanation of the only gateway.
pub(super) async fn explain(view: &View, request: v1::ExplainRequest) -> Result<v1::Explanation, Status> {
    let names = selected(view, &request.gateway)?;
    if names.len() != 1 {
        let message = format!(
            "expected `gateway`, the name of one of: {}; ListExplanations asks all of them",
            listed(&names, GATEWAYS_LISTED_MAX)
        );
        return Err(Status::failed_precondition(message));
    }
    let v1::ListExplanationsResponse { mut explanations, mut silent } = list_explanations(view, request).await?;
    explanations.pop().ok_or_else(|| {
        let reason = silent.pop().map(|one| format!("gateway {}: {}", one.gateway, one.reason));
        Status::unavailable(reason.unwrap_or_else(|| "the gateway has disconnected".to_owned()))
    })
}

/// The explanations of all gateways. If none answers because the request is wrong, that is the error.
pub(super) async fn list_explanations(view: &View, request: v1::ExplainRequest) -> Result<v1::ListExplanationsResponse, Status> {
    let names = selected(view, &request.gateway)?;
    let (mut all, mut invalid) = (v1::ListExplanationsResponse::default(), None);
    for (gateway, answer) in view.fleet.ask(names, &Query::Explain(request)).await {
        match answer {
            Ok(Reply::Explanation(explanation)) => all.explanations.push(v1::Explanation { gateway, ..explanation }),
            Ok(_) => all.silent.push(silent(gateway, OTHER_ANSWER.to_owned())),
            Err(error) => {
                if let SilentError::Invalid(message) = &error {
                    invalid = invalid.or_else(|| Some(message.clone()));
                }
                all.silent.push(silent(gateway, error.to_string()));
            }
        }
    }
    match invalid {
        Some(message) if all.explanations.is_empty() => Err(Status::invalid_argument(message)),
        _ => Ok(all),
    }
}

/// Why an answer is no use.
const OTHER_ANSWER: &str = "its answer belongs to another request";

fn silent(gateway: String, reason: String) -> v1::Silent {
    v1::Silent { gateway, reason }
}
