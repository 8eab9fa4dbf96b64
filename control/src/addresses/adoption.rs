//! What a controller that starts takes over from the Services' statuses (CONTROL section 6).
//!
//! Invariant: no status makes an address anybody's that lies in none of our pools and that we did not write, that is a gateway's
//! or a node's, or that another Service holds. What is not taken over is told.

use std::net::IpAddr;

use proto::{AddressRange, Family};

use super::pools::refuses;
use super::search::is_buggy;
use super::{Allocations, Claim, Outcome, Rules};
use crate::note::{Cause, Remark};
use crate::spec::pool::unreachable;

impl Allocations {
    /// What we wrote comes first: an address that somebody else wrote into the status of an older Service is still its holder's.
    /// Nobody knows on which ports and terms a Service that cannot be read holds an address: it sits down last.
    pub(super) fn adopt_all(&mut self, order: &[&Claim], outcomes: &mut [Outcome], rules: Rules<'_>) {
        for (is_ours, is_readable) in [(true, true), (true, false), (false, true), (false, false)] {
            let is_turn = |claim: &Claim| claim.status_is_ours == is_ours && claim.is_readable() == is_readable;
            let of_these = order.iter().zip(&mut *outcomes).filter(|(claim, _)| is_turn(claim));
            of_these.for_each(|(claim, outcome)| self.adopt(claim, rules, outcome));
        }
    }

    fn adopt(&mut self, claim: &Claim, rules: Rules<'_>, outcome: &mut Outcome) {
        for &address in &claim.in_status {
            let family = Family::of(address);
            let is_wanted = !claim.is_readable() || claim.families.contains(&family);
            if !is_wanted || self.holders.held_of(&claim.service, family).is_some() {
                continue;
            }
            let is_shared_unread = !claim.is_readable() && claim.status_is_ours && self.holders.is_held(address);
            let obstacle = || self.obstacle(claim, address, rules.pools).filter(|_| !is_shared_unread);
            match refusal(claim, address, rules).or_else(obstacle) {
                Some(why) => {
                    let text = format!("address {address} of its status is not taken over: {why}; it gets another one");
                    outcome.notes.push(Remark::new(Cause::AddressLost, text));
                }
                None => self.hold(claim, address, rules.pools),
            }
        }
    }
}

/// Why an address of a status is not the Service's, whoever else wants it.
fn refusal(claim: &Claim, address: IpAddr, rules: Rules<'_>) -> Option<String> {
    let special = AddressRange::new(address, address).ok().and_then(|range| unreachable(&range));
    if let Some(net) = special {
        return Some(format!("it lies in {net}, where no client can reach it"));
    }
    if let Some(why) = rules.forbidden.why(address) {
        return Some(why);
    }
    // A pool edit renumbers nobody.
    if claim.status_is_ours {
        return None;
    }
    match rules.pools.holding(address) {
        None => {
            let writer = claim.status_writer.as_ref().map_or_else(|| "somebody else".to_owned(), |name| format!("{name:?}"));
            Some(format!("{writer} wrote it there, and it lies in no pool"))
        }
        Some(pool) if pool.avoid_buggy_ips && is_buggy(address) => {
            Some(format!("pool {} leaves out addresses that end in .0 or .255", pool.name))
        }
        Some(pool) => refuses(pool, claim),
    }
}
