//! Writes notes as Events (events.k8s.io/v1) of the objects that they are about.
//!
//! **Invariant.** One note is one Event object: what is said again within [`REPEATED_AFTER`] is not written, and later it is
//! counted in the `series` of the same object, since Events vanish after an hour. Telling never waits; what does not fit
//! into the queue is lost, and the log has it. Deliberately not here: what is worth telling.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{ObjectMeta, Patch};
use proto::ServiceName;
use serde_json::json;
use tokio::sync::Notify;
use tracing::{debug, warn};

use super::{Cluster, Outage, Trouble, patch_params, post_params};
use crate::note::{Note, Subject};

/// An Event vanishes after an hour unless it is written again; half of that leaves room for an outage.
pub const REPEATED_AFTER: Duration = Duration::from_secs(1_800);
/// Events that wait: at 10 a second seven minutes of them, at 1.5 kB each 6 MB.
const WAITING_MAX: usize = 4_096;
/// Notes that are remembered: with about 100 bytes each 6.5 MB, as many as there may be Services.
const TOLD_MAX: usize = 65_536;
/// 10 a second: what a burst of notes costs the API server.
const PACE: Duration = Duration::from_millis(100);
/// The API server takes 1,024 bytes.
const NOTE_BYTES_MAX: usize = 1_000;
/// The API server takes 128 bytes of an instance's name.
const INSTANCE_BYTES_MAX: usize = 128;
/// Attempts at one Event; after them it is lost.
const ATTEMPTS_MAX: u32 = 8;
/// Who reports.
const REPORTING_CONTROLLER: &str = "sluice.dev/controller";

/// Notes that wait to be written, and those that were.
#[derive(Debug)]
pub struct EventWriter {
    instance: String,
    state: Mutex<State>,
    came: Notify,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Waiting>,
    told: HashMap<u64, Told>,
    is_loss_said: bool,
}

#[derive(Debug)]
struct Told {
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
}

impl EventWriter {
    /// A writer whose Events come from `instance`: the name of the machine or pod.
    #[must_use]
    pub fn new(instance: &str) -> Self {
        Self { instance: cut(instance, INSTANCE_BYTES_MAX).to_owned(), state: Mutex::default(), came: Notify::new() }
    }

    /// Hands a note over, unless it was told lately.
    pub fn tell(&self, note: &Note, uid: Option<&str>) {
        self.tell_at(note, uid, Instant::now());
    }

    fn tell_at(&self, note: &Note, uid: Option<&str>, now: Instant) {
        let key = key(note, uid);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.told.get(&key).is_some_and(|told| now.duration_since(told.last) < REPEATED_AFTER) {
            return;
        }
        if state.waiting.len() >= WAITING_MAX {
            if !std::mem::replace(&mut state.is_loss_said, true) {
                warn!("more than {WAITING_MAX} Events wait to be written; the newest are lost, the log has them");
            }
            return;
        }
        if state.told.len() >= TOLD_MAX {
            state.told.retain(|_, told| now.duration_since(told.last) < REPEATED_AFTER);
        }
        if state.told.len() >= TOLD_MAX {
            // Starting anew costs one Event each.
            state.told.clear();
        }
        let told = state.told.entry(key).or_insert(Told { last: now, count: 0 });
        (told.last, told.count) = (now, told.count.saturating_add(1));
        let count = told.count;
        let (note, uid) = (note.clone(), uid.map(str::to_owned));
        state.waiting.push_back(Waiting { key, note, uid, time: Timestamp::now(), count });
        drop(state);
        self.came.notify_one();
    }

    /// Writes Events for as long as it is polled.
    pub async fn run(&self, cluster: &Cluster) {
        let mut trouble = Trouble::new("create and patch events.events.k8s.io", &cluster.server);
        loop {
            let Some(waiting) = self.next() else {
                self.came.notified().await;
                continue;
            };
            let mut attempts = 0;
            while let Err(outage) = self.write(cluster, &waiting).await {
                attempts += 1;
                let wait = trouble.met(outage, Instant::now());
                tokio::time::sleep(wait).await;
                if attempts == ATTEMPTS_MAX {
                    break;
                }
            }
            if attempts < ATTEMPTS_MAX {
                trouble.over();
            }
            tokio::time::sleep(PACE).await;
        }
    }

