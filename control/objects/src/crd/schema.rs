//! Schema of `AddressPool`: the values that the API server itself refuses.
//!
//! Invariant: every list and text is bounded, so that the API server's estimate of what its rules cost stays far below
//! the 10,000,000 units that one rule may cost: an address of 79 characters counts as 316 bytes, a rule reads it about
//! ten times at a tenth of a unit a byte, and 128 addresses make about 40,000 units.

use proto::limits::GROUP_BYTES_MAX;
use schemars::{Schema, SchemaGenerator, json_schema};

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
                    "key": {"type": "string", "minLength": 1, "maxLength": CLASS_CHARS_MAX},
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
