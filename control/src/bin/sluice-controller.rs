//! `sluice-controller`: the cluster side of sluice, for more than one gateway.
//!
//! Exit codes: 0 done, 1 failed, 2 bad usage or configuration.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use control::config::controller::ControllerFile;

#[derive(Parser)]
#[command(name = "sluice-controller", version, about = "The controller of sluice gateways")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check the configuration and print the effective settings, or everything that is wrong with it.
    Check {
        /// The configuration.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Check { config } => check(&config),
    }
}

fn check(config: &Path) -> ExitCode {
    match ControllerFile::read(config) {
        Ok(file) => {
            print!("{}", file.effective());
            ExitCode::SUCCESS
        }
        Err(invalid) => {
            eprintln!("{invalid}");
            ExitCode::from(2)
        }
    }
}
