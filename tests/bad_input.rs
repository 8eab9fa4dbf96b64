//! Bad configurations and missing resources of the machine, against the real binary. Each test checks the exit code and
//! the message, which names the finding, its position and the remedy.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use edge::{DEADLINE, Edge, can_create_namespaces, skip, until};

/// A configuration that needs no resource of the machine: ports without traffic, no twins, no hugepages.
const GOOD: &str = "\
name: test
ports:
  - name: uplink
    device: net_null0,no-rx=1
    addresses: [192.0.2.2/24]
    twin: none
  - name: cluster
    device: net_null1,no-rx=1
    addresses: [10.0.0.2/24]
    twin: none
workers: {cores: [0], poll: adaptive}
memory: {hugepages: off}
flows: {maxPerWorker: 1024}
snat: {addresses: [10.0.0.3]}
pools: [{name: default, addresses: [192.0.2.100-192.0.2.119]}]
manifests: manifests
statusDir: status
stateDir: state
listen: unix:config.sock
admin: {listen: 'unix:admin.sock'}
";

/// A directory with a configuration, from which a gateway can be started.
struct ConfigDir {
    dir: tempfile::TempDir,
    config: PathBuf,
}

impl ConfigDir {
    /// [`GOOD`] with the text `from` replaced by `to`.
    fn with(from: &str, to: &str) -> Self {
        assert!(GOOD.contains(from), "{from} is not in the configuration");
        Self::of(&GOOD.replace(from, to))
    }

    fn of(text: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("sluice-").tempdir().unwrap();
        fs::create_dir(dir.path().join("manifests")).unwrap();
        let config = dir.path().join("sluice.yaml");
        fs::write(&config, text).unwrap();
        Self { dir, config }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluiced"));
        command.arg("run").arg("--config").arg(&self.config).args(arguments);
        command.env("XDG_RUNTIME_DIR", self.dir.path()).stdin(Stdio::null());
        command
    }

    /// Runs the gateway. It must refuse to start, with this exit code and all these texts in its output.
    fn assert_refused(&self, code: i32, texts: &[&str]) -> String {
        let child = self.command(&[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = wait_for_exit(child);
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert_eq!(output.status.code(), Some(code), "{text}");
        for expected in texts {
            assert!(text.contains(expected), "expected {expected:?} in:\n{text}");
        }
        text
    }

    /// Starts the gateway and waits until it runs.
    fn start(&self, arguments: &[&str]) -> Gateway<'_> {
        let log = fs::File::create(self.path("log")).unwrap();
        let child = self.command(arguments).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let mut gateway = Gateway { config_dir: self, child };
        until("the gateway runs", || gateway.logs("the gateway runs"));
        gateway
    }
}

/// Waits until a process ends by itself, and returns its output.
fn wait_for_exit(mut child: Child) -> Output {
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > DEADLINE {
            child.kill().unwrap();
            panic!("the process did not end: {:?}", child.wait_with_output().unwrap());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

struct Gateway<'a> {
    config_dir: &'a ConfigDir,
    child: Child,
}

impl Gateway<'_> {
    fn log(&self) -> String {
        fs::read_to_string(self.config_dir.path("log")).unwrap()
    }

    /// `Some` once the log contains this text. Panics if the gateway has ended.
    fn logs(&mut self, text: &str) -> Option<()> {
        let log = self.log();
        if log.contains(text) {
            return Some(());
        }
        assert_eq!(self.child.try_wait().unwrap(), None, "the gateway ended:\n{log}");
        None
    }

    /// Stops the gateway by SIGTERM, expects exit code 0, and returns the log.
    fn stop(mut self) -> String {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), rustix::process::Signal::TERM).unwrap();
        let status = until("the gateway ends", || self.child.try_wait().unwrap());
        assert_eq!(status.code(), Some(0), "{}", self.log());
        self.log()
    }
}

