//! MetalLB's objects: IPAddressPool, its predecessor AddressPool, advertisements, peers.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube_core::{Selector, SelectorExt};
use serde::Deserialize;

use super::input::{ConvertError, Found};
use super::pool::{ConvertedPool, addresses};
use super::selectors::{any_of, named};
use objects::crd::{AddressPoolSpec, AnnounceKind, BgpSpec, PRIORITY_MAX};
use proto::Community;

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

/// Pools in L2Advertisement and BGPAdvertisement, and how they are announced.
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

/// A Community: names for communities.
#[derive(Default, Deserialize)]
#[serde(default)]
struct CommunityAliases {
    communities: Vec<CommunityAlias>,
}

#[derive(Deserialize)]
struct CommunityAlias {
    name: String,
    value: String,
}

struct Advertised<'a> {
    found: &'a Found,
    how: AnnounceKind,
    bgp: BgpSpec,
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
    let aliases = aliases(found)?;
    let mut advertised = Vec::new();
    for object in found.iter().filter(|object| object.group == GROUP) {
        match object.kind.as_str() {
            "L2Advertisement" => advertised.push(advertisement(object, AnnounceKind::L2, &aliases, notes)?),
            "BGPAdvertisement" => advertised.push(advertisement(object, AnnounceKind::Routed, &aliases, notes)?),
            "BGPPeer" => notes.push(peer(object)?),
            "BFDProfile" => {
                notes.push(object.note(" has no equivalent: it belongs into the configuration of FRR or BIRD on each gateway, see docs/operate/bgp.md"));
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
    let announce = announce(object, pool.protocol.as_deref(), advertised, notes);
    let selects = namespace_selector.is_some() || service_selector.is_some();
    let spec = AddressPoolSpec {
        addresses: addresses(object, pool.addresses.iter().map(String::as_str))?,
        auto_assign: pool.auto_assign.unwrap_or(true),
        avoid_buggy_ips: pool.avoid_buggy_ips,
        priority: if selects && priority == 0 { PRIORITY_WITH_SELECTOR } else { priority },
        namespace_selector,
        service_selector,
        announce,
        bgp: if announce == AnnounceKind::Routed { bgp(object, advertised, notes) } else { None },
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

/// How the advertisements of a pool announce it by BGP. A pool of ours is announced once.
fn bgp(object: &Found, advertised: &[Advertised<'_>], notes: &mut Vec<String>) -> Option<BgpSpec> {
    let is_of_this = |one: &&Advertised<'_>| one.how == AnnounceKind::Routed && one.names(object);
    let mut of_this = advertised.iter().filter(is_of_this);
    let first = of_this.next()?;
    let others: Vec<String> = of_this.filter(|other| other.bgp != first.bgp).map(|other| other.found.title()).collect();
    if !others.is_empty() {
        notes.push(object.note(format_args!(
            " is announced in several ways; a pool of sluice has one: it becomes that of {}, not that of {}",
            first.found.title(),
            others.join(", ")
        )));
    }
    Some(first.bgp.clone()).filter(|bgp| *bgp != BgpSpec::default())
}

/// The names that Community objects give to communities.
fn aliases(found: &[Found]) -> Result<BTreeMap<String, String>, ConvertError> {
    let mut aliases = BTreeMap::new();
    for object in found.iter().filter(|object| object.is(GROUP, "Community")) {
        let CommunityAliases { communities } = object.spec::<Option<CommunityAliases>>()?.unwrap_or_default();
        aliases.extend(communities.into_iter().map(|alias| (alias.name, alias.value)));
    }
    Ok(aliases)
}

/// The communities in our format, without those that a pool may not have.
fn communities(object: &Found, written: &[String], aliases: &BTreeMap<String, String>, notes: &mut Vec<String>) -> Vec<String> {
    let mut communities: Vec<Community> = Vec::new();
    for text in written {
        let value = aliases.get(text).unwrap_or(text);
        match value.strip_prefix("large:").unwrap_or(value).parse() {
            Ok(community) if communities.contains(&community) => {}
            Ok(community) => communities.push(community),
            Err(error) => {
                notes.push(object.note(format_args!(
                    ": community {text:?} is left out, {error}; names are read from objects of kind Community"
                )));
            }
        }
    }
    communities.iter().map(ToString::to_string).collect()
}

fn advertisement<'a>(
    object: &'a Found,
    how: AnnounceKind,
    aliases: &BTreeMap<String, String>,
    notes: &mut Vec<String>,
) -> Result<Advertised<'a>, ConvertError> {
    let spec: Advertisement = object.spec::<Option<Advertisement>>()?.unwrap_or_default();
    let lost = [
        ("nodeSelectors", !spec.node_selectors.is_empty()),
        ("interfaces", !spec.interfaces.is_empty()),
        ("peers", !spec.peers.is_empty()),
    ];
    let lost: Vec<_> = lost.iter().filter(|(_, is_set)| *is_set).map(|(field, _)| *field).collect();
    if !lost.is_empty() {
        let instead = match how {
            AnnounceKind::L2 => "the gateways answer for the VIPs, on the port whose network they are of",
            AnnounceKind::Routed => "every gateway announces the VIPs to all routers of its FRR or BIRD",
        };
        notes.push(object.note(format_args!(": no equivalent of {}: {instead}", lost.join(", "))));
    }
    let wrong = |error| object.place.error(format!("{}: ipAddressPoolSelectors: {error}", object.title()));
    let selectors = spec.ip_address_pool_selectors.into_iter().map(|selector| Selector::try_from(selector).map_err(wrong));
    let selectors = selectors.collect::<Result<_, _>>()?;
    // MetalLB's defaults are ours.
    let shorter = |length: Option<u32>, whole: u32| length.filter(|length| *length != whole);
    let bgp = BgpSpec {
        communities: communities(object, &spec.communities, aliases, notes),
        med: None,
        local_pref: spec.local_pref,
        aggregation_length: shorter(spec.aggregation_length, 32),
        aggregation_length_v6: shorter(spec.aggregation_length_v6, 128),
    };
    Ok(Advertised { found: object, how, bgp, pools: spec.ip_address_pools.into_iter().collect(), selectors })
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
         docs/operate/bgp.md; the router must take sessions from the gateways",
        peer_address.as_deref().unwrap_or("?"),
        number(peer_asn),
        number(my_asn)
    )))
}
