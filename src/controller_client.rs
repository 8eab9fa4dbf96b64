//! The client of the controller: one stream of `sluice.v1.Config/Watch`, which is opened again whenever it ends.
//!
//! Invariant: only a message of a controller changes the state; without one, the last state stays in use. A generation
//! is acknowledged on the stream that brought it, after every worker has applied it. A pending acknowledgement is
//! replaced by a newer one, never queued. A controller that does not lead names the leader, which is dialled next;
//! after that the configured ones in turn. Deliberately not here: the meaning of messages (`received`), sockets and TLS
//! (`dial`).

mod claims;
mod dial;
mod fleet_queries;
pub(crate) mod received;
mod report;
mod stream_end;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use control::config::settings::CertificateFiles;
use objects::scalar::url::ServerUrl;
use proto::message_parts::Reassembly;
use proto::v1::config_client::ConfigClient;
use proto::v1::watch_request::Message;
use proto::{Arbitration, GatewayProfile, GatewayState, Membership, limits, v1};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use crate::agent::supervisor::Failure;
use crate::agent::watch::send_if_changed;
use dial::dial;
use received::Received;
use stream_end::{Backoffs, StreamError};

pub use claims::Contender;
pub use fleet_queries::Responder;
pub use report::Facts;

/// How long the address of a leader that could not be reached is not dialled again. It may be that of a Pod in a network that
/// this machine does not reach, and each attempt takes seconds; another URL leads to the leader by chance.
const UNREACHED_LEADER_FOR: Duration = Duration::from_secs(60);

/// The controllers, and the identity of the gateway.
#[derive(Clone, Debug)]
pub struct ClientSettings {
    /// Controllers, tried in turn.
    pub urls: Vec<ServerUrl>,
    /// Certificates for TCP.
    pub certificates: Option<CertificateFiles>,
    /// The group of the embedded controller; for others the certificate has it.
    pub group: Option<String>,
    /// This gateway's name.
    pub gateway: String,
    /// This program's version.
    pub version: String,
    /// What the gateway says about itself. When it changes, a new stream tells it.
    pub profile: watch::Receiver<GatewayProfile>,
    /// Where this gateway replicates flows; `None`: it does not.
    pub replication: Option<SocketAddr>,
    /// Whether the controller has to name partners, or the key: they are not configured.
    pub needs_membership: bool,
}

/// The channels of the client.
#[derive(Clone)]
pub struct ClientChannels {
    /// Output, and input at the start: the current state.
    pub state: watch::Sender<Option<GatewayState>>,
    /// Output: whether a controller is connected and has sent its state.
    pub connected: watch::Sender<bool>,
    /// Output: whether the gateway is drained.
    pub draining: watch::Sender<bool>,
    /// Output: with whom it replicates flows, by the last controller that said so.
    pub membership: watch::Sender<Option<Membership>>,
    /// This gateway's part where several claim a VIP group; `None`: there is no election.
    pub contender: Option<Contender>,
    /// Answers requests of the controller.
    pub answering: Responder,
    /// Input: acknowledgements and reports.
    pub facts: Facts,
}

impl ClientChannels {
    /// Passes on what the controller decides.
    fn arbitrate(&self, arbitration: Option<v1::Arbitration>) {
        if let Some(contender) = &self.contender {
            contender.decided(arbitration.map(Arbitration::from).unwrap_or_default());
        }
    }
}

/// What outlives a stream.
struct Progress {
    received: Received,
    backoffs: Backoffs,
    /// Whether the last controller named no partners although they are not configured.
    lacks_membership: bool,
}

/// The client of the controller. Cloned for each start.
#[derive(Clone)]
pub struct ControllerClient {
    /// The controllers, and the identity of the gateway.
    pub settings: ClientSettings,
    /// Its inputs and outputs.
    pub channels: ClientChannels,
}

