//! A converted pool, as the converters of both products produce it.

use objects::crd::AddressPoolSpec;
use proto::{AddressRange, AddressRangeError, NetworkError};

use super::input::{ConvertError, Found, SourcePosition};

/// A converted pool and its origin.
#[derive(Clone, Debug)]
pub(super) struct ConvertedPool {
    pub(super) place: SourcePosition,
    pub(super) origin: String,
    pub(super) name: String,
    pub(super) spec: AddressPoolSpec,
}

impl ConvertedPool {
    /// The pool that `found` becomes.
    pub(super) fn new(found: &Found, spec: AddressPoolSpec) -> Self {
        let name = found.metadata.name.clone().unwrap_or_default();
        Self { place: found.place.clone(), origin: found.title(), name, spec }
    }
}

/// The ranges in our format: CIDRs are those of their networks, as both products take them, and blanks are removed.
pub(super) fn addresses<'a>(found: &Found, texts: impl Iterator<Item = &'a str>) -> Result<Vec<String>, ConvertError> {
    let trimmed = texts.map(|text| text.split('-').map(str::trim).collect::<Vec<_>>().join("-"));
    let checked = trimmed.map(|text| match text.parse::<AddressRange>() {
        Ok(_) => Ok(text),
        Err(AddressRangeError::Network(NetworkError::HostBits { network, .. })) => Ok(network.to_string()),
        Err(error) => Err(found.place.error(format!("{}: {error}", found.title()))),
    });
    checked.collect()
}
