//! The gRPC server for gateways (`sluice.v1.Config` and `sluice.v1.Fleet`): gateways dial it, report their generation,
//! and get the changes.
//!
//! Invariant: nothing is sent before the first complete state, so that a controller that has just started never looks
//! like an empty cluster. At most one message is queued for a slow gateway; the next one is the newest state. A gateway
//! can report only for itself: over TCP its name must match its certificate, and its group must be ours.
//! Deliberately not here: sockets and TLS (`listener`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use proto::limits::{LEADER_METADATA, MESSAGE_BYTES_MAX, RESERVED_MAX, SERVICES_MAX};
use proto::v1::config_server::{Config, ConfigServer};
use proto::v1::fleet_server::FleetServer;
use proto::v1::{self, Hello, WatchRequest, WatchResponse, watch_request};
use proto::{Arbitration, GatewayProfile, Generation, GroupKey, Membership, message_parts, v1::FILE_DESCRIPTOR_SET};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::server::NamedService;
use tonic::transport::Server;
use tonic::transport::server::Router;
use tonic::{Request, Response, Status, Streaming};

use crate::gateways::arbiter::{Arbiter, Party};
use crate::gateways::fleet_queries::{Fleet, FleetService};
use crate::gateways::listener::{Listeners, Peer};
use crate::gateways::publish::Published;
use crate::gateways::registry::{Connection, Gateways, Health, Report};
use crate::kubernetes::lease::{Leader, Leadership};

/// Time in which a new connection must send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of keep-alive pings. A dead connection is noticed within twice this time, 20 s (CONTROL section 8).
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Time after a stop at which open connections are dropped.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// Maximum length of a Kubernetes name, in characters.
const GATEWAY_NAME_MAX: usize = 253;

/// Dependencies of the service.
#[derive(Clone, Debug)]
pub struct ConfigService {
    /// The newest state; `None` before the first.
    pub states: watch::Receiver<Option<Arc<Published>>>,
    /// The registry of connected gateways.
    pub gateways: watch::Sender<Gateways>,
    /// Gateways that are registered to answer requests.
    pub fleet: Fleet,
    /// Decides about VIP groups that several gateways claim.
    pub arbiter: Arbiter,
    /// Whether this controller leads; it serves only then.
    pub leadership: watch::Receiver<Leadership>,
    /// The group of gateways that it serves.
    pub group: String,
    /// The key by which gateways of the group know each other when they replicate flows: a new one for each process.
    pub key: GroupKey,
    /// Ends all streams.
    pub shutdown: CancellationToken,
}

/// Why a gRPC server ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The descriptors for server reflection are invalid.
    #[error("server reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The transport failed.
    #[error("the gRPC server failed: {0}")]
    Transport(#[from] tonic::transport::Error),
}

