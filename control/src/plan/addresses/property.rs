//! Random steps of claims, pools, gateways and edits.

use std::collections::{BTreeMap, BTreeSet};
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
    families: &'static [Family],
    second_is_optional: bool,
    ports: Vec<u16>,
    key: Option<(u8, bool, bool)>,
    /// The last number of an address of its first family.
    asked: Option<u8>,
    is_readable: bool,
}

fn random_service() -> impl Strategy<Value = RandomService> {
    let key = prop::option::of((0u8..2, any::<bool>(), any::<bool>()));
    let ports = prop::collection::btree_set(1u16..5, 1..3);
    let families: [&[Family]; 4] = [&[Family::V4], &[Family::V6], &[Family::V4, Family::V6], &[Family::V6, Family::V4]];
    let families = (prop::sample::select(families.to_vec()), any::<bool>());
    let who = (0i64..4, 0u8..2);
    (who, families, ports, key, prop::option::weighted(0.2, 98u8..108), prop::bool::weighted(0.9)).prop_map(
        |((created, namespace), (families, second_is_optional), ports, key, asked, is_readable)| RandomService {
            created,
            namespace,
            families,
            second_is_optional,
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
    let asked = |last: u8| match settings.families[0] {
        Family::V4 => IpAddr::from([192, 0, 2, last]),
        Family::V6 => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(last)]),
    };
    Claim {
        service: service_name(name, settings),
        families: if settings.is_readable { settings.families.to_vec() } else { Vec::new() },
        second_family_optional: settings.second_is_optional,
        ports: if settings.is_readable { settings.ports.iter().map(|port| (Protocol::Tcp, *port)).collect() } else { Vec::new() },
        sharing: sharing.filter(|_| settings.is_readable),
        requested: settings.asked.map(asked).filter(|_| settings.is_readable).into_iter().collect(),
        in_status: before.map(|outcome| outcome.addresses().collect()).unwrap_or_default(),
        status_is_ours: true,
        ..claim("", settings.created)
    }
}

fn service_name(name: u8, settings: &RandomService) -> ServiceName {
    ServiceName::new(&format!("n{}", settings.namespace), &name.to_string())
}

/// What a gateway does at the end of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GatewayStep {
    /// It applies the state.
    Applies,
    /// It goes on with the one that it has: it is slow, or away.
    Stays,
    /// It is gone for good, and its `EdgeGateway` is deleted.
    Leaves,
}

/// What a controller that starts anew knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Restart {
    No,
    /// The checkpoint of its predecessor.
    WithCheckpoint,
    /// Objects only; gateways that forwarded something else are gone.
    WithoutCheckpoint,
}

#[derive(Clone, Debug)]
struct Step {
    services: BTreeMap<u8, RandomService>,
    pools: u8,
    passes_s: u64,
    restart: Restart,
    gateways: [GatewayStep; 2],
}

fn step() -> impl Strategy<Value = Step> {
    let services = prop::collection::btree_map(0u8..8, random_service(), 0..8);
    let restart = prop_oneof![8 => Just(Restart::No), 1 => Just(Restart::WithCheckpoint), 1 => Just(Restart::WithoutCheckpoint)];
    let gateway = || prop_oneof![4 => Just(GatewayStep::Applies), 4 => Just(GatewayStep::Stays), 1 => Just(GatewayStep::Leaves)];
    (services, 0u8..4, prop::sample::select(vec![1, 400, 700]), restart, [gateway(), gateway()])
        .prop_map(|(services, pools, passes_s, restart, gateways)| Step { services, pools, passes_s, restart, gateways })
}

fn pools_of(number: u8) -> Pools {
    let mut open = pool("open", &["192.0.2.102-192.0.2.104", "2001:db8::66-2001:db8::67"]);
    open.allow_cross_namespace_sharing = true;
    let one = pool("one", &["192.0.2.100-192.0.2.101", "2001:db8::64-2001:db8::65"]);
    match number {
        0 => pools(&[one, open]),
        1 => pools(&[one]),
        2 => pools(&[pool("other", &["192.0.2.101-192.0.2.106", "2001:db8::65"])]),
        _ => pools(&[]),
    }
}

