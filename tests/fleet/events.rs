//! What can happen to a fleet, each as a function, and what became of the load.

use std::net::Ipv4Addr;
use std::time::{Duration, SystemTime};

use rustix::process::Signal;

use super::api_server::Availability;
use super::arp::{self, Claim};
use super::bed::{Bed, GATEWAYS, Way, late_target};
use super::edge::until;
use super::load::{Load, Record};
use super::vip_owners::has_joined;

/// The events, in the order in which they are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Kill,
    StopAndResume,
    NoCarrier,
    NoBackends,
    Partition,
    NoController,
    NoApiServer,
    RouterRestart,
    Upgrade,
}

impl Event {
    pub(crate) const ALL: [Self; 9] = [
        Self::Kill,
        Self::StopAndResume,
        Self::NoCarrier,
        Self::NoBackends,
        Self::Partition,
        Self::NoController,
        Self::NoApiServer,
        Self::RouterRestart,
        Self::Upgrade,
    ];

    /// Its name in the table.
    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Kill => "`kill -9` of a gateway, and its next start",
            Self::StopAndResume => "SIGSTOP of a gateway, and SIGCONT",
            Self::NoCarrier => "no carrier on the link of clients",
            Self::NoBackends => "no way to the cluster",
            Self::Partition => "partition between the gateways only",
            Self::NoController => "controller killed, and its next start",
            Self::NoApiServer => "no API server, until the controller leads no longer",
            Self::RouterRestart => "restart of the router",
            Self::Upgrade => "upgrade of all gateways, one after another",
        }
    }

    /// Its name in `SLUICE_FLEET_EVENTS`.
    const fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::StopAndResume => "stop",
            Self::NoCarrier => "no-carrier",
            Self::NoBackends => "no-backends",
            Self::Partition => "partition",
            Self::NoController => "no-controller",
            Self::NoApiServer => "no-api-server",
            Self::RouterRestart => "router-restart",
            Self::Upgrade => "upgrade",
        }
    }

    /// The events that `SLUICE_FLEET_EVENTS` names, separated by commas; all without it.
    pub(crate) fn selected() -> Vec<Self> {
        let Ok(names) = std::env::var("SLUICE_FLEET_EVENTS") else { return Self::ALL.into() };
        let known = || Self::ALL.map(Self::name).join(", ");
        let find = |name: &str| Self::ALL.into_iter().find(|event| event.name() == name);
        let expect = |name: &str| find(name).unwrap_or_else(|| panic!("found event {name:?}, expected {}", known()));
        names.split(',').map(expect).collect()
    }

    fn happen(self, bed: &mut Bed, victim: usize, load: &Load) -> Hit {
        match self {
            Self::Kill => kill(bed, victim, load),
            Self::StopAndResume => stop_and_resume(bed, victim, load),
            Self::NoCarrier => no_carrier(bed, victim, load),
            Self::NoBackends => no_backends(bed, victim, load),
            Self::Partition => partition(bed, load),
            Self::NoController => no_controller(bed, load),
            Self::NoApiServer => no_api_server(bed, load),
            Self::RouterRestart => router_restart(bed, load),
            Self::Upgrade => upgrade(bed),
        }
    }
}

/// What an event touched.
#[derive(Default)]
struct Hit {
    /// Gateways that were lost, for a while at least.
    gateways: Vec<usize>,
    /// Whether every VIP on the link may have moved.
    all_vips: bool,
    /// Whether the routes to all gateways went.
    all_routes: bool,
    /// A gateway that was resumed, and when.
    resumed: Option<(usize, Duration)>,
    /// From when on there may be only one owner again; none: at any time.
    healed: Option<Duration>,
}

impl Hit {
    fn of(gateway: usize) -> Self {
        Self { gateways: vec![gateway], ..Self::default() }
    }
}

/// An event, and what it did.
pub(crate) struct Outcome {
    pub(crate) record: Record,
    /// VIPs whose gateway the event touched, by name of the Service.
    pub(crate) touched: Vec<String>,
    /// Time of the event in the record.
    pub(crate) at_ms: u64,
    /// How long after a takeover requests were answered twice.
    pub(crate) double_answers: Vec<Duration>,
    /// Requests that a resumed gateway answered.
    pub(crate) answers_of_the_resumed: usize,
}

/// Lets an event happen under load.
pub(crate) fn run(bed: &mut Bed, event: Event, each: usize) -> Outcome {
    bed.settle(&format!("before: {}", event.title()));
    let file = bed.path("arp.pcap");
    let capture = bed.capture(&file);
    let load = Load::begin(bed, each);
    // For more than two seconds: then all flows are replicated.
    load.until_traffic_returns("before the event");
    let owners: Vec<Option<usize>> = bed.targets.iter().map(|target| bed.owner(&target.vip)).collect();
    let most = (0..GATEWAYS).max_by_key(|n| owners.iter().filter(|owner| **owner == Some(*n)).count());
    let at_ms = load.mark();
    let hit = event.happen(bed, most.unwrap(), &load);
    bed.settle(&format!("after: {}", event.title()));
    load.until_traffic_returns(event.title());
    let record = load.end();
    drop(capture);
    let is_touched = |n: usize| match bed.targets[n].way {
        Way::Link => hit.all_vips || owners[n].is_some_and(|owner| hit.gateways.contains(&owner)),
        Way::Router => hit.all_routes || !hit.gateways.is_empty(),
    };
    let touched = (0..bed.targets.len()).filter(|n| is_touched(*n)).map(|n| bed.targets[n].name.clone()).collect();
    let vips: Vec<Ipv4Addr> = bed.targets.iter().map(|target| target.vip.parse().unwrap()).collect();
    let claims = arp::claims(&file, &vips);
    Outcome {
        record,
        touched,
        at_ms,
        double_answers: doubles(&claims, hit.healed),
        answers_of_the_resumed: hit.resumed.map_or(0, |(n, at)| arp::answers_after(&claims, &Bed::mac(n), at)),
    }
}

