//! `sluicectl status` and `sluicectl history` against a real gateway: servers die and return, the configuration is
//! broken, the gateway restarts, its history is damaged.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::fs;
use std::path::Path;
use std::process::Command;

use edge::{Edge, built_program, until};

/// Runs `sluicectl`; returns what it prints, and its exit code.
fn sluicectl(program: &Path, edge: &Edge, words: &str) -> (String, i32) {
    let server = format!("unix:{}", edge.path("admin.sock").display());
    let output = Command::new(program).args(["--server", &server]).args(words.split(' ')).output().unwrap();
    (String::from_utf8(output.stdout).unwrap(), output.status.code().unwrap())
}

/// Waits until `status` ends with 1 and shows all the texts.
fn wait_for_trouble(program: &Path, edge: &Edge, texts: &[&str]) -> String {
    until(&format!("trouble {texts:?}"), || {
        let (screen, code) = sluicectl(program, edge, "status");
        let words = screen.split_whitespace().collect::<Vec<_>>().join(" ");
        (code == 1 && texts.iter().all(|text| words.contains(text))).then_some(screen)
    })
}

fn wait_until_well(program: &Path, edge: &Edge) {
    let (screen, code) = sluicectl(program, edge, "status --wait --timeout 2m");
    assert!(code == 0 && screen.starts_with("All is well"), "{screen}{}", sluicectl(program, edge, "events").0);
}

#[test]
fn status_says_what_is_wrong_until_it_is_well_again_and_history_remembers() {
    let Some(mut edge) = Edge::with_af_packet("status_says_what_is_wrong_until_it_is_well_again_and_history_remembers", "st")
    else {
        return;
    };
    let program = &built_program("sluicectl", "sluicectl");
    edge.write_demo_manifests();
    edge.start();
    wait_until_well(program, &edge);

    edge.script("stop_server 13");
    let texts = ["warning Service demo/web (some-unhealthy), since 20", "tcp 10.0.0.13:8080", "-> `sluicectl backends`"];
    wait_for_trouble(program, &edge, &texts);
    let (document, code) = sluicectl(program, &edge, "status -o json");
    let document: serde_json::Value = serde_json::from_str(&document).unwrap();
    assert_eq!((code, &document["well"], &document["critical"]), (1, &false.into(), &0.into()), "{document}");
    let page = edge.run("gw", &["curl", "-s", "http://127.0.0.1:9435/status.json"]).stdout;
    let page: serde_json::Value = serde_json::from_slice(&page).unwrap();
    assert_eq!(page["troubles"][0]["kind"], "some-unhealthy", "{page}");
    let metrics = edge.run("gw", &["curl", "-s", "http://127.0.0.1:9435/metrics"]).stdout;
    let metrics = String::from_utf8(metrics).unwrap();
    assert!(metrics.contains("sluice_troubles{severity=\"critical\"} 0"), "{metrics}");

    edge.script("stop_server 11; stop_server 12");
    wait_for_trouble(program, &edge, &["critical Service demo/web (fail-open)", "all 6 backends are unhealthy"]);
    let (history, code) = sluicectl(program, &edge, "history 10.0.0.13:8080");
    assert_eq!(code, 0);
    let texts = [
        "tcp 10.0.0.13:8080 of demo/web at test",
        "unhealthy since 20",
        "last check 20",
        "healthy    the gateway started; nothing earlier is known",
    ];
    for text in texts {
        assert!(history.contains(text), "{text}: {history}");
    }
    let down = history.lines().find(|line| line.contains("Z  unhealthy  tcp 10.0.0.13:8080")).unwrap().to_owned();

    for n in [11, 12, 13] {
        edge.script(&format!("start_server {n}"));
    }
    wait_until_well(program, &edge);
    assert_eq!(edge.stop(false), Some(0));
    edge.start();
    wait_until_well(program, &edge);
    let history = sluicectl(program, &edge, "history web").0;
    assert!(history.contains(&down) && history.contains("healthy    its probes pass"), "{history}");

    let good = fs::read_to_string(edge.path("sluice.yaml")).unwrap();
    fs::write(edge.path("sluice.yaml"), good.replace("snat:", "snatt:")).unwrap();
    edge.reload().unwrap_err();
    wait_for_trouble(program, &edge, &["warning Configuration (reload-failed)", "snatt"]);
    fs::write(edge.path("sluice.yaml"), good).unwrap();
    edge.reload().unwrap();
    wait_until_well(program, &edge);

    assert_eq!(edge.stop(false), Some(0));
    fs::write(edge.path("state/history"), "no history").unwrap();
    edge.start();
    wait_until_well(program, &edge);
    let history = until("a new history", || {
        Some(sluicectl(program, &edge, "history web").0).filter(|history| history.contains("nothing earlier is known"))
    });
    assert!(!history.contains(&down), "{history}");
    assert!(edge.log().contains("the history of backends is not used and begins anew"), "{}", edge.log());
    services_in_trouble(program, &edge);
}

/// A Service without endpoints, and one whose address lies in no pool.
fn services_in_trouble(program: &Path, edge: &Edge) {
    let service = |name: &str, spec: &str| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{namespace: demo, name: {name}}}\n\
             spec: {{type: LoadBalancer, loadBalancerClass: sluice.dev/gateway, {spec}ports: [{{port: 81}}]}}\n"
        )
    };
    edge.write_manifest("empty.yaml", &service("empty", ""));
    wait_for_trouble(program, edge, &["warning Service demo/empty (no-endpoints)"]);
    edge.write_manifest("far.yaml", &service("far", "loadBalancerIP: 198.51.100.1, "));
    let screen = wait_for_trouble(program, edge, &["critical Service demo/far (not-served)", "OutsidePools"]);
    assert!(screen.starts_with("Not well: 1 critical") && screen.lines().all(|line| line.chars().count() <= 80), "{screen}");
}
