//! Answers to requests that the controller forwards for operators (`sluice.v1.Fleet`), on a stream beside that of the
//! state.
//!
//! Invariant: requests are answered one after another, from memory. A controller that does not read its answers blocks
//! this stream only, with one pending answer. Deliberately not here: the answers themselves, which come from the admin
//! API.

use std::sync::Arc;
use std::time::Duration;

use proto::limits;
use proto::v1::fleet_client::FleetClient;
use proto::v1::{Answer, Offer, Question, answer::Reply, question::Query};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

/// Delay before registering again: operators can wait a moment, and a controller needs about as long to restart.
const WAIT: Duration = Duration::from_secs(1);

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
    while let Some(Question { number, query }) = questions.message().await? {
        let reply = match query {
            Some(query) => answering(&query),
            None => Reply::Refusal("this gateway does not know the question; it is older than its controller".to_owned()),
        };
        if answers.send(Answer { number, reply: Some(reply) }).await.is_err() {
            return Ok(());
        }
    }
    Ok(())
}
