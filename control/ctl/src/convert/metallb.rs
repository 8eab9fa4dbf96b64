//! MetalLB's objects: IPAddressPool, its predecessor AddressPool, advertisements, peers.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube_core::{Selector, SelectorExt};
use serde::Deserialize;

use super::input::{ConvertError, Found};
use super::pool::{ConvertedPool, addresses};
use super::selectors::{any_of, named};
use objects::crd::{AddressPoolSpec, AnnounceKind, PRIORITY_MAX};

const GROUP: &str = "metallb.io";
/// MetalLB tries pools with selectors before those without, regardless of priority. sluice uses the number alone, and 0
/// comes last.
const PRIORITY_WITH_SELECTOR: u32 = PRIORITY_MAX;

/// IPAddressPool, and the common fields of AddressPool (until 0.13).
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MetallbPool {
    #[serde(default)]
    addresses: Vec<String>,
    #[serde(default)]
    auto_assign: Option<bool>,
    #[serde(default, rename = "avoidBuggyIPs")]
    avoid_buggy_ips: bool,
    #[serde(default)]
    service_allocation: Option<Allocation>,
    /// AddressPool only: `layer2` or `bgp`.
    #[serde(default)]
    protocol: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Allocation {
    #[serde(default)]
    priority: u32,
    #[serde(default)]
    namespaces: Vec<String>,
    #[serde(default)]
    namespace_selectors: Vec<LabelSelector>,
    #[serde(default)]
    service_selectors: Vec<LabelSelector>,
}

/// Pools in L2Advertisement and BGPAdvertisement, and their settings without equivalent.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Advertisement {
    ip_address_pools: Vec<String>,
    ip_address_pool_selectors: Vec<LabelSelector>,
    node_selectors: Vec<serde_json::Value>,
    interfaces: Vec<String>,
    aggregation_length: Option<u32>,
    aggregation_length_v6: Option<u32>,
    local_pref: Option<u32>,
    communities: Vec<String>,
    peers: Vec<String>,
}

struct Advertised<'a> {
    found: &'a Found,
    how: AnnounceKind,
    pools: BTreeSet<String>,
    selectors: Vec<Selector>,
}

impl Advertised<'_> {
    fn names(&self, pool: &Found) -> bool {
        let labels = pool.metadata.labels.clone().unwrap_or_default();
        let everything = self.pools.is_empty() && self.selectors.is_empty();
        everything
            || pool.metadata.name.as_ref().is_some_and(|name| self.pools.contains(name))
            || self.selectors.iter().any(|selector| selector.matches(&labels))
    }
}

/// Converts the pools; adds notes for settings without equivalent.
pub(super) fn pools(found: &[Found], notes: &mut Vec<String>) -> Result<Vec<ConvertedPool>, ConvertError> {
    let mut advertised = Vec::new();
    for object in found.iter().filter(|object| object.group == GROUP) {
        match object.kind.as_str() {
            "L2Advertisement" => advertised.push(advertisement(object, AnnounceKind::L2, notes)?),
            "BGPAdvertisement" => advertised.push(advertisement(object, AnnounceKind::Routed, notes)?),
            "BGPPeer" => notes.push(peer(object)?),
            "BFDProfile" | "Community" => {
                notes.push(object.note(" has no equivalent: it belongs into the configuration of FRR or BIRD on each gateway"))
            }
            _ => {}
        }
    }
    let mut pools = Vec::new();
    for object in found {
        if object.is(GROUP, "IPAddressPool") || object.is(GROUP, "AddressPool") {
            pools.extend(pool(object, &advertised, notes)?);
        } else if object.is("", "ConfigMap") {
            let text = " is not read: the configuration of MetalLB 0.12 and before has to become objects of MetalLB first";
            notes.push(object.note(text));
        }
    }
    Ok(pools)
}

