//! Writes notes as Events (events.k8s.io/v1) of the objects that they are about.
//!
//! Invariant: one note is one Event object. A repetition within [`REPEATED_AFTER`] is not written, unless it is a change
//! that happened again; others are counted in the `series` of the same object, because Events expire after an hour.
//! Warnings are written before normal Events, round robin over namespaces, and a namespace whose Events the server rejects
//! delays no other. No Event is written about an object that is being deleted. Recording never blocks; Events that do not
//! fit into the queue are dropped, normal ones first, and remain in the log.
//! Deliberately not here: which notes exist.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{ObjectMeta, Patch};
use proto::limits::cut_bytes;
use proto::{ServiceName, fnv1a};
use serde_json::json;
use tokio::sync::Notify;
use tracing::{debug, warn};

use super::backoff::Backoff;
use super::fair_queue::FairQueue;
use crate::kubernetes::api_error::{ApiError, Retry};
use crate::kubernetes::client::{Cluster, patch_params, post_params};
use objects::note::{Cause, Note, Subject};

/// Interval of repetitions: an Event expires after an hour unless it is written again; half of that tolerates an
/// outage.
pub const REPEATED_AFTER: Duration = Duration::from_secs(1_800);
/// Age from which a known note no longer holds: one that does is repeated before.
const STALE_AFTER: Duration = Duration::from_secs(2 * REPEATED_AFTER.as_secs());
/// Size of the queue: seven minutes at 10 Events a second, 6 MB at 1.5 kB each.
const WAITING_MAX: usize = 4_096;
/// Number of queued normal Events (ten seconds' worth) from which the newest Event about an object replaces earlier
/// ones.
const MERGED_FROM: usize = 100;
/// Maximum number of known notes about one object, the newest ones: a Service has at most 32 remarks at a time.
const REPORTED_OF_OBJECT_MAX: usize = 64;
/// Maximum number of known notes about all objects, of about 150 bytes each: 10 MB. Notes end with their objects, so that
/// only notes on more existing objects than this can reach it.
const REPORTED_MAX: usize = 65_536;
/// Minimum time between two writes: 10 a second bounds the load on the API server.
const WRITE_PERIOD: Duration = Duration::from_millis(100);
/// Maximum number of concurrent requests, each for another namespace: a slow admission webhook of one delays no other.
const IN_FLIGHT_MAX: usize = 4;
/// Maximum length of a message, in bytes, that the API server accepts.
const NOTE_BYTES_MAX: usize = 1_000;
/// Maximum length of an instance's name, in bytes, that the API server accepts.
const INSTANCE_BYTES_MAX: usize = 128;
/// Maximum number of attempts for one Event, after which it is dropped.
const ATTEMPTS_MAX: u32 = 8;
/// Reporting controller.
const REPORTING_CONTROLLER: &str = "sluice.dev/controller";
/// Namespace of Events about cluster-scoped objects.
const NO_NAMESPACE: &str = "default";

/// Queued notes and written ones.
#[derive(Debug)]
pub struct EventWriter {
    instance: String,
    state: Mutex<State>,
    added: Notify,
}

#[derive(Debug, Default)]
struct State {
    warnings: FairQueue<u64, Waiting>,
    ordinary: FairQueue<u64, Waiting>,
    /// Known notes by object, which are forgotten with it.
    reported: HashMap<Subject, BTreeMap<u64, Reported>>,
    /// Number of known notes.
    reported_count: usize,
    /// Whether Events of an earlier run or replica were found, so that the next new note probably has one, too.
    expects_existing: bool,
    /// Namespaces that are being deleted and accept no new objects.
    ending: BTreeSet<String>,
    is_loss_logged: bool,
}

#[derive(Debug)]
struct Reported {
    last: Instant,
    count: i32,
}

/// One Event to be written, for the `count`th time.
#[derive(Clone, Debug)]
struct Waiting {
    key: u64,
    note: Note,
    uid: Option<String>,
    time: Timestamp,
    count: i32,
    attempts: u32,
}

/// Result of writing an Event.
#[derive(Debug)]
enum Answered {
    /// It is written, or the server will never accept it.
    Done,
    /// Its namespace is being deleted, or is deleted.
    Ending,
    /// It may be retried.
    Later(ApiError),
}

