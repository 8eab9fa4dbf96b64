//! Doorbells, by which threads wake a worker, or the thread of the twins, when they hand something to it.
//!
//! A thread arms its doorbell, polls once more, and sleeps if that poll found nothing. A thread that hands something to
//! it rings afterwards. A ring costs a fence and a read while the thread is awake; the first ring of a sleep wakes it.
//!
//! **Invariant:** the poll after [`Doorbell::arm`] sees everything that was handed over before a ring, or the ring ends
//! the sleep that follows.
//!
//! Not here: how a thread sleeps, and the system call that wakes it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Wakes one thread. Other threads read the flag at every ring, so it has its own pair of cache lines.
#[repr(align(128))]
pub struct Doorbell {
    armed: AtomicBool,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl Doorbell {
    /// A doorbell that is not armed. `wake` ends the sleep of the thread, or the next one if it is about to sleep.
    #[must_use]
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self { armed: AtomicBool::new(false), wake: Box::new(wake) }
    }

    /// The thread polls once more, and then sleeps.
    pub fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
        // Pairs with the one in `ring`: the thread's poll sees what was handed over, or the ringer sees the flag.
        fence(Ordering::SeqCst);
    }

    /// The thread is awake.
    pub fn disarm(&self) {
        self.armed.store(false, Ordering::Relaxed);
    }

    /// Wakes the thread if it sleeps or is about to. To be called after something was handed to it.
    #[inline]
    pub fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) {
            self.wake_once();
        }
    }

    #[cold]
    fn wake_once(&self) {
        if self.armed.swap(false, Ordering::Relaxed) {
            (self.wake)();
        }
    }
}

impl fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doorbell").field("armed", &self.armed).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use crossbeam_queue::ArrayQueue;

    use super::*;

    #[test]
    fn only_the_first_ring_of_a_sleep_wakes() {
        let wakes = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&wakes);
        let doorbell = Doorbell::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let rung = || {
            doorbell.ring();
            wakes.load(Ordering::Relaxed)
        };
        assert_eq!(rung(), 0, "the worker is awake");
        doorbell.arm();
        assert_eq!((rung(), rung()), (1, 1));
        doorbell.arm();
        doorbell.disarm();
        assert_eq!(rung(), 1, "it found something itself");
        doorbell.arm();
        assert_eq!(rung(), 2);
    }

    /// The worker sleeps until it is woken, without limit: a lost wake-up fails the test.
    #[test]
    fn nothing_that_is_handed_over_before_a_ring_is_slept_over() {
        const COUNT: u32 = 20_000;
        let queue = Arc::new(ArrayQueue::new(1));
        let (wake, woken) = channel();
        let doorbell = Arc::new(Doorbell::new(move || wake.send(()).unwrap()));
        let (pushed, rung) = (Arc::clone(&queue), Arc::clone(&doorbell));
        let other = std::thread::spawn(move || {
            for n in 0..COUNT {
                while pushed.push(n).is_err() {
                    std::thread::yield_now();
                }
                rung.ring();
            }
        });
        let mut next = 0;
        while next < COUNT {
            if let Some(n) = queue.pop() {
                assert_eq!(n, next);
                next += 1;
                continue;
            }
            doorbell.arm();
            if queue.is_empty() {
                woken.recv_timeout(Duration::from_secs(120)).unwrap();
            }
            doorbell.disarm();
        }
        other.join().unwrap();
    }
}
