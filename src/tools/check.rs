//! `sluiced check`: prints the effective settings, or all errors of a configuration.

use std::io::{self, Write};
use std::path::Path;

use crate::settings::{Settings, SourceChoice};

/// Why `check` failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The file is invalid: exit code 2.
    #[error(transparent)]
    Invalid(#[from] control::config::Invalid),
    /// The output could not be written: exit code 1.
    #[error("cannot write the settings: {0}")]
    Output(#[from] io::Error),
}

/// Writes the effective settings of `file` as YAML, which is itself a valid file.
///
/// # Errors
/// If the file is invalid, with all errors; if `out` cannot be written.
pub fn check(file: &Path, choice: &SourceChoice, out: &mut impl Write) -> Result<(), CheckError> {
    let settings = Settings::read(file, choice)?;
    out.write_all(settings.effective().as_bytes())?;
    Ok(())
}
