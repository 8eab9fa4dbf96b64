//! Claims over time: which Service gets which address, and the notes for the others.

use std::sync::Arc;

use kube::core::Selector;
use proto::Protocol;

use objects::{Namespaces, Sharing};

use super::*;
use crate::config::settings::ControllerSettings;
use crate::plan::forbidden::Forbidden;
use crate::plan::forbidden::tests::forbidden;
use crate::plan::tests::settings;
use objects::NodeSpec;

mod families;
mod figures;

/// The pools of a configuration.
pub(crate) fn pools(specs: &[PoolSpec]) -> Pools {
    Pools::of(&ControllerSettings { pools: specs.to_vec(), ..settings() }, &BTreeMap::new())
}

/// A Service on TCP port 80.
pub(super) fn claim(name: &str, created_s: i64) -> Claim {
    Claim {
        created_s: Some(created_s),
        families: vec![Family::V4],
        ports: vec![(Protocol::Tcp, 80)],
        ..Claim::new(ServiceName::new("shop", name))
    }
}

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn pool(name: &str, ranges: &[&str]) -> PoolSpec {
    PoolSpec::new(name, ranges.iter().map(|range| range.parse().unwrap()).collect())
}

pub(super) fn held(outcome: &Allocation) -> Vec<IpAddr> {
    outcome.addresses().collect()
}

/// A controller's view, with a pool of three addresses.
pub(super) struct Lab {
    pub(super) pools: Pools,
    pub(super) forbidden: Forbidden,
    pub(super) reached: Option<u64>,
    pub(super) now: Instant,
    pub(super) all: Allocations,
    outcomes: BTreeMap<ServiceName, Allocation>,
}

impl Lab {
    pub(super) fn new(specs: &[PoolSpec]) -> Self {
        let (forbidden, all, outcomes) = (Forbidden::default(), Allocations::default(), BTreeMap::new());
        Self { pools: pools(specs), forbidden, reached: None, now: Instant::now(), all, outcomes }
    }

    pub(super) fn small() -> Self {
        Self::new(&[pool("default", &["192.0.2.100-192.0.2.102"])])
    }

    fn assign(&mut self, claims: &[Claim]) -> &mut Self {
        let rules = Rules { pools: &self.pools, forbidden: &self.forbidden, reached: self.reached, absent: &[], now: self.now };
        self.outcomes = self.all.assign(claims, rules);
        self
    }

    fn account(&mut self, absent: &[AbsentGateway]) -> Vec<PoolUse> {
        let rules = Rules { pools: &self.pools, forbidden: &self.forbidden, reached: self.reached, absent, now: self.now };
        self.all.account(rules)
    }

    fn of(&self, name: &str) -> &Allocation {
        self.outcomes.iter().find(|(service, _)| service.name == name).map(|(_, outcome)| outcome).unwrap()
    }

    /// The last number of its IPv4 address, or the reason why it has none.
    fn got(&self, name: &str) -> String {
        let outcome = self.of(name);
        match (&held(outcome)[..], outcome.refusal()) {
            ([IpAddr::V4(address), ..], None) => address.octets()[3].to_string(),
            (_, Some(refusal)) => refusal.reason.to_string(),
            other => panic!("{other:?}"),
        }
    }

    fn why(&self, name: &str) -> String {
        self.of(name).refusal().unwrap().message.clone()
    }
}

fn sharing(claim: Claim, key: &str, port: u16) -> Claim {
    let terms = Sharing { key: key.to_owned(), is_metallb: false, namespaces: Namespaces::Named([].into()) };
    Claim { sharing: Some(terms), ports: vec![(Protocol::Tcp, port)], ..claim }
}

fn asking(claim: Claim, address: &str) -> Claim {
    Claim { requested: vec![ip(address)], ..claim }
}

fn holding(claim: Claim, address: &str) -> Claim {
    Claim { in_status: vec![ip(address)], status_is_ours: true, ..claim }
}

#[test]
fn at_start_addresses_in_statuses_come_first_then_requests_then_the_rest_by_age() {
    let mut lab = Lab::small();
    let requesting = asking(claim("requesting", 3), "192.0.2.101");
    let held = Claim { in_status: vec![ip("192.0.2.100")], ..claim("holding", 9) };
    lab.assign(&[claim("oldest", 1), requesting, held, claim("young", 5)]);
    assert_eq!(["holding", "requesting", "oldest", "young"].map(|name| lab.got(name)), ["100", "101", "102", "Exhausted"]);
}

