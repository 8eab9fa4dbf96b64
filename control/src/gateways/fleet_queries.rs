//! `sluice.v1.Fleet`: gateways register to answer requests of operators, and the controller queries all of them at
//! once.
//!
//! Invariant: a gateway that does not answer in time is named in the result and does not delay the answers of others.
//! Requests that wait for one gateway are bounded.
//! Deliberately not here: the requests themselves and how answers are combined (`admin`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use proto::v1::fleet_server::Fleet as FleetApi;
use proto::v1::{Answer, Failure, Question, answer::Reply, question::Query};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::gateways::listener::Peer;

/// Time in which a gateway must send its registration after it opened the stream.
const OFFER_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of one answer. A gateway answers from memory, or within its own time limits from its workers. It is shorter
/// than the timeout of `sluicectl`, so that the client learns which gateway did not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of requests that wait to be sent to one gateway, and of those that wait for an answer; further ones
/// are refused at once. A dozen operators may watch one list each.
const WAITING_MAX: usize = 16;

/// A request and the channel for its answer.
struct PendingQuestion {
    query: Query,
    answer: oneshot::Sender<Reply>,
}

/// The registration of a gateway.
#[derive(Debug)]
struct Registered {
    gateway: String,
    questions: mpsc::Sender<PendingQuestion>,
}

/// Why a gateway did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SilentError {
    /// It is not registered.
    #[error("it is not registered for requests: it has only just connected, or has an older version")]
    NoOffer,
    /// Too many requests wait for it.
    #[error("{WAITING_MAX} requests already wait for it")]
    Busy,
    /// It timed out.
    #[error("it gave no answer within {} s; look at its log", ANSWER_TIMEOUT.as_secs())]
    TimedOut,
    /// It disconnected.
    #[error("it disconnected before it answered")]
    Gone,
    /// It answered with an error.
    #[error("{0}")]
    Refused(String),
    /// The request itself is wrong: no gateway can answer it.
    #[error("{0}")]
    Invalid(String),
}

/// The registered gateways.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    registered: Arc<Mutex<Registrations>>,
}

#[derive(Debug, Default)]
struct Registrations {
    open: BTreeMap<u64, Registered>,
    last: u64,
}

/// Registration of a stream, which is removed when this is dropped.
struct Registration {
    fleet: Fleet,
    number: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.fleet.registered.lock().unwrap_or_else(PoisonError::into_inner).open.remove(&self.number);
    }
}

impl Fleet {
    fn add(&self, gateway: String) -> (Registration, mpsc::Receiver<PendingQuestion>) {
        let (questions, receiver) = mpsc::channel(WAITING_MAX);
        let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        registered.last += 1;
        let number = registered.last;
        registered.open.insert(number, Registered { gateway, questions });
        (Registration { fleet: self.clone(), number }, receiver)
    }

    /// The names of the registered gateways.
    #[must_use]
    pub fn registered(&self) -> BTreeSet<String> {
        let registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        registered.open.values().map(|one| one.gateway.clone()).collect()
    }

    /// Queries all gateways of these names and waits for the slowest.
    pub async fn ask(&self, gateways: Vec<String>, query: &Query) -> Vec<(String, Result<Reply, SilentError>)> {
        let one = |name: String| async move {
            let answer = self.ask_one(&name, query.clone()).await;
            (name, answer)
        };
        join_all(gateways.into_iter().map(one)).await
    }

    async fn ask_one(&self, gateway: &str, query: Query) -> Result<Reply, SilentError> {
        let (answer, answered) = oneshot::channel();
        {
            let registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
            // The newest stream: an older one of the same name is about to end.
            let newest = registered.open.values().rev().find(|one| one.gateway == gateway).ok_or(SilentError::NoOffer)?;
            newest.questions.try_send(PendingQuestion { query, answer }).map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => SilentError::Busy,
                mpsc::error::TrySendError::Closed(_) => SilentError::Gone,
            })?;
        }
        match tokio::time::timeout(ANSWER_TIMEOUT, answered).await {
            Err(_) => Err(SilentError::TimedOut),
            Ok(Err(_)) => Err(SilentError::Gone),
            Ok(Ok(Reply::Refusal(why))) => Err(SilentError::Refused(why)),
            Ok(Ok(Reply::Failure(Failure { code, message }))) => Err(match Code::from(code.cast_signed()) {
                Code::InvalidArgument => SilentError::Invalid(message),
                _ => SilentError::Refused(message),
            }),
            Ok(Ok(reply)) => Ok(reply),
        }
    }
}

