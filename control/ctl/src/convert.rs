//! `sluicectl convert`: address pools of MetalLB or Cilium as AddressPools of sluice.
//!
//! Invariant: a converted pool gives no address to a Service that could not have had it before. Settings without
//! equivalent are left out, and a note says what to do instead.
//! Deliberately not here: reading files or a cluster, and changing Services; the migration guide has the order of
//! steps.

mod cilium;
mod input;
mod metallb;
mod pool;
mod selectors;
mod services;

use std::collections::HashMap;

use clap::ValueEnum;
use kube_core::ObjectMeta;
use proto::AddressRange;
use serde_json::{Value, json};

pub use input::{ConvertError, Input};
use objects::PoolSpec;
use objects::crd::{AddressPool, AddressPoolSpec};
use pool::ConvertedPool;

/// Product of the input objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Product {
    /// IPAddressPool, its advertisements and peers, and Services.
    Metallb,
    /// CiliumLoadBalancerIPPool, its policies, and Services.
    Cilium,
}

/// Output of a conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Conversion {
    /// Documents of AddressPools.
    pub yaml: String,
    /// Notes: settings without equivalent, and manual steps.
    pub notes: Vec<String>,
}

/// Converts everything in `inputs`.
///
/// # Errors
/// The first syntax error or invalid object, by document and line.
pub(crate) fn convert(product: Product, inputs: &[Input<'_>]) -> Result<Conversion, ConvertError> {
    let mut found = Vec::new();
    for input in inputs {
        found.extend(input::read(input)?);
    }
    let mut notes = Vec::new();
    let pools = match product {
        Product::Metallb => metallb::pools(&found, &mut notes)?,
        Product::Cilium => cilium::pools(&found, &mut notes)?,
    };
    refuse_equal_names(&pools)?;
    let pools = usable(pools, &mut notes);
    note_overlaps(&pools, &mut notes);
    services::notes(&found, &mut notes)?;
    if pools.is_empty() {
        notes.push("no pool was read, so that none is printed".to_owned());
    }
    Ok(Conversion { yaml: pools.iter().map(|(pool, _)| document(pool)).collect(), notes })
}

/// Refuses pools of equal names: `kubectl apply` would overwrite the first one with the second.
fn refuse_equal_names(pools: &[ConvertedPool]) -> Result<(), ConvertError> {
    let mut seen: HashMap<&str, &ConvertedPool> = HashMap::new();
    for pool in pools {
        if let Some(first) = seen.insert(&pool.name, pool) {
            let message = format!(
                "{} has the name of {} ({}); AddressPools have no namespace: rename one of the two",
                pool.origin, first.origin, first.place
            );
            return Err(pool.place.error(message));
        }
    }
    Ok(())
}

/// Removes pools that our stricter rules refuse, with a note for each.
fn usable(pools: Vec<ConvertedPool>, notes: &mut Vec<String>) -> Vec<(ConvertedPool, PoolSpec)> {
    let mut usable = Vec::new();
    for pool in pools {
        match PoolSpec::try_from(&object(&pool)) {
            Ok(spec) => usable.push((pool, spec)),
            Err(error) => notes.push(format!("{}: {} is left out: {error}", pool.place, pool.origin)),
        }
    }
    usable
}

fn note_overlaps(pools: &[(ConvertedPool, PoolSpec)], notes: &mut Vec<String>) {
    let mut ranges: Vec<_> = pools.iter().flat_map(|(pool, spec)| spec.ranges.iter().map(move |range| (range, pool))).collect();
    ranges.sort_by_key(|(range, _)| (range.first(), range.last()));
    let mut farthest: Option<(&AddressRange, &ConvertedPool)> = None;
    for (range, pool) in ranges {
        match farthest {
            Some((before, other)) if before.overlaps(range) => notes.push(format!(
                "pools {} and {}: {before} and {range} overlap; of two such pools the younger one is not used: divide the addresses",
                other.name, pool.name
            )),
            _ => {}
        }
        if farthest.is_none_or(|(before, _)| before.last() < range.last()) {
            farthest = Some((range, pool));
        }
    }
}

fn object(pool: &ConvertedPool) -> AddressPool {
    let metadata = ObjectMeta { name: Some(pool.name.clone()), ..ObjectMeta::default() };
    AddressPool { metadata, spec: pool.spec.clone(), status: None }
}

/// One pool as a document, with the fields that differ from the default.
fn document(pool: &ConvertedPool) -> String {
    let plain = json!(AddressPoolSpec { addresses: Vec::new(), auto_assign: true, ..AddressPoolSpec::default() });
    let mut object = json!(object(pool));
    if let Some(Value::Object(fields)) = object.get_mut("spec") {
        fields.retain(|key, value| key == "addresses" || plain.get(key) != Some(value));
    }
    // Only strings, numbers and lists, which always serialize.
    let text = serde_saphyr::to_string(&object).unwrap_or_default();
    format!("---\n# From {}, {}.\n{text}", pool.origin, pool.place)
}

#[cfg(test)]
mod tests;
