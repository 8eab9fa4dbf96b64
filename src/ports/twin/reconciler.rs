//! Reconciles the twin of a port while the gateway runs: it has the port's Ethernet address and link state, and is
//! created again after it was deleted.
//!
//! Invariant: a failure at one twin is retried later, and does not affect other ports. Deliberately not here:
//! routes over a twin, which Linux removes when the twin is deleted, and which the operator must add again.

use dataplane::Mac;
use tokio::time::Instant;

use super::interface::{Interface, TwinConfig, TwinError};
use super::thread::NewTap;
use crate::ports::retry::Retry;

/// The part of a twin's state that follows its port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TwinState {
    mac: Option<Mac>,
    carrier: bool,
}

/// The twin of one port.
pub(in crate::ports) struct TwinReconciler {
    config: TwinConfig,
    /// `None`: it was deleted.
    interface: Option<Interface>,
    wanted: TwinState,
    /// The state that was applied last; `None`: unknown.
    applied: Option<TwinState>,
    tap: NewTap,
    retry: Retry,
}

impl TwinReconciler {
    /// For a twin that was just created.
    pub(in crate::ports) fn new(config: TwinConfig, interface: Interface, tap: NewTap) -> Self {
        let wanted = TwinState { mac: config.mac, carrier: false };
        Self { config, interface: Some(interface), wanted, applied: None, tap, retry: Retry::default() }
    }

    /// Sets the Ethernet address of the port, for the next [`TwinReconciler::reconcile`].
    pub(in crate::ports) fn want_mac(&mut self, mac: Mac) {
        (self.wanted.mac, self.config.mac) = (Some(mac), Some(mac));
    }

    /// Sets the link of the port, for the next [`TwinReconciler::reconcile`].
    pub(in crate::ports) fn want_carrier(&mut self, is_up: bool) {
        self.wanted.carrier = is_up;
    }

    /// Applies the wanted state where it differs, and creates the twin again if it was deleted.
    pub(in crate::ports) async fn reconcile(&mut self) {
        let interface = &self.config.name;
        if self.interface.as_ref().is_some_and(Interface::is_gone) {
            tracing::warn!(interface, "the twin was deleted; it is created again, without the routes over it");
            (self.interface, self.applied) = (None, None);
        }
        if self.applied == Some(self.wanted) || !self.retry.is_due(Instant::now()) {
            return;
        }
        match self.apply().await {
            Ok(()) => self.retry = Retry::default(),
            Err(error) => {
                self.retry.failed(Instant::now());
                tracing::warn!(interface = self.config.name, %error, "the twin cannot be configured; retrying");
            }
        }
    }

    async fn apply(&mut self) -> Result<(), TwinError> {
        let interface = match &mut self.interface {
            Some(interface) => interface,
            None => {
                let (interface, tap) = Interface::open(&self.config).await?;
                self.tap.give(tap);
                tracing::info!(interface = self.config.name, "the twin was created again");
                self.interface.insert(interface)
            }
        };
        if let Some(mac) = self.wanted.mac.filter(|mac| self.applied.is_none_or(|applied| applied.mac != Some(*mac))) {
            interface.set_mac(mac).await?;
        }
        interface.set_carrier(self.wanted.carrier).await?;
        self.applied = Some(self.wanted);
        Ok(())
    }
}
