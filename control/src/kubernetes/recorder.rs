//! The event recorder: each note goes to the log, to a list of recent notes, and to the cluster as an Event.
//!
//! Invariant: the list is bounded by `NEWEST_MAX`, and recording never blocks.
//! Deliberately not here: how Events are written (`events`).

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::kubernetes::events::EventWriter;
use objects::note::{Note, Subject};

/// Size of the list of recent notes: 1,000 notes of about 300 bytes, at most 1,200, are 1.2 MB.
const NEWEST_MAX: usize = 1_000;

/// How long after a reload a note from before counts as one that still holds: until then everything has been planned and
/// reported again.
const FOUND_AGAIN_WITHIN: Duration = Duration::from_secs(60);

/// A recorded note.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedNote {
    /// Its time.
    pub time: SystemTime,
    /// Its content.
    pub note: Note,
}

/// Recent notes.
#[derive(Debug, Default)]
pub struct Recorder {
    newest: Mutex<VecDeque<RecordedNote>>,
    /// Notes from before a reload that were not found again yet, and its time: for a while they are no news.
    from_before: Mutex<Option<(HashSet<Note>, Instant)>>,
    events: Option<Arc<EventWriter>>,
}

impl Recorder {
    /// A recorder in place of another one, whose notes are kept; with `events` it writes Events, too.
    #[must_use]
    pub fn after(before: Option<&Self>, events: Option<Arc<EventWriter>>) -> Self {
        let newest = before.map(Self::newest).unwrap_or_default();
        let notes = newest.iter().map(|one| one.note.clone()).collect();
        Self { newest: Mutex::new(newest.into()), from_before: Mutex::new(Some((notes, Instant::now()))), events }
    }

    /// Records a note. `uid` is that of its object, if known; `kubectl describe` shows only Events that have it.
    pub fn record(&self, note: &Note, uid: Option<&str>) {
        self.record_at(note, uid, Instant::now());
    }

    fn record_at(&self, note: &Note, uid: Option<&str>, now: Instant) {
        if !self.is_from_before(note, now) {
            self.list(note);
        }
        self.repeat(note, uid);
    }

    /// Records a change, also if an equal one was recorded lately: its opposite has happened in between.
    pub fn record_change(&self, note: &Note, uid: Option<&str>) {
        self.list(note);
        self.write_change(note, uid);
    }

    /// Writes the Event of a change that is listed already.
    pub fn write_change(&self, note: &Note, uid: Option<&str>) {
        if let Some(events) = &self.events {
            events.record_change(note, uid);
        }
    }

    /// Whether a note held before a reload and has not been found again yet.
    fn is_from_before(&self, note: &Note, now: Instant) -> bool {
        let mut from_before = self.from_before.lock().unwrap_or_else(PoisonError::into_inner);
        from_before.take_if(|(_, since)| now.duration_since(*since) >= FOUND_AGAIN_WITHIN);
        from_before.as_mut().is_some_and(|(notes, _)| notes.remove(note))
    }

    /// Records a note that may be found again and again: it is listed once, and its Event repeated when due.
    pub fn record_once(&self, note: &Note, uid: Option<&str>) {
        if !self.newest().iter().any(|one| one.note == *note) {
            self.list(note);
        }
        self.repeat(note, uid);
    }

    /// Records a note without an Event, which [`Recorder::repeat`] writes later.
    pub fn list(&self, note: &Note) {
        let Note { subject, remark } = note;
        let (reason, text) = (remark.cause.as_str(), &remark.text);
        if remark.cause.is_ordinary() {
            tracing::info!(%subject, reason, "{text}");
        } else {
            tracing::warn!(%subject, reason, "{text}");
        }
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.len() >= NEWEST_MAX {
            newest.pop_front();
        }
        newest.push_back(RecordedNote { time: SystemTime::now(), note: note.clone() });
    }

    /// Records that a note still holds, so that its Event is repeated when due.
    pub fn repeat(&self, note: &Note, uid: Option<&str>) {
        if let Some(events) = &self.events {
            events.record(note, uid);
        }
    }

    /// Drops pending Events about these objects, which are deleted or being deleted.
    pub fn forget(&self, deleted: &BTreeSet<Subject>) {
        if let Some(events) = self.events.as_ref().filter(|_| !deleted.is_empty()) {
            events.forget(deleted);
        }
    }

    /// Drops pending Events in these namespaces, which are being deleted and accept none.
    pub fn end(&self, namespaces: &BTreeSet<String>) {
        if let Some(events) = &self.events {
            events.end(namespaces);
        }
    }

    /// The Event writer, if there is one.
    #[must_use]
    pub const fn events(&self) -> Option<&Arc<EventWriter>> {
        self.events.as_ref()
    }

    /// Recent notes, oldest first.
    #[must_use]
    pub fn newest(&self) -> Vec<RecordedNote> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use objects::note::{Cause, Remark};

    #[test]
    fn after_a_reload_notes_are_kept_and_standing_ones_are_no_news() {
        let note = |text: &str| Note {
            subject: Subject::Node("n".to_owned()),
            remark: Remark::new(Cause::NoHealthyBackend, text.to_owned()),
        };
        let before = Recorder::default();
        before.record(&note("standing"), None);
        let after = Recorder::after(Some(&before), None);
        let texts = |all: &Recorder| all.newest().into_iter().map(|one| one.note.remark.text).collect::<Vec<_>>();
        after.record(&note("standing"), None);
        after.record(&note("new"), None);
        assert_eq!(texts(&after), ["standing", "new"]);
        after.record(&note("standing"), None);
        assert_eq!(texts(&after), ["standing", "new", "standing"], "it came up again");
        let later = Recorder::after(Some(&before), None);
        later.record_at(&note("standing"), None, Instant::now() + FOUND_AGAIN_WITHIN);
        assert_eq!(texts(&later), ["standing", "standing"], "it did not hold after the reload");
    }

    #[test]
    fn a_change_is_news_although_an_equal_one_was_before_a_reload() {
        let remark = Remark::new(Cause::BackendsUnhealthy, "1 of 3");
        let note = Note { subject: Subject::Gateway("edge-1".to_owned()), remark };
        let before = Recorder::default();
        before.record_change(&note, None);
        let after = Recorder::after(Some(&before), None);
        after.record_change(&note, None);
        assert_eq!(after.newest().len(), 2);
    }

    #[test]
    fn the_newest_notes_are_kept_and_older_ones_forgotten() {
        let recorder = Recorder::default();
        for number in 0..NEWEST_MAX + 5 {
            let remark = Remark::new(Cause::Programmed, number.to_string());
            recorder.record(&Note { subject: Subject::Node("n".to_owned()), remark }, None);
        }
        let newest = recorder.newest();
        assert_eq!((newest.len(), newest[0].note.remark.text.as_str()), (NEWEST_MAX, "5"));
    }
}
