//! The numbers of frontends, by which their flows are counted, and which backends each frontend has.
//!
//! **Invariants:** a frontend keeps its number for as long as it exists. Up to [`FrontendNumber::MAX`] frontends of a
//! Service and protocol have different numbers. Of more frontends, two without a common backend share a number; where
//! the numbers still do not suffice, a backend is counted with the first frontend that has it.
//!
//! A number is given again as late as possible, because flows may outlive their frontend.
//!
//! Services have numbers of their own, by which workers count all their flows.
//!
//! Not here: the counters (`stats`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use proto::Protocol;

use crate::snapshot::{FrontendAddress, FrontendView};
use crate::stats::{CounterSlot, FrontendCounters, FrontendNumber, FrontendNumberSet, ServiceNumber, WorkerCounters};

/// The numbers of Services. They are given in turn, so that flows of a removed Service have ended when its number is
/// given again.
#[derive(Debug, Default)]
pub(super) struct ServiceNumbers {
    used: BTreeSet<ServiceNumber>,
    last: u16,
}

impl ServiceNumbers {
    /// A number that no Service has; 0, which belongs to none, if all are given.
    pub(super) fn take(&mut self) -> ServiceNumber {
        let next = (1..=u16::MAX).map(|step| ServiceNumber(self.last.wrapping_add(step)));
        let number = next.filter(|number| number.0 != 0).find(|number| !self.used.contains(number)).unwrap_or_default();
        if number != ServiceNumber::default() {
            self.used.insert(number);
            self.last = number.0;
        }
        number
    }

    /// Gives a number back.
    pub(super) fn free(&mut self, number: ServiceNumber) {
        self.used.remove(&number);
    }
}

/// The frontends and backends of one port of a service.
pub(super) struct PortFrontends {
    pub(super) protocol: Protocol,
    /// The port of the service.
    pub(super) number: u16,
    pub(super) addresses: Vec<FrontendAddress>,
    /// Slots of its backends.
    pub(super) backends: Vec<u32>,
}

/// Where clients reach these addresses and ports, of which the first `vips` are at VIPs.
pub(super) fn addresses_of(listens: &[SocketAddr], vips: usize) -> impl Iterator<Item = FrontendAddress> {
    let address = move |(n, at): (usize, &SocketAddr)| match n < vips {
        true => FrontendAddress::Vip(*at),
        false => FrontendAddress::NodePort(at.port()),
    };
    listens.iter().enumerate().map(address)
}

/// The frontends of a service.
#[derive(Debug, Default)]
pub(super) struct FrontendNumbers {
    /// In the order of the ports and their addresses.
    frontends: Vec<FrontendView>,
    /// The number that was given last.
    last: u8,
    /// Numbers of former frontends, each with the slots of backends to which flows are left.
    former: BTreeMap<FrontendNumber, BTreeSet<u32>>,
    /// The numbers of present and former frontends, for schedulers that count flows.
    in_use: Arc<FrontendNumberSet>,
}

impl FrontendNumbers {
    /// Takes over the present ports.
    pub(super) fn follow(&mut self, ports: &[PortFrontends], workers: &[Arc<WorkerCounters>]) {
        let mut before = std::mem::take(&mut self.frontends);
        let is_present = |known: &FrontendView| {
            ports.iter().any(|port| port.protocol == known.protocol && port.addresses.contains(&known.address))
        };
        for gone in before.extract_if(.., |known| !is_present(known)) {
            self.former.entry(gone.counters.number()).or_default().extend(gone.counters.slots());
        }
        for port in ports {
            for &address in &port.addresses {
                let is_it = |known: &FrontendView| known.protocol == port.protocol && known.address == address;
                let known = self.frontends.iter().position(is_it).or_else(|| {
                    let known = before.iter().position(is_it).map(|at| before.remove(at));
                    let known = known.unwrap_or_else(|| self.new_frontend(port, address, &before));
                    self.frontends.push(FrontendView { port: port.number, ..known });
                    self.frontends.len().checked_sub(1)
                });
                if let Some(known) = known.map(|at| &self.frontends[at]) {
                    self.join(known, &before, &port.backends, workers);
                }
            }
        }
        self.former.retain(|&number, slots| {
            let has_flows = |slot| workers.iter().any(|worker| worker.at(CounterSlot::new(slot, number)).flows.get() > 0);
            slots.retain(|slot| has_flows(*slot));
            !slots.is_empty()
        });
        let present = self.frontends.iter().map(|frontend| frontend.counters.number());
        self.in_use.set(present.chain(self.former.keys().copied()));
    }

