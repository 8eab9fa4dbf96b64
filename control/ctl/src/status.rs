//! `sluicectl status`: whether all is well, and what is not; and waiting until it is, or until a drain is complete.
//!
//! Invariant: the exit code says what the screen says. Not here: what a trouble is (`proto::trouble`).

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use proto::v1;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::args::{StatusArguments, StatusOutput, WaitTime};
use crate::client::{Server, ask};
use crate::error::CtlError;
use crate::list::wrap::wrapped;
use crate::list::{Screen, format_error, write_yaml};

/// Columns of the margin of lines about a trouble.
const MARGIN: usize = 10;
/// Severity of what an operator wanted.
const NOTICE: &str = "notice";

/// The answer in JSON and YAML.
#[derive(Debug, Serialize)]
struct StatusDocument<'a> {
    /// Whether there is nothing but notices.
    well: bool,
    critical: usize,
    warnings: usize,
    notices: usize,
    gateways: &'a [String],
    services: u32,
    troubles: &'a [v1::Trouble],
}

impl<'a> From<&'a v1::ListTroublesResponse> for StatusDocument<'a> {
    fn from(all: &'a v1::ListTroublesResponse) -> Self {
        let count = |severity| all.troubles.iter().filter(|trouble| trouble.severity == severity).count();
        let (critical, notices) = (count("critical"), count(NOTICE));
        let warnings = all.troubles.len() - critical - notices;
        let well = critical + warnings == 0;
        let (gateways, services, troubles) = (&all.gateways, all.services, &all.troubles);
        Self { well, critical, warnings, notices, gateways, services, troubles }
    }
}

/// Prints the status; with `--wait` once it is well, or when time is over.
///
/// # Errors
/// If the server does not answer, or not all is well.
pub(super) async fn status(
    server: &Server,
    arguments: &StatusArguments,
    out: &mut impl Write,
    notes: &mut impl Write,
    screen: Screen,
) -> Result<(), CtlError> {
    let mut waiting = Waiting::new(arguments.wait, arguments.timeout.as_ref(), screen);
    loop {
        let result = ask(server, async |mut admin| admin.list_troubles(v1::ListTroublesRequest {}).await).await;
        let first = match &result {
            Ok(all) if StatusDocument::from(all).well => None,
            Ok(all) => all.troubles.first().map(|trouble| format!("{}: {}", trouble.object, trouble.cause)),
            // A gateway that restarts does not answer for a while. Other options would not help by themselves.
            Err(error) if error.is_usage() => None,
            Err(error) => Some(error.to_string()),
        };
        if let Some(first) = first
            && waiting.goes_on(&first, notes).await?
        {
            continue;
        }
        return show(&result?, arguments.output, out);
    }
}

fn show(all: &v1::ListTroublesResponse, output: StatusOutput, out: &mut impl Write) -> Result<(), CtlError> {
    let document = StatusDocument::from(all);
    match output {
        StatusOutput::Text => out.write_all(text(all, &document).as_bytes())?,
        StatusOutput::Json => writeln!(out, "{}", serde_json::to_string_pretty(&document).map_err(format_error)?)?,
        StatusOutput::Yaml => write_yaml(&document, out)?,
    }
    out.flush()?;
    if document.well { Ok(()) } else { Err(CtlError::Unwell(summary(&document))) }
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// `1 critical, 2 warnings`.
fn summary(document: &StatusDocument<'_>) -> String {
    let critical = (document.critical > 0).then(|| format!("{} critical", document.critical));
    let warnings = (document.warnings > 0).then(|| counted(document.warnings, "warning"));
    critical.into_iter().chain(warnings).collect::<Vec<_>>().join(", ")
}

fn text(all: &v1::ListTroublesResponse, document: &StatusDocument<'_>) -> String {
    let verdict = if document.well { "All is well".to_owned() } else { format!("Not well: {}", summary(document)) };
    let gateways = if all.gateways.len() == 1 { "gateway" } else { "gateways" };
    let names = if all.gateways.is_empty() { "none answered".to_owned() } else { all.gateways.join(", ") };
    let services = counted(usize::try_from(all.services).unwrap_or(usize::MAX), "Service");
    let mut text = wrapped("", &format!("{verdict}. {} {gateways} ({names}), {services}.", all.gateways.len()), 0);
    // Where all see it, nobody needs to be named.
    let by = |trouble: &v1::Trouble| match trouble.gateways.as_slice() {
        seen if all.gateways.len() < 2 || seen.is_empty() => String::new(),
        seen if seen.len() == all.gateways.len() => ", on all gateways".to_owned(),
        seen => format!(", on {}", seen.join(", ")),
    };
    for trouble in &all.troubles {
        let head = format!("{} ({}){}, since {}", trouble.object, trouble.kind, by(trouble), trouble.since);
        text.push('\n');
        text.push_str(&wrapped(&trouble.severity, &head, MARGIN));
        text.push_str(&wrapped("", &trouble.cause, MARGIN));
        text.push_str(&wrapped("", &format!("-> {}", trouble.remedy), MARGIN));
    }
    text
}

/// A condition that is waited for.
struct Waiting {
    period: Duration,
    is_wanted: bool,
    deadline: Option<Instant>,
    told: String,
}

impl Waiting {
    fn new(is_wanted: bool, timeout: Option<&WaitTime>, screen: Screen) -> Self {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout.0));
        Self { period: screen.period, is_wanted, deadline, told: String::new() }
    }

    /// Waits for the next look, unless nobody wants to, or time is over. Tells what it waits for if that is new.
    async fn goes_on(&mut self, what: &str, notes: &mut impl Write) -> Result<bool, CtlError> {
        if !self.is_wanted || self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(false);
        }
        if self.told != what {
            writeln!(notes, "waiting: {what}")?;
            what.clone_into(&mut self.told);
        }
        sleep(self.period).await;
        Ok(true)
    }
}

