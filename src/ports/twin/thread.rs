//! The thread that owns all taps: it moves frames from Linux to the workers' rings, and frames from the rings to Linux.
//!
//! It waits in epoll for at most 1 ms and then empties the rings: workers do not wake it, because that would be a system
//! call on the packet path. Beside adaptive workers it sleeps after 8 ms in which nothing moved, and then a worker with
//! a frame for Linux wakes it: one system call after each silence.
//!
//! Invariant: every frame popped from a ring is written, or counted as refused. A frame from Linux is read only if
//! there is a buffer and room in the ring; until then it waits in the tap's queue, which Linux bounds and counts. A
//! panic of the thread ends the process, like a panic of a worker: otherwise Linux would be cut off without a sign.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_queue::ArrayQueue;
use dataplane::{BURST, Buffer, Burst, Doorbell, TwinQueues};
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use crate::worker_threads::{Bell, or_abort};

/// Maximum wait while workers do not ring.
const WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Maximum sleep while workers ring. Nothing depends on it.
const SLEEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// Waits in a row without a frame after which the thread sleeps.
const QUIET_WAITS: u32 = 8;
/// The number of the doorbell among the descriptors, which is that of no port.
const BELL: u64 = u64::MAX;
/// Bursts moved in each direction of a port before the turn of the next port.
const BURSTS_PER_TURN: usize = 4;
/// Length of the Ethernet header and two VLAN tags, which the MTU does not include.
const OVERHEAD_BYTES: usize = 14 + 2 * 4;

/// Counters of one port. Relaxed; only the thread writes them.
#[derive(Debug, Default)]
pub struct TwinCounters {
    /// Frames that Linux accepted.
    pub to_linux: AtomicU64,
    /// Frames that Linux refused because the interface is down or memory is short.
    pub to_linux_refused: AtomicU64,
    /// Frames from Linux, pushed to the workers.
    pub from_linux: AtomicU64,
    /// Number of times that reading stopped because there was no buffer; the frames waited in the tap.
    pub no_buffer: AtomicU64,
}

/// The tap and the rings of one port.
#[derive(Debug)]
pub struct TwinPort<B> {
    tap: OwnedFd,
    queues: Arc<TwinQueues<B>>,
    counters: Arc<TwinCounters>,
    frame_bytes_max: usize,
    /// The tap that replaces `tap`.
    new_tap: Arc<ArrayQueue<OwnedFd>>,
    /// The tap may hold unread frames.
    readable: bool,
    /// Of the worker that takes the frames from Linux; `None` if it never sleeps.
    worker: Option<Arc<Doorbell>>,
}

/// Passes the tap of a twin that was created again to its port.
#[derive(Debug)]
pub struct NewTap(Arc<ArrayQueue<OwnedFd>>);

impl NewTap {
    /// The thread takes the tap within 100 ms, and closes the previous one.
    pub fn give(&self, tap: OwnedFd) {
        // If the previous tap was not taken yet, its twin is gone as well.
        drop(self.0.force_push(tap));
    }
}

impl<B: Buffer> TwinPort<B> {
    /// A port with a non-blocking tap, and the sender of its replacements. `mtu` in bytes is that of the port.
    #[must_use]
    pub fn new(tap: OwnedFd, queues: Arc<TwinQueues<B>>, counters: Arc<TwinCounters>, mtu: u16) -> (Self, NewTap) {
        let new_tap = Arc::new(ArrayQueue::new(1));
        let given = NewTap(Arc::clone(&new_tap));
        let frame_bytes_max = usize::from(mtu) + OVERHEAD_BYTES;
        (Self { tap, queues, counters, frame_bytes_max, new_tap, readable: true, worker: None }, given)
    }

    /// Wakes the worker that takes the frames from Linux, if it sleeps at times.
    #[must_use]
    pub fn waking(self, worker: Option<Arc<Doorbell>>) -> Self {
        Self { worker, ..self }
    }

    /// Takes a new tap, if there is one, and registers it with epoll under number `n`.
    fn take_new_tap(&mut self, epoll: &OwnedFd, n: u64) {
        let Some(tap) = self.new_tap.pop() else { return };
        if let Err(error) = watch(epoll, &tap, n) {
            tracing::error!(%error, "cannot watch the tap of a twin that was created again; frames from Linux are not read");
        }
        // Closing the previous tap here removes it from epoll.
        (self.tap, self.readable) = (tap, true);
    }

    /// Whether nothing is to be moved in either direction.
    fn is_quiet(&self) -> bool {
        !self.readable && self.queues.to_linux.is_empty()
    }

