//! A netlink socket that reads one datagram at a time: unread messages wait in the kernel's bounded receive buffer.
//!
//! Not here: the meaning of messages. If a message does not parse, only its header is passed on, because a newer kernel
//! may send unknown types. docs/internals/decisions/0041 says why this is not a library.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    Parseable,
};
use netlink_packet_route::RouteNetlinkMessage;
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with, sockopt};
use tokio::io::unix::AsyncFd;

/// Size of the read buffer: the kernel fills dump datagrams up to 32 KiB.
const DATAGRAM_BYTES_MAX: usize = 64 * 1024;
/// Receive buffer of a following socket: 8 MiB hold about 40,000 route changes of 200 bytes, which is what a routing
/// daemon sends while a full table is read.
const RECEIVE_BUFFER_BYTES: usize = 8 * 1024 * 1024;

/// Errors of a netlink exchange with the kernel.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket could not be opened.
    #[error("cannot open a netlink socket: {0}; the gateway needs CAP_NET_ADMIN")]
    Open(#[source] io::Error),
    /// The receive buffer was full and messages were lost. Read all tables again.
    #[error("the kernel dropped netlink messages because the socket's receive buffer was full")]
    Overrun,
    /// Reading or writing failed.
    #[error("netlink socket: {0}")]
    Io(#[source] io::Error),
    /// The kernel refused a request.
    #[error("the kernel refused to {what}: {source}")]
    Refused {
        /// The requested action, as it follows "refused to".
        what: String,
        /// The kernel's error code.
        source: io::Error,
    },
}

impl NetlinkError {
    /// Whether the kernel refused a request with this error code.
    pub(crate) fn is_refusal(&self, errno: Errno) -> bool {
        matches!(self, Self::Refused { source, .. } if source.raw_os_error() == Some(errno.raw_os_error()))
    }
}

/// Whether a dump shows the tables at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DumpOutcome {
    /// It does.
    Consistent,
    /// The tables changed during the dump (NLM_F_DUMP_INTR), and an entry may be missing.
    Interrupted,
}

type Message = NetlinkMessage<RouteNetlinkMessage>;

/// A NETLINK_ROUTE socket in the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: AsyncFd<OwnedFd>,
    datagram: Vec<u8>,
    sequence: u32,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.get_ref().as_fd()
    }
}

impl Socket {
    /// Opens a socket. `groups` is a mask of RTMGRP bits: 0 for a socket that only sends requests, otherwise the
    /// multicast groups of the changes to follow.
    pub(crate) fn open(groups: u32) -> Result<Self, NetlinkError> {
        let open = || -> rustix::io::Result<OwnedFd> {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            // NETLINK_ROUTE is protocol 0, the default of the family.
            let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
            if groups != 0 {
                sockopt::set_socket_recv_buffer_size_force(&fd, RECEIVE_BUFFER_BYTES)?;
            }
            bind(&fd, &SocketAddrNetlink::new(0, groups))?;
            Ok(fd)
        };
        Self::of(open().map_err(|e| NetlinkError::Open(e.into()))?)
    }

    fn of(fd: OwnedFd) -> Result<Self, NetlinkError> {
        #[expect(deprecated, reason = "the successor is unsafe for types that do not own their descriptor; OwnedFd owns it")]
        let fd = AsyncFd::new(fd).map_err(NetlinkError::Open)?;
        Ok(Self { fd, datagram: vec![0; DATAGRAM_BYTES_MAX], sequence: 0 })
    }

    /// Waits for a datagram and passes its messages to `each`.
    pub(crate) async fn receive(&mut self, mut each: impl FnMut(Message)) -> Result<(), NetlinkError> {
        let read = loop {
            let mut ready = self.fd.readable().await.map_err(NetlinkError::Io)?;
            match ready.try_io(|fd| Ok(recv(fd, &mut self.datagram[..], RecvFlags::empty())?.1)) {
                Ok(Ok(read)) => break read,
                Ok(Err(e)) if e.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => {
                    return Err(NetlinkError::Overrun);
                }
                Ok(Err(e)) => return Err(NetlinkError::Io(e)),
                Err(_would_block) => {}
            }
        };
        messages(&self.datagram[..read], &mut each);
        Ok(())
    }

