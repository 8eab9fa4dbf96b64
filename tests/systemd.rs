//! The programs as units of systemd: what they tell it, and the shipped units.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use edge::{Edge, skip, until};

/// A time in which the watchdog is fed many times.
const FEEDS: Duration = Duration::from_secs(2);

/// systemd's end of `NOTIFY_SOCKET`.
struct NotifySocket {
    socket: UnixDatagram,
    lines: VecDeque<String>,
}

impl NotifySocket {
    fn bind(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        Self { socket, lines: VecDeque::new() }
    }

    /// The next line that a program sent, if there is one soon.
    fn line(&mut self) -> Option<String> {
        if self.lines.is_empty() {
            let mut message = [0; 4096];
            match self.socket.recv(&mut message) {
                Ok(length) => self.lines.extend(String::from_utf8_lossy(&message[..length]).lines().map(str::to_owned)),
                Err(error) => assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}"),
            }
        }
        self.lines.pop_front()
    }

    /// Waits for a line that begins so, and returns it.
    fn wait_for(&mut self, start: &str) -> String {
        until(start, || self.line().filter(|line| line.starts_with(start)))
    }
}

fn metric(edge: &Edge, name: &str) -> Option<String> {
    let text = edge.run("gw", &["curl", "-s", "--max-time", edge::REQUEST_S, "http://127.0.0.1:9435/metrics"]).stdout;
    let text = String::from_utf8(text).unwrap();
    text.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
}

/// Code of the answer to a probe.
fn livez(edge: &Edge) -> String {
    let url = "http://127.0.0.1:9435/livez";
    let output = edge.run("gw", &["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--max-time", edge::REQUEST_S, url]);
    String::from_utf8(output.stdout).unwrap()
}

/// The threads of a gateway of this name.
fn threads(edge: &Edge, name: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", edge.pid().as_raw_nonzero())).unwrap().map(|task| task.unwrap());
    let is_named = |task: &fs::DirEntry| fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name);
    tasks.filter(is_named).map(|task| task.file_name().into_string().unwrap()).collect()
}

/// Every thread: no capability of which an af_packet port has no need, no new privileges, and a seccomp filter.
fn assert_every_thread_is_restricted(edge: &Edge) {
    let threads = fs::read_dir(format!("/proc/{}/task", edge.pid().as_raw_nonzero())).unwrap();
    let statuses: Vec<_> = threads.filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok()).collect();
    assert!(statuses.len() > 3, "workers, tasks and DPDK's threads: {statuses:?}");
    // CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_NET_ADMIN, CAP_NET_RAW.
    let kept: u64 = 1 << 0 | 1 << 1 | 1 << 12 | 1 << 13;
    for status in statuses {
        let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_owned();
        for set in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"] {
            assert_eq!(u64::from_str_radix(&value(set), 16).unwrap() & !kept, 0, "{status}");
        }
        assert_eq!((value("NoNewPrivs:").as_str(), value("Seccomp:").as_str()), ("1", "2"), "{status}");
    }
}

/// Units, each with the greatest exposure that `systemd-analyze security` may find.
const UNITS: [(&str, f64); 3] =
    [("deploy/sluiced.service", 5.0), ("deploy/sluice-controller.service", 3.0), ("deploy/sluiced-prepare.service", 3.0)];

/// The units of programs that serve sockets.
const SERVING: [&str; 2] = ["deploy/sluiced.service", "deploy/sluice-controller.service"];

/// Whether systemd's tools are there. If not, reports the test as skipped.
fn has_systemd_analyze(test: &str) -> bool {
    let is_there = Command::new("systemd-analyze").arg("--version").output().is_ok();
    if !is_there {
        skip(test, "no `systemd-analyze` here (Debian: apt-get install systemd)");
    }
    is_there
}

#[test]
fn units_are_exposed_as_little_as_promised() {
    if !has_systemd_analyze("the exposure of units") {
        return;
    }
    for (unit, exposure_max) in UNITS {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(unit);
        let output = Command::new("systemd-analyze").args(["security", "--no-pager", "--offline=true"]).arg(&path).output();
        let text = String::from_utf8(output.unwrap().stdout).unwrap();
        let total = text.lines().find_map(|line| line.split_once("Overall exposure level for ")).unwrap().1;
        let exposure: f64 = total.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(exposure <= exposure_max, "{unit}: {total}\n{text}");
        let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operate/privileges.md")).unwrap();
        assert!(page.contains(&format!("{exposure:.1}")), "docs/operate/privileges.md says {exposure} of {unit}");
    }
}

