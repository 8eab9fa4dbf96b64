//! Flows and explanations of all gateways, which answer from their workers.
//!
//! Invariant: a page holds flows of one gateway, so that no more than a page of one gateway is in memory for a request.
//! A token begins with the gateway it continues; the controller keeps nothing between pages. A gateway that does not
//! answer is named, and the next page goes on with the gateway after it.

use objects::text::listed;
use proto::v1;
use proto::v1::{answer::Reply, question::Query};
use tonic::Status;

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

/// A page of the flows of one gateway.
pub(super) async fn list_flows(view: &View, request: v1::ListFlowsRequest) -> Result<v1::ListFlowsResponse, Status> {
    let names = selected(view, &request.gateway)?;
    let (gateway, token) = match request.page_token.split_once(SEPARATOR) {
        Some((gateway, token)) => (gateway.to_owned(), token.to_owned()),
        None if request.page_token.is_empty() => match names.first() {
            Some(first) => (first.clone(), String::new()),
            None => return Ok(v1::ListFlowsResponse::default()),
        },
        None => {
            let found = request.page_token;
            return Err(Status::invalid_argument(format!(
                "page_token: found {found:?}, expected the next_page_token of an earlier page"
            )));
        }
    };
    let after = names.into_iter().find(|name| *name > gateway).map_or_else(String::new, |name| format!("{name}{SEPARATOR}"));
    let query = Query::Flows(v1::ListFlowsRequest { page_token: token, ..request });
    let mut page = v1::ListFlowsResponse::default();
    for (gateway, answer) in view.fleet.ask(vec![gateway], &query).await {
        match answer {
            Ok(Reply::Flows(answer)) => {
                page.flows = answer.flows;
                page.flows.iter_mut().for_each(|flow| flow.gateway.clone_from(&gateway));
                if !answer.next_page_token.is_empty() {
                    page.next_page_token = format!("{gateway}{SEPARATOR}{}", answer.next_page_token);
                    return Ok(page);
                }
            }
            Ok(_) => page.silent.push(silent(gateway, OTHER_ANSWER.to_owned())),
            Err(SilentError::Invalid(message)) => return Err(Status::invalid_argument(message)),
            Err(error) => page.silent.push(silent(gateway, error.to_string())),
        }
    }
    page.next_page_token = after;
    Ok(page)
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
