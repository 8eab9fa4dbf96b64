//! The trial of a decision: [`follow`] and [`decide`] on tables that hold only the flows that matter to one packet.
//!
//! **Invariant:** the tables hash as those of the workers, so that next hops are chosen alike.
//!
//! Not here: which flows matter, and the SNAT port that the worker would lease.

use std::net::SocketAddr;

use super::explanation::{FlowEffect, Leaves, Outcome, TunnelEnds};
use crate::flow::{
    Direction, Flow, FlowTable, IdleLimits, LeaseOffer, PoolId, Segment, SnatAddress, SnatPorts, SnatTarget, Tick, TrialPorts,
};
use crate::forward::decide::exit::route_to_client;
use crate::forward::decide::inquiry::{FamilyInquiry, Inquired};
use crate::forward::decide::{
    Answer, Changes, DecisionContext, DirectForward, FlowFamily, FlowTables, Followed, NatForward, Packet, ResetBuffers, Verdict,
    decide, follow,
};
use crate::forward::rewrite::rewrite_of;
use crate::port::Link;
use crate::snapshot::{Ends, Snapshot};
use crate::wire::{Address, Headers, TupleHash, TupleKey};

/// Flows that fit into the table of a trial: the packet's, one for each tuple of a new flow, and the new flow.
const FLOWS: u32 = 8;

/// The tables of a trial. They are reserved once: the lists of flows that yield have an entry for each of a million pools.
#[derive(Debug)]
pub(super) struct TrialTables {
    flows: FlowTables,
    ports: TrialPorts,
}

impl TrialTables {
    /// Reserves them, with the hash of the workers' tables; `None` without memory.
    pub(super) fn new(seed: u64) -> Option<Self> {
        let flows = FlowTables { v4: FlowTable::new(FLOWS, seed).ok()?, v6: FlowTable::new(FLOWS, seed).ok()? };
        Some(Self { flows, ports: TrialPorts::new().ok()? })
    }
}

/// A family of which inquiries can be made.
pub(in crate::forward) trait TrialFamily: FlowFamily {
    /// An inquiry of the family.
    fn inquiry(of: FamilyInquiry<Self>) -> Inquired;
    /// The answer, if it is of the family.
    fn answered(inquired: &Inquired) -> Option<&FamilyInquiry<Self>>;
}

impl TrialFamily for u32 {
    fn inquiry(of: FamilyInquiry<Self>) -> Inquired {
        Inquired::V4(of)
    }

    fn answered(inquired: &Inquired) -> Option<&FamilyInquiry<Self>> {
        if let Inquired::V4(of) = inquired { Some(of) } else { None }
    }
}

impl TrialFamily for u128 {
    fn inquiry(of: FamilyInquiry<Self>) -> Inquired {
        Inquired::V6(of)
    }

    fn answered(inquired: &Inquired) -> Option<&FamilyInquiry<Self>> {
        if let Inquired::V6(of) = inquired { Some(of) } else { None }
    }
}

/// The inputs of a decision on one packet.
pub(super) struct Trial<'a, A: Address> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) headers: &'a Headers<A>,
    pub(super) segment: Segment,
    pub(super) link: Link,
    pub(super) now: Tick,
    pub(super) worker: usize,
    pub(super) flows: Vec<Flow<A>>,
    pub(super) seed: u64,
}

/// The result of a trial.
pub(super) struct Tried<A: Address> {
    pub(super) outcome: Outcome,
    pub(super) leaves: Option<Leaves>,
    pub(super) effect: FlowEffect,
    /// The two-way flow that began.
    pub(super) made: Option<Flow<A>>,
}

