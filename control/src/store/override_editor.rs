//! Editing of overrides on behalf of operators. The planner gets every change.
//!
//! Invariant: a change is stored before it is confirmed, so that it survives the process and its leadership. While the
//! overrides cannot be read, nothing is changed and nothing is planned, because a plan without them would send flows to
//! drained backends and gateways again. Only the answer "not found" means that there are no overrides.

use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::sync::{Mutex, mpsc, watch};

use super::Storage;
use super::overrides::{self, OverrideStoreError};
use crate::world::change::Change;
use crate::world::overrides::{Overrides, TooManyOverrides};

/// Delays before reading is retried: 200 ms first, doubled up to the maximum.
const BACKOFF: ExponentialBuilder =
    ExponentialBuilder::new().with_min_delay(Duration::from_millis(200)).with_max_delay(READ_RETRY_MAX).without_max_times();
const READ_RETRY_MAX: Duration = Duration::from_secs(10);
/// Number of attempts of a write that conflicts with another one.
const ATTEMPTS: usize = 3;

/// Knowledge about the overrides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OverridesState {
    /// None yet: this controller does not lead, or has just begun to.
    #[default]
    NotLeading,
    /// They cannot be read, with the reason.
    Unreadable(String),
    /// The complete set.
    Loaded(Arc<Overrides>),
}

/// Why a change failed.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// This controller does not lead.
    #[error("this controller does not lead; send the request to the leader")]
    NotLeading,
    /// They cannot be read.
    #[error("the overrides cannot be read: {0}")]
    Unreadable(String),
    /// They cannot be written.
    #[error(transparent)]
    Store(#[from] OverrideStoreError),
    /// The maximum number of overrides is reached.
    #[error(transparent)]
    Full(#[from] TooManyOverrides),
}

/// Editor of overrides.
#[derive(Clone, Debug)]
pub struct OverrideEditor {
    storage: Arc<Storage>,
    /// Serializes changes.
    turn: Arc<Mutex<()>>,
    state: Arc<watch::Sender<OverridesState>>,
}

/// Guard of the task that serves the planner: when it is dropped, no overrides are known.
struct PlanningGuard<'a>(&'a OverrideEditor);

impl Drop for PlanningGuard<'_> {
    fn drop(&mut self) {
        self.0.state.send_replace(OverridesState::NotLeading);
    }
}

impl OverrideEditor {
    /// An editor of the overrides in `storage`.
    #[must_use]
    pub fn new(storage: Storage) -> Self {
        Self { storage: Arc::new(storage), turn: Arc::default(), state: Arc::default() }
    }

    /// Current knowledge.
    #[must_use]
    pub fn state(&self) -> OverridesState {
        self.state.borrow().clone()
    }

