//! `sluice-controller`: the cluster side of sluice, for more than one gateway.
//!
//! Exit codes: 0 done, 1 failed, 2 bad usage or configuration.

use std::fmt::Display;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::anyhow;
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use control::admin::{self, AdminSockets, ControllerAdmin};
use control::config::command_pages;
use control::config::controller::{CONFIG, ControllerFile};
use control::config::logging;
use control::config::settings::Source;
use control::controller::preflight::{self, Level};
use control::controller::{self, ControllerError};
use control::gateways::listener::{KeyCertificates, ServerTls};
use control::gateways::socket::{self, ListenError};
use control::healthz::{self, systemd};
use control::kubernetes;
use control::metrics::{ControllerMetrics, ControllerPages};
use control::status::release::{self, Extent, ReleaseError, RequestError};
use control::store::checkpoints::CONFIG_MAPS;
use mimalloc::MiMalloc;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Objects of a large cluster are millions of small allocations, for which glibc takes more time and memory
/// (docs/internals/decisions/0040).
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

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
        /// The file to read.
        #[command(flatten)]
        config: ConfigArgs,
        /// The name or address of this replica alone, without a port, as other replicas tell it to gateways that dial them
        /// while this one leads. Its port is that of `listen`. For manifests of Pods; `advertise` in the file goes before it.
        #[arg(long, value_name = "HOST")]
        advertise_host: Option<String>,
    },
    /// Print the definitions of the kinds that sluice adds to a cluster, for `kubectl apply -f -`.
    Crds {
        /// Ignored: the definitions are the same for every configuration.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Remove addresses, conditions and the finalizer of sluice from Services. Without `--class` or `--all`: from
    /// Services that the configuration no longer claims, because they have no class or are no longer of type
    /// LoadBalancer.
    Release {
        /// The file to read.
        #[command(flatten)]
        config: ConfigArgs,
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
        /// The file to read.
        #[command(flatten)]
        config: ConfigArgs,
        /// First scale this Deployment, in the controller's own namespace, to no replicas, and wait until none leads.
        #[arg(long, value_name = "DEPLOYMENT", conflicts_with = "dry_run")]
        scale_down: Option<String>,
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
    /// Validate the configuration and print it with all defaults; look at what it names.
    ///
    /// Looks at certificates, manifests, the API server of a kubeconfig and the rights there. What cannot be seen from this
    /// machine is a note, so that the command can run where no controller runs. What can be seen and cannot work is an error,
    /// with exit code 2. A manifest that does not parse is a warning: the others are served. Nothing is changed. A plugin
    /// (`exec`) that the kubeconfig names runs.
    Check(ConfigArgs),
}

/// The file that a command reads.
#[derive(Args)]
struct ConfigArgs {
    /// Configuration file.
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Check(config) => with_file(&config, |file| check(&file)),
        Command::Run { config, advertise_host } => with_file(&config, |file| run(file, advertise_host.as_deref())),
        Command::Release { config, class, all, dry_run } => with_file(&config, |file| {
            let extent = class.map_or(if all { Extent::All } else { Extent::Unclaimed }, Extent::Class);
            release(&file, &extent, &Removal { is_dry: dry_run, ..Removal::default() })
        }),
        Command::Uninstall { config, scale_down, dry_run } => with_file(&config, |file| {
            release(&file, &Extent::All, &Removal { is_uninstalled: true, is_dry: dry_run, scale_down })
        }),
        Command::Pages { directory } => exit_code(command_pages::write(Arguments::command(), &directory).map_err(Into::into)),
        Command::Crds { config: _ } => exit_code(objects::crd::definitions().map_err(Into::into).and_then(|text| print(&text))),
    }
}

/// Writes to standard output, which may be closed or full.
fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(unwritten)
}

fn unwritten(error: io::Error) -> anyhow::Error {
    anyhow!("cannot write the output: {error}")
}

/// The lines of a command that goes on when standard output fails.
#[derive(Default)]
struct ReportedLines {
    failed: Option<io::Error>,
}

impl ReportedLines {
    fn line(&mut self, line: impl Display) {
        if self.failed.is_none() {
            self.failed = writeln!(io::stdout().lock(), "{line}").err();
        }
    }

    fn finish(self) -> anyhow::Result<()> {
        self.failed.map_or(Ok(()), |error| Err(unwritten(error)))
    }
}

fn with_file(ConfigArgs { config }: &ConfigArgs, act: impl FnOnce(ControllerFile) -> ExitCode) -> ExitCode {
    match ControllerFile::read(config) {
        Ok(file) => act(file),
        Err(invalid) => {
            logging::print(&invalid.to_string());
            ExitCode::from(2)
        }
    }
}

/// Prints the effective settings, and on standard error what was found about what the file names.
fn check(file: &ControllerFile) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return exit_code(Err(anyhow!("cannot look at what the file names: {error}"))),
    };
    let mut findings = runtime.block_on(preflight::examine(&file.settings));
    findings.extend(runtime.block_on(preflight::examine_admin(&file.admin_listen)));
    // A plugin of the kubeconfig may hang; nobody waits for its thread.
    runtime.shutdown_background();
    findings.iter().filter(|found| found.level != Level::Ok).for_each(|found| logging::print(&found.to_string()));
    if findings.iter().any(|found| found.level == Level::Fault) {
        return ExitCode::from(2);
    }
    exit_code(print(&file.effective()))
}