impl Answered {
    /// The result as metrics name it.
    const fn name(&self) -> &'static str {
        match self {
            Self::Done => "written",
            Self::Ending => "gone",
            Self::Later(_) => "failed",
        }
    }
}

impl Waiting {
    fn namespace(&self) -> &str {
        namespace(&self.note.subject).unwrap_or(NO_NAMESPACE)
    }

    fn is_ordinary(&self) -> bool {
        self.note.remark.cause.is_ordinary()
    }

    /// Key for replacement: of two normal notes with the same object and cause the newer suffices; every warning is
    /// kept.
    fn queue_key(&self) -> u64 {
        if self.is_ordinary() { ordinary_key(&self.note.subject, self.uid.as_deref(), self.note.remark.cause) } else { self.key }
    }
}

impl State {
    /// Enqueues it; returns false if it is dropped.
    fn put(&mut self, waiting: Waiting) -> bool {
        let namespace = waiting.namespace().to_owned();
        if self.warnings.len() + self.ordinary.len() >= WAITING_MAX {
            let lost = match self.ordinary.shed() {
                None if waiting.is_ordinary() => return false,
                None => self.warnings.shed(),
                ordinary => ordinary,
            };
            // The note may be recorded again later.
            if let Some(lost) = lost {
                self.forget_note(&lost);
            }
        }
        if !waiting.is_ordinary() {
            self.warnings.put(&namespace, waiting.queue_key(), waiting);
            return true;
        }
        if self.ordinary.len() >= MERGED_FROM {
            for cause in Cause::ORDINARY {
                self.ordinary.remove(&namespace, &ordinary_key(&waiting.note.subject, waiting.uid.as_deref(), cause));
            }
        }
        self.ordinary.put(&namespace, waiting.queue_key(), waiting);
        true
    }

    /// Drops queued Events about objects that are not `kept`.
    fn clear(&mut self, namespace: &str, is_kept: impl Fn(&Waiting) -> bool) {
        for queue in [&mut self.warnings, &mut self.ordinary] {
            for dropped in queue.clear(namespace, &is_kept) {
                forget_note(&mut self.reported, &mut self.reported_count, &dropped);
            }
        }
    }

    fn forget_note(&mut self, waiting: &Waiting) {
        forget_note(&mut self.reported, &mut self.reported_count, waiting);
    }

    fn forget_object(&mut self, subject: &Subject) {
        self.reported_count -= self.reported.remove(subject).map_or(0, |known| known.len());
    }

    /// Records that a note is written; the oldest one about its object is forgotten if there are too many.
    fn remember(&mut self, subject: &Subject, key: u64, reported: Reported) {
        if self.reported_count >= REPORTED_MAX {
            self.forget_old(reported.last);
        }
        let known = self.reported.entry(subject.clone()).or_default();
        self.reported_count += usize::from(known.insert(key, reported).is_none());
        if known.len() > REPORTED_OF_OBJECT_MAX
            && let Some(oldest) = known.iter().min_by_key(|(_, reported)| reported.last).map(|(key, _)| *key)
        {
            known.remove(&oldest);
            self.reported_count -= 1;
        }
    }

    /// Forgets notes that do not hold any more, and all if there are still too many: their Events are found again.
    fn forget_old(&mut self, now: Instant) {
        self.reported.retain(|_, known| {
            known.retain(|_, reported| now.duration_since(reported.last) < STALE_AFTER);
            !known.is_empty()
        });
        self.reported_count = self.reported.values().map(BTreeMap::len).sum();
        if self.reported_count > REPORTED_MAX / 2 {
            self.reported.clear();
            (self.reported_count, self.expects_existing) = (0, true);
        }
    }
}

/// Forgets a known note, and its object if it was the last one.
fn forget_note(reported: &mut HashMap<Subject, BTreeMap<u64, Reported>>, count: &mut usize, waiting: &Waiting) {
    let Some(known) = reported.get_mut(&waiting.note.subject) else { return };
    *count -= usize::from(known.remove(&waiting.key).is_some());
    if known.is_empty() {
        reported.remove(&waiting.note.subject);
    }
}

