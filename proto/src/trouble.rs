//! Troubles: what is not as it should be with a gateway or a group of gateways, as one pure function of what they show.
//!
//! Invariant: [`find`] looks at nothing but its argument, so that `sluicectl status`, the status page and the metrics of a
//! gateway agree. The worst comes first, and the number of troubles is bounded.
//! Not here: who looks, and when (`sluiced`, `control`), and since when a trouble lasts ([`Memory`] alone knows that).

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
pub use memory::Memory;
pub use observed::{Observed, ObservedCertificate, ObservedGateway, ObservedGroup, Recent, ReloadOutcome};

/// Maximum number of troubles of one kind; the others are one line. A node that fails may concern every Service.
const OF_A_KIND_MAX: usize = 50;

/// All troubles, the worst first, then by object.
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
    bounded(found, observed.now_s)
}

/// The worst first. Kinds are declared in the order of what they do to clients.
fn order(trouble: &Trouble) -> (Severity, Kind, &str) {
    (trouble.kind.facts().severity, trouble.kind, &trouble.object)
}

/// At most [`OF_A_KIND_MAX`] of a kind, with the number of the others.
fn bounded(found: Vec<Trouble>, now_s: u64) -> Vec<Trouble> {
    let mut all = Vec::with_capacity(found.len());
    for of_kind in found.chunk_by(|one, other| one.kind == other.kind) {
        all.extend(of_kind.iter().take(OF_A_KIND_MAX).cloned());
        if of_kind.len() > OF_A_KIND_MAX {
            let others = of_kind.len() - OF_A_KIND_MAX;
            let (kind, object) = (of_kind[0].kind, format!("{others} others"));
            all.push(Trouble { kind, object, cause: "as those above".to_owned(), since_s: now_s });
        }
    }
    all
}

#[cfg(test)]
mod tests;
