//! Two gateways on one bridge that share the VIPs of an `l2` pool: real keepalived elects the owners, and a client counts
//! who answers its ARP requests.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod pair;

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use pair::{Pair, VIPS, until};
use rustix::process::Signal;

/// A lease of 1.5 s: a busy machine seldom stands still for so long.
const ANNOUNCE: &str = "election: keepalived, advertisement: 500ms";
/// Number of groups of VIPs, if the configuration does not say it.
const GROUPS: usize = 16;

fn owns_all(pair: &Pair, n: usize, why: &str) {
    until(&format!("gateway {n} answers for all VIPs: {why}"), || (pair.owned(n) == VIPS).then_some(()));
}

/// Whether a gateway would take VIPs, by the newest word about it in its log.
fn stands(pair: &Pair, n: usize) -> Option<()> {
    let log = pair.log(n);
    (log.rfind("the gateway stands for election")? > log.rfind("the gateway leaves its VIPs to others").unwrap_or(0))
        .then_some(())
}

/// Questions by DNS over UDP to all VIPs, each from a new port, without end. Dropping it ends them.
struct Exchanges {
    programs: Vec<Child>,
    lines: Arc<Mutex<Vec<String>>>,
    began: Instant,
}

impl Exchanges {
    fn start(pair: &Pair) -> Self {
        let began = Instant::now();
        let script = |name: &str| format!("{}/tests/edge/{name}", env!("CARGO_MANIFEST_DIR"));
        let mut server = pair.command("client", &["python3", &script("dns_server.py"), "5353", "server"]);
        let mut server = server.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let mut client = pair.command("client", &["python3", &script("dns_exchanges.py"), "200"]);
        let mut client = client.args((100..100 + VIPS).map(|n| format!("192.0.2.{n}"))).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(client.stdout.take().unwrap()).lines();
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let seen = Arc::clone(&lines);
        std::thread::spawn(move || output.map_while(Result::ok).for_each(|line| seen.lock().unwrap().push(line)));
        Self { programs: vec![server, client], lines, began }
    }

    /// Number of answers so far.
    fn answers(&self) -> u64 {
        let lines = self.lines.lock().unwrap();
        lines.iter().rev().find_map(|line| line.strip_prefix("answers ")?.parse().ok()).unwrap_or(0)
    }

    /// Waits for answers to questions that begin now, and until older questions are answered or have failed. They may fail
    /// only if the machine stood still meanwhile.
    fn continue_without_a_failure(&self, pair: &Pair, what: &str) {
        let before = self.answers();
        until(what, || (self.answers() > before + 30 * VIPS as u64).then_some(()));
        let failed: Vec<_> = self.lines.lock().unwrap().iter().filter(|line| line.ends_with("failed")).cloned().collect();
        assert!(failed.is_empty() || pair.was_stalled_since(self.began), "{what}: {failed:?}");
    }
}

