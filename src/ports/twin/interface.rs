//! One twin as Linux sees it: MAC, MTU, addresses, carrier.
//!
//! Invariant: only what sluice made is changed or removed. The interface carries an alias, and each address a protocol
//! number (Linux 5.18; before, addresses are added and never removed), so that the next process knows them again.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use dataplane::Mac;
use dpdk_sys::tap::{self, TapError};
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, AddressProtocol};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;

use crate::netlink::{NetlinkError, OUR_PROTOCOL, Socket};

/// Marks an interface as ours; `ip link` shows it.
const ALIAS: &str = "sluice twin";

/// What a twin is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TwinConfig {
    /// The port's name, and the interface's.
    pub name: String,
    /// The port's Ethernet address; none: not known yet, the twin keeps what it has.
    pub mac: Option<Mac>,
    /// Largest IP packet, bytes.
    pub mtu: u16,
    /// Addresses, each with the prefix that is on-link.
    pub addresses: Vec<IpNet>,
}

/// Why a twin could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TwinError {
    /// An interface of that name exists and does not bear our mark.
    #[error(
        "interface {name} exists and was not made by sluice: name the port otherwise, or remove it with \
         `ip link delete {name}`, or hand it over with `ip link set {name} alias '{ALIAS}'`"
    )]
    Foreign {
        /// The interface.
        name: String,
    },
    /// No tap.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// Setting it up failed.
    #[error("twin {name}: {source}")]
    Netlink {
        /// The interface.
        name: String,
        /// Why.
        source: NetlinkError,
    },
    /// It is gone again.
    #[error("interface {name} vanished while it was being set up; is something else removing it?")]
    Vanished {
        /// The interface.
        name: String,
    },
    /// A kernel setting could not be written.
    #[error("cannot write {value:?} to {}: {source}", path.display())]
    Setting {
        /// The file.
        path: PathBuf,
        /// The value.
        value: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// A twin that is set up. Dropping it leaves it standing.
#[derive(Debug)]
pub struct Interface {
    name: String,
    index: u32,
    socket: Socket,
}

impl Interface {
    /// Makes or takes over the twin, up and with its addresses usable at once, and opens its tap. Works in the network
    /// namespace of the calling thread.
    ///
    /// # Errors
    /// See [`TwinError`].
    pub async fn open(config: &TwinConfig) -> Result<(Self, OwnedFd), TwinError> {
        let name = config.name.clone();
        let failed = |source| TwinError::Netlink { name: name.clone(), source };
        let mut socket = Socket::open(0).map_err(failed)?;
        let standing = find(&mut socket, &name).await.map_err(failed)?;
        if standing.as_ref().is_some_and(|found| found.alias.as_deref() != Some(ALIAS)) {
            return Err(TwinError::Foreign { name });
        }
        let tap = tap::open(&name, true)?;
        let found = find(&mut socket, &name).await.map_err(failed)?.ok_or_else(|| TwinError::Vanished { name: name.clone() })?;
        let mut twin = Self { name: name.clone(), index: found.index, socket };
        twin.set(vec![LinkAttribute::IfAlias(ALIAS.to_owned())], None).await?;
        if standing.is_none() {
            // Only at first, so that the operator may decide otherwise.
            twin.write_settings(config)?;
        }
        let mac = config.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec()));
        twin.set(mac.into_iter().chain([LinkAttribute::Mtu(config.mtu.into())]).collect(), Some(LinkFlags::Up)).await?;
        twin.set_addresses(&config.addresses).await?;
        Ok((twin, tap))
    }

    /// Whether Linux still has it, by its name.
    #[must_use]
    pub fn stands(&self) -> bool {
        name_to_index(&self.socket, &self.name).is_ok_and(|index| index == self.index)
    }

    /// Gives the twin the Ethernet address of its port.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn set_mac(&mut self, mac: Mac) -> Result<(), TwinError> {
        self.set(vec![LinkAttribute::Address(mac.0.to_vec())], None).await
    }

    /// Makes the twin's carrier follow the port's link.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn set_carrier(&mut self, up: bool) -> Result<(), TwinError> {
        self.set(vec![LinkAttribute::Carrier(up.into())], None).await
    }

    async fn set(&mut self, attributes: Vec<LinkAttribute>, flag: Option<LinkFlags>) -> Result<(), TwinError> {
        let mut message = LinkMessage::default();
        message.header.index = self.index;
        message.header.flags = flag.unwrap_or(LinkFlags::empty());
        message.header.change_mask = message.header.flags;
        message.attributes = attributes;
        let outcome = self.socket.request(RouteNetlinkMessage::SetLink(message), 0, "configure the interface").await;
        outcome.map_err(|source| TwinError::Netlink { name: self.name.clone(), source })
    }

    /// A router's interface: it believes no router advertisements, and its link-local address needs no second of duplicate
    /// address detection, in which neighbours would get no answer. Removing an address leaves the others of its subnet.
    fn write_settings(&self, config: &TwinConfig) -> Result<(), TwinError> {
        let mut settings = vec![
            ("ipv4", "promote_secondaries", "1"),
            ("ipv6", "accept_dad", "0"),
            ("ipv6", "accept_ra", "0"),
            ("ipv6", "autoconf", "0"),
        ];
        if config.addresses.iter().any(|a| a.addr().is_ipv6()) {
            settings.push(("ipv6", "disable_ipv6", "0"));
        }
        for (family, setting, value) in settings {
            let path = PathBuf::from(format!("/proc/sys/net/{family}/conf/{}/{setting}", self.name));
            match std::fs::write(&path, value) {
                // A kernel without IPv6.
                Err(source) if source.kind() == io::ErrorKind::NotFound => {}
                outcome => outcome.map_err(|source| TwinError::Setting { path, value, source })?,
            }
        }
        Ok(())
    }

    /// Adds what is missing of `wanted`, and removes of ours what is not wanted.
    async fn set_addresses(&mut self, wanted: &[IpNet]) -> Result<(), TwinError> {
        let failed = |source| TwinError::Netlink { name: self.name.clone(), source };
        let standing = addresses(&mut self.socket, self.index).await.map_err(failed)?;
        for (address, message) in &standing {
            if is_ours(message) && !wanted.contains(address) {
                tracing::info!(interface = self.name, %address, "removing an address that the configuration no longer names");
                let request = RouteNetlinkMessage::DelAddress(message.clone());
                self.socket.request(request, 0, &format!("remove address {address}")).await.map_err(failed)?;
            }
        }
        // An address with another prefix length would stand beside ours; the operator's stays.
        for address in wanted.iter().filter(|a| !standing.iter().any(|(standing, _)| standing == *a)) {
            let request = RouteNetlinkMessage::NewAddress(address_message(self.index, *address));
            let what = format!("add address {address}");
            match self.socket.request(request, NLM_F_CREATE | NLM_F_EXCL, &what).await {
                Err(NetlinkError::Refused { source, .. }) if source.raw_os_error() == Some(Errno::EXIST.raw_os_error()) => {}
                outcome => outcome.map_err(failed)?,
            }
        }
        Ok(())
    }
}