/// The gRPC service for gateways.
#[derive(Clone, Debug)]
pub struct FleetService {
    /// The registrations.
    pub fleet: Fleet,
    /// The group of gateways that it serves.
    pub group: String,
    /// Ends all streams.
    pub shutdown: CancellationToken,
}

#[tonic::async_trait]
impl FleetApi for FleetService {
    type ServeStream = ReceiverStream<Result<Question, Status>>;

    async fn serve(&self, request: Request<Streaming<Answer>>) -> Result<Response<Self::ServeStream>, Status> {
        let peer = Peer::of(&request)?;
        let (questions, stream) = mpsc::channel(1);
        let service = self.clone();
        tokio::spawn(async move {
            let ended = tokio::select! {
                biased;
                expired = peer.expired() => Err(expired),
                ended = service.converse((request.into_inner(), &peer), &questions) => ended,
            };
            if let Err(status) = ended {
                // The receiver may be gone.
                let _ = questions.send(Err(status)).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

impl FleetService {
    /// Serves one gateway until either side disconnects.
    async fn converse(
        self,
        (mut answers, peer): (Streaming<Answer>, &Peer),
        questions: &mpsc::Sender<Result<Question, Status>>,
    ) -> Result<(), Status> {
        let gateway = offer(&mut answers).await?;
        peer.may_speak_for(&gateway, &self.group)?;
        let (_registration, mut receiver) = self.fleet.add(gateway);
        let mut waiting: HashMap<u64, oneshot::Sender<Reply>> = HashMap::new();
        let mut number = 0;
        loop {
            tokio::select! {
                () = self.shutdown.cancelled() => return Err(Status::unavailable("the controller stops; dial again")),
                answer = answers.message() => {
                    let Some(Answer { number, reply }) = answer? else { return Ok(()) };
                    // An unknown answer of a newer version is ignored.
                    let reply = reply.unwrap_or_else(|| Reply::Refusal("its answer has the format of a newer version".to_owned()));
                    if let Some(answer) = waiting.remove(&number) {
                        // The client may have given up.
                        let _ = answer.send(reply);
                    }
                }
                next = receiver.recv(), if waiting.len() < WAITING_MAX => {
                    let Some(PendingQuestion { query, answer }) = next else { return Ok(()) };
                    if answer.is_closed() {
                        continue;
                    }
                    number += 1;
                    waiting.retain(|_, answer| !answer.is_closed());
                    waiting.insert(number, answer);
                    // A gateway that does not read blocks this only as long as a client waits for the answer.
                    let question = Question { number, query: Some(query) };
                    match tokio::time::timeout(ANSWER_TIMEOUT, questions.send(Ok(question))).await {
                        Ok(Ok(())) => {}
                        Ok(Err(_)) => return Ok(()),
                        Err(_) => return Err(Status::deadline_exceeded("the gateway does not read requests; dial again")),
                    }
                }
                () = tokio::time::sleep(ANSWER_TIMEOUT), if !waiting.is_empty() => waiting.retain(|_, answer| !answer.is_closed()),
            }
        }
    }
}

/// Checks the first message.
async fn offer(answers: &mut Streaming<Answer>) -> Result<String, Status> {
    let first = tokio::time::timeout(OFFER_TIMEOUT, answers.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded("expected an offer within 10 s of connecting"))??;
    match first {
        Some(Answer { reply: Some(Reply::Offer(offer)), .. }) if !offer.gateway.is_empty() => Ok(offer.gateway),
        _ => Err(Status::invalid_argument("expected an offer with the gateway's name as the first message")),
    }
}
