//! A panic in a task of the agent is nobody's but its own: packets go on, and the task's work is taken up again.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../dataplane/tests/rig/mod.rs"]
mod rig;

use std::mem::replace;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use control::probe;
use dataplane::testing::Packet;
use dataplane::{Compiler, DropReason, Fate, Publisher};
use proto::{Known, Origin, ServiceName};
use rig::{CLUSTER, Rig, SECOND, UPLINK};
use sluice::agent::compile_loop::{self, Inputs, Outputs, Tables};
use sluice::agent::served::Served;
use sluice::agent::supervisor::Supervisor;
use tokio::sync::{Mutex, watch};
use tokio_util::sync::CancellationToken;

/// How often the task panics before it works.
const PANICS: u64 = 3;

/// The tables of the rig, for the task that makes its snapshots from now on.
fn take_tables(rig: &mut Rig) -> Tables {
    let other = Compiler::new(rig::config(1));
    let (publisher, _) = Publisher::new(other.initial(), 1);
    Tables { compiler: replace(&mut rig.compiler, other), publisher: replace(&mut rig.publisher, publisher) }
}

fn syn(n: u64) -> Vec<u8> {
    Packet::tcp(&format!("198.51.100.7:{}", 2000 + n % 500), "192.0.2.100:80").build()
}

#[test]
fn a_task_that_panics_loses_no_packet_and_is_heard_again_afterwards() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let _entered = runtime.enter();
    let mut rig = Rig::new();
    let tables = Arc::new(Mutex::new(take_tables(&mut rig)));
    let known = |state| Some(Known { state: Arc::new(state), origin: Origin::Controller });
    let (states, states_seen) = watch::channel(known(rig.state.clone()));
    let (network, health) = (watch::Sender::new(rig.network.clone()), watch::Sender::new(probe::Health::default()));
    let inputs = Inputs { known: states_seen, network: network.subscribe(), health: health.subscribe(), clock: || 100 * SECOND };
    let outputs = Outputs {
        next_hops: watch::Sender::default(),
        served: watch::Sender::new(Served::default()),
        reached: watch::Sender::new(None),
    };

    let stop = CancellationToken::new();
    let mut supervisor = Supervisor::new(stop.clone());
    let runs = AtomicU64::new(0);
    supervisor.run("compile", move || {
        let run = runs.fetch_add(1, Ordering::Relaxed);
        let (tables, inputs, outputs) = (Arc::clone(&tables), inputs.clone(), outputs.clone());
        async move {
            if run < PANICS {
                let _tables = tables.lock().await;
                panic!("in run {run}, with the tables in its hands");
            }
            compile_loop::run(tables, inputs, outputs).await
        }
    });

    let deadline = Instant::now() + Duration::from_secs(20);
    let mut sent = 0;
    while supervisor.tasks().status()[0].restarts < PANICS {
        assert!(Instant::now() < deadline, "{:?}", supervisor.tasks().status());
        rig.now += 1000;
        rig.forward(UPLINK, &syn(sent));
        sent += 1;
    }
    assert!(sent > 0);
    assert!(DropReason::ALL.iter().all(|reason| rig.drops(*reason) == 0), "{sent} packets, none lost");

    rig.state.services.remove(&ServiceName::new("default", "web"));
    states.send_replace(known(rig.state.clone()));
    let new_client = Packet::tcp("198.51.100.8:1", "192.0.2.100:80").build();
    while rig.put(UPLINK, &new_client) == Some(Fate::Forward(CLUSTER)) {
        assert!(Instant::now() < deadline, "the change does not reach the worker");
        std::thread::yield_now();
    }
    assert_eq!(rig.put(UPLINK, &new_client), Some(Fate::Drop(DropReason::UnknownVip)));
    stop.cancel();
    runtime.block_on(supervisor.finished());
}
