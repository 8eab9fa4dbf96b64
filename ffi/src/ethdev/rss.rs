//! Receive side scaling (RSS): the distribution of received packets over the queues of a port.

use super::owned_port::OwnedPort;
use crate::raw;

/// Receive side scaling: the key of the Toeplitz hash, and the queues for its low seven bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spread {
    /// The key.
    pub key: [u8; raw::SLUICE_RSS_KEY_BYTES as usize],
    /// The queues, each below [`crate::PortConfig::queues`].
    pub queues: [u16; raw::SLUICE_RETA_ENTRIES as usize],
}

/// Why a device does not distribute received packets as configured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSpread {
    /// It was not configured.
    #[error("not asked for")]
    NotAsked,
    /// There are fewer receive queues than workers.
    #[error("{driver} has {found} receive queues")]
    Queues {
        /// The driver.
        driver: String,
        /// Number of its receive queues.
        found: u16,
    },
    /// The device does not hash TCP and UDP of both address families, or not with our key.
    #[error("{driver} offers no Toeplitz hash over TCP and UDP")]
    NoHash {
        /// The driver.
        driver: String,
    },
    /// The device refused the table, or does not report it.
    #[error("{driver} does not take a redirection table: {reason}")]
    NoTable {
        /// The driver.
        driver: String,
        /// The cause.
        reason: String,
    },
}

/// Configures the distribution over the queues of a started port, and reads back whether the device uses it. `setup` is
/// the result of its configuration, in which `wanted_queues` were requested.
pub(super) fn distribute(
    port: &OwnedPort,
    driver: &str,
    spread: Option<&Spread>,
    wanted_queues: u16,
    setup: &raw::sluice_port_setup,
) -> Result<(), NoSpread> {
    let driver = || driver.to_owned();
    let spread = spread.ok_or(NoSpread::NotAsked)?;
    if setup.rx_queues < wanted_queues {
        return Err(NoSpread::Queues { driver: driver(), found: setup.rx_queues });
    }
    if setup.spreads == 0 {
        return Err(NoSpread::NoHash { driver: driver() });
    }
    // SAFETY: the port is started; key and table have the expected lengths and outlive the call.
    match unsafe { raw::sluice_port_spread(port.id, spread.key.as_ptr(), spread.queues.as_ptr()) } {
        0 => Ok(()),
        code => Err(NoSpread::NoTable { driver: driver(), reason: raw::error_text(code) }),
    }
}
