//! Replays recorded answers of a real API server to the watchers. Whatever lists, pages, watches or errors they
//! contain, the `World` ends with the content of the last recorded list, and the selection with the endpoints that
//! kube-proxy's rules select from that list.
//!
//! `fixtures/recordings/follow` contains bodies of kube-apiserver 1.36.2, reduced to the fields that sluice reads. For
//! slices with many changes only some of the events are included. Another program made `selected-*.txt` from the
//! recorded lists: Service, protocol, port, family, the endpoints that are used, and zones with the indexes of the
//! endpoints that are hinted to them.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use control::config::settings::{ControllerSettings, Source};
use control::kubernetes::{Following, connect, follow};
use control::plan::{Memory, plan};
use control::world::World;
use control::world::change::Change;
use futures::StreamExt;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use proto::{Backend, BackendState, Family, ServicePort};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::user::DEADLINE;

/// After this time no plan waits for a status or finalizer, and no deleted slice is kept: nothing is written in this
/// test.
const AFTER_ALL_WAITS: Duration = Duration::from_secs(60);

fn fixture(name: &str) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/recordings/follow").join(name);
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// The answers of the server, in order: to lists and watches of Services and EndpointSlices. After the last watch the
/// server is silent; the last list is repeated.
#[derive(Default)]
struct Script {
    lists: BTreeMap<&'static str, VecDeque<&'static str>>,
    watches: BTreeMap<&'static str, VecDeque<&'static str>>,
}

impl Script {
    fn new(services: [&[&'static str]; 2], slices: [&[&'static str]; 2]) -> Self {
        let queues = |of: usize| [("services", services[of]), ("endpointslices", slices[of])];
        let queue = |(kind, files): (&'static str, &[&'static str])| (kind, files.iter().copied().collect());
        Self { lists: queues(0).map(queue).into(), watches: queues(1).map(queue).into() }
    }

    /// The next response: status code, body, and whether the stream stays open after it.
    fn response(&mut self, kind: &str, is_watch: bool) -> (u16, String, bool) {
        if is_watch {
            let next = self.watches.get_mut(kind).and_then(VecDeque::pop_front);
            return (200, next.map(fixture).unwrap_or_default(), next.is_none());
        }
        let Some(files) = self.lists.get_mut(kind) else {
            let empty = r#"{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":"243"},"items":[]}"#;
            return (200, empty.to_owned(), false);
        };
        let file = if files.len() > 1 { files.pop_front() } else { files.front().copied() }.unwrap();
        (if file.starts_with("expired") { 410 } else { 200 }, fixture(file), false)
    }
}

async fn serve(listener: TcpListener, script: Arc<Mutex<Script>>) {
    while let Ok((stream, _)) = listener.accept().await {
        let script = Arc::clone(&script);
        let response = service_fn(move |request| {
            let script = Arc::clone(&script);
            async move { Ok::<_, Infallible>(respond(&request, &script)) }
        });
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), response));
    }
}

fn respond(request: &Request<Incoming>, script: &Mutex<Script>) -> Response<BoxBody<Bytes, Infallible>> {
    let kind = request.uri().path().rsplit('/').next().unwrap_or_default();
    let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true") || query.contains("watch=1"));
    let (code, body, stays_open) = script.lock().unwrap().response(kind, is_watch);
    let first_frame = futures::stream::once(async move { Ok(Frame::data(Bytes::from(body))) });
    let body = if stays_open { first_frame.chain(futures::stream::pending()).left_stream() } else { first_frame.right_stream() };
    let response = Response::builder().status(code).header("content-type", "application/json");
    response.body(BodyExt::boxed(StreamBody::new(body))).unwrap()
}

fn settings() -> ControllerSettings {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = "kubernetes: {claimClassless: {enabled: true}}\nexternalIPs: {allowed: [203.0.113.60/32]}\n\
                pools: [{name: default, addresses: [203.0.113.0-203.0.113.55, 2001:db8:1::/112]}]\n";
    std::fs::write(file.path(), text).unwrap();
    let mut settings = control::config::controller::ControllerFile::read(file.path()).unwrap().settings;
    assert!(matches!(settings.source, Source::Kubernetes { .. }));
    settings.profile.serves_node_ports = Some(true);
    settings
}

/// The world that watches a server with a script.
struct WatchedWorld {
    world: World,
    changes: mpsc::Receiver<Change>,
}

