//! Connections of processes on this machine, over a unix socket: bounded in number, shared fairly among users, and closed
//! when they are silent.
//!
//! Invariant: no more connections are open than the socket has places, apart from one that waits for a place. When all
//! are taken, a new connection gets that of the oldest of the user who has most of them. A connection whose peer sends
//! nothing for 30 s is closed: a live peer answers a keep-alive ping every 10 s. So nobody who may open the socket can
//! take the descriptors of the program, or the places of other users.
//! Not here: who may open a socket (`admin::sockets`), and what is asked over it.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, Sleep, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::{Connected, UdsConnectInfo};

use super::socket::not_accepted;

/// A connection is closed after this time without a byte of its peer: three keep-alive pings.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// A user ID, if the kernel knows it.
type User = Option<u32>;

/// Accepts connections until the receiver is dropped.
pub(crate) fn incoming(listener: UnixListener, connections_max: usize) -> ReceiverStream<io::Result<LocalStream>> {
    let (streams, incoming) = mpsc::channel(1);
    tokio::spawn(accept(listener, connections_max, Ok, streams));
    ReceiverStream::new(incoming)
}

/// Accepts connections, and sends each as `wrap` makes it, until the receiver is dropped.
pub(super) async fn accept<T>(
    listener: UnixListener,
    connections_max: usize,
    wrap: impl Fn(LocalStream) -> T,
    streams: mpsc::Sender<T>,
) {
    let mut places = Places::new(connections_max);
    let accept_one = async {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let user = stream.peer_cred().ok().map(|peer| peer.uid());
                    let place = places.take(user).await;
                    if streams.send(wrap(LocalStream::new(stream, place))).await.is_err() {
                        return;
                    }
                }
                Err(error) => not_accepted(&error).await,
            }
        }
    };
    tokio::select! {
        () = streams.closed() => {}
        () = accept_one => {}
    }
}

/// The places of a socket.
#[derive(Debug)]
struct Places {
    connections_max: usize,
    /// Open connections, the oldest first.
    open: Vec<(User, Weak<CancellationToken>)>,
    permits: Arc<Semaphore>,
}

/// The place of a connection, until this is dropped.
#[derive(Debug)]
struct Place {
    /// Cancelled when another connection gets the place.
    lost: Arc<CancellationToken>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Places {
    fn new(connections_max: usize) -> Self {
        Self { connections_max, open: Vec::new(), permits: Arc::new(Semaphore::new(connections_max)) }
    }

    /// Waits for a place. If all are taken, one connection is closed for it.
    async fn take(&mut self, user: User) -> Place {
        self.open.retain(|(_, lost)| lost.strong_count() > 0);
        if self.open.len() >= self.connections_max {
            let users: Vec<User> = self.open.iter().map(|(user, _)| *user).collect();
            let (_, lost) = self.open.remove(loser(&users, user));
            if let Some(lost) = lost.upgrade() {
                lost.cancel();
            }
        }
        // The semaphore is never closed.
        let permit = Arc::clone(&self.permits).acquire_owned().await.ok();
        let lost = Arc::new(CancellationToken::new());
        self.open.push((user, Arc::downgrade(&lost)));
        Place { lost, _permit: permit }
    }
}

/// The connection, among those of `users` from the oldest to the newest, that gives way to one of `newcomer`.
fn loser(users: &[User], newcomer: User) -> usize {
    let mut counts = BTreeMap::<User, usize>::new();
    users.iter().chain([&newcomer]).for_each(|user| *counts.entry(*user).or_default() += 1);
    let most = users.iter().map(|user| counts[user]).max();
    let has_most = |user: &User| Some(counts[user]) == most;
    let own = users.iter().position(|user| *user == newcomer && has_most(user));
    own.or_else(|| users.iter().position(has_most)).unwrap_or_default()
}

/// One connection.
pub(crate) struct LocalStream {
    stream: UnixStream,
    lost: Pin<Box<WaitForCancellationFutureOwned>>,
    silence: Pin<Box<Sleep>>,
    _place: Place,
}

impl LocalStream {
    fn new(stream: UnixStream, place: Place) -> Self {
        let lost = Box::pin(CancellationToken::clone(&place.lost).cancelled_owned());
        Self { stream, lost, silence: Box::pin(sleep(SILENCE_MAX)), _place: place }
    }

    /// Ready when the connection has to end.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if self.lost.as_mut().poll(cx).is_ready() {
            let why = "too many connections are open; this one gave way to a newer one";
            return Poll::Ready(io::Error::new(io::ErrorKind::ConnectionAborted, why));
        }
        self.silence.as_mut().poll(cx).map(|()| io::Error::new(io::ErrorKind::TimedOut, "the peer is silent"))
    }
}

impl Connected for LocalStream {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for LocalStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Poll::Ready(error) = self.poll_end(cx) {
            return Poll::Ready(Err(error));
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.silence.as_mut().reset(Instant::now() + SILENCE_MAX);
        }
        read
    }
}

impl AsyncWrite for LocalStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if let Poll::Ready(error) = self.poll_end(cx) {
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[test]
    fn the_oldest_connection_of_the_user_with_most_gives_way() {
        let (root, alice, bob) = (Some(0), Some(1000), Some(1001));
        assert_eq!(loser(&[root, alice, alice, alice], bob), 1);
        assert_eq!(loser(&[root, alice, alice, alice], alice), 1);
        assert_eq!(loser(&[root, alice, bob, root], bob), 2, "the newcomer would have as many");
        assert_eq!(loser(&[root, bob, bob], None), 1);
        assert_eq!(loser(&[root, alice, bob], None), 0);
    }

    #[tokio::test]
    async fn no_more_connections_are_open_than_there_are_places() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let (streams, mut accepted) = mpsc::channel(1);
        tokio::spawn(accept(UnixListener::bind(&path).unwrap(), 4, |stream| stream, streams));
        // Each is read by a task of its own, as a server reads it, until it is told to end.
        let reader = |mut stream: LocalStream| tokio::spawn(async move { stream.read_u8().await.map_err(|error| error.kind()) });
        let (mut clients, mut readers) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            clients.push(UnixStream::connect(&path).await.unwrap());
            readers.push(reader(accepted.recv().await.unwrap()));
        }
        let newest = readers.split_off(16);
        for ended in readers {
            assert_eq!(ended.await.unwrap(), Err(io::ErrorKind::ConnectionAborted));
        }
        for (client, reader) in clients[16..].iter_mut().zip(newest) {
            client.write_u8(7).await.unwrap();
            assert_eq!(reader.await.unwrap(), Ok(7), "the newest are served");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_connection_is_closed_and_one_that_sends_is_not() {
        let (server, mut client) = UnixStream::pair().unwrap();
        let mut stream = LocalStream::new(server, Places::new(1).take(None).await);
        for _ in 0..3 {
            tokio::time::advance(SILENCE_MAX - Duration::from_secs(1)).await;
            client.write_u8(7).await.unwrap();
            assert_eq!(stream.read_u8().await.unwrap(), 7);
        }
        let since = Instant::now();
        assert_eq!(stream.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(since.elapsed() >= SILENCE_MAX - Duration::from_secs(1));
    }
}
