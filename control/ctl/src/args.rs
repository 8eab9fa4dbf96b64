//! The command line of `sluicectl` (DESIGN section 8).

mod lists;

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use objects::scalar::url::ServerUrl;
use proto::limits::{ADMIN_LISTEN, HEAVIEST_MAX};

use crate::convert::Product;
use crate::routing::RoutingDaemon;
pub(crate) use lists::{
    DropsArguments, EventsArguments, Filters, GatewayFilter, OfGatewaysArguments, OfServicesArguments, OverridesArguments,
    Selection, ServiceFilter, ServicesArguments,
};
pub use lists::{ListArguments, Output};

/// Heading of the options that say which server is asked, and how; they are options of every command.
const CONNECTION: &str = "Connection";
/// Names of protocols.
const PROTOCOLS: [&str; 3] = ["tcp", "udp", "sctp"];

/// Query a sluice gateway, or all gateways of a controller, and drain backends, nodes and gateways.
#[derive(Clone, Debug, Parser)]
#[command(name = "sluicectl", version)]
pub struct Arguments {
    /// The admin API of a gateway or a controller: unix:PATH, or https://HOST:PORT, which needs --ca, --cert and --key.
    #[arg(long, global = true, help_heading = CONNECTION, value_name = "URL", env = "SLUICE_SERVER", default_value = ADMIN_LISTEN,
        value_parser = ServerUrl::of_argument)]
    pub server: ServerUrl,
    /// PEM file of the authority of the server's certificate, for https.
    #[arg(long, global = true, help_heading = CONNECTION, value_name = "FILE", env = "SLUICE_CA")]
    pub ca: Option<PathBuf>,
    /// PEM file of your certificate, for https.
    #[arg(long, global = true, help_heading = CONNECTION, value_name = "FILE", env = "SLUICE_CERT")]
    pub cert: Option<PathBuf>,
    /// PEM file of its private key, which others must not be able to read, for https.
    #[arg(long, global = true, help_heading = CONNECTION, value_name = "FILE", env = "SLUICE_KEY")]
    pub key: Option<PathBuf>,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Whether all is well, and what is not: object, cause, since when, what to do; the worst first. Exit code 1 if not.
    Status(StatusArguments),
    /// History of backends: since when each is as it is, its last changes with their causes, its last check.
    History(HistoryArguments),
    /// Services: frontends, backends, and why one is not served.
    Services(ServicesArguments),
    /// Frontends: flows, packets, bytes and connections of each VIP and port, and of each node port.
    Frontends(OfServicesArguments),
    /// Backends: state, health, weight, flows.
    Backends(OfServicesArguments),
    /// Flows of a gateway, or of all gateways of a controller: client, frontend, backend, state, age; the heaviest of them;
    /// or end some.
    Flows(FlowsArguments),
    /// Watch flows of a gateway begin and end, and packets being dropped, as it happens.
    Watch(WatchArguments),
    /// Explain what a gateway, or each of a controller, does with a packet, without sending one: frontend, backend and
    /// why, rewrite, next hop, and what its flow says.
    Explain(ExplainArguments),
    /// Follow packets of a gateway as they pass: where one was received, its flow, the verdict, and what was sent or why it
    /// was dropped.
    Trace(TraceArguments),
    /// Write packets of a gateway as they pass, and the frames they leave as, to a pcapng file for Wireshark. Comments have
    /// the verdict, drop reason, Service and backend.
    Capture(CaptureArguments),
    /// Network ports: link and packets.
    Ports(OfGatewaysArguments),
    /// Dropped packets by reason and worker.
    Drops(DropsArguments),
    /// Convert the address pools of MetalLB or Cilium to AddressPools, and list what has no equivalent.
    Convert(ConvertArguments),
    /// Gateways of the group: ready, generation, draining, last seen, groups of VIPs that they own, shadow flows, lag of their
    /// partners, and routing sessions that are up.
    Gateways(OfGatewaysArguments),
    /// VIPs: pool, group, and the gateways that answer for them or announce them.
    Vips(OfServicesArguments),
    /// Address pools: addresses, used and available, and why a pool is not in use.
    Pools(ListArguments),
    /// Recent events: why a Service is not served, and other notes for owners of objects.
    Events(EventsArguments),
    /// Manual overrides: drains and weights, with author and time.
    Overrides(OverridesArguments),
    /// Show services, backends, flows, workers, drops, ports and gateways live, with rates.
    Top(TopArguments),
    /// Stop new flows to a backend (ADDRESS:PORT, or ADDRESS for all its ports), to all backends on a node, or to a
    /// gateway: its routes to VIPs are withdrawn, and other gateways of its link take its VIPs over. Existing flows continue.
    Drain {
        /// A backend, or the name of a node or gateway; node/NAME or gateway/NAME if both have it.
        #[arg(value_name = "BACKEND|NODE|GATEWAY")]
        target: String,
        /// Wait until every gateway applies the drain and no flow is left there: at least 2 s, for a gateway 11 s.
        #[arg(long)]
        wait: bool,
        /// How long --wait waits at most, for example 10m; then the exit code is 1. Default: without end.
        #[arg(long, value_name = "TIME", requires = "wait")]
        timeout: Option<WaitTime>,
    },
    /// Allow new flows again.
    Undrain {
        /// The drained backend, node or gateway, as `overrides` lists it.
        #[arg(value_name = "BACKEND|NODE|GATEWAY")]
        target: String,
    },
    /// Set the share of new flows of a backend, relative to the others.
    Weight {
        /// The Service: NAMESPACE/NAME, or an unambiguous name.
        service: String,
        /// The backend: ADDRESS:PORT.
        #[arg(value_parser = socket_address)]
        backend: SocketAddr,
        /// 0 to 65535, or `auto` to remove the override.
        #[arg(value_name = "N", allow_hyphen_values = true)]
        weight: ChosenWeight,
    },
    /// Reload the gateway's configuration, and print what is in effect and what needs a restart.
    Reload,
    /// Print the settings in effect, with all defaults; or the configuration of a routing daemon beside the gateway.
    Config {
        /// The routing daemon.
        #[command(subcommand)]
        daemon: Option<RoutingDaemon>,
    },
    /// Print the completion script of a shell.
    Completion {
        /// The shell.
        shell: Shell,
    },
    /// Print the man page of this program, or write one for each command to a directory.
    Man {
        /// The directory.
        #[arg(value_name = "DIR")]
        directory: Option<PathBuf>,
    },
    /// Print the version of this program.
    Version,
}

