//! Troubles: what is not as it should be with a gateway or a group of gateways, as one pure function of what they show.
//!
//! Invariant: [`find`] looks at nothing but its argument, so that `sluicectl status`, the status page and the metrics of a
//! gateway agree. The worst comes first.
//! Not here: who looks, and when (`sluiced`, `control`), since when a trouble lasts and how many are listed ([`Memory`]
//! alone knows that).

mod findings;
mod gateway;
mod group;
mod kind;
mod memory;
mod observed;
mod services;

use findings::Findings;
pub use findings::Trouble;
pub use kind::{Facts, Kind, Severity};
pub use memory::{Memory, OF_A_KIND_MAX, OTHERS};
pub use observed::{Observed, ObservedCertificate, ObservedGateway, ObservedGroup, Recent, ReloadOutcome};

/// All troubles, the worst first, then by object. Their number has no bound; [`Memory::settle`] lists some of each kind.
#[must_use]
pub fn find(observed: &Observed) -> Vec<Trouble> {
    let mut findings = Findings { now_s: observed.now_s, found: Vec::new() };
    if let Some(of_gateway) = &observed.gateway {
        gateway::look(of_gateway, &mut findings);
    }
    gateway::look_at_certificates(&observed.certificates, &mut findings);
    services::look(&observed.services, &observed.unhealthy, &mut findings);
    for (backend, turns) in &observed.flapping {
        findings.add(
            Kind::BackendFlaps,
            format!("Backend {backend}"),
            format!("its health changed {turns} times within 10 minutes"),
        );
    }
    if let Some(of_group) = &observed.group {
        group::look(of_group, &mut findings);
    }
    let mut found = findings.found;
    found.sort_by(|one, other| order(one).cmp(&order(other)));
    found
}

/// The worst first. Kinds are declared in the order of what they do to clients.
fn order(trouble: &Trouble) -> (Severity, Kind, &str) {
    (trouble.kind.facts().severity, trouble.kind, &trouble.object)
}

#[cfg(test)]
mod tests;
