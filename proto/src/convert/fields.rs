//! Conversions of single fields: names, addresses, ports, durations.

use std::net::IpAddr;
use std::time::Duration;

use super::error::ConvertError;
use crate::{Family, ServiceName};

/// Reads `namespace/name`.
///
/// # Errors
/// [`ConvertError::Name`] if a part is missing.
pub fn service_name(text: &str) -> Result<ServiceName, ConvertError> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(ServiceName::new(namespace, name))
        }
        _ => Err(ConvertError::Name(text.to_owned())),
    }
}

/// The 4 or 16 bytes of an address, in network order.
#[must_use]
pub fn address_bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

/// The address of 4 or 16 bytes in network order.
///
/// # Errors
/// When the length is another.
pub fn address(bytes: &[u8]) -> Result<IpAddr, ConvertError> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).map_err(|_| ConvertError::AddressBytes(bytes.len()))
}

/// The address of 4 or 16 bytes; `family` is the required one, if any.
pub(super) fn address_of(family: Option<Family>, bytes: &[u8]) -> Result<IpAddr, ConvertError> {
    let address = address(bytes)?;
    match family.filter(|family| Family::of(address) != *family) {
        Some(family) => Err(ConvertError::WrongFamily { address, family }),
        None => Ok(address),
    }
}

/// The number of a family in messages: 4 or 6.
pub(super) fn family_number(family: Family) -> u32 {
    match family {
        Family::V4 => 4,
        Family::V6 => 6,
    }
}

/// Converts the number of a family.
pub(super) fn family(number: u32) -> Result<Family, ConvertError> {
    match number {
        4 => Ok(Family::V4),
        6 => Ok(Family::V6),
        other => Err(ConvertError::Family(other)),
    }
}

/// Converts a required port.
pub(super) fn port(field: &'static str, found: u32) -> Result<u16, ConvertError> {
    optional_port(field, found)?.ok_or(ConvertError::Port { field, found })
}

/// Converts an optional port: 0 means none.
pub(super) fn optional_port(field: &'static str, found: u32) -> Result<Option<u16>, ConvertError> {
    let port = u16::try_from(found).map_err(|_| ConvertError::Port { field, found })?;
    Ok((port != 0).then_some(port))
}

/// Converts an optional time: 0 means none.
pub(super) fn optional_duration(ms: u64) -> Option<Duration> {
    (ms != 0).then(|| Duration::from_millis(ms))
}

/// Whole milliseconds, as messages have them; saturates above 584 million years.
pub(super) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
