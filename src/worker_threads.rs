//! Worker threads: one pinned to each configured core, polling until it is stopped. An adaptive worker sleeps when
//! nothing arrives.
//!
//! Invariants: a worker runs only on its core. A panic of a worker aborts the process after a log message, because its
//! flows would otherwise be lost silently (FORWARDING section 14).
//!
//! Deliberately not here: the work of a poll. The body gets a [`Turn`] and returns the number of packets that it
//! handled.

mod bell;
mod heartbeat;
mod idle;
pub mod inquiries;
mod load;
mod sleep;

use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, UnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};

use control::config::logging;
use core_affinity::CoreId;
use dataplane::Doorbell;
use dpdk_sys::{Eal, RegisteredThread, cycles};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};

pub use bell::Bell;
pub use heartbeat::{Heartbeats, OBSERVATION_INTERVAL};
use idle::{Idle, Step};
pub use load::{BURST_SIZES, Load, LoadReading};
pub use sleep::Sleep;

/// Timer slack: the kernel may extend a sleep by this; its default equals the shortest sleep.
const TIMER_SLACK_NS: NonZeroU64 = NonZeroU64::MIN;

/// A request to the body of a worker.
#[derive(Debug)]
pub enum Turn<'a> {
    /// Poll every port once; the result is the number of packets handled.
    Poll {
        /// Monotonic time.
        now_ns: u64,
    },
    /// The worker sleeps after one more poll that finds nothing: arm what wakes it. The result is ignored.
    Arm,
    /// The worker sleeps now: release everything that others wait for, and say what ends the sleep. The result is
    /// ignored.
    Sleep(&'a mut Sleep),
    /// The worker has slept, or found something instead. The result is ignored.
    Wake,
    /// The worker stops and does not poll again. The result is ignored.
    End,
}

/// How an adaptive worker rests.
#[derive(Debug)]
pub struct Rest {
    /// Its doorbell.
    pub bell: Bell,
    /// Flows that it has at most, per family.
    pub max_flows: u32,
}

/// Why a worker could not be started.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The core does not exist.
    #[error("workers.cores: core {core} does not exist; this machine has {present}")]
    NoSuchCore {
        /// The core.
        core: usize,
        /// The kernel's list of cores.
        present: String,
    },
    /// The kernel refused to pin a thread to it.
    #[error(
        "workers.cores: core {core} exists, but the kernel refuses to run a thread there: {source}; bring it online \
         (/sys/devices/system/cpu/cpu{core}/online), or widen the cpuset or the container's limits"
    )]
    Refused {
        /// The core.
        core: usize,
        /// Why.
        source: std::io::Error,
    },
    /// The thread ended before it ran.
    #[error("worker {number} ended before it was pinned")]
    Ended {
        /// The worker.
        number: usize,
    },
    /// DPDK refused the thread.
    #[error("worker {number}: {source}")]
    Dpdk {
        /// The worker.
        number: usize,
        /// Why.
        source: dpdk_sys::Error,
    },
    /// The thread could not be created.
    #[error("worker {number} cannot be started: {source}")]
    Thread {
        /// The worker.
        number: usize,
        /// Why.
        source: std::io::Error,
    },
}

/// A running worker. Dropping it stops the thread and waits for it.
#[derive(Debug)]
pub struct Worker {
    stop: Arc<AtomicBool>,
    load: Arc<Load>,
    doorbell: Option<Arc<Doorbell>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Its counters.
    #[must_use]
    pub fn load(&self) -> &Arc<Load> {
        &self.load
    }

    /// Stops it after the current poll and waits. Its own thread drops its body.
    pub fn stop(self) {}

    /// Stops all workers together, each after its current poll, and waits.
    pub fn stop_all(workers: Vec<Self>) {
        workers.iter().for_each(Self::tell_to_stop);
        drop(workers);
    }

    fn tell_to_stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(doorbell) = &self.doorbell {
            doorbell.ring();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.tell_to_stop();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread would have aborted the process before.
            let _ = thread.join();
        }
    }
}

