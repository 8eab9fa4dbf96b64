//! The manifests in `deploy/examples` do what their comments say, parsed as the manifests source parses them.

#![allow(clippy::unwrap_used, clippy::panic)]

mod settings;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use control::config::settings::Source;
use control::manifests::Directory;
use control::plan::{Memory, plan};
use control::world::World;
use objects::PoolSpec;
use objects::crd::AddressPool;
use proto::{Mode, Probe, Scheduler, Service, ServiceName, Target};
use settings::settings;

/// The Service `name` that `deploy/examples/NAME.yaml` describes.
fn service(name: &str) -> Service {
    services(name).remove(&ServiceName::new("example", name)).unwrap()
}

/// The Services of `deploy/examples/NAME.yaml`, alone in a directory. All of them must be served.
fn services(name: &str) -> BTreeMap<ServiceName, Service> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../deploy/examples/{name}.yaml"));
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(file, dir.path().join("example.yaml")).unwrap();
    let (objects, notes) = Directory::new(dir.path().to_owned()).read().unwrap();
    assert_eq!(notes, Vec::<String>::new());
    let objects = objects.unwrap();
    let mut world = World::default();
    objects.into_changes().into_iter().for_each(|change| world.apply(change));
    let source = Source::Kubernetes { kubeconfig: None, namespace: None };
    let plan = plan(&world, &settings(source, &["192.0.2.100-192.0.2.199"]), &mut Memory::default(), Instant::now());
    assert!(plan.notes.is_empty(), "{:?}", plan.notes);
    let served: Vec<_> = plan.services.iter().map(|(name, service)| (name.clone(), Service::clone(service))).collect();
    assert!(served.iter().all(|(_, service)| service.refusal.is_none()), "{served:?}");
    served.into_iter().collect()
}

fn backends(service: &Service) -> Vec<String> {
    service.ports.iter().flat_map(|port| port.all_backends()).map(|b| format!("{} x{}", b.address, b.weight)).collect()
}

/// Examples that do not show a mode.
const EXAMPLES_WITHOUT_MODE: [&str; 2] = ["pools.yaml", "sharing.yaml"];

#[test]
fn every_mode_has_an_example() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/examples");
    let mut names: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let mut known: Vec<_> = Mode::ALL.iter().map(|mode| format!("{mode}.yaml")).collect();
    known.extend(EXAMPLES_WITHOUT_MODE.map(str::to_owned));
    names.sort();
    known.sort();
    assert_eq!(names, known);
    for mode in Mode::ALL {
        assert_eq!(service(mode.as_str()).mode, *mode);
    }
}

#[test]
fn two_services_share_an_address_by_different_ports() {
    let services = services("sharing");
    let ports: Vec<_> = services.values().flat_map(|service| &service.ports).collect();
    let address: std::net::IpAddr = "192.0.2.153".parse().unwrap();
    assert!(ports.iter().all(|port| port.vips == [address] && port.port == 53), "{ports:?}");
    assert_eq!(ports.len(), 2);
    assert_ne!(ports[0].protocol, ports[1].protocol);
}

#[test]
fn pools_have_the_fields_that_their_comments_describe() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/examples/pools.yaml");
    let text = std::fs::read_to_string(file).unwrap();
    let documents = text.split("\n---\n").map(|document| serde_saphyr::from_str::<AddressPool>(document).unwrap());
    let pools: Vec<PoolSpec> = documents.map(|pool| PoolSpec::try_from(&pool).unwrap()).collect();
    let names: Vec<_> = pools.iter().map(|pool| pool.name.as_str()).collect();
    assert_eq!(names, ["default", "tenants", "dns", "east", "intranet"]);
    let all: Vec<_> = pools.iter().flat_map(|pool| &pool.ranges).collect();
    let clash = all.iter().enumerate().any(|(index, range)| all[..index].iter().any(|other| other.overlaps(range)));
    assert!(!clash, "{all:?}");
    let [default, tenants, dns, east, intranet] = &pools[..] else { panic!("{names:?}") };
    assert_eq!((default, default.auto_assign), (&PoolSpec::new("default", default.ranges.clone()), true));
    assert_eq!((tenants.priority, tenants.max_per_namespace, tenants.avoid_buggy_ips), (10, Some(4), true));
    assert_eq!((dns.auto_assign, dns.allow_cross_namespace_sharing), (false, true));
    assert_eq!(east.load_balancer_class.as_deref(), Some("example.com/east"));
    assert_eq!(intranet.gateway_group.as_deref(), Some("intranet"));
}

#[test]
fn nat_rewrites_to_endpoints() {
    assert_eq!(backends(&service("nat")), ["10.0.0.11:8080 x1", "10.0.0.12:8080 x1"]);
}

#[test]
fn dnat_allows_some_client_addresses() {
    let service = service("dnat");
    assert_eq!(service.scheduler, Scheduler::LeastConnections);
    assert_eq!(service.idle_timeout, Some(Duration::from_secs(1800)));
    assert_eq!(service.source_ranges.unwrap().len(), 2);
}

#[test]
fn dsr_weighs_nodes_by_their_endpoints() {
    let service = service("dsr");
    assert_eq!(backends(&service), ["10.0.0.21:80 x2", "10.0.0.22:80 x1"]);
    assert_eq!((service.local, service.affinity), (true, Some(Duration::from_secs(3600))));
    assert_eq!(service.health.node_health_port, Some(31_000));
}

#[test]
fn ipip_leads_to_endpoints_of_the_other_family() {
    let service = service("ipip");
    assert_eq!(
        (service.target, backends(&service)),
        (Target::Endpoint, vec!["[fd00::11]:80 x1".into(), "[fd00::12]:80 x1".into()])
    );
}

#[test]
fn gue_sends_udp_to_nodes_that_are_not_excluded() {
    let service = service("gue");
    assert_eq!((service.target, backends(&service)), (Target::Node, vec!["10.0.0.23:53 x1".to_owned()]));
    assert_eq!(service.health.probe, Probe::Icmp);
}
