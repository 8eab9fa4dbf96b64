//! A gateway without traffic leaves its core to others, and forwards again when packets arrive.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::fs;
use std::time::{Duration, Instant};

use edge::{Edge, until};
use proto::v1;

/// How long CPU time is measured.
const WINDOW: Duration = Duration::from_secs(4);
/// Seconds of CPU time per second.
const IDLE_SHARE_MAX: f64 = 0.02;

/// The directory below /proc of a thread of the gateway, by its name.
fn thread(edge: &Edge, name: &str) -> std::path::PathBuf {
    let tasks = fs::read_dir(format!("/proc/{}/task", edge.pid().as_raw_nonzero())).unwrap();
    let mut tasks = tasks.map(|task| task.unwrap().path());
    tasks.find(|task| fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name)).unwrap()
}

/// Seconds of CPU time per second of a thread, over a window. A machine that is busy lowers it, if anything.
fn share(task: &std::path::Path) -> f64 {
    let spent_ns = || {
        let text = fs::read_to_string(task.join("schedstat")).unwrap();
        text.split(' ').next().unwrap().parse::<f64>().unwrap()
    };
    let (start, before) = (Instant::now(), spent_ns());
    std::thread::sleep(WINDOW);
    (spent_ns() - before) / 1e9 / start.elapsed().as_secs_f64()
}

/// Probes of the backends are all the traffic there is.
#[test]
fn an_idle_adaptive_gateway_takes_less_than_two_percent_of_a_core_and_forwards_at_once() {
    let Some(mut edge) = Edge::with_af_packet("an idle adaptive gateway", "idle") else { return };
    edge.write_demo_manifests();
    edge.start();
    edge.assert_all_servers_answer("http://192.0.2.100/");
    for name in ["sluice-worker-0", "twin"] {
        let task = thread(&edge, name);
        let mut shares = Vec::new();
        until(&format!("{name} is idle"), || {
            shares.push(share(&task));
            println!("{name} takes {:.2} % of a core", shares.last().unwrap() * 100.0);
            shares.last().is_some_and(|share| *share < IDLE_SHARE_MAX).then_some(())
        });
    }
    // Each request comes after a silence in which the worker fell asleep. It takes eight packets or more.
    let received = || edge.status().unwrap().accounts.iter().map(|account| account.received).sum::<u64>();
    let before = received();
    for n in 0..20 {
        std::thread::sleep(Duration::from_millis(100));
        assert!(edge.curl("http://192.0.2.100/").is_some(), "request {n}: {:?}", edge.drops());
    }
    assert!(received() - before >= 20 * 8);
    assert_no_packet_of_a_burst_is_lost(&edge);
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

/// Sends bursts after silences, each smaller than the ring of af_packet, to a pool address without a
/// Service: such packets have a drop reason of their own.
fn assert_no_packet_of_a_burst_is_lost(edge: &Edge) {
    edge.script(
        "set -e; mac=$(in_ns gw cat /sys/class/net/uplink0/address)
         in_ns client ip neigh replace 192.0.2.119 lladdr $mac nud permanent dev eth0",
    );
    let burst = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
                 for n in range(300): s.sendto(b'x', ('192.0.2.119', 9))";
    let dropped = || edge.drops().iter().find(|(reason, _)| reason == "unknown_vip").map_or(0, |(_, packets)| *packets);
    // What arrives before the gateway has a complete state is dropped for the same reason.
    let before = dropped();
    for n in 1..=5 {
        std::thread::sleep(Duration::from_millis(200));
        assert!(edge.run("client", &["python3", "-c", burst]).status.success());
        let arrived = || dropped() - before;
        until(&format!("all packets of burst {n}"), || (arrived() >= 300 * n).then_some(()));
        assert_eq!(arrived(), 300 * n);
    }
}

/// Workers that sleep are asked too: each flow is explained by the worker that lists it.
fn assert_flows_are_explained_by_their_owners(edge: &Edge) {
    let request = v1::ListFlowsRequest::default();
    let flows = edge.admin(async |mut client| client.list_flows(request).await.ok()).unwrap().into_inner().flows;
    assert!([0, 1].iter().all(|worker| flows.iter().any(|flow| flow.worker == *worker)), "{flows:?}");
    for flow in &flows {
        let request = v1::ExplainRequest {
            protocol: flow.protocol.clone(),
            source: flow.client.clone(),
            destination: flow.frontend.clone(),
            ..v1::ExplainRequest::default()
        };
        let explained = edge.admin(async |mut client| client.explain(request).await.ok()).unwrap().into_inner();
        let known = explained.flow.as_ref().map(|known| (&known.client, &known.backend));
        assert_eq!((explained.worker, known), (flow.worker, Some((&flow.client, &flow.backend))), "{explained:?}");
    }
}

/// Worker 1 owns about half of the flows, and receives nothing itself: the packets are handed to it while it sleeps.
#[test]
fn packets_handed_to_a_worker_that_sleeps_are_forwarded() {
    let test = "packets for a worker that sleeps";
    if std::thread::available_parallelism().is_ok_and(|cores| cores.get() < 2) {
        return edge::skip(test, "needs two cores");
    }
    let Some(mut edge) = Edge::new(test, "idl2") else { return };
    edge.configure_on(&[0, 1], "net_af_packet0,iface=uplink0,qpairs=1", "net_af_packet1,iface=cluster0,qpairs=1", "");
    edge.write_demo_manifests();
    edge.start();
    edge.assert_all_servers_answer("http://192.0.2.100/");
    for n in 0..20 {
        std::thread::sleep(Duration::from_millis(100));
        assert!(edge.curl("http://192.0.2.100/").is_some(), "request {n}: {:?}", edge.drops());
    }
    assert_flows_are_explained_by_their_owners(&edge);
    let accounts = edge.status().unwrap().accounts;
    assert!(accounts[1].handed_in >= 20, "{accounts:?}");
    let task = thread(&edge, "sluice-worker-1");
    until("the worker without queues is idle", || (share(&task) < IDLE_SHARE_MAX).then_some(()));
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}
