//! Services of two families, and those that name an address which another one has left.

use super::*;

#[test]
fn a_new_service_of_two_families_needs_both_unless_the_other_is_optional() {
    let both = Claim { families: vec![Family::V6, Family::V4], ..claim("a", 1) };
    assert_eq!(Lab::small().assign(std::slice::from_ref(&both)).got("a"), "Exhausted");
    assert!(held(Lab::small().assign(std::slice::from_ref(&both)).of("a")).is_empty());
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100", "2001:db8::1:0/112"])]);
    assert_eq!(held(lab.assign(&[both]).of("a")), [ip("2001:db8::1:0"), ip("192.0.2.100")]);
    for families in [vec![Family::V4, Family::V6], vec![Family::V6, Family::V4]] {
        let optional = Claim { families, second_family_optional: true, ..claim("a", 1) };
        let mut lab = Lab::small();
        assert_eq!(lab.assign(&[optional]).got("a"), "100");
        assert!(lab.of("a").is_complete && lab.of("a").notes.is_empty(), "no pool has IPv6: {:?}", lab.of("a"));
    }
}

/// A Service that requires or prefers both families.
fn dual(name: &str, created_s: i64, is_required: bool) -> Claim {
    let families = vec![Family::V6, Family::V4];
    Claim { families, second_family_optional: !is_required, ..claim(name, created_s) }
}

#[test]
fn a_refused_service_holds_no_address_that_another_one_could_have() {
    // One IPv4 address, two of IPv6.
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100", "2001:db8::1-2001:db8::2"])]);
    let v6 = |name, created| Claim { families: vec![Family::V6], ..claim(name, created) };
    lab.assign(&[dual("h1", 1, true), dual("h2", 2, true), v6("h3", 3)]);
    assert_eq!(held(lab.of("h1")), [ip("2001:db8::1"), ip("192.0.2.100")]);
    assert!(held(lab.of("h2")).is_empty());
    assert!(lab.why("h2").contains("no IPv4 address is left"), "{}", lab.why("h2"));
    assert_eq!(held(lab.of("h3")), [ip("2001:db8::2")], "the address that h2 does not use");
    // The same if it names one of both.
    let asking_v6 = Claim { requested: vec![ip("2001:db8::2")], ..dual("h2", 2, true) };
    lab.assign(&[dual("h1", 1, true), asking_v6]);
    assert!(held(lab.of("h2")).is_empty());
    assert_eq!(held(lab.assign(&[dual("h1", 1, true), v6("h3", 3)]).of("h3")), [ip("2001:db8::2")]);
}

#[test]
fn a_service_that_wants_a_second_family_keeps_the_first_and_is_told() {
    for is_required in [true, false] {
        let mut lab = Lab::new(&[pool("default", &["192.0.2.100-192.0.2.101"])]);
        lab.assign(&[claim("a", 1)]);
        lab.assign(&[dual("a", 1, is_required)]);
        assert_eq!(held(lab.of("a")), [ip("192.0.2.100")]);
        assert_eq!((lab.of("a").refusal(), lab.of("a").is_complete), (None, !is_required));
        let notes: Vec<_> = lab.of("a").notes.iter().map(|note| (note.cause, note.text.clone())).collect();
        assert_eq!(notes.len(), usize::from(is_required), "{notes:?}");
        assert!(notes.iter().all(|(cause, text)| *cause == Cause::Reason(Reason::Exhausted) && text.contains("no IPv6 address")));
        // The next leader decides the same, whether or not the status was written.
        for claim in [
            holding(dual("a", 1, is_required), "192.0.2.100"),
            Claim { recalled: vec![ip("192.0.2.100")], ..dual("a", 1, is_required) },
        ] {
            lab.all = Allocations::default();
            assert_eq!(held(lab.assign(&[claim]).of("a")), [ip("192.0.2.100")]);
        }
        // As soon as there is an address, it has both.
        lab.pools = pools(&[pool("default", &["192.0.2.100-192.0.2.101", "2001:db8::1"])]);
        lab.assign(&[dual("a", 1, is_required)]);
        assert_eq!(held(lab.of("a")), [ip("2001:db8::1"), ip("192.0.2.100")]);
        assert!(lab.of("a").is_complete && lab.of("a").notes.is_empty());
    }
}

#[test]
fn a_service_that_prefers_two_families_is_served_at_the_one_that_is_left_and_told_of_the_other() {
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100", "2001:db8::1-2001:db8::2"])]);
    lab.assign(&[claim("a", 1), dual("b", 2, false)]);
    assert_eq!(held(lab.of("b")), [ip("2001:db8::1")]);
    let note = &lab.of("b").notes[0];
    assert!(note.cause == Cause::Reason(Reason::Exhausted) && note.text.contains("no IPv4 address"), "{note:?}");
    // One whose named address is refused in one family is served in the other.
    let named = Claim { requested: vec![ip("192.0.2.100")], ..dual("c", 3, false) };
    lab.assign(&[claim("a", 1), dual("b", 2, false), named]);
    assert_eq!(held(lab.of("c")), [ip("2001:db8::2")]);
    assert!(lab.of("c").notes[0].text.contains("held by shop/a"), "{:?}", lab.of("c").notes);
}

