//! Health of a node as reported by kube-proxy: `GET /healthz` at the `healthCheckNodePort` of a Service returns 200 while
//! the node has ready endpoints of it and kube-proxy is healthy.

use std::net::SocketAddr;
use std::pin::pin;

use http::{Request, StatusCode};
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::Outcome;

/// Sends the request over a connection to `target`; the caller applies the timeout. The body is not read.
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
        // The connection task may end first if the server closes at once; the answer was received before.
        _ = &mut connection => answer.await,
    };
    match answer {
        Ok(answer) if answer.status() == StatusCode::OK => Outcome::Passed,
        Ok(answer) => Outcome::Failed(format!("answered {}, expected 200", answer.status().as_u16())),
        Err(error) => failed(error),
    }
}