    /// The numbers by which flows to backends of the service are counted.
    pub(super) fn in_use(&self) -> &Arc<FrontendNumberSet> {
        &self.in_use
    }

    /// A frontend with a number that no other has if possible, otherwise one whose frontends have other backends.
    fn new_frontend(&mut self, port: &PortFrontends, address: FrontendAddress, before: &[FrontendView]) -> FrontendView {
        let others = self.frontends.iter().chain(before).filter(|other| other.protocol == port.protocol);
        let used = others.map(|other| (other.counters.number(), other.counters.shared(&port.backends)));
        let number = free_number(used, self.last);
        self.last = number.get();
        FrontendView { protocol: port.protocol, address, port: port.number, counters: Arc::new(FrontendCounters::new(number)) }
    }

    /// Adds backends to a frontend, except those that another frontend with its number has.
    fn join(&self, to: &FrontendView, before: &[FrontendView], backends: &[u32], workers: &[Arc<WorkerCounters>]) {
        let mut new = to.counters.missing(backends);
        for rival in self.frontends.iter().chain(before).filter(|other| is_rival(other, to)) {
            if new.is_empty() {
                return;
            }
            new = rival.counters.missing(&new);
        }
        to.counters.join(new, workers);
    }

    /// Removes a backend whose slot is free.
    pub(super) fn leave(&self, slot: u32, workers: &[Arc<WorkerCounters>]) {
        self.frontends.iter().for_each(|frontend| frontend.counters.leave(slot, workers));
    }

    /// The numbers of the frontends at these addresses and ports, of which the first `vips` are at VIPs.
    pub(super) fn of(&self, protocol: Protocol, listens: &[SocketAddr], vips: usize) -> Vec<FrontendNumber> {
        let number = |address| {
            let found = self.frontends.iter().find(|known| known.protocol == protocol && known.address == address);
            found.map_or(FrontendNumber::NONE, |known| known.counters.number())
        };
        addresses_of(listens, vips).map(number).collect()
    }

    /// All of them.
    pub(super) fn views(&self) -> Vec<FrontendView> {
        self.frontends.clone()
    }
}

/// Whether two frontends could count one backend in the same counters.
fn is_rival(other: &FrontendView, to: &FrontendView) -> bool {
    other.counters != to.counters && other.protocol == to.protocol && other.counters.number() == to.counters.number()
}

