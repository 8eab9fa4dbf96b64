//! A parsed pool, from the configuration or an `AddressPool` object.
//!
//! Invariant: the rules of the CRD's schema apply here too, because manifests have no API server. A pool with an
//! unusable address is an error as a whole; no pool is used in part.
//! Deliberately not here: overlaps between pools (the controller's `plan`).

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube_core::Selector;
use proto::limits::GROUP_BYTES_MAX;
use proto::{AddressRange, AddressRangeError, AggregationError, Announce, Community, CommunityError, Pool, PoolBgp};

use crate::crd::{self, AddressPool, AddressPoolSpec, AnnounceKind};
use crate::scalar::{CLASS_EXPECTED, is_class, is_dns_label, is_label_key, is_label_value};
use crate::text::cut_chars;

/// Addresses that are unreachable from other machines: "this network", loopback, link-local, multicast, broadcast,
/// IPv4-mapped (RFC 6890). The rest of the reserved 240.0.0.0/4 is unicast, as in Linux.
const UNREACHABLE: [&str; 9] = [
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "224.0.0.0/4",
    "255.255.255.255",
    "::/127",
    "::ffff:0:0/96",
    "fe80::/10",
    "ff00::/8",
];

/// A pool with valid values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    /// Its name.
    pub name: String,
    /// Its addresses, without overlaps; at least one range.
    pub ranges: Vec<AddressRange>,
    /// How routers learn the addresses.
    pub announce: Announce,
    /// How routing daemons announce them, if it is `routed`.
    pub bgp: PoolBgp,
    /// Whether Services that request neither a pool nor an address may get one of these addresses.
    pub auto_assign: bool,
    /// Leave out IPv4 addresses that end in .0 or .255.
    pub avoid_buggy_ips: bool,
    /// Pools of a lower number are used first; 0 comes last.
    pub priority: u32,
    /// Namespaces whose Services may have one of these addresses.
    pub namespaces: Selector,
    /// Services that may have one of these addresses.
    pub services: Selector,
    /// Maximum number of addresses per namespace; unset means no limit.
    pub max_per_namespace: Option<u32>,
    /// Only the installation of this class uses it; unset means that of the default class.
    pub load_balancer_class: Option<String>,
    /// The group of gateways that uses it; unset means the group that serves what names none.
    pub gateway_group: Option<String>,
    /// Whether Services of different namespaces may share an address under MetalLB's sharing key alone.
    pub allow_cross_namespace_sharing: bool,
    /// Whether it is for Services that ask for an internal load balancer, and for others only if they ask for it.
    pub internal: bool,
}

impl PoolSpec {
    /// A pool with these addresses and defaults for everything else.
    #[must_use]
    pub fn new(name: impl Into<String>, ranges: Vec<AddressRange>) -> Self {
        Self {
            name: name.into(),
            ranges,
            announce: Announce::L2,
            bgp: PoolBgp::default(),
            auto_assign: true,
            avoid_buggy_ips: false,
            priority: 0,
            namespaces: Selector::default(),
            services: Selector::default(),
            max_per_namespace: None,
            load_balancer_class: None,
            gateway_group: None,
            allow_cross_namespace_sharing: false,
            internal: false,
        }
    }

    /// Its addresses in the format that operators write.
    #[must_use]
    pub fn ranges_text(&self) -> String {
        self.ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }
}

impl From<&PoolSpec> for Pool {
    /// The pool as sent to gateways.
    fn from(spec: &PoolSpec) -> Self {
        Self { name: spec.name.clone(), ranges: spec.ranges.clone(), announce: spec.announce, bgp: spec.bgp.clone() }
    }
}

