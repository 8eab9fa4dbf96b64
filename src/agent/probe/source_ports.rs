//! Probe tags: source ports that identify the backend of a probe to a VIP.
//!
//! In modes that rewrite no address, a probe goes to the VIP itself, which every backend of the Service accepts. Its
//! source port identifies the backend, and the engine sends the probe there (FORWARDING 12).
//!
//! Invariant: a backend keeps its port while it is probed. Prober and engine use the same table.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;

use proto::ProbeTags;
use proto::limits::{PROBE_PORT_FIRST, PROBE_PORT_LAST};

use super::Target;
use super::target::Targets;

/// The ports in use.
#[derive(Debug)]
pub(super) struct Tags {
    table: ProbeTags,
    ports: HashMap<IpAddr, u16>,
    /// Position of the search for a free port, so that a released port rests as long as possible.
    next: u16,
}

impl Tags {
    /// Starts from the table of the previous task, whose probes may still be in progress.
    pub(super) fn resuming(table: ProbeTags) -> Self {
        let ports = table.iter().map(|(port, backend)| (*backend, *port)).collect();
        Self { table, ports, next: PROBE_PORT_FIRST }
    }

    /// Assigns a port to every backend that is probed through a VIP, and releases the ports of all others. Targets
    /// without a free port are removed from `targets`; returns their number.
    pub(super) fn follow(&mut self, targets: &mut Targets) -> usize {
        let wanted: BTreeSet<IpAddr> = targets.keys().filter_map(|target| target.tagged()).collect();
        self.ports.retain(|backend, _| wanted.contains(backend));
        self.table.retain(|_, backend| wanted.contains(backend));
        for backend in wanted {
            if !self.ports.contains_key(&backend)
                && let Some(port) = self.free()
            {
                self.ports.insert(backend, port);
                self.table.insert(port, backend);
            }
        }
        let before = targets.len();
        targets.retain(|target, _| target.tagged().is_none_or(|backend| self.ports.contains_key(&backend)));
        before - targets.len()
    }

    fn free(&mut self) -> Option<u16> {
        let port =
            (self.next..=PROBE_PORT_LAST).chain(PROBE_PORT_FIRST..self.next).find(|port| !self.table.contains_key(port))?;
        self.next = if port == PROBE_PORT_LAST { PROBE_PORT_FIRST } else { port + 1 };
        Some(port)
    }

    /// The source port of a probe of `target`; `None` if any port will do.
    pub(super) fn of(&self, target: Target) -> Option<u16> {
        self.ports.get(&target.tagged()?).copied()
    }

    /// Port to backend, for the engine.
    pub(super) const fn table(&self) -> &ProbeTags {
        &self.table
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proto::HealthCheck;

    use super::super::target::Check;
    use super::*;

    fn vip(n: u32) -> Target {
        Target::Vip { vip: "192.0.2.100:80".parse().unwrap(), backend: Ipv4Addr::from(0x0a00_0000 + n).into() }
    }

    fn targets(of: impl IntoIterator<Item = Target>) -> Targets {
        of.into_iter().map(|target| (target, Check::new(&HealthCheck::default()))).collect()
    }

    #[test]
    fn a_backend_keeps_its_port_and_one_that_is_gone_gives_it_back_last() {
        let mut tags = Tags::resuming(ProbeTags::new());
        assert_eq!(tags.follow(&mut targets([vip(1), vip(2)])), 0);
        let [first, second] = [tags.of(vip(1)).unwrap(), tags.of(vip(2)).unwrap()];
        assert_ne!(first, second);
        tags.follow(&mut targets([vip(2), vip(3)]));
        assert_eq!((tags.of(vip(1)), tags.of(vip(2))), (None, Some(second)));
        assert!(![first, second].contains(&tags.of(vip(3)).unwrap()));
        let resumed = Tags::resuming(tags.table().clone());
        assert_eq!(resumed.of(vip(2)), Some(second));
    }

    #[test]
    fn only_probes_through_a_vip_are_tagged_and_what_finds_no_port_is_not_probed() {
        let room = u32::from(PROBE_PORT_LAST - PROBE_PORT_FIRST) + 1;
        let plain = Target::Tcp("10.0.0.1:80".parse().unwrap());
        let mut tags = Tags::resuming(ProbeTags::new());
        let mut all = targets((0..room + 3).map(vip).chain([plain]));
        assert_eq!(tags.follow(&mut all), 3);
        assert_eq!((all.len(), tags.table().len()), (room as usize + 1, room as usize));
        assert!(all.contains_key(&plain) && tags.of(plain).is_none());
        assert!(tags.table().keys().all(|port| (PROBE_PORT_FIRST..=PROBE_PORT_LAST).contains(port)));
    }
}
