//! The file `history` in the state directory: what is known of backends, for the next process.
//!
//! Invariant: at most [`SAVED_MAX`] backends and [`BYTES_MAX`] bytes, those that changed last. A file that cannot be used
//! costs a warning and the history, never a start. It is not synced to disk: after a power cut an older one may count.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use control::store::files::Survives;
use proto::ServiceName;
use serde::{Deserialize, Serialize};

use super::{BackendCondition, BackendHistories, BackendHistory, BackendTurn, CHANGES_MAX, Subject};
use crate::agent::persist::directories::StateDirs;
use crate::agent::persist::sealed::{FileDamage, Moment, seal, unseal};

/// Name of the file.
pub const HISTORY: &str = "history";
/// Name of the format.
const FORMAT: &str = "sluice history ";
/// Backends in the file. 10,000 with three changes each are about 3 MB.
const SAVED_MAX: usize = 10_000;
/// Bytes of the file without its head.
const BYTES_MAX: usize = 4 << 20;

/// Why a file is of no use.
#[derive(Debug, thiserror::Error)]
enum UnusableHistory {
    #[error(transparent)]
    Sealed(#[from] FileDamage),
    #[error("it cannot be decoded: {0}")]
    Encoding(#[from] serde_json::Error),
    #[error("it cannot be read: {0}")]
    Read(#[from] io::Error),
}

/// A backend in the file.
#[derive(Serialize, Deserialize)]
struct Record {
    namespace: String,
    name: String,
    protocol: String,
    address: String,
    day: u64,
    down_s: u64,
    changes: Vec<RecordedTurn>,
}

#[derive(Serialize, Deserialize)]
struct RecordedTurn {
    at_s: u64,
    to: String,
    cause: String,
}

/// The file.
#[derive(Clone, Debug)]
pub struct HistoryFile {
    dirs: StateDirs,
}

impl HistoryFile {
    /// In these directories.
    #[must_use]
    pub const fn new(dirs: StateDirs) -> Self {
        Self { dirs }
    }

    /// Takes over what the newest usable file has, if there is one.
    pub fn restore(&self, histories: &BackendHistories) {
        let now = Moment::now();
        let mut newest: Option<(Moment, Vec<Record>)> = None;
        for path in self.dirs.paths(HISTORY) {
            match read(&path) {
                Ok((written, records)) if newest.as_ref().is_none_or(|(other, _)| now.is_newer(&written, other)) => {
                    newest = Some((written, records));
                }
                Ok(_) => {}
                Err(UnusableHistory::Read(error)) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => warn(&path, &error),
            }
        }
        let Some((_, records)) = newest else { return };
        let known: HashMap<_, _> = records.into_iter().take(SAVED_MAX).filter_map(history).collect();
        tracing::info!(backends = known.len(), "the history of backends goes on from the last process");
        histories.restore(known);
    }

    /// Writes what is known, if that has changed since it was written last; the next call tries again what could not be
    /// written. Blocks.
    pub fn save(&self, histories: &BackendHistories) {
        let Some(content) = unsaved(histories) else { return };
        let bytes = seal(FORMAT, Moment::now(), &content);
        let written = self.dirs.replace(HISTORY, Survives::Process, [&bytes[..]].into_iter());
        let mut known = histories.lock();
        known.is_unsaved |= written.is_err();
        let was_failing = std::mem::replace(&mut known.is_save_failing, written.is_err());
        drop(known);
        if let Err(error) = written
            && !was_failing
        {
            let dir = self.dirs.disk().display();
            tracing::warn!(%dir, %error, "the history of backends cannot be saved; a restart forgets what is new in it");
        }
    }
}

fn warn(path: &Path, error: &UnusableHistory) {
    tracing::warn!(path = %path.display(), %error, "the history of backends is not used and begins anew");
}

fn read(path: &PathBuf) -> Result<(Moment, Vec<Record>), UnusableHistory> {
    let mut bytes = Vec::new();
    // A longer one was not written by this program, and its checksum fails.
    File::open(path)?.take(2 * BYTES_MAX as u64).read_to_end(&mut bytes)?;
    let (written, content) = unseal(FORMAT, &bytes)?;
    Ok((written, serde_json::from_slice(content)?))
}

/// The content of the file, if it has changed since the last call: as much as it may hold, what changed last first.
fn unsaved(histories: &BackendHistories) -> Option<Vec<u8>> {
    let mut known = histories.lock();
    if !std::mem::take(&mut known.is_unsaved) {
        return None;
    }
    let newest = newest(&known.all);
    drop(known);
    let mut content = vec![b'['];
    for (subject, history) in &newest {
        // A record of texts and numbers can be written.
        let Ok(text) = serde_json::to_vec(&record(subject, history)) else { continue };
        if content.len() + text.len() + 2 > BYTES_MAX {
            break;
        }
        if content.len() > 1 {
            content.push(b',');
        }
        content.extend(text);
    }
    content.push(b']');
    Some(content)
}

/// The [`SAVED_MAX`] backends that changed last, these first. Probes wait meanwhile, so texts are made later.
fn newest(all: &HashMap<Subject, BackendHistory>) -> Vec<(Subject, BackendHistory)> {
    let last = |(_, history): &(&Subject, &BackendHistory)| Reverse(history.changes.back().map_or(0, |last| last.at_s));
    let mut newest: Vec<_> = all.iter().collect();
    if newest.len() > SAVED_MAX {
        newest.select_nth_unstable_by_key(SAVED_MAX, last);
        newest.truncate(SAVED_MAX);
    }
    newest.sort_by_key(last);
    newest.into_iter().map(|(subject, history)| (subject.clone(), history.clone())).collect()
}

fn record(subject: &Subject, history: &BackendHistory) -> Record {
    let turn = |turn: &BackendTurn| RecordedTurn {
        at_s: turn.at_s,
        to: turn.to.as_str().to_owned(),
        cause: turn.cause.as_ref().to_owned(),
    };
    Record {
        namespace: subject.service.namespace.clone(),
        name: subject.service.name.clone(),
        protocol: subject.protocol.to_string(),
        address: subject.address.to_string(),
        day: history.day,
        down_s: history.down_s,
        changes: history.changes.iter().map(turn).collect(),
    }
}

/// The backend of a record; `None` if a word in it is of another version.
fn history(record: Record) -> Option<(Subject, BackendHistory)> {
    let condition = |word: &str| BackendCondition::ALL.into_iter().find(|condition| condition.as_str() == word);
    let turn = |turn: RecordedTurn| {
        Some(BackendTurn { at_s: turn.at_s, to: condition(&turn.to)?, cause: super::shortened(&turn.cause) })
    };
    let changes = record.changes.into_iter().take(CHANGES_MAX).map(turn).collect::<Option<_>>()?;
    let subject = Subject {
        service: Arc::new(ServiceName::new(&record.namespace, &record.name)),
        protocol: record.protocol.parse().ok()?,
        address: record.address.parse().ok()?,
    };
    Some((subject, BackendHistory { changes, day: record.day, down_s: record.down_s }))
}
