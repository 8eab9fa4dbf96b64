//! A gateway over memory ports: two ports with Linux twins, three services, one worker. Tests put frames in, check what
//! leaves by which port, and check the account.
#![allow(dead_code, unreachable_pub, reason = "each program of tests uses a part of it")]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use dataplane::flow::FlowRecords;
use dataplane::forward::{Inquired, Inquiry, Mailbox};
use dataplane::testing::arriving_at;
use dataplane::{
    Buffer, Burst, Compiler, Config, DropReason, FlowLimits, Health, Mac, MemoryBuffer, MemoryPort, Neighbour, NeighbourRequest,
    Network, Observe, PacketFlow, PacketOutcome, Parts, PortConfig, PortIndex, Publisher, Route, Tunnel, TwinQueues, Worker,
    WorkerCounters,
};
use proto::limits::MAGLEV_HASH_VERSION;
use proto::{
    AddressRange, Announce, Backend, BackendState, Family, Generation, MaglevSpec, Mode, Pool, Protocol, Service, ServiceName,
    ServicePort, State,
};

pub const UPLINK: PortIndex = PortIndex(0);
pub const CLUSTER: PortIndex = PortIndex(1);
pub const UPLINK_MAC: Mac = Mac([2, 0, 0, 0, 0xaa, 1]);
pub const CLUSTER_MAC: Mac = Mac([2, 0, 0, 0, 0xaa, 2]);
pub const ROUTER_MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
pub const SECOND: u64 = 1_000_000_000;

/// Backends of the services: addresses and MACs end in the same number.
pub const BACKENDS: [u8; 3] = [11, 12, 13];

#[derive(Debug, Default)]
pub struct Log(pub Vec<(PacketOutcome, Option<PacketFlow>)>);

impl Observe<MemoryBuffer> for Log {
    /// It has no effect without flow records.
    const METERS: bool = true;

    fn observe(&mut self, _: &MemoryBuffer, outcome: PacketOutcome, belongs: impl FnOnce() -> Option<PacketFlow>) {
        self.0.push((outcome, belongs()));
    }
}

pub struct Rig {
    pub worker: Worker<MemoryPort, Log>,
    pub compiler: Compiler,
    pub publisher: Publisher,
    pub twins: Vec<Arc<TwinQueues<MemoryBuffer>>>,
    pub neighbour_requests: Arc<ArrayQueue<NeighbourRequest>>,
    pub mailbox: Arc<Mailbox>,
    pub counters: Arc<WorkerCounters>,
    pub state: State,
    pub network: Network,
    pub health: Health,
    pub now: u64,
}

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub fn config(max_flows: u32) -> Config {
    let port = |name: &str, mac, addresses: [&str; 2]| PortConfig {
        name: name.into(),
        mac,
        mtu: 1500,
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        twin: true,
    };
    Config {
        ports: vec![
            port("uplink", UPLINK_MAC, ["192.0.2.2/24", "2001:db8::2/64"]),
            port("cluster", CLUSTER_MAC, ["10.0.0.2/24", "fd00::2/64"]),
        ],
        snat: vec![ip("10.0.0.3"), ip("fd00::3")],
        node_port_addresses: vec![ip("192.0.2.2")],
        flows: FlowLimits { max_per_worker: max_flows, ..FlowLimits::default() },
        shared_snat: false,
        targets_max: dataplane::flow::TARGETS_MAX,
        tunnel: Tunnel::default(),
    }
}

pub fn service_port(
    protocol: Protocol,
    family: Family,
    vips: &[&str],
    port: u16,
    node_port: Option<u16>,
    target: u16,
) -> ServicePort {
    let backend = |n: u8| match family {
        Family::V4 => ip(&format!("10.0.0.{n}")),
        Family::V6 => ip(&format!("fd00::{n}")),
    };
    ServicePort {
        name: format!("{protocol}-{port}"),
        vips: vips.iter().map(|a| ip(a)).collect(),
        node_port,
        backends: BACKENDS
            .iter()
            .map(|n| Backend { address: SocketAddr::new(backend(*n), target), weight: 1, state: BackendState::Active })
            .collect(),
        ..ServicePort::new(protocol, family, port, MaglevSpec { size: 1021, seed: 0, hash_version: MAGLEV_HASH_VERSION })
    }
}

pub fn service(name: &str, ports: Vec<ServicePort>) -> (ServiceName, Arc<Service>) {
    let name = ServiceName::new("default", name);
    let service = Service::new(name.clone(), ports);
    (name, Arc::new(service))
}

