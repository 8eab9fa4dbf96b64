//! Leader election among several controllers: take-over after a kill, hand-over on a stop, and the requests that reach
//! a controller that does not lead.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Parser as _;
use control::config::settings::Listen;
use control::healthz::{Pages as _, Probes};
use control::kubernetes::lease::{LEASE, Leadership, RENEW_DEADLINE, RETRY_PERIOD};
use proto::v1::config_client::ConfigClient;
use proto::v1::watch_request::Message;
use proto::v1::{Generation, Hello, WatchRequest, WatchResponse};
use tokio::process::{Child, Command};
use tokio_stream::StreamExt;
use tonic::{Code, Status, Streaming};

use crate::api_server::{ApiServer, Availability, Fault, FaultRule, Kind, LoggedRequest};
use crate::gateway::{Gateway, dial};
use crate::installation::Installation;
use crate::user::{User, wait_for};

/// Extra time for every wait on a busy machine.
const SLACK: Duration = Duration::from_secs(60);

/// A `sluice-controller` process.
struct Replica {
    socket: PathBuf,
    log: PathBuf,
    child: Child,
}

impl Replica {
    /// Simulates a separate machine: no other replica sees its directory.
    fn start(user: &User, name: &str) -> Self {
        let dir = user.directory().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        let file = |end: &str| dir.join(format!("controller.{end}"));
        let (config, socket, log) = (file("yaml"), file("sock"), file("log"));
        let text = format!(
            "listen: \"unix:{0}\"\nadmin: {{listen: \"unix:{0}.admin\"}}\nkubernetes: {{kubeconfig: {1}, namespace: {2}, loadBalancerClass: {3}}}\n\
             pools: [{{name: default, addresses: [192.0.2.100-192.0.2.199]}}]\n",
            socket.display(),
            user.kubeconfig.display(),
            user.namespace,
            user.class(),
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice-controller"));
        command.args(["run", "--config", config.to_str().unwrap()]).stderr(std::fs::File::create(&log).unwrap());
        let child = command.kill_on_drop(true).spawn().unwrap();
        Self { socket, log, child }
    }

    /// The first response to a gateway that already has the state in `have`. The gateway dials until the controller
    /// listens.
    async fn first_response(&self, have: Hello) -> Result<WatchResponse, Status> {
        let end = Instant::now() + SLACK;
        let channel = loop {
            match dial(self.socket.clone()).await {
                Ok(channel) => break channel,
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        first_message(watch(channel, have).await?).await
    }

    async fn leads(&self) -> bool {
        self.first_response(hello()).await.is_ok()
    }

    async fn stop(&mut self, signal: &str) {
        let id = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().await.unwrap().success());
        tokio::time::timeout(SLACK, self.child.wait()).await.unwrap().unwrap();
    }
}

fn hello() -> Hello {
    Hello { gateway: "edge-2".to_owned(), version: "test".to_owned(), ..Hello::default() }
}

async fn watch(channel: tonic::transport::Channel, hello: Hello) -> Result<Streaming<WatchResponse>, Status> {
    let requests = tokio_stream::once(WatchRequest { message: Some(Message::Hello(hello)) }).chain(tokio_stream::pending());
    Ok(ConfigClient::new(channel).watch(requests).await?.into_inner())
}

async fn first_message(mut stream: Streaming<WatchResponse>) -> Result<WatchResponse, Status> {
    let message = tokio::time::timeout(SLACK, stream.message()).await.unwrap()?;
    message.ok_or_else(|| Status::aborted("the stream ended"))
}

/// The hello of a gateway after `response`.
fn hello_after(response: &WatchResponse) -> Hello {
    let hashes: HashMap<_, _> =
        response.services.iter().map(|s| (format!("{}/{}", s.namespace, s.name), s.hash.clone())).collect();
    Hello { have: response.generation.clone(), hashes: hashes.into_iter().collect(), ..hello() }
}

fn status_writes(server: &ApiServer) -> usize {
    server.log().iter().filter(|logged| logged.method == "PATCH" && logged.path.contains("/services/")).count()
}

fn lease_holder(server: &ApiServer, user: &User) -> Option<String> {
    let lease = server.get(Kind::Lease, &user.namespace, "sluice-controller-default")?;
    lease["spec"]["holderIdentity"].as_str().map(str::to_owned)
}

/// Two replicas, of which the first leads, and Services with addresses.
async fn two_replicas(server: &ApiServer, user: &User) -> (Replica, Replica) {
    let leader = Replica::start(user, "one");
    let _gateway = Gateway::start(&leader.socket);
    for name in ["web", "mail"] {
        user.add_service(name, &user.class()).await;
        user.wait_for_ingress(name).await;
    }
    let standby = Replica::start(user, "two");
    let refused = standby.first_response(hello()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let holder = lease_holder(server, user).unwrap();
    wait_for(
        "the leader's name",
        async || standby.first_response(hello()).await.unwrap_err().message().to_owned(),
        |message| message.contains(&holder),
    )
    .await;
    (leader, standby)
}

#[tokio::test]
async fn a_killed_leader_is_replaced_when_its_lease_expires_and_no_address_changes() {
    let (server, user) = User::with_test_server().await;
    let (mut leader, standby) = two_replicas(&server, &user).await;
    let before = (user.ingress("web").await, user.ingress("mail").await);
    let first_state = leader.first_response(hello()).await.unwrap();
    let written = status_writes(&server);
    let killed_at = Instant::now();
    leader.stop("-KILL").await;
    let wait = async {
        while !standby.leads().await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LEASE + RETRY_PERIOD + SLACK, wait).await.unwrap();
    println!("another controller leads {:?} after the kill", killed_at.elapsed());
    assert!(killed_at.elapsed() > RENEW_DEADLINE - RETRY_PERIOD, "it led before the Lease of the other had expired");
    // A gateway that moves to the new leader does not receive its state a second time.
    let resumed = standby.first_response(hello_after(&first_state)).await.unwrap();
    let epoch = |generation: &Option<Generation>| generation.as_ref().unwrap().epoch.clone();
    assert!(epoch(&first_state.generation).ends_with("-0") && epoch(&resumed.generation).ends_with("-1"), "{resumed:?}");
    assert!(!resumed.full && resumed.services.is_empty() && resumed.removed.is_empty(), "{resumed:?}");
    let _gateway = Gateway::start(&standby.socket);
    user.add_service("late", &user.class()).await;
    user.wait_for_ingress("late").await;
    assert_eq!((user.ingress("web").await, user.ingress("mail").await), before);
    assert_eq!(status_writes(&server), written + 2, "only the new Service was written: its finalizer, then its address");
}

#[tokio::test]
async fn a_leader_that_is_stopped_hands_over_immediately() {
    let (server, user) = User::with_test_server().await;
    let (mut leader, standby) = two_replicas(&server, &user).await;
    let before = lease_holder(&server, &user);
    assert!(before.is_some());
    leader.stop("-TERM").await;
    assert_ne!(lease_holder(&server, &user), before, "only a killed controller keeps the Lease until it expires");
    wait_for("the other leads", async || standby.leads().await, |leads| *leads).await;
}

#[tokio::test]
async fn a_leader_that_cannot_renew_stops_before_its_lease_expires_and_leads_again_after_the_outage() {
    let (server, user) = User::with_test_server().await;
    let leader = Replica::start(&user, "one");
    wait_for("a leader", async || leader.leads().await, |leads| *leads).await;
    let mut stream = watch(dial(leader.socket.clone()).await.unwrap(), hello()).await.unwrap();
    let first = stream.message().await.unwrap().unwrap();
    let silent_since = Instant::now();
    server.set_availability(Availability::Silent).await;
    let end = loop {
        match tokio::time::timeout(LEASE, stream.message()).await.expect("the stream stayed open for longer than the Lease") {
            Ok(message) => assert!(
                message.is_some_and(|message| message.removed.is_empty()),
                "a Service was withdrawn, or the stream ended without an error"
            ),
            Err(status) => break status,
        }
    };
    assert_eq!(end.code(), Code::FailedPrecondition, "{end}");
    assert!(silent_since.elapsed() < LEASE, "another controller may already lead, after {:?}", silent_since.elapsed());
    server.set_availability(Availability::Up).await;
    let again = wait_for("a leader again", async || leader.first_response(hello()).await, Result::is_ok).await.unwrap();
    assert_ne!(first.generation.unwrap().epoch, again.generation.unwrap().epoch);
}

#[tokio::test]
async fn a_killed_leader_that_restarts_on_its_machine_leads_immediately() {
    let (server, user) = User::with_test_server().await;
    let mut leader = Replica::start(&user, "one");
    wait_for("a leader", async || leader.leads().await, |leads| *leads).await;
    let before = lease_holder(&server, &user).unwrap();
    let killed_at = Instant::now();
    leader.stop("-KILL").await;
    assert_eq!(lease_holder(&server, &user), Some(before.clone()), "a killed controller does not release its Lease");
    let restarted = Replica::start(&user, "one");
    wait_for("a leader again", async || restarted.leads().await, |leads| *leads).await;
    assert!(killed_at.elapsed() < RENEW_DEADLINE, "as slow as a take-over by another machine: {:?}", killed_at.elapsed());
    assert_ne!(lease_holder(&server, &user), Some(before));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_that_does_not_lead_names_the_leader_and_fails_all_requests() {
    let (server, user) = User::with_test_server().await;
    let (leader, standby) = two_replicas(&server, &user).await;
    let sluicectl = async |replica: &Replica, arguments: &[&str]| {
        let socket = format!("unix:{}.admin", replica.socket.display());
        let line = ["sluicectl", "--server", &socket].into_iter().chain(arguments.iter().copied());
        let arguments = ctl::Arguments::try_parse_from(line).unwrap();
        let screen = ctl::Screen { redraw: false, period: Duration::from_secs(1) };
        ctl::run(&arguments, &mut Vec::new(), &mut Vec::new(), screen).await.map_err(|error| error.to_string())
    };
    let holder = lease_holder(&server, &user).unwrap();
    let commands: [&[&str]; 10] = [
        &["services"],
        &["backends"],
        &["ports"],
        &["drops"],
        &["gateways"],
        &["pools"],
        &["events"],
        &["overrides"],
        &["drain", "edge-1"],
        &["undrain", "edge-1"],
    ];
    for arguments in commands {
        let error = sluicectl(&standby, arguments).await.unwrap_err();
        assert!(error.contains(&format!("does not lead, {holder} does")), "{arguments:?}: {error}");
    }
    for arguments in ["gateways", "pools", "events", "overrides"] {
        assert_eq!(sluicectl(&leader, &[arguments]).await, Ok(()), "{arguments}");
    }
}

/// The shipped role grants exactly these operations on Leases.
#[tokio::test]
async fn a_controller_only_gets_creates_and_updates_its_lease() {
    let (server, user) = User::with_test_server().await;
    let mut leader = Replica::start(&user, "one");
    wait_for("a leader", async || leader.leads().await, |leads| *leads).await;
    leader.stop("-TERM").await;
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", user.namespace);
    let log = server.log();
    let of_leases: Vec<_> = log.iter().filter(|logged| logged.path.contains("/leases")).collect();
    let is_allowed = |method: &str, is_named: bool| matches!((method, is_named), ("GET" | "PUT", true) | ("POST", false));
    for logged in &of_leases {
        let is_named = Path::new(&logged.path) == Path::new(&path).join("sluice-controller-default");
        assert!(is_named || logged.path == path, "{logged:?}");
        assert!(is_allowed(&logged.method, is_named) && !logged.is_watch(), "{logged:?}");
    }
    assert_eq!(lease_holder(&server, &user), None, "the Lease is released");
}

/// The leader has seen everything already when its term begins: what it reads then is the metadata of Services.
#[tokio::test]
async fn a_follower_watches_and_a_take_over_lists_no_objects() {
    let (server, user) = User::with_test_server().await;
    let (mut leader, standby) = two_replicas(&server, &user).await;
    let before = (user.ingress("web").await, user.ingress("mail").await);
    let gateway = Gateway::start(&standby.socket);
    // A write that the successor has to see before it plans.
    user.add("late", &serde_json::json!({"metadata": {"annotations": {"sluice.dev/mode": "dnat"}}})).await;
    let late = user.wait_for_ingress("late").await;
    let since = server.log().len();
    let written = status_writes(&server);
    leader.stop("-TERM").await;
    wait_for("the other leads", async || standby.leads().await, |leads| *leads).await;
    wait_for("its state", async || gateway.received().services.len(), |count| *count == 3).await;
    let lists = |path: &str| {
        let log = server.log();
        let all =
            log[since..].iter().filter(|logged| logged.method == "GET" && !logged.is_watch() && logged.path.ends_with(path));
        all.count()
    };
    for kind in ["/endpointslices", "/nodes", "/namespaces", "/addresspools"] {
        assert_eq!(lists(kind), 0, "{kind}");
    }
    assert_eq!(lists("/services"), 1, "their metadata");
    assert_eq!((user.ingress("web").await, user.ingress("mail").await, user.ingress("late").await), (before.0, before.1, late));
    assert!(status_writes(&server) <= written + 1, "the finalizer of `late` at most");
}

/// The predecessor is the test: it holds the Lease, writes an address and hands over, while the events of Services are late.
#[tokio::test]
async fn a_new_leader_plans_nothing_before_it_has_seen_what_its_predecessor_wrote() {
    let (server, user) = User::with_test_server().await;
    let name = format!("sluice-controller-{}", user.group());
    let now = "2026-01-01T00:00:00.000000Z";
    let spec = serde_json::json!({"holderIdentity": "predecessor", "leaseDurationSeconds": 15, "leaseTransitions": 0,
        "acquireTime": now, "renewTime": now});
    let metadata = serde_json::json!({"name": name, "namespace": user.namespace});
    server.create(Kind::Lease, serde_json::json!({"metadata": metadata, "spec": spec}));
    let standby = Installation::without_gateway(&user, |_| {}).await;
    let leadership = async || standby.running().probes.leadership.borrow().clone();
    wait_for("a follower", leadership, |now| matches!(now, Leadership::Following(Some(_)))).await;
    let watches = |log: &[LoggedRequest]| log.iter().any(|one| one.is_watch() && one.path.ends_with("/services"));
    wait_for("a watch of Services", async || server.log(), |log| watches(log)).await;
    let asks = serde_json::json!({"metadata": {"annotations": {"sluice.dev/addresses": "192.0.2.150"}}});
    user.add("asks", &asks).await;
    let seen = async || server.event_sent_at(Kind::Service);
    wait_for("the event of the Service that waits", seen, Option::is_some).await;
    server.hold_back(Kind::Service, true);
    user.add("has", &serde_json::json!({})).await;
    user.write_address("has", "192.0.2.150").await;
    let before = server.log().len();
    server.update(Kind::Lease, &user.namespace, &name, &serde_json::json!({"spec": {"holderIdentity": ""}}));
    let is_list = |log: &[LoggedRequest]| {
        log[before..].iter().any(|one| one.method == "GET" && !one.is_watch() && one.path.ends_with("/services"))
    };
    wait_for("the list of metadata", async || server.log(), |log| is_list(log)).await;
    // Time for a plan that would come too early, and give the address to the Service that asks.
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.hold_back(Kind::Service, false);
    user.wait_for_reason("asks", "AddressAssigned", "False Conflict").await;
    assert_eq!(user.wait_for_address("has").await, "192.0.2.150");
    standby.stop().await;
}

#[tokio::test]
async fn a_replica_that_cannot_read_the_lease_is_not_ready() {
    let (server, user) = User::with_test_server().await;
    let leader = Installation::without_gateway(&user, |_| {}).await;
    let ready = async |probes: &Probes| probes.ready().await;
    wait_for("a leader", async || ready(&leader.running().probes).await, Result::is_ok).await.unwrap();
    let standby = Installation::without_gateway(&user, |settings| {
        settings.listen = Listen::unix(user.directory().join("standby.sock"));
    })
    .await;
    wait_for("a follower", async || ready(&standby.running().probes).await, Result::is_ok).await.unwrap();
    let refusal = Fault::Unauthorized;
    server.inject(FaultRule { fault: refusal, times: usize::MAX, method: "GET", path_contains: "/leases", watch: false });
    let unready = wait_for("no readiness", async || ready(&standby.running().probes).await, Result::is_err).await;
    assert_eq!(unready, Err("the leader is not known; the log says why"));
    assert_eq!(ready(&leader.running().probes).await, Ok(()), "it renews the Lease");
    server.clear_faults();
    wait_for("a follower again", async || ready(&standby.running().probes).await, Result::is_ok).await.unwrap();
}

#[tokio::test]
async fn a_lease_that_may_not_be_renewed_is_told_as_refused() {
    let (server, user) = User::with_test_server().await;
    let leader = Replica::start(&user, "one");
    wait_for("a leader", async || leader.leads().await, |leads| *leads).await;
    for method in ["PUT", "GET"] {
        server.inject(FaultRule { fault: Fault::Forbidden, times: usize::MAX, method, path_contains: "/leases", watch: false });
    }
    let log = async || std::fs::read_to_string(&leader.log).unwrap();
    let log = wait_for("the end of its term", log, |log| log.contains("could not be renewed")).await;
    assert!(log.contains("the API server forbids it (403") && !log.contains("does not answer"), "{log}");
}

#[tokio::test]
async fn a_deleted_lease_makes_no_second_leader() {
    let (server, user) = User::with_test_server().await;
    let leader = Installation::without_gateway(&user, |_| {}).await;
    let standby = Installation::without_gateway(&user, |settings| {
        settings.listen = Listen::unix(user.directory().join("standby.sock"));
    })
    .await;
    let leads = |one: &Installation| matches!(*one.running().probes.leadership.borrow(), Leadership::Leading { .. });
    let one_leads = async || u8::from(leads(&leader)) + u8::from(leads(&standby));
    wait_for("a leader", &one_leads, |count| *count == 1).await;
    let (first, other) = if leads(&leader) { (&leader, &standby) } else { (&standby, &leader) };
    let knows = async || matches!(*other.running().probes.leadership.borrow(), Leadership::Following(Some(_)));
    wait_for("a follower", knows, |knows| *knows).await;
    let lease = format!("sluice-controller-{}", user.group());
    let held_by = || {
        let lease = server.get(Kind::Lease, &user.namespace, &lease)?;
        lease["spec"]["holderIdentity"].as_str().map(str::to_owned)
    };
    let holder = held_by();
    assert!(holder.is_some());
    server.delete(Kind::Lease, &user.namespace, &lease);
    let again = async || {
        assert!(!leads(other), "a second leader beside the first");
        held_by()
    };
    wait_for("a new Lease of the same leader", again, |now| *now == holder).await;
    wait_for("it leads", async || leads(first), |leads| *leads).await;
}
