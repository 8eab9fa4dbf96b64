//! The admin API of a controller with manifests: its lists, and the drains and weights that gateways receive.

#![allow(clippy::unwrap_used, clippy::panic)]

mod fake_gateway;

use std::fs;
use std::path::PathBuf;

use control::admin::{AdminSockets, ControllerAdmin, serve};
use control::config::controller::ControllerFile;
use control::controller::{self, Running};
use fake_gateway::{DEADLINE, FakeGateway, dial};
use proto::v1;
use proto::v1::admin_client::AdminClient;
use proto::v1::answer::Reply;
use proto::v1::fleet_client::FleetClient;
use proto::v1::question::Query;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::Channel;

/// The directory of a controller: a manifest with one Service of two backends on two nodes, status files and sockets.
struct ControllerDir {
    dir: tempfile::TempDir,
}

/// A running controller, and a client of its admin API.
struct Controller {
    running: Running,
    admin: AdminClient<Channel>,
    shutdown: CancellationToken,
}

impl ControllerDir {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("manifests")).unwrap();
        fs::write(dir.path().join("manifests/web.yaml"), MANIFESTS).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    async fn start(&self) -> Controller {
        let [config, admin, manifests, status] =
            ["config.sock", "admin.sock", "manifests", "status"].map(|name| self.path(name).display().to_string());
        let text = format!(
            "listen: \"unix:{config}\"\nadmin: {{listen: \"unix:{admin}\"}}\nmanifests: \"{manifests}\"\nstatusDir: \"{status}\"\n\
             pools: [{{name: default, addresses: [192.0.2.100]}}]\n"
        );
        fs::write(self.path("controller.yaml"), text).unwrap();
        let file = ControllerFile::read(&self.path("controller.yaml")).unwrap();
        let sockets = AdminSockets::listen(&file.admin_listen, None).await.unwrap();
        let shutdown = CancellationToken::new();
        let config = file.effective();
        let running = controller::start(file.settings, shutdown.clone()).await.unwrap();
        let view = running.view.clone();
        tokio::spawn(serve(sockets, ControllerAdmin { view, config }, shutdown.clone().cancelled_owned()));
        let mut states = running.view.states.clone();
        tokio::time::timeout(DEADLINE, states.wait_for(Option::is_some)).await.unwrap().unwrap();
        Controller { running, admin: AdminClient::new(dial(&file.admin_listen.unix).await), shutdown }
    }

    async fn gateway(&self, name: &str) -> FakeGateway {
        FakeGateway::connect(&self.path("config.sock"), name).await
    }
}

impl Controller {
    async fn drain(&mut self, target: &str) -> Result<String, tonic::Status> {
        let request = v1::DrainRequest { target: target.to_owned(), by: "alice@edge".to_owned() };
        Ok(self.admin.drain(request).await?.into_inner().summary)
    }

    async fn undrain(&mut self, target: &str) -> Result<String, tonic::Status> {
        Ok(self.admin.undrain(v1::UndrainRequest { target: target.to_owned() }).await?.into_inner().summary)
    }

    async fn set_weight(&mut self, backend: &str, weight: Option<u32>) -> Result<String, tonic::Status> {
        let request =
            v1::SetWeightRequest { service: "web".to_owned(), backend: backend.to_owned(), weight, by: "bob".to_owned() };
        Ok(self.admin.set_weight(request).await?.into_inner().summary)
    }

    async fn overrides(&mut self) -> Vec<String> {
        let all = self.admin.list_overrides(v1::ListOverridesRequest {}).await.unwrap().into_inner().overrides;
        let text = |one: v1::Override| {
            assert!(one.at.ends_with('Z'), "{one:?}");
            format!("{} {} {:?} by {}", one.kind, one.name, one.weight, one.by)
        };
        all.into_iter().map(text).collect()
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.running.stopped().await.unwrap();
    }
}

const MANIFESTS: &str = "apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  ports: [{port: 80}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- {addresses: [10.0.0.1], nodeName: worker-1}
- {addresses: [10.0.0.2], nodeName: worker-2}
---
apiVersion: v1
kind: Node
metadata: {name: worker-1}
status: {addresses: [{type: InternalIP, address: 10.0.1.1}]}
";

