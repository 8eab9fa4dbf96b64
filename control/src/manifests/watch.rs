//! Watches a directory by inotify and sends its objects as changes. What inotify does not tell, changes behind symbolic
//! links, is found by polling.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::ServiceStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry};
use notify::event::{AccessKind, AccessMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher as _};
use proto::ServiceName;
use proto::limits::FIELD_MANAGER;
use serde_json::json;
use tokio::sync::{Notify, mpsc};

use super::directory::{Directory, Objects};
use crate::world::change::Change;

/// Debounce time: editors write a file in several steps, so files are read once there was no event for this long,
const QUIET: Duration = Duration::from_millis(20);
/// or at the latest after this time.
const QUIET_MAX: Duration = Duration::from_millis(200);
/// Polling interval for a replaced directory, since an inotify watch belongs to the directory, not to its name, and for
/// files behind symbolic links.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Why a directory cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum FollowError {
    /// It cannot be listed.
    #[error("manifests directory {path}: {error}; create it, or correct `manifests`")]
    Directory {
        /// Which.
        path: PathBuf,
        /// Its error.
        error: io::Error,
    },
    /// inotify failed.
    #[error(
        "manifests directory {path} cannot be watched: {error}; raise fs.inotify.max_user_watches or max_user_instances if they are used up"
    )]
    Watch {
        /// Which.
        path: PathBuf,
        /// Its error.
        error: notify::Error,
    },
}

/// Sends the objects of `path` until the receiver of `changes` is dropped. `adopted` is the content of the status
/// files; `may_forget` is set once every file was read. `reread` reads all files again, whatever inotify and times say.
///
/// # Errors
/// If the directory cannot be read or watched at start. Later, errors are retried.
pub async fn follow(
    path: PathBuf,
    mut adopted: BTreeMap<ServiceName, ServiceStatus>,
    may_forget: Arc<AtomicBool>,
    reread: Arc<Notify>,
    changes: mpsc::Sender<Change>,
) -> Result<(), FollowError> {
    // One pending event suffices to read the directory again.
    let (events, mut seen) = mpsc::channel(1);
    let mut watch = Some(Watch::start(&path, events.clone())?);
    let mut directory = Directory::new(path.clone());
    let (first, notes) = directory.read().map_err(|error| FollowError::Directory { path: path.clone(), error })?;
    log_notes(notes);
    let mut unsent = first.or_else(|| Some(Objects::default()));
    let mut is_missing = false;
    loop {
        if let Some(objects) = unsent.take() {
            // A file that was never read may contain the Service of a status file.
            if directory.is_whole() {
                may_forget.store(true, Ordering::Relaxed);
            }
            if may_forget.load(Ordering::Relaxed) {
                adopted.retain(|name, _| objects.services.contains_key(name));
            }
            if send(objects, &adopted, &changes).await.is_err() {
                return Ok(());
            }
        }
        tokio::select! {
            () = changes.closed() => return Ok(()),
            _ = seen.recv() => settle(&mut seen).await,
            () = reread.notified() => {}
            () = tokio::time::sleep(POLL_INTERVAL) => {
                if !watch.as_ref().is_some_and(|watch| watch.is_of(directory.path())) {
                    watch = Watch::start(directory.path(), events.clone()).ok();
                } else if !directory.has_changed() {
                    continue;
                }
            }
        }
        match directory.read() {
            Ok((objects, notes)) => {
                log_notes(notes);
                (unsent, is_missing) = (objects, false);
            }
            Err(error) if !is_missing => {
                tracing::error!(path = %directory.path().display(), %error, "manifests directory not readable; its last good content stays in force");
                is_missing = true;
            }
            Err(_) => {}
        }
    }
}

fn log_notes(notes: Vec<String>) {
    for note in notes {
        tracing::warn!("{note}");
    }
}

async fn settle(seen: &mut mpsc::Receiver<()>) {
    let end = tokio::time::Instant::now() + QUIET_MAX;
    loop {
        let quiet = end.min(tokio::time::Instant::now() + QUIET);
        match tokio::time::timeout_at(quiet, seen.recv()).await {
            Ok(Some(())) if tokio::time::Instant::now() < end => {}
            _ => return,
        }
    }
}

/// Manifests contain no status of ours; it is in the status files, which sluice wrote.
async fn send(
    mut objects: Objects,
    adopted: &BTreeMap<ServiceName, ServiceStatus>,
    changes: &mpsc::Sender<Change>,
) -> Result<(), mpsc::error::SendError<Change>> {
    for (name, service) in &mut objects.services {
        service.status = adopted.get(name).cloned();
        service.metadata.managed_fields = service.status.as_ref().map(|_| {
            let (manager, subresource) = (Some(FIELD_MANAGER.to_owned()), Some("status".to_owned()));
            let fields_v1 = Some(FieldsV1(json!({"f:status": {"f:loadBalancer": {"f:ingress": {}}}})));
            vec![ManagedFieldsEntry { manager, subresource, fields_v1, ..ManagedFieldsEntry::default() }]
        });
    }
    for change in objects.into_changes() {
        changes.send(change).await?;
    }
    Ok(())
}