#[test]
fn of_two_services_that_claim_one_address_the_older_gets_it_and_the_other_gets_the_reason() {
    let mut lab = Lab::small();
    lab.assign(&[asking(claim("younger", 2), "192.0.2.100"), asking(claim("older", 1), "192.0.2.100")]);
    assert_eq!(["older", "younger"].map(|name| lab.got(name)), ["100", "Conflict"]);
    assert!(lab.why("younger").contains("held by shop/older"), "{}", lab.why("younger"));
    let mut lab = Lab::small();
    lab.assign(&[holding(claim("younger", 2), "192.0.2.100"), holding(claim("older", 1), "192.0.2.100")]);
    assert_eq!(["older", "younger"].map(|name| lab.got(name)), ["100", "101"]);
    assert_eq!(lab.of("younger").notes[0].cause, Cause::AddressLost);
}

#[test]
fn a_freed_address_waits_ten_minutes_for_the_same_name() {
    let mut lab = Lab::small();
    let first = lab.assign(&[claim("a", 1)]).got("a");
    lab.assign(&[]).now += FREED_ADDRESS_KEPT / 2;
    assert_ne!(lab.assign(&[claim("b", 2)]).got("b"), first);
    assert_eq!(lab.assign(&[claim("b", 2), claim("a", 5)]).got("a"), first);
    lab.assign(&[claim("b", 2)]).now += FREED_ADDRESS_KEPT;
    assert_eq!(lab.assign(&[claim("b", 2), claim("d", 4)]).got("d"), first);
}

#[test]
fn if_nothing_else_is_free_the_reserved_address_that_was_freed_first_is_used() {
    let mut lab = Lab::small();
    lab.assign(&[claim("a", 1), claim("b", 2), claim("c", 3)]);
    // b goes first, then c, then a.
    for left in [&[claim("a", 1), claim("c", 3)][..], &[claim("a", 1)], &[]] {
        lab.assign(left).now += Duration::from_secs(1);
    }
    lab.assign(&[claim("d", 4)]);
    assert_eq!(lab.got("d"), "101");
    lab.assign(&[claim("d", 4), claim("e", 5), claim("f", 6), claim("g", 7)]);
    assert_eq!(["d", "e", "f", "g"].map(|name| lab.got(name)), ["101", "102", "100", "Exhausted"]);
    // A Service that returns too late gets another address.
    lab.assign(&[claim("b", 8), claim("d", 4), claim("e", 5)]);
    assert_eq!(lab.got("b"), "100");
}

#[test]
fn no_other_service_gets_a_freed_address_before_every_gateway_has_removed_it() {
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100"])]);
    lab.assign(&[claim("a", 1)]);
    lab.assign(&[]).all.published(7);
    lab.reached = Some(6);
    assert_eq!(lab.assign(&[claim("b", 2)]).got("b"), "Exhausted");
    assert!(lab.why("b").contains("that gateways may still forward for their former Services"), "{}", lab.why("b"));
    assert!(lab.all.waits_for_gateways(lab.now) && lab.all.next_expiry(lab.now).is_some());
    lab.now += FREED_ADDRESS_KEPT;
    assert_eq!(lab.assign(&[claim("b", 2)]).got("b"), "Exhausted");
    assert!(lab.all.waits_for_gateways(lab.now));
    lab.reached = Some(7);
    assert_eq!(lab.assign(&[claim("b", 2)]).got("b"), "100");
    // Without any gateway there is nothing to wait for; a Service of the same name never waits.
    lab.assign(&[]);
    assert_eq!(lab.assign(&[claim("b", 2)]).got("b"), "100");
    lab.assign(&[]);
    lab.reached = None;
    assert_eq!(lab.assign(&[claim("c", 2)]).got("c"), "100");
}

#[test]
fn a_waiting_service_gets_an_address_at_the_next_expiry() {
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100"])]);
    lab.reached = Some(1);
    lab.assign(&[claim("a", 1)]);
    assert_eq!(lab.assign(&[claim("b", 2)]).got("b"), "Exhausted");
    lab.all.published(1);
    lab.now = lab.all.next_expiry(lab.now).unwrap();
    assert_eq!(lab.assign(&[claim("b", 2)]).got("b"), "100");
}

#[test]
fn a_pool_edit_renumbers_no_service_and_adds_a_note() {
    let mut lab = Lab::small();
    lab.assign(&[claim("a", 1)]);
    lab.all.outside(&lab.pools, &[]);
    lab.pools = pools(&[pool("default", &["198.51.100.0/28"])]);
    assert_eq!(lab.assign(&[claim("a", 1)]).got("a"), "100");
    assert_eq!(lab.of("a").notes[0].cause, Cause::Reason(Reason::OutsidePools));
    assert_eq!(lab.all.outside(&lab.pools, &[]), [(ip("192.0.2.100"), Some(Arc::default()))]);
    lab.pools = pools(&[]);
    assert_eq!(lab.assign(&[claim("a", 1)]).got("a"), "100");
    let mut closed = pool("default", &["192.0.2.100-192.0.2.102"]);
    (closed.auto_assign, closed.max_per_namespace, closed.avoid_buggy_ips) = (false, Some(1), true);
    lab.pools = pools(&[closed]);
    assert_eq!(lab.assign(&[claim("a", 1), claim("b", 2)]).got("a"), "100");
    assert_eq!(lab.got("b"), "Exhausted");
}

