//! `sessionAffinity: ClientIP`: the table of clients and the backends that they keep (FORWARDING 10).
//!
//! A client's first flow goes to the backend that the Maglev table gives for (service port, client address), so all
//! workers and gateways agree without exchanging messages. This table adds memory: after a change of endpoints, a known
//! client stays with its backend until it has begun no flow for the timeout. As with kube-proxy, each port of a service
//! remembers its clients separately, and each new flow restarts the timeout: once it is confirmed, since anybody can
//! send first packets in the name of any client.
//!
//! There is one table per gateway. An entry has two words: a keyed hash of (service port, client address), which stands
//! for the client, and the backend together with its expiry time. Two clients with the same 64-bit hash share a
//! backend.
//!
//! **Invariants:** readers never wait, and write at most once per [`Moment`] and client. A writer takes an entry by
//! exchanging its value for [`BUSY`] and releases it by storing the next value. When the table is full, newer clients
//! are not remembered and follow the hash; older ones keep their backend.
//!
//! Not here: whether the backend takes flows.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use zerocopy::FromZeros;

use super::entry::BackendId;
use super::tick::{Tick, Ticks};

/// Maximum number of remembered clients: the default number of flows of a worker. 1,048,576 * 16 B = 16 MiB, of which
/// only used pages are ever touched.
const CLIENTS_MAX: usize = 1 << 20;
/// Entries in a bucket: one cache line.
const BUCKET: usize = 4;
/// Buckets visited by a sweep: one page. 262,144 buckets take 4,096 ticks, 9 minutes.
const SWEPT_BUCKETS: u32 = 64;

/// Value of a free entry.
const FREE: u64 = 0;
/// Value of an entry that a writer holds.
const BUSY: u64 = 1;

/// Coarse time: 8 ticks, 1.07 s, modulo 2^24. Moments at most 104 days apart compare correctly; the longest timeout is
/// one day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment(u32);

impl Moment {
    const BITS: u32 = 24;

    pub(crate) const fn at(now: Tick) -> Self {
        Self(now.0 >> 3 & ((1 << Self::BITS) - 1))
    }

    /// The moment this much later, rounded up.
    const fn after(self, timeout: Ticks) -> Self {
        Self((self.0 + timeout.0.div_ceil(8)) & ((1 << Self::BITS) - 1))
    }

    const fn is_past(self, now: Self) -> bool {
        now.0.wrapping_sub(self.0) & ((1 << Self::BITS) - 1) < 1 << (Self::BITS - 1)
    }
}

/// A backend and its expiry time in one word: 18 bits of slot, 21 of generation, 24 of time. The lowest bit is 0, so
/// that the word is not [`BUSY`]; the slot counts from 1, so that it is not [`FREE`].
#[derive(Clone, Copy)]
struct Value {
    backend: BackendId,
    until: Moment,
}

impl Value {
    const SLOT: u32 = 18;
    const GENERATION: u32 = 64 - 1 - Moment::BITS - Self::SLOT;

    fn word(self) -> u64 {
        let generation = u64::from(self.backend.generation) & ((1 << Self::GENERATION) - 1);
        let slot = u64::from(self.backend.slot) + 1;
        (slot << Self::GENERATION | generation) << (Moment::BITS + 1) | u64::from(self.until.0) << 1
    }

    #[allow(clippy::cast_possible_truncation)] // the fields of a word
    fn of(word: u64) -> Option<Self> {
        if word == FREE || word & BUSY != 0 {
            return None;
        }
        let until = Moment((word >> 1) as u32 & ((1 << Moment::BITS) - 1));
        let id = word >> (Moment::BITS + 1);
        let (slot, generation) = ((id >> Self::GENERATION) as u32 - 1, id as u32 & ((1 << Self::GENERATION) - 1));
        Some(Self { backend: BackendId { slot, generation }, until })
    }
}

impl Value {
    /// The backend, if the entry has not expired and `keeps` accepts it.
    fn kept(self, now: Moment, keeps: impl Fn(BackendId) -> Option<BackendId>) -> Option<BackendId> {
        keeps(self.backend).filter(|_| !self.until.is_past(now))
    }
}