pub fn state() -> State {
    let web = vec![
        service_port(Protocol::Tcp, Family::V4, &["192.0.2.100"], 80, None, 8080),
        service_port(Protocol::Tcp, Family::V6, &["2001:db8::1:0"], 80, None, 8080),
        service_port(Protocol::Sctp, Family::V4, &["192.0.2.100"], 80, None, 8080),
        service_port(Protocol::Sctp, Family::V6, &["2001:db8::1:0"], 80, None, 8080),
    ];
    let dns = vec![
        service_port(Protocol::Udp, Family::V4, &["192.0.2.101"], 53, None, 5353),
        service_port(Protocol::Udp, Family::V6, &["2001:db8::1:1"], 53, None, 5353),
    ];
    let node_port = vec![service_port(Protocol::Tcp, Family::V4, &[], 80, Some(30080), 8080)];
    let pool = |text: &str| text.parse::<AddressRange>().unwrap();
    State {
        generation: Generation { epoch: "test".into(), counter: 1 },
        services: [service("web", web), service("dns", dns), service("node-port", node_port)].into_iter().collect(),
        pools: vec![Pool {
            name: "default".into(),
            ranges: vec![pool("192.0.2.100-192.0.2.119"), pool("2001:db8::1:0/112")],
            announce: Announce::L2,
            bgp: proto::PoolBgp::default(),
        }],
    }
}

/// The Ethernet address of a port.
pub fn mac_of(port: PortIndex) -> Mac {
    if port == UPLINK { UPLINK_MAC } else { CLUSTER_MAC }
}

pub fn backend_mac(n: u8) -> Mac {
    Mac([2, 0, 0, 0, 1, n])
}

pub fn network() -> Network {
    let route = |to: &str, via: Option<&str>, port: PortIndex| Route {
        to: to.parse().unwrap(),
        via: via.map(ip),
        link: port.into(),
        weight: 1,
    };
    let neighbour = |port: PortIndex, address: &str, mac| Neighbour { link: port.into(), address: ip(address), mac };
    let mut neighbours = vec![
        neighbour(UPLINK, "192.0.2.1", ROUTER_MAC),
        neighbour(UPLINK, "2001:db8::ffff", ROUTER_MAC),
        neighbour(UPLINK, "192.0.2.10", Mac([2, 0, 0, 0, 0, 10])),
    ];
    for n in BACKENDS {
        neighbours.push(neighbour(CLUSTER, &format!("10.0.0.{n}"), backend_mac(n)));
        neighbours.push(neighbour(CLUSTER, &format!("fd00::{n}"), backend_mac(n)));
    }
    Network {
        routes: vec![
            route("192.0.2.0/24", None, UPLINK),
            route("2001:db8::/64", None, UPLINK),
            route("10.0.0.0/24", None, CLUSTER),
            route("fd00::/64", None, CLUSTER),
            route("0.0.0.0/0", Some("192.0.2.1"), UPLINK),
            route("::/0", Some("2001:db8::ffff"), UPLINK),
        ],
        neighbours,
        addresses: vec![ip("192.0.2.2"), ip("2001:db8::2"), ip("10.0.0.2"), ip("fd00::2")],
        ..Network::default()
    }
}

impl Rig {
    pub fn new() -> Self {
        Self::with_flows(1024)
    }

    pub fn with_flows(max_flows: u32) -> Self {
        let mut rig = Self::before_state(max_flows);
        rig.state = state();
        rig.network = network();
        rig.publish();
        rig
    }

    /// A gateway with these SNAT addresses.
    pub fn with_snat(max_flows: u32, addresses: &[&str]) -> Self {
        let snat = addresses.iter().map(|address| ip(address)).collect();
        let mut rig = Self::with_config(Config { snat, ..config(max_flows) });
        rig.state = state();
        rig.network = network();
        rig.publish();
        rig
    }

    /// A gateway before its first state.
    pub fn before_state(max_flows: u32) -> Self {
        Self::with_config(config(max_flows))
    }

