//! A gateway of a fleet over memory ports: workers that replicate, leases, and the news that it tells and hears.

use std::sync::Arc;
use std::time::Duration;

use dataplane::flow::{FlowLimits, FlowRecord, FlowRecords, FlowReplication, ReplicaEvent};
use dataplane::workers::Steering;
use dataplane::{Config, OwnedGroups, VipAnswers, VipOwnership, tcp_flags};
use proto::{ServiceName, State};

use crate::rig::{CLUSTER, SECOND, UPLINK, config, ip, state};
use crate::team::{self, Delivery, Team};

pub const GROUPS: u8 = 2;
pub const ALL: u64 = 0b11;
pub const NONE: u64 = 0;
pub const FIRST_VRID: u8 = 101;
/// Leases end three times as late.
pub const ADVERTISEMENT_NS: u64 = 10_000 * SECOND;
pub const SNAT: [&str; 4] = ["10.0.0.3", "10.0.0.4", "fd00::3", "fd00::4"];
pub const DATA: u8 = tcp_flags::ACK | tcp_flags::PSH;
pub const FIN: u8 = tcp_flags::FIN | tcp_flags::ACK;

/// A gateway of a fleet.
pub struct Gateway {
    pub team: Team,
    pub replications: Vec<Arc<FlowReplication>>,
    pub records: Arc<FlowRecords>,
    pub ownership: Arc<VipOwnership>,
}

impl Gateway {
    pub fn new(state: State, workers: u8, over_cards: bool, seed: u64, max_flows: u32) -> Self {
        let steering = if over_cards { Steering::toeplitz(workers, seed) } else { Steering::own_hash(workers, seed) };
        let delivery = if over_cards { Delivery::Card(team::card(&steering)) } else { Delivery::InTurn };
        Self::with_snat(&SNAT, state, (steering, delivery, workers), seed, max_flows)
    }

    /// With one worker and these SNAT addresses, those beyond the groups being its own.
    pub fn with_own_snat(own: &[&str], state: State, seed: u64) -> Self {
        Self::with_snat(&[&SNAT, own].concat(), state, (Steering::own_hash(1, seed), Delivery::InTurn, 1), seed, 4096)
    }

    fn with_snat(snat: &[&str], state: State, workers: (Steering, Delivery, u8), seed: u64, max_flows: u32) -> Self {
        let snat = snat.iter().map(|address| ip(address)).collect();
        let config = config(max_flows);
        // Models wait for the end of flows that one side has reset.
        let flows = FlowLimits { tcp_reset: config.flows.tcp_closing, ..config.flows.clone() };
        let config = Config { snat, shared_snat: true, flows, ..config };
        let mut team = Team::with_config(config, seed, state, workers);
        let ownership = Arc::new(VipOwnership::elected(GROUPS, FIRST_VRID, ADVERTISEMENT_NS));
        ownership.open();
        let records = Arc::new(FlowRecords::new(4096));
        let replicate = |worker: &mut dataplane::Worker<_, _>| {
            let replication = Arc::new(FlowReplication::new(4096, Duration::from_secs(1)));
            worker.replicate(Arc::clone(&replication));
            // Its polls take no time.
            worker.own_by(Arc::clone(&ownership), || 0);
            worker.record(&records).unwrap();
            replication
        };
        let replications = team.workers.iter_mut().map(replicate).collect();
        let mut gateway = Self { team, replications, records, ownership };
        gateway.own(NONE);
        gateway
    }

    pub fn small(seed: u64) -> Self {
        Self::new(state(), 1, false, seed, 4096)
    }

    /// With one worker and one Service, which has the table to itself.
    pub fn of_web(seed: u64, max_flows: u32) -> Self {
        let mut state = state();
        let name = ServiceName::new("default", "web");
        let web = state.services[&name].clone();
        state.services = [(name, web)].into_iter().collect();
        Self::new(state, 1, false, seed, max_flows)
    }

    /// Owns these groups from now on, and lets time pass until all is announced.
    pub fn own(&mut self, owned: u64) {
        self.own_now(owned);
        self.team.settle();
    }

    /// Owns these groups from now on.
    pub fn own_now(&mut self, owned: u64) {
        for group in 0..GROUPS {
            if owned >> group & 1 == 1 { self.ownership.begin(group, self.team.now) } else { self.ownership.end(group) }
        }
        let groups = Some(OwnedGroups { groups: GROUPS, owned });
        self.team.compiler.answer_for(&VipAnswers { groups, ..VipAnswers::default() });
        let sequence = self.team.offer();
        while !self.team.publisher.reached(sequence) {
            self.team.poll();
            self.team.publisher.advance();
        }
        // The first announcements; the next ones follow with time.
        (0..8).for_each(|_| self.team.poll());
        self.team.sent(UPLINK);
        self.team.sent(CLUSTER);
    }

    pub fn pass(&mut self, seconds: u64) {
        for _ in 0..8 * seconds {
            self.team.now += SECOND / 8;
            self.team.poll();
            // Work that no packet causes is bounded in each poll.
            (0..64).for_each(|_| self.team.poll());
        }
        self.team.sent(UPLINK);
        self.team.sent(CLUSTER);
    }

    /// What it has told since the last call.
    pub fn sent(&self) -> Vec<ReplicaEvent> {
        self.replications.iter().flat_map(|replication| std::iter::from_fn(|| replication.take())).collect()
    }

    /// Gives the events to every worker, as the agent does.
    pub fn receive(&mut self, events: &[ReplicaEvent]) {
        for event in events {
            assert!(self.replications.iter().all(|replication| replication.give(*event)));
        }
        (0..events.len() / 32 + 2).for_each(|_| self.team.poll());
    }

    pub fn count(&self, counter: impl Fn(&FlowReplication) -> u64) -> u64 {
        self.replications.iter().map(|replication| counter(replication)).sum()
    }

    /// The flow records since the last call.
    pub fn records(&self) -> Vec<FlowRecord> {
        std::iter::from_fn(|| self.records.take()).collect()
    }

    pub fn flows(&self) -> u64 {
        self.team.sum(|counters| counters.flows.get())
    }
}

/// The same at the same moment.
pub fn take_over_now(from: &mut Gateway, to: &mut Gateway) {
    to.team.now = to.team.now.max(from.team.now);
    from.own_now(NONE);
    to.own_now(ALL);
}

/// One gateway dies, or gives everything away, and another takes over.
pub fn take_over(from: &mut Gateway, to: &mut Gateway) {
    to.team.now = to.team.now.max(from.team.now);
    from.own(NONE);
    to.own(ALL);
}

pub fn new_clients(count: u16) -> Vec<(String, &'static str)> {
    (0..count).map(|n| (format!("203.0.113.{}:{}", n % 200 + 1, 3000 + n), "192.0.2.100:80")).collect()
}
