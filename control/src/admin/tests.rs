//! The admin API of a controller over TCP: roles, refusals, renewed certificates and the log, by `sluicectl` itself.

use std::fs::{self, Permissions};
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::Parser as _;
use ctl::{Arguments, Screen};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::fmt::MakeWriter;

use super::*;
use crate::config::controller::ControllerFile;
use crate::controller::{self, Running};
use crate::gateways::listener::ServerTls;
use crate::gateways::tls::Material;
use crate::gateways::tls::tests::Authority;

/// Longer than any expected wait. A test that reaches it has failed.
const DEADLINE: Duration = Duration::from_secs(120);
const SERVICE: &str = "apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: LoadBalancer, loadBalancerClass: sluice.dev/gateway, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [10.0.0.1]}]
";

/// The log of a test.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Log {
    fn has(&self, line: &[&str]) -> bool {
        let log = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        log.lines().any(|other| line.iter().all(|part| other.contains(part)))
    }
}

/// A controller with one Service, on an address of its own.
struct Lab {
    dir: tempfile::TempDir,
    authority: Authority,
    address: SocketAddr,
    log: Log,
    running: Running,
    shutdown: CancellationToken,
    _logging: tracing::subscriber::DefaultGuard,
}

fn write(dir: &Path, name: &str, material: &Material) {
    for (end, content) in [("ca", &material.ca), ("crt", &material.certificate), ("key", &material.key)] {
        let file = dir.join(format!("{name}.{end}"));
        fs::write(&file, content).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    }
}

/// A loopback address that no other test and no other process uses.
fn own_address() -> IpAddr {
    static LAST: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, high, low, LAST.fetch_add(1, Ordering::Relaxed)).into()
}

impl Lab {
    async fn new() -> Self {
        let (dir, authority, address) = (tempfile::tempdir().unwrap(), Authority::new(), SocketAddr::new(own_address(), 9444));
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
        let _logging = tracing::subscriber::set_default(subscriber);
        write(dir.path(), "server", &authority.issue_server(address.ip()));
        fs::create_dir(dir.path().join("manifests")).unwrap();
        fs::write(dir.path().join("manifests/web.yaml"), SERVICE).unwrap();
        let text = format!(
            "listen: unix:config.sock\nmanifests: manifests\nstatusDir: status\n\
             pools: [{{name: default, addresses: [192.0.2.100]}}]\n\
             admin: {{listen: ['unix:admin.sock', '{address}'], tls: {{ca: server.ca, cert: server.crt, key: server.key}}}}\n"
        );
        fs::write(dir.path().join("controller.yaml"), text).unwrap();
        let file = ControllerFile::read(&dir.path().join("controller.yaml")).unwrap();
        let sockets = AdminSockets::listen(&file.admin_listen, ServerTls::of_admin(&file.admin_listen)).await.unwrap();
        let shutdown = CancellationToken::new();
        let config = file.effective();
        let running = controller::start(file.settings, shutdown.clone()).await.unwrap();
        let mut states = running.view.states.clone();
        tokio::time::timeout(DEADLINE, states.wait_for(Option::is_some)).await.unwrap().unwrap();
        let admin = ControllerAdmin { view: running.view.clone(), config };
        tokio::spawn(serve(sockets, admin, shutdown.clone().cancelled_owned()));
        let lab = Self { dir, authority, address, log, running, shutdown, _logging };
        lab.logs(&["the admin API is served over TCP"]).await;
        lab
    }

