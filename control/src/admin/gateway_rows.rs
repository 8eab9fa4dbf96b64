//! Rows about gateways and VIPs: who is connected, who owns what, partners and routing sessions.
//!
//! Invariant: a gateway has one row, also while it reconnects. Not here: how gateways report (`gateways`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use objects::text;
use proto::{Announce, FleetStatus, Generation, Pool, State, VipElection, v1, vip_group};

use crate::gateways::registry::{Gateway, Gateways};
use crate::plan::addresses::PoolUse;

/// Gateways of the group by their objects: names, and when each was last seen, in seconds since 1970, if that is known.
pub type KnownGateways = BTreeMap<String, Option<u64>>;

/// Connected and recently disconnected gateways, those that pools wait for, and `known` ones, by name.
pub(super) fn gateways(
    gateways: &Gateways,
    pools: &[PoolUse],
    known: &KnownGateways,
    epoch: Option<&str>,
) -> Vec<v1::GatewayStatus> {
    let connected = newest(gateways).into_values().map(|gateway| connected(gateway, gateways, epoch));
    let disconnected = gateways.disconnected().iter().map(|(name, seen)| v1::GatewayStatus {
        name: name.clone(),
        draining: gateways.is_drained(name),
        last_seen: written(*seen),
        ..v1::GatewayStatus::default()
    });
    let mut all: BTreeMap<String, v1::GatewayStatus> = connected.chain(disconnected).map(|row| (row.name.clone(), row)).collect();
    // One that was not connected since this controller leads is known from its object only.
    let unseen = |name: &String, seen_s: Option<u64>| v1::GatewayStatus {
        name: name.clone(),
        draining: gateways.is_drained(name),
        last_seen: seen_s.map(text::of_time).unwrap_or_default(),
        ..v1::GatewayStatus::default()
    };
    for (name, seen_s) in known {
        all.entry(name.clone()).or_insert_with(|| unseen(name, *seen_s));
    }
    for pool in pools {
        for name in &pool.awaited {
            all.entry(name.clone()).or_insert_with(|| unseen(name, None)).awaited_by.push(pool.state.name.clone());
        }
    }
    all.into_values().collect()
}

/// The connected gateways by name. Of one that reconnects, the last connection is in use.
fn newest(gateways: &Gateways) -> BTreeMap<&str, &Gateway> {
    gateways.iter().map(|gateway| (gateway.name.as_str(), gateway)).collect()
}

fn connected(gateway: &Gateway, all: &Gateways, epoch: Option<&str>) -> v1::GatewayStatus {
    let fleet = gateway.fleet.as_deref().map(fleet_row).unwrap_or_default();
    let generation = gateway.acknowledged.zip(epoch).map(|(counter, epoch)| Generation { epoch: epoch.to_owned(), counter });
    v1::GatewayStatus {
        name: gateway.name.clone(),
        ready: gateway.ready,
        generation: generation.map_or_else(String::new, |generation| generation.to_string()),
        draining: all.is_drained(&gateway.name),
        last_seen: written(gateway.last_seen),
        version: gateway.version.clone(),
        flows: gateway.flows,
        // Shadow flows are a part of the flows, and are reported more often.
        shadow_flows: fleet.shadow_flows.min(gateway.flows),
        ..fleet
    }
}

