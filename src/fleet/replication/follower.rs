//! The follower's side of a session: takes a copy and news of one sender, and gives them to the workers.
//!
//! **Invariant:** news is applied in its order, and a repeated, forged or late datagram changes nothing. Shadow flows stay
//! when a session ends. Not here: order and gaps (`window`).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::ops::Range;
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
use super::message::PartnerMessage;
use super::record;
use super::seal::{Identity, Opener, Sealer};
use super::sender::reason;
use super::window::{BatchWindow, TouchedFlows};

/// Messages that wait to be applied: 16 pages of 8 KiB are 128 KiB. TCP slows the sender down beyond.
const MESSAGES_WAITING_MAX: usize = 16;
/// Batches and pages that wait for room in the queues of workers: 64 of at most 240 events of 152 B are 2.3 MB.
const EVENTS_WAITING_MAX: usize = 64;
/// Questions for missing batches that wait for the connection. What finds no room is asked for at the next heartbeat.
const ASKED_WAITING_MAX: usize = 64;
/// Most batches that are asked for at a heartbeat: 256 of 1.4 KB are 360 KB.
const MISSING_MAX: usize = 256;
/// Longest gap between two sessions that is asked for, batches: half of those that fit ahead of a gap.
const RESUME_MAX: u64 = 2048;
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
    let mut last = None;
    loop {
        let mut has_followed = false;
        let Err(error) = follow(&hub, partner, &mut has_followed, &mut last).await;
        if matches!(error, SessionError::Gone | SessionError::BatchWindow(_)) {
            last = None;
        }
        hub.update_partner(partner, |state| (state.is_followed, state.has_failed) = (false, true));
        if has_followed {
            (waits, logged) = (BACKOFF.build(), String::new());
        }
        let text = error.to_string();
        // A partner that ended a session as a matter of routine answers the next dial; of one that does not, that one tells.
        if error.is_routine() || has_followed && matches!(error, SessionError::Closed) {
            tracing::info!(%partner, reason = text, "a session with a partner has ended, and a new one follows");
        } else if text != logged {
            tracing::warn!(%partner, error = text, "the flows of a partner are not followed; it is dialled again");
            logged = text;
        }
        sleep(waits.next().unwrap_or(LONGEST_DELAY)).await;
    }
}

/// A process of a sender, and the number of the first of its batches that the workers may not have.
type Followed = ([u8; 8], u64);

async fn follow(
    hub: &Arc<Hub>,
    partner: SocketAddr,
    has_followed: &mut bool,
    last: &mut Option<Followed>,
) -> Result<Infallible, SessionError> {
    let mut stream = timeout(HANDSHAKE_MAX, TcpStream::connect(partner)).await.map_err(|_| SessionError::Slow)??;
    stream.set_nodelay(true)?;
    let identity = hub.identity();
    let (session, sender) = channel::follow(&mut stream, &identity, &hub.keys(), hub.agreement.groups).await?;
    let Identity { name, process, .. } = sender;
    let mut registered = hub.register(session.id());
    let ((sealer, opener), (by_udp, from_udp)) = (session.stream(), session.datagrams());
    let (read_half, write_half) = stream.into_split();
    let (messages, written) = mpsc::channel(ASKED_WAITING_MAX);
    let (reads, mut read) = mpsc::channel(MESSAGES_WAITING_MAX);
    let (events, given) = mpsc::channel(EVENTS_WAITING_MAX);
    let mut tasks = JoinSet::new();
    tasks.spawn(give(Arc::clone(hub), given));
    tasks.spawn(channel::write(write_half, sealer, mpsc::channel(1).1, written));
    tasks.spawn(channel::read(read_half, opener, reads));
    let mut follower = PartnerFollower {
        hub,
        partner,
        by_udp,
        from_udp,
        messages,
        events,
        window: BatchWindow::default(),
        touched: TouchedFlows::default(),
        copies: (0, 0),
        heard: Instant::now(),
        counter: 0,
        questions: Questions::default(),
        process,
        last: *last,
    };
    hub.update_partner(partner, |state| (state.name, state.has_failed) = (Some(name.clone()), false));
    let mut heartbeat = interval(HEARTBEAT);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            ended = tasks.join_next() => return Err(reason(ended)),
            Some(datagram) = registered.datagrams.recv() => follower.take_datagram(&datagram).await?,
            Some(message) = read.recv(), if follower.has_room() => {
                let was_complete = follower.copies.1 > 0;
                follower.take_message(&message).await?;
                if follower.copies.1 > 0 && !was_complete {
                    *has_followed = true;
                    tracing::info!(gateway = name, %partner, "this gateway has a copy of the flows of a partner, and follows them");
                }
            }
            _ = heartbeat.tick() => {
                if hub.identity() != identity {
                    return Err(SessionError::Changed);
                }
                if !hub.accepts(session.key()) {
                    return Err(SessionError::KeyWithdrawn);
                }
                follower.apply_news().await?;
                follower.acknowledge().await?;
            }
        }
        if let Some(first) = follower.first_unsure() {
            *last = Some((process, first));
        }
    }
}