/// The next number after `last` whose frontends share the fewest backends with the new one, and of these the fewest
/// frontends have. `used`: the numbers of frontends, and how many backends each shares.
fn free_number(used: impl Iterator<Item = (FrontendNumber, usize)>, last: u8) -> FrontendNumber {
    let mut costs = [(0, 0); FrontendNumber::MAX as usize + 1];
    for (number, shared) in used {
        let (backends, frontends) = &mut costs[usize::from(number.get())];
        (*backends, *frontends) = (*backends + shared, *frontends + 1);
    }
    let max = u32::from(FrontendNumber::MAX);
    let numbers = (0..max).map(|step| FrontendNumber::new((u32::from(last) + step) % max + 1));
    numbers.min_by_key(|number| costs[usize::from(number.get())]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vip(port: u16) -> FrontendAddress {
        FrontendAddress::Vip(SocketAddr::new([192, 0, 2, 100].into(), port))
    }

    fn port(number: u16, addresses: &[FrontendAddress], backends: &[u32]) -> PortFrontends {
        PortFrontends { protocol: Protocol::Tcp, number, addresses: addresses.to_vec(), backends: backends.to_vec() }
    }

    fn numbers(of: &FrontendNumbers) -> Vec<u8> {
        of.frontends.iter().map(|frontend| frontend.counters.number().get()).collect()
    }

    #[test]
    fn ports_vips_and_the_node_port_of_a_service_have_different_numbers() {
        let mut of = FrontendNumbers::default();
        let node_port = FrontendAddress::NodePort(30080);
        let other_vip = FrontendAddress::Vip("192.0.2.101:80".parse().unwrap());
        of.follow(&[port(80, &[vip(80), other_vip, node_port], &[0, 1]), port(81, &[vip(81)], &[0, 1])], &[]);
        assert_eq!(numbers(&of), [1, 2, 3, 4]);
        let listens = ["192.0.2.100:80", "192.0.2.101:80", "192.0.2.2:30080", "192.0.2.3:30080"].map(|at| at.parse().unwrap());
        let of_listens = of.of(Protocol::Tcp, &listens, 2);
        assert_eq!(of_listens.iter().map(|number| number.get()).collect::<Vec<_>>(), [1, 2, 3, 3], "one node port");
        assert_eq!(of.of(Protocol::Udp, &listens[..1], 1), [FrontendNumber::NONE], "a Service has no such frontend");
    }

    #[test]
    fn a_frontend_keeps_its_number_and_another_gets_a_used_one_as_late_as_possible() {
        let mut of = FrontendNumbers::default();
        of.follow(&[port(80, &[vip(80)], &[0]), port(81, &[vip(81)], &[0])], &[]);
        let first = of.views().remove(0);
        for n in 0..13 {
            of.follow(&[port(80, &[vip(80)], &[0]), port(82 + n, &[vip(82 + n)], &[0])], &[]);
        }
        assert_eq!((numbers(&of), &of.frontends[0]), (vec![1, 15], &first));
        of.follow(&[port(95, &[vip(95)], &[0]), port(80, &[vip(80)], &[0])], &[]);
        assert_eq!(numbers(&of), [2, 1], "in the order of the ports; 1 is in use");
    }

    #[test]
    fn schedulers_read_the_numbers_of_present_frontends_and_of_former_ones_while_these_have_flows() {
        let workers = [Arc::new(WorkerCounters::default())];
        let numbers = |of: &FrontendNumbers| of.in_use().iter().map(FrontendNumber::get).collect::<Vec<_>>();
        let mut many = FrontendNumbers::default();
        let ports: Vec<_> = (0..15).map(|n| port(n, &[vip(n)], &[9])).collect();
        many.follow(&ports, &workers);
        let mut of = FrontendNumbers::default();
        assert_eq!(numbers(&of), [0]);
        of.follow(&[port(80, &[vip(80)], &[0, 1])], &workers);
        assert_eq!((numbers(&of), numbers(&many).len()), (vec![0, 1], 16), "whatever other services have");
        of.follow(&[port(80, &[vip(80)], &[0, 1]), port(81, &[vip(81)], &[0, 1])], &workers);
        let flows = &workers[0].at(CounterSlot::new(1, FrontendNumber::new(2))).flows;
        flows.add(1);
        of.follow(&[port(80, &[vip(80)], &[0, 1]), port(82, &[vip(82)], &[0, 1])], &workers);
        assert_eq!(numbers(&of), [0, 1, 2, 3], "a flow of port 81 is left");
        flows.set(0);
        of.follow(&[port(80, &[vip(80)], &[0, 1])], &workers);
        assert_eq!(numbers(&of), [0, 1]);
    }

    #[test]
    fn a_node_port_of_both_families_is_one_frontend() {
        let mut of = FrontendNumbers::default();
        let node_port = [FrontendAddress::NodePort(30080)];
        of.follow(&[port(80, &node_port, &[0]), port(80, &node_port, &[7])], &[]);
        let counters = &of.views()[0].counters;
        assert_eq!((of.frontends.len(), counters.shared(&[0, 7])), (1, 2));
    }

    #[test]
    fn more_frontends_than_numbers_share_those_of_frontends_with_other_backends() {
        let mut of = FrontendNumbers::default();
        let ports: Vec<_> = (0..40).map(|n| port(n, &[vip(n)], &[u32::from(n)])).collect();
        of.follow(&ports, &[]);
        let each = of.frontends.iter().zip(0..).all(|(frontend, slot)| frontend.counters.shared(&[slot]) == 1);
        assert!(each && numbers(&of).iter().all(|number| (1..=15).contains(number)));
        let users = |number| numbers(&of).iter().filter(|other| **other == number).count();
        assert!((1..=15).all(|number| (2..=3).contains(&users(number))));
    }

    #[test]
    fn of_more_frontends_to_one_backend_than_numbers_the_first_count_it() {
        let mut of = FrontendNumbers::default();
        let ports: Vec<_> = (0..16).map(|n| port(n, &[vip(n)], &[3])).collect();
        of.follow(&ports, &[]);
        let having = of.frontends.iter().filter(|frontend| frontend.counters.shared(&[3]) == 1).count();
        assert_eq!((numbers(&of)[15], having, of.frontends[15].counters.shared(&[3])), (1, 15, 0));
    }
}
