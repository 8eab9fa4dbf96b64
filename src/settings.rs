//! The gateway's configuration file (DESIGN section 7) as valid values, and everything that is wrong with it at once.
//!
//! Invariant: what [`Settings::effective`] prints reads back as equal settings. Deliberately not here: what only the
//! running machine knows, such as whether a device, a core or an address exists; the file may be for another machine.

mod announce;
mod checks;
mod effective;
mod engine;
mod keys;
mod links;
mod port;
mod source;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::config::settings::{CertificateFiles, ControllerSettings};
use control::config::tree::Node;
use control::config::url::ControllerUrl;
use control::config::{Invalid, Logs, Placed, Reader};
use dataplane::{FlowLimits, Neighbour, Route, Tunnel, VlanLink};
use serde::Serialize;

use crate::netlink::RouteTable;
pub use port::{Device, PortSettings, Twin};
pub use source::SourceChoice;

/// How a worker waits for packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Poll {
    /// It never sleeps.
    #[default]
    Busy,
    /// It yields, then sleeps up to 50 us after empty polls (FORWARDING section 13).
    Adaptive,
}

/// Where packet buffers come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Hugepages {
    /// From hugepages if there are any; PCI devices need them.
    #[default]
    Auto,
    /// From hugepages, or the gateway does not start.
    Require,
    /// From ordinary pages.
    Off,
}

/// Who tells the gateway what to forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateSource {
    /// A controller in this process; with certificates also another one that leads.
    Embedded(Box<ControllerSettings>, Option<CertificateFiles>),
    /// Controllers, tried in order, never empty; certificates where one is reached over TCP.
    Remote(Vec<ControllerUrl>, Option<CertificateFiles>),
}

/// A valid configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Key `name`; the host's name where absent.
    pub name: String,
    /// Key `ports`; at least one.
    pub ports: Vec<PortSettings>,
    /// Key `workers.cores`: a worker runs on each; at least one.
    pub cores: Vec<usize>,
    /// Key `workers.poll`.
    pub poll: Poll,
    /// Key `memory.hugepages`.
    pub hugepages: Hugepages,
    /// Key `snat.addresses`.
    pub snat: Vec<IpAddr>,
    /// Key `tunnel`.
    pub tunnel: Tunnel,
    /// Key `nodePortAddresses`, CIDRs resolved to the port addresses within them.
    pub node_port_addresses: Vec<IpAddr>,
    /// Key `flows`.
    pub flows: FlowLimits,
    /// Key `zone`: where the gateway stands among the cluster's zones; none: hints for zones do not count.
    pub zone: Option<String>,
    /// Key `stateDir`.
    pub state_dir: PathBuf,
    /// Key `maxStateAge`.
    pub max_state_age: Duration,
    /// Key `logs`.
    pub logs: Logs,
    /// Key `admin.listen`.
    pub admin_listen: PathBuf,
    /// Key `static.links`, in the order of links.
    pub links: Vec<VlanLink>,
    /// Key `static.routes`.
    pub routes: Vec<Route>,
    /// Key `static.neighbours`.
    pub neighbours: Vec<Neighbour>,
    /// Key `announce`.
    pub announce: RouteTable,
    /// Key `drainOnStop`: how long packets are forwarded on after the routes to VIPs were withdrawn, before the end.
    pub drain_on_stop: Duration,
    /// The gateway's own addresses, ordered: of ports, SNAT, tunnels, node ports and next hops. They are never VIPs.
    pub reserved: Vec<IpAddr>,
    /// The source of state.
    pub source: StateSource,
}

impl Settings {
    /// Reads a file. The choice of a source on the command line overrides the same key of the file.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn read(file: &Path, choice: &SourceChoice) -> Result<Self, Invalid> {
        let (reader, root) = Reader::open(file)?;
        Self::take(reader, &root, choice)
    }

    fn take(reader: Reader, root: &Node, choice: &SourceChoice) -> Result<Self, Invalid> {
        let mut top = reader.section(root);
        let name = keys::name(&mut top);
        let ports = port::take(&mut top);
        let (cores, poll) = keys::workers(&mut top);
        let hugepages = keys::hugepages(&mut top);
        let snat = keys::snat(&mut top);
        let (tunnel_sources, gue_destination_port) = keys::tunnel(&mut top);
        let node_ports = keys::node_port_addresses(&mut top, &ports);
        let flows = keys::flows(&mut top);
        let zone = keys::zone(&mut top);
        let (state_dir, max_state_age) = keys::persistence(&mut top);
        let logs = Logs::take(&mut top);
        let admin_listen = keys::admin(&mut top);
        let (mut links, routes, neighbours) = keys::fixed_network(&mut top, &ports);
        let announce = announce::take(&mut top);
        let drain_on_stop = announce::drain_on_stop(&mut top);
        keys::unbuilt(&mut top);
        let source = source::take(&mut top, choice, &admin_listen);
        top.finish();

        links.sort_by_key(|link| link.settings.link);
        let used = checks::Used {
            ports: &ports,
            links: &links,
            snat: &snat,
            tunnel: &tunnel_sources,
            node_ports: &node_ports,
            routes: &routes,
        };
        checks::run(&reader, &used, hugepages, source.ranges());
        let reserved = used.reserved();
        reader.finish()?;
        Ok(Self {
            name,
            ports: ports.into_iter().map(|port| port.settings).collect(),
            cores,
            poll,
            hugepages,
            snat: values(snat),
            tunnel: Tunnel { sources: values(tunnel_sources), gue_destination_port },
            node_port_addresses: values(node_ports),
            flows,
            zone,
            source: source.settings(reserved.clone(), &state_dir),
            state_dir,
            max_state_age,
            logs,
            admin_listen,
            links: links.into_iter().map(|link| link.settings).collect(),
            routes: values(routes),
            neighbours,
            announce,
            drain_on_stop,
            reserved,
        })
    }
}

fn values<T>(placed: Vec<Placed<T>>) -> Vec<T> {
    placed.into_iter().map(|placed| placed.value).collect()
}

#[cfg(test)]
mod tests;
