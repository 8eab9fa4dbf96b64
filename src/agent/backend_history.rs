//! History of backends: since when each is as it is, its last changes with their causes, its downtime of today, and its
//! last check.
//!
//! Invariant: everything is bounded: `BACKENDS_MAX` backends, [`CHANGES_MAX`] changes of each, `REMOVED_MAX` backends
//! that no Service lists any more. Readers hold the lock for as long as a copy takes. Not here: what decides about health
//! (`health`), and how the history is kept over restarts ([`HistoryFile`]).

mod file;
mod keeper;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dataplane::snapshot::{ServiceView, Views};

use super::backend_health::{Causes, Subject};
use super::served::backend_states;
pub use file::{HISTORY, HistoryFile};
pub use keeper::HistoryKeeper;

/// Changes that are kept of a backend, the newest ones.
pub const CHANGES_MAX: usize = 10;
/// Backends with a history; of others nothing is kept. Each takes up to 2 kB.
const BACKENDS_MAX: usize = 65_536;
/// Removed backends that are kept, those that were removed last.
const REMOVED_MAX: usize = 1_024;
/// Characters of a cause that are kept.
const CAUSE_MAX: usize = 160;
/// Seconds of a day.
const DAY_S: u64 = 86_400;
/// A backend flaps if it has changed this often between healthy and unhealthy within [`FLAPPING_WITHIN_S`].
const FLAPS_MIN: usize = 6;
const FLAPPING_WITHIN_S: u64 = 600;
/// Backends that are read without letting others take the lock: those of 0.2 ms.
const READ_AT_ONCE: usize = 1_024;

/// The time of day in seconds since 1970, as operators see times.
#[must_use]
pub fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// How a backend is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendCondition {
    /// It takes new flows.
    Healthy,
    /// Its probes fail.
    Unhealthy,
    /// It takes no new flows and will be removed.
    Draining,
    /// No Service lists it any more.
    Removed,
}

impl BackendCondition {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Healthy, Self::Unhealthy, Self::Draining, Self::Removed];

    /// The condition as a word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Unhealthy => "unhealthy",
            Self::Draining => "draining",
            Self::Removed => "removed",
        }
    }
}

/// A change of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendTurn {
    /// When, seconds since 1970.
    pub at_s: u64,
    /// What it became.
    pub to: BackendCondition,
    /// Why.
    pub cause: Arc<str>,
}

/// What is known of a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackendHistory {
    /// The last changes, the oldest first; at least one.
    pub changes: VecDeque<BackendTurn>,
    /// The day, since 1970 in UTC, of `down_s`.
    day: u64,
    /// Seconds of this day for which it was unhealthy, without the time since the last change.
    down_s: u64,
}

/// The last check of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastCheck {
    /// When it ended, seconds since 1970.
    pub at_s: u64,
    /// How long it took.
    pub took: Duration,
    /// What a check that failed has found.
    pub found: Result<(), Arc<str>>,
    /// Checks in a row that contradict the health of the backend.
    pub contrary: u32,
    /// As many of them change it: `rise`, while backends that flap are damped more, or `fall`.
    pub needed: u32,
}

/// The histories of all backends. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct BackendHistories(Arc<Mutex<Histories>>);

#[derive(Debug, Default)]
struct Histories {
    all: HashMap<Subject, BackendHistory>,
    checks: HashMap<Subject, LastCheck>,
    /// Unhealthy backends whose cause is not known yet.
    unexplained: HashSet<Subject>,
    services: Views,
    /// Whether Services have been followed, or these are the first since the gateway started.
    has_followed: bool,
    /// Whether anything has changed since it was saved.
    is_unsaved: bool,
    /// Whether it could not be saved the last time.
    is_save_failing: bool,
}

impl BackendHistory {
    /// How it is.
    #[must_use]
    pub fn condition(&self) -> Option<BackendCondition> {
        self.changes.back().map(|last| last.to)
    }

    /// Seconds of today, in UTC, for which it was unhealthy.
    #[must_use]
    pub fn down_today_s(&self, now_s: u64) -> u64 {
        let of_today = if self.day == now_s / DAY_S { self.down_s } else { 0 };
        let last = self.changes.back().filter(|last| last.to == BackendCondition::Unhealthy);
        let since_s = last.map_or(now_s, |last| last.at_s.max(now_s / DAY_S * DAY_S));
        of_today + now_s.saturating_sub(since_s)
    }

