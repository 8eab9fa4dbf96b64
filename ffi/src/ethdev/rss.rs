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

/// How a device distributes received packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spreading {
    /// The kinds of packets that it hashes with their ports.
    pub kinds: Vec<HashedKind>,
    /// Entries of its redirection table.
    pub table_entries: u16,
}

/// Why a device does not distribute received packets as configured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSpread {
    /// It was not configured.
    #[error("not asked for")]
    NotAsked,
    /// There are fewer receive queues than workers.
    #[error("{driver} has {found} receive queue{}", if *found == 1 { "" } else { "s" })]
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

/// Entries of the smallest redirection table that is set besides those of 128: no driver is known with a smaller one.
const ENTRIES_MIN: u16 = 64;

/// Entries of the table to be set on a device that reports `reported` of them (docs/internals/decisions/0158). A larger
/// table than the 128 `queues` repeats them. A smaller one is what they repeat, or does not lead where they lead. mlx5
/// reports as many entries as it has queues, where that is a power of two, and takes any number; other drivers refuse
/// every size but their own, or fill only a part of their table.
fn table_entries(queues: &[u16; raw::SLUICE_RETA_ENTRIES as usize], reported: u16) -> u16 {
    let all = u16::try_from(queues.len()).unwrap_or(u16::MAX);
    let repeats = |entries: u16| queues.iter().zip(&queues[usize::from(entries)..]).all(|(one, other)| one == other);
    let is_larger = reported > 0 && reported.is_multiple_of(all);
    let is_repeated = (ENTRIES_MIN..all).contains(&reported) && all.is_multiple_of(reported) && repeats(reported);
    if is_larger || is_repeated { reported } else { all }
}

/// Configures the distribution over the queues of a started port, and reads back whether the device uses it, and for which
/// kinds of packets. `setup` is the result of its configuration, in which `wanted_queues` were requested.
pub(super) fn distribute(
    port: &OwnedPort,
    driver: &str,
    spread: Option<&Spread>,
    wanted_queues: u16,
    setup: &raw::sluice_port_setup,
) -> Result<Spreading, NoSpread> {
    let driver = || driver.to_owned();
    let spread = spread.ok_or(NoSpread::NotAsked)?;
    if setup.rx_queues < wanted_queues {
        return Err(NoSpread::Queues { driver: driver(), found: setup.rx_queues });
    }
    if setup.spreads == 0 {
        return Err(NoSpread::NoHash { driver: driver() });
    }
    // SAFETY: the port is started.
    let table_entries = table_entries(&spread.queues, unsafe { raw::sluice_port_table_entries(port.id) });
    let (key, queues, mut part) = (spread.key.as_ptr(), spread.queues.as_ptr(), 0);
    // SAFETY: the port is started; key and table have the expected lengths and outlive the call; `part` is written only
    // in this call.
    match unsafe { raw::sluice_port_spread(port.id, key, queues, table_entries, &raw mut part) } {
        // SAFETY: the port is started.
        0 => Ok(Spreading { kinds: kinds_of(unsafe { raw::sluice_port_hashes(port.id) }), table_entries }),
        code => Err(refused(driver(), part, table_entries, code)),
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
    fn a_card_gets_the_table_that_it_reports_if_that_leads_packets_where_128_entries_do() {
        let queues = |workers: u16| std::array::from_fn(|entry| u16::try_from(entry).unwrap() % workers);
        let rows = [
            ("mlx5 with two queues", 2, 2, 128),
            ("mlx5 with 16", 16, 16, 128),
            ("igb", 2, 128, 128),
            ("ice", 3, 512, 512),
            ("cnxk, bnxt on a chip P5, virtual functions", 2, 64, 64),
            ("the same for three workers: entries 0 and 64 differ", 3, 64, 128),
            ("vmxnet3 with two queues", 2, 8, 128),
            ("none", 2, 0, 128),
        ];
        for (sentence, workers, reported, expected) in rows {
            assert_eq!(table_entries(&queues(workers), reported), expected, "{sentence}");
        }
    }
}
