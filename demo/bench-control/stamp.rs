//! When a change reached each stage, on the clock of the log lines, and percentiles over many changes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A time of day in UTC, as in the log lines, with a resolution of 1 us. Differences are taken within one day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(Duration);

const DAY: Duration = Duration::from_secs(86_400);

impl Stamp {
    pub fn now() -> Self {
        SystemTime::now().into()
    }

    /// Reads `2026-01-01T12:34:56.123456Z`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split_once('T')?.1.trim_end_matches('Z').split(':');
        let mut whole = || parts.next()?.parse::<u64>().ok();
        let seconds = whole()? * 3600 + whole()? * 60;
        let rest = parts.next()?.parse::<f64>().ok()?;
        Some(Self(Duration::from_secs(seconds) + Duration::from_secs_f64(rest)))
    }

    /// Time since an earlier stamp. Stamps of two programs for one moment may differ by a few us: 0 if it is later.
    pub fn since(self, earlier: Self) -> Duration {
        let passed = if self.0 < earlier.0 && earlier.0 - self.0 > DAY / 2 { self.0 + DAY } else { self.0 };
        passed.saturating_sub(earlier.0)
    }
}

impl From<SystemTime> for Stamp {
    fn from(time: SystemTime) -> Self {
        let passed = time.duration_since(UNIX_EPOCH).unwrap();
        Self(Duration::new(passed.as_secs() % DAY.as_secs(), passed.subsec_nanos()))
    }
}

/// The stages of one generation.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The controller has planned and published it.
    pub planned: Option<Stamp>,
    /// Time from the first change that it contains.
    pub planning: Option<Duration>,
    /// The gateway has received all of it.
    pub received: Option<Stamp>,
    /// The gateway has published the snapshot to its workers.
    pub published: Option<Stamp>,
    /// Time to compile the snapshot.
    pub compiling: Option<Duration>,
    /// Every worker has taken the snapshot.
    pub reached: Option<Stamp>,
}

impl Trace {
    pub fn is_complete(&self) -> bool {
        self.planned.is_some() && self.received.is_some() && self.published.is_some() && self.reached.is_some()
    }

    pub fn reached(&self) -> Stamp {
        self.reached.unwrap()
    }
}

/// Times of many changes, each from its event at the controller's socket.
#[derive(Default)]
pub struct Stages {
    pub whole: Vec<Duration>,
    /// Until the plan, and the part of the planner.
    pub plan: Vec<Duration>,
    pub planner: Vec<Duration>,
    /// From the plan until the gateway has received it.
    pub send: Vec<Duration>,
    /// Until the snapshot is published, and the part of the compiler.
    pub publish: Vec<Duration>,
    pub compiler: Vec<Duration>,
    /// Until every worker has taken it.
    pub switch: Vec<Duration>,
}

impl Stages {
    /// Adds a change whose event was sent to the controller at `event`.
    pub fn add(&mut self, event: Stamp, trace: &Trace) {
        let [planned, received, published] = [trace.planned, trace.received, trace.published].map(Option::unwrap);
        self.whole.push(trace.reached().since(event));
        self.plan.push(planned.since(event));
        self.planner.extend(trace.planning);
        self.send.push(received.since(planned));
        self.publish.push(published.since(received));
        self.compiler.extend(trace.compiling);
        self.switch.push(trace.reached().since(published));
    }

    /// The rows of the stages: name and percentiles.
    pub fn rows(&self) -> [(&'static str, Spread); 6] {
        [
            ("event read and planned", Spread::of(&self.plan)),
            ("  of it, planner", Spread::of(&self.planner)),
            ("sent to the gateway", Spread::of(&self.send)),
            ("compiled and published", Spread::of(&self.publish)),
            ("  of it, compiler", Spread::of(&self.compiler)),
            ("taken by every worker", Spread::of(&self.switch)),
        ]
    }
}

/// Percentiles of many times.
#[derive(Clone, Copy)]
pub struct Spread {
    pub p50: Duration,
    pub p99: Duration,
    pub max: Duration,
}

impl Spread {
    pub fn of(times: &[Duration]) -> Self {
        let mut times = times.to_vec();
        times.sort_unstable();
        let at = |percent: usize| times.get((times.len() * percent / 100).min(times.len().saturating_sub(1)));
        let at = |percent: usize| at(percent).copied().unwrap_or_default();
        Self { p50: at(50), p99: at(99), max: at(100) }
    }
}
