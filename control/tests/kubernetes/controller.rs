//! The whole controller on a cluster, as the owner of a Service and a gateway meet it. What only needs the API is also
//! tried on a real cluster.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use control::controller::{Controller, Running};
use control::settings::{ControllerSettings, Defaults, OwnershipRules, Source};
use control::spec::PoolSpec;
use proto::limits::DRAIN_TIMEOUT;
use proto::{HealthCheck, Mode, Scheduler};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::api_server::{ApiServer, Cut, Fault, Kind, Presence, Trap};
use crate::gateway::{Gateway, Given};
use crate::user::{User, on_a_real_cluster, reached};

/// A controller and its one gateway.
struct Installation {
    gateway: Gateway,
    shutdown: CancellationToken,
    running: Running,
}

impl Installation {
    async fn start(user: &User) -> Self {
        let socket = user.directory().join("config.sock");
        let shutdown = CancellationToken::new();
        let running = Controller::start(settings(user, socket.clone()), shutdown.clone()).await.unwrap();
        Self { gateway: Gateway::start(&socket), shutdown, running }
    }

    /// Waits until the gateway was given what is wanted.
    async fn gives(&self, what: &str, is_wanted: impl Fn(&Given) -> bool) -> Given {
        reached(what, async || self.gateway.given(), is_wanted).await
    }
}

fn settings(user: &User, listen: PathBuf) -> ControllerSettings {
    let ranges = vec!["192.0.2.100-192.0.2.199".parse().unwrap()];
    ControllerSettings {
        listen,
        group: "default".to_owned(),
        source: Source::Kubernetes { kubeconfig: Some(user.kubeconfig.clone()), namespace: Some(user.namespace.clone()) },
        load_balancer_class: user.class(),
        ownership: OwnershipRules::default(),
        defaults: Defaults { mode: Mode::Nat, scheduler: Scheduler::Maglev, drain_timeout: DRAIN_TIMEOUT },
        health: HealthCheck::default(),
        backends_allowed: None,
        cluster_cidrs: Vec::new(),
        pools: vec![PoolSpec::new("default", ranges)],
        reserved: Vec::new(),
    }
}

async fn a_service_gets_its_address(user: &User) {
    let installation = Installation::start(user).await;
    installation.gives("a first message", |given| given.messages > 0).await;
    let start = Instant::now();
    user.add_service("web", &user.class()).await;
    let ingress = user.ingress_comes("web").await;
    let taken = start.elapsed();
    println!("an address after {taken:?}");
    assert!(taken < Duration::from_secs(1), "after {taken:?}");
    assert_eq!(ingress, json!([{"ip": "192.0.2.100", "ipMode": "Proxy"}]));
    let web = user.full_name("web");
    installation.gives("the backend", |given| given.backends(&web) == 1).await;
    user.delete_service("web").await;
    installation.gives("the end", |given| !given.services.contains_key(&web)).await;
}

async fn a_service_of_another_class_is_left_alone(user: &User) {
    let _installation = Installation::start(user).await;
    user.add_service("theirs", "example.com/other").await;
    user.add_service("ours", &user.class()).await;
    user.ingress_comes("ours").await;
    assert!(user.ingress("theirs").await.is_null());
}

async fn an_address_survives_a_new_controller(user: &User) {
    let installation = Installation::start(user).await;
    for name in ["first", "second"] {
        user.add_service(name, &user.class()).await;
        user.ingress_comes(name).await;
    }
    let before = user.ingress("second").await;
    user.delete_service("first").await;
    installation.shutdown.cancel();
    installation.running.stopped().await.unwrap();
    let installation = Installation::start(user).await;
    let second = user.full_name("second");
    installation.gives("the Service", |given| given.backends(&second) == 1).await;
    assert_eq!(user.ingress("second").await, before);
}

#[tokio::test]
async fn a_new_service_has_its_address_within_a_second() {
    a_service_gets_its_address(&User::of_test_server(&ApiServer::start().await).await).await;
}

#[tokio::test]
async fn a_new_service_has_its_address_within_a_second_on_a_real_cluster() {
    on_a_real_cluster("a new Service has its address within a second", a_service_gets_its_address).await;
}

#[tokio::test]
async fn services_of_others_are_left_alone() {
    let server = ApiServer::start().await;
    a_service_of_another_class_is_left_alone(&User::of_test_server(&server).await).await;
    assert!(!server.log().iter().any(|logged| logged.method == "PATCH" && logged.path.contains("theirs")));
}

#[tokio::test]
async fn services_of_others_are_left_alone_on_a_real_cluster() {
    on_a_real_cluster("Services of others are left alone", a_service_of_another_class_is_left_alone).await;
}

#[tokio::test]
async fn a_controller_that_starts_anew_renumbers_nobody() {
    an_address_survives_a_new_controller(&User::of_test_server(&ApiServer::start().await).await).await;
}

#[tokio::test]
async fn a_controller_that_starts_anew_renumbers_nobody_on_a_real_cluster() {
    on_a_real_cluster("a controller that starts anew renumbers nobody", an_address_survives_a_new_controller).await;
}

#[tokio::test]
async fn a_write_that_lost_a_race_is_decided_again_on_the_newer_object() {
    let server = ApiServer::start().await;
    let user = User::of_test_server(&server).await;
    let _installation = Installation::start(&user).await;
    server.trap(Trap { fault: Fault::Conflict, times: 1, method: "PATCH", path_contains: "/status", watch: false });
    user.add_service("web", &user.class()).await;
    let patches = || server.log().iter().filter(|logged| logged.path.ends_with("/status")).count();
    reached("the write that loses", async || patches(), |count| *count == 1).await;
    user.annotate("web", "example.com/touched").await;
    user.ingress_comes("web").await;
    assert_eq!(patches(), 2);
}

