//! `sluice-controller` and a gateway as two processes. The gateway forwards while the controller is replaced.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::fs;
use std::process::{Child, Command, Stdio};

use edge::{Edge, ServiceManifest, controller_program, node_manifest, until};

const WEB: &str = "http://192.0.2.100/";
/// Keys of a configuration that belong to the controller.
const CONTROLLER_KEYS: [&str; 4] = ["pools:", "manifests:", "statusDir:", "listen:"];

/// A running controller; killed when dropped.
struct Controller(Child);

impl Controller {
    fn start(edge: &Edge) -> Self {
        let log = fs::OpenOptions::new().create(true).append(true).open(edge.path("controller.log")).unwrap();
        let mut command = Command::new(controller_program());
        command.args(["run", "--config"]).arg(edge.path("controller.yaml"));
        Self(command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Moves the controller's keys to `controller.yaml`.
fn split_configuration(edge: &Edge) {
    let text = fs::read_to_string(edge.path("sluice.yaml")).unwrap();
    let is_controllers = |line: &&str| CONTROLLER_KEYS.iter().any(|key| line.starts_with(key));
    let (controllers, gateways): (Vec<_>, Vec<_>) = text.lines().partition(is_controllers);
    let admin = format!("admin: {{listen: \"unix:{}\"}}", edge.path("controller.sock").display());
    fs::write(edge.path("controller.yaml"), [controllers.join("\n"), admin].join("\n")).unwrap();
    let socket = edge.path("config.sock").display().to_string();
    let gateways = format!("{}\ncontroller: {{urls: [\"unix:{socket}\"]}}\n", gateways.join("\n"));
    fs::write(edge.path("sluice.yaml"), gateways).unwrap();
}

/// A Service with one echo server on port 9000, at this address.
fn echo(name: &str, address: &str) -> String {
    ServiceManifest { name, address, servers: &[11], ..ServiceManifest::default() }.yaml()
}

/// A Service on port 90 whose backend is a node with an echo server on its node port 30090.
fn echo_of_node(name: &str, address: &str) -> String {
    let node = node_manifest("worker-1", "10.0.0.11");
    let service = ServiceManifest { name, address, servers: &[11], ..ServiceManifest::default() }.yaml();
    let service = service.replace("targetPort: 9000", "targetPort: 9000, nodePort: 30090");
    service.replace("annotations: {", "annotations: {sluice.dev/target: node, ") + &node
}

fn epoch(edge: &Edge) -> Option<String> {
    Some(edge.status()?.generation?.epoch)
}

#[test]
fn a_gateway_keeps_serving_without_its_controller_and_follows_the_next_one() {
    let Some(mut edge) = Edge::new("a controller in another process", "ctl") else { return };
    edge.echo_server("b11", 9000);
    edge.write_demo_manifests();
    edge.write_manifest("echo.yaml", &echo("echo", "192.0.2.110"));
    edge.configure_af_packet("");
    split_configuration(&edge);

    let first = Controller::start(&edge);
    edge.start();
    until("an answer", || edge.curl(WEB));
    let mut connection = until("a connection", || edge.connect("192.0.2.110:90"));
    connection.assert_alive("with a controller");
    let first_epoch = epoch(&edge).unwrap();

    drop(first);
    until("the gateway notices the missing controller", || edge.status().filter(|status| !status.controller_connected));
    assert!(edge.status().unwrap().ready, "the last known state is in use");
    connection.assert_alive("without a controller");
    for _ in 0..20 {
        edge.curl(WEB).expect("the Service still answers");
    }
    edge.write_manifest("more.yaml", &echo("more", "192.0.2.111"));
    fs::remove_file(edge.path("manifests/web.yaml")).unwrap();

    let _second = Controller::start(&edge);
    until("the new controller's state arrives", || edge.service("more"));
    until("the new Service answers", || edge.connect("192.0.2.111:90"));
    until("the deleted Service is gone", || edge.service("web").is_none().then_some(()));
    assert_ne!(epoch(&edge).unwrap(), first_epoch);
    connection.assert_alive("with the next controller");
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

#[test]
fn a_running_gateway_without_a_controller_stops_using_endpoints_when_its_state_is_too_old() {
    let Some(mut edge) = Edge::new("a state that ages in a running gateway", "age") else { return };
    edge.echo_server("b11", 9000);
    edge.echo_server("b11", 30090);
    edge.write_manifest("endpoint.yaml", &echo("endpoint", "192.0.2.110"));
    edge.write_manifest("node.yaml", &echo_of_node("node", "192.0.2.111"));
    edge.configure_af_packet("maxStateAge: 5s\n");
    split_configuration(&edge);
    let is_expired = |edge: &Edge| edge.status().is_some_and(|status| status.state_expired);

    let first = Controller::start(&edge);
    edge.start();
    let endpoint = || edge.connect("192.0.2.110:90");
    let mut to_endpoint = until("an endpoint answers", endpoint);
    let mut to_node = until("a node answers", || edge.connect("192.0.2.111:90"));
    to_endpoint.assert_alive("with a controller");

    drop(first);
    until("the state has expired", || is_expired(&edge).then_some(()));
    assert!(edge.log().contains("no controller has confirmed the state for longer than"), "{}", edge.log());
    until("endpoints are not used", || endpoint().is_none().then_some(()));
    to_node.assert_alive("nodes are used on");
    until("a new connection to a node", || edge.connect("192.0.2.111:90"));

    let _second = Controller::start(&edge);
    until("an endpoint answers again", endpoint);
    assert!(!is_expired(&edge), "a controller has confirmed the state");
    to_node.assert_alive("with the next controller");
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}