    /// Waits until the log has a line with all these parts.
    async fn logs(&self, line: &[&str]) {
        let wait = async {
            while !self.log.has(line) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(DEADLINE, wait).await.unwrap_or_else(|_| panic!("the log never had {line:?}"));
    }

    /// The output of a command with this certificate, or the error.
    async fn ctl(&self, material: &Material, command: &str) -> Result<String, String> {
        write(self.dir.path(), "operator", material);
        self.ctl_at(self.address, command).await
    }

    async fn ctl_at(&self, server: SocketAddr, command: &str) -> Result<String, String> {
        let file = |end: &str| self.dir.path().join(format!("operator.{end}")).display().to_string();
        let words = ["sluicectl", "--server", &format!("https://{server}"), "--ca", &file("ca"), "--cert", &file("crt"), "--key"]
            .map(str::to_owned)
            .into_iter()
            .chain([file("key")])
            .chain(command.split_whitespace().map(str::to_owned));
        let arguments = Arguments::try_parse_from(words).unwrap();
        let (mut out, mut notes) = (Vec::new(), Vec::new());
        let screen = Screen { redraw: false, period: Duration::from_secs(1) };
        let result = tokio::time::timeout(DEADLINE, ctl::run(&arguments, &mut out, &mut notes, screen)).await.unwrap();
        result.map(|()| String::from_utf8(out).unwrap()).map_err(|error| error.to_string())
    }

    fn operator(&self, organizations: &[&str]) -> Material {
        self.authority.issue_operator("alice", organizations, 4000)
    }

    fn server_file(&self, end: &str) -> PathBuf {
        self.dir.path().join(format!("server.{end}"))
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.running.stopped().await.unwrap();
    }
}

#[tokio::test]
async fn admins_change_viewers_look_others_are_refused_and_each_change_is_logged_with_its_name() {
    let lab = Lab::new().await;
    let admin = lab.operator(&["example", "sluice:admins"]);
    assert_eq!(lab.ctl(&admin, "drain 10.0.0.1:8080").await.unwrap(), "backend/10.0.0.1:8080 is drained\n");
    lab.logs(&["drained", "what=backend/10.0.0.1:8080", "caller=alice (certificate), from 127."]).await;

    let viewer = lab.authority.issue_operator("bob", &["sluice:viewers"], 4000);
    assert!(lab.ctl(&viewer, "overrides").await.unwrap().contains("10.0.0.1:8080"));
    for command in ["undrain 10.0.0.1:8080", "drain 10.0.0.1:8080", "weight web 10.0.0.1:8080 1", "reload"] {
        let error = lab.ctl(&viewer, command).await.unwrap_err();
        assert!(error.contains("the certificate of \"bob\" only allows to look; issue it with"), "{command}: {error}");
    }
    lab.logs(&["a change was refused, because the caller may only look", "caller=bob (certificate)"]).await;

    let without_role = lab.operator(&["example"]);
    let error = lab.ctl(&without_role, "overrides").await.unwrap_err();
    assert!(error.contains("the certificate of \"alice\" has no role; issue it with the organisation (O)"), "{error}");
    // A gateway of the same authority is no operator.
    let error = lab.ctl(&lab.authority.issue(&["sluice://east/edge-1"]), "overrides").await.unwrap_err();
    assert!(error.contains("has no role"), "{error}");
    lab.stop().await;
}

#[tokio::test]
async fn certificates_that_one_side_does_not_accept_are_refused_with_the_reason() {
    let lab = Lab::new().await;
    let own = lab.operator(&["sluice:admins"]);
    let other = Authority::new();
    let stranger = other.issue_operator("eve", &["sluice:admins"], 4000);
    let both = [own.ca.clone(), stranger.ca.clone()].concat();
    let exposed = |name: &str| fs::set_permissions(lab.dir.path().join(name), Permissions::from_mode(0o644)).unwrap();

    let error = lab.ctl(&stranger, "overrides").await.unwrap_err();
    assert!(error.contains("is not of the authority in ") && error.contains("operator.ca"), "{error}");
    let error = lab.ctl(&Material { ca: both, ..stranger }, "overrides").await.unwrap_err();
    assert!(error.contains("it refused our certificate: its `admin.tls.ca` holds another authority"), "{error}");
    lab.logs(&["a connection over TCP was refused"]).await;
    let error = lab.ctl(&lab.authority.issue_operator("old", &["sluice:admins"], 2020), "overrides").await.unwrap_err();
    assert!(error.contains("operator.crt: the certificate would be refused") && error.contains("certificate expired"), "{error}");
    let error = lab.ctl(&Material { key: b"x".to_vec(), ..own.clone() }, "overrides").await.unwrap_err();
    assert!(error.contains("expected a private key as PEM"), "{error}");
    write(lab.dir.path(), "operator", &own);
    exposed("operator.key");
    let error = lab.ctl_at(lab.address, "overrides").await.unwrap_err();
    assert!(error.contains("the key has mode 0644: every user of this machine may use it; chmod 600"), "{error}");

    // The server's certificate is for another address.
    write(lab.dir.path(), "server", &lab.authority.issue_server("192.0.2.1".parse().unwrap()));
    let error = lab.ctl(&own, "overrides").await.unwrap_err();
    assert!(error.contains(&format!("its certificate is not for {}", lab.address.ip())), "{error}");
    lab.stop().await;
}

#[tokio::test]
async fn peers_without_tls_or_certificates_are_not_answered() {
    let lab = Lab::new().await;
    let address = lab.address;
    let answer = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        // The end may be a reset.
        let _ = stream.read_to_end(&mut answer);
        answer
    });
    let answer = answer.await.unwrap();
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    lab.logs(&["a connection over TCP was refused"]).await;

    let plain = tokio::net::TcpListener::bind(SocketAddr::new(own_address(), 9444)).await.unwrap();
    let at = plain.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = plain.accept().await {
            let _ = stream.try_write(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    write(lab.dir.path(), "operator", &lab.operator(&["sluice:admins"]));
    let error = lab.ctl_at(at, "overrides").await.unwrap_err();
    assert!(error.contains("speaks no TLS; give the TCP address of `admin.listen`"), "{error}");
    let nobody = SocketAddr::new(own_address(), 9444);
    let error = lab.ctl_at(nobody, "overrides").await.unwrap_err();
    assert!(error.contains("no process listens there"), "{error}");
    lab.stop().await;
}

#[tokio::test]
async fn renewed_certificates_count_from_the_next_connection_on_and_unusable_ones_never() {
    let lab = Lab::new().await;
    let own = lab.operator(&["sluice:viewers"]);
    lab.ctl(&own, "overrides").await.unwrap();
    let next = Authority::new();
    write(lab.dir.path(), "server", &next.issue_server(lab.address.ip()));
    lab.ctl(&own, "overrides").await.unwrap_err();
    let renewed = next.issue_operator("alice", &["sluice:viewers"], 4000);
    lab.ctl(&renewed, "overrides").await.unwrap();
    fs::set_permissions(lab.server_file("key"), Permissions::from_mode(0o644)).unwrap();
    lab.ctl(&renewed, "overrides").await.unwrap();
    lab.logs(&["the certificates are unusable", "the key has mode 0644, so every user of this machine may read it"]).await;
    fs::write(lab.server_file("crt"), "half").unwrap();
    lab.ctl(&renewed, "overrides").await.unwrap();
    lab.stop().await;
}

/// Runs the commands of the page. Skipped if openssl is missing.
#[tokio::test]
async fn the_documented_commands_make_certificates_that_are_accepted() {
    if std::process::Command::new("openssl").arg("version").output().is_err() {
        println!("skipped: there is no openssl");
        return;
    }
    let lab = Lab::new().await;
    let page = include_str!("../../../docs/operate/admin-over-tcp.md");
    let blocks = page.split("```sh\n").skip(1).map(|block| block.split("```").next().unwrap());
    let script: String = blocks.filter(|block| block.contains("openssl")).collect();
    let script = script.replace("192.0.2.2", &lab.address.ip().to_string());
    let output = std::process::Command::new("sh").args(["-ec", &script]).current_dir(lab.dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for (from, to) in [("edge-1", "server"), ("alice", "operator")] {
        for (file, end) in [("admin-ca.crt".to_owned(), "ca"), (format!("{from}.crt"), "crt"), (format!("{from}.key"), "key")] {
            fs::copy(lab.dir.path().join(file), lab.dir.path().join(format!("{to}.{end}"))).unwrap();
        }
    }
    lab.ctl_at(lab.address, "drain 10.0.0.1:8080").await.unwrap();
    lab.logs(&["drained", "caller=alice (certificate)"]).await;
    lab.stop().await;
}
