//! Schema of `AddressPool`: the values that the API server itself refuses.
//!
//! Invariant: every list and text is bounded, so that the API server's estimate of what its rules cost stays far below
//! the 10,000,000 units that one rule may cost: an address of 79 characters counts as 316 bytes, a rule reads it about
//! ten times at a tenth of a unit a byte, and 128 addresses make about 40,000 units.

use proto::limits::GROUP_BYTES_MAX;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::json;

/// Maximum number of entries in `addresses`. Further ones belong into another pool.
pub const ADDRESSES_MAX: usize = 128;
/// Maximum length of one entry, in characters: two IPv6 addresses of 39 and the hyphen.
pub const ADDRESS_CHARS_MAX: usize = 79;
/// Maximum number of addresses of one gateway: ports and VLANs, each with its next hops, and SNAT.
pub const GATEWAY_ADDRESSES_MAX: usize = 4096;
/// Highest `priority`.
pub const PRIORITY_MAX: u32 = 65_535;
/// Highest `maxPerNamespace`: the maximum number of Services.
pub const PER_NAMESPACE_MAX: u32 = 65_536;
/// Maximum length of a class, in characters: a DNS name of 253, a slash, a name of 63.
pub const CLASS_CHARS_MAX: usize = 317;
/// Maximum number of BGP communities of a pool: their attribute then has 128 bytes, or 384 of large ones, of the 4,096 of a
/// message (RFC 4271).
pub const COMMUNITIES_MAX: usize = 32;
/// Maximum length of one, in characters: three numbers of 10 digits and two colons.
const COMMUNITY_CHARS_MAX: usize = 32;
/// The key of a label: an optional prefix that is a DNS name, a slash, and a name.
const LABEL_KEY: &str = "^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$";
/// Maximum number of expressions of a selector, and of values of one expression.
const EXPRESSIONS_MAX: usize = 32;
const VALUES_MAX: usize = 64;

/// An address, a CIDR, or two addresses of one family with a hyphen between them. A rule cannot check their order,
/// because CEL does not compare addresses.
pub(super) fn addresses(_: &mut SchemaGenerator) -> Schema {
    let first = "self.substring(0, self.indexOf('-'))";
    let last = "self.substring(self.indexOf('-') + 1)";
    let is_range = format!("(self.contains('-') && isIP({first}) && isIP({last}))");
    let one_family = format!("ip({first}).family() == ip({last}).family()");
    json_schema!({
        "description": "CIDRs, ranges FIRST-LAST and single addresses of both families.",
        "type": "array",
        "minItems": 1,
        "maxItems": ADDRESSES_MAX,
        "x-kubernetes-list-type": "set",
        "items": {
            "type": "string",
            "minLength": 2,
            "maxLength": ADDRESS_CHARS_MAX,
            "x-kubernetes-validations": [
                {"rule": format!("isIP(self) || isCIDR(self) || {is_range}"),
                 "message": "expected an address, a CIDR or a range FIRST-LAST"},
                {"rule": format!("!{is_range} || {one_family}"),
                 "message": "the ends of a range are of different families"},
                {"rule": "!isCIDR(self) || cidr(self).masked() == cidr(self)",
                 "message": "a CIDR has bits set beyond its length: give the network, such as 198.51.100.128/25, or the address without length"},
            ],
        },
    })
}

/// A bounded label selector with the operators of Kubernetes.
pub(super) fn selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "description": "Labels that an object must have; empty: all objects.",
        "type": "object",
        "nullable": true,
        "properties": {
            "matchLabels": {"type": "object", "maxProperties": EXPRESSIONS_MAX,
                "additionalProperties": {"type": "string", "maxLength": 63}},
            "matchExpressions": {"type": "array", "maxItems": EXPRESSIONS_MAX, "items": {
                "type": "object",
                "required": ["key", "operator"],
                "properties": {
                    "key": {"type": "string", "minLength": 1, "maxLength": CLASS_CHARS_MAX, "pattern": LABEL_KEY},
                    "operator": {"type": "string", "enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
                    "values": {"type": "array", "maxItems": VALUES_MAX, "items": {"type": "string", "maxLength": 63}},
                },
                "x-kubernetes-validations": [
                    {"rule": "(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)",
                     "message": "operators In and NotIn take values, the others none"},
                ],
            }},
        },
    })
}

