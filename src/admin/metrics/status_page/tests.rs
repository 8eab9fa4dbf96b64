//! Tests of the status page: which answers, with which headers, of which size.

use std::collections::BTreeSet;
use std::time::Duration;

use dataplane::WorkerCounters;
use dataplane::flow::BackendId;
use dataplane::snapshot::{BackendView, PortView, ServiceView, Views};
use http_body_util::BodyExt as _;
use proto::{Family, Protocol, Reason, Refusal, ServiceName};
use serde_json::Value;
use std::sync::Arc;
use tokio::sync::watch;

use super::*;
use crate::admin::api::tests::{counted, sources, web};
use crate::agent::served::Served;
use crate::worker_threads::Load;

const HOST: &str = "127.0.0.1:9435";

/// Code, headers and body of the answer to a request.
fn ask(page: &StatusPage, sources: &Sources, uri: &str, host: Option<&str>) -> Option<(u16, HeaderMap, String)> {
    let request = http::Request::builder().uri(uri);
    let request = host.into_iter().fold(request, |request, host| request.header(header::HOST, host));
    let parts = request.body(()).unwrap().into_parts().0;
    let workers = WorkerLoads::new(vec![Arc::new(Load::default())], Vec::new(), 1_000);
    let (head, body) = page.answer(&parts, sources, &workers)?.into_parts();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let body = runtime.block_on(body.collect()).unwrap().to_bytes();
    Some((head.status.as_u16(), head.headers, String::from_utf8(body.to_vec()).unwrap()))
}

/// The document that a query gets.
fn document(page: &StatusPage, sources: &Sources, query: &str) -> (Value, usize) {
    let (code, _, body) = ask(page, sources, &format!("/status.json?{query}"), Some(HOST)).unwrap();
    assert_eq!(code, 200, "{body}");
    (serde_json::from_str(&body).unwrap(), body.len())
}

fn names(document: &Value) -> Vec<&str> {
    document["services"].as_array().unwrap().iter().map(|service| service["name"].as_str().unwrap()).collect()
}

#[test]
fn the_document_has_its_own_style_and_script_only() {
    let (code, headers, html) = ask(&StatusPage::new(Vec::new()), &sources(), "/", Some(HOST)).unwrap();
    assert_eq!((code, headers["content-type"].as_bytes()), (200, &b"text/html; charset=utf-8"[..]));
    let policy = headers["content-security-policy"].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none'; style-src 'sha256-") && !policy.contains("unsafe"), "{policy}");
    for (element, directive) in [("style", "style-src"), ("script", "script-src")] {
        let text = html.split_once(&format!("<{element}>")).unwrap().1.split_once(&format!("</{element}>")).unwrap().0;
        let hash = STANDARD.encode(Sha256::digest(text));
        assert!(policy.contains(&format!("{directive} 'sha256-{hash}'")), "{element}: {policy}");
    }
    let markup = html.split_once("<body>").unwrap().1.split_once("<script>").unwrap().0;
    assert!(!markup.contains(" style=") && !markup.contains(" on"), "the policy allows neither");
    for name in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "//cdn"] {
        assert!(!html.contains(name), "{name}");
    }
    for (name, value) in HEADERS.iter().filter(|(name, _)| *name != header::CONTENT_SECURITY_POLICY) {
        assert_eq!(headers[name].to_str().unwrap(), *value);
    }
    assert!(!headers.contains_key("access-control-allow-origin"));
}

#[test]
fn a_host_name_that_another_site_may_own_is_refused() {
    let names = ["edge-1", "gw.example"].map(str::to_owned);
    let (page, sources) = (StatusPage::new(names.into()), sources());
    let code = |uri, host| ask(&page, &sources, uri, host).map(|(code, ..)| code);
    for host in [HOST, "localhost:9435", "LOCALHOST", "[::1]:9435", "10.0.0.2", "edge-1:9435", "Edge-1", "GW.example:9435"] {
        assert_eq!((code("/", Some(host)), code("/status.json", Some(host))), (Some(200), Some(200)), "{host}");
    }
    for host in [
        None,
        Some("rebind.example:9435"),
        Some("127.0.0.1.example"),
        Some("edge-1.example"),
        Some("example"),
        Some(""),
        Some("a b"),
    ] {
        assert_eq!((code("/", host), code("/status.json", host)), (Some(421), Some(421)), "{host:?}");
    }
    assert_eq!(code("/status.json?limit=0", Some(HOST)), Some(400));
    assert_eq!(code("/other", Some(HOST)), None);
}