/// Why a pool is invalid.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum PoolError {
    /// No name.
    #[error("an AddressPool without metadata.name")]
    Unnamed,
    /// Too few or too many entries.
    #[error("spec.addresses has {0} entries, expected 1 to {max}; make several pools of it", max = crd::ADDRESSES_MAX)]
    Count(usize),
    /// An entry is not a range.
    #[error("spec.addresses[{index}]: {error}")]
    Range {
        /// Which entry.
        index: usize,
        /// What is wrong.
        error: AddressRangeError,
    },
    /// Blanks within an entry.
    #[error("spec.addresses[{0}]: expected no blanks and at most {max} characters", max = crd::ADDRESS_CHARS_MAX)]
    Blanks(usize),
    /// Unreachable addresses.
    #[error("spec.addresses[{index}]: {range} reaches into {net}; expected addresses that clients can reach")]
    Unreachable {
        /// Which entry.
        index: usize,
        /// The entry.
        range: AddressRange,
        /// The network that it overlaps.
        net: &'static str,
    },
    /// Two entries with a common address.
    #[error("spec.addresses[{index}]: {range} overlaps {other} of the same pool; an address belongs to one pool, once")]
    Overlap {
        /// Which entry.
        index: usize,
        /// The entry.
        range: AddressRange,
        /// An earlier one.
        other: AddressRange,
    },
    /// A number out of range.
    #[error("spec.{field} is {found}, expected {least} to {most}")]
    Number {
        /// Which field.
        field: &'static str,
        /// Its value.
        found: u32,
        /// Lowest legal value.
        least: u32,
        /// Highest legal value.
        most: u32,
    },
    /// Settings of BGP for a pool that is not announced by it.
    #[error("spec.bgp is for pools with `announce: routed`, expected that or no spec.bgp")]
    BgpWithoutRoutes,
    /// Too many communities.
    #[error("spec.bgp.communities has {0} entries, expected at most {max}", max = crd::COMMUNITIES_MAX)]
    CommunityCount(usize),
    /// An entry is not a community that a pool may have.
    #[error("spec.bgp.communities[{index}]: found {found:?}, {error}")]
    Community {
        /// Which entry.
        index: usize,
        /// Its text.
        found: String,
        /// What is wrong.
        error: CommunityError,
    },
    /// A community twice.
    #[error("spec.bgp.communities[{index}]: found {community} a second time; leave it out")]
    CommunityTwice {
        /// Which entry.
        index: usize,
        /// The community.
        community: Community,
    },
    /// Aggregates with addresses outside of the pool.
    #[error("spec.bgp.{field}: {0}", field = .0.field())]
    Aggregation(AggregationError),
    /// An invalid selector.
    #[error("spec.{field}: {error}; operators are In and NotIn with values, Exists and DoesNotExist without")]
    Selector {
        /// Which field.
        field: &'static str,
        /// What is wrong.
        error: String,
    },
    /// A selector with a key or a value that no label can have.
    #[error("spec.{field}: {error}")]
    Label {
        /// Which field.
        field: &'static str,
        /// What is wrong.
        error: String,
    },
    /// An invalid class.
    #[error("spec.loadBalancerClass is {0:?}, expected {CLASS_EXPECTED}")]
    Class(String),
    /// An invalid name of a group.
    #[error("spec.gatewayGroup is {0:?}, expected a name of lower-case letters, digits and `-`, at most {GROUP_BYTES_MAX}")]
    GatewayGroup(String),
}

/// The network of unreachable addresses that `range` overlaps, if any.
#[must_use]
pub fn unreachable(range: &AddressRange) -> Option<&'static str> {
    UNREACHABLE.into_iter().find(|net| net.parse().is_ok_and(|net: AddressRange| net.overlaps(range)))
}

/// The addresses of a CIDR; `None` if the text is not a CIDR.
#[must_use]
pub fn range_of(net: &IpNet) -> Option<AddressRange> {
    AddressRange::new(net.network(), net.broadcast()).ok()
}

impl TryFrom<&AddressPool> for PoolSpec {
    type Error = PoolError;

    fn try_from(pool: &AddressPool) -> Result<Self, PoolError> {
        let name = pool.metadata.name.clone().ok_or(PoolError::Unnamed)?;
        let spec = &pool.spec;
        let class = spec.load_balancer_class.clone();
        if let Some(class) = class.as_ref().filter(|class| !is_class(class)) {
            return Err(PoolError::Class(class.chars().take(80).collect()));
        }
        let gateway_group = spec.gateway_group.clone();
        if let Some(group) = gateway_group.as_ref().filter(|group| !is_dns_label(group, GROUP_BYTES_MAX)) {
            return Err(PoolError::GatewayGroup(group.chars().take(80).collect()));
        }
        let ranges = ranges(&spec.addresses)?;
        let limit = spec.max_per_namespace.map(|max| within("maxPerNamespace", max, 1, crd::PER_NAMESPACE_MAX));
        Ok(Self {
            announce: match spec.announce {
                AnnounceKind::L2 => Announce::L2,
                AnnounceKind::Routed => Announce::Routed,
            },
            bgp: bgp(spec, &ranges)?,
            auto_assign: spec.auto_assign,
            avoid_buggy_ips: spec.avoid_buggy_ips,
            priority: within("priority", spec.priority, 0, crd::PRIORITY_MAX)?,
            namespaces: selector("namespaceSelector", spec.namespace_selector.as_ref())?,
            services: selector("serviceSelector", spec.service_selector.as_ref())?,
            max_per_namespace: limit.transpose()?,
            load_balancer_class: class,
            gateway_group,
            allow_cross_namespace_sharing: spec.allow_cross_namespace_sharing,
            internal: spec.internal,
            ..Self::new(name, ranges)
        })
    }
}

