//! Earlier tables: what is kept, and how many connections break when routers move them to a gateway that does not know
//! them.

use super::*;
use crate::flow::Tick;
use crate::wire::split_mix;

const MINUTE_NS: u64 = 60 * SECOND_NS;
const HOUR_NS: u64 = 60 * MINUTE_NS;
const VIP: &str = "192.0.2.100";

fn tuple(n: u64) -> Tuple<u32> {
    let [a, b, c, d, e, f, ..] = split_mix(n).to_be_bytes();
    Tuple {
        source: u32::from_be_bytes([a, b, c, d]),
        destination: v4(VIP),
        source_port: u16::from_be_bytes([e, f]),
        destination_port: 80,
        protocol: 6,
    }
}

fn frontend(snapshot: &Snapshot) -> &crate::snapshot::Frontend {
    snapshot.frontend(v4(VIP), 6, 80).unwrap()
}

fn new_flow(snapshot: &Snapshot, n: u64) -> BackendId {
    frontend(snapshot).choose_by_hash(&tuple(n)).unwrap()
}

fn mid_stream(snapshot: &Snapshot, n: u64, now_ns: u64) -> BackendId {
    frontend(snapshot).choose_mid_stream(&tuple(n), &snapshot.backends, Tick::at(now_ns)).unwrap()
}

/// A gateway with a service of mode `dsr` and tables of 1,021 entries.
fn with_backends(backends: &[u32]) -> Rig {
    let mut rig = Rig::new();
    rig.now_ns = 10 * HOUR_NS;
    let mut one = service("web", VIP, &[]);
    (one.mode, one.health.probe) = (Mode::Dsr, proto::Probe::None);
    one.ports[0].maglev.size = 1021;
    rig.put(one);
    set(&mut rig, backends);
    rig
}

fn set(rig: &mut Rig, backends: &[u32]) -> Snapshot {
    let list = |n: &u32| backend(&format!("{}:80", std::net::Ipv4Addr::from(v4("10.0.0.0") + n)));
    rig.change("web", |service| service.ports[0].backends = backends.iter().map(list).collect());
    rig.compile()
}

#[test]
fn an_entry_keeps_its_former_backend_until_the_new_one_has_had_it_for_four_minutes() {
    let mut rig = with_backends(&[11, 12, 13]);
    let before = rig.compile();
    rig.now_ns += HOUR_NS;
    let after = set(&mut rig, &[11, 12, 13, 14]);
    let moved: Vec<u64> = (0..1000).filter(|n| new_flow(&before, *n) != new_flow(&after, *n)).collect();
    assert!(moved.len() > 150, "{}", moved.len());
    let start = rig.now_ns;
    for (later_ns, is_former) in [(0, true), (3 * MINUTE_NS, true), (6 * MINUTE_NS, false), (HOUR_NS, false)] {
        rig.now_ns = start + later_ns;
        let now = rig.compile();
        let expected = if is_former { &before } else { &after };
        assert!(moved.iter().all(|n| mid_stream(&now, *n, rig.now_ns) == new_flow(expected, *n)), "after {later_ns} ns");
    }
    assert!((0..1000).all(|n| mid_stream(&after, n, start) == new_flow(&before, n)), "all others stay where they were");
    assert_eq!(rig.compiler.next_due_ns(), Some(start + 2 * HOUR_NS), "then the memory of the table is freed");
    rig.now_ns = start + 2 * HOUR_NS;
    assert_eq!(frontend(&rig.compile()).earlier.iter().count(), 0);
    assert_eq!(rig.compiler.next_due_ns(), None);
}

