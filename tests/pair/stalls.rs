//! Whether the machine stood still, as threads of the test see it: one on each core sleeps for 10 ms again and again.
//!
//! A gateway that loses its VIPs without such a stall has a fault, whatever it says in its log.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A thread that wakes so much too late was kept from its core. It is a third of a lease of 1.5 s: gateways need the core
/// several times in a lease, and each time may come too late.
const STALL: Duration = Duration::from_millis(500);
const NAP: Duration = Duration::from_millis(10);

/// The naps of one thread.
#[derive(Debug)]
struct Naps {
    /// When the running one began.
    began: Instant,
    /// When the last stall ended.
    stalled_until: Option<Instant>,
}

impl Naps {
    /// A nap ends and the next one begins.
    fn end(&mut self, now: Instant) {
        if now.duration_since(self.began) >= STALL {
            self.stalled_until = Some(now);
        }
        self.began = now;
    }

    /// Whether there was a stall after `since`, or there is one.
    fn is_stalled(&self, since: Instant, now: Instant) -> bool {
        self.stalled_until.is_some_and(|until| until >= since) || now.duration_since(self.began) >= STALL
    }
}

/// The threads. Dropping this ends them.
#[derive(Debug, Default)]
pub struct Stalls {
    stop: Arc<AtomicBool>,
    naps: Vec<Arc<Mutex<Naps>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Stalls {
    pub fn watch() -> Self {
        let mut stalls = Self::default();
        for core in core_affinity::get_core_ids().unwrap() {
            let naps = Arc::new(Mutex::new(Naps { began: Instant::now(), stalled_until: None }));
            let (stop, of_thread) = (Arc::clone(&stalls.stop), Arc::clone(&naps));
            stalls.naps.push(naps);
            stalls.threads.push(thread::spawn(move || {
                core_affinity::set_for_current(core);
                while !stop.load(Ordering::Relaxed) {
                    thread::sleep(NAP);
                    of_thread.lock().unwrap().end(Instant::now());
                }
            }));
        }
        stalls
    }

    /// Whether a core stood still since then.
    pub fn since(&self, since: Instant) -> bool {
        let now = Instant::now();
        self.naps.iter().any(|naps| naps.lock().unwrap().is_stalled(since, now))
    }
}

impl Drop for Stalls {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[test]
fn a_stall_is_seen_while_it_lasts_and_afterwards_by_those_who_began_before_its_end() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let mut naps = Naps { began: start, stalled_until: None };
    for ms in [10, 25, 400] {
        naps.end(at(ms));
    }
    assert!(!naps.is_stalled(start, at(410)), "late, though no stall");
    assert!(naps.is_stalled(start, at(900)), "one that lasts");
    naps.end(at(1000));
    naps.end(at(1010));
    assert!(naps.is_stalled(at(999), at(1020)) && !naps.is_stalled(at(1001), at(1020)));
}
