//! The order of turns of weighted backends, for `round-robin` and the Maglev tables.
//!
//! **Invariant:** the k-th turn of a backend comes in round `ceil(k * largest weight / weight)`. Within a round, turns
//! are ordered by position. So the heaviest backend has a turn in every round, and a backend of half its weight in
//! every other round.

/// The rounds of a backend's turns, in order: k * heaviest / weight, rounded up, without a division for each turn.
struct Rounds {
    weight: u32,
    quotient: u32,
    remainder: u32,
    round: u32,
    /// (k * heaviest) modulo weight, counted down from a multiple: the unused part of the round.
    over: u32,
}

impl Rounds {
    const fn new(weight: u32, heaviest: u32) -> Self {
        Self { weight, quotient: heaviest / weight, remainder: heaviest % weight, round: 0, over: 0 }
    }
}

impl Iterator for Rounds {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        self.round += self.quotient;
        if self.remainder > self.over {
            self.round += 1;
            self.over += self.weight;
        }
        self.over -= self.remainder;
        Some(self.round)
    }
}

/// All turns of the first `rounds` rounds, as positions in `weights`. Backends with weight 0 and positions past the
/// 65,535th get no turn.
pub(crate) fn turns(weights: &[u32], rounds: u32) -> Vec<u16> {
    let heaviest = weights.iter().copied().max().unwrap_or(0);
    let of = |weight: u32| Rounds::new(weight, heaviest).take_while(|&round| round <= rounds);
    let taking = || (0..u16::MAX).zip(weights.iter().copied()).filter(|&(_, weight)| weight > 0);
    // A counting sort: first the index where each round begins, then every turn into its place.
    let mut begins = vec![0_u32; rounds as usize + 2];
    for (_, weight) in taking() {
        of(weight).for_each(|round| begins[round as usize + 1] += 1);
    }
    let mut before = 0;
    for begin in &mut begins {
        before += *begin;
        *begin = before;
    }
    let mut turns = vec![0; before as usize];
    for (position, weight) in taking() {
        for round in of(weight) {
            turns[begins[round as usize] as usize] = position;
            begins[round as usize] += 1;
        }
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// By the definition in the module head.
    fn naive(weights: &[u32], rounds: u32) -> Vec<u16> {
        let heaviest = weights.iter().copied().max().unwrap_or(0);
        let mut taken = vec![0; weights.len()];
        let mut turns = Vec::new();
        for round in 1..=rounds {
            for (position, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0) {
                while ((taken[position] + 1) * heaviest).div_ceil(weight) <= round {
                    taken[position] += 1;
                    turns.push(u16::try_from(position).unwrap());
                }
            }
        }
        turns
    }

    #[test]
    fn a_heavier_backend_has_its_turns_between_those_of_others() {
        assert_eq!(turns(&[4, 3, 2], 4), [0, 0, 1, 2, 0, 1, 0, 1, 2]);
        assert_eq!(turns(&[1, 0, 1], 2), [0, 2, 0, 2]);
        assert_eq!(turns(&[], 5), [0; 0]);
    }

    proptest! {
        #[test]
        fn turns_come_in_their_rounds(weights in proptest::collection::vec(0u32..70, 0..20), rounds in 0u32..200) {
            prop_assert_eq!(turns(&weights, rounds), naive(&weights, rounds));
        }
    }
}