impl ControllerClient {
    /// Follows the controllers and never returns.
    ///
    /// # Errors
    /// If no controller is configured.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { settings, channels } = self;
        if settings.urls.is_empty() {
            return Err("no controller is configured: expected at least one of `controller.urls`".into());
        }
        let mut progress = Progress {
            received: Received::resuming(channels.state.borrow().as_ref()),
            backoffs: Backoffs::new(),
            lacks_membership: false,
        };
        let mut logged = String::new();
        let mut configured = settings.urls.iter().cycle();
        let mut leader: Option<ServerUrl> = None;
        let mut unreached: Option<(ServerUrl, Instant)> = None;
        let mut of_all_streams = JoinSet::new();
        if let Some(contender) = channels.contender.clone() {
            of_all_streams.spawn(claims::lapse(contender));
        }
        loop {
            // A named leader that does not lead cannot name another one, so that two that name each other cause no loop.
            let is_led_there = leader.is_some();
            let Some(url) = leader.take().or_else(|| configured.next().cloned()) else { return Ok(()) };
            let Err(error) = follow(&url, &settings, &channels, &mut progress).await;
            if is_led_there && matches!(error, StreamError::Connect { .. }) {
                unreached = Some((url, Instant::now()));
            }
            let is_unreached = |url: &ServerUrl| {
                unreached.as_ref().is_some_and(|(unreached, at)| unreached == url && at.elapsed() < UNREACHED_LEADER_FOR)
            };
            leader = error.leader().filter(|url| !is_led_there && settings.certificates.is_some() && !is_unreached(url));
            // An attempt that fails is no news: the age of the state counts changes of this.
            if channels.connected.send_if_modified(std::mem::take) {
                logged.clear();
            }
            let text = error.to_string();
            if text != logged {
                tracing::warn!(error = text, "not connected to a controller; the last state stays in use");
                logged = text;
            }
            if leader.is_none() {
                sleep(progress.backoffs.after(&error)).await;
            }
        }
    }
}

/// Follows one controller until the stream ends, which is always an error.
async fn follow(
    url: &ServerUrl,
    settings: &ClientSettings,
    channels: &ClientChannels,
    progress: &mut Progress,
) -> Result<Infallible, StreamError> {
    let refused = |status| StreamError::Refused { url: url.clone(), status: Box::new(status) };
    let dialled = dial(url, &settings.gateway, settings.certificates.as_ref()).await;
    let (channel, group) = dialled.map_err(|error| StreamError::Connect { url: url.clone(), error })?;
    let group = group.or_else(|| settings.group.clone()).unwrap_or_default();
    let (acknowledge, acknowledged) = watch::channel(None);
    let mut changes = settings.profile.clone();
    let profile = changes.borrow_and_update().clone();
    let replication = settings.replication.map_or_else(String::new, |address| address.to_string());
    let hello = v1::Hello { group, parts: true, replication, ..progress.received.hello(&settings.gateway, &settings.version) };
    let hello = proto::convert::with_profile(hello, &profile);
    let hello = Message::Hello(hello);
    let (messages, outgoing) = mpsc::channel(1);
    // Both end with the stream that reads their messages.
    if let Some(contender) = channels.contender.clone() {
        tokio::spawn(claims::run(contender, messages.clone()));
    }
    tokio::spawn(report::run(channels.facts.clone(), acknowledged, messages));
    let requests =
        tokio_stream::once(hello).chain(ReceiverStream::new(outgoing)).map(|message| v1::WatchRequest { message: Some(message) });
    let mut answers = JoinSet::new();
    let mut client = ConfigClient::new(channel.clone())
        .max_decoding_message_size(limits::MESSAGE_BYTES_MAX)
        .max_encoding_message_size(limits::MESSAGE_BYTES_MAX);
    let mut stream = client.watch(requests).await.map_err(refused)?.into_inner();
    answers.spawn(fleet_queries::run(channel, settings.gateway.clone(), channels.answering.clone()));
    let mut applied = channels.facts.applied.clone();
    let (mut epoch, mut reassembly, mut is_arbitrated) = (None, Reassembly::default(), false);
    loop {
        tokio::select! {
            message = stream.message() => {
                let message = message.map_err(refused)?.ok_or_else(|| StreamError::Closed(url.clone()))?;
                let Some(mut whole) = reassembly.add(message)? else { continue };
                let arbitration = whole.arbitration.take();
                is_arbitrated |= arbitration.is_some();
                // A controller that has not yet heard the claims of this stream says nothing, and what was decided goes on.
                if is_arbitrated {
                    channels.arbitrate(arbitration);
                }
                if whole.arbitration_only {
                    continue;
                }
                // A controller of an earlier version says nothing about it.
                let membership = whole.membership.take().and_then(proto::convert::membership);
                let lacks_membership = settings.needs_membership && membership.is_none();
                warn_once_without_membership(&mut progress.lacks_membership, lacks_membership, url);
                if let Some(membership) = membership {
                    send_if_changed(&channels.membership, Some(membership));
                }
                // Applied before the state, so that a drained gateway announces nothing in between.
                send_if_changed(&channels.draining, whole.draining);
                let state = progress.received.apply(whole)?;
                tracing::debug!(generation = %state.state.generation, "received");
                progress.backoffs = Backoffs::new();
                epoch = Some(state.state.generation.epoch.clone());
                if !channels.connected.send_replace(true) {
                    tracing::info!(%url, generation = %state.state.generation, "following the controller");
                }
                channels.state.send_replace(Some(state));
                applied.mark_changed();
            }
            Ok(()) = changes.changed() => return Err(StreamError::Readdressed),
            Ok(()) = applied.changed() => {
                let now = applied.borrow_and_update().clone().filter(|g| epoch.as_ref() == Some(&g.epoch));
                if now.is_some() {
                    send_if_changed(&acknowledge, now);
                }
            }
        }
    }
}