impl EventWriter {
    /// A writer whose Events name `instance`, the machine or pod, as their source.
    #[must_use]
    pub fn new(instance: &str) -> Self {
        Self { instance: cut_bytes(instance, INSTANCE_BYTES_MAX).to_owned(), state: Mutex::default(), added: Notify::new() }
    }

    /// Enqueues a note, unless it was written recently or its namespace is being deleted.
    pub fn record(&self, note: &Note, uid: Option<&str>) {
        self.record_at(note, uid, Instant::now());
    }

    /// Enqueues a note about a change, also if an equal one was written recently, unless its namespace is being deleted.
    pub fn record_change(&self, note: &Note, uid: Option<&str>) {
        self.enqueue(note, uid, Instant::now(), Duration::ZERO);
    }

    fn record_at(&self, note: &Note, uid: Option<&str>, now: Instant) {
        self.enqueue(note, uid, now, REPEATED_AFTER);
    }

    /// Enqueues a note, unless it was written within `repeated_after`.
    fn enqueue(&self, note: &Note, uid: Option<&str>, now: Instant, repeated_after: Duration) {
        let key = key(note, uid);
        let mut state = self.state();
        let known = state.reported.get(&note.subject).and_then(|known| known.get(&key));
        let is_recent = known.is_some_and(|reported| now.duration_since(reported.last) < repeated_after);
        if is_recent || namespace(&note.subject).is_some_and(|namespace| state.ending.contains(namespace)) {
            return;
        }
        let count = known.map_or(1, |reported| reported.count.saturating_add(1));
        let (note, uid) = (note.clone(), uid.map(str::to_owned));
        let is_full = state.warnings.len() + state.ordinary.len() >= WAITING_MAX;
        let subject = note.subject.clone();
        if state.put(Waiting { key, note, uid, time: Timestamp::now(), count, attempts: 0 }) {
            state.remember(&subject, key, Reported { last: now, count });
        }
        if is_full && !std::mem::replace(&mut state.is_loss_logged, true) {
            warn!("more than {WAITING_MAX} Events are queued; some are dropped, normal ones first; the log has them");
        }
        drop(state);
        self.added.notify_one();
    }

    /// Drops queued Events about these objects, which are deleted or being deleted, and what is remembered of them.
    pub fn forget(&self, deleted: &BTreeSet<Subject>) {
        let namespaces: BTreeSet<&str> = deleted.iter().map(|subject| namespace(subject).unwrap_or(NO_NAMESPACE)).collect();
        let mut state = self.state();
        for namespace in namespaces {
            state.clear(namespace, |waiting| !deleted.contains(&waiting.note.subject));
        }
        for subject in deleted {
            state.forget_object(subject);
        }
    }

    /// Drops queued Events in these namespaces, which are being deleted.
    pub fn end(&self, namespaces: &BTreeSet<String>) {
        let mut state = self.state();
        if state.ending != *namespaces {
            state.ending.clone_from(namespaces);
            for namespace in namespaces {
                state.clear(namespace, |waiting| matches!(waiting.note.subject, Subject::Namespace(_)));
            }
        }
    }

    /// Number of queued Events, without those in progress.
    #[must_use]
    pub fn waiting(&self) -> usize {
        let state = self.state();
        state.warnings.len() + state.ordinary.len()
    }