/// The Services at each address.
type Holdings = BTreeMap<IpAddr, BTreeSet<ServiceName>>;

/// Two gateways: the counter of the state that each has acknowledged in this term, and what it forwards.
#[derive(Default)]
struct Fleet {
    gateways: [Option<(u64, Holdings)>; 2],
    counter: u64,
}

impl Fleet {
    /// The counter of the oldest state that a gateway may forward; `None` if there is no gateway.
    fn reached(&self) -> Option<u64> {
        self.gateways.iter().flatten().map(|(counter, _)| *counter).min()
    }

    /// A controller starts a new term: no gateway has acknowledged anything of it.
    fn restart(&mut self, restart: Restart) {
        self.counter = 0;
        match restart {
            Restart::No => {}
            Restart::WithCheckpoint => self.gateways.iter_mut().flatten().for_each(|(counter, _)| *counter = 0),
            Restart::WithoutCheckpoint => self.gateways = [None, None],
        }
    }

    /// The gateways get the state with these holdings.
    fn publish(&mut self, holdings: &Holdings, steps: [GatewayStep; 2]) {
        for (gateway, step) in self.gateways.iter_mut().zip(steps) {
            match step {
                GatewayStep::Applies => *gateway = Some((self.counter, holdings.clone())),
                GatewayStep::Stays => {}
                GatewayStep::Leaves => *gateway = None,
            }
        }
    }

    /// The Services for which gateways forward `address`; none if one forwards it for `service`, too, which they shared with.
    fn forwarded_for_others(&self, address: IpAddr, service: &ServiceName) -> BTreeSet<&ServiceName> {
        let all = self.gateways.iter().flatten().filter_map(|(_, holdings)| holdings.get(&address)).flatten();
        let all: BTreeSet<&ServiceName> = all.collect();
        if all.contains(service) { BTreeSet::new() } else { all }
    }
}

fn holdings_of(outcomes: &BTreeMap<ServiceName, Allocation>) -> Holdings {
    let mut all = Holdings::new();
    for (service, outcome) in outcomes {
        for address in outcome.addresses() {
            all.entry(address).or_default().insert(service.clone());
        }
    }
    all
}

/// The last step of a Service: what it got for which claim.
type Before = BTreeMap<ServiceName, (Allocation, Claim)>;

fn had(before: &Before, service: &ServiceName, address: IpAddr) -> bool {
    before.get(service).is_some_and(|(old, _)| old.addresses().any(|held| held == address))
}

/// Each (address, port) has one Service, and an address that is new to its Service lies in a pool.
fn check_frontends(
    lab: &Lab,
    claims: &[Claim],
    outcomes: &BTreeMap<ServiceName, Allocation>,
    before: &Before,
) -> Result<(), TestCaseError> {
    let mut frontends = BTreeMap::new();
    for claim in claims {
        let addresses: Vec<IpAddr> = outcomes[&claim.service].addresses().collect();
        let families: BTreeSet<Family> = addresses.iter().map(|address| Family::of(*address)).collect();
        prop_assert_eq!(families.len(), addresses.len(), "one address a family");
        for address in addresses {
            for port in &claim.ports {
                prop_assert_eq!(frontends.insert((address, *port), claim.service.clone()), None);
            }
            let inside = lab.pools.holding(address).is_some();
            prop_assert!(inside || had(before, &claim.service, address), "{:?} is new and in no pool", address);
        }
    }
    Ok(())
}