/// Waits for a message in which `what` equals `expected`.
async fn wait_until(gateway: &mut FakeGateway, what: impl Fn(&v1::WatchResponse) -> String, expected: &str) {
    gateway.wait_for(expected, |message| what(message) == expected).await;
}

/// Connects a gateway to the query service of the controller. Without an answer of `respond` it is silent.
async fn offer(dir: &ControllerDir, gateway: &str, respond: impl Fn(Query) -> Option<Reply> + Send + 'static) {
    let (answers, outbound) = mpsc::channel(8);
    let offer = Reply::Offer(v1::Offer { gateway: gateway.to_owned() });
    answers.send(v1::Answer { number: 0, reply: Some(offer) }).await.unwrap();
    let mut queries =
        FleetClient::new(dial(&dir.path("config.sock")).await).serve(ReceiverStream::new(outbound)).await.unwrap().into_inner();
    tokio::spawn(async move {
        while let Ok(Some(question)) = queries.message().await {
            if let Some(reply) = question.query.and_then(&respond) {
                answers.send(v1::Answer { number: question.number, reply: Some(reply) }).await.unwrap();
            }
        }
    });
}

fn drops(_: Query) -> Option<Reply> {
    let count = v1::DropCount { reason: "no_flow".to_owned(), packets: 7, ..v1::DropCount::default() };
    Some(Reply::Drops(v1::ListDropsResponse { drops: vec![count], ..v1::ListDropsResponse::default() }))
}

/// A gateway with a flow on each of two pages, which refuses a state and another port than uplink.
fn flows_and_explanations(query: Query) -> Option<Reply> {
    let wrong = |message: &str| Reply::Failure(v1::Failure { code: 3, message: message.to_owned() });
    Some(match query {
        Query::Flows(request) if !request.state.is_empty() => wrong("state: found \"open\", expected one of established"),
        Query::Flows(request) => {
            let (client, next) = if request.page_token.is_empty() { ("a", "0.4.64") } else { ("b", "") };
            let flow = v1::FlowStatus { client: client.to_owned(), ..v1::FlowStatus::default() };
            Reply::Flows(v1::ListFlowsResponse { flows: vec![flow], next_page_token: next.to_owned(), silent: Vec::new() })
        }
        Query::Explain(request) if request.port == "wan" => wrong("port: found \"wan\", expected one of uplink"),
        Query::Explain(_) => Reply::Explanation(v1::Explanation { verdict: "forward".to_owned(), ..v1::Explanation::default() }),
        other => drops(other)?,
    })
}

/// A gateway of an older version.
fn old(query: Query) -> Option<Reply> {
    match query {
        Query::Flows(_) | Query::Explain(_) => Some(Reply::Refusal("this gateway does not know the question".to_owned())),
        other => drops(other),
    }
}

