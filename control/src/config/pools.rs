//! Key `pools`: addresses that VIPs are taken from, without overlaps.

use proto::{AddressRange, Announce, Pool};

use super::{Field, Place, Section, scalar};

/// Addresses that nothing can be reached at from another machine: "this network", loopback, link-local, multicast,
/// reserved, IPv4-mapped (RFC 6890).
const UNREACHABLE: [&str; 8] = [
    "0.0.0.0/8",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "224.0.0.0-255.255.255.255",
    "::/127",
    "::ffff:0:0/96",
    "fe80::/10",
    "ff00::/8",
];

/// A pool's range and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedRange {
    /// Name of its pool.
    pub pool: String,
    /// Where the file says so.
    pub place: Place,
    /// The addresses.
    pub range: AddressRange,
    /// How routers learn of them.
    pub announce: Announce,
}

/// Takes key `pools`.
pub(super) fn take(top: &mut Section<'_>) -> (Vec<Pool>, Vec<PlacedRange>) {
    let mut pools: Vec<Pool> = Vec::new();
    let mut placed: Vec<PlacedRange> = Vec::new();
    for field in top.items("pools", "pools") {
        let mut section = field.section();
        let name = take_name(&mut section, &pools);
        let announce = section.one_of("announce", &[("l2", Announce::L2), ("routed", Announce::Routed)], Announce::L2);
        let addresses = section.required("addresses", EXPECTED_RANGES);
        let items = addresses.as_ref().map(|field| field.items(EXPECTED_RANGE)).unwrap_or_default();
        if let Some(field) = addresses.filter(Field::is_empty) {
            field.unexpected(EXPECTED_RANGES);
        }
        let mut ranges = Vec::new();
        for item in items {
            let Some(range) = take_range(&item) else { continue };
            match placed.iter().find(|other| other.range.overlaps(&range)) {
                Some(other) => item.problem(format!(
                    "found {range}, which overlaps {} of `{}` (line {}); an address belongs to one pool, once",
                    other.range, other.place.key, other.place.line
                )),
                None => ranges.push(range),
            }
            placed.push(PlacedRange { pool: name.clone(), place: item.place.clone(), range, announce });
        }
        section.finish();
        pools.push(Pool { name, ranges, announce });
    }
    (pools, placed)
}

const EXPECTED_RANGE: &str = "addresses, CIDRs or ranges FIRST-LAST";
const EXPECTED_RANGES: &str = "a list of addresses, CIDRs or ranges FIRST-LAST, such as [192.0.2.100-192.0.2.199]";

fn take_name(section: &mut Section<'_>, pools: &[Pool]) -> String {
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
    let unreachable = UNREACHABLE.iter().find(|net| net.parse().is_ok_and(|net: AddressRange| net.overlaps(&range)));
    if let Some(net) = unreachable {
        item.problem(format!("found {range}, which reaches into {net}; expected addresses that clients can reach"));
        return None;
    }
    Some(range)
}