impl Drop for Gateway<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_mistake_in_the_file_is_reported_with_file_line_and_key_and_exit_code_2() {
    let rows: &[(&str, &str, &[&str])] = &[
        ("name: test", "name: [unclosed", &["sluice.yaml:"]),
        ("name: test", "name: test\nflux: 1", &["sluice.yaml:2:", "`flux`"]),
        ("[10.0.0.3]", "[10.0.0.300]", &["sluice.yaml:14:", "`snat.addresses[0]`", "10.0.0.300"]),
        ("[10.0.0.3]", "[10.0.0.2]", &["sluice.yaml:14:", "`snat.addresses[0]`", "address of port `cluster` (line 9)"]),
        (
            "192.0.2.100-192.0.2.119]}]",
            "192.0.2.100-192.0.2.119]}, {name: more, addresses: [192.0.2.110-192.0.2.130]}]",
            &["sluice.yaml:15:", "`pools[1].addresses[0]`", "overlaps"],
        ),
        ("192.0.2.100-", "192.0.2.1-", &["sluice.yaml:15:", "holds 192.0.2.2, an address of port `uplink`"]),
        (
            "manifests: manifests",
            "defaults: {mode: teleport}\nmanifests: manifests",
            &["sluice.yaml:16:", "`defaults.mode`", "nat, dnat, dsr, ipip or gue"],
        ),
        ("net_null1,no-rx=1", "eth1", &["sluice.yaml:8:", "`ports[1].device`", "eth1"]),
    ];
    for (from, to, texts) in rows {
        ConfigDir::with(from, to).assert_refused(2, texts);
    }
    let missing = ConfigDir::of(GOOD);
    fs::remove_file(&missing.config).unwrap();
    missing.assert_refused(2, &["sluice.yaml", "No such file"]);
}

#[test]
fn all_mistakes_of_a_file_are_reported_at_once() {
    let text = GOOD
        .replace("name: test", "name: test\nflux: 1")
        .replace("10.0.0.3]", "10.0.0.2]")
        .replace("192.0.2.100-", "192.0.2.1-")
        .replace("hugepages: off", "hugepages: sometimes")
        .replace("maxPerWorker: 1024", "maxPerWorker: many");
    let keys = ["`flux`", "`memory.hugepages`", "`flows.maxPerWorker`", "`snat.addresses[0]`", "`pools[0].addresses[0]`"];
    let output = ConfigDir::of(&text).assert_refused(2, &keys);
    let lines: Vec<_> = output.lines().filter(|line| line.contains("sluice.yaml:")).collect();
    assert_eq!(lines.len(), keys.len(), "{output}");
    assert!(lines.is_sorted_by_key(|line| line.split(':').nth(1).unwrap().parse::<u32>().unwrap()), "{output}");
}

#[test]
fn a_socket_in_use_is_not_taken_over_and_the_exit_code_is_1() {
    for name in ["admin.sock", "config.sock"] {
        let config_dir = ConfigDir::of(GOOD);
        let path = config_dir.path(name);
        let _listening = UnixListener::bind(&path).unwrap();
        let in_use = format!("{} is in use: another process listens there; stop it, or configure another path", path.display());
        config_dir.assert_refused(1, &[&in_use]);
        assert!(path.exists());
    }
    let config_dir = ConfigDir::of(GOOD);
    fs::write(config_dir.path("admin.sock"), "precious").unwrap();
    config_dir.assert_refused(1, &["admin.sock exists and is no socket; move it away"]);
}

#[test]
fn a_core_that_does_not_exist_is_reported_with_the_cores_that_do() {
    ConfigDir::with("cores: [0]", "cores: [1023]")
        .assert_refused(1, &["workers.cores: core 1023 does not exist; this machine has 0-"]);
}

#[test]
fn a_device_or_interface_that_does_not_exist_is_reported() {
    let none = ConfigDir::with("net_null1,no-rx=1", "net_nonesuch0");
    none.assert_refused(1, &["device net_nonesuch0"]);
    if can_create_namespaces("an interface that does not exist") {
        // The interface may appear later, so the gateway runs with the other port.
        let none = ConfigDir::with("net_null1,no-rx=1", "net_af_packet1,iface=nonesuch0");
        let mut gateway = none.start(&[]);
        for words in ["device net_af_packet1,iface=nonesuch0", "there is no interface", "`ip link`", "attached when it appears"] {
            assert!(gateway.logs(words).is_some(), "{words}");
        }
    }
}