    /// The same gateway with another configuration.
    pub fn with_config(config: Config) -> Self {
        let limits = config.flows.clone();
        let counters = Arc::new(WorkerCounters::default());
        let compiler = Compiler::new(config).counting(vec![counters.clone()]);
        let initial = compiler.initial();
        let (publisher, mut subscribers) = Publisher::new(initial, 1);
        let twins: Vec<_> = (0..2).map(|_| Arc::new(TwinQueues::new())).collect();
        let neighbour_requests = Arc::new(ArrayQueue::new(64));
        let mailbox = Arc::new(Mailbox::new(None));
        let worker = Worker::new(Parts {
            ports: twins.iter().map(|twin| (MemoryPort::default(), Some(twin.clone()))).collect(),
            subscriber: subscribers.remove(0),
            limits,
            counters: counters.clone(),
            neighbour_requests: neighbour_requests.clone(),
            seed: 7,
            peers: None,
            observer: Log::default(),
        })
        .unwrap()
        .answering(mailbox.clone());
        let (state, network, health) = (State::default(), Network::default(), Health::default());
        Self { worker, compiler, publisher, twins, neighbour_requests, mailbox, counters, state, network, health, now: SECOND }
    }

    /// Records flows from now on, into a queue of this length.
    pub fn record(&mut self, records: usize) -> Arc<FlowRecords> {
        let records = Arc::new(FlowRecords::new(records));
        self.worker.record(&records).unwrap();
        records
    }

    /// Publishes a snapshot of the current fields.
    pub fn publish(&mut self) {
        let snapshot = self.compiler.compile(&self.state, &self.network, &self.health, self.now);
        self.publisher.publish(snapshot);
        self.worker.poll(self.now);
        self.settle();
    }

    /// Gives a service of [`state`] another mode.
    pub fn set_mode(&mut self, service: &str, mode: Mode) {
        let name = ServiceName::new("default", service);
        let service = self.state.services.get_mut(&name).unwrap();
        *service = Arc::new(Service { mode, ..Service::clone(service) });
        self.publish();
    }

    /// Changes a service and publishes.
    pub fn change_service(&mut self, name: &ServiceName, change: impl FnOnce(&mut Service)) {
        change(Arc::make_mut(self.state.services.get_mut(name).unwrap()));
        self.publish();
    }

    /// A gateway whose services `web` and `dns` have this mode.
    pub fn with_mode(mode: Mode) -> Self {
        let mut rig = Self::new();
        rig.set_mode("web", mode);
        rig.set_mode("dns", mode);
        rig
    }

    /// Gives backends the ports of their services, as one-way modes require. To be published.
    pub fn set_backend_ports(&mut self) {
        for (name, service) in self.state.services.clone() {
            let mut changed = Service::clone(&service);
            for port in &mut changed.ports {
                let number = port.port;
                port.backends.iter_mut().for_each(|backend| backend.address.set_port(number));
            }
            self.state.services.insert(name, Arc::new(changed));
        }
    }

    /// Puts the backends of one family behind two routers.
    pub fn route_backends(&mut self, is_v4: bool) {
        let (net, routers) = match is_v4 {
            true => ("10.0.0.8/29", ["10.0.0.71", "10.0.0.72"]),
            false => ("fd00::10/124", ["fd00::71", "fd00::72"]),
        };
        for (n, router) in (1..).zip(routers) {
            let (address, mac) = (ip(router), Mac([2, 0, 0, 0, 2, n]));
            self.network.routes.push(Route { to: net.parse().unwrap(), via: Some(address), link: CLUSTER.into(), weight: 1 });
            self.network.neighbours.push(Neighbour { link: CLUSTER.into(), address, mac });
        }
    }

    /// Keeps only this service, which then has the flow table to itself.
    pub fn keep_service(&mut self, service: &str) {
        let name = ServiceName::new("default", service);
        let kept = self.state.services.remove(&name).unwrap();
        self.state.services = [(name, kept)].into_iter().collect();
        self.publish();
    }

    /// Keeps only these backends of a service, in both families.
    pub fn keep_backends(&mut self, service: &str, keep: &[u8]) {
        let name = ServiceName::new("default", service);
        let keep: Vec<IpAddr> = keep.iter().flat_map(|n| [ip(&format!("10.0.0.{n}")), ip(&format!("fd00::{n}"))]).collect();
        let mut changed = (*state().services[&name]).clone();
        changed.ports.iter_mut().for_each(|port| port.backends.retain(|backend| keep.contains(&backend.address.ip())));
        self.state.services.insert(name, Arc::new(changed));
        self.state.generation.counter += 1;
        self.publish();
    }

    /// Waits until all announcements are sent, so that tests see only what they cause.
    pub fn settle(&mut self) {
        for _ in 0..40 {
            self.now += SECOND / 8;
            self.worker.poll(self.now);
        }
        self.sent(UPLINK);
        self.sent(CLUSTER);
    }