fn within(field: &'static str, found: u32, least: u32, most: u32) -> Result<u32, PoolError> {
    if (least..=most).contains(&found) { Ok(found) } else { Err(PoolError::Number { field, found, least, most }) }
}

fn ranges(addresses: &[String]) -> Result<Vec<AddressRange>, PoolError> {
    if addresses.is_empty() || addresses.len() > crd::ADDRESSES_MAX {
        return Err(PoolError::Count(addresses.len()));
    }
    let mut ranges: Vec<AddressRange> = Vec::new();
    for (index, text) in addresses.iter().enumerate() {
        if text.len() > crd::ADDRESS_CHARS_MAX || text.contains(char::is_whitespace) {
            return Err(PoolError::Blanks(index));
        }
        let range: AddressRange = text.parse().map_err(|error| PoolError::Range { index, error })?;
        if let Some(net) = unreachable(&range) {
            return Err(PoolError::Unreachable { index, range, net });
        }
        if let Some(&other) = ranges.iter().find(|other| other.overlaps(&range)) {
            return Err(PoolError::Overlap { index, range, other });
        }
        ranges.push(range);
    }
    Ok(ranges)
}

fn bgp(spec: &AddressPoolSpec, ranges: &[AddressRange]) -> Result<PoolBgp, PoolError> {
    let Some(written) = &spec.bgp else { return Ok(PoolBgp::default()) };
    if spec.announce != AnnounceKind::Routed {
        return Err(PoolError::BgpWithoutRoutes);
    }
    if written.communities.len() > crd::COMMUNITIES_MAX {
        return Err(PoolError::CommunityCount(written.communities.len()));
    }
    let mut communities: Vec<Community> = Vec::new();
    for (index, text) in written.communities.iter().enumerate() {
        let found = || cut_chars(text, crd::ADDRESS_CHARS_MAX);
        let community = text.parse().map_err(|error| PoolError::Community { index, found: found(), error })?;
        if communities.contains(&community) {
            return Err(PoolError::CommunityTwice { index, community });
        }
        communities.push(community);
    }
    let length = |field, written: Option<u32>, most: u8| match written {
        Some(found) => within(field, found, 1, most.into()).map(|length| u8::try_from(length).unwrap_or(most)),
        None => Ok(most),
    };
    let PoolBgp { aggregation_length, aggregation_length_v6, .. } = PoolBgp::default();
    let bgp = PoolBgp {
        communities,
        med: written.med,
        local_pref: written.local_pref,
        aggregation_length: length("bgp.aggregationLength", written.aggregation_length, aggregation_length)?,
        aggregation_length_v6: length("bgp.aggregationLengthV6", written.aggregation_length_v6, aggregation_length_v6)?,
    };
    bgp.check(ranges).map_err(PoolError::Aggregation)?;
    Ok(bgp)
}

