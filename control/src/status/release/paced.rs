//! Requests of a command that changes many objects, one after another.
//!
//! Invariant: requests keep to the rate limit of status writes. A request that meets a temporary error is repeated
//! after the delay that the server asks for; it is sent at most [`ATTEMPTS_MAX`] times in all. A server that was never
//! reached is not waited for: probably its address is wrong.

use tokio::time::{Instant, sleep, sleep_until};

use crate::kubernetes::{ApiError, Cluster, RateLimit, Retry};

/// Maximum number of attempts of one request. The delays between them add up to 23 s; a server that is busy may ask for
/// up to 60 s each.
const ATTEMPTS_MAX: u32 = 8;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// It will fail until somebody changes something.
    #[error("{what}: {outage}")]
    Failed {
        /// The operation.
        what: &'static str,
        /// The error.
        outage: ApiError,
    },
    /// The API server was busy or did not answer again and again.
    #[error("{what}: {attempts} attempts failed, the last one because {outage}")]
    GivenUp {
        /// The operation.
        what: &'static str,
        /// How often it was tried.
        attempts: u32,
        /// The last error.
        outage: ApiError,
    },
}

/// State of the requests.
pub(super) struct PacedRequests {
    rate_limit: RateLimit,
    retry: Retry,
    /// Whether the server has answered at all.
    has_answered: bool,
}

impl PacedRequests {
    pub(super) fn new(cluster: &Cluster) -> Self {
        Self { rate_limit: RateLimit::default(), retry: Retry::new("release Services", &cluster.server), has_answered: false }
    }

    /// Sends a request that does `what`, while `waiting` others wait for it.
    pub(super) async fn send<T>(
        &mut self,
        what: &'static str,
        waiting: usize,
        request: impl AsyncFn() -> Result<T, ApiError>,
    ) -> Result<T, RequestError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            sleep_until(self.rate_limit.next_at(Instant::now().into_std()).into()).await;
            let sent_at = Instant::now();
            self.rate_limit.count(sent_at.into_std());
            let result = request().await;
            let now = Instant::now();
            self.has_answered |= !matches!(result, Err(ApiError::Unreachable(_)));
            match result {
                Ok(done) => {
                    self.rate_limit.answered(now - sent_at, waiting, now.into_std());
                    self.retry.succeeded();
                    return Ok(done);
                }
                Err(outage) if !self.has_answered || !is_temporary(&outage) => return Err(RequestError::Failed { what, outage }),
                Err(outage) if attempts == ATTEMPTS_MAX => return Err(RequestError::GivenUp { what, attempts, outage }),
                Err(outage) => {
                    self.rate_limit.throttled();
                    sleep(self.retry.failed(outage, now.into_std())).await;
                }
            }
        }
    }
}

/// Whether the same request may succeed later without a change of credentials, rights or address.
const fn is_temporary(outage: &ApiError) -> bool {
    matches!(outage, ApiError::Busy { .. } | ApiError::Failing { .. } | ApiError::Unreachable(_))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use super::*;

    fn requests() -> PacedRequests {
        PacedRequests { rate_limit: RateLimit::default(), retry: Retry::new("release Services", ""), has_answered: false }
    }

    fn busy(seconds: u64) -> ApiError {
        ApiError::Busy { code: 429, message: "slow down".to_owned(), retry_after: Duration::from_secs(seconds) }
    }

    #[tokio::test(start_paused = true)]
    async fn twenty_requests_are_sent_in_a_second_and_more_only_while_many_wait() {
        let (mut requests, start) = (requests(), Instant::now());
        for _ in 0..61 {
            requests.send("patch", 0, async || Ok(())).await.unwrap();
        }
        assert_eq!(start.elapsed().as_secs(), 3);
        let start = Instant::now();
        for number in 0..1_000 {
            requests.send("patch", 1_000 - number, async || Ok(())).await.unwrap();
        }
        assert!((9..30).contains(&start.elapsed().as_secs()), "{:?}", start.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_waits_as_long_as_the_server_asks_and_is_given_up_after_eight_attempts() {
        let (mut requests, start, attempts) = (requests(), Instant::now(), Cell::new(0));
        let twice_busy = async || {
            attempts.set(attempts.get() + 1);
            if attempts.get() <= 2 { Err(busy(30)) } else { Ok("written") }
        };
        assert_eq!(requests.send("patch", 0, twice_busy).await.unwrap(), "written");
        assert_eq!((start.elapsed().as_secs(), attempts.get()), (60, 3));
        let error = requests.send("patch services/status", 0, async || Err::<(), _>(busy(0))).await.unwrap_err().to_string();
        assert!(error.starts_with("patch services/status: 8 attempts failed") && error.contains("429: slow down"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_does_not_answer_any_more_is_waited_for_and_one_that_never_did_is_not() {
        let (mut requests, start) = (requests(), Instant::now());
        let unreachable = async || Err::<(), _>(ApiError::Unreachable("Connection refused".to_owned()));
        assert!(matches!(requests.send("list", 0, unreachable).await, Err(RequestError::Failed { .. })));
        assert!(start.elapsed() < Duration::from_secs(1));
        requests.send("list", 0, async || Ok(())).await.unwrap();
        assert!(matches!(requests.send("list", 0, unreachable).await, Err(RequestError::GivenUp { attempts: ATTEMPTS_MAX, .. })));
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_right_ends_it_at_once() {
        let start = Instant::now();
        let forbidden = async || Err::<(), _>(ApiError::Forbidden("cannot patch".to_owned()));
        let error = requests().send("patch services/status", 0, forbidden).await.unwrap_err().to_string();
        assert!(start.elapsed() < Duration::from_secs(1) && error.contains("403: cannot patch"), "{error}");
    }
}
