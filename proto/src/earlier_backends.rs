//! Which backends that a port had before are kept, so that gateways build Maglev tables that they did not see.
//!
//! Invariant: at most [`limits::EARLIER_TABLES_MAX`] lists, the newest first. Deliberately not here: which of the tables
//! gets a packet (`dataplane`).

use crate::{Backend, BackendState, EarlierBackends, ServicePort, limits};

/// Weights of the backends that take new flows: what a table is built from.
fn taking(backends: &[Backend]) -> impl Iterator<Item = (std::net::SocketAddr, u16)> {
    let takes = |backend: &&Backend| backend.state == BackendState::Active && backend.weight > 0;
    backends.iter().filter(takes).map(|backend| (backend.address, backend.weight))
}

impl ServicePort {
    /// The earlier backends of this port, which replaces `before` at `now_s`, seconds of Unix time. Ports whose backends
    /// are the nodes of a set, or more than [`limits::EARLIER_BACKENDS_MAX`], have none.
    #[must_use]
    pub fn earlier_after(&self, before: &Self, now_s: u64) -> Vec<EarlierBackends> {
        let is_listed = |port: &Self| port.nodes.is_none() && port.backends.len() <= limits::EARLIER_BACKENDS_MAX;
        if !is_listed(self) || !is_listed(before) {
            return Vec::new();
        }
        let is_recent = |one: &&EarlierBackends| now_s.saturating_sub(one.until_s) < limits::EARLIER_TABLES_HORIZON.as_secs();
        let mut earlier: Vec<EarlierBackends> = before.earlier.iter().filter(is_recent).cloned().collect();
        let is_same = before.maglev == self.maglev && taking(&before.backends).eq(taking(&self.backends));
        if !is_same && taking(&before.backends).next().is_some() {
            let backends = before.backends.clone();
            earlier.insert(0, EarlierBackends { until_s: now_s, maglev_size: before.maglev.size, backends });
        }
        if earlier.len() > limits::EARLIER_TABLES_MAX {
            earlier.remove(least(&earlier, now_s));
        }
        earlier
    }
}

/// The list, other than the oldest, whose time counts least: the smallest ratio of the ages at its beginning and its end.
fn least(earlier: &[EarlierBackends], now_s: u64) -> usize {
    let youngest_s = limits::EARLIER_TABLES_YOUNGEST.as_secs();
    let age = |at: usize| now_s.saturating_sub(earlier[at].until_s) + youngest_s;
    let newer = |one: &usize, other: &usize| (age(one + 1) * age(*other)).cmp(&(age(other + 1) * age(*one)));
    (0..earlier.len() - 1).min_by(newer).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Family, MaglevSpec, Protocol};

    fn port(backends: impl Iterator<Item = u8>, earlier: Vec<EarlierBackends>) -> ServicePort {
        let backend = |last| Backend { address: ([10, 0, 0, last], 80).into(), weight: 1, state: BackendState::Active };
        let spec = MaglevSpec { size: 251, seed: 0, hash_version: 1 };
        ServicePort {
            backends: backends.map(backend).collect(),
            earlier,
            ..ServicePort::new(Protocol::Tcp, Family::V4, 80, spec)
        }
    }

    #[test]
    fn a_list_is_kept_when_its_table_is_replaced_and_for_two_hours() {
        let first = port(1..4, Vec::new());
        let same = port(1..4, Vec::new());
        assert_eq!(same.earlier_after(&first, 1000), []);
        let second = port(1..5, Vec::new());
        let earlier = second.earlier_after(&first, 1000);
        assert_eq!(earlier, [EarlierBackends { until_s: 1000, maglev_size: 251, backends: first.backends.clone() }]);
        let second = port(1..5, earlier.clone());
        assert_eq!(second.earlier_after(&second, 8199), earlier);
        assert_eq!(second.earlier_after(&second, 8200), []);
        let draining = |port: &ServicePort| {
            let mut drained = port.clone();
            drained.backends[0].state = BackendState::Draining;
            drained
        };
        assert_eq!(draining(&first).earlier_after(&first, 1000).len(), 1, "it takes no new flows");
        let grown = ServicePort { maglev: MaglevSpec { size: 509, ..first.maglev }, ..first.clone() };
        assert_eq!(grown.earlier_after(&first, 1000)[0].maglev_size, 251);
        assert_eq!(first.earlier_after(&port(0..0, Vec::new()), 1000), [], "an empty table leads nowhere");
        let many: Vec<Backend> = (0..2).flat_map(|_| port(0..255, Vec::new()).backends).collect();
        assert_eq!(ServicePort { backends: many, ..first.clone() }.earlier_after(&first, 1000), []);
    }

    #[test]
    fn of_many_steps_the_list_that_was_in_use_for_long_stays() {
        let mut last = port(0..5, Vec::new());
        for step in 1..=20 {
            let next = port(step..step + 5, Vec::new());
            last = ServicePort { earlier: next.earlier_after(&last, 10_000 + 10 * u64::from(step)), ..next };
        }
        let until: Vec<u64> = last.earlier.iter().map(|one| one.until_s).collect();
        assert_eq!((until.len(), until[3]), (limits::EARLIER_TABLES_MAX, 10_010), "{until:?}");
        assert!(until.is_sorted_by(|newer, older| newer > older), "{until:?}");
    }
}
