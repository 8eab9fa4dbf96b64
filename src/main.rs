//! `sluiced`, the gateway. Exit codes: 0 done, 1 failed, 2 bad usage or configuration.

use std::fmt::Display;
use std::io::{self, BufWriter, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use bench::BenchArgs;
use clap::Parser;
use control::config::{Logs, logging};
use control::controller::preflight::Level;
use objects::text::without_os_errors;
use sluice::commands::cli::{self, Cli, Command, ConfigArgs, DoctorArgs, PrepareArgs, ReplayArgs, RunArgs};
use sluice::commands::replay::{self, ReplayError};
use sluice::commands::run::{self, Privileges, RunError};
use sluice::commands::{self, doctor, preflight, prepare};
use sluice::settings::reload::Reload;
use sluice::settings::{Settings, SourceChoice};

#[global_allocator]
static ALLOCATOR: linux::memory::TablesInHugePages = linux::memory::TablesInHugePages;

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run(args) => run_gateway(&args),
        Command::Check(args) => check(&args),
        Command::Doctor(args) => run_doctor(&args),
        Command::Prepare(args) => run_prepare(&args),
        Command::Replay(args) => run_replay(&args),
        Command::Bench(args) => run_bench(&args),
        Command::Pages { directory } => exit_code(cli::write_pages(&directory)),
    }
}

fn run_gateway(RunArgs { config: args, no_sandbox }: &RunArgs) -> ExitCode {
    let privileges = if *no_sandbox { Privileges::All } else { Privileges::Needed };
    let settings = match Settings::read(&args.config, &args.choice()) {
        Ok(settings) => settings,
        Err(errors) => return invalid(&errors),
    };
    logging::start(settings.logs);
    let reload = Reload::new(args.config.clone(), args.choice(), settings.clone());
    let code = match run::run(&settings, reload, privileges) {
        Err(RunError::Controller(error)) if error.is_configuration() => invalid(&format!("sluiced: {error}")),
        other => exit_code(other),
    };
    logging::flush();
    code
}

/// Prints the effective settings, which are themselves a valid file. On standard error are warnings, and what was found
/// about what the file names.
fn check(args: &ConfigArgs) -> ExitCode {
    match Settings::read(&args.config, &args.choice()) {
        Ok(settings) => {
            settings.warnings.iter().for_each(|warning| logging::print(&format!("warning: {warning}")));
            let named = match preflight::examine(&settings) {
                Ok(named) => named,
                Err(error) => return exit_code(Err(format!("cannot look at what the file names: {error}"))),
            };
            named.iter().filter(|found| found.level != Level::Ok).for_each(|found| logging::print(&found.to_string()));
            if named.iter().any(|found| found.level == Level::Fault) {
                return ExitCode::from(2);
            }
            let written = io::stdout().lock().write_all(settings.effective().as_bytes());
            exit_code(written.map_err(|error| format!("cannot write the settings: {error}")))
        }
        Err(errors) => invalid(&errors),
    }
}

fn run_doctor(args: &DoctorArgs) -> ExitCode {
    // As in `replay`, the source of Services is not required: it may be given by a flag of `run`.
    let read = |file: &PathBuf| Settings::read(file, &SourceChoice::Replay("/".into()));
    let settings = match args.config.as_ref().map(read).transpose() {
        Ok(settings) => settings,
        Err(errors) => return invalid(&errors),
    };
    let with_source = args.config.as_ref().and_then(|file| Settings::read(file, &SourceChoice::File).ok());
    let named = match preflight::of_this_machine(settings.as_ref(), with_source.as_ref()) {
        Ok(named) => named,
        Err(error) => return exit_code(Err(format!("cannot look at what the file names: {error}"))),
    };
    let mut table = Vec::new();
    let result = doctor::run(settings.as_ref(), named, &mut table);
    let table = String::from_utf8_lossy(&table);
    let written = io::stdout().lock().write_all(without_os_errors(&table).as_bytes());
    match written.and(result) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => exit_code(Err(format!("cannot write the table: {error}"))),
    }
}

fn run_prepare(args: &PrepareArgs) -> ExitCode {
    // As in `doctor`.
    let settings = match Settings::read(&args.config, &SourceChoice::Replay("/".into())) {
        Ok(settings) => settings,
        Err(errors) => return invalid(&errors),
    };
    match prepare::run(&settings, args, &mut io::stdout().lock()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => exit_code(Err(format!("cannot write the result: {error}"))),
    }
}

fn invalid(errors: &impl Display) -> ExitCode {
    logging::print(&errors.to_string());
    ExitCode::from(2)
}

fn exit_code<E: Display>(result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            logging::print(&format!("sluiced: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run_bench(args: &BenchArgs) -> ExitCode {
    match commands::bench::run(args, &mut io::stdout().lock()) {
        Err(error) if error.is_usage() => invalid(&format!("sluiced: {error}")),
        other => exit_code(other),
    }
}

fn run_replay(args: &ReplayArgs) -> ExitCode {
    logging::start(Logs::default());
    match replay::replay(args, &mut BufWriter::new(io::stdout().lock())) {
        // The errors of a configuration begin with its name.
        Err(error @ ReplayError::Settings(_)) => invalid(&error),
        Err(error) if error.is_usage() => invalid(&format!("sluiced: {error}")),
        other => exit_code(other),
    }
}
