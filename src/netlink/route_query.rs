//! Asks Linux by which interface it would send to an address, rules included.
//!
//! Not here: routes of the gateway's ports, which `follow` publishes as a whole.

use std::net::IpAddr;

use netlink_packet_route::route::{RouteAttribute, RouteMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;
use tokio::sync::Mutex;

use super::socket::{NetlinkError, Socket};

/// Linux's answers where no route leads to an address: none at all or an unreachable one, a prohibited one, a black hole.
const NO_ROUTE: [Errno; 4] = [Errno::NETUNREACH, Errno::HOSTUNREACH, Errno::ACCESS, Errno::INVAL];

/// A socket for questions, opened with the first one and again after an error.
#[derive(Debug, Default)]
pub struct RouteQuery {
    socket: Mutex<Option<Socket>>,
}

impl RouteQuery {
    /// The index of the interface by which Linux sends to an address; `None` if it has no route to it.
    ///
    /// # Errors
    /// When the socket fails, or Linux does not say: this is not the absence of a route.
    pub async fn interface_to(&self, to: IpAddr) -> Result<Option<u32>, NetlinkError> {
        let mut socket = self.socket.lock().await;
        let mut open = match socket.take() {
            Some(open) => open,
            None => Socket::open(0)?,
        };
        let mut interface = None;
        let answer = open.ask_once(RouteNetlinkMessage::GetRoute(question(to)), "look up a route", |message| {
            if let RouteNetlinkMessage::NewRoute(route) = message {
                interface =
                    route.attributes.iter().find_map(|a| if let RouteAttribute::Oif(index) = a { Some(*index) } else { None });
            }
        });
        match answer.await {
            Ok(()) => {}
            Err(error) if NO_ROUTE.iter().any(|errno| error.is_refusal(*errno)) => interface = None,
            Err(error) => return Err(error),
        }
        *socket = Some(open);
        Ok(interface)
    }
}

fn question(to: IpAddr) -> RouteMessage {
    let mut message = RouteMessage::default();
    let (family, bits) = if to.is_ipv4() { (AddressFamily::Inet, 32) } else { (AddressFamily::Inet6, 128) };
    (message.header.address_family, message.header.destination_prefix_length) = (family, bits);
    message.attributes.push(RouteAttribute::Destination(to.into()));
    message
}

#[cfg(test)]
mod tests {
    use rustix::net::netdevice::name_to_index;
    use rustix::net::{AddressFamily, SocketType, socket};

    use super::*;

    #[tokio::test]
    async fn linux_sends_to_its_own_addresses_by_loopback() {
        let any = socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
        let loopback = name_to_index(&any, "lo").unwrap();
        let query = RouteQuery::default();
        for to in ["127.0.0.1", "127.1.2.3"] {
            assert_eq!(query.interface_to(to.parse().unwrap()).await.unwrap(), Some(loopback), "{to}");
        }
    }
}
