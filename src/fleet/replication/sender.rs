//! The sender's side of a session: sends a copy, then news, to one follower.
//!
//! **Invariant:** one batch is sealed once by UDP; what a follower misses is sent again by TCP, which loses nothing. Not
//! here: which flows are copied (`copy`).

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::channel::{self, HEARTBEAT, SILENCE_MAX, SessionError};
use super::copy::{self, LastCopy};
use super::hub::{FollowerProgress, Hub};
use super::message::PartnerMessage;
use super::seal::{Identity, Opener, SealedSession, Sealer};

/// Messages that wait for the connection: 64 pages of 8 KiB are half a megabyte.
const MESSAGES_WAITING_MAX: usize = 64;
/// Batches that are sent again and wait for the connection: 360 KB. What finds no room is asked for again.
const REPAIRS_WAITING_MAX: usize = 256;
/// A follower that lacks older news is behind: two acknowledgements may be lost. So is one without a copy of the flows of
/// a group of VIPs that this gateway has taken over: it may know them from the last owner, or not.
const LAG_MAX: Duration = Duration::from_millis(500);
/// It is no longer in sync when it has been behind for this long: a task that waits for the processor, a burst of repairs
/// or a short copy is no news for operators.
const BEHIND_MAX: Duration = Duration::from_secs(2);
/// Batches that are sent before the session looks at what arrives.
const BATCHES_AT_ONCE: u64 = 256;

/// Marks the partner as no follower when the session ends.
struct FollowerGuard<'a>(&'a Hub, SocketAddr);

impl Drop for FollowerGuard<'_> {
    fn drop(&mut self) {
        self.0.update_partner(self.1, |state| (state.follows, state.left_at) = (None, Some(std::time::Instant::now())));
    }
}

/// A follower that has proven that it has the key.
#[derive(Debug)]
pub(super) struct Greeting {
    stream: TcpStream,
    session: SealedSession,
    own: Identity,
    follower: Identity,
}

impl Greeting {
    /// Who it is.
    pub(super) fn follower(&self) -> &Identity {
        &self.follower
    }
}

/// Shakes hands with whoever dials.
pub(super) async fn greet(hub: &Hub, mut stream: TcpStream) -> Result<Greeting, SessionError> {
    stream.set_nodelay(true)?;
    let own = hub.identity();
    let (session, follower) = channel::tell(&mut stream, &own, &hub.keys(), hub.agreement.groups).await?;
    Ok(Greeting { stream, session, own, follower })
}

/// Serves one follower until the session ends, which is always an error.
pub(super) async fn serve(hub: Arc<Hub>, greeting: Greeting) -> Result<Infallible, SessionError> {
    let Greeting { stream, session, own: identity, follower: who } = greeting;
    let first = hub.sent().next();
    let follower = FollowerProgress { is_in_sync: false, acknowledged: first };
    hub.update_partner(who.address, |state| (state.name, state.follows) = (Some(who.name.clone()), Some(follower)));
    let _guard = FollowerGuard(&hub, who.address);
    tracing::info!(gateway = who.name, address = %who.address, "a partner follows the flows of this gateway");
    let mut registered = hub.register(session.id());
    let ((sealer, opener), (by_udp, from_udp)) = (session.stream(), session.datagrams());
    let (read_half, write_half) = stream.into_split();
    let (messages, written) = mpsc::channel(MESSAGES_WAITING_MAX);
    let (repairs, repaired) = mpsc::channel(REPAIRS_WAITING_MAX);
    let (reads, mut read) = mpsc::channel(MESSAGES_WAITING_MAX);
    let (begun, copied) = (watch::Sender::new(0), watch::Sender::default());
    let last_copy = copied.subscribe();
    let mut tasks = JoinSet::new();
    tasks.spawn(channel::write(write_half, sealer, repaired, written));
    tasks.spawn(channel::read(read_half, opener, reads));
    tasks.spawn(copy::run(Arc::clone(&hub), messages, begun.subscribe(), first, copied));
    let mut sender = FlowSender {
        hub: &hub,
        to: who.address,
        by_udp,
        from_udp,
        repairs,
        begun,
        next: first,
        acknowledged: first,
        heard: Instant::now(),
        counter: 0,
        last_copy,
        copied: None,
        sync: FollowerSync::default(),
    };
    let mut head = hub.head.subscribe();
    let mut heartbeat = interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_behind = false;
    loop {
        tokio::select! {
            ended = tasks.join_next() => return Err(reason(ended)),
            Some(datagram) = registered.datagrams.recv() => sender.take_datagram(&datagram),
            Some(message) = read.recv() => sender.repair(&message)?,
            _ = heartbeat.tick() => {
                if hub.identity() != identity {
                    return Err(SessionError::Changed);
                }
                if !hub.accepts(session.key()) {
                    return Err(SessionError::KeyWithdrawn);
                }
                sender.heartbeat().await?;
            }
            Ok(()) = head.changed() => is_behind = sender.send_news().await?,
            () = yield_now(), if is_behind => is_behind = sender.send_news().await?,
        }
    }
}

