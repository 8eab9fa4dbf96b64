//! The twin of a port while the gateway runs: it gets the port's Ethernet address and follows its link, and one that somebody
//! deleted is made again.
//!
//! Invariant: what goes wrong with one twin is tried again at a later look, and touches no other port. Deliberately not here:
//! routes over a twin, which go when it is deleted, and which are the operator's to put again.

use dataplane::Mac;
use tokio::time::Instant;

use super::interface::{Interface, TwinConfig, TwinError};
use super::thread::NewTap;
use crate::ports::hotplug::Retry;

/// What of a twin follows its port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Shape {
    mac: Option<Mac>,
    carrier: bool,
}

/// The twin of one port.
pub(in crate::ports) struct AttendedTwin {
    config: TwinConfig,
    /// None: it is gone.
    interface: Option<Interface>,
    /// What it is to be.
    wanted: Shape,
    /// What it was made; none: that is not known.
    made: Option<Shape>,
    tap: NewTap,
    retry: Retry,
}

impl AttendedTwin {
    /// A twin that was just made.
    pub(in crate::ports) fn new(config: TwinConfig, interface: Interface, tap: NewTap) -> Self {
        let wanted = Shape { mac: config.mac, carrier: false };
        Self { config, interface: Some(interface), wanted, made: None, tap, retry: Retry::new() }
    }

    /// The Ethernet address of its port, from the next look on.
    pub(in crate::ports) fn want_mac(&mut self, mac: Mac) {
        (self.wanted.mac, self.config.mac) = (Some(mac), Some(mac));
    }

    /// The link of its port, from the next look on.
    pub(in crate::ports) fn want_carrier(&mut self, is_up: bool) {
        self.wanted.carrier = is_up;
    }

    /// One look: makes it as it is to be, and makes it at all when it is gone.
    pub(in crate::ports) async fn look(&mut self) {
        if self.interface.as_ref().is_some_and(|interface| !interface.stands()) {
            tracing::warn!(
                interface = self.config.name,
                "the twin was deleted; it is made again, without routes that led over it"
            );
            (self.interface, self.made) = (None, None);
        }
        if self.made == Some(self.wanted) || !self.retry.is_due(Instant::now()) {
            return;
        }
        match self.make().await {
            Ok(()) => self.retry = Retry::new(),
            Err(error) => {
                self.retry.failed(Instant::now());
                tracing::warn!(interface = self.config.name, %error, "the twin is not as it should be; it is tried again");
            }
        }
    }

    async fn make(&mut self) -> Result<(), TwinError> {
        let interface = match &mut self.interface {
            Some(interface) => interface,
            None => {
                let (interface, tap) = Interface::open(&self.config).await?;
                self.tap.give(tap);
                tracing::info!(interface = self.config.name, "the twin was made again");
                self.interface.insert(interface)
            }
        };
        if let Some(mac) = self.wanted.mac.filter(|mac| self.made.is_none_or(|made| made.mac != Some(*mac))) {
            interface.set_mac(mac).await?;
        }
        interface.set_carrier(self.wanted.carrier).await?;
        self.made = Some(self.wanted);
        Ok(())
    }
}