#[test]
fn a_table_in_force_for_long_outlives_the_many_steps_of_a_rolling_update() {
    let mut rig = with_backends(&[11, 12, 13, 14, 15]);
    let before = rig.compile();
    rig.now_ns += HOUR_NS;
    // The first backend stays, the others are replaced.
    for step in 0..4 {
        let old = (0..=4 - step).map(|n| 11 + n);
        let new = (0..=step).map(|n| 21 + n);
        set(&mut rig, &old.chain(new.clone()).collect::<Vec<_>>());
        rig.now_ns += 5 * SECOND_NS;
        set(&mut rig, &(0..4 - step).map(|n| 11 + n).chain(new).collect::<Vec<_>>());
        rig.now_ns += 5 * SECOND_NS;
    }
    let now = rig.compile();
    assert_eq!(frontend(&now).earlier.iter().count(), 4);
    let of_the_first =
        |snapshot: &Snapshot, n: &u64| snapshot.backend(new_flow(snapshot, *n)).unwrap().address.ip() == ip("10.0.0.11");
    let stayed: Vec<u64> = (0..1000).filter(|n| of_the_first(&before, n)).collect();
    assert!(stayed.iter().all(|n| mid_stream(&now, *n, rig.now_ns) == new_flow(&before, *n)));
    assert!(stayed.iter().any(|n| new_flow(&now, *n) != new_flow(&before, *n)), "by the current table not all of them");
}

#[test]
fn a_removed_backend_gets_mid_stream_packets_for_the_grace_and_one_that_fails_gets_none() {
    let mut rig = with_backends(&[11, 12]);
    let before = rig.compile();
    rig.now_ns += HOUR_NS;
    set(&mut rig, &[11]);
    let gone: Vec<u64> =
        (0..200).filter(|n| before.backend(new_flow(&before, *n)).unwrap().address.ip() == ip("10.0.0.12")).collect();
    let at_former = |rig: &mut Rig, later_ns| {
        rig.now_ns += later_ns;
        let now = rig.compile();
        gone.iter().filter(|n| mid_stream(&now, **n, rig.now_ns) == new_flow(&before, **n)).count()
    };
    assert_eq!(at_former(&mut rig, 50 * SECOND_NS), gone.len());
    assert_eq!(at_former(&mut rig, 15 * SECOND_NS), 0);
    let mut rig = with_backends(&[11, 12]);
    rig.change("web", |service| service.health.probe = proto::Probe::Tcp);
    let before = rig.compile();
    rig.now_ns += HOUR_NS;
    rig.health.failing.insert((Protocol::Tcp, "10.0.0.12:80".parse().unwrap()));
    let now = rig.compile();
    assert!(gone.iter().all(|n| mid_stream(&now, *n, rig.now_ns) != new_flow(&before, *n)));
}

#[test]
fn the_tables_that_were_replaced_first_make_room() {
    let mut rig = with_backends(&[11, 12]);
    let mut other = service("other", "192.0.2.101", &["10.0.1.11:80"]);
    other.mode = Mode::Dsr;
    rig.put(other);
    rig.compile();
    // A table of 1,021 entries takes 2,042 bytes, one of 251 takes 502, each backend 8 or more.
    rig.compiler.earlier_memory.bytes_max = 5_000;
    let kept = |rig: &mut Rig| {
        let snapshot = rig.compile();
        let of = |vip| snapshot.frontend(v4(vip), 6, 80).unwrap().earlier.iter().count();
        (of(VIP), of("192.0.2.101"))
    };
    let step = |rig: &mut Rig, web: &[u32]| {
        rig.now_ns += MINUTE_NS;
        set(rig, web);
    };
    rig.change("other", |service| service.ports[0].backends.push(backend("10.0.1.12:80")));
    assert_eq!(kept(&mut rig), (0, 1));
    step(&mut rig, &[11, 12, 13]);
    step(&mut rig, &[11, 12, 13, 14]);
    assert_eq!(kept(&mut rig), (2, 1));
    step(&mut rig, &[11, 12, 13, 14, 15]);
    assert_eq!(kept(&mut rig), (2, 0), "the oldest of both services go, until the rest has room");
    rig.state.services.clear();
    rig.compile();
    rig.put(service("web", VIP, &TWO));
    rig.compile();
    assert!(rig.compiler.earlier_memory.excess().is_none());
}

#[test]
fn two_way_modes_and_another_port_in_its_place_take_over_no_tables() {
    let mut rig = with_backends(&[11, 12]);
    rig.compile();
    rig.change("web", |service| service.ports[0].port = 81);
    set(&mut rig, &[11, 13]);
    assert_eq!(rig.compile().frontend(v4(VIP), 6, 81).unwrap().earlier.iter().count(), 0);
    set(&mut rig, &[11, 14]);
    assert_eq!(rig.compile().frontend(v4(VIP), 6, 81).unwrap().earlier.iter().count(), 1);
    rig.change("web", |service| service.mode = Mode::Dnat);
    assert_eq!(rig.compile().frontend(v4(VIP), 6, 81).unwrap().earlier.iter().count(), 0);
}

