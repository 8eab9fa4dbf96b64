//! Scripts, configurations and the Vagrantfile of the repository, checked by the programs that read them.

#![allow(clippy::unwrap_used, clippy::panic)]

mod edge;
#[path = "../control/tests/documents/pages.rs"]
mod pages;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use edge::{built_program, can_create_namespaces, controller_program, missing_capabilities, skip};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn check(config: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sluiced")).args(["check", "--config"]).arg(config).output().unwrap()
}

#[test]
fn every_script_is_correct_bash() {
    let mut scripts: Vec<PathBuf> = Vec::new();
    for dir in [".ci", "demo"] {
        let files = fs::read_dir(root().join(dir)).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
        scripts.extend(files.filter(|path| {
            let is_script = fs::read_to_string(path).unwrap().starts_with("#!/usr/bin/env bash");
            is_script || path.extension().is_some_and(|extension| extension == "sh")
        }));
    }
    assert!(scripts.len() >= 6, "{scripts:?}");
    for script in scripts {
        let output = Command::new("bash").arg("-n").arg(&script).output().unwrap();
        assert!(output.status.success(), "{}: {}", script.display(), text(&output));
    }
}

#[test]
fn debug_symbols_lie_beside_a_stripped_program() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.c"), "int main(void) { return 7; }\n").unwrap();
    let run = |program: &mut Command| {
        let output = program.current_dir(dir.path()).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    run(Command::new("cc").args(["-g", "-o", "a", "a.c"]));
    let sections = |file: &str| run(Command::new("readelf").args(["--wide", "--sections", file]));
    let symbols = || run(Command::new(root().join(".ci/separate-symbols")).arg(dir.path()).arg("a"));
    assert!(sections("a").contains(".debug_info"));
    for _ in 0..2 {
        symbols();
        let program = sections("a");
        assert!(!program.contains(".debug_") && program.contains(".gnu_debuglink") && program.contains(".symtab"), "{program}");
        assert!(sections("a.debug").contains(".debug_info"));
        assert_eq!(Command::new(dir.path().join("a")).status().unwrap().code(), Some(7));
    }
}

