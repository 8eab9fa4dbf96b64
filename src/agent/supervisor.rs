//! The supervisor of tasks: a task that fails, panics or returns early is counted, its failure is logged
//! and kept, and it is restarted with an exponential backoff.
//!
//! Invariant: no task can end another task or the process. A worker is not a task; its panic aborts the process.

use std::error::Error;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use objects::text::without_os_errors;
use proto::v1;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Why a task ended early.
pub type Failure = Box<dyn Error + Send + Sync>;

/// Waits before restarts, with the jitter that is added: 50 to 100 ms first, 5 to 10 s at most. A task that cannot run
/// costs a log line every 5 to 10 s.
const BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(50))
    .with_max_delay(LONGEST_DELAY)
    .with_jitter()
    .without_max_times();
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// A task that ran this long before it failed starts with the first delay again.
const SETTLED: Duration = Duration::from_secs(60);
/// Timeout for tasks that shut down by themselves: the controller's server takes one second, releasing its Lease two.
const ENDING_MAX: Duration = Duration::from_secs(5);

/// How a task ends when the supervisor ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnShutdown {
    /// It is dropped.
    Dropped,
    /// Its token is cancelled, and the supervisor waits for it.
    Awaited,
}

/// Statuses of the tasks, for readers.
#[derive(Clone, Debug, Default)]
pub struct Tasks(Arc<Mutex<Vec<v1::TaskStatus>>>);

impl Tasks {
    /// One status per task, in the order they were started.
    #[must_use]
    pub fn status(&self) -> Vec<v1::TaskStatus> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<v1::TaskStatus>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, name: &str, change: impl FnOnce(&mut v1::TaskStatus)) {
        if let Some(status) = self.lock().iter_mut().find(|status| status.name == name) {
            change(status);
        }
    }
}

/// Starts and restarts tasks.
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

    /// Runs the task that `start` makes of a copy of `inputs`, and again after each end, until the supervisor ends and
    /// drops it.
    pub fn run<I, Run, T, E>(&mut self, name: &'static str, inputs: I, start: impl Fn(I) -> Run + Send + 'static)
    where
        I: Clone + Send + 'static,
        Run: Future<Output = Result<T, E>> + Send + 'static,
        E: Into<Failure>,
    {
        self.keep(name, self.stop.clone(), OnShutdown::Dropped, move || start(inputs.clone()));
    }

    /// Runs a task that shuts down by itself: the supervisor cancels its token and waits for it.
    pub fn run_to_its_end<I, Run, T, E>(&mut self, name: &'static str, inputs: I, start: impl Fn(I) -> Run + Send + 'static)
    where
        I: Clone + Send + 'static,
        Run: Future<Output = Result<T, E>> + Send + 'static,
        E: Into<Failure>,
    {
        self.run_to_an_earlier_end(name, self.stop.clone(), inputs, start);
    }

    /// The same for a task that shuts down before the others: once `stop` is cancelled.
    pub fn run_to_an_earlier_end<I, Run, T, E>(
        &mut self,
        name: &'static str,
        stop: CancellationToken,
        inputs: I,
        start: impl Fn(I) -> Run + Send + 'static,
    ) where
        I: Clone + Send + 'static,
        Run: Future<Output = Result<T, E>> + Send + 'static,
        E: Into<Failure>,
    {
        self.keep(name, stop, OnShutdown::Awaited, move || start(inputs.clone()));
    }

    fn keep<Run, T, E>(
        &mut self,
        name: &'static str,
        stop: CancellationToken,
        on_shutdown: OnShutdown,
        start: impl Fn() -> Run + Send + 'static,
    ) where
        Run: Future<Output = Result<T, E>> + Send + 'static,
        E: Into<Failure>,
    {
        self.tasks.lock().push(v1::TaskStatus { name: name.to_owned(), ..v1::TaskStatus::default() });
        let tasks = self.tasks.clone();
        let start = move || {
            let run = start();
            async move { run.await.map(drop).map_err(Into::into) }
        };
        self.running.spawn(async move { keep_running(name, &tasks, &stop, on_shutdown, start).await });
    }

    /// Statuses of the tasks; the handle may be cloned.
    #[must_use]
    pub fn tasks(&self) -> Tasks {
        self.tasks.clone()
    }

    /// Waits until every task has ended, after the token was cancelled.
    pub async fn finished(mut self) {
        while self.running.join_next().await.is_some() {}
    }
}

