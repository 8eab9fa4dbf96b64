//! `grpc.health.v1.Health/Check` over an open connection, without TLS. The caller bounds the time.

use std::error::Error;
use std::sync::{Arc, PoisonError};

use futures::FutureExt as _;
use hyper::client::conn::http2;
use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tonic::body::Body;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::Outcome;
use super::tls::innermost;

/// Asks for the health of `service`, or of the whole server if it is empty.
pub(super) async fn ask(stream: TcpStream, authority: &str, service: &str) -> Outcome {
    let Ok(origin) = http::Uri::try_from(format!("http://{authority}")) else {
        return Outcome::NotAsked(format!("host {authority:?} is no part of a URI"));
    };
    let tasks = ConnectionTasks::default();
    let (sender, connection) = match http2::handshake::<_, _, Body>(tasks.clone(), TokioIo::new(stream)).await {
        Ok(both) => both,
        Err(error) => return no_answer(&error),
    };
    tasks.execute(connection.map(drop));
    let tasks = AbortOnDrop(tasks);
    let transport = tower::service_fn(move |request: http::Request<Body>| {
        let mut sender = sender.clone();
        async move {
            sender.ready().await?;
            sender.send_request(request).await
        }
    });
    let request = HealthCheckRequest { service: service.to_owned() };
    let answer = HealthClient::with_origin(transport, origin).check(request).await;
    drop(tasks);
    match answer.map(|answer| answer.into_inner().status()) {
        Ok(ServingStatus::Serving) => Outcome::Passed,
        Ok(status) => Outcome::Failed(format!("answered {}, expected SERVING", status.as_str_name())),
        // The server answered nothing that is gRPC, so the status is one of our own.
        Err(status) if status.source().is_some() => no_answer(&status),
        Err(status) => Outcome::Failed(format!("answered {:?} ({}), expected SERVING", status.code(), short(status.message()))),
    }
}

/// The commonest cause is TLS, of which the connection shows nothing but that it ends.
fn no_answer(error: &(dyn Error + 'static)) -> Outcome {
    Outcome::Failed(format!("gave no gRPC answer: {}; the probe has no TLS", innermost(error)))
}

/// The beginning of a text of unknown length, on one line.
fn short(text: &str) -> String {
    text.chars().take(80).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The tasks of one HTTP/2 connection, which must not outlive the probe.
#[derive(Clone, Default)]
struct ConnectionTasks(Arc<std::sync::Mutex<JoinSet<()>>>);

impl<F> Executor<F> for ConnectionTasks
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).spawn(task.map(drop));
    }
}

/// Tasks hold their set, so that dropping it would end nothing.
struct AbortOnDrop(ConnectionTasks);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).abort_all();
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::net::TcpListener;
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic_health::server::HealthReporter;

    use super::super::prober::tests::{LONG, failure};
    use super::super::target::tests::at;
    use super::super::{GrpcQuestion, Question, prober};
    use super::*;

    async fn server() -> (SocketAddr, HealthReporter) {
        let (reporter, service) = tonic_health::server::health_reporter();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(
            tonic::transport::Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener)),
        );
        (address, reporter)
    }

    async fn probe(address: SocketAddr, service: &str, timeout: std::time::Duration) -> Outcome {
        let question = GrpcQuestion { service: service.to_owned(), host: None };
        prober::tests::probe(at(address, Question::Grpc(Arc::new(question))), None, timeout).await
    }

    #[tokio::test]
    async fn a_server_passes_while_it_says_that_it_serves() {
        let (address, reporter) = server().await;
        assert_eq!(probe(address, "", LONG).await, Outcome::Passed);
        let unknown = failure(probe(address, "shop.Cart", LONG).await);
        assert!(unknown.starts_with("answered NotFound"), "{unknown}");
        reporter.set_service_status("shop.Cart", tonic_health::ServingStatus::NotServing).await;
        assert_eq!(failure(probe(address, "shop.Cart", LONG).await), "answered NOT_SERVING, expected SERVING");
        reporter.set_service_status("shop.Cart", tonic_health::ServingStatus::Serving).await;
        assert_eq!(probe(address, "shop.Cart", LONG).await, Outcome::Passed);
    }

    #[tokio::test]
    async fn a_server_that_speaks_no_grpc_or_says_nothing_fails() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let silent = probe(address, "", std::time::Duration::from_millis(50)).await;
        assert!(failure(silent).contains("gave no answer within 50ms"));
        let closes = tokio::spawn(async move { while listener.accept().await.is_ok() {} });
        let closed = failure(probe(address, "", LONG).await);
        assert!(closed.starts_with("gave no gRPC answer: ") && closed.ends_with("; the probe has no TLS"), "{closed}");
        closes.abort();
    }

    #[tokio::test]
    async fn a_server_with_tls_gives_no_grpc_answer_and_the_reason_names_tls() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 64]).await;
                // The alert by which OpenSSL answers what is no TLS.
                let _ = stream.write_all(b"\x15\x03\x01\x00\x02\x02\x46").await;
                let _ = stream.shutdown().await;
                let _ = stream.read(&mut [0; 64]).await;
            }
        });
        let why = failure(probe(address, "", LONG).await);
        assert!(why.starts_with("gave no gRPC answer: ") && why.ends_with("; the probe has no TLS"), "{why}");
        assert!(!why.contains("Unknown"), "{why}");
        server.abort();
    }
}
