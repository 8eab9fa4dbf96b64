//! Errors of the API server, with messages that tell the operator what to do, and the delay before a retry.
//!
//! Invariant: each cause is logged once until it is over. Delays are bounded by [`WAIT_MAX`]; delays that the server
//! requests, by [`RETRY_AFTER_MAX`]. They are jittered, so that those that failed together do not try again together.

use std::error::Error as StdError;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use kube::runtime::watcher;
use objects::text::cut_chars;
use thiserror::Error;
use tracing::{info, warn};

/// Delays between attempts; they double with every consecutive failure.
pub(super) const BACKOFF: ExponentialBuilder =
    ExponentialBuilder::new().with_min_delay(WAIT_MIN).with_max_delay(WAIT_MAX).without_max_times();
const WAIT_MIN: Duration = Duration::from_millis(200);
/// Maximum delay of our own backoff.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(10);
/// Maximum delay that the server may request, so that a misconfigured proxy cannot stop us for longer.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// A failure this long after the previous one begins a new sequence.
const SEQUENCE_GAP: Duration = Duration::from_secs(60);
/// Maximum length of a server message, in characters: some answers embed the whole object.
const MESSAGE_CHARS_MAX: usize = 1_000;

/// Why a request to the API server failed, and what to do. Whether the request is repeated depends on who made it: a
/// [`Retry`] says so, a command asks its user to ([`ApiError::repeat`]).
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ApiError {
    /// 401: the credentials are invalid.
    #[error("the API server does not accept our credentials (401: {0}); renew the certificate or token in the kubeconfig")]
    Unauthorized(String),
    /// 403: a right is missing.
    #[error("the API server forbids it (403: {0}); grant it by a ClusterRole")]
    Forbidden(String),
    /// 429, 503 and similar: the server is overloaded or starting.
    #[error("the API server is busy or starting ({code}: {message})")]
    Busy {
        /// HTTP status.
        code: u16,
        /// Its message.
        message: String,
        /// The delay that it requests.
        retry_after: Duration,
    },
    /// 410: the resource version has expired. This is normal.
    #[error("the resource version has expired (410: {0})")]
    Expired(String),
    /// Any other answer.
    #[error("the API server answered {code}: {message}; see its log")]
    Failing {
        /// HTTP status.
        code: u16,
        /// Its message.
        message: String,
    },
    /// No answer.
    #[error("the API server cannot be reached ({0}); check its address in the kubeconfig, and that it runs")]
    Unreachable(String),
    /// An invalid answer.
    #[error("the answer is not that of a Kubernetes API server ({0}); check its address in the kubeconfig")]
    Senseless(String),
}

impl ApiError {
    /// What the user of a command that made this request does at last.
    #[must_use]
    pub const fn repeat(&self) -> &'static str {
        match self {
            Self::Busy { .. } | Self::Expired(_) => "repeat the command later",
            _ => "then repeat the command",
        }
    }

    /// Whether requests for other objects would fail the same way now. A refusal (403) or an error (500) may concern
    /// one object or namespace only: admission webhooks decide per object, quotas per namespace.
    pub(crate) const fn concerns_all(&self) -> bool {
        match self {
            Self::Unauthorized(_) | Self::Busy { .. } | Self::Unreachable(_) | Self::Senseless(_) => true,
            Self::Forbidden(_) | Self::Expired(_) | Self::Failing { .. } => false,
        }
    }
}

impl From<&kube::core::Status> for ApiError {
    fn from(status: &kube::core::Status) -> Self {
        let message = truncated(&status.message);
        let retry_after = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
        match status.code {
            401 => Self::Unauthorized(message),
            403 => Self::Forbidden(message),
            410 => Self::Expired(message),
            code @ (429 | 503 | 504) => Self::Busy { code, message, retry_after: Duration::from_secs(retry_after.into()) },
            code => Self::Failing { code, message },
        }
    }
}

impl From<&kube::Error> for ApiError {
    fn from(error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => status.as_ref().into(),
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => Self::Senseless(truncated(&root_cause(error))),
            other => Self::Unreachable(truncated(&root_cause(other))),
        }
    }
}

impl From<&watcher::Error> for ApiError {
    fn from(error: &watcher::Error) -> Self {
        match error {
            watcher::Error::InitialListFailed(cause)
            | watcher::Error::WatchStartFailed(cause)
            | watcher::Error::WatchFailed(cause) => cause.into(),
            watcher::Error::WatchError(status) => status.as_ref().into(),
            watcher::Error::NoResourceVersion => Self::Senseless(error.to_string()),
        }
    }
}

/// The innermost cause; outer errors only add context.
fn root_cause(error: &dyn StdError) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// Half of a delay to all of it, at random. The standard library seeds each hasher anew.
pub(super) fn jittered(delay: Duration) -> Duration {
    let share = u32::try_from(RandomState::new().build_hasher().finish() % 1_000).unwrap_or_default();
    delay / 2 + delay / 2_000 * share
}

/// At most [`MESSAGE_CHARS_MAX`] characters of a foreign message.
pub(crate) fn truncated(message: &str) -> String {
    cut_chars(message, MESSAGE_CHARS_MAX)
}

