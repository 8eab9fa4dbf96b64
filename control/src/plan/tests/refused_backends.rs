//! Backends that a tenant must not reach through a gateway: VIPs, of whichever installation.

use kube::core::Selector;

use super::*;
use crate::plan::service_life::Limitation;
use objects::crd::AddressPool;

fn pool(name: &str, addresses: &str, spec: &Value) -> AddressPool {
    let mut object = json!({"apiVersion": "sluice.dev/v1beta1", "kind": "AddressPool", "metadata": {"name": name},
        "spec": {"addresses": [addresses]}});
    for (key, value) in spec.as_object().unwrap() {
        object["spec"][key] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

/// A Service of another group at an address that `writer` wrote.
fn of_another_group(name: &str, address: &str, writer: &str) -> Value {
    let mut object = service(name, json!({"loadBalancerClass": "example.com/other"}));
    object["metadata"]["annotations"] = json!({"sluice.dev/group": "east"});
    object["status"] = json!({"loadBalancer": {"ingress": [{"ip": address}]}});
    let fields = json!({"f:status": {"f:loadBalancer": {"f:ingress": {}}}});
    object["metadata"]["managedFields"] =
        json!([{"manager": writer, "operation": "Update", "subresource": "status", "fieldsV1": fields}]);
    object
}

/// The refused backends of Service `web`, each with the reason.
fn refused(plan: &Plan) -> Vec<String> {
    let notes = plan.notes.iter().filter(|note| note.remark.cause == Cause::BackendRefused);
    notes.map(|note| note.remark.text.clone()).collect()
}

#[test]
fn vips_of_other_installations_are_neither_backends_nor_external_ips() {
    let mut settings = settings();
    settings.ownership.external_ips_allowed = vec!["0.0.0.0/0".parse().unwrap()];
    settings.ownership.pools = Selector::from_iter([("zone".to_owned(), "a".to_owned())]);
    let labelled = |mut pool: AddressPool| {
        pool.metadata.labels = Some([("zone".to_owned(), "a".to_owned())].into());
        pool
    };
    let mut world = World::default();
    world.apply(Change::PoolsReplaced(vec![
        labelled(pool("of-class", "203.0.113.0/28", &json!({"loadBalancerClass": "example.com/other"}))),
        labelled(pool("of-group", "203.0.113.16/28", &json!({"gatewayGroup": "east"}))),
        pool("of-labels", "203.0.113.32/28", &json!({})),
    ]));
    apply(&mut world, of_another_group("east", "198.51.100.7", "sluice"));
    apply(&mut world, of_another_group("forged", "198.51.100.8", "kubectl"));
    let vips = ["203.0.113.1", "203.0.113.16", "203.0.113.47", "198.51.100.7"];
    apply(&mut world, service("web", json!({"externalIPs": vips})));
    endpoints(&mut world, "web", &texts(&[&vips[..], &["198.51.100.8", "203.0.113.48"]].concat()));
    let plan = plan(&world, &settings, &mut Memory::default(), Instant::now());
    let refused = refused(&plan);
    let rows = [(vips[0], "of-class"), (vips[1], "of-group"), (vips[2], "of-labels"), (vips[3], "it is a VIP")];
    for (address, why) in rows {
        assert!(refused.iter().any(|text| text.contains(&format!("{address}:8080")) && text.contains(why)), "{refused:?}");
    }
    let port = &plan.services[&named("web")].ports[0];
    assert_eq!(addresses(&plan.services[&named("web")]), ["198.51.100.8:8080", "203.0.113.48:8080"], "not what others wrote");
    assert_eq!(port.vips, ["192.0.2.100".parse::<IpAddr>().unwrap()], "no external IP");
}

#[test]
fn backends_are_refused_and_admitted_again_as_the_pool_of_another_class_comes_and_goes() {
    let (mut world, mut memory, settings) = (World::default(), Memory::default(), settings());
    apply(&mut world, service("web", json!({})));
    endpoints(&mut world, "web", &texts(&["203.0.113.1"]));
    let theirs = pool("theirs", "203.0.113.0/28", &json!({"loadBalancerClass": "example.com/other"}));
    for (pools, expected) in [(vec![], None), (vec![theirs], Some(Reason::Refused)), (vec![], None)] {
        world.apply(Change::PoolsReplaced(pools));
        let plan = plan(&world, &settings, &mut memory, Instant::now());
        let refusal = plan.services[&named("web")].refusal.as_ref().map(|refusal| refusal.reason);
        assert_eq!(refusal, expected);
    }
}

/// A Service with the ports `good` and `bad`, and the endpoints of each.
fn two_ports(world: &mut World, good: &[&str], bad: &[&str]) {
    let ports = json!([{"name": "good", "port": 80}, {"name": "bad", "port": 443}]);
    apply(world, service("web", json!({"ports": ports})));
    for (name, addresses) in [("good", good), ("bad", bad)] {
        let list: Vec<Value> = addresses.iter().map(|address| json!({"addresses": [address]})).collect();
        let labels = json!({"kubernetes.io/service-name": "web"});
        let object = json!({"metadata": {"name": name, "namespace": "shop", "labels": labels},
            "addressType": "IPv4", "ports": [{"name": name, "port": 8080}], "endpoints": list});
        world.apply(Change::SliceApplied(Box::new(serde_json::from_value::<EndpointSlice>(object).unwrap().into())));
    }
}

#[test]
fn a_port_that_lost_all_backends_by_refusal_is_named_beside_a_good_one_as_long_as_that_lasts() {
    let (mut world, mut memory, settings) = (World::default(), Memory::default(), settings());
    two_ports(&mut world, &["10.0.0.1"], &["127.0.0.1"]);
    let first = plan(&world, &settings, &mut memory, Instant::now());
    assert_eq!(first.services[&named("web")].refusal, None, "the good port is served");
    assert_eq!(first.statuses[&named("web")].limitations, [Limitation::PartRefused]);
    let names_port = |note: &Note| note.remark.cause == Cause::Reason(Reason::Refused) && note.remark.text.contains("tcp 443");
    let names_backend = |note: &Note| note.remark.cause == Cause::BackendRefused && note.remark.text.contains("127.0.0.1:8080");
    for notes in [&first.notes, &memory.current_notes()] {
        assert!(notes.iter().any(names_port) && notes.iter().any(names_backend), "{notes:?}");
        assert!(!notes.iter().any(|note| note.remark.text.contains("tcp 80 ")), "{notes:?}");
    }
    two_ports(&mut world, &["10.0.0.1"], &["127.0.0.1", "10.0.0.2"]);
    plan(&world, &settings, &mut memory, Instant::now());
    let lasting = memory.current_notes();
    assert!(!lasting.iter().any(names_port) && lasting.iter().any(names_backend), "{lasting:?}");
    two_ports(&mut world, &["10.0.0.1"], &[]);
    plan(&world, &settings, &mut memory, Instant::now());
    assert_eq!(memory.current_notes(), [], "nothing is refused any more");
}