/// The fields about the part in the fleet.
#[must_use]
pub fn fleet_row(fleet: &FleetStatus) -> v1::GatewayStatus {
    let duplicate = |(vip, station): (&IpAddr, &String)| v1::DuplicateStatus { vip: vip.to_string(), station: station.clone() };
    let partner = |partner: &proto::FleetPartner| v1::PartnerStatus {
        name: partner.name.clone(),
        address: partner.address.clone(),
        in_sync: partner.is_in_sync,
        lag_ms: partner.lag_ms,
    };
    let session = |session: &proto::RoutingSession| v1::SessionStatus {
        protocol: session.protocol.as_str().to_owned(),
        peer: session.peer.clone(),
        status: session.health.as_str().to_owned(),
        state: session.state.clone(),
        since: text::of_time(session.since_s),
    };
    let election = fleet.election.clone().unwrap_or_default();
    let owned_groups: Vec<_> = election.owned_groups().map(u32::from).collect();
    v1::GatewayStatus {
        groups_owned: u32::try_from(owned_groups.len()).unwrap_or(u32::MAX),
        groups: election.groups.into(),
        owned_groups,
        takeovers: election.takeovers,
        election_restarts: election.restarts,
        unfit: election.unfit.unwrap_or_default(),
        duplicates: fleet.duplicates.iter().map(duplicate).collect(),
        partners: fleet.partners.iter().map(partner).collect(),
        partners_in_sync: u32::try_from(fleet.partners_in_sync()).unwrap_or(u32::MAX),
        lag_ms: fleet.lag_ms(),
        shadow_flows: fleet.shadow_flows,
        sessions: fleet.sessions.iter().map(session).collect(),
        ..v1::GatewayStatus::default()
    }
}

/// Every VIP of a Service, by address.
pub(super) fn vips(state: &State, gateways: &Gateways) -> Vec<v1::VipStatus> {
    let mut services: BTreeMap<IpAddr, BTreeSet<String>> = BTreeMap::new();
    for service in state.services.values() {
        for vip in service.ports.iter().flat_map(|port| &port.vips) {
            services.entry(*vip).or_default().insert(service.name.to_string());
        }
    }
    let ready: Vec<_> = newest(gateways).into_values().filter(|gateway| gateway.ready).collect();
    services.into_iter().map(|(vip, services)| vip_row(vip, services, &state.pools, gateways, &ready)).collect()
}

fn vip_row(vip: IpAddr, services: BTreeSet<String>, pools: &[Pool], gateways: &Gateways, ready: &[&Gateway]) -> v1::VipStatus {
    let pool = pools.iter().find(|pool| pool.ranges.iter().any(|range| range.contains(vip)));
    let announce = pool.map(|pool| pool.announce);
    let election = |gateway: &Gateway| gateway.fleet.as_ref().and_then(|fleet| fleet.election.clone());
    let owns = |election: &VipElection| election.owned >> vip_group(vip, election.groups) & 1 == 1;
    let has_it = |gateway: &&&Gateway| match announce {
        Some(Announce::L2) => election(gateway).is_none_or(|election| owns(&election)),
        Some(Announce::Routed) => !gateways.is_drained(&gateway.name),
        None => true,
    };
    let elected = ready.iter().filter_map(|gateway| election(gateway)).find(|_| announce == Some(Announce::L2));
    let others = ready.iter().filter_map(|gateway| gateway.fleet.as_ref()?.duplicates.get(&vip).cloned());
    let word = |announce| match announce {
        Announce::L2 => "l2",
        Announce::Routed => "routed",
    };
    v1::VipStatus {
        vip: vip.to_string(),
        pool: pool.map(|pool| pool.name.clone()).unwrap_or_default(),
        announce: announce.map_or("", word).to_owned(),
        group: elected.map(|election| vip_group(vip, election.groups).into()),
        gateways: ready.iter().filter(has_it).map(|gateway| gateway.name.clone()).collect(),
        services: services.into_iter().collect(),
        stations: others.collect::<BTreeSet<_>>().into_iter().collect(),
    }
}

/// Formats a time with a precision of one second.
pub(super) fn written(time: SystemTime) -> String {
    text::of_time(u64::try_from(seconds(time)).unwrap_or_default())
}