/// Unknown keys and values would only be warnings of a running systemd.
#[test]
fn systemd_accepts_every_line_of_the_units_and_of_the_accounts() {
    if !has_systemd_analyze("the units in systemd's eyes") {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let dir = tempfile::tempdir().unwrap();
    for (unit, _) in UNITS {
        // The programs and pages are not installed here.
        let text = fs::read_to_string(root.join(unit)).unwrap().replace("/usr/bin/sluice", "/bin/true #");
        let text: String =
            text.lines().filter(|line| !line.starts_with("Documentation=")).map(|line| format!("{line}\n")).collect();
        let path = dir.path().join(Path::new(unit).file_name().unwrap());
        fs::write(&path, text).unwrap();
        let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let output =
        Command::new("systemd-sysusers").arg("--dry-run").arg(root.join("deploy/sysusers.d/sluice.conf")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

/// The system calls that a unit allows: the first line makes a list, `~` takes calls from it, later lines add some.
fn allowed_calls(unit: &str) -> BTreeSet<String> {
    let mut allowed = BTreeSet::new();
    for line in unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")) {
        match line.strip_prefix('~') {
            Some(denied) => denied.split_whitespace().flat_map(expand).for_each(|call| _ = allowed.remove(&call)),
            None => allowed.extend(line.split_whitespace().flat_map(expand)),
        }
    }
    allowed
}

/// The calls of a set such as `@chown`, with those of the sets in it; a call is itself.
fn expand(name: &str) -> Vec<String> {
    if !name.starts_with('@') {
        return vec![name.to_owned()];
    }
    let output = Command::new("systemd-analyze").args(["syscall-filter", "--no-pager", name]).output().unwrap();
    assert!(output.status.success(), "{name}");
    let text = String::from_utf8(output.stdout).unwrap();
    let members = text.lines().skip(1).map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    members.flat_map(expand).collect()
}

/// The socket that only reads is given to group sluice.
#[test]
fn units_may_give_a_socket_to_a_group_and_little_else_of_root() {
    if !has_systemd_analyze("system calls of units") {
        return;
    }
    for unit in SERVING {
        let allowed = allowed_calls(&fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(unit)).unwrap());
        for call in ["chown", "fchown", "fchownat", "openat", "epoll_wait"] {
            assert!(allowed.contains(call), "{unit}: {call}");
        }
        for call in ["mount", "init_module", "ptrace", "add_key", "reboot"] {
            assert!(!allowed.contains(call), "{unit}: {call}");
        }
    }
}

/// Devices of PCI and modules are what it is for. It has the files that it writes, and root's other rights it has not.
#[test]
fn the_unit_that_prepares_binds_only_listed_devices_and_may_load_modules() {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/sluiced-prepare.service")).unwrap();
    let has = |line: &str| text.lines().any(|found| found == line);
    assert!(has("ExecStart=/usr/bin/sluiced prepare --boot --config /etc/sluice/sluice.yaml"));
    assert!(has("CapabilityBoundingSet=CAP_SYS_MODULE CAP_DAC_OVERRIDE"));
    // These would keep it from /sys, from modules, from the machine's interfaces and from the gateway's process.
    for key in ["ProtectKernelTunables", "ProtectKernelModules", "PrivateNetwork", "ProtectProc", "PrivateUsers"] {
        assert!(!text.contains(key), "{key}");
    }
    if !has_systemd_analyze("system calls of the unit that prepares") {
        return;
    }
    let allowed = allowed_calls(&text);
    assert!(["finit_module", "init_module", "openat"].iter().all(|&call| allowed.contains(call)));
    assert!(["mount", "ptrace", "add_key", "reboot"].iter().all(|&call| !allowed.contains(call)));
}

/// Members of group sluice may look, not change.
#[test]
fn no_unit_gives_its_sockets_to_the_group_that_may_look() {
    for unit in SERVING {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(unit)).unwrap();
        assert!(text.lines().any(|line| line == "SupplementaryGroups=sluice"), "{unit}");
        assert!(!text.lines().any(|line| line == "Group=sluice" || line == "User=sluice"), "{unit}");
    }
}

#[test]
fn systemd_hears_of_the_start_a_reload_a_stalled_worker_and_the_stop() {
    let Some(mut edge) = Edge::with_af_packet("messages to systemd", "sysd") else { return };
    edge.write_demo_manifests();
    let path = edge.path("notify.sock");
    let mut socket = NotifySocket::bind(&path);
    edge.spawn_with(&[("NOTIFY_SOCKET", path.to_str().unwrap()), ("WATCHDOG_USEC", "20000000")]);
    socket.wait_for("READY=1");
    assert!(edge.status().unwrap().ready, "READY=1 comes once every worker forwards by a complete state");
    assert!(socket.wait_for("STATUS=").starts_with("STATUS=forwards by "));
    socket.wait_for("WATCHDOG=1");

    assert_eq!(edge.reload().as_deref(), Ok("nothing has changed"));
    socket.wait_for("RELOADING=1");
    socket.wait_for("READY=1");

    assert_every_thread_is_restricted(&edge);

    let stalled = "sluice_worker_stalled{worker=\"0\"}";
    until("metrics are served", || metric(&edge, stalled).filter(|value| value == "0"));
    assert_eq!(livez(&edge), "200");
    let stopped = edge.start_script("gw", "stop_thread.py", &[&threads(&edge, "sluice-worker-0")[0]]);
    until("the worker is stalled", || metric(&edge, stalled).filter(|value| value == "1"));
    assert_eq!(livez(&edge), "503");
    while socket.line().is_some() {}
    let start = Instant::now();
    while start.elapsed() < FEEDS {
        assert_ne!(socket.line().as_deref(), Some("WATCHDOG=1"), "not while a worker is stalled");
    }
    drop(stopped);
    socket.wait_for("WATCHDOG=1");

    let agent: Vec<_> = threads(&edge, "agent").iter().map(|id| edge.start_script("gw", "stop_thread.py", &[id])).collect();
    until("the agent is stalled", || {
        // As systemd does: a sender waits while its messages are not read.
        while socket.line().is_some() {}
        edge.log().contains("the agent does not run its tasks any longer").then_some(())
    });
    while socket.line().is_some() {}
    let start = Instant::now();
    while start.elapsed() < FEEDS {
        assert_ne!(socket.line().as_deref(), Some("WATCHDOG=1"), "not while the agent is stalled");
    }
    drop(agent);
    socket.wait_for("WATCHDOG=1");
    until("the worker polls", || metric(&edge, stalled).filter(|value| value == "0"));
    assert!(edge.curl("http://192.0.2.100/").is_some(), "it forwards again");

    assert_eq!(edge.stop(false), Some(0));
    socket.wait_for("STOPPING=1");
}

#[test]
fn every_line_of_a_gateway_in_the_journal_has_a_priority() {
    let Some(mut edge) = Edge::with_af_packet("priorities in the journal", "jou") else { return };
    edge.write_manifest("broken.yaml", "kind: [");
    let log = fs::OpenOptions::new().create(true).append(true).open(edge.path("sluiced.log")).unwrap();
    let of_log = log.metadata().unwrap();
    edge.spawn_logging_to(log, &[("JOURNAL_STREAM", &format!("{}:{}", of_log.dev(), of_log.ino()))]);
    until("a broken manifest is reported", || edge.log().contains("broken.yaml").then_some(()));
    until("the gateway runs", || edge.log().contains("the gateway runs").then_some(()));
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    let log = edge.log();
    let has_priority = |line: &str| ["<3>", "<4>", "<6>", "<7>"].iter().any(|priority| line.starts_with(priority));
    assert!(log.lines().all(has_priority), "{log}");
    let warnings: Vec<_> = log.lines().filter(|line| line.contains(" WARN ")).collect();
    assert!(!warnings.is_empty() && warnings.iter().all(|line| line.starts_with("<4>")), "{log}");
}
