//! The workers of a gateway over memory ports, and the network around them. Frames are distributed as by a card with
//! RSS, or to the queues in turn.
#![allow(dead_code, unreachable_pub, reason = "each program of tests uses a part of it")]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use dataplane::testing::{Packet, Rss, arriving_at};
use dataplane::wire::RETA_ENTRIES;
use dataplane::workers::{Proof, RssKind, RssProof, Steering};
use dataplane::{
    Buffer, Compiler, Config, DropReason, Health, MemoryBuffer, MemoryPort, Network, PacketOutcome, Parts, Peers, PortIndex,
    PortQueues, Publisher, TwinQueues, Worker, WorkerCounters, tcp_flags,
};
use proto::State;

use crate::rig::{CLUSTER, Log, SECOND, UPLINK, config, ends, mac_of, network, state};

pub const SEED: u64 = 7;

/// How frames are distributed to queues.
pub enum Delivery {
    /// As by a card with RSS.
    Card(Rss),
    /// As by a card with RSS that does not report the hashes of these kinds.
    Silent(Rss, [RssKind; 2]),
    /// To the queues in turn, without a hash.
    InTurn,
}

/// The workers of a gateway, and the network around them.
pub struct Team {
    pub workers: Vec<Worker<MemoryPort, Log>>,
    pub counters: Vec<Arc<WorkerCounters>>,
    pub twins: Vec<Arc<TwinQueues<MemoryBuffer>>>,
    pub proofs: [Arc<[Arc<RssProof>]>; 2],
    pub delivery: Delivery,
    pub compiler: Compiler,
    pub publisher: Publisher,
    pub state: State,
    pub network: Network,
    pub health: Health,
    pub now: u64,
    next: usize,
}

pub fn card(steering: &Steering) -> Rss {
    let reta = (0..RETA_ENTRIES).map(|entry| steering.reta(entry).0).collect();
    Rss::new(*steering.rss_key().unwrap(), reta)
}

impl Team {
    pub fn over_cards(workers: u8) -> Self {
        let steering = Steering::toeplitz(workers, SEED);
        let card = card(&steering);
        Self::new(steering, Delivery::Card(card), workers)
    }

    pub fn in_turn(workers: u8) -> Self {
        Self::new(Steering::own_hash(workers, SEED), Delivery::InTurn, workers)
    }

    pub fn new(steering: Steering, delivery: Delivery, transmit_queues: u8) -> Self {
        Self::serving(state(), steering, delivery, transmit_queues)
    }

    pub fn serving(state: State, steering: Steering, delivery: Delivery, transmit_queues: u8) -> Self {
        Self::with_config(config(4096), SEED, state, (steering, delivery, transmit_queues))
    }

    /// A gateway whose workers have this seed, which must be that of the steering.
    pub fn with_config(
        config: Config,
        seed: u64,
        state: State,
        (steering, delivery, transmit_queues): (Steering, Delivery, u8),
    ) -> Self {
        let limits = config.flows.clone();
        let counters: Vec<_> = (0..steering.workers()).map(|_| Arc::new(WorkerCounters::default())).collect();
        let compiler = Compiler::new(config).counting(counters.clone());
        let (publisher, subscribers) = Publisher::new(compiler.initial(), steering.workers().into());
        let twins: Vec<_> = (0..2).map(|_| Arc::new(TwinQueues::new())).collect();
        let proofs = [(); 2].map(|()| (0..steering.workers()).map(|_| Arc::default()).collect::<Arc<[_]>>());
        let queues = proofs.clone().map(|proofs| PortQueues {
            transmit: transmit_queues,
            rss: matches!(delivery, Delivery::Card(_) | Delivery::Silent(..)).then_some(proofs),
        });
        let parts = Peers::all(&Arc::new(steering), &queues).into_iter().zip(subscribers).zip(&counters);
        let worker = |((peers, subscriber), counters): ((_, _), &Arc<WorkerCounters>)| {
            let parts = Parts {
                ports: twins.iter().map(|twin| (MemoryPort::default(), Some(twin.clone()))).collect(),
                subscriber,
                limits: limits.clone(),
                counters: counters.clone(),
                neighbour_requests: Arc::new(ArrayQueue::new(64)),
                peers: Some(peers),
                seed,
                observer: Log::default(),
            };
            Worker::new(parts).unwrap()
        };
        let workers = parts.map(worker).collect();
        let (network, health) = (network(), Health::default());
        let mut team = Self {
            workers,
            counters,
            twins,
            proofs,
            delivery,
            compiler,
            publisher,
            state,
            network,
            health,
            now: SECOND,
            next: 0,
        };
        team.offer();
        team
    }

