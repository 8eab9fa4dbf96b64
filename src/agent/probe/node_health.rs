//! What kube-proxy says of its node: `GET /healthz` at the `healthCheckNodePort` of a Service, 200 while the node has ready
//! endpoints of it and kube-proxy is well.

use std::net::SocketAddr;
use std::pin::pin;

use http::{Request, StatusCode};
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::Outcome;

/// Asks over a connection to `target`, which the caller bounds in time. The body is not read.
pub(super) async fn ask(stream: TcpStream, target: SocketAddr) -> Outcome {
    let request = Request::get("/healthz").header("host", target.to_string()).header("connection", "close");
    let Ok(request) = request.body(Empty::<Bytes>::new()) else {
        return Outcome::NotAsked("the request cannot be written".to_owned());
    };
    let failed = |error: hyper::Error| Outcome::Failed(format!("no HTTP answer: {error}"));
    let (mut sender, connection) = match http1::handshake(TokioIo::new(stream)).await {
        Ok(both) => both,
        Err(error) => return failed(error),
    };
    let mut connection = pin!(connection);
    let mut answer = pin!(sender.send_request(request));
    let answer = tokio::select! {
        answer = &mut answer => answer,
        // The connection ends first where the server closes it at once; the answer was taken in before.
        _ = &mut connection => answer.await,
    };
    match answer {
        Ok(answer) if answer.status() == StatusCode::OK => Outcome::Passed,
        Ok(answer) => Outcome::Failed(format!("answered {}, expected 200", answer.status().as_u16())),
        Err(error) => failed(error),
    }
}
