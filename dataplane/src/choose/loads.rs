//! `least-connections`, `shortest-expected-delay` and `never-queue`: choice by the number of flows of each backend.
//!
//! Each worker keeps a tournament tree of the backends. A choice reads the winner at the root and replays log2(n)
//! games.
//!
//! Flows are counted per backend slot, frontend and worker in any case: a look reads a line for each frontend of the
//! service. Each choice refreshes the counts of the next few
//! backends: this worker's own count of [`OWN_LOOKS`] backends, and the counts of all other workers for one. A choice
//! therefore sees the end of a flow after n / 4 new flows, and flows of other workers after n new flows. It sees the
//! flows that its own worker begins at once. No worker writes into another worker's memory, and a worker reads the
//! others' counts only when it makes a flow.
//!
//! **Invariant:** a new tournament begins with the current counts. If every count began at 0, backends would get too
//! many flows after each change of endpoints. Among equal backends, the one chosen the longest ago wins. A flow counts
//! in every state.
//!
//! Not here: counting flows.

use std::cmp::Ordering;
use std::sync::Arc;

use proto::Scheduler;

use crate::flow::BackendId;
use crate::stats::{Counter, FrontendNumberSet, WorkerCounters};

/// Number of backends whose own count a worker refreshes with each choice. Counts are exact for up to four backends,
/// and four cache lines are cheap.
const OWN_LOOKS: usize = 4;
/// Number of winners that are refreshed before the choice is final. Each refresh may dethrone the winner.
const WINNERS: usize = 4;

/// The measure by which backends are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    /// Fewest flows per weight.
    Flows,
    /// Fewest flows per weight, counting the new flow.
    Delay,
    /// Idle backends first; among the idle and among the others, as `Delay`.
    Idle,
}

impl Measure {
    /// The measure of a scheduler; `None` for schedulers that do not count flows.
    pub(crate) const fn of(scheduler: Scheduler) -> Option<Self> {
        match scheduler {
            Scheduler::LeastConnections => Some(Self::Flows),
            Scheduler::ShortestExpectedDelay => Some(Self::Delay),
            Scheduler::NeverQueue => Some(Self::Idle),
            Scheduler::Maglev | Scheduler::RoundRobin | Scheduler::SourceHash | Scheduler::DestinationHash => None,
        }
    }

    /// Compares flows / weight by cross-multiplication: 48 bits of flows and 16 bits of weight fit in 64 bits.
    fn compare(self, (flows_a, weight_a): (u64, u16), (flows_b, weight_b): (u64, u16)) -> Ordering {
        let more = u64::from(self != Self::Flows);
        let by_weight = ((flows_a + more) * u64::from(weight_b)).cmp(&((flows_b + more) * u64::from(weight_a)));
        match self {
            Self::Flows | Self::Delay => by_weight,
            Self::Idle => (flows_a > 0).cmp(&(flows_b > 0)).then(by_weight),
        }
    }
}

/// A backend that takes new flows.
#[derive(Clone, Copy, Debug)]
struct Player {
    /// Position in the list of backends that the tournament was built from.
    position: u16,
    weight: u16,
    slot: u32,
}

/// A worker's counts for one player.
#[derive(Debug, Default)]
struct Score {
    own: Counter,
    others: Counter,
    /// When the player was last chosen, counted in choices.
    chosen: Counter,
}

impl Score {
    fn flows(&self) -> u64 {
        self.own.get() + self.others.get()
    }
}

/// The tournament of one worker.
#[derive(Debug)]
struct Tournament {
    scores: Box<[Score]>,
    /// The winner of each game, as an index of a player. Game 1 is the final; game g is played by the winners of games
    /// 2g and 2g + 1. "Games" from the number of players on stand for the players themselves.
    winners: Box<[Counter]>,
    choices: Counter,
}

impl Tournament {
    fn copied(&self) -> Self {
        let copied = |counter: &Counter| {
            let copy = Counter::default();
            copy.set(counter.get());
            copy
        };
        let score =
            |score: &Score| Score { own: copied(&score.own), others: copied(&score.others), chosen: copied(&score.chosen) };
        Self {
            scores: self.scores.iter().map(score).collect(),
            winners: self.winners.iter().map(copied).collect(),
            choices: copied(&self.choices),
        }
    }
}

/// The backends of a frontend, ordered by load.
#[derive(Debug)]
pub(crate) struct Loads {
    measure: Measure,
    players: Box<[Player]>,
    /// Indexed by worker.
    tournaments: Box<[Tournament]>,
    counters: Arc<[Arc<WorkerCounters>]>,
    /// The frontends of the service, by which its flows are counted.
    numbers: Arc<FrontendNumberSet>,
}

