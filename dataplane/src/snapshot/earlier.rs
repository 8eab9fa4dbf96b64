//! The tables that a frontend had before its current one, for packets of connections that began at another gateway.
//!
//! In one-way modes a connection stays at the backend of the table by which it began, and only the gateway that saw its
//! SYN remembers which that was. When routers move the connection to another gateway, its packet does not say when it
//! began. So each entry of the table has candidates: the backends that it had, each for some time. A backend gets the
//! packet if, of the connections that exist now, probably most began while the entry had it. Ages of connections span
//! orders of magnitude: from [`YOUNGEST`] to [`HORIZON`], as many are 10 to 20 s old as 10 to 20 minutes. So a period
//! counts by the difference of the logarithms of the ages at its ends (docs/internals/decisions/0064).
//!
//! **Invariant:** tables are ordered, the newest first; there are at most [`TABLES_MAX`], none older than [`HORIZON`].
//!
//! Not here: how much memory all of them take (`compiler`), and packets of flows that the gateway knows.

use std::sync::Arc;
use std::time::Duration;

use proto::limits::{EARLIER_TABLES_HORIZON as HORIZON, EARLIER_TABLES_MAX as TABLES_MAX, EARLIER_TABLES_YOUNGEST as YOUNGEST};

use super::backends::{Backend, BackendTable};
use crate::choose::MaglevTable;
use crate::flow::{BackendId, Tick, Ticks};

const HORIZON_NS: u64 = HORIZON.as_secs() * 1_000_000_000;

/// A table that was replaced. Its times may be before the machine started; then they wrap, as ticks do.
#[derive(Debug)]
pub(crate) struct EarlierTable {
    pub(crate) table: Arc<MaglevTable>,
    /// Backends by position of the table.
    pub(crate) backends: Box<[BackendId]>,
    /// When it became the current table.
    pub(crate) since_ns: u64,
    /// When it was replaced.
    pub(crate) until_ns: u64,
}

impl EarlierTable {
    /// When it is no longer asked.
    pub(crate) fn over_ns(&self) -> u64 {
        self.until_ns.wrapping_add(HORIZON_NS)
    }

    /// Memory, bytes.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(self.table.entries()) + size_of_val(&*self.backends)
    }

    fn choose(&self, hash: u64) -> Option<BackendId> {
        self.backends.get(usize::from(self.table.choose(hash)?)).copied()
    }

    /// How much its period counts at `now_ns`.
    fn weight(&self, now_ns: u64) -> u32 {
        let now = Tick::at(now_ns);
        age_weight(now.since(Tick::at(self.since_ns))).saturating_sub(age_weight(now.since(Tick::at(self.until_ns))))
    }
}

/// The binary logarithm of an age plus [`YOUNGEST`], in units of 2^-16; linear between powers of two, so that it takes
/// no floating point. Ages above [`HORIZON`] count as that.
fn age_weight(age: Ticks) -> u32 {
    let bounded = age.0.min(Ticks::from(HORIZON).0) + Ticks::from(YOUNGEST).0;
    let exponent = bounded.ilog2();
    let fraction = (bounded << (31 - exponent) & 0x7fff_ffff) >> 15;
    exponent << 16 | fraction
}

/// The earlier tables of a frontend.
#[derive(Clone, Debug)]
pub(crate) struct EarlierTables {
    tables: Box<[Arc<EarlierTable>]>,
    /// How long a removed backend counts: connections end soon after the pod is told to terminate.
    grace: Ticks,
}

impl EarlierTables {
    /// These tables, the newest first.
    pub(crate) fn new(tables: Vec<EarlierTable>, grace: Duration) -> Self {
        Self { tables: tables.into_iter().map(Arc::new).collect(), grace: grace.into() }
    }

    /// The tables that are still asked at `now_ns` and were replaced after `forgotten_ns`, and `replaced`, the table
    /// that is replaced now. If there are too many, the one whose period counts least is left out.
    pub(crate) fn with(&self, replaced: Option<EarlierTable>, forgotten_ns: Option<u64>, grace: Duration, now_ns: u64) -> Self {
        let stays = |table: &&Arc<EarlierTable>| table.over_ns() > now_ns && forgotten_ns.is_none_or(|ns| table.until_ns > ns);
        let mut tables: Vec<Arc<EarlierTable>> = replaced.map(Arc::new).into_iter().collect();
        tables.extend(self.tables.iter().filter(stays).cloned());
        if tables.len() > TABLES_MAX {
            let least = (0..tables.len()).min_by_key(|&at| tables[at].weight(now_ns));
            least.map(|at| tables.remove(at));
        }
        Self { tables: tables.into(), grace: grace.into() }
    }

    /// Whether both share all tables.
    pub(crate) fn is_as(&self, other: &Self) -> bool {
        let are_same = |(one, other): (&Arc<_>, &Arc<_>)| Arc::ptr_eq(one, other);
        let is_as_long = self.tables.len() == other.tables.len() && self.grace == other.grace;
        is_as_long && self.tables.iter().zip(&other.tables).all(are_same)
    }

    /// The tables, the newest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &EarlierTable> {
        self.tables.iter().map(|table| &**table)
    }

    /// The backend that gets a mid-stream packet with this hash, if any that the entry had earlier is preferred over
    /// `current`, which it has since `since`. Backends that are gone or fail their probes do not count.
    pub(crate) fn choose(
        &self,
        hash: u64,
        current: Option<(BackendId, Tick)>,
        backends: &BackendTable,
        now: Tick,
    ) -> Option<BackendId> {
        let mut candidates = Candidates::default();
        if let Some((id, since)) = current {
            candidates.add(id, now.since(since), Ticks(0));
        }
        let oldest = self.tables.len().wrapping_sub(1);
        for (at, table) in self.tables.iter().enumerate() {
            let (Some(id), until) = (table.choose(hash), now.since(Tick::at(table.until_ns))) else { continue };
            let is_alive = |backend: &Backend| backend.failing.is_none() && (!backend.removed || until < self.grace);
            if candidates.has(id) || backends.get(id).is_some_and(is_alive) {
                // The table before the oldest one is not known. It probably was no different.
                let since = if at == oldest { Ticks::from(HORIZON) } else { now.since(Tick::at(table.since_ns)) };
                candidates.add(id, since, until);
            }
        }
        candidates.heaviest()
    }
}

/// The backends that an entry had, with the weight of the periods of each.
#[derive(Default)]
struct Candidates {
    found: [Option<(BackendId, u32)>; TABLES_MAX + 1],
}

impl Candidates {
    fn has(&self, id: BackendId) -> bool {
        self.found.iter().flatten().any(|(candidate, _)| *candidate == id)
    }

    /// Adds a period, by the ages of its beginning and its end.
    fn add(&mut self, id: BackendId, since: Ticks, until: Ticks) {
        let weight = age_weight(since).saturating_sub(age_weight(until));
        for entry in &mut self.found {
            match entry {
                Some((candidate, sum)) if *candidate == id => *sum += weight,
                Some(_) => continue,
                None => *entry = Some((id, weight)),
            }
            return;
        }
    }

    /// Of equal ones the newest.
    fn heaviest(&self) -> Option<BackendId> {
        let newest_first = self.found.iter().flatten().rev();
        newest_first.max_by_key(|(_, weight)| *weight).map(|(id, _)| *id)
    }
}