#[test]
fn a_status_outside_the_pools_counts_only_if_we_wrote_it() {
    let mut lab = Lab::small();
    let foreign = Claim { in_status: vec![ip("203.0.113.1")], ..claim("foreign", 1) };
    lab.assign(&[foreign, holding(claim("ours", 2), "203.0.113.2")]);
    assert_eq!(held(lab.of("foreign")), [ip("192.0.2.100")]);
    assert_eq!(held(lab.of("ours")), [ip("203.0.113.2")]);
}

#[test]
fn a_foreign_status_counts_only_if_a_pool_would_give_that_address_now() {
    let mut closed = pool("closed", &["192.0.2.110"]);
    closed.namespaces = [("team".to_owned(), "a".to_owned())].into_iter().collect();
    let specs = [pool("default", &["192.0.2.100-192.0.2.105"]), closed];
    let node = NodeSpec { name: "worker".to_owned(), all_addresses: vec![ip("192.0.2.101")], ..NodeSpec::default() };
    let forbidden = forbidden(&["192.0.2.103"], &["192.0.2.102"], &[node], &["10.0.0.0/8"]);
    let rows = [
        ("192.0.2.105", true, None),
        ("198.18.0.1", false, Some("\"kubectl\" wrote it there, and it lies in no pool")),
        ("192.0.2.110", false, Some("pool closed is for namespaces")),
        ("127.0.0.1", false, Some("127.0.0.0/8, where no client can reach it")),
        ("169.254.1.1", false, Some("169.254.0.0/16")),
        ("192.0.2.101", false, Some("address of node worker")),
        ("192.0.2.102", false, Some("address of gateway edge-2")),
        ("192.0.2.103", false, Some("address of the gateway itself")),
        ("10.1.1.1", false, Some("10.0.0.0/8 of clusterCIDRs")),
    ];
    for (address, is_kept, why) in rows {
        let mut lab = Lab::new(&specs);
        lab.forbidden = forbidden.clone();
        let writer = Some("kubectl".to_owned());
        lab.assign(&[Claim { in_status: vec![ip(address)], status_writer: writer, ..claim("a", 1) }]);
        let got = lab.of("a");
        assert_eq!(held(got), [ip(if is_kept { address } else { "192.0.2.100" })], "{address}");
        let warning = got.notes.iter().find(|note| note.cause == Cause::AddressLost).map(|note| note.text.as_str());
        assert_eq!(warning.is_some(), why.is_some(), "{address}: {warning:?}");
        assert!(warning.is_none_or(|warning| warning.contains(why.unwrap())), "{address}: {warning:?}");
    }
    // An address that we wrote counts outside the pools too, but an unreachable or forbidden one never does.
    for (address, is_kept) in [("198.18.0.1", true), ("192.0.2.110", true), ("127.0.0.1", false), ("192.0.2.102", false)] {
        let mut lab = Lab::new(&specs);
        lab.forbidden = forbidden.clone();
        lab.assign(&[holding(claim("a", 1), address)]);
        assert_eq!(held(lab.of("a")) == [ip(address)], is_kept, "{address}");
    }
    // One that the checkpoint confirms was served before a node or gateway had it.
    for address in ["192.0.2.101", "192.0.2.102", "10.1.1.1"] {
        for in_status in [vec![ip(address)], Vec::new()] {
            let mut lab = Lab::new(&specs);
            lab.forbidden = forbidden.clone();
            lab.assign(&[Claim { in_status, status_is_ours: true, recalled: vec![ip(address)], ..claim("a", 1) }]);
            assert_eq!(held(lab.of("a")), [ip(address)]);
            assert!(lab.of("a").notes.iter().any(|note| note.text.contains("may not work")), "{:?}", lab.of("a").notes);
        }
    }
}

#[test]
fn an_address_that_we_wrote_stays_with_its_holder_although_an_older_service_has_it_in_its_status() {
    let mut lab = Lab::small();
    let older = Claim { in_status: vec![ip("192.0.2.100")], ..claim("older", 1) };
    lab.assign(&[older, holding(claim("holder", 2), "192.0.2.100")]);
    assert_eq!(["older", "holder"].map(|name| lab.got(name)), ["101", "100"]);
    assert!(lab.of("older").notes[0].text.contains("is not taken over: held by shop/holder"), "{:?}", lab.of("older"));
    assert!(lab.of("holder").notes.is_empty());
}

