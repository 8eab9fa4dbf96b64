//! The end of a stream: why it ended, and the delay before the next dial.
//!
//! Not here: which controller is dialled next.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use control::gateways::listener::chain;
use objects::scalar::url::ServerUrl;
use proto::limits;
use proto::message_parts::TooManyParts;

use super::dial::DialError;
use super::received::ReceivedError;

/// Backoffs before the next dial, with the jitter that is added: 50 to 100 ms first, 250 to 500 ms at most. The jitter
/// keeps a hundred gateways from dialling one controller at the same moment. A controller that restarts on its machine
/// is back within a second; a dozen gateways then dial it 24 to 48 times a second at most.
const BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(50))
    .with_max_delay(Duration::from_millis(250))
    .with_jitter()
    .without_max_times();
/// A gateway that was refused dials less often, every 2.5 to 5 s at the end: an operator has to correct something
/// first.
const BACKOFF_REFUSED: ExponentialBuilder = BACKOFF.with_max_delay(LONGEST_DELAY_REFUSED);
const LONGEST_DELAY_REFUSED: Duration = Duration::from_millis(2500);

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    #[error("cannot connect to the controller at {url}: {error}; is it running there, and may this process reach it?")]
    Connect { url: ServerUrl, error: DialError },
    #[error("the controller at {url} refused: {}", status_text(status))]
    Refused { url: ServerUrl, status: Box<tonic::Status> },
    #[error("the controller at {0} closed the stream")]
    Closed(ServerUrl),
    #[error("addresses of the gateway have changed; the stream is opened again with them")]
    Readdressed,
    #[error(transparent)]
    Received(#[from] ReceivedError),
    #[error(transparent)]
    Parts(#[from] TooManyParts),
}

impl StreamError {
    /// The leader, as named by a controller that does not lead.
    pub(super) fn leader(&self) -> Option<ServerUrl> {
        let Self::Refused { status, .. } = self else { return None };
        if status.code() != tonic::Code::FailedPrecondition {
            return None;
        }
        status.metadata().get(limits::LEADER_METADATA)?.to_str().ok()?.parse().ok()
    }

    /// Whether dialling again cannot help: the controller refuses this gateway, or its messages cannot be understood.
    pub(super) fn is_lasting(&self) -> bool {
        use tonic::Code::{InvalidArgument, PermissionDenied, Unauthenticated, Unimplemented};
        match self {
            Self::Refused { status, .. } => {
                matches!(status.code(), InvalidArgument | PermissionDenied | Unauthenticated | Unimplemented)
            }
            Self::Received(_) | Self::Parts(_) => true,
            Self::Connect { .. } | Self::Closed(_) | Self::Readdressed => false,
        }
    }
}

/// Delay before dialling again.
pub(super) struct Backoffs {
    away: ExponentialBackoff,
    refused: ExponentialBackoff,
}

impl Backoffs {
    pub(super) fn new() -> Self {
        Self { away: BACKOFF.build(), refused: BACKOFF_REFUSED.build() }
    }

    pub(super) fn after(&mut self, error: &StreamError) -> Duration {
        let waits = if error.is_lasting() { &mut self.refused } else { &mut self.away };
        waits.next().unwrap_or(LONGEST_DELAY_REFUSED)
    }
}

/// Formats a status with the cause from the transport, which alone shows a handshake that the controller refused.
fn status_text(status: &tonic::Status) -> String {
    let cause = std::error::Error::source(status).map(chain).unwrap_or_default();
    if cause.is_empty() { status.message().to_owned() } else { format!("{}: {cause}", status.message()) }
}
