//! The command line of `sluicectl` (DESIGN section 8).

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use proto::limits::ADMIN_LISTEN;

use crate::config::scalar;
use crate::convert::Product;

/// Asks a sluice gateway, or a controller for all of its gateways, what they do, and takes backends, nodes and gateways out.
#[derive(Clone, Debug, Parser)]
#[command(name = "sluicectl", version)]
pub struct Arguments {
    /// The admin API of a gateway or a controller: unix:PATH.
    #[arg(long, global = true, value_name = "URL", env = "SLUICE_SERVER", default_value = ADMIN_LISTEN)]
    pub server: Server,
    /// What to ask.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Services: frontends, backends, and why one is not served.
    Services(ListArguments),
    /// Backends: state, health, weight, flows.
    Backends(ListArguments),
    /// Network ports: link and packets.
    Ports(ListArguments),
    /// Dropped packets by reason and worker.
    Drops(ListArguments),
    /// Print what MetalLB or Cilium hold of load balancer addresses as AddressPools, and say what has no equivalent.
    Convert(ConvertArguments),
    /// Gateways of the group: ready, generation, draining, when last heard of.
    Gateways(ListArguments),
    /// Pools that VIPs are taken from: addresses, how many are used and available, and why one is not used.
    Pools(ListArguments),
    /// What owners of objects were told: why a Service is not served, and the like.
    Events(ListArguments),
    /// What is set by hand, by whom and since when: drains and weights.
    Overrides(ListArguments),
    /// Take no new flows: of a backend (ADDRESS:PORT, or ADDRESS for all its ports), of all backends on a node, or of a
    /// gateway, whose routes to VIPs are withdrawn. Flows that there are go on.
    Drain {
        /// A backend, or the name of a node or gateway; node/NAME or gateway/NAME where both have it.
        #[arg(value_name = "BACKEND|NODE|GATEWAY")]
        target: String,
    },
    /// Take new flows again.
    Undrain {
        /// What is drained, as `overrides` lists it.
        #[arg(value_name = "BACKEND|NODE|GATEWAY")]
        target: String,
    },
    /// Set the share of new flows that a backend takes, relative to the others.
    Weight {
        /// The Service: NAMESPACE/NAME, or a name that one alone has.
        service: String,
        /// The backend: ADDRESS:PORT.
        backend: SocketAddr,
        /// 0 to 65535; `auto`: its own again.
        #[arg(value_name = "N", allow_hyphen_values = true)]
        weight: ChosenWeight,
    },
    /// Have the gateway read its configuration again; says what is in effect and what needs a restart.
    Reload,
    /// Print the settings in effect, with all defaults.
    Config,
    /// Print the completion script of a shell.
    Completion {
        /// The shell.
        shell: Shell,
    },
    /// Print the version of this program.
    Version,
}

/// What is converted.
#[derive(Clone, Debug, Args)]
pub struct ConvertArguments {
    /// Whose objects these are.
    pub product: Product,
    /// Files of YAML as `kubectl get -o yaml` prints; - is the standard input, which is read unless a file is given.
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

/// How a list is printed.
#[derive(Clone, Debug, Args)]
pub struct ListArguments {
    /// Output format.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value = "table")]
    pub output: Output,
    /// Go on: redraw the table once a second, or print each object that is new or has changed.
    #[arg(long)]
    pub watch: bool,
}

/// Output formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// One array; with --watch, one object a line.
    Json,
    /// One list; with --watch, one document per object.
    Yaml,
}

/// A weight; none: the backend's own.
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

/// Where the admin API is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server(PathBuf);

impl Server {
    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.0
    }
}

impl FromStr for Server {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.starts_with("https://") || text.starts_with("http://") {
            return Err("TCP and TLS are not built in this version; \
                        use unix:PATH on the gateway itself, or forward its socket: ssh -L ./admin.sock:/run/sluice/admin.sock GATEWAY"
                .to_owned());
        }
        let here = std::env::current_dir().map_err(|error| format!("the current directory cannot be read: {error}"))?;
        scalar::socket(text, &here).map(Self)
    }
}

/// Writes the completion script of a shell.
pub(super) fn write_completion(shell: Shell, out: &mut impl Write) -> io::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "sluicectl", &mut script);
    out.write_all(&script)
}
