//! A netlink socket: one datagram at a time, so that what has not been read waits in the kernel's bounded buffer, not in
//! ours.
//!
//! Deliberately not here: what messages mean. Of a message that does not parse only the header is handed on: a newer kernel
//! may say more.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with, sockopt};
use tokio::io::unix::AsyncFd;

/// Bytes of a message's header (RFC 3549 section 2.2).
const HEADER_BYTES: usize = 16;
/// Longest datagram that is read: the kernel fills dumps by 32 KiB at most.
const DATAGRAM_BYTES_MAX: usize = 64 * 1024;
/// Receive buffer of a following socket: 8 MiB hold some 40,000 route changes of 200 bytes, what a routing daemon sends
/// while a full table is being read.
const RECEIVE_BUFFER_BYTES: usize = 8 * 1024 * 1024;

/// Why talking to the kernel's routing tables failed.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// No socket.
    #[error("cannot open a netlink socket: {0}; the gateway needs CAP_NET_ADMIN")]
    Open(#[source] io::Error),
    /// The kernel had more to say than its buffer holds. Read everything anew.
    #[error("the kernel dropped netlink messages for us: its receive buffer was full")]
    Overrun,
    /// Reading or writing failed.
    #[error("netlink socket: {0}")]
    Io(#[source] io::Error),
    /// The kernel refused a request.
    #[error("the kernel refused to {what}: {source}")]
    Refused {
        /// What was asked for.
        what: String,
        /// Its answer.
        source: io::Error,
    },
}

/// Whether a dump is of one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dump {
    /// It is.
    Consistent,
    /// Something changed meanwhile, and an entry may be missing.
    Interrupted,
}

type Message = NetlinkMessage<RouteNetlinkMessage>;

