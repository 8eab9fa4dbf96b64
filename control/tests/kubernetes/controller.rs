//! The complete controller on the test server, in situations that cannot be caused on a real server. Tests that only
//! need the API are in `scenarios`.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::api_server::{Availability, Fault, FaultRule, Kind, LoggedRequest, WatchEnd};
use crate::gateway::ReceivedState;
use crate::installation::Installation;
use crate::user::{DEADLINE, User, wait_for};

/// How long an address waits for a slow gateway before it is written (CONTROL section 5).
const SLOW_GATEWAY_TIMEOUT: Duration = Duration::from_secs(2);

#[tokio::test]
async fn a_write_with_a_conflict_is_decided_again_on_the_newer_object() {
    let (server, user) = User::with_test_server().await;
    let _installation = Installation::start(&user).await;
    server.inject(FaultRule {
        fault: Fault::Conflict,
        times: 1,
        method: "PATCH",
        path_contains: "/services/web/status",
        watch: false,
    });
    user.add_service("web", &user.class()).await;
    let patches = || server.log().iter().filter(|logged| logged.path.ends_with("/services/web/status")).count();
    wait_for("the write with the conflict", async || patches(), |count| *count == 1).await;
    user.annotate("web", "example.com/touched", "yes").await;
    user.wait_for_ingress("web").await;
    assert_eq!(patches(), 3, "the one with the conflict, the finalizer, then the address once the gateway serves the Service");
}

#[tokio::test]
async fn expired_watches_and_lists_delay_an_address_but_lose_nothing() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    user.add_service("before", &user.class()).await;
    user.wait_for_ingress("before").await;
    server.inject(FaultRule { fault: Fault::Expired, times: 1, method: "GET", path_contains: "/api/v1/services", watch: false });
    server.compact();
    server.end_watches(WatchEnd::Expired);
    user.add_service("after", &user.class()).await;
    user.wait_for_ingress("after").await;
    let (before, after) = (user.full_name("before"), user.full_name("after"));
    let received =
        installation.wait_for_state("both", |received| received.backends(&before) == 1 && received.backends(&after) == 1).await;
    assert!(received.removed.is_empty(), "{:?}", received.removed);
}

#[tokio::test]
async fn without_the_right_to_list_slices_nothing_is_decided_until_it_is_granted() {
    let (server, user) = User::with_test_server().await;
    user.add_service("web", &user.class()).await;
    server.inject(FaultRule { fault: Fault::Forbidden, times: 2, method: "GET", path_contains: "/endpointslices", watch: false });
    let _installation = Installation::start(&user).await;
    user.wait_for_ingress("web").await;
    let log = server.log();
    let mut lists = (0..log.len()).filter(|&at| log[at].path.ends_with("/endpointslices") && !log[at].is_watch());
    let granted = lists.nth(2).unwrap();
    let written = log.iter().position(|logged| logged.path.ends_with("/web/status")).unwrap();
    assert!(granted < written, "a status was written before slices were known");
}

#[tokio::test]
async fn services_are_served_without_the_right_to_read_the_checkpoint() {
    let (server, user) = User::with_test_server().await;
    let checkpoint = "/configmaps/sluice-checkpoint";
    server.inject(FaultRule {
        fault: Fault::Forbidden,
        times: usize::MAX,
        method: "GET",
        path_contains: checkpoint,
        watch: false,
    });
    let installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_ingress("web").await;
    installation.wait_until_served(&user, "web", 1).await;
    let log = server.log();
    assert!(
        log.iter().all(|logged| logged.method == "GET" || !logged.path.contains(checkpoint)),
        "a checkpoint that was not read must not be overwritten"
    );
}

#[tokio::test]
async fn an_object_that_cannot_be_decoded_does_not_stop_the_others() {
    let (server, user) = User::with_test_server().await;
    server
        .put_raw(Kind::Service, json!({"metadata": {"name": "odd", "namespace": "a", "uid": "1"}, "spec": {"ports": "eighty"}}));
    server.put_raw(Kind::EndpointSlice, json!({"metadata": {"name": "odd-1", "namespace": "a", "uid": "2"}, "endpoints": 3}));
    let _installation = Installation::start(&user).await;
    user.add_service("web", &user.class()).await;
    user.wait_for_ingress("web").await;
}

