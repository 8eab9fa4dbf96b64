//! The network that the engine forwards by: tables of Linux, static entries of the configuration, and ports without link.
//!
//! Not here: how Linux's tables are followed (`netlink`), and the states of ports (`ports`).

use std::collections::BTreeSet;
use std::convert::Infallible;

use dataplane::{Link, Network};
use tokio::sync::watch;

use crate::agent::supervisor::Failure;
use crate::ports::{Hotplug, PortStates, af_packet};
use crate::settings::PortSettings;

/// The task that attaches and detaches devices, and observes ports. Cloned for each start.
#[derive(Clone)]
pub(super) struct PortMonitor {
    /// The devices.
    pub(super) hotplug: Hotplug,
    /// Output.
    pub(super) port_states: watch::Sender<PortStates>,
}

impl PortMonitor {
    /// Runs until its future is dropped.
    ///
    /// # Errors
    /// Never.
    pub(super) async fn run(self) -> Result<Infallible, Failure> {
        Ok(self.hotplug.run(self.port_states).await)
    }
}

/// The task that merges the network. Cloned for each start.
#[derive(Clone, Debug)]
pub(super) struct NetworkMerge {
    /// The tables of Linux.
    pub(super) linux: watch::Receiver<Network>,
    /// The states of the ports.
    pub(super) port_states: watch::Receiver<PortStates>,
    /// Static entries of the configuration.
    pub(super) fixed: Network,
    /// The ports of the configuration.
    pub(super) ports: Vec<PortSettings>,
    /// Output.
    pub(super) network: watch::Sender<Network>,
}

impl NetworkMerge {
    /// Merges the network, again after each change.
    ///
    /// # Errors
    /// If a sender is dropped.
    pub(super) async fn run(self) -> Result<(), Failure> {
        let Self { mut linux, mut port_states, fixed, ports: settings, network } = self;
        let mut warned = BTreeSet::new();
        loop {
            tokio::select! {
                changed = linux.changed() => changed?,
                changed = port_states.changed() => changed?,
            }
            let mut merged = linux.borrow_and_update().clone();
            merged.routes.extend(&fixed.routes);
            merged.neighbours.extend(&fixed.neighbours);
            merged.addresses.extend(&fixed.addresses);
            // A VLAN device of Linux takes precedence over a static link with the same tags.
            let missing: Vec<_> =
                fixed.vlans.iter().filter(|vlan| merged.vlans.iter().all(|known| known.link != vlan.link)).collect();
            merged.vlans.extend(missing.into_iter().cloned());
            merged.vlans.sort_by_key(|vlan| vlan.link);
            warn_of_changed_tags(&merged, &settings, &mut warned);
            merged.interfaces = merged.interfaces.or_else(|| fixed.interfaces.clone());
            let ports = port_states.borrow_and_update().clone();
            (merged.down, merged.moves, merged.macs) = (ports.down, ports.moves, ports.macs);
            network.send_replace(merged);
        }
    }
}

/// Warns once of each link that receives nothing, because the driver of its port changes the outer tag. There are at most
/// as many links as VLAN devices are followed.
fn warn_of_changed_tags(network: &Network, ports: &[PortSettings], warned: &mut BTreeSet<Link>) {
    for link in network.vlans.iter().map(|vlan| vlan.link) {
        let Some(port) = ports.get(usize::from(link.port().0)) else { continue };
        if af_packet::changes_outer_tag(&port.device, link) && warned.insert(link) {
            let (port, tags) = (&port.name, link.vlan());
            tracing::warn!(port, %tags, "frames of this link do not arrive: the driver of af_packet replaces an outer 802.1ad tag by 802.1Q; use 802.1Q tags, or a port of another driver");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Settings, SourceChoice};

    #[test]
    fn each_link_whose_outer_tag_changes_is_warned_of_once() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "ports:\n  - {name: a, device: 'net_af_packet0,iface=eth1', addresses: [192.0.2.2/24]}\n\
                    \x20 - {name: b, device: net_tap1, addresses: [10.0.0.2/24]}\n\
                    workers: {cores: [3]}\nsnat: {addresses: [10.0.0.3]}\nstatic:\n  links:\n\
                    \x20   - {port: a, tags: [802.1ad:7, 200], addresses: [10.7.0.2/24]}\n\
                    \x20   - {port: a, tags: [8, 200], addresses: [10.8.0.2/24]}\n\
                    \x20   - {port: b, tags: [802.1ad:7, 200], addresses: [10.9.0.2/24]}\n";
        std::fs::write(file.path(), text).unwrap();
        let settings = Settings::read(file.path(), &SourceChoice::Replay("/".into())).unwrap();
        let (network, mut warned) = (settings.fixed_network(), BTreeSet::new());
        for _ in 0..2 {
            warn_of_changed_tags(&network, &settings.ports, &mut warned);
            let links: Vec<_> = warned.iter().map(|link: &Link| (link.port().0, link.vlan().to_string())).collect();
            assert_eq!(links, [(0, "7.200".to_owned())]);
        }
    }
}
