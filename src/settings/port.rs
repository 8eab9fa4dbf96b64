//! Key `ports`: the network ports that sluice owns.

use std::fmt;
use std::net::IpAddr;

use control::config::{Field, Place, Section, scalar};
use dataplane::Mac;
use ipnet::IpNet;
use serde::Serialize;

/// Ports of one gateway: `RTE_MAX_ETHPORTS` of a DPDK built with its defaults.
const PORTS_MAX: usize = 32;
/// Bytes of an interface name: `IFNAMSIZ` with the terminating zero is 16.
const NAME_BYTES_MAX: usize = 15;
/// Bytes of a DPDK device name: `RTE_DEV_NAME_MAX_LEN` with the terminating zero is 64.
const DEVICE_NAME_BYTES_MAX: usize = 63;
/// Largest MTU, bytes: the most that cards and switches commonly take (9,216 with or without the Ethernet header; the device
/// refuses what is too much for it).
pub(super) const MTU_BYTES_MAX: u16 = 9216;
/// Least MTU of an IPv6 link (RFC 8200 section 5).
pub(super) const IPV6_MTU_MIN: u16 = 1280;

/// What a port's Linux interface is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Twin {
    /// A tap of ours.
    #[default]
    Tap,
    /// There is none.
    None,
}

/// A device as DPDK's EAL is told about it, arguments included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// A PCI address.
    Pci(String),
    /// A virtual device.
    Vdev(String),
}

impl Device {
    fn parse(text: &str) -> Option<Self> {
        let name = text.split(',').next()?;
        if is_pci(name) {
            return Some(Self::Pci(text.to_ascii_lowercase()));
        }
        let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
        let vdev = name.starts_with("net_") && name.len() <= DEVICE_NAME_BYTES_MAX && name.bytes().all(legal);
        (vdev && !text.contains(char::is_whitespace)).then(|| Self::Vdev(text.to_owned()))
    }

