//! Two gateways that replicate their flows, on one bridge with real keepalived: partners find each other, and connections
//! survive the death of their gateway.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod pair;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use pair::{Pair, VIPS, until};
use rustix::process::Signal;

/// A lease of 1.5 s: a busy machine seldom stands still for so long.
const ANNOUNCE: &str = "election: keepalived, groups: 2, advertisement: 500ms";
const KEYS: [&str; 2] = ["AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=", "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI="];

/// Two gateways with these keys, an index each, that tell flows older than 300 ms.
fn replicating(test: &str, name: &str, keys: [usize; 2]) -> Option<Pair> {
    replicating_after("300ms", test, name, keys)
}

fn replicating_after(age: &str, test: &str, name: &str, keys: [usize; 2]) -> Option<Pair> {
    let lines = |n: usize| {
        let (own, other) = (n + 2, 3 - n);
        format!(
            "snat: {{addresses: [192.0.2.20, 192.0.2.21]}}\nmetrics: {{listen: \"127.0.0.1:9435\"}}\n\
             fleet: {{listen: \"192.0.2.{own}:9437\", replicate: {age}, partners: [\"192.0.2.{other}:9437\"], key: fleet.key}}\n"
        )
    };
    let pair = Pair::with_lines(test, name, ANNOUNCE, lines)?;
    for (n, key) in keys.into_iter().enumerate() {
        write_keys(&pair, n, &[key]);
    }
    Some(pair)
}