/// Options of `status`.
#[derive(Clone, Debug, Args)]
pub struct StatusArguments {
    /// Output format.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub output: StatusOutput,
    /// Wait until all is well; a server that does not answer yet is not.
    #[arg(long)]
    pub wait: bool,
    /// How long --wait waits at most, for example 5m; then the exit code is 1. Default: without end.
    #[arg(long, value_name = "TIME", requires = "wait")]
    pub timeout: Option<WaitTime>,
}

/// Options of `history`.
#[derive(Clone, Debug, Args)]
pub struct HistoryArguments {
    /// The backends of a Service (NAMESPACE/NAME or NAME), or a backend (ADDRESS or ADDRESS:PORT).
    #[arg(value_name = "SERVICE|BACKEND")]
    pub object: String,
    /// Output format.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub output: StatusOutput,
}

/// Output formats of `status` and `history`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StatusOutput {
    /// A screen for people.
    Text,
    /// One object; of `history` one array.
    Json,
    /// One document; of `history` one list.
    Yaml,
}

/// How long a condition is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitTime(pub Duration);

impl FromStr for WaitTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let time = objects::scalar::duration(text);
        time.map(Self).ok_or_else(|| "expected a number and a unit, such as 30s, 5m or 1h".to_owned())
    }
}

/// Input of `convert`.
#[derive(Clone, Debug, Args)]
pub struct ConvertArguments {
    /// The product that the objects belong to.
    pub product: Product,
    /// YAML files as printed by `kubectl get -o yaml`; - or no file means standard input.
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

/// Filters of `flows`; a flow must match all that are given.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct FlowsArguments {
    /// Output options.
    #[command(flatten)]
    pub list: ListArguments,
    /// The flows.
    #[command(flatten)]
    pub flows: FlowFilter,
    /// Maximum number of flows; 0: all of them.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub limit: usize,
    /// The N flows and the N clients with most traffic in the last seconds, from a sample of packets, in place of the
    /// list. Of the filters, --service, --namespace and --gateway count.
    #[arg(long, value_name = "N", value_parser = heaviest, conflicts_with_all = ["limit", "backend", "client", "protocol", "state"])]
    pub top: Option<u32>,
    /// What to do with flows.
    #[command(subcommand)]
    pub command: Option<FlowsCommand>,
}