impl Loads {
    /// Builds one tournament per worker over the backends with a weight above 0, from the current counts.
    pub(crate) fn new(
        measure: Measure,
        backends: &[(BackendId, u16)],
        counters: &Arc<[Arc<WorkerCounters>]>,
        numbers: &Arc<FrontendNumberSet>,
    ) -> Self {
        let taking = (0..).zip(backends).filter(|(_, (_, weight))| *weight > 0);
        let players: Box<[_]> = taking.map(|(position, &(id, weight))| Player { position, weight, slot: id.slot }).collect();
        let tournament = |_| Tournament {
            scores: players.iter().map(|_| Score::default()).collect(),
            winners: players.iter().map(|_| Counter::default()).collect(),
            choices: Counter::default(),
        };
        let tournaments = (0..counters.len().max(1)).map(tournament).collect();
        let loads = Self { measure, players, tournaments, counters: counters.clone(), numbers: numbers.clone() };
        loads.tournaments.iter().enumerate().for_each(|(worker, tournament)| loads.open(worker, tournament));
        loads
    }

    /// The position of the backend that gets this worker's next flow.
    pub(crate) fn lightest(&self, worker: usize) -> Option<u16> {
        self.choose(worker, self.tournaments.get(worker)?)
    }

    /// The result of the worker's next [`Loads::lightest`], from a copy of its tournament.
    pub(crate) fn preview(&self, worker: usize) -> Option<u16> {
        self.choose(worker, &self.tournaments.get(worker)?.copied())
    }

    #[inline]
    fn choose(&self, worker: usize, tournament: &Tournament) -> Option<u16> {
        let (count, choice) = (self.players.len(), tournament.choices.get());
        let nth = |n: u64| usize::try_from(n.checked_rem(count as u64)?).ok();
        let other = nth(choice)?;
        tournament.scores[other].others.set(self.others(worker, other));
        self.replay(tournament, other);
        for look in 0..OWN_LOOKS.min(count) {
            self.look(worker, tournament, nth(choice * OWN_LOOKS as u64 + look as u64)?);
        }
        for _ in 0..WINNERS {
            let winner = self.winner(tournament, 1);
            self.look(worker, tournament, winner);
            if self.winner(tournament, 1) == winner {
                break;
            }
        }
        let winner = self.winner(tournament, 1);
        let score = &tournament.scores[winner];
        // The flow is counted when it is created. If none is created, the next refresh corrects the count.
        score.own.add(1);
        tournament.choices.add(1);
        score.chosen.set(choice + 1);
        self.replay(tournament, winner);
        Some(self.players[winner].position)
    }

    /// Refreshes the worker's own count of a player.
    fn look(&self, worker: usize, tournament: &Tournament, player: usize) {
        let (score, now) = (&tournament.scores[player], self.own(worker, player));
        if score.own.get() != now {
            score.own.set(now);
            self.replay(tournament, player);
        }
    }

    fn own(&self, worker: usize, player: usize) -> u64 {
        self.counters.get(worker).map_or(0, |counters| counters.flows_by(self.players[player].slot, &self.numbers))
    }

    fn others(&self, worker: usize, player: usize) -> u64 {
        let others = self.counters.iter().enumerate().filter(|(other, _)| *other != worker);
        others.map(|(_, counters)| counters.flows_by(self.players[player].slot, &self.numbers)).sum()
    }

    /// Refreshes all counts and plays all games.
    fn open(&self, worker: usize, tournament: &Tournament) {
        for (player, score) in tournament.scores.iter().enumerate() {
            score.own.set(self.own(worker, player));
            score.others.set(self.others(worker, player));
        }
        (1..self.players.len()).rev().for_each(|game| self.play(tournament, game));
    }

    /// Replays the games that a player takes part in.
    fn replay(&self, tournament: &Tournament, player: usize) {
        let mut game = (player + self.players.len()) / 2;
        while game > 0 {
            self.play(tournament, game);
            game /= 2;
        }
    }

    fn play(&self, tournament: &Tournament, game: usize) {
        let (a, b) = (self.winner(tournament, 2 * game), self.winner(tournament, 2 * game + 1));
        let of = |player: usize| (tournament.scores[player].flows(), self.players[player].weight);
        let chosen = |player: usize| tournament.scores[player].chosen.get();
        let order = self.measure.compare(of(a), of(b)).then_with(|| chosen(a).cmp(&chosen(b))).then(a.cmp(&b));
        tournament.winners[game].set(if order.is_le() { a } else { b } as u64);
    }

