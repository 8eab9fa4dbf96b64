//! `sluiced`, the gateway. Exit codes: 0 done, 1 failed, 2 bad usage or configuration.

use std::fmt::Display;
use std::io::{self, BufWriter};
use std::process::ExitCode;

use clap::Parser;
use control::config::Logs;
use control::controller::ControllerError;
use sluice::cli::{BenchArgs, Cli, Command, ConfigArgs, ReplayArgs};
use sluice::reload::Reload;
use sluice::run;
use sluice::run::RunError;
use sluice::settings::Settings;
use sluice::tools::check::{CheckError, check};
use sluice::tools::doctor::DoctorError;
use sluice::tools::{bench, doctor, replay};

#[global_allocator]
static ALLOCATOR: dpdk_sys::memory::TablesInHugePages = dpdk_sys::memory::TablesInHugePages;

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run(args) => with_settings(&args, |settings| {
            control::config::logging::start(settings.logs);
            let reload = Reload::new(args.config.clone(), args.choice(), settings.clone());
            match run::run(settings, reload) {
                // A kubeconfig that leads nowhere is configuration, too.
                Err(error @ RunError::Controller(ControllerError::Kubernetes(_))) => invalid(&format!("sluiced: {error}")),
                other => ended(other),
            }
        }),
        Command::Check(args) => match check(&args.config, &args.choice(), &mut io::stdout().lock()) {
            Err(CheckError::Invalid(errors)) => invalid(&errors),
            other => ended(other),
        },
        Command::Doctor(args) => match doctor::run(args.config.as_deref(), &mut io::stdout().lock()) {
            Err(DoctorError::Invalid(errors)) => invalid(&errors),
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => ended(Err(error)),
        },
        Command::Replay(args) => put_through(&args),
        Command::Bench(args) => measure(&args),
    }
}

/// Reads the configuration, and goes on with it if it is valid.
fn with_settings(args: &ConfigArgs, go_on: impl FnOnce(&Settings) -> ExitCode) -> ExitCode {
    match Settings::read(&args.config, &args.choice()) {
        Ok(settings) => go_on(&settings),
        Err(errors) => invalid(&errors),
    }
}

fn invalid(errors: &impl Display) -> ExitCode {
    eprintln!("{errors}");
    ExitCode::from(2)
}

fn ended<E: Display>(result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sluiced: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(args: &BenchArgs) -> ExitCode {
    ended(bench::run(args).and_then(|report| bench::print(&report, args.output, &mut io::stdout().lock())))
}

fn put_through(args: &ReplayArgs) -> ExitCode {
    control::config::logging::start(Logs::default());
    match replay::replay(args, &mut BufWriter::new(io::stdout().lock())) {
        Err(error) if error.is_usage() => invalid(&error),
        other => ended(other),
    }
}