/// An inotify watch and its directory.
struct Watch {
    _watcher: RecommendedWatcher,
    identity: (u64, u64),
}

impl Watch {
    fn start(path: &std::path::Path, events: mpsc::Sender<()>) -> Result<Self, FollowError> {
        let failed = |error| FollowError::Watch { path: path.to_owned(), error };
        let identity = identity(path).map_err(|error| FollowError::Directory { path: path.to_owned(), error })?;
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Our own reads are not changes. A full channel already has a pending event, which suffices.
            if event.is_ok_and(|event| !is_reading(event.kind)) {
                let _ = events.try_send(());
            }
        })
        .map_err(failed)?;
        watcher.watch(path, RecursiveMode::NonRecursive).map_err(failed)?;
        Ok(Self { _watcher: watcher, identity })
    }

    fn is_of(&self, path: &std::path::Path) -> bool {
        identity(path).is_ok_and(|now| now == self.identity)
    }
}

fn is_reading(kind: EventKind) -> bool {
    matches!(kind, EventKind::Access(access) if access != AccessKind::Close(AccessMode::Write))
}

fn identity(path: &std::path::Path) -> io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use objects::ReadService;

    use super::*;

    const WAIT: Duration = Duration::from_secs(20);

    fn service(port: u16) -> String {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: web}}\nspec: {{type: LoadBalancer, ports: [{{port: {port}}}]}}\n"
        )
    }

    /// Waits for the expected ports of all Services.
    async fn until(changes: &mut mpsc::Receiver<Change>, expected: &[u16]) {
        let wait = async {
            loop {
                if let Some(Change::ServicesReplaced(services)) = changes.recv().await {
                    let port = |service: &ReadService| {
                        let candidate = service.candidate.as_ref().unwrap();
                        candidate.wanted.as_ref().unwrap().ports[0].port
                    };
                    if services.iter().map(port).collect::<Vec<_>>() == expected {
                        return;
                    }
                }
            }
        };
        tokio::time::timeout(WAIT, wait).await.unwrap();
    }

    #[tokio::test]
    async fn changes_of_files_are_sent_and_a_replaced_directory_is_watched() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manifests");
        fs::create_dir(&path).unwrap();
        let (sender, mut changes) = mpsc::channel(16);
        let task = tokio::spawn(follow(path.clone(), BTreeMap::new(), Arc::default(), Arc::default(), sender));
        until(&mut changes, &[]).await;
        fs::write(path.join("a.yaml"), service(80)).unwrap();
        until(&mut changes, &[80]).await;
        fs::write(path.join("new"), service(81)).unwrap();
        fs::rename(path.join("new"), path.join("a.yaml")).unwrap();
        until(&mut changes, &[81]).await;
        fs::rename(&path, dir.path().join("old")).unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join("b.yaml"), service(82)).unwrap();
        until(&mut changes, &[82]).await;
        fs::remove_file(path.join("b.yaml")).unwrap();
        until(&mut changes, &[]).await;
        drop(changes);
        task.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_manifest_behind_a_symbolic_link_is_followed() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let target = elsewhere.path().join("web.yaml");
        fs::write(&target, service(80)).unwrap();
        std::os::unix::fs::symlink(&target, dir.path().join("web.yaml")).unwrap();
        let (sender, mut changes) = mpsc::channel(16);
        let task = tokio::spawn(follow(dir.path().to_owned(), BTreeMap::new(), Arc::default(), Arc::default(), sender));
        until(&mut changes, &[80]).await;
        fs::write(&target, service(8080)).unwrap();
        until(&mut changes, &[8080]).await;
        fs::write(elsewhere.path().join("new"), service(8181)).unwrap();
        fs::rename(elsewhere.path().join("new"), &target).unwrap();
        until(&mut changes, &[8181]).await;
        drop(changes);
        task.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn all_files_are_read_again_on_request() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let target = elsewhere.path().join("web.yaml");
        fs::write(&target, service(80)).unwrap();
        std::os::unix::fs::symlink(&target, dir.path().join("web.yaml")).unwrap();
        let reread = Arc::new(Notify::new());
        let (sender, mut changes) = mpsc::channel(16);
        let task = tokio::spawn(follow(dir.path().to_owned(), BTreeMap::new(), Arc::default(), Arc::clone(&reread), sender));
        until(&mut changes, &[80]).await;
        // Of this clock, which moves on only while nothing else can.
        tokio::time::pause();
        let begun = tokio::time::Instant::now();
        fs::write(&target, service(81)).unwrap();
        reread.notify_one();
        until(&mut changes, &[81]).await;
        assert!(begun.elapsed() < POLL_INTERVAL, "without polling");
        drop(changes);
        task.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_directory_that_is_missing_at_start_is_an_error_with_its_path() {
        let (sender, _changes) = mpsc::channel(1);
        let path = PathBuf::from("/nonexistent/manifests");
        let error = follow(path, BTreeMap::new(), Arc::default(), Arc::default(), sender).await.unwrap_err().to_string();
        assert!(error.contains("/nonexistent/manifests"), "{error}");
    }
}