/// Consecutive failures of one kind of request.
#[derive(Debug)]
pub struct Retry {
    /// The operation in RBAC terms: `list and watch services`.
    what: &'static str,
    /// The server, for messages.
    server: String,
    waits: ExponentialBackoff,
    last: Option<(ApiError, Instant)>,
}

impl Retry {
    /// No failures yet of requests that do `what` at `server`.
    #[must_use]
    pub fn new(what: &'static str, server: &str) -> Self {
        Self { what, server: server.to_owned(), waits: BACKOFF.build(), last: None }
    }

    /// Records a failure, logs it unless the previous one had the same cause, and returns the delay before the next
    /// attempt.
    pub fn failed(&mut self, outage: ApiError, now: Instant) -> Duration {
        if self.last.as_ref().is_some_and(|(_, at)| now.duration_since(*at) > SEQUENCE_GAP) {
            self.succeeded();
        }
        let is_new = self.last.as_ref().is_none_or(|(last, _)| std::mem::discriminant(last) != std::mem::discriminant(&outage));
        match &outage {
            _ if !is_new => {}
            ApiError::Expired(_) => info!(server = self.server, "{}: {outage}; listing again", self.what),
            _ => {
                warn!(server = self.server, "cannot {}: {outage}; trying again. The last known state stays in force.", self.what)
            }
        }
        let ours = jittered(self.waits.next().unwrap_or(WAIT_MAX));
        let wait = match &outage {
            ApiError::Busy { retry_after, .. } => ours.max((*retry_after).min(RETRY_AFTER_MAX)),
            _ => ours,
        };
        self.last = Some((outage, now));
        wait
    }

    /// Records a success.
    pub fn succeeded(&mut self) {
        self.waits = BACKOFF.build();
        match self.last.take() {
            None | Some((ApiError::Expired(_), _)) => {}
            Some(_) => info!(server = self.server, "the API server answers again: {}", self.what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy(seconds: u64) -> ApiError {
        ApiError::Busy { code: 429, message: String::new(), retry_after: Duration::from_secs(seconds) }
    }

    #[test]
    fn delays_double_up_to_a_bound_and_restart_after_success() {
        let (mut retry, now) = (Retry::new("list services", ""), Instant::now());
        for expected in [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000] {
            let wait = retry.failed(ApiError::Unreachable(String::new()), now).as_millis();
            assert!((expected / 2..=expected).contains(&wait), "{wait} ms, expected at most {expected}");
        }
        retry.succeeded();
        assert!(retry.failed(ApiError::Unreachable(String::new()), now) <= WAIT_MIN);
        let different: std::collections::BTreeSet<_> = (0..20).map(|_| jittered(WAIT_MAX)).collect();
        assert!(different.len() > 1, "{different:?}");
    }

    #[test]
    fn a_failure_long_after_the_last_one_restarts_the_backoff() {
        let (mut retry, now) = (Retry::new("watch services", ""), Instant::now());
        for _ in 0..5 {
            retry.failed(ApiError::Unreachable(String::new()), now);
        }
        let now = now + SEQUENCE_GAP + Duration::from_secs(1);
        assert!(retry.failed(ApiError::Unreachable(String::new()), now) <= WAIT_MIN);
    }

    #[test]
    fn a_requested_delay_is_respected_up_to_a_minute() {
        assert_eq!(Retry::new("list services", "").failed(busy(3), Instant::now()), Duration::from_secs(3));
        assert_eq!(Retry::new("list services", "").failed(busy(86_400), Instant::now()), RETRY_AFTER_MAX);
    }

    /// Captured log output.
    fn logged(act: impl FnOnce()) -> String {
        let (reader, writer) = std::io::pipe().unwrap();
        let lines = tracing_subscriber::fmt().with_ansi(false).with_writer(std::sync::Mutex::new(writer)).finish();
        tracing::subscriber::with_default(lines, act);
        std::io::read_to_string(reader).unwrap()
    }

    #[test]
    fn a_cause_is_logged_once_until_it_ends() {
        let text = logged(|| {
            let (mut retry, now) = (Retry::new("list and watch services", "https://api:6443"), Instant::now());
            for number in 0..5 {
                retry.failed(ApiError::Unreachable(format!("connection {number} refused")), now);
            }
            retry.failed(ApiError::Forbidden("cannot list".to_owned()), now);
            retry.succeeded();
            retry.succeeded();
            retry.failed(ApiError::Forbidden("cannot list".to_owned()), now);
        });
        assert_eq!(text.matches("cannot be reached").count(), 1, "{text}");
        assert_eq!(text.matches("grant it by a ClusterRole").count(), 2, "{text}");
        assert_eq!(text.matches("answers again").count(), 1, "{text}");
        assert!(text.contains("cannot list and watch services") && text.contains("https://api:6443"), "{text}");
        assert_eq!(text.matches("; trying again. ").count(), 3, "{text}");
    }

    #[test]
    fn a_message_that_embeds_an_object_is_cut() {
        assert_eq!(truncated(&"ä".repeat(5_000)).chars().count(), MESSAGE_CHARS_MAX + 1);
        assert_eq!(truncated("short"), "short");
    }
}
