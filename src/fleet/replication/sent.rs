//! The batches of news that this gateway has sent, for followers that miss some.
//!
//! **Invariant:** at most [`BATCHES_MAX`] batches are kept; the oldest go first. Not here: sealing and sending.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane::flow::ReplicaEvent;

use super::message::MESSAGE_HEAD;
use super::record::{self, RECORD_MAX};
use super::seal::{DATAGRAM_HEAD, TAG};

/// Longest datagram, bytes: with the headers of IPv6 and UDP it fits the MTU of Ethernet, 1,500.
const DATAGRAM_MAX: usize = 1400;
/// Bytes of records in a batch: 38 records of IPv4, 16 of IPv6.
pub(super) const RECORDS_MAX: usize = DATAGRAM_MAX - DATAGRAM_HEAD - TAG - MESSAGE_HEAD;
/// Batches that are kept: 8,192 of 1.4 KB are 11 MB. At 100,000 records of IPv4 a second, 2,632 batches, they last three
/// seconds, longer than a session without an acknowledgement.
const BATCHES_MAX: usize = 8192;

/// Batches that were sent.
#[derive(Debug, Default)]
pub(super) struct SentBatches {
    /// Number of the first one that is kept.
    first: u64,
    kept: VecDeque<(Instant, Arc<[u8]>)>,
}

impl SentBatches {
    /// Number of the next batch.
    pub(super) fn next(&self) -> u64 {
        self.first + self.kept.len() as u64
    }

    /// Adds news as batches.
    pub(super) fn add(&mut self, events: impl Iterator<Item = ReplicaEvent>, now: Instant) {
        let mut records = Vec::with_capacity(RECORDS_MAX);
        for event in events {
            record::encode(&event, &mut records);
            if records.len() + RECORD_MAX > RECORDS_MAX {
                self.push(&records, now);
                records.clear();
            }
        }
        if !records.is_empty() {
            self.push(&records, now);
        }
    }

    fn push(&mut self, records: &[u8], now: Instant) {
        if self.kept.len() == BATCHES_MAX {
            self.kept.pop_front();
            self.first += 1;
        }
        self.kept.push_back((now, records.into()));
    }

    /// A batch, if it is still kept.
    pub(super) fn get(&self, number: u64) -> Option<Arc<[u8]>> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.kept.get(index).map(|(_, records)| Arc::clone(records))
    }

    /// How old the news is from this batch on; 0 if there is none.
    pub(super) fn age(&self, from: u64, now: Instant) -> Duration {
        let index = usize::try_from(from.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.kept.get(index).map_or(Duration::ZERO, |(sent, _)| now.saturating_duration_since(*sent))
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::flow;
    use super::super::record::{RECORD_V4, decode};
    use super::*;

    #[test]
    fn news_is_kept_in_batches_of_a_datagram_and_the_oldest_goes_first() {
        let (mut sent, now) = (SentBatches::default(), Instant::now());
        let later = now + Duration::from_secs(1);
        sent.add((0..100).map(|port| ReplicaEvent::Holds(flow(port))), now);
        let in_one = (RECORDS_MAX - RECORD_MAX) / RECORD_V4 + 1;
        assert_eq!(sent.next(), 100_u64.div_ceil(in_one as u64));
        let events: Vec<_> = (0..sent.next()).flat_map(|n| decode(&sent.get(n).unwrap()).collect::<Vec<_>>()).collect();
        assert_eq!(events, (0..100).map(|port| ReplicaEvent::Holds(flow(port))).collect::<Vec<_>>());
        assert_eq!((sent.age(0, later), sent.age(sent.next(), later)), (Duration::from_secs(1), Duration::ZERO));
        sent.add(std::iter::empty(), later);
        assert_eq!(sent.next(), 100_u64.div_ceil(in_one as u64), "no news, no batch");
        let before = sent.next();
        for _ in 0..BATCHES_MAX as u64 {
            sent.add(std::iter::once(ReplicaEvent::Ended(flow(1))), later);
        }
        assert_eq!((sent.get(before - 1), sent.next()), (None, before + BATCHES_MAX as u64));
        assert!(sent.get(before).is_some() && sent.get(sent.next()).is_none());
        assert_eq!(sent.age(0, later), Duration::ZERO, "of those that are kept");
    }
}