async fn keep_running<F, Run>(name: &str, tasks: &Tasks, stop: &CancellationToken, on_shutdown: OnShutdown, start: F)
where
    F: Fn() -> Run,
    Run: Future<Output = Result<(), Failure>> + Send + 'static,
{
    let mut waits = BACKOFF.build();
    loop {
        let started = Instant::now();
        // A separate tokio task, so that a panic is caught here; a set, so that dropping this future stops it.
        let mut run = JoinSet::new();
        run.spawn(start());
        let ended = match (stop.run_until_cancelled(run.join_next()).await, on_shutdown) {
            (None, OnShutdown::Dropped) => return,
            (None, OnShutdown::Awaited) => return finish(name, run).await,
            (Some(ended), _) => ended,
        };
        let failure = match ended {
            // It noticed the end earlier than this loop.
            Some(Ok(Ok(()))) if stop.is_cancelled() => return,
            // So did a task whose output it reads.
            Some(Ok(Err(_))) if stop.is_cancelled() && matches!(on_shutdown, OnShutdown::Dropped) => return,
            None | Some(Ok(Ok(()))) => "it returned although it was not asked to stop".to_owned(),
            Some(Ok(Err(failure))) => without_os_errors(&failure.to_string()).into_owned(),
            Some(Err(error)) => panic_message(error),
        };
        if started.elapsed() >= SETTLED {
            waits = BACKOFF.build();
        }
        let wait = waits.next().unwrap_or(LONGEST_DELAY);
        tracing::error!(task = name, failure, wait_ms = wait.as_millis(), "task failed; restarting after a delay");
        tasks.update(name, |status| status.last_failure = failure);
        if stop.run_until_cancelled(sleep(wait)).await.is_none() {
            return;
        }
        tasks.update(name, |status| status.restarts += 1);
    }
}

/// Waits for a task after its cancellation.
async fn finish(name: &str, mut run: JoinSet<Result<(), Failure>>) {
    let why = match timeout(ENDING_MAX, run.join_next()).await {
        Ok(None | Some(Ok(Ok(())))) => return,
        Ok(Some(Ok(Err(failure)))) => failure.to_string(),
        Ok(Some(Err(error))) => panic_message(error),
        Err(_) => format!("not within {ENDING_MAX:?}"),
    };
    tracing::warn!(task = name, why, "a task ended with an error");
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
        supervisor.run("shaky", runs, |runs| async move {
            runs.send_modify(|n| *n += 1);
            let n = *runs.borrow();
            match n {
                1 => Err("a failure of its own"),
                2 => panic!("in run {n}"),
                _ => std::future::pending::<Result<(), _>>().await,
            }
        });
        let (ticks, mut ticked) = watch::channel(0);
        supervisor.run("steady", ticks, async |ticks| -> Result<(), Failure> {
            loop {
                ticks.send_modify(|n| *n += 1);
                sleep(Duration::from_millis(10)).await;
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
    async fn a_task_that_returns_early_has_failed_and_runs_again() {
        let stop = CancellationToken::new();
        let mut supervisor = Supervisor::new(stop.clone());
        let (runs, mut seen) = watch::channel(0);
        supervisor.run("early", runs, |runs| async move {
            runs.send_modify(|n| *n += 1);
            Ok::<_, Failure>(())
        });
        let tasks = supervisor.tasks();
        seen.wait_for(|n| *n == 3).await.unwrap();
        let status = tasks.status();
        assert_eq!((status[0].restarts, status[0].last_failure.as_str()), (2, "it returned although it was not asked to stop"));
        stop.cancel();
        supervisor.finished().await;
    }

    #[tokio::test]
    async fn a_task_whose_source_ends_with_the_supervisor_has_not_failed() {
        let stop = CancellationToken::new();
        let mut supervisor = Supervisor::new(stop.clone());
        let (source, seen) = watch::channel(());
        supervisor.run("reader", seen, |mut seen| async move { seen.changed().await });
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
        let tasks = supervisor.tasks();
        drop(source);
        stop.cancel();
        supervisor.finished().await;
        assert_eq!(tasks.status()[0].last_failure, "");
    }

    #[tokio::test]
    async fn a_task_that_was_asked_to_end_before_the_others_has_not_failed() {
        let stop = CancellationToken::new();
        let mut supervisor = Supervisor::new(stop.clone());
        let (earlier, ended) = (stop.child_token(), watch::Sender::new(0));
        let inputs = (earlier.clone(), ended.clone());
        supervisor.run_to_an_earlier_end("early", earlier.clone(), inputs, |(earlier, ended)| async move {
            earlier.cancelled().await;
            ended.send_modify(|n| *n += 1);
            Ok::<_, Failure>(())
        });
        earlier.cancel();
        ended.subscribe().wait_for(|n| *n == 1).await.unwrap();
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        let tasks = supervisor.tasks();
        stop.cancel();
        supervisor.finished().await;
        let status = tasks.status();
        assert_eq!((status[0].restarts, status[0].last_failure.as_str(), *ended.borrow()), (0, "", 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_has_something_to_do_at_the_end_does_it_and_no_task_holds_up_the_end_for_long() {
        let stop = CancellationToken::new();
        let mut supervisor = Supervisor::new(stop.clone());
        let done = watch::Sender::new(false);
        supervisor.run_to_its_end("tidy", (stop.clone(), done.clone()), |(stop, done)| async move {
            stop.cancelled().await;
            sleep(ENDING_MAX / 2).await;
            done.send_replace(true);
            Ok::<_, Failure>(())
        });
        supervisor.run_to_its_end("deaf", (), |()| std::future::pending::<Result<(), Failure>>());
        tokio::task::yield_now().await;
        let start = Instant::now();
        stop.cancel();
        supervisor.finished().await;
        assert!(*done.borrow());
        // Time is paused and advances only while all tasks wait.
        assert_eq!(start.elapsed().as_secs(), ENDING_MAX.as_secs());
    }
}
