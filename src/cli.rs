//! The command line of `sluiced` (DESIGN section 8). Usage errors exit with 2, which is clap's own code for them.

use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use control::config::url::ControllerUrl;
use proto::Mode;

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
    /// cannot work is an error, with exit code 2. Nothing is changed.
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
    #[arg(long, value_name = "URL", value_parser = controller_url)]
    controller: Option<ControllerUrl>,
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

/// Forwarding mode of `bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchMode {
    /// Destination and source address are rewritten.
    Nat,
    /// The destination address is rewritten.
    Dnat,
    /// Only the Ethernet addresses are rewritten; the backend is on the link.
    Dsr,
    /// The packet is encapsulated in an IP packet.
    Ipip,
    /// The packet is encapsulated in a UDP datagram.
    Gue,
    /// Only the Ethernet addresses are swapped; this measures the harness alone.
    None,
}

impl BenchMode {
    /// The mode of the services; `None` for the harness alone, which has no services.
    #[must_use]
    pub const fn of_services(self) -> Option<Mode> {
        match self {
            Self::Nat => Some(Mode::Nat),
            Self::Dnat => Some(Mode::Dnat),
            Self::Dsr => Some(Mode::Dsr),
            Self::Ipip => Some(Mode::Ipip),
            Self::Gue => Some(Mode::Gue),
            Self::None => None,
        }
    }
}

/// Address family of `bench`'s packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchFamily {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// I/O of `bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchIo {
    /// Buffers in memory.
    Mem,
    /// DPDK rings, fed by a second core.
    Ring,
}

/// Transport protocol of `bench`'s packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// State of `bench`'s flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchState {
    /// Both sides have shown that they exist: a whole handshake; of UDP a packet, its reply and a packet. In one-way
    /// modes the client has continued for two seconds.
    Established,
    /// Only the client has sent.
    Opening,
}

/// Direction of `bench`'s packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchDirection {
    /// From clients.
    ToBackend,
    /// From backends.
    ToClient,
    /// Bursts of both in turn.
    Both,
}

/// Sizes of `bench`'s frames, in bytes with frame check sequence, without VLAN tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameSize {
    /// All frames have this size, or are the shortest that carry their headers.
    Each(u16),
    /// 64, 594 and 1,518 bytes as 7:4:1.
    Imix,
}

/// Flags of `bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// Forwarding mode.
    #[arg(long, value_enum, default_value = "nat")]
    pub mode: BenchMode,
    /// Address family.
    #[arg(long, value_enum, default_value = "v4")]
    pub family: BenchFamily,
    /// Transport protocol.
    #[arg(long, value_enum, default_value = "tcp")]
    pub protocol: BenchProtocol,
    /// State of the flows.
    #[arg(long, value_enum, default_value = "established")]
    pub state: BenchState,
    /// Direction of the packets: `both` by default where replies pass the gateway and flows are established.
    #[arg(long, value_enum)]
    pub direction: Option<BenchDirection>,
    /// Number of flows; packets of all flows arrive in random order.
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    pub flows: u32,
    /// Services.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub services: u32,
    /// Backends of each service.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=6_553))]
    pub backends: u32,
    /// Size of the frames in bytes, with frame check sequence, without VLAN tag; `imix`: 64, 594 and 1518 as 7:4:1.
    #[arg(long, value_name = "N|imix", default_value = "64", value_parser = frame_size)]
    pub size: FrameSize,
    /// IPv4 packets may be fragmented: the flag DF is not set.
    #[arg(long)]
    pub no_df: bool,
    /// Frames carry a VLAN tag on both sides.
    #[arg(long)]
    pub vlan: bool,
    /// Clients, and backends unless they are on the link, are behind N next hops of equal cost.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub ecmp: u8,
    /// Number of workers, each on its own core from `--core` on, with its own flows and ports; `--io mem` only.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub workers: u8,
    /// Every packet arrives at another worker than the one that owns it; measured beside the same without.
    #[arg(long, conflicts_with_all = ["new_flows", "flood"])]
    pub handover: bool,
    /// Every packet opens a flow; the simulated time lets as many flows expire.
    #[arg(long, conflicts_with = "flood")]
    pub new_flows: bool,
    /// With `--new-flows`: live flows hold this percentage of the SNAT ports.
    #[arg(long, value_name = "PERCENT", requires = "new_flows", value_parser = clap::value_parser!(u8).range(1..=98))]
    pub snat_load: Option<u8>,
    /// Every packet is a SYN of a new flow without further packets, and time stands still.
    #[arg(long)]
    pub flood: bool,
    /// Also measure latency, from a packet's arrival until it leaves, at 10, 50 and 90 % load.
    #[arg(long)]
    pub latency: bool,
    /// Also measure while another core lists all flows, as `sluicectl flows` does; alternately with and without.
    #[arg(long)]
    pub listing: bool,
    /// I/O of the packets.
    #[arg(long, value_enum, default_value = "mem")]
    pub io: BenchIo,
    /// Packet buffers of each worker with `--io mem`, used in turn.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(256..=1 << 20))]
    pub buffers: u32,
    /// Seconds to measure, after a warm-up.
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub seconds: u32,
    /// Core of the first worker.
    #[arg(long, value_name = "C", default_value_t = 1)]
    pub core: usize,
    /// Core that feeds `--io ring`, or lists flows; by default the one before `--core`, or the one after core 0.
    #[arg(long, value_name = "C")]
    pub generator_core: Option<usize>,
    /// Output format; a table by default.
    #[arg(short, value_name = "FORMAT")]
    pub output: Option<OutputFormat>,
}

