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

/// A kind of packets that devices may hash by addresses and ports, each apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashedKind {
    /// TCP over IPv4.
    TcpV4,
    /// UDP over IPv4.
    UdpV4,
    /// TCP over IPv6.
    TcpV6,
    /// UDP over IPv6.
    UdpV6,
}

/// The kinds of a set of `SLUICE_HASHES_`.
fn kinds_of(hashes: u32) -> Vec<HashedKind> {
    let kinds = [
        (raw::SLUICE_HASHES_TCP_V4, HashedKind::TcpV4),
        (raw::SLUICE_HASHES_UDP_V4, HashedKind::UdpV4),
        (raw::SLUICE_HASHES_TCP_V6, HashedKind::TcpV6),
        (raw::SLUICE_HASHES_UDP_V6, HashedKind::UdpV6),
    ];
    kinds.into_iter().filter(|(bit, _)| hashes & bit != 0).map(|(_, kind)| kind).collect()
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
    /// The device hashes neither TCP nor UDP with their ports, or not with our key.
    #[error("{driver} offers no Toeplitz hash over TCP and UDP")]
    NoHash {
        /// The driver.
        driver: String,
    },
    /// The device refused the table, the key or the hashes, or reports other ones.
    #[error("{driver} does not take {part}: {reason}")]
    Refused {
        /// The driver.
        driver: String,
        /// What it refused.
        part: RefusedPart,
        /// The cause.
        reason: String,
    },
}

/// The part of receive side scaling that a device refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusedPart {
    /// The queues for the low bits of the hash.
    #[error("a redirection table of {entries} entries")]
    Table {
        /// Entries of the table.
        entries: u16,
    },
    /// The key of the hash.
    #[error("the RSS key")]
    Key,
    /// The kinds of packets that are hashed.
    #[error("the RSS hashes over TCP and UDP")]
    Hashes,
}

/// The refused part, and why: an error of the driver, or 1 if the device reports something else than was set.
fn refused(driver: String, part: i32, entries: u16, code: i32) -> NoSpread {
    let parts = [
        (raw::SLUICE_SPREAD_TABLE, RefusedPart::Table { entries }),
        (raw::SLUICE_SPREAD_KEY, RefusedPart::Key),
        (raw::SLUICE_SPREAD_HASHES, RefusedPart::Hashes),
    ];
    let named = parts.into_iter().find(|(number, _)| i32::try_from(*number) == Ok(part));
    let part = named.map_or(RefusedPart::Table { entries }, |(_, part)| part);
    let reason = if code > 0 { "it reports another one than was set".into() } else { raw::error_text(code) };
    NoSpread::Refused { driver, part, reason }
}

/// Entries of the table to be set on a device that reports `reported` of them. mlx5 reports as many as it has queues,
/// where that is a power of two, and takes any size; other drivers refuse every size but their own, or fill only a part
/// of their table.
fn table_entries(reported: u16) -> u16 {
    let entries = u16::try_from(raw::SLUICE_RETA_ENTRIES).unwrap_or(u16::MAX);
    if reported > 0 && reported.is_multiple_of(entries) { reported } else { entries }
}

/// Configures the distribution over the queues of a started port, and reads back whether the device uses it, and for which
/// kinds of packets. `setup` is the result of its configuration, in which `wanted_queues` were requested.
pub(super) fn distribute(
    port: &OwnedPort,
    driver: &str,
    spread: Option<&Spread>,
    wanted_queues: u16,
    setup: &raw::sluice_port_setup,
) -> Result<Vec<HashedKind>, NoSpread> {
    let driver = || driver.to_owned();
    let spread = spread.ok_or(NoSpread::NotAsked)?;
    if setup.rx_queues < wanted_queues {
        return Err(NoSpread::Queues { driver: driver(), found: setup.rx_queues });
    }
    if setup.spreads == 0 {
        return Err(NoSpread::NoHash { driver: driver() });
    }
    // SAFETY: the port is started.
    let entries = table_entries(unsafe { raw::sluice_port_table_entries(port.id) });
    let mut part = 0;
    // SAFETY: the port is started; key and table have the expected lengths and outlive the call; `part` is written only
    // in this call.
    match unsafe { raw::sluice_port_spread(port.id, spread.key.as_ptr(), spread.queues.as_ptr(), entries, &raw mut part) } {
        // SAFETY: the port is started.
        0 => Ok(kinds_of(unsafe { raw::sluice_port_hashes(port.id) })),
        code => Err(refused(driver(), part, entries, code)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_hashes_the_kinds_that_it_says_and_no_others() {
        assert_eq!(kinds_of(0), []);
        assert_eq!(kinds_of(raw::SLUICE_HASHES_TCP_V4 | raw::SLUICE_HASHES_TCP_V6), [HashedKind::TcpV4, HashedKind::TcpV6]);
        assert_eq!(kinds_of(u32::MAX).len(), 4);
    }

    #[test]
    fn the_message_names_the_part_that_the_card_refused() {
        let text = |part: u32, code| refused("net_e1000_igb".into(), part.try_into().unwrap(), 128, code).to_string();
        let rows = [
            (raw::SLUICE_SPREAD_TABLE, -libc::EINVAL, "a redirection table of 128 entries: Invalid argument"),
            (raw::SLUICE_SPREAD_KEY, 1, "the RSS key: it reports another one than was set"),
            (raw::SLUICE_SPREAD_HASHES, -libc::ENOTSUP, "the RSS hashes over TCP and UDP: "),
        ];
        for (part, code, expected) in rows {
            assert!(text(part, code).contains(expected), "{}", text(part, code));
        }
    }

    #[test]
    fn a_card_that_reports_as_many_entries_as_queues_is_offered_128() {
        let rows =
            [("mlx5 with two queues", 2, 128), ("mlx5 with 16", 16, 128), ("igb", 128, 128), ("ice", 512, 512), ("none", 0, 128)];
        for (sentence, reported, expected) in rows {
            assert_eq!(table_entries(reported), expected, "{sentence}");
        }
    }
}
