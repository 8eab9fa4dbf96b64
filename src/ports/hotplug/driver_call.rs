//! A call into a driver on a thread of its own, because a driver may never return: one that waits for an answer of a card
//! waits without limit.
//!
//! Invariant: nothing of the gateway waits for a call longer than [`LIMIT`], not even its end. A call that is late keeps
//! its thread; what it returns later is used, or dropped on that thread if nobody waits any more.
//!
//! Not here: what a port without its device means (`hotplug`).

use std::io;
use std::time::Duration;

use tokio::sync::oneshot::{self, error::TryRecvError};
use tokio::time::{Instant, timeout_at};

/// Time after which a call is late. Cards with firmware take some seconds to open or to close, all others less than one.
pub(in crate::ports) const LIMIT: Duration = Duration::from_secs(10);

/// A call that was started.
#[derive(Debug)]
pub(in crate::ports) struct DriverCall<T> {
    result: oneshot::Receiver<T>,
    late_at: Instant,
    /// It was late when it was looked at last.
    is_late: bool,
}

/// The state of a call.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::ports) enum CallState<T> {
    /// It runs.
    Running,
    /// It has become late since the last look.
    BecameLate,
    /// It returned.
    Returned(T),
    /// Its thread panicked.
    Panicked,
}

impl<T: Send + 'static> DriverCall<T> {
    /// Starts a call, whose result is late after `limit`.
    ///
    /// # Errors
    /// There is no thread for it; the call was dropped.
    pub(in crate::ports) fn start(limit: Duration, call: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        let (sender, result) = oneshot::channel();
        std::thread::Builder::new().name("driver".into()).spawn(move || drop(sender.send(call())))?;
        Ok(Self { result, late_at: Instant::now() + limit, is_late: false })
    }

    /// The state now.
    pub(in crate::ports) fn look(&mut self) -> CallState<T> {
        match self.result.try_recv() {
            Ok(returned) => CallState::Returned(returned),
            Err(TryRecvError::Closed) => CallState::Panicked,
            Err(TryRecvError::Empty) if !self.is_late && Instant::now() >= self.late_at => {
                self.is_late = true;
                CallState::BecameLate
            }
            Err(TryRecvError::Empty) => CallState::Running,
        }
    }

    /// Waits until the call returns or is late.
    pub(in crate::ports) async fn wait(&mut self) -> CallState<T> {
        match timeout_at(self.late_at, &mut self.result).await {
            Ok(Ok(returned)) => CallState::Returned(returned),
            Ok(Err(_)) => CallState::Panicked,
            Err(_) => {
                self.is_late = true;
                CallState::BecameLate
            }
        }
    }

    /// Whether it was late when it was looked at last.
    pub(in crate::ports) fn is_late(&self) -> bool {
        self.is_late
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Waits for the result in real time, on the paused clock of the test.
    fn returned<T: Send + 'static>(call: &mut DriverCall<T>) -> CallState<T> {
        loop {
            match call.look() {
                CallState::Running => std::thread::yield_now(),
                state => return state,
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_driver_that_does_not_return_delays_nobody_and_its_late_result_is_used() {
        let (release, held) = mpsc::channel();
        let mut call = DriverCall::start(LIMIT, move || held.recv()).unwrap();
        assert_eq!((call.look(), call.is_late()), (CallState::Running, false));
        let start = Instant::now();
        assert_eq!((call.wait().await, call.is_late()), (CallState::BecameLate, true));
        assert_eq!(start.elapsed().as_secs(), LIMIT.as_secs());
        assert_eq!(call.look(), CallState::Running, "it is reported once");
        release.send(7).unwrap();
        assert_eq!(returned(&mut call), CallState::Returned(Ok(7)));
    }

    #[tokio::test]
    async fn a_look_reports_once_that_a_call_is_late() {
        let (_release, held) = mpsc::channel::<()>();
        let mut call = DriverCall::start(Duration::ZERO, move || held.recv()).unwrap();
        assert_eq!((call.look(), call.look(), call.is_late()), (CallState::BecameLate, CallState::Running, true));
    }

    #[tokio::test]
    async fn a_driver_that_panics_is_reported() {
        let mut call = DriverCall::start(LIMIT, || -> () { std::panic::panic_any("of the test") }).unwrap();
        assert_eq!(call.wait().await, CallState::Panicked);
    }
}
