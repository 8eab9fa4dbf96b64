//! Announcements of the addresses that this gateway answers for: three of each, so that switches and neighbours learn
//! where they are (FORWARDING 8). Announcements are originated packets.
//!
//! Of addresses that this gateway has lost to another one, each is asked for once by a probe: the owner, which may not
//! know that this gateway has announced them meanwhile, then announces them again.
//!
//! **Invariant:** every address of the snapshot is announced, however many there are, and all of them once before any
//! of them again. The outstanding work is not a queue but three positions in the order in which addresses were added,
//! one per round, so one address takes as much memory as a hundred thousand.
//!
//! Not here: which addresses the gateway answers for.

use std::net::IpAddr;

use super::arp_ndp::{announcement, probe};
use super::vip_ownership::VipOwnership;
use crate::port::{Link, Port};
use crate::snapshot::{Announced, Snapshot};
use crate::stats::Tally;
use crate::workers::Egress;

/// Number of announcements of one address.
const ROUNDS: usize = 3;
/// Minimum time between two announcements of one address, ns; at most twice that, plus the time that pacing takes.
const INTERVAL_NS: u64 = 1_000_000_000;
/// Time between two announcements, ns: 4,000 a second, 3 Mbit/s of minimum-size frames. 20,000 addresses (10,000
/// services of both families) have been announced once after 5 s.
const PACE_NS: u64 = 250_000;
/// Announcements in a row after a pause, and per poll, so that a poll stays short.
const BURST: u64 = 8;

/// A position in the order in which addresses were added.
type Position = (u64, Link, IpAddr);

/// The outstanding announcements.
#[derive(Debug)]
pub(crate) struct Announcements {
    /// The last address that each round has announced; `None` before its first.
    done: [Option<Position>; ROUNDS],
    /// The last lost address that was asked for.
    asked: Option<Position>,
    /// How far each round except the first may follow the round before it.
    follows: [RoundLimit; ROUNDS - 1],
    /// When pacing permits the next announcement.
    next_ns: u64,
    /// No round may continue before this time.
    rests_until_ns: u64,
    /// Whether all announcements have been sent.
    is_idle: bool,
}

/// Lets a round repeat what the round before it announced [`INTERVAL_NS`] ago.
#[derive(Clone, Copy, Debug, Default)]
struct RoundLimit {
    /// The round may announce up to this position.
    allowed: Option<Position>,
    /// The round may announce up to this position once the interval that began at `since_ns` is over.
    waiting: Option<Position>,
    since_ns: u64,
}

impl RoundLimit {
    /// `before`: the position of the round before.
    fn update(&mut self, before: Option<Position>, now_ns: u64) {
        if self.waiting > self.allowed && now_ns >= self.since_ns.saturating_add(INTERVAL_NS) {
            self.allowed = self.waiting;
        }
        if self.waiting <= self.allowed && before > self.waiting {
            (self.waiting, self.since_ns) = (before, now_ns);
        }
    }

    /// When it may continue.
    fn allows_more_at(&self) -> Option<u64> {
        (self.waiting > self.allowed).then(|| self.since_ns.saturating_add(INTERVAL_NS))
    }
}

impl Announcements {
    pub(crate) fn new() -> Self {
        let follows = [RoundLimit::default(); ROUNDS - 1];
        Self { done: [None; ROUNDS], asked: None, follows, next_ns: 0, rests_until_ns: 0, is_idle: true }
    }

    /// A new snapshot may contain new addresses.
    pub(crate) fn wake(&mut self) {
        (self.is_idle, self.rests_until_ns) = (false, 0);
    }

    /// Sends the announcements that are due.
    #[inline]
    pub(crate) fn send<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        snapshot: &Snapshot,
        ownership: &VipOwnership,
        now_ns: u64,
        tally: &mut Tally,
    ) {
        if !self.is_idle && now_ns >= self.next_ns.max(self.rests_until_ns) {
            self.send_due(egress, snapshot, ownership, now_ns, tally);
        }
    }

    #[inline(never)]
    fn send_due<P: Port>(
        &mut self,
        egress: &mut Egress<P>,
        snapshot: &Snapshot,
        ownership: &VipOwnership,
        now_ns: u64,
        tally: &mut Tally,
    ) {
        let announced = snapshot.all_announced();
        for _ in 0..BURST {
            if self.next_ns > now_ns {
                break;
            }
            self.update(now_ns);
            if let Some(position) = snapshot.lost().after(self.asked) {
                self.asked = Some(position);
                let (_, link, address) = position;
                if let Some(mut buffer) = egress.allocate(link.port())
                    && probe(&mut buffer, address, snapshot.port(link.port()).mac)
                {
                    tally.originated += 1;
                    egress.send_tagged(link.port(), link.tags(), buffer, tally);
                }
                self.pace(now_ns);
                continue;
            }
            let Some((round, position)) = self.next(announced) else {
                self.rests_until_ns = self.follows.iter().filter_map(RoundLimit::allows_more_at).min().unwrap_or(0);
                break;
            };
            let (_, link, address) = position;
            let Some(permission) = ownership.may_speak_for_ip(snapshot, address, now_ns) else {
                // The next snapshot does not answer for it, or the lease begins again and the address counts as new.
                self.done[round] = Some(position);
                continue;
            };
            let Some(mut buffer) = egress.allocate(link.port()) else { break };
            if announcement(&mut buffer, address, snapshot.port(link.port()).mac) {
                tally.originated += 1;
                permission.send(egress, link.port(), link.tags(), buffer, tally);
            }
            self.done[round] = Some(position);
            self.pace(now_ns);
        }
        self.update(now_ns);
        self.is_idle = announced.newest() <= self.done[ROUNDS - 1] && snapshot.lost().newest() <= self.asked;
    }

    fn pace(&mut self, now_ns: u64) {
        self.next_ns = self.next_ns.max(now_ns.saturating_sub((BURST - 1) * PACE_NS)) + PACE_NS;
    }

    fn update(&mut self, now_ns: u64) {
        for (follows, before) in self.follows.iter_mut().zip(self.done) {
            follows.update(before, now_ns);
        }
    }

    /// The next announcement and its round: addresses that were never announced come first.
    fn next(&self, announced: &Announced) -> Option<(usize, Position)> {
        (0..ROUNDS).find_map(|round| {
            let position = announced.after(self.done[round])?;
            let is_allowed = round == 0 || Some(position) <= self.follows[round - 1].allowed;
            is_allowed.then_some((round, position))
        })
    }
}
