//! `sluiced bench`: every mode in both families, every option, over memory and over rings. Sent packets are verified and
//! accounted for, and none is dropped.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Command, Stdio};

use dataplane::BURST;
use serde_json::Value;

const FLOWS: u32 = 3000;

/// Runs one process for each list of arguments, all at once, and returns their reports.
fn bench(each: &[Vec<&str>]) -> Vec<Value> {
    let core = core_affinity::get_core_ids().unwrap()[0].id.to_string();
    let start = |args: &Vec<&str>| {
        Command::new(env!("CARGO_BIN_EXE_sluiced"))
            .args(["bench", "--seconds", "1", "-o", "json", "--flows", &FLOWS.to_string()])
            .args(["--core", &core].iter().filter(|_| !args.contains(&"--core")))
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let running: Vec<_> = each.iter().map(|args| (args, start(args))).collect();
    let report = |(args, child): (&Vec<&str>, std::process::Child)| {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    running.into_iter().map(report).collect()
}

const MODES: [&str; 5] = ["nat", "dnat", "dsr", "ipip", "gue"];

fn each_mode_and_family<'a>(more: &[&'a str]) -> Vec<Vec<&'a str>> {
    let both = MODES.into_iter().flat_map(|mode| [(mode, "v4"), (mode, "v6")]);
    both.map(|(mode, family)| [&["--mode", mode, "--family", family], more].concat()).collect()
}

/// Every packet hit a known flow and was sent, and verified packets were correct.
fn assert_known_flows(args: &[&str], report: &Value) {
    assert!(report["packets"].as_u64().unwrap() > 0);
    assert_eq!((&report["hits"], &report["misses"], &report["drops"]), (&report["packets"], &0.into(), &0.into()), "{args:?}");
    assert_eq!(report["new_flows"], 0, "{args:?}");
    assert_eq!((&report["received"], &report["held"]), (&report["transmitted"], &0.into()), "{args:?}");
    // A random one in a hundred, and the first packet of each flow.
    let (verified, received) = (report["verified"].as_u64().unwrap(), report["received"].as_u64().unwrap());
    assert!(verified > u64::from(FLOWS) + received / 200 && verified < u64::from(FLOWS) + received / 50, "{args:?}: {report}");
    assert!(report["floor_ns"].as_f64().unwrap() > 0.0, "{args:?}: {report}");
}

#[test]
fn every_mode_forwards_known_flows_correctly() {
    let each = each_mode_and_family(&["--services", "3", "--backends", "5"]);
    for (args, report) in each.iter().zip(bench(&each)) {
        assert_eq!((&report["mode"], &report["family"]), (&args[1].into(), &args[3].into()));
        let direction = if ["nat", "dnat"].contains(&args[1]) { "both" } else { "to-backend" };
        assert_eq!((&report["direction"], &report["state"]), (&direction.into(), &"established".into()));
        assert_known_flows(args, &report);
    }
}

#[test]
fn known_flows_are_forwarded_however_they_come() {
    let each = [
        "--protocol udp",
        "--protocol udp --mode gue",
        "--state opening",
        "--state opening --mode ipip",
        "--direction to-backend",
        "--direction to-client --family v6",
        "--no-df",
        "--no-df --mode ipip --size imix",
        "--vlan",
        "--vlan --family v6 --mode dsr",
        "--ecmp 4",
        "--ecmp 4 --mode gue --family v6",
        "--size imix --protocol udp --family v6",
        "--size 1518 --buffers 512",
    ]
    .map(|args| args.split(' ').collect::<Vec<_>>());
    for (args, report) in each.iter().zip(bench(&each)) {
        assert_known_flows(args, &report);
    }
}

#[test]
fn every_mode_creates_flows_and_forwards_their_packets_correctly() {
    let each = each_mode_and_family(&["--new-flows"]);
    for (args, report) in each.iter().zip(bench(&each)) {
        // The number of new flows in this time depends on the machine.
        assert!(report["new_flows"].as_u64().unwrap() > 0, "{args:?}: {report}");
        assert!(report["verified"].as_u64().unwrap() > 10, "{args:?}: {report}");
        assert_eq!(report["snat_port_reused_early"], 0, "{args:?}: {report}");
    }
}

#[test]
fn flows_are_created_in_a_flood_and_beside_many_that_hold_ports() {
    let each = ["--flood", "--new-flows --snat-load 95 --backends 1", "--new-flows --snat-load 95 --backends 1 --services 2"]
        .map(|args| args.split(' ').collect::<Vec<_>>());
    for (args, report) in each.iter().zip(bench(&each)) {
        assert!(report["new_flows"].as_u64().unwrap() > 0, "{args:?}: {report}");
        assert!(report["verified"].as_u64().unwrap() > 10, "{args:?}: {report}");
    }
}

#[test]
fn every_mode_works_over_rings() {
    for mode in MODES {
        let args = vec!["--mode", mode, "--io", "ring"];
        let report = bench(std::slice::from_ref(&args)).remove(0);
        assert_known_flows(&args, &report);
        assert_eq!(report["io"], "ring");
    }
}

