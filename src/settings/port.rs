//! Key `ports`: the network ports that sluice owns.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use control::config::{Field, Location, Section, alternatives, scalar};
use dataplane::{Mac, PortIndex};
use dpdk_sys::{BadDevice, Descriptors, Device};
use ipnet::IpNet;
use serde::Serialize;

/// Maximum number of ports of a gateway: `RTE_MAX_ETHPORTS` of a DPDK built with its defaults.
const PORTS_MAX: usize = 32;
/// Maximum length of an interface name: `IFNAMSIZ` with the terminating zero is 16.
const NAME_BYTES_MAX: usize = 15;
/// Maximum MTU in bytes that cards and switches commonly accept (9,216 with or without the Ethernet header; a device
/// refuses more than it supports).
const MTU_BYTES_MAX: u16 = 9216;
/// Minimum MTU of an IPv6 link in bytes (RFC 8200 section 5).
const IPV6_MTU_MIN: u16 = 1280;

/// Descriptors of a queue: two bursts of 128 are the least that keeps a worker and its card apart, 32,768 the most that a
/// driver of DPDK 22.11 takes (mlx5). Drivers adjust the number to what their cards take.
const DESCRIPTORS: RangeInclusive<u16> = 256..=32768;

/// The kind of a port's Linux interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Twin {
    /// A tap device that the gateway creates.
    #[default]
    Tap,
    /// There is none.
    None,
}

/// A port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSettings {
    /// Its name, and that of its Linux twin.
    pub name: String,
    /// The device.
    pub device: Device,
    /// Addresses of its Linux twin, with the prefixes that are on-link.
    pub addresses: Vec<IpNet>,
    /// Its Ethernet address; none: the device's own.
    pub mac: Option<Mac>,
    /// Largest IP packet, bytes.
    pub mtu_bytes: u16,
    /// Descriptors of each of its queues.
    pub descriptors: Descriptors,
    /// Its Linux interface.
    pub twin: Twin,
}

/// A port and the locations of its keys.
#[derive(Clone, Debug)]
pub(super) struct LocatedPort {
    pub(super) settings: PortSettings,
    pub(super) device_location: Location,
    pub(super) address_locations: Vec<Location>,
}

/// Reads key `ports`. No two ports share a name, a device or an address.
pub(super) fn take(top: &mut Section<'_>) -> Vec<LocatedPort> {
    let expected = "a list of at least one port, each with name and device";
    let Some(field) = top.required("ports", expected) else { return Vec::new() };
    let items = field.items("ports");
    if field.is_empty() {
        field.unexpected(expected);
    }
    if items.len() > PORTS_MAX {
        field.problem(format!("found {} ports, expected at most {PORTS_MAX}, which is DPDK's limit", items.len()));
    }
    let mut ports = Vec::new();
    for item in items {
        let port = take_port(&item, &ports);
        ports.push(port);
    }
    ports
}

fn take_port(item: &Field<'_>, others: &[LocatedPort]) -> LocatedPort {
    let mut section = item.section();
    let name = take_name(&mut section, others);
    let (device, device_location) = take_device(&mut section, others);
    let used: Vec<_> = others.iter().flat_map(|port| &port.settings.addresses).copied().collect();
    let (addresses, address_locations) = take_addresses(&mut section, &used);
    let mac = section.parse("mac", "the Ethernet address of one interface, such as 02:00:00:00:aa:01", mac);
    let mtu_bytes = take_mtu(&mut section, &addresses, 1500, item);
    let Descriptors { rx, tx } = Descriptors::default();
    let descriptors = Descriptors {
        rx: section.number("rxDescriptors", DESCRIPTORS, rx),
        tx: section.number("txDescriptors", DESCRIPTORS, tx),
    };
    let twin = section.one_of_built("twin", &[Twin::Tap, Twin::None], &["virtio-user"], Twin::default());
    section.finish();
    LocatedPort {
        settings: PortSettings { name, device, addresses, mac, mtu_bytes, descriptors, twin },
        device_location,
        address_locations,
    }
}

