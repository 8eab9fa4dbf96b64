//! The settings of a controller in tests.

use control::config::settings::{ControllerSettings, Defaults, Listen, MaglevSeed, OwnershipRules, Source};
use objects::PoolSpec;
use proto::limits::DRAIN_TIMEOUT;
use proto::{HealthCheck, Mode, Scheduler};

/// The default settings, with a pool of these addresses.
pub(crate) fn settings(source: Source, pool: &[&str]) -> ControllerSettings {
    ControllerSettings {
        listen: Listen::default(),
        group: "default".to_owned(),
        source,
        load_balancer_class: "sluice.dev/gateway".to_owned(),
        ownership: OwnershipRules::default(),
        defaults: Defaults { mode: Mode::Nat, scheduler: Scheduler::Maglev, drain_timeout: DRAIN_TIMEOUT },
        health: HealthCheck::default(),
        maglev_seed: MaglevSeed::default(),
        backends_allowed: None,
        cluster_cidrs: Vec::new(),
        pools: vec![PoolSpec::new("default", pool.iter().map(|range| range.parse().unwrap()).collect())],
        profile: proto::GatewayProfile::default(),
        lock_dir: None,
    }
}
