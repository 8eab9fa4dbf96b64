//! `sluiced check`: the effective settings, or everything that is wrong with them.

use std::io::{self, Write};
use std::path::Path;

use crate::settings::{Settings, SourceChoice};

/// Why `check` did not print settings.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The file is wrong: exit 2.
    #[error(transparent)]
    Invalid(#[from] control::config::Invalid),
    /// The output could not be written: exit 1.
    #[error("cannot write the settings: {0}")]
    Output(#[from] io::Error),
}

/// Writes the effective settings of `file` as YAML, which is itself a valid file.
///
/// # Errors
/// When the file is wrong, with all that is wrong; when `out` cannot be written.
pub fn check(file: &Path, choice: &SourceChoice, out: &mut impl Write) -> Result<(), CheckError> {
    let settings = Settings::read(file, choice)?;
    out.write_all(settings.effective().as_bytes())?;
    Ok(())
}
