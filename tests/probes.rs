//! Probes of every protocol with real backends: nginx, a gRPC health server, one that accepts and never answers, one
//! that answers 500, one with an expired certificate, one that drops packets. Each goes out and in again as configured,
//! and the gateway says why.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;

use edge::{Edge, until};
use proto::v1::ListBackendsRequest;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use tokio_stream::wrappers::TcpListenerStream;
use tonic_health::server::HealthReporter;

const SERVERS: [u8; 3] = [11, 12, 13];
const HTTP: &str = "sluice.dev/health-check: http, sluice.dev/health-check-path: /healthz, \
                    sluice.dev/health-check-host: shop.example, sluice.dev/health-check-status: 200-299";
const DSR_VIP: &str = "192.0.2.116";

/// A Service over all servers. A backend is out after two failed probes; a busy machine has 2 s for each.
fn service(name: &str, address: &str, protocol: &str, port: u16, annotations: &str) -> String {
    let endpoints: Vec<_> = SERVERS.iter().map(|n| format!("{{addresses: [10.0.0.{n}]}}")).collect();
    format!(
        "---
apiVersion: v1
kind: Service
metadata:
  namespace: demo
  name: {name}
  annotations: {{sluice.dev/addresses: {address}, sluice.dev/health-check-interval: 200ms,
    sluice.dev/health-check-timeout: 2s, sluice.dev/health-check-fall: '2', {annotations}}}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  ports: [{{port: {port}, protocol: {protocol}}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: demo, name: {name}-1, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv4
ports: [{{port: {port}, protocol: {protocol}}}]
endpoints: [{}]
",
        endpoints.join(", ")
    )
}

/// Writes an authority, and a certificate of it for each server, of which that of the last one has expired.
fn write_certificates(edge: &Edge) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    fs::write(edge.path("ca.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(params, key);
    for n in SERVERS {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["shop.example".to_owned()]).unwrap();
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(if n == 13 { 2001 } else { 2900 }, 1, 1);
        fs::write(edge.path(&format!("b{n}/cert.pem")), params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
        fs::write(edge.path(&format!("b{n}/key.pem")), key.serialize_pem()).unwrap();
    }
}

/// Replaces the demo's servers by such that answer `/healthz` by 500 while a file `failing` is there, also over TLS.
/// On b11 nothing of nginx listens on port 9200.
fn start_servers(edge: &Edge) {
    edge.script(
        r#"for n in 11 12 13; do
  dir=$work/b$n; stop_server $n
  mute=; [ $n = 11 ] || mute="listen 9200;"
  cat >"$dir/nginx.conf" <<CONF
pid $dir/pid;
error_log $dir/error.log;
master_process off;
events { worker_connections 512; }
http {
  access_log off;
  default_type text/plain;
  server {
    listen 8081; $mute
    location = / { return 200 "b$n\n"; }
    location = /healthz {
      if (\$host != shop.example) { return 421; }
      if (-f $dir/failing) { return 500; }
      return 204;
    }
  }
  server {
    listen 8443 ssl;
    ssl_certificate $dir/cert.pem;
    ssl_certificate_key $dir/key.pem;
    location / { return 200 "b$n\n"; }
  }
  server {
    listen 8444 ssl;
    ssl_certificate $PWD/tests/edge/p521.pem;
    ssl_certificate_key $PWD/tests/edge/p521.key;
    location / { return 200 "b$n\n"; }
  }
}
CONF
  in_ns b$n nginx -c "$dir/nginx.conf" -p "$dir"
done"#,
    );
}

/// Starts a gRPC health server on port 9100 of each server.
fn start_grpc_servers(edge: &Edge, runtime: &tokio::runtime::Runtime) -> Vec<HealthReporter> {
    let start = |n: u8| {
        let listener = edge.in_namespace(&format!("b{n}"), || TcpListener::bind(("0.0.0.0", 9100)).unwrap());
        listener.set_nonblocking(true).unwrap();
        let (reporter, service) = tonic_health::server::health_reporter();
        runtime.spawn(async move {
            let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener).unwrap());
            tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await
        });
        reporter
    };
    SERVERS.map(start).into()
}

/// The unhealthy backends of a Service with their reasons.
fn unhealthy(edge: &Edge, service: &str) -> Option<Vec<(String, String)>> {
    let call = async |mut client: proto::v1::admin_client::AdminClient<_>| {
        Some(client.list_backends(ListBackendsRequest::default()).await.ok()?.into_inner().backends)
    };
    let backends = edge.admin(call)?.into_iter().filter(|b| b.service == format!("demo/{service}"));
    let backends: Vec<_> = backends.collect();
    assert!(backends.iter().all(|backend| !backend.healthy || backend.reason.is_empty()), "{backends:?}");
    (backends.len() == 3).then(|| backends.into_iter().filter(|b| !b.healthy).map(|b| (b.address, b.reason)).collect())
}

/// Waits until exactly this backend of a Service is unhealthy for this reason; `None`: until none is.
fn wait_for(edge: &Edge, service: &str, expected: Option<(&str, &str)>) {
    let is_expected = |found: &Vec<(String, String)>| match (expected, found.as_slice()) {
        (None, []) => true,
        (Some((address, why)), [(found, reason)]) => address == found && reason.contains(why),
        _ => false,
    };
    let mut last = None;
    until(&format!("{service}: {expected:?}"), || {
        let found = unhealthy(edge, service)?;
        if last.as_ref() != Some(&found) {
            println!("{service}: {found:?}");
        }
        let is_there = is_expected(&found);
        last = Some(found);
        is_there.then_some(())
    });
}

#[test]
fn backends_go_out_and_in_by_probes_of_every_protocol_and_say_why() {
    let Some(mut edge) = Edge::with_af_packet("probes of every protocol", "prb") else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    write_certificates(&edge);
    start_servers(&edge);
    let grpc = start_grpc_servers(&edge, &runtime);
    let _mute = edge.in_namespace("b11", || TcpListener::bind(("0.0.0.0", 9200)).unwrap());
    edge.script(&format!(". tests/edge/direct.sh; make_direct {DSR_VIP}"));
    edge.script("in_ns gw sysctl -qw net.ipv4.ping_group_range='0 0'");
    edge.environment.push(("SSL_CERT_FILE", edge.path("ca.pem")));
    let tls = "sluice.dev/health-check: https, sluice.dev/health-check-host: shop.example";
    let manifests = [
        service("http", "192.0.2.110", "TCP", 8081, HTTP),
        service("dsr", DSR_VIP, "TCP", 8081, &format!("{HTTP}, sluice.dev/mode: dsr, sluice.dev/target: endpoint")),
        service("tls", "192.0.2.111", "TCP", 8443, &format!("{tls}, sluice.dev/health-check-tls-verify: 'true'")),
        service("unverified", "192.0.2.112", "TCP", 8443, tls),
        // A key of a kind that is not verified, and a store in which its certificate is not.
        service("p521", "192.0.2.119", "TCP", 8444, tls),
        service("grpc", "192.0.2.113", "TCP", 9100, "sluice.dev/health-check: grpc"),
        service("mute", "192.0.2.114", "TCP", 9200, HTTP),
        service("ping", "192.0.2.115", "UDP", 9300, "sluice.dev/health-check: icmp"),
        // UDP by a request to a TCP port.
        service("udp", "192.0.2.117", "UDP", 9300, &format!("{HTTP}, sluice.dev/health-check-port: '8081'")),
    ];
    edge.write_manifest("all.yaml", &manifests.concat());
    edge.start();

    wait_for(&edge, "tls", Some(("10.0.0.13:8443", "failed the TLS handshake: invalid peer certificate: certificate expired")));
    wait_for(&edge, "mute", Some(("10.0.0.11:9200", "accepted the connection and gave no answer within 2s")));
    for service in ["http", "dsr", "unverified", "p521", "grpc", "ping", "udp"] {
        wait_for(&edge, service, None);
    }

    // One answers 500.
    fs::write(edge.path("b12/failing"), "").unwrap();
    let why = "GET http://10.0.0.12:8081/healthz answered 500, expected 200-299";
    wait_for(&edge, "http", Some(("10.0.0.12:8081", why)));
    wait_for(&edge, "udp", Some(("10.0.0.12:9300", why)));
    let through_vip = format!("GET http://{DSR_VIP}:8081/healthz at 10.0.0.12 answered 500, expected 200-299");
    wait_for(&edge, "dsr", Some(("10.0.0.12:8081", &through_vip)));
    assert!(edge.log().contains(why), "the log says why");
    for vip in ["192.0.2.110", DSR_VIP] {
        for n in 0..12 {
            let server = edge.curl(&format!("http://{vip}:8081/")).unwrap_or_else(|| panic!("{vip}: request {n} failed"));
            assert_ne!(server, "b12", "{vip}");
        }
    }
    fs::remove_file(edge.path("b12/failing")).unwrap();
    for service in ["http", "udp", "dsr"] {
        wait_for(&edge, service, None);
    }

    // A gRPC server says that it does not serve.
    runtime.block_on(grpc[1].set_service_status("", tonic_health::ServingStatus::NotServing));
    wait_for(&edge, "grpc", Some(("10.0.0.12:9100", "grpc.health.v1 10.0.0.12:9100 answered NOT_SERVING, expected SERVING")));
    runtime.block_on(grpc[1].set_service_status("", tonic_health::ServingStatus::Serving));
    wait_for(&edge, "grpc", None);

    // One drops packets; the VIP of the other way stays reachable.
    edge.script("in_ns b13 ip route add blackhole 10.0.0.2/32; in_ns b13 ip route add blackhole 10.0.0.3/32");
    wait_for(&edge, "ping", Some(("10.0.0.13:9300", "ping 10.0.0.13 gave no answer within 2s")));
    wait_for(&edge, "http", Some(("10.0.0.13:8081", "accepted no connection within 2s")));
    edge.script("in_ns b13 ip route del blackhole 10.0.0.2/32; in_ns b13 ip route del blackhole 10.0.0.3/32");
    for service in ["ping", "http"] {
        wait_for(&edge, service, None);
    }
    edge.assert_account();
}

#[test]
fn flows_of_a_backend_that_fails_its_probes_go_on_until_its_drain_is_over() {
    const BACKEND: &str = "10.0.0.12:9000";
    let Some(mut edge) = Edge::with_echo_servers("drain of an unhealthy backend", "prbdrain", 9000) else { return };
    let answers = |n: u8| edge.in_namespace(&format!("b{n}"), || TcpListener::bind(("0.0.0.0", 9001)).unwrap());
    let (_others, answering) = ([answers(11), answers(13)], answers(12));
    let echo = |drain_timeout: &str| {
        let annotations = format!("sluice.dev/health-check-port: '9001', sluice.dev/drain-timeout: {drain_timeout}");
        service("echo", "192.0.2.118", "TCP", 9000, &annotations)
    };
    edge.write_manifest("all.yaml", &echo("1h"));
    edge.start();
    until("the first connection", || edge.connect("192.0.2.118:9000"));
    let all: Vec<_> = (0..40).filter_map(|_| edge.connect("192.0.2.118:9000")).collect();
    let (mut there, mut elsewhere): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| one.server == "b12");
    assert!(!there.is_empty() && !elsewhere.is_empty());

    drop(answering);
    wait_for(&edge, "echo", Some((BACKEND, "9001")));
    there.iter_mut().for_each(|connection| connection.assert_alive("while its backend fails"));
    let answering = edge.in_namespace("b12", || TcpListener::bind(("0.0.0.0", 9001)).unwrap());
    wait_for(&edge, "echo", None);
    there.iter_mut().for_each(|connection| connection.assert_alive("after its return"));
    drop(answering);
    wait_for(&edge, "echo", Some((BACKEND, "9001")));

    edge.write_manifest("all.yaml", &echo("0s"));
    let flows = || {
        let rows = edge.admin(async |mut client| client.list_backends(ListBackendsRequest::default()).await.ok())?;
        rows.into_inner().backends.into_iter().find(|row| row.address == BACKEND).map(|row| (row.state, row.flows))
    };
    // A RST to both sides answers the next packet.
    let mut sockets: Vec<_> = there.into_iter().map(edge::peers::Connection::into_socket).collect();
    until("its connections are reset", || {
        sockets.retain_mut(|socket| writeln!(socket, "still there?").is_ok());
        sockets.is_empty().then_some(())
    });
    until("it is still listed, without flows", || flows().filter(|now| *now == ("active".to_owned(), 0)));
    elsewhere.iter_mut().for_each(|connection| connection.assert_alive("all the time"));
    let _answering = edge.in_namespace("b12", || TcpListener::bind(("0.0.0.0", 9001)).unwrap());
    wait_for(&edge, "echo", None);
    until("it takes flows again", || edge.connect("192.0.2.118:9000").filter(|one| one.server == "b12"));
    edge.assert_account();
}

