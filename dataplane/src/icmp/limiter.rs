//! Rate limits of the answers that a worker originates: one for all of them, and one for each /24 (IPv4) or /56 (IPv6)
//! of requesters (FORWARDING section 8). "Fragmentation needed" and "packet too big" have limits of their own: a flood
//! to a closed port must not end path MTU discovery.
//!
//! **Invariant:** memory is fixed at creation; a check costs two comparisons. Networks that share a bucket share its
//! rate, which only ever allows fewer answers.
//!
//! Not here: which answer is sent, and the counting of refused ones.

use std::net::IpAddr;

use proto::Family;

use crate::port::TokenBucket;
use crate::wire::Address;

/// Answers per second of one worker. The largest is an ICMPv6 error of 1,294 bytes; 20,000 of them are 207 Mbit/s. At
/// about 100 ns each they take 0.2 % of a core.
pub const ANSWERS_PER_SECOND: u32 = 20_000;
/// Answers per second to one /24 or /56: enough for a full subnet whose hosts resolve their gateway four times.
pub const ANSWERS_PER_SECOND_AND_NETWORK: u32 = 1_000;
/// Number of network buckets of a limit: 4,096 * 8 bytes = 32 KiB, which stay in a core's cache under a flood.
const BUCKETS: usize = 4_096;

/// The rate limits of one worker.
#[derive(Debug)]
pub struct AnswerLimiter {
    seed: u64,
    answers: Limit,
    too_big: Limit,
}

/// A limit of all requesters together, and of each network.
#[derive(Debug)]
struct Limit {
    all: TokenBucket,
    networks: Box<[TokenBucket; BUCKETS]>,
}

impl Limit {
    fn full() -> Self {
        Self { all: TokenBucket::default(), networks: Box::new([TokenBucket::default(); BUCKETS]) }
    }

    fn allow(&mut self, bucket: usize, now_ns: u64) -> bool {
        let Some(network) = self.networks.get_mut(bucket) else { return false };
        let all = self.all.after_one(now_ns, ANSWERS_PER_SECOND);
        let Some(both) = all.zip(network.after_one(now_ns, ANSWERS_PER_SECOND_AND_NETWORK)) else { return false };
        (self.all, *network) = both;
        true
    }
}

impl AnswerLimiter {
    /// Creates full buckets. `seed` is a random number of the process, so that no sender can choose networks that share
    /// a bucket with a victim's.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed, answers: Limit::full(), too_big: Limit::full() }
    }

    /// [`AnswerLimiter::allow`], for an address of either family.
    pub fn allow_ip(&mut self, source: IpAddr, now_ns: u64) -> bool {
        match source {
            IpAddr::V4(source) => self.allow(u32::from(source), now_ns),
            IpAddr::V6(source) => self.allow(u128::from(source), now_ns),
        }
    }

    /// Whether `source` may be answered now; if so the answer is counted. `now_ns` is monotonic.
    pub fn allow<A: Address>(&mut self, source: A, now_ns: u64) -> bool {
        self.answers.allow(bucket_of(source, self.seed), now_ns)
    }

    /// Whether an error that a packet is too big may go to `source` now; if so it is counted. The rates are those of
    /// answers, and separate from these.
    pub fn allow_too_big<A: Address>(&mut self, source: A, now_ns: u64) -> bool {
        self.too_big.allow(bucket_of(source, self.seed), now_ns)
    }
}

/// The bucket of an address's network.
fn bucket_of<A: Address>(source: A, seed: u64) -> usize {
    let network = match A::FAMILY {
        Family::V4 => (source.wide() >> 8 & 0xff_ffff) as u64,
        Family::V6 => (source.wide() >> 72) as u64,
    };
    // Two rounds of multiply and shift spread every input bit over the index; the rotated seed keeps them secret.
    let mixed = (network ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 29) ^ seed.rotate_left(32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 32) as usize % BUCKETS
}

#[cfg(test)]
mod tests {
    use super::*;

    const NS_PER_SECOND: u64 = 1_000_000_000;

    /// Answers allowed to one request per microsecond during one second, both ends included.
    fn allowed_in_a_second<A: Address>(limiter: &mut AnswerLimiter, from_ns: u64, source: impl Fn(u32) -> A) -> u32 {
        (0..=1_000_000_u32).map(|i| u32::from(limiter.allow(source(i), from_ns + u64::from(i) * 1_000))).sum()
    }

    #[test]
    fn one_network_gets_its_rate_and_a_burst() {
        let expected = ANSWERS_PER_SECOND_AND_NETWORK + ANSWERS_PER_SECOND_AND_NETWORK / 10;
        let mut limiter = AnswerLimiter::new(7);
        assert_eq!(allowed_in_a_second(&mut limiter, 0, |i| 0xc633_6400_u32 | (i & 0xff)), expected);
        assert_eq!(allowed_in_a_second(&mut limiter, 9 * NS_PER_SECOND, |i| (0x2001_0db8_u128 << 96) | u128::from(i)), expected);
    }

    #[test]
    fn all_networks_together_get_the_rate_of_the_worker() {
        let mut limiter = AnswerLimiter::new(7);
        let allowed = allowed_in_a_second(&mut limiter, 0, |i| i << 8);
        assert_eq!(allowed, ANSWERS_PER_SECOND + ANSWERS_PER_SECOND / 10);
    }

    #[test]
    fn a_network_over_its_rate_takes_nothing_from_others() {
        let mut limiter = AnswerLimiter::new(7);
        allowed_in_a_second(&mut limiter, 0, |_| 0xc633_6401_u32);
        assert!(!limiter.allow(0xc633_6402_u32, NS_PER_SECOND));
        assert!(limiter.allow(0x0a00_0001_u32, NS_PER_SECOND));
    }

    #[test]
    fn path_mtu_discovery_has_a_limit_of_its_own() {
        let mut limiter = AnswerLimiter::new(7);
        let expected = allowed_in_a_second(&mut limiter, 0, |i| i << 8);
        assert!(!limiter.allow(0x0a00_0001_u32, NS_PER_SECOND));
        let told = (0..=1_000_000_u32).map(|i| u32::from(limiter.allow_too_big(i << 8, u64::from(i) * 1_000))).sum();
        assert_eq!(expected, told);
        assert!(!limiter.allow_too_big(0x0a00_0001_u32, NS_PER_SECOND) && limiter.allow(0x0a00_0001_u32, 2 * NS_PER_SECOND));
    }

    #[test]
    fn a_clock_that_goes_back_refuses_rather_than_fails() {
        let mut limiter = AnswerLimiter::new(7);
        assert!(limiter.allow(1_u32 << 24, u64::MAX / 2));
        assert!(!limiter.allow(1_u32 << 24, 0));
    }
}