/// Waits until no flow is left at what is drained.
///
/// # Errors
/// If time is over, the drain is removed meanwhile, or the server refuses to answer for good.
pub(super) async fn drained(
    server: &Server,
    target: &str,
    timeout: Option<&WaitTime>,
    out: &mut impl Write,
    notes: &mut impl Write,
    screen: Screen,
) -> Result<(), CtlError> {
    let mut waiting = Waiting::new(true, timeout, screen);
    let mut looks_without_flows = 0;
    loop {
        let what = match ask(server, async |mut admin| admin.list_overrides(v1::ListOverridesRequest {}).await).await {
            Ok(listed) => {
                let drain = drain_of(target, &listed.overrides).ok_or_else(|| CtlError::Undrained(target.to_owned()))?;
                looks_without_flows = if drain.flows == Some(0) { looks_without_flows + 1 } else { 0 };
                if looks_without_flows == looks_needed(&drain.kind) {
                    writeln!(out, "no flow is left at {target}")?;
                    return Ok(());
                }
                left_text(drain.flows, &listed.silent)
            }
            Err(error) if error.is_final() => return Err(error.into()),
            // A controller that restarts, or a new leader, answers in a while.
            Err(error) => {
                looks_without_flows = 0;
                error.to_string()
            }
        };
        if !waiting.goes_on(&what, notes).await? {
            return Err(CtlError::FlowsLeft { target: target.to_owned(), what });
        }
    }
}

/// Looks in a row, a second apart, that find no flow before none is left. A controller of an older version gives numbers
/// before gateways know of the drain, which takes less than 2 s. A gateway reports its own number every 10 s.
fn looks_needed(kind: &str) -> u32 {
    if kind == "gateway" { 12 } else { 3 }
}

/// The drain of a target that is named as in a request: `10.0.0.1:8080`, `NAME`, or `node/NAME`. `None`: it is not drained.
fn drain_of<'a>(target: &str, overrides: &'a [v1::Override]) -> Option<&'a v1::Override> {
    let (kind, name) = target.split_once('/').map_or((None, target), |(kind, name)| (Some(kind), name));
    let is_it = |drain: &&v1::Override| {
        drain.kind != "weight" && kind.is_none_or(|kind| kind == drain.kind) && is_same_name(name, &drain.name)
    };
    overrides.iter().find(is_it)
}

/// Whether two names are the same, or are spellings of the same address.
fn is_same_name(one: &str, other: &str) -> bool {
    let is_same_socket = || one.parse::<SocketAddr>().is_ok_and(|one| other.parse() == Ok(one));
    let is_same_address = || one.parse::<IpAddr>().is_ok_and(|one| other.parse() == Ok(one));
    one == other || is_same_socket() || is_same_address()
}