fn frame_size(text: &str) -> Result<FrameSize, String> {
    match text.parse() {
        Ok(bytes @ 64..=1518) => Ok(FrameSize::Each(bytes)),
        Err(_) if text == "imix" => Ok(FrameSize::Imix),
        _ => Err("expected 64 to 1518, or imix".to_owned()),
    }
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    std::path::absolute(text).map_err(|error| format!("expected a path: {error}"))
}

fn controller_url(text: &str) -> Result<ControllerUrl, String> {
    let here = std::env::current_dir().map_err(|error| format!("the current directory is gone: {error}"))?;
    ControllerUrl::parse(text, &here)
}

fn capture(text: &str) -> Result<CaptureInput, String> {
    match text.split_once('=') {
        Some((port, file)) if !port.is_empty() && !file.is_empty() => Ok(CaptureInput { port: port.into(), file: file.into() }),
        _ => Err("expected PORT=FILE, such as uplink=in.pcap".to_owned()),
    }
}

#[cfg(test)]
impl BenchArgs {
    /// Those of a command line.
    pub(crate) fn parsed(args: &[&str]) -> Self {
        match Cli::try_parse_from([&["sluiced", "bench"], args].concat()).unwrap().command {
            Command::Bench(args) => args,
            other => panic!("not bench: {other:?}"),
        }
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

    #[derive(Debug, Parser)]
    struct Bench {
        #[command(flatten)]
        args: BenchArgs,
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        for command in [Cli::command(), Replay::command(), Bench::command()] {
            command.debug_assert();
        }
    }

    #[test]
    fn one_source_at_most_is_given() {
        let parse = |args: &[&str]| Cli::try_parse_from([&["sluiced", "check"], args].concat());
        let Command::Check(args) = parse(&["--config", "f", "--manifests", "/m"]).unwrap().command else { panic!("not check") };
        assert_eq!((args.config.to_str(), args.choice()), (Some("f"), SourceChoice::Manifests("/m".into())));
        let Command::Check(args) = parse(&["--controller", "unix:/c"]).unwrap().command else { panic!("not check") };
        assert_eq!(
            (args.config.to_str(), args.choice()),
            (Some(CONFIG), SourceChoice::Controller(ControllerUrl::Unix("/c".into())))
        );
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

    #[test]
    fn bench_reads_modes_and_refuses_what_there_is_not() {
        for mode in Mode::ALL {
            let args = Bench::try_parse_from(["bench", "--mode", mode.as_str()]).unwrap().args;
            assert_eq!(args.mode.of_services(), Some(*mode));
        }
        let args =
            Bench::try_parse_from(["bench", "--mode", "none", "--io", "ring", "--family", "v6", "-o", "json"]).unwrap().args;
        assert_eq!((args.mode, args.io, args.family), (BenchMode::None, BenchIo::Ring, BenchFamily::V6));
        let sizes = ["64", "1518", "imix"].map(|size| Bench::try_parse_from(["bench", "--size", size]).unwrap().args.size);
        assert_eq!(sizes, [FrameSize::Each(64), FrameSize::Each(1518), FrameSize::Imix]);
        for wrong in [
            ["--mode", "snat"],
            ["--workers", "65"],
            ["--flows", "0"],
            ["-o", "yaml"],
            ["--size", "63"],
            ["--size", "mixed"],
            ["--ecmp", "0"],
            ["--buffers", "255"],
            ["--snat-load", "95"],
            ["--protocol", "sctp"],
        ] {
            let error = Bench::try_parse_from(["bench", wrong[0], wrong[1]]).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{wrong:?}");
        }
    }
}