/// Why one of the tasks of a session ended.
pub(super) fn reason(ended: Option<Result<Result<(), SessionError>, tokio::task::JoinError>>) -> SessionError {
    match ended {
        Some(Ok(Err(error))) => error,
        Some(Err(error)) => std::io::Error::other(error).into(),
        Some(Ok(Ok(()))) | None => SessionError::Closed,
    }
}

struct FlowSender<'a> {
    hub: &'a Hub,
    to: SocketAddr,
    by_udp: Sealer,
    from_udp: Opener,
    repairs: mpsc::Sender<Vec<u8>>,
    /// Number of the copy that the follower is ready for.
    begun: watch::Sender<u32>,
    /// Number of the batch that is sent next.
    next: u64,
    /// The follower has every batch before this one.
    acknowledged: u64,
    heard: Instant,
    /// Counter of the next acknowledgement.
    counter: u64,
    last_copy: watch::Receiver<LastCopy>,
    /// The groups of VIPs of which the follower has a complete copy, as bits; `None` before its first one.
    copied: Option<u64>,
    sync: FollowerSync,
}

/// Whether a follower has all flows, without the changes of a moment.
#[derive(Debug, Default)]
struct FollowerSync {
    is_in_sync: bool,
    /// Since when it has been behind.
    behind_since: Option<Instant>,
}

impl FollowerSync {
    /// It has a copy of the flows of these groups of VIPs, `None` before its first, while this gateway owns others, and the
    /// oldest news that it lacks is of this age. Returns whether it is in sync.
    fn note(&mut self, copied: Option<u64>, owned: u64, lag: Duration, now: Instant) -> bool {
        let is_behind = lag >= LAG_MAX || copied.is_some_and(|copied| owned & !copied != 0);
        self.behind_since = if is_behind { self.behind_since.or(Some(now)) } else { None };
        self.is_in_sync = copied.is_some()
            && match self.behind_since {
                None => true,
                Some(since) => self.is_in_sync && now.saturating_duration_since(since) < BEHIND_MAX,
            };
        self.is_in_sync
    }
}