#[test]
fn a_service_that_requests_another_pool_keeps_its_address_with_a_note_until_it_requests_the_exchange() {
    let mut lab = Lab::new(&[pool("one", &["192.0.2.100"]), pool("two", &["192.0.2.200"])]);
    lab.assign(&[claim("a", 1)]);
    let elsewhere = Claim { pool: Some("two".to_owned()), ..claim("a", 1) };
    lab.assign(std::slice::from_ref(&elsewhere));
    assert_eq!(lab.got("a"), "100");
    let note = lab.of("a").notes[0].clone();
    assert_eq!(note.cause, Cause::Reason(Reason::OutsidePools));
    assert!(note.text.contains("lies in pool one, and pool two is asked for") && note.text.contains("sluice.dev/readdress"));
    let moving = Claim { readdress: true, ..elsewhere };
    // While no other address is available, it keeps its address.
    lab.assign(&[moving.clone(), asking(claim("b", 2), "192.0.2.200")]);
    assert_eq!(["a", "b"].map(|name| lab.got(name)), ["100", "200"]);
    assert!(lab.of("a").notes[0].text.contains("no IPv4 address is left (pool two)"), "{:?}", lab.of("a"));
    lab.assign(std::slice::from_ref(&moving));
    assert_eq!(lab.got("a"), "200");
    assert!(lab.assign(&[moving]).of("a").notes.is_empty());
    assert_eq!(lab.got("a"), "200");
    // The same applies if the pool was deleted.
    lab.pools = pools(&[pool("one", &["192.0.2.100"])]);
    assert_eq!(lab.assign(&[claim("a", 1)]).got("a"), "200");
    assert_eq!(lab.assign(&[Claim { readdress: true, ..claim("a", 1) }]).got("a"), "100");
}

#[test]
fn an_internal_service_gets_an_address_of_an_internal_pool_or_none() {
    let internal = |claim: Claim| Claim { internal: true, ..claim };
    let mut lab = Lab::new(&[pool("open", &["192.0.2.100-192.0.2.102"])]);
    lab.assign(&[internal(claim("a", 1)), internal(asking(claim("b", 2), "192.0.2.101"))]);
    assert_eq!(["a", "b"].map(|name| lab.got(name)), ["Refused", "Refused"]);
    assert!(lab.why("a").contains("an internal load balancer is asked for, and pool open is not marked internal"));
    let mut inside = pool("inside", &["192.0.2.200-192.0.2.202"]);
    (inside.internal, inside.priority) = (true, 1);
    lab.pools = pools(&[pool("open", &["192.0.2.100-192.0.2.102"]), inside]);
    let asked = Claim { pool: Some("inside".to_owned()), ..claim("d", 4) };
    lab.assign(&[internal(claim("a", 1)), claim("c", 3), asked]);
    assert_eq!(["a", "c", "d"].map(|name| lab.got(name)), ["200", "100", "201"]);
    // Once it requests an internal address, it is not served at a public one.
    lab.assign(&[internal(claim("c", 3))]);
    assert!(lab.of("c").refusal.is_some() && lab.why("c").contains("sluice.dev/readdress"), "{:?}", lab.of("c"));
    assert_eq!(lab.assign(&[internal(Claim { readdress: true, ..claim("c", 3) })]).got("c"), "202");
}

#[test]
fn a_request_that_cannot_be_met_is_refused_with_the_reason() {
    let mut closed = pool("closed", &["192.0.2.103"]);
    closed.namespaces = [("team".to_owned(), "a".to_owned())].into_iter().collect();
    let mut clean = pool("clean", &["198.51.100.0/24"]);
    clean.avoid_buggy_ips = true;
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100-192.0.2.102"]), closed, clean]);
    let node = NodeSpec { name: "worker".to_owned(), all_addresses: vec![ip("192.0.2.101")], ..NodeSpec::default() };
    lab.forbidden = forbidden(&["192.0.2.102"], &["192.0.2.100"], &[node], &["10.0.0.0/8"]);
    let rows = [
        ("203.0.113.1", "OutsidePools", "lies in no pool; ask for one of pool default"),
        ("192.0.2.102", "Refused", "address of the gateway itself"),
        ("192.0.2.100", "Refused", "address of gateway edge-2"),
        ("192.0.2.101", "Refused", "address of node worker"),
        ("10.1.1.1", "Refused", "10.0.0.0/8 of clusterCIDRs"),
        ("192.0.2.103", "Refused", "pool closed is for namespaces with team=a, and shop is none of them"),
        ("198.51.100.0", "Refused", "end in .0 or .255"),
        ("198.51.100.255", "Refused", "end in .0 or .255"),
    ];
    for (address, reason, why) in rows {
        lab.assign(&[asking(claim("a", 1), address)]);
        assert_eq!(lab.got("a"), reason, "{address}");
        assert!(held(lab.of("a")).is_empty() && lab.why("a").contains(why), "{address}: {}", lab.why("a"));
    }
    for (named, why) in [("nowhere", "does not exist"), ("closed", "is for namespaces with team=a")] {
        lab.assign(&[Claim { pool: Some(named.to_owned()), ..claim("a", 1) }]);
        assert!(lab.got("a") == "Refused" && lab.why("a").contains(why), "{named}: {}", lab.why("a"));
    }
    // The three addresses of `default` belong to gateways and a node, so none of them is allocated.
    lab.assign(&[Claim { pool: Some("default".to_owned()), ..claim("a", 1) }]);
    assert_eq!(lab.got("a"), "Exhausted");
}

