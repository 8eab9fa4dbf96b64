//! What is seen of the gateways.

use std::collections::BTreeSet;

use proto::ServiceName;
use tokio::time::Instant;

use crate::gateways::Gateways;

/// The connected gateways.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) gateways: &'a Gateways,
    /// Since when none is connected; none: one is.
    pub(super) absent_since: Option<Instant>,
    /// Those that nobody waits for.
    pub(super) drained: &'a BTreeSet<String>,
}

impl View<'_> {
    /// Whether every gateway that is waited for forwards by `counter` or a newer generation. Where all are drained, it is
    /// all of them: a VIP is not told before anybody forwards for it.
    pub(super) fn all_reached(&self, counter: u64) -> bool {
        let mut awaited = self.gateways.iter().filter(|gateway| !self.drained.contains(&gateway.name)).peekable();
        if awaited.peek().is_none() {
            return self.gateways.all_reached(counter);
        }
        awaited.all(|gateway| gateway.acknowledged >= Some(counter))
    }

    /// Whether any gateway finds any backend of a Service healthy; none: no gateway has told yet. What a gateway told that
    /// knew of no backend is from before there was one.
    pub(super) fn has_healthy_backend(&self, service: &ServiceName) -> Option<bool> {
        let told = self.gateways.iter().filter_map(|gateway| gateway.health.get(service));
        let told = told.filter(|health| health.backends > 0);
        told.map(|health| health.healthy > 0).reduce(|one, other| one || other)
    }
}