/// Numbers between 0 and 1.
struct Random(u64);

impl Random {
    fn word(&mut self) -> u32 {
        self.0 += 1;
        u32::try_from(split_mix(self.0) >> 32).unwrap()
    }

    fn next(&mut self) -> f64 {
        f64::from(self.word()) / 2f64.powi(32)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.word()).unwrap() % n
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.next()).ln()
    }
}

/// What happens to the backends of a service.
#[derive(Clone, Copy, Debug)]
enum Events {
    /// Every ten minutes one comes or goes.
    Autoscaling,
    /// Every 40 minutes all are replaced one by one, within about two minutes.
    RollingUpdates,
    /// Every ten minutes one is not ready for one to four minutes.
    NotReady,
}

/// Ages of the connections that exist at a time. With lifetimes that are exponentially distributed, ages have the same
/// distribution; with two kinds of connections, each counts by its number and its lifetime.
#[derive(Clone, Copy, Debug)]
enum Ages {
    /// Of 100 new connections 90 last 5 s on average and 10 last 10 minutes: of those that exist 7 % are short.
    Web,
    /// Lifetimes on average.
    Seconds(f64),
}

impl Ages {
    fn sample(self, random: &mut Random) -> f64 {
        match self {
            Self::Web if random.next() < 0.07 => random.exponential(5.0),
            Self::Web => random.exponential(600.0),
            Self::Seconds(mean) => random.exponential(mean),
        }
    }
}

/// The tables of a service over four hours.
struct Past {
    rig: Rig,
    /// Each with the time from which it was the current one.
    snapshots: Vec<(u64, Snapshot)>,
    listed: Vec<u32>,
    next: u32,
    /// When the process of a backend ended.
    ended_ns: BTreeMap<IpAddr, u64>,
}

fn ns(seconds: f64) -> u64 {
    u64::try_from(Duration::from_secs_f64(seconds).as_nanos()).unwrap()
}

impl Past {
    fn new() -> Self {
        let listed: Vec<u32> = (1..=10).collect();
        let mut rig = with_backends(&listed);
        let snapshots = vec![(0, rig.compile())];
        Self { rig, snapshots, listed, next: 11, ended_ns: BTreeMap::new() }
    }

    fn change(&mut self) {
        let snapshot = set(&mut self.rig, &self.listed);
        self.snapshots.push((self.rig.now_ns, snapshot));
    }

    fn add(&mut self) {
        self.listed.push(self.next);
        self.next += 1;
        self.change();
    }

    /// Kubernetes ends the process 30 s after it has removed the endpoint.
    fn terminate(&mut self, at: usize) {
        let gone = self.listed.remove(at);
        self.ended_ns.insert(IpAddr::V4((v4("10.0.0.0") + gone).into()), self.rig.now_ns + 30 * SECOND_NS);
        self.change();
    }

    fn event(&mut self, events: Events, random: &mut Random) {
        match events {
            Events::Autoscaling if self.listed.len() < 5 || random.next() < 0.5 => self.add(),
            Events::Autoscaling => self.terminate(random.below(self.listed.len())),
            Events::RollingUpdates => {
                for _ in 0..self.listed.len() {
                    self.add();
                    self.rig.now_ns += ns(1.0 + 3.0 * random.next());
                    self.terminate(0);
                    self.rig.now_ns += ns(2.0 + 13.0 * random.next());
                }
            }
            Events::NotReady => {
                let at = random.below(self.listed.len());
                let one = self.listed.remove(at);
                self.change();
                self.rig.now_ns += ns(60.0 + 180.0 * random.next());
                self.listed.insert(at, one);
                self.change();
            }
        }
    }

    /// The snapshot that was current then.
    fn at(&self, time_ns: u64) -> &Snapshot {
        &self.snapshots[self.snapshots.partition_point(|(since, _)| *since <= time_ns) - 1].1
    }

