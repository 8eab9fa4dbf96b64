//! The state on disk, from which a gateway starts if no controller can be reached.
//!
//! The file is `state` in the state directory: magic and format, a SHA-256 of the rest, then the time at which it was
//! last known to be current, the version of the program that wrote it with a line feed, and a full `WatchResponse`, which
//! also says whether the gateway is drained. It is replaced by a rename. Invariant: a loaded state is exactly the saved
//! one. A damaged file is moved aside with a warning and not used. Deliberately not here: which parts of a loaded state
//! may be used (`usable`).

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message as _;
use proto::convert::{self, ConvertError, full};
use proto::{GatewayState, Generation, NodeSets, Origin, Pool, State, v1};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::supervisor::Failure;

const MAGIC: &[u8; 14] = b"sluice state 1";
const HASH_BYTES: usize = 32;
/// Minimum time between two writes while the state changes.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);
/// Interval of writes while it does not change but a controller confirms it.
const REFRESHED_EVERY: Duration = Duration::from_secs(600);
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The state file.
#[derive(Clone, Debug)]
pub struct StateFile {
    dir: PathBuf,
}

/// What the gateway knew when the file was written.
#[derive(Clone, Debug, PartialEq)]
pub struct KnownBefore {
    /// The state, and how current it is.
    pub known: GatewayState,
    /// Whether the gateway was drained.
    pub draining: bool,
}

/// Why an existing state file is unusable.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It could not be read.
    #[error("cannot read {path}: {error}; make it readable for this process")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Its error.
        error: io::Error,
    },
    /// It is damaged.
    #[error("{path} is damaged ({what}); starting without it. It was moved to {moved} for inspection")]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: Box<StateFileDamage>,
        /// Its new path.
        moved: PathBuf,
    },
}

/// How a file is damaged.
#[derive(Debug, thiserror::Error)]
pub enum StateFileDamage {
    /// It belongs to another program or a later version.
    #[error("it does not begin with {:?}", String::from_utf8_lossy(MAGIC))]
    Magic,
    /// It is truncated or modified.
    #[error("its checksum does not match")]
    Checksum,
    /// The checksum is correct, but the content cannot be decoded.
    #[error("it cannot be decoded")]
    Encoding,
    /// A value in it is invalid.
    #[error(transparent)]
    Value(#[from] ConvertError),
}

/// Name of the file of the state.
pub const STATE: &str = "state";

impl StateFile {
    /// The file in `dir`; it may not exist yet.
    #[must_use]
    pub fn in_dir(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The state, if there is one, and whether it was current within `max_age` before `now`. A state from the future
    /// has an unknown age: a clock that was set back must not cost all services, and endpoints are not used before they
    /// pass a probe. The generation is empty if another version of the program wrote the file, which may lack fields
    /// that this version knows; the full state is then requested again.
    ///
    /// # Errors
    /// If there is a file and it is unusable.
    pub fn load(&self, now: SystemTime, max_age: Duration) -> Result<Option<KnownBefore>, LoadError> {
        let path = self.path(STATE);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(LoadError::Unreadable { path, error }),
        };
        let (saved_at, state, draining) = match decode(&bytes) {
            Ok(decoded) => decoded,
            Err(what) => {
                let moved = self.path("state.broken");
                fs::rename(&path, &moved).map_err(|error| LoadError::Unreadable { path: path.clone(), error })?;
                return Err(LoadError::Broken { path, what: Box::new(what), moved });
            }
        };
        let known = |origin| Ok(Some(KnownBefore { known: GatewayState { state: Arc::new(state), origin }, draining }));
        match now.duration_since(saved_at) {
            Err(ahead) => {
                let ahead_s = ahead.duration().as_secs();
                tracing::warn!(path = %path.display(), ahead_s, "the state on disk is dated in the future: its age is unknown, check the clock");
                known(Origin::Disk)
            }
            Ok(age) if age > max_age => {
                let (age_s, max_age_s) = (age.as_secs(), max_age.as_secs());
                tracing::warn!(path = %path.display(), age_s, max_age_s, "the state on disk is older than `maxStateAge`: only nodes are used of it");
                known(Origin::OldDisk)
            }
            Ok(_) => known(Origin::Disk),
        }
    }

    /// The state to start from before a controller is connected: that on disk, or none, with the reason in the log.
    #[must_use]
    pub fn known_at_start(&self, now: SystemTime, max_age: Duration) -> Option<KnownBefore> {
        match self.load(now, max_age) {
            Ok(saved) => saved.inspect(|KnownBefore { known, draining }| {
                tracing::info!(
                    services = known.state.services.len(),
                    draining,
                    "starting from the state on disk until a controller is there"
                );
            }),
            Err(error) => {
                tracing::error!(%error, "not starting from the state on disk");
                None
            }
        }
    }