    /// Reads the overrides and sends them and every change to the planner, until the planner ends.
    pub async fn serve(&self, changes: mpsc::Sender<Change>) {
        let _guard = PlanningGuard(self);
        let mut seen = self.state.subscribe();
        let mut waits = BACKOFF.build();
        loop {
            match overrides::load(&self.storage).await {
                Ok((overrides, _)) => {
                    self.state.send_replace(OverridesState::Loaded(Arc::new(overrides)));
                    break;
                }
                Err(error) => {
                    let unreadable = OverridesState::Unreadable(error.to_string());
                    if self.state.send_replace(unreadable.clone()) != unreadable {
                        tracing::error!(%error, "drains and weights cannot be read; nothing is planned until they can, gateways keep their state");
                    }
                }
            }
            tokio::select! {
                () = changes.closed() => return,
                () = tokio::time::sleep(waits.next().unwrap_or(READ_RETRY_MAX)) => {}
            }
        }
        loop {
            let state = seen.borrow_and_update().clone();
            if let OverridesState::Loaded(overrides) = state {
                let change = Change::OverridesReplaced(Box::new((*overrides).clone()));
                if changes.send(change).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                () = changes.closed() => return,
                changed = seen.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Changes and stores the overrides. Returns the result of `change` of the successful attempt.
    ///
    /// # Errors
    /// See [`ChangeError`]; nothing is changed then.
    pub async fn change<T>(&self, change: impl Fn(&mut Overrides) -> Result<T, TooManyOverrides>) -> Result<T, ChangeError> {
        let _turn = self.turn.lock().await;
        match self.state() {
            OverridesState::NotLeading => return Err(ChangeError::NotLeading),
            OverridesState::Unreadable(why) => return Err(ChangeError::Unreadable(why)),
            OverridesState::Loaded(_) => {}
        }
        let mut attempt = 1;
        loop {
            let (mut overrides, version) = overrides::load(&self.storage).await?;
            let before = overrides.clone();
            let answer = change(&mut overrides)?;
            let saved = if overrides == before { Ok(()) } else { overrides::save(&self.storage, &overrides, version).await };
            match saved {
                Err(OverrideStoreError::Conflict) if attempt < ATTEMPTS => attempt += 1,
                Err(error) => return Err(error.into()),
                Ok(()) => {
                    let now = OverridesState::Loaded(Arc::new(overrides));
                    // A controller that stopped leading in the meantime keeps no overrides.
                    self.state.send_if_modified(|state| {
                        let is_news = *state != OverridesState::NotLeading && *state != now;
                        if is_news {
                            *state = now;
                        }
                        is_news
                    });
                    return Ok(answer);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::overrides::DrainTarget;
    use crate::world::overrides::tests::author;

    const WAIT: Duration = Duration::from_secs(20);

    fn drain(node: &str) -> impl Fn(&mut Overrides) -> Result<(), TooManyOverrides> {
        move |overrides| overrides.drain(DrainTarget::Node(node.to_owned()), author("alice"))
    }

    /// The next overrides sent to the planner.
    async fn next_overrides(changes: &mut mpsc::Receiver<Change>) -> Overrides {
        match tokio::time::timeout(WAIT, changes.recv()).await.unwrap() {
            Some(Change::OverridesReplaced(all)) => *all,
            other => panic!("{other:?}"),
        }
    }

    fn start(file: &std::path::Path) -> (OverrideEditor, mpsc::Receiver<Change>) {
        let editor = OverrideEditor::new(Storage::File(file.to_owned()));
        let (sender, changes) = mpsc::channel(4);
        let serving = editor.clone();
        tokio::spawn(async move { serving.serve(sender).await });
        (editor, changes)
    }

    #[tokio::test]
    async fn a_change_is_stored_sent_to_the_planner_and_kept_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("overrides.yaml");
        let (editor, mut changes) = start(&file);
        assert!(next_overrides(&mut changes).await.is_empty());
        editor.change(drain("a")).await.unwrap();
        let drained = next_overrides(&mut changes).await;
        assert!(drained.drains().contains_key(&DrainTarget::Node("a".to_owned())));
        drop((editor, changes));
        let (again, mut changes) = start(&file);
        assert_eq!(next_overrides(&mut changes).await, drained);
        assert!(again.change(|all| Ok(all.undrain(&DrainTarget::Node("a".to_owned())))).await.unwrap());
        assert!(next_overrides(&mut changes).await.is_empty());
    }

    #[tokio::test]
    async fn unreadable_overrides_are_unknown_and_are_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("overrides.yaml");
        fs_write(&file, "version: 9");
        let (editor, mut changes) = start(&file);
        let mut state = editor.state.subscribe();
        let is_unreadable = |state: &OverridesState| matches!(state, OverridesState::Unreadable(_));
        tokio::time::timeout(WAIT, state.wait_for(is_unreadable)).await.unwrap().unwrap();
        let error = editor.change(drain("a")).await.unwrap_err().to_string();
        assert!(error.contains("version 9") && error.contains("overrides.yaml"), "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "version: 9");
        fs_write(&file, "version: 1\ndrains: [{what: node/b, by: bob, at: '2026-01-31T12:00:00Z'}]");
        assert_eq!(next_overrides(&mut changes).await.len(), 1, "nothing was sent before it could be read");
        editor.change(drain("a")).await.unwrap();
        assert_eq!(next_overrides(&mut changes).await.len(), 2);
    }

    #[tokio::test]
    async fn a_change_that_cannot_be_stored_is_refused_and_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("overrides.yaml");
        let (editor, mut changes) = start(&file);
        assert!(next_overrides(&mut changes).await.is_empty());
        editor.change(drain("a")).await.unwrap();
        let stored = next_overrides(&mut changes).await;
        // No file takes the name of a directory with something in it.
        std::fs::create_dir_all(dir.path().join("overrides.yaml.new/full")).unwrap();
        let copy = dir.path().join("overrides.yaml.last");
        std::fs::remove_file(&copy).unwrap();
        std::fs::create_dir_all(copy.join("full")).unwrap();
        let error = editor.change(drain("b")).await.unwrap_err().to_string();
        assert!(error.contains("overrides.yaml") && error.contains("disk with room"), "{error}");
        assert_eq!(editor.state(), OverridesState::Loaded(Arc::new(stored)));
    }

    #[tokio::test]
    async fn overrides_whose_file_is_empty_or_cut_short_are_those_of_its_copy() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("overrides.yaml");
        let (editor, mut changes) = start(&file);
        next_overrides(&mut changes).await;
        editor.change(drain("a")).await.unwrap();
        next_overrides(&mut changes).await;
        editor.change(drain("b")).await.unwrap();
        let drained = next_overrides(&mut changes).await;
        let whole = std::fs::read(&file).unwrap();
        for length in 0..whole.len() {
            fs_write(&file, std::str::from_utf8(&whole[..length]).unwrap());
            assert_eq!(overrides::load(&editor.storage).await.unwrap().0, drained, "cut at {length}");
        }
    }

    fn fs_write(file: &std::path::Path, text: &str) {
        let beside = file.with_extension("new");
        std::fs::write(&beside, text).unwrap();
        std::fs::rename(&beside, file).unwrap();
    }

    #[tokio::test]
    async fn a_controller_that_does_not_lead_changes_no_override() {
        let dir = tempfile::tempdir().unwrap();
        let (editor, mut changes) = start(&dir.path().join("overrides.yaml"));
        next_overrides(&mut changes).await;
        drop(changes);
        let mut state = editor.state.subscribe();
        tokio::time::timeout(WAIT, state.wait_for(|state| *state == OverridesState::NotLeading)).await.unwrap().unwrap();
        assert!(matches!(editor.change(drain("a")).await, Err(ChangeError::NotLeading)));
    }
}