    /// Writes Events while it is polled.
    pub async fn run(&self, cluster: &Cluster) {
        let mut of_server = Retry::new("create and patch events.events.k8s.io", &cluster.server);
        let mut of_some = Retry::new("create and patch events.events.k8s.io of some namespaces", &cluster.server);
        let (mut backoff, mut busy) = (Backoff::<String>::default(), HashSet::new());
        let mut in_flight = FuturesUnordered::new();
        let mut next_at = Instant::now();
        loop {
            let now = Instant::now();
            let may_send = in_flight.len() < IN_FLIGHT_MAX && next_at <= now;
            let is_open = |namespace: &str| !backoff.holds(namespace, now) && !busy.contains(namespace);
            if let Some(waiting) = may_send.then(|| self.next(is_open)).flatten() {
                next_at = now + WRITE_PERIOD;
                busy.insert(waiting.namespace().to_owned());
                in_flight.push(async move {
                    let answered = self.write(cluster, &waiting).await;
                    (waiting, answered)
                });
                continue;
            }
            let wake_at = backoff.first_over(now).into_iter().chain([next_at].into_iter().filter(|at| *at > now)).min();
            let (waiting, answered) = tokio::select! {
                Some(done) = in_flight.next() => done,
                () = self.added.notified() => continue,
                () = tokio::time::sleep_until(wake_at.unwrap_or(now).into()), if wake_at.is_some() => continue,
            };
            let (now, namespace) = (Instant::now(), waiting.namespace().to_owned());
            busy.remove(&namespace);
            cluster.activity.event_writes.get_or_create(&[("result", answered.name())]).inc();
            match answered {
                Answered::Later(outage) if outage.concerns_all() => {
                    next_at = next_at.max(now + of_server.failed(outage, now));
                    self.put_back(waiting);
                }
                Answered::Later(outage) => {
                    of_server.succeeded();
                    of_some.failed(outage, now);
                    backoff.failed(&namespace, now);
                    self.put_back(waiting);
                }
                answered => {
                    if matches!(answered, Answered::Ending) {
                        self.state().clear(&namespace, |_| false);
                    }
                    of_server.succeeded();
                    backoff.succeeded(&namespace);
                    if backoff.is_empty() {
                        of_some.succeeded();
                    }
                }
            }
        }
    }

    fn next(&self, is_open: impl Fn(&str) -> bool) -> Option<Waiting> {
        let mut state = self.state();
        let warning = state.warnings.take(&is_open, |_| true);
        let next = warning.or_else(|| state.ordinary.take(&is_open, |_| true));
        state.is_loss_logged &= next.is_some();
        next
    }

    /// Retries it before all others of its namespace.
    fn put_back(&self, mut waiting: Waiting) {
        waiting.attempts += 1;
        let mut state = self.state();
        if waiting.attempts >= ATTEMPTS_MAX || state.ending.contains(waiting.namespace()) {
            return;
        }
        let (namespace, queue_key) = (waiting.namespace().to_owned(), waiting.queue_key());
        let queue = if waiting.is_ordinary() { &mut state.ordinary } else { &mut state.warnings };
        queue.put_back(&namespace, queue_key, waiting);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Updates an existing Event or creates a new one: one request if the Event is as expected. After a restart most notes
    /// have an Event already, so what the last new note met is expected of the next. Other errors of the server are not retried.
    async fn write(&self, cluster: &Cluster, waiting: &Waiting) -> Answered {
        let event = event(waiting, &self.instance);
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let name = event.metadata.name.clone().unwrap_or_default();
        let api = Api::<Event>::namespaced(cluster.client.clone(), &namespace);
        let mut is_there = waiting.count > 1 || self.state().expects_existing;
        // At most three requests: the Event may have expired, or may exist from before a restart.
        for _ in 0..3 {
            let result = if is_there {
                let series = json!({"series": {"count": waiting.count.max(2), "lastObservedTime": MicroTime(waiting.time)}});
                api.patch(&name, &patch_params(), &Patch::Merge(series)).await
            } else {
                api.create(&post_params(), &event).await
            };
            match result {
                Ok(_) | Err(kube::Error::SerdeError(_)) => return Answered::Done,
                Err(kube::Error::Api(status)) => match status.code {
                    404 if is_there => {
                        (is_there, self.state().expects_existing) = (false, false);
                    }
                    409 if !is_there => {
                        (is_there, self.state().expects_existing) = (true, true);
                    }
                    404 => return Answered::Ending,
                    403 if is_terminating(&status) => return Answered::Ending,
                    400 | 409 | 422 => {
                        debug!(name, "the API server refuses an Event: {}", super::api_error::truncated(&status.message));
                        return Answered::Done;
                    }
                    _ => return Answered::Later(status.as_ref().into()),
                },
                Err(error) => return Answered::Later(ApiError::from(&error)),
            }
        }
        Answered::Done
    }
}

fn is_terminating(status: &kube::core::Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// The namespace of an object, if it is namespaced.
fn namespace(subject: &Subject) -> Option<&str> {
    match subject {
        Subject::Service(name) | Subject::Slice(name) => Some(&name.namespace),
        Subject::Node(_) | Subject::Namespace(_) | Subject::Pool(_) | Subject::Gateway(_) => None,
    }
}

fn ordinary_key(subject: &Subject, uid: Option<&str>, cause: Cause) -> u64 {
    hash_of(&[subject.to_string().as_str(), uid.unwrap_or_default(), cause.as_str()])
}

/// Name of the Event of a note, the same in every run and replica.
fn key(note: &Note, uid: Option<&str>) -> u64 {
    hash_of(&[note.subject.to_string().as_str(), uid.unwrap_or_default(), note.remark.cause.as_str(), note.remark.text.as_str()])
}

/// A hash of texts, each with its end.
fn hash_of(parts: &[&str]) -> u64 {
    fnv1a(&parts.iter().flat_map(|part| part.bytes().chain([0])).collect::<Vec<_>>())
}

fn event(waiting: &Waiting, instance: &str) -> Event {
    let Waiting { note, uid, .. } = waiting;
    let remark = &note.remark;
    let regarding = regarding(&note.subject, uid.as_deref());
    let namespace = waiting.namespace().to_owned();
    // Names have at most 253 characters, 17 of them for the key.
    let object = cut_bytes(regarding.name.as_deref().unwrap_or_default(), 236).trim_end_matches(['.', '-']).to_owned();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{object}.{:016x}", waiting.key)),
            namespace: Some(namespace),
            ..ObjectMeta::default()
        },
        action: Some(remark.cause.action().to_owned()),
        event_time: Some(MicroTime(waiting.time)),
        note: Some(cut_bytes(&remark.text, NOTE_BYTES_MAX).to_owned()),
        reason: Some(remark.cause.as_str().to_owned()),
        regarding: Some(regarding),
        reporting_controller: Some(REPORTING_CONTROLLER.to_owned()),
        reporting_instance: Some(instance.to_owned()),
        type_: Some(if remark.cause.is_ordinary() { "Normal" } else { "Warning" }.to_owned()),
        ..Event::default()
    }
}