// Slot + 1 fits in its bits, and all fields together fit in 63 bits.
const _: () = assert!(crate::flow::entry::BACKEND_SLOTS < 1 << Value::SLOT);

#[derive(Debug, FromZeros)]
#[repr(C)]
struct AffinityEntry {
    key: AtomicU64,
    value: AtomicU64,
}

#[derive(Debug, FromZeros)]
#[repr(C, align(64))]
struct AffinityBucket([AffinityEntry; BUCKET]);

/// The affinity table for the clients of all services.
#[derive(Debug)]
pub(crate) struct AffinityTable {
    /// A power of two.
    buckets: Box<[AffinityBucket]>,
    /// Where the next sweep starts; only the sweeping worker uses it.
    swept: AtomicU32,
}

impl AffinityTable {
    /// An empty table; `None` without memory for it.
    pub(crate) fn new() -> Option<Self> {
        Self::with_capacity(CLIENTS_MAX)
    }

    fn with_capacity(clients: usize) -> Option<Self> {
        let buckets = (clients / BUCKET).next_power_of_two();
        let buckets = <[AffinityBucket]>::new_box_zeroed_with_elems(buckets).ok()?;
        Some(Self { buckets, swept: AtomicU32::new(0) })
    }

    /// Whether a remembered backend is this one, compared by the generation bits that the table keeps.
    pub(crate) const fn is(remembered: BackendId, backend: BackendId) -> bool {
        let mask = (1 << Value::GENERATION) - 1;
        remembered.slot == backend.slot && (remembered.generation ^ backend.generation) & mask == 0
    }

    /// The two buckets that a client may be in.
    #[allow(clippy::cast_possible_truncation)] // masked
    fn buckets(&self, client: u64) -> [&AffinityBucket; 2] {
        [client, client >> 32].map(|hash| &self.buckets[hash as usize & (self.buckets.len() - 1)])
    }

    /// The client's entry, with its word and decoded value.
    fn find(&self, client: u64) -> Option<(&AffinityEntry, u64, Value)> {
        self.buckets(client).into_iter().flat_map(|bucket| &bucket.0).find_map(|entry| {
            let word = entry.value.load(Ordering::Acquire);
            let value = Value::of(word)?;
            let is_clients = entry.key.load(Ordering::Acquire) == client && entry.value.load(Ordering::Acquire) == word;
            is_clients.then_some((entry, word, value))
        })
    }

    /// The backend of this client, even if the entry has expired but was not swept yet: for packets of a flow that is
    /// older than the lookup. The generation has 21 bits only.
    pub(crate) fn recall(&self, client: u64) -> Option<BackendId> {
        self.find(client).map(|(.., value)| value.backend)
    }

    /// The backend for a new flow of this client: the remembered one if `keeps` accepts it, otherwise a `new` one,
    /// which is then remembered.
    pub(crate) fn choose(
        &self,
        client: u64,
        now: Tick,
        timeout: Ticks,
        keeps: impl Fn(BackendId) -> Option<BackendId>,
        new: impl FnOnce() -> Option<BackendId>,
    ) -> Option<BackendId> {
        let now = Moment::at(now);
        let until = now.after(timeout);
        let found = self.find(client);
        let kept = found.and_then(|(.., value)| value.kept(now, keeps));
        let backend = kept.or_else(new)?;
        let next = Value { backend, until }.word();
        match found {
            Some((_, word, _)) if word == next => {}
            // If another worker was faster, its choice is as good.
            Some((entry, word, _)) => drop(entry.value.compare_exchange(word, next, Ordering::AcqRel, Ordering::Relaxed)),
            None => self.remember(client, next, now),
        }
        Some(backend)
    }

