//! Storage of the checkpoint: the ConfigMaps `sluice-checkpoint-0` to `-3` in the controller's own namespace, under the
//! name of the group; with manifests, a file beside the status files.
//!
//! A new installation draws the seed of its Maglev tables here; one that runs keeps what it has until it is told to draw.
//!
//! Invariant: nothing is planned before the checkpoint was read or reading it was refused. A write replaces exactly the
//! version that was read or written last, so that a former leader cannot overwrite the text of its successor: a text that
//! another controller of the group wrote is replaced only after a time in which a former leader has stepped down. A seed
//! is used only once it is stored.

use std::convert::Infallible;
use std::time::{Duration, Instant, SystemTime};

use kube::api::Patch;
use ring::rand::{SecureRandom as _, SystemRandom};
use serde_json::json;
use tokio::sync::{mpsc, watch};

use super::files::{self, FileError};
use super::{Storage, create, write_file};
use crate::config::settings::MaglevSeed;
use crate::kubernetes::lease::RENEW_DEADLINE;
use crate::kubernetes::{ApiError, patch_params};
use crate::world::change::Change;
use crate::world::checkpoint::Checkpoint;

/// Names of the ConfigMaps, one per text.
pub const CONFIG_MAPS: [&str; 4] = ["sluice-checkpoint-0", "sluice-checkpoint-1", "sluice-checkpoint-2", "sluice-checkpoint-3"];
/// Name of the file in the status directory, where everything else is a directory.
pub const FILE: &str = "checkpoint.txt";

/// How long a change waits for further changes before it is written,
const WRITTEN_AFTER: Duration = Duration::from_millis(500);
/// and the minimum time between two writes: a stream of changes costs one write of each text every 5 s.
const WRITE_INTERVAL: Duration = Duration::from_secs(5);
/// Retry interval after a failed write.
const RETRY: Duration = Duration::from_secs(5);
/// Wait before the text of another controller is replaced: a leader that was deposed ends within [`RENEW_DEADLINE`], so
/// whoever still runs after it leads. The second is for the time that a read takes.
const DEPOSED_AFTER: Duration = Duration::from_secs(RENEW_DEADLINE.as_secs() + 1);
/// Maximum number of attempts for one text while other installations write theirs to the same ConfigMap.
const ATTEMPTS_MAX: usize = 5;
/// Retry interval after a failed read.
const READ_RETRY: Duration = Duration::from_millis(500);

/// Why the checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointStoreError {
    /// The file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The request to the API server failed.
    #[error("ConfigMap {name}: {outage}")]
    Cluster {
        /// Which.
        name: &'static str,
        /// The error.
        outage: ApiError,
    },
    /// Another process wrote to the ConfigMap in the meantime.
    #[error("ConfigMap {0} was changed in the meantime")]
    Changed(&'static str),
    /// Another controller of this group wrote its text.
    #[error("another controller of this group has written ConfigMap {0}; expected one leader")]
    Overtaken(&'static str),
}

/// A text as this controller last read or wrote it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Stored {
    text: String,
    /// The resourceVersion of its ConfigMap; `None` if there is none, and for files.
    version: Option<String>,
}

/// The stored texts.
async fn load(storage: &Storage) -> Result<Vec<Stored>, CheckpointStoreError> {
    match storage {
        Storage::File(path) => {
            let text = files::read_text(path, |_| Ok::<_, Infallible>(()))?.unwrap_or_default();
            Ok(vec![Stored { text, version: None }])
        }
        Storage::ConfigMaps { .. } => {
            let mut texts = Vec::new();
            for at in 0..CONFIG_MAPS.len() {
                texts.push(load_one(storage, at).await?);
            }
            Ok(texts)
        }
    }
}

async fn load_one(storage: &Storage, at: usize) -> Result<Stored, CheckpointStoreError> {
    let Storage::ConfigMaps { api, group } = storage else { return Ok(Stored::default()) };
    let name = CONFIG_MAPS[at];
    let failed = |error| CheckpointStoreError::Cluster { name, outage: ApiError::from(&error) };
    let Some(object) = api.get_opt(name).await.map_err(failed)? else { return Ok(Stored::default()) };
    let text = object.data.and_then(|mut data| data.remove(group)).unwrap_or_default();
    Ok(Stored { text, version: object.metadata.resource_version })
}

