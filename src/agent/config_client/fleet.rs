//! Answers what the controller asks on behalf of operators (`sluice.v1.Fleet`), beside the stream that brings the state.
//!
//! Invariant: one question is answered after the other, from memory; a controller that does not read its answers is waited
//! for and costs one answer.
//! Deliberately not here: the answers themselves, which are those of the admin API.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use proto::limits;
use proto::v1::fleet_client::FleetClient;
use proto::v1::{Answer, Offer, Question, answer::Said, question::Ask};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// Wait before the offer is made again: operators may wait a moment, and a controller that just ended is not there sooner.
const WAIT: Duration = Duration::from_secs(1);

/// What answers.
#[derive(Clone)]
pub struct Responder(Arc<dyn Fn(&Ask) -> Said + Send + Sync>);

impl Responder {
    /// By a function of the question.
    pub fn new(answer: impl Fn(&Ask) -> Said + Send + Sync + 'static) -> Self {
        Self(Arc::new(answer))
    }
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Responder").finish_non_exhaustive()
    }
}

/// Offers to answer for as long as it is polled, unless the controller is of a version that never asks.
pub(super) async fn run(channel: Channel, gateway: String, answering: Responder) {
    loop {
        match serve(&channel, &gateway, &answering).await {
            Err(status) if status.code() == Code::Unimplemented => return,
            Err(status) => tracing::debug!(%status, "the controller asks no more; offering again"),
            Ok(()) => {}
        }
        tokio::time::sleep(WAIT).await;
    }
}

/// One stream.
async fn serve(channel: &Channel, gateway: &str, answering: &Responder) -> Result<(), Status> {
    let (answers, outbound) = mpsc::channel(1);
    let offer = Said::Offer(Offer { gateway: gateway.to_owned() });
    // The channel has room for it.
    let _ = answers.try_send(Answer { number: 0, said: Some(offer) });
    let mut client = FleetClient::new(channel.clone()).max_encoding_message_size(limits::MESSAGE_BYTES_MAX);
    let mut questions = client.serve(ReceiverStream::new(outbound)).await?.into_inner();
    while let Some(Question { number, ask }) = questions.message().await? {
        let said = match ask {
            Some(ask) => (answering.0)(&ask),
            None => Said::Refusal("this gateway does not know the question; it is older than its controller".to_owned()),
        };
        if answers.send(Answer { number, said: Some(said) }).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}