fn run(mut file: ControllerFile, advertise_host: Option<&str>) -> ExitCode {
    logging::start(file.logs);
    if let Some(host) = advertise_host
        && let Err(problem) = file.settings.listen.advertise_at(host)
    {
        logging::print(&format!("sluice-controller: --advertise-host: {problem}"));
        return ExitCode::from(2);
    }
    if let Err(error) = logging::write_from_thread() {
        tracing::warn!(%error, "the log has no thread of its own; whoever does not read stderr holds the controller up");
    }
    let code = exit_code(serve(file));
    logging::flush();
    code
}

/// Prints the error. Files that the configuration names and that cannot be used count as configuration, too.
fn exit_code(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    logging::print(&format!("sluice-controller: {error}"));
    let is_configuration = error.downcast_ref().is_some_and(ControllerError::is_configuration)
        || error.downcast_ref::<kubernetes::ConnectError>().is_some();
    ExitCode::from(if is_configuration { 2 } else { 1 })
}

/// What `release` and `uninstall` do beside releasing Services.
#[derive(Default)]
struct Removal {
    /// Whether our other objects are deleted, too.
    is_uninstalled: bool,
    /// Whether nothing is done.
    is_dry: bool,
    /// The Deployment whose replicas end first.
    scale_down: Option<String>,
}

/// Releases Services, and deletes what `removal` says. Exit code 2 if no cluster is configured.
fn release(file: &ControllerFile, extent: &Extent, removal: &Removal) -> ExitCode {
    let Source::Kubernetes { kubeconfig, namespace } = &file.settings.source else {
        logging::print(
            "sluice-controller: expected a Kubernetes cluster, found `manifests`: stop the controller and remove the status files",
        );
        return ExitCode::from(2);
    };
    exit_code(release_services(file, kubeconfig.as_deref(), namespace.as_deref(), (extent, removal)))
}

#[tokio::main]
async fn release_services(
    file: &ControllerFile,
    kubeconfig: Option<&Path>,
    namespace: Option<&str>,
    (extent, removal): (&Extent, &Removal),
) -> anyhow::Result<()> {
    let mut cluster = kubernetes::connect(kubeconfig).await?;
    if let Some(namespace) = namespace {
        namespace.clone_into(&mut cluster.namespace);
    }
    let failed = |error| failure(error, &cluster.server);
    let (settings, is_dry) = (&file.settings, removal.is_dry);
    let would = if is_dry { "would release" } else { "released" };
    if let Some(deployment) = &removal.scale_down {
        release::scale_down(&cluster, &settings.group, deployment).await.map_err(&failed)?;
    } else if !is_dry {
        release::check_no_leader(&cluster, &settings.group).await.map_err(&failed)?;
    }
    let (mut lines, mut count) = (ReportedLines::default(), 0_usize);
    release::release(&cluster, settings, extent, is_dry, |service| {
        lines.line(format_args!("{would} Service {service}"));
        count += 1;
    })
    .await
    .map_err(&failed)?;
    lines.line(format_args!("{would} {count} Services"));
    if removal.is_uninstalled {
        let would = if is_dry { "would delete" } else { "deleted" };
        let deleted = |name: &str| lines.line(format_args!("{would} EdgeGateway {name}"));
        release::delete_gateways(&cluster, &settings.group, is_dry, deleted).await.map_err(&failed)?;
        lines.line(remaining(&cluster.namespace, &settings.group));
    }
    lines.finish()
}

/// The error of a command, which nobody repeats but its user.
fn failure(error: ReleaseError, server: &str) -> anyhow::Error {
    match error {
        ReleaseError::Request(RequestError::Failed { what, outage }) => {
            anyhow!("cannot {what} at {server}: {outage}; {}", outage.repeat())
        }
        ReleaseError::Request(RequestError::GivenUp { what, attempts, outage }) => anyhow!(
            "cannot {what} at {server}: {attempts} attempts failed, the last one because {outage}; what is done stays done; {}",
            outage.repeat()
        ),
        other => other.into(),
    }
}

/// What only an administrator of the cluster may delete.
fn remaining(namespace: &str, group: &str) -> String {
    let config_maps = CONFIG_MAPS.map(|name| format!("configmap/{name}")).join(" ");
    [
        "as cluster administrator, delete what remains:".to_owned(),
        format!("  kubectl -n {namespace} delete lease/sluice-controller-{group}"),
        format!("  kubectl -n {namespace} delete configmap/sluice-overrides {config_maps}"),
        "  kubectl delete -f deploy/rbac.yaml".to_owned(),
        "  kubectl delete crd/addresspools.sluice.dev crd/edgegateways.sluice.dev  # of every installation".to_owned(),
    ]
    .join("\n")
}

#[tokio::main]
async fn serve(file: ControllerFile) -> anyhow::Result<()> {
    let shutdown = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let config = file.effective();
    let admin_tls = ServerTls::of_admin(&file.admin_listen);
    let admin_sockets = AdminSockets::listen(&file.admin_listen, admin_tls.clone()).await?;
    let (health_listener, metrics_listener) = (listen_tcp(file.health_listen).await?, listen_tcp(file.metrics_listen).await?);
    let mut running = controller::start(file.settings, shutdown.clone()).await?;
    running.view.certificates.extend(admin_tls.map(KeyCertificates::of_admin));
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
