//! The Linux interface of a twin: MAC, MTU, addresses, carrier.
//!
//! Invariant: only interfaces and addresses that sluice created are changed or removed. The interface carries an alias,
//! and each address a protocol number, so that the next process recognises them. (Linux before 5.18 has no protocol
//! number of addresses: there, addresses are added and never removed.)

use std::os::fd::OwnedFd;

use dataplane::Mac;
use ipnet::IpNet;
use linux::tap::{self, TapError};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, AddressProtocol};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;

use crate::netlink::{NetlinkError, OUR_PROTOCOL, Socket, interface_address, link_named};
use crate::ports::setting::{self, SettingError};

/// Alias that marks an interface as ours; `ip link` shows it.
const ALIAS: &str = "sluice twin";

/// Configuration of a twin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TwinConfig {
    /// Name of the port and of the interface.
    pub name: String,
    /// Ethernet address of the port; none: not known yet, the twin keeps its own.
    pub mac: Option<Mac>,
    /// Largest IP packet, bytes.
    pub mtu: u16,
    /// Addresses, each with its on-link prefix.
    pub addresses: Vec<IpNet>,
}

/// Errors of creating or changing a twin.
#[derive(Debug, thiserror::Error)]
pub enum TwinError {
    /// An interface with this name exists and does not carry our alias.
    #[error(
        "interface {name} exists and was not made by sluice: rename the port, or remove the interface with \
         `ip link delete {name}`, or hand it over with `ip link set {name} alias '{ALIAS}'`"
    )]
    Foreign {
        /// The interface.
        name: String,
    },
    /// The tap could not be opened.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// A netlink request failed.
    #[error("twin {name}: {source}")]
    Netlink {
        /// The interface.
        name: String,
        /// The cause.
        source: NetlinkError,
    },
    /// The interface disappeared during the set-up.
    #[error("interface {name} disappeared while it was set up; does another program remove it?")]
    Vanished {
        /// The interface.
        name: String,
    },
    /// A kernel setting could not be written.
    #[error(transparent)]
    Setting(#[from] SettingError),
}

/// The interface of a twin. Dropping this leaves the interface in place.
#[derive(Debug)]
pub struct Interface {
    name: String,
    index: u32,
    socket: Socket,
}