/// A tenant's address in a network that no port leads to, and one that a rule of Linux leads there.
#[test]
fn a_probe_goes_by_a_port_or_not_at_all() {
    let Some(mut edge) = Edge::with_af_packet("no probe beside the ports", "prbway") else { return };
    edge.script(
        r#"in_ns gw ip link add mgmt0 type veth peer name mgmt1 netns "$id-b13"
in_ns gw ip addr add 10.99.0.1/24 dev mgmt0; in_ns gw ip addr add fd99::1/64 dev mgmt0 nodad; in_ns gw ip link set mgmt0 up
in_ns b13 ip addr add 10.99.0.13/24 dev mgmt1; in_ns b13 ip addr add fd99::13/64 dev mgmt1 nodad; in_ns b13 ip link set mgmt1 up
in_ns b13 sysctl -qw net.ipv4.conf.all.arp_ignore=1; in_ns b13 ip addr add 10.0.0.12/32 dev lo
in_ns gw ip route add 10.0.0.12/32 via 10.99.0.13 dev mgmt0 table 77
in_ns gw ip rule add to 10.0.0.12 lookup 77"#,
    );
    let listen = |n: u8, address: &str| edge.in_namespace(&format!("b{n}"), || TcpListener::bind((address, 9400)).unwrap());
    let (_one, management) =
        (listen(11, "10.0.0.11"), [listen(13, "10.99.0.13"), listen(13, "fd99::13"), listen(13, "10.0.0.12")]);
    let admin = "sluice.dev/health-check: http, sluice.dev/health-check-path: '/admin/reboot?now=1'";
    let in_management = service("evil", "192.0.2.117", "TCP", 9400, admin).replace("10.0.0.13", "10.99.0.13");
    let six = service("six", "'2001:db8::1:17'", "TCP", 9400, admin)
        .replace("addressType: IPv4", "addressType: IPv6")
        .replace("spec:\n", "spec:\n  ipFamilies: [IPv6]\n")
        .replace("10.0.0.11", "'fd00::11'")
        .replace("10.0.0.12", "'fd00::12'")
        .replace("10.0.0.13", "'fd99::13'");
    // No probe at all, and a route all the same.
    let udp = service("udp", "192.0.2.118", "UDP", 9401, "").replace("10.0.0.13", "10.99.0.13");
    edge.write_manifest("all.yaml", &[in_management, six, udp].concat());
    edge.start();
    let reason = |service: &str, address: &str| {
        unhealthy(&edge, service)?.into_iter().find(|(found, why)| found == address && why == "no route by a port")
    };
    for (service, address) in [("evil", "10.99.0.13:9400"), ("six", "[fd99::13]:9400"), ("udp", "10.99.0.13:9401")] {
        until(&format!("{service} has no route to {address}"), || reason(service, address));
    }
    until("the rule is noticed", || edge.log().contains("Linux sends to it by an interface that is no port").then_some(()));
    for listener in management {
        listener.set_nonblocking(true).unwrap();
        let nobody = listener.accept().map(|(_, from)| from).map_err(|error| error.kind());
        assert_eq!(nobody, Err(std::io::ErrorKind::WouldBlock));
    }
    edge.assert_account();
}

