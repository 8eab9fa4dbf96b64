//! Two workers between real programs. Both have flows, whichever queue the kernel chooses for a packet.

#![allow(clippy::unwrap_used, clippy::panic)]

mod edge;

use std::collections::BTreeSet;

use edge::{Edge, skip, until};
use rustix::thread::{CpuSet, sched_setaffinity};

/// An iperf3 server behind a VIP. It has one backend because iperf3's connections belong together.
const IPERF: &str = "apiVersion: v1
kind: Service
metadata: {namespace: demo, name: iperf, annotations: {sluice.dev/addresses: 192.0.2.110, sluice.dev/health-check: none}}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  ports: [{name: tcp, port: 5201, protocol: TCP}, {name: udp, port: 5201, protocol: UDP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: demo, name: iperf-1, labels: {kubernetes.io/service-name: iperf}}
addressType: IPv4
ports: [{name: tcp, port: 5201, protocol: TCP}, {name: udp, port: 5201, protocol: UDP}]
endpoints: [{addresses: [10.0.0.11]}]
";

/// Whether this machine has two cores. If not, reports the test as skipped.
fn has_two_cores(test: &str) -> bool {
    let cores = std::thread::available_parallelism().unwrap().get();
    if cores < 2 {
        skip(test, "needs two cores");
    }
    cores >= 2
}

/// Tests HTTP, TCP streams and UDP datagrams through two workers over these devices.
fn two_workers(test: &str, name: &str, devices: [&str; 2], steering: &str) {
    if !has_two_cores(test) {
        return;
    }
    let Some(mut edge) = Edge::new(test, name) else { return };
    edge.configure_on(&[0, 1], devices[0], devices[1], "");
    edge.write_demo_manifests();
    edge.write_manifest("iperf.yaml", IPERF);
    let _server = edge.start_program("b11", &["iperf3", "-s", "--forceflush"]);
    edge.start();
    // Over TCP and over UDP.
    until("the iperf3 server is found healthy", || edge.healthy("demo/iperf").filter(|n| *n == 2));
    until("the web servers are found healthy", || edge.healthy("demo/web").filter(|n| *n == 6));
    assert!(edge.steering().unwrap().iter().all(|mode| mode.starts_with(steering)), "{:?}", edge.steering());

    let answers: BTreeSet<String> = (0..60).map(|_| edge.curl("http://192.0.2.100/").unwrap()).collect();
    assert_eq!(answers.len(), 3, "every backend answers: {answers:?}");
    for options in [&["-P", "8"][..], &["-u", "-b", "20M", "-P", "4"]] {
        let command = [&["iperf3", "-c", "192.0.2.110", "-t", "2", "-J", "--connect-timeout", "60000"], options].concat();
        let output = edge.run("client", &command);
        let report = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{command:?}: {report}");
    }

    let accounts = edge.status().unwrap().accounts;
    assert_eq!(accounts.len(), 2);
    assert!(accounts.iter().all(|account| account.flows > 0), "both workers have flows: {accounts:?}");
    assert!(accounts.iter().any(|account| account.handed_in > 0), "{accounts:?}");
    edge.assert_account();
}

/// Threads of a process, with the cores that each may run on.
fn threads(pid: rustix::process::Pid) -> Vec<(String, String)> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).unwrap();
    let thread = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?.trim().to_owned();
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let cores = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Some((name, cores.trim().to_owned()))
    };
    tasks.filter_map(|task| thread(task.unwrap())).collect()
}

/// With `isolcpus=1` processes inherit a CPU mask without core 1; otherwise the mask contains it.
#[test]
fn only_the_worker_runs_on_its_core_whatever_cpu_mask_the_process_inherits() {
    let test = "a worker on an isolated core";
    if !has_two_cores(test) {
        return;
    }
    let Some(mut edge) = Edge::new(test, "iso") else { return };
    edge.configure_on(&[1], edge::AF_PACKET[0], edge::AF_PACKET[1], "");
    edge.write_demo_manifests();
    for inherited in [&[0][..], &[0, 1]] {
        let mut mask = CpuSet::new();
        inherited.iter().for_each(|&core| mask.set(core));
        // Applies to this test's thread and to the processes that it starts.
        sched_setaffinity(None, &mask).unwrap();
        edge.start();
        until("an answer", || edge.curl("http://192.0.2.100/"));
        let threads = threads(edge.pid());
        assert!(threads.len() > 4, "{threads:?}");
        for (name, cores) in &threads {
            assert_eq!(cores, if name.starts_with("sluice-worker") { "1" } else { "0" }, "{name} of {threads:?}");
        }
        assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    }
}

#[test]
fn iperf3_through_two_workers_over_af_packet() {
    two_workers("iperf3 through two workers over af_packet", "two", edge::AF_PACKET, "own hash: net_af_packet");
}

#[test]
fn iperf3_through_two_workers_where_a_device_has_one_queue() {
    // Worker 1 has no queues: it neither receives nor sends.
    let devices = ["net_af_packet0,iface=uplink0,qpairs=1", "net_af_packet1,iface=cluster0,qpairs=1"];
    two_workers(
        "iperf3 through two workers where a device has one queue",
        "one",
        devices,
        "own hash: net_af_packet has 1 receive queue; 1 of 2 workers can transmit",
    );
}
