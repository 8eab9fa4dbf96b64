//! Troubles of a group of gateways, as the leader of its controllers sees them.

use super::findings::Findings;
use super::kind::Kind;
use super::observed::ObservedGroup;
use crate::v1;

pub(super) fn look(group: &ObservedGroup, found: &mut Findings) {
    if let Some(why) = &group.starting {
        found.add(Kind::ControllerStarting, "Controller", why);
    } else if group.gateways.iter().all(|gateway| gateway.version.is_empty()) {
        found.add(Kind::NoGateway, "Controller", "no gateway is connected to it");
    }
    for gateway in &group.gateways {
        look_at_gateway(gateway, group.newest, found);
    }
    for v1::Silent { gateway, reason } in &group.silent {
        found.add(Kind::GatewaySilent, format!("Gateway {gateway}"), reason);
    }
    for vip in &group.vips {
        look_at_vip(vip, &group.pools, found);
    }
    for pool in &group.pools {
        look_at_pool(pool, found);
    }
}

fn look_at_gateway(gateway: &v1::GatewayStatus, newest: Option<u64>, found: &mut Findings) {
    let object = format!("Gateway {}", gateway.name);
    if gateway.version.is_empty() {
        let seen = if gateway.last_seen.is_empty() { "in this controller's time" } else { gateway.last_seen.as_str() };
        // What is drained may be switched off.
        let kind = if gateway.draining { Kind::Drained } else { Kind::GatewayAway };
        let cause = if gateway.last_seen.is_empty() { format!("not seen {seen}") } else { format!("last seen at {seen}") };
        found.add(kind, object, format!("it is not connected; {cause}"));
        return;
    }
    if gateway.draining {
        found.add(Kind::Drained, &object, "it is drained");
    }
    if !gateway.ready {
        found.add(Kind::GatewayNotReady, object, "its workers have no complete state");
    } else if newest.is_some_and(|newest| counter(&gateway.generation).is_none_or(|counter| counter < newest)) {
        found.add(Kind::GatewayBehind, object, "its workers do not forward by the newest state");
    }
}

/// Of a generation as text, `epoch/counter`.
fn counter(generation: &str) -> Option<u64> {
    generation.rsplit_once('/')?.1.parse().ok()
}

fn look_at_vip(vip: &v1::VipStatus, pools: &[v1::PoolStatus], found: &mut Findings) {
    let object = format!("VIP {}", vip.vip);
    let services = vip.services.join(", ");
    if vip.gateways.is_empty() {
        found.add(Kind::VipUnowned, object, format!("no gateway answers for it; it serves {services}"));
        return;
    }
    // Without an election gateways of different links have no group, and one that stations of a link see is a duplicate.
    if vip.announce != "l2" || vip.group.is_none() {
        return;
    }
    let elsewhere = pools.iter().find(|pool| pool.name == vip.pool).map_or(&[][..], |pool| &pool.unannounced_by);
    let owners: Vec<_> = vip.gateways.iter().filter(|gateway| !elsewhere.contains(gateway)).map(String::as_str).collect();
    if owners.len() > 1 {
        let gateways = owners.join(", ");
        found.add(Kind::VipOwnedTwice, object, format!("{gateways} answer for it at once; it serves {services}"));
    }
}

fn look_at_pool(pool: &v1::PoolStatus, found: &mut Findings) {
    let object = format!("AddressPool {}", pool.name);
    if !pool.conflict.is_empty() {
        found.add(Kind::PoolConflict, &object, &pool.conflict);
    }
    // "0", or by family "0 IPv4, 9 IPv6".
    if pool.total != "0" && pool.available.split(", ").any(|figure| figure == "0" || figure.starts_with("0 ")) {
        let (used, available) = (&pool.used, &pool.available);
        found.add(Kind::PoolExhausted, &object, format!("of addresses {used} are in use, {available} are available"));
    }
    if !pool.unannounced_by.is_empty() {
        let gateways = pool.unannounced_by.join(", ");
        found.add(Kind::PoolUnannounced, object, format!("{gateways} cannot answer ARP and NDP for all of its addresses"));
    }
}