impl FlowSender<'_> {
    async fn send(&mut self, message: PartnerMessage<'_>) -> Result<(), SessionError> {
        let datagram = self.by_udp.datagram(&message.encode())?;
        // What the kernel refuses is lost like any other datagram; a partner that is gone is noticed by its silence.
        let _ = self.hub.socket.send_to(&datagram, self.to).await;
        Ok(())
    }

    /// Sends batches that were not sent; true if there are more. Batches that are no longer kept are left out, as if they
    /// were lost on their way.
    async fn send_news(&mut self) -> Result<bool, SessionError> {
        let head = self.hub.sent().next();
        let end = head.min(self.next + BATCHES_AT_ONCE);
        while self.next < end {
            let records = self.hub.sent().get(self.next);
            if let Some(records) = records {
                self.send(PartnerMessage::Batch(self.next, &records)).await?;
                self.hub.exchange.batches_sent.fetch_add(1, Ordering::Relaxed);
            }
            self.next += 1;
        }
        Ok(self.next < head)
    }

    async fn heartbeat(&mut self) -> Result<(), SessionError> {
        if self.heard.elapsed() > SILENCE_MAX {
            return Err(SessionError::Silent);
        }
        self.publish_progress();
        self.send(PartnerMessage::Heartbeat(self.next)).await
    }

    /// Publishes the progress of the follower.
    fn publish_progress(&mut self) {
        let lag = self.hub.lag(self.acknowledged);
        let is_in_sync = self.sync.note(self.copied, self.hub.owned().owned, lag, Instant::now());
        let follower = FollowerProgress { is_in_sync, acknowledged: self.acknowledged };
        self.hub.update_partner(self.to, |state| state.follows = Some(follower));
    }

    /// Takes an acknowledgement; an old one changes nothing.
    fn take_datagram(&mut self, datagram: &[u8]) {
        let Ok((counter, message)) = self.from_udp.datagram(datagram) else { return };
        // A repeated one would say that the follower lives.
        if counter < self.counter {
            return;
        }
        let Some(PartnerMessage::Acknowledge(next, begun, complete)) = PartnerMessage::decode(&message) else { return };
        (self.heard, self.counter) = (Instant::now(), counter + 1);
        self.acknowledged = self.acknowledged.max(next.min(self.next));
        self.begun.send_if_modified(|last| {
            let is_later = begun > *last;
            *last = begun.max(*last);
            is_later
        });
        let copy = *self.last_copy.borrow();
        if copy.number > 0 && complete >= copy.number {
            self.copied = Some(copy.owned);
        }
        self.publish_progress();
    }

    /// Sends again by TCP what the follower misses, as far as there is room. It never waits: heartbeats go on.
    fn repair(&mut self, message: &[u8]) -> Result<(), SessionError> {
        let Some(PartnerMessage::Missing(first, count)) = PartnerMessage::decode(message) else { return Ok(()) };
        for number in first..first.saturating_add(count.into()).min(self.next) {
            let records = self.hub.sent().get(number);
            let Some(records) = records else {
                self.hub.exchange.batches_lost.fetch_add(1, Ordering::Relaxed);
                let _ = self.repairs.try_send(PartnerMessage::Gone.encode());
                return Err(SessionError::Gone);
            };
            if self.repairs.try_send(PartnerMessage::Batch(number, &records).encode()).is_err() {
                break;
            }
            self.hub.exchange.batches_repaired.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_follower_that_is_behind_for_a_moment_stays_in_sync() {
        let (mut sync, start) = (FollowerSync::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        let (little, much) = (LAG_MAX / 2, LAG_MAX);
        let mut note = |copied, lag, ms| sync.note(copied, 0b11, lag, at(ms));
        let all = Some(0b11);
        assert!(!note(None, little, 0), "it has no copy yet");
        assert!(!note(all, much, 100), "it is behind when its copy is complete");
        assert!(note(all, little, 200));
        // Heartbeats and acknowledgements see it behind, but never for long.
        for second in 1..60 {
            assert!(note(all, much, 1000 * second));
            assert!(note(all, 4 * much, 1000 * second + 900));
            assert!(note(all, little, 1000 * second + 950));
        }
        assert!(note(all, much, 60_000));
        assert!(note(all, much, 61_999));
        assert!(!note(all, much, 62_000), "for two seconds");
        assert!(!note(all, much, 62_100));
        assert!(note(all, little, 62_200));
        // It has no copy of a group that this gateway has taken over.
        assert!(note(Some(0b01), little, 63_000));
        assert!(!note(Some(0b01), little, 65_000));
        assert!(note(Some(0b111), little, 65_100));
        assert!(!note(None, little, 65_300));
    }
}