#[test]
fn a_missing_privilege_is_reported_with_the_name_of_the_capability() {
    if !can_create_namespaces("missing privilege") {
        return;
    }
    let config_dir = ConfigDir::with("net_null1,no-rx=1", "net_af_packet1,iface=lo");
    fs::set_permissions(config_dir.dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    // User `nobody` may lack permission to enter the build directory.
    let program = config_dir.path("sluiced");
    fs::copy(env!("CARGO_BIN_EXE_sluiced"), &program).unwrap();
    let child = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"])
        .arg(&program)
        .args(["run", "--config"])
        .arg(&config_dir.config)
        .env("XDG_RUNTIME_DIR", config_dir.dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let output = wait_for_exit(child);
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("interface lo") && text.contains("the gateway needs CAP_NET_ADMIN"), "{text}");
}

/// Whether the machine has no hugepages. These tests need a machine without them.
fn lacks_hugepages(test: &str) -> bool {
    let sizes = fs::read_dir("/sys/kernel/mm/hugepages").map(Iterator::collect::<Vec<_>>).unwrap_or_default();
    let is_none = |dir: PathBuf| fs::read_to_string(dir.join("nr_hugepages")).is_ok_and(|n| n.trim() == "0");
    let has_none = sizes.into_iter().all(|entry| is_none(entry.unwrap().path()));
    if !has_none {
        skip(test, "the machine has hugepages");
    }
    has_none
}

#[test]
fn without_required_hugepages_the_start_fails_and_reports_how_many_are_needed() {
    if lacks_hugepages("hugepages required and absent") {
        let config_dir = ConfigDir::with("hugepages: off", "hugepages: require");
        config_dir.assert_refused(1, &["hugepages are required", "MB are needed, 0 MB are free", "sysctl vm.nr_hugepages="]);
        let pci = ConfigDir::of(&GOOD.replace("net_null1,no-rx=1", "0000:ff:1f.7").replace("hugepages: off", "hugepages: auto"));
        pci.assert_refused(1, &["a PCI port"]);
    }
}

#[test]
fn virtual_devices_work_without_hugepages_after_one_warning() {
    if lacks_hugepages("virtual devices without hugepages") {
        let config_dir = ConfigDir::with("hugepages: off", "hugepages: auto");
        let mut gateway = config_dir.start(&[]);
        until("the gateway follows its controller", || gateway.logs("following the controller"));
        let log = gateway.log();
        assert_eq!(log.matches("too few free hugepages").count(), 1, "{log}");
        assert_eq!(log.matches("WARN").count(), 1, "{log}");
        gateway.stop();
    }
}

#[test]
fn a_missing_or_broken_kubeconfig_is_reported_with_exit_code_2() {
    let kubernetes = |text: Option<&str>| {
        let config_dir = ConfigDir::with("manifests: manifests", "kubernetes: {kubeconfig: kubeconfig}");
        if let Some(text) = text {
            fs::write(config_dir.path("kubeconfig"), text).unwrap();
        }
        let path = config_dir.path("kubeconfig").display().to_string();
        config_dir.assert_refused(2, &[&format!("kubeconfig {path}"), "expected a readable kubeconfig", "try `kubectl"]);
    };
    kubernetes(None);
    kubernetes(Some("clusters: [oops"));
    kubernetes(Some("apiVersion: v1\nkind: Config\n"));
}

#[test]
fn unreadable_certificates_of_the_controller_are_reported_with_exit_code_2() {
    let tcp = "listen: ['unix:config.sock', '127.0.0.1:9']\ntls: {ca: ca.pem, cert: cert.pem, key: key.pem}";
    ConfigDir::with("listen: unix:config.sock", tcp).assert_refused(2, &["tls: ", "ca.pem"]);
}

#[test]
fn a_replay_of_a_capture_that_does_not_exist_ends_with_exit_code_2() {
    let config_dir = ConfigDir::of(GOOD);
    let (manifests, out) = (config_dir.path("manifests"), config_dir.path("out"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluiced"));
    command.args(["replay", "--in", "uplink=/nonexistent.pcap"]).arg("--config").arg(&config_dir.config);
    let output = command.arg("--manifests").arg(manifests).arg("--out").arg(out).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("sluiced: cannot open /nonexistent.pcap"), "{text}");
}

fn kubeconfig(server: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
         clusters: [{{name: c, cluster: {{server: '{server}'}}}}]\nusers: [{{name: u, user: {{token: t}}}}]\n"
    )
}

#[test]
fn an_unreachable_api_server_is_logged_once_and_retried() {
    let config_dir = ConfigDir::with("manifests: manifests", "kubernetes: {kubeconfig: kubeconfig}");
    // The server accepts connections and never answers: clients see it as unreachable, and the test can count attempts.
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    fs::write(config_dir.path("kubeconfig"), kubeconfig(&format!("http://{}", server.local_addr().unwrap()))).unwrap();
    let gateway = config_dir.start(&[]);
    server.set_nonblocking(true).unwrap();
    // A controller that does not lead requests the Lease, and watches: fewer than ten requests, each of which is repeated.
    for _ in 0..20 {
        until("the gateway connects again", || server.accept().ok());
    }
    let log = gateway.stop();
    let lines = || log.lines().filter(|line| line.contains("the API server cannot be reached"));
    let requests: Vec<_> = lines().map(|line| line.split_once("cannot ").unwrap().1.split(": ").next().unwrap()).collect();
    assert_eq!(requests.iter().collect::<BTreeSet<_>>().len(), requests.len(), "each once: {log}");
    assert!(requests.len() < 10 && requests.iter().any(|request| request.contains("leases")), "{log}");
    assert!(lines().all(|line| line.contains("check its address")), "{log}");
}

#[test]
fn an_api_server_that_refuses_connections_does_not_stop_the_gateway() {
    let config_dir = ConfigDir::with("manifests: manifests", "kubernetes: {kubeconfig: kubeconfig}");
    fs::write(config_dir.path("kubeconfig"), kubeconfig("https://127.0.0.1:1")).unwrap();
    let mut gateway = config_dir.start(&[]);
    until("the failure is logged", || gateway.logs("the API server cannot be reached"));
    gateway.stop();
}

#[test]
fn an_unreachable_controller_is_logged_once_and_does_not_stop_the_gateway() {
    let without_controller: Vec<_> = ["pools:", "manifests:", "statusDir:", "listen: unix:config"].into();
    let text: String = GOOD
        .lines()
        .filter(|line| !without_controller.iter().any(|key| line.starts_with(key)))
        .fold(String::new(), |text, line| text + line + "\n");
    let config_dir = ConfigDir::of(&text);
    let socket = format!("unix:{}", config_dir.path("none.sock").display());
    let mut gateway = config_dir.start(&["--controller", &socket]);
    let message = format!("cannot connect to the controller at {socket}");
    until("the failure is logged", || gateway.logs(&message));
    // An accepted connection proves that the gateway tried again.
    let listener = UnixListener::bind(config_dir.path("none.sock")).unwrap();
    listener.set_nonblocking(true).unwrap();
    until("the gateway tries again", || listener.accept().ok());
    let log = gateway.stop();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("No such file")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("is it running there, and may this process reach it?"), "{log}");
}