    fn next(&self) -> Option<Waiting> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let next = state.waiting.pop_front();
        state.is_loss_said &= next.is_some();
        next
    }

    /// An Event that is there is repeated, one that is not is created; whatever else the server refuses is not tried again.
    async fn write(&self, cluster: &Cluster, waiting: &Waiting) -> Result<(), Outage> {
        let event = event(waiting, &self.instance);
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let name = event.metadata.name.clone().unwrap_or_default();
        let api = Api::<Event>::namespaced(cluster.client.clone(), &namespace);
        let mut is_there = waiting.count > 1;
        // At most three requests: the Event may have vanished, or have been there from before a restart.
        for _ in 0..3 {
            let result = if is_there {
                let series = json!({"series": {"count": waiting.count.max(2), "lastObservedTime": MicroTime(waiting.time)}});
                api.patch(&name, &patch_params(), &Patch::Merge(series)).await
            } else {
                api.create(&post_params(), &event).await
            };
            match result {
                Ok(_) | Err(kube::Error::SerdeError(_)) => return Ok(()),
                Err(kube::Error::Api(status)) => match status.code {
                    404 if is_there => is_there = false,
                    409 if !is_there => is_there = true,
                    // A namespace that is being deleted takes no new objects.
                    403 if is_terminating(&status) => return Ok(()),
                    400 | 404 | 409 | 422 => {
                        debug!(name, "the API server refuses an Event: {}", super::outage::truncated(&status.message));
                        return Ok(());
                    }
                    _ => return Err(status.as_ref().into()),
                },
                Err(error) => return Err(Outage::from(&error)),
            }
        }
        Ok(())
    }
}

fn is_terminating(status: &kube::core::Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// FNV-1a: the same note has the same Event in every run and replica.
fn key(note: &Note, uid: Option<&str>) -> u64 {
    let subject = note.subject.to_string();
    let parts = [subject.as_str(), uid.unwrap_or_default(), note.remark.cause.as_str(), note.remark.text.as_str()];
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// At most so many bytes, cut between characters.
fn cut(text: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or_default()]
}

fn event(waiting: &Waiting, instance: &str) -> Event {
    let Waiting { note, uid, .. } = waiting;
    let remark = &note.remark;
    let regarding = regarding(&note.subject, uid.as_deref());
    // Objects without a namespace have their Events in `default`.
    let namespace = regarding.namespace.clone().unwrap_or_else(|| "default".to_owned());
    // Names have 253 characters at most, 17 of them for the key.
    let object = cut(regarding.name.as_deref().unwrap_or_default(), 236).trim_end_matches(['.', '-']).to_owned();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{object}.{:016x}", waiting.key)),
            namespace: Some(namespace),
            ..ObjectMeta::default()
        },
        action: Some(remark.cause.action().to_owned()),
        event_time: Some(MicroTime(waiting.time)),
        note: Some(cut(&remark.text, NOTE_BYTES_MAX).to_owned()),
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
    use crate::note::{Cause, Remark};

    fn note(text: &str) -> Note {
        let subject = Subject::Service(ServiceName::new("shop", "web"));
        Note { subject, remark: Remark::new(Cause::AnnotationIgnored, text) }
    }

    #[test]
    fn the_same_note_is_an_event_once_and_repeated_after_half_an_hour() {
        let (writer, now) = (EventWriter::new("edge-1"), Instant::now());
        for after in [0, 1, 1_799] {
            writer.tell_at(&note("one"), Some("u"), now + Duration::from_secs(after));
        }
        writer.tell_at(&note("two"), Some("u"), now);
        writer.tell_at(&note("one"), Some("u"), now + REPEATED_AFTER);
        let waiting: Vec<_> = std::iter::from_fn(|| writer.next()).map(|w| (w.note.remark.text, w.count)).collect();
        assert_eq!(waiting, [("one".to_owned(), 1), ("two".to_owned(), 1), ("one".to_owned(), 2)]);
    }

    #[test]
    fn a_storm_of_notes_fills_the_queue_and_no_more() {
        let writer = EventWriter::new("edge-1");
        for number in 0..WAITING_MAX + 100 {
            writer.tell(&note(&number.to_string()), None);
        }
        assert_eq!(std::iter::from_fn(|| writer.next()).count(), WAITING_MAX);
    }

    #[test]
    fn an_event_has_all_that_the_server_asks_for_and_no_more_than_it_takes() {
        let waiting =
            Waiting { key: 7, note: note(&"ä".repeat(900)), uid: Some("u".to_owned()), time: Timestamp::UNIX_EPOCH, count: 1 };
        let event = event(&waiting, "edge-1");
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
        let note = Note { subject: Subject::Pool("edge".to_owned()), remark };
        let event = event(&Waiting { key: 1, note, uid: None, time: Timestamp::UNIX_EPOCH, count: 1 }, "edge-1");
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        assert_eq!(event.regarding.unwrap().namespace, None);
    }
}