/// Names of all fields of a document.
fn fields(value: &Value, names: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => object.iter().for_each(|(name, value)| {
            names.insert(name.clone());
            fields(value, names);
        }),
        Value::Array(array) => array.iter().for_each(|value| fields(value, names)),
        _ => {}
    }
}

#[test]
fn the_document_says_what_the_admin_api_says_and_its_fields_are_documented() {
    let sources = sources();
    sources.workers.counters[0].at(counted(0)).flows.set(3);
    for bytes in [100, 60] {
        sources.workers.counters[0].forwarded(counted(0), bytes == 60, bytes);
    }
    let (document, _) = document(&StatusPage::new(Vec::new()), &sources, "service=default/web");
    let service = &document["service"];
    assert_eq!(service, &document["services"][0]);
    assert_eq!((&service["backends"], &service["healthy"], &service["members_total"]), (&2.into(), &1.into(), &3.into()));
    let members: Vec<_> = service["members"].as_array().unwrap().iter().map(|of| of["address"].as_str().unwrap()).collect();
    assert_eq!(members, ["10.0.0.2:80", "10.0.0.9:80", "10.0.0.1:80"], "those with trouble first");
    let totals = &document["totals"];
    for of in [totals, service, &service["members"][2]] {
        assert_eq!((&of["packets_to_backends"], &of["bytes_to_backends"]), (&1.into(), &100.into()), "{of}");
        assert_eq!(
            (&of["packets_to_clients"], &of["bytes_to_clients"], &of["flows"]),
            (&1.into(), &60.into(), &3.into()),
            "{of}"
        );
    }
    assert_eq!((&totals["services_with_trouble"], &totals["backends_draining"]), (&1.into(), &1.into()));
    assert_eq!((&document["drops"]["no_flow"], &document["workers"][0]["received_packets"]), (&1.into(), &10.into()));
    assert_eq!((&document["fleet"]["groups"], &document["fleet"]["sessions_up"]), (&0.into(), &0.into()));
    assert!(document["events_missing"].as_str().unwrap().contains("unix:/c.sock"), "{document}");
    let mut names = BTreeSet::new();
    fields(&document, &mut names);
    names.remove("no_flow");
    let page = include_str!("../../../../docs/reference/status-page.md");
    let missing: Vec<_> = names.iter().filter(|name| !page.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "docs/reference/status-page.md has no {missing:?}");
}

#[test]
fn a_service_without_healthy_backends_is_no_refused_one_and_both_are_found_by_their_reason() {
    let refusal = Refusal { reason: Reason::Unsupported, message: "a setting".to_owned() };
    let named = |name: &str| ServiceView { name: Arc::new(ServiceName::new("shop", name)), ..web() };
    let mut failing = named("failing");
    failing.ports.iter_mut().flat_map(|port| &mut port.backends).for_each(|backend| backend.healthy = false);
    let all = [
        failing,
        ServiceView { ports: Vec::new(), ..named("empty") },
        ServiceView { refusal: Some(refusal), ..named("refused") },
    ];
    let services: Views = all.into_iter().map(|view| (Arc::clone(&view.name), Arc::new(view))).collect();
    let served = watch::channel(Served { ready: true, services, ..Served::default() }).1;
    let (page, sources) = (StatusPage::new(Vec::new()), Sources { served, ..sources() });
    let rows = [("NoHealthyBackend", "failing", false), ("noendpoints", "empty", false), ("Unsupported", "refused", true)];
    for (reason, name, is_refused) in rows {
        let (document, _) = document(&page, &sources, &format!("search={reason}"));
        assert_eq!(names(&document), [format!("shop/{name}")], "{reason}");
        let row = &document["services"][0];
        assert_eq!(row["refused"], is_refused, "{row}");
        assert!(row["reason"].as_str().unwrap().eq_ignore_ascii_case(reason), "{row}");
    }
}