#[tokio::test]
async fn expired_watches_and_lists_delay_an_address_but_lose_nothing() {
    let server = ApiServer::start().await;
    let user = User::of_test_server(&server).await;
    let installation = Installation::start(&user).await;
    user.add_service("before", &user.class()).await;
    user.ingress_comes("before").await;
    server.trap(Trap { fault: Fault::Expired, times: 1, method: "GET", path_contains: "/api/v1/services", watch: false });
    server.compact();
    server.cut_watches(Cut::Expired);
    user.add_service("after", &user.class()).await;
    user.ingress_comes("after").await;
    let (before, after) = (user.full_name("before"), user.full_name("after"));
    let given = installation.gives("both", |given| given.backends(&before) == 1 && given.backends(&after) == 1).await;
    assert!(given.removed.is_empty(), "{:?}", given.removed);
}

#[tokio::test]
async fn without_the_right_to_list_slices_nothing_is_decided_until_it_is_granted() {
    let server = ApiServer::start().await;
    let user = User::of_test_server(&server).await;
    user.add_service("web", &user.class()).await;
    server.trap(Trap { fault: Fault::Forbidden, times: 2, method: "GET", path_contains: "/endpointslices", watch: false });
    let _installation = Installation::start(&user).await;
    user.ingress_comes("web").await;
    let log = server.log();
    let mut lists = (0..log.len()).filter(|&at| log[at].path.ends_with("/endpointslices") && !log[at].is_watch());
    let granted = lists.nth(2).unwrap();
    let written = log.iter().position(|logged| logged.path.ends_with("/status")).unwrap();
    assert!(granted < written, "a status was written before slices were known");
}

#[tokio::test]
async fn an_object_that_makes_no_sense_does_not_stop_the_others() {
    let server = ApiServer::start().await;
    let user = User::of_test_server(&server).await;
    server
        .put_raw(Kind::Service, json!({"metadata": {"name": "odd", "namespace": "a", "uid": "1"}, "spec": {"ports": "eighty"}}));
    server.put_raw(Kind::EndpointSlice, json!({"metadata": {"name": "odd-1", "namespace": "a", "uid": "2"}, "endpoints": 3}));
    let _installation = Installation::start(&user).await;
    user.add_service("web", &user.class()).await;
    user.ingress_comes("web").await;
}

#[tokio::test]
async fn an_api_server_that_is_away_at_the_start_and_later_takes_nothing_from_the_gateways() {
    let server = ApiServer::start().await;
    let user = User::of_test_server(&server).await;
    user.add_service("web", &user.class()).await;
    server.set_presence(Presence::Away).await;
    let installation = Installation::start(&user).await;
    server.set_presence(Presence::There).await;
    let web = user.full_name("web");
    user.ingress_comes("web").await;
    installation.gives("the Service", |given| given.backends(&web) == 1).await;
    server.set_presence(Presence::Away).await;
    server.compact();
    server.set_presence(Presence::There).await;
    user.add_service("next", &user.class()).await;
    user.ingress_comes("next").await;
    let given = installation.gateway.given();
    assert!(given.removed.is_empty() && given.backends(&web) == 1, "{:?}", given.removed);
}

#[tokio::test]
async fn towards_a_mode_in_which_nodes_see_the_vip_the_status_comes_first_and_back_from_it_the_gateways() {
    let server = ApiServer::start().await;
    let user = User::of_test_server(&server).await;
    let installation = Installation::start(&user).await;
    user.add_service("web", &user.class()).await;
    let web = user.full_name("web");
    let mode = |given: &Given| given.services.get(&web).map(|service| service.mode.clone()).unwrap_or_default();
    let annotate = |mode: &str| {
        let annotations = json!({"metadata": {"annotations": {"sluice.dev/mode": mode}}});
        server.update(Kind::Service, &user.namespace, "web", &annotations);
    };
    let told = async || user.ingress("web").await[0]["ipMode"].clone();
    reached("the first status", &told, |told| told == "Proxy").await;
    annotate("dnat");
    installation.gives("the new mode", |given| mode(given) == "dnat").await;
    assert_eq!(told().await, "VIP");
    annotate("nat");
    reached("the status of before", &told, |told| told == "Proxy").await;
    assert_eq!(mode(&installation.gateway.given()), "nat");
}

#[tokio::test]
async fn a_status_that_is_never_taken_holds_a_mode_up_for_ten_seconds_only() {
    let server = ApiServer::start().await;
    let user = User::of_test_server(&server).await;
    let installation = Installation::start(&user).await;
    user.add_service("web", &user.class()).await;
    user.ingress_comes("web").await;
    let web = user.full_name("web");
    let refusal = Fault::Invalid("no".to_owned());
    server.trap(Trap { fault: refusal, times: usize::MAX, method: "PATCH", path_contains: "/status", watch: false });
    let start = Instant::now();
    let annotations = json!({"metadata": {"annotations": {"sluice.dev/mode": "dnat"}}});
    server.update(Kind::Service, &user.namespace, "web", &annotations);
    installation.gives("the new mode", |given| given.services.get(&web).is_some_and(|service| service.mode == "dnat")).await;
    assert!(start.elapsed() >= Duration::from_secs(9), "after {:?}", start.elapsed());
}
