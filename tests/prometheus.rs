//! A real Prometheus scrapes a gateway and a controller, and evaluates the shipped alerts and the dashboard. The reference
//! of metrics is compared with what the programs export.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use edge::{Edge, controller_program, skip, until};
use serde_json::Value;

const GATEWAY: &str = "http://127.0.0.1:9435";
const CONTROLLER: &str = "http://127.0.0.1:9436";
const PROMETHEUS: &str = "http://127.0.0.1:9437";

/// A metric, as the page describes it and as a program exports it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Described {
    name: String,
    kind: String,
    unit: String,
    help: String,
}

fn file(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The rows of docs/reference/metrics.md under these headings.
fn documented(headings: &[&str]) -> BTreeSet<Described> {
    let page = file("docs/reference/metrics.md");
    let sections = page.split("\n## ").filter(|section| headings.contains(&section.lines().next().unwrap()));
    let rows = sections.flat_map(str::lines).filter(|line| line.starts_with("| `"));
    let described = |line: &str| {
        let cells: Vec<_> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [name, kind, unit, _labels, help] = cells[..] else { panic!("{line}") };
        let name = name.trim_matches('`').to_owned();
        Described { name, kind: kind.to_owned(), unit: unit.to_owned(), help: help.to_owned() }
    };
    rows.map(described).collect()
}

/// The metrics of an exposition in OpenMetrics text.
fn exported(text: &str) -> BTreeSet<Described> {
    let described = |help: &str| {
        let (name, help) = help.split_once(' ').unwrap();
        let value = |what: &str| text.lines().find_map(|line| line.strip_prefix(&format!("# {what} {name} ")));
        let kind = value("TYPE").unwrap_or_else(|| panic!("{name} has no type"));
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        let unit = value("UNIT").unwrap_or_default().to_owned();
        Described { name: format!("{name}{suffix}"), kind: kind.to_owned(), unit, help: help.to_owned() }
    };
    text.lines().filter_map(|line| line.strip_prefix("# HELP ")).map(described).collect()
}

/// The names of metrics in a text, without the suffixes of histograms.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| word.starts_with("sluice_"));
    words.map(|word| word.trim_end_matches("_bucket").trim_end_matches("_count").trim_end_matches("_sum").to_owned()).collect()
}

fn with_input(command: &mut Command, input: &str) -> Option<Output> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().ok()?;
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    Some(child.wait_with_output().unwrap())
}

/// Whether Debian's package prometheus is installed. If not, reports the test as skipped.
fn has_prometheus(test: &str) -> bool {
    let is_there = Command::new("promtool").arg("--version").output().is_ok();
    if !is_there {
        skip(test, "needs prometheus and promtool (.ci/install test)");
    }
    is_there
}

/// A running program; killed when dropped.
struct Server(Child);