    /// The text for EAL.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Pci(text) | Self::Vdev(text) => text,
        }
    }

    /// The name without arguments; a PCI address without a domain is in domain 0.
    fn name(&self) -> String {
        let name = self.as_str().split(',').next().unwrap_or_default();
        match self {
            Self::Pci(_) if name.len() == "3b:00.0".len() => format!("0000:{name}"),
            _ => name.to_owned(),
        }
    }

    /// The device, and behind it the members that a bond is made of.
    #[must_use]
    pub fn parts(&self) -> Vec<Self> {
        let members = self.as_str().parse::<dpdk_sys::Device>().map(|device| device.members()).unwrap_or_default();
        let members = members.iter().filter_map(|member| Self::parse(&member.to_string()));
        std::iter::once(self.clone()).chain(members).collect()
    }

    /// What no other port may have: the device and the members of a bond, each with its interface.
    fn claims(&self) -> Vec<String> {
        let of_one = |device: Self| [Some(device.name()), device.interface().map(|name| format!("interface {name}"))];
        self.parts().into_iter().flat_map(of_one).flatten().collect()
    }

    /// The Linux interface that it uses (`iface=`), if any. A bond has none; its members have.
    #[must_use]
    pub fn interface(&self) -> Option<&str> {
        if self.as_str().starts_with("net_bonding") {
            return None;
        }
        self.as_str().split(',').find_map(|argument| argument.strip_prefix("iface="))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whether this is `[DOMAIN:]BUS:DEVICE.FUNCTION` as Linux writes it.
fn is_pci(name: &str) -> bool {
    let (head, function) = name.split_at_checked(name.len().saturating_sub(2)).unwrap_or_default();
    let mut parts = head.split(':').rev();
    let hex = |part: Option<&str>, len: usize| part.is_some_and(|p| p.len() == len && p.bytes().all(|b| b.is_ascii_hexdigit()));
    let legal = hex(parts.next(), 2) && hex(parts.next(), 2);
    let domain = parts.next();
    legal && (domain.is_none() || hex(domain, 4)) && parts.next().is_none() && matches!(function.as_bytes(), [b'.', b'0'..=b'7'])
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
    /// Its Linux interface.
    pub twin: Twin,
}

/// A port and where its keys stand.
#[derive(Clone, Debug)]
pub(super) struct PlacedPort {
    pub(super) settings: PortSettings,
    pub(super) device_place: Place,
    pub(super) address_places: Vec<Place>,
}

/// Takes key `ports`. Names, devices and addresses are each port's own.
pub(super) fn take(top: &mut Section<'_>) -> Vec<PlacedPort> {
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

fn take_port(item: &Field<'_>, others: &[PlacedPort]) -> PlacedPort {
    let mut section = item.section();
    let name = take_name(&mut section, others);
    let (device, device_place) = take_device(&mut section, others);
    let used: Vec<_> = others.iter().flat_map(|port| &port.settings.addresses).copied().collect();
    let (addresses, address_places) = take_addresses(&mut section, &used);
    let mac = section
        .field("mac")
        .and_then(|field| field.parse("the Ethernet address of one interface, such as 02:00:00:00:aa:01", mac));
    let mtu_bytes = section.number("mtu", 68..=MTU_BYTES_MAX, 1500);
    let twin = section.one_of_built("twin", &[Twin::Tap, Twin::None], &["virtio-user"], Twin::default());
    if mtu_bytes < IPV6_MTU_MIN
        && let Some(address) = addresses.iter().find(|net| net.addr().is_ipv6())
    {
        let message = format!("mtu {mtu_bytes} is too small for IPv6 ({address}), expected at least {IPV6_MTU_MIN}");
        section.reader.problem(&item.place, message);
    }
    section.finish();
    PlacedPort { settings: PortSettings { name, device, addresses, mac, mtu_bytes, twin }, device_place, address_places }
}

fn take_name(section: &mut Section<'_>, others: &[PlacedPort]) -> String {
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

fn take_device(section: &mut Section<'_>, others: &[PlacedPort]) -> (Device, Place) {
    let expected = "a PCI address such as 0000:3b:00.0 or a DPDK vdev such as net_af_packet0,iface=eth1";
    let none = || Device::Vdev(String::new());
    let Some(field) = section.required("device", expected) else { return (none(), section.place.clone()) };
    let Some(device) = field.parse(expected, Device::parse) else { return (none(), field.place) };
    if let Err(error) = device.as_str().parse::<dpdk_sys::Device>() {
        field.problem(format!("found {device}: {}", error.reason));
    }
    let claims = device.claims();
    if let Some(twice) = claims.iter().enumerate().find_map(|(at, claim)| claims[..at].contains(claim).then_some(claim)) {
        field.problem(format!("found {twice} twice in one bond; name each member once"));
    }
    for other in others {
        let theirs = other.settings.device.claims();
        if let Some(shared) = claims.iter().find(|claim| theirs.contains(claim)) {
            field.problem(format!("found {shared}, which port `{}` has already; give each port its own", other.settings.name));
        }
    }
    (device, field.place)
}

/// Takes key `addresses`: none of them is `used` already.
pub(super) fn take_addresses(section: &mut Section<'_>, used: &[IpNet]) -> (Vec<IpNet>, Vec<Place>) {
    let (mut addresses, mut places): (Vec<IpNet>, Vec<Place>) = Default::default();
    for item in section.items("addresses", "addresses with their prefix, such as 192.0.2.2/24") {
        let expected = "an interface's address with its prefix, such as 192.0.2.2/24";
        let Some(address) = item.parse(expected, |text| text.parse().ok().filter(is_interface_address)) else { continue };
        if used.iter().chain(&addresses).any(|other| other.addr() == address.addr()) {
            item.problem(format!("found {} a second time; an address belongs to one port, once", address.addr()));
        }
        addresses.push(address);
        places.push(item.place);
    }
    (addresses, places)
}

/// Whether an interface can have this address: no IPv4 network or broadcast address of a prefix that has them.
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

/// An address that a machine can have.
pub(super) fn host(text: &str) -> Option<IpAddr> {
    text.parse().ok().filter(|address| scalar::is_host(*address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_pci_addresses_or_vdevs() {
        for text in [
            "0000:3b:00.0",
            "3b:00.1",
            "0000:3B:00.0,representor=0",
            "net_af_packet0,iface=eth1",
            "net_tap0",
            "net_af_xdp0,iface=x",
        ] {
            assert!(Device::parse(text).is_some(), "{text}");
        }
        for text in ["", "eth0", "0000:3b:00.8", "3b:00", "0000:0000:3b:00.0", "net_a b", "net_A0", ",", "ü.0", "3b:0ü.0"] {
            assert_eq!(Device::parse(text), None, "{text}");
        }
        assert!(matches!(Device::parse("3b:00.1"), Some(Device::Pci(_))));
    }

    #[test]
    fn a_pci_address_without_a_domain_is_in_domain_zero() {
        assert_eq!(Device::parse("3B:00.0").unwrap().name(), Device::parse("0000:3b:00.0,x=1").unwrap().name());
    }

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
