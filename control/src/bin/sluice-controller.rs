//! `sluice-controller`: the cluster side of sluice, for more than one gateway.
//!
//! Exit codes: 0 done, 1 failed, 2 bad usage or configuration.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use control::admin::{self, AdminSockets, ControllerAdmin};
use control::config::command_pages;
use control::config::controller::ControllerFile;
use control::config::logging;
use control::config::settings::Source;
use control::controller::{self, ControllerError};
use control::gateways::socket::{self, ListenError};
use control::healthz::{self, systemd};
use control::kubernetes;
use control::metrics::{ControllerMetrics, ControllerPages};
use control::status::release::{self, Extent};
use control::store::checkpoints::CONFIG_MAPS;
use tokio::net::TcpListener;
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
    /// Follow the cluster or the manifests, allocate addresses, serve gateways and write status, until SIGTERM or
    /// SIGINT.
    Run {
        /// The configuration.
        #[arg(long, value_name = "FILE", default_value = "/etc/sluice/sluice.yaml")]
        config: PathBuf,
    },
    /// Print the definitions of the kinds that sluice adds to a cluster, for `kubectl apply -f -`.
    Crds,
    /// Remove addresses, conditions and the finalizer of sluice from Services. Without `--class` or `--all`: from
    /// Services that the configuration no longer claims, because they have no class or are no longer of type
    /// LoadBalancer.
    Release {
        /// The configuration.
        #[arg(long, value_name = "FILE", default_value = "/etc/sluice/sluice.yaml")]
        config: PathBuf,
        /// Also from Services of this class, which was ours.
        #[arg(long, value_name = "CLASS", conflicts_with = "all")]
        class: Option<String>,
        /// From every Service of this installation.
        #[arg(long)]
        all: bool,
        /// Only list these Services.
        #[arg(long)]
        dry_run: bool,
    },
    /// Release every Service of this installation, delete its EdgeGateway objects, and print what remains.
    Uninstall {
        /// The configuration.
        #[arg(long, value_name = "FILE", default_value = "/etc/sluice/sluice.yaml")]
        config: PathBuf,
        /// Only print what would be done.
        #[arg(long)]
        dry_run: bool,
    },
    /// Write a man page for each command, and completion scripts of shells, to a directory. For packages.
    #[command(hide = true)]
    Pages {
        /// The directory.
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
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
        Command::Release { config, class, all, dry_run } => with_file(&config, |file| {
            let extent = class.map_or(if all { Extent::All } else { Extent::Unclaimed }, Extent::Class);
            release(&file, &extent, false, dry_run)
        }),
        Command::Uninstall { config, dry_run } => with_file(&config, |file| release(&file, &Extent::All, true, dry_run)),
        Command::Pages { directory } => exit_code(command_pages::write(Arguments::command(), &directory).map_err(Into::into)),
        Command::Crds => exit_code(objects::crd::definitions().map(|text| print!("{text}")).map_err(Into::into)),
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
    exit_code(serve(file))
}

/// Prints the error. An unusable kubeconfig also counts as a configuration error.
fn exit_code(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    eprintln!("sluice-controller: {error}");
    let is_configuration = matches!(error.downcast_ref(), Some(ControllerError::Kubernetes(_)))
        || error.downcast_ref::<kubernetes::ConnectError>().is_some();
    ExitCode::from(if is_configuration { 2 } else { 1 })
}

/// Releases Services, and with `is_uninstalled` deletes our other objects. Exit code 2 if no cluster is configured.
fn release(file: &ControllerFile, extent: &Extent, is_uninstalled: bool, is_dry: bool) -> ExitCode {
    let Source::Kubernetes { kubeconfig, namespace } = &file.settings.source else {
        eprintln!(
            "sluice-controller: expected a Kubernetes cluster, found `manifests`: stop the controller and remove the status files"
        );
        return ExitCode::from(2);
    };
    exit_code(release_services(file, kubeconfig.as_deref(), namespace.as_deref(), (extent, is_uninstalled, is_dry)))
}

#[tokio::main]
async fn release_services(
    file: &ControllerFile,
    kubeconfig: Option<&Path>,
    namespace: Option<&str>,
    (extent, is_uninstalled, is_dry): (&Extent, bool, bool),
) -> anyhow::Result<()> {
    let mut cluster = kubernetes::connect(kubeconfig).await?;
    if let Some(namespace) = namespace {
        namespace.clone_into(&mut cluster.namespace);
    }
    let (settings, would) = (&file.settings, if is_dry { "would release" } else { "released" });
    if !is_dry {
        release::check_no_leader(&cluster, &settings.group).await?;
    }
    let mut count = 0_usize;
    release::release(&cluster, settings, extent, is_dry, |service| {
        println!("{would} Service {service}");
        count += 1;
    })
    .await?;
    println!("{would} {count} Services");
    if is_uninstalled {
        let would = if is_dry { "would delete" } else { "deleted" };
        release::delete_gateways(&cluster, &settings.group, is_dry, |name| println!("{would} EdgeGateway {name}")).await?;
        println!("as cluster administrator, delete what remains:");
        println!("  kubectl -n {} delete lease/sluice-controller-{}", cluster.namespace, settings.group);
        let config_maps = CONFIG_MAPS.map(|name| format!("configmap/{name}")).join(" ");
        println!("  kubectl -n {} delete configmap/sluice-overrides {config_maps}", cluster.namespace);
        println!("  kubectl delete -f deploy/rbac.yaml");
        println!("  kubectl delete crd/addresspools.sluice.dev crd/edgegateways.sluice.dev  # of every installation");
    }
    Ok(())
}

#[tokio::main]
async fn serve(file: ControllerFile) -> anyhow::Result<()> {
    let shutdown = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let config = file.effective();
    let admin_sockets = AdminSockets::listen(&file.admin_listen).await?;
    let (health_listener, metrics_listener) = (listen_tcp(file.health_listen).await?, listen_tcp(file.metrics_listen).await?);
    let running = controller::start(file.settings, shutdown.clone()).await?;
    if let Some(listener) = health_listener {
        tokio::spawn(healthz::serve(listener, running.probes.clone(), shutdown.clone()));
    }
    if let Some(listener) = metrics_listener {
        let pages = ControllerPages { probes: running.probes.clone(), metrics: ControllerMetrics(running.view.clone()) };
        tokio::spawn(healthz::serve(listener, pages, shutdown.clone()));
    }
    tokio::spawn(systemd::report_controller(running.probes.clone()));
    let admin = ControllerAdmin { view: running.view.clone(), config };
    let stop = shutdown.clone().cancelled_owned();
    // A failure of the admin API is no reason to stop the controller.
    tokio::spawn(async move {
        if let Err(error) = admin::serve(admin_sockets, admin, stop).await {
            tracing::error!(%error, "the admin API ended; restart sluice-controller");
        }
    });
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("shutting down; gateways keep their state");
        systemd::stopping("stops; gateways keep their state");
        shutdown.cancel();
    });
    Ok(running.stopped().await?)
}

async fn listen_tcp(address: Option<SocketAddr>) -> Result<Option<TcpListener>, ListenError> {
    match address {
        Some(address) => socket::listen_tcp(address).await.map(Some),
        None => Ok(None),
    }
}