#[test]
fn a_renamed_service_gets_the_address_that_it_names_as_soon_as_gateways_have_removed_it() {
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100-192.0.2.101"])]);
    lab.reached = Some(0);
    lab.assign(&[asking(claim("web", 1), "192.0.2.100")]);
    let other = Claim { service: ServiceName::new("other", "web2"), ..asking(claim("web2", 2), "192.0.2.100") };
    lab.assign(std::slice::from_ref(&other)).all.published(5);
    assert_eq!(lab.got("web2"), "AddressReleasing");
    assert!(lab.why("web2").contains("may still forward it for shop/web"), "{}", lab.why("web2"));
    assert!(lab.all.waits_for_gateways(lab.now));
    // Nobody without a wish gets it meanwhile, not even if nothing else is left, nor the one that held it before.
    lab.assign(&[other.clone(), claim("d", 3), claim("web", 4)]);
    assert_eq!(["web2", "d", "web"].map(|name| lab.got(name)), ["AddressReleasing", "101", "Exhausted"]);
    lab.reached = Some(5);
    lab.assign(&[other.clone(), claim("d", 3), claim("web", 4)]);
    assert_eq!(["web2", "d", "web"].map(|name| lab.got(name)), ["100", "101", "Exhausted"]);
    // A Service that holds the address is named as its holder.
    lab.assign(&[other, asking(claim("e", 5), "192.0.2.100")]);
    assert!(lab.got("e") == "Conflict" && lab.why("e").contains("held by other/web2"), "{}", lab.why("e"));
}

#[test]
fn an_address_that_a_service_of_two_families_cannot_use_passes_to_nobody_while_a_gateway_forwards_it() {
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100-192.0.2.101"])]);
    lab.reached = Some(0);
    lab.assign(&[claim("x", 1)]).all.published(5);
    assert_eq!(lab.got("x"), "100");
    // It is deleted while a gateway is away, and created again with a family that no pool has, or named by another one.
    lab.assign(&[]).all.published(6);
    let named = Claim { requested: vec![ip("192.0.2.100")], ..dual("x", 2, true) };
    for again in [dual("x", 2, true), named] {
        let before = lab.reserved().into_iter().find(|one| one.service.name == "x").unwrap();
        lab.assign(&[again, claim("y", 3), claim("z", 4)]);
        assert_eq!(["x", "y", "z"].map(|name| lab.got(name)), ["Exhausted", "101", "Exhausted"]);
        assert!(lab.reserved().contains(&before), "the reservation lasts");
        lab.assign(&[]).all.published(7);
    }
    lab.reached = Some(7);
    assert_eq!(lab.assign(&[claim("y", 3), claim("z", 4)]).got("z"), "100");
}

#[test]
fn a_request_that_waits_for_the_other_family_refuses_no_other_request_and_keeps_automatic_choice_away() {
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100-192.0.2.101"])]);
    let x = Claim { requested: vec![ip("192.0.2.100")], ..dual("x", 1, true) };
    lab.assign(&[x.clone(), claim("w", 2), claim("v", 3)]);
    assert_eq!(["x", "w", "v"].map(|name| lab.got(name)), ["Exhausted", "101", "Exhausted"]);
    lab.assign(&[x.clone(), claim("w", 2), asking(claim("z", 3), "192.0.2.100")]);
    assert_eq!(["x", "w", "z"].map(|name| lab.got(name)), ["Conflict", "101", "100"]);
    // The older request comes first if it can be met, and takes no IPv6 address that another Service names.
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100-192.0.2.101", "2001:db8::1-2001:db8::2"])]);
    let v6 = Claim { families: vec![Family::V6], requested: vec![ip("2001:db8::1")], ..claim("v6", 4) };
    lab.assign(&[x, asking(claim("z", 3), "192.0.2.100"), v6]);
    assert_eq!(held(lab.of("x")), [ip("2001:db8::2"), ip("192.0.2.100")]);
    assert_eq!((lab.got("z"), held(lab.of("v6"))), ("Conflict".to_owned(), vec![ip("2001:db8::1")]));
}

