//! A list, printed once or repeatedly: as a table, as JSON, as YAML.

pub(super) mod history;
pub(super) mod rows;
pub(super) mod selection;
pub(super) mod wrap;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::io::Write;
use std::time::Duration;

use proto::v1;
use proto::v1::admin_client::AdminClient;
use serde_json::Value;
use tonic::Status;
use tonic::transport::Channel;

use crate::args::{Filters, ListArguments, Output};
use crate::client::{self, ClientError, Server};
use crate::error::CtlError;
use rows::{Listed, Row, field_of};

/// Moves the cursor of a terminal to its first line, and clears it.
pub(super) const CLEAR: &[u8] = b"\x1b[H\x1b[2J";
/// Blanks between two columns.
const GAP: usize = 2;

/// Output options of `--watch`.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    /// Whether a table is redrawn in place, as on a terminal, or printed below the previous one.
    pub redraw: bool,
    /// Polling interval.
    pub period: Duration,
}

/// Prints the list; with `--watch` also its changes, until the output is closed or the gateway ends.
pub(super) async fn follow<R: Row>(
    server: &Server,
    arguments: &impl Filters,
    out: &mut impl Write,
    notes: &mut impl Write,
    screen: Screen,
) -> Result<(), CtlError> {
    let selection = arguments.selection();
    let has_asked = Cell::new(false);
    let fetch = async |client: &mut AdminClient<Channel>| {
        let (rows, silent) = R::list(client).await?;
        if selection.is_all() {
            return Ok((rows, silent));
        }
        let reasons: BTreeSet<_> = rows.iter().filter(|_| R::HAS_ALL_REASONS).map(|row| row.subject().reason).collect();
        let rows: Vec<R> = rows.into_iter().filter(|row| selection.has(&row.subject())).collect();
        // A gateway that is silent may have what is missed.
        if rows.is_empty() && silent.is_empty() && !has_asked.replace(true) {
            selection.expect_known(client, &reasons).await?;
        }
        Ok((rows, silent))
    };
    follow_by(server, arguments.list(), out, notes, screen, fetch).await
}

/// The same with another way to fetch the rows.
pub(super) async fn follow_by<R: Row>(
    server: &Server,
    arguments: &ListArguments,
    out: &mut impl Write,
    notes: &mut impl Write,
    screen: Screen,
    fetch: impl AsyncFn(&mut AdminClient<Channel>) -> Result<Listed<R>, Status>,
) -> Result<(), CtlError> {
    let mut client = client::connect(server).await?;
    let first = fetch(&mut client).await.map_err(|status| ClientError::from_status(server, &status, false))?;
    if !arguments.watch {
        let (rows, silent) = first;
        list(&rows, arguments.output, out, notes)?;
        return if silent.is_empty() { Ok(()) } else { Err(CtlError::Silent(silent_text(&silent))) };
    }
    let mut period = tokio::time::interval(screen.period);
    let mut shown: Vec<R> = Vec::new();
    let mut silent = Vec::new();
    let mut is_first = true;
    let mut listed = Some(first);
    loop {
        period.tick().await;
        let (now, silent_now) = match listed.take() {
            Some(listed) => listed,
            None => fetch(&mut client).await.map_err(|status| ClientError::from_status(server, &status, true))?,
        };
        if silent_now != silent && !silent_now.is_empty() {
            writeln!(notes, "{}", silent_text(&silent_now))?;
        }
        match arguments.output {
            Output::Table | Output::Wide if is_first || now != shown => {
                if screen.redraw {
                    out.write_all(CLEAR)?;
                }
                list(&now, arguments.output, out, notes)?;
            }
            Output::Table | Output::Wide => {}
            output => {
                for row in changed(&shown, &now) {
                    object(row, output, out)?;
                }
                out.flush()?;
            }
        }
        (shown, silent, is_first) = (now, silent_now, false);
    }
}