    /// Discards all waiting messages. After an overrun the kernel drops every further message until the buffer is
    /// empty, and the messages in the buffer are older than the dropped ones.
    pub(crate) fn drain(&mut self) -> Result<(), NetlinkError> {
        loop {
            match recv(self.fd.get_ref(), &mut self.datagram[..], RecvFlags::DONTWAIT) {
                Ok(_) | Err(Errno::NOBUFS | Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(e) => return Err(NetlinkError::Io(e.into())),
            }
        }
    }

    /// Sends a request without waiting for the reply, which [`Socket::receive`] returns like a change.
    pub(crate) async fn ask(&mut self, message: RouteNetlinkMessage) -> Result<(), NetlinkError> {
        self.send(message, NLM_F_REQUEST).await.map(|_| ())
    }

    /// Sends a request and waits for the kernel's acknowledgement. `what` completes "refused to".
    pub(crate) async fn request(&mut self, message: RouteNetlinkMessage, flags: u16, what: &str) -> Result<(), NetlinkError> {
        self.exchange(message, NLM_F_ACK | flags, what, |_| {}).await.map(|_| ())
    }

    /// Requests one entry and passes it to `each`. `what` completes "refused to".
    pub(crate) async fn ask_once(
        &mut self,
        message: RouteNetlinkMessage,
        what: &str,
        each: impl FnMut(&RouteNetlinkMessage),
    ) -> Result<(), NetlinkError> {
        self.exchange(message, NLM_F_ACK, what, each).await.map(|_| ())
    }

    /// Requests all entries of a kind and passes them to `each`. `what` completes "refused to". A dump that the kernel
    /// ends with an error counts as refused, because entries are missing.
    pub(crate) async fn dump(
        &mut self,
        message: RouteNetlinkMessage,
        what: &str,
        each: impl FnMut(&RouteNetlinkMessage),
    ) -> Result<DumpOutcome, NetlinkError> {
        self.exchange(message, NLM_F_DUMP, what, each).await
    }

    /// Requests all entries of a kind and returns those that `select` picks.
    pub(crate) async fn list<T>(
        &mut self,
        message: RouteNetlinkMessage,
        what: &str,
        mut select: impl FnMut(&RouteNetlinkMessage) -> Option<T>,
    ) -> Result<Vec<T>, NetlinkError> {
        let mut found = Vec::new();
        self.dump(message, what, |message| found.extend(select(message))).await?;
        Ok(found)
    }

    /// Sends a request and reads its replies up to the last one: an acknowledgement, an error, or the end of a dump.
    async fn exchange(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
        what: &str,
        mut each: impl FnMut(&RouteNetlinkMessage),
    ) -> Result<DumpOutcome, NetlinkError> {
        let sequence = self.send(message, NLM_F_REQUEST | flags).await?;
        let (mut end, mut outcome) = (None, DumpOutcome::Consistent);
        while end.is_none() {
            self.receive(|m| {
                if m.header.sequence_number != sequence {
                    return;
                }
                if m.header.flags & NLM_F_DUMP_INTR != 0 {
                    outcome = DumpOutcome::Interrupted;
                }
                match &m.payload {
                    NetlinkPayload::InnerMessage(inner) => each(inner),
                    NetlinkPayload::Error(e) => end = Some(e.code.map(|_| e.to_io())),
                    NetlinkPayload::Done(done) => {
                        end = Some((done.code < 0).then(|| io::Error::from_raw_os_error(done.code.saturating_neg())));
                    }
                    _ => {}
                }
            })
            .await?;
        }
        match end.flatten() {
            None => Ok(outcome),
            Some(source) => Err(NetlinkError::Refused { what: what.to_owned(), source }),
        }
    }

    async fn send(&mut self, message: RouteNetlinkMessage, flags: u16) -> Result<u32, NetlinkError> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = self.sequence;
        let mut message = Message::new(header, NetlinkPayload::InnerMessage(message));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        loop {
            let mut ready = self.fd.writable().await.map_err(NetlinkError::Io)?;
            match ready.try_io(|fd| Ok(send(fd, &bytes, SendFlags::empty())?)) {
                Ok(Ok(_)) => return Ok(self.sequence),
                Ok(Err(e)) => return Err(NetlinkError::Io(e)),
                Err(_would_block) => {}
            }
        }
    }
}

