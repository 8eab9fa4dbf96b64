//! Requests for addresses and families in objects, and what gateways and statuses get of them.

use super::*;
use crate::plan::service_life::Shortfall;

#[test]
fn a_request_for_an_address_or_pool_that_cannot_be_read_gets_no_other_address_and_takes_none_away() {
    let long = "x".repeat(300);
    let rows = [
        ("sluice.dev/addresses", "192.0.2.300"),
        ("metallb.io/loadBalancerIPs", "192.0.2.300"),
        ("metallb.universe.tf/loadBalancerIPs", "192.0.2.101,192.0.2.102"),
        ("lbipam.cilium.io/ips", "web.example.com"),
        ("kube-vip.io/loadbalancerIPs", "192.0.2.1oo"),
        ("sluice.dev/addresses", "2001:db8::1"),
        ("sluice.dev/address-pool", &long),
        ("metallb.io/address-pool", &long),
    ];
    for (key, value) in rows {
        let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
        let mut object = service("web", json!({}));
        object["metadata"]["annotations"][key] = value.into();
        apply(&mut world, object.clone());
        let first = plan(&world, &settings(), &mut memory, now);
        let refusal = first.services[&named("web")].refusal.as_ref().unwrap();
        assert_eq!(refusal.reason, Reason::Refused, "{key}");
        assert!(refusal.message.contains("no other address is given"), "{key}: {}", refusal.message);
        assert!(first.statuses[&named("web")].ingress.is_empty() && first.checkpoint.services.is_empty(), "{key}");
        assert!(first.notes.iter().any(|note| note.remark.cause == Cause::AnnotationIgnored), "{key}: {:?}", first.notes);
        // Once it has an address, a mistake takes none away, whoever leads.
        apply(&mut world, service("web", json!({})));
        assert_eq!(plan(&world, &settings(), &mut memory, now).services[&named("web")].ports.len(), 1);
        apply(&mut world, object);
        let mistaken = plan(&world, &settings(), &mut memory, now);
        assert_eq!(mistaken.services[&named("web")].ports.len(), 1, "{key}");
        world.apply(Change::CheckpointReplaced(Box::new(mistaken.checkpoint)));
        assert_eq!(plan(&world, &settings(), &mut Memory::default(), now).services[&named("web")].ports.len(), 1, "{key}");
    }
    let mut world = World::default();
    apply(&mut world, service("web", json!({"loadBalancerIP": "192.0.2.300"})));
    assert!(plan(&world, &settings(), &mut Memory::default(), Instant::now()).services[&named("web")].refusal.is_some());
}

#[test]
fn a_service_that_is_patched_to_require_a_second_family_stays_served_at_the_first() {
    for policy in ["RequireDualStack", "PreferDualStack"] {
        let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
        apply(&mut world, service("web", json!({})));
        let before = plan(&world, &settings(), &mut memory, now);
        apply(&mut world, service("web", json!({"ipFamilyPolicy": policy, "ipFamilies": ["IPv6", "IPv4"]})));
        let after = plan(&world, &settings(), &mut memory, now);
        let (was, is) = (&before.services[&named("web")], &after.services[&named("web")]);
        assert_eq!((&is.refusal, &is.ports), (&None, &was.ports), "{policy}");
        let status = &after.statuses[&named("web")];
        assert_eq!((&status.ingress[..], status.refusal()), (&[ingress("192.0.2.100")][..], None));
        let is_required = policy == "RequireDualStack";
        let expected = if is_required { Shortfall::Lacks(Reason::Exhausted) } else { Shortfall::LacksPreferredFamily };
        assert_eq!(status.shortfall, Some(expected));
        let is_told =
            |note: &Note| note.remark.cause == Cause::Reason(Reason::Exhausted) && note.remark.text.contains("no IPv6 address");
        assert_eq!(after.notes.iter().any(is_told), is_required, "{:?}", after.notes);
        // The owner of a new one is told the same, and gateways get no port of it.
        apply(&mut world, service("new", json!({"ipFamilyPolicy": policy, "ipFamilies": ["IPv6", "IPv4"]})));
        let new = plan(&world, &settings(), &mut memory, now);
        assert_eq!(new.services[&named("new")].refusal.is_some(), is_required);
        assert_eq!(new.checkpoint.services.contains_key(&named("new")), !is_required);
    }
}
