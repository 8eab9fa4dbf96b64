//! What workers tell while somebody watches: starts and ends of flows and drops for `sluicectl watch`, and samples of
//! packets for the heaviest flows and clients.
//!
//! Invariant: workers have a watch only while somebody wants something of it. At most [`CLIENTS_MAX`] clients watch; one
//! that is too slow loses events, which are counted. Deliberately not here: what workers write (`dataplane::forward`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use control::admin::time_text;
use dataplane::Snapshot;
use dataplane::flow::{FlowView, FlowWatch, Watched, WatchedEvent};
use proto::limits::{HEAVIEST, HEAVIEST_MAX};
use proto::v1;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::flows::{is_of, protocol, service_of};
use super::heaviest::HeaviestSummary;
use crate::worker_threads;
use crate::worker_threads::inquiries::{Inquiries, NoAnswer};

/// Time between two looks for events: a worker's queue has room for three times as many as it writes in it at most.
const LOOK: Duration = Duration::from_millis(20);
/// Clients that watch at one time: a dozen operators, some of whom do.
const CLIENTS_MAX: usize = 8;
/// Batches of events that wait for a client: 1.3 s.
const BATCHES: usize = 64;
/// Maximum time between two replies, which tell the client how many events are lost.
const PROGRESS: Duration = Duration::from_secs(1);
/// Samples are summed up for so long.
const INTERVAL: Duration = Duration::from_secs(1);
/// Samples are taken for so long after the last request for the heaviest: three refreshes of a page.
const HEAVIEST_KEPT: Duration = Duration::from_secs(10);
/// How long a request for the heaviest waits for the first interval; a controller waits 3 s for the answer.
const FIRST_TIMEOUT: Duration = Duration::from_millis(2_500);

/// What a stream of replies carries.
pub(super) type WatchReply = Result<v1::WatchFlowsReply, Status>;

type Batch = Arc<Vec<v1::WatchEvent>>;

/// A client of the stream.
#[derive(Debug)]
struct Client {
    batches: mpsc::Sender<Batch>,
    /// Events that it was too slow for.
    lost: Arc<AtomicU64>,
}

/// The sum of an interval.
#[derive(Clone, Debug)]
struct Sampled {
    summary: Arc<HeaviestSummary>,
    seconds: f64,
}

/// Who wants what.
#[derive(Debug, Default)]
struct Wanted {
    clients: Vec<Client>,
    /// When the heaviest were asked for last.
    heaviest: Option<Instant>,
}

/// The watches of a gateway.
#[derive(Debug)]
pub struct Watches {
    inquiries: Arc<Inquiries>,
    gateway: String,
    wanted: Mutex<Wanted>,
    /// The workers' watches, while they have any.
    armed: tokio::sync::Mutex<Option<Vec<Arc<FlowWatch>>>>,
    sampled: watch::Sender<Option<Sampled>>,
    shutdown: CancellationToken,
}

impl Watches {
    /// Watches of the workers that these inquiries reach.
    #[must_use]
    pub fn new(gateway: &str, inquiries: Arc<Inquiries>) -> Self {
        let (armed, sampled) = (tokio::sync::Mutex::default(), watch::channel(None).0);
        Self {
            inquiries,
            gateway: gateway.to_owned(),
            wanted: Mutex::default(),
            armed,
            sampled,
            shutdown: CancellationToken::new(),
        }
    }

    /// Ends all streams, and lets none begin.
    pub fn end(&self) {
        self.shutdown.cancel();
    }