impl Interface {
    /// Creates the twin or takes it over, sets it up with its addresses usable at once, and opens its tap. Works in the
    /// network namespace of the calling thread.
    ///
    /// # Errors
    /// See [`TwinError`].
    pub async fn open(config: &TwinConfig) -> Result<(Self, OwnedFd), TwinError> {
        let name = config.name.clone();
        let failed = |source| TwinError::Netlink { name: name.clone(), source };
        let mut socket = Socket::open(0).map_err(failed)?;
        let alias = LinkAttribute::IfAlias(ALIAS.to_owned());
        let existing = link_named(&mut socket, &name).await.map_err(failed)?;
        if existing.as_ref().is_some_and(|link| !link.attributes.contains(&alias)) {
            return Err(TwinError::Foreign { name });
        }
        let tap = tap::open(&name)?;
        let link = link_named(&mut socket, &name).await.map_err(failed)?;
        let index = link.ok_or_else(|| TwinError::Vanished { name: name.clone() })?.header.index;
        let mut twin = Self { name: name.clone(), index, socket };
        twin.set(vec![alias], None).await?;
        if existing.is_none() {
            // Only at creation, so that the operator may change them.
            twin.write_settings(config)?;
        }
        let mac = config.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec()));
        twin.set(mac.into_iter().chain([LinkAttribute::Mtu(config.mtu.into())]).collect(), Some(LinkFlags::Up)).await?;
        twin.set_addresses(&config.addresses).await?;
        Ok((twin, tap))
    }

    /// Whether the interface no longer exists under its name. Any error but the kernel's answer that there is no such
    /// interface leaves it in existence.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        match name_to_index(&self.socket, &self.name) {
            Ok(index) => index != self.index,
            Err(error) => error == Errno::NODEV,
        }
    }

    /// Sets the Ethernet address, which is that of the port.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn set_mac(&mut self, mac: Mac) -> Result<(), TwinError> {
        self.set(vec![LinkAttribute::Address(mac.0.to_vec())], None).await
    }

    /// Sets the carrier, which follows the link of the port.
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

    /// Settings of a router's interface: it ignores router advertisements. Its link-local address skips the second of
    /// duplicate address detection, during which neighbours would get no answer. The removal of an address keeps others
    /// of its subnet.
    fn write_settings(&self, config: &TwinConfig) -> Result<(), SettingError> {
        let mut settings = vec![
            ("ipv4", "promote_secondaries", "1"),
            ("ipv6", "accept_dad", "0"),
            ("ipv6", "accept_ra", "0"),
            ("ipv6", "autoconf", "0"),
        ];
        if config.addresses.iter().any(|a| a.addr().is_ipv6()) {
            settings.push(("ipv6", "disable_ipv6", "0"));
        }
        settings.into_iter().try_for_each(|(family, setting, value)| setting::write(family, &self.name, setting, value))
    }

    /// Adds the missing addresses, and removes those of ours that are not wanted.
    async fn set_addresses(&mut self, wanted: &[IpNet]) -> Result<(), TwinError> {
        let failed = |source| TwinError::Netlink { name: self.name.clone(), source };
        let existing = addresses(&mut self.socket, self.index).await.map_err(failed)?;
        for (address, message) in &existing {
            if is_ours(message) && !wanted.contains(address) {
                tracing::info!(interface = self.name, %address, "removing an address that the configuration no longer contains");
                let request = RouteNetlinkMessage::DelAddress(message.clone());
                self.socket.request(request, 0, &format!("remove address {address}")).await.map_err(failed)?;
            }
        }
        // An address that exists with another prefix length is a different one; an operator's address stays.
        for address in wanted.iter().filter(|a| !existing.iter().any(|(existing, _)| existing == *a)) {
            let request = RouteNetlinkMessage::NewAddress(address_message(self.index, *address));
            let what = format!("add address {address}");
            match self.socket.request(request, NLM_F_CREATE | NLM_F_EXCL, &what).await {
                Err(error) if error.is_refusal(Errno::EXIST) => {}
                outcome => outcome.map_err(failed)?,
            }
        }
        Ok(())
    }
}

async fn addresses(socket: &mut Socket, index: u32) -> Result<Vec<(IpNet, AddressMessage)>, NetlinkError> {
    let all = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let found = socket.list(all, "list addresses", |message| match message {
        RouteNetlinkMessage::NewAddress(address) if address.header.index == index => {
            interface_address(address).map(|net| (net, address.clone()))
        }
        _ => None,
    });
    found.await
}

fn is_ours(message: &AddressMessage) -> bool {
    message.attributes.contains(&AddressAttribute::Protocol(AddressProtocol::Other(OUR_PROTOCOL)))
}

fn address_message(index: u32, address: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.index = index;
    message.header.family = address.addr().into();
    message.header.prefix_len = address.prefix_len();
    message.attributes.push(AddressAttribute::Address(address.addr()));
    message.attributes.push(AddressAttribute::Local(address.addr()));
    message.attributes.push(AddressAttribute::Protocol(AddressProtocol::Other(OUR_PROTOCOL)));
    message.attributes.extend(match address {
        // Prefixes of 31 bits have no broadcast address (RFC 3021).
        IpNet::V4(net) if net.prefix_len() < 31 => Some(AddressAttribute::Broadcast(net.broadcast())),
        IpNet::V4(_) => None,
        IpNet::V6(_) => Some(AddressAttribute::Flags(AddressFlags::Nodad)),
    });
    message
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn our_addresses_carry_our_protocol_number_and_are_usable_at_once() {
        for text in ["192.0.2.2/24", "192.0.2.2/31", "2001:db8::2/64"] {
            let address: IpNet = text.parse().unwrap();
            let message = address_message(7, address);
            assert!(is_ours(&message), "{text}");
            assert_eq!(interface_address(&message), Some(address));
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
        assert_eq!(interface_address(&message), Some("192.0.2.2/32".parse().unwrap()));
    }
}