    /// The remembered clients: each with its backend and the time until it is forgotten, in [`Moment`]s.
    pub(crate) fn clients(&self, now: Tick) -> impl Iterator<Item = (u64, BackendId, u32)> {
        let now = Moment::at(now);
        self.buckets.iter().flat_map(|bucket| &bucket.0).filter_map(move |entry| {
            let value = Value::of(entry.value.load(Ordering::Acquire)).filter(|value| !value.until.is_past(now))?;
            let left = value.until.0.wrapping_sub(now.0) & ((1 << Moment::BITS) - 1);
            Some((entry.key.load(Ordering::Acquire), value.backend, left))
        })
    }

    /// Remembers a client of the process before, for `left` [`Moment`]s more. A client that is known already stays as
    /// it is.
    pub(crate) fn restore(&self, client: u64, backend: BackendId, left: u32, now: Tick) {
        let now = Moment::at(now);
        let until = Moment((now.0 + left) & ((1 << Moment::BITS) - 1));
        if self.find(client).is_none() && !until.is_past(now) {
            self.remember(client, Value { backend, until }.word(), now);
        }
    }

    /// The backend that [`AffinityTable::choose`] would remember for this client and `keeps` accepts.
    pub(crate) fn kept(&self, client: u64, now: Tick, keeps: impl Fn(BackendId) -> Option<BackendId>) -> Option<BackendId> {
        self.find(client).and_then(|(.., value)| value.kept(Moment::at(now), keeps))
    }

    /// Takes a free or expired entry of the emptier bucket, if there is one.
    fn remember(&self, client: u64, next: u64, now: Moment) {
        let free = |word: u64| word == FREE || Value::of(word).is_some_and(|value| value.until.is_past(now));
        let room = |bucket: &AffinityBucket| bucket.0.iter().filter(|entry| free(entry.value.load(Ordering::Relaxed))).count();
        let [a, b] = self.buckets(client);
        for entry in &(if room(b) > room(a) { b } else { a }).0 {
            let word = entry.value.load(Ordering::Acquire);
            if free(word) && entry.value.compare_exchange(word, BUSY, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                entry.key.store(client, Ordering::Release);
                entry.value.store(next, Ordering::Release);
                return;
            }
        }
    }