#[test]
fn a_missing_manifests_directory_is_reported_and_noticed_once_it_exists() {
    let config_dir = ConfigDir::of(GOOD);
    fs::remove_dir(config_dir.path("manifests")).unwrap();
    let path: &Path = &config_dir.path("manifests");
    let mut gateway = config_dir.start(&[]);
    until("the missing directory is logged", || gateway.logs(&format!("manifests directory {}", path.display())));
    fs::create_dir(path).unwrap();
    until("the directory is followed", || gateway.logs("following the controller"));
    gateway.stop();
}

#[test]
fn an_interface_that_sluice_did_not_make_is_never_taken_as_a_twin() {
    let Some(edge) = Edge::with_af_packet("a foreign interface of a twin's name", "for") else { return };
    edge.write_demo_manifests();
    let config = edge.path("sluice.yaml").display().to_string();
    let program = env!("CARGO_BIN_EXE_sluiced");
    let makes = ["link add uplink type bridge", "tuntap add dev uplink mode tap"];
    for make in makes {
        edge.script(&format!("in_ns gw ip {make}"));
        let output = edge.run("gw", &[program, "run", "--config", &config]);
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(
            text.contains("interface uplink exists and was not made by sluice") && text.contains("`ip link delete uplink`"),
            "{text}"
        );
        edge.script("in_ns gw ip link show uplink; in_ns gw ip link del uplink");
        let filters = edge.run("gw", &["tc", "filter", "show", "dev", "uplink0", "ingress"]);
        assert!(filters.stdout.is_empty(), "the gateway removed its tc filter");
    }
}