#[test]
fn a_changed_request_moves_the_service_if_possible() {
    let mut lab = Lab::small();
    lab.assign(&[claim("a", 1), claim("b", 2)]);
    lab.assign(&[asking(claim("a", 1), "192.0.2.101"), claim("b", 2)]);
    assert_eq!(lab.got("a"), "100");
    assert!(lab.of("a").notes[0].text.contains("shop/b"), "{:?}", lab.of("a"));
    assert_eq!(lab.assign(&[asking(claim("a", 1), "192.0.2.102"), claim("b", 2)]).got("a"), "102");
}

#[test]
fn a_service_that_cannot_be_served_keeps_its_addresses_and_gets_no_new_ones() {
    let mut lab = Lab::small();
    lab.assign(&[claim("a", 1)]);
    let unreadable = |name| Claim { families: Vec::new(), ports: Vec::new(), ..claim(name, 1) };
    lab.assign(&[unreadable("a"), unreadable("b"), asking(claim("c", 2), "192.0.2.100")]);
    assert_eq!(held(lab.of("a")), [ip("192.0.2.100")]);
    assert!(held(lab.of("b")).is_empty());
    assert_eq!(lab.got("c"), "Conflict");
}

#[test]
fn pools_are_tried_by_priority_and_those_without_auto_assign_only_on_request() {
    let mut asked_only = pool("asked-only", &["192.0.2.1"]);
    (asked_only.auto_assign, asked_only.priority) = (false, 1);
    let mut second = pool("second", &["192.0.2.2"]);
    second.priority = 20;
    let mut first = pool("first", &["192.0.2.3"]);
    first.priority = 10;
    let mut lab = Lab::new(&[pool("last", &["192.0.2.4"]), asked_only, second, first]);
    let asked = Claim { pool: Some("asked-only".to_owned()), ..claim("e", 5) };
    lab.assign(&[claim("a", 1), claim("b", 2), claim("c", 3), claim("d", 4), asked]);
    assert_eq!(["a", "b", "c", "d", "e"].map(|name| lab.got(name)), ["3", "2", "4", "Exhausted", "1"]);
}

#[test]
fn selectors_limit_the_services_of_a_pool() {
    let labels = |pairs: &[(&str, &str)]| pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let mut teams = pool("team-a", &["192.0.2.1-192.0.2.9"]);
    teams.namespaces = [("team".to_owned(), "a".to_owned())].into_iter().collect();
    let mut public = pool("public", &["198.51.100.1-198.51.100.9"]);
    public.services = [("tier".to_owned(), "public".to_owned())].into_iter().collect();
    let mut lab = Lab::new(&[teams, public]);
    let of_team = Claim { namespace_labels: labels(&[("team", "a")]), ..claim("of-team", 1) };
    let public = Claim { labels: labels(&[("tier", "public")]), ..claim("public", 2) };
    lab.assign(&[of_team, public, claim("other", 3)]);
    assert_eq!(held(lab.of("of-team")), [ip("192.0.2.1")]);
    assert_eq!(held(lab.of("public")), [ip("198.51.100.1")]);
    assert!(lab.got("other") == "Refused" && lab.why("other").contains("pool team-a is for namespaces"), "{}", lab.why("other"));
}

#[test]
fn a_namespace_gets_no_more_than_its_limit_and_a_shared_address_counts_once() {
    let mut limited = pool("limited", &["192.0.2.1-192.0.2.9"]);
    limited.max_per_namespace = Some(2);
    let mut lab = Lab::new(&[limited]);
    let elsewhere = Claim { service: ServiceName::new("other", "d"), ..claim("d", 4) };
    lab.assign(&[sharing(claim("a", 1), "k", 80), claim("b", 2), claim("c", 3), elsewhere, sharing(claim("e", 5), "k", 443)]);
    assert_eq!(["a", "b", "c", "d", "e"].map(|name| lab.got(name)), ["1", "2", "Exhausted", "3", "1"]);
    assert!(
        lab.why("c").contains("namespace shop has reached its limit in pool limited (maxPerNamespace 2)"),
        "{}",
        lab.why("c")
    );
    lab.assign(&[sharing(claim("a", 1), "k", 80), asking(claim("b", 2), "192.0.2.7"), asking(claim("f", 6), "192.0.2.8")]);
    assert_eq!(["b", "f"].map(|name| lab.got(name)), ["7", "Exhausted"]);
}