/// An interface that exists.
struct Found {
    index: u32,
    alias: Option<String>,
}

async fn find(socket: &mut Socket, name: &str) -> Result<Option<Found>, NetlinkError> {
    let mut found = None;
    let all = RouteNetlinkMessage::GetLink(LinkMessage::default());
    socket
        .dump(all, "list interfaces", |message| {
            let RouteNetlinkMessage::NewLink(link) = message else { return };
            if link.attributes.iter().any(|a| matches!(a, LinkAttribute::IfName(n) if n == name)) {
                let alias = link.attributes.iter().find_map(|a| match a {
                    LinkAttribute::IfAlias(alias) => Some(alias.clone()),
                    _ => None,
                });
                found = Some(Found { index: link.header.index, alias });
            }
        })
        .await?;
    Ok(found)
}

async fn addresses(socket: &mut Socket, index: u32) -> Result<Vec<(IpNet, AddressMessage)>, NetlinkError> {
    let mut found = Vec::new();
    let all = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    socket
        .dump(all, "list addresses", |message| {
            let RouteNetlinkMessage::NewAddress(address) = message else { return };
            if address.header.index == index {
                found.extend(net(address).map(|net| (net, address.clone())));
            }
        })
        .await?;
    Ok(found)
}

fn net(message: &AddressMessage) -> Option<IpNet> {
    let local = message.attributes.iter().find_map(|a| if let AddressAttribute::Local(ip) = a { Some(*ip) } else { None });
    let address = message.attributes.iter().find_map(|a| if let AddressAttribute::Address(ip) = a { Some(*ip) } else { None });
    IpNet::new(local.or(address)?, message.header.prefix_len).ok()
}

fn is_ours(message: &AddressMessage) -> bool {
    message.attributes.contains(&AddressAttribute::Protocol(AddressProtocol::Other(OUR_PROTOCOL)))
}

fn address_message(index: u32, address: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.index = index;
    message.header.prefix_len = address.prefix_len();
    message.attributes.push(AddressAttribute::Address(address.addr()));
    message.attributes.push(AddressAttribute::Local(address.addr()));
    message.attributes.push(AddressAttribute::Protocol(AddressProtocol::Other(OUR_PROTOCOL)));
    match address {
        IpNet::V4(net) => {
            message.header.family = AddressFamily::Inet;
            // RFC 3021: 31-bit prefixes have no broadcast address.
            if net.prefix_len() < 31 {
                message.attributes.push(AddressAttribute::Broadcast(net.broadcast()));
            }
        }
        IpNet::V6(_) => {
            message.header.family = AddressFamily::Inet6;
            message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn our_addresses_carry_our_mark_and_are_usable_at_once() {
        for text in ["192.0.2.2/24", "192.0.2.2/31", "2001:db8::2/64"] {
            let address: IpNet = text.parse().unwrap();
            let message = address_message(7, address);
            assert!(is_ours(&message), "{text}");
            assert_eq!(net(&message), Some(address));
            let broadcast = message.attributes.iter().any(|a| matches!(a, AddressAttribute::Broadcast(_)));
            assert_eq!(broadcast, text.ends_with("/24"), "{text}");
            let nodad = message.attributes.contains(&AddressAttribute::Flags(AddressFlags::Nodad));
            assert_eq!(nodad, address.addr().is_ipv6(), "{text}");
        }
    }

    #[test]
    fn an_address_of_another_program_is_not_ours() {
        let mut message = address_message(7, "192.0.2.2/24".parse().unwrap());
        message.attributes.retain(|a| !matches!(a, AddressAttribute::Protocol(_)));
        assert!(!is_ours(&message));
    }

    #[test]
    fn point_to_point_addresses_are_known_by_their_local_end() {
        let mut message = address_message(7, "192.0.2.2/32".parse().unwrap());
        message.attributes[0] = AddressAttribute::Address(IpAddr::from([192, 0, 2, 3]));
        assert_eq!(net(&message), Some("192.0.2.2/32".parse().unwrap()));
    }
}