/// Rules over several fields of a pool. Ranges FIRST-LAST with an aggregation length are left to the controller, because
/// CEL does not calculate with addresses.
pub(super) fn pool_rules() -> serde_json::Value {
    let aggregates = |field: &str, family: u8, bits: u8| {
        let length = format!("self.bgp.{field}");
        let fits = format!(
            "(!isIP(one) || ip(one).family() != {family} || {length} == {bits}) && \
             (!isCIDR(one) || cidr(one).ip().family() != {family} || cidr(one).prefixLength() <= {length})"
        );
        json!({"rule": format!("!has(self.bgp) || !has({length}) || self.addresses.all(one, {fits})"),
            "message": format!("{field} is shorter than an entry of addresses, so that the aggregate would attract others")})
    };
    json!([
        {"rule": "!has(self.bgp) || self.announce == 'routed'", "message": "bgp is for pools with announce: routed"},
        aggregates("aggregationLength", 4, 32),
        aggregates("aggregationLengthV6", 6, 128),
    ])
}

/// How the addresses are announced by BGP.
pub(super) fn bgp(_: &mut SchemaGenerator) -> Schema {
    let number = |description: &str, least: u8, most: u32| json!({"description": description, "type": "integer", "format": "int64", "minimum": least, "maximum": most});
    let of_16_bits = "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[0-9]{1,4})";
    let community = format!(
        "^({of_16_bits}:{of_16_bits}|[0-9]{{1,10}}:[0-9]{{1,10}}:[0-9]{{1,10}}|no-export|no-advertise|no-export-subconfed|no-peer)$"
    );
    json_schema!({
        "description": "How routing daemons announce the addresses by BGP, with announce routed.",
        "type": "object",
        "properties": {
            "communities": {
                "description": "Communities A:B (RFC 1997), large communities A:B:C (RFC 8092), no-export, no-advertise, \
                                no-export-subconfed and no-peer. Unset: those of the routing daemon's configuration.",
                "type": "array",
                "maxItems": COMMUNITIES_MAX,
                "x-kubernetes-list-type": "set",
                "items": {
                    "type": "string",
                    "maxLength": COMMUNITY_CHARS_MAX,
                    "x-kubernetes-validations": [
                        {"rule": format!("self.matches('{community}')"),
                         "message": "expected A:B, A:B:C, no-export, no-advertise, no-export-subconfed or no-peer"},
                        {"rule": "self != '65535:0'", "message": "GRACEFUL_SHUTDOWN belongs to gateways that drain"},
                    ],
                },
            },
            "med": number("Multi-exit discriminator (MED). Unset: that of the routing daemon's configuration.", 0, u32::MAX),
            "localPref": number("Local preference, for peers of the same autonomous system.", 0, u32::MAX),
            "aggregationLength": number(
                "Length of the prefixes by which IPv4 addresses are announced; every entry of addresses must consist of whole \
                 prefixes. Unset: 32, each address on its own.", 1, 32),
            "aggregationLengthV6": number("The same for IPv6. Unset: 128.", 1, 128),
        },
    })
}

/// A load balancer class.
pub(super) fn class(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "description": "Only the installation of this class uses the pool; none: every one.",
        "type": "string",
        "nullable": true,
        "minLength": 1,
        "maxLength": CLASS_CHARS_MAX,
        "x-kubernetes-validations": [
            {"rule": "self.matches('^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?$')",
             "message": "expected a class such as sluice.dev/gateway"},
        ],
    })
}

/// The name of a group of gateways: a DNS label.
pub(super) fn gateway_group(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "description": "The group of gateways that uses the pool; none: the group that serves what names none.",
        "type": "string",
        "nullable": true,
        "minLength": 1,
        "maxLength": GROUP_BYTES_MAX,
        "x-kubernetes-validations": [
            {"rule": "self.matches('^[a-z0-9]([a-z0-9-]*[a-z0-9])?$')",
             "message": "expected a name of lower-case letters, digits and -"},
        ],
    })
}
