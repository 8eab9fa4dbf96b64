//! FORWARDING section 14: what fails outside the worker loses no packet. A task of the test's own panics again and again under
//! the real supervisor, while a pinned worker forwards.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../dataplane/tests/rig/mod.rs"]
mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use core_affinity::CoreId;
use dataplane::testing::Packet;
use dataplane::{DropReason, MemoryBuffer};
use rig::{CLUSTER, Rig, UPLINK};
use sluice::agent::supervisor::Supervisor;
use sluice::settings::Poll;
use sluice::workers::{self, Turn};
use tokio_util::sync::CancellationToken;

const PANICS: u64 = 20;
/// Packets between two panics.
const PACKETS: u64 = 10_000;
/// Frames that arrive for each poll.
const ARRIVING: usize = 32;

/// What goes in and comes out, counted outside the engine.
#[derive(Debug, Default)]
struct Traffic {
    stopped: AtomicBool,
    sent: AtomicU64,
    forwarded: AtomicU64,
}

impl Traffic {
    fn forwarded(&self) -> u64 {
        self.forwarded.load(Ordering::Acquire)
    }
}

/// Polls the gateway with frames of 512 clients, over and over.
fn body(mut rig: Rig, traffic: Arc<Traffic>) -> impl FnMut(Turn) -> usize + Send {
    let syn = |n: usize| Packet::tcp(&format!("198.51.100.7:{}", 2000 + n), "192.0.2.100:80").build();
    let frames: Vec<_> = (0..512).map(syn).collect();
    let mut next = frames.chunks(ARRIVING).map(<[_]>::to_vec).collect::<Vec<_>>().into_iter().cycle();
    let start = Instant::now();
    move |turn| {
        if !matches!(turn, Turn::Poll { .. }) {
            return 0;
        }
        if !traffic.stopped.load(Ordering::Acquire) {
            let chunk = next.next().unwrap_or_default();
            traffic.sent.fetch_add(chunk.len() as u64, Ordering::Release);
            let port = rig.worker.port_mut(UPLINK).unwrap();
            port.arriving.extend(chunk.iter().map(|frame| MemoryBuffer::new(frame, 1)));
        }
        let now_ns = rig.now + u64::try_from(start.elapsed().as_nanos()).unwrap();
        let handled = rig.worker.poll(now_ns);
        rig.worker.observer_mut().0.clear();
        let left = rig.worker.port_mut(CLUSTER).unwrap().sent.drain(..).count();
        traffic.forwarded.fetch_add(left as u64, Ordering::Release);
        handled
    }
}

/// Gives other threads the processor until the worker has forwarded `packets` more.
async fn forwards(traffic: &Traffic, packets: u64) {
    let (start, before) = (Instant::now(), traffic.forwarded());
    while traffic.forwarded() < before + packets {
        assert!(start.elapsed() < Duration::from_secs(30), "the worker forwards no more");
        std::thread::yield_now();
        tokio::task::yield_now().await;
    }
}

// Time is paused, so that the supervisor's growing waits take none; the worker's clock is its own.
#[tokio::test(start_paused = true)]
async fn a_task_that_panics_twenty_times_loses_no_packet() {
    let (rig, traffic) = (Rig::new(), Arc::new(Traffic::default()));
    let counters = Arc::clone(&rig.counters);
    let before = counters.account();
    let core = core_affinity::get_core_ids().unwrap().into_iter().map(|core| core.id).max().unwrap();
    let worker = workers::spawn(0, CoreId { id: core }, Poll::Busy, None, body(rig, Arc::clone(&traffic))).unwrap();

    let stop = CancellationToken::new();
    let mut supervisor = Supervisor::new(stop.clone());
    let (panics, shared) = (Arc::new(AtomicU64::new(0)), Arc::clone(&traffic));
    let counted = Arc::clone(&panics);
    supervisor.run("shaky", move || {
        let (traffic, panics) = (Arc::clone(&shared), Arc::clone(&counted));
        async move {
            forwards(&traffic, PACKETS).await;
            let n = panics.fetch_add(1, Ordering::Relaxed) + 1;
            assert!(n > PANICS, "panic {n}");
            Ok(())
        }
    });
    let tasks = supervisor.tasks();
    supervisor.finished().await;
    let status = tasks.status();
    assert_eq!((status[0].restarts, status[0].last_failure.as_str()), (PANICS, "panicked: panic 20"));

    traffic.stopped.store(true, Ordering::Release);
    worker.stop();
    let (sent, forwarded) = (traffic.sent.load(Ordering::Acquire), traffic.forwarded());
    assert!(sent >= PANICS * PACKETS, "{sent} packets");
    assert_eq!(
        forwarded,
        sent,
        "every packet left; drops: {:?}",
        DropReason::ALL.iter().map(|r| counters.drops(*r).get()).sum::<u64>()
    );
    let account = counters.account();
    assert!(account.closes(), "{account:?}");
    assert_eq!((account.received - before.received, account.dropped), (sent, before.dropped));
}
