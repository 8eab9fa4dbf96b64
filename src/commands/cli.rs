//! The command line of `sluiced` (DESIGN section 8). Usage errors exit with 2, which is clap's own code for them.

use std::path::{Path, PathBuf};

use bench::BenchArgs;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use objects::scalar::url::ServerUrl;

use crate::settings::SourceChoice;

/// Kernel drivers that hand a whole PCI device over to DPDK: the choices of `prepare --driver`, the first one by default.
pub const DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];
/// The configuration file unless given.
pub const CONFIG: &str = "/etc/sluice/sluice.yaml";

/// Edge gateway for Kubernetes: forwards for Services of type LoadBalancer and NodePort, by DPDK.
#[derive(Debug, Parser)]
#[command(name = "sluiced", version)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the gateway until SIGINT or SIGTERM; a second one ends it at once.
    Run(RunArgs),
    /// Validate the configuration and print it with all defaults; look at what it names.
    ///
    /// Looks at certificates, manifests, the API server of a kubeconfig and the rights there, and at the MTUs of ports. What
    /// cannot be seen from this machine is a note, so that the command can run where no gateway runs. What can be seen and
    /// cannot work is an error, with exit code 2. A manifest that does not parse is a warning: the gateway serves the others.
    /// Nothing is changed. A plugin (`exec`) that the kubeconfig names runs.
    Check(ConfigArgs),
    /// Show what this machine has and lacks.
    Doctor(DoctorArgs),
    /// Bind the ports' PCI devices and reserve huge pages, as a configuration needs them (root; the unit sluiced-prepare).
    Prepare(PrepareArgs),
    /// Replay capture files through the forwarding engine and print the verdict on each packet.
    Replay(ReplayArgs),
    /// Measure the forwarding engine without a NIC, and verify the packets that leave it.
    Bench(BenchArgs),
    /// Write a man page for each command, and completion scripts of shells, to a directory. For packages.
    #[command(hide = true)]
    Pages {
        /// The directory.
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

/// Writes a man page for each command, and completion scripts, to a directory.
///
/// # Errors
/// If the directory cannot be written to.
pub fn write_pages(directory: &Path) -> std::io::Result<()> {
    control::config::command_pages::write(Cli::command(), directory)
}

/// Flags of `doctor`.
#[derive(Clone, Debug, Args)]
pub struct DoctorArgs {
    /// Configuration file whose requirements are checked, and what it names: certificates, manifests, the API server and the
    /// rights there, the other ends of veths. Without it nothing counts as missing.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Flags of `prepare`.
#[derive(Clone, Debug, Args)]
pub struct PrepareArgs {
    /// Configuration file.
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    pub config: PathBuf,
    /// The kernel driver that hands PCI devices over to DPDK, vfio-pci by default. Without this flag a device that DPDK can
    /// take keeps its driver.
    #[arg(long, value_parser = DRIVERS)]
    pub driver: Option<String>,
    /// Bind only devices that a run without this flag has bound or kept, by the same driver. For the unit sluiced-prepare: at a
    /// boot no interface has addresses yet by which one in use could be known.
    #[arg(long, conflicts_with = "driver")]
    pub boot: bool,
}

/// Flags of `run`.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "it has a type of its own")]
    pub config: ConfigArgs,
    /// Keep all privileges, for a driver that needs more than is kept (docs/operate/privileges.md).
    #[arg(long)]
    pub no_sandbox: bool,
}

/// The configuration file and the source of Services.
#[derive(Clone, Debug, Args)]
pub struct ConfigArgs {
    /// Configuration file.
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    pub config: PathBuf,
    #[command(flatten)]
    source: SourceArgs,
}

impl ConfigArgs {
    /// The source given by flags.
    #[must_use]
    pub fn choice(&self) -> SourceChoice {
        let SourceArgs { manifests, kubeconfig, controller } = self.source.clone();
        let manifests = manifests.map(SourceChoice::Manifests);
        manifests.or(kubeconfig.map(SourceChoice::Kubeconfig)).or(controller.map(SourceChoice::Controller)).unwrap_or_default()
    }
}

#[derive(Clone, Debug, Args)]
#[group(multiple = false)]
struct SourceArgs {
    /// Watch the YAML files in this directory, with an embedded controller.
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    manifests: Option<PathBuf>,
    /// Watch the cluster of this kubeconfig, with an embedded controller.
    #[arg(long, value_name = "FILE", value_parser = absolute)]
    kubeconfig: Option<PathBuf>,
    /// Connect to a sluice-controller: unix:PATH or https://HOST:PORT.
    #[arg(long, value_name = "URL", value_parser = ServerUrl::of_argument)]
    controller: Option<ServerUrl>,
}

/// Format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// JSON for programs.
    Json,
}