    /// Moves frames to Linux. True if more may be waiting.
    fn write(&self) -> bool {
        for _ in 0..BURSTS_PER_TURN {
            let Some(burst) = self.queues.to_linux.pop() else { return false };
            let taken = burst.iter().filter(|frame| write(&self.tap, frame.bytes())).count();
            count(&self.counters.to_linux, taken);
            count(&self.counters.to_linux_refused, burst.len() - taken);
        }
        true
    }

    /// Moves frames from Linux. True if more may be waiting and there is room for them.
    fn read(&mut self, allocate: &mut impl FnMut() -> Option<B>, spare: &mut Option<B>) -> bool {
        for _ in 0..BURSTS_PER_TURN {
            if !self.readable || self.queues.from_linux.is_full() {
                return false;
            }
            let mut burst = Burst::<B>::new();
            let mut starved = false;
            while self.readable && burst.len() < BURST {
                let Some(mut buffer) = empty(spare, allocate, self.frame_bytes_max) else {
                    starved = true;
                    break;
                };
                match rustix::io::read(&self.tap, buffer.bytes_mut()) {
                    Ok(len @ 1..) if buffer.resize(len) => burst.push(buffer),
                    Ok(1..) | Err(Errno::INTR) => *spare = Some(buffer),
                    Ok(0) | Err(_) => {
                        // The tap is empty or the interface is gone. Either way there is nothing to read until epoll
                        // reports it.
                        self.readable = false;
                        *spare = Some(buffer);
                    }
                }
            }
            let read = burst.len();
            // Only this thread pushes, so the ring still has the room seen above.
            if !burst.is_empty() && self.queues.from_linux.push(burst).is_ok() {
                count(&self.counters.from_linux, read);
                if let Some(worker) = &self.worker {
                    worker.ring();
                }
            }
            if starved {
                count(&self.counters.no_buffer, 1);
                return false;
            }
        }
        true
    }
}

/// A buffer of `len` bytes: the spare one, or else a new one.
fn empty<B: Buffer>(spare: &mut Option<B>, allocate: &mut impl FnMut() -> Option<B>, len: usize) -> Option<B> {
    let mut buffer = spare.take().or_else(allocate)?;
    buffer.resize(len).then_some(buffer)
}

fn write(tap: &OwnedFd, frame: &[u8]) -> bool {
    loop {
        match rustix::io::write(tap, frame) {
            Err(Errno::INTR) => {}
            outcome => return outcome.is_ok(),
        }
    }
}

fn count(counter: &AtomicU64, n: usize) {
    // There is one writer, so no atomic addition is needed.
    counter.store(counter.load(Ordering::Relaxed) + n as u64, Ordering::Relaxed);
}

/// The running thread. Dropping this stops it and closes the taps; the interfaces stay, without carrier.
#[derive(Debug)]
pub struct TwinThread {
    stop: Arc<AtomicBool>,
    doorbell: Option<Arc<Doorbell>>,
    thread: Option<JoinHandle<()>>,
}

impl TwinThread {
    /// Starts the thread. With the bell that the rings of the ports know it sleeps when nothing moves. `allocate`
    /// returns an empty buffer, or none if memory is short.
    ///
    /// # Errors
    /// When epoll or the thread cannot be created.
    pub fn start<B: Buffer + 'static>(
        ports: Vec<TwinPort<B>>,
        bell: Option<Bell>,
        allocate: impl FnMut() -> Option<B> + Send + 'static,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (n, port) in (0..).zip(&ports) {
            watch(&epoll, &port.tap, n)?;
        }
        if let Some(bell) = &bell {
            watch(&epoll, bell, BELL)?;
        }
        let doorbell = bell.as_ref().map(|bell| Arc::clone(bell.doorbell()));
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let run = AssertUnwindSafe(move || run(ports, bell.as_ref(), allocate, &epoll, &stopped));
        let last_words = "the twin thread panicked; the gateway aborts, because Linux would be cut off without a sign";
        let thread = std::thread::Builder::new().name("twin".to_owned()).spawn(move || or_abort(last_words, run))?;
        Ok(Self { stop, doorbell, thread: Some(thread) })
    }
}

impl Drop for TwinThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(doorbell) = &self.doorbell {
            doorbell.ring();
        }
        if let Some(thread) = self.thread.take() {
            // A panic of the thread would have ended the process.
            let _ = thread.join();
        }
    }
}

