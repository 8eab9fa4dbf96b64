//! Random steps of claims, pools and edits.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proto::Protocol;

use super::tests::{Lab, claim, pool, pools};
use objects::{Namespaces, Sharing};

use super::*;

/// The random settings of one Service in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RandomService {
    created: i64,
    namespace: u8,
    ports: Vec<u16>,
    key: Option<(u8, bool, bool)>,
    asked: Option<u8>,
    is_readable: bool,
}

fn random_service() -> impl Strategy<Value = RandomService> {
    let key = prop::option::of((0u8..2, any::<bool>(), any::<bool>()));
    let ports = prop::collection::btree_set(1u16..5, 1..3);
    (0i64..4, 0u8..2, ports, key, prop::option::weighted(0.2, 98u8..108), prop::bool::weighted(0.9)).prop_map(
        |(created, namespace, ports, key, asked, is_readable)| RandomService {
            created,
            namespace,
            ports: ports.into_iter().collect(),
            key,
            asked,
            is_readable,
        },
    )
}

fn claim_of(name: u8, settings: &RandomService, before: Option<&Allocation>) -> Claim {
    let sharing = settings.key.map(|(key, is_metallb, all)| {
        let namespaces = if all { Namespaces::All } else { Namespaces::Named([].into()) };
        Sharing { key: key.to_string(), is_metallb, namespaces }
    });
    let families = if settings.is_readable { vec![Family::V4] } else { Vec::new() };
    Claim {
        service: ServiceName::new(&format!("n{}", settings.namespace), &name.to_string()),
        families,
        ports: if settings.is_readable { settings.ports.iter().map(|port| (Protocol::Tcp, *port)).collect() } else { Vec::new() },
        sharing: sharing.filter(|_| settings.is_readable),
        requested: settings
            .asked
            .map(|last| IpAddr::from([192, 0, 2, last]))
            .filter(|_| settings.is_readable)
            .into_iter()
            .collect(),
        in_status: before.map(|outcome| outcome.addresses().collect()).unwrap_or_default(),
        status_is_ours: true,
        ..claim("", settings.created)
    }
}

#[derive(Clone, Debug)]
struct Step {
    services: BTreeMap<u8, RandomService>,
    pools: u8,
    passes_s: u64,
    restarts: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let services = prop::collection::btree_map(0u8..8, random_service(), 0..8);
    (services, 0u8..4, prop::sample::select(vec![1, 400, 700]), prop::bool::weighted(0.15))
        .prop_map(|(services, pools, passes_s, restarts)| Step { services, pools, passes_s, restarts })
}

fn pools_of(number: u8) -> Pools {
    let mut open = pool("open", &["192.0.2.102-192.0.2.104"]);
    open.allow_cross_namespace_sharing = true;
    match number {
        0 => pools(&[pool("one", &["192.0.2.100-192.0.2.101"]), open]),
        1 => pools(&[pool("one", &["192.0.2.100-192.0.2.101"])]),
        2 => pools(&[pool("other", &["192.0.2.101-192.0.2.106"])]),
        _ => pools(&[]),
    }
}

proptest! {
    #[test]
    fn no_two_services_hold_one_frontend_and_no_service_is_renumbered_unasked(steps in prop::collection::vec(step(), 1..12)) {
        let mut lab = Lab::new(&[]);
        let mut before: BTreeMap<ServiceName, (Allocation, Claim)> = BTreeMap::new();
        // A Service that a step does not name keeps its last settings.
        let mut current: BTreeMap<u8, RandomService> = BTreeMap::new();
        for step in steps {
            current.retain(|name, _| step.services.contains_key(name) || name % 3 != 0);
            for (name, new) in step.services {
                // A namespace and a creation time do not change.
                let old = current.get(&name).map_or((new.namespace, new.created), |old| (old.namespace, old.created));
                current.insert(name, RandomService { namespace: old.0, created: old.1, ..new });
            }
            let claims: Vec<Claim> = current.iter().map(|(name, settings)| {
                let service = ServiceName::new(&format!("n{}", settings.namespace), &name.to_string());
                claim_of(*name, settings, before.get(&service).map(|(outcome, _)| outcome))
            }).collect();
            lab.now += Duration::from_secs(step.passes_s);
            lab.pools = pools_of(step.pools);
            if step.restarts {
                lab.all = Allocations::default();
            }
            let rules = Rules { pools: &lab.pools, forbidden: &lab.forbidden, reached: None, absent: &[], now: lab.now };
            let outcomes = lab.all.assign(&claims, rules);
            let mut frontends = BTreeMap::new();
            for claim in &claims {
                let outcome = &outcomes[&claim.service];
                prop_assert!(outcome.addresses().count() <= 1);
                for address in &outcome.addresses().collect::<Vec<_>>() {
                    for port in &claim.ports {
                        prop_assert_eq!(frontends.insert((*address, *port), claim.service.clone()), None);
                    }
                    let inside = lab.pools.holding(*address).is_some();
                    let had = before.get(&claim.service).is_some_and(|(old, _)| old.addresses().any(|held| held == *address));
                    prop_assert!(inside || had, "{:?} is new and in no pool", address);
                }
                if let Some((old, earlier)) = before.get(&claim.service) {
                    let asks_the_same = earlier.ports == claim.ports && earlier.sharing == claim.sharing;
                    let keeps = !claim.is_readable() || (claim.requested.is_empty() && asks_the_same);
                    // After a restart a Service that shared with an unreadable one may conflict with it.
                    if keeps && !step.restarts && old.addresses().next().is_some() && earlier.is_readable() {
                        prop_assert!(old.addresses().eq(outcome.addresses()));
                    }
                }
            }
            before = claims.into_iter().map(|claim| (claim.service.clone(), (outcomes[&claim.service].clone(), claim))).collect();
        }
    }
}