/// A Service keeps what it has, and one that is new and needs two families gets both or none.
fn check_service(claim: &Claim, outcome: &Allocation, before: &Before, restart: Restart) -> Result<(), TestCaseError> {
    let had_any = before.get(&claim.service).is_some_and(|(old, _)| old.addresses().next().is_some());
    if claim.requires_all() && !had_any {
        prop_assert!(matches!(outcome.addresses().count(), 0 | 2), "{:?} has a part: {:?}", claim.service, outcome);
    }
    let Some((old, earlier)) = before.get(&claim.service) else { return Ok(()) };
    let asks_the_same = earlier.ports == claim.ports && earlier.sharing == claim.sharing;
    let keeps = !claim.is_readable() || (claim.requested.is_empty() && asks_the_same);
    // After a restart a Service that shared with an unreadable one may conflict with it.
    if keeps && restart == Restart::No && earlier.is_readable() {
        let is_wanted = |address: &IpAddr| !claim.is_readable() || claim.families.contains(&Family::of(*address));
        for address in old.addresses().filter(is_wanted) {
            prop_assert!(outcome.addresses().any(|held| held == address), "{:?} has lost {address}", claim.service);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn no_two_services_hold_one_frontend_and_no_service_is_renumbered_unasked(steps in prop::collection::vec(step(), 1..12)) {
        let (mut lab, mut fleet) = (Lab::new(&[]), Fleet::default());
        let mut before = Before::new();
        // Services that ever had a key: former sharers of an address return to it before all gateways have left it.
        let mut sharers: BTreeSet<ServiceName> = BTreeSet::new();
        // A Service that a step does not name keeps its last settings.
        let mut current: BTreeMap<u8, RandomService> = BTreeMap::new();
        for step in steps {
            // A Service that is deleted while no controller runs stays until the next one removes its finalizer.
            let may_end = |name: &u8| name.is_multiple_of(3) && step.restart != Restart::WithCheckpoint;
            current.retain(|name, _| step.services.contains_key(name) || !may_end(name));
            for (name, new) in step.services {
                // A namespace and a creation time do not change.
                let old = current.get(&name).map_or((new.namespace, new.created), |old| (old.namespace, old.created));
                current.insert(name, RandomService { namespace: old.0, created: old.1, ..new });
            }
            let outcome_of = |service: &ServiceName| before.get(service).map(|(outcome, _)| outcome);
            let claims: Vec<Claim> = current
                .iter()
                .map(|(name, settings)| claim_of(*name, settings, outcome_of(&service_name(*name, settings))))
                .collect();
            sharers.extend(claims.iter().filter(|claim| claim.sharing.is_some()).map(|claim| claim.service.clone()));
            lab.now += Duration::from_secs(step.passes_s);
            lab.pools = pools_of(step.pools);
            if step.restart != Restart::No {
                let former = std::mem::take(&mut lab.all);
                if step.restart == Restart::WithCheckpoint {
                    lab.all.recall(&former.reserved().1.iter().cloned().collect::<Vec<_>>(), lab.now);
                }
                fleet.restart(step.restart);
            }
            let (reached, now) = (fleet.reached(), lab.now);
            let rules = Rules { pools: &lab.pools, forbidden: &lab.forbidden, reached, absent: &[], now };
            let outcomes = lab.all.assign(&claims, rules);
            check_frontends(&lab, &claims, &outcomes, &before)?;
            for claim in &claims {
                check_service(claim, &outcomes[&claim.service], &before, step.restart)?;
            }
            let holdings = holdings_of(&outcomes);
            for (address, holders) in &holdings {
                // Who joins those that share an address is of their key.
                let is_joined = holders.iter().any(|service| had(&before, service, *address));
                for service in holders.iter().filter(|service| !is_joined && !sharers.contains(*service)) {
                    let others = fleet.forwarded_for_others(*address, service);
                    prop_assert!(others.is_empty(), "{} gets {}, which a gateway forwards for {:?}", service, address, others);
                }
            }
            fleet.counter += 1;
            lab.all.published(fleet.counter);
            fleet.publish(&holdings, step.gateways);
            before = claims.into_iter().map(|claim| (claim.service.clone(), (outcomes[&claim.service].clone(), claim))).collect();
        }
    }
}
