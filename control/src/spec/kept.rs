//! What a typing error must not change: a wish that cannot be read leaves in force what was wished before.
//!
//! Invariant: only what a person may mistype without any harm is here. What decides who may connect or what a backend
//! receives is an error of its own (`SpecError`). After a restart of the controller nothing is known of before: then the
//! default counts, and an address stays because the status holds it.

use super::service::ServiceSpec;

/// What becomes of a value that cannot be read.
pub(super) const STAYS: &str = "what was in force stays, else the default";

/// A wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unread {
    /// Addresses by name.
    Addresses,
    /// A pool by name.
    Pool,
    /// Whether an address is exchanged.
    Readdress,
    /// With whom addresses are shared.
    Sharing,
    /// How backends are chosen.
    Scheduler,
    /// What the status says of the VIP.
    IpMode,
    /// What a probe speaks.
    Probe,
    /// The port that is probed.
    HealthPort,
    /// Time between probes.
    Interval,
    /// How long a probe may take.
    Timeout,
    /// Passed probes that make a target healthy.
    Rise,
    /// Failed probes that make a target unhealthy.
    Fall,
    /// How long flows of a removed backend go on.
    DrainTimeout,
    /// How long a flow may be idle.
    IdleTimeout,
}

impl ServiceSpec {
    /// Takes over from `before` what this asks for in words that cannot be read.
    pub fn keep(&mut self, before: &Self) {
        for what in self.unread.clone() {
            match what {
                Unread::Addresses => self.addresses.clone_from(&before.addresses),
                Unread::Pool => self.pool.clone_from(&before.pool),
                Unread::Readdress => self.readdress = before.readdress,
                Unread::Sharing => self.sharing.clone_from(&before.sharing),
                Unread::Scheduler => self.scheduler = before.scheduler,
                Unread::IpMode => self.ip_mode = before.ip_mode,
                Unread::Probe => self.health.probe = before.health.probe,
                Unread::HealthPort => self.health.port = before.health.port,
                Unread::Interval => self.health.interval = before.health.interval,
                Unread::Timeout => self.health.timeout = before.health.timeout,
                Unread::Rise => self.health.rise = before.health.rise,
                Unread::Fall => self.health.fall = before.health.fall,
                Unread::DrainTimeout => self.drain_timeout = before.drain_timeout,
                Unread::IdleTimeout => self.idle_timeout = before.idle_timeout,
            }
        }
        // The Service may have lost a family since.
        self.addresses.retain(|address| self.families.contains(&proto::Family::of(*address)));
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;
    use proto::ServiceName;
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::source::Change;
    use crate::world::World;

    fn annotate(world: &mut World, uid: &str, pairs: &[(&str, &str)]) -> ServiceSpec {
        let annotations: Map<String, Value> = pairs.iter().map(|(k, v)| (format!("sluice.dev/{k}"), (*v).into())).collect();
        let object = json!({"metadata": {"name": "a", "namespace": "shop", "uid": uid, "annotations": annotations},
            "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]}});
        world.apply(Change::ServiceApplied(Box::new(serde_json::from_value::<Service>(object).unwrap())));
        world.services()[&ServiceName::new("shop", "a")].candidate.wanted.clone().unwrap()
    }

    #[test]
    fn a_typing_error_leaves_in_force_what_was() {
        let good = [("addresses", "192.0.2.9"), ("health-check", "none"), ("scheduler", "rr"), ("idle-timeout", "5m")];
        let bad = [("addresses", "192.0.2.900"), ("health-check", "http"), ("scheduler", "dice"), ("idle-timeout", "5")];
        let mut world = World::default();
        let before = annotate(&mut world, "u", &good);
        // The second time as with any later event of the object.
        for _ in 0..2 {
            let now = annotate(&mut world, "u", &bad);
            assert_eq!((&now.addresses, &now.health), (&before.addresses, &before.health));
            assert_eq!((now.scheduler, now.idle_timeout), (before.scheduler, before.idle_timeout));
            assert_eq!((now.unread.len(), now.notes.len()), (4, 4), "{:?}", now.notes);
        }
        assert!(annotate(&mut world, "other", &bad).addresses.is_empty(), "another Service of that name");
        annotate(&mut world, "u", &good);
        assert!(annotate(&mut world, "u", &[]).addresses.is_empty(), "taken back");
    }
}