/// Frames that the parser must refuse: truncated headers, wrong lengths, versions that do not exist.
fn malformed_frames(destination: &str) -> Vec<Vec<u8>> {
    let mac: Vec<u8> = destination.split(':').map(|part| u8::from_str_radix(part, 16).unwrap()).collect();
    let frame = |ether_type: u16, payload: &[u8]| {
        let mut frame = mac.clone();
        frame.extend([2, 0, 0, 0, 0, 9]);
        frame.extend(ether_type.to_be_bytes());
        frame.extend(payload);
        frame.resize(frame.len().max(60), 0xff);
        frame
    };
    let addresses = [192, 0, 2, 10, 192, 0, 2, 100];
    let ipv4 = |first: u8, length: u16| {
        let mut header = vec![first, 0];
        header.extend(length.to_be_bytes());
        header.extend([0, 0, 0, 0, 64, 6, 0, 0]);
        header.extend(addresses);
        header
    };
    vec![
        frame(0x0800, &ipv4(0x65, 40)),   // version 6 in an IPv4 frame
        frame(0x0800, &ipv4(0x44, 40)),   // a header of 16 bytes
        frame(0x0800, &ipv4(0x45, 1400)), // longer than the frame
        frame(0x0800, &ipv4(0x45, 19)),   // shorter than its header
        frame(0x86dd, &[0x45; 40]),       // version 4 in an IPv6 frame
        frame(0x86dd, &[0x60, 0, 0, 0, 0xff, 0xff, 6, 64]),
    ]
}

/// Sends the malformed frames from the client, and returns their number.
fn send_malformed(edge: &Edge) -> u64 {
    let mac = String::from_utf8(edge.run("gw", &["cat", "/sys/class/net/uplink/address"]).stdout).unwrap();
    let frames = malformed_frames(mac.trim());
    let lines: Vec<String> = frames.iter().map(|frame| frame.iter().map(|byte| format!("{byte:02x}")).collect()).collect();
    let program = "import socket, sys\ns = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)\ns.bind(('eth0', 0))\n\
                   [s.send(bytes.fromhex(frame)) for frame in sys.argv[1:]]";
    let mut command = vec!["/usr/bin/python3", "-c", program];
    command.extend(lines.iter().map(String::as_str));
    let sent = edge.run("client", &command);
    assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
    frames.len() as u64
}

#[test]
fn malformed_and_truncated_frames_are_counted_and_do_not_disturb_other_traffic() {
    let Some(mut edge) = Edge::with_af_packet("malformed frames", "mal") else { return };
    edge.write_demo_manifests();
    edge.start();
    until("the first answer", || edge.curl("http://192.0.2.100/"));
    let sent = send_malformed(&edge);
    let is_counted = |reason: &str| reason == "malformed" || reason == "truncated";
    let malformed = |edge: &Edge| edge.drops().iter().filter(|(reason, _)| is_counted(reason)).map(|(_, n)| n).sum::<u64>();
    until("every frame is counted", || (malformed(&edge) == sent).then_some(()));
    assert!(edge.curl("http://192.0.2.100/").is_some(), "the Service still answers");
    edge.assert_account();
}