    /// Compiles the current fields and publishes the snapshot; returns its sequence.
    pub fn offer(&mut self) -> u64 {
        self.state.generation.counter += 1;
        self.publisher.publish(self.compiler.compile(&self.state, &self.network, &self.health, self.now))
    }

    /// Publishes, and waits until all workers use the snapshot.
    pub fn publish(&mut self) {
        let sequence = self.offer();
        while !self.publisher.reached(sequence) {
            self.poll();
            self.publisher.advance();
        }
        self.settle();
    }

    /// Polls every worker until none has work left.
    pub fn poll(&mut self) {
        while self.workers.iter_mut().map(|worker| worker.poll(self.now)).sum::<usize>() > 0 {}
    }

    /// Waits until all announcements are sent; returns what was sent meanwhile.
    pub fn settle(&mut self) -> Vec<Vec<u8>> {
        for _ in 0..40 {
            self.now += SECOND / 8;
            self.poll();
        }
        self.sent(CLUSTER);
        self.sent(UPLINK)
    }

    /// Puts frames in at a port and lets all workers process them.
    pub fn put(&mut self, port: PortIndex, frames: &[Vec<u8>]) {
        self.arrive(port, frames);
        self.poll();
    }

    pub fn sent(&mut self, port: PortIndex) -> Vec<Vec<u8>> {
        let sent = |worker: &mut Worker<MemoryPort, Log>| worker.port_mut(port).unwrap().sent.drain(..).collect::<Vec<_>>();
        self.workers.iter_mut().flat_map(sent).map(|buffer| buffer.bytes().to_vec()).collect()
    }

    /// Puts frames in at a port without polling any worker.
    pub fn arrive(&mut self, port: PortIndex, frames: &[Vec<u8>]) {
        for frame in frames {
            let frame = &arriving_at(mac_of(port), frame);
            let mut buffer = MemoryBuffer::new(frame, 1);
            let queue = match &self.delivery {
                Delivery::Card(card) => {
                    let (queue, hash) = card.queue(frame);
                    buffer.rss_hash = hash;
                    usize::from(queue)
                }
                Delivery::Silent(card, kinds) => {
                    let (queue, hash) = card.queue(frame);
                    let is_silent = card.clone().with_key(None, kinds).queue(frame).1.is_none();
                    buffer.rss_hash = hash.filter(|_| !is_silent);
                    usize::from(queue)
                }
                Delivery::InTurn => {
                    self.next += 1;
                    self.next % self.workers.len()
                }
            };
            self.workers[queue].port_mut(port).unwrap().arriving.push_back(buffer);
        }
    }

    /// For each client's packet at a backend, the gateway's end and the backend's. Every packet must arrive.
    pub fn towards_backends(&mut self, clients: &[(String, &str)], flags: u8) -> HashMap<String, (SocketAddr, SocketAddr)> {
        let mut seen = HashMap::new();
        for (from, to) in clients {
            self.put(UPLINK, &[Packet::tcp(from, to).flags(flags).build()]);
            let sent = self.sent(CLUSTER);
            assert_eq!(
                sent.len(),
                1,
                "{from} reaches a backend: {:?}",
                self.counters.iter().map(|c| c.account()).collect::<Vec<_>>()
            );
            seen.insert(from.clone(), ends(&sent[0]));
        }
        seen
    }

    /// Both sides reset their connections, which then end soon. Returns what [`Team::towards_backends`] does.
    pub fn abort(&mut self, clients: &[(String, &str)]) -> HashMap<String, (SocketAddr, SocketAddr)> {
        let seen = self.towards_backends(clients, tcp_flags::RST);
        self.answered(&seen, tcp_flags::RST);
        seen
    }