#[test]
fn addresses_that_a_namespace_freed_count_in_its_quota_until_gateways_have_removed_them() {
    let limited = PoolSpec { max_per_namespace: Some(1), ..pool("default", &["192.0.2.100-192.0.2.109"]) };
    let mut lab = Lab::new(&[limited]);
    lab.reached = Some(0);
    lab.assign(&[claim("a", 1)]).all.published(5);
    lab.assign(&[claim("b", 2)]).all.published(6);
    assert_eq!(lab.got("b"), "Exhausted");
    assert!(lab.why("b").contains("freed addresses count"), "{}", lab.why("b"));
    assert!(lab.all.waits_for_gateways(lab.now), "it is tried again when gateways report");
    assert_eq!(lab.assign(&[asking(claim("b", 2), "192.0.2.105")]).got("b"), "Exhausted");
    // One of the same name gets the address back, and other namespaces have their own quota.
    assert_eq!(lab.assign(&[claim("a", 3)]).got("a"), "100");
    lab.assign(&[]).all.published(7);
    let other = Claim { service: ServiceName::new("other", "c"), ..claim("c", 4) };
    lab.assign(&[claim("b", 2), other]);
    assert_eq!(["b", "c"].map(|name| lab.got(name)), ["Exhausted", "101"]);
    lab.reached = Some(7);
    assert_eq!(lab.assign(&[claim("b", 2)]).got("b"), "102");
}

/// A Service of another installation at an address.
fn of_another(name: &str, created_s: i64, address: &str) -> Claim {
    let of_another = Some(OtherInstallation::Proven);
    Claim { families: Vec::new(), ports: Vec::new(), of_another, ..holding(claim(name, created_s), address) }
}

#[test]
fn of_several_sharers_none_leaves_an_address_if_one_of_them_is_older_than_the_service_of_another_installation() {
    for (created_s, expected) in [(2, ["100", "100"]), (0, ["101", "101"])] {
        let mut lab = Lab::small();
        let mut theirs = objects::crd::AddressPool::new(
            "theirs",
            objects::crd::AddressPoolSpec { addresses: vec!["192.0.2.100".to_owned()], ..Default::default() },
        );
        theirs.spec.load_balancer_class = Some("example.com/other".to_owned());
        let ours = ControllerSettings { pools: vec![pool("default", &["192.0.2.100-192.0.2.102"])], ..settings() };
        lab.pools = Pools::of(&ours, &[("theirs".to_owned(), theirs)].into());
        let sharers = [sharing(claim("old", 1), "k", 80), sharing(claim("young", 3), "k", 81)];
        lab.assign(&sharers);
        assert_eq!(["old", "young"].map(|name| lab.got(name)), ["100", "100"]);
        let all = [&sharers[..], &[of_another("theirs", created_s, "192.0.2.100")]].concat();
        for _ in 0..2 {
            lab.assign(&all);
            assert_eq!(["old", "young"].map(|name| lab.got(name)), expected);
        }
    }
}

/// A new leader knows from statuses and from the checkpoint what gateways may still forward.
#[test]
fn what_services_gave_up_while_there_was_no_leader_passes_to_nobody_while_a_gateway_forwards_it() {
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100-192.0.2.101", "2001:db8::1-2001:db8::2"])]);
    lab.reached = Some(0);
    // It had both families; another one, which the checkpoint has, is gone without a trace.
    let left = Claim { families: vec![Family::V6], status_is_ours: true, ..claim("a", 1) };
    let left = Claim { in_status: vec![ip("192.0.2.100"), ip("2001:db8::1")], ..left };
    let gone = ServiceName::new("shop", "gone");
    let now = lab.now;
    lab.all.free_forgotten([(&gone, &[ip("192.0.2.101")][..])].into_iter(), now);
    let claims = [left, claim("new", 2)];
    assert_eq!(lab.assign(&claims).got("new"), "Exhausted");
    assert_eq!(held(lab.of("a")), [ip("2001:db8::1")]);
    lab.all.published(1);
    assert_eq!(lab.assign(&claims).got("new"), "Exhausted", "a gateway has not let go");
    lab.reached = Some(1);
    assert_ne!(lab.assign(&claims).got("new"), "Exhausted");
    // Later assignments recorded who held what: a stale status reserves nothing.
    lab.now += 2 * FREED_ADDRESS_KEPT;
    assert_eq!(lab.assign(&claims[..1]).all.reserved().1.len(), 1, "that of the Service that went just now");
}

#[test]
fn a_former_sharer_waits_until_gateways_have_removed_the_one_that_stayed_longer() {
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100"])]);
    lab.reached = Some(0);
    let (first, second) = (sharing(claim("first", 1), "k", 80), sharing(claim("second", 2), "k", 81));
    lab.assign(&[first, second.clone()]);
    lab.assign(&[second]).all.published(1);
    lab.reached = Some(1);
    // The second one goes, too; gateways forward its port, which the first one wants now.
    let alone = Claim { ports: vec![(Protocol::Tcp, 81)], ..claim("first", 1) };
    assert_eq!(lab.assign(std::slice::from_ref(&alone)).got("first"), "Exhausted");
    lab.all.published(2);
    lab.reached = Some(2);
    assert_eq!(lab.assign(&[alone]).got("first"), "100");
}
