//! How many packets a worker gives to Linux: a flood of what is not for a frontend must not drown the machine that
//! answers ARP, carries routing sessions and sends probes.

/// Packets a second and worker. Linux takes some 500,000 packets a second from a tap on one core; a tenth of it leaves
/// room for several workers and for what the core does besides.
const PACKETS_PER_S: u64 = 50_000;
/// Packets at once: 100 ms worth.
const BURST_PACKETS: u64 = 5_000;
const NS_PER_PACKET: u64 = 1_000_000_000 / PACKETS_PER_S;

/// A token bucket whose tokens are nanoseconds.
#[derive(Debug)]
pub(crate) struct TwinRate {
    saved_ns: u64,
    last_ns: u64,
}

impl Default for TwinRate {
    fn default() -> Self {
        Self { saved_ns: BURST_PACKETS * NS_PER_PACKET, last_ns: 0 }
    }
}

impl TwinRate {
    /// Whether one more packet may go to Linux now.
    pub(crate) fn allow(&mut self, now_ns: u64) -> bool {
        let earned = now_ns.saturating_sub(self.last_ns);
        self.last_ns = self.last_ns.max(now_ns);
        self.saved_ns = self.saved_ns.saturating_add(earned).min(BURST_PACKETS * NS_PER_PACKET);
        let allowed = self.saved_ns >= NS_PER_PACKET;
        if allowed {
            self.saved_ns -= NS_PER_PACKET;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linux_gets_a_burst_and_then_the_rate() {
        let mut rate = TwinRate::default();
        let at_once = (0..2 * BURST_PACKETS).filter(|_| rate.allow(1)).count() as u64;
        assert_eq!(at_once, BURST_PACKETS);
        let in_one_second = (0..1000).map(|ms| (0..200).filter(|_| rate.allow(1 + ms * 1_000_000)).count() as u64).sum::<u64>();
        assert!((PACKETS_PER_S - 100..=PACKETS_PER_S).contains(&in_one_second), "{in_one_second}");
    }
}