    /// Backends answer with these flags; asserts that each client gets its answer.
    pub fn answered(&mut self, seen: &HashMap<String, (SocketAddr, SocketAddr)>, flags: u8) {
        let reply = |(snat, backend): &(SocketAddr, SocketAddr)| {
            Packet::tcp(&backend.to_string(), &snat.to_string()).flags(flags).build()
        };
        let replies: Vec<_> = seen.values().map(reply).collect();
        self.put(CLUSTER, &replies);
        let answered: HashSet<_> = self.sent(UPLINK).iter().map(|frame| ends(frame).1.to_string()).collect();
        assert_eq!(answered, seen.keys().cloned().collect(), "every client gets its answer");
    }

    /// Opens connections, including the backend's answer and the client's acknowledgement.
    pub fn establish(&mut self, clients: &[(String, &str)]) -> HashMap<String, (SocketAddr, SocketAddr)> {
        let seen = self.towards_backends(clients, tcp_flags::SYN);
        self.answered(&seen, tcp_flags::SYN | tcp_flags::ACK);
        assert_eq!(self.towards_backends(clients, tcp_flags::ACK), seen, "a connection has one backend");
        seen
    }

    /// Packets that each worker has forwarded since the last call.
    pub fn forwarded(&mut self) -> Vec<usize> {
        let count = |worker: &mut Worker<MemoryPort, Log>| {
            let log = std::mem::take(&mut worker.observer_mut().0);
            log.iter().filter(|(outcome, _)| matches!(outcome, PacketOutcome::Forward(_))).count()
        };
        self.workers.iter_mut().map(count).collect()
    }

    /// What all queues of both ports have found out about a kind of packets.
    pub fn proofs_of(&self, kind: RssKind) -> Vec<Proof> {
        self.proofs.iter().flat_map(|port| port.iter().map(|proof| proof.read(kind))).collect()
    }

    pub fn sum(&self, counter: impl Fn(&WorkerCounters) -> u64) -> u64 {
        self.counters.iter().map(|counters| counter(counters)).sum()
    }

    pub fn drops(&self, reason: DropReason) -> u64 {
        self.sum(|counters| counters.drops(reason).get())
    }

    /// All clients send a packet and their backends answer. Every packet must arrive.
    pub fn exchange(&mut self, clients: &[(String, &str)], flags: u8) {
        let frames: Vec<_> = clients.iter().map(|(from, to)| Packet::tcp(from, to).flags(flags).build()).collect();
        self.put(UPLINK, &frames);
        let seen = self.sent(CLUSTER);
        assert_eq!(seen.len(), clients.len(), "every packet reaches a backend");
        let flags = if flags == tcp_flags::SYN { tcp_flags::SYN | tcp_flags::ACK } else { tcp_flags::ACK };
        let mappings: HashSet<(SocketAddr, SocketAddr)> = seen.iter().map(|frame| ends(frame)).collect();
        assert_eq!(mappings.len(), clients.len(), "no two flows look the same to a backend");
        let replies: Vec<_> = mappings
            .iter()
            .map(|(snat, backend)| Packet::tcp(&backend.to_string(), &snat.to_string()).flags(flags).build())
            .collect();
        self.put(CLUSTER, &replies);
        let mut answered: Vec<_> = self.sent(UPLINK).iter().map(|frame| ends(frame).1.to_string()).collect();
        let mut expected: Vec<_> = clients.iter().map(|(from, _)| from.clone()).collect();
        answered.sort_unstable();
        expected.sort_unstable();
        assert_eq!(answered, expected, "every client gets its answer");
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        for (n, counters) in self.counters.iter().enumerate() {
            let account = counters.account();
            assert!(account.closes(), "worker {n}: {account:?}");
        }
        let lost = self.sum(|c| c.handed_out.get()) - self.sum(|c| c.handed_in.get());
        assert_eq!(lost, 0, "what is handed out is handed in");
    }
}

/// Clients of both families, at many addresses.
pub fn clients(count: u16) -> Vec<(String, &'static str)> {
    let client = |n: u16| match n % 2 {
        0 => (format!("198.51.100.{}:{}", n % 200 + 1, 2000 + n), "192.0.2.100:80"),
        _ => (format!("[2001:db8:1::{}]:{}", n % 200 + 1, 2000 + n), "[2001:db8::1:0]:80"),
    };
    (0..count).map(client).collect()
}