/// Splits a datagram into messages, which are aligned to 4 bytes and start with their length (RFC 3549 section 2.2).
fn messages(mut datagram: &[u8], each: &mut impl FnMut(Message)) {
    while !datagram.is_empty()
        && let Ok(buffer) = NetlinkBuffer::new_checked(&datagram)
    {
        let message = Message::parse(&buffer).or_else(|error| {
            tracing::debug!(%error, "a netlink message does not parse");
            NetlinkHeader::parse(&buffer).map(|header| Message::new(header, NetlinkPayload::Noop))
        });
        let length = usize::try_from(buffer.length()).unwrap_or(usize::MAX);
        message.into_iter().for_each(&mut *each);
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::{NLM_F_MULTIPART, NLMSG_DONE};
    use netlink_packet_route::link::LinkMessage;
    use rustix::net::socketpair;
    use tokio::time::{Duration, timeout};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);
    const NEW_LINK: u16 = 16;

    /// A socket and the descriptor at the kernel's end of it.
    fn with_kernel() -> (Socket, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, kernels) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (Socket::of(ours).unwrap(), kernels)
    }

    /// A reply to the first request, with its header of 16 bytes.
    fn message(kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(16 + payload.len()).unwrap().to_ne_bytes();
        let (kind, flags) = (kind.to_ne_bytes(), (flags | NLM_F_MULTIPART).to_ne_bytes());
        [&length[..], &kind, &flags, &1_u32.to_ne_bytes(), &[0; 4], payload].concat()
    }

    /// The outcome of a dump to which the kernel sends these datagrams, and the number of its entries.
    async fn dumped(answers: &[&[u8]]) -> (Result<DumpOutcome, NetlinkError>, usize) {
        let (mut socket, kernel) = with_kernel();
        for answer in answers {
            send(&kernel, answer, SendFlags::empty()).unwrap();
        }
        let mut entries = 0;
        let dump = socket.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()), "list links", |_| entries += 1);
        let outcome = timeout(LONG, dump).await.unwrap();
        (outcome, entries)
    }

    #[tokio::test]
    async fn a_dump_that_ends_in_an_error_is_refused() {
        let entry = message(NEW_LINK, 0, &[0; 16]);
        let done = |code: i32| message(NLMSG_DONE, 0, &code.to_ne_bytes());
        let (whole, entries) = dumped(&[&entry, &[entry.clone(), done(0)].concat()]).await;
        assert_eq!((whole.unwrap(), entries), (DumpOutcome::Consistent, 2));
        let (cut, entries) = dumped(&[&entry, &done(-Errno::NOBUFS.raw_os_error())]).await;
        let error = cut.unwrap_err().to_string();
        assert!(error.contains("refused to list links: ") && error.contains("os error 105"), "{error}");
        assert_eq!(entries, 1);
    }

    #[tokio::test]
    async fn an_entry_that_does_not_parse_still_says_that_the_dump_was_interrupted() {
        let odd = message(NEW_LINK, NLM_F_DUMP_INTR, &[0; 3]);
        let done = message(NLMSG_DONE, 0, &0_i32.to_ne_bytes());
        assert_eq!(dumped(&[&odd, &done]).await.0.unwrap(), DumpOutcome::Interrupted);
    }
}