/// Serves until `service.shutdown`.
///
/// # Errors
/// If the transport fails.
pub async fn serve(listeners: impl Into<Listeners>, service: ConfigService) -> Result<(), ServeError> {
    let shutdown = service.shutdown.clone();
    let fleet = FleetService { fleet: service.fleet.clone(), group: service.group.clone(), shutdown: shutdown.clone() };
    let config =
        ConfigServer::new(service).max_decoding_message_size(MESSAGE_BYTES_MAX).max_encoding_message_size(MESSAGE_BYTES_MAX);
    let server = Server::builder().http2_keepalive_interval(Some(KEEP_ALIVE)).http2_keepalive_timeout(Some(KEEP_ALIVE));
    let server = with_health_and_reflection::<ConfigServer<ConfigService>>(server)
        .await?
        .add_service(config)
        .add_service(FleetServer::new(fleet).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .serve_with_incoming_shutdown(listeners.into().incoming(), shutdown.clone().cancelled_owned());
    // Streams end at once. A peer that ignores this does not delay the shutdown.
    let grace_is_over = async {
        shutdown.cancelled().await;
        tokio::time::sleep(SHUTDOWN_GRACE).await;
    };
    tokio::select! {
        ended = server => Ok(ended?),
        () = grace_is_over => Ok(()),
    }
}

/// Adds the health service, which reports `S` as serving, and server reflection.
pub(crate) async fn with_health_and_reflection<S: NamedService>(mut server: Server) -> Result<Router, ServeError> {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<S>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    Ok(server.add_service(health).add_service(reflection))
}

#[tonic::async_trait]
impl Config for ConfigService {
    type WatchStream = ReceiverStream<Result<WatchResponse, Status>>;

    async fn watch(&self, request: Request<Streaming<WatchRequest>>) -> Result<Response<Self::WatchStream>, Status> {
        let leads_since = self.leadership.borrow().clone();
        if !matches!(leads_since, Leadership::Leading { .. }) {
            return Err(not_leading(&leads_since));
        }
        let peer = Peer::of(&request)?;
        // Capacity of one message: further changes while the gateway reads it are sent as one difference.
        let (messages, stream) = mpsc::channel(1);
        let (service, shutdown) = (self.clone(), self.shutdown.clone());
        tokio::spawn(async move {
            let ended = tokio::select! {
                // Checked first: a stream on a connection whose certificate has expired since is refused.
                biased;
                expired = peer.expired() => Err(expired),
                ended = service.converse((request.into_inner(), &peer), &messages, leads_since) => ended,
            };
            if let Err(status) = ended {
                if !shutdown.is_cancelled() {
                    tracing::warn!(%status, "gateway disconnected");
                }
                // The receiver may be gone.
                let _ = messages.send(Err(status)).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

impl ConfigService {
    /// Serves one gateway until either side disconnects or this controller's term of leadership ends.
    async fn converse(
        mut self,
        (mut inbound, peer): (Streaming<WatchRequest>, &Peer),
        messages: &mpsc::Sender<Result<WatchResponse, Status>>,
        leads_since: Leadership,
    ) -> Result<(), Status> {
        let hello = hello(&mut inbound).await?;
        check_identity(&hello, peer, &self.group)?;
        let replication = replication(&hello)?;
        let connection = Connection::open(&self.gateways, &hello.gateway, &hello.version, profile(&hello)?);
        let connection = connection.replicating(replication);
        let party = self.arbiter.admit(&hello.gateway, connection.number());
        tracing::info!(gateway = hello.gateway, version = hello.version, "gateway connected");
        let mut sent: Option<Generation> = None;
        let (mut gateways, mut rulings) = (self.gateways.subscribe(), self.arbiter.rulings());
        let mut sent_of_fleet = OfFleet::default();
        loop {
            let ruling = rulings.borrow_and_update().get(&hello.gateway).copied();
            let arbitration = ruling.map(|ruling| party.answer(ruling));
            let of_fleet = OfFleet { arbitration, ..self.of_fleet(&gateways.borrow_and_update(), &hello.gateway, replication) };
            let is_news = |newest: &Arc<Published>| sent.as_ref() != Some(&newest.state.generation) || sent_of_fleet != of_fleet;
            let has_news = self.states.borrow().as_ref().is_some_and(is_news);
            tokio::select! {
                () = self.shutdown.cancelled() => return Err(Status::unavailable("the controller stops; dial again")),
                now = left(&mut self.leadership, &leads_since) => return Err(not_leading(&now)),
                message = inbound.message() => match message? {
                    None => return Ok(()),
                    Some(message) => take((&connection, &party), message, sent.as_ref())?,
                },
                permit = messages.reserve(), if has_news => {
                    let Ok(permit) = permit else { return Ok(()) };
                    let Some(newest) = self.states.borrow_and_update().clone() else { continue };
                    let whole = next_message(&newest, &hello, sent.as_ref(), (&sent_of_fleet, &of_fleet));
                    let mut parts = if hello.parts { message_parts::split(whole, message_parts::PART_BYTES) } else { vec![whole] }.into_iter();
                    if let Some(first) = parts.next() {
                        permit.send(Ok(first));
                    }
                    tokio::select! {
                        now = left(&mut self.leadership, &leads_since) => return Err(not_leading(&now)),
                        is_taken = send(messages, parts) => if !is_taken { return Ok(()) },
                    }
                    sent_of_fleet = of_fleet;
                    sent = Some(newest.state.generation.clone());
                }
                // The other tasks notice the closed channel, because this task owns the sender.
                _ = gateways.changed(), if !has_news => {}
                _ = rulings.changed(), if !has_news => {}
                changed = self.states.changed(), if !has_news => {
                    changed.map_err(|_| Status::unavailable("the controller stops; dial again"))?;
                }
            }
        }
    }
}

/// What a gateway is told about itself in the fleet.
#[derive(Debug, Default, PartialEq, Eq)]
struct OfFleet {
    /// Whether it is drained.
    draining: bool,
    /// With whom it replicates flows, if it does.
    membership: Option<Membership>,
    /// What is decided about VIP groups that it claims and another one too.
    arbitration: Option<Arbitration>,
}

/// What a gateway is sent next.
fn next_message(
    newest: &Published,
    hello: &Hello,
    sent: Option<&Generation>,
    (before, now): (&OfFleet, &OfFleet),
) -> WatchResponse {
    if sent == Some(&newest.state.generation) && now.is_only_arbitration(before) {
        let arbitration = now.arbitration.map(v1::Arbitration::from);
        return WatchResponse { arbitration, arbitration_only: true, ..WatchResponse::default() };
    }
    // The log reaches back to the last message unless the gateway missed thousands of changes.
    let changes = sent.and_then(|have| newest.since(have, hello.node_sets));
    let first_or_full = || if sent.is_none() { newest.answer(hello) } else { newest.full(hello.node_sets) };
    now.with(changes.unwrap_or_else(first_or_full))
}

impl OfFleet {
    /// Whether nothing else differs.
    fn is_only_arbitration(&self, before: &Self) -> bool {
        self.draining == before.draining && self.membership == before.membership
    }

    fn with(&self, change: WatchResponse) -> WatchResponse {
        let membership = self.membership.as_ref().map(v1::Membership::from);
        WatchResponse { draining: self.draining, membership, arbitration: self.arbitration.map(v1::Arbitration::from), ..change }
    }
}

impl ConfigService {
    /// What a gateway is told, without an arbitration.
    fn of_fleet(&self, gateways: &Gateways, name: &str, replication: Option<SocketAddr>) -> OfFleet {
        let membership = replication.map(|_| Membership { key: self.key, others: gateways.members_beside(name) });
        OfFleet { draining: gateways.is_drained(name), membership, arbitration: None }
    }
}

/// Sends the remaining parts of a change; returns false if the receiver is gone.
async fn send(messages: &mpsc::Sender<Result<WatchResponse, Status>>, parts: impl Iterator<Item = WatchResponse>) -> bool {
    for part in parts {
        if messages.send(Ok(part)).await.is_err() {
            return false;
        }
    }
    true
}

/// Waits until this controller stops leading, or leads in another epoch. With manifests it never returns.
async fn left(leadership: &mut watch::Receiver<Leadership>, since: &Leadership) -> Leadership {
    let now = leadership.wait_for(|now| now != since).await.ok().map(|now| now.clone());
    match now {
        Some(now) => now,
        None => std::future::pending().await,
    }
}

/// The answer to a gateway that dialled a controller which does not lead: the address of the leader.
fn not_leading(leadership: &Leadership) -> Status {
    let Leadership::Following(Some(Leader { identity, address })) = leadership else {
        return Status::failed_precondition("this controller does not lead, and does not know the leader yet; dial again");
    };
    let Some(address) = address else {
        let why = "its Lease holds no address, or no recent renewal of it was seen";
        return Status::failed_precondition(format!("this controller does not lead, {identity} does ({why}); dial again"));
    };
    let mut status = Status::failed_precondition(format!("this controller does not lead, {identity} at {address} does"));
    if let Ok(value) = address.parse() {
        status.metadata_mut().insert(LEADER_METADATA, value);
    }
    status
}

/// Checks the first message.
async fn hello(inbound: &mut Streaming<WatchRequest>) -> Result<Hello, Status> {
    let first = tokio::time::timeout(HELLO_TIMEOUT, inbound.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("expected hello within 10 s of connecting"))??;
    let Some(WatchRequest { message: Some(watch_request::Message::Hello(hello)) }) = first else {
        return Err(Status::invalid_argument("expected hello as the first message"));
    };
    if hello.gateway.is_empty() || hello.gateway.len() > GATEWAY_NAME_MAX {
        let found = hello.gateway.len();
        return Err(Status::invalid_argument(format!("expected a gateway name of 1 to {GATEWAY_NAME_MAX} bytes, found {found}")));
    }
    if hello.hashes.len() > SERVICES_MAX {
        let found = hello.hashes.len();
        return Err(Status::invalid_argument(format!("expected at most {SERVICES_MAX} hashes, found {found}")));
    }
    let found = hello.reserved.len().max(hello.next_hops.len());
    if found > RESERVED_MAX {
        let message =
            format!("expected at most {RESERVED_MAX} addresses of the gateway itself, found {found}; give its ports fewer");
        return Err(Status::invalid_argument(message));
    }
    Ok(hello)
}

/// Whether the gateway belongs to our group and its name matches its certificate. Peers on the unix socket are trusted.
fn check_identity(hello: &Hello, peer: &Peer, group: &str) -> Result<(), Status> {
    if !(hello.group.is_empty() || hello.group == group) {
        return Err(Status::invalid_argument(format!(
            "gateway {} belongs to group {}, and this controller serves group {group}; correct `group`, the gateway's certificate, or \
             `controller.urls`",
            hello.gateway, hello.group
        )));
    }
    peer.may_speak_for(&hello.gateway, group)
}

/// What the gateway says about itself.
fn profile(hello: &Hello) -> Result<GatewayProfile, Status> {
    proto::convert::profile(hello).map_err(|error| Status::invalid_argument(error.to_string()))
}

/// Where the gateway replicates flows; `None`: it does not.
fn replication(hello: &Hello) -> Result<Option<SocketAddr>, Status> {
    let found = hello.replication.as_str();
    let refused = |_| Status::invalid_argument(format!("expected ADDRESS:PORT where flows are replicated, found `{found}`"));
    Some(found).filter(|text| !text.is_empty()).map(|text| text.parse().map_err(refused)).transpose()
}

/// Parses a report. Invalid names, such as those of a newer version, are skipped.
fn report(message: v1::Report) -> Report {
    let name = |text: &str| proto::convert::service_name(text).ok();
    let health = |one: &v1::ServiceHealth| {
        let refusal = one.refusal.as_ref().map(|refusal| Arc::new(proto::convert::read_reported_refusal(refusal)));
        Some((name(&one.service)?, Health { backends: one.backends, healthy: one.healthy, refusal }))
    };
    // Of more networks, and of invalid ones, none counts: as of a gateway that does not say.
    let links = message.links.map(|links| Some(links.prefixes).filter(|prefixes| prefixes.len() <= RESERVED_MAX));
    Report {
        ready: message.ready,
        health: message.services.iter().filter_map(health).collect(),
        removed: message.removed.iter().filter_map(|text| name(text)).collect(),
        flows: message.flows,
        fleet: message.fleet.as_ref().map(proto::convert::fleet_status),
        links: links.map(|prefixes| prefixes.and_then(|prefixes| proto::convert::networks(&prefixes).ok()).unwrap_or_default()),
    }
}

fn take((connection, party): (&Connection, &Party), message: WatchRequest, sent: Option<&Generation>) -> Result<(), Status> {
    match message.message {
        // An acknowledgement counts only for a generation of this epoch that was sent to this gateway.
        Some(watch_request::Message::Acknowledge(generation)) => {
            let generation = Generation::from(generation);
            if sent.is_some_and(|sent| sent.includes(&generation)) {
                connection.acknowledge(generation.counter);
            }
            Ok(())
        }
        Some(watch_request::Message::Report(message)) => {
            connection.report(report(message));
            Ok(())
        }
        Some(watch_request::Message::Claims(claims)) => {
            party.claims(claims.into());
            Ok(())
        }
        Some(watch_request::Message::Hello(_)) => Err(Status::invalid_argument("hello is sent once, at the start")),
        // A message of a newer version is ignored.
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use proto::v1::config_client::ConfigClient;
    use tonic::transport::{Channel, Endpoint};

    use super::*;
    use crate::gateways::publish::tests::{follow, services};

    const WAIT: Duration = Duration::from_secs(20);

    #[test]
    fn networks_that_cannot_be_taken_end_those_before() {
        let links = |prefixes| report(v1::Report { links: Some(v1::Links { prefixes }), ..v1::Report::default() }).links;
        let network = || v1::Prefix { address: vec![192, 0, 2, 0], length: 24 };
        assert_eq!(links(vec![network()]), Some(vec!["192.0.2.0/24".parse().unwrap()]));
        assert_eq!(links(vec![network(); RESERVED_MAX + 1]), Some(Vec::new()));
        assert_eq!(links(vec![v1::Prefix::default()]), Some(Vec::new()));
        assert_eq!(report(v1::Report::default()).links, None, "nothing has changed");
    }

    /// A server on a socket, with handles to its state.
    struct Lab {
        dir: tempfile::TempDir,
        states: watch::Sender<Option<Arc<Published>>>,
        gateways: watch::Receiver<Gateways>,
        shutdown: CancellationToken,
    }

    impl Lab {
        async fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let (states, seen) = watch::channel(None);
            let (gateways, gateways_seen) = watch::channel(Gateways::default());
            let shutdown = CancellationToken::new();
            let leadership = watch::channel(Leadership::Leading { epoch: "now".to_owned() }).1;
            let (group, fleet, key) = ("east".to_owned(), Fleet::default(), GroupKey::new([7; 32]));
            let arbiter = Arbiter::default();
            let service =
                ConfigService { states: seen, gateways, fleet, arbiter, leadership, group, key, shutdown: shutdown.clone() };
            let listener = crate::gateways::socket::listen(&dir.path().join("config.sock")).await.unwrap();
            tokio::spawn(serve(listener, service));
            Self { dir, states, gateways: gateways_seen, shutdown }
        }

        fn publish(&self, list: &[(&str, u64)]) {
            let next = match &*self.states.borrow() {
                None => Some(Published::first("now".to_owned(), services(list), Vec::new())),
                Some(last) => last.next(services(list), Vec::new()),
            };
            self.states.send_replace(next.map(Arc::new));
        }

        async fn dial(&self, hello: Hello) -> Gateway {
            Gateway::dial(&self.dir.path().join("config.sock"), hello).await
        }
    }

    /// A gateway that stores what it receives.
    struct Gateway {
        requests: mpsc::Sender<WatchRequest>,
        messages: Streaming<WatchResponse>,
        have: BTreeMap<String, u64>,
    }

    impl Gateway {
        async fn dial(socket: &Path, hello: Hello) -> Self {
            let endpoint = Endpoint::try_from(format!("unix:{}", socket.display())).unwrap();
            let mut client: ConfigClient<Channel> = ConfigClient::new(endpoint.connect().await.unwrap());
            let (requests, outbound) = mpsc::channel(8);
            let message = Some(watch_request::Message::Hello(hello));
            requests.send(WatchRequest { message }).await.unwrap();
            let messages = client.watch(ReceiverStream::new(outbound)).await.unwrap().into_inner();
            Self { requests, messages, have: BTreeMap::new() }
        }

        async fn next(&mut self) -> Result<WatchResponse, Status> {
            let message = tokio::time::timeout(WAIT, self.messages.message()).await.unwrap()?;
            let message = message.ok_or_else(|| Status::ok("the stream ended"))?;
            follow(&mut self.have, &message);
            Ok(message)
        }

        async fn claim(&self, claims: v1::GroupClaims) {
            let message = Some(watch_request::Message::Claims(claims));
            self.requests.send(WatchRequest { message }).await.unwrap();
        }

        async fn acknowledge(&self, epoch: &str, counter: u64) {
            let message = Some(watch_request::Message::Acknowledge(v1::Generation { epoch: epoch.to_owned(), counter }));
            self.requests.send(WatchRequest { message }).await.unwrap();
        }
    }

    fn hello(have: Option<(&str, u64)>) -> Hello {
        let have = have.map(|(epoch, counter)| v1::Generation { epoch: epoch.to_owned(), counter });
        Hello { gateway: "edge-1".to_owned(), version: "0.1.0".to_owned(), have, ..Hello::default() }
    }

    fn names(message: &WatchResponse) -> Vec<&str> {
        message.services.iter().map(|service| service.name.as_str()).collect()
    }

    #[tokio::test]
    async fn a_gateway_without_state_gets_the_full_state_and_then_the_changes() {
        let lab = Lab::new().await;
        lab.publish(&[("a", 1), ("b", 1)]);
        let mut gateway = lab.dial(hello(None)).await;
        let first = gateway.next().await.unwrap();
        assert!(first.full && names(&first) == ["a", "b"], "{first:?}");
        lab.publish(&[("a", 1), ("c", 1)]);
        let second = gateway.next().await.unwrap();
        assert!(!second.full);
        assert_eq!(second.removed, ["shop/b"]);
        assert_eq!(gateway.have.keys().collect::<Vec<_>>(), ["shop/a", "shop/c"]);
    }

    #[tokio::test]
    async fn gateways_that_replicate_flows_get_the_key_and_each_other() {
        let lab = Lab::new().await;
        lab.publish(&[("a", 1)]);
        let replicating = |name: &str, at: &str| Hello { gateway: name.to_owned(), replication: at.to_owned(), ..hello(None) };
        let mut one = lab.dial(replicating("edge-1", "192.0.2.2:9437")).await;
        let read = |message: WatchResponse| proto::convert::membership(message.membership.unwrap()).unwrap();
        assert_eq!(read(one.next().await.unwrap()), Membership { key: GroupKey::new([7; 32]), others: Vec::new() });
        let mut two = lab.dial(replicating("edge-2", "192.0.2.3:9437")).await;
        assert_eq!(read(two.next().await.unwrap()).others[0].gateway, "edge-1");
        let message = one.next().await.unwrap();
        assert!(message.services.is_empty() && message.removed.is_empty(), "{message:?}");
        assert_eq!(read(message).others[0].replication.to_string(), "192.0.2.3:9437");
        let mut other = lab.dial(Hello { gateway: "edge-3".to_owned(), ..hello(None) }).await;
        assert_eq!(other.next().await.unwrap().membership, None, "who does not replicate gets no key");
        let mut wrong = lab.dial(replicating("edge-4", "somewhere")).await;
        assert_eq!(wrong.next().await.unwrap_err().code(), tonic::Code::InvalidArgument);
    }

    #[tokio::test]
    async fn each_contested_claim_is_answered_to_those_that_contest_alone() {
        let lab = Lab::new().await;
        lab.publish(&[("a", 1)]);
        let named = |name: &str| Hello { gateway: name.to_owned(), ..hello(None) };
        let (mut one, mut two) = (lab.dial(named("edge-1")).await, lab.dial(named("edge-2")).await);
        let mut other = lab.dial(named("edge-3")).await;
        for gateway in [&mut one, &mut two, &mut other] {
            assert!(!gateway.next().await.unwrap().arbitration_only);
        }
        let claims =
            |groups: u64, number: u64| v1::GroupClaims { groups, hears_link: true, number, ..v1::GroupClaims::default() };
        two.claim(claims(1, 1)).await;
        for number in 1..=3 {
            one.claim(claims(1, number)).await;
            loop {
                let message = one.next().await.unwrap();
                let arbitration = message.arbitration.unwrap();
                assert!(message.arbitration_only && message.pools.is_empty() && arbitration.contested == 1);
                if arbitration.answers == number {
                    break;
                }
            }
        }
        one.claim(claims(0, 4)).await;
        while one.next().await.unwrap().arbitration.is_some() {}
        lab.publish(&[("a", 2)]);
        let message = other.next().await.unwrap();
        assert_eq!((names(&message), message.arbitration), (vec!["a"], None), "it was told nothing meanwhile");
    }

    #[tokio::test]
    async fn nothing_is_sent_before_the_first_state() {
        let lab = Lab::new().await;
        let mut gateway = lab.dial(hello(Some(("before", 7)))).await;
        let mut connected = lab.gateways.clone();
        tokio::time::timeout(WAIT, connected.wait_for(|all| all.iter().count() == 1)).await.unwrap().unwrap();
        lab.publish(&[("a", 1)]);
        assert_eq!(names(&gateway.next().await.unwrap()), ["a"]);
    }

    #[tokio::test]
    async fn a_gateway_of_this_epoch_gets_only_the_changes_since() {
        let lab = Lab::new().await;
        lab.publish(&[("a", 1), ("b", 1)]);
        let first = Arc::clone(lab.states.borrow().as_ref().unwrap());
        // Unchanged Services keep their Arc, as in a plan.
        let mut next = first.state.services.clone();
        next.extend(services(&[("c", 1)]));
        lab.states.send_replace(first.next(next, Vec::new()).map(Arc::new));
        let mut gateway = lab.dial(hello(Some(("now", 1)))).await;
        let message = gateway.next().await.unwrap();
        assert!(!message.full && names(&message) == ["c"], "{message:?}");
    }

    #[tokio::test]
    async fn a_gateway_of_another_epoch_gets_the_differences_to_its_hashes() {
        let lab = Lab::new().await;
        lab.publish(&[("a", 2), ("b", 1)]);
        let had = services(&[("a", 1), ("b", 1), ("gone", 1)]);
        let hashes = had.iter().map(|(name, service)| (name.to_string(), v1::Service::from(&**service).hash)).collect();
        let mut gateway = lab.dial(Hello { hashes, ..hello(Some(("before", 9))) }).await;
        let message = gateway.next().await.unwrap();
        assert!(!message.full && names(&message) == ["a"], "{message:?}");
        assert_eq!(message.removed, ["shop/gone"]);
    }

    #[tokio::test]
    async fn a_slow_gateway_gets_only_the_newest_state() {
        let lab = Lab::new().await;
        let mut gateway = lab.dial(hello(None)).await;
        let many: Vec<String> = (0..200).map(|n| format!("service-{n:04}-{}", "x".repeat(200))).collect();
        let last = 300;
        for version in 1..=last {
            let list: Vec<(&str, u64)> = many.iter().map(|name| (name.as_str(), version)).collect();
            lab.publish(&list);
            tokio::task::yield_now().await;
        }
        let mut messages = 0;
        while gateway.have.values().any(|version| *version != last) || gateway.have.is_empty() {
            gateway.next().await.unwrap();
            messages += 1;
        }
        assert!(messages < last / 3, "{messages} messages for {last} states");
    }

    #[tokio::test]
    async fn an_acknowledgement_counts_only_for_generations_sent_in_this_epoch() {
        let lab = Lab::new().await;
        lab.publish(&[("a", 1)]);
        let mut gateway = lab.dial(hello(None)).await;
        gateway.next().await.unwrap();
        gateway.acknowledge("before", 1).await;
        gateway.acknowledge("now", 99).await;
        gateway.acknowledge("now", 1).await;
        let mut gateways = lab.gateways.clone();
        let all = tokio::time::timeout(WAIT, gateways.wait_for(|all| all.any_reached(1))).await.unwrap().unwrap().clone();
        assert!(all.all_reached(1) && !all.any_reached(2));
        drop(gateway);
        tokio::time::timeout(WAIT, gateways.wait_for(|all| all.iter().count() == 0)).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_missing_or_repeated_hello_is_an_error() {
        let lab = Lab::new().await;
        lab.publish(&[("a", 1)]);
        let mut nameless = lab.dial(Hello::default()).await;
        assert_eq!(nameless.next().await.unwrap_err().code(), tonic::Code::InvalidArgument);
        let mut twice = lab.dial(hello(None)).await;
        twice.next().await.unwrap();
        twice.requests.send(WatchRequest { message: Some(watch_request::Message::Hello(hello(None))) }).await.unwrap();
        assert_eq!(twice.next().await.unwrap_err().code(), tonic::Code::InvalidArgument);
    }

    #[tokio::test]
    async fn a_gateway_with_too_many_addresses_is_refused() {
        let lab = Lab::new().await;
        lab.publish(&[("a", 1)]);
        let address = |number: usize| (0xfd00_u128 << 112 | number as u128).to_be_bytes().to_vec();
        let claims = async |count: usize| {
            let hello = Hello { reserved: (0..count).map(address).collect(), ..hello(None) };
            lab.dial(hello).await.next().await
        };
        claims(RESERVED_MAX).await.unwrap();
        let status = claims(RESERVED_MAX + 1).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().contains("at most 4096 addresses") && status.message().contains("found 4097"), "{status}");
    }

    #[tokio::test]
    async fn health_and_reflection_answer() {
        let lab = Lab::new().await;
        let endpoint = Endpoint::try_from(format!("unix:{}", lab.dir.path().join("config.sock").display())).unwrap();
        let channel = endpoint.connect().await.unwrap();
        let request = tonic_health::pb::HealthCheckRequest { service: "sluice.v1.Config".to_owned() };
        let health = tonic_health::pb::health_client::HealthClient::new(channel.clone()).check(request).await.unwrap();
        assert_eq!(health.into_inner().status, i32::from(tonic_health::pb::health_check_response::ServingStatus::Serving));

        use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
        use tonic_reflection::pb::v1::{ServerReflectionRequest, server_reflection_request::MessageRequest};
        let message_request = Some(MessageRequest::ListServices(String::new()));
        let request = ServerReflectionRequest { host: String::new(), message_request };
        let answers = ServerReflectionClient::new(channel).server_reflection_info(tokio_stream::once(request)).await.unwrap();
        let answer = answers.into_inner().message().await.unwrap().unwrap();
        assert!(format!("{answer:?}").contains("sluice.v1.Config"), "{answer:?}");
    }

    #[tokio::test]
    async fn a_stop_ends_the_streams() {
        let lab = Lab::new().await;
        lab.publish(&[("a", 1)]);
        let mut gateway = lab.dial(hello(None)).await;
        gateway.next().await.unwrap();
        lab.shutdown.cancel();
        assert_eq!(gateway.next().await.unwrap_err().code(), tonic::Code::Unavailable);
    }
}
