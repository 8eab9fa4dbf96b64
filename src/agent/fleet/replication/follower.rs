//! The follower's side of a session: takes a copy and news of one teller, and gives them to the workers.
//!
//! **Invariant:** news is applied in its order, and a repeated, forged or late datagram changes nothing. Shadow flows stay
//! when a session ends. Not here: order and gaps (`window`).

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use backon::{BackoffBuilder as _, ExponentialBuilder};
use dataplane::flow::ReplicaEvent;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, MissedTickBehavior, interval, sleep, timeout};

use super::channel::{self, HANDSHAKE_MAX, HEARTBEAT, SILENCE_MAX, SessionError};
use super::hub::Hub;
use super::message::Message;
use super::record;
use super::seal::{Opener, Sealer, SessionId, Side};
use super::teller::reason;
use super::window::{TouchedFlows, Window};

/// Messages that wait to be applied: 16 pages of 8 KiB are 128 KiB. TCP slows the teller down beyond.
const MESSAGES_WAITING_MAX: usize = 16;
/// What is missing is asked for again after this time: a repair by TCP takes as long as a lost packet of TCP, 200 ms.
const REPAIR: Duration = Duration::from_millis(300);
/// Waits before a partner is dialled again: 0.2 to 0.4 s first, 2.5 to 5 s at most.
const BACKOFF: ExponentialBuilder = ExponentialBuilder::new()
    .with_min_delay(Duration::from_millis(200))
    .with_max_delay(LONGEST_DELAY)
    .with_jitter()
    .without_max_times();
const LONGEST_DELAY: Duration = Duration::from_millis(2500);

/// Follows a partner, and never ends.
pub(super) async fn run(hub: Arc<Hub>, partner: SocketAddr) {
    let (mut waits, mut logged) = (BACKOFF.build(), String::new());
    loop {
        let mut has_followed = false;
        let Err(error) = follow(&hub, partner, &mut has_followed).await;
        hub.stand(partner, |standing| standing.is_followed = false);
        if has_followed {
            (waits, logged) = (BACKOFF.build(), String::new());
        }
        let text = error.to_string();
        if text != logged {
            tracing::warn!(%partner, error = text, "the flows of a partner are not followed; it is dialled again");
            logged = text;
        }
        sleep(waits.next().unwrap_or(LONGEST_DELAY)).await;
    }
}

async fn follow(hub: &Arc<Hub>, partner: SocketAddr, has_followed: &mut bool) -> Result<Infallible, SessionError> {
    let mut stream = timeout(HANDSHAKE_MAX, TcpStream::connect(partner)).await.map_err(|_| SessionError::Slow)??;
    stream.set_nodelay(true)?;
    let (session, name) = channel::follow(&mut stream, &hub.identity, &hub.keys()).await?;
    let mut registered = hub.register(session.id());
    let ((sealer, opener), (by_udp, from_udp)) = (session.stream(Side::Follower), session.datagrams(Side::Follower));
    let (read_half, write_half) = stream.into_split();
    let (messages, written) = mpsc::channel(MESSAGES_WAITING_MAX);
    let (reads, mut read) = mpsc::channel(MESSAGES_WAITING_MAX);
    let mut tasks = JoinSet::new();
    tasks.spawn(channel::write(write_half, sealer, written));
    tasks.spawn(channel::read(read_half, opener, reads));
    let mut follower = Follower {
        hub,
        partner,
        id: session.id(),
        by_udp,
        from_udp,
        messages,
        window: Window::default(),
        touched: TouchedFlows::default(),
        copies: (0, 0),
        heard: Instant::now(),
        counter: 0,
        asked: None,
    };
    hub.stand(partner, |standing| standing.name = Some(name.clone()));
    let mut heartbeat = interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            ended = tasks.join_next() => return Err(reason(ended)),
            Some(datagram) = registered.datagrams.recv() => follower.take_datagram(datagram).await?,
            Some(message) = read.recv() => {
                let was_complete = follower.copies.1 > 0;
                follower.take_message(&message).await?;
                if follower.copies.1 > 0 && !was_complete {
                    *has_followed = true;
                    tracing::info!(gateway = name, %partner, "this gateway has a copy of the flows of a partner, and follows them");
                }
            }
            _ = heartbeat.tick() => follower.acknowledge().await?,
        }
    }
}