/// Which flows.
#[derive(Clone, Debug, Args)]
pub struct FlowFilter {
    /// See there.
    #[command(flatten)]
    pub services: ServiceFilter,
    /// To this backend: ADDRESS or ADDRESS:PORT.
    #[arg(long, value_name = "BACKEND", default_value = "", hide_default_value = true)]
    pub backend: String,
    /// Of this client: ADDRESS, ADDRESS:PORT or a network.
    #[arg(long, value_name = "CLIENT", default_value = "", hide_default_value = true)]
    pub client: String,
    /// Of this protocol.
    #[arg(long, value_name = "PROTOCOL", value_parser = PROTOCOLS, ignore_case = true)]
    pub protocol: Option<String>,
    /// In this state, as the list shows it.
    #[arg(long, value_name = "STATE", default_value = "", hide_default_value = true)]
    pub state: String,
    /// See there.
    #[command(flatten)]
    pub gateways: GatewayFilter,
}

/// What `flows` does besides listing.
#[derive(Clone, Debug, Subcommand)]
pub enum FlowsCommand {
    /// End the flows that match: TCP connections by a RST to both ends, others by forgetting them. Without --yes it only
    /// says how many match.
    End {
        /// The flows; at least one filter besides --gateway.
        #[command(flatten)]
        flows: FlowFilter,
        /// End them.
        #[arg(long)]
        yes: bool,
    },
}

/// Options of `watch`.
#[derive(Clone, Debug, Args)]
pub struct WatchArguments {
    /// See there.
    #[command(flatten)]
    pub services: ServiceFilter,
    /// Only these: start and end of flows, drop of packets. May be repeated.
    #[arg(long, value_name = "VERDICT", value_parser = ["start", "end", "drop"])]
    pub verdict: Vec<String>,
    /// End after this many.
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// End after this time, for example 30s.
    #[arg(short, long, value_name = "TIME")]
    pub duration: Option<CaptureTime>,
    /// Output format.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub output: TraceOutput,
}

fn heaviest(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (1..=HEAVIEST_MAX).contains(number));
    number.and_then(|number| u32::try_from(number).ok()).ok_or_else(|| format!("expected 1 to {HEAVIEST_MAX}"))
}

/// Options of `top`.
#[derive(Clone, Debug, Args)]
pub struct TopArguments {
    /// Time between two samples, from 0.2 to 3600.
    #[arg(short, long, value_name = "SECONDS", default_value = "1")]
    pub delay: Delay,
}

/// Time between two samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay(pub Duration);

impl FromStr for Delay {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let seconds = text.parse().ok().filter(|seconds| (0.2..=3600.0).contains(seconds));
        seconds.map(|seconds| Self(Duration::from_secs_f64(seconds))).ok_or_else(|| "expected 0.2 to 3600 seconds".to_owned())
    }
}

/// The packet that `explain` is about.
#[derive(Clone, Debug, Args)]
pub struct ExplainArguments {
    /// Its protocol.
    #[arg(value_parser = PROTOCOLS, ignore_case = true)]
    pub protocol: String,
    /// Its source, for example 198.51.100.7:5555; an IPv6 address stands in brackets.
    #[arg(value_parser = socket_address)]
    pub source: SocketAddr,
    /// Its destination, for example 192.0.2.100:80.
    #[arg(value_parser = socket_address)]
    pub destination: SocketAddr,
    /// Whether it opens a connection (first) or comes later. Default: later if the gateway has its flow, otherwise first.
    #[arg(long, value_name = "first|later", value_parser = ["first", "later"])]
    pub packet: Option<String>,
    /// The port on which it arrives. Default: the one towards its source.
    #[arg(long = "in", value_name = "PORT", default_value = "", hide_default_value = true)]
    pub port: String,
    /// At this gateway. Default: at all gateways of a controller.
    #[arg(long, value_name = "GATEWAY", default_value = "", hide_default_value = true)]
    pub gateway: String,
    /// Output format.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub output: ExplainOutput,
}