/// The backends of web: last octet, weight, and `d` if draining.
fn backends(message: &v1::WatchResponse) -> String {
    let all = message.services.iter().flat_map(|service| &service.ports).flat_map(|port| &port.backends);
    let one = |b: &v1::Backend| format!("{}x{}{}", b.address[3], b.weight, if b.draining { "d" } else { "" });
    all.map(one).collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn drains_and_weights_reach_gateways_survive_a_restart_and_can_be_removed() {
    let dir = ControllerDir::new();
    let mut controller = dir.start().await;
    let mut gateway = dir.gateway("edge-1").await;
    wait_until(&mut gateway, backends, "1x1 2x1").await;
    assert_eq!(controller.drain("10.0.0.1:8080").await.unwrap(), "backend/10.0.0.1:8080 is drained");
    wait_until(&mut gateway, backends, "1x1d 2x1").await;
    assert_eq!(controller.set_weight("10.0.0.2:8080", Some(9)).await.unwrap(), "10.0.0.2:8080 of default/web has weight 9");
    wait_until(&mut gateway, backends, "1x1d 2x9").await;
    controller.stop().await;

    let mut restarted = dir.start().await;
    let mut gateway = dir.gateway("edge-1").await;
    wait_until(&mut gateway, backends, "1x1d 2x9").await;
    let listed = ["backend 10.0.0.1:8080 None by alice@edge", "weight 10.0.0.2:8080 Some(9) by bob"];
    assert_eq!(restarted.overrides().await, listed);
    restarted.undrain("10.0.0.1:8080").await.unwrap();
    wait_until(&mut gateway, backends, "1x1 2x9").await;
    restarted.set_weight("10.0.0.2:8080", None).await.unwrap();
    wait_until(&mut gateway, backends, "1x1 2x1").await;
    assert!(restarted.overrides().await.is_empty());
    restarted.stop().await;
}

#[tokio::test]
async fn a_drained_node_drains_its_backends_and_a_drained_gateway_is_notified() {
    let dir = ControllerDir::new();
    let mut controller = dir.start().await;
    let [mut first, mut second] = [dir.gateway("edge-1").await, dir.gateway("edge-2").await];
    controller.drain("worker-1").await.unwrap();
    wait_until(&mut first, backends, "1x1d 2x1").await;
    controller.drain("edge-2").await.unwrap();
    let draining = |message: &v1::WatchResponse| message.draining.to_string();
    wait_until(&mut second, draining, "true").await;
    let gateways = controller.admin.list_gateways(v1::ListGatewaysRequest {}).await.unwrap().into_inner().gateways;
    let rows: Vec<_> = gateways.iter().map(|g| (g.name.as_str(), g.draining, g.version.as_str())).collect();
    assert_eq!(rows, [("edge-1", false, "9"), ("edge-2", true, "9")]);
    drop(second);
    let mut reconnected = dir.gateway("edge-2").await;
    wait_until(&mut reconnected, draining, "true").await;
    controller.undrain("edge-2").await.unwrap();
    wait_until(&mut reconnected, draining, "false").await;
    controller.stop().await;
}

#[tokio::test]
async fn unknown_names_are_answered_with_the_known_ones_and_change_nothing() {
    let dir = ControllerDir::new();
    let mut controller = dir.start().await;
    let _gateway = dir.gateway("edge-1").await;
    let mut gateways = controller.running.view.gateways.clone();
    tokio::time::timeout(DEADLINE, gateways.wait_for(|all| all.iter().count() == 1)).await.unwrap().unwrap();
    let error = controller.drain("edge-9").await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.message().contains("neither a gateway (edge-1) nor a node (worker-1)"), "{error}");
    let error = controller.drain("10.0.0.9:8080").await.unwrap_err();
    assert!(error.message().contains("there are: 10.0.0.1:8080, 10.0.0.2:8080"), "{error}");
    let error = controller.set_weight("10.0.0.9:8080", Some(1)).await.unwrap_err();
    assert!(error.message().contains("default/web has no backend 10.0.0.9:8080"), "{error}");
    let error = controller.set_weight("10.0.0.1:8080", Some(70_000)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert_eq!(controller.set_weight("10.0.0.1:8080", None).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(controller.undrain("worker-1").await.unwrap_err().code(), Code::NotFound);
    assert!(controller.overrides().await.is_empty());
    controller.stop().await;
}

/// A gateway with flows at backends of both nodes, at a node port, and at a backend that has left its Service.
fn flows_at_backends(query: Query) -> Option<Reply> {
    let Query::Backends(request) = query else { return drops(query) };
    let row = |(service, address, flows): (&str, &str, u64)| {
        let (service, address) = (service.to_owned(), address.to_owned());
        v1::BackendStatus { service, address, flows, ..v1::BackendStatus::default() }
    };
    let all = [("a", "10.0.0.1:8080", 1), ("b", "10.0.0.1:8080", 2), ("a", "10.0.0.1:53", 4), ("a", "10.0.0.2:8080", 8)];
    let all = all.into_iter().chain([("a", "10.0.1.1:30080", 16)]).map(row);
    let is_asked_for = |row: &v1::BackendStatus| request.addresses.iter().any(|ip| row.address.starts_with(&format!("{ip}:")));
    Some(Reply::Backends(v1::ListBackendsResponse { backends: all.filter(is_asked_for).collect(), silent: Vec::new() }))
}

#[tokio::test]
async fn what_is_drained_shows_the_flows_that_are_left_and_none_where_a_gateway_does_not_tell() {
    let dir = ControllerDir::new();
    let mut controller = dir.start().await;
    for target in ["worker-1", "10.0.0.1:8080", "10.0.0.2"] {
        controller.drain(target).await.unwrap();
    }
    let flows = async |controller: &mut Controller| {
        let answer = controller.admin.list_overrides(v1::ListOverridesRequest {}).await.unwrap().into_inner();
        let rows: Vec<_> = answer.overrides.into_iter().map(|row| (row.name, row.flows)).collect();
        (rows, answer.silent.into_iter().map(|one| one.gateway).collect::<Vec<_>>())
    };
    let rows = |[backend, address, node]: [Option<u64>; 3]| {
        [("10.0.0.1:8080", backend), ("10.0.0.2", address), ("worker-1", node)].map(|(name, left)| (name.to_owned(), left)).into()
    };
    assert_eq!(flows(&mut controller).await, (rows([None; 3]), vec![]), "no gateway is connected");
    let [mut one, mut two] = [dir.gateway("edge-1").await, dir.gateway("edge-2").await];
    let wait = async |controller: &mut Controller, expected: (Vec<(String, Option<u64>)>, Vec<String>)| {
        let same = async { while flows(controller).await != expected {} };
        tokio::time::timeout(DEADLINE, same).await.unwrap_or_else(|_| panic!("never {expected:?}"));
    };
    offer(&dir, "edge-1", flows_at_backends).await;
    wait(&mut controller, (rows([None; 3]), vec!["edge-2".to_owned()])).await;
    offer(&dir, "edge-2", flows_at_backends).await;
    wait_until(&mut one, backends, "1x1d 2x1d").await;
    wait(&mut controller, (rows([None; 3]), vec![])).await;
    wait_until(&mut two, backends, "1x1d 2x1d").await;
    wait(&mut controller, (rows([Some(6), Some(16), Some(46)]), vec![])).await;
    // Its endpoint leaves; flows to it go on.
    fs::write(dir.path("manifests/web.yaml"), MANIFESTS.replace("- {addresses: [10.0.0.1], nodeName: worker-1}\n", "")).unwrap();
    let one_backend = |state: &Option<std::sync::Arc<_>>| {
        let published: &std::sync::Arc<control::gateways::publish::Published> = state.as_ref().unwrap();
        published.state.services.values().flat_map(|service| &service.ports).all(|port| port.all_backends().count() == 1)
    };
    let mut states = controller.running.view.states.clone();
    tokio::time::timeout(DEADLINE, states.wait_for(one_backend)).await.unwrap().unwrap();
    wait(&mut controller, (rows([Some(6), Some(16), Some(46)]), vec![])).await;
    drop(two);
    wait(&mut controller, (rows([None; 3]), vec!["edge-2".to_owned()])).await;
    controller.stop().await;
}

#[tokio::test]
async fn rows_carry_the_names_of_their_gateways_and_silent_gateways_are_named() {
    let dir = ControllerDir::new();
    let mut controller = dir.start().await;
    let _gateways = [dir.gateway("edge-1").await, dir.gateway("edge-2").await, dir.gateway("edge-3").await];
    let mut connected = controller.running.view.gateways.clone();
    tokio::time::timeout(DEADLINE, connected.wait_for(|all| all.iter().count() == 3)).await.unwrap().unwrap();
    offer(&dir, "edge-1", drops).await;
    offer(&dir, "edge-2", |_| None).await;
    let wait = async {
        loop {
            let answer = controller.admin.list_drops(v1::ListDropsRequest {}).await.unwrap().into_inner();
            let rows: Vec<_> = answer.drops.into_iter().map(|drop| (drop.gateway, drop.packets)).collect();
            let silent: Vec<_> = answer.silent.into_iter().map(|one| (one.gateway, one.reason.contains("no answer"))).collect();
            if rows == [("edge-1".to_owned(), 7)] && silent == [("edge-2".to_owned(), true), ("edge-3".to_owned(), false)] {
                return;
            }
        }
    };
    tokio::time::timeout(DEADLINE, wait).await.unwrap();
    controller.stop().await;
}

/// A gateway with a trouble of its own.
fn without_link(query: Query) -> Option<Reply> {
    let Query::Troubles(_) = query else { return None };
    let (kind, object) = ("port-down".to_owned(), "Port uplink".to_owned());
    let trouble = v1::Trouble { severity: "critical".to_owned(), kind, object, ..v1::Trouble::default() };
    Some(Reply::Troubles(v1::ListTroublesResponse { troubles: vec![trouble], gateways: Vec::new(), services: 1 }))
}

#[tokio::test]
async fn troubles_are_those_of_the_group_and_of_every_gateway_and_a_silent_gateway_is_one() {
    let dir = ControllerDir::new();
    let mut controller = dir.start().await;
    let [_one, two] = [dir.gateway("edge-1").await, dir.gateway("edge-2").await];
    offer(&dir, "edge-1", without_link).await;
    let wait = async |controller: &mut Controller, expected: &[&str]| {
        let mut shown = Vec::new();
        let same = async {
            while shown != expected {
                let answer = controller.admin.list_troubles(v1::ListTroublesRequest {}).await.unwrap().into_inner();
                assert_eq!((answer.gateways, answer.services), (vec!["edge-1".to_owned()], 1));
                let text = |trouble: v1::Trouble| format!("{} {} {}", trouble.kind, trouble.object, trouble.gateways.join(","));
                shown = answer.troubles.into_iter().map(text).collect();
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        let result = tokio::time::timeout(DEADLINE, same).await;
        assert!(result.is_ok(), "{shown:?} is never {expected:?}");
    };
    // The gateways have no state yet. The first tells that by itself, if it is so.
    let of_group = ["vip-unowned VIP 192.0.2.100 ", "pool-exhausted AddressPool default "];
    let silent = ["port-down Port uplink edge-1", "gateway-silent Gateway edge-2 ", "gateway-not-ready Gateway edge-2 "];
    wait(&mut controller, &[&silent[..], &of_group].concat()).await;
    drop(two);
    let away = ["port-down Port uplink edge-1", "gateway-away Gateway edge-2 "];
    wait(&mut controller, &[&away[..], &of_group].concat()).await;
    controller.drain("gateway/edge-2").await.unwrap();
    let drained = [&away[..1], &of_group, &["drained Gateway edge-2 "]].concat();
    wait(&mut controller, &drained).await;
    controller.stop().await;
}

/// All pages of flows: gateway and client of each, and the silent gateways.
async fn all_flows(controller: &mut Controller, gateway: &str) -> (Vec<String>, Vec<v1::Silent>) {
    let (mut flows, mut silent) = (Vec::new(), Vec::new());
    let mut request = v1::ListFlowsRequest { gateway: gateway.to_owned(), ..v1::ListFlowsRequest::default() };
    loop {
        let page = controller.admin.list_flows(request.clone()).await.unwrap().into_inner();
        flows.extend(page.flows.iter().map(|flow| format!("{} {}", flow.gateway, flow.client)));
        silent.extend(page.silent);
        request.page_token = page.next_page_token;
        if request.page_token.is_empty() {
            return (flows, silent);
        }
    }
}

#[tokio::test]
async fn flows_and_explanations_come_from_all_gateways_and_an_old_one_is_named() {
    let dir = ControllerDir::new();
    let mut controller = dir.start().await;
    let nothing = all_flows(&mut controller, "").await;
    assert_eq!(nothing, (Vec::new(), Vec::new()));
    let _gateways = [dir.gateway("edge-1").await, dir.gateway("edge-2").await, dir.gateway("edge-3").await];
    offer(&dir, "edge-1", flows_and_explanations).await;
    offer(&dir, "edge-2", old).await;
    offer(&dir, "edge-3", flows_and_explanations).await;
    let registered = async {
        while {
            let answer = controller.admin.list_drops(v1::ListDropsRequest {}).await.unwrap().into_inner();
            answer.drops.len() < 3
        } {}
    };
    tokio::time::timeout(DEADLINE, registered).await.unwrap();

    let (flows, silent) = all_flows(&mut controller, "").await;
    assert_eq!(flows, ["edge-1 a", "edge-1 b", "edge-3 a", "edge-3 b"]);
    assert_eq!(silent.len(), 1);
    assert!(silent[0].gateway == "edge-2" && silent[0].reason.contains("does not know the question"), "{silent:?}");
    assert_eq!(all_flows(&mut controller, "edge-3").await.0, ["edge-3 a", "edge-3 b"]);
    let wrong = v1::ListFlowsRequest { state: "open".to_owned(), ..v1::ListFlowsRequest::default() };
    let error = controller.admin.list_flows(wrong).await.unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().starts_with("state:"), "{error}");
    let wrong = v1::ListFlowsRequest { page_token: "x".to_owned(), ..v1::ListFlowsRequest::default() };
    assert_eq!(controller.admin.list_flows(wrong).await.unwrap_err().code(), Code::InvalidArgument);

    let packet = |gateway: &str| v1::ExplainRequest { gateway: gateway.to_owned(), ..v1::ExplainRequest::default() };
    let all = controller.admin.list_explanations(packet("")).await.unwrap().into_inner();
    let names: Vec<_> = all.explanations.iter().map(|one| (one.gateway.as_str(), one.verdict.as_str())).collect();
    assert_eq!(names, [("edge-1", "forward"), ("edge-3", "forward")]);
    assert_eq!(all.silent, silent);
    assert_eq!(controller.admin.explain(packet("edge-3")).await.unwrap().into_inner().gateway, "edge-3");
    let error = controller.admin.explain(packet("")).await.unwrap_err();
    assert!(error.code() == Code::FailedPrecondition && error.message().contains("edge-1, edge-2, edge-3"), "{error}");
    let error = controller.admin.explain(packet("edge-9")).await.unwrap_err();
    assert!(error.code() == Code::NotFound && error.message().contains("there are: edge-1, edge-2, edge-3"), "{error}");
    let wrong = v1::ExplainRequest { port: "wan".to_owned(), ..packet("") };
    let error = controller.admin.list_explanations(wrong).await.unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().starts_with("port:"), "{error}");
    controller.stop().await;
}

#[tokio::test]
async fn the_controller_shows_its_configuration_status_pools_and_events() {
    let dir = ControllerDir::new();
    let mut controller = dir.start().await;
    let config = controller.admin.get_config(v1::GetConfigRequest {}).await.unwrap().into_inner().yaml;
    assert!(config.contains("admin: {listen:") && config.contains("192.0.2.100"), "{config}");
    let status = controller.admin.get_status(v1::GetStatusRequest {}).await.unwrap().into_inner();
    assert!(status.ready && status.gateway.is_empty() && status.generation.is_some());
    let pools = controller.admin.list_pools(v1::ListPoolsRequest {}).await.unwrap().into_inner().pools;
    let figures: Vec<_> = pools.iter().map(|pool| (pool.name.as_str(), pool.total.as_str(), pool.used.as_str())).collect();
    assert_eq!(figures, [("default", "1", "1")]);
    fs::write(dir.path("manifests/more.yaml"), MANIFESTS.replace("name: web", "name: more")).unwrap();
    let wait = async {
        loop {
            let events = controller.admin.list_events(v1::ListEventsRequest {}).await.unwrap().into_inner().events;
            if let Some(event) = events.iter().find(|event| event.reason == "Exhausted") {
                return (event.r#type.clone(), event.object.clone());
            }
        }
    };
    let event = tokio::time::timeout(DEADLINE, wait).await.unwrap();
    assert_eq!(event, ("Warning".to_owned(), "Service default/more".to_owned()));
    assert_eq!(controller.admin.reload(v1::ReloadRequest {}).await.unwrap_err().code(), Code::FailedPrecondition);
    controller.stop().await;
}
