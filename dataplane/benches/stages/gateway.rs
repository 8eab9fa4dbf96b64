//! A gateway of one worker whose ports hold one burst, which stages fill and empty.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use dataplane::flow::FlowReplication;
use dataplane::wire::checksum;
use dataplane::{
    BURST, Buffer, Burst, Compiler, Config, Health, MemoryBuffer, Network, OwnedGroups, Parts, Port, PortIndex, Publisher,
    VipAnswers, Worker, WorkerCounters,
};
use proto::State;

/// Bursts per measurement: enough that the first one, with cold predictors, does not matter.
pub(crate) const BURSTS: usize = 64;
/// The port of clients.
pub(crate) const UPLINK: PortIndex = PortIndex(0);
/// The port of backends.
pub(crate) const CLUSTER: PortIndex = PortIndex(1);

/// A port that the benchmark fills and empties: one burst in, one burst out, each buffer reused.
#[derive(Default)]
pub(crate) struct BurstPort {
    arriving: Burst<MemoryBuffer>,
    sent: Burst<MemoryBuffer>,
    dropped: usize,
}

impl Port for BurstPort {
    type Buffer = MemoryBuffer;

    fn receive(&mut self, burst: &mut Burst<MemoryBuffer>) {
        std::mem::swap(burst, &mut self.arriving);
    }

    fn transmit(&mut self, burst: &mut Burst<MemoryBuffer>) {
        std::mem::swap(burst, &mut self.sent);
    }

    fn allocate(&mut self) -> Option<MemoryBuffer> {
        Some(MemoryBuffer::default())
    }

    fn release(&mut self, burst: &mut Burst<MemoryBuffer>) {
        self.dropped += burst.len();
        burst.clear();
    }
}

/// A gateway with one worker.
pub(crate) struct Gateway {
    worker: Worker<BurstPort>,
    pub(crate) replication: Arc<FlowReplication>,
    _publisher: Publisher,
    /// The time of the last poll.
    pub(crate) now_ns: u64,
}

impl Gateway {
    /// A gateway that has announced its addresses. `owned`: the groups of VIPs that it owns, where flows are
    /// replicated.
    pub(crate) fn new(config: Config, network: &Network, state: &State, owned: Option<u64>) -> Self {
        let mut compiler = Compiler::new(config.clone());
        // One VIP group, where flows are replicated.
        let groups = owned.map(|owned| OwnedGroups { groups: 1, owned });
        compiler.answer_for(&VipAnswers { groups, ..VipAnswers::default() });
        let (mut publisher, mut subscribers) = Publisher::new(compiler.initial(), 1);
        publisher.publish(compiler.compile(state, network, &Health::default(), 0));
        let worker = Worker::new(Parts {
            ports: config.ports.iter().map(|_| (BurstPort::default(), None)).collect(),
            subscriber: subscribers.remove(0),
            limits: config.flows,
            counters: Arc::new(WorkerCounters::default()),
            neighbour_requests: Arc::new(ArrayQueue::new(64)),
            peers: None,
            seed: 7,
            observer: (),
        });
        let replication = Arc::new(FlowReplication::new(BURSTS * BURST, Duration::from_secs(1)));
        let mut gateway = Self { worker: worker.unwrap(), replication, _publisher: publisher, now_ns: 1_000_000_000 };
        if owned.is_some() {
            gateway.worker.replicate(Arc::clone(&gateway.replication));
        }
        // All addresses are announced before the first packet.
        for _ in 0..100 {
            gateway.now_ns += 100_000_000;
            for index in 0..config.ports.len() {
                let port = PortIndex(u8::try_from(index).unwrap());
                gateway.pass(Self::poll, port, port, Burst::new());
            }
        }
        gateway
    }

    fn port(&mut self, port: PortIndex) -> &mut BurstPort {
        self.worker.port_mut(port).unwrap()
    }

    /// Puts a burst in at one port, and takes the packets that leave at another.
    pub(crate) fn pass(
        &mut self,
        poll: fn(&mut Self),
        from: PortIndex,
        to: PortIndex,
        burst: Burst<MemoryBuffer>,
    ) -> Burst<MemoryBuffer> {
        self.port(from).arriving = burst;
        poll(self);
        std::mem::take(&mut self.port(to).sent)
    }

    pub(crate) fn poll(&mut self) {
        self.now_ns += 1000;
        self.worker.poll(self.now_ns);
    }
}

/// An address.
pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A packet that answers `sent`: source and destination are swapped, which does not change sums, and the flags differ.
pub(crate) fn answer(sent: &MemoryBuffer, flags: u8) -> MemoryBuffer {
    let mut bytes = sent.bytes().to_vec();
    // The tag is that of the link already.
    let tag: Vec<u8> = bytes.drain(12..if bytes[12..14] == [0x81, 0] { 16 } else { 12 }).collect();
    let (addresses, len) = if bytes[12..14] == [8, 0] { (26, 4) } else { (22, 16) };
    let swap = |bytes: &mut [u8], at: usize, len: usize| (0..len).for_each(|n| bytes.swap(at + n, at + len + n));
    swap(&mut bytes, 0, 6);
    swap(&mut bytes, addresses, len);
    let tcp = addresses + 2 * len;
    swap(&mut bytes, tcp, 2);
    let change = checksum::word_delta(bytes[tcp + 13].into(), flags.into());
    bytes[tcp + 13] = flags;
    let sum = checksum::apply(u16::from_be_bytes([bytes[tcp + 16], bytes[tcp + 17]]), change);
    bytes[tcp + 16..tcp + 18].copy_from_slice(&sum.to_be_bytes());
    bytes.splice(12..12, tag);
    MemoryBuffer::new(&bytes, 0)
}