#[test]
fn a_mix_is_forwarded_correctly_over_memory_and_over_rings() {
    for args in [vec!["--mix"], vec!["--mix", "--io", "ring"]] {
        let report = bench(std::slice::from_ref(&args)).remove(0);
        assert_eq!((&report["mode"], &report["family"], &report["direction"]), (&"mix".into(), &"mix".into(), &"both".into()));
        assert_eq!((&report["services"], &report["vlan"], &report["ecmp"]), (&14.into(), &true.into(), &4.into()));
        let [packets, hits, misses, new_flows, verified] =
            ["packets", "hits", "misses", "new_flows", "verified"].map(|key| report[key].as_u64().unwrap());
        assert_eq!((packets, misses), (hits + misses, new_flows), "only SYNs have no flow yet: {report}");
        // One packet in a hundred is a SYN, in a random order.
        assert!(packets < 10_000 || (packets / 120..=packets / 80).contains(&new_flows), "{report}");
        assert_eq!((&report["received"], &report["held"], &report["dropped"]), (&report["transmitted"], &0.into(), &0.into()));
        assert!(verified > u64::from(FLOWS), "{report}");
        assert!(report["floor_ns"].as_f64().unwrap() > 0.0, "{report}");
    }
}

/// Latencies are not judged: they depend on the machine.
#[test]
fn latency_is_measured_at_three_loads() {
    let args = vec!["--latency", "--family", "v6"];
    let report = bench(std::slice::from_ref(&args)).remove(0);
    assert_known_flows(&args, &report);
    let loads = report["latency"].as_array().unwrap();
    assert_eq!(loads.iter().map(|load| load["load_percent"].as_u64().unwrap()).collect::<Vec<_>>(), [10, 50, 90]);
    for load in loads {
        let [p50, p99, p999, packets] = ["p50_ns", "p99_ns", "p999_ns", "packets"].map(|key| load[key].as_u64().unwrap());
        assert!(packets > 0 && 0 < p50 && p50 <= p99 && p99 <= p999, "{report}");
        let packets_per_burst = load["packets_per_burst"].as_f64().unwrap();
        assert!((1.0..=BURST as f64).contains(&packets_per_burst), "a worker that was interrupted finds full bursts: {report}");
    }
    let [low, .., high] = &loads[..] else { panic!("{report}") };
    assert!((high["mpps"].as_f64().unwrap() / low["mpps"].as_f64().unwrap() - 9.0).abs() < 0.01, "{report}");
}

#[test]
fn a_listing_of_all_flows_is_measured_beside_slices_without() {
    let core_count = core_affinity::get_core_ids().unwrap().len();
    if core_count < 2 {
        return;
    }
    let [report] = bench(&[vec!["--listing"]]).try_into().unwrap();
    assert_known_flows(&[], &report);
    let [with, without, flows] =
        ["ns_per_packet", "without_ns", "flows_per_second"].map(|key| report["listing"][key].as_f64().unwrap());
    assert!(with > 0.0 && without > 0.0, "{report}");
    // At most 16 inquiries of 64 flows in 2 ms.
    assert!(flows > f64::from(FLOWS) && flows < 16.0 * 64.0 * 550.0, "{report}");
}

#[test]
fn workers_forward_their_own_flows_and_hand_over_those_of_others() {
    let core_count = core_affinity::get_core_ids().unwrap().len();
    if core_count < 2 {
        return;
    }
    for args in [vec!["--workers", "2", "--core", "0"], vec!["--workers", "2", "--core", "0", "--handover"]] {
        let report = bench(std::slice::from_ref(&args)).remove(0);
        assert!(report["packets"].as_u64().unwrap() > 0);
        assert_eq!((&report["received"], &report["dropped"]), (&report["transmitted"], &0.into()), "{args:?}: {report}");
        assert_eq!(report["without_handover_ns"].is_null(), args.len() == 4);
    }
}

#[test]
fn bench_without_a_mode_uses_no_flows() {
    let [report] = bench(&[vec!["--mode", "none"]]).try_into().unwrap();
    assert_eq!((&report["mode"], &report["hits"], &report["verified"]), (&"none".into(), &0.into(), &0.into()));
    assert_eq!(report["floor_ns"], report["ns_per_packet"]);
    for time in ["fetched_ahead_ns", "dependent_ns"] {
        assert!(report["memory_line"][time].as_f64().unwrap() > 0.0, "{time}: {report}");
    }
    assert!(report["packets"].as_u64().unwrap() > 0);
}

#[test]
fn contradictions_are_refused() {
    for args in [
        "--mode dsr --direction both",
        "--handover",
        "--state opening --direction to-client",
        "--no-df --family v6",
        "--latency --new-flows",
        "--listing --flood",
        "--mix --mode nat",
        "--mix --new-flows",
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_sluiced")).arg("bench").args(args.split(' ')).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("--"), "{args}");
    }
}
