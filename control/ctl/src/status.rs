//! `sluicectl status`: whether all is well, and what is not; and waiting until it is, or until a drain is complete.
//!
//! Invariant: the exit code says what the screen says. Not here: what a trouble is (`proto::trouble`).

use std::io::Write;
use std::time::Duration;

use proto::v1;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::args::{StatusArguments, StatusOutput, WaitTime};
use crate::client::{ClientError, Server, ask};
use crate::error::CtlError;
use crate::list::{Screen, format_error, write_yaml};

/// Columns of a line of the screen.
const COLUMNS: usize = 80;
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

/// Lines of words behind a margin, in whose first line `mark` stands.
fn wrapped(mark: &str, words: &str, margin: usize) -> String {
    let mut lines = format!("{mark:<margin$}");
    let mut column = margin;
    for (at, word) in words.split_whitespace().enumerate() {
        let length = word.chars().count();
        if at > 0 && column + 1 + length > COLUMNS {
            lines.push_str(&format!("\n{:margin$}", ""));
            column = margin;
        } else if at > 0 {
            lines.push(' ');
            column += 1;
        }
        lines.push_str(word);
        column += length;
    }
    lines.push('\n');
    lines
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
/// If time is over, or the drain is removed meanwhile.
pub(super) async fn drained(
    server: &Server,
    target: &str,
    timeout: Option<&WaitTime>,
    out: &mut impl Write,
    notes: &mut impl Write,
    screen: Screen,
) -> Result<(), CtlError> {
    let mut waiting = Waiting::new(true, timeout, screen);
    loop {
        let left = match ask(server, async |mut admin| admin.list_overrides(v1::ListOverridesRequest {}).await).await {
            Ok(listed) => left_at(target, &listed.overrides).ok_or_else(|| CtlError::Undrained(target.to_owned()))?,
            Err(error @ ClientError::Answer { .. }) => return Err(error.into()),
            Err(error) => Left::Unknown(error.to_string()),
        };
        let what = match left {
            Left::Flows(0) => {
                writeln!(out, "no flow is left at {target}")?;
                return Ok(());
            }
            Left::Flows(1) => "1 flow is left".to_owned(),
            Left::Flows(flows) => format!("{flows} flows are left"),
            Left::Unknown(why) => why,
        };
        if !waiting.goes_on(&what, notes).await? {
            return Err(CtlError::FlowsLeft { target: target.to_owned(), what });
        }
    }
}

enum Left {
    Flows(u64),
    Unknown(String),
}

/// What is left at a drained target, which is named as in the request: `10.0.0.1:8080`, `NAME`, or `node/NAME`. `None`:
/// it is not drained.
fn left_at(target: &str, overrides: &[v1::Override]) -> Option<Left> {
    let is_it = |drain: &&v1::Override| {
        drain.kind != "weight" && (drain.name == target || target.split_once('/') == Some((&drain.kind, &drain.name)))
    };
    let drain = overrides.iter().find(is_it)?;
    Some(drain.flows.map_or_else(|| Left::Unknown("not every gateway tells its flows".to_owned()), Left::Flows))
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_drain_is_found_by_its_name_and_by_its_kind_and_name() {
        let drain =
            |kind: &str, name: &str, flows| v1::Override { kind: kind.into(), name: name.into(), flows, ..Default::default() };
        let all = [drain("node", "a", Some(3)), drain("backend", "10.0.0.1:80", Some(0)), drain("weight", "10.0.0.2:80", None)];
        let flows = |target: &str| match left_at(target, &all) {
            Some(Left::Flows(flows)) => Some(flows),
            _ => None,
        };
        let found = ["a", "node/a", "10.0.0.1:80", "gateway/a", "10.0.0.2:80"].map(flows);
        assert_eq!(found, [Some(3), Some(3), Some(0), None, None]);
    }
}
