//! The distribution of outages, as a page of the documents: each event again and again under many connections.
//!
//! `SLUICE_FLEET_REPETITIONS` (20) and `SLUICE_FLEET_CONNECTIONS` (300, of each kind and way) make it shorter. With
//! `SLUICE_FLEET_EVENTS=kill,stop` only these events happen, and the page is `target/fleet-outages.md`. Each connection
//! and each new flow is a line of JSON in `target/fleet-records.jsonl`.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::bed::{Bed, Pace, Way};
use super::events::{self, Event, Outcome};
use super::load::{Held, Kind};

/// The defaults of an election, and BFD that notices a failure within 150 ms.
const FAST: Pace = Pace { advertisement_ms: 100, bfd: (50, 3), probe_ms: 500, stalled: Duration::from_secs(25) };
const PAGE: &str = "docs/reference/fleet-outages.md";
/// The page of a run of selected events.
const PART: &str = "target/fleet-outages.md";
const RECORDS: &str = "target/fleet-records.jsonl";
/// Double answers later than this after a takeover break the promise.
const DOUBLE_ANSWERS_MAX: Duration = Duration::from_millis(100);

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

#[test]
#[ignore = "a measurement, of more than an hour"]
fn outages_of_a_fleet() {
    let Some(mut bed) = Bed::start("outages of a fleet", "matrix", FAST) else { return };
    let (repetitions, each) = (number("SLUICE_FLEET_REPETITIONS", 20), number("SLUICE_FLEET_CONNECTIONS", 300));
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let selected = Event::selected();
    let file = if selected == Event::ALL { PAGE } else { PART };
    let mut outcomes: Vec<(Event, Outcome)> = Vec::new();
    let mut records = fs::File::create(root.join(RECORDS)).unwrap();
    for repetition in 1..=repetitions {
        for event in selected.iter().copied() {
            let start = Instant::now();
            let outcome = events::run(&mut bed, event, each);
            println!("{repetition}: {}: {}, in {} s", event.title(), summary(&outcome), start.elapsed().as_secs());
            let (title, at_ms) = (event.title(), outcome.at_ms);
            let line =
                serde_json::json!({ "event": title, "repetition": repetition, "at_ms": at_ms, "touched": outcome.touched });
            writeln!(records, "{line}\n{}", outcome.record.json_lines().trim_end()).unwrap();
            outcomes.push((event, outcome));
        }
        // After each round, so that a run that is ended early has a page.
        fs::write(root.join(file), page(&bed, &outcomes, repetition, each)).unwrap();
    }
}

/// The worst of an event, for those who wait for the page.
fn summary(outcome: &Outcome) -> String {
    let outage = outcome.touched.iter().map(|name| outcome.record.outage_ms(name, outcome.at_ms)).max().unwrap_or(0);
    let held = &outcome.record.held;
    let gap = held.iter().filter(|held| held.broken.is_none()).map(|held| held.longest_gap_ms).max().unwrap_or(0);
    let broken = held.iter().filter(|held| held.broken.is_some()).count();
    format!("new flows fail for {outage} ms at most, longest gap {gap} ms, {broken} broken")
}

/// p50, p99 and maximum.
fn distribution(mut values: Vec<u64>) -> String {
    values.sort_unstable();
    let Some(last) = values.len().checked_sub(1) else { return "- | - | -".to_owned() };
    // The rank of a percentile is rounded up: of a few values the 99th is the last one.
    let at = |percent: usize| values[(values.len() * percent).div_ceil(100).clamp(1, values.len()) - 1];
    format!("{} | {} | {}", at(50), at(99), values[last])
}

fn page(bed: &Bed, outcomes: &[(Event, Outcome)], repetitions: usize, each: usize) -> String {
    let output = Command::new("date").args(["-u", "+%Y-%m-%d"]).output().unwrap();
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    let cores = std::thread::available_parallelism().unwrap();
    let mut text = format!(
        "# Outages of a fleet

For how long clients are affected when something happens to three gateways, and which connections break. `make
fleet-matrix` writes this page; it takes more than an hour. What the events mean for an operator: [Several gateways on a
link](../operate/gateways.md), [Announce VIPs by BGP](../operate/bgp.md).

| | |
|---|---|
| repetitions of each event | {repetitions} |
| connections held | {each} of each kind by each way: HTTP keep-alive to nginx, downloads from iperf3, datagrams of a protocol that needs its flow as QUIC does |
| new flows | a DNS query and a TCP connection every {} ms to each VIP |
| network | three gateways, clients and servers in network namespaces, veth; `workers: {{poll: adaptive}}` |
| election | keepalived, advertisements every {} ms |
| replication of flows | flows older than 1 s, to both other gateways |
| router | FRR, with BIRD on the gateways; BFD every {} ms, times {} |
| machine | {cores} cores for everything, shared with other work |
| build | {profile} |
| date | {} |

",
        super::load::NEW_FLOW_EVERY.as_millis(),
        FAST.advertisement_ms,
        FAST.bfd.0,
        FAST.bfd.1,
        String::from_utf8_lossy(&output.stdout).trim(),
    );
    let ways = [
        (
            Way::Link,
            "On a link",
            "Mode `nat`; each VIP has one owner (`l2` pools). Values are of VIPs whose owner the event touched.",
        ),
        (
            Way::Router,
            "Behind a router",
            "Modes `dsr`, `gue` and `ipip`; a router spreads flows over the gateways (`routed` pools).",
        ),
    ];
    for (way, heading, what) in ways {
        write!(text, "## {heading}\n\n{what}\n\n{HEAD}").unwrap();
        for event in Event::selected() {
            let of_event = outcomes.iter().filter(|(found, _)| *found == event).map(|(_, outcome)| outcome);
            text += &row(bed, way, event, &of_event.collect::<Vec<_>>());
        }
        text.push('\n');
    }
    text + &answers(outcomes) + NOTES
}