    /// Frees expired entries in the next buckets, long before the time wraps. One worker calls this once per tick.
    pub(crate) fn sweep(&self, now: Tick) {
        let now = Moment::at(now);
        let start = self.swept.load(Ordering::Relaxed) as usize;
        let end = (start + SWEPT_BUCKETS as usize).min(self.buckets.len());
        for entry in self.buckets[start..end].iter().flat_map(|bucket| &bucket.0) {
            let word = entry.value.load(Ordering::Acquire);
            if Value::of(word).is_some_and(|value| value.until.is_past(now)) {
                // If this fails, another worker has renewed the entry.
                let _ = entry.value.compare_exchange(word, FREE, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
        let next = if end == self.buckets.len() { 0 } else { end };
        self.swept.store(u32::try_from(next).unwrap_or(0), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::split_mix;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const HOUR: Ticks = Ticks(8 * 3600);

    fn id(slot: u32) -> BackendId {
        BackendId { slot, generation: 1 }
    }

    fn choose(table: &AffinityTable, client: u64, now: Tick, new: u32) -> u32 {
        table.choose(split_mix(client), now, HOUR, Some, || Some(id(new))).unwrap().slot
    }

    #[test]
    fn a_value_decodes_to_what_was_encoded() {
        let slot = u32::try_from(crate::flow::entry::BACKEND_SLOTS - 1).unwrap();
        for backend in [id(0), id(slot), BackendId { slot, generation: (1 << Value::GENERATION) - 1 }] {
            for until in [Moment(0), Moment((1 << Moment::BITS) - 1)] {
                let word = Value { backend, until }.word();
                assert!(word != FREE && word != BUSY);
                let value = Value::of(word).unwrap();
                assert_eq!((value.backend, value.until), (backend, until));
            }
        }
    }

    #[test]
    fn a_client_keeps_its_backend_for_the_timeout_after_its_last_new_flow() {
        let table = AffinityTable::with_capacity(64).unwrap();
        // Across the wrap of moments, 208 days after the start.
        let start = Tick(u32::MAX - 5000);
        let at = |ticks: u32| Tick(start.0.wrapping_add(ticks));
        assert_eq!(choose(&table, 1, at(0), 3), 3);
        assert_eq!(choose(&table, 1, at(HOUR.0 - 16), 4), 3, "within the hour");
        assert_eq!(choose(&table, 1, at(2 * HOUR.0 - 32), 4), 3, "an hour after that");
        assert_eq!(choose(&table, 1, at(3 * HOUR.0), 4), 4, "but not later");
        let elsewhere = table.choose(split_mix(1), at(3 * HOUR.0), HOUR, |_| None, || Some(id(5)));
        assert_eq!(elsewhere, Some(id(5)), "its backend takes no new flows");
        assert_eq!(choose(&table, 1, at(3 * HOUR.0), 6), 5);
        assert_eq!(table.choose(split_mix(2), at(0), HOUR, Some, || None), None, "there is no backend at all");
    }

    #[test]
    fn when_it_is_full_new_clients_are_not_remembered_and_old_ones_are() {
        let table = AffinityTable::with_capacity(16).unwrap();
        let clients = 0..100;
        clients.clone().for_each(|client| assert_eq!(choose(&table, client, Tick(0), 1), 1));
        let remembered: Vec<u64> = clients.filter(|&client| choose(&table, client, Tick(1), 2) == 1).collect();
        assert!((8..=16).contains(&remembered.len()), "{remembered:?}");
        assert!(remembered.iter().all(|&client| choose(&table, client, Tick(2), 3) == 1));
        (0..2).for_each(|_| table.sweep(Tick(2 * HOUR.0)));
        assert!(table.buckets.iter().flat_map(|b| &b.0).all(|entry| entry.value.load(Ordering::Relaxed) == FREE));
    }

    #[test]
    fn at_three_quarters_of_its_room_not_one_client_in_a_hundred_is_forgotten() {
        let table = AffinityTable::with_capacity(1 << 16).unwrap();
        let clients = 0..3 << 14;
        clients.clone().for_each(|client| assert_eq!(choose(&table, client, Tick(0), 1), 1));
        let forgotten = clients.filter(|&client| choose(&table, client, Tick(1), 2) != 1).count();
        assert!(forgotten < 491, "{forgotten} of 49,152");
    }

    #[test]
    fn concurrent_workers_never_read_the_backend_of_another_client() {
        let table = AffinityTable::with_capacity(64).unwrap();
        std::thread::scope(|scope| {
            for worker in 0..4_u64 {
                let table = &table;
                scope.spawn(move || {
                    for n in 0..40_000_u32 {
                        let client = split_mix(u64::from(n) ^ worker << 40) % 200;
                        // Time passes, so that entries change owners all the time.
                        let now = Tick(n * 8);
                        let own = id(u32::try_from(client).unwrap());
                        let found = table.choose(split_mix(client), now, Ticks(800), Some, || Some(own));
                        assert_eq!(found, Some(own));
                    }
                });
            }
        });
    }

    proptest! {
        #[test]
        fn the_table_remembers_what_a_map_with_timestamps_does(
            start in any::<u32>(),
            steps in proptest::collection::vec((0u64..12, 0u32..4000, 0u32..4, any::<bool>()), 1..200),
        ) {
            let table = AffinityTable::with_capacity(1024).unwrap();
            let mut model: HashMap<u64, (u32, u64)> = HashMap::new();
            // In moments since the start; the engine's time wraps, this one does not.
            let mut now: u64 = u64::from(start);
            for (client, passed, new, sweeps) in steps {
                now += u64::from(passed);
                #[allow(clippy::cast_possible_truncation)] // modulo 2^32, as ticks are
                let tick = Tick((now << 3) as u32);
                if sweeps {
                    (0..4).for_each(|_| table.sweep(tick));
                }
                let kept = model.get(&client).filter(|(_, until)| now < *until).map(|(backend, _)| *backend);
                prop_assert_eq!(choose(&table, client, tick, new), kept.unwrap_or(new));
                model.insert(client, (kept.unwrap_or(new), now + 3600));
            }
        }
    }
}