fn take_name(section: &mut Section<'_>, others: &[LocatedPort]) -> String {
    let expected = format!("an interface name: 1 to {NAME_BYTES_MAX} letters, digits, `-`, `_` or `.`");
    let Some(field) = section.required("name", &expected) else { return String::new() };
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    let is_name =
        |text: &str| (1..=NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(legal) && text != "." && text != "..";
    let Some(name) = field.parse(expected, |text| is_name(text).then_some(text)) else { return String::new() };
    if others.iter().any(|port| port.settings.name == name) {
        field.problem(format!("found `{name}` a second time; give each port a name of its own"));
    }
    name.to_owned()
}

fn take_device(section: &mut Section<'_>, others: &[LocatedPort]) -> (Device, Location) {
    let expected = "a PCI address such as 0000:3b:00.0 or a DPDK vdev such as net_af_packet0,iface=eth1";
    let none = || Device::Virtual { name: String::new(), arguments: String::new() };
    let Some(field) = section.required("device", expected) else { return (none(), section.location.clone()) };
    let parse = |text: &str| text.parse().map_err(|BadDevice { reason, .. }| format!("expected {expected}: {reason}"));
    let Some(device) = field.try_parse(expected, parse) else { return (none(), field.location) };
    let claims = claims(&device);
    if let Some(twice) = claims.iter().enumerate().find_map(|(at, claim)| claims[..at].contains(claim).then_some(claim)) {
        field.problem(format!("found {twice} twice in one bond; name each member once"));
    }
    for other in others {
        let theirs = self::claims(&other.settings.device);
        if let Some(shared) = claims.iter().find(|claim| theirs.contains(claim)) {
            field.problem(format!("found {shared}, which port `{}` has already; give each port its own", other.settings.name));
        }
    }
    (device, field.location)
}

/// The exclusive resources of a port: its device or the members of its bond, each with its interface.
fn claims(device: &Device) -> Vec<String> {
    let of_part = |part: Device| [Some(part.port_name()), part.named_interface().map(|name| format!("interface {name}"))];
    device.parts().into_iter().flat_map(of_part).flatten().collect()
}

/// Reads key `addresses`, none of which may be `used` already.
pub(super) fn take_addresses(section: &mut Section<'_>, used: &[IpNet]) -> (Vec<IpNet>, Vec<Location>) {
    let (mut addresses, mut locations): (Vec<IpNet>, Vec<Location>) = Default::default();
    for item in section.items("addresses", "addresses with their prefix, such as 192.0.2.2/24") {
        let expected = "an interface's address with its prefix, such as 192.0.2.2/24";
        let Some(address) = item.parse(expected, |text| text.parse().ok().filter(is_interface_address)) else { continue };
        if used.iter().chain(&addresses).any(|other| other.addr() == address.addr()) {
            item.problem(format!("found {} a second time; an address belongs to one port, once", address.addr()));
        }
        addresses.push(address);
        locations.push(item.location);
    }
    (addresses, locations)
}

/// Reads key `mtu` of the port or link `item`, in bytes.
pub(super) fn take_mtu(section: &mut Section<'_>, addresses: &[IpNet], default: u16, item: &Field<'_>) -> u16 {
    let mtu = section.number("mtu", 68..=MTU_BYTES_MAX, default);
    if mtu < IPV6_MTU_MIN
        && let Some(address) = addresses.iter().find(|net| net.addr().is_ipv6())
    {
        let message = format!("mtu {mtu} is too small for IPv6 ({address}), expected at least {IPV6_MTU_MIN}");
        item.problem(message);
    }
    mtu
}

/// Whether an interface can have this address. Network and broadcast addresses of IPv4 prefixes are excluded.
fn is_interface_address(net: &IpNet) -> bool {
    let edge = net.addr().is_ipv4() && net.prefix_len() < 31 && [net.network(), net.broadcast()].contains(&net.addr());
    scalar::is_host(net.addr()) && net.prefix_len() > 0 && !edge
}

/// A unicast Ethernet address.
pub(super) fn mac(text: &str) -> Option<Mac> {
    let mut bytes = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut bytes {
        let part = parts.next().filter(|part| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit()))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    (parts.next().is_none() && bytes != [0; 6] && bytes[0] & 1 == 0).then_some(Mac(bytes))
}

/// Reads key `port`.
pub(super) fn port_index(section: &mut Section<'_>, ports: &[LocatedPort]) -> Option<PortIndex> {
    let names: Vec<_> = ports.iter().map(|port| port.settings.name.as_str()).collect();
    let expected = format!("the name of a port: {}", alternatives(&names));
    let index = section.parse_required("port", expected, |text| names.iter().position(|name| *name == text))?;
    u8::try_from(index).ok().map(PortIndex)
}

/// An address that a machine can have.
pub(super) fn host(text: &str) -> Option<IpAddr> {
    text.parse().ok().filter(|address| scalar::is_host(*address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ethernet_addresses_are_of_one_interface() {
        assert_eq!(mac("02:00:00:00:aa:01"), Some(Mac([2, 0, 0, 0, 0xaa, 1])));
        for wrong in [
            "",
            "02:00:00:00:aa",
            "02:00:00:00:aa:01:02",
            "01:00:00:00:00:00",
            "00:00:00:00:00:00",
            "2:0:0:0:0:1",
            "+2:00:00:00:00:01",
        ] {
            assert_eq!(mac(wrong), None, "{wrong}");
        }
    }
}
