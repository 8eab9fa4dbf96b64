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
        Command::Run(args) => run_gateway(&args),
        Command::Check(args) => match check(&args.config, &args.choice(), &mut io::stdout().lock()) {
            Err(CheckError::Invalid(errors)) => invalid(&errors),
            other => exit_code(other),
        },
        Command::Doctor(args) => match doctor::run(args.config.as_deref(), &mut io::stdout().lock()) {
            Err(DoctorError::Invalid(errors)) => invalid(&errors),
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => exit_code(Err(error)),
        },
        Command::Replay(args) => run_replay(&args),
        Command::Bench(args) => run_bench(&args),
    }
}

fn run_gateway(args: &ConfigArgs) -> ExitCode {
    let settings = match Settings::read(&args.config, &args.choice()) {
        Ok(settings) => settings,
        Err(errors) => return invalid(&errors),
    };
    control::config::logging::start(settings.logs);
    let reload = Reload::new(args.config.clone(), args.choice(), settings.clone());
    match run::run(&settings, reload) {
        // An unusable kubeconfig is a configuration error, too.
        Err(error @ RunError::Controller(ControllerError::Kubernetes(_))) => invalid(&format!("sluiced: {error}")),
        other => exit_code(other),
    }
}

fn invalid(errors: &impl Display) -> ExitCode {
    eprintln!("{errors}");
    ExitCode::from(2)
}

fn exit_code<E: Display>(result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sluiced: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_bench(args: &BenchArgs) -> ExitCode {
    exit_code(bench::run(args).and_then(|report| bench::print(&report, args.output, &mut io::stdout().lock())))
}

fn run_replay(args: &ReplayArgs) -> ExitCode {
    control::config::logging::start(Logs::default());
    match replay::replay(args, &mut BufWriter::new(io::stdout().lock())) {
        Err(error) if error.is_usage() => invalid(&error),
        other => exit_code(other),
    }
}
