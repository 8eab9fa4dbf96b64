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
