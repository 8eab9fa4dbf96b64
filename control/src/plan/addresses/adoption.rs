//! Adoption of addresses from the Services' statuses and the checkpoint when a controller starts (CONTROL section 6).
//!
//! Invariant: an address in a status is not adopted if it lies outside our pools and sluice did not write it, or if
//! another Service holds it. The address of a gateway or a node is adopted only if the checkpoint confirms that it was
//! served: it was there first, and the running leader would keep it, too. A mere reservation for another Service counts only
//! against what sluice did not allocate. The owner gets an Event for each address that is not adopted.

use std::collections::BTreeSet;
use std::net::IpAddr;

use proto::{AddressRange, Family};

use super::Allocations;
use super::claim::{Allocation, Claim, Rules, refuses};
use super::search::is_buggy;
use objects::note::{Cause, Remark};
use objects::pool::unreachable;

/// Origin of the claim that a Service has an address.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AddressSource {
    /// Its status, written by sluice.
    Ours,
    /// The checkpoint of a previous leader.
    Recalled,
    /// Its status, written by another controller.
    Foreign,
}

impl AddressSource {
    fn applies_to(self, claim: &Claim) -> bool {
        match self {
            // What is only alleged comes last.
            Self::Ours => claim.status_is_ours && !claim.is_alleged(),
            Self::Recalled => !claim.recalled.is_empty(),
            Self::Foreign => !claim.status_is_ours || claim.is_alleged(),
        }
    }
}

impl Allocations {
    /// Statuses written by sluice come first, so that a foreign status of an older Service cannot take an address from
    /// its holder. Services that cannot be parsed come last, because their ports and sharing terms are unknown.
    pub(super) fn adopt_all(&mut self, order: &[&Claim], outcomes: &mut [Allocation], rules: Rules<'_>) {
        let mut recalled = BTreeSet::new();
        for source in [AddressSource::Ours, AddressSource::Recalled, AddressSource::Foreign] {
            for is_readable in [true, false] {
                let applies = |claim: &Claim| source.applies_to(claim) && claim.is_readable() == is_readable;
                for (claim, outcome) in order.iter().zip(&mut *outcomes).filter(|(claim, _)| applies(claim)) {
                    if source == AddressSource::Foreign && recalled.contains(&claim.service) {
                        self.note_overwritten_status(claim, rules, outcome);
                    }
                    let before = self.holders.of(&claim.service).len();
                    self.adopt(claim, source, rules, outcome);
                    if source == AddressSource::Recalled && self.holders.of(&claim.service).len() > before {
                        recalled.insert(&claim.service);
                    }
                }
            }
        }
    }

    fn adopt(&mut self, claim: &Claim, source: AddressSource, rules: Rules<'_>, outcome: &mut Allocation) {
        let offered = if source == AddressSource::Recalled { &claim.recalled } else { &claim.in_status };
        for &address in offered {
            let family = Family::of(address);
            let is_wanted = !claim.is_readable() || claim.families.contains(&family);
            if !is_wanted && source != AddressSource::Foreign {
                // It has given up a family while there was no leader, and gateways may still forward the address.
                self.free_unheld(&claim.service, address, rules.now);
            }
            if !is_wanted || self.holders.held_of(&claim.service, family).is_some() {
                continue;
            }
            let is_ours = source != AddressSource::Foreign || claim.of_another.is_some();
            let is_shared_unread = !claim.is_readable() && is_ours && self.holders.is_held(address);
            let obstacle = || match source {
                AddressSource::Foreign => self.obstacle(claim, address, rules),
                // sluice allocated it in spite of the reservation: a former sharer freed it, or nothing else was free.
                AddressSource::Ours | AddressSource::Recalled => {
                    self.holders.refuse(address, claim, rules.pools.holding(address)).filter(|_| !is_shared_unread)
                }
            };
            match refusal(claim, address, is_ours, rules).or_else(obstacle) {
                None => self.hold_as_before(claim, address),
                Some(_) if source == AddressSource::Recalled => {}
                Some(why) => {
                    let text = format!("address {address} of its status is not taken over: {why}; it gets another one");
                    outcome.notes.push(Remark::new(Cause::AddressLost, text));
                }
            }
        }
    }

    /// Adds a warning if the status was overwritten while there was no leader, or before sluice could write it again.
    fn note_overwritten_status(&self, claim: &Claim, rules: Rules<'_>, outcome: &mut Allocation) {
        for &address in &claim.in_status {
            let held = self.holders.held_of(&claim.service, Family::of(address));
            let Some(held) = held.filter(|held| *held != address) else { continue };
            let why = refusal(claim, address, false, rules).or_else(|| self.obstacle(claim, address, rules));
            let why = why.unwrap_or_else(|| format!("{} wrote it there", writer(claim)));
            let text = format!("address {address} of its status is not taken over: {why}; it keeps {held}");
            outcome.notes.push(Remark::new(Cause::AddressLost, text));
        }
    }
}

fn writer(claim: &Claim) -> String {
    claim.status_writer.as_ref().map_or_else(|| "another program".to_owned(), |name| format!("{name:?}"))
}

/// Why an address in a status cannot belong to the Service, regardless of other Services.
fn refusal(claim: &Claim, address: IpAddr, is_ours: bool, rules: Rules<'_>) -> Option<String> {
    let special = AddressRange::new(address, address).ok().and_then(|range| unreachable(&range));
    if let Some(net) = special {
        return Some(format!("it lies in {net}, where no client can reach it"));
    }
    if let Some(why) = rules.forbidden.why(address).filter(|_| !(is_ours && claim.recalled.contains(&address))) {
        return Some(why);
    }
    // Editing a pool never renumbers a Service.
    if is_ours {
        return None;
    }
    match rules.pools.holding(address) {
        None => Some(format!("{} wrote it there, and it lies in no pool", writer(claim))),
        Some(pool) if pool.avoid_buggy_ips && is_buggy(address) => {
            Some(format!("pool {} leaves out addresses that end in .0 or .255", pool.name))
        }
        Some(pool) => refuses(pool, claim),
    }
}