/// Replaces a version, and returns the new one.
async fn save(storage: &Storage, at: usize, text: &str, version: Option<&str>) -> Result<Option<String>, CheckpointStoreError> {
    match storage {
        Storage::File(path) => Ok(write_file(path, text.to_owned()).await.map(|()| None)?),
        Storage::ConfigMaps { api, group } => {
            let name = CONFIG_MAPS[at];
            let answer = match version {
                None => create(api, name, group, text.to_owned()).await,
                Some(version) => {
                    let patch = json!({"metadata": {"resourceVersion": version}, "data": {group: text}});
                    api.patch(name, &patch_params(), &Patch::Merge(patch)).await
                }
            };
            match answer {
                Ok(object) => Ok(object.metadata.resource_version),
                // It was created, changed or deleted since it was read.
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Err(CheckpointStoreError::Changed(name)),
                Err(error) => Err(CheckpointStoreError::Cluster { name, outage: ApiError::from(&error) }),
            }
        }
    }
}

impl CheckpointStoreError {
    /// Whether the error may disappear by itself, so that a retry makes sense.
    const fn passes(&self) -> bool {
        matches!(
            self,
            Self::Cluster { outage: ApiError::Unreachable(_) | ApiError::Busy { .. }, .. }
                | Self::Changed(_)
                | Self::Overtaken(_)
        )
    }
}

/// Sends the stored checkpoint to the planner, then stores the planner's decisions until the planner ends.
pub async fn keep(storage: Storage, seed: MaglevSeed, mut newest: watch::Receiver<Checkpoint>, changes: mpsc::Sender<Change>) {
    let Some(mut kept) = read(&storage, seed, &changes).await else { return };
    let mut is_failing = false;
    while newest.changed().await.is_ok() {
        tokio::time::sleep(WRITTEN_AFTER).await;
        let checkpoint = newest.borrow_and_update().clone();
        loop {
            match write(&storage, &checkpoint, &mut kept).await {
                Ok(()) => break is_failing = false,
                Err(error) => {
                    let is_overtaken = matches!(error, CheckpointStoreError::Overtaken(_));
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(%error, "the checkpoint cannot be written; retrying. A new leader would decide its missing parts again");
                    }
                    tokio::time::sleep(if is_overtaken { DEPOSED_AFTER } else { RETRY }).await;
                }
            }
        }
        tokio::time::sleep(WRITE_INTERVAL).await;
    }
}

/// Reads the checkpoint; `None` once the planner has ended. If reading is refused, planning starts without a
/// checkpoint.
async fn read(storage: &Storage, seed: MaglevSeed, changes: &mpsc::Sender<Change>) -> Option<Vec<Stored>> {
    let mut is_told = false;
    loop {
        let error = match load_with_seed(storage, seed).await {
            Ok((stored, read)) => {
                changes.send(Change::CheckpointReplaced(Box::new(read))).await.ok()?;
                return Some(stored);
            }
            Err(error) => error,
        };
        if !error.passes() && !std::mem::replace(&mut is_told, true) {
            tracing::error!(%error, "the checkpoint cannot be read; Services without an address in their status may get another one");
            changes.send(Change::CheckpointReplaced(Box::default())).await.ok()?;
        }
        tokio::select! {
            () = changes.closed() => return None,
            () = tokio::time::sleep(READ_RETRY) => {}
        }
    }
}

impl MaglevSeed {
    /// Whether a seed may be drawn because nothing was ever decided.
    fn may_begin(self, texts: &[String]) -> bool {
        self == Self::Kept && texts.iter().all(String::is_empty)
    }
}

