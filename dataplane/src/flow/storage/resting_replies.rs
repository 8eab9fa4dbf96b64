//! SNAT ports that rest although no pool of this worker has them: ports of flows of partners and of the process before.
//!
//! A server may hold the connection of an ended flow in TIME_WAIT. A gateway that takes over the SNAT address gives the
//! port to no other flow meanwhile, as its pools do with their own ports. A port is known by the hash of the replies to
//! it.
//!
//! **Invariant:** constant time and memory. 32 bits of a hash stand for a port: another port may count as resting by
//! mistake, and is used later. Where many flows end at once, the ports that have rested longest are forgotten first.
//!
//! Not here: ports of pools (`flow::snat`).

use proto::limits::SNAT_PORT_REST;

use crate::flow::tick::{Tick, Ticks};

/// Ports of a bucket, which is a cache line.
const PORTS: usize = 8;
/// Most ports, 8 MB: 17,476 a second that rest for a minute.
const PORTS_MAX: usize = 1 << 20;

/// Ports whose hashes have the same low bits: the upper half of the hash, never 0, and when the port was freed. 0:
/// none.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct RestingBucket([u64; PORTS]);

/// See the module.
#[derive(Debug)]
pub(super) struct RestingReplies {
    buckets: Box<[RestingBucket]>,
    rest: Ticks,
}

#[allow(clippy::cast_possible_truncation)] // halves
const fn parts(entry: u64) -> (u32, Tick) {
    ((entry >> 32) as u32, Tick(entry as u32))
}

/// The tag of a hash. Its lowest bit makes sure that it is not 0.
const fn tag_of(hash: u64) -> u32 {
    (hash >> 32) as u32 | 1
}

impl RestingReplies {
    /// For a table with room for this many flows: half as many ports.
    pub(super) fn new(flows: usize) -> Self {
        let buckets = (flows / 2).clamp(64 * PORTS, PORTS_MAX).div_ceil(PORTS).next_power_of_two();
        Self { buckets: vec![RestingBucket::default(); buckets].into(), rest: SNAT_PORT_REST.into() }
    }

    #[allow(clippy::cast_possible_truncation)] // a remainder
    fn position(&self, hash: u64) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    /// A port rests that was freed then.
    pub(super) fn add(&mut self, hash: u64, freed: Tick, now: Tick) {
        let tag = tag_of(hash);
        let bucket = &mut self.buckets[self.position(hash)].0;
        // Its own entry, a free one, or that of the port that has rested longest.
        let order = |entry: &&mut u64| match parts(**entry) {
            (known, _) if known == tag => (2, 0),
            (0, _) => (1, 0),
            (_, freed) => (0, now.since(freed).0),
        };
        if let Some(entry) = bucket.iter_mut().max_by_key(order) {
            *entry = u64::from(tag) << 32 | u64::from(freed.0);
        }
    }

    /// For how long a port has rested; `None`: it need not rest, or no longer.
    pub(super) fn age(&self, hash: u64, now: Tick) -> Option<Ticks> {
        let tag = tag_of(hash);
        let entries = self.buckets[self.position(hash)].0.iter().map(|entry| parts(*entry));
        let age = entries.filter(|(known, _)| *known == tag).map(|(_, freed)| now.since(freed)).next()?;
        (age < self.rest).then_some(age)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Tick {
        Tick::at(seconds * 1_000_000_000)
    }

    #[test]
    fn a_port_rests_for_a_minute_from_its_last_end_on() {
        let mut resting = RestingReplies::new(1000);
        let hash = 0x1234_5678_0000_0007;
        assert_eq!(resting.age(hash, at(10)), None);
        resting.add(hash, at(10), at(10));
        assert_eq!(resting.age(hash, at(10)), Some(Ticks(0)));
        assert_eq!(resting.age(hash, at(40)), Some(at(40).since(at(10))));
        assert_eq!(resting.age(hash, at(71)), None);
        resting.add(hash, at(70), at(70));
        assert!(resting.age(hash, at(100)).is_some());
        assert_eq!(resting.age(hash ^ 1 << 40, at(100)), None, "another port of the same bucket");
        resting.add(1, at(100), at(100));
        assert!(resting.age(1, at(100)).is_some(), "a hash without upper bits is one too");
        // A port that was freed by the process before.
        resting.add(9, at(100 - 50), at(100));
        assert_eq!((resting.age(9, at(105)).is_some(), resting.age(9, at(111))), (true, None));
    }

    #[test]
    fn a_full_bucket_forgets_the_port_that_has_rested_longest() {
        let mut resting = RestingReplies::new(1);
        let hash = |n: u64| (n + 1) << 33 | 5;
        for n in 0..PORTS as u64 {
            resting.add(hash(n), at(10 + n), at(10 + n));
        }
        resting.add(hash(3), at(30), at(30));
        resting.add(hash(100), at(31), at(31));
        let rest = |n: u64| resting.age(hash(n), at(31)).is_some();
        assert!(!rest(0) && rest(100) && (1..PORTS as u64).all(rest));
    }

    #[test]
    fn memory_follows_the_table_within_bounds() {
        let ports = |flows| RestingReplies::new(flows).buckets.len() * PORTS;
        assert_eq!((ports(1), ports(1 << 16), ports(1 << 26)), (512, 1 << 15, PORTS_MAX));
        assert_eq!(size_of::<RestingBucket>(), 64);
    }
}