fn left_text(flows: Option<u64>, silent: &[v1::Silent]) -> String {
    match flows {
        Some(0) => "no flow is left; it is confirmed by further looks".to_owned(),
        Some(1) => "1 flow is left".to_owned(),
        Some(flows) => format!("{flows} flows are left"),
        None if silent.is_empty() => {
            "the flows are not known: a gateway is not connected, or does not apply the drain yet".to_owned()
        }
        None => {
            let of_gateway = |one: &v1::Silent| format!("flows of {} are not known: {}", one.gateway, one.reason);
            silent.iter().map(of_gateway).collect::<Vec<_>>().join("; ")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::list::wrap::COLUMNS;

    fn trouble(severity: &str, object: &str, gateways: &[&str]) -> v1::Trouble {
        v1::Trouble {
            severity: severity.into(),
            kind: "some-kind".into(),
            object: object.into(),
            cause: "a cause that is longer than one line of a terminal of eighty columns, as causes often are".into(),
            since: "2026-01-31T12:00:00Z".into(),
            remedy: "do something".into(),
            gateways: gateways.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    fn shown(troubles: Vec<v1::Trouble>, gateways: &[&str]) -> (String, Result<(), CtlError>) {
        let gateways = gateways.iter().map(|name| (*name).to_owned()).collect();
        let (mut out, all) = (Vec::new(), v1::ListTroublesResponse { troubles, gateways, services: 2 });
        let result = show(&all, StatusOutput::Text, &mut out);
        (String::from_utf8(out).unwrap(), result)
    }

    #[test]
    fn notices_alone_are_well_and_no_line_is_wider_than_a_terminal() {
        let (out, result) = shown(Vec::new(), &["edge-1"]);
        assert!(result.is_ok() && out == "All is well. 1 gateway (edge-1), 2 Services.\n", "{out}");
        let (out, result) = shown(vec![trouble("notice", "Gateway edge-1", &["edge-1"])], &["edge-1"]);
        assert!(result.is_ok() && out.starts_with("All is well") && out.contains("notice    Gateway edge-1"), "{out}");
        let troubles = vec![trouble("critical", "Port uplink", &["edge-1"]), trouble("warning", "VIP 192.0.2.1", &[])];
        let (out, result) = shown(troubles, &["edge-1", "edge-2"]);
        let error = result.unwrap_err();
        assert_eq!((error.exit_code(), error.to_string().as_str()), (1, "not well: 1 critical, 1 warning"));
        let expected = "\
Not well: 1 critical, 1 warning. 2 gateways (edge-1, edge-2), 2 Services.

critical  Port uplink (some-kind), on edge-1, since 2026-01-31T12:00:00Z
          a cause that is longer than one line of a terminal of eighty columns,
          as causes often are
          -> do something

warning   VIP 192.0.2.1 (some-kind), since 2026-01-31T12:00:00Z
          a cause that is longer than one line of a terminal of eighty columns,
          as causes often are
          -> do something
";
        assert_eq!(out, expected);
        assert!(out.lines().all(|line| line.chars().count() <= COLUMNS));
    }

    #[test]
    fn a_drain_is_found_by_its_name_by_its_kind_and_name_and_by_any_spelling_of_an_address() {
        let drain =
            |kind: &str, name: &str, flows| v1::Override { kind: kind.into(), name: name.into(), flows, ..Default::default() };
        let all = [
            drain("node", "a", Some(3)),
            drain("gateway", "a", Some(4)),
            drain("backend", "10.0.0.1:80", Some(0)),
            drain("backend", "2001:db8::1", Some(5)),
            drain("backend", "[2001:db8::1]:80", Some(6)),
            drain("weight", "10.0.0.2:80", None),
        ];
        let rows = [
            ("node/a", Some(3)),
            ("gateway/a", Some(4)),
            ("10.0.0.1:80", Some(0)),
            ("backend/2001:DB8:0::1", Some(5)),
            ("[2001:DB8::1]:80", Some(6)),
            ("backend/a", None),
            ("10.0.0.2:80", None),
        ];
        for (target, flows) in rows {
            assert_eq!(drain_of(target, &all).and_then(|drain| drain.flows), flows, "{target}");
        }
    }

    #[test]
    fn flows_that_are_not_known_name_the_gateways_that_do_not_tell() {
        let silent = |gateway: &str| v1::Silent { gateway: gateway.into(), reason: "it gave no answer".into() };
        let text = left_text(None, &["edge-1", "edge-2"].map(silent));
        assert_eq!(text, "flows of edge-1 are not known: it gave no answer; flows of edge-2 are not known: it gave no answer");
        assert!(left_text(None, &[]).contains("does not apply the drain yet"));
    }
}