/// The stored texts and the checkpoint in them, with a seed if one is to be drawn.
async fn load_with_seed(storage: &Storage, seed: MaglevSeed) -> Result<(Vec<Stored>, Checkpoint), CheckpointStoreError> {
    let mut stored = load(storage).await?;
    let texts: Vec<String> = stored.iter().map(|one| one.text.clone()).collect();
    let mut read = Checkpoint::from_texts(&texts, Instant::now(), SystemTime::now());
    if read.maglev_seed.is_none() && (seed == MaglevSeed::Random || seed.may_begin(&texts)) {
        read.maglev_seed = drawn(storage, &mut stored).await?;
    }
    Ok((stored, read))
}

/// A new seed, once it is stored. An installation that cannot store it uses the seed that all know: another one after each
/// start would move flows of stateless modes. An error that may disappear is returned, so that all is read again.
async fn drawn(storage: &Storage, stored: &mut [Stored]) -> Result<Option<u64>, CheckpointStoreError> {
    let mut bytes = [0; size_of::<u64>()];
    let Some(before) = stored.first_mut() else { return Ok(None) };
    if SystemRandom::new().fill(&mut bytes).is_err() {
        return Ok(None);
    }
    let seed = u64::from_le_bytes(bytes);
    let text = Checkpoint::with_seed(&before.text, seed);
    match write_one(storage, 0, text, before).await {
        Ok(()) => Ok(Some(seed)),
        // Another controller wrote meanwhile: its text may have a seed.
        Err(error) if error.passes() => Err(error),
        Err(error) => {
            tracing::warn!(%error, "a seed of the Maglev tables cannot be stored: the public one is used. Once other decisions are stored \
                it stays; `maglevSeed: random` draws one then");
            Ok(None)
        }
    }
}

async fn write(storage: &Storage, checkpoint: &Checkpoint, kept: &mut [Stored]) -> Result<(), CheckpointStoreError> {
    let texts = checkpoint.to_texts(kept.len(), Instant::now(), SystemTime::now());
    for (at, (text, kept)) in texts.into_iter().zip(kept).enumerate() {
        if kept.text != text {
            write_one(storage, at, text, kept).await?;
        }
    }
    Ok(())
}

