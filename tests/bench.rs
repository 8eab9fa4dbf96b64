//! `sluiced bench`: every mode in both families, over memory and over rings. Sent packets are verified, and none is
//! dropped.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Command, Stdio};

use serde_json::Value;

const FLOWS: u32 = 3000;

/// Runs one process for each list of arguments, all at once, and returns their reports.
fn bench(each: &[Vec<&str>]) -> Vec<Value> {
    let core = core_affinity::get_core_ids().unwrap()[0].id.to_string();
    let start = |args: &Vec<&str>| {
        Command::new(env!("CARGO_BIN_EXE_sluiced"))
            .args(["bench", "--seconds", "1", "--core", &core, "-o", "json", "--flows", &FLOWS.to_string()])
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
    assert_eq!((&report["mode"], &report["family"]), (&args[1].into(), &args[3].into()));
    assert!(report["packets"].as_u64().unwrap() > 0);
    assert_eq!((&report["hits"], &report["misses"], &report["drops"]), (&report["packets"], &0.into(), &0.into()), "{args:?}");
    assert_eq!(report["new_flows"], 0, "{args:?}");
    assert!(report["verified"].as_u64().unwrap() > 10, "{args:?}: {report}");
}

#[test]
fn every_mode_forwards_known_flows_correctly() {
    let each = each_mode_and_family(&["--services", "3", "--backends", "5"]);
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
    }
}

#[test]
fn every_mode_works_over_rings() {
    let each: Vec<_> = MODES.iter().map(|mode| vec!["--mode", mode, "--family", "v4", "--io", "ring"]).collect();
    for (args, report) in each.iter().zip(bench(&each)) {
        assert_known_flows(args, &report);
        assert_eq!(report["io"], "ring");
    }
}

#[test]
fn bench_without_a_mode_uses_no_flows() {
    let [report] = bench(&[vec!["--mode", "none"]]).try_into().unwrap();
    assert_eq!((&report["mode"], &report["hits"], &report["verified"]), (&"none".into(), &0.into(), &0.into()));
    assert!(report["packets"].as_u64().unwrap() > 0);
}