    /// The choices of a gateway that does not know the connection, by the rules of [`RULES`].
    fn choices(&self, now: &Snapshot, now_ns: u64, n: u64) -> [BackendId; RULES.len()] {
        let known = &self.snapshots[..self.snapshots.partition_point(|(since, _)| *since <= now_ns)];
        // Of the current and four earlier tables, the newest first: the choice, since when, and until when.
        let mut until = now_ns;
        let entry = known.iter().rev().take(5).map(|(since, snapshot)| {
            let one = (new_flow(snapshot, n), *since, until);
            until = *since;
            one
        });
        let entry: Vec<_> = entry.collect();
        let lives = |id: &BackendId| now.backend(*id).is_some();
        let current = entry[0].0;
        let earlier = |within_ns: u64| entry[1..].iter().filter(move |(id, _, until)| lives(id) && now_ns - until < within_ns);
        let one_earlier = entry.get(1).filter(|(id, _, until)| lives(id) && now_ns - until < MINUTE_NS);
        let mut times: BTreeMap<(u32, u32), u64> = BTreeMap::new();
        let from = now_ns.saturating_sub(15 * MINUTE_NS);
        for (id, since, until) in entry.iter().filter(|(id, ..)| lives(id)) {
            *times.entry((id.slot, id.generation)).or_default() += until.max(&from) - since.max(&from);
        }
        let longest = times.iter().max_by_key(|(_, time)| **time).map(|((slot, generation), _)| (*slot, *generation));
        [
            current,
            one_earlier.map_or(current, |(id, ..)| *id),
            earlier(15 * MINUTE_NS).next_back().map_or(current, |(id, ..)| *id),
            longest.map_or(current, |(slot, generation)| BackendId { slot, generation }),
            mid_stream(now, n, now_ns),
        ]
    }
}

/// The rules, ours last: the current table; the one before within a minute (until version 1.0); the oldest of four
/// within 15 minutes; the backend that the entry had longest within 15 minutes; the earlier tables as they are used.
const RULES: [&str; 5] = ["current", "one, 60 s", "oldest", "longest", "as built"];

/// Per thousand of the connections that routers move to a gateway that does not know them: those that it sends to
/// another backend although theirs lives, for each rule.
fn broken(events: Events, ages: Ages) -> [f64; RULES.len()] {
    let mut random = Random(7);
    let (mut connection, mut asked, mut wrong) = (0_u64, 0.0, [0.0; RULES.len()]);
    for _ in 0..3 {
        let mut past = Past::new();
        let pause = if matches!(events, Events::RollingUpdates) { 2400.0 } else { 600.0 };
        // The time until the first change, so that long connections have a past.
        past.rig.now_ns += 3 * HOUR_NS;
        let (start, mut rehash) = (past.rig.now_ns, past.rig.now_ns);
        while past.rig.now_ns < start + 4 * HOUR_NS {
            let next = past.rig.now_ns + ns(random.exponential(pause));
            // Routers rehash on average every five minutes, until the next change and during it.
            let mut moments = Vec::new();
            past.rig.now_ns = next;
            past.event(events, &mut random);
            while rehash < past.rig.now_ns {
                moments.push(rehash);
                rehash += ns(random.exponential(300.0));
            }
            for now_ns in moments {
                let now = past.at(now_ns).clone();
                for _ in 0..60 {
                    connection += 1;
                    let (age_ns, n) = (ns(ages.sample(&mut random)), connection);
                    let opened = past.at(now_ns.saturating_sub(age_ns));
                    let own = new_flow(opened, n);
                    let address = opened.backend(own).unwrap().address.ip();
                    if past.ended_ns.get(&address).is_some_and(|ended_ns| *ended_ns <= now_ns) {
                        continue;
                    }
                    asked += 1.0;
                    let choices = past.choices(&now, now_ns, n);
                    choices.iter().zip(&mut wrong).filter(|(id, _)| **id != own).for_each(|(_, wrong)| *wrong += 1.0);
                }
            }
        }
    }
    wrong.map(|wrong| 1000.0 * wrong / asked)
}