impl Drop for Exchanges {
    fn drop(&mut self) {
        for program in &mut self.programs {
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

/// The groups that a gateway has given away by this part of its log, in order, and whether another gateway had always
/// taken those before, as far as it did in time.
fn given_away(log: &str) -> (Vec<&str>, bool) {
    let (mut given, mut taken, mut is_in_order) = (Vec::new(), BTreeSet::new(), true);
    for line in log.lines() {
        let group = line.rsplit("group=").next().and_then(|rest| rest.split(' ').next()).unwrap_or_default();
        if line.contains("another gateway owns the group of VIPs") || line.contains("no other gateway has taken the group") {
            taken.insert(group);
        } else if line.contains("gives a group of VIPs away") {
            is_in_order &= given.iter().all(|before| taken.contains(before));
            given.push(group);
        }
    }
    (given, is_in_order)
}

/// The upgrade of docs/guide/upgrade.md: drain, wait, restart, undrain, next.
#[test]
fn a_fleet_is_restarted_one_after_another_without_a_failed_exchange() {
    let Some(mut pair) = Pair::new("an upgrade of two gateways", "upgr", ANNOUNCE) else {
        return;
    };
    (0..2).for_each(|n| pair.spawn(n));
    until("each VIP has one owner, which keeps it", || pair.has_settled(GROUPS));
    let shares = [pair.owned(0), pair.owned(1)];
    let exchanges = Exchanges::start(&pair);
    exchanges.continue_without_a_failure(&pair, "answers at rest");
    let unanswered_before = pair.watch.lines();
    for (n, other) in [(0, 1), (1, 0)] {
        let (start, since) = (pair.log(n).len(), Instant::now());
        let share = until("no VIP moves", || pair.has_settled(GROUPS).map(|()| pair.owned(n)));
        pair.drain(n, true);
        owns_all(&pair, other, "the other is drained");
        until("the new owner keeps them", || pair.has_settled(GROUPS));
        let log = pair.log(n);
        let (given, is_in_order) = given_away(&log[start..]);
        // A stall ends the drain, too.
        assert!(
            pair.was_stalled_since(since) || (given.len() == share && is_in_order),
            "one group after another: {given:?} of {share}"
        );
        exchanges.continue_without_a_failure(&pair, "answers of the other gateway");

        let start = pair.log(n).len();
        assert_eq!(pair.stop(n), Some(0), "{}", pair.log(n));
        pair.spawn(n);
        until("it has joined the election, still drained", || {
            let log = pair.log(n);
            let is_drained = log[start..].contains("why=\"it is drained\"");
            let has_heard = (0..16).all(|group| log[start..].contains(&format!("\\\"sluice-{group}\\\" BACKUP")));
            (is_drained && has_heard).then_some(())
        });
        pair.drain(n, false);
        until("it stands for election", || stands(&pair, n));
        exchanges.continue_without_a_failure(&pair, "answers after the restart");
        until("the end of the drain takes nothing back", || {
            (pair.owned(other) == VIPS || pair.was_stalled_since(since)).then_some(())
        });
    }
    assert_eq!(shares[0] + shares[1], VIPS);
    // Linux asks three times, a second apart, before it gives up.
    let outages = pair.watch.outages_ms(unanswered_before);
    assert!(
        pair.was_stalled_since(exchanges.began) || outages.iter().all(|outage_ms| *outage_ms < 3000),
        "without an answer by ARP, ms: {outages:?}"
    );
}

#[test]
fn a_gateway_takes_no_vip_while_it_waits_for_neighbours_not_even_those_of_a_drained_one() {
    let Some(mut pair) = Pair::new("joining", "joins", ANNOUNCE) else { return };
    pair.spawn(0);
    owns_all(&pair, 0, "it is alone");
    // Nobody has this address.
    let slice = "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {namespace: demo, name: more, labels: \
                 {kubernetes.io/service-name: web-100}}\naddressType: IPv4\nports: [{name: http, protocol: TCP, port: 8080}]\n\
                 endpoints: [{addresses: [192.0.2.99]}]\n";
    fs::write(pair.path(1, "manifests/more.yaml"), slice).unwrap();
    pair.drain(0, true);
    pair.spawn(1);
    until("it waits for neighbours", || pair.log(1).contains("it waits for the neighbours of its backends").then_some(()));
    until("its time is over", || {
        let taken = pair.owned(1);
        let is_over = pair.log(1).contains("stands for election without what it waited for");
        assert!(taken == 0 || is_over || pair.was_stalled(), "it has taken {taken} VIPs; its log:\n{}", pair.log(1));
        is_over.then_some(())
    });
    owns_all(&pair, 1, "the other is drained");
}

#[test]
fn two_gateways_share_the_vips_and_each_takes_those_of_the_other_when_it_fails() {
    let Some(mut pair) = Pair::new("two gateways with an election", "vrrp", ANNOUNCE) else {
        return;
    };
    pair.spawn(0);
    pair.spawn(1);
    until("each VIP has one owner, which keeps it", || pair.has_settled(GROUPS));
    let shares = [pair.owned(0), pair.owned(1)];
    assert!(shares[0] > 0 && shares[1] > 0 && shares[0] + shares[1] == VIPS, "{shares:?}");

    // Each knows what it owns.
    for n in 0..2 {
        until("the gateway lists its groups", || (pair.field(n, "groups_owned") == pair.owned(n)).then_some(()));
        let answered = pair.listed(n, "vips").iter().filter(|row| row["gateways"][0] == format!("edge-{n}")).count();
        assert_eq!((answered, pair.field(n, "groups")), (pair.owned(n), 16.into()));
    }

    // Draining gives all VIPs away, and the end of the drain takes none back.
    pair.drain(0, true);
    owns_all(&pair, 1, "the other is drained");
    until("it says why", || (pair.field(0, "unfit") == "it is drained").then_some(()));
    until("the new owner keeps them", || pair.has_settled(GROUPS));
    pair.drain(0, false);

    // A gateway that was stopped never answers with what it owned before.
    pair.signal(1, Signal::STOP);
    owns_all(&pair, 0, "the other is stopped");
    until("the new owner keeps them", || pair.has_settled(GROUPS));
    let before = pair.watch.lines();
    pair.signal(1, Signal::CONT);
    until("the gateway stands for election again", || pair.log(1).contains("stands for election again").then_some(()));
    until("it has joined the election", || pair.has_joined(1).then_some(()));
    // Long enough to win an election that it must not win. No condition tells that something does not happen.
    std::thread::sleep(std::time::Duration::from_secs(3));
    let answered: Vec<_> = pair.watch.since(before).into_iter().filter(|line| line.contains(&Pair::mac(1))).collect();
    assert_eq!(answered, Vec::<String>::new(), "answers of the resumed gateway; its log:\n{}", pair.log(1));

    // Without a link.
    pair.cable(0, false);
    owns_all(&pair, 1, "the other has no link");
    pair.cable(0, true);
    until("the new owner keeps them", || pair.has_settled(GROUPS));

    // kill -9, and a new start, which takes nothing back.
    let takeovers = pair.field(0, "takeovers").as_u64().unwrap();
    pair.kill(1);
    owns_all(&pair, 0, "the other was killed");
    until("the takeovers are counted", || (pair.field(0, "takeovers").as_u64().unwrap() >= takeovers + 16).then_some(()));
    assert_eq!(pair.field(0, "groups_owned"), VIPS);
    until("and are an Event", || pair.has_event(0, "TookOver").then_some(()));
    until("the new owner keeps them", || pair.has_settled(GROUPS));
    pair.spawn(1);
    until("it has joined the election", || pair.has_joined(1).then_some(()));
    owns_all(&pair, 0, "the VIPs stay where they are");

    // An orderly end hands the VIPs over before it.
    assert_eq!(pair.stop(0), Some(0), "{}", pair.log(0));
    owns_all(&pair, 1, "the other has ended");
    assert!(!pair.log(0).contains("no other gateway has taken"), "{}", pair.log(0));
    // The program's own words for an end as it should be.
    let errors: Vec<_> = pair.log(0).lines().filter(|line| line.contains("Z ERROR ")).map(str::to_owned).collect();
    assert_eq!(errors, Vec::<String>::new());
}

#[test]
fn of_two_gateways_without_an_election_one_reports_the_other_and_stops_answering() {
    let Some(mut pair) = Pair::new("two gateways without an election", "twice", "") else { return };
    pair.spawn(0);
    owns_all(&pair, 0, "it is alone");
    pair.spawn(1);
    until("it reports the other", || pair.log(0).contains("another station announces a VIP").then_some(()));
    owns_all(&pair, 1, "its Ethernet address is the higher one");
    until("it names the other station", || (pair.field(0, "duplicates")[0]["station"] == Pair::mac(1)).then_some(()));
    until("an Event says so", || pair.has_event(0, "DuplicateVIP").then_some(()));
}

/// The outages by `kill -9` of an owner. `SLUICE_KILLS=30 cargo test --test vip_election -- --ignored --nocapture`
#[test]
#[ignore = "a measurement, of several minutes"]
fn outages_by_kill() {
    let Some(mut pair) = Pair::new("outages", "outage", "election: keepalived") else { return };
    let kills: usize = std::env::var("SLUICE_KILLS").map_or(20, |text| text.parse().unwrap());
    (0..2).for_each(|n| pair.spawn(n));
    let mut outages = Vec::new();
    for kill in 0..kills {
        until("both take part, and every VIP is kept", || {
            pair.has_settled(GROUPS).filter(|()| pair.has_joined(0) && pair.has_joined(1))
        });
        let victim = usize::from(pair.owned(1) > pair.owned(0));
        let before = pair.watch.lines();
        pair.kill(victim);
        owns_all(&pair, 1 - victim, "the other was killed");
        outages.extend(pair.watch.outages_ms(before));
        println!("{kill}: {outages:?}");
        pair.spawn(victim);
    }
    outages.sort_unstable();
    let at = |share: usize| outages[(outages.len() - 1) * share / 100];
    println!("{} VIPs in {kills} kills: p50 {} ms, p99 {} ms, most {} ms", outages.len(), at(50), at(99), at(100));
}
