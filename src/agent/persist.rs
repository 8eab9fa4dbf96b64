//! The state on disk, from which a gateway starts if no controller can be reached.
//!
//! The file is `state` in the state directory: [`sealed`] with the time at which it was last known to be current, the
//! version of the program that wrote it with a line feed, and a full `WatchResponse`, which also says whether the gateway
//! is drained. It is replaced by a rename. Invariant: a loaded state is exactly the saved one, but for Services that only
//! a newer version can read, which are refused. A damaged file is moved aside with an error in the log and not used. Deliberately not here: which parts of a loaded state may be used
//! (`usable`).

pub mod directories;
pub mod sealed;

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use control::store::files::Survives;
use prost::Message as _;
use proto::convert::{self, ConvertError, full, refused_service, service_name};
use proto::{GatewayState, Generation, NodeSets, Origin, Pool, Services, State, v1};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::supervisor::Failure;
use directories::StateDirs;
use sealed::{Age, FileDamage, Moment, seal, unseal};

/// Name of the format.
const FORMAT: &str = "sluice state ";
/// Minimum time between two writes while the state changes.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);
/// Interval of writes while it does not change but a controller confirms it.
const REFRESHED_EVERY: Duration = Duration::from_secs(600);
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The state file.
#[derive(Clone, Debug)]
pub struct StateFile {
    dirs: StateDirs,
}