/// The summary of `make test` names the tests that did not run.
#[test]
fn tests_that_are_left_out_are_listed_by_program_and_name() {
    let dir = tempfile::tempdir().unwrap();
    let program = |name: &str, lines: &str| {
        let path = dir.path().join(name);
        let asked = "\"$*\" = '--list --ignored --format terse'";
        fs::write(&path, format!("#!/bin/sh\n[ {asked} ] && printf '{lines}'\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        format!("{}\t{name}\t{}\n", dir.path().display(), path.display())
    };
    let programs = program("fleet", "matrix::every_event: test\nother::bench: benchmark\n") + &program("quick", "");
    let mut listed = Command::new(root().join(".ci/ignored-tests")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    listed.stdin.take().unwrap().write_all(programs.as_bytes()).unwrap();
    let output = listed.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "fleet: matrix::every_event\n");
    let summary = fs::read_to_string(root().join(".ci/test")).unwrap();
    assert!(summary.contains(".ci/ignored-tests <\"$logs/programs\"") && summary.contains("levels: $(paste"), "{summary}");
}

/// The short run of `make bench-wire` fails by itself if a request fails. How fast anything is depends on the machine.
#[test]
fn a_comparison_with_the_kernel_on_the_wire_has_every_figure() {
    let test = "a comparison with the kernel on the wire";
    if !can_create_namespaces(test) {
        return;
    }
    if std::thread::available_parallelism().is_ok_and(|cores| cores.get() < 2) {
        return skip(test, "needs two cores");
    }
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.md");
    let output = Command::new(root().join("demo/bench-wire"))
        .env("SLUICE_BIN", Path::new(env!("CARGO_BIN_EXE_sluiced")).parent().unwrap())
        .env("OUTPUT", &page)
        .envs([("SECONDS_EACH", "1"), ("ROUNDS", "1"), ("SERVICES", "2"), ("SYSTEMS", "kernel af_packet")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let page = fs::read_to_string(page).unwrap();
    let tables = page.split("## What is compared").next().unwrap();
    let rows: Vec<Vec<&str>> = tables
        .lines()
        .filter(|line| line.starts_with("| ") && line.contains(": "))
        .map(|line| line.trim_matches(['|', ' ']).split(" | ").collect())
        .collect();
    let figures: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(
        figures,
        [
            "HTTP: requests/s",
            "HTTP: p50, us",
            "HTTP: p99, us",
            "HTTP, a connection a request: requests/s",
            "HTTP, a connection a request: p50, us",
            "HTTP, a connection a request: p99, us",
            "UDP: packets/s",
            "UDP: packets/s sent",
            "TCP: Gbit/s",
        ],
        "{page}"
    );
    for row in rows {
        let values = row[1..].iter().map(|cell| cell.split(' ').next().unwrap().replace(',', "").parse::<f64>());
        let values: Vec<f64> = values.collect::<Result<_, _>>().unwrap_or_else(|error| panic!("{row:?}: {error}"));
        assert!(values.len() == 2 && values.iter().all(|value| *value > 0.0), "{row:?}");
    }
}

/// The script fails by itself if the download breaks or differs from what was sent.
#[test]
fn in_the_demo_of_a_fleet_a_download_survives_the_kill_of_its_gateway() {
    let test = "the demo of a fleet";
    if !can_create_namespaces(test) {
        return;
    }
    if !Path::new("/usr/sbin/keepalived").exists() {
        return skip(test, "no keepalived here (Debian: apt-get install keepalived)");
    }
    let programs = controller_program();
    assert_eq!(built_program("sluicectl", "sluicectl").parent(), programs.parent());
    let output = Command::new(root().join("demo/fleet")).env("SLUICE_BIN", programs.parent().unwrap()).output().unwrap();
    let printed = text(&output);
    assert!(output.status.success(), "{printed}");
    for part in
        ["192.0.2.100  link  l2 ", "3. kill -9 of edge-", " has taken over; ", " ms\n", "demo-fleet: the download survived"]
    {
        assert!(printed.contains(part), "{part:?} is not in\n{printed}");
    }
    let sums = printed.lines().find_map(|line| line.trim().strip_prefix("sent ")?.split_once(", received "));
    assert!(sums.is_some_and(|(sent, received)| sent == received), "{printed}");
}

/// Figures are not judged here, only that each row has one.
#[test]
fn the_page_of_figures_has_every_row_the_machine_and_both_graphs() {
    let output = Command::new(root().join("demo/bench")).arg("--rows").output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let titles = String::from_utf8(output.stdout).unwrap();
    assert!(titles.lines().count() > 30, "{titles}");
    let folder = root().join("docs/reference");
    let page = fs::read_to_string(folder.join("performance.md")).unwrap();
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let rows: Vec<_> = page.lines().filter(|line| line.starts_with("| ")).map(cells).collect();
    for title in titles.lines() {
        let [row] = rows.iter().filter(|row| row[0] == title).collect::<Vec<_>>()[..] else { panic!("{title}: not one row") };
        assert_eq!(row.len(), 6, "{row:?}");
        assert!(row.iter().all(|cell| !cell.is_empty()) && row[1].contains(|c: char| c.is_ascii_digit()), "{row:?}");
    }
    for field in ["processor", "clock", "caches of a core", "memory", "huge pages of DPDK", "kernel", "DPDK", "date"] {
        assert!(rows.iter().any(|row| row.len() == 2 && row[0] == field && row[1].len() > 1), "{field}");
    }
    for (graph, lines) in
        [("performance-flows.svg", &["nat", "dnat", "dsr", "ipip", "gue"][..]), ("performance-services.svg", &["nat"])]
    {
        assert!(page.contains(&format!("]({graph})")), "{graph}");
        let svg = fs::read_to_string(folder.join(graph)).unwrap();
        assert!(lines.iter().all(|line| svg.contains(&format!(">{line}</text>"))), "{graph}");
        assert!(svg.contains("no NIC") && svg.contains("prefers-color-scheme: dark"), "{graph}");
    }
}

#[test]
fn figures_are_compared_with_targets_in_units_of_the_yardstick() {
    let program = "from rows import Figures\n\
                   run = lambda y, ns: {'yardstick_ns': y, 'report': {'ns_per_packet': ns, 'floor_ns': 5}}\n\
                   memory = {'report': {'memory_line': {'fetched_ahead_ns': 1.5}}}\n\
                   runs = {'none': memory, 'a': run(10, 26.0), 'b': run(10, 26.1), 'c': run(None, 9)}\n\
                   figures = Figures({'runs': runs, 'skipped': 'why'})\n\
                   for name in 'abc': print(figures.in_units(name, name, 2, 4))";
    let output =
        Command::new("python3").args(["-B", "-c", program]).current_dir(root().join("demo/bench-table")).output().unwrap();
    let rows = [
        "['a', '26.0 ns', '5.0', '<= 26.0 (1.9 y + 2 L + 4)', '2.60', 'met']",
        "['b', '26.1 ns', '5.0', '<= 26.0 (1.9 y + 2 L + 4)', '2.61', 'not met']",
        "['c', '9.0 ns', '5.0', '<= (1.9 y + 2 L + 4)', '-', '-']",
    ];
    assert_eq!(text(&output), rows.map(|row| format!("{row}\n")).concat());
}

#[test]
fn configurations_of_the_repository_are_accepted() {
    for file in ["deploy/sluice.example.yaml", "demo/vagrant.yaml"] {
        let output = check(&root().join(file));
        assert!(output.status.success(), "{file}: {}", text(&output));
    }
}

#[test]
fn a_check_fails_by_what_is_wrong_and_not_by_what_is_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sluice.yaml");
    let ports = "[{name: uplink, device: net_tap0, addresses: [192.0.2.2/24]}]";
    fs::write(&file, format!("name: edge-1\nports: {ports}\nsnat: {{addresses: [192.0.2.3]}}\nmanifests: m\n")).unwrap();
    let elsewhere = check(&file);
    assert!(elsewhere.status.success() && text(&elsewhere).contains("note: manifests: "), "{}", text(&elsewhere));
    assert!(String::from_utf8_lossy(&elsewhere.stdout).starts_with("name: edge-1\n"));
    fs::create_dir(dir.path().join("m")).unwrap();
    fs::write(dir.path().join("m/web.yaml"), "kind: [\n").unwrap();
    // The gateway starts without the manifest that does not parse.
    let tenant = check(&file);
    let warnings = String::from_utf8_lossy(&tenant.stderr);
    assert!(tenant.status.success() && warnings.starts_with("warning: manifests: "), "{}", text(&tenant));
    assert!(warnings.contains("web.yaml"), "{warnings}");
    let tls = "admin: {listen: ['unix:/run/a.sock', '0.0.0.0:9438'], tls: {ca: ca.pem, cert: cert.pem, key: key.pem}}\n";
    fs::write(&file, fs::read_to_string(&file).unwrap() + tls).unwrap();
    for name in ["ca.pem", "cert.pem", "key.pem"] {
        fs::write(dir.path().join(name), "of nobody\n").unwrap();
    }
    let wrong = check(&file);
    assert_eq!((wrong.status.code(), wrong.stdout.len()), (Some(2), 0));
    assert!(text(&wrong).contains("error: admin.tls: "), "{}", text(&wrong));
    let doctor = Command::new(env!("CARGO_BIN_EXE_sluiced")).args(["doctor", "--config"]).arg(&file).output().unwrap();
    assert!(doctor.status.code() == Some(1) && text(&doctor).contains("missing  admin.tls"), "{}", text(&doctor));
}

#[test]
fn the_first_configuration_of_the_readme_is_accepted() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let blocks = readme.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let first = blocks.into_iter().find(|block| block.starts_with("name:")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sluice.yaml");
    fs::write(&file, first).unwrap();
    let output = check(&file);
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn command_lines_in_documents_are_accepted_by_sluiced() {
    let mut seen = 0;
    for page in pages::pages(root()) {
        for arguments in page.commands("sluiced") {
            seen += 1;
            // With `--help` it checks the arguments and does nothing.
            let output = Command::new(env!("CARGO_BIN_EXE_sluiced")).args(&arguments).arg("--help").output().unwrap();
            assert!(output.status.success(), "{}: {arguments:?}: {}", page.name(), text(&output));
        }
    }
    assert!(seen > 10, "only {seen} command lines found");
}

#[test]
fn systemd_units_restart_without_limit_and_allow_time_to_stop() {
    for (file, stop_min_s) in [("deploy/sluiced.service", 20), ("deploy/sluice-controller.service", 10)] {
        let text = fs::read_to_string(root().join(file)).unwrap();
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        assert_eq!((value("Restart"), value("RestartPreventExitStatus")), (Some("on-failure"), Some("2")), "{file}");
        // By default systemd gives up after five failures in 10 s.
        assert_eq!(value("StartLimitIntervalSec"), Some("0"), "{file}");
        assert!(text.find("StartLimitIntervalSec") < text.find("[Service]"), "{file}: a key of [Unit]");
        // `drainOnStop` is 10 s, and the rest of the stop needs a few seconds.
        let stop_s: u32 = value("TimeoutStopSec").and_then(|text| text.strip_suffix('s')).unwrap().parse().unwrap();
        assert!(stop_s >= stop_min_s, "{file}: {stop_s} s");
    }
}

/// Rows of `/proc/self/status` of root, with and without the capabilities that tests with namespaces need.
#[test]
fn missing_capabilities_of_root_are_reported_by_name() {
    let status = |effective: &str| format!("Name:\ttest\nUid:\t0\t0\t0\t0\nCapPrm:\t000001ffffffffff\nCapEff:\t{effective}\n");
    assert_eq!(missing_capabilities(&status("000001ffffffffff")), [""; 0]);
    assert_eq!(missing_capabilities(&status("00000000a80425fb")), ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"], "docker's default");
    assert_eq!(missing_capabilities(&status("000001ffffffefff")), ["CAP_NET_ADMIN"]);
    assert_eq!(missing_capabilities(&status("0000000000001000")), ["CAP_SYS_ADMIN"]);
    assert_eq!(missing_capabilities(""), ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]);
}

#[test]
fn the_vagrantfile_is_valid() {
    if Command::new("vagrant").arg("--version").output().is_err() {
        return skip("the_vagrantfile_is_valid", "no `vagrant` here (Debian: apt-get install vagrant)");
    }
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new("vagrant")
        .args(["validate", "--ignore-provider"])
        .current_dir(root())
        .env("VAGRANT_HOME", dir.path().join("home"))
        .env("VAGRANT_DOTFILE_PATH", dir.path().join("dot"))
        .env("VAGRANT_CHECKPOINT_DISABLE", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
}
