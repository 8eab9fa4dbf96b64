//! Announcing the addresses that this gateway answers for: three times each, so that switches and neighbours learn who
//! has them now (FORWARDING 8). Announcements are originated packets: no packet became them.
//!
//! Bounded: what finds no room is not announced; neighbours then ask, and are answered.

use std::collections::VecDeque;
use std::net::IpAddr;

use crate::lanes::Lanes;
use crate::snapshot::Snapshot;
use crate::tags::Tags;
use crate::tally::Tally;
use crate::{Link, Port, answer};

/// Announcements of one address.
const TIMES: u8 = 3;
/// Time between them, ns.
const INTERVAL_NS: u64 = 1_000_000_000;
/// Addresses under way at once.
const ADDRESSES_MAX: usize = 4096;
/// Announcements per poll, so that a poll stays short.
const PER_POLL: usize = 8;

#[derive(Debug)]
struct Pending {
    link: Link,
    address: IpAddr,
    left: u8,
    due_ns: u64,
}

/// The announcements that are still to be made, those due first in front.
#[derive(Debug)]
pub(crate) struct Announcements {
    pending: VecDeque<Pending>,
    /// The snapshots up to here are announced.
    announced: u64,
}

impl Announcements {
    pub(crate) fn new() -> Self {
        Self { pending: VecDeque::with_capacity(ADDRESSES_MAX), announced: 0 }
    }

    /// Notes what this snapshot answers for and earlier ones did not.
    pub(crate) fn add(&mut self, snapshot: &Snapshot, now_ns: u64) {
        for (link, address, since) in snapshot.announced() {
            if *since > self.announced && self.pending.len() < ADDRESSES_MAX {
                self.pending.push_front(Pending { link: *link, address: *address, left: TIMES, due_ns: now_ns });
            }
        }
        self.announced = snapshot.sequence();
    }

    /// Sends what is due.
    pub(crate) fn send<P: Port>(&mut self, lanes: &mut Lanes<P>, snapshot: &Snapshot, now_ns: u64, tally: &mut Tally) {
        for _ in 0..PER_POLL {
            if self.pending.front().is_none_or(|next| next.due_ns > now_ns) {
                return;
            }
            let Some(mut next) = self.pending.pop_front() else { return };
            if !snapshot.answers_for_ip(next.link, next.address) {
                continue;
            }
            let Some(mut buffer) = lanes.allocate(next.link.port()) else { return self.pending.push_front(next) };
            if answer::announcement(&mut buffer, next.address, snapshot.port(next.link.port()).mac) {
                tally.originated += 1;
                lanes.leave(next.link.port(), Tags::on(next.link), buffer, tally);
            }
            next.left -= 1;
            next.due_ns = now_ns + INTERVAL_NS;
            if next.left > 0 {
                self.pending.push_back(next);
            }
        }
    }
}