/// Logs once that a controller names no partners, and again after one has named some. `was_lacking`: whether the last
/// controller named none. Returns whether it was logged.
fn warn_once_without_membership(was_lacking: &mut bool, is_lacking: bool, url: &ServerUrl) -> bool {
    let is_new = is_lacking && !*was_lacking;
    if is_new {
        tracing::warn!(
            %url,
            "the controller names no partners and no key, because its version is older: this gateway shares no flows. Upgrade \
             the controller, or set `fleet.partners` and `fleet.key`"
        );
    }
    *was_lacking = is_lacking;
    is_new
}

#[cfg(test)]
mod redirected;

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use control::gateways::arbiter::Arbiter;
    use control::gateways::fleet_queries::{Fleet, SilentError};
    use control::gateways::publish::Published;
    use control::gateways::registry::Gateways;
    use control::gateways::server::{ConfigService, ServeError, serve};
    use control::kubernetes::lease::Leadership;
    use dataplane::snapshot::ServiceView;
    use proto::convert::{difference, difference_by_hashes, full};
    use proto::v1::answer::Reply;
    use proto::v1::config_server::{Config, ConfigServer};
    use proto::v1::question::Query;
    use proto::{FleetStatus, Generation, Origin, Reason, Refusal, Service, State};
    use tokio::net::UnixListener;
    use tokio::time::timeout;
    use tokio_stream::wrappers::UnixListenerStream;
    use tokio_util::sync::CancellationToken;
    use tonic::{Request, Response, Status, Streaming};

    use super::*;
    use crate::admin::api::tests::web as web_view;
    use crate::agent::served::Served;
    use crate::controller_client::received::tests::{service, state};

    const LONG: Duration = Duration::from_secs(120);

    /// A stream as the controller sees it.
    struct Seen {
        requests: Streaming<v1::WatchRequest>,
        responses: mpsc::Sender<Result<v1::WatchResponse, Status>>,
    }

    impl Seen {
        /// The next message, without claims.
        async fn next(&mut self) -> Message {
            loop {
                let request = timeout(LONG, self.requests.message()).await.unwrap().unwrap();
                let message = request.unwrap().message.unwrap();
                if !matches!(message, Message::Claims(_)) {
                    return message;
                }
            }
        }

        async fn hello(&mut self) -> v1::Hello {
            match self.next().await {
                Message::Hello(hello) => hello,
                _ => panic!("hello comes first"),
            }
        }

        async fn send(&self, response: v1::WatchResponse) {
            self.responses.send(Ok(response)).await.unwrap();
        }
    }

    /// A controller whose messages the test determines.
    struct Scripted(mpsc::Sender<Seen>);

    #[tonic::async_trait]
    impl Config for Scripted {
        type WatchStream = ReceiverStream<Result<v1::WatchResponse, Status>>;

        async fn watch(&self, request: Request<Streaming<v1::WatchRequest>>) -> Result<Response<Self::WatchStream>, Status> {
            let (responses, stream) = mpsc::channel(8);
            self.0.send(Seen { requests: request.into_inner(), responses }).await.map_err(|_| Status::internal("over"))?;
            Ok(Response::new(ReceiverStream::new(stream)))
        }
    }

    struct Streams(mpsc::Receiver<Seen>);

    impl Streams {
        async fn next(&mut self) -> Seen {
            timeout(LONG, self.0.recv()).await.unwrap().unwrap()
        }
    }

    struct Gateway {
        dir: tempfile::TempDir,
        known: watch::Receiver<Option<GatewayState>>,
        connected: watch::Receiver<bool>,
        applied: watch::Sender<Option<Generation>>,
        served: watch::Sender<Served>,
        draining: watch::Receiver<bool>,
        membership: watch::Receiver<Option<Membership>>,
        arbitration: watch::Receiver<Arbitration>,
        _fleet: watch::Sender<FleetStatus>,
        client: tokio::task::JoinHandle<Result<(), Failure>>,
    }

    impl Gateway {
        /// A client that dials `config.sock` in its own directory, where no process listens yet.
        fn dialling(before: Option<GatewayState>) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let (known, known_out) = watch::channel(before);
            let (connected, connected_out) = watch::channel(false);
            let (applied, applied_out) = watch::channel(None);
            let settings = ClientSettings {
                urls: vec![ServerUrl::Unix(dir.path().join("config.sock"))],
                certificates: None,
                group: Some("east".to_owned()),
                gateway: "edge-1".to_owned(),
                version: "0.1.0".to_owned(),
                profile: watch::Sender::new(GatewayProfile::new(["192.0.2.2".parse().unwrap()], [])).subscribe(),
                replication: Some("192.0.2.2:9437".parse().unwrap()),
                needs_membership: true,
            };
            let (served, served_out) = watch::channel(Served::default());
            let fleet = watch::Sender::default();
            let facts = Facts { served: served_out, applied: applied_out, fleet: fleet.subscribe(), workers: Vec::new() };
            let (draining, draining_out) = watch::channel(false);
            let answering: Responder = Arc::new(|query: &Query| match query {
                Query::Services(_) => Reply::Services(v1::ListServicesResponse::default()),
                Query::Flows(_) => Reply::Flows(v1::ListFlowsResponse::default()),
                _ => Reply::Refusal("not today".to_owned()),
            });
            let (membership, membership_out) = watch::channel(None);
            let decided = watch::Sender::default();
            let (arbitration, claimed) = (decided.subscribe(), watch::Sender::default().subscribe());
            let contender = Some(Contender::new(claimed, "192.0.2.0/24".to_owned(), || 0, decided));
            let channels = ClientChannels { state: known, connected, draining, membership, contender, answering, facts };
            let client = tokio::spawn(ControllerClient { settings, channels }.run());
            let (known, connected, draining, membership) = (known_out, connected_out, draining_out, membership_out);
            Self { dir, known, connected, applied, served, draining, membership, arbitration, _fleet: fleet, client }
        }

        /// A client with a controller whose messages the test determines.
        fn scripted(before: Option<GatewayState>) -> (Self, Streams) {
            let gateway = Self::dialling(before);
            let (sender, streams) = mpsc::channel(8);
            let listener = UnixListener::bind(gateway.dir.path().join("config.sock")).unwrap();
            let server = tonic::transport::Server::builder().add_service(ConfigServer::new(Scripted(sender)));
            tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
            (gateway, Streams(streams))
        }

        async fn knows(&mut self, state: &State) -> GatewayState {
            let arrived =
                self.known.wait_for(|known| known.as_ref().is_some_and(|k| *k.state == *state && k.origin == Origin::Controller));
            timeout(LONG, arrived).await.unwrap().unwrap().clone().unwrap()
        }
    }

    impl Drop for Gateway {
        fn drop(&mut self) {
            self.client.abort();
        }
    }

    #[tokio::test]
    async fn full_state_then_changes_and_an_acknowledgement_only_once_reached() {
        let (mut gateway, mut streams) = Gateway::scripted(None);
        let mut stream = streams.next().await;
        let hello = stream.hello().await;
        assert_eq!((hello.gateway.as_str(), hello.have), ("edge-1", None));
        assert_eq!(hello.reserved, [[192, 0, 2, 2]]);
        let [one, two] = [state("e", 1, &[service("a", &["10.0.0.1:80"])]), state("e", 2, &[service("a", &["10.0.0.2:80"])])];
        stream.send(full(&one)).await;
        gateway.knows(&one).await;
        stream.send(difference(&one, &two)).await;
        gateway.knows(&two).await;
        assert!(*gateway.connected.borrow());
        gateway.applied.send_replace(Some(Generation { epoch: "older".to_owned(), counter: 9 }));
        gateway.applied.send_replace(Some(two.generation.clone()));
        assert_eq!(stream.next().await, Message::Acknowledge((&two.generation).into()));
    }

    #[test]
    fn a_controller_that_names_no_partners_is_logged_once() {
        let (mut lacks, url) = (false, ServerUrl::Unix("/run/config.sock".into()));
        let logged = [true, true, false, true].map(|is_lacking| warn_once_without_membership(&mut lacks, is_lacking, &url));
        assert_eq!(logged, [true, false, false, true], "again after one that named some");
    }

    #[test]
    fn who_found_no_controller_dials_again_within_half_a_second_and_who_was_refused_less_often() {
        let url = || ServerUrl::Unix("/run/config.sock".into());
        let refused = |code| StreamError::Refused { url: url(), status: Box::new(Status::new(code, "")) };
        let mut backoffs = Backoffs::new();
        let away = [
            StreamError::Closed(url()),
            StreamError::Connect { url: url(), error: super::dial::DialError::Connect("connection refused".to_owned()) },
            refused(tonic::Code::Unavailable),
            refused(tonic::Code::FailedPrecondition),
        ];
        for error in away.iter().cycle().take(40) {
            assert!(backoffs.after(error) <= Duration::from_millis(500), "{error}");
        }
        let mut longest = Duration::ZERO;
        for error in [refused(tonic::Code::PermissionDenied), refused(tonic::Code::InvalidArgument)].iter().cycle().take(10) {
            longest = longest.max(backoffs.after(error));
        }
        assert!((2500..=5000).contains(&longest.as_millis()), "{longest:?}");
        let first = Backoffs::new().after(&StreamError::Closed(url()));
        assert!((50..=100).contains(&first.as_millis()), "{first:?}");
    }

    #[tokio::test]
    async fn a_lost_stream_is_opened_again_with_what_is_known_and_nothing_is_lost_meanwhile() {
        let (mut gateway, mut streams) = Gateway::scripted(None);
        let mut stream = streams.next().await;
        stream.hello().await;
        let [one, two] = [state("e", 1, &[service("a", &["10.0.0.1:80"])]), state("f", 1, &[service("b", &["10.0.0.2:80"])])];
        stream.send(full(&one)).await;
        gateway.knows(&one).await;
        drop(stream);
        timeout(LONG, gateway.connected.wait_for(|c| !c)).await.unwrap().unwrap();
        assert_eq!(gateway.known.borrow().as_ref().unwrap().state.generation, one.generation);
        let mut again = streams.next().await;
        let hello = again.hello().await;
        assert_eq!(hello.have, Some((&one.generation).into()));
        again.send(difference_by_hashes(&hello.hashes, &two)).await;
        gateway.knows(&two).await;
    }

    #[tokio::test]
    async fn an_answer_to_claims_changes_nothing_but_what_is_decided() {
        let (mut gateway, mut streams) = Gateway::scripted(None);
        let stream = streams.next().await;
        let one = state("e", 1, &[service("a", &["10.0.0.1:80"])]);
        stream.send(v1::WatchResponse { draining: true, ..full(&one) }).await;
        gateway.knows(&one).await;
        gateway.known.mark_unchanged();
        for arbitration in [Some(v1::Arbitration { contested: 1, yields: 1, answers: 7, ..v1::Arbitration::default() }), None] {
            stream.send(v1::WatchResponse { arbitration, arbitration_only: true, ..v1::WatchResponse::default() }).await;
            let is_told = |decided: &Arbitration| *decided == arbitration.map(Arbitration::from).unwrap_or_default();
            timeout(LONG, gateway.arbitration.wait_for(is_told)).await.unwrap().unwrap();
        }
        assert!(!gateway.known.has_changed().unwrap() && *gateway.draining.borrow());
    }

    #[tokio::test]
    async fn a_state_from_disk_becomes_the_controllers_by_an_empty_change() {
        let held = Arc::new(state("e", 5, &[service("a", &["10.0.0.1:80"])]));
        let (mut gateway, mut streams) = Gateway::scripted(Some(GatewayState { state: Arc::clone(&held), origin: Origin::Disk }));
        let mut stream = streams.next().await;
        let hello = stream.hello().await;
        assert_eq!(hello.have, Some((&held.generation).into()));
        stream.send(difference(&held, &held)).await;
        assert!(Arc::ptr_eq(&gateway.knows(&held).await.state, &held));
        gateway.applied.send_replace(Some(held.generation.clone()));
        assert_eq!(stream.next().await, Message::Acknowledge((&held.generation).into()));
    }

    #[tokio::test]
    async fn a_message_that_leads_nowhere_ends_the_stream_and_the_client_asks_again() {
        let (gateway, mut streams) = Gateway::scripted(None);
        let stream = streams.next().await;
        stream.send(difference(&State::default(), &state("e", 1, &[]))).await;
        assert_eq!(streams.next().await.hello().await.have, None);
        assert_eq!(*gateway.known.borrow(), None);
    }

    /// The controller's own server, with the states that the test publishes.
    struct Controller {
        fleet: Fleet,
        drains: watch::Sender<Gateways>,
        states: watch::Sender<Option<Arc<Published>>>,
        gateways: watch::Receiver<Gateways>,
        shutdown: CancellationToken,
        server: tokio::task::JoinHandle<Result<(), ServeError>>,
    }

    impl Controller {
        async fn start(path: &Path, first: Published) -> Self {
            let (states, states_in) = watch::channel(Some(Arc::new(first)));
            let (gateways_out, gateways) = watch::channel(Gateways::default());
            let shutdown = CancellationToken::new();
            let leadership = watch::channel(Leadership::Leading { epoch: "e".to_owned() }).1;
            let (fleet, drains) = (Fleet::default(), gateways_out.clone());
            let service = ConfigService {
                states: states_in,
                gateways: gateways_out,
                fleet: fleet.clone(),
                arbiter: Arbiter::default(),
                leadership,
                group: "east".to_owned(),
                key: proto::GroupKey::new([7; 32]),
                shutdown: shutdown.clone(),
            };
            let listener = control::gateways::socket::listen(path).await.unwrap();
            Self { fleet, drains, states, gateways, shutdown, server: tokio::spawn(serve(listener, service)) }
        }

        fn publish(&self, services: &[Arc<Service>]) -> State {
            let now = self.states.borrow().clone().unwrap();
            let next = now.next(state("", 0, services).services, Vec::new()).unwrap();
            let state = State::clone(&next.state);
            self.states.send_replace(Some(Arc::new(next)));
            state
        }

        async fn stop(self) {
            self.shutdown.cancel();
            drop(self.states);
            timeout(LONG, self.server).await.unwrap().unwrap().unwrap();
        }
    }

    fn first(epoch: &str, services: &[Arc<Service>]) -> Published {
        Published::first(epoch.to_owned(), state("", 0, services).services, Vec::new())
    }

    #[tokio::test]
    async fn the_controllers_server_is_followed_over_changes_and_its_restart() {
        let mut gateway = Gateway::dialling(None);
        let path = gateway.dir.path().join("config.sock");
        let [kept, web] = [service("kept", &["10.0.0.1:80"]), service("web", &["10.0.0.2:80"])];
        let mut controller = Controller::start(&path, first("e", &[Arc::clone(&kept), Arc::clone(&web)])).await;
        gateway.knows(&state("e", 1, &[Arc::clone(&kept), web])).await;
        let changed = controller.publish(&[Arc::clone(&kept), service("web", &["10.0.0.3:80"])]);
        let before = gateway.knows(&changed).await;
        gateway.applied.send_replace(Some(changed.generation.clone()));
        let acknowledged = |gateways: &Gateways| gateways.any_reached(changed.generation.counter);
        timeout(LONG, controller.gateways.wait_for(acknowledged)).await.unwrap().unwrap();
        gateway.served.send_replace(Served {
            ready: true,
            services: dataplane::snapshot::Views::unit(Arc::clone(&web_view().name), Arc::new(web_view())),
            ..Served::default()
        });
        let is_reported = |all: &Gateways| all.iter().any(|one| one.ready && one.health.values().any(|h| h.healthy == 1));
        timeout(LONG, controller.gateways.wait_for(is_reported)).await.unwrap().unwrap();
        let refusal = Some(Refusal { reason: Reason::Refused, message: "no SNAT address".to_owned() });
        let refused = ServiceView { refusal, ..web_view() };
        let services = dataplane::snapshot::Views::unit(Arc::clone(&refused.name), Arc::new(refused.clone()));
        gateway.served.send_replace(Served { ready: true, services, ..Served::default() });
        let is_refused = |all: &Gateways| {
            let found = all.refusal(&refused.name, changed.generation.counter);
            found.is_some_and(|(by, why)| by == ["edge-1"].into() && Some(why) == refused.refusal.as_ref())
        };
        timeout(LONG, controller.gateways.wait_for(is_refused)).await.unwrap().unwrap();
        controller.stop().await;
        let again = Controller::start(&path, first("f", &[Arc::clone(&kept)])).await;
        let after = gateway.knows(&state("f", 1, &[Arc::clone(&kept)])).await;
        assert!(Arc::ptr_eq(&before.state.services[&kept.name], &after.state.services[&kept.name]));
        again.stop().await;
    }

    /// Sends requests until the gateway is registered.
    async fn answered(controller: &Controller, query: Query) -> Result<Reply, SilentError> {
        let names = || vec!["edge-1".to_owned()];
        let answer = async {
            loop {
                match controller.fleet.ask(names(), &query).await.remove(0).1 {
                    Err(SilentError::NoOffer) => tokio::task::yield_now().await,
                    answer => return answer,
                }
            }
        };
        timeout(LONG, answer).await.unwrap()
    }

    #[tokio::test]
    async fn the_controller_drains_a_gateway_and_asks_it_what_operators_want_to_know() {
        let mut gateway = Gateway::dialling(None);
        let path = gateway.dir.path().join("config.sock");
        let controller = Controller::start(&path, first("e", &[])).await;
        gateway.knows(&state("e", 1, &[])).await;
        let alone = Membership { key: proto::GroupKey::new([7; 32]), others: Vec::new() };
        assert_eq!(*gateway.membership.borrow(), Some(alone), "the key arrives with the first state");
        for is_drained in [true, false, true] {
            let names = if is_drained { ["edge-1".to_owned()].into() } else { ["edge-9".to_owned()].into() };
            Gateways::drain(&controller.drains, names);
            timeout(LONG, gateway.draining.wait_for(|draining| *draining == is_drained)).await.unwrap().unwrap();
        }
        let services = answered(&controller, Query::Services(v1::ListServicesRequest::default())).await;
        assert_eq!(services, Ok(Reply::Services(v1::ListServicesResponse::default())));
        let flows = answered(&controller, Query::Flows(v1::ListFlowsRequest::default())).await;
        assert_eq!(flows, Ok(Reply::Flows(v1::ListFlowsResponse::default())));
        let refused = answered(&controller, Query::Drops(v1::ListDropsRequest {})).await;
        assert_eq!(refused, Err(SilentError::Refused("not today".to_owned())));
        let nobody = controller.fleet.ask(vec!["edge-9".to_owned()], &Query::Drops(v1::ListDropsRequest {})).await;
        assert_eq!(nobody, [("edge-9".to_owned(), Err(SilentError::NoOffer))]);
        controller.stop().await;
        let again = Controller::start(&path, first("f", &[])).await;
        gateway.knows(&state("f", 1, &[])).await;
        assert!(!*gateway.draining.borrow(), "the new controller says so with its first message");
        again.stop().await;
    }
}