    fn turn(&mut self, to: BackendCondition, cause: &str, now_s: u64) {
        (self.down_s, self.day) = (self.down_today_s(now_s), now_s / DAY_S);
        if self.changes.len() == CHANGES_MAX {
            self.changes.pop_front();
        }
        self.changes.push_back(BackendTurn { at_s: now_s, to, cause: shortened(cause) });
    }

    /// How often it changed between healthy and unhealthy lately, if it flaps. A backend that is gone does not.
    fn flaps(&self, now_s: u64) -> Option<usize> {
        use BackendCondition::{Healthy, Removed, Unhealthy};
        if self.condition() == Some(Removed) {
            return None;
        }
        // A turn of the future was dated by a clock that was wrong.
        let is_lately = |turn: &BackendTurn| now_s.checked_sub(turn.at_s).is_some_and(|ago_s| ago_s <= FLAPPING_WITHIN_S);
        let pairs = self.changes.iter().zip(self.changes.iter().skip(1));
        let is_turn = |(from, to): &(&BackendTurn, &BackendTurn)| {
            matches!((from.to, to.to), (Healthy, Unhealthy) | (Unhealthy, Healthy)) && is_lately(to)
        };
        Some(pairs.filter(is_turn).count()).filter(|turns| *turns >= FLAPS_MIN)
    }
}

fn shortened(cause: &str) -> Arc<str> {
    let end = cause.char_indices().nth(CAUSE_MAX).map_or(cause.len(), |(at, _)| at);
    cause[..end].into()
}

impl BackendHistories {
    fn lock(&self) -> MutexGuard<'_, Histories> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Histories and last checks of these backends, in their order.
    pub fn of<'a>(&self, backends: impl IntoIterator<Item = &'a Subject>) -> Vec<(Option<BackendHistory>, Option<LastCheck>)> {
        self.read(backends, |known, backend| (known.all.get(backend).cloned(), known.checks.get(backend).cloned()))
    }

    /// Since when these backends are as they are, seconds since 1970, in their order.
    pub fn since_s<'a>(&self, backends: impl IntoIterator<Item = &'a Subject>) -> Vec<Option<u64>> {
        self.read(backends, |known, backend| Some(known.all.get(backend)?.changes.back()?.at_s))
    }

    /// Reads something of each of these backends. The lock is free between some and others, for probes that end.
    fn read<'a, T>(&self, backends: impl IntoIterator<Item = &'a Subject>, read: impl Fn(&Histories, &Subject) -> T) -> Vec<T> {
        let backends: Vec<&Subject> = backends.into_iter().collect();
        let mut all = Vec::with_capacity(backends.len());
        for some in backends.chunks(READ_AT_ONCE) {
            let known = self.lock();
            all.extend(some.iter().map(|backend| read(&known, backend)));
        }
        all
    }

    /// Backends that no Service lists any more, in their order.
    #[must_use]
    pub fn removed(&self) -> BTreeMap<Subject, BackendHistory> {
        let is_removed = |(_, history): &(&Subject, &BackendHistory)| history.condition() == Some(BackendCondition::Removed);
        self.lock().all.iter().filter(is_removed).map(|(backend, history)| (backend.clone(), history.clone())).collect()
    }

    /// Backends that flap, with the number of their changes.
    #[must_use]
    pub fn flapping(&self, now_s: u64) -> BTreeMap<Subject, usize> {
        let turns = |(backend, history): (&Subject, &BackendHistory)| Some((backend.clone(), history.flaps(now_s)?));
        self.lock().all.iter().filter_map(turns).collect()
    }

    /// Records a check of these backends.
    pub fn check<'a>(&self, backends: impl IntoIterator<Item = &'a Subject>, check: &LastCheck) {
        let mut known = self.lock();
        for backend in backends {
            if known.checks.len() < BACKENDS_MAX || known.checks.contains_key(backend) {
                known.checks.insert(backend.clone(), check.clone());
            }
        }
    }

    /// Forgets the checks of backends that are not checked any more.
    pub fn retain_checks(&self, is_checked: impl Fn(&Subject) -> bool) {
        self.lock().checks.retain(|backend, _| is_checked(backend));
    }

    /// Notes how backends have changed. Of Services that are the same as last time nothing is looked at.
    pub fn follow(&self, services: &Views, causes: &Causes, now_s: u64) {
        self.lock().follow(services, causes, now_s);
    }

    /// Takes over what an earlier process has kept.
    fn restore(&self, all: HashMap<Subject, BackendHistory>) {
        self.lock().all = all;
    }
}