#[tokio::test]
async fn outages_of_the_api_server_withdraw_nothing_from_the_gateways() {
    let (server, user) = User::with_test_server().await;
    user.add_service("web", &user.class()).await;
    server.set_availability(Availability::Down).await;
    let installation = Installation::start(&user).await;
    server.set_availability(Availability::Up).await;
    let web = user.full_name("web");
    user.wait_for_ingress("web").await;
    installation.wait_for_state("the Service", |received| received.backends(&web) == 1).await;
    server.set_availability(Availability::Down).await;
    server.compact();
    server.set_availability(Availability::Up).await;
    user.add_service("next", &user.class()).await;
    user.wait_for_ingress("next").await;
    let received = installation.received();
    assert!(received.removed.is_empty() && received.backends(&web) == 1, "{:?}", received.removed);
}

#[tokio::test]
async fn a_change_to_a_vip_mode_reaches_the_status_first_and_a_change_back_the_gateways_first() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    user.add_service("web", &user.class()).await;
    let web = user.full_name("web");
    let mode = |received: &ReceivedState| received.services.get(&web).map(|service| service.mode.clone()).unwrap_or_default();
    let annotate = |mode: &str| {
        let annotations = json!({"metadata": {"annotations": {"sluice.dev/mode": mode}}});
        server.update(Kind::Service, &user.namespace, "web", &annotations);
    };
    let ip_mode = async || user.ingress("web").await[0]["ipMode"].clone();
    wait_for("the first status", &ip_mode, |ip_mode| ip_mode == "Proxy").await;
    annotate("dnat");
    installation.wait_for_state("the new mode", |received| mode(received) == "dnat").await;
    assert_eq!(ip_mode().await, "VIP");
    annotate("nat");
    wait_for("the previous status", &ip_mode, |ip_mode| ip_mode == "Proxy").await;
    assert_eq!(mode(&installation.received()), "nat");
}

#[tokio::test]
async fn a_status_that_is_never_accepted_delays_a_mode_by_ten_seconds_only() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    user.add_service("web", &user.class()).await;
    user.wait_for_ingress("web").await;
    let web = user.full_name("web");
    let refusal = Fault::Invalid("no".to_owned());
    server.inject(FaultRule { fault: refusal, times: usize::MAX, method: "PATCH", path_contains: "/status", watch: false });
    let start = Instant::now();
    let annotations = json!({"metadata": {"annotations": {"sluice.dev/mode": "dnat"}}});
    server.update(Kind::Service, &user.namespace, "web", &annotations);
    installation
        .wait_for_state("the new mode", |received| received.services.get(&web).is_some_and(|service| service.mode == "dnat"))
        .await;
    assert!(start.elapsed() >= Duration::from_secs(9), "already after {:?}", start.elapsed());
}

/// One Service at a time: more than a few at once would wait for each other, since only 20 writes per second are sent.
/// The fastest one counts, because the machine may be busy: it must be faster than the wait for a slow gateway.
#[tokio::test]
async fn the_address_of_a_new_service_comes_without_delay() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    installation.wait_for_state("a first message", |received| received.messages > 0).await;
    let mut fastest = Duration::MAX;
    for name in ["one", "two", "three", "four", "five"] {
        user.add(name, &json!({})).await;
        user.wait_for_ingress(name).await;
        let path = format!("/services/{name}/status");
        let writes_address = |logged: &&LoggedRequest| logged.path.ends_with(&path) && logged.body.contains("\"ip\"");
        let patched = server.log().iter().find(writes_address).unwrap().at;
        let delay = patched.duration_since(server.added_at(Kind::Service, &user.namespace, name).unwrap());
        println!("{name} after {delay:?}");
        fastest = fastest.min(delay);
    }
    assert!(fastest < SLOW_GATEWAY_TIMEOUT, "the fastest took {fastest:?}");
}

