//! Key `pools`: the addresses that VIPs are allocated from, without overlaps. A pool has the fields of an
//! `AddressPool`.
//!
//! Invariant: [`key_values`] has every key, and reads back as the same pool.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use proto::{AddressRange, AggregationError, Announce, Community, PoolBgp};

use super::key_values::KeyValues;
use super::problem::Location;
use super::section::{Field, Section};
use objects::pool::unreachable;
use objects::scalar::{self, CLASS_EXPECTED, is_class};
use objects::{PoolSpec, crd};

/// A range of a pool with its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocatedRange {
    /// Name of the pool.
    pub pool: String,
    /// Line and key of the range.
    pub location: Location,
    /// The addresses.
    pub range: AddressRange,
    /// How the addresses become reachable.
    pub announce: Announce,
}

/// Reads key `pools` for a controller of this load balancer class.
pub(super) fn take(top: &mut Section<'_>, class: &str) -> (Vec<PoolSpec>, Vec<LocatedRange>) {
    let mut pools: Vec<PoolSpec> = Vec::new();
    let mut located: Vec<LocatedRange> = Vec::new();
    for field in top.items("pools", "pools") {
        let mut section = field.section();
        let name = take_name(&mut section, &pools);
        let announce = section.one_of("announce", &[Announce::L2, Announce::Routed], Announce::L2);
        let ranges = take_ranges(&mut section, &name, announce, &mut located);
        let expected = format!("a number from 1 to {}", crd::PER_NAMESPACE_MAX);
        let parse = |text: &str| text.parse().ok().filter(|n| (1..=crd::PER_NAMESPACE_MAX).contains(n));
        pools.push(PoolSpec {
            announce,
            bgp: take_bgp(&mut section, announce, &ranges),
            auto_assign: section.flag("autoAssign", true),
            avoid_buggy_ips: section.flag("avoidBuggyIPs", false),
            priority: section.number("priority", 0..=crd::PRIORITY_MAX, 0),
            namespaces: section.selector("namespaceSelector"),
            services: section.selector("serviceSelector"),
            max_per_namespace: section.parse("maxPerNamespace", expected, parse),
            load_balancer_class: take_class(&mut section, class),
            allow_cross_namespace_sharing: section.flag("allowCrossNamespaceSharing", false),
            internal: section.flag("internal", false),
            ..PoolSpec::new(name, ranges)
        });
        section.finish();
    }
    (pools, located)
}

const EXPECTED_RANGE: &str = "addresses, CIDRs or ranges FIRST-LAST";
const EXPECTED_RANGES: &str = "a list of addresses, CIDRs or ranges FIRST-LAST, such as [192.0.2.100-192.0.2.199]";

fn take_ranges(section: &mut Section<'_>, pool: &str, announce: Announce, located: &mut Vec<LocatedRange>) -> Vec<AddressRange> {
    let addresses = section.required("addresses", EXPECTED_RANGES);
    let items = addresses.as_ref().map(|field| field.items(EXPECTED_RANGE)).unwrap_or_default();
    if let Some(field) = addresses.filter(Field::is_empty) {
        field.unexpected(EXPECTED_RANGES);
    }
    let mut ranges = Vec::new();
    for item in items {
        let Some(range) = take_range(&item) else { continue };
        match located.iter().find(|other| other.range.overlaps(&range)) {
            Some(other) => item.problem(format!(
                "found {range}, which overlaps {} of `{}` (line {}); an address belongs to one pool, once",
                other.range, other.location.key, other.location.line
            )),
            None => ranges.push(range),
        }
        located.push(LocatedRange { pool: pool.to_owned(), location: item.location.clone(), range, announce });
    }
    ranges
}

