//! Probe tags: source ports that identify the backend of a probe to a VIP.
//!
//! In modes that rewrite no address, a probe goes to the VIP itself, which every backend of the Service accepts. Its
//! source port identifies the backend, and the engine sends the probe there (FORWARDING 12).
//!
//! Invariant: a backend keeps its port while it is probed. Prober and engine use the same table.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use proto::ProbeTags;
use proto::limits::{PROBE_PORT_FIRST, PROBE_PORT_LAST};

use super::Target;
use super::target::{Changes, Subjects};

/// The ports in use.
#[derive(Debug)]
pub(super) struct Tags {
    table: ProbeTags,
    ports: HashMap<IpAddr, u16>,
    /// The targets of each backend that has a port.
    tagged: HashMap<IpAddr, BTreeSet<Target>>,
    /// Targets without a port, which are not probed.
    untagged: BTreeMap<Target, Subjects>,
    /// Position of the search for a free port, so that a released port rests as long as possible.
    next: u16,
}

impl Tags {
    /// Starts from the table of the previous task, whose probes may still be in progress.
    pub(super) fn resuming(table: ProbeTags) -> Self {
        let ports = table.iter().map(|(port, backend)| (*backend, *port)).collect();
        Self { table, ports, tagged: HashMap::new(), untagged: BTreeMap::new(), next: PROBE_PORT_FIRST }
    }

    /// Assigns a port to every backend that is probed through a VIP, and releases the ports of all others. Targets
    /// without a free port are kept out of `changes` until one is free; returns their number.
    pub(super) fn follow(&mut self, changes: &mut Changes) -> usize {
        let is_behind_vip = |target: &Target| target.behind_vip.is_some();
        let gone: Vec<Target> =
            changes.iter().filter(|(t, subjects)| is_behind_vip(t) && subjects.is_none()).map(|c| c.0.clone()).collect();
        for target in gone {
            self.untagged.remove(&target);
            self.release(&target);
        }
        let wanted = changes.iter().filter(|(target, _)| is_behind_vip(target));
        let wanted: Vec<_> = wanted.filter_map(|(target, subjects)| Some((target.clone(), subjects.clone()?))).collect();
        for (target, subjects) in std::mem::take(&mut self.untagged).into_iter().chain(wanted) {
            if self.assign(&target) {
                changes.insert(target, Some(subjects));
            } else {
                changes.remove(&target);
                self.untagged.insert(target, subjects);
            }
        }
        // Ports of a previous task that no target needs.
        self.ports.retain(|backend, _| self.tagged.contains_key(backend));
        self.table.retain(|_, backend| self.tagged.contains_key(backend));
        self.untagged.len()
    }

    fn assign(&mut self, target: &Target) -> bool {
        let Some(backend) = target.behind_vip else { return true };
        if !self.ports.contains_key(&backend) {
            let Some(port) = self.free() else { return false };
            self.ports.insert(backend, port);
            self.table.insert(port, backend);
        }
        self.tagged.entry(backend).or_default().insert(target.clone());
        true
    }

    fn release(&mut self, target: &Target) {
        let Some(backend) = target.behind_vip else { return };
        let Some(targets) = self.tagged.get_mut(&backend) else { return };
        targets.remove(target);
        if targets.is_empty() {
            self.tagged.remove(&backend);
            self.ports.remove(&backend).and_then(|port| self.table.remove(&port));
        }
    }

    fn free(&mut self) -> Option<u16> {
        let port =
            (self.next..=PROBE_PORT_LAST).chain(PROBE_PORT_FIRST..self.next).find(|port| !self.table.contains_key(port))?;
        self.next = if port == PROBE_PORT_LAST { PROBE_PORT_FIRST } else { port + 1 };
        Some(port)
    }

    /// The source port of a probe of `target`; `None` if any port will do.
    pub(super) fn of(&self, target: &Target) -> Option<u16> {
        self.ports.get(&target.behind_vip?).copied()
    }

    /// Port to backend, for the engine.
    pub(super) const fn table(&self) -> &ProbeTags {
        &self.table
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::super::target::tests::tcp;
    use super::*;

    fn vip(n: u32) -> Target {
        Target { behind_vip: Some(Ipv4Addr::from(0x0a00_0000 + n).into()), ..tcp("192.0.2.100:80") }
    }

    fn added(of: impl IntoIterator<Item = Target>) -> Changes {
        of.into_iter().map(|target| (target, Some(Subjects::new()))).collect()
    }

    fn removed(of: impl IntoIterator<Item = Target>) -> Changes {
        of.into_iter().map(|target| (target, None)).collect()
    }

    #[test]
    fn a_backend_keeps_its_port_and_one_that_is_gone_gives_it_back_last() {
        let mut tags = Tags::resuming(ProbeTags::new());
        assert_eq!(tags.follow(&mut added([vip(1), vip(2)])), 0);
        let [first, second] = [tags.of(&vip(1)).unwrap(), tags.of(&vip(2)).unwrap()];
        assert_ne!(first, second);
        let mut changes = added([vip(3)]);
        changes.extend(removed([vip(1)]));
        tags.follow(&mut changes);
        assert_eq!((tags.of(&vip(1)), tags.of(&vip(2))), (None, Some(second)));
        assert!(![first, second].contains(&tags.of(&vip(3)).unwrap()));
        let mut resumed = Tags::resuming(tags.table().clone());
        resumed.follow(&mut added([vip(2)]));
        assert_eq!((resumed.of(&vip(2)), resumed.table().len()), (Some(second), 1), "nobody needs the other port any more");
    }

    #[test]
    fn the_port_of_a_backend_stays_while_one_of_its_targets_does() {
        let other = Target { address: "192.0.2.101:80".parse().unwrap(), ..vip(1) };
        let mut tags = Tags::resuming(ProbeTags::new());
        tags.follow(&mut added([vip(1), other.clone()]));
        let port = tags.of(&vip(1));
        tags.follow(&mut removed([vip(1)]));
        assert_eq!(tags.of(&other), port);
        tags.follow(&mut removed([other]));
        assert!(tags.table().is_empty());
    }

    #[test]
    fn only_probes_through_a_vip_are_tagged_and_what_finds_no_port_waits_for_one() {
        let room = u32::from(PROBE_PORT_LAST - PROBE_PORT_FIRST) + 1;
        let plain = tcp("10.0.0.1:80");
        let mut tags = Tags::resuming(ProbeTags::new());
        let mut all = added((0..room + 3).map(vip).chain([plain.clone()]));
        assert_eq!(tags.follow(&mut all), 3);
        assert_eq!((all.len(), tags.table().len()), (room as usize + 1, room as usize));
        assert!(all.contains_key(&plain) && tags.of(&plain).is_none());
        assert!(tags.table().keys().all(|port| (PROBE_PORT_FIRST..=PROBE_PORT_LAST).contains(port)));
        let mut one_less = removed([vip(0)]);
        assert_eq!(tags.follow(&mut one_less), 2);
        assert_eq!(one_less.len(), 2, "the target that is gone and the one that takes its port");
    }
}