/// Gives a gateway a file with these keys, an index each.
fn write_keys(pair: &Pair, n: usize, keys: &[usize]) {
    let path = pair.path(n, "fleet.key");
    fs::write(&path, keys.iter().map(|key| format!("{}\n", KEYS[*key])).collect::<String>()).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// The same while it runs.
fn reload_keys(pair: &Pair, n: usize, keys: &[usize]) {
    let reloads = || pair.log(n).matches("in effect: fleet.key").count();
    let before = reloads();
    write_keys(pair, n, keys);
    pair.signal(n, Signal::HUP);
    until("the keys are in effect", || (reloads() > before).then_some(()));
}

/// The value of a metric of a gateway; `None` while it does not answer.
fn metric(pair: &Pair, n: usize, series: &str) -> Option<f64> {
    let text = pair.run(&format!("gw{n}"), &["curl", "-s", "http://127.0.0.1:9435/metrics"]);
    let line = text.lines().find(|line| line.strip_prefix(series).is_some_and(|rest| rest.starts_with(' ')))?;
    line.rsplit(' ').next()?.parse().ok()
}

fn is(pair: &Pair, n: usize, series: &str, value: f64) -> bool {
    metric(pair, n, series) == Some(value)
}

/// The metric that says whether the other gateway has the flows of this one.
fn partner_of(n: usize) -> String {
    format!("sluice_partner_in_sync{{partner=\"192.0.2.{}:9437\"}}", 3 - n)
}

/// Whether each gateway has the flows of the other.
fn in_sync(pair: &Pair) -> Option<()> {
    let has_all = |n| is(pair, n, &partner_of(n), 1.0) && is(pair, n, "sluice_fleet_followed_partners", 1.0);
    (has_all(0) && has_all(1)).then_some(())
}

fn nft(pair: &Pair, n: usize, command: &str) {
    pair.run(&format!("gw{n}"), &[&["nft"][..], &command.split(' ').collect::<Vec<_>>()].concat());
}

/// Lets a firewall of a gateway drop datagrams of its partner: all, or those of a rule of nftables that ends in `drop`.
fn drop_datagrams(pair: &Pair, n: usize, rule: &str) {
    nft(pair, n, "add table inet test");
    nft(pair, n, "add chain inet test in { type filter hook input priority 0 ; }");
    nft(pair, n, &format!("add rule inet test in udp dport 9437 {rule}"));
}

/// Takes that firewall away.
fn pass_datagrams(pair: &Pair, n: usize) {
    nft(pair, n, "delete table inet test");
}

#[test]
fn partners_follow_each_other_again_after_a_crash_and_after_a_firewall_dropped_their_datagrams() {
    let Some(mut pair) = replicating("partners that replicate flows", "repl", [0, 0]) else { return };
    pair.spawn(0);
    pair.spawn(1);
    until("both gateways are in sync", || in_sync(&pair));
    assert!(pair.log(0).contains("a partner follows the flows of this gateway"), "{}", pair.log(0));

    pair.kill(1);
    until("the partner is away", || is(&pair, 0, &partner_of(0), 0.0).then_some(()));
    until("it is not followed", || is(&pair, 0, "sluice_fleet_followed_partners", 0.0).then_some(()));
    pair.spawn(1);
    until("both gateways are in sync again", || in_sync(&pair));

    drop_datagrams(&pair, 0, "drop");
    until("the log names the cause", || pair.log(0).contains("nothing arrived by UDP for 1000 ms").then_some(()));
    until("the partner is not in sync", || is(&pair, 0, &partner_of(0), 0.0).then_some(()));
    pass_datagrams(&pair, 0);
    until("both gateways are in sync once it is gone", || in_sync(&pair));
    assert!(!pair.log(0).contains(KEYS[0]) && !pair.log(0).contains("[1, 1, 1"), "the key is in the log");
}

#[test]
fn a_partner_with_another_key_is_refused_by_name() {
    let Some(mut pair) = replicating("partners with different keys", "rkey", [0, 1]) else { return };
    pair.spawn(0);
    pair.spawn(1);
    for n in 0..2 {
        until("the dialling side names the cause", || pair.log(n).contains("it refused: it has another key").then_some(()));
        until("so does the other side", || pair.log(n).contains("a connection to `fleet.listen` was refused").then_some(()));
        assert!(pair.log(n).contains("give all gateways of the group the same `fleet.key`"), "{}", pair.log(n));
        until("nobody is in sync", || is(&pair, n, &partner_of(n), 0.0).then_some(()));
    }
}

#[test]
fn a_pair_changes_its_key_while_it_replicates_and_refuses_the_old_one() {
    const CONNECTIONS: usize = 64;
    let Some(mut pair) = replicating("partners that change their key", "rchange", [0, 0]) else { return };
    pair.spawn(0);
    pair.spawn(1);
    until("both gateways are in sync", || in_sync(&pair));
    let refused = |n| pair.log(n).contains("it has another key");
    reload_keys(&pair, 0, &[1, 0]);
    reload_keys(&pair, 1, &[1, 0]);
    let withdrawn = "the key by which the session began is no longer in `fleet.key`";
    assert!(![0, 1].iter().any(|n| pair.log(*n).contains(withdrawn)), "{}", pair.log(0));
    for n in 0..2 {
        reload_keys(&pair, n, &[1]);
        until("both gateways are in sync by a key that both have", || in_sync(&pair));
    }
    assert!([0, 1].iter().any(|n| pair.log(*n).contains(withdrawn)), "{}", pair.log(0));
    until("no group of VIPs moves any more", || pair.has_settled(2));
    let clients = Clients::start(&pair, CONNECTIONS);
    until("each connection has a shadow flow", || have_shadows(&pair, CONNECTIONS));
    assert!(!refused(0) && !refused(1), "{}", pair.log(0));
    reload_keys(&pair, 0, &[0]);
    until("the old key alone is refused", || (refused(0) && refused(1)).then_some(()));
    until("nobody is in sync", || is(&pair, 0, &partner_of(0), 0.0).then_some(()));
    assert_eq!(clients.counts().1, 0, "broken connections");
}

/// Clients that keep connections to all VIPs.
struct Clients {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Clients {
    fn start(pair: &Pair, connections: usize) -> Self {
        let script = format!("{}/tests/edge/keep_alive.py", env!("CARGO_MANIFEST_DIR"));
        let (count, vips) = (connections.to_string(), (100..100 + VIPS).map(|n| format!("192.0.2.{n}")).collect::<Vec<_>>());
        let mut command = vec!["python3", &script, &count];
        command.extend(vips.iter().map(String::as_str));
        let mut child = pair.start_client(&command);
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let all = Arc::clone(&lines);
        std::thread::spawn(move || output.map_while(Result::ok).for_each(|line| all.lock().unwrap().push(line)));
        let clients = Self { child, lines };
        until("every connection has an answer", || {
            clients.lines.lock().unwrap().iter().any(|line| line == "ready").then_some(())
        });
        clients
    }

    /// Answers so far, and broken connections.
    fn counts(&self) -> (u64, u64) {
        let lines = self.lines.lock().unwrap();
        let numbers = |line: &String| {
            let (answers, broken) = line.split_once(' ')?;
            Some((answers.parse().ok()?, broken.parse().ok()?))
        };
        lines.iter().rev().find_map(numbers).unwrap_or_default()
    }

    /// Waits until each connection has had several more answers on average.
    fn go_on(&self, connections: u64, when: &str) {
        let before = self.counts().0;
        until(&format!("the connections go on {when}"), || (self.counts().0 > before + 20 * connections).then_some(()));
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether the gateways keep shadow flows of so many connections.
fn have_shadows(pair: &Pair, connections: usize) -> Option<()> {
    let shadows = |n| metric(pair, n, "sluice_shadow_flows").unwrap_or_default();
    (shadows(0) + shadows(1) >= connections as f64).then_some(())
}

#[test]
fn connections_survive_the_death_of_their_gateway() {
    const CONNECTIONS: usize = 64;
    let Some(mut pair) = replicating("connections that survive their gateway", "rlive", [0, 0]) else { return };
    pair.spawn(0);
    pair.spawn(1);
    until("both gateways are in sync", || in_sync(&pair));
    until("no group of VIPs moves any more", || pair.has_settled(2));
    let clients = Clients::start(&pair, CONNECTIONS);
    until("each connection has a shadow flow", || have_shadows(&pair, CONNECTIONS));
    assert_eq!(clients.counts().1, 0);

    // A third of the datagrams is lost: the batches are repaired.
    drop_datagrams(&pair, 1, "numgen random mod 3 == 0 drop");
    drop(Clients::start(&pair, CONNECTIONS));
    let repaired =
        || (0..2).filter_map(|n| metric(&pair, n, "sluice_flow_replica_batches_total{outcome=\"repaired\"}")).sum::<f64>();
    until("batches are repaired", || (repaired() > 0.0).then_some(()));
    pass_datagrams(&pair, 1);
    until("both gateways are in sync", || in_sync(&pair));

    pair.kill(0);
    clients.go_on(CONNECTIONS as u64, "by the other gateway");
    assert_eq!(clients.counts().1, 0, "broken connections");
    pair.spawn(0);
    until("both gateways are in sync again", || in_sync(&pair));
    until("each connection has a shadow flow again", || have_shadows(&pair, CONNECTIONS));
    pair.kill(1);
    clients.go_on(CONNECTIONS as u64, "by the gateway that has returned");
    assert_eq!(clients.counts().1, 0, "broken connections");
}

/// Two gateways in sync with connections that they have not told each other, and the index of the one that will end: it
/// owns most VIPs.
fn with_young_connections(name: &str, connections: usize) -> Option<(Pair, Clients, usize)> {
    let mut pair = replicating_after("60s", "young connections that survive", name, [0, 0])?;
    pair.spawn(0);
    pair.spawn(1);
    until("both gateways are in sync", || in_sync(&pair));
    until("no group of VIPs moves any more", || pair.has_settled(2));
    let clients = Clients::start(&pair, connections);
    let owners = pair.watch.owners();
    let owned_by = |n: &usize| owners.values().filter(|macs| macs.contains(&Pair::mac(*n))).count();
    Some((pair, clients, (0..2).max_by_key(owned_by).unwrap()))
}

#[test]
fn connections_that_partners_were_not_told_survive_a_gateway_that_ends() {
    const CONNECTIONS: usize = 64;
    let applied = |pair: &Pair, n| metric(pair, n, "sluice_flow_replicas_total{outcome=\"applied\"}");
    let mut tried = 0;
    let (mut pair, clients, ends) = loop {
        let Some(found) = with_young_connections("ryoung", CONNECTIONS) else { return };
        // A group that moves because the machine is busy takes its flows along: such a run shows nothing.
        if [0, 1].map(|n| applied(&found.0, n)) == [Some(0.0); 2] {
            break found;
        }
        tried += 1;
        assert!(tried < 5, "none is old enough to be told");
    };
    assert_eq!(pair.stop(ends), Some(0), "{}", pair.log(ends));
    clients.go_on(CONNECTIONS as u64, "by the other gateway");
    assert_eq!(clients.counts().1, 0, "broken connections");
    assert!(applied(&pair, 1 - ends).unwrap() > 0.0);
}

#[test]
fn a_gateway_that_ends_waits_for_a_partner_whose_session_breaks() {
    const CONNECTIONS: usize = 64;
    let Some((mut pair, clients, ends)) = with_young_connections("rbreak", CONNECTIONS) else { return };
    // The partner hears nothing of what the gateway tells when it loses its VIPs. Sessions break after a second; those that
    // begin again have a copy by TCP.
    drop_datagrams(&pair, 1 - ends, "drop");
    let since = Instant::now();
    assert_eq!(pair.stop(ends), Some(0), "{}", pair.log(ends));
    clients.go_on(CONNECTIONS as u64, "by the other gateway");
    // A partner takes flows for 2 s, and the gateway waits for 3 s: a machine that stands still may need longer.
    let (broken, is_stalled) = (clients.counts().1, pair.was_stalled_since(since));
    assert!(broken == 0 || is_stalled, "{broken} broken connections; the log:\n{}", pair.log(ends));
}
