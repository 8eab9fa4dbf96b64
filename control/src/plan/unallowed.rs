//! Services whose `externalIPs` are not served because none is allowed, and that are not ours otherwise. The reason goes
//! to the log and not to an Event, because in most clusters another product serves them.

use std::collections::BTreeSet;

use proto::ServiceName;

use crate::config::settings::ControllerSettings;
use crate::world::World;
use objects::Kind;

/// Services already logged.
#[derive(Debug, Default)]
pub(crate) struct Unallowed {
    told: BTreeSet<ServiceName>,
    /// The revision of the world that was examined last.
    seen: u64,
}

impl Unallowed {
    /// Logs each new one and returns them.
    pub(crate) fn look(&mut self, world: &World, settings: &ControllerSettings) -> Vec<ServiceName> {
        let since = std::mem::replace(&mut self.seen, world.revision());
        if !settings.ownership.external_ips_allowed.is_empty() {
            return Vec::new();
        }
        let asks = |name: &&ServiceName| {
            let candidate = world.services().get(*name).map(|entry| &entry.candidate);
            let is_other = candidate.filter(|candidate| candidate.kind == Kind::ClusterIp);
            is_other.is_some_and(|candidate| candidate.wanted.as_ref().is_ok_and(|spec| !spec.external_ips.is_empty()))
        };
        self.told.retain(|name| world.services().contains_key(name));
        let new: Vec<ServiceName> =
            world.changed_since(since).filter(asks).filter(|name| !self.told.contains(*name)).cloned().collect();
        for service in &new {
            tracing::info!(%service, "spec.externalIPs has no effect: none is allowed (`externalIPs.allowed`)");
        }
        self.told.extend(new.iter().cloned());
        new
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;
    use serde_json::json;

    use super::*;
    use crate::plan::tests::settings;
    use crate::world::change::Change;

    fn service(name: &str, kind: &str, ips: &[&str]) -> Change {
        let object = json!({"metadata": {"name": name, "namespace": "shop"},
            "spec": {"type": kind, "externalIPs": ips, "ports": [{"port": 80}]}});
        Change::ServiceApplied(Box::new(serde_json::from_value::<Service>(object).unwrap()))
    }

    #[test]
    fn external_ips_of_a_cluster_ip_service_are_told_of_once_while_none_is_allowed() {
        let (mut world, mut unallowed, mut settings) = (World::default(), Unallowed::default(), settings());
        world.apply(service("inner", "ClusterIP", &["192.0.2.9"]));
        world.apply(service("outer", "LoadBalancer", &["192.0.2.9"]));
        assert_eq!(unallowed.look(&world, &settings), [ServiceName::new("shop", "inner")], "the other is told as ours");
        world.apply(service("inner", "ClusterIP", &["192.0.2.10"]));
        assert_eq!(unallowed.look(&world, &settings), []);
        settings.ownership.external_ips_allowed = vec!["192.0.2.0/24".parse().unwrap()];
        world.apply(service("next", "ClusterIP", &["192.0.2.11"]));
        assert_eq!(unallowed.look(&world, &settings), []);
    }
}