/// Prints a whole list. For an empty table it prints only the titles, and a note that there are none.
fn list<R: Row>(rows: &[R], output: Output, out: &mut impl Write, notes: &mut impl Write) -> Result<(), CtlError> {
    match output {
        Output::Table | Output::Wide => {
            out.write_all(table(rows, output == Output::Wide).as_bytes())?;
            if !rows.iter().any(R::is_shown) {
                writeln!(notes, "(none)")?;
            }
        }
        Output::Json => writeln!(out, "{}", serde_json::to_string_pretty(rows).map_err(format_error)?)?,
        Output::Yaml => write_yaml(&rows, out)?,
    }
    Ok(out.flush()?)
}

/// Prints one object of a watched list.
fn object<R: Row>(row: &R, output: Output, out: &mut impl Write) -> Result<(), CtlError> {
    match output {
        Output::Yaml => {
            writeln!(out, "---")?;
            write_yaml(row, out)
        }
        Output::Json | Output::Table | Output::Wide => {
            Ok(writeln!(out, "{}", serde_json::to_string(row).map_err(format_error)?)?)
        }
    }
}

pub(super) fn write_yaml(value: &impl serde::Serialize, out: &mut impl Write) -> Result<(), CtlError> {
    let text = serde_saphyr::to_string(value).map_err(format_error)?;
    Ok(writeln!(out, "{}", text.trim_end())?)
}

pub(super) fn format_error(error: impl ToString) -> CtlError {
    CtlError::Format(error.to_string())
}

/// Formats the rows that a table has, with all its columns.
pub(super) fn table<R: Row>(rows: &[R], is_wide: bool) -> String {
    let shown = rows.iter().filter(|row| row.is_shown()).map(R::shown).collect();
    let more = if is_wide { R::WIDE } else { &[] };
    let titles: Vec<&str> = R::TITLES.iter().chain(more).copied().collect();
    let mut gateways = rows.iter().map(|row| row.shown()["gateway"].clone());
    let first = gateways.next();
    aligned_of(shown, &titles, first.is_some_and(|first| gateways.any(|other| other != first)))
}

/// Formats aligned columns under their titles. If rows come from several gateways, the gateway is the first column.
pub(super) fn aligned(rows: Vec<Value>, titles: &[&str]) -> String {
    let of_several = rows.iter().any(|row| row["gateway"] != rows[0]["gateway"]);
    aligned_of(rows, titles, of_several)
}

fn aligned_of(rows: Vec<Value>, titles: &[&str], of_several: bool) -> String {
    let titles: Vec<&str> = of_several.then_some("GATEWAY").into_iter().chain(titles.iter().copied()).collect();
    let cells = |row: &Value| titles.iter().map(|title| cell(&row[field_of(title)])).collect();
    let header = titles.iter().map(ToString::to_string).collect();
    let lines: Vec<Vec<String>> = std::iter::once(header).chain(rows.iter().map(cells)).collect();
    let width = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..lines[0].len()).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for line in &lines {
        let padded: String = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<pad$}", pad = width + GAP)).collect();
        text.push_str(padded.trim_end());
        text.push('\n');
    }
    text
}

/// The text of a JSON field in a table.
fn cell(field: &Value) -> String {
    match field {
        Value::Null => String::new(),
        Value::Bool(is_so) => if *is_so { "yes" } else { "no" }.to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

/// The gateways that did not answer, and why.
pub(super) fn silent_text(silent: &[v1::Silent]) -> String {
    let one = |v1::Silent { gateway, reason }: &v1::Silent| format!("without gateway {gateway}: {reason}");
    silent.iter().map(one).collect::<Vec<_>>().join("\n")
}

/// The objects of `now` that are new or differ from the last output.
fn changed<'a, R: Row>(shown: &[R], now: &'a [R]) -> impl Iterator<Item = &'a R> {
    now.iter().filter(|row| shown.iter().find(|old| old.key() == row.key()).is_none_or(|old| old != *row))
}