/// Double answers; of gateways that could not hear each other, only those after the end of that, counted from there.
fn doubles(claims: &[Claim], healed: Option<Duration>) -> Vec<Duration> {
    let Some(healed) = healed else { return arp::double_answers(claims) };
    let after: Vec<Claim> = claims.iter().filter(|claim| claim.at > healed).cloned().collect();
    arp::double_answers(&after)
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap()
}

/// Waits until clients are served without a gateway.
fn leave(bed: &Bed, gateway: usize, load: &Load, what: &str) {
    until(&format!("{what}: no client is sent to the gateway"), || bed.is_left(gateway).then_some(()));
    load.until_traffic_returns(what);
}

fn kill(bed: &mut Bed, victim: usize, load: &Load) -> Hit {
    bed.signal(victim, Signal::KILL);
    assert_eq!(bed.wait_for_exit(victim), None);
    leave(bed, victim, load, "a killed gateway");
    bed.spawn(victim);
    Hit::of(victim)
}

fn stop_and_resume(bed: &mut Bed, victim: usize, load: &Load) -> Hit {
    bed.signal(victim, Signal::STOP);
    leave(bed, victim, load, "a stopped gateway");
    let resumed = now();
    bed.signal(victim, Signal::CONT);
    until("the resumed gateway stands for election again", || {
        let log = bed.log(victim);
        (log.contains("stands for election again") && has_joined(&log, super::bed::GROUPS)).then_some(())
    });
    Hit { resumed: Some((victim, resumed)), ..Hit::of(victim) }
}

fn no_carrier(bed: &mut Bed, victim: usize, load: &Load) -> Hit {
    bed.script(&format!("in_ns sw ip link set uplink{victim} down"));
    leave(bed, victim, load, "a gateway without a link to clients");
    bed.script(&format!("in_ns sw ip link set uplink{victim} up"));
    Hit::of(victim)
}

/// The link has a carrier, but leads nowhere.
fn no_backends(bed: &mut Bed, victim: usize, load: &Load) -> Hit {
    bed.script(&format!("in_ns sw ip link set cluster{victim} nomaster"));
    leave(bed, victim, load, "a gateway without a way to the cluster");
    bed.script(&format!("in_ns sw ip link set cluster{victim} master cluster"));
    Hit::of(victim)
}

/// Ports of a bridge that are isolated reach all others, but not each other.
fn partition(bed: &mut Bed, load: &Load) -> Hit {
    let isolate = |how: &str| {
        bed.script(&format!("for n in 0 1 2; do in_ns sw bridge link set dev uplink$n isolated {how}; in_ns sw bridge link set dev cluster$n isolated {how}; done"));
    };
    let contests = |n: usize| bed.log(n).matches("other gateways claim the same groups").count();
    let before: Vec<usize> = (0..GATEWAYS).map(contests).collect();
    isolate("on");
    until("every gateway hears of the contest", || (0..GATEWAYS).all(|n| contests(n) > before[n]).then_some(()));
    let is_decided = || bed.watch.owners().values().all(|macs| macs.len() == 1);
    until("one gateway answers for each VIP", || is_decided().then_some(()));
    load.until_traffic_returns("a partition of the gateways");
    isolate("off");
    Hit { all_vips: true, healed: Some(now()), ..Hit::default() }
}

fn no_controller(bed: &mut Bed, load: &Load) -> Hit {
    bed.end_controller();
    load.until_traffic_returns("no controller");
    bed.start_controller();
    Hit::default()
}

/// Gateways forward by what they know, and hear of what happened meanwhile once the API server is back.
fn no_api_server(bed: &mut Bed, load: &Load) -> Hit {
    bed.cluster.be(Availability::Down);
    let late = late_target();
    bed.cluster.create(&late);
    until("the controller cannot renew its Lease", || (0..GATEWAYS).all(|n| !bed.follows_controller(n)).then_some(()));
    load.until_traffic_returns("no API server");
    assert_eq!(bed.having(&late.vip), 0, "nobody can know it yet");
    bed.cluster.be(Availability::Up);
    until("what happened meanwhile arrives", || (bed.having(&late.vip) == GATEWAYS).then_some(()));
    bed.cluster.delete(&late);
    until("a deleted Service leaves", || (bed.having(&late.vip) == 0).then_some(()));
    Hit::default()
}

fn router_restart(bed: &mut Bed, load: &Load) -> Hit {
    bed.restart_router();
    load.until_traffic_returns("a restart of the router");
    Hit { all_routes: true, ..Hit::default() }
}

/// As docs/operate describes it: drain, wait, restart, end the drain, wait.
fn upgrade(bed: &mut Bed) -> Hit {
    for n in 0..GATEWAYS {
        let name = format!("edge-{n}");
        until("the drain begins", || bed.controller(&["drain", &name]));
        until("a drained gateway gets no clients", || bed.is_left(n).then_some(()));
        bed.signal(n, Signal::TERM);
        assert_eq!(bed.wait_for_exit(n), Some(0), "{}", bed.log(n));
        bed.spawn(n);
        until("the drain ends", || bed.controller(&["undrain", &name]));
        bed.settle("after the upgrade of a gateway");
    }
    Hit { gateways: (0..GATEWAYS).collect(), ..Hit::default() }
}