/// Starts worker `number` on `core` and returns once it is pinned. Without `rest` it polls all the time. With `eal` its
/// thread gets its own mempool caches.
///
/// # Errors
/// The core does not exist or is not permitted, or the thread cannot be created, pinned or registered.
pub fn spawn(
    number: usize,
    core: CoreId,
    rest: Option<Rest>,
    eal: Option<Eal>,
    body: impl FnMut(Turn<'_>) -> usize + Send + 'static,
) -> Result<Worker, WorkerError> {
    let stop = Arc::new(AtomicBool::new(false));
    let load = Arc::new(Load::default());
    let doorbell = rest.as_ref().map(|rest| Arc::clone(rest.bell.doorbell()));
    let (ready, is_ready) = channel();
    let thread = {
        let (stop, load) = (Arc::clone(&stop), Arc::clone(&load));
        thread::Builder::new().name(format!("sluice-worker-{number}")).spawn(move || {
            let run = AssertUnwindSafe(|| match prepare(number, core, rest.is_some(), eal) {
                // If the receiver is gone, the stop flag is set.
                Ok(_registered) => {
                    let _ = ready.send(Ok(()));
                    match rest {
                        None => poll_until_stopped(body, &stop, &load),
                        Some(rest) => poll_or_rest_until_stopped(&rest, body, &stop, &load),
                    }
                }
                Err(error) => drop(ready.send(Err(error))),
            });
            or_abort("a worker panicked; the gateway aborts, because its flows would be lost silently", run);
        })
    };
    let thread = thread.map_err(|source| WorkerError::Thread { number, source })?;
    let worker = Worker { stop, load, doorbell, thread: Some(thread) };
    match is_ready.recv() {
        Ok(started) => started.map(|()| worker),
        // Unreachable: the thread reports first, or has aborted the process.
        Err(_) => Err(WorkerError::Ended { number }),
    }
}

/// Runs a thread body that must not panic. After a panic it logs `last_words` and aborts the process, because other
/// threads would continue as if it still ran.
pub(crate) fn or_abort(last_words: &str, run: impl FnOnce() + UnwindSafe) {
    if catch_unwind(run).is_err() {
        tracing::error!(thread = thread::current().name(), "{last_words}");
        logging::flush();
        std::process::abort();
    }
}

/// Pins the calling thread to a core. The kernel decides whether this is possible, not the inherited CPU mask:
/// `isolcpus` and `taskset` remove usable cores from that mask.
///
/// # Errors
/// The core does not exist, is offline, or a cpuset forbids it.
pub fn pin(core: CoreId) -> Result<(), WorkerError> {
    pin_or_explain(core.id, Path::new("/sys/devices/system/cpu"))
}

fn pin_or_explain(core: usize, cpus: &Path) -> Result<(), WorkerError> {
    let mut mask = CpuSet::new();
    let pinned = if core < CpuSet::MAX_CPU {
        mask.set(core);
        sched_setaffinity(None, &mask)
    } else {
        Err(Errno::INVAL)
    };
    let Err(source) = pinned else { return Ok(()) };
    if cpus.join(format!("cpu{core}")).exists() {
        return Err(WorkerError::Refused { core, source: source.into() });
    }
    let present = std::fs::read_to_string(cpus.join("present")).unwrap_or_default().trim().to_owned();
    Err(WorkerError::NoSuchCore { core, present })
}

/// Keeps the calling thread, and every thread that it starts later, off the workers' cores, unless there are no others.
pub fn keep_off(cores: &[usize]) {
    let kept_off = sched_getaffinity(None).and_then(|mut mask| {
        cores.iter().filter(|&&core| core < CpuSet::MAX_CPU).for_each(|&core| mask.unset(core));
        if mask.count() == 0 { Ok(()) } else { sched_setaffinity(None, &mask) }
    });
    if let Err(error) = kept_off {
        tracing::warn!(%error, "cannot keep other threads of the gateway off the workers' cores");
    }
}

/// Pins the calling thread and registers it with DPDK.
fn prepare(number: usize, core: CoreId, rests: bool, eal: Option<Eal>) -> Result<Option<RegisteredThread>, WorkerError> {
    pin(core)?;
    if rests && let Err(error) = rustix::thread::set_current_timer_slack(Some(TIMER_SLACK_NS)) {
        tracing::debug!(number, %error, "timer slack cannot be set; short sleeps last about twice as long");
    }
    eal.map(Eal::register_thread).transpose().map_err(|source| WorkerError::Dpdk { number, source })
}

/// The loop of a busy worker.
fn poll_until_stopped(mut body: impl FnMut(Turn<'_>) -> usize, stop: &AtomicBool, load: &Load) {
    let mut before = cycles();
    while !stop.load(Ordering::Relaxed) {
        poll(&mut body, load, &mut before);
    }
    body(Turn::End);
}

/// Polls once, and counts the packets and the cycles since `before`, which becomes the present.
fn poll(body: &mut impl FnMut(Turn<'_>) -> usize, load: &Load, before: &mut u64) -> usize {
    let packets = body(Turn::Poll { now_ns: now_ns() });
    let after = cycles();
    load.count(packets, after.wrapping_sub(*before));
    *before = after;
    packets
}

/// The loop of an adaptive worker.
fn poll_or_rest_until_stopped(rest: &Rest, mut body: impl FnMut(Turn<'_>) -> usize, stop: &AtomicBool, load: &Load) {
    let mut idle = Idle::new(rest.max_flows);
    let mut is_armed = false;
    let mut before = cycles();
    // The flag is read between arming and sleeping, and whoever sets it rings.
    while !stop.load(Ordering::Relaxed) {
        let packets = poll(&mut body, load, &mut before);
        match idle.after_poll(packets) {
            Step::Poll if !is_armed => continue,
            Step::Poll => {}
            Step::Yield => thread::yield_now(),
            Step::Arm => {
                rest.bell.doorbell().arm();
                body(Turn::Arm);
                is_armed = true;
                continue;
            }
            Step::Sleep => {
                let mut sleep = Sleep::new();
                body(Turn::Sleep(&mut sleep));
                idle.slept(sleep.wait(&rest.bell));
            }
        }
        if is_armed {
            rest.bell.doorbell().disarm();
            body(Turn::Wake);
            is_armed = false;
        }
        let after = cycles();
        load.rested(after.wrapping_sub(before));
        before = after;
    }
    body(Turn::End);
}

/// Monotonic time, without a system call if the kernel has a vDSO.
#[inline]
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;

    fn any_core() -> CoreId {
        core_affinity::get_core_ids().unwrap().pop().unwrap()
    }

    fn wait_for(condition: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(120);
        while !condition() {
            assert!(Instant::now() < deadline, "waited 120 s");
            thread::yield_now();
        }
    }

    #[test]
    fn a_worker_runs_on_its_core_under_its_name_until_stopped() {
        let core = any_core();
        let (say, heard) = channel();
        let worker = spawn(7, core, None, None, move |turn| {
            let now_ns = if let Turn::Poll { now_ns } = turn { now_ns } else { 0 };
            let _ = say.send((now_ns, thread::current().name().map(str::to_owned), core_affinity::get_core_ids()));
            0
        });
        let worker = worker.unwrap();
        let (now_ns, name, cores) = heard.recv().unwrap();
        assert!(now_ns > 0);
        assert_eq!(name.as_deref(), Some("sluice-worker-7"));
        assert_eq!(cores.unwrap(), [core]);
        worker.stop();
        let others = heard.iter().filter(|(now_ns, ..)| *now_ns == 0).count();
        assert_eq!(others, 1, "a busy worker never sleeps; its last turn is the end");
    }

    fn rest() -> Rest {
        Rest { bell: Bell::new().unwrap(), max_flows: 1 }
    }

    #[test]
    fn an_adaptive_worker_polls_between_arming_and_sleeping_and_counts_only_busy_polls_as_busy() {
        let (say, heard) = channel();
        let mut left = 10;
        let worker = spawn(0, any_core(), Some(rest()), None, move |turn| {
            let _ = say.send(match turn {
                Turn::Poll { .. } => "poll",
                Turn::Arm => "arm",
                Turn::Sleep(_) => "sleep",
                Turn::Wake => "wake",
                Turn::End => "end",
            });
            let packets = if left > 0 { 32 } else { 0 };
            left -= i32::from(packets > 0);
            packets
        });
        let worker = worker.unwrap();
        let turns: Vec<&str> = heard.iter().skip_while(|turn| *turn != "arm").take(10).collect();
        assert_eq!(turns, ["arm", "poll", "sleep", "wake", "poll", "arm", "poll", "sleep", "wake", "poll"]);
        let load = Arc::clone(worker.load());
        worker.stop();
        let ends: Vec<&str> = heard.iter().skip_while(|turn| *turn != "end").collect();
        assert_eq!(ends, ["end"], "the last turn");
        let load = load.read();
        assert_eq!((load.busy_polls, load.packets), (10, 320));
        assert!(load.polls > 10 + u64::from(idle::SLEEP_AFTER));
        assert!((0.0..1.0).contains(&load.busy_ratio()) && load.cycles_per_packet().is_some());
    }

    #[test]
    fn a_packet_that_arrives_between_arming_and_sleeping_keeps_the_worker_awake() {
        let (say, heard) = channel();
        let mut is_armed = false;
        let worker = spawn(0, any_core(), Some(rest()), None, move |turn| {
            match turn {
                Turn::Poll { .. } => return usize::from(std::mem::take(&mut is_armed)),
                Turn::Arm => is_armed = true,
                Turn::Sleep(_) => drop(say.send("sleep")),
                Turn::Wake => drop(say.send("wake")),
                Turn::End => {}
            }
            0
        });
        let worker = worker.unwrap();
        assert!(heard.iter().take(10).all(|turn| turn == "wake"), "it slept over a packet");
        worker.stop();
    }

    #[test]
    fn a_busy_worker_counts_every_poll() {
        let worker = spawn(0, any_core(), None, None, |_| 3).unwrap();
        wait_for(|| worker.load().read().polls > 100);
        let load = Arc::clone(worker.load());
        // Counters are updated one by one: while the worker runs, a reading may fall between two updates.
        worker.stop();
        let load = load.read();
        assert_eq!((load.busy_polls, load.packets), (load.polls, 3 * load.polls), "{load:?}");
        assert_eq!(load.busy_cycles, load.cycles, "{load:?}");
    }

    #[test]
    fn a_core_that_does_not_exist_is_refused_with_those_that_do() {
        let error = spawn(0, CoreId { id: 4095 }, None, None, |_| 0).unwrap_err();
        assert!(error.to_string().starts_with("workers.cores: core 4095 does not exist; this machine has 0"), "{error}");
    }

    #[test]
    fn a_core_that_the_kernel_refuses_is_named_with_its_reason() {
        let cpus = tempfile::tempdir().unwrap();
        std::fs::create_dir(cpus.path().join("cpu4095")).unwrap();
        let error = pin_or_explain(4095, cpus.path()).unwrap_err();
        assert!(matches!(&error, WorkerError::Refused { core: 4095, .. }), "{error}");
        assert!(error.to_string().contains("Invalid argument"), "{error}");
    }

    /// A mask without the core, as `isolcpus` gives it to every process. With a single core the mask keeps it.
    #[test]
    fn a_worker_runs_on_a_core_that_the_inherited_mask_lacks() {
        let all = core_affinity::get_core_ids().unwrap();
        let (other, core) = (all[0], all[all.len() - 1]);
        // A separate thread, so that its mask does not affect other tests.
        let started = thread::spawn(move || {
            pin(other).unwrap();
            let (say, heard) = channel();
            let worker = spawn(0, core, None, None, move |_| {
                let _ = say.send(core_affinity::get_core_ids());
                0
            });
            let worker = worker.unwrap();
            assert_eq!(heard.recv().unwrap().unwrap(), [core]);
            worker.stop();
        });
        started.join().unwrap();
    }

    #[test]
    fn threads_that_are_started_later_keep_off_the_workers_cores_unless_there_are_no_others() {
        let all: Vec<usize> = core_affinity::get_core_ids().unwrap().into_iter().map(|core| core.id).collect();
        let cores_of_a_thread_after = |cores: Vec<usize>| {
            let started = thread::spawn(move || {
                keep_off(&cores);
                thread::spawn(core_affinity::get_core_ids).join().unwrap().unwrap()
            });
            started.join().unwrap().into_iter().map(|core| core.id).collect::<Vec<_>>()
        };
        assert_eq!(cores_of_a_thread_after(all.clone()), all);
        if let [others @ .., last] = &all[..]
            && !others.is_empty()
        {
            assert_eq!(cores_of_a_thread_after(vec![*last, 4095]), others);
        }
    }

    #[test]
    fn a_panic_in_a_worker_aborts_the_process_after_its_last_words() {
        const CHILD: &str = "SLUICE_WORKER_PANICS";
        if std::env::var_os(CHILD).is_some() {
            let _worker = spawn(0, any_core(), None, None, |_| panic!("last words")).unwrap();
            loop {
                thread::park();
            }
        }
        let module = module_path!().split_once("::").map_or("", |(_, path)| path);
        let test = format!("{module}::a_panic_in_a_worker_aborts_the_process_after_its_last_words");
        let child =
            Command::new(std::env::current_exe().unwrap()).args(["--exact", "--nocapture", &test]).env(CHILD, "1").output();
        let output = child.unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(6), "not SIGABRT: {output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("last words"), "{output:?}");
    }
}