impl WatchedWorld {
    async fn start(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let kubeconfig = format!(
            "{{apiVersion: v1, kind: Config, current-context: c, contexts: [{{name: c, context: {{cluster: c, user: u}}}}], \
             clusters: [{{name: c, cluster: {{server: 'http://{}'}}}}], users: [{{name: u, user: {{}}}}]}}",
            listener.local_addr().unwrap()
        );
        tokio::spawn(serve(listener, Arc::new(Mutex::new(script))));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), kubeconfig).unwrap();
        let cluster = connect(Some(file.path())).await.unwrap();
        let (sender, changes) = mpsc::channel(16);
        tokio::spawn(follow(Following::new(Arc::new(cluster), sender)));
        let mut world = World::default();
        world.apply(Change::OverridesReplaced(Box::default()));
        world.apply(Change::CheckpointReplaced(Box::default()));
        world.apply(Change::GatewaysReplaced(BTreeMap::new()));
        Self { world, changes }
    }

    /// The selected endpoints, one line per port and family, as in `selected-*.txt`, at a time when deleted slices are
    /// no longer kept.
    fn selected(&self) -> String {
        let (settings, mut memory, now) = (settings(), Memory::default(), Instant::now());
        plan(&self.world, &settings, &mut memory, now);
        let plan = plan(&self.world, &settings, &mut memory, now + AFTER_ALL_WAITS);
        let services = plan.services.values().filter(|service| service.name.namespace == "rec");
        let refused = plan.services.values().filter_map(|service| Some((&service.name, service.refusal.as_ref()?)));
        let refused: Vec<_> = refused.collect();
        let mut lines: Vec<String> =
            services.flat_map(|service| service.ports.iter().map(|port| line(&service.name.name, port))).collect();
        lines.extend(refused.iter().map(|(name, refusal)| format!("{name} is refused: {}", refusal.message)));
        lines.sort();
        lines.into_iter().map(|line| line + "\n").collect()
    }

    /// Applies changes until the selection is `expected` and the world contains this many Services.
    async fn ends_with(mut self, services: usize, expected: &str) {
        let ends = tokio::time::timeout(DEADLINE, async {
            loop {
                let change = self.changes.recv().await.expect("the watchers keep running");
                self.world.apply(change);
                let is_there = self.world.is_complete() && self.world.services().len() == services;
                if is_there && self.selected() == expected {
                    return;
                }
            }
        });
        if ends.await.is_err() {
            let names: Vec<_> = self.world.services().keys().map(|name| &name.name).collect();
            panic!("{} Services: {names:?}\n{}\nexpected {services} Services and\n{expected}", names.len(), self.selected());
        }
    }
}

/// The backends that take new flows.
fn line(service: &str, port: &ServicePort) -> String {
    let family = if port.family == Family::V4 { "IPv4" } else { "IPv6" };
    let mut words = vec![format!("{service} {} {} {family}", port.protocol, port.port)];
    let takes_new = |backend: &Backend| backend.state == BackendState::Active;
    words.extend(port.all_backends().filter(takes_new).map(|backend| backend.address.to_string()));
    for hint in &port.zones {
        let place = |index: &u32| port.backends[..*index as usize].iter().filter(|backend| takes_new(backend)).count();
        let indexes: Vec<String> = hint.backends.iter().map(|index| place(index).to_string()).collect();
        words.push(format!("{}={}", hint.zone, indexes.join(",")));
    }
    words.join(" ")
}

#[tokio::test]
async fn lists_of_every_shape_give_the_selection_of_kube_proxy() {
    let script = Script::new([&["services-shapes.json"], &[]], [&["slices-shapes.json"], &[]]);
    WatchedWorld::start(script).await.ends_with(22, &fixture("selected-shapes.txt")).await;
}

#[tokio::test]
async fn all_recorded_events_end_in_the_state_of_the_last_list() {
    let script =
        Script::new([&["services-first.json"], &["services-main.ndjson"]], [&["slices-first.json"], &["slices-main.ndjson"]]);
    WatchedWorld::start(script).await.ends_with(19, &fixture("selected-last.txt")).await;
}

#[tokio::test]
async fn expired_watches_and_pages_end_in_the_state_of_the_next_list() {
    let pages: &[&str] = &["services-page-1.json", "services-page-2.json", "expired-continue.json", "services-last.json"];
    let script = Script::new([pages, &["expired.ndjson"]], [&["slices-first.json", "slices-last.json"], &["expired.ndjson"]]);
    WatchedWorld::start(script).await.ends_with(19, &fixture("selected-last.txt")).await;
}

#[tokio::test]
async fn a_deleted_namespace_leaves_no_service() {
    let script = Script::new(
        [&["services-last.json"], &["services-namespace-gone.ndjson"]],
        [&["slices-last.json"], &["slices-namespace-gone.ndjson"]],
    );
    WatchedWorld::start(script).await.ends_with(0, "").await;
}
