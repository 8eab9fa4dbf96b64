//! The interface of the routes to VIPs: a TUN interface that the kernel removes, with its routes, when the process ends,
//! however it ends. Routing daemons notice that at once.
//!
//! Nobody reads it. What Linux itself sends to a VIP by these routes waits in its queue of 500 packets or is dropped.
//! Not here: the routes.

use std::os::fd::OwnedFd;

use linux::tap::{self, TapError};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use rustix::net::netdevice::name_to_index;

use super::socket::{NetlinkError, Socket};

/// What `ip link` shows about the interface.
const ALIAS: &str = "sluice: routes to VIPs, removed when sluiced ends";

/// Errors of creating the interface.
#[derive(Debug, thiserror::Error)]
pub enum VipDeviceError {
    /// It cannot be created.
    #[error("routes to VIPs need an interface of their own: {0}")]
    Tap(#[from] TapError),
    /// It was created and cannot be set up.
    #[error("interface {name} of the routes to VIPs: {source}")]
    Netlink {
        /// The interface.
        name: String,
        /// The cause.
        source: NetlinkError,
    },
}

/// The interface. Dropping this removes it, and all routes through it.
#[derive(Debug)]
pub(super) struct VipDevice {
    name: String,
    /// Its number in Linux.
    pub(super) index: u32,
    _tun: OwnedFd,
}

impl VipDevice {
    /// Its name for routes in this table: 15 characters at most, the maximum of Linux.
    pub(super) fn name(table: u32) -> String {
        format!("vips-{table}")
    }

    /// Creates it in the network namespace of the calling thread.
    pub(super) async fn open(socket: &mut Socket, table: u32) -> Result<Self, VipDeviceError> {
        let name = Self::name(table);
        let tun = tap::open_transient(&name)?;
        let failed = |source| VipDeviceError::Netlink { name: name.clone(), source };
        let index = name_to_index(&*socket, &name).map_err(|error| failed(NetlinkError::Io(error.into())))?;
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = LinkFlags::Up;
        message.header.change_mask = LinkFlags::Up;
        message.attributes.push(LinkAttribute::IfAlias(ALIAS.to_owned()));
        socket.request(RouteNetlinkMessage::SetLink(message), 0, "set the interface up").await.map_err(failed)?;
        Ok(Self { name, index, _tun: tun })
    }

    /// Whether it still exists. Another program may have removed it.
    pub(super) fn exists(&self, socket: &Socket) -> bool {
        name_to_index(socket, &self.name).is_ok_and(|index| index == self.index)
    }
}