    /// Replaces the file: mode 0600 in a directory of mode 0700, synced to disk before the rename.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn save(&self, state: &State, draining: bool, now: SystemTime) -> io::Result<()> {
        replace(&self.dir, STATE, [encode(state, draining, now).as_slice()].into_iter(), File::sync_all)?;
        File::open(&self.dir)?.sync_all()
    }
}

/// Creates a directory that only its owner may enter, unless there is one.
///
/// # Errors
/// The error of the operating system.
pub fn create_private(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Replaces the file `name` of a private directory: mode 0600, complete before it gets its name. `finish` is called with
/// the written file. After an error, the file is the former one, and nothing of the new one takes room on the disk.
///
/// # Errors
/// The error of the operating system.
pub fn replace<'a>(
    dir: &Path,
    name: &str,
    bytes: impl Iterator<Item = &'a [u8]>,
    finish: fn(&File) -> io::Result<()>,
) -> io::Result<()> {
    create_private(dir)?;
    let new = temporary(dir, name);
    remove(&new)?;
    let written = write(&new, bytes, finish).and_then(|()| fs::rename(&new, dir.join(name)));
    if written.is_err() {
        // The error of the write says more.
        let _ = fs::remove_file(&new);
    }
    written
}

fn write<'a>(path: &Path, mut bytes: impl Iterator<Item = &'a [u8]>, finish: fn(&File) -> io::Result<()>) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    bytes.try_for_each(|bytes| file.write_all(bytes))?;
    finish(&file)
}

/// Removes what a process that was killed while it wrote has left of the files `names`: as large as the files, it could
/// take the room that they need.
pub fn remove_temporary(dir: &Path, names: &[&str]) {
    for path in names.iter().map(|name| temporary(dir, name)) {
        if let Err(error) = remove(&path) {
            tracing::warn!(path = %path.display(), %error, "a temporary file of an earlier process cannot be removed");
        }
    }
}

fn temporary(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.new"))
}

/// Removes a file; one that does not exist is no error.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn encode(state: &State, draining: bool, now: SystemTime) -> Vec<u8> {
    let saved_at_s = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut rest = saved_at_s.to_be_bytes().to_vec();
    rest.extend_from_slice(VERSION.as_bytes());
    rest.push(b'\n');
    rest.extend(v1::WatchResponse { draining, ..full(state) }.encode_to_vec());
    [&MAGIC[..], &Sha256::digest(&rest), &rest].concat()
}

fn decode(bytes: &[u8]) -> Result<(SystemTime, State, bool), StateFileDamage> {
    let (hash, rest) =
        bytes.strip_prefix(MAGIC).ok_or(StateFileDamage::Magic)?.split_at_checked(HASH_BYTES).ok_or(StateFileDamage::Checksum)?;
    if *hash != *Sha256::digest(rest) {
        return Err(StateFileDamage::Checksum);
    }
    let (saved_at_s, rest) = rest.split_first_chunk().ok_or(StateFileDamage::Encoding)?;
    let end = rest.iter().position(|byte| *byte == b'\n').ok_or(StateFileDamage::Encoding)?;
    let (version, message) = rest.split_at(end);
    let message = v1::WatchResponse::decode(&message[1..]).map_err(|_| StateFileDamage::Encoding)?;
    let known_generation = message.generation.filter(|_| version == VERSION.as_bytes());
    let (sets, errors) = convert::node_sets(message.node_sets, &NodeSets::new());
    if let Some(error) = errors.into_iter().next() {
        return Err(error.into());
    }
    let service = |message| convert::service(message, &sets).map(|service| (service.name.clone(), Arc::new(service)));
    let state = State {
        generation: known_generation.map_or_else(Generation::default, Generation::from),
        services: message.services.into_iter().map(service).collect::<Result<_, _>>()?,
        pools: message.pools.into_iter().map(Pool::try_from).collect::<Result<_, _>>()?,
    };
    Ok((UNIX_EPOCH + Duration::from_secs(u64::from_be_bytes(*saved_at_s)), state, message.draining))
}

