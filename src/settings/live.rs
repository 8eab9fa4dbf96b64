//! Live keys, which a reload applies, and keys that wait for the next start.
//!
//! Invariant: an address by which flows exist stays: SNAT addresses keep their positions, others are added after them, as
//! far as there is room.
//! Not here: the channels of the new values (`reload`).

use std::net::IpAddr;
use std::path::Path;

use control::config::settings::{ControllerSettings, Source};
use dataplane::flow::SNAT_ADDRESSES_MAX;
use dataplane::{FlowLimits, Tunables};
use proto::{GatewayProfile, GroupKey};

use super::{Replication, Settings, StateSource};

impl Settings {
    /// The part that the engine takes over while it forwards.
    #[must_use]
    pub fn tunables(&self) -> Tunables {
        let Self { snat, node_port_addresses, flows, targets_max, .. } = self;
        let (snat, node_port_addresses, flows) = (snat.clone(), node_port_addresses.clone(), flows.clone());
        Tunables { snat, node_port_addresses, flows, targets_max: *targets_max }
    }

    /// The keys of `fleet.key`, the preferred one first; none without such a file.
    #[must_use]
    pub fn fleet_keys(&self) -> Vec<GroupKey> {
        let file = self.replication.as_ref().and_then(|replication| replication.key.as_ref());
        file.map(|file| file.keys.clone()).unwrap_or_default()
    }

    /// The settings of a gateway that runs with these and has read `new`: what can change has changed.
    #[must_use]
    pub fn reloaded(&self, new: &Self) -> Self {
        let mut next = Self {
            logs: new.logs,
            flows: FlowLimits { max_per_worker: self.flows.max_per_worker, ..new.flows.clone() },
            targets_max: new.targets_max,
            node_port_addresses: new.node_port_addresses.clone(),
            snat: with_more(&self.snat, &new.snat),
            replication: self.reloaded_replication(new),
            ..self.clone()
        };
        let added = next.snat.iter().chain(&next.node_port_addresses);
        let own = self.profile.own.iter().chain(added).copied();
        next.profile = GatewayProfile {
            serves_node_ports: Some(!next.node_port_addresses.is_empty()),
            prefixes: self.profile.prefixes.clone(),
            max_state_age: self.profile.max_state_age,
            ..GatewayProfile::new(own, self.profile.next_hops.iter().copied())
        };
        next.source = self.reloaded_source(new, &next.profile);
        next
    }

    /// The keys of the file of `new`. A gateway with the keys of its controller takes those of a file at its next start.
    fn reloaded_replication(&self, new: &Self) -> Option<Replication> {
        let mut next = self.replication.clone()?;
        if let (Some(key), Some(Replication { key: Some(new), .. })) = (&mut next.key, &new.replication) {
            key.clone_from(new);
        }
        Some(next)
    }

    fn reloaded_source(&self, new: &Self, profile: &GatewayProfile) -> StateSource {
        let StateSource::Embedded(old, tls) = &self.source else { return self.source.clone() };
        // The gateway itself is connected to the socket, a source of another kind needs other tasks, and another directory
        // cannot be written to (`commands::run::privileges`): all need a restart.
        let next = match &new.source {
            StateSource::Embedded(new, _)
                if old.listen == new.listen && is_writable(status_dir(new), status_dir(old), &self.state_dir) =>
            {
                new
            }
            _ => old,
        };
        let controller = ControllerSettings { profile: profile.clone(), ..ControllerSettings::clone(next) };
        StateSource::Embedded(Box::new(controller), tls.clone())
    }
}

/// The SNAT addresses `old`, and behind them those of `new` for which each family has room.
fn with_more(old: &[IpAddr], new: &[IpAddr]) -> Vec<IpAddr> {
    let mut all = old.to_vec();
    for address in new {
        let of_family = all.iter().filter(|other| other.is_ipv4() == address.is_ipv4()).count();
        if of_family < usize::from(SNAT_ADDRESSES_MAX) && !all.contains(address) {
            all.push(*address);
        }
    }
    all
}

fn status_dir(controller: &ControllerSettings) -> Option<&Path> {
    match &controller.source {
        Source::Manifests { status_dir, .. } => Some(status_dir),
        Source::Kubernetes { .. } => None,
    }
}

/// Whether a gateway that was started with these directories may write to a new one.
fn is_writable(new: Option<&Path>, old: Option<&Path>, state_dir: &Path) -> bool {
    new.is_none_or(|new| new.starts_with(state_dir) || old.is_some_and(|old| new.starts_with(old)))
}
