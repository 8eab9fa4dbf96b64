//! Where notes go: into the log, among the newest ones that are kept, and to a cluster as Events.
//!
//! Invariant: bounded by `NEWEST_MAX`; telling never waits. Deliberately not here: how Events are written (`kubernetes::events`).

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use crate::kubernetes::EventWriter;
use crate::note::{Note, Subject};

/// Notes that are kept: 1,000 of about 300 bytes, at most of 1,200, are 1.2 MB.
const NEWEST_MAX: usize = 1_000;

/// A note that was told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// When.
    pub time: SystemTime,
    /// What.
    pub note: Note,
}

/// All that was told lately.
#[derive(Debug, Default)]
pub struct Notebook {
    newest: Mutex<VecDeque<Told>>,
    events: Option<Arc<EventWriter>>,
}

impl Notebook {
    /// A notebook whose notes become Events, too.
    #[must_use]
    pub fn with_events(events: Arc<EventWriter>) -> Self {
        Self { newest: Mutex::default(), events: Some(events) }
    }

    /// Tells a note. `uid` is that of the object, where it is known: `kubectl describe` shows only Events that have it.
    pub fn tell(&self, note: &Note, uid: Option<&str>) {
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
        newest.push_back(Told { time: SystemTime::now(), note: note.clone() });
        drop(newest);
        if let Some(events) = &self.events {
            events.tell(note, uid);
        }
    }

    /// Says that a note is still true: its Event is repeated in its time.
    pub fn stands(&self, note: &Note, uid: Option<&str>) {
        if let Some(events) = &self.events {
            events.tell(note, uid);
        }
    }

    /// These objects are gone, or going: Events about them that are not written yet need not be.
    pub fn forget(&self, gone: &BTreeSet<Subject>) {
        if let Some(events) = self.events.as_ref().filter(|_| !gone.is_empty()) {
            events.forget(gone);
        }
    }

    /// These namespaces are being deleted: they take no Events.
    pub fn end(&self, namespaces: &BTreeSet<String>) {
        if let Some(events) = &self.events {
            events.end(namespaces);
        }
    }

    /// Who writes Events, if anybody does.
    #[must_use]
    pub const fn events(&self) -> Option<&Arc<EventWriter>> {
        self.events.as_ref()
    }

    /// The newest notes, the oldest of them first.
    #[must_use]
    pub fn newest(&self) -> Vec<Told> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::note::{Cause, Remark};

    #[test]
    fn the_newest_notes_are_kept_and_older_ones_forgotten() {
        let notebook = Notebook::default();
        for number in 0..NEWEST_MAX + 5 {
            let remark = Remark::new(Cause::Programmed, number.to_string());
            notebook.tell(&Note { subject: Subject::Node("n".to_owned()), remark }, None);
        }
        let newest = notebook.newest();
        assert_eq!((newest.len(), newest[0].note.remark.text.as_str()), (NEWEST_MAX, "5"));
    }
}