const HEAD: &str = "| event | new flows fail, ms: p50 | p99 | maximum | longest gap of held connections, ms: p50 | p99 | \
                    maximum | broken: HTTP | iperf3 | datagrams | broken of other gateways |\n\
                    |---|---|---|---|---|---|---|---|---|---|---|\n";

const NOTES: &str = "
Notes:

- *New flows fail*: from the first one that failed to the last, at one VIP. Behind a router a third of the flows does.
- *Gap*: how much longer than usual an answer took. TCP repeats a lost segment after 200 ms, 600 ms, 1.4 s and so on;
  lost datagrams are not repeated, the next one follows after a second.
- *Broken of other gateways* counts connections of VIPs whose gateway the event did not touch.
- *Restart of the router*: its daemons end and start, and withdraw the routes meanwhile.
- A connection without an answer for 25 s counts as broken.
- iperf3 ends all downloads of a VIP when one breaks.
- In a partition each gateway takes every VIP, until the controller lets one keep each.
- Gateways ask the controller only: without an API server they go on with what they know.
";

fn row(bed: &Bed, way: Way, event: Event, outcomes: &[&Outcome]) -> String {
    let names: Vec<&str> = bed.targets.iter().filter(|target| target.way == way).map(|target| target.name.as_str()).collect();
    let mut outages = Vec::new();
    let mut gaps = Vec::new();
    let mut broken: Vec<(Kind, bool)> = Vec::new();
    for outcome in outcomes {
        let is_touched = |name: &str| outcome.touched.iter().any(|touched| touched == name);
        // An event that touches no gateway is shown by all VIPs.
        let counts = |name: &str| outcome.touched.is_empty() || is_touched(name);
        outages.extend(names.iter().filter(|name| counts(name)).map(|name| outcome.record.outage_ms(name, outcome.at_ms)));
        let held = outcome.record.held.iter().filter(|held| names.contains(&held.target.as_str()));
        let held: Vec<&Held> = held.collect();
        gaps.extend(held.iter().filter(|h| h.broken.is_none() && counts(&h.target)).map(|h| h.longest_gap_ms));
        broken.extend(held.iter().filter(|held| held.broken.is_some()).map(|held| (held.kind, is_touched(&held.target))));
    }
    let of = |kind: Kind| broken.iter().filter(|(found, touched)| *found == kind && *touched).count();
    format!(
        "| {} | {} | {} | {} | {} | {} | {} |\n",
        event.title(),
        distribution(outages),
        distribution(gaps),
        of(Kind::Http),
        of(Kind::Iperf3),
        of(Kind::Quic),
        broken.iter().filter(|(_, touched)| !touched).count(),
    )
}

/// Requests that two gateways answered.
fn answers(outcomes: &[(Event, Outcome)]) -> String {
    let mut text = "## Who answers ARP\n\n\
        By the times of a capture on the bridge, with a request for each VIP every 10 ms.\n\n\
        | event | requests that two gateways answered | later than 100 ms after the takeover | the latest, ms | \
        requests that a resumed gateway answered |\n|---|---|---|---|---|\n"
        .to_owned();
    for event in Event::selected() {
        let of_event: Vec<_> = outcomes.iter().filter(|(found, _)| *found == event).map(|(_, outcome)| outcome).collect();
        let doubles: Vec<Duration> = of_event.iter().flat_map(|outcome| outcome.double_answers.iter().copied()).collect();
        let late = doubles.iter().filter(|late| **late > DOUBLE_ANSWERS_MAX).count();
        let latest = doubles.iter().max().map_or("-".to_owned(), |latest| latest.as_millis().to_string());
        let resumed: usize = of_event.iter().map(|outcome| outcome.answers_of_the_resumed).sum();
        writeln!(text, "| {} | {} | {late} | {latest} | {resumed} |", event.title(), doubles.len()).unwrap();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Attempt, Record};

    #[test]
    fn a_distribution_has_the_middle_the_99th_percentile_and_the_largest() {
        assert_eq!(distribution((1..=200).rev().collect()), "100 | 198 | 200");
        assert_eq!(distribution(vec![7]), "7 | 7 | 7");
        assert_eq!(distribution(Vec::new()), "- | - | -");
    }

    #[test]
    fn an_outage_lasts_from_the_first_failure_to_the_last_one_with_successes_of_other_ways_between() {
        let attempt = |at_ms, succeeded| Attempt { kind: Kind::Dns, target: "a".to_owned(), at_ms, succeeded };
        let other = Attempt { target: "b".to_owned(), ..attempt(9000, false) };
        let attempts = [(100, false), (1000, true), (1200, false), (1400, true), (1600, false), (1700, true), (4000, false)];
        let mut attempts: Vec<_> = attempts.map(|(at_ms, succeeded)| attempt(at_ms, succeeded)).into();
        attempts.push(other);
        let record = Record { held: Vec::new(), attempts };
        assert_eq!(record.outage_ms("a", 1000), 440);
        assert_eq!(record.outage_ms("a", 5000), 0);
    }
}
