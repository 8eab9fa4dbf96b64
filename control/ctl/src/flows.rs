//! `sluicectl flows`: the flows of a gateway, or of all gateways of a controller, fetched page by page; the heaviest of
//! them; and flows that are to end.
//!
//! Invariant: a list that was cut off says so, and no flow ends without a filter and `--yes`.

use std::cell::Cell;
use std::io::Write;

use proto::v1;
use serde_json::json;
use tokio::time::sleep;
use tonic::Status;

use crate::args::{FlowFilter, FlowsArguments, FlowsCommand, ListArguments, Output, Selection};
use crate::client::{ClientError, Server, ask, connect};
use crate::error::CtlError;
use crate::list::{CLEAR, Screen, aligned, follow_by, format_error, silent_text, write_yaml};

/// Columns of the heaviest flows, and of the heaviest clients.
const FLOWS: &[&str] = &["PROTOCOL", "CLIENT", "FRONTEND", "BACKEND", "SERVICE", "PACKETS-PER-SECOND", "BITS-PER-SECOND"];
const CLIENTS: &[&str] = &["CLIENT", "SERVICE", "PACKETS-PER-SECOND", "BITS-PER-SECOND"];
/// Rows of a page.
const PAGE_ROWS: u32 = 5_000;

/// Prints flows, or ends some.
pub(super) async fn run(
    server: &Server,
    arguments: &FlowsArguments,
    out: &mut impl Write,
    notes: &mut impl Write,
    screen: Screen,
) -> Result<(), CtlError> {
    match (&arguments.command, arguments.top) {
        (Some(FlowsCommand::End { flows, yes }), _) => end(server, flows, *yes, out).await,
        (None, Some(limit)) => heaviest(server, arguments, limit, out, screen).await,
        (None, None) => list(server, arguments, out, notes, screen).await,
    }
}

impl FlowFilter {
    fn request(&self) -> v1::ListFlowsRequest {
        v1::ListFlowsRequest {
            service: self.services.service.clone().unwrap_or_default(),
            namespace: self.services.namespace.clone().unwrap_or_default(),
            backend: self.backend.clone(),
            client: self.client.clone(),
            protocol: self.protocol.clone().unwrap_or_default(),
            state: self.state.clone(),
            gateway: self.gateways.gateway.clone().unwrap_or_default(),
            ..v1::ListFlowsRequest::default()
        }
    }

    /// The names of which an error says what there is.
    fn names(&self) -> Selection {
        Selection::from(&self.services)
    }
}

/// Prints the flows that match.
async fn list(
    server: &Server,
    arguments: &FlowsArguments,
    out: &mut impl Write,
    notes: &mut impl Write,
    screen: Screen,
) -> Result<(), CtlError> {
    let limit = if arguments.limit == 0 { usize::MAX } else { arguments.limit };
    let names = arguments.flows.names();
    let (is_cut, has_asked) = (Cell::new(false), Cell::new(false));
    let listed = follow_by::<v1::FlowStatus>(server, &arguments.list, out, notes, screen, async |client| {
        let page_size = u32::try_from(limit).unwrap_or(u32::MAX).min(PAGE_ROWS);
        let mut request = v1::ListFlowsRequest { page_size, ..arguments.flows.request() };
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
        if is_first && flows.is_empty() && silent.is_empty() && !names.is_all() {
            // A list without flows is not to be taken for one of a Service without any.
            names.expect_known(client, &std::collections::BTreeSet::new()).await?;
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

/// Ends the flows that match, page by page; without `yes` it counts them.
async fn end(server: &Server, filter: &FlowFilter, yes: bool, out: &mut impl Write) -> Result<(), CtlError> {
    let mut client = connect(server).await?;
    let failed = |status: &Status| ClientError::from_status(server, status, false);
    let (mut matched, mut ended, mut silent) = (0, 0, Vec::new());
    let mut flows = filter.request();
    loop {
        let request = v1::EndFlowsRequest { flows: Some(flows.clone()), count_only: !yes, ..Default::default() };
        let page = client.end_flows(request).await.map_err(|status| failed(&status))?.into_inner();
        matched += page.matched;
        ended += page.ended;
        silent.extend(page.silent);
        flows.page_token = page.next_page_token;
        if flows.page_token.is_empty() {
            break;
        }
    }
    if matched == 0 && silent.is_empty() {
        let names = filter.names();
        let known = names.expect_known(&mut client, &std::collections::BTreeSet::new()).await;
        known.map_err(|status| failed(&status))?;
    }
    match (yes, ended == matched) {
        (true, true) => writeln!(out, "{ended} flows end")?,
        (true, false) => writeln!(
            out,
            "{ended} of {matched} flows end; the others had ended already, or another gateway owns them: ask the controller"
        )?,
        (false, _) => writeln!(out, "{matched} flows match")?,
    }
    if !silent.is_empty() {
        return Err(CtlError::Silent(silent_text(&silent)));
    }
    if !yes && matched > 0 { Err(CtlError::NotConfirmed) } else { Ok(()) }
}

/// Prints the heaviest flows and clients.
async fn heaviest(
    server: &Server,
    arguments: &FlowsArguments,
    limit: u32,
    out: &mut impl Write,
    screen: Screen,
) -> Result<(), CtlError> {
    let FlowsArguments { list: ListArguments { output, watch }, flows, .. } = arguments;
    let v1::ListFlowsRequest { service, namespace, gateway, .. } = flows.request();
    let request = v1::ListHeaviestRequest { service, namespace, limit, gateway };
    loop {
        let answer = ask(server, async |mut admin| admin.list_heaviest(request.clone()).await).await?;
        if *watch && screen.redraw && matches!(output, Output::Table | Output::Wide) {
            out.write_all(CLEAR)?;
        }
        let v1::ListHeaviestResponse { flows, clients, silent } = &answer;
        let document = json!({ "flows": flows, "clients": clients });
        match output {
            Output::Table | Output::Wide => {
                let values = |rows: &[v1::HeavyTraffic]| rows.iter().map(|row| json!(row)).collect();
                write!(out, "{}\n{}", aligned(values(flows), FLOWS), aligned(values(clients), CLIENTS))?;
            }
            Output::Json => {
                let text = if *watch { serde_json::to_string(&document) } else { serde_json::to_string_pretty(&document) };
                writeln!(out, "{}", text.map_err(format_error)?)?;
            }
            Output::Yaml => write_yaml(&document, out)?,
        }
        out.flush()?;
        if !*watch {
            return if silent.is_empty() { Ok(()) } else { Err(CtlError::Silent(silent_text(silent))) };
        }
        sleep(screen.period).await;
    }
}
