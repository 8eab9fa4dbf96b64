//! `sluiced`, the gateway. Exit codes: 0 done, 1 failed, 2 bad usage or configuration.

use std::io;
use std::process::ExitCode;

use clap::Parser;
use sluice::check::{CheckError, check};
use sluice::cli::{Cli, Command};
use sluice::doctor::{self, DoctorError};

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Check(args) => match check(&args.config, &args.choice(), &mut io::stdout().lock()) {
            Ok(()) => ExitCode::SUCCESS,
            // The reader of a pipe has seen enough.
            Err(CheckError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::from(if matches!(error, CheckError::Invalid(_)) { 2 } else { 1 })
            }
        },
        Command::Doctor(args) => match doctor::run(args.config.as_deref(), &mut io::stdout().lock()) {
            Ok(is_ready) => ExitCode::from(u8::from(!is_ready)),
            Err(DoctorError::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::from(if matches!(error, DoctorError::Invalid(_)) { 2 } else { 1 })
            }
        },
    }
}
