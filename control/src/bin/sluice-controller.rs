//! `sluice-controller`: the cluster side of sluice, for more than one gateway.
//!
//! Exit codes: 0 done, 1 failed, 2 bad usage or configuration.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use control::config::controller::ControllerFile;
use control::controller::{Controller, ControllerError};
use control::logging;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

#[derive(Parser)]
#[command(name = "sluice-controller", version, about = "The controller of sluice gateways")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Follow the cluster or the manifests, allocate addresses, serve gateways and write status, until SIGTERM or SIGINT.
    Run {
        /// The configuration.
        #[arg(long, value_name = "FILE", default_value = "/etc/sluice/sluice.yaml")]
        config: PathBuf,
    },
    /// Print the definitions of the kinds that sluice adds to a cluster, for `kubectl apply -f -`.
    Crds,
    /// Check the configuration and print the effective settings, or everything that is wrong with it.
    Check {
        /// The configuration.
        #[arg(long, value_name = "FILE", default_value = "/etc/sluice/sluice.yaml")]
        config: PathBuf,
    },
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Check { config } => with_file(&config, |file| {
            print!("{}", file.effective());
            ExitCode::SUCCESS
        }),
        Command::Run { config } => with_file(&config, run),
        Command::Crds => match control::crd::definitions() {
            Ok(text) => {
                print!("{text}");
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("sluice-controller: {error}");
                ExitCode::FAILURE
            }
        },
    }
}

fn with_file(config: &Path, act: impl FnOnce(ControllerFile) -> ExitCode) -> ExitCode {
    match ControllerFile::read(config) {
        Ok(file) => act(file),
        Err(invalid) => {
            eprintln!("{invalid}");
            ExitCode::from(2)
        }
    }
}

fn run(file: ControllerFile) -> ExitCode {
    logging::start(file.logs);
    match serve(file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sluice-controller: {error}");
            // A kubeconfig that leads nowhere is configuration, too.
            let is_configuration = matches!(error.downcast_ref(), Some(ControllerError::Kubernetes(_)));
            ExitCode::from(if is_configuration { 2 } else { 1 })
        }
    }
}

#[tokio::main]
async fn serve(file: ControllerFile) -> anyhow::Result<()> {
    let shutdown = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let running = Controller::start(file.settings, shutdown.clone()).await?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("shutting down; gateways keep their state");
        shutdown.cancel();
    });
    Ok(running.stopped().await?)
}