/// Writes one text. Other installations keep theirs in the same ConfigMap, so its version may be newer although nobody
/// wrote our text.
async fn write_one(storage: &Storage, at: usize, text: String, kept: &mut Stored) -> Result<(), CheckpointStoreError> {
    for _ in 0..ATTEMPTS_MAX {
        match save(storage, at, &text, kept.version.as_deref()).await {
            Ok(version) => {
                *kept = Stored { text, version };
                return Ok(());
            }
            Err(CheckpointStoreError::Changed(name)) => {
                let before = std::mem::replace(kept, load_one(storage, at).await?);
                // An answer that was lost may have been ours. A text that is gone was deleted by a person: it is written again.
                if !kept.text.is_empty() && kept.text != before.text && kept.text != text {
                    return Err(CheckpointStoreError::Overtaken(name));
                }
            }
            Err(error) => return Err(error),
        }
    }
    Err(CheckpointStoreError::Changed(CONFIG_MAPS[at]))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::plan::MAGLEV_SEED;

    /// The checkpoint that a controller starts with.
    async fn started(path: &std::path::Path, seed: MaglevSeed) -> Checkpoint {
        let (sender, mut changes) = mpsc::channel(1);
        let _ = read(&Storage::File(path.to_owned()), seed, &sender).await;
        match changes.recv().await {
            Some(Change::CheckpointReplaced(read)) => *read,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_new_installation_draws_a_maglev_seed_and_keeps_it() {
        let dir = tempfile::tempdir().unwrap();
        let [one, other] = ["a", "b"].map(|name| dir.path().join(name));
        let first = started(&one, MaglevSeed::Kept).await.maglev_seed;
        assert!(first.is_some_and(|seed| seed != MAGLEV_SEED));
        for seed in [MaglevSeed::Kept, MaglevSeed::Random, MaglevSeed::Public] {
            assert_eq!(started(&one, seed).await.maglev_seed, first, "after a restart");
        }
        assert_ne!(started(&other, MaglevSeed::Kept).await.maglev_seed, first, "another installation");
    }

    #[tokio::test]
    async fn an_installation_that_runs_keeps_the_public_maglev_seed_until_it_is_told_to_draw() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint.txt");
        std::fs::write(&path, "v1\nshop/web 192.0.2.1 tcp/80/IPv4=509\n").unwrap();
        assert_eq!(started(&path, MaglevSeed::Kept).await.maglev_seed, None);
        let told = started(&path, MaglevSeed::Random).await;
        assert!(told.maglev_seed.is_some() && told.services.len() == 1);
        assert_eq!(started(&path, MaglevSeed::Kept).await.maglev_seed, told.maglev_seed);
    }

    #[tokio::test]
    async fn a_maglev_seed_that_cannot_be_stored_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("checkpoint.txt");
        std::fs::create_dir(dir.path().join("checkpoint.txt.new")).unwrap();
        assert_eq!(started(&path, MaglevSeed::Kept).await.maglev_seed, None);
    }

    /// An API server that gives these answers, one after another, and the methods that it was asked with.
    fn answering(answers: &[(u16, serde_json::Value)]) -> (Storage, Arc<Mutex<Vec<String>>>) {
        let (answers, asked) = (Arc::new(Mutex::new(VecDeque::from(answers.to_vec()))), Arc::new(Mutex::new(Vec::new())));
        let methods = Arc::clone(&asked);
        let server = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            methods.lock().unwrap().push(request.method().to_string());
            let (code, object) = answers.lock().unwrap().pop_front().unwrap();
            let answer = http::Response::builder().status(code).body(kube::client::Body::from(object.to_string().into_bytes()));
            async move { Ok::<_, std::convert::Infallible>(answer.unwrap()) }
        });
        let api = Box::new(kube::Api::namespaced(kube::Client::new(server, "a"), "a"));
        (Storage::ConfigMaps { api, group: "east".to_owned() }, asked)
    }

    fn config_map(data: serde_json::Value, version: &str) -> (u16, serde_json::Value) {
        (
            200,
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "n", "resourceVersion": version}, "data": data}),
        )
    }

    fn refusal(code: u16) -> (u16, serde_json::Value) {
        let reason = if code == 404 { "NotFound" } else { "Conflict" };
        (code, json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "reason": reason}))
    }

    fn kept(text: &str) -> Stored {
        Stored { text: text.to_owned(), version: Some("1".to_owned()) }
    }

    #[tokio::test]
    async fn a_deleted_config_map_is_written_again_at_once_and_only_another_text_is_that_of_a_second_leader() {
        let (deleted, asked) = answering(&[refusal(404), refusal(404), config_map(json!({"east": "new"}), "2")]);
        let mut of_deleted = kept("old");
        write_one(&deleted, 0, "new".to_owned(), &mut of_deleted).await.unwrap();
        assert_eq!(of_deleted.text, "new");
        assert_eq!(*asked.lock().unwrap(), ["PATCH", "GET", "POST"]);
        let (overtaken, _) = answering(&[refusal(409), config_map(json!({"east": "other"}), "2")]);
        let error = write_one(&overtaken, 0, "new".to_owned(), &mut kept("old")).await;
        assert!(matches!(error, Err(CheckpointStoreError::Overtaken(_))), "{error:?}");
    }

    #[tokio::test]
    async fn a_maglev_seed_is_drawn_although_another_installation_writes_at_the_same_time() {
        let beside = |version| config_map(json!({"west": "v1"}), version);
        let (storage, asked) = answering(&[refusal(409), beside("2"), beside("3")]);
        let mut stored = [Stored { version: Some("1".to_owned()), ..Stored::default() }];
        assert!(drawn(&storage, &mut stored).await.unwrap().is_some());
        assert_eq!(stored[0].version.as_deref(), Some("3"));
        assert_eq!(*asked.lock().unwrap(), ["PATCH", "GET", "PATCH"]);
        let (overtaken, _) = answering(&[refusal(409), config_map(json!({"east": "v1\n"}), "2")]);
        assert!(drawn(&overtaken, &mut stored).await.is_err_and(|error| error.passes()), "the other text is read first");
    }
}
