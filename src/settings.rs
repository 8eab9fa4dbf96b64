//! The gateway's configuration file (DESIGN section 7) as valid values, or all its problems at once.
//!
//! Invariant: the output of [`Settings::effective`] reads back as equal settings. Deliberately not here: facts of the
//! running machine, such as whether a device, a core or an address exists. The file may be for another machine.

mod checks;
mod effective;
mod election;
mod engine;
mod fleet;
mod keys;
mod links;
mod live;
mod port;
mod record_target;
pub mod reload;
mod state_source;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::config::listen::{check_listeners, take_admin};
use control::config::settings::AdminListen;
use control::config::yaml_tree::Node;
use control::config::{Invalid, Located, Logs, Reader};
use control::gateways::listener::KeyCertificates;
use dataplane::{FlowLimits, Neighbour, Route, Tunnel, VlanLink};
use proto::GatewayProfile;
use proto::limits::ADMIN_LISTEN;

use crate::netlink::RouteTable;
pub use election::{DaemonSockets, Election, Elector, RoutingDaemon};
pub use fleet::{KeyFile, Replication};
pub use keys::{Hugepages, Poll, WithoutBackends};
pub use port::{PortSettings, Twin};
pub use record_target::RecordTarget;
pub use state_source::{SourceChoice, StateSource};

/// A valid configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Key `name`; the host's name if it is absent.
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
    /// Key `limits.targets`: room for backends and their targets.
    pub targets_max: u32,
    /// Key `zone`: the gateway's zone in the cluster; none: topology hints are ignored.
    pub zone: Option<String>,
    /// Key `stateDir`.
    pub state_dir: PathBuf,
    /// Key `maxStateAge`.
    pub max_state_age: Duration,
    /// Key `logs`.
    pub logs: Logs,
    /// Key `flowRecords.to`; none: flows are not recorded.
    pub flow_records: Option<RecordTarget>,
    /// Key `admin`: where the admin API is served.
    pub admin_listen: AdminListen,
    /// Key `metrics.listen`; none: metrics are not served.
    pub metrics_listen: Option<SocketAddr>,
    /// Key `static.links`, in the order of links.
    pub links: Vec<VlanLink>,
    /// Key `static.routes`.
    pub routes: Vec<Route>,
    /// Key `static.neighbours`.
    pub neighbours: Vec<Neighbour>,
    /// Keys `announce.routeTable` and `announce.routeProtocol`.
    pub announce: RouteTable,
    /// Key `announce.withoutBackends`.
    pub without_backends: WithoutBackends,
    /// How the owners of VIPs of `l2` pools are elected.
    pub election: Election,
    /// Key `fleet`: how flows are replicated to other gateways; none: they are not.
    pub replication: Option<Replication>,
    /// Keys `announce.daemon` and `announce.daemonSocket`: whose routing sessions are shown.
    pub daemon_sockets: DaemonSockets,
    /// Key `drainOnStop`: how long packets are still forwarded after the routes to VIPs are withdrawn, before the
    /// process ends.
    pub drain_on_stop: Duration,
    /// What the gateway says about itself: its addresses, which are never VIPs, and its prefixes.
    pub profile: GatewayProfile,
    /// The source of state.
    pub source: StateSource,
    /// Values that are valid, but may not do what is expected of them, with file and line.
    pub warnings: Vec<String>,
}

impl Settings {
    /// Reads a file. A source that the command line chooses overrides the same key of the file.
    ///
    /// # Errors
    /// All problems of the file.
    pub fn read(file: &Path, choice: &SourceChoice) -> Result<Self, Invalid> {
        let (reader, root) = Reader::open(file)?;
        Self::take(reader, &root, choice)
    }

    /// The certificates that the gateway shows to controllers, if it has any.
    #[must_use]
    pub fn certificates(&self) -> Option<KeyCertificates> {
        self.source.certificates()
    }

    fn take(reader: Reader, root: &Node, choice: &SourceChoice) -> Result<Self, Invalid> {
        let mut top = reader.section(root);
        let name = keys::name(&mut top);
        let ports = port::take(&mut top);
        let (cores, poll) = keys::workers(&mut top);
        let (hugepages, snat) = (keys::hugepages(&mut top), keys::snat(&mut top));
        let (tunnel_sources, gue_destination_port) = keys::tunnel(&mut top);
        let node_ports = keys::node_port_addresses(&mut top, &ports);
        let flows = keys::flows(&mut top);
        let (targets_max, zone) = (keys::targets(&mut top), keys::zone(&mut top));
        let (state_dir, max_state_age) = keys::persistence(&mut top);
        let logs = Logs::take(&mut top);
        let admin_listen = take_admin(&mut top, ADMIN_LISTEN);
        let metrics_listen = keys::metrics(&mut top);
        let (mut links, routes, neighbours) = keys::fixed_network(&mut top, &ports);
        let (announce, without_backends, election, daemon_sockets) = election::announce(&mut top, &ports);
        let drain_on_stop = keys::drain_on_stop(&mut top);
        let replication = fleet::take(&mut top, &election, &snat);
        let flow_records = keys::flow_records(&mut top, &reader.base());
        let source = state_source::take(&mut top, choice, &admin_listen.unix);
        fleet::check_source(&top, replication.as_ref(), &source);
        let listeners = [
            ("listen", source.listen()),
            ("admin.listen", admin_listen.tcp.as_ref().map(|(address, _)| *address)),
            ("fleet.listen", replication.as_ref().map(|replication| replication.listen)),
        ];
        // The key with a default comes first, so that of two keys the other one is reported.
        check_listeners(&mut top, &[&[("metrics.listen", metrics_listen)], &listeners[..]].concat());
        top.finish();

        links.sort_by_key(|link| link.settings.link);
        let used = checks::UsedAddresses {
            ports: &ports,
            links: &links,
            snat: &snat,
            tunnel: &tunnel_sources,
            node_ports: &node_ports,
            routes: &routes,
            snat_groups: replication.as_ref().map(|_| election.groups),
        };
        checks::run(&reader, &used, hugepages, source.ranges());
        let profile = GatewayProfile { max_state_age: Some(max_state_age), ..used.profile() };
        Ok(Self {
            warnings: reader.finish()?,
            name,
            ports: ports.into_iter().map(|port| port.settings).collect(),
            cores,
            poll,
            hugepages,
            snat: values(snat),
            tunnel: Tunnel { sources: values(tunnel_sources), gue_destination_port },
            node_port_addresses: values(node_ports),
            flows,
            targets_max,
            zone,
            source: source.settings(profile.clone(), &state_dir, election.elector == Elector::Keepalived),
            state_dir,
            max_state_age,
            logs,
            flow_records,
            admin_listen,
            metrics_listen,
            links: links.into_iter().map(|link| link.settings).collect(),
            routes: values(routes),
            neighbours,
            announce,
            without_backends,
            election,
            replication,
            daemon_sockets,
            drain_on_stop,
            profile,
        })
    }
}

fn values<T>(located: Vec<Located<T>>) -> Vec<T> {
    located.into_iter().map(|located| located.value).collect()
}

#[cfg(test)]
mod tests;