#[test]
fn services_of_one_key_share_an_address_while_their_ports_differ() {
    let mut lab = Lab::small();
    let (web, tls) = (sharing(claim("web", 1), "k", 80), sharing(claim("tls", 2), "k", 443));
    let same_port = sharing(claim("same-port", 3), "k", 80);
    let udp = Claim { ports: vec![(Protocol::Udp, 80)], ..sharing(claim("udp", 4), "k", 0) };
    lab.assign(&[web.clone(), tls.clone(), same_port, udp, sharing(claim("other-key", 5), "l", 53), claim("no-key", 6)]);
    let got = ["web", "tls", "same-port", "udp", "other-key", "no-key"].map(|name| lab.got(name));
    assert_eq!(got, ["100", "100", "101", "100", "102", "Exhausted"]);
    // The remaining Service keeps the address, and the returning one gets it again.
    assert_eq!(lab.assign(std::slice::from_ref(&tls)).got("tls"), "100");
    assert_eq!(lab.assign(&[web, tls]).got("web"), "100");
}

#[test]
fn impossible_sharing_is_refused_with_the_conflict() {
    let holder = asking(sharing(claim("holder", 1), "k", 80), "192.0.2.100");
    let rows = [
        (claim("a", 2), "sharing needs the same sharing-key on both"),
        (sharing(claim("a", 2), "l", 443), "its sharing-key is \"k\", not \"l\""),
        (sharing(claim("a", 2), "k", 80), "which has tcp 80 of it, too"),
    ];
    for (other, why) in rows {
        let mut lab = Lab::small();
        lab.assign(&[holder.clone(), asking(other, "192.0.2.100")]);
        assert!(lab.got("a") == "Conflict" && lab.why("a").contains(why), "{}", lab.why("a"));
    }
}

#[test]
fn across_namespaces_every_sharer_names_the_others_or_metallbs_pool_allows_it() {
    let one = |name: &str, namespace: &str, port: u16, named: &str, is_metallb: bool| {
        let namespaces = match named {
            "*" => Namespaces::All,
            names => Namespaces::Named(names.split(',').map(str::to_owned).collect()),
        };
        let sharing = Some(Sharing { key: "k".to_owned(), is_metallb, namespaces });
        let service = ServiceName::new(namespace, name);
        let created = if name == "a" { 1 } else { 2 };
        Claim { service, sharing, ports: vec![(Protocol::Tcp, port)], requested: vec![ip("192.0.2.100")], ..claim(name, created) }
    };
    let rows = [
        (("blog", false), ("shop", false), false, true),
        (("*", false), ("shop,wiki", false), false, true),
        (("blog", false), ("", false), false, false),
        (("", false), ("shop", false), false, false),
        (("wiki", false), ("shop", false), false, false),
        (("", true), ("", true), true, true),
        (("", true), ("", true), false, false),
        (("", true), ("", false), true, false),
        (("", true), ("shop", false), true, true),
    ];
    for (first, second, pool_allows, expected) in rows {
        let mut default = pool("default", &["192.0.2.100-192.0.2.102"]);
        default.allow_cross_namespace_sharing = pool_allows;
        let mut lab = Lab::new(&[default]);
        lab.assign(&[one("a", "shop", 80, first.0, first.1), one("b", "blog", 443, second.0, second.1)]);
        assert_eq!(lab.got("a"), "100");
        assert_eq!(lab.got("b") == "100", expected, "{first:?} {second:?} {pool_allows}: {:?}", lab.of("b"));
        assert!(expected || lab.why("b").contains("sharing-namespaces"), "{}", lab.why("b"));
    }
}

#[test]
fn a_service_whose_new_ports_or_key_conflict_loses_the_address_and_no_other_service_moves() {
    let mut lab = Lab::small();
    let (older, younger) = (sharing(claim("older", 1), "k", 80), sharing(claim("younger", 2), "k", 443));
    lab.assign(&[older, younger.clone()]);
    let clashing = sharing(claim("older", 1), "k", 443);
    lab.assign(&[clashing, younger.clone()]);
    assert_eq!(["older", "younger"].map(|name| lab.got(name)), ["101", "100"]);
    assert!(lab.of("older").notes[0].text.contains("shop/younger, which has tcp 443"), "{:?}", lab.of("older"));
    let insisting = asking(claim("older", 1), "192.0.2.100");
    lab.assign(&[insisting, younger]);
    assert_eq!(["older", "younger"].map(|name| lab.got(name)), ["101", "100"]);
}

