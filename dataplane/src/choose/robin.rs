//! `round-robin`: the backends in turn, each as often as its weight demands.
//!
//! A choice is one step in a sequence that the compiler made. Each worker steps on its own and starts at a different
//! position, so that a few flows on many workers do not all go to the first backend.
//!
//! **Invariant:** a worker's position survives a change of the sequence. If every change reset it, backends at the
//! front would get more than their share.

use std::sync::Arc;

use super::rounds::turns;
use crate::stats::Counter;

/// Maximum length of a sequence, where weights would make it longer: the number of values of a weight, so that a
/// backend with weight 1 beside one with 65,535 still gets its share. 128 KiB.
const SEQUENCE_MAX: u64 = 65_536;
/// The maximum per backend where there are many: 655,360 entries for the 6,553 backends that a port may have, so that
/// shares are within 1 %.
const PER_BACKEND_MAX: u64 = 100;

/// A worker's position, on a cache line that no other worker writes: it changes with every new flow.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Turn(Counter);

/// The round-robin scheduler of a frontend.
#[derive(Debug)]
pub(crate) struct Robin {
    /// Positions of backends.
    sequence: Vec<u16>,
    /// Indexed by worker.
    turns: Arc<[Turn]>,
}

impl Robin {
    /// A sequence for these weights. Workers continue at the positions that they had in `before`.
    pub(crate) fn new(weights: &[u16], workers: usize, before: Option<&Self>) -> Self {
        let sequence = sequence(weights);
        let begin = |worker: usize| {
            let turn = Turn::default();
            turn.0.set((worker * sequence.len() / workers.max(1)) as u64);
            turn
        };
        let turns = before.map_or_else(|| (0..workers).map(begin).collect(), |robin| robin.turns.clone());
        Self { sequence, turns }
    }

    /// The position of the next backend for this worker.
    pub(crate) fn next(&self, worker: usize) -> Option<u16> {
        let turn = &self.turns.get(worker)?.0;
        let at = self.at(turn);
        turn.set(at as u64 + 1);
        self.sequence.get(at).copied()
    }

    /// The result of the worker's next [`Robin::next`].
    pub(crate) fn preview(&self, worker: usize) -> Option<u16> {
        self.sequence.get(self.at(&self.turns.get(worker)?.0)).copied()
    }

    fn at(&self, turn: &Counter) -> usize {
        usize::try_from(turn.get()).ok().filter(|&at| at < self.sequence.len()).unwrap_or(0)
    }
}

/// One cycle of turns. Weights are divided by their greatest common divisor. A cycle that would be too long is
/// shortened by smaller weights, rounded, but never to 0.
fn sequence(weights: &[u16]) -> Vec<u16> {
    let divisor = weights.iter().copied().fold(0, greatest_common_divisor).max(1);
    let taking = weights.iter().filter(|&&weight| weight > 0).count() as u64;
    let sum: u64 = weights.iter().map(|weight| u64::from(weight / divisor)).sum();
    let most = SEQUENCE_MAX.max(PER_BACKEND_MAX * taking);
    let scaled = |weight: u16| {
        let weight = u64::from(weight / divisor);
        let scaled = if sum <= most { weight } else { (weight * most / sum).max(weight.min(1)) };
        u32::try_from(scaled).unwrap_or(u32::MAX)
    };
    let scaled: Vec<u32> = weights.iter().map(|&weight| scaled(weight)).collect();
    let rounds = scaled.iter().copied().max().unwrap_or(0);
    turns(&scaled, rounds)
}

const fn greatest_common_divisor(mut a: u16, mut b: u16) -> u16 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shares(positions: impl Iterator<Item = u16>, count: usize) -> Vec<u64> {
        let mut shares = vec![0; count];
        positions.for_each(|position| shares[usize::from(position)] += 1);
        shares
    }

    #[test]
    fn workers_begin_at_different_places_and_go_on_where_they_were_when_backends_change() {
        let robin = Robin::new(&[1, 1, 1, 1], 2, None);
        let next = |robin: &Robin, worker| robin.next(worker).unwrap();
        assert_eq!([next(&robin, 0), next(&robin, 0), next(&robin, 1), next(&robin, 1)], [0, 1, 2, 3]);
        let fewer = Robin::new(&[1, 1, 1], 2, Some(&robin));
        assert_eq!([next(&fewer, 0), next(&fewer, 0), next(&fewer, 1)], [2, 0, 0]);
        assert_eq!(fewer.next(2), None, "there is no such worker");
        assert_eq!(Robin::new(&[0, 0], 1, None).next(0), None, "no backend takes flows");
    }

    #[test]
    fn a_change_at_every_flow_favours_no_backend() {
        let mut robin = Robin::new(&[1; 5], 1, None);
        let mut chosen = Vec::new();
        for round in 0..6000 {
            // The fifth backend comes and goes.
            let fifth = u16::from(crate::wire::split_mix(round) & 1 == 0);
            robin = Robin::new(&[1, 1, 1, 1, fifth], 1, Some(&robin));
            chosen.extend(robin.next(0));
        }
        let shares = shares(chosen.into_iter(), 5);
        assert!(shares[..4].iter().all(|share| (1200..1500).contains(share)) && shares[4] > 500, "{shares:?}");
    }

    #[test]
    fn very_different_weights_keep_their_shares() {
        assert_eq!(shares(sequence(&[65_535, 1]).into_iter(), 2), [65_535, 1]);
        let many: Vec<u16> = (0..1000).map(|n| 60_000 - n).collect();
        let shares = shares(sequence(&many).into_iter(), 1000);
        assert!(shares.iter().all(|share| (98..=101).contains(share)), "{shares:?}");
    }

    proptest! {
        #[test]
        fn in_each_cycle_every_backend_has_as_many_turns_as_its_weight_says(
            weights in proptest::collection::vec(0u16..50, 1..20),
            common in 1u16..100,
        ) {
            let weights: Vec<u16> = weights.iter().map(|weight| weight * common).collect();
            let sum: u64 = weights.iter().copied().map(u64::from).sum();
            let robin = Robin::new(&weights, 1, None);
            // As many steps as the sum of the weights are whole cycles, wherever they begin.
            robin.next(0);
            let chosen = (0..sum).filter_map(|_| robin.next(0));
            let expected: Vec<u64> = weights.iter().copied().map(u64::from).collect();
            prop_assert_eq!(shares(chosen, weights.len()), expected);
        }
    }
}