    fn with_wanted<T>(&self, with: impl FnOnce(&mut Wanted) -> T) -> T {
        with(&mut self.wanted.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Streams events to a client.
    ///
    /// # Errors
    /// A verdict is not known, [`CLIENTS_MAX`] clients watch already, or a worker does not answer.
    pub(super) async fn events(self: &Arc<Self>, request: v1::WatchFlowsRequest) -> Result<mpsc::Receiver<WatchReply>, Status> {
        let known = ["start", "end", "drop"];
        if let Some(found) = request.verdicts.iter().find(|verdict| !known.contains(&verdict.as_str())) {
            return Err(Status::invalid_argument(format!("verdicts: found {found:?}, expected start, end or drop")));
        }
        if self.shutdown.is_cancelled() {
            return Err(Status::unavailable("the gateway ends"));
        }
        let ((batches, mut receiver), lost) = (mpsc::channel(BATCHES), Arc::new(AtomicU64::new(0)));
        let client = Client { batches, lost: Arc::clone(&lost) };
        let has_place = self.with_wanted(|wanted| {
            wanted.clients.retain(|client| !client.batches.is_closed());
            let has_place = wanted.clients.len() < CLIENTS_MAX;
            wanted.clients.extend(has_place.then_some(client));
            has_place
        });
        if !has_place {
            return Err(Status::resource_exhausted(format!("{CLIENTS_MAX} clients watch already; end one of them")));
        }
        let workers = self.arm().await?;
        let before: u64 = workers.iter().map(|watch| watch.lost().get()).sum();
        let (replies, stream) = mpsc::channel(1);
        let shutdown = self.shutdown.clone();
        tokio::spawn(async move {
            let lost_now = || workers.iter().map(|watch| watch.lost().get()).sum::<u64>() - before + lost.load(Ordering::Relaxed);
            let passes = async {
                let mut last_reply: Option<Instant> = None;
                loop {
                    let batch = match last_reply {
                        Some(_) => timeout(PROGRESS, receiver.recv()).await.ok(),
                        None => None,
                    };
                    let batch = match batch {
                        Some(None) => return,
                        Some(Some(batch)) => batch,
                        None => Batch::default(),
                    };
                    let all_events = batch.iter().filter(|event| is_wanted(&request, event));
                    let events: Vec<_> = all_events.cloned().collect();
                    // Under load there is always a batch, and the client must hear of lost events all the same.
                    let is_due = last_reply.is_none_or(|last| last.elapsed() >= PROGRESS);
                    if events.is_empty() && !batch.is_empty() && !is_due {
                        continue;
                    }
                    last_reply = Some(Instant::now());
                    if replies.send(Ok(v1::WatchFlowsReply { events, lost: lost_now() })).await.is_err() {
                        return;
                    }
                }
            };
            tokio::select! {
                () = passes => {}
                () = replies.closed() => {}
                () = shutdown.cancelled() => {
                    let _ = replies.try_send(Err(Status::unavailable("the gateway ends")));
                }
            }
        });
        Ok(stream)
    }

    /// The heaviest flows and clients of the last interval. The first request of a while waits for it.
    ///
    /// # Errors
    /// `limit` is out of range, or workers do not answer.
    pub(super) async fn heaviest(
        self: &Arc<Self>,
        request: &v1::ListHeaviestRequest,
    ) -> Result<v1::ListHeaviestResponse, Status> {
        let limit = match request.limit as usize {
            0 => HEAVIEST,
            limit if limit <= HEAVIEST_MAX => limit,
            limit => return Err(Status::invalid_argument(format!("limit: found {limit}, expected 1 to {HEAVIEST_MAX}"))),
        };
        self.with_wanted(|wanted| wanted.heaviest = Some(Instant::now()));
        let mut sampled = self.sampled.subscribe();
        self.arm().await?;
        let first = timeout(FIRST_TIMEOUT, sampled.wait_for(Option::is_some)).await;
        let Ok(Ok(Some(Sampled { summary, seconds }))) = first.map(|first| first.map(|sampled| sampled.clone())) else {
            return Err(Status::unavailable("no packets have been sampled yet; try again"));
        };
        Ok(summary.rows(request, limit, seconds, &self.inquiries.snapshot()))
    }

    /// The heaviest flows and clients of the last interval; none before there is one. Workers sample from now on, until
    /// nobody asks any more.
    pub(super) fn newest_heaviest(self: &Arc<Self>, request: &v1::ListHeaviestRequest, limit: usize) -> v1::ListHeaviestResponse {
        self.with_wanted(|wanted| wanted.heaviest = Some(Instant::now()));
        let sampled = self.sampled.borrow().clone();
        let Some(Sampled { summary, seconds }) = sampled else {
            if let Ok(runtime) = Handle::try_current() {
                let watches = Arc::clone(self);
                // A worker that does not answer is seen by others.
                runtime.spawn(async move { watches.arm().await.map(drop) });
            }
            return v1::ListHeaviestResponse::default();
        };
        summary.rows(request, limit, seconds, &self.inquiries.snapshot())
    }

    /// Gives the workers a watch, if they have none.
    async fn arm(self: &Arc<Self>) -> Result<Vec<Arc<FlowWatch>>, Status> {
        let mut armed = self.armed.lock().await;
        let watches = match &*armed {
            Some(watches) => watches.clone(),
            None => {
                let watches: Vec<_> = (0..self.inquiries.workers()).map(|_| Arc::new(FlowWatch::default())).collect();
                let given = self.exchange(watches.iter().cloned().map(Some).collect()).await;
                if let Err(error) = given {
                    self.exchange(watches.iter().map(|_| None).collect()).await.ok();
                    return Err(Status::unavailable(error.to_string()));
                }
                *armed = Some(watches.clone());
                tokio::spawn(Arc::clone(self).run(watches.clone()));
                watches
            }
        };
        self.want(&watches);
        Ok(watches)
    }

    async fn exchange(&self, next: Vec<Option<Arc<FlowWatch>>>) -> Result<(), NoAnswer> {
        let inquiries = Arc::clone(&self.inquiries);
        let exchanged = tokio::task::spawn_blocking(move || inquiries.exchange_watches(next)).await;
        exchanged.unwrap_or(Err(NoAnswer { worker: 0 }))
    }

    /// Tells the workers what is wanted now. Returns whether anything is.
    fn want(&self, watches: &[Arc<FlowWatch>]) -> bool {
        let (events, packets) = self.with_wanted(|wanted| {
            wanted.clients.retain(|client| !client.batches.is_closed());
            (!wanted.clients.is_empty(), wanted.heaviest.is_some_and(|asked| asked.elapsed() < HEAVIEST_KEPT))
        });
        for watch in watches {
            watch.want_events(events);
            watch.want_packets(packets);
        }
        if !packets {
            self.sampled.send_replace(None);
        }
        events || packets
    }

    /// Passes on what workers write, until nobody wants anything or the gateway ends.
    async fn run(self: Arc<Self>, watches: Vec<Arc<FlowWatch>>) {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut summary, mut begun) = (HeaviestSummary::new(), Instant::now());
        loop {
            tokio::select! {
                _ = looks.tick() => {}
                // The workers end, too.
                () = self.shutdown.cancelled() => return,
            }
            self.pass_on(&watches, &mut summary);
            if begun.elapsed() >= INTERVAL {
                let seconds = begun.elapsed().as_secs_f64();
                let summary = Arc::new(std::mem::replace(&mut summary, HeaviestSummary::new()));
                self.sampled.send_replace(Some(Sampled { summary, seconds }));
                begun = Instant::now();
            }
            if !self.want(&watches) {
                let mut armed = self.armed.lock().await;
                if self.want(&watches) {
                    continue;
                }
                *armed = None;
                if let Err(error) = self.exchange(watches.iter().map(|_| None).collect()).await {
                    // It is told nothing, so it writes nothing; the next watch takes its place.
                    tracing::warn!(%error, "a worker keeps the memory of a watch");
                }
                return;
            }
        }
    }

    /// Passes on what workers have written: events to clients, packets to the summary.
    fn pass_on(&self, watches: &[Arc<FlowWatch>], summary: &mut HeaviestSummary) {
        let snapshot = self.inquiries.snapshot();
        let offset_ns = clock_offset_ns();
        let mut events = Vec::new();
        for (worker, watch) in (0..).zip(watches) {
            while let Some(Watched { time_ns, event }) = watch.take() {
                match event {
                    WatchedEvent::Packet(packet, flow) => summary.add(packet, flow),
                    event => {
                        let named = named(&event, &snapshot);
                        let time = time_text(time_ns.saturating_add(offset_ns));
                        events.push(v1::WatchEvent { time, worker, gateway: self.gateway.clone(), ..named });
                    }
                }
            }
        }
        if events.is_empty() {
            return;
        }
        events.sort_by(|one, other| one.time.cmp(&other.time));
        let (count, batch) = (events.len() as u64, Arc::new(events));
        self.with_wanted(|wanted| {
            for client in &wanted.clients {
                if client.batches.try_send(Arc::clone(&batch)).is_err() {
                    client.lost.fetch_add(count, Ordering::Relaxed);
                }
            }
        });
    }
}

/// What to add to the workers' time for the time since 1970.
fn clock_offset_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).saturating_sub(worker_threads::now_ns())
}

