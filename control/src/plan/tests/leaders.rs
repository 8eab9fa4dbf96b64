//! Random changes of Services, nodes, gateways and leaders: whoever leads, what is served stays served.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant, SystemTime};

use proptest::prelude::*;
use proto::{GatewayProfile, ServiceName};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{apply, named, service, settings};
use crate::gateways::registry::{Connection, Gateways};
use crate::plan::{Memory, Plan, plan};
use crate::world::World;
use crate::world::change::{Change, KnownGateway};
use crate::world::checkpoint::Checkpoint;
use objects::note::{Cause, Subject};

/// One change.
#[derive(Clone, Debug)]
enum Event {
    Service {
        number: u8,
        policy: Option<&'static str>,
        request: Option<u8>,
    },
    ServiceDeleted(u8),
    /// A node has this address, or no address.
    Node {
        number: u8,
        address: Option<u8>,
    },
    /// A gateway with this address of its own connects, with one as its next hop.
    Connected {
        number: u8,
        own: u8,
        next_hop: u8,
    },
    Disconnected(u8),
    /// It applies no new state, or does again.
    Stalled {
        number: u8,
        is_stalled: bool,
    },
    /// Seconds pass.
    Passed(u16),
    /// Its object is deleted.
    Gone(u8),
    Leader,
}

fn event() -> impl Strategy<Value = Event> {
    let policy = prop::sample::select(vec![None, Some("PreferDualStack"), Some("RequireDualStack")]);
    let last = || 99u8..104;
    prop_oneof![
        5 => (0u8..4, policy, prop::option::weighted(0.3, last()))
            .prop_map(|(number, policy, request)| Event::Service { number, policy, request }),
        2 => (0u8..4).prop_map(Event::ServiceDeleted),
        2 => (0u8..2, prop::option::of(last())).prop_map(|(number, address)| Event::Node { number, address }),
        2 => (0u8..2, last(), last()).prop_map(|(number, own, next_hop)| Event::Connected { number, own, next_hop }),
        1 => (0u8..2).prop_map(Event::Disconnected),
        1 => (0u8..2, any::<bool>()).prop_map(|(number, is_stalled)| Event::Stalled { number, is_stalled }),
        2 => prop::sample::select(vec![2, 400, 700]).prop_map(Event::Passed),
        1 => (0u8..2).prop_map(Event::Gone),
        1 => Just(Event::Leader),
    ]
}

fn v4(last: u8) -> IpAddr {
    [192, 0, 2, last].into()
}

/// A cluster, its gateways, and the controller that leads.
struct Cluster {
    world: World,
    services: BTreeMap<u8, Value>,
    gateways: watch::Sender<Gateways>,
    connections: BTreeMap<u8, Connection>,
    stalled: BTreeSet<u8>,
    /// The owners of VIPs in the state that each gateway applied last.
    forwarded: BTreeMap<u8, BTreeMap<IpAddr, ServiceName>>,
    listed: BTreeMap<String, KnownGateway>,
    memory: Memory,
    counter: u64,
    now: Instant,
}

impl Cluster {
    fn new() -> Self {
        Self {
            world: World::default(),
            services: BTreeMap::new(),
            gateways: watch::Sender::new(Gateways::default()),
            connections: BTreeMap::new(),
            stalled: BTreeSet::new(),
            forwarded: BTreeMap::new(),
            listed: BTreeMap::new(),
            memory: Memory::default(),
            counter: 0,
            now: Instant::now(),
        }
    }

    fn happen(&mut self, event: &Event) {
        match event {
            Event::Service { number, policy, request } => {
                let mut object = service(&format!("s{number}"), json!({"ipFamilyPolicy": policy}));
                object["metadata"]["annotations"] = json!({});
                if let Some(last) = request {
                    object["metadata"]["annotations"]["sluice.dev/addresses"] = v4(*last).to_string().into();
                }
                self.services.insert(*number, object.clone());
                apply(&mut self.world, object);
            }
            Event::ServiceDeleted(number) => {
                self.services.remove(number);
                self.world.apply(Change::ServiceDeleted(named(&format!("s{number}"))));
            }
            Event::Node { number, address } => {
                let list = address.map(|last| json!([{"type": "InternalIP", "address": v4(last)}])).unwrap_or_default();
                let node = json!({"metadata": {"name": format!("n{number}")}, "status": {"addresses": list}});
                self.world.apply(Change::NodeApplied(Box::new(serde_json::from_value(node).unwrap())));
            }
            Event::Connected { number, own, next_hop } => {
                let (name, profile) = (format!("edge-{number}"), GatewayProfile::new([v4(*own)], [v4(*next_hop)]));
                self.connections.remove(number);
                self.connections.insert(*number, Connection::open(&self.gateways, &name, "", profile.clone()));
                let known = KnownGateway { group: "default".to_owned(), profile, last_seen_s: None };
                self.listed.insert(name, known);
            }
            Event::Disconnected(number) => {
                self.connections.remove(number);
                self.listed.entry(format!("edge-{number}")).and_modify(|known| known.last_seen_s = Some(1));
            }
            Event::Gone(number) if !self.connections.contains_key(number) => {
                self.listed.remove(&format!("edge-{number}"));
                self.forwarded.remove(number);
            }
            Event::Stalled { number, is_stalled: true } => drop(self.stalled.insert(*number)),
            Event::Stalled { number, is_stalled: false } => drop(self.stalled.remove(number)),
            Event::Passed(seconds) => self.now += Duration::from_secs(u64::from(*seconds)),
            Event::Gone(_) | Event::Leader => {}
        }
        self.world.apply(Change::GatewaysReplaced(self.listed.clone()));
    }