/// A NETLINK_ROUTE socket, in the network namespace of the thread that opened it.
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
    /// A socket for requests; with multicast groups (a mask of RTMGRP bits), one that follows changes.
    pub(crate) fn open(groups: u32) -> Result<Self, NetlinkError> {
        let open = || -> rustix::io::Result<OwnedFd> {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            // NETLINK_ROUTE is protocol 0, the family's default.
            let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
            if groups != 0 {
                sockopt::set_socket_recv_buffer_size_force(&fd, RECEIVE_BUFFER_BYTES)?;
            }
            bind(&fd, &SocketAddrNetlink::new(0, groups))?;
            Ok(fd)
        };
        let fd = open().map_err(|e| NetlinkError::Open(e.into()))?;
        #[expect(
            deprecated,
            reason = "its successor is unsafe for the sake of types that do not own their descriptor; OwnedFd does"
        )]
        let fd = AsyncFd::new(fd).map_err(NetlinkError::Open)?;
        Ok(Self { fd, datagram: vec![0; DATAGRAM_BYTES_MAX], sequence: 0 })
    }

    /// Waits for a datagram and hands its messages to `each`.
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

    /// Throws away what is waiting. After an overrun the kernel drops every further message until the buffer has been
    /// emptied, and what lies in it is older than what was dropped.
    pub(crate) fn drain(&mut self) -> Result<(), NetlinkError> {
        loop {
            match recv(self.fd.get_ref(), &mut self.datagram[..], RecvFlags::DONTWAIT) {
                Ok(_) | Err(Errno::NOBUFS | Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(e) => return Err(NetlinkError::Io(e.into())),
            }
        }
    }

    /// Asks for what answers itself, on a socket that follows changes: the answer comes as they do.
    pub(crate) async fn ask(&mut self, message: RouteNetlinkMessage) -> Result<(), NetlinkError> {
        self.send(message, NLM_F_REQUEST).await.map(|_| ())
    }

    /// Sends a request and waits for the kernel's answer to it. `what` completes "refused to".
    pub(crate) async fn request(&mut self, message: RouteNetlinkMessage, flags: u16, what: &str) -> Result<(), NetlinkError> {
        let sequence = self.send(message, NLM_F_REQUEST | NLM_F_ACK | flags).await?;
        let mut answer = None;
        while answer.is_none() {
            self.receive(|m| {
                if let (true, NetlinkPayload::Error(e)) = (m.header.sequence_number == sequence, &m.payload) {
                    answer = Some(e.code.map(|_| e.to_io()));
                }
            })
            .await?;
        }
        match answer.flatten() {
            None => Ok(()),
            Some(source) => Err(NetlinkError::Refused { what: what.to_owned(), source }),
        }
    }

    /// Asks for all entries of a kind and hands them to `each`. A dump that the kernel ends with an error is refused: entries
    /// are missing.
    pub(crate) async fn dump(
        &mut self,
        message: RouteNetlinkMessage,
        what: &str,
        mut each: impl FnMut(&RouteNetlinkMessage),
    ) -> Result<Dump, NetlinkError> {
        let sequence = self.send(message, NLM_F_REQUEST | NLM_F_DUMP).await?;
        let (mut end, mut outcome) = (None, Dump::Consistent);
        while end.is_none() {
            self.receive(|m| {
                if m.header.sequence_number != sequence {
                    return;
                }
                if m.header.flags & NLM_F_DUMP_INTR != 0 {
                    outcome = Dump::Interrupted;
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

/// Splits a datagram. Messages are aligned to 4 bytes and start with their length (RFC 3549 section 2.2).
fn messages(mut datagram: &[u8], each: &mut impl FnMut(Message)) {
    while let Some(length) = datagram.first_chunk::<4>() {
        let length = usize::try_from(u32::from_ne_bytes(*length)).unwrap_or(usize::MAX);
        if length < HEADER_BYTES || length > datagram.len() {
            return;
        }
        match Message::deserialize(&datagram[..length]) {
            Ok(message) => each(message),
            Err(error) => {
                tracing::debug!(%error, "a netlink message does not parse");
                each(Message::new(header_of(datagram), NetlinkPayload::Noop));
            }
        }
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
}

/// The header of the first message, which is there: type, flags, and the number of the request that it answers.
fn header_of(datagram: &[u8]) -> NetlinkHeader {
    let mut header = NetlinkHeader::default();
    header.message_type = u16::from_ne_bytes([datagram[4], datagram[5]]);
    header.flags = u16::from_ne_bytes([datagram[6], datagram[7]]);
    header.sequence_number = u32::from_ne_bytes([datagram[8], datagram[9], datagram[10], datagram[11]]);
    header
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

    /// A socket, and its kernel.
    fn with_kernel() -> (Socket, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, kernels) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        #[expect(deprecated, reason = "as in Socket::open")]
        let fd = AsyncFd::new(ours).unwrap();
        (Socket { fd, datagram: vec![0; DATAGRAM_BYTES_MAX], sequence: 0 }, kernels)
    }

    /// A message of the first dump.
    fn message(kind: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEADER_BYTES + payload.len()).unwrap().to_ne_bytes();
        let (kind, flags) = (kind.to_ne_bytes(), (flags | NLM_F_MULTIPART).to_ne_bytes());
        [&length[..], &kind, &flags, &1_u32.to_ne_bytes(), &[0; 4], payload].concat()
    }

    /// What comes of a dump that the kernel answers so, and how many entries it had.
    async fn dumped(answers: &[&[u8]]) -> (Result<Dump, NetlinkError>, usize) {
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
        assert_eq!((whole.unwrap(), entries), (Dump::Consistent, 2));
        let (cut, entries) = dumped(&[&entry, &done(-Errno::NOBUFS.raw_os_error())]).await;
        let error = cut.unwrap_err().to_string();
        assert!(error.contains("refused to list links: ") && error.contains("os error 105"), "{error}");
        assert_eq!(entries, 1);
    }

    #[tokio::test]
    async fn an_entry_that_does_not_parse_still_says_that_the_dump_was_interrupted() {
        let odd = message(NEW_LINK, NLM_F_DUMP_INTR, &[0; 3]);
        let done = message(NLMSG_DONE, 0, &0_i32.to_ne_bytes());
        assert_eq!(dumped(&[&odd, &done]).await.0.unwrap(), Dump::Interrupted);
    }
}