fn pool(object: &Found, advertised: &[Advertised<'_>], notes: &mut Vec<String>) -> Result<Option<ConvertedPool>, ConvertError> {
    let pool: MetallbPool = object.spec()?;
    let Allocation { priority, namespaces, mut namespace_selectors, service_selectors } =
        pool.service_allocation.unwrap_or_default();
    if !namespaces.is_empty() {
        namespace_selectors.push(named(&namespaces));
    }
    let (Ok(namespace_selector), Ok(service_selector)) = (any_of(namespace_selectors), any_of(service_selectors)) else {
        notes.push(object.note(
            " is left out: of its selectors any suffices, and one selector cannot say that; give what they select a label of \
             its own, or divide the addresses over pools with a selector each",
        ));
        return Ok(None);
    };
    let selects = namespace_selector.is_some() || service_selector.is_some();
    let spec = AddressPoolSpec {
        addresses: addresses(object, pool.addresses.iter().map(String::as_str))?,
        auto_assign: pool.auto_assign.unwrap_or(true),
        avoid_buggy_ips: pool.avoid_buggy_ips,
        priority: if selects && priority == 0 { PRIORITY_WITH_SELECTOR } else { priority },
        namespace_selector,
        service_selector,
        announce: announce(object, pool.protocol.as_deref(), advertised, notes),
        ..AddressPoolSpec::default()
    };
    Ok(Some(ConvertedPool::new(object, spec)))
}

fn announce(object: &Found, protocol: Option<&str>, advertised: &[Advertised<'_>], notes: &mut Vec<String>) -> AnnounceKind {
    if let Some(protocol) = protocol {
        return if protocol == "bgp" { AnnounceKind::Routed } else { AnnounceKind::L2 };
    }
    let of_this: Vec<_> = advertised.iter().filter(|advertised| advertised.names(object)).collect();
    let has = |how| of_this.iter().any(|advertised| advertised.how == how);
    let (l2, routed) = (has(AnnounceKind::L2), has(AnnounceKind::Routed));
    if l2 && routed {
        let names = of_this.iter().map(|advertised| advertised.found.title()).collect::<Vec<_>>().join(", ");
        notes.push(object.note(format_args!(
            " is announced in both ways ({names}); a pool of sluice has one: it becomes `announce: routed`, make it `l2` if its \
             addresses are of a network that the gateways are on"
        )));
    } else if !l2 && !routed {
        notes.push(object.note(": no advertisement of it was read; it becomes `announce: l2`"));
    }
    if routed { AnnounceKind::Routed } else { AnnounceKind::L2 }
}

fn advertisement<'a>(object: &'a Found, how: AnnounceKind, notes: &mut Vec<String>) -> Result<Advertised<'a>, ConvertError> {
    let spec: Advertisement = object.spec::<Option<Advertisement>>()?.unwrap_or_default();
    let lost = [
        ("nodeSelectors", !spec.node_selectors.is_empty()),
        ("interfaces", !spec.interfaces.is_empty()),
        ("aggregationLength", spec.aggregation_length.is_some() || spec.aggregation_length_v6.is_some()),
        ("localPref", spec.local_pref.is_some()),
        ("communities", !spec.communities.is_empty()),
        ("peers", !spec.peers.is_empty()),
    ];
    let lost: Vec<_> = lost.iter().filter(|(_, is_set)| *is_set).map(|(field, _)| *field).collect();
    if !lost.is_empty() {
        let instead = match how {
            AnnounceKind::L2 => "the gateways answer for the VIPs, on the port whose network they are of",
            AnnounceKind::Routed => "FRR or BIRD on each gateway announces the VIPs: configure it there",
        };
        notes.push(object.note(format_args!(": no equivalent of {}: {instead}", lost.join(", "))));
    }
    let wrong = |error| object.place.error(format!("{}: ipAddressPoolSelectors: {error}", object.title()));
    let selectors = spec.ip_address_pool_selectors.into_iter().map(|selector| Selector::try_from(selector).map_err(wrong));
    let selectors = selectors.collect::<Result<_, _>>()?;
    Ok(Advertised { found: object, how, pools: spec.ip_address_pools.into_iter().collect(), selectors })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Peer {
    #[serde(rename = "myASN")]
    my_asn: Option<u32>,
    #[serde(rename = "peerASN")]
    peer_asn: Option<u32>,
    peer_address: Option<String>,
}

fn peer(object: &Found) -> Result<String, ConvertError> {
    let Peer { my_asn, peer_asn, peer_address } = object.spec()?;
    let number = |asn: Option<u32>| asn.map_or_else(|| "?".to_owned(), |asn| asn.to_string());
    Ok(object.note(format_args!(
        " has no equivalent: a gateway is a neighbour of {} (AS {}, from AS {}) by FRR or BIRD on it, see \
         docs/guide/addresses.md; the router must take sessions from the gateways",
        peer_address.as_deref().unwrap_or("?"),
        number(peer_asn),
        number(my_asn)
    )))
}