impl Histories {
    fn follow(&mut self, services: &Views, causes: &Causes, now_s: u64) {
        let before = std::mem::replace(&mut self.services, services.clone());
        let is_first = !std::mem::replace(&mut self.has_followed, true);
        let mut gone: HashSet<Subject> = if is_first {
            // Those of an earlier process that are not listed now.
            self.all.keys().cloned().collect()
        } else {
            HashSet::new()
        };
        for (name, view) in &before {
            if !services.get(name).is_some_and(|now| Arc::ptr_eq(now, view)) {
                gone.extend(subjects(view).map(|(subject, _)| subject));
            }
        }
        for (name, view) in services {
            if before.get(name).is_some_and(|before| Arc::ptr_eq(before, view)) {
                continue;
            }
            for (subject, condition) in subjects(view) {
                gone.remove(&subject);
                let cause = self.cause(&subject, condition, is_first, causes);
                self.note(subject, condition, cause, now_s);
            }
        }
        for subject in gone {
            self.unexplained.remove(&subject);
            if let Some(history) = self.all.get_mut(&subject).filter(|of| of.condition() != Some(BackendCondition::Removed)) {
                history.turn(BackendCondition::Removed, "its Service no longer lists it", now_s);
                self.is_unsaved = true;
            }
        }
        self.explain(causes);
        self.forget_removed();
    }

    /// Why a backend is in this condition now. `is_first`: these are the first Services since the gateway started.
    fn cause<'a>(&self, subject: &Subject, condition: BackendCondition, is_first: bool, causes: &'a Causes) -> &'a str {
        match (condition, self.all.get(subject).and_then(BackendHistory::condition)) {
            (BackendCondition::Unhealthy, _) => causes.get(subject).map_or("", |cause| cause),
            (BackendCondition::Draining, _) => "it drains: its endpoint ends, or it is drained by hand",
            (_, None) if is_first => "the gateway started; nothing earlier is known",
            (_, None | Some(BackendCondition::Removed)) => "its Service lists it",
            (_, Some(BackendCondition::Draining)) => "it no longer drains",
            (_, Some(_)) => "its probes pass",
        }
    }

    fn note(&mut self, subject: Subject, condition: BackendCondition, cause: &str, now_s: u64) {
        let is_full = self.all.len() >= BACKENDS_MAX;
        let before = self.all.get(&subject).and_then(BackendHistory::condition);
        if before == Some(condition) || (before.is_none() && is_full) {
            return;
        }
        if condition == BackendCondition::Unhealthy && cause.is_empty() {
            self.unexplained.insert(subject.clone());
        } else {
            self.unexplained.remove(&subject);
        }
        self.all.entry(subject).or_default().turn(condition, cause, now_s);
        self.is_unsaved = true;
    }

    /// Causes are published a moment after health.
    fn explain(&mut self, causes: &Causes) {
        let Self { all, unexplained, is_unsaved, .. } = self;
        unexplained.retain(|subject| {
            let (Some(cause), Some(last)) = (causes.get(subject), all.get_mut(subject).and_then(|of| of.changes.back_mut()))
            else {
                return true;
            };
            last.cause = shortened(cause);
            *is_unsaved = true;
            false
        });
    }

    fn forget_removed(&mut self) {
        let removed_at = |history: &BackendHistory| {
            history.changes.back().filter(|last| last.to == BackendCondition::Removed).map(|last| last.at_s)
        };
        let mut removed: Vec<_> =
            self.all.iter().filter_map(|(subject, history)| Some((removed_at(history)?, subject.clone()))).collect();
        let surplus = removed.len().saturating_sub(REMOVED_MAX);
        if surplus > 0 {
            removed.sort();
            removed.iter().take(surplus).for_each(|(_, subject)| drop(self.all.remove(subject)));
        }
    }
}

/// The backends of a service, each with how it is.
fn subjects(view: &ServiceView) -> impl Iterator<Item = (Subject, BackendCondition)> {
    backend_states(view).into_iter().map(|((protocol, address), state)| {
        let condition = match (state.draining, state.healthy) {
            (true, _) => BackendCondition::Draining,
            (false, true) => BackendCondition::Healthy,
            (false, false) => BackendCondition::Unhealthy,
        };
        (Subject { service: Arc::clone(&view.name), protocol, address }, condition)
    })
}

#[cfg(test)]
mod tests;
