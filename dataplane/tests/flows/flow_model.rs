//! The flow table compared with a naive model: a vector of flows, idle limits checked one by one, and time that runs
//! across the wrap of the tick.

use std::time::Duration;

use dataplane::flow::PoolId;
use dataplane::flow::{
    BackendId, Direction, Flow, FlowBackend, FlowEnd, FlowIndex, FlowMode, FlowState, IdleLimits, Segment, SnatLease, YieldClass,
};
use dataplane::flow::{Tick, Ticks};
use dataplane::{FlowLimits, FlowTable, Transport, Tuple, tcp_flags};
use proptest::prelude::*;

const CAPACITY: u32 = 48;
const SECOND: u32 = 8; // ticks, rounded up

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A packet of the client: a new flow, or one more packet of its flow.
    Client(u32),
    /// A packet of the backend.
    Backend(u32),
    /// A FIN of the client, or of the backend.
    Fin(u32, Direction),
    /// This many seconds pass, and a few entries are swept.
    Pass(u32),
    /// The oldest flow of a class yields.
    Yield(YieldClass),
    /// The oldest flow of one pool yields.
    YieldOf(YieldClass, u32),
}

/// Flows from this one on are UDP.
const UDP_FROM: u32 = 48;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Opening,
    Answered,
    Established,
    /// Of the client, which nobody has acknowledged.
    Fin,
    HalfClosed,
    Closing,
    Refused,
    Unreplied,
    Exchange,
    Stream,
}

#[derive(Clone, Copy, Debug)]
struct ModelFlow {
    n: u32,
    class: Class,
    last_seen: u64,
    /// Order in which the flows entered their classes.
    since: u64,
}

fn step() -> impl Strategy<Value = Step> {
    (0u32..20, 0u32..64, 0u32..9).prop_map(|(kind, n, seconds)| match kind {
        0..=9 => Step::Client(n),
        10..=14 => Step::Backend(n),
        15 => Step::Fin(n, if seconds < 5 { Direction::ToBackend } else { Direction::ToClient }),
        16..=17 => Step::Pass(seconds),
        18 => Step::Yield(YieldClass::ALL[usize::from(seconds < 5)]),
        _ => Step::YieldOf(YieldClass::ALL[usize::from(seconds < 5)], n),
    })
}

fn flow(n: u32, now: Tick) -> Flow<u32> {
    let (protocol, state) = if n < UDP_FROM { (6, FlowState::TcpOpening) } else { (17, FlowState::UdpUnreplied) };
    let tuple = Tuple { source: 0x0a00_0000 + n, destination: 0xc000_0264, source_port: 4000, destination_port: 80, protocol };
    let lease = SnatLease { address: 0xac10_0002, port: 1024 + u16::try_from(n).unwrap(), pool: PoolId(n % 3) };
    let backend = FlowBackend { id: BackendId { slot: n, generation: 1 }, address: 0xac10_0001, port: 8080 };
    Flow::new(&tuple, state, FlowMode::Nat, backend, &lease, now)
}

impl Class {
    fn first(n: u32) -> Self {
        if n < UDP_FROM { Self::Opening } else { Self::Unreplied }
    }

    fn yields(self) -> Option<YieldClass> {
        match self {
            Self::Opening | Self::Answered | Self::Refused | Self::Unreplied => Some(YieldClass::Unconfirmed),
            Self::Exchange => Some(YieldClass::SingleExchange),
            Self::Established | Self::Fin | Self::HalfClosed | Self::Closing | Self::Stream => None,
        }
    }

    fn limit(self) -> u64 {
        match self {
            Self::Opening | Self::Answered => 30,
            Self::Established => 100,
            Self::Fin | Self::HalfClosed => 50,
            Self::Closing | Self::Refused => 10,
            Self::Unreplied => 20,
            Self::Exchange => 12,
            Self::Stream => 60,
        }
    }
}

fn limits() -> IdleLimits {
    let seconds = Duration::from_secs;
    let limits = FlowLimits {
        tcp_opening: seconds(30),
        tcp_established: seconds(100),
        tcp_half_closed: seconds(50),
        tcp_closing: seconds(10),
        udp_unreplied: seconds(20),
        udp_exchange: seconds(12),
        udp: seconds(60),
        ..FlowLimits::default()
    };
    IdleLimits::new(&limits)
}

struct Both {
    table: FlowTable<u32>,
    /// Unordered.
    model: Vec<ModelFlow>,
    /// Number of class changes so far.
    changes: u64,
    limits: IdleLimits,
    /// Ticks since a start that is 40 s before the wrap.
    now: u64,
    sweep: u32,
}

impl Both {
    fn tick(&self) -> Tick {
        Tick((u32::MAX - 40 * SECOND).wrapping_add(u32::try_from(self.now).unwrap()))
    }

    fn known(&mut self, n: u32) -> Option<&mut ModelFlow> {
        self.model.iter_mut().find(|known| known.n == n)
    }

    fn find(&self, n: u32) -> Option<FlowIndex> {
        let tuple = flow(n, Tick(0)).tuple(Direction::ToClient);
        self.table.search(self.table.hash(&tuple), &tuple).map(|(index, _)| index)
    }