fn selector(field: &'static str, written: Option<&LabelSelector>) -> Result<Selector, PoolError> {
    let Some(written) = written else { return Ok(Selector::default()) };
    let refused = |error| Err(PoolError::Label { field, error });
    let labels = written.match_labels.iter().flatten();
    let keys = labels.clone().map(|(key, _)| key).chain(written.match_expressions.iter().flatten().map(|one| &one.key));
    if let Some(key) = keys.into_iter().find(|key| !is_label_key(key)) {
        return refused(format!(
            "key {:?} is none of a label, so that nothing would ever match; expected one such as team",
            cut_chars(key, crd::ADDRESS_CHARS_MAX)
        ));
    }
    let listed = written.match_expressions.iter().flatten().flat_map(|one| one.values.iter().flatten());
    if let Some(value) = labels.map(|(_, value)| value).chain(listed).find(|value| !is_label_value(value)) {
        return refused(format!(
            "value {:?} is none of a label; expected letters, digits, `-`, `_` and `.`, at most 63",
            cut_chars(value, crd::ADDRESS_CHARS_MAX)
        ));
    }
    for one in written.match_expressions.iter().flatten() {
        let takes_values = matches!(one.operator.as_str(), "In" | "NotIn");
        let has_values = one.values.as_ref().is_some_and(|values| !values.is_empty());
        if takes_values != has_values {
            let what = if has_values { "takes no values" } else { "has no values" };
            let error = format!("operator {} of key {} {what}", one.operator, one.key);
            return Err(PoolError::Selector { field, error });
        }
    }
    Selector::try_from(written.clone()).map_err(|error| PoolError::Selector { field, error: error.to_string() })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pool(spec: &Value) -> AddressPool {
        serde_json::from_value(json!({"apiVersion": "sluice.dev/v1beta1", "kind": "AddressPool",
            "metadata": {"name": "edge"}, "spec": spec}))
        .unwrap()
    }

    #[test]
    fn a_pool_with_only_addresses_serves_all_services() {
        let read = PoolSpec::try_from(&pool(&json!({"addresses": ["192.0.2.0/25", "2001:db8::1-2001:db8::9", "192.0.2.200"]})));
        let ranges = ["192.0.2.0-192.0.2.127", "2001:db8::1-2001:db8::9", "192.0.2.200"].map(|text| text.parse().unwrap());
        assert_eq!(read, Ok(PoolSpec::new("edge", ranges.to_vec())));
    }

    #[test]
    fn every_field_is_read() {
        let all = json!({"addresses": ["192.0.2.1"], "autoAssign": false, "avoidBuggyIPs": true, "priority": 7,
            "namespaceSelector": {"matchLabels": {"team": "a"}}, "serviceSelector": {"matchExpressions": [{"key": "x", "operator": "Exists"}]},
            "maxPerNamespace": 3, "loadBalancerClass": "sluice.dev/gateway", "gatewayGroup": "east", "announce": "routed",
            "bgp": {"communities": ["65000:100", "65000:1:2", "no-export"], "med": 50, "localPref": 200, "aggregationLengthV6": 64},
            "allowCrossNamespaceSharing": true, "internal": true});
        let read = PoolSpec::try_from(&pool(&all)).unwrap();
        assert_eq!((read.auto_assign, read.avoid_buggy_ips, read.priority), (false, true, 7));
        assert_eq!((read.namespaces.to_string(), read.services.to_string()), ("team=a".to_owned(), "x".to_owned()));
        assert_eq!((read.max_per_namespace, read.announce), (Some(3), Announce::Routed));
        let communities = ["65000:100", "65000:1:2", "65535:65281"].map(|text| text.parse().unwrap()).to_vec();
        let bgp = PoolBgp { communities, med: Some(50), local_pref: Some(200), aggregation_length_v6: 64, ..PoolBgp::default() };
        assert_eq!(read.bgp, bgp);
        assert_eq!(read.load_balancer_class.as_deref(), Some("sluice.dev/gateway"));
        assert_eq!(read.gateway_group.as_deref(), Some("east"));
        assert!(read.allow_cross_namespace_sharing && read.internal);
    }

    #[test]
    fn the_controller_refuses_pools_that_the_api_server_refuses() {
        let expression = |operator: &str, values: Value| json!({"addresses": ["192.0.2.1"], "namespaceSelector": {"matchExpressions": [{"key": "a", "operator": operator, "values": values}]}});
        let with = |field: &str, value: Value| json!({"addresses": ["192.0.2.1"], field: value});
        let routed = |bgp: Value| json!({"addresses": ["192.0.2.1"], "announce": "routed", "bgp": bgp});
        let rows = [
            (json!({"addresses": []}), "spec.addresses has 0 entries, expected 1 to 128"),
            (json!({"addresses": vec!["192.0.2.1"; 129]}), "has 129 entries"),
            (
                json!({"addresses": ["192.0.2.1", "nonsense"]}),
                "spec.addresses[1]: \"nonsense\" is neither an address, a CIDR nor a range",
            ),
            (json!({"addresses": ["192.0.2.300"]}), "neither an address"),
            (json!({"addresses": ["192.0.2.0/33"]}), "neither an address"),
            (json!({"addresses": ["192.0.2.1-"]}), "neither an address"),
            (json!({"addresses": ["-192.0.2.1"]}), "neither an address"),
            (json!({"addresses": ["192.0.2.1-192.0.2.2-192.0.2.3"]}), "neither an address"),
            (json!({"addresses": ["192.0.2.0/24-192.0.3.0/24"]}), "neither an address"),
            (json!({"addresses": ["192.0.2.1 - 192.0.2.9"]}), "expected no blanks"),
            (json!({"addresses": ["1".repeat(80)]}), "at most 79 characters"),
            (json!({"addresses": ["192.0.2.1-2001:db8::1"]}), "of different families"),
            (json!({"addresses": ["192.0.2.1", "192.0.2.1"]}), "overlaps 192.0.2.1 of the same pool"),
            (expression("In", json!([])), "operator In of key a has no values"),
            (expression("Exists", json!(["b"])), "takes no values"),
            (expression("Equals", Value::Null), "spec.namespaceSelector: "),
            (
                with("serviceSelector", json!({"matchLabels": {"-team": "a"}})),
                "spec.serviceSelector: key \"-team\" is none of a label",
            ),
            (
                json!({"addresses": ["192.0.2.1"], "namespaceSelector": {"matchExpressions": [{"key": "a/b/c", "operator": "Exists"}]}}),
                "spec.namespaceSelector: key \"a/b/c\" is none of a label",
            ),
            (expression("In", json!(["b c"])), "spec.namespaceSelector: value \"b c\" is none of a label"),
            (
                json!({"addresses": ["198.51.100.129/25"]}),
                "198.51.100.129/25 has bits set beyond /25: expected 198.51.100.128/25 for the network, or 198.51.100.129 for the address",
            ),
            (json!({"addresses": ["2001:db8::1/64"]}), "expected 2001:db8::/64 for the network"),
            (with("priority", json!(65_536)), "spec.priority is 65536, expected 0 to 65535"),
            (with("maxPerNamespace", json!(0)), "spec.maxPerNamespace is 0, expected 1 to 65536"),
            (with("bgp", json!({"med": 1})), "spec.bgp is for pools with `announce: routed`"),
            (routed(json!({"communities": vec!["1:1"; 33]})), "spec.bgp.communities has 33 entries, expected at most 32"),
            (
                routed(json!({"communities": ["1:1", "65000"]})),
                "spec.bgp.communities[1]: found \"65000\", expected A:B with numbers up to 65535, A:B:C",
            ),
            (routed(json!({"communities": ["65000:70000"]})), "expected A:B with numbers up to 65535"),
            (
                routed(json!({"communities": ["graceful-shutdown"]})),
                "this is GRACEFUL_SHUTDOWN, which a gateway sends only while",
            ),
            (routed(json!({"communities": ["no-export", "65535:65281"]})), "found 65535:65281 a second time"),
            (routed(json!({"aggregationLength": 33})), "spec.bgp.aggregationLength is 33, expected 1 to 32"),
            (routed(json!({"aggregationLength": 300})), "spec.bgp.aggregationLength is 300, expected 1 to 32"),
            (
                routed(json!({"aggregationLength": 24})),
                "spec.bgp.aggregationLength: found 24, but 192.0.2.0/24 has addresses outside of 192.0.2.1",
            ),
            (with("loadBalancerClass", json!("")), "expected a class such as"),
            (with("loadBalancerClass", json!("a/b/c")), "expected a class such as"),
            (with("loadBalancerClass", json!("a b")), "expected a class such as"),
            (with("gatewayGroup", json!("East")), "spec.gatewayGroup is \"East\", expected a name of lower-case letters"),
            (with("gatewayGroup", json!("a".repeat(46))), "at most 45"),
        ];
        for (spec, expected) in rows {
            let error = PoolSpec::try_from(&pool(&spec)).unwrap_err().to_string();
            assert!(error.contains(expected), "{spec}: {error}");
        }
    }

    #[test]
    fn pools_that_no_rule_of_the_api_server_can_refuse_are_refused() {
        let rows = [
            (json!(["192.0.2.9-192.0.2.1"]), "is reversed"),
            (
                json!(["192.0.2.0/24", "192.0.2.128/25"]),
                "spec.addresses[1]: 192.0.2.128-192.0.2.255 overlaps 192.0.2.0-192.0.2.255",
            ),
            (json!(["127.0.0.0/8"]), "reaches into 127.0.0.0/8"),
            (json!(["223.0.0.0-225.0.0.0"]), "reaches into 224.0.0.0"),
            (json!(["fe80::1"]), "reaches into fe80::/10"),
            (json!(["::/0"]), "reaches into"),
        ];
        for (addresses, expected) in rows {
            let error = PoolSpec::try_from(&pool(&json!({"addresses": addresses}))).unwrap_err().to_string();
            assert!(error.contains(expected), "{addresses}: {error}");
        }
    }
}
