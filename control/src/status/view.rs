//! What is seen of the gateways.

use proto::ServiceName;
use tokio::time::Instant;

use crate::gateways::Gateways;

/// The connected gateways.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) gateways: &'a Gateways,
    /// Since when none is connected; none: one is.
    pub(super) absent_since: Option<Instant>,
}

impl View<'_> {
    /// Whether any gateway finds any backend of a Service healthy; none: no gateway has told yet.
    pub(super) fn has_healthy_backend(&self, service: &ServiceName) -> Option<bool> {
        let told = self.gateways.iter().filter_map(|gateway| gateway.health.get(service));
        told.map(|health| health.healthy > 0).reduce(|one, other| one || other)
    }
}