const SERVICES: u32 = 10_000;
const BACKENDS: u32 = 10;

/// Service `n` of many; its last backend is unhealthy if `n` is 77.
fn one_of_many(n: u32) -> ServiceView {
    let backend = |at: u32| BackendView {
        address: format!("10.{}.{}.{}:8080", n / 256, n % 256, at + 1).parse().unwrap(),
        id: BackendId { slot: n * BACKENDS + at, generation: 0 },
        weight: 1,
        healthy: n != 77 || at + 1 < BACKENDS,
        draining: false,
        accepts_new: true,
    };
    let frontends = (0..20).map(|port| format!("192.{}.{}.1:{}", n / 256, n % 256, 80 + port).parse().unwrap()).collect();
    let backends = (0..BACKENDS).map(backend).collect();
    let port =
        PortView { protocol: Protocol::Tcp, family: Family::V4, frontends, backends, app_protocol: None, proxy_protocol: None };
    ServiceView { name: Arc::new(ServiceName::new("many", &format!("service-{n:05}"))), ports: vec![port], ..web() }
}

#[test]
fn with_100_000_backends_the_document_stays_small_and_finds_each() {
    let services: Views = (0..SERVICES).map(one_of_many).map(|view| (Arc::clone(&view.name), Arc::new(view))).collect();
    let served = watch::channel(Served { ready: true, services: services.clone(), ..Served::default() }).1;
    let mut sources = Sources { served, ..sources() };
    sources.workers.counters = vec![Arc::new(WorkerCounters::default())];
    let send =
        |n: u32, packets| (0..packets).for_each(|_| sources.workers.counters[0].forwarded(counted(n * BACKENDS), false, 100));
    let page = StatusPage::new(Vec::new());
    send(4_711, 2);
    let (all, bytes) = document(&page, &sources, "");
    assert!(bytes < 150_000, "{bytes}");
    assert_eq!((all["matched"].as_u64(), names(&all).len()), (Some(10_000), 50));
    assert_eq!(all["totals"]["backends"], 100_000);
    let (largest, bytes) = document(&page, &sources, "limit=500&service=many/service-00077");
    assert!(names(&largest).len() == 500 && bytes < 1_500_000, "{bytes}");
    let (trouble, _) = document(&page, &sources, "sort=trouble&limit=2");
    assert_eq!(names(&trouble), ["many/service-00077", "many/service-04711"]);
    for search in ["service-09999", "SERVICE-09999", "10.39.15.7:8080", "192.39.15.1:99"] {
        assert_eq!(names(&document(&page, &sources, &format!("search={search}")).0), ["many/service-09999"], "{search}");
    }
    assert_eq!(document(&page, &sources, "search=absent").0["matched"], 0);

    let mut reading = Reading::default();
    let rate = |reading: &Reading, n: u32| reading.ranks[&ServiceName::new("many", &format!("service-{n:05}"))].rate;
    reading.refresh(Duration::from_secs(10), &services, &sources.workers.counters);
    send(1, 30);
    reading.refresh(Duration::from_millis(10_999), &services, &sources.workers.counters);
    assert_eq!(reading.ranks[&*services.values().nth(1).unwrap().name].packets, 0, "a fresh reading serves again");
    reading.refresh(Duration::from_secs(16), &services, &sources.workers.counters);
    assert!((rate(&reading, 1) - 5.0).abs() < 1e-9 && rate(&reading, 4_711) == 0.0, "30 packets in 6 s; none");
    send(2, 90);
    reading.refresh(Duration::from_secs(18), &services, &sources.workers.counters);
    assert!((rate(&reading, 1) - 5.0).abs() < 1e-9 && rate(&reading, 2) == 0.0, "the window has not passed");
}