#[test]
fn of_the_rules_for_mid_stream_packets_the_one_that_is_built_breaks_least() {
    let all_ages = [Ages::Seconds(10.0), Ages::Seconds(120.0), Ages::Web, Ages::Seconds(900.0), Ages::Seconds(7200.0)];
    let mut means = [0.0; RULES.len()];
    let mut table = format!("{:32} {}\n", "broken, per thousand", RULES.map(|rule| format!("{rule:>10}")).join(" "));
    for (events, ages) in [Events::Autoscaling, Events::RollingUpdates, Events::NotReady]
        .into_iter()
        .flat_map(|events| all_ages.map(|ages| (events, ages)))
    {
        let rates = broken(events, ages);
        let row = rates.map(|rate| format!("{rate:10.1}")).join(" ");
        table += &format!("{:32} {row}\n", format!("{events:?}, {ages:?}"));
        rates.iter().zip(&mut means).for_each(|(rate, mean)| *mean += rate / 15.0);
    }
    let [others @ .., ours] = means;
    assert!(others.iter().all(|other| ours < *other), "{table}means {means:?}");
}

/// Earlier backends as a controller sends them, with their age in seconds.
fn sent(rig: &mut Rig, earlier: &[(&[u32], u64)]) -> Snapshot {
    let unix_s = 1_700_000_000;
    rig.compiler.set_time_of_day(unix_s * SECOND_NS, rig.now_ns);
    let backend = |n: &u32| backend(&format!("10.0.0.{n}:80"));
    let one = |&(backends, age_s): &(&[u32], u64)| proto::EarlierBackends {
        until_s: unix_s - age_s,
        maglev_size: 1021,
        backends: backends.iter().map(backend).collect(),
    };
    rig.change("web", |service| service.ports[0].earlier = earlier.iter().map(one).collect());
    rig.compile()
}

#[test]
fn a_gateway_that_joins_chooses_as_those_that_saw_the_earlier_backends() {
    // The machine of the second has just started.
    for start_ns in [10 * HOUR_NS, SECOND_NS] {
        let mut old = with_backends(&[11, 12, 13]);
        old.now_ns += HOUR_NS;
        set(&mut old, &[11, 12, 13, 14]);
        old.now_ns += 100 * SECOND_NS;
        set(&mut old, &[11, 12, 13, 14, 15]);
        let mut joined = Rig::new();
        joined.now_ns = start_ns;
        joined.state = old.state.clone();
        let mut last = sent(&mut joined, &[(&[11, 12, 13, 14], 0), (&[11, 12, 13], 100), (&[11, 12], 7200)]);
        for later_ns in [0, MINUTE_NS, 3 * MINUTE_NS, 10 * MINUTE_NS, HOUR_NS] {
            let (of_old, of_joined) = (old.compile(), joined.compile());
            let address = |snapshot: &Snapshot, now_ns, n| snapshot.backend(mid_stream(snapshot, n, now_ns)).unwrap().address;
            for n in 0..500 {
                assert_eq!(address(&of_joined, joined.now_ns, n), address(&of_old, old.now_ns, n), "{later_ns} ns later");
            }
            (old.now_ns, joined.now_ns) = (old.now_ns + later_ns, joined.now_ns + later_ns);
            last = of_joined;
        }
        assert_eq!(frontend(&last).earlier.iter().count(), 2);
        joined.now_ns += HOUR_NS;
        assert_eq!(frontend(&joined.compile()).earlier.iter().count(), 0, "their memory is freed");
    }
}

#[test]
fn earlier_backends_that_are_gone_and_lists_without_a_time_of_day_do_not_count() {
    let mut rig = with_backends(&[]);
    rig.state.services.clear();
    rig.compile();
    let now = with_backends(&[11, 12]).state;
    rig.state = now.clone();
    let snapshot = sent(&mut rig, &[(&[21, 22], 5)]);
    assert_eq!(frontend(&snapshot).earlier.iter().count(), 1);
    assert!((0..200).all(|n| mid_stream(&snapshot, n, rig.now_ns) == new_flow(&snapshot, n)));
    let mut unaware = Rig::new();
    unaware.state = rig.state.clone();
    assert_eq!(frontend(&unaware.compile()).earlier.iter().count(), 0);
}
