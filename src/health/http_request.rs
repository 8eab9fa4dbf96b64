//! An HTTP/1.1 request over an open connection. The caller bounds the time, and ends the connection.

use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use proto::StatusRanges;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Outcome;
use super::tls::cause_of;

/// How servers recognise probes in their logs.
const USER_AGENT: &str = concat!("sluice/", env!("CARGO_PKG_VERSION"));

/// A GET request, and the statuses that pass.
pub(super) struct Request<'a> {
    pub(super) authority: &'a str,
    pub(super) path: &'a str,
    pub(super) status: &'a StatusRanges,
}

/// Sends `asked` and judges the status of the answer. Redirects are not followed, and the body is not read.
pub(super) async fn ask(stream: impl AsyncRead + AsyncWrite + Unpin, asked: &Request<'_>) -> Outcome {
    let request = http::Request::get(asked.path).header("host", asked.authority).header("user-agent", USER_AGENT);
    let Ok(request) = request.header("connection", "close").body(Empty::<Bytes>::new()) else {
        return Outcome::NotAsked(format!("the request for {:?} of host {:?} is no HTTP", asked.path, asked.authority));
    };
    let failed = |error: hyper::Error| Outcome::Failed(format!("gave no HTTP answer: {}", cause_of(&error)));
    let (mut sender, connection) = match http1::handshake(TokioIo::new(LeftOpen(stream))).await {
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
    match answer.map(|answer| answer.status().as_u16()) {
        Ok(status) if asked.status.contains(status) => Outcome::Passed,
        Ok(status) => Outcome::Failed(format!("answered {status}, expected {}", asked.status)),
        Err(error) => failed(error),
    }
}

/// A stream that only its owner ends. The end of a probe is a reset, so a FIN before it, and over TLS an alert before
/// that, would cost packets at both sides and say nothing more.
struct LeftOpen<S>(S);

impl<S: AsyncRead + Unpin> AsyncRead for LeftOpen<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LeftOpen<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().0).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_write_vectored(self: Pin<&mut Self>, context: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().0).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }
}
