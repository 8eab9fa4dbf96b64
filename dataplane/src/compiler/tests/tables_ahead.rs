//! Tests of tables that are built ahead: that services use them.

use super::super::tables_ahead::{TABLES_MIN, TablesAhead};
use super::*;

/// A service of two ports: with listed backends, one of which takes less, one drains and one takes nothing; and with nodes.
fn varied(n: usize) -> Service {
    let vip = format!("203.0.113.{}", n % 250 + 1);
    let mut one = service(&format!("s{n:04}"), &vip, &["10.0.0.11:80", "10.0.0.12:80", "10.0.0.13:80", "10.0.0.14:80"]);
    let [port] = &mut one.ports[..] else { panic!("a service of one port") };
    port.port = 1000 + u16::try_from(n).unwrap();
    one.scheduler = if n.is_multiple_of(3) { Scheduler::SourceHash } else { Scheduler::Maglev };
    port.backends[n % 4].weight = 3;
    port.backends[(n + 1) % 4].state = BackendState::Draining;
    port.backends[(n + 2) % 4].weight = 0;
    let node = |text: &str| NodeBackend { address: ip(text), weight: 1, state: BackendState::Active };
    let nodes = vec![node("10.0.0.21"), NodeBackend { state: BackendState::Draining, ..node("10.0.0.22") }, node("10.0.0.23")];
    let set = NodeSet { name: "v4".to_owned(), family: Some(Family::V4), nodes };
    let to_nodes = ServicePort { protocol: Protocol::Udp, backends: Vec::new(), ..port.clone() };
    one.ports.push(ServicePort { nodes: Some(NodesAt { set: Arc::new(set), port: 30_080 }), ..to_nodes });
    one
}

/// All services of the state.
fn services(rig: &Rig) -> Vec<Arc<Service>> {
    rig.state.services.values().cloned().collect()
}

#[test]
fn services_get_the_weights_that_tables_were_built_for() {
    let mut rig = Rig::new();
    (0..TABLES_MIN / 2).for_each(|n| rig.put(varied(n)));
    rig.compile();
    let all = services(&rig);
    let ports: Vec<_> = all.iter().flat_map(|service| service.ports.iter().map(move |port| (&**service, port))).collect();
    assert_eq!(ports.len(), TABLES_MIN);
    let ahead = TablesAhead::by(3, &ports);
    for service in &all {
        for (port, compiled) in service.ports.iter().zip(&rig.compiler.services[&service.name].ports) {
            let table = ahead.get(service, port, &compiled.weights);
            assert_eq!(table.as_ref(), Some(&compiled.frontend.table), "{}, {}", service.name, port.protocol);
        }
    }
}

#[test]
fn services_have_no_tables_before_any_backend_is_known() {
    let mut rig = Rig::new();
    (0..4).for_each(|n| rig.put(varied(n)));
    let names: BTreeSet<ServiceName> = services(&rig).iter().map(|service| service.name.clone()).collect();
    let without_tables = |rig: &Rig| rig.compiler.without_tables(&names, &rig.state).count();
    let complete = services(&rig);
    for service in &complete {
        let mut unproven = Service::clone(service);
        unproven.ports.iter_mut().for_each(|port| (port.backends, port.nodes) = (Vec::new(), None));
        rig.put(unproven);
    }
    rig.compile();
    assert_eq!(without_tables(&rig), 4, "as after a start with the state on disk");
    complete.iter().for_each(|service| rig.put(Service::clone(service)));
    assert_eq!(without_tables(&rig), 4);
    rig.compile();
    assert_eq!(without_tables(&rig), 0);
}
