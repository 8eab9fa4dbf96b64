//! The sleep of a worker: until a packet arrives, the doorbell rings, or time is up.
//!
//! Invariant: a sleep ends at the latest after [`Sleep::LONGEST`], which bounds the delay of all that depends on time
//! alone: limits of flows and of waiting packets, devices that come and go. Where a queue cannot wake the worker, it
//! ends after [`Sleep::POLLED`], so that the queue does not overflow.
//!
//! Not here: when a worker sleeps (`idle`).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use arrayvec::ArrayVec;
use dpdk_port::{DpdkPort, Wakeup};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_error;

use super::bell::Bell;

/// Maximum number of queues of a worker: DPDK has 32 ports.
const QUEUES_MAX: usize = 32;

/// A sleep that is about to begin: what ends it.
#[derive(Debug)]
pub struct Sleep {
    wake_on: ArrayVec<Arc<OwnedFd>, QUEUES_MAX>,
    longest: Duration,
}

impl Sleep {
    /// Duration of an uninterrupted sleep.
    pub const LONGEST: Duration = Duration::from_millis(20);
    /// The same while announcements are sent, 8 a poll and 4,000 a second at most, or packets wait.
    pub const PENDING: Duration = Duration::from_millis(2);
    /// The same where a queue cannot wake the worker: 750 frames of 64 bytes at 10 Gbit/s, which fit a queue of 1,024.
    pub const POLLED: Duration = Duration::from_micros(50);

    pub(super) fn new() -> Self {
        Self { wake_on: ArrayVec::new(), longest: Self::LONGEST }
    }

    /// Ends the sleep when the descriptor becomes readable.
    pub fn wake_on(&mut self, readable: Arc<OwnedFd>) {
        if self.wake_on.try_push(readable).is_err() {
            self.at_most(Self::POLLED);
        }
    }

    /// Ends the sleep when a packet arrives at a port, or after the time that it may wait where it wakes nobody.
    pub fn wake_for(&mut self, port: &mut DpdkPort) {
        match port.wakeup() {
            Some(Wakeup::Readable(readable)) => self.wake_on(Arc::clone(readable)),
            Some(Wakeup::Never) => self.at_most(Self::POLLED),
            None => {}
        }
    }

    /// Ends the sleep after this time at the latest.
    pub fn at_most(&mut self, longest: Duration) {
        self.longest = self.longest.min(longest);
    }

    /// Sleeps. Returns the limit of the sleep.
    pub(super) fn wait(self, bell: &Bell) -> Duration {
        let mut fds: ArrayVec<PollFd<'_>, { QUEUES_MAX + 1 }> = ArrayVec::new();
        fds.push(PollFd::new(bell, PollFlags::IN));
        fds.extend(self.wake_on.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let timeout = Timespec { tv_sec: 0, tv_nsec: self.longest.subsec_nanos().into() };
        // The only possible error is an interrupting signal, which ends the sleep as well.
        if poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0) {
            if !fds[0].revents().is_empty() {
                bell.quiet();
            }
            let broken = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
            let mut has_broken = false;
            for (fd, polled) in self.wake_on.iter().zip(&fds[1..]) {
                if polled.revents().intersects(broken) {
                    // An interface that went down leaves its error with the socket; reading it removes it.
                    let _ = socket_error(fd.as_fd());
                    has_broken = true;
                }
            }
            if has_broken {
                // An error that stays would end every sleep at once.
                thread::sleep(Self::POLLED);
            }
        }
        self.longest
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (Arc<OwnedFd>, OwnedFd) {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        (Arc::new(ours), theirs)
    }

    /// A sleep that would last a long time if nothing ended it; no test waits for its end.
    fn long() -> Sleep {
        Sleep { wake_on: ArrayVec::new(), longest: Duration::from_millis(999) }
    }

    #[test]
    fn a_readable_queue_a_ring_and_time_end_a_sleep() {
        let bell = Bell::new().unwrap();
        let ends = |sleep: Sleep| {
            let start = Instant::now();
            sleep.wait(&bell);
            start.elapsed()
        };
        let mut short = long();
        short.at_most(Sleep::POLLED);
        short.at_most(Sleep::LONGEST);
        assert!(ends(short) >= Sleep::POLLED);

        // Each is ready before its sleep begins, so how long the sleep takes depends on the machine alone: several
        // attempts, one of which must be shorter than the limit.
        let (ours, theirs) = pair();
        rustix::io::write(&theirs, b"packet").unwrap();
        let by_queue = || {
            let mut sleep = long();
            sleep.wake_on(Arc::clone(&ours));
            ends(sleep)
        };
        assert!((0..100).any(|_| by_queue() < Duration::from_millis(999)));
        let by_bell = || {
            bell.doorbell().arm();
            bell.doorbell().ring();
            ends(long())
        };
        assert!((0..100).any(|_| by_bell() < Duration::from_millis(999)));
    }

    #[test]
    fn a_ring_ends_one_sleep_only() {
        let bell = Bell::new().unwrap();
        bell.doorbell().arm();
        bell.doorbell().ring();
        long().wait(&bell);
        let mut sleep = long();
        sleep.at_most(Sleep::LONGEST);
        let start = Instant::now();
        sleep.wait(&bell);
        assert!(start.elapsed() >= Sleep::LONGEST);
    }

    #[test]
    fn a_queue_that_is_broken_does_not_make_the_worker_spin() {
        let bell = Bell::new().unwrap();
        let (ours, theirs) = pair();
        drop(theirs);
        let start = Instant::now();
        for _ in 0..10 {
            let mut sleep = long();
            sleep.wake_on(Arc::clone(&ours));
            sleep.wait(&bell);
        }
        assert!(start.elapsed() >= 10 * Sleep::POLLED);
    }
}