/// Edge-triggered: while its ring is full, a tap stays readable, and a level-triggered wait would not sleep.
fn watch(epoll: &OwnedFd, tap: impl AsFd, n: u64) -> rustix::io::Result<()> {
    epoll::add(epoll, tap, EventData::new_u64(n), EventFlags::IN | EventFlags::ET)
}

fn run<B: Buffer>(
    mut ports: Vec<TwinPort<B>>,
    bell: Option<&Bell>,
    mut allocate: impl FnMut() -> Option<B>,
    epoll: &OwnedFd,
    stop: &AtomicBool,
) {
    let mut spare = None;
    let mut events = Vec::with_capacity(ports.len() + 1);
    let mut more = false;
    let mut quiet_waits = 0;
    while !stop.load(Ordering::Relaxed) {
        events.clear();
        let timeout = match bell {
            _ if more => &NO_WAIT,
            Some(bell) if quiet_waits >= QUIET_WAITS => {
                bell.doorbell().arm();
                let is_idle = !stop.load(Ordering::Relaxed) && ports.iter().all(TwinPort::is_quiet);
                if is_idle { &SLEEP } else { &NO_WAIT }
            }
            _ => &WAIT,
        };
        // The only possible error is an interrupting signal; then there are no events.
        let _interrupted = epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), Some(timeout));
        if let Some(bell) = bell {
            bell.doorbell().disarm();
        }
        let is_quiet = events.is_empty() && ports.iter().all(TwinPort::is_quiet);
        quiet_waits = if is_quiet { quiet_waits.saturating_add(1) } else { 0 };
        for event in &events {
            if let Some(port) = usize::try_from(event.data.u64()).ok().and_then(|n| ports.get_mut(n)) {
                port.readable = true;
            }
        }
        more = false;
        for (n, port) in (0..).zip(&mut ports) {
            port.take_new_tap(epoll, n);
            more |= port.write();
            more |= port.read(&mut allocate, &mut spare);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use dataplane::{FROM_LINUX_BURSTS, MemoryBuffer};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// A port whose tap is one end of a socket pair that preserves frame boundaries like a tap. The other end acts as
    /// Linux.
    fn port() -> (TwinPort<MemoryBuffer>, OwnedFd) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (tap, linux) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (TwinPort::new(tap, Arc::new(TwinQueues::new()), Arc::new(TwinCounters::default()), 1500).0, linux)
    }

    fn until(mut condition: impl FnMut() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < Duration::from_secs(120), "waited in vain");
            std::thread::yield_now();
        }
    }

    fn send(linux: &OwnedFd, frame: &[u8]) {
        until(|| rustix::io::write(linux, frame).is_ok());
    }

    fn numbered(n: usize) -> Vec<u8> {
        [&n.to_be_bytes()[..], &[0xab; 52]].concat()
    }

    fn received(queues: &TwinQueues<MemoryBuffer>) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| queues.from_linux.pop()).flatten().map(|frame| frame.bytes().to_vec()).collect()
    }

    #[test]
    fn frames_go_both_ways_whole_and_in_order() {
        let (port, linux) = port();
        let queues = port.queues.clone();
        let _thread = TwinThread::start(vec![port], None, || Some(MemoryBuffer::default())).unwrap();
        let mut from_linux = Vec::new();
        for n in 0..100 {
            send(&linux, &numbered(n));
            let burst = Burst::from_iter([MemoryBuffer::new(&numbered(n), 0)]);
            assert!(queues.to_linux.push(burst).is_ok());
            let mut frame = [0; 2048];
            let mut len = 0;
            until(|| {
                rustix::io::read(&linux, &mut frame).is_ok_and(|read| {
                    len = read;
                    read > 0
                })
            });
            assert_eq!(frame[..len], numbered(n));
        }
        until(|| {
            from_linux.extend(received(&queues));
            from_linux.len() == 100
        });
        assert!(from_linux.iter().enumerate().all(|(n, frame)| *frame == numbered(n)));
    }

    #[test]
    fn a_thread_that_sleeps_is_woken_by_both_sides_and_wakes_the_worker() {
        let (port, linux) = port();
        let (bell, worker) = (Bell::new().unwrap(), Bell::new().unwrap());
        let queues = Arc::new(TwinQueues::<MemoryBuffer>::new().with_doorbell(Some(Arc::clone(bell.doorbell()))));
        let port = TwinPort { queues: Arc::clone(&queues), ..port }.waking(Some(Arc::clone(worker.doorbell())));
        let doorbell = Arc::clone(bell.doorbell());
        let _thread = TwinThread::start(vec![port], Some(bell), || Some(MemoryBuffer::default())).unwrap();
        for n in 0..3 {
            // Long enough for it to fall asleep, which no other thread can observe; awake it must do the same.
            std::thread::sleep(Duration::from_millis(40));
            assert!(queues.to_linux.push(Burst::from_iter([MemoryBuffer::new(&numbered(n), 0)])).is_ok());
            doorbell.ring();
            let mut frame = [0; 2048];
            until(|| rustix::io::read(&linux, &mut frame).is_ok_and(|len| frame[..len] == numbered(n)));
            std::thread::sleep(Duration::from_millis(40));
            worker.doorbell().arm();
            send(&linux, &numbered(n));
            until(|| received(&queues) == [numbered(n)]);
            let mut rung = [0; 8];
            until(|| rustix::io::read(&worker, &mut rung).is_ok());
        }
    }

    #[test]
    fn a_new_tap_takes_the_place_of_one_whose_interface_is_gone() {
        let ((port, gone), (other, linux)) = (port(), port());
        let (queues, new_tap) = (port.queues.clone(), NewTap(port.new_tap.clone()));
        let _thread = TwinThread::start(vec![port], None, || Some(MemoryBuffer::default())).unwrap();
        drop(gone);
        // Long enough for it to read the end, which is no frame.
        std::thread::sleep(Duration::from_millis(40));
        new_tap.give(other.tap);
        send(&linux, &numbered(7));
        let mut from_linux = Vec::new();
        until(|| {
            from_linux.extend(received(&queues));
            from_linux == [numbered(7)]
        });
        assert!(queues.to_linux.push(Burst::from_iter([MemoryBuffer::new(&numbered(8), 0)])).is_ok());
        let mut frame = [0; 2048];
        until(|| rustix::io::read(&linux, &mut frame).is_ok_and(|len| frame[..len] == numbered(8)));
    }

    #[test]
    fn a_panic_in_the_twin_thread_aborts_the_process_after_its_last_words() {
        const CHILD: &str = "SLUICE_TWIN_THREAD_PANICS";
        if std::env::var_os(CHILD).is_some() {
            let (port, linux) = port();
            send(&linux, &numbered(0));
            let _thread = TwinThread::start(vec![port], None, || panic!("last words")).unwrap();
            loop {
                std::thread::park();
            }
        }
        let module = module_path!().split_once("::").map_or("", |(_, path)| path);
        let test = format!("{module}::a_panic_in_the_twin_thread_aborts_the_process_after_its_last_words");
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", "--nocapture", &test]).env(CHILD, "1").output().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&output.status), Some(6), "not SIGABRT: {output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("last words"), "{output:?}");
    }

    #[test]
    fn frames_without_room_in_the_ring_wait_in_the_tap() {
        let (mut port, linux) = port();
        let (queues, mut spare) = (port.queues.clone(), None);
        let mut sent = 0;
        let mut got = Vec::new();
        while !queues.from_linux.is_full() {
            send(&linux, &numbered(sent));
            sent += 1;
            port.readable = true;
            port.read(&mut || Some(MemoryBuffer::default()), &mut spare);
        }
        assert_eq!(sent, FROM_LINUX_BURSTS, "one frame a burst");
        send(&linux, &numbered(sent));
        port.readable = true;
        assert!(!port.read(&mut || Some(MemoryBuffer::default()), &mut spare), "no room: must not be called again at once");
        got.extend(received(&queues));
        port.read(&mut || Some(MemoryBuffer::default()), &mut spare);
        got.extend(received(&queues));
        assert!(got.iter().enumerate().all(|(n, frame)| *frame == numbered(n)));
        assert_eq!(got.len(), sent + 1);
    }

    #[test]
    fn without_buffers_frames_wait_and_the_shortage_is_counted() {
        let (mut port, linux) = port();
        send(&linux, &numbered(0));
        assert!(!port.read(&mut || None, &mut None));
        assert_eq!(port.counters.no_buffer.load(Ordering::Relaxed), 1);
        port.read(&mut || Some(MemoryBuffer::default()), &mut None);
        assert_eq!(received(&port.queues), [numbered(0)]);
        assert_eq!(port.counters.from_linux.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn frames_that_linux_refuses_are_counted() {
        let (port, linux) = port();
        drop(linux);
        let burst = Burst::from_iter([0, 1].map(|n| MemoryBuffer::new(&numbered(n), 0)));
        assert!(port.queues.to_linux.push(burst).is_ok());
        port.write();
        assert_eq!(port.counters.to_linux_refused.load(Ordering::Relaxed), 2);
        assert_eq!(port.counters.to_linux.load(Ordering::Relaxed), 0);
    }
}
