//! Rows as a table, as JSON, as YAML.

use std::io::{self, Write};

use crate::rows::Row;
use crate::{CtlError, Output};

/// Blanks between two columns.
const GAP: usize = 2;

/// Prints a whole list. An empty table has its titles, and says so to people.
pub(super) fn list<R: Row>(rows: &[R], output: Output, out: &mut impl Write, notes: &mut impl Write) -> Result<(), CtlError> {
    match output {
        Output::Table => {
            out.write_all(table(rows).as_bytes())?;
            if rows.is_empty() {
                writeln!(notes, "(none)")?;
            }
        }
        Output::Json => writeln!(out, "{}", serde_json::to_string_pretty(rows).map_err(format_error)?)?,
        Output::Yaml => write_yaml(&rows, out)?,
    }
    Ok(out.flush()?)
}

/// Prints one object of a watched list.
pub(super) fn object<R: Row>(row: &R, output: Output, out: &mut impl Write) -> Result<(), CtlError> {
    match output {
        Output::Yaml => {
            writeln!(out, "---")?;
            write_yaml(row, out)
        }
        Output::Json | Output::Table => Ok(writeln!(out, "{}", serde_json::to_string(row).map_err(format_error)?)?),
    }
}

fn write_yaml(value: &impl serde::Serialize, out: &mut impl Write) -> Result<(), CtlError> {
    let text = serde_saphyr::to_string(value).map_err(format_error)?;
    Ok(writeln!(out, "{}", text.trim_end())?)
}

fn format_error(error: impl ToString) -> CtlError {
    CtlError::Format(error.to_string())
}

/// Formats aligned columns under their titles. If rows come from several gateways, the gateway is the first column.
pub(super) fn table<R: Row>(rows: &[R]) -> String {
    let of_several = rows.iter().any(|row| row.gateway() != rows[0].gateway());
    let whose = |gateway: &str| of_several.then(|| gateway.to_owned());
    let titles = whose("GATEWAY").into_iter().chain(R::TITLES.iter().map(|title| (*title).to_owned())).collect();
    let cells = |row: &R| whose(row.gateway()).into_iter().chain(row.cells()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(titles).chain(rows.iter().map(cells)).collect();
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

/// Clears a terminal and moves the cursor to its first line.
pub(super) fn clear(out: &mut impl Write) -> io::Result<()> {
    out.write_all(b"\x1b[H\x1b[2J")
}
