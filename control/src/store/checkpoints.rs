//! Storage of the checkpoint: the ConfigMaps `sluice-checkpoint-0` to `-3` in the controller's own namespace, under the
//! name of the group; with manifests, a file beside the status files.
//!
//! Invariant: nothing is planned before the checkpoint was read or reading it was refused. A text that was not read is not
//! overwritten.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{ObjectMeta, Patch};
use serde_json::json;
use tokio::sync::{mpsc, watch};

use super::{read_file, replace_file};
use crate::kubernetes::{ApiError, Cluster, patch_params, post_params};
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
/// Retry interval after a failed read.
const READ_AGAIN: Duration = Duration::from_millis(500);

/// Storage of the checkpoint.
#[derive(Clone, Debug)]
pub enum CheckpointStore {
    /// A file.
    File(PathBuf),
    /// ConfigMaps.
    ConfigMaps {
        /// API of the controller's own namespace.
        api: Box<Api<ConfigMap>>,
        /// The key: our group.
        group: String,
    },
}

/// Why the checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointStoreError {
    /// The operating system refused.
    #[error("{path}: {error}; it must be readable and writable for this process (key `statusDir`)")]
    System {
        /// The file.
        path: PathBuf,
        /// Its error.
        error: io::Error,
    },
    /// The request to the API server failed.
    #[error("ConfigMap {name}: {outage}")]
    Cluster {
        /// Which.
        name: &'static str,
        /// The error.
        outage: ApiError,
    },
}

impl CheckpointStore {
    /// Storage in the controller's own namespace of a cluster.
    #[must_use]
    pub fn config_maps(cluster: &Cluster, group: &str) -> Self {
        let api = Api::namespaced(cluster.client.clone(), &cluster.namespace);
        Self::ConfigMaps { api: Box::new(api), group: group.to_owned() }
    }

    const fn count(&self) -> usize {
        match self {
            Self::File(_) => 1,
            Self::ConfigMaps { .. } => CONFIG_MAPS.len(),
        }
    }

    async fn load(&self) -> Result<Vec<String>, CheckpointStoreError> {
        match self {
            Self::File(path) => match read_file(path) {
                Ok(text) => Ok(vec![text]),
                Err(error) => Err(CheckpointStoreError::System { path: path.clone(), error }),
            },
            Self::ConfigMaps { api, group } => {
                let mut texts = Vec::new();
                for name in CONFIG_MAPS {
                    let failed = |error| CheckpointStoreError::Cluster { name, outage: ApiError::from(&error) };
                    let found = api.get_opt(name).await.map_err(failed)?.and_then(|object| object.data);
                    texts.push(found.and_then(|mut data| data.remove(group)).unwrap_or_default());
                }
                Ok(texts)
            }
        }
    }

    async fn save(&self, at: usize, text: &str) -> Result<(), CheckpointStoreError> {
        match self {
            Self::File(path) => {
                replace_file(path, text).map_err(|error| CheckpointStoreError::System { path: path.clone(), error })
            }
            Self::ConfigMaps { api, group } => {
                let name = CONFIG_MAPS[at];
                let failed = |error: &kube::Error| CheckpointStoreError::Cluster { name, outage: ApiError::from(error) };
                match api.patch(name, &patch_params(), &Patch::Merge(json!({"data": {group: text}}))).await {
                    Ok(_) | Err(kube::Error::SerdeError(_)) => Ok(()),
                    Err(kube::Error::Api(status)) if status.code == 404 => {
                        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
                        let data = Some([(group.clone(), text.to_owned())].into());
                        let made = api.create(&post_params(), &ConfigMap { metadata, data, ..ConfigMap::default() }).await;
                        made.map(drop).map_err(|error| failed(&error))
                    }
                    Err(error) => Err(failed(&error)),
                }
            }
        }
    }
}

impl CheckpointStoreError {
    /// Whether the error may disappear by itself, so that a retry makes sense.
    const fn passes(&self) -> bool {
        matches!(self, Self::Cluster { outage: ApiError::Unreachable(_) | ApiError::Busy { .. }, .. })
    }
}

/// Sends the stored checkpoint to the planner, then stores the planner's decisions until the planner ends.
pub async fn keep(store: CheckpointStore, mut newest: watch::Receiver<Checkpoint>, changes: mpsc::Sender<Change>) {
    let Some(mut kept) = read(&store, &changes).await else { return };
    let mut is_failing = false;
    while newest.changed().await.is_ok() {
        tokio::time::sleep(WRITTEN_AFTER).await;
        let checkpoint = newest.borrow_and_update().clone();
        loop {
            match write(&store, &checkpoint, &mut kept).await {
                Ok(()) => break is_failing = false,
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(%error, "the checkpoint cannot be written; retrying. A new leader would decide its missing parts again");
                    }
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
        tokio::time::sleep(WRITE_INTERVAL).await;
    }
}

/// Reads the checkpoint; `None` once the planner has ended. If reading is refused, planning starts without a checkpoint.
async fn read(store: &CheckpointStore, changes: &mpsc::Sender<Change>) -> Option<Vec<String>> {
    let mut is_told = false;
    loop {
        let error = match store.load().await {
            Ok(texts) => {
                let read = Checkpoint::from_texts(&texts, Instant::now(), SystemTime::now());
                changes.send(Change::CheckpointReplaced(Box::new(read))).await.ok()?;
                return Some(texts);
            }
            Err(error) => error,
        };
        if !error.passes() && !std::mem::replace(&mut is_told, true) {
            tracing::error!(%error, "the checkpoint cannot be read; Services without an address in their status may get another one");
            changes.send(Change::CheckpointReplaced(Box::default())).await.ok()?;
        }
        tokio::select! {
            () = changes.closed() => return None,
            () = tokio::time::sleep(READ_AGAIN) => {}
        }
    }
}

async fn write(store: &CheckpointStore, checkpoint: &Checkpoint, kept: &mut [String]) -> Result<(), CheckpointStoreError> {
    let texts = checkpoint.to_texts(store.count(), Instant::now(), SystemTime::now());
    for (at, (text, kept)) in texts.into_iter().zip(kept).enumerate() {
        if *kept != text {
            store.save(at, &text).await?;
            *kept = text;
        }
    }
    Ok(())
}