    /// Publishes, and returns what is sent by the uplink until all announcements are sent.
    pub fn publish_and_watch(&mut self) -> Vec<Vec<u8>> {
        let snapshot = self.compiler.compile(&self.state, &self.network, &self.health, self.now);
        self.publisher.publish(snapshot);
        for _ in 0..40 {
            self.now += SECOND / 8;
            self.worker.poll(self.now);
        }
        self.sent(UPLINK)
    }

    pub fn settle_nothing_sent(&mut self) {
        for _ in 0..40 {
            self.now += SECOND / 8;
            self.worker.poll(self.now);
        }
        assert!(self.sent(UPLINK).is_empty() && self.sent(CLUSTER).is_empty());
    }

    pub fn sent(&mut self, port: PortIndex) -> Vec<Vec<u8>> {
        self.worker.port_mut(port).unwrap().sent.drain(..).map(|b| b.bytes().to_vec()).collect()
    }

    pub fn to_linux(&self, port: PortIndex) -> Vec<Vec<u8>> {
        let queue = &self.twins[usize::from(port.0)].to_linux;
        std::iter::from_fn(|| queue.pop()).flatten().map(|b| b.bytes().to_vec()).collect()
    }

    pub fn send_from_linux(&mut self, port: PortIndex, frame: &[u8]) {
        let mut burst = Burst::new();
        burst.push(MemoryBuffer::new(frame, 0));
        assert!(self.twins[usize::from(port.0)].from_linux.push(burst).is_ok());
        self.worker.poll(self.now);
    }

    /// Queues a frame, which the next poll receives.
    pub fn arrive(&mut self, port: PortIndex, frame: &[u8], id: u64) {
        let frame = arriving_at(mac_of(port), frame);
        self.worker.port_mut(port).unwrap().arriving.push_back(MemoryBuffer::new(&frame, id));
    }

    /// Puts one frame in and returns its outcome.
    pub fn put(&mut self, port: PortIndex, frame: &[u8]) -> Option<PacketOutcome> {
        self.worker.observer_mut().0.clear();
        self.arrive(port, frame, 1);
        self.worker.poll(self.now);
        self.worker.observer_mut().0.first().map(|(outcome, _)| *outcome)
    }

    /// Puts in one frame that must be forwarded, and returns what leaves.
    pub fn forward(&mut self, port: PortIndex, frame: &[u8]) -> Vec<u8> {
        let outcome = self.put(port, frame);
        let Some(PacketOutcome::Forward(out)) = outcome else { panic!("expected it forwarded, found {outcome:?}") };
        let mut sent = self.sent(out);
        assert_eq!(sent.len(), 1, "one packet in, one packet out");
        sent.remove(0)
    }

    /// Asks the worker.
    pub fn ask(&mut self, inquired: Inquired) -> Box<Inquiry> {
        self.mailbox.ask(Box::new(Inquiry::new(0, inquired))).unwrap();
        self.worker.poll(self.now);
        self.mailbox.take_answer().unwrap()
    }

    /// Drops for one reason that are counted for a service of [`state`].
    pub fn service_drops(&mut self, service: &str, reason: DropReason) -> u64 {
        let snapshot = self.compiler.compile(&self.state, &self.network, &self.health, self.now);
        snapshot.services()[&ServiceName::new("default", service)].drops.sum(reason)
    }

    pub fn drops(&self, reason: DropReason) -> u64 {
        self.counters.drops(reason).get()
    }

    /// Asserts that every packet was counted once.
    pub fn assert_account(&self) {
        let account = self.counters.account();
        assert!(account.closes(), "{account:?}");
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_account();
        }
    }
}

/// Source and destination of an untagged TCP or UDP frame without options or extension headers.
pub fn ends(frame: &[u8]) -> (SocketAddr, SocketAddr) {
    let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    if frame[12..14] == [8, 0] {
        let address = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).unwrap());
        (SocketAddr::new(address(26), port(34)), SocketAddr::new(address(30), port(36)))
    } else {
        let address = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&frame[at..at + 16]).unwrap());
        (SocketAddr::new(address(22), port(54)), SocketAddr::new(address(38), port(56)))
    }
}

pub fn hop_limit(frame: &[u8]) -> u8 {
    if frame[12..14] == [8, 0] { frame[22] } else { frame[21] }
}

pub fn last_byte(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(a) => a.octets()[3],
        IpAddr::V6(a) => a.octets()[15],
    }
}