#[tokio::test]
async fn a_deleted_namespace_keeps_its_services_until_its_pods_have_ended() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_ingress("web").await;
    installation.wait_until_served(&user, "web", 1).await;
    let pod = json!({"metadata": {"name": "p", "namespace": user.namespace}, "spec": {"nodeName": "n1"}});
    server.create(Kind::Pod, pod);
    server.delete(Kind::Namespace, "", &user.namespace);
    user.set_backends("web", 2).await;
    let received = installation.wait_until_served(&user, "web", 2).await;
    assert!(received.removed.is_empty(), "withdrawn while a Pod is still ending: {:?}", received.removed);
    server.end_pod(&user.namespace, "p");
    installation.wait_until_withdrawn(&user, "web").await;
    let is_there = async || server.get(Kind::Namespace, "", &user.namespace).is_some();
    wait_for("the end of the namespace", is_there, |is_there| !is_there).await;
}

/// The HTTP status code that a probe of the Deployment gets.
fn probe(address: std::net::SocketAddr, path: &str) -> u16 {
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n").as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Waits, outside any runtime, until a probe gets this code.
fn probe_until(address: std::net::SocketAddr, path: &str, code: u16) {
    let start = Instant::now();
    while probe(address, path) != code {
        assert!(start.elapsed() < DEADLINE, "{path} does not answer {code}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Serves the probes in a separate runtime, which a hung planner cannot block.
fn serve_in_own_runtime(probes: control::healthz::Probes) -> std::net::SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            control::healthz::serve(listener, probes, CancellationToken::new()).await
        })
    });
    address
}

#[test]
fn a_hung_planner_fails_livez() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(16).enable_all().build().unwrap();
    let (server, user, installation) = runtime.block_on(async {
        let (server, user) = User::with_test_server().await;
        let installation = Installation::start(&user).await;
        (server, user, installation)
    });
    // Longer than the planner may go without a sign of life, and shorter than the deadline of this test.
    let probes = control::healthz::Probes { stalled_after: Duration::from_secs(10), ..installation.running().probes.clone() };
    let address = serve_in_own_runtime(probes);
    probe_until(address, "/readyz", 200);
    assert_eq!(probe(address, "/livez"), 200);
    // Blocks the planner on the lock of the gateways that it publishes.
    let gateways = installation.running().view.gateways.clone();
    let lock = gateways.borrow();
    let adding = runtime.spawn(async move {
        user.add("web", &json!({})).await;
        user
    });
    probe_until(address, "/livez", 503);
    drop(lock);
    probe_until(address, "/livez", 200);
    runtime.block_on(async move {
        adding.await.unwrap().wait_for_ingress("web").await;
        drop((installation, server));
    });
}

/// Requests of one kind are counted between the first and the last one. Less frequent requests add 3.5 a minute: three
/// watches of 120 s, and one read and one write of EdgeGateways every 60 s.
#[tokio::test]
async fn an_idle_controller_sends_fewer_than_thirty_requests_a_minute() {
    let (server, user) = User::with_test_server().await;
    let _installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_event("web", "Programmed").await;
    let since = server.log().len();
    let watches =
        || server.log()[since..].iter().filter(|logged| logged.is_watch() && logged.path.ends_with("/services")).count();
    let enough = async {
        while watches() < 3 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), enough).await.unwrap();
    let mut requests: BTreeMap<(String, String), Vec<Instant>> = BTreeMap::new();
    // The checkpoint is written once after the last decision.
    let is_periodic = |logged: &LoggedRequest| !logged.path.contains("/configmaps/sluice-checkpoint-");
    for logged in server.log().split_off(since).into_iter().filter(is_periodic) {
        requests.entry((logged.method, logged.path)).or_default().push(logged.at);
    }
    let lasted = |times: &Vec<Instant>| times[times.len() - 1] - times[0];
    let rate = |times: &Vec<Instant>| 60.0 * f64::from(u32::try_from(times.len() - 1).unwrap()) / lasted(times).as_secs_f64();
    let (often, rarely): (Vec<_>, Vec<_>) = requests.iter().partition(|(_, times)| lasted(times) >= Duration::from_secs(10));
    let rates: BTreeMap<_, _> = often.into_iter().map(|(request, times)| (request, rate(times))).collect();
    println!("requests a minute: {rates:#?}, and {} others", rarely.len());
    assert!(rates.values().sum::<f64>() + 3.5 < 30.0 && rarely.len() <= 6, "{rates:#?} {rarely:#?}");
}