impl<A: TrialFamily> Trial<'_, A> {
    /// Adds flows that the packet may meet.
    pub(super) fn add(&mut self, flows: &[Flow<A>]) {
        for flow in flows {
            let tuple = flow.tuple(Direction::ToBackend);
            if self.flows.iter().all(|known| known.tuple(Direction::ToBackend) != tuple) {
                self.flows.push(*flow);
            }
        }
    }

    /// [`FlowTable::hash`] of the packet's tuple.
    pub(super) fn hash(&self) -> u64 {
        TupleHash::new(self.seed).hash_key(&A::Key::of(&self.headers.tuple), self.headers.tuple.protocol)
    }

    /// Number of flows that may begin. When there is no room, a two-way flow begins if another one yields.
    pub(super) fn room(&self, room: u32, yields: bool) -> u32 {
        let tuple = &self.headers.tuple;
        let frontend = self.snapshot.frontend(tuple.destination, tuple.protocol, tuple.destination_port);
        let may_yield = yields && frontend.is_none_or(|frontend| frontend.mode().is_two_way());
        room.max(may_yield.into())
    }

    /// Decides as if a SNAT port were free. Returns `None` if the flows do not fit.
    pub(super) fn run_with_any_port(&self, room: u32, tables: &mut TrialTables) -> Option<Tried<A>> {
        let TrialTables { flows, ports } = tables;
        let tried = self.run(room, flows, ports.any(self.pools()))?;
        if let Some(made) = tried.made {
            ports.took(made.snat_pool);
        }
        Some(tried)
    }

    /// Decides with the SNAT port that the worker offers towards a target from one of its addresses. Returns `None` if
    /// the flows do not fit.
    pub(super) fn run_with_offer(
        &self,
        room: u32,
        target: SnatTarget<A>,
        addresses: &[SnatAddress<A>],
        offer: Option<LeaseOffer<A>>,
        tables: &mut TrialTables,
    ) -> Option<Tried<A>> {
        let TrialTables { flows, ports } = tables;
        let lease = offer.map(|offer| offer.lease);
        let mut tried = self.run(room, flows, ports.only(self.pools(), target.slot, addresses, lease.as_ref()))?;
        if let Some(leaves) = &mut tried.leaves {
            leaves.is_port_early = offer.is_some_and(|offer| offer.is_early);
        }
        Some(tried)
    }

    /// The pools to which ports of the flows may return.
    fn pools(&self) -> impl Iterator<Item = PoolId> {
        self.flows.iter().map(|flow| flow.snat_pool)
    }

    fn run(&self, room: u32, tables: &mut FlowTables, ports: &mut SnatPorts) -> Option<Tried<A>> {
        tables.set_time(self.now);
        tables.v4.sweep(0, FLOWS, 0, |_| true);
        tables.v6.sweep(0, FLOWS, 0, |_| true);
        let (table, others) = A::split(tables);
        for flow in &self.flows {
            table.insert(*flow).ok()?;
        }
        let hash = self.hash();
        let packet = &Packet { headers: self.headers, hash, candidate: table.candidate(hash), in_link: self.link };
        let mut limits = IdleLimits::new(self.snapshot.limits());
        limits.follow(self.snapshot.shortest_idle_timeout());
        let Self { snapshot, now, worker, .. } = *self;
        let mut changes = Changes::default();
        let verdict = match follow(packet, snapshot, table, &limits, now) {
            Followed::Decided(verdict) => {
                changes.hit = true;
                verdict
            }
            Followed::Undecided(found) => {
                let (limits, changes) = (&limits, &mut changes);
                let mut has_buffers = |_| true;
                let reset_buffers = ResetBuffers(&mut has_buffers);
                #[rustfmt::skip]
                let mut context = DecisionContext {
                    snapshot, now, table, others, ports, limits, counters: None, changes, room, worker, is_trial: true, reset_buffers,
                };
                decide(packet, self.segment, found, &mut context)
            }
        };
        let (table, _) = A::split(tables);
        let made = match verdict {
            Verdict::Forward(NatForward { flow, .. }) if changes.made.is_some() => Some(table.get(flow)),
            _ => None,
        };
        let leaves = self.leaves(&verdict, table, hash);
        Some(Tried { outcome: outcome(&verdict, self.link), leaves, effect: effect(&changes), made })
    }

    fn leaves(&self, verdict: &Verdict<'_>, table: &FlowTable<A>, hash: u64) -> Option<Leaves> {
        let hop_of_backend = |next_hop| self.snapshot.next_hop(self.snapshot.member(next_hop, hash)).map(|hop| hop.address);
        match *verdict {
            Verdict::Forward(NatForward { flow, direction, exit }) => {
                let mut flow = table.get(flow);
                let rewrite = rewrite_of(&flow, direction, exit);
                let next_hop = match direction {
                    Direction::ToBackend => hop_of_backend(self.snapshot.backend(flow.backend)?.next_hop),
                    Direction::ToClient => {
                        let _ = route_to_client(self.snapshot, &mut flow);
                        self.snapshot.next_hop(flow.route_to_client).map(|hop| hop.address)
                    }
                };
                Some(Leaves {
                    link: exit.link,
                    mac: exit.destination_mac(),
                    next_hop,
                    source: SocketAddr::new(rewrite.source.ip(), rewrite.source_port),
                    destination: SocketAddr::new(rewrite.destination.ip(), rewrite.destination_port),
                    tunnel: None,
                    backend: flow.backend,
                    is_port_early: false,
                })
            }
            Verdict::ForwardDirect(DirectForward { backend, exit, outer, .. }) => {
                let tuple = &self.headers.tuple;
                Some(Leaves {
                    link: exit.link,
                    mac: exit.destination_mac(),
                    next_hop: hop_of_backend(self.snapshot.backend(backend)?.next_hop),
                    source: SocketAddr::new(tuple.source.ip(), tuple.source_port),
                    destination: SocketAddr::new(tuple.destination.ip(), tuple.destination_port),
                    tunnel: outer.map(|outer| ends(outer.ends, outer.ports)),
                    backend,
                    is_port_early: false,
                })
            }
            _ => None,
        }
    }
}

fn ends(ends: Ends, ports: Option<(u16, u16)>) -> TunnelEnds {
    let (source, destination) = match ends {
        Ends::V4(source, destination) => (source.ip(), destination.ip()),
        Ends::V6(source, destination) => (source.ip(), destination.ip()),
    };
    TunnelEnds { source, destination, ports }
}

fn outcome(verdict: &Verdict<'_>, arrived: Link) -> Outcome {
    match *verdict {
        Verdict::Forward(_) | Verdict::ForwardDirect(_) => Outcome::Forward,
        Verdict::Wait(neighbour) => Outcome::Wait(neighbour.link, neighbour.address),
        Verdict::Linux => Outcome::Linux(arrived),
        Verdict::LinuxAt(link) => Outcome::Linux(link),
        Verdict::Reply(Answer::Reset) => Outcome::RefusedByReset,
        Verdict::Reply(Answer::PortUnreachable) => Outcome::RefusedByIcmp,
        Verdict::Reply(Answer::TimeExceeded | Answer::TooBig { .. } | Answer::Echo) => Outcome::OtherIcmp,
        Verdict::Reset(reason) => Outcome::Reset(reason),
        Verdict::Drop(reason) => Outcome::Drop(reason),
    }
}

fn effect(changes: &Changes) -> FlowEffect {
    match (changes.hit, changes.ended.is_some(), changes.made.is_some()) {
        (true, ..) => FlowEffect::Continues,
        (_, true, true) => FlowEffect::Replaces,
        (_, true, false) => FlowEffect::Ends,
        (_, false, true) => FlowEffect::Begins,
        (_, false, false) => FlowEffect::None,
    }
}
