//! Answers to requests that the controller forwards for operators (`sluice.v1.Fleet`), on a stream beside that of the
//! state.
//!
//! Invariant: requests are answered one after another from memory; a few that wait for workers are answered beside
//! them, each within its own time limit, so none needs to be cancelled. A controller that does not read its answers
//! blocks this stream only, with one pending answer. Deliberately not here: the answers themselves, which come from the
//! admin API.

use std::sync::Arc;
use std::time::Duration;

use proto::limits;
use proto::v1::fleet_client::FleetClient;
use proto::v1::{Answer, Offer, Question, answer::Reply, question::Query};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// Delay before registering again: operators can wait a moment, and a controller needs about as long to restart.
const WAIT: Duration = Duration::from_secs(1);

/// Questions to the workers that wait at one time: each has a thread, and they are answered one after another.
const INQUIRIES_MAX: usize = 4;
const BUSY: &str = "it answers other questions about flows; ask again in a moment";
const UNKNOWN: &str = "this gateway does not know the question; it is older than its controller";

/// Source of the answers.
pub type Responder = Arc<dyn Fn(&Query) -> Reply + Send + Sync>;

/// Keeps the gateway registered while it is polled, unless the controller is too old to send requests.
pub(super) async fn run(channel: Channel, gateway: String, answering: Responder) {
    loop {
        match serve(&channel, &gateway, &answering).await {
            Err(status) if status.code() == Code::Unimplemented => return,
            Err(status) => tracing::debug!(%status, "the controller closed the request stream; registering again"),
            Ok(()) => {}
        }
        tokio::time::sleep(WAIT).await;
    }
}

/// One stream.
async fn serve(channel: &Channel, gateway: &str, answering: &Responder) -> Result<(), Status> {
    let (answers, outbound) = mpsc::channel(1);
    let offer = Reply::Offer(Offer { gateway: gateway.to_owned() });
    // The channel has room for this message.
    let _ = answers.try_send(Answer { number: 0, reply: Some(offer) });
    let mut client = FleetClient::new(channel.clone()).max_encoding_message_size(limits::MESSAGE_BYTES_MAX);
    let mut questions = client.serve(ReceiverStream::new(outbound)).await?.into_inner();
    let mut inquiries = JoinSet::new();
    loop {
        let answer = tokio::select! {
            question = questions.message() => {
                let Some(Question { number, query }) = question? else { return Ok(()) };
                match query {
                    Some(query) if waits_for_workers(&query) && inquiries.len() < INQUIRIES_MAX => {
                        let answering = Arc::clone(answering);
                        inquiries.spawn_blocking(move || Answer { number, reply: Some(answering(&query)) });
                        continue;
                    }
                    Some(query) if waits_for_workers(&query) => refusal(number, BUSY),
                    Some(query) => Answer { number, reply: Some(answering(&query)) },
                    None => refusal(number, UNKNOWN),
                }
            }
            Some(Ok(answer)) = inquiries.join_next() => answer,
        };
        if answers.send(answer).await.is_err() {
            return Ok(());
        }
    }
}

/// Whether a question is answered by the workers.
const fn waits_for_workers(query: &Query) -> bool {
    matches!(query, Query::Flows(_) | Query::Explain(_) | Query::EndFlows(_) | Query::Heaviest(_))
}

fn refusal(number: u64, why: &str) -> Answer {
    Answer { number, reply: Some(Reply::Refusal(why.to_owned())) }
}