#[test]
fn after_a_restart_sharers_keep_their_address_even_one_that_cannot_be_parsed() {
    let at = |claim| holding(claim, "192.0.2.102");
    let unreadable = Claim { families: Vec::new(), ports: Vec::new(), ..at(claim("unreadable", 1)) };
    let mut lab = Lab::small();
    lab.assign(&[unreadable, at(sharing(claim("web", 2), "k", 80)), at(sharing(claim("tls", 3), "k", 443))]);
    assert_eq!(["unreadable", "web", "tls"].map(|name| lab.got(name)), ["102", "102", "102"]);
    let readable = at(sharing(claim("unreadable", 1), "k", 53));
    lab.assign(&[readable, at(sharing(claim("web", 2), "k", 80)), at(sharing(claim("tls", 3), "k", 443))]);
    assert_eq!(lab.got("unreadable"), "102");
}

impl Lab {
    /// The leader changes; the next one starts from these reservations.
    fn change_leader(&mut self, reserved: &[Reserved]) {
        self.all = Allocations::default();
        self.all.recall(reserved, self.now);
    }

    fn reserved(&self) -> Vec<Reserved> {
        self.all.reserved().1.iter().cloned().collect()
    }
}

#[test]
fn after_a_change_of_leader_a_service_keeps_an_address_that_another_sharer_freed() {
    let (web, tls) = (sharing(claim("web", 1), "k", 80), sharing(claim("tls", 2), "k", 443));
    let recalled = Claim { recalled: vec![ip("192.0.2.100")], ..tls.clone() };
    for successor in [holding(tls.clone(), "192.0.2.100"), recalled] {
        let mut lab = Lab::small();
        lab.assign(&[web.clone(), tls.clone()]).assign(std::slice::from_ref(&tls));
        let reserved = lab.reserved();
        assert_eq!(reserved.len(), 1, "the address is reserved for web");
        lab.change_leader(&reserved);
        assert_eq!(lab.assign(std::slice::from_ref(&successor)).got("tls"), "100");
        assert!(lab.of("tls").notes.is_empty(), "{:?}", lab.of("tls"));
        assert_eq!(lab.reserved(), reserved, "web may return");
        assert_eq!(lab.assign(&[web.clone(), successor]).got("web"), "100");
    }
}

#[test]
fn after_a_change_of_leader_a_service_keeps_a_reserved_address_that_the_checkpoint_does_not_name_yet() {
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100"])]);
    lab.assign(&[claim("a", 1)]).assign(&[]);
    let reserved = lab.reserved();
    assert_eq!(lab.assign(&[claim("b", 2)]).got("b"), "100", "nothing else is free");
    lab.change_leader(&reserved);
    // No gateway has applied a state of the new leader yet.
    lab.reached = Some(0);
    assert_eq!(lab.assign(&[holding(claim("b", 2), "192.0.2.100"), claim("a", 3)]).got("b"), "100");
    assert!(lab.of("b").notes.is_empty() && lab.got("a") == "Exhausted", "{:?}", lab.of("b"));
    // A reservation still counts against what another program wrote.
    lab.change_leader(&reserved);
    let foreign = Claim { in_status: vec![ip("192.0.2.100")], ..claim("c", 1) };
    lab.assign(&[foreign, claim("a", 3)]);
    assert!(lab.of("c").notes[0].text.contains("is reserved for shop/a"), "{:?}", lab.of("c"));
}

#[test]
fn of_four_thousand_services_created_deleted_and_created_again_those_of_a_full_pool_wait() {
    const COUNT: u16 = 4_000;
    let specs = [pool("full", &["192.0.2.1-192.0.2.2"]), pool("v6", &["2001:db8::/64"])];
    let claims: Vec<Claim> = (0..COUNT)
        .map(|n| {
            let families = if n % 2 == 0 { vec![Family::V6] } else { vec![Family::V4] };
            let shared = n % 4 < 2;
            let claim = Claim { families, ..claim(&format!("s{n}"), i64::from(n)) };
            if shared { sharing(claim, "k", n % 7) } else { claim }
        })
        .collect();
    let mut lab = Lab::new(&specs);
    for claims in [&claims[..], &claims, &[], &claims] {
        lab.assign(claims);
    }
    assert_eq!(lab.got(&format!("s{}", COUNT - 1)), "Exhausted");
    assert!(!held(lab.of(&format!("s{}", COUNT - 2))).is_empty());
}

mod conflicts {
    use serde_json::json;

    use super::*;
    use crate::config::settings::Source;
    use objects::crd::AddressPool;