impl Server {
    fn start(edge: &Edge, log: &str, command: &[&str]) -> Self {
        let log = fs::File::create(edge.path(log)).unwrap();
        let mut program = Command::new("ip");
        program.args(["netns", "exec", &edge.namespace("gw")]).args(command).stdin(Stdio::null());
        Self(program.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a URL answers to a program on the gateway's machine.
fn get(edge: &Edge, url: &str, more: &[&str]) -> Option<String> {
    let output = edge.run("gw", &[&["curl", "-sfg", "--max-time", edge::REQUEST_S], more, &[url]].concat());
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

/// The result of a query; panics if Prometheus rejects it.
fn query(edge: &Edge, expression: &str) -> Vec<Value> {
    let data = format!("query={expression}");
    let output = edge.run("gw", &["curl", "-sg", "--data-urlencode", &data, &format!("{PROMETHEUS}/api/v1/query")]);
    let Ok(answer) = serde_json::from_slice::<Value>(&output.stdout) else { return Vec::new() };
    assert_eq!(answer["status"], "success", "{expression}: {answer}");
    answer["data"]["result"].as_array().cloned().unwrap_or_default()
}

fn number(sample: &Value) -> f64 {
    sample["value"][1].as_str().unwrap().parse().unwrap()
}

/// The expressions of the dashboard, for all gateways and Services.
fn dashboard_expressions() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&file("deploy/prometheus/dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().cloned().unwrap_or_default());
    let plain = |text: &str| text.replace("$__rate_interval", "30s").replace("$instance", ".*").replace("$service", ".*");
    targets.map(|target| plain(target["expr"].as_str().unwrap())).collect()
}

#[test]
fn a_prometheus_scrapes_a_gateway_and_a_controller_and_evaluates_alerts_and_dashboard() {
    let test = "metrics in a real Prometheus";
    let Some(mut edge) = has_prometheus(test).then(|| Edge::with_af_packet(test, "prom")).flatten() else { return };
    edge.write_demo_manifests();
    edge.start();
    edge.assert_all_servers_answer("http://192.0.2.100/");
    let dir = edge.dir.path().display();
    let controller = format!(
        "manifests: {dir}/manifests\nstatusDir: {dir}/status2\nlisten: unix:{dir}/second.sock\n\
         admin: {{listen: \"unix:{dir}/second-admin.sock\"}}\nmetrics: {{listen: '127.0.0.1:9436'}}\n\
         pools: [{{name: default, addresses: [192.0.2.100-192.0.2.119, '2001:db8::1:0/112']}}]\n"
    );
    fs::write(edge.path("second.yaml"), controller).unwrap();
    let program = controller_program().display().to_string();
    let configuration = edge.path("second.yaml").display().to_string();
    let _controller = Server::start(&edge, "second.log", &[&program, "run", "--config", &configuration]);
    for (url, headings) in
        [(GATEWAY, &["Both programs", "Gateway", "Controller"][..]), (CONTROLLER, &["Both programs", "Controller"])]
    {
        let ready = until("the program is ready", || get(&edge, &format!("{url}/readyz"), &[]));
        assert_eq!((ready.as_str(), get(&edge, &format!("{url}/livez"), &[]).as_deref()), ("ok\n", Some("ok\n")), "{url}");
        let accept = ["-H", "accept: application/openmetrics-text; version=1.0.0"];
        let text = get(&edge, &format!("{url}/metrics"), &accept).unwrap();
        assert!(text.ends_with("# EOF\n"), "{text}");
        assert_eq!(exported(&text), documented(headings), "{url}: docs/reference/metrics.md tells the truth");
        let text = get(&edge, &format!("{url}/metrics"), &[]).unwrap();
        let checked = with_input(Command::new("promtool").args(["check", "metrics"]), &text).unwrap();
        assert!(checked.status.success(), "{url}: {}", String::from_utf8_lossy(&checked.stderr));
    }

    let scrape =
        format!("global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n{}", file("deploy/prometheus/prometheus.yaml"));
    fs::write(edge.path("prometheus.yaml"), scrape).unwrap();
    fs::write(edge.path("alerts.yaml"), file("deploy/prometheus/alerts.yaml")).unwrap();
    let arguments = [
        format!("--config.file={}", edge.path("prometheus.yaml").display()),
        format!("--storage.tsdb.path={}", edge.path("tsdb").display()),
        format!("--web.listen-address={}", PROMETHEUS.trim_start_matches("http://")),
    ];
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let _prometheus = Server::start(&edge, "prometheus.log", &[&["prometheus"], arguments.as_slice()].concat());
    until("both targets are up", || (query(&edge, "up == 1").len() == 2).then_some(()));
    let packets = until("packets are counted", || query(&edge, "sum(sluice_packets_total{service='demo/web'})").pop());
    assert!(number(&packets) >= 30.0, "{packets}: at least one packet of each request");
    let healthy = until("health is known", || query(&edge, "sluice_service_healthy_backends{service='demo/web'} == 6").pop());
    assert_eq!(healthy["metric"]["job"], "sluice-gateway", "{healthy}");
    let used = "sluice_pool_addresses{job='sluice-controller',family='IPv4',state='used'} > 0";
    assert_eq!(number(&until("pools are counted", || query(&edge, used).pop())), 1.0);
    until("the alerts are evaluated", || {
        let answer: Value = serde_json::from_str(&get(&edge, &format!("{PROMETHEUS}/api/v1/rules"), &[])?).unwrap();
        let groups = answer["data"]["groups"].as_array()?;
        let rules: Vec<_> = groups.iter().flat_map(|group| group["rules"].as_array().unwrap()).collect();
        assert!(rules.iter().all(|rule| rule["health"] != "err"), "{answer}");
        (!rules.is_empty() && rules.iter().all(|rule| rule["health"] == "ok")).then_some(())
    });
    for expression in dashboard_expressions() {
        query(&edge, &expression);
    }
}

#[test]
fn alerts_and_the_dashboard_use_metrics_that_exist_and_each_alert_has_a_runbook() {
    let known: BTreeSet<_> =
        documented(&["Both programs", "Gateway", "Controller"]).into_iter().map(|metric| metric.name).collect();
    let alerts = file("deploy/prometheus/alerts.yaml");
    let expressions = alerts.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    let used: BTreeSet<_> = expressions.map(str::to_owned).chain(dashboard_expressions()).flat_map(|text| names(&text)).collect();
    assert!(used.len() > 20, "{used:?}");
    assert!(used.is_subset(&known), "unknown: {:?}", used.difference(&known));
    let index = file("docs/operate/metrics.md");
    let named: BTreeSet<_> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    for alert in &named {
        let page = format!("runbooks/{alert}.md");
        assert!(alerts.contains(&format!("runbook: docs/operate/{page}")), "{alert} names its runbook");
        assert!(index.contains(&format!("[{alert}]({page})")), "docs/operate/metrics.md lists {alert}");
        let text = file(&format!("docs/operate/{page}"));
        assert!(text.starts_with(&format!("# {alert}\n")) && text.contains("**Check**") && text.contains("**Action**"), "{page}");
    }
    let pages = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operate/runbooks")).unwrap();
    assert_eq!(pages.count(), named.len(), "every runbook has an alert");
}

#[test]
fn promtool_accepts_the_alerts_and_the_scrape_configuration() {
    if !has_prometheus("promtool checks deploy/prometheus") {
        return;
    }
    for (what, path) in [("rules", "deploy/prometheus/alerts.yaml"), ("config", "deploy/prometheus/prometheus.yaml")] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let output = Command::new("promtool").args(["check", what]).arg(&path).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
