//! Two gateways on one bridge that share the VIPs of an `l2` pool: real keepalived elects the owners, and a client counts
//! who answers its ARP requests.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod pair;

use std::collections::BTreeSet;
use std::fs;

use pair::{Pair, VIPS, until};
use rustix::process::Signal;

/// Every VIP is answered by one gateway, which has decided to keep it.
fn settled(pair: &Pair) -> Option<()> {
    let owners = pair.watch.owners();
    let keeps = |n: usize| {
        let files = (0..16).map(|group| pair.path(n, &format!("state/keepalived/group-{group}")));
        files.filter(|file| fs::read_to_string(file).is_ok_and(|text| text.trim() == "50")).count()
    };
    let have_one = owners.len() == VIPS && owners.values().all(|macs| macs.len() == 1);
    (have_one && (0..2).all(|n| owned(pair, n) == 0 || owned(pair, n) == keeps(n))).then_some(())
}

/// VIPs that only this gateway answers for.
fn owned(pair: &Pair, n: usize) -> usize {
    pair.watch.owners().values().filter(|macs| **macs == BTreeSet::from([Pair::mac(n)])).count()
}

fn owns_all(pair: &Pair, n: usize, why: &str) {
    until(&format!("gateway {n} answers for all VIPs: {why}"), || (owned(pair, n) == VIPS).then_some(()));
}

#[test]
fn two_gateways_share_the_vips_and_each_takes_those_of_the_other_when_it_fails() {
    let Some(mut pair) = Pair::new("two gateways with an election", "vrrp", "election: keepalived, advertisement: 200ms") else {
        return;
    };
    pair.spawn(0);
    pair.spawn(1);
    until("each VIP has one owner, which keeps it", || settled(&pair));
    let shares = [owned(&pair, 0), owned(&pair, 1)];
    assert!(shares[0] > 0 && shares[1] > 0 && shares[0] + shares[1] == VIPS, "{shares:?}");

    // Each knows what it owns.
    for n in 0..2 {
        until("the gateway lists its groups", || (pair.field(n, "groups_owned") == owned(&pair, n)).then_some(()));
        let answered = pair.listed(n, "vips").iter().filter(|row| row["gateways"][0] == format!("edge-{n}")).count();
        assert_eq!((answered, pair.field(n, "groups")), (owned(&pair, n), 16.into()));
    }

    // Draining gives all VIPs away, and the end of the drain takes none back.
    pair.drain(0, true);
    owns_all(&pair, 1, "the other is drained");
    until("it says why", || (pair.field(0, "unfit") == "it is drained").then_some(()));
    until("the new owner keeps them", || settled(&pair));
    pair.drain(0, false);

    // A gateway that was stopped never answers with what it owned before.
    pair.signal(1, Signal::STOP);
    owns_all(&pair, 0, "the other is stopped");
    until("the new owner keeps them", || settled(&pair));
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
    until("the new owner keeps them", || settled(&pair));

    // kill -9, and a new start, which takes nothing back.
    let takeovers = pair.field(0, "takeovers").as_u64().unwrap();
    pair.kill(1);
    owns_all(&pair, 0, "the other was killed");
    until("the takeovers are counted", || (pair.field(0, "takeovers").as_u64().unwrap() >= takeovers + 16).then_some(()));
    assert_eq!(pair.field(0, "groups_owned"), VIPS);
    until("and are an Event", || pair.has_event(0, "TookOver").then_some(()));
    until("the new owner keeps them", || settled(&pair));
    pair.spawn(1);
    until("it has joined the election", || pair.has_joined(1).then_some(()));
    assert_eq!(owned(&pair, 0), VIPS, "the VIPs stay where they are");

    // An orderly end hands the VIPs over before it.
    assert_eq!(pair.stop(0), Some(0), "{}", pair.log(0));
    owns_all(&pair, 1, "the other has ended");
    assert!(!pair.log(0).contains("no other gateway has taken"), "{}", pair.log(0));
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
        until("both take part, and every VIP is kept", || settled(&pair).filter(|()| pair.has_joined(0) && pair.has_joined(1)));
        let victim = usize::from(owned(&pair, 1) > owned(&pair, 0));
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
