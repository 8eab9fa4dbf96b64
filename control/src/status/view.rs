//! A view of the connected gateways.

use proto::ServiceName;
use tokio::time::Instant;

use crate::gateways::registry::Gateways;

/// The connected gateways.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) gateways: &'a Gateways,
    /// Since when no gateway is connected; `None` while one is.
    pub(super) absent_since: Option<Instant>,
}

impl View<'_> {
    /// Whether any gateway reports a healthy backend of a Service; `None` if no gateway has reported yet. Reports of gateways
    /// that knew no backend do not count, because they are older than the first backend.
    pub(super) fn has_healthy_backend(&self, service: &ServiceName) -> Option<bool> {
        let told = self.gateways.iter().filter_map(|gateway| gateway.health.get(service));
        let told = told.filter(|health| health.backends > 0);
        told.map(|health| health.healthy > 0).reduce(|one, other| one || other)
    }
}
