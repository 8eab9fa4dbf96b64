//! The network that the engine forwards by: tables of Linux, static entries of the configuration, and ports without link.
//!
//! Not here: how Linux's tables are followed (`netlink`), and the states of ports (`ports`).

use dataplane::Network;
use tokio::sync::watch;

use crate::agent::supervisor::Failure;
use crate::ports::PortStates;

/// Merges the network, again after each change.
///
/// # Errors
/// If a sender is dropped.
pub(super) async fn merge(
    mut linux: watch::Receiver<Network>,
    mut ports: watch::Receiver<PortStates>,
    network: watch::Sender<Network>,
    fixed: Network,
) -> Result<(), Failure> {
    loop {
        tokio::select! {
            changed = linux.changed() => changed?,
            changed = ports.changed() => changed?,
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
        merged.interfaces = merged.interfaces.or_else(|| fixed.interfaces.clone());
        let ports = ports.borrow_and_update().clone();
        (merged.down, merged.moves, merged.macs) = (ports.down, ports.moves, ports.macs);
        network.send_replace(merged);
    }
}