    /// Plans, publishes, and plans again once the connected gateways have applied it. Returns both plans.
    fn plan(&mut self) -> [Plan; 2] {
        let mut one = || {
            self.memory.follow_gateways(&self.gateways.borrow(), self.now);
            let plan = plan(&self.world, &settings_of_six(), &mut self.memory, self.now);
            self.counter += 1;
            self.memory.published(self.counter);
            let owners: BTreeMap<IpAddr, ServiceName> = plan
                .services
                .iter()
                .flat_map(|(name, one)| one.ports.iter().flat_map(|port| &port.vips).map(|vip| (*vip, name.clone())))
                .collect();
            for (vip, owner) in &owners {
                let others = self.forwarded.values().filter_map(|state| state.get(vip)).filter(|other| *other != owner);
                assert_eq!(others.collect::<Vec<_>>(), [] as [&ServiceName; 0], "{owner} has {vip} too early");
            }
            for (number, connection) in self.connections.iter().filter(|(number, _)| !self.stalled.contains(*number)) {
                connection.acknowledge(self.counter);
                self.forwarded.insert(*number, owners.clone());
            }
            plan
        };
        [one(), one()]
    }

    /// The world as the next leader finds it.
    fn found_by_successor(&self, checkpoint: &Checkpoint, wrote_statuses: bool) -> World {
        let mut world = self.world.clone();
        for (number, object) in self.services.iter().filter(|_| wrote_statuses) {
            let held = vips(checkpoint, *number);
            let mut object = object.clone();
            object["status"]["loadBalancer"]["ingress"] = held.iter().map(|vip| json!({"ip": vip})).collect();
            object["metadata"]["managedFields"] = json!([{"manager": "sluice", "subresource": "status",
                "fieldsV1": {"f:status": {"f:loadBalancer": {"f:ingress": {}}}}}]);
            apply(&mut world, object);
        }
        let clock = SystemTime::now();
        let read = Checkpoint::from_texts(&checkpoint.to_texts(2, self.now, clock), self.now, clock);
        world.apply(Change::CheckpointReplaced(Box::new(read)));
        world
    }
}

/// Three addresses of IPv4, and two of IPv6.
fn settings_of_six() -> crate::config::settings::ControllerSettings {
    let mut settings = settings();
    let ranges = ["192.0.2.100-192.0.2.102", "2001:db8::1-2001:db8::2"];
    settings.pools[0].ranges = ranges.map(|range| range.parse().unwrap()).into();
    settings
}

fn vips(checkpoint: &Checkpoint, number: u8) -> Vec<IpAddr> {
    let decided = checkpoint.services.get(&named(&format!("s{number}")));
    decided.map(|decided| decided.addresses.clone()).unwrap_or_default()
}

proptest! {
    /// No address twice; none taken from a Service that did not change, unless its owner is told; what is held is served;
    /// and a fresh leader decides as the old one, whether or not that wrote the statuses.
    #[test]
    fn whoever_leads_what_is_served_stays_served(events in prop::collection::vec((event(), any::<bool>()), 1..24)) {
        let mut cluster = Cluster::new();
        let mut before: BTreeMap<u8, Vec<IpAddr>> = BTreeMap::new();
        for (event, wrote_statuses) in events {
            cluster.happen(&event);
            let [first, second] = cluster.plan();
            let held: BTreeMap<u8, Vec<IpAddr>> =
                cluster.services.keys().map(|number| (*number, vips(&second.checkpoint, *number))).collect();
            let all: Vec<IpAddr> = held.values().flatten().copied().collect();
            prop_assert_eq!(all.len(), all.iter().collect::<BTreeSet<_>>().len(), "{:?}", held);
            let changed = match &event {
                Event::Service { number, .. } => Some(*number),
                _ => None,
            };
            for (number, addresses) in &held {
                let name = named(&format!("s{number}"));
                let served: BTreeSet<IpAddr> = second.services[&name].ports.iter().flat_map(|port| &port.vips).copied().collect();
                prop_assert_eq!(&served, &addresses.iter().copied().collect(), "what is held is served: s{}", number);
                let was_lost = |note: &objects::note::Note| {
                    note.subject == Subject::Service(name.clone()) && note.remark.cause == Cause::AddressLost
                };
                let is_told = first.notes.iter().chain(&second.notes).any(was_lost);
                // One that waits for an address that it names exchanges its own for it.
                let is_exchanged = cluster.services[number]["metadata"]["annotations"]["sluice.dev/addresses"]
                    .as_str()
                    .is_some_and(|asked| addresses.iter().any(|vip| vip.to_string() == asked));
                let lost = before.get(number).into_iter().flatten().find(|vip| !addresses.contains(vip));
                prop_assert!(lost.is_none() || changed == Some(*number) || is_told || is_exchanged, "s{} lost {:?}", number, lost);
            }
            let mut world = cluster.found_by_successor(&second.checkpoint, wrote_statuses);
            let mut memory = Memory::default();
            memory.follow_gateways(&cluster.gateways.borrow(), cluster.now);
            let successor = plan(&world, &settings_of_six(), &mut memory, cluster.now);
            for (number, addresses) in held.iter().filter(|(_, addresses)| !addresses.is_empty()) {
                prop_assert_eq!(&vips(&successor.checkpoint, *number), addresses, "s{} under the next leader", number);
            }
            if matches!(event, Event::Leader) {
                std::mem::swap(&mut world, &mut cluster.world);
                cluster.memory = memory;
            }
            before = held;
        }
    }
}
