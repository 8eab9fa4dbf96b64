//! Keeps the agent's tasks running: one that fails or panics is counted, its last failure kept and logged, and it is
//! started again after a wait that grows.
//!
//! Invariant: nothing that a task does ends another task or the process. A worker is no task: a panic there aborts.

use std::error::Error;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use proto::v1;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::backoff::{Backoff, random};

/// Why a task ended before it was asked to.
pub type Failure = Box<dyn Error + Send + Sync>;

/// Wait before the first restart.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// Longest wait: a task that cannot run costs a log line every 10 s.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// A task that ran this long before it failed starts from the first wait again.
const SETTLED: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Task {
    name: &'static str,
    restarts: AtomicU64,
    last_failure: Mutex<String>,
}

/// How the tasks are, for whoever asks.
#[derive(Clone, Debug, Default)]
pub struct Tasks(Arc<Mutex<Vec<Arc<Task>>>>);

impl Tasks {
    /// One status per task, in the order they were started.
    #[must_use]
    pub fn status(&self) -> Vec<v1::TaskStatus> {
        let status = |task: &Arc<Task>| v1::TaskStatus {
            name: task.name.to_owned(),
            restarts: task.restarts.load(Ordering::Relaxed),
            last_failure: task.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().map(status).collect()
    }

    fn add(&self, name: &'static str) -> Arc<Task> {
        let task = Arc::new(Task { name, restarts: AtomicU64::new(0), last_failure: Mutex::default() });
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&task));
        task
    }
}

/// Starts tasks and starts them again.
#[derive(Debug)]
pub struct Supervisor {
    stop: CancellationToken,
    running: JoinSet<()>,
    tasks: Tasks,
}

impl Supervisor {
    /// Supervises until `stop` is cancelled.
    #[must_use]
    pub fn new(stop: CancellationToken) -> Self {
        Self { stop, running: JoinSet::new(), tasks: Tasks::default() }
    }

    /// Runs what `start` makes, again after each failure. A task that returns `Ok` is done.
    pub fn run<F, Run>(&mut self, name: &'static str, start: F)
    where
        F: Fn() -> Run + Send + 'static,
        Run: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        let task = self.tasks.add(name);
        let stop = self.stop.clone();
        self.running.spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = keep_running(&task, start) => {}
            }
        });
    }

    /// How the tasks are; the handle may be shared.
    #[must_use]
    pub fn tasks(&self) -> Tasks {
        self.tasks.clone()
    }

    /// Waits until every task is done or stopped.
    pub async fn finished(mut self) {
        while self.running.join_next().await.is_some() {}
    }
}

async fn keep_running<F, Run>(task: &Task, start: F)
where
    F: Fn() -> Run,
    Run: Future<Output = Result<(), Failure>> + Send + 'static,
{
    let mut backoff = Backoff::new(FIRST_WAIT, LONGEST_WAIT);
    loop {
        let started = Instant::now();
        // A task of its own, so that a panic unwinds to here; a set, so that dropping this future stops it.
        let mut run = JoinSet::new();
        run.spawn(start());
        let failure = match run.join_next().await {
            None | Some(Ok(Ok(()))) => return,
            Some(Ok(Err(failure))) => failure.to_string(),
            Some(Err(error)) => panic_message(error),
        };
        if started.elapsed() >= SETTLED {
            backoff.reset();
        }
        let wait = backoff.wait(random());
        tracing::error!(task = task.name, failure, wait_ms = wait.as_millis(), "task failed; it starts again after the wait");
        task.last_failure.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&failure);
        sleep(wait).await;
        task.restarts.fetch_add(1, Ordering::Relaxed);
    }
}

fn panic_message(error: JoinError) -> String {
    let Ok(payload) = error.try_into_panic() else { return "cancelled".to_owned() };
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("no message"))
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_or_fails_runs_again_and_the_others_never_notice() {
        let stop = CancellationToken::new();
        let mut supervisor = Supervisor::new(stop.clone());
        let (runs, mut seen) = watch::channel(0);
        supervisor.run("shaky", move || {
            let runs = runs.clone();
            async move {
                runs.send_modify(|n| *n += 1);
                let n = *runs.borrow();
                match n {
                    1 => Err("a failure of its own".into()),
                    2 => panic!("in run {n}"),
                    _ => std::future::pending().await,
                }
            }
        });
        let (ticks, mut ticked) = watch::channel(0);
        supervisor.run("steady", move || {
            let ticks = ticks.clone();
            async move {
                loop {
                    ticks.send_modify(|n| *n += 1);
                    sleep(Duration::from_millis(10)).await;
                }
            }
        });
        let tasks = supervisor.tasks();
        seen.wait_for(|n| *n == 3).await.unwrap();
        ticked.wait_for(|n| *n >= 10).await.unwrap();
        let status = tasks.status();
        assert_eq!((status[0].restarts, status[0].last_failure.as_str()), (2, "panicked: in run 2"));
        assert_eq!((status[1].restarts, status[1].last_failure.as_str()), (0, ""));
        stop.cancel();
        supervisor.finished().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_is_done_is_not_started_again() {
        let mut supervisor = Supervisor::new(CancellationToken::new());
        supervisor.run("once", || async { Ok(()) });
        let tasks = supervisor.tasks();
        supervisor.finished().await;
        assert_eq!(tasks.status()[0].restarts, 0);
    }
}
