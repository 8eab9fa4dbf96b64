//! Man pages and completion scripts of a program, made from its command line, so that they are always true.
//!
//! Not here: `sluicectl`, which prints its own.

use std::io;
use std::path::Path;

use clap_complete::Shell;

/// Shells whose scripts packages contain.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Writes a man page for each command that `--help` lists, and a completion script for each of these shells.
///
/// # Errors
/// If the directory cannot be written to.
pub fn write(mut command: clap::Command, directory: &Path) -> io::Result<()> {
    let name = command.get_name().to_owned();
    for shell in SHELLS {
        clap_complete::generate_to(shell, &mut command, name.as_str(), directory)?;
    }
    clap_mangen::generate_to(command, directory)
}
