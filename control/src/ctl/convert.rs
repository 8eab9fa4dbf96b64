//! `sluicectl convert`: reads files, prints pools, and notes beside them.

use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;

use super::CtlError;
use super::args::ConvertArguments;
use crate::convert::{Input, convert};

/// The standard input.
const STDIN: &str = "-";

pub(super) fn run(arguments: &ConvertArguments, out: &mut impl Write, notes: &mut impl Write) -> Result<(), CtlError> {
    let mut texts = Vec::new();
    for file in &arguments.files {
        texts.push((file.display().to_string(), read(file)?));
    }
    if texts.is_empty() {
        texts.push((STDIN.to_owned(), read(Path::new(STDIN))?));
    }
    let inputs: Vec<_> = texts.iter().map(|(name, text)| Input { name, text }).collect();
    let converted = convert(arguments.product, &inputs)?;
    write!(out, "{}", converted.yaml)?;
    for note in converted.notes {
        writeln!(notes, "note: {note}")?;
    }
    Ok(())
}

fn read(file: &Path) -> Result<String, CtlError> {
    let mut text = String::new();
    let result =
        if file.as_os_str() == STDIN { io::stdin().read_to_string(&mut text).map(|_| text) } else { fs::read_to_string(file) };
    result.map_err(|error| CtlError::Input(file.display().to_string(), error))
}
