//! Services whose address lies outside the pool that they request: they keep the address, and their owner gets a warning,
//! until the owner requests the exchange by `readdress`.
//!
//! Invariant: the new address is allocated before the old one is freed. A Service that requests an internal load balancer is
//! not served at an address that is not internal, because other clients could connect there.

use std::net::IpAddr;

use proto::{Family, Reason, Refusal};

use super::pools::refuses;
use super::search::Search;
use super::{Allocations, Claim, Outcome, Rules};
use crate::note::{Cause, Remark};

impl Allocations {
    /// Reports the addresses of a Service in family order, and those that lie outside what it requests.
    pub(super) fn place(&mut self, claim: &Claim, rules: Rules<'_>, search: &mut Search<'_>, outcome: &mut Outcome) {
        for address in self.holders.of(&claim.service).to_vec() {
            let Some(why) = misplaced(claim, address, rules) else { continue };
            let mut advice = "it keeps it until annotation sluice.dev/readdress is \"true\"".to_owned();
            if claim.readdress && claim.is_readable() {
                match self.take(claim, Family::of(address), rules, search) {
                    Ok(other) => {
                        self.free(&claim.service, address, rules.now);
                        self.hold(claim, other, rules.pools);
                        continue;
                    }
                    Err(refusal) => advice = format!("it keeps it, for there is no other: {}", refusal.message),
                }
            }
            let text = format!("address {address} {why}; {advice}");
            if claim.internal && rules.pools.holding(address).is_some_and(|pool| !pool.internal) {
                outcome.refusal.get_or_insert(Refusal { reason: Reason::Refused, message: text });
            } else {
                outcome.notes.push(Remark::new(Cause::Reason(Reason::OutsidePools), text));
            }
        }
        let rank = |address: &IpAddr| claim.families.iter().position(|family| *family == Family::of(*address));
        outcome.addresses = self.holders.of(&claim.service).to_vec();
        outcome.addresses.sort_by_key(rank);
    }
}

/// Why a Service would not get the address that it holds today. A changed pool selector never moves a Service.
fn misplaced(claim: &Claim, address: IpAddr, rules: Rules<'_>) -> Option<String> {
    let Some(pool) = rules.pools.holding(address) else { return Some("lies in no pool any more".to_owned()) };
    if let Some(named) = claim.pool.as_ref().filter(|named| **named != pool.name) {
        return Some(format!("lies in pool {}, and pool {named} is asked for", pool.name));
    }
    refuses(pool, claim).filter(|_| claim.readdress || claim.internal).map(|why| format!("would not be given to it: {why}"))
}