/// Reads key `bgp` of a pool with `ranges`.
fn take_bgp(section: &mut Section<'_>, announce: Announce, ranges: &[AddressRange]) -> PoolBgp {
    let Some(field) = section.field("bgp") else { return PoolBgp::default() };
    if announce == Announce::L2 {
        field.problem("is for pools with `announce: routed`; set that, or leave `bgp` out");
    }
    let mut keys = field.section();
    let mut communities: Vec<Community> = Vec::new();
    let items = keys.items("communities", "communities");
    if items.len() > crd::COMMUNITIES_MAX {
        let message = format!("found {} communities, expected at most {}", items.len(), crd::COMMUNITIES_MAX);
        keys.problem_of("communities", message);
    }
    for item in items {
        let Some(community) = item.try_parse("a community such as 65000:100", str::parse) else { continue };
        if communities.contains(&community) {
            item.problem(format!("found {community} a second time; leave it out"));
        }
        communities.push(community);
    }
    let number = |keys: &mut Section<'_>, key| keys.parse(key, "a number from 0 to 4294967295", |text| text.parse().ok());
    let default = PoolBgp::default();
    let bgp = PoolBgp {
        communities,
        med: number(&mut keys, "med"),
        local_pref: number(&mut keys, "localPref"),
        aggregation_length: keys.number("aggregationLength", 1..=32, default.aggregation_length),
        aggregation_length_v6: keys.number("aggregationLengthV6", 1..=128, default.aggregation_length_v6),
    };
    if let Err(error @ AggregationError::Outside { field, .. }) = bgp.check(ranges)
        && let Some(key) = keys.field(field)
    {
        key.problem(error.to_string());
    }
    keys.finish();
    bgp
}

fn take_name(section: &mut Section<'_>, pools: &[PoolSpec]) -> String {
    let expected = "a name of lower-case letters, digits and `-`, at most 63";
    let Some(field) = section.required("name", expected) else { return String::new() };
    let Some(name) = field.parse(expected, |text| scalar::is_dns_label(text, 63).then_some(text)) else { return String::new() };
    if pools.iter().any(|pool| pool.name == name) {
        field.problem(format!("found `{name}` a second time; give each pool a name of its own"));
    }
    name.to_owned()
}

fn take_range(item: &Field<'_>) -> Option<AddressRange> {
    let range = item.try_parse("an address, a CIDR or a range FIRST-LAST", |text| {
        text.parse::<AddressRange>().map_err(|error| format!("expected an address, a CIDR or a range FIRST-LAST: {error}"))
    })?;
    if let Some(net) = unreachable(&range) {
        item.problem(format!("found {range}, which reaches into {net}; expected addresses that clients can reach"));
        return None;
    }
    Some(range)
}

/// Refuses another class: a pool of another class in this file would never be used.
fn take_class(section: &mut Section<'_>, class: &str) -> Option<String> {
    let field = section.field("loadBalancerClass")?;
    let found = field.parse(CLASS_EXPECTED, |text| is_class(text).then(|| text.to_owned()))?;
    if found != class {
        field.problem(format!("found `{found}`, but this controller's class is `{class}`; leave the key or the pool out"));
    }
    Some(found)
}

/// The keys of one pool.
pub(super) fn key_values(pool: &PoolSpec) -> KeyValues {
    KeyValues::default()
        .with("name", &pool.name)
        .with_texts("addresses", &pool.ranges)
        .with("announce", pool.announce)
        .with("bgp", (pool.announce == Announce::Routed).then_some(&pool.bgp))
        .with("autoAssign", pool.auto_assign)
        .with("avoidBuggyIPs", pool.avoid_buggy_ips)
        .with("priority", pool.priority)
        .with("namespaceSelector", LabelSelector::from(pool.namespaces.clone()))
        .with("serviceSelector", LabelSelector::from(pool.services.clone()))
        .with("maxPerNamespace", pool.max_per_namespace)
        .with("loadBalancerClass", &pool.load_balancer_class)
        .with("allowCrossNamespaceSharing", pool.allow_cross_namespace_sharing)
        .with("internal", pool.internal)
}