/// Which packets `capture` and `trace` are about, and when they end.
#[derive(Clone, Debug, Args)]
pub struct PacketSelection {
    /// Packets of which a frame matches, as it arrives or as it leaves: an expression of pcap-filter(7), for example 'host
    /// 198.51.100.7 and tcp port 80'. Default: all packets.
    #[arg(value_name = "FILTER")]
    pub filter: Vec<String>,
    /// End after this many packets.
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// End after this time, for example 30s.
    #[arg(short, long, value_name = "TIME")]
    pub duration: Option<CaptureTime>,
}

/// Output of `capture`.
#[derive(Clone, Debug, Args)]
pub struct CaptureArguments {
    /// The packets.
    #[command(flatten)]
    pub selection: PacketSelection,
    /// The file to write; - or none means standard output.
    #[arg(short, long, value_name = "FILE")]
    pub write: Option<PathBuf>,
    /// Maximum number of bytes of each frame.
    #[arg(short, long, value_name = "BYTES", default_value_t = 65_535, value_parser = clap::value_parser!(u32).range(1..=65_535))]
    pub snaplen: u32,
}

/// Output of `trace`.
#[derive(Clone, Debug, Args)]
pub struct TraceArguments {
    /// The packets.
    #[command(flatten)]
    pub selection: PacketSelection,
    /// Output format.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub output: TraceOutput,
}

/// Output formats of `trace` and `watch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TraceOutput {
    /// Lines for people.
    Text,
    /// One object a line.
    Json,
}

/// How long a capture lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureTime(pub Duration);

impl FromStr for CaptureTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let time = objects::scalar::duration(text).filter(|time| !time.is_zero());
        time.map(Self).ok_or_else(|| "expected a number and a unit, such as 30s, 5m or 1h".to_owned())
    }
}

/// Output formats of `explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExplainOutput {
    /// Lines for people.
    Text,
    /// One object for each gateway.
    Json,
    /// One document for each gateway.
    Yaml,
}

/// A weight; `None` removes the override.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChosenWeight(pub Option<u16>);

impl FromStr for ChosenWeight {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self(None)),
            number => number.parse().map(|weight| Self(Some(weight))).map_err(|_| "expected 0 to 65535, or auto".to_owned()),
        }
    }
}

fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "expected ADDRESS:PORT, such as 192.0.2.100:80 or [2001:db8::1]:80".to_owned())
}

/// Writes the man page of the program to `out`, or one for each command to a directory.
pub(super) fn write_man(directory: Option<&Path>, out: &mut impl Write) -> io::Result<()> {
    match directory {
        Some(directory) => clap_mangen::generate_to(Arguments::command(), directory),
        None => clap_mangen::Man::new(Arguments::command()).render(out),
    }
}

/// Writes the completion script of a shell.
pub(super) fn write_completion(shell: Shell, out: &mut impl Write) -> io::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "sluicectl", &mut script);
    out.write_all(&script)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(words: &str) -> String {
        let error = Arguments::try_parse_from(["sluicectl"].into_iter().chain(words.split(' '))).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{words}");
        error.to_string()
    }

    #[test]
    fn the_packet_of_explain_says_what_is_expected() {
        let expected = "expected ADDRESS:PORT, such as 192.0.2.100:80 or [2001:db8::1]:80";
        for words in ["explain tcp here 192.0.2.100:80", "explain tcp 198.51.100.7:1 192.0.2.100", "weight web 10.0.0.1 5"] {
            assert!(refusal(words).contains(expected), "{words}");
        }
        for words in ["explain icmp 198.51.100.7:1 192.0.2.100:80", "flows --protocol icmp"] {
            assert!(refusal(words).contains("[possible values: tcp, udp, sctp]"), "{words}");
        }
        assert!(refusal("explain").contains("<PROTOCOL> <SOURCE> <DESTINATION>"));
        Arguments::try_parse_from(["sluicectl", "explain", "TCP", "198.51.100.7:1", "[2001:db8::1]:80"]).unwrap();
    }

    #[test]
    fn the_options_of_the_connection_stand_apart_in_the_help() {
        let mut command = Arguments::command();
        command.build();
        let help = command.find_subcommand_mut("flows").unwrap().render_help().to_string();
        let (own, connection) = help.split_once("Connection:").unwrap();
        for option in ["--server", "--ca", "--cert", "--key"] {
            assert!(connection.contains(option) && !own.contains(option), "{help}");
        }
        assert!(own.contains("--limit"), "{help}");
    }
}