    fn object(name: &str, created: &str, addresses: &[&str]) -> (String, AddressPool) {
        let pool = json!({"apiVersion": "sluice.dev/v1beta1", "kind": "AddressPool", "spec": {"addresses": addresses},
            "metadata": {"name": name, "creationTimestamp": format!("2026-01-01T00:00:{created}Z")}});
        (name.to_owned(), serde_json::from_value(pool).unwrap())
    }

    fn conflict(pools: &Pools, name: &str) -> Option<String> {
        pools.states().iter().rfind(|pool| pool.name == name).unwrap().conflict.clone()
    }

    #[test]
    fn of_two_overlapping_pools_the_younger_is_not_used_and_the_configuration_is_oldest() {
        let configured = [pool("default", &["192.0.2.100-192.0.2.199"])];
        let objects: BTreeMap<String, AddressPool> = [
            object("b-older", "01", &["198.51.100.0/25"]),
            object("a-younger", "02", &["203.0.113.1", "198.51.100.127-198.51.100.200"]),
            object("c-after", "03", &["203.0.113.1"]),
            object("default", "00", &["203.0.113.9"]),
            object("into-config", "00", &["192.0.2.150"]),
            object("reversed", "00", &["203.0.113.9-203.0.113.7"]),
            object("into-cluster", "00", &["10.96.0.0/24"]),
        ]
        .into();
        let cidrs = ["10.96.0.0/12".parse().unwrap()];
        let settings = ControllerSettings { pools: configured.into(), cluster_cidrs: cidrs.into(), ..settings() };
        let pools = Pools::of(&settings, &objects);
        let used: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
        assert_eq!(used, ["default", "b-older", "c-after"]);
        let rows = [
            ("a-younger", "198.51.100.127-198.51.100.200 of pool a-younger overlaps 198.51.100.0-198.51.100.127 of pool b-older"),
            ("default", "the configuration has a pool default too"),
            ("into-config", "overlaps 192.0.2.100-192.0.2.199 of pool default"),
            ("reversed", "is reversed"),
            ("into-cluster", "10.96.0.0/12 of clusterCIDRs"),
        ];
        for (name, expected) in rows {
            let found = conflict(&pools, name).unwrap();
            assert!(found.contains(expected), "{name}: {found}");
        }
        assert_eq!(pools.holding(ip("203.0.113.1")).unwrap().name, "c-after");
        assert_eq!((conflict(&pools, "b-older"), conflict(&pools, "c-after")), (None, None));
    }

    #[test]
    fn a_pool_of_another_installation_is_not_used() {
        let (name, mut theirs) = object("theirs", "00", &["192.0.2.1"]);
        theirs.spec.load_balancer_class = Some("example.com/other".to_owned());
        let (ours_name, mut ours) = object("ours", "01", &["192.0.2.1"]);
        ours.spec.load_balancer_class = Some("sluice.dev/gateway".to_owned());
        let objects = [(name, theirs), (ours_name, ours)].into();
        let pools = Pools::of(&ControllerSettings { pools: Vec::new(), ..settings() }, &objects);
        assert_eq!(pools.states().len(), 1);
        assert_eq!(pools.holding(ip("192.0.2.1")).unwrap().name, "ours");
    }

    #[test]
    fn a_pool_without_class_belongs_to_the_installation_of_the_default_class() {
        let kubernetes = Source::Kubernetes { kubeconfig: None, namespace: None };
        let rows = [
            ("sluice.dev/gateway", kubernetes.clone(), true),
            ("example.com/other", kubernetes, false),
            ("example.com/other", settings().source, true),
        ];
        for (class, source, is_used) in rows {
            let settings = ControllerSettings { pools: Vec::new(), load_balancer_class: class.to_owned(), source, ..settings() };
            let pools = Pools::of(&settings, &[object("shared", "00", &["192.0.2.1"])].into());
            assert_eq!(pools.holding(ip("192.0.2.1")).is_some(), is_used, "{class}");
            assert_eq!((pools.classless().count(), pools.elsewhere(ip("192.0.2.1")).is_none()), (usize::from(!is_used), is_used));
        }
    }

    #[test]
    fn a_pool_without_the_selected_labels_is_not_used_and_overlaps_no_pool() {
        let (theirs, (ours_name, mut ours)) = (object("theirs", "00", &["192.0.2.0/24"]), object("ours", "01", &["192.0.2.1"]));
        ours.metadata.labels = Some([("group".to_owned(), "east".to_owned())].into());
        let mut settings = ControllerSettings { pools: Vec::new(), ..settings() };
        settings.ownership.pools = Selector::from_iter([("group".to_owned(), "east".to_owned())]);
        let pools = Pools::of(&settings, &[theirs, (ours_name, ours)].into());
        assert_eq!(pools.states().len(), 1, "the other pool gets no status");
        assert_eq!(pools.holding(ip("192.0.2.1")).unwrap().name, "ours");
    }
}