    /// Applies one packet to both.
    fn packet(&mut self, n: u32, direction: Direction, flags: u8) {
        let now = self.now;
        let index = self.find(n).unwrap();
        // The backend acknowledges less than a FIN of the client; the client all.
        let segment = Segment { sequence: 41, acknowledgement: 42, end: if direction == Direction::ToBackend { 43 } else { 42 } };
        let tick = self.tick();
        let transport = if n < UDP_FROM { Transport::Tcp { flags } } else { Transport::Udp };
        let mut flow = self.table.advance(index, transport, direction, segment, tick);
        flow.last_seen = tick;
        self.table.set(index, &flow);
        self.changes += 1;
        let changes = self.changes;
        let known = self.known(n).unwrap();
        known.last_seen = now;
        let is_fin = flags & tcp_flags::FIN != 0;
        let before = known.class;
        known.class = match (before, direction) {
            (Class::Unreplied, Direction::ToClient) => Class::Exchange,
            (Class::Exchange, Direction::ToBackend) => Class::Stream,
            (Class::Unreplied | Class::Exchange | Class::Stream, _) => before,
            (Class::Established | Class::Fin, Direction::ToClient) if is_fin => Class::HalfClosed,
            (Class::Fin, Direction::ToClient) => Class::Established, // a SYN-ACK
            (Class::Established | Class::Answered, Direction::ToBackend) if is_fin => Class::Fin,
            (Class::HalfClosed, Direction::ToBackend) if is_fin => Class::Closing,
            (Class::Opening | Class::Answered, Direction::ToClient) if is_fin => Class::Refused,
            (Class::Opening | Class::Refused, Direction::ToClient) if !is_fin => Class::Answered,
            (Class::Answered, Direction::ToBackend) => Class::Established,
            (class, _) => class,
        };
        if known.class.yields() != before.yields() {
            known.since = changes;
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Client(n) if self.known(n).is_none() => {
                let inserted = self.table.insert(flow(n, self.tick()));
                assert_eq!(inserted.is_ok(), self.model.len() < CAPACITY as usize);
                if inserted.is_ok() {
                    self.changes += 1;
                    self.model.push(ModelFlow { n, class: Class::first(n), last_seen: self.now, since: self.changes });
                }
            }
            Step::Client(n) => self.packet(n, Direction::ToBackend, tcp_flags::ACK),
            Step::Backend(n) if self.known(n).is_some() => {
                self.packet(n, Direction::ToClient, tcp_flags::SYN | tcp_flags::ACK);
            }
            Step::Fin(n, direction) if self.known(n).is_some() => {
                self.packet(n, direction, tcp_flags::FIN | tcp_flags::ACK);
            }
            Step::Backend(_) | Step::Fin(..) => {}
            Step::Pass(seconds) => self.pass(seconds),
            Step::Yield(class) => self.take_oldest(|known| known.class.yields() == Some(class), self.table.oldest(class)),
            Step::YieldOf(class, n) => {
                let is_of = |known: &ModelFlow| known.class.yields() == Some(class) && known.n % 3 == n % 3;
                self.take_oldest(is_of, self.table.oldest_of(class, PoolId(n % 3)));
            }
        }
    }

    fn take_oldest(&mut self, is_of: impl Fn(&ModelFlow) -> bool, found: Option<(FlowIndex, Tick)>) {
        let expected = self.model.iter().enumerate().filter(|(_, known)| is_of(known)).min_by_key(|(_, known)| known.since);
        let expected = expected.map(|(at, _)| at);
        assert_eq!(found.is_some(), expected.is_some());
        if let (Some((index, _)), Some(at)) = (found, expected) {
            assert_eq!(self.table.remove(index, FlowEnd::Idle).backend.slot, self.model.remove(at).n);
        }
    }

    /// Time passes, and the whole table is swept seven entries at a time.
    fn pass(&mut self, seconds: u32) {
        self.now += u64::from(seconds * SECOND);
        self.table.set_time(self.tick());
        let (now, limits) = (self.tick(), self.limits);
        let over = |flow: &Flow<u32>| limits.is_over(flow, None, now);
        loop {
            self.sweep = self.table.sweep(self.sweep, 7, 1, over);
            if self.sweep == 0 {
                break;
            }
        }
        let now = self.now;
        self.model.retain(|known| now - known.last_seen < u64::from(Ticks::from(Duration::from_secs(known.class.limit())).0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn the_table_equals_a_vector(seed in any::<u64>(), steps in proptest::collection::vec(step(), 1..600)) {
        let table = FlowTable::new(CAPACITY, seed).unwrap();
        let mut both = Both { table, model: Vec::new(), changes: 0, limits: limits(), now: 0, sweep: 0 };
        both.table.set_time(both.tick());
        for step in steps {
            both.take(step);
            prop_assert_eq!(both.table.len() as usize, both.model.len());
            for n in 0..64 {
                let found = both.find(n).map(|index| both.table.get(index).state.yield_class());
                prop_assert_eq!(found, both.known(n).map(|known| known.class.yields()));
            }
        }
    }
}
