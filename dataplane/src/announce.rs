//! Announcing the addresses that this gateway answers for: three times each, so that switches and neighbours learn who
//! has them now (FORWARDING 8). Announcements are originated packets: no packet became them.
//!
//! Invariant: every address of the snapshot is announced, however many there are; all of them once before any of them again.
//! What is still to be made is no queue but three places in the order in which addresses became ours, one for each round, so
//! it takes the same memory for one address and for a hundred thousand.

use std::net::IpAddr;

use crate::lanes::Lanes;
use crate::snapshot::{Announced, Snapshot};
use crate::tags::Tags;
use crate::tally::Tally;
use crate::{Link, Port, answer};

/// Announcements of one address.
const ROUNDS: usize = 3;
/// Time between two of one address, ns, at least; at most twice that, beside what pacing takes.
const INTERVAL_NS: u64 = 1_000_000_000;
/// Time between two announcements, ns: 4,000 a second, 3 Mbit/s of shortest frames. 20,000 addresses (10,000 services of both
/// families) have been announced once after 5 s.
const PACE_NS: u64 = 250_000;
/// Announcements in a row after a pause, and per poll, so that a poll stays short.
const BURST: u64 = 8;

/// A place in the order in which addresses became ours.
type Position = (u64, Link, IpAddr);

/// Announcements still to be made.
#[derive(Debug)]
pub(crate) struct Announcements {
    /// The last address that each round has announced; none: it has not begun.
    done: [Option<Position>; ROUNDS],
    /// How far each round but the first may follow the one before.
    follows: [Follows; ROUNDS - 1],
    /// When pacing lets the next announcement go.
    next_ns: u64,
    /// Until then no round may go on.
    rests_until_ns: u64,
    /// Nothing is left to be announced.
    is_idle: bool,
}

/// Lets a round announce what the round before announced [`INTERVAL_NS`] ago.
#[derive(Clone, Copy, Debug, Default)]
struct Follows {
    /// Up to here it may.
    allowed: Option<Position>,
    /// Up to here it may when the interval is over that began at `since_ns`.
    waiting: Option<Position>,
    since_ns: u64,
}

impl Follows {
    /// `before`: how far the round before is.
    fn update(&mut self, before: Option<Position>, now_ns: u64) {
        if self.waiting > self.allowed && now_ns >= self.since_ns.saturating_add(INTERVAL_NS) {
            self.allowed = self.waiting;
        }
        if self.waiting <= self.allowed && before > self.waiting {
            (self.waiting, self.since_ns) = (before, now_ns);
        }
    }
}

impl Follows {
    /// When it may go further.
    fn allows_more_at(&self) -> Option<u64> {
        (self.waiting > self.allowed).then(|| self.since_ns.saturating_add(INTERVAL_NS))
    }
}

impl Announcements {
    pub(crate) fn new() -> Self {
        Self { done: [None; ROUNDS], follows: [Follows::default(); ROUNDS - 1], next_ns: 0, rests_until_ns: 0, is_idle: true }
    }

    /// There is another snapshot, which may answer for more.
    pub(crate) fn wake(&mut self) {
        (self.is_idle, self.rests_until_ns) = (false, 0);
    }

    /// Sends what is due.
    #[inline]
    pub(crate) fn send<P: Port>(&mut self, lanes: &mut Lanes<P>, snapshot: &Snapshot, now_ns: u64, tally: &mut Tally) {
        if !self.is_idle && now_ns >= self.next_ns.max(self.rests_until_ns) {
            self.send_due(lanes, snapshot, now_ns, tally);
        }
    }

    #[inline(never)]
    fn send_due<P: Port>(&mut self, lanes: &mut Lanes<P>, snapshot: &Snapshot, now_ns: u64, tally: &mut Tally) {
        let announced = snapshot.all_announced();
        for _ in 0..BURST {
            if self.next_ns > now_ns {
                break;
            }
            self.update(now_ns);
            let Some((round, position)) = self.next(announced) else {
                self.rests_until_ns = self.follows.iter().filter_map(Follows::allows_more_at).min().unwrap_or(0);
                break;
            };
            let (_, link, address) = position;
            let Some(mut buffer) = lanes.allocate(link.port()) else { break };
            if answer::announcement(&mut buffer, address, snapshot.port(link.port()).mac) {
                tally.originated += 1;
                lanes.leave(link.port(), Tags::on(link), buffer, tally);
            }
            self.done[round] = Some(position);
            self.next_ns = self.next_ns.max(now_ns.saturating_sub((BURST - 1) * PACE_NS)) + PACE_NS;
        }
        self.update(now_ns);
        self.is_idle = announced.newest() <= self.done[ROUNDS - 1];
    }

    fn update(&mut self, now_ns: u64) {
        for (follows, before) in self.follows.iter_mut().zip(self.done) {
            follows.update(before, now_ns);
        }
    }

    /// The next announcement and its round: what has not been announced at all comes first.
    fn next(&self, announced: &Announced) -> Option<(usize, Position)> {
        (0..ROUNDS).find_map(|round| {
            let position = announced.after(self.done[round])?;
            let is_allowed = round == 0 || Some(position) <= self.follows[round - 1].allowed;
            is_allowed.then_some((round, position))
        })
    }
}
