//! The TCP connection of a session: the handshake, and sealed messages with their length.
//!
//! **Invariant:** nothing is read that is longer than [`FRAME_MAX`], and nothing is believed before the other side has proven
//! that it has the key. Not here: what the messages mean.

use std::io;
use std::time::Duration;

use proto::GroupKey;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::seal::{
    self, HANDSHAKE_BYTES_MAX, Identity, Offer, Opener, PendingSession, SealError, SealedSession, Sealer, TAG, VERSION,
};
use super::window::WindowError;
use crate::worker_threads::inquiries::NoAnswer;

/// Time for a handshake: partners are in one network.
pub(super) const HANDSHAKE_MAX: Duration = Duration::from_secs(3);
/// A session ends when nothing was heard for this time: ten heartbeats.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(1);
/// Interval of heartbeats and acknowledgements.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(100);
/// Longest message: a page of a copy of 8 KiB, and room for later versions.
const FRAME_MAX: usize = 16 * 1024;

/// Why a session ended, or did not begin.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("its handshake took longer than {} s", HANDSHAKE_MAX.as_secs())]
    Slow,
    #[error(transparent)]
    Seal(#[from] SealError),
    #[error(transparent)]
    BatchWindow(#[from] WindowError),
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error("expected messages of at most {FRAME_MAX} bytes, found one of {0}")]
    Length(usize),
    #[error("nothing arrived by UDP for {} ms; does a firewall let UDP through, too?", SILENCE_MAX.as_millis())]
    Silent,
    #[error("news was lost that is no longer kept; a new copy follows")]
    Gone,
    #[error("it closed the connection")]
    Closed,
    #[error(
        "it closed the connection without an answer: it speaks another version of the replication, or its log says why; \
         upgrade the older one"
    )]
    Unanswered,
    #[error("the key by which the session began is no longer in `fleet.key`; a new session follows")]
    KeyWithdrawn,
    #[error("it refused: {0}")]
    Refused(SealError),
    #[error(
        "partner {0} has other values of `announce.groups`, `announce.firstVrid` or the first {1} of `snat.addresses` of a \
         family; stop all gateways and give them the same"
    )]
    Disagrees(String, u8),
    #[error("`snat.addresses` of this gateway have changed; a new session follows")]
    Changed,
}

impl SessionError {
    /// Whether a session ends so as a matter of routine, and the next one has what this one had.
    pub(super) const fn is_routine(&self) -> bool {
        matches!(self, Self::Seal(SealError::WornOut) | Self::KeyWithdrawn | Self::Changed)
    }
}

/// Why the sender refuses, in place of an answer: one byte, after [`REFUSED_VERSION`] the newest version that it speaks.
const REFUSED_KEY: u8 = 0;
const REFUSED_VERSION: u8 = 2;

async fn write_handshake(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), bytes].concat()).await
}

