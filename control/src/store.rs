//! What outlives a controller: the checkpoint of its decisions, and what operators set by hand.
//!
//! Deliberately not here: what either holds (`world`).

pub mod checkpoints;
pub mod override_editor;
pub mod overrides;

use std::fs;
use std::io;
use std::path::Path;

/// The text of a file; a file that does not exist is empty.
fn read_file(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        read => read,
    }
}

/// Replaces a file as a whole: the text is written beside it and renamed.
fn replace_file(path: &Path, text: &str) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    fs::write(&beside, text)?;
    fs::rename(&beside, path)
}