struct Follower<'a> {
    hub: &'a Hub,
    partner: SocketAddr,
    id: SessionId,
    by_udp: Sealer,
    from_udp: Opener,
    messages: mpsc::Sender<Vec<u8>>,
    window: Window,
    touched: TouchedFlows,
    /// Numbers of the last copies that have begun and that are complete.
    copies: (u32, u32),
    heard: Instant,
    /// Counter of the next heartbeat.
    counter: u64,
    /// What was asked for last, and when.
    asked: Option<(u64, Instant)>,
}

impl Follower<'_> {
    async fn take_datagram(&mut self, mut datagram: Vec<u8>) -> Result<(), SessionError> {
        let Ok((counter, message)) = self.from_udp.datagram(&mut datagram) else { return Ok(()) };
        match Message::decode(message) {
            Some(Message::Batch(number, records)) => {
                self.window.add(number, records)?;
                self.apply_news().await
            }
            // A repeated one would say that the teller lives.
            Some(Message::Heartbeat(next, _)) if counter >= self.counter => {
                (self.heard, self.counter) = (Instant::now(), counter + 1);
                self.window.heard(next);
                self.ask().await
            }
            _ => Ok(()),
        }
    }

    async fn take_message(&mut self, message: &[u8]) -> Result<(), SessionError> {
        match Message::decode(message) {
            Some(Message::CopyBegins(copy, first)) => {
                self.window.begin(first);
                self.touched.begin();
                self.copies.0 = copy;
                // The teller waits for it.
                self.acknowledge().await
            }
            Some(Message::Page(mark, records)) => {
                self.touched.forget_before(mark);
                let is_listed =
                    |event: &ReplicaEvent| matches!(event, ReplicaEvent::Holds(flow) if !self.touched.is_touched(flow));
                let events: Vec<_> = record::decode(records).filter(is_listed).collect();
                self.hub.exchange.give(&events).await;
                Ok(())
            }
            Some(Message::CopyEnds(copy)) => {
                self.touched.end();
                self.copies.1 = copy;
                self.hub.exchange.copies_received.fetch_add(1, Ordering::Relaxed);
                self.hub.stand(self.partner, |standing| standing.is_followed = true);
                self.acknowledge().await
            }
            Some(Message::Batch(number, records)) => {
                self.window.add(number, records)?;
                self.apply_news().await
            }
            Some(Message::Gone) => Err(SessionError::Gone),
            _ => Ok(()),
        }
    }

    async fn apply_news(&mut self) -> Result<(), SessionError> {
        while let Some((number, records)) = self.window.take() {
            let events: Vec<_> = record::decode(&records).collect();
            for event in &events {
                self.touched.touch(number, event)?;
            }
            self.hub.exchange.give(&events).await;
        }
        Ok(())
    }

    /// Asks for what is missing. Two heartbeats must agree on it, because datagrams may be reordered.
    async fn ask(&mut self) -> Result<(), SessionError> {
        let Some((first, count)) = self.window.missing() else {
            self.asked = None;
            return Ok(());
        };
        match self.asked {
            Some((before, since)) if before == first && since > Instant::now() => return Ok(()),
            Some((before, _)) if before == first => {
                let message = Message::Missing(first, count).encode();
                self.messages.send(message).await.map_err(|_| SessionError::Closed)?;
                self.asked = Some((first, Instant::now() + REPAIR));
            }
            _ => self.asked = Some((first, Instant::now())),
        }
        Ok(())
    }

    async fn acknowledge(&mut self) -> Result<(), SessionError> {
        if self.heard.elapsed() > SILENCE_MAX {
            return Err(SessionError::Silent);
        }
        let (begun, complete) = self.copies;
        let message = Message::Acknowledge(self.window.next(), begun, complete).encode();
        let datagram = self.by_udp.datagram(self.id, message)?;
        // What the kernel refuses is lost like any other datagram.
        let _ = self.hub.socket.send_to(&datagram, self.partner).await;
        Ok(())
    }
}