async fn read_handshake(stream: &mut TcpStream) -> Result<Vec<u8>, SessionError> {
    let length = usize::from(stream.read_u16().await?);
    if length > HANDSHAKE_BYTES_MAX {
        // So is any other protocol.
        return Err(SealError::Magic.into());
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

/// Partners have one owner for each SNAT address only if they have the same values.
fn check_agreement(own: &Identity, partner: &Identity, groups: u8) -> Result<(), SessionError> {
    if own.agreement == partner.agreement { Ok(()) } else { Err(SessionError::Disagrees(partner.name.clone(), groups)) }
}

/// The follower's handshake. Returns the session, and who the sender is. It introduces itself before it judges what the
/// sender has, so both sides name the same cause.
pub(super) async fn follow(
    stream: &mut TcpStream,
    identity: &Identity,
    keys: &[GroupKey],
    groups: u8,
) -> Result<(SealedSession, Identity), SessionError> {
    let handshake = async {
        let offer = Offer::new(keys)?;
        write_handshake(stream, &offer.bytes).await?;
        let answer = read_handshake(stream).await.map_err(|error| match error {
            SessionError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => SessionError::Unanswered,
            other => other,
        })?;
        match answer[..] {
            [REFUSED_KEY] => return Err(SessionError::Refused(SealError::Key)),
            [REFUSED_VERSION, newest] => return Err(SealError::Version(newest).into()),
            _ => {}
        }
        let (PendingSession { session, bytes }, sender) = offer.accept(&answer, identity, keys)?;
        write_handshake(stream, &bytes).await?;
        if sender.name == identity.name {
            return Err(SealError::Itself(sender.name).into());
        }
        check_agreement(identity, &sender, groups)?;
        Ok((session, sender))
    };
    timeout(HANDSHAKE_MAX, handshake).await.unwrap_or(Err(SessionError::Slow))
}

/// The sender's handshake. Returns the session, and who the follower is.
pub(super) async fn tell(
    stream: &mut TcpStream,
    identity: &Identity,
    keys: &[GroupKey],
    groups: u8,
) -> Result<(SealedSession, Identity), SessionError> {
    let handshake = async {
        let offer = read_handshake(stream).await?;
        let PendingSession { session, bytes } = match seal::answer(&offer, identity, keys) {
            Ok(answer) => answer,
            Err(error) => {
                match error {
                    SealError::Key => write_handshake(stream, &[REFUSED_KEY]).await?,
                    // Version 1 knows no refusal: it would take the bytes for an answer, and log a wrong cause.
                    SealError::Version(1) => {}
                    SealError::Version(_) => write_handshake(stream, &[REFUSED_VERSION, VERSION]).await?,
                    _ => {}
                }
                return Err(error.into());
            }
        };
        write_handshake(stream, &bytes).await?;
        let follower = session.introduced(&read_handshake(stream).await?, identity)?;
        check_agreement(identity, &follower, groups)?;
        Ok((session, follower))
    };
    timeout(HANDSHAKE_MAX, handshake).await.unwrap_or(Err(SessionError::Slow))
}

/// Writes messages, urgent ones first, until there are no more, or the connection fails.
pub(super) async fn write(
    mut stream: OwnedWriteHalf,
    mut sealer: Sealer,
    mut urgent: mpsc::Receiver<Vec<u8>>,
    mut messages: mpsc::Receiver<Vec<u8>>,
) -> Result<(), SessionError> {
    loop {
        let message = tokio::select! {
            biased;
            Some(message) = urgent.recv() => message,
            Some(message) = messages.recv() => message,
            else => return Ok(()),
        };
        let length = u16::try_from(message.len() + TAG).map_err(io::Error::other)?.to_be_bytes();
        let mut sealed = length.to_vec();
        sealer.seal(&message, &mut sealed)?;
        stream.write_all(&sealed).await?;
    }
}

/// Reads messages, and passes them on until the connection or the reader ends.
pub(super) async fn read(mut stream: OwnedReadHalf, opener: Opener, messages: mpsc::Sender<Vec<u8>>) -> Result<(), SessionError> {
    for counter in 0.. {
        let mut head = [0; 2];
        match stream.read_exact(&mut head).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(SessionError::Closed),
            read => read?,
        };
        let length = usize::from(u16::from_be_bytes(head));
        if length > FRAME_MAX {
            return Err(SessionError::Length(length));
        }
        let mut sealed = vec![0; length];
        stream.read_exact(&mut sealed).await?;
        let message = opener.open(counter, &sealed)?;
        if messages.send(message).await.is_err() {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::net::TcpListener;

    use super::*;

    fn identity(n: u8) -> Identity {
        let address = SocketAddr::from(([192, 0, 2, n], 9437));
        Identity { name: format!("edge-{n}"), address, process: [n; 8], agreement: [7; 32] }
    }

    async fn both(of_follower: u8, of_sender: u8) -> (Result<Identity, SessionError>, Result<Identity, SessionError>) {
        both_of(identity(1), of_follower, of_sender).await
    }

    async fn both_of(
        one: Identity,
        of_follower: u8,
        of_sender: u8,
    ) -> (Result<Identity, SessionError>, Result<Identity, SessionError>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let follower = async {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let (session, sender) = follow(&mut stream, &one, &[GroupKey::new([of_follower; 32])], 2).await?;
            let (read_half, _write_half) = stream.into_split();
            let (messages, mut read_messages) = mpsc::channel(1);
            let reading = tokio::spawn(read(read_half, session.stream().1, messages));
            assert_eq!(read_messages.recv().await.unwrap(), b"urgent");
            assert_eq!(read_messages.recv().await.unwrap(), b"first");
            assert_eq!(read_messages.recv().await.unwrap(), b"second");
            assert!(matches!(reading.await.unwrap(), Err(SessionError::Closed)));
            Ok(sender)
        };
        let sender = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (session, follower) = tell(&mut stream, &identity(2), &[GroupKey::new([of_sender; 32])], 2).await?;
            let (_read_half, write_half) = stream.into_split();
            let (messages, written) = mpsc::channel(2);
            messages.send(b"first".to_vec()).await.unwrap();
            messages.send(b"second".to_vec()).await.unwrap();
            let (urgent, repaired) = mpsc::channel(1);
            urgent.send(b"urgent".to_vec()).await.unwrap();
            drop((messages, urgent));
            write(write_half, session.stream().0, repaired, written).await?;
            Ok(follower)
        };
        tokio::join!(follower, sender)
    }

    #[tokio::test]
    async fn gateways_with_the_same_key_exchange_messages() {
        let (sender, follower) = both(7, 7).await;
        assert_eq!((sender.unwrap(), follower.unwrap()), (identity(2), identity(1)));
    }

    #[tokio::test]
    async fn a_partner_with_other_groups_or_snat_addresses_is_named_on_both_sides() {
        let (of_follower, of_sender) = both_of(Identity { agreement: [8; 32], ..identity(1) }, 7, 7).await;
        for (error, partner) in [(of_follower.unwrap_err(), "edge-2"), (of_sender.unwrap_err(), "edge-1")] {
            let expected = format!(
                "partner {partner} has other values of `announce.groups`, `announce.firstVrid` or the first 2 of `snat.addresses`"
            );
            assert!(error.to_string().starts_with(&expected), "{error}");
        }
    }

    #[tokio::test]
    async fn a_wrong_key_is_named_on_both_sides() {
        let (of_follower, of_sender) = both(7, 8).await;
        let (of_follower, of_sender) = (of_follower.unwrap_err().to_string(), of_sender.unwrap_err().to_string());
        assert!(of_follower.contains("it refused: it has another key"), "{of_follower}");
        assert!(of_sender.contains("it has another key; give all gateways"), "{of_sender}");
    }

    #[tokio::test]
    async fn only_a_gateway_that_knows_refusals_is_sent_one() {
        // An offer of version 1 continues with a nonce, a later one with its newest version.
        for (oldest, expected) in [(1, &[][..]), (9, &[0, 2, REFUSED_VERSION, VERSION])] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            write_handshake(&mut stream, &[&b"sluiceRP"[..], &[oldest, 200], &[7; 48]].concat()).await.unwrap();
            let (mut accepted, _) = listener.accept().await.unwrap();
            let error = tell(&mut accepted, &identity(2), &[GroupKey::new([7; 32])], 2).await.unwrap_err();
            assert!(matches!(error, SessionError::Seal(SealError::Version(version)) if version == oldest), "{error}");
            drop(accepted);
            let mut refusal = Vec::new();
            stream.read_to_end(&mut refusal).await.unwrap();
            assert_eq!(refusal, expected, "version {oldest}");
        }
    }

    #[test]
    fn only_ends_that_need_nobody_are_routine() {
        let routine = [SessionError::Seal(SealError::WornOut), SessionError::KeyWithdrawn, SessionError::Changed];
        assert!(routine.iter().all(SessionError::is_routine));
        let others = [SessionError::Closed, SessionError::Silent, SessionError::Gone, SealError::Key.into()];
        assert!(!others.iter().any(SessionError::is_routine));
    }

    #[tokio::test]
    async fn who_speaks_another_protocol_is_refused_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let (mut accepted, _) = listener.accept().await.unwrap();
        let error = tell(&mut accepted, &identity(2), &[GroupKey::new([7; 32])], 2).await.unwrap_err();
        assert!(matches!(error, SessionError::Seal(SealError::Magic)), "{error}");
    }
}