fn is_wanted(request: &v1::WatchFlowsRequest, event: &v1::WatchEvent) -> bool {
    let wanted = |name: &'_ String| (!name.is_empty()).then(|| name.clone());
    let (service, namespace) = (wanted(&request.service), wanted(&request.namespace));
    let is_all = service.is_none() && namespace.is_none();
    (request.verdicts.is_empty() || request.verdicts.contains(&event.verdict))
        && (is_all || is_of(&event.service, service.as_deref(), namespace.as_deref()))
}

/// An event with names, without time and worker.
fn named(event: &WatchedEvent, snapshot: &Snapshot) -> v1::WatchEvent {
    let of_flow = |flow: &FlowView, verdict: &str, reason: &str| v1::WatchEvent {
        verdict: verdict.to_owned(),
        reason: reason.to_owned(),
        protocol: protocol(flow.protocol),
        source: flow.client.to_string(),
        destination: flow.frontend.to_string(),
        service: service_of(snapshot, flow.frontend, flow.protocol),
        backend: snapshot.backend(flow.backend).map_or(flow.backend_address, |backend| backend.address).to_string(),
        ..v1::WatchEvent::default()
    };
    match event {
        WatchedEvent::Start(flow) | WatchedEvent::Packet(_, flow) => of_flow(flow, "start", ""),
        WatchedEvent::End(why, flow) => of_flow(flow, "end", why.as_str()),
        WatchedEvent::Drop(reason, ends) => {
            let (verdict, reason) = ("drop".to_owned(), reason.as_str().to_owned());
            let Some(ends) = ends else { return v1::WatchEvent { verdict, reason, ..v1::WatchEvent::default() } };
            v1::WatchEvent {
                verdict,
                reason,
                protocol: protocol(ends.protocol),
                source: ends.source.to_string(),
                destination: ends.destination.to_string(),
                service: service_of(snapshot, ends.destination, ends.protocol),
                ..v1::WatchEvent::default()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watches() -> Arc<Watches> {
        Arc::new(Watches::new("edge-1", Arc::new(crate::worker_threads::inquiries::tests::without_workers())))
    }

    #[tokio::test(start_paused = true)]
    async fn a_bounded_number_of_clients_watches_and_places_are_free_again() {
        let watches = watches();
        let mut clients = Vec::new();
        for _ in 0..CLIENTS_MAX {
            let mut client = watches.events(v1::WatchFlowsRequest::default()).await.unwrap();
            assert_eq!(client.recv().await.unwrap().unwrap(), v1::WatchFlowsReply::default(), "the first reply comes at once");
            clients.push(client);
        }
        let refused = watches.events(v1::WatchFlowsRequest::default()).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        clients.clear();
        let freed = async {
            while watches.armed.lock().await.is_some() {
                tokio::time::sleep(LOOK).await;
            }
        };
        timeout(Duration::from_secs(60), freed).await.expect("workers are told that nobody watches");
        let mut last = watches.events(v1::WatchFlowsRequest::default()).await.unwrap();
        watches.end();
        let ended = async { while let Some(Ok(_)) = last.recv().await {} };
        timeout(Duration::from_secs(60), ended).await.unwrap();
        assert!(watches.events(v1::WatchFlowsRequest::default()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_hears_of_lost_events_while_only_others_come() {
        let watches = watches();
        let request = v1::WatchFlowsRequest { service: "quiet".to_owned(), ..Default::default() };
        let mut client = watches.events(request).await.unwrap();
        client.recv().await.unwrap().unwrap();
        let (batches, lost) =
            watches.with_wanted(|wanted| (wanted.clients[0].batches.clone(), Arc::clone(&wanted.clients[0].lost)));
        lost.store(7, Ordering::Relaxed);
        let flood = tokio::spawn(async move {
            let other = v1::WatchEvent { service: "default/loud".to_owned(), ..Default::default() };
            while batches.send(Arc::new(vec![other.clone()])).await.is_ok() {
                tokio::time::sleep(LOOK).await;
            }
        });
        let reply = timeout(10 * PROGRESS, client.recv()).await.expect("a reply while others flood").unwrap().unwrap();
        assert_eq!(reply, v1::WatchFlowsReply { events: Vec::new(), lost: 7 });
        flood.abort();
    }

    #[tokio::test]
    async fn wrong_requests_say_what_is_expected() {
        let request = v1::WatchFlowsRequest { verdicts: vec!["forward".to_owned()], ..Default::default() };
        let refused = watches().events(request).await.unwrap_err();
        assert!(refused.message().contains("expected start, end or drop"), "{refused}");
        let request = v1::ListHeaviestRequest { limit: 101, ..Default::default() };
        let refused = watches().heaviest(&request).await.unwrap_err();
        assert!(refused.message().contains("expected 1 to 100"), "{refused}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_heaviest_wait_for_the_first_interval_and_samples_end_when_nobody_asks() {
        let watches = watches();
        let answer = watches.heaviest(&v1::ListHeaviestRequest::default()).await.unwrap();
        assert_eq!(answer, v1::ListHeaviestResponse::default());
        assert!(watches.armed.lock().await.is_some());
        tokio::time::sleep(2 * HEAVIEST_KEPT).await;
        assert!(watches.armed.lock().await.is_none() && watches.sampled.borrow().is_none());
    }
}