/// Flags of `replay`.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// Configuration file.
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    pub config: PathBuf,
    /// Directory of Service and EndpointSlice YAML.
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    pub manifests: PathBuf,
    /// A capture file with the packets that a port receives; may be repeated.
    #[arg(long = "in", value_name = "PORT=FILE", required = true, value_parser = capture)]
    pub inputs: Vec<CaptureInput>,
    /// Directory for the capture files of transmitted packets.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Packets of one time stamp that the gateway processes together, at most; 1: each by itself.
    ///
    /// A running gateway receives what has arrived since its last look in bursts of up to 128. With N, up to N packets that
    /// follow each other and have the same time stamp arrive in one poll. Those of one port are a burst, in their order;
    /// ports have their turns in the order of the configuration.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=128))]
    pub burst: u8,
    /// Print a line of JSON per packet on standard output.
    #[arg(short, value_name = "FORMAT")]
    pub output: Option<OutputFormat>,
}

/// A capture file and the port that receives its packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureInput {
    /// The port's name.
    pub port: String,
    /// The file.
    pub file: PathBuf,
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    std::path::absolute(text).map_err(|error| format!("expected a path: {error}"))
}

fn capture(text: &str) -> Result<CaptureInput, String> {
    match text.split_once('=') {
        Some((port, file)) if !port.is_empty() && !file.is_empty() => Ok(CaptureInput { port: port.into(), file: file.into() }),
        _ => Err("expected PORT=FILE, such as uplink=in.pcap".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Parser)]
    struct Replay {
        #[command(flatten)]
        args: ReplayArgs,
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        for command in [Cli::command(), Replay::command()] {
            command.debug_assert();
        }
    }

    #[test]
    fn one_source_at_most_is_given() {
        let parse = |args: &[&str]| Cli::try_parse_from([&["sluiced", "check"], args].concat());
        let Command::Check(args) = parse(&["--config", "f", "--manifests", "/m"]).unwrap().command else { panic!("not check") };
        assert_eq!((args.config.to_str(), args.choice()), (Some("f"), SourceChoice::Manifests("/m".into())));
        let Command::Check(args) = parse(&["--controller", "unix:/c"]).unwrap().command else { panic!("not check") };
        assert_eq!((args.config.to_str(), args.choice()), (Some(CONFIG), SourceChoice::Controller(ServerUrl::Unix("/c".into()))));
        for wrong in [&["--manifests", "a", "--kubeconfig", "b"][..], &["--controller", "http://a:1"], &["--x"]] {
            assert_eq!(parse(wrong).unwrap_err().exit_code(), 2, "{wrong:?}");
        }
    }

    #[test]
    fn replay_reads_captures_in_the_order_of_the_command_line() {
        let args =
            ["replay", "--config", "f", "--manifests", "m", "--in", "a=1.pcap", "--in", "b=x=2.pcap", "--out", "d", "-o", "json"];
        let inputs = Replay::try_parse_from(args).unwrap().args.inputs;
        let names: Vec<_> = inputs.iter().map(|input| (input.port.as_str(), input.file.to_str().unwrap())).collect();
        assert_eq!(names, [("a", "1.pcap"), ("b", "x=2.pcap")]);
        let wrong = ["replay", "--manifests", "m", "--in", "a", "--out", "d"];
        assert!(Replay::try_parse_from(wrong).unwrap_err().to_string().contains("expected PORT=FILE"));
    }
}