#[test]
fn one_service_takes_no_backend_from_another_by_its_health_check() {
    let Some(mut edge) = Edge::with_af_packet("health checks of one service", "prbown") else { return };
    let _open = SERVERS.map(|n| edge.in_namespace(&format!("b{n}"), || TcpListener::bind(("0.0.0.0", 9500)).unwrap()));
    let evil =
        service("evil", "192.0.2.117", "TCP", 9500, "sluice.dev/health-check-port: '9', sluice.dev/health-check-rise: '3600'");
    edge.write_manifest("all.yaml", &[evil, service("web", "192.0.2.118", "TCP", 9500, "")].concat());
    edge.start();
    until("every probe of evil fails", || unhealthy(&edge, "evil").filter(|found| found.len() == 3));
    wait_for(&edge, "web", None);
    edge.assert_account();
}

#[test]
fn a_backend_that_failed_before_a_restart_gets_no_request_after_it() {
    const DEAD: &str = "10.0.0.12:8081";
    let Some(mut edge) = Edge::with_af_packet("health over a restart", "prbkept") else { return };
    write_certificates(&edge);
    start_servers(&edge);
    // A new process would need 50 s to find out.
    let slow = service("web", "192.0.2.118", "TCP", 8081, HTTP);
    edge.write_manifest(
        "all.yaml",
        &slow.replace("health-check-fall: '2'", "health-check-fall: '50', sluice.dev/health-check-rise: '3'"),
    );
    edge.start();
    wait_for(&edge, "web", None);
    fs::write(edge.path("b12/failing"), "").unwrap();
    let why = "answered 500, expected 200-299";
    wait_for(&edge, "web", Some((DEAD, why)));
    let times_it_turned = |edge: &Edge| edge.log().matches("target fails its probes").count();
    let turned = times_it_turned(&edge);
    for _ in 0..2 {
        edge.stop(false);
        edge.start();
        wait_for(&edge, "web", Some((DEAD, why)));
        assert_eq!(times_it_turned(&edge), turned, "it is known, not found out again");
        for n in 0..30 {
            let server = edge.curl("http://192.0.2.118:8081/").unwrap_or_else(|| panic!("request {n} failed"));
            assert_ne!(server, "b12", "request {n}");
        }
    }
    assert!(edge.log().contains("the health of backends goes on from the last process"));
    fs::remove_file(edge.path("b12/failing")).unwrap();
    wait_for(&edge, "web", None);
    edge.assert_account();
}

#[test]
fn a_backend_that_is_unhealthy_at_first_gets_no_request_before_it_has_passed_a_probe() {
    let Some(mut edge) = Edge::with_af_packet("unhealthy at first", "prbfirst") else { return };
    edge.configure_af_packet("health: {initial: unhealthy}");
    write_certificates(&edge);
    start_servers(&edge);
    fs::write(edge.path("b12/failing"), "").unwrap();
    let web = service("web", "192.0.2.118", "TCP", 8081, HTTP);
    // It never fails: that takes 3,600 probes.
    edge.write_manifest("all.yaml", &web.replace("health-check-fall: '2'", "health-check-fall: '3600'"));
    edge.start();
    wait_for(&edge, "web", Some(("10.0.0.12:8081", "no probe has passed yet")));
    for n in 0..30 {
        let server = edge.curl("http://192.0.2.118:8081/").unwrap_or_else(|| panic!("request {n} failed"));
        assert_ne!(server, "b12", "request {n}");
    }
    fs::remove_file(edge.path("b12/failing")).unwrap();
    wait_for(&edge, "web", None);
    until("it is used", || edge.curl("http://192.0.2.118:8081/").filter(|server| server == "b12"));
    edge.assert_account();
}