/// Gives events to the workers, at their pace.
async fn give(hub: Arc<Hub>, mut events: mpsc::Receiver<Vec<ReplicaEvent>>) -> Result<(), SessionError> {
    while let Some(events) = events.recv().await {
        hub.exchange.give(&events).await;
    }
    Ok(())
}

struct PartnerFollower<'a> {
    hub: &'a Hub,
    partner: SocketAddr,
    by_udp: Sealer,
    from_udp: Opener,
    messages: mpsc::Sender<Vec<u8>>,
    /// Events for the workers, in order.
    events: mpsc::Sender<Vec<ReplicaEvent>>,
    window: BatchWindow,
    touched: TouchedFlows,
    /// Numbers of the last copies that have begun and that are complete.
    copies: (u32, u32),
    heard: Instant,
    /// Counter of the next heartbeat.
    counter: u64,
    questions: Questions,
    /// The process of the sender, and what was followed before.
    process: [u8; 8],
    last: Option<Followed>,
}

impl PartnerFollower<'_> {
    async fn take_datagram(&mut self, datagram: &[u8]) -> Result<(), SessionError> {
        let Ok((counter, message)) = self.from_udp.datagram(datagram) else { return Ok(()) };
        match PartnerMessage::decode(&message) {
            Some(PartnerMessage::Batch(number, records)) => {
                self.window.add(number, records)?;
                self.apply_news().await
            }
            // A repeated one would say that the sender lives.
            Some(PartnerMessage::Heartbeat(next)) if counter >= self.counter => {
                (self.heard, self.counter) = (Instant::now(), counter + 1);
                self.window.heard(next);
                self.ask();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    async fn take_message(&mut self, message: &[u8]) -> Result<(), SessionError> {
        match PartnerMessage::decode(message) {
            Some(PartnerMessage::CopyBegins(copy, first)) => {
                self.window.begin(first_batch(self.last, self.process, first));
                self.window.heard(first);
                self.touched.begin();
                self.copies.0 = copy;
                // The sender waits for it.
                self.acknowledge().await
            }
            Some(PartnerMessage::Page(mark, records)) => {
                self.touched.forget_before(mark);
                let is_listed =
                    |event: &ReplicaEvent| matches!(event, ReplicaEvent::Holds(flow) if !self.touched.is_touched(flow));
                let events: Vec<_> = record::decode(records).filter(is_listed).collect();
                self.events.send(events).await.map_err(|_| SessionError::Closed)
            }
            Some(PartnerMessage::CopyEnds(copy)) => {
                self.touched.end();
                self.copies.1 = copy;
                self.hub.exchange.copies_received.fetch_add(1, Ordering::Relaxed);
                self.hub.update_partner(self.partner, |state| state.is_followed = true);
                self.acknowledge().await
            }
            Some(PartnerMessage::Batch(number, records)) => {
                self.window.add(number, records)?;
                self.apply_news().await
            }
            Some(PartnerMessage::Gone) => Err(SessionError::Gone),
            _ => Ok(()),
        }
    }

    async fn apply_news(&mut self) -> Result<(), SessionError> {
        while self.has_room()
            && let Some((number, records)) = self.window.take()
        {
            let events: Vec<_> = record::decode(&records).collect();
            for event in &events {
                self.touched.touch(number, event)?;
            }
            self.events.send(events).await.map_err(|_| SessionError::Closed)?;
        }
        Ok(())
    }

    /// Whether workers keep up. While they do not, batches wait in the window, and pages in the connection.
    fn has_room(&self) -> bool {
        self.events.capacity() > 0
    }

    /// The first batch that the workers may not have: some that were taken in order wait for them.
    fn first_unsure(&self) -> Option<u64> {
        (self.copies.1 > 0).then(|| self.window.next().saturating_sub(EVENTS_WAITING_MAX as u64 + 1))
    }

    /// Asks for what is missing. What finds no room is asked for at the next heartbeat.
    fn ask(&mut self) {
        let now = Instant::now();
        for missing in self.questions.due(&self.window, now) {
            let count = u32::try_from(missing.end - missing.start).unwrap_or(u32::MAX);
            if self.messages.try_send(PartnerMessage::Missing(missing.start, count).encode()).is_err() {
                break;
            }
            self.questions.note(missing, now);
        }
    }

    async fn acknowledge(&mut self) -> Result<(), SessionError> {
        if self.heard.elapsed() > SILENCE_MAX {
            return Err(SessionError::Silent);
        }
        let (begun, complete) = self.copies;
        let message = PartnerMessage::Acknowledge(self.window.next(), begun, complete).encode();
        let datagram = self.by_udp.datagram(&message)?;
        // What the kernel refuses is lost like any other datagram.
        let _ = self.hub.socket.send_to(&datagram, self.partner).await;
        Ok(())
    }
}

/// What was asked for.
#[derive(Debug, Default)]
struct Questions {
    /// Missing batches that were asked for, and when.
    asked: BTreeMap<u64, Instant>,
    /// The number of the sender's next batch at the last heartbeat.
    head_before: u64,
}

impl Questions {
    /// At a heartbeat: what is missing of the batches before the last heartbeat, because datagrams may be reordered. What
    /// was asked for a moment ago is left out.
    fn due(&mut self, window: &BatchWindow, now: Instant) -> Vec<Range<u64>> {
        let below = std::mem::replace(&mut self.head_before, window.head());
        self.asked = self.asked.split_off(&window.next());
        let is_due = |number: &u64| self.asked.get(number).is_none_or(|asked| now.saturating_duration_since(*asked) >= REPAIR);
        let due: Vec<_> = window.missing(below).filter(is_due).take(MISSING_MAX).collect();
        due.chunk_by(|one, next| one + 1 == *next).map(|gap| gap[0]..gap[0] + gap.len() as u64).collect()
    }

    /// It was asked for.
    fn note(&mut self, missing: Range<u64>, now: Instant) {
        self.asked.extend(missing.map(|number| (number, now)));
    }
}

/// The batch with which a session begins whose first one is `first`: after an earlier session with the same process, the
/// first one that the workers may not have.
fn first_batch(last: Option<Followed>, process: [u8; 8], first: u64) -> u64 {
    let gap = last.filter(|(before, next)| *before == process && *next <= first && first - next <= RESUME_MAX);
    gap.map_or(first, |(_, next)| next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gap_is_asked_for_at_once_and_again_only_after_a_while() {
        let (mut window, mut questions, now) = (BatchWindow::default(), Questions::default(), Instant::now());
        window.begin(0);
        // A tenth of 330 batches a second is lost, and the last batch.
        (0..330).filter(|number| number % 10 != 3).for_each(|number| window.add(number, b"").unwrap());
        while window.take().is_some() {}
        window.heard(331);
        assert_eq!(questions.due(&window, now), Vec::<Range<u64>>::new(), "they may still arrive");
        let due = questions.due(&window, now);
        let gaps: Vec<_> = (3..330).step_by(10).map(|number| number..number + 1).chain(std::iter::once(330..331)).collect();
        assert_eq!(due, gaps);
        due[1..].iter().for_each(|gap| questions.note(gap.clone(), now));
        assert_eq!(questions.due(&window, now), due[..1], "for it there was no room");
        questions.note(3..4, now);
        assert_eq!(questions.due(&window, now + REPAIR / 2), Vec::<Range<u64>>::new());
        window.add(3, b"").unwrap();
        while window.take().is_some() {}
        assert_eq!(questions.due(&window, now + REPAIR), gaps[1..]);
        window.heard(2000);
        questions.due(&window, now);
        let asked: u64 = questions.due(&window, now + REPAIR).iter().map(|gap| gap.end - gap.start).sum();
        assert_eq!(asked, MISSING_MAX as u64);
    }

    #[test]
    fn a_session_begins_where_the_last_one_with_the_same_process_ended() {
        let (same, other) = ([1; 8], [2; 8]);
        assert_eq!(first_batch(None, same, 5000), 5000);
        assert_eq!(first_batch(Some((same, 4000)), same, 5000), 4000);
        assert_eq!(first_batch(Some((other, 4000)), same, 5000), 5000, "it counts its own batches");
        assert_eq!(first_batch(Some((same, 5001)), same, 5000), 5000);
        assert_eq!(first_batch(Some((same, 5000 - RESUME_MAX - 1)), same, 5000), 5000, "too many");
    }
}