/// Seconds since 1970.
pub(super) fn seconds(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proto::{
        AddressRange, Family, FleetPartner, MaglevSpec, PoolBgp, Protocol, RoutingSession, Service, ServiceName, ServicePort,
        SessionHealth, SessionProtocol,
    };
    use tokio::sync::watch;

    use super::*;
    use crate::gateways::registry::{Connection, Report};
    use crate::plan::pools::PoolState;

    fn connect(gateways: &watch::Sender<Gateways>, name: &str, fleet: FleetStatus) -> Connection {
        let connection = Connection::open(gateways, name, "0.1.0", Vec::new());
        connection.report(Report { ready: true, fleet: Some(fleet), ..Report::default() });
        connection
    }

    fn owning(owned: u64) -> FleetStatus {
        let election = VipElection { groups: 16, owned, takeovers: 4, ..VipElection::default() };
        FleetStatus { election: Some(election), ..FleetStatus::default() }
    }

    fn state() -> State {
        let port = |vips: &[&str]| ServicePort {
            vips: vips.iter().map(|vip| vip.parse().unwrap()).collect(),
            ..ServicePort::new(Protocol::Tcp, Family::V4, 80, MaglevSpec { size: 251, seed: 0, hash_version: 1 })
        };
        let service = |name: &str, vips: &[&str]| {
            let name = ServiceName::new("shop", name);
            (name.clone(), Arc::new(Service { ports: vec![port(vips), port(vips)], ..Service::new(name, Vec::new()) }))
        };
        let pool = |name: &str, range: &str, announce| {
            let ranges = vec![range.parse::<AddressRange>().unwrap()];
            Pool { name: name.to_owned(), ranges, announce, bgp: PoolBgp::default() }
        };
        State {
            services: [
                service("a", &["192.0.2.100", "203.0.113.7"]),
                service("b", &["192.0.2.100"]),
                service("c", &["192.0.2.9"]),
            ]
            .into_iter()
            .collect(),
            pools: vec![pool("link", "192.0.2.100-192.0.2.199", Announce::L2), pool("far", "203.0.113.0/24", Announce::Routed)],
            ..State::default()
        }
    }

    #[test]
    fn vips_name_who_answers_for_them() {
        let gateways = watch::Sender::new(Gateways::default());
        // 192.0.2.100 is of group 11.
        let with_station =
            FleetStatus { duplicates: [("192.0.2.100".parse().unwrap(), "02:00:00:00:00:09".to_owned())].into(), ..owning(0) };
        let _connections = (connect(&gateways, "edge-1", owning(1 << 11)), connect(&gateways, "edge-2", with_station));
        Gateways::drain(&gateways, ["edge-1".to_owned()].into());
        let rows = vips(&state(), &gateways.borrow());
        let texts: Vec<_> = rows
            .iter()
            .map(|row| {
                let group = row.group.map_or_else(String::new, |group| group.to_string());
                let lists = [&row.gateways, &row.services, &row.stations].map(|list| list.join(","));
                format!("{} {} {} {group} {}", row.vip, row.pool, row.announce, lists.join(" "))
            })
            .collect();
        let expected = [
            "192.0.2.9    edge-1,edge-2 shop/c ",
            "192.0.2.100 link l2 11 edge-1 shop/a,shop/b 02:00:00:00:00:09",
            "203.0.113.7 far routed  edge-2 shop/a ",
        ];
        assert_eq!(texts, expected);
    }

    #[test]
    fn a_vip_of_a_group_that_nobody_owns_has_no_gateway() {
        let gateways = watch::Sender::new(Gateways::default());
        let _connection = connect(&gateways, "edge-1", owning(!(1 << 11)));
        assert_eq!(vips(&state(), &gateways.borrow())[1].gateways, Vec::<String>::new());
    }

    #[test]
    fn shadow_flows_are_never_more_than_the_flows_that_they_are_part_of() {
        let gateways = watch::Sender::new(Gateways::default());
        let connection = connect(&gateways, "edge-1", FleetStatus::default());
        for (flows, shadow_flows, shown) in [(100, 40, 40), (100, 140, 100), (0, 7, 0)] {
            let fleet = Some(FleetStatus { shadow_flows, ..FleetStatus::default() });
            connection.report(Report { flows, fleet, ..Report::default() });
            assert_eq!(
                super::gateways(&gateways.borrow(), &[], &KnownGateways::new(), None)[0].shadow_flows,
                shown,
                "{shadow_flows} of {flows}"
            );
        }
    }

    #[test]
    fn a_gateway_shows_its_part_in_the_fleet_and_an_older_one_does_not() {
        let gateways = watch::Sender::new(Gateways::default());
        let session = |protocol, health| RoutingSession {
            protocol,
            peer: "192.0.2.1".to_owned(),
            health,
            state: "Established".to_owned(),
            since_s: 1_769_860_800,
        };
        let partner = |is_in_sync, lag_ms| FleetPartner { name: "edge-2".into(), address: "a".into(), is_in_sync, lag_ms };
        let fleet = FleetStatus {
            partners: vec![partner(true, Some(3)), partner(false, None)],
            sessions: vec![session(SessionProtocol::Bgp, SessionHealth::Up), session(SessionProtocol::Bfd, SessionHealth::Down)],
            ..owning(0b11)
        };
        let _connection = connect(&gateways, "edge-1", fleet);
        let _older = Connection::open(&gateways, "edge-2", "0.0.9", Vec::new());
        let rows = super::gateways(&gateways.borrow(), &[], &KnownGateways::new(), Some("e"));
        let row = &rows[0];
        assert_eq!((row.groups_owned, row.groups, &row.owned_groups[..], row.takeovers), (2, 16, &[0, 1][..], 4));
        assert_eq!((row.partners.len(), row.partners_in_sync, row.lag_ms), (2, 1, Some(3)));
        let sessions: Vec<_> = row.sessions.iter().map(|one| (one.protocol.as_str(), one.status.as_str())).collect();
        assert_eq!(sessions, [("bgp", "up"), ("bfd", "down")]);
        assert_eq!(row.sessions[0].since, "2026-01-31T12:00:00Z");
        assert_eq!((rows[1].groups, rows[1].sessions.len()), (0, 0));
        drop(_connection);
        let gone = &super::gateways(&gateways.borrow(), &[], &KnownGateways::new(), None)[0];
        assert_eq!((gone.name.as_str(), gone.ready, gone.groups), ("edge-1", false, 0));
    }

    #[test]
    fn gateways_that_freed_addresses_wait_for_name_the_pools() {
        let gateways = watch::Sender::new(Gateways::default());
        let _one = connect(&gateways, "edge-1", FleetStatus::default());
        drop(connect(&gateways, "edge-2", FleetStatus::default()));
        let pool = |name: &str, awaited: &[&str]| PoolUse {
            state: PoolState { name: name.to_owned(), ..PoolState::default() },
            awaited: awaited.iter().map(|name| (*name).to_owned()).collect(),
            ..PoolUse::default()
        };
        let pools = [pool("a", &["edge-2", "edge-3"]), pool("b", &[]), pool("c", &["edge-2"])];
        let rows = super::gateways(&gateways.borrow(), &pools, &KnownGateways::new(), None);
        let rows: Vec<_> = rows.iter().map(|row| (row.name.as_str(), row.awaited_by.join(","))).collect();
        assert_eq!(rows, [("edge-1", String::new()), ("edge-2", "a,c".to_owned()), ("edge-3", "a".to_owned())]);
    }

    #[test]
    fn a_gateway_that_is_known_by_its_object_alone_has_a_row() {
        let gateways = watch::Sender::new(Gateways::default());
        let _one = connect(&gateways, "edge-1", FleetStatus::default());
        let known = [("edge-1", None), ("edge-2", Some(1_769_860_800)), ("edge-3", None)];
        let known: KnownGateways = known.into_iter().map(|(name, seen_s)| (name.to_owned(), seen_s)).collect();
        let rows = super::gateways(&gateways.borrow(), &[], &known, None);
        let rows: Vec<_> = rows.iter().map(|row| (row.name.as_str(), row.version.is_empty(), row.last_seen.as_str())).collect();
        assert_eq!(rows[1..], [("edge-2", true, "2026-01-31T12:00:00Z"), ("edge-3", true, "")]);
        assert!(rows[0].0 == "edge-1" && !rows[0].1, "{rows:?}");
    }
}
