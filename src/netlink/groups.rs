//! Membership of the solicited-node groups of the IPv6 addresses that the engine answers for. Linux holds it on the twins
//! and the VLAN devices above them, reports it by MLD (RFC 3810) and answers queries, so that a switch that snoops MLD lets
//! neighbour solicitations through.
//!
//! Invariant: a group is joined while an address of it is answered for on the link, and left when the process ends, however it
//! ends: memberships are those of sockets. Deliberately not here: ports without twin, for which Linux cannot speak.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};

/// Memberships of one socket: 320 of 64 bytes fit the 20,480 that kernels before 6.7 allow one (`net.core.optmem_max`).
const PER_SOCKET: usize = 256;
/// Memberships that change in one turn: each takes the kernel some microseconds, with thousands of groups some ten.
const PER_TURN: usize = 64;

/// A group on an interface, which its index names.
pub(super) type Membership = (u32, Ipv6Addr);

/// The group in which whoever has the address is asked for (RFC 4291 section 2.7.1).
pub(super) fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c])
}

/// Sockets that are members of groups.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// The memberships, each with its socket.
    joined: BTreeMap<Membership, usize>,
    sockets: Vec<Members>,
    to_leave: Vec<Membership>,
    to_join: Vec<Membership>,
    /// Linux refused a membership that is wanted.
    refused: bool,
    /// That was logged.
    told: bool,
}

#[derive(Debug)]
struct Members {
    socket: OwnedFd,
    count: usize,
}

impl Groups {
    /// Notes which memberships there are to be. Those that Linux refused are tried again.
    pub(super) fn want(&mut self, wanted: &BTreeSet<Membership>) {
        (self.told, self.refused) = (self.refused, false);
        self.to_leave = self.joined.keys().filter(|membership| !wanted.contains(membership)).copied().collect();
        self.to_join = wanted.iter().filter(|membership| !self.joined.contains_key(membership)).copied().collect();
    }

    /// Whether memberships are still to be changed.
    pub(super) fn is_behind(&self) -> bool {
        !self.to_leave.is_empty() || !self.to_join.is_empty()
    }

    /// Whether Linux refused a membership.
    pub(super) fn is_refused(&self) -> bool {
        self.refused
    }

    /// Changes some of what is to be changed.
    pub(super) fn advance(&mut self) {
        for _ in 0..PER_TURN {
            if let Some(membership) = self.to_leave.pop() {
                self.leave(membership);
            } else if let Some(membership) = self.to_join.pop() {
                if let Err(error) = self.join(membership) {
                    self.was_refused(membership, &error);
                }
            } else {
                return;
            }
        }
    }

    fn was_refused(&mut self, (interface, group): Membership, error: &io::Error) {
        self.refused = true;
        if !std::mem::replace(&mut self.told, true) {
            tracing::warn!(
                %group,
                interface,
                %error,
                "Linux does not join the multicast group in which an IPv6 address of ours is asked for, so behind a switch that snoops \
                 MLD it may not be found; is IPv6 disabled on the port's interface (net.ipv6.conf.NAME.disable_ipv6)?"
            );
        }
    }

    fn join(&mut self, membership: Membership) -> io::Result<()> {
        let place = match self.sockets.iter().position(|members| members.count < PER_SOCKET) {
            Some(place) => place,
            None => {
                // Not bound, so it receives nothing.
                let socket = socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
                self.sockets.push(Members { socket, count: 0 });
                self.sockets.len() - 1
            }
        };
        let (interface, group) = membership;
        sockopt::set_ipv6_add_membership(&self.sockets[place].socket, &group, interface)?;
        self.sockets[place].count += 1;
        self.joined.insert(membership, place);
        Ok(())
    }

    fn leave(&mut self, membership: Membership) {
        let Some(place) = self.joined.remove(&membership) else { return };
        let (interface, group) = membership;
        self.sockets[place].count -= 1;
        // The membership is gone with its interface, if that is.
        if let Err(error) = sockopt::set_ipv6_drop_membership(&self.sockets[place].socket, &group, interface) {
            tracing::debug!(%group, interface, %error, "Linux refused to leave a multicast group");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_solicited_node_group_has_the_last_24_bits_of_the_address() {
        let group = solicited_node("4037::1:800:200e:8c6c".parse().unwrap());
        assert_eq!(group, "ff02::1:ff0e:8c6c".parse::<Ipv6Addr>().unwrap(), "the example of RFC 4291 section 2.7.1");
    }

    #[test]
    fn groups_are_joined_and_left_in_turns_however_many_there_are() {
        const LOOPBACK: u32 = 1;
        let all = |count: u16| (0..count).map(|n| (LOOPBACK, Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xffff, n))).collect();
        let mut groups = Groups::default();
        groups.want(&all(1000));
        let mut turns = 0;
        while groups.is_behind() {
            groups.advance();
            turns += 1;
        }
        if groups.is_refused() {
            eprintln!("skipped: this machine has no IPv6 on its loopback interface");
            return;
        }
        assert_eq!((turns, groups.joined.len(), groups.sockets.len()), (16, 1000, 4));
        groups.want(&all(10));
        while groups.is_behind() {
            groups.advance();
        }
        assert_eq!((groups.joined.len(), groups.sockets.iter().map(|members| members.count).sum::<usize>()), (10, 10));
    }
}