fn regarding(subject: &Subject, uid: Option<&str>) -> ObjectReference {
    let (kind, api_version, namespace, name) = match subject {
        Subject::Service(ServiceName { namespace, name }) => ("Service", "v1", Some(namespace), name),
        Subject::Slice(ServiceName { namespace, name }) => ("EndpointSlice", "discovery.k8s.io/v1", Some(namespace), name),
        Subject::Node(name) => ("Node", "v1", None, name),
        Subject::Namespace(name) => ("Namespace", "v1", None, name),
        Subject::Pool(name) => ("AddressPool", "sluice.dev/v1beta1", None, name),
        Subject::Gateway(name) => ("EdgeGateway", "sluice.dev/v1beta1", None, name),
    };
    ObjectReference {
        api_version: Some(api_version.to_owned()),
        kind: Some(kind.to_owned()),
        name: Some(name.clone()),
        namespace: namespace.cloned(),
        uid: uid.map(str::to_owned),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use objects::note::{Cause, Remark};

    fn note(text: &str) -> Note {
        about("shop", "web", Cause::AnnotationIgnored, text)
    }

    fn about(namespace: &str, name: &str, cause: Cause, text: &str) -> Note {
        Note { subject: Subject::Service(ServiceName::new(namespace, name)), remark: Remark::new(cause, text) }
    }

    fn waiting(note: Note) -> Waiting {
        Waiting { key: 7, note, uid: Some("u".to_owned()), time: Timestamp::UNIX_EPOCH, count: 1, attempts: 0 }
    }

    impl EventWriter {
        /// Takes all queued Events: their notes, and how often each was recorded.
        pub(crate) fn take_queued(&self) -> Vec<(Note, i32)> {
            all(self).into_iter().map(|waiting| (waiting.note, waiting.count)).collect()
        }
    }

    /// All queued Events, in order.
    fn all(writer: &EventWriter) -> Vec<Waiting> {
        std::iter::from_fn(|| writer.next(|_| true)).collect()
    }

    #[test]
    fn the_same_note_is_an_event_once_and_repeated_after_half_an_hour() {
        let (writer, now) = (EventWriter::new("edge-1"), Instant::now());
        for after in [0, 1, 1_799] {
            writer.record_at(&note("one"), Some("u"), now + Duration::from_secs(after));
        }
        writer.record_at(&note("two"), Some("u"), now);
        let queued: Vec<_> = all(&writer).into_iter().map(|w| (w.note.remark.text, w.count)).collect();
        assert_eq!(queued, [("one".to_owned(), 1), ("two".to_owned(), 1)]);
        writer.record_at(&note("one"), Some("u"), now + REPEATED_AFTER);
        assert_eq!(all(&writer)[0].count, 2);
    }

    #[test]
    fn a_change_that_happens_again_is_written_again() {
        let writer = EventWriter::new("edge-1");
        let fails = about("shop", "web", Cause::BackendsUnhealthy, "1 of 3");
        let returns = about("shop", "web", Cause::BackendsReturned, "0 of 3");
        for (note, count) in [(&fails, 1), (&returns, 1), (&fails, 2), (&returns, 2)] {
            writer.record_change(note, Some("u"));
            let queued: Vec<_> = all(&writer).into_iter().map(|waiting| (waiting.note, waiting.count)).collect();
            assert_eq!(queued, [(note.clone(), count)]);
        }
    }

    #[test]
    fn the_queue_is_bounded() {
        let writer = EventWriter::new("edge-1");
        for number in 0..WAITING_MAX + 100 {
            writer.record(&note(&number.to_string()), None);
        }
        assert_eq!(all(&writer).len(), WAITING_MAX);
        let known = |writer: &EventWriter| writer.state().reported.values().map(BTreeMap::len).sum::<usize>();
        assert_eq!(known(&writer), REPORTED_OF_OBJECT_MAX, "of one object");
        writer.record(&about("shop", "other", Cause::NoHealthyBackend, "none"), None);
        writer.forget(&[Subject::Service(ServiceName::new("shop", "web"))].into());
        assert_eq!(known(&writer), 1, "what is remembered of a deleted object is forgotten with it, and nothing else");
    }

    #[test]
    fn what_is_remembered_of_notes_is_bounded_and_leaves_no_empty_entries() {
        let (writer, now) = (EventWriter::new("edge-1"), Instant::now());
        let written = |writer: &EventWriter, number: usize, at| {
            writer.record_at(&about("shop", &number.to_string(), Cause::NeverServed, "headless"), None, at);
            assert!(writer.next(|_| true).is_some());
        };
        (0..REPORTED_MAX + 100).for_each(|number| written(&writer, number, now));
        let counts = |writer: &EventWriter| {
            let state = writer.state();
            assert_eq!(state.reported_count, state.reported.values().map(BTreeMap::len).sum::<usize>());
            (state.reported_count, state.reported.values().all(|known| !known.is_empty()))
        };
        let (known, is_tidy) = counts(&writer);
        assert!((100..=REPORTED_MAX).contains(&known) && is_tidy, "{known}");
        writer.record_at(&about("shop", "waits", Cause::NeverServed, "headless"), None, now);
        writer.end(&["shop".to_owned()].into());
        assert_eq!(counts(&writer), (known, true), "an object without notes is forgotten");
        let (writer, later) = (EventWriter::new("edge-1"), now + STALE_AFTER);
        (0..=REPORTED_MAX).for_each(|number| written(&writer, number, if number < REPORTED_MAX - 10 { now } else { later }));
        assert_eq!(counts(&writer), (11, true), "those that still hold");
    }

    #[test]
    fn warnings_precede_normal_events_and_namespaces_take_turns() {
        let writer = EventWriter::new("edge-1");
        for number in 0..2_000 {
            writer.record(&about("big", &number.to_string(), Cause::Programmed, "gateways forward for it"), None);
        }
        for number in 0..10 {
            writer.record(&about("big", &number.to_string(), Cause::NoHealthyBackend, "none"), None);
        }
        writer.record(&about("small", "web", Cause::NeverServed, "headless"), None);
        let first: Vec<_> = all(&writer).into_iter().map(|waiting| waiting.note).take(12).collect();
        assert!(first[..11].iter().all(|note| !note.remark.cause.is_ordinary()), "{first:?}");
        assert_eq!(first[1].subject, Subject::Service(ServiceName::new("small", "web")), "after one of the other namespace");
        assert!(first[11].remark.cause.is_ordinary());
    }

    #[test]
    fn normal_events_are_merged_under_load_and_dropped_before_any_warning() {
        let ordinary = |name: &str, cause| about("shop", name, cause, "as it should be");
        let writer = EventWriter::new("edge-1");
        for cause in [Cause::AddressAssigned, Cause::Programmed] {
            writer.record(&ordinary("quiet", cause), None);
        }
        assert_eq!(all(&writer).len(), 2, "both, while nothing else waits");
        for number in 0..MERGED_FROM {
            writer.record(&ordinary(&format!("before-{number}"), Cause::Programmed), None);
        }
        for cause in [Cause::AddressAssigned, Cause::Programmed] {
            writer.record(&ordinary("web", cause), None);
        }
        let queued: Vec<_> = all(&writer).into_iter().filter(|w| w.note.subject.to_string() == "Service shop/web").collect();
        assert_eq!(queued.iter().map(|w| w.note.remark.cause).collect::<Vec<_>>(), [Cause::Programmed]);
        for number in 0..WAITING_MAX {
            writer.record(&ordinary(&number.to_string(), Cause::Released), None);
        }
        for number in 0..WAITING_MAX {
            writer.record(&note(&number.to_string()), None);
        }
        writer.record(&ordinary("late", Cause::Released), None);
        let left = all(&writer);
        assert!(left.len() == WAITING_MAX && left.iter().all(|waiting| !waiting.is_ordinary()));
        writer.record(&ordinary("late", Cause::Released), None);
        assert_eq!(all(&writer).len(), 1, "a dropped note may be recorded again");
    }

    #[test]
    fn no_event_is_written_about_namespaces_and_objects_that_are_being_deleted() {
        let writer = EventWriter::new("edge-1");
        for (namespace, name) in [("going", "a"), ("shop", "web"), ("shop", "gone")] {
            writer.record(&about(namespace, name, Cause::NoHealthyBackend, "none"), None);
        }
        writer.end(&["going".to_owned()].into());
        writer.forget(&[Subject::Service(ServiceName::new("shop", "gone"))].into());
        writer.record(&about("going", "b", Cause::Released, "free"), None);
        let left: Vec<_> = all(&writer).into_iter().map(|waiting| waiting.note.subject.to_string()).collect();
        assert_eq!(left, ["Service shop/web"]);
        writer.end(&BTreeSet::new());
        writer.record(&about("going", "b", Cause::Released, "free"), None);
        assert_eq!(all(&writer).len(), 1, "another namespace of that name");
    }

    #[test]
    fn an_event_has_the_required_fields_within_the_limits_of_the_server() {
        let event = event(&waiting(note(&"ä".repeat(900))), "edge-1");
        assert_eq!(event.metadata.name.as_deref(), Some("web.0000000000000007"));
        assert_eq!(event.note.as_ref().unwrap().len(), NOTE_BYTES_MAX);
        let regarding = event.regarding.as_ref().unwrap();
        assert_eq!((regarding.kind.as_deref(), regarding.uid.as_deref()), (Some("Service"), Some("u")));
        let json = serde_json::to_value(&event).unwrap();
        assert_eq!(json["eventTime"], "1970-01-01T00:00:00.000000Z");
        for field in ["action", "reportingController", "reportingInstance", "reason", "type"] {
            assert!(json[field].is_string(), "{field}");
        }
    }

    #[test]
    fn an_object_without_namespace_has_its_events_in_default() {
        let remark = Remark::new(Cause::Undecodable, "x");
        let event = event(&waiting(Note { subject: Subject::Pool("edge".to_owned()), remark }), "edge-1");
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        assert_eq!(event.regarding.unwrap().namespace, None);
    }
}