/// Saves the controller's state and drain after changes, and repeatedly while they stay current. `stored` is true while
/// the file is from a controller that sent it to this process: not before its first state, and not after a failure.
///
/// A state is written once every worker forwards by it or a later one, as `reached` tells, or after a second: to write a
/// large one takes a tenth of a second, in which the compiler may need the core. What is written is the newest state then.
///
/// # Errors
/// If the file cannot be written.
pub async fn run(
    file: StateFile,
    (mut known, mut draining): (watch::Receiver<Option<GatewayState>>, watch::Receiver<bool>),
    (connected, mut reached): (watch::Receiver<bool>, watch::Receiver<Option<Generation>>),
    stored: watch::Sender<bool>,
) -> Result<(), Failure> {
    let mut refresh = interval(REFRESHED_EVERY);
    refresh.set_missed_tick_behavior(MissedTickBehavior::Delay);
    known.mark_changed();
    loop {
        let (due, is_new) = tokio::select! {
            changed = known.changed() => (changed.map(|()| true), true),
            changed = draining.changed() => (changed.map(|()| true), false),
            _ = refresh.tick() => (Ok(*connected.borrow()), false),
        };
        let Ok(due) = due else { return Ok(()) };
        let newest = known.borrow_and_update().clone().filter(|known| due && known.origin == Origin::Controller);
        let Some(GatewayState { state: newest, .. }) = newest else { continue };
        if is_new {
            let have_it =
                |reached: &Option<Generation>| reached.as_ref().is_some_and(|reached| reached.includes(&newest.generation));
            tokio::select! {
                _ = timeout(AT_MOST_EVERY, reached.wait_for(have_it)) => {}
                _ = draining.changed() => {}
            }
        }
        let Some(GatewayState { state, .. }) = known.borrow_and_update().clone() else { continue };
        let (file, path, draining) = (file.clone(), file.path(STATE), *draining.borrow_and_update());
        let saved = tokio::task::spawn_blocking(move || file.save(&state, draining, SystemTime::now())).await?;
        stored.send_replace(saved.is_ok());
        saved.map_err(|error| {
            format!("cannot write {}: {error}; a restart without a controller would start empty", path.display())
        })?;
        tokio::time::sleep(AT_MOST_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::agent::controller_client::received::tests::{service, state};

    const DAY: Duration = Duration::from_secs(86_400);

    fn saved() -> (tempfile::TempDir, StateFile, State, SystemTime) {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::in_dir(&dir.path().join("sluice"));
        let state = state("e", 3, &[service("a", &["10.0.0.1:80"]), service("b", &["10.0.0.2:80", "10.0.0.3:80"])]);
        let now = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        file.save(&state, false, now).unwrap();
        (dir, file, state, now)
    }

    fn with(state: &State, origin: Origin, draining: bool) -> KnownBefore {
        KnownBefore { known: GatewayState { state: Arc::new(state.clone()), origin }, draining }
    }

    #[test]
    fn what_was_saved_is_loaded_and_only_the_owner_may_read_it() {
        let (_dir, file, state, now) = saved();
        file.save(&state, true, now).unwrap();
        assert_eq!(file.load(now, DAY).unwrap(), Some(with(&state, Origin::Disk, true)));
        file.save(&state, false, now).unwrap();
        assert_eq!(file.load(now + DAY, DAY).unwrap(), Some(with(&state, Origin::Disk, false)));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&file.path(STATE)), mode(&file.dir)), (0o600, 0o700));
        assert!(!file.path("state.new").exists());
    }

    #[test]
    fn without_a_file_there_is_no_state_and_no_error() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(StateFile::in_dir(dir.path()).load(SystemTime::now(), DAY).unwrap(), None);
    }

    #[test]
    fn a_file_cut_short_or_changed_anywhere_is_moved_aside() {
        let (_dir, file, _, now) = saved();
        let good = fs::read(file.path(STATE)).unwrap();
        for i in 0..good.len() {
            assert!(decode(&good[..i]).is_err(), "cut at {i}");
            let mut changed = good.clone();
            changed[i] ^= 1;
            assert!(decode(&changed).is_err(), "changed at {i}");
        }
        fs::write(file.path(STATE), &good[..good.len() - 1]).unwrap();
        assert!(matches!(file.load(now, DAY), Err(LoadError::Broken { what, .. }) if matches!(*what, StateFileDamage::Checksum)));
        assert!(file.path("state.broken").exists());
        assert_eq!(file.load(now, DAY).unwrap(), None);
    }

    #[test]
    fn an_expired_file_is_refused_a_newer_one_and_one_from_the_future_are_used() {
        let (_dir, file, state, now) = saved();
        let known = |origin| Some(with(&state, origin, false));
        assert_eq!(file.load(now + DAY + Duration::from_secs(1), DAY).unwrap(), known(Origin::OldDisk));
        assert_eq!(file.load(now - 3 * DAY, DAY).unwrap(), known(Origin::Disk));
    }

    #[test]
    fn a_write_that_was_killed_halfway_leaves_the_old_state() {
        let (_dir, file, state, now) = saved();
        fs::write(file.path("state.new"), b"half").unwrap();
        assert_eq!(*file.load(now, DAY).unwrap().unwrap().known.state, state);
        file.save(&state, false, now).unwrap();
    }

    #[test]
    fn a_write_that_fails_leaves_the_former_file_and_no_temporary_one() {
        let (_dir, file, state, now) = saved();
        // As on a full disk: the bytes are written, and making them last fails.
        let full = |_: &File| Err(io::ErrorKind::StorageFull.into());
        let failed = replace(&file.dir, STATE, [&b"more than fits"[..]].into_iter(), full);
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(!file.path("state.new").exists());
        assert_eq!(*file.load(now, DAY).unwrap().unwrap().known.state, state);
    }

    #[test]
    fn temporary_files_of_an_earlier_process_go_at_the_start() {
        let (_dir, file, state, now) = saved();
        for name in ["state.new", "flows.new", "other.new"] {
            fs::write(file.path(name), "half").unwrap();
        }
        remove_temporary(&file.dir, &[STATE, "flows"]);
        let left = ["state.new", "flows.new", "other.new"].map(|name| file.path(name).exists());
        assert_eq!(left, [false, false, true]);
        remove_temporary(&file.dir, &[STATE]);
        assert_eq!(*file.load(now, DAY).unwrap().unwrap().known.state, state);
    }

    #[test]
    fn the_state_of_another_program_version_has_no_generation() {
        let (_dir, _, state, now) = saved();
        let mut bytes = encode(&state, false, now);
        let rest = MAGIC.len() + HASH_BYTES;
        bytes[rest + 8] ^= 1;
        let hash = Sha256::digest(&bytes[rest..]);
        bytes[MAGIC.len()..rest].copy_from_slice(&hash);
        let (_, loaded, _) = decode(&bytes).unwrap();
        assert_eq!(loaded, State { generation: Generation::default(), ..state });
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_saves_what_the_controller_sent_once_workers_have_it_and_not_what_came_from_disk() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::in_dir(dir.path());
        let at = |counter: u64| state("e", counter, &[service("a", &[&format!("10.0.0.{counter}:80")])]);
        let of_controller = |counter| Some(GatewayState { state: Arc::new(at(counter)), origin: Origin::Controller });
        let (sender, known) = watch::channel(Some(GatewayState { state: Arc::new(at(1)), origin: Origin::Disk }));
        let (_connected, connected) = watch::channel(true);
        let (stored, mut is_stored) = watch::channel(false);
        let (drain, draining) = watch::channel(false);
        let (reaches, reached) = watch::channel(None);
        let task = tokio::spawn(run(file.clone(), (known, draining), (connected, reached), stored));
        sender.send_replace(Some(GatewayState { state: Arc::new(at(1)), origin: Origin::LastProcess }));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!((file.load(SystemTime::now(), DAY).unwrap(), *is_stored.borrow()), (None, false), "no controller has sent it");
        // The time until a state is in the file, of the clock that the test turns.
        let comes = async |wanted: KnownBefore| {
            let (start, deadline) = (tokio::time::Instant::now(), std::time::Instant::now() + Duration::from_secs(20));
            while file.load(SystemTime::now(), DAY).unwrap().as_ref() != Some(&wanted) {
                assert!(std::time::Instant::now() < deadline);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            start.elapsed()
        };
        sender.send_replace(of_controller(2));
        tokio::time::sleep(AT_MOST_EVERY / 2).await;
        assert_eq!(file.load(SystemTime::now(), DAY).unwrap(), None, "workers do not have it yet");
        reaches.send_replace(Some(at(2).generation));
        assert!(comes(with(&at(2), Origin::Disk, false)).await < AT_MOST_EVERY / 4, "at once when they do");
        assert!(*is_stored.wait_for(|stored| *stored).await.unwrap());
        tokio::time::sleep(2 * AT_MOST_EVERY).await;
        sender.send_replace(of_controller(3));
        reaches.send_replace(Some(at(4).generation));
        assert!(comes(with(&at(3), Origin::Disk, false)).await < AT_MOST_EVERY / 4, "or a later one");
        tokio::time::sleep(2 * AT_MOST_EVERY).await;
        sender.send_replace(of_controller(5));
        assert!(comes(with(&at(5), Origin::Disk, false)).await >= AT_MOST_EVERY, "although they do not have it after a second");
        tokio::time::sleep(2 * AT_MOST_EVERY).await;
        sender.send_replace(of_controller(6));
        drain.send_replace(true);
        assert!(comes(with(&at(6), Origin::Disk, true)).await < AT_MOST_EVERY / 4, "a drain waits for nothing");
        drop(sender);
        task.await.unwrap().unwrap();
    }
}