    /// The index of the player that won a game.
    fn winner(&self, tournament: &Tournament, game: usize) -> usize {
        match game.checked_sub(self.players.len()) {
            Some(player) => player,
            None => usize::try_from(tournament.winners[game].get()).unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{CounterSlot, FrontendNumber};
    use proptest::prelude::*;

    fn counted(slot: u32) -> CounterSlot {
        CounterSlot::new(slot, FrontendNumber::NONE)
    }

    /// Backends in slots 0.., and workers that count.
    struct Rig {
        counters: Arc<[Arc<WorkerCounters>]>,
        backends: Vec<(BackendId, u16)>,
        numbers: Arc<FrontendNumberSet>,
    }

    impl Rig {
        fn new(workers: usize, weights: &[u16]) -> Self {
            let backends = (0..).zip(weights).map(|(slot, &weight)| (BackendId { slot, generation: 1 }, weight));
            let counters = (0..workers).map(|_| Arc::new(WorkerCounters::default())).collect();
            Self { counters, backends: backends.collect(), numbers: Arc::default() }
        }

        fn loads(&self, measure: Measure) -> Loads {
            Loads::new(measure, &self.backends, &self.counters, &self.numbers)
        }

        fn begin(&self, worker: usize, backend: u16) {
            self.counters[worker].at(counted(backend.into())).flows.add(1);
        }

        fn end(&self, worker: usize, backend: usize) {
            if self.counters[worker].flows_by(u32::try_from(backend).unwrap(), &self.numbers) > 0 {
                self.counters[worker].flow_ended(counted(u32::try_from(backend).unwrap()));
            }
        }

        /// Chooses a backend and begins a flow there.
        fn flow(&self, loads: &Loads, worker: usize) -> u16 {
            let chosen = loads.lightest(worker).unwrap();
            self.begin(worker, chosen);
            chosen
        }

        fn flows_begin(&self, loads: &Loads, count: u32) {
            for _ in 0..count {
                self.flow(loads, 0);
            }
        }

        fn flows(&self) -> Vec<u64> {
            let of = |b: &(BackendId, u16)| self.counters.iter().map(|c| c.flows_by(b.0.slot, &self.numbers)).sum();
            self.backends.iter().map(of).collect()
        }
    }

    /// The formulas of ip_vs(8), evaluated over all backends. Among equal backends, the one chosen the longest ago.
    fn naive(measure: Measure, flows: &[u64], weights: &[u16], chosen: &[u64]) -> u16 {
        let cost = |n: usize| {
            let (flows, weight) = (f64::from(u32::try_from(flows[n]).unwrap()), f64::from(weights[n]));
            match measure {
                Measure::Flows => (0, flows / weight),
                Measure::Delay => (0, (flows + 1.0) / weight),
                Measure::Idle => (u8::from(flows > 0.0), (flows + 1.0) / weight),
            }
        };
        let usable = (0..flows.len()).filter(|&n| weights[n] > 0);
        let best = usable.min_by(|&a, &b| cost(a).partial_cmp(&cost(b)).unwrap().then(chosen[a].cmp(&chosen[b])));
        u16::try_from(best.unwrap()).unwrap()
    }

    const ALL: [Measure; 3] = [Measure::Flows, Measure::Delay, Measure::Idle];

    #[test]
    fn no_backend_is_chosen_without_backends() {
        let rig = Rig::new(1, &[0, 0]);
        assert_eq!(rig.loads(Measure::Flows).lightest(0), None);
        assert_eq!(Rig::new(1, &[]).loads(Measure::Flows).lightest(0), None);
        assert_eq!(Rig::new(1, &[1]).loads(Measure::Flows).lightest(1), None, "there is no such worker");
    }

    #[test]
    fn never_queue_prefers_an_idle_backend_to_a_strong_one() {
        let rig = Rig::new(1, &[10, 1]);
        let chosen = |measure| {
            let loads = Rig::new(1, &[10, 1]);
            let of = loads.loads(measure);
            [loads.flow(&of, 0), loads.flow(&of, 0), loads.flow(&of, 0)]
        };
        assert_eq!(chosen(Measure::Idle), [0, 1, 0]);
        assert_eq!(chosen(Measure::Delay), [0, 0, 0]);
        assert_eq!(rig.flows(), [0, 0]);
    }

    #[test]
    fn only_flows_by_frontends_of_the_service_are_read() {
        let rig = Rig::new(1, &[1, 1]);
        let loads = rig.loads(Measure::Flows);
        // Another service has many frontends, and the slot counted flows of one.
        rig.counters[0].prepare(0, FrontendNumber::new(9));
        rig.counters[0].at(CounterSlot::new(0, FrontendNumber::new(9))).flows.add(100);
        assert_eq!([rig.flow(&loads, 0), rig.flow(&loads, 0)], [0, 1]);
        rig.numbers.set([FrontendNumber::new(9)].into_iter());
        assert_eq!([(); 4].map(|()| rig.flow(&loads, 0)), [1; 4], "a frontend with 100 flows joins");
    }

    #[test]
    fn a_backend_that_joins_loaded_ones_catches_up_and_then_takes_its_share() {
        let mut rig = Rig::new(1, &[1; 9]);
        let loads = rig.loads(Measure::Flows);
        rig.flows_begin(&loads, 900);
        assert_eq!(rig.flows(), [100; 9]);
        rig.backends.push((BackendId { slot: 9, generation: 1 }, 1));
        let loads = rig.loads(Measure::Flows);
        (0..100).for_each(|_| assert_eq!(rig.flow(&loads, 0), 9));
        rig.flows_begin(&loads, 100);
        assert_eq!(rig.flows(), [110; 10]);
    }

    #[test]
    fn changes_of_endpoints_at_every_tenth_flow_do_not_skew_anything() {
        let rig = Rig::new(1, &[1; 20]);
        for _ in 0..100 {
            let loads = rig.loads(Measure::Flows);
            rig.flows_begin(&loads, 10);
        }
        assert_eq!(rig.flows(), [50; 20]);
    }

    #[test]
    fn two_workers_fill_backends_together() {
        let rig = Rig::new(2, &[1, 1, 1, 3]);
        let loads = rig.loads(Measure::Flows);
        for n in 0..600 {
            rig.flow(&loads, n % 2);
        }
        let flows = rig.flows();
        assert!(flows[..3].iter().all(|n| (98..=102).contains(n)) && (296..=304).contains(&flows[3]), "{flows:?}");
        // One worker alone levels out the flows that the other worker ended.
        (0..80).for_each(|_| rig.end(1, 0));
        let left = rig.flows();
        assert!((48..=52).contains(&left[0]), "it had half of them: {left:?}");
        rig.flows_begin(&loads, 200);
        assert_eq!(rig.flows().iter().sum::<u64>(), left.iter().sum::<u64>() + 200);
        let flows = rig.flows();
        assert!(flows[..3].iter().all(|n| (123..=127).contains(n)), "{left:?}, then {flows:?}");
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Begin,
        End(usize),
    }

    fn step(backends: usize) -> impl Strategy<Value = Step> {
        prop_oneof![2 => Just(Step::Begin), 1 => (0..backends).prop_map(Step::End)]
    }

    proptest! {
        #[test]
        fn with_four_backends_every_choice_is_the_naive_one(
            weights in proptest::collection::vec(0u16..5, 4),
            steps in proptest::collection::vec(step(4), 1..200),
            measure in proptest::sample::select(&ALL[..]),
        ) {
            let mut weights = weights;
            weights[1] = weights[1].max(1);
            let (rig, mut chosen_at) = (Rig::new(1, &weights), vec![0; 4]);
            let loads = rig.loads(measure);
            for (now, step) in (1..).zip(steps) {
                match step {
                    Step::End(backend) => rig.end(0, backend),
                    Step::Begin => {
                        let expected = naive(measure, &rig.flows(), &weights, &chosen_at);
                        prop_assert_eq!(rig.flow(&loads, 0), expected);
                        chosen_at[usize::from(expected)] = now;
                    }
                }
            }
        }

        #[test]
        fn with_many_backends_every_choice_is_the_naive_one_while_no_flow_ends(
            weights in proptest::collection::vec(0u16..5, 5..70),
            before in proptest::collection::vec(0usize..70, 0..100),
            measure in proptest::sample::select(&ALL[..]),
        ) {
            let mut weights = weights;
            weights[1] = weights[1].max(1);
            let (rig, mut chosen_at) = (Rig::new(1, &weights), vec![0; weights.len()]);
            before.iter().for_each(|n| rig.begin(0, u16::try_from(n % weights.len()).unwrap()));
            let loads = rig.loads(measure);
            for now in 1..300 {
                let expected = naive(measure, &rig.flows(), &weights, &chosen_at);
                prop_assert_eq!(rig.flow(&loads, 0), expected);
                chosen_at[usize::from(expected)] = now;
            }
        }

        #[test]
        fn with_many_backends_and_flows_that_end_no_backend_is_far_from_the_average(
            ends in proptest::collection::vec(0usize..64, 4000),
        ) {
            let rig = Rig::new(1, &[1; 64]);
            let loads = rig.loads(Measure::Flows);
            rig.flows_begin(&loads, 1280);
            for end in ends {
                rig.end(0, end);
                rig.flow(&loads, 0);
            }
            let flows = rig.flows();
            prop_assert!(flows.iter().all(|n| (8..=32).contains(n)), "{:?}", flows);
        }
    }
}