/// What the gateway knew when the file was written.
#[derive(Clone, Debug, PartialEq)]
pub struct PersistedState {
    /// The state, and how current it is.
    pub state: GatewayState,
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
    /// It is of another format, truncated or modified.
    #[error(transparent)]
    Sealed(#[from] FileDamage),
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
    /// The file in these directories; it may not exist yet.
    #[must_use]
    pub const fn new(dirs: StateDirs) -> Self {
        Self { dirs }
    }

    /// The newest state, if there is one, and whether it was current within `max_age` before `now`. A state from the
    /// future has an unknown age: a clock that was set back must not cost all services, and endpoints are not used before
    /// they pass a probe. The generation is empty if another version of the program wrote the file, which may lack fields
    /// that this version knows; the full state is then requested again. So it is if a Service is of a newer version.
    ///
    /// # Errors
    /// If there are files and none of them is usable.
    pub fn load(&self, now: Moment, max_age: Duration) -> Result<Option<PersistedState>, LoadError> {
        let (mut newest, mut unusable) = (None::<(Moment, PathBuf, State, bool)>, None);
        for path in self.dirs.paths(STATE) {
            match read(&path) {
                Ok(None) => {}
                Ok(Some((written, state, draining))) => {
                    if newest.as_ref().is_none_or(|(newest, ..)| now.is_newer(&written, newest)) {
                        newest = Some((written, path, state, draining));
                    }
                }
                Err(error) => unusable = Some(error),
            }
        }
        let Some((written, path, state, draining)) = newest else { return unusable.map_or(Ok(None), Err) };
        if let Some(error) = unusable {
            tracing::error!(%error, used = %path.display(), "a state on disk is not used, another one is");
        }
        let origin = match now.age_of(&written) {
            Age::Unknown(ahead) => {
                let ahead_s = ahead.as_secs();
                tracing::warn!(path = %path.display(), ahead_s, "the state on disk is dated in the future: its age is unknown, check the clock");
                Origin::Disk
            }
            Age::OfThisBoot(age) | Age::ByTimeOfDay(age) if age > max_age => {
                let (age_s, max_age_s) = (age.as_secs(), max_age.as_secs());
                tracing::warn!(path = %path.display(), age_s, max_age_s, "the state on disk is older than `maxStateAge`: only nodes are used of it");
                Origin::Expired
            }
            Age::OfThisBoot(_) | Age::ByTimeOfDay(_) => Origin::Disk,
        };
        Ok(Some(PersistedState { state: GatewayState { state: Arc::new(state), origin }, draining }))
    }

    /// When the newest file was written, if there is one.
    #[must_use]
    pub fn written(&self) -> Option<Moment> {
        let now = Moment::now();
        let head = |path: PathBuf| {
            let mut head = Vec::new();
            let limit = u64::try_from(sealed::HEAD_BYTES).unwrap_or(u64::MAX);
            fs::File::open(path).ok()?.take(limit).read_to_end(&mut head).ok()?;
            sealed::written(FORMAT, &head)
        };
        self.dirs.paths(STATE).filter_map(head).reduce(|one, other| if now.is_newer(&other, &one) { other } else { one })
    }

    /// The state to start from before a controller is connected: that on disk, or none, with the reason in the log.
    #[must_use]
    pub fn load_at_start(&self, now: Moment, max_age: Duration) -> Option<PersistedState> {
        match self.load(now, max_age) {
            Ok(saved) => saved.inspect(|PersistedState { state: current, draining }| {
                tracing::info!(
                    services = current.state.services.len(),
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

    /// Replaces the file, so that it survives a power cut if the disk takes it.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn save(&self, state: &State, draining: bool, now: Moment) -> io::Result<()> {
        self.dirs.replace(STATE, Survives::PowerCut, [encode(state, draining, now).as_slice()].into_iter())
    }
}

/// The content of a file, if there is one. A damaged one is moved aside.
fn read(path: &Path) -> Result<Option<(Moment, State, bool)>, LoadError> {
    let unreadable = |error| LoadError::Unreadable { path: path.to_owned(), error };
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(unreadable)?,
    };
    decode(&bytes).map(Some).map_err(|what| {
        let moved = path.with_extension("broken");
        match fs::rename(path, &moved) {
            Ok(()) => LoadError::Broken { path: path.to_owned(), what: Box::new(what), moved },
            Err(error) => unreadable(error),
        }
    })
}

fn encode(state: &State, draining: bool, now: Moment) -> Vec<u8> {
    let message = v1::WatchResponse { draining, ..full(state) }.encode_to_vec();
    seal(FORMAT, now, &[VERSION.as_bytes(), b"\n", &message].concat())
}

fn decode(bytes: &[u8]) -> Result<(Moment, State, bool), StateFileDamage> {
    let (written, content) = unseal(FORMAT, bytes)?;
    let end = content.iter().position(|byte| *byte == b'\n').ok_or(StateFileDamage::Encoding)?;
    let (version, message) = content.split_at(end);
    let message = v1::WatchResponse::decode(&message[1..]).map_err(|_| StateFileDamage::Encoding)?;
    let (sets, errors) = convert::node_sets(message.node_sets, &NodeSets::new());
    if let Some(error) = errors.into_iter().next() {
        return Err(error.into());
    }
    let (mut services, mut are_whole) = (Services::new(), true);
    for message in message.services {
        let name = service_name(&format!("{}/{}", message.namespace, message.name))?;
        let service = convert::service(message, &sets).unwrap_or_else(|error| {
            tracing::error!(service = %name, %error, "this gateway cannot read the Service on disk, and does not serve it");
            are_whole = false;
            refused_service(name, &error)
        });
        services.insert(service.name.clone(), Arc::new(service));
    }
    // Without a generation the controller sends everything.
    let known_generation = message.generation.filter(|_| are_whole && version == VERSION.as_bytes());
    let state = State {
        generation: known_generation.map_or_else(Generation::default, Generation::from),
        services,
        pools: message.pools.into_iter().map(Pool::try_from).collect::<Result<_, _>>()?,
    };
    Ok((written, state, message.draining))
}

/// The task that writes the state to disk. Cloned for each start.
#[derive(Clone, Debug)]
pub struct StateWriter {
    /// The file.
    pub file: StateFile,
    /// The current state.
    pub state: watch::Receiver<Option<GatewayState>>,
    /// Whether the gateway is drained.
    pub draining: watch::Receiver<bool>,
    /// Whether a controller is connected.
    pub connected: watch::Receiver<bool>,
    /// The generation that every worker has applied.
    pub applied: watch::Receiver<Option<Generation>>,
    /// Output: whether the file is from a controller that sent it to this process.
    pub is_persisted: watch::Sender<bool>,
}

impl StateWriter {
    /// Saves the controller's state and drain after changes, and repeatedly while they stay current. `is_persisted` is true while
    /// the file is from a controller that sent it to this process: not before its first state, and not after a failure.
    ///
    /// A state is written once every worker forwards by it or a later one, by `applied`, or after a second: to write a
    /// large one takes a tenth of a second, in which the compiler may need the core. What is written is the newest state then.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { file, mut state, mut draining, connected, mut applied, is_persisted } = self;
        let mut refresh = interval(REFRESHED_EVERY);
        refresh.set_missed_tick_behavior(MissedTickBehavior::Delay);
        state.mark_changed();
        loop {
            let (due, is_new) = tokio::select! {
                changed = state.changed() => (changed.map(|()| true), true),
                changed = draining.changed() => (changed.map(|()| true), false),
                _ = refresh.tick() => (Ok(*connected.borrow()), false),
            };
            let Ok(due) = due else { return Ok(()) };
            let newest = state.borrow_and_update().clone().filter(|state| due && state.origin == Origin::Controller);
            let Some(GatewayState { state: newest, .. }) = newest else { continue };
            if is_new {
                let have_it =
                    |applied: &Option<Generation>| applied.as_ref().is_some_and(|applied| applied.includes(&newest.generation));
                tokio::select! {
                    _ = timeout(AT_MOST_EVERY, applied.wait_for(have_it)) => {}
                    _ = draining.changed() => {}
                }
            }
            // It may have expired meanwhile: the time of the file would make it young again.
            let newest = state.borrow_and_update().clone().filter(|state| state.origin == Origin::Controller);
            let Some(GatewayState { state: current, .. }) = newest else { continue };
            let (file, dir, draining) = (file.clone(), file.dirs.disk().to_owned(), *draining.borrow_and_update());
            let saved = tokio::task::spawn_blocking(move || file.save(&current, draining, Moment::now())).await?;
            is_persisted.send_replace(saved.is_ok());
            saved.map_err(|error| {
                format!("cannot write {}: {error}; a restart without a controller would start empty", dir.join(STATE).display())
            })?;
            tokio::time::sleep(AT_MOST_EVERY).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use proto::{Reason, ServiceName};

    use super::sealed::tests::moment;
    use super::*;
    use crate::controller_client::received::tests::{service, state};

    const DAY: Duration = Duration::from_secs(86_400);

    /// A state in a directory that does not exist yet, and a runtime directory beside it.
    fn saved() -> (tempfile::TempDir, StateFile, State, Moment) {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::new(StateDirs::with_runtime(&dir.path().join("sluice"), Some(&dir.path().join("run"))));
        let state = state("e", 3, &[service("a", &["10.0.0.1:80"]), service("b", &["10.0.0.2:80", "10.0.0.3:80"])]);
        let now = moment(1, 1000, 0);
        file.save(&state, false, now).unwrap();
        (dir, file, state, now)
    }

    /// Another boot, so many seconds later.
    fn rebooted(seconds: u64) -> Moment {
        moment(2, 10, seconds)
    }

    fn path(file: &StateFile) -> PathBuf {
        file.dirs.disk().join(STATE)
    }

    fn with(state: &State, origin: Origin, draining: bool) -> PersistedState {
        PersistedState { state: GatewayState { state: Arc::new(state.clone()), origin }, draining }
    }

    #[test]
    fn what_was_saved_is_loaded_and_only_the_owner_may_read_it() {
        let (_dir, file, state, now) = saved();
        file.save(&state, true, now).unwrap();
        assert_eq!(file.load(now, DAY).unwrap(), Some(with(&state, Origin::Disk, true)));
        file.save(&state, false, now).unwrap();
        assert_eq!(file.load(rebooted(86_400), DAY).unwrap(), Some(with(&state, Origin::Disk, false)));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path(&file)), mode(file.dirs.disk())), (0o600, 0o700));
        assert_eq!(fs::read_dir(file.dirs.disk()).unwrap().count(), 1);
    }

    #[test]
    fn without_a_file_there_is_no_state_and_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::new(StateDirs::with_runtime(dir.path(), None));
        assert_eq!(file.load(Moment::now(), DAY).unwrap(), None);
    }

    #[test]
    fn a_file_cut_short_or_changed_anywhere_is_moved_aside() {
        let (_dir, file, _, now) = saved();
        let good = fs::read(path(&file)).unwrap();
        for i in 0..good.len() {
            assert!(decode(&good[..i]).is_err(), "cut at {i}");
            let mut changed = good.clone();
            changed[i] ^= 4;
            assert!(decode(&changed).is_err(), "changed at {i}");
        }
        for length in [good.len() - 1, 0] {
            fs::write(path(&file), &good[..length]).unwrap();
            assert!(matches!(file.load(now, DAY), Err(LoadError::Broken { .. })));
            assert_eq!(fs::read(path(&file).with_extension("broken")).unwrap(), good[..length]);
            assert_eq!(file.load(now, DAY).unwrap(), None);
        }
    }

    #[test]
    fn the_newest_valid_file_of_disk_and_memory_is_used() {
        let (dir, file, old, now) = saved();
        let (new, later) = (state("e", 4, &[service("c", &["10.0.0.4:80"])]), moment(1, 1001, 0));
        let memory = dir.path().join("run/state/state");
        fs::create_dir_all(memory.parent().unwrap()).unwrap();
        fs::write(&memory, encode(&new, true, later)).unwrap();
        let load = || file.load(later, DAY).unwrap();
        assert_eq!(load(), Some(with(&new, Origin::Disk, true)));
        fs::write(&memory, encode(&new, true, moment(1, 999, 0))).unwrap();
        assert_eq!(load(), Some(with(&old, Origin::Disk, false)));
        fs::write(path(&file), "").unwrap();
        assert_eq!(load(), Some(with(&new, Origin::Disk, true)), "the empty one does not count");
        assert!(path(&file).with_extension("broken").exists());
        file.save(&old, false, now).unwrap();
        assert!(!memory.exists(), "the disk is written again");
    }

    #[test]
    fn an_expired_file_is_refused_a_newer_one_and_one_from_the_future_are_used() {
        let (_dir, file, state, _) = saved();
        let known = |origin| Some(with(&state, origin, false));
        assert_eq!(file.load(rebooted(86_401), DAY).unwrap(), known(Origin::Expired));
        let earlier = Moment { time_of_day: rebooted(0).time_of_day - 3 * DAY, ..rebooted(0) };
        assert_eq!(file.load(earlier, DAY).unwrap(), known(Origin::Disk));
    }

    #[test]
    fn a_clock_that_jumps_within_a_boot_makes_no_state_old() {
        let (_dir, file, state, _) = saved();
        let known = |origin| Some(with(&state, origin, false));
        assert_eq!(file.load(moment(1, 1002, 400 * 86_400), DAY).unwrap(), known(Origin::Disk));
        assert_eq!(file.load(moment(1, 1000 + 86_401, 0), DAY).unwrap(), known(Origin::Expired), "although the clock stood");
    }

    #[test]
    fn the_state_of_another_program_version_has_no_generation() {
        let (_dir, _, state, now) = saved();
        let message = full(&state).encode_to_vec();
        let bytes = seal(FORMAT, now, &[b"0.0.1\n", message.as_slice()].concat());
        let (_, loaded, _) = decode(&bytes).unwrap();
        assert_eq!(loaded, State { generation: Generation::default(), ..state });
    }

    #[test]
    fn a_service_of_a_newer_version_is_refused_alone() {
        let (_dir, _, state, now) = saved();
        let mut message = full(&state);
        "nat+later".clone_into(&mut message.services[0].mode);
        let saved_by = |version: &str| seal(FORMAT, now, &[version.as_bytes(), b"\n", &message.encode_to_vec()].concat());
        for version in [VERSION, "99.0.0"] {
            let (_, loaded, _) = decode(&saved_by(version)).unwrap();
            let [a, b] = ["a", "b"].map(|name| &loaded.services[&ServiceName::new("default", name)]);
            let refusal = a.refusal.as_ref().expect("a refusal");
            assert!(refusal.reason == Reason::Unsupported && refusal.message.contains("nat+later"), "{refusal:?}");
            assert_eq!(*b, service("b", &["10.0.0.2:80", "10.0.0.3:80"]));
            assert_eq!(loaded.generation, Generation::default(), "the controller sends the Service again");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_task_saves_what_the_controller_sent_once_workers_have_it_and_not_what_came_from_disk() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::new(StateDirs::with_runtime(dir.path(), None));
        let at = |counter: u64| state("e", counter, &[service("a", &[&format!("10.0.0.{counter}:80")])]);
        let of_controller = |counter| Some(GatewayState { state: Arc::new(at(counter)), origin: Origin::Controller });
        let (sender, known) = watch::channel(Some(GatewayState { state: Arc::new(at(1)), origin: Origin::Disk }));
        let (_connected, connected) = watch::channel(true);
        let (stored, mut is_stored) = watch::channel(false);
        let (drain, draining) = watch::channel(false);
        let (reaches, applied) = watch::channel(None);
        let task = tokio::spawn(
            StateWriter { file: file.clone(), state: known, draining, connected, applied, is_persisted: stored }.run(),
        );
        sender.send_replace(Some(GatewayState { state: Arc::new(at(1)), origin: Origin::LastProcess }));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!((file.load(Moment::now(), DAY).unwrap(), *is_stored.borrow()), (None, false), "no controller has sent it");
        // The time until a state is in the file, of the clock that the test turns.
        let comes = async |wanted: PersistedState| {
            let (start, deadline) = (tokio::time::Instant::now(), std::time::Instant::now() + Duration::from_secs(20));
            while file.load(Moment::now(), DAY).unwrap().as_ref() != Some(&wanted) {
                assert!(std::time::Instant::now() < deadline);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            start.elapsed()
        };
        sender.send_replace(of_controller(2));
        tokio::time::sleep(AT_MOST_EVERY / 2).await;
        assert_eq!(file.load(Moment::now(), DAY).unwrap(), None, "workers do not have it yet");
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

    #[tokio::test(start_paused = true)]
    async fn a_state_that_expires_before_it_is_saved_is_not_saved_as_young() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::new(StateDirs::with_runtime(dir.path(), None));
        let with = |origin| Some(GatewayState { state: Arc::new(state("e", 1, &[service("a", &["10.0.0.1:80"])])), origin });
        let (sender, known) = watch::channel(with(Origin::Controller));
        let (_drain, draining) = watch::channel(false);
        let ((_connected, connected), (_reaches, applied)) = (watch::channel(false), watch::channel(None));
        let task = tokio::spawn(
            StateWriter {
                file: file.clone(),
                state: known,
                draining,
                connected,
                applied,
                is_persisted: watch::Sender::default(),
            }
            .run(),
        );
        tokio::time::sleep(AT_MOST_EVERY / 2).await;
        sender.send_replace(with(Origin::Expired));
        tokio::time::sleep(AT_MOST_EVERY).await;
        drop(sender);
        task.await.unwrap().unwrap();
        assert_eq!(file.load(Moment::now(), DAY).unwrap(), None);
    }
}
