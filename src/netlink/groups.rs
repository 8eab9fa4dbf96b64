//! Membership of the solicited-node multicast groups of the IPv6 addresses that the engine answers. Linux holds the
//! membership on the twins and the VLAN devices above them, reports it by MLD (RFC 3810) and answers queries. A switch
//! that snoops MLD then forwards neighbour solicitations to us.
//!
//! Invariant: a group is joined while the engine answers one of its addresses on the link. All groups are left when the
//! process ends, however it ends, because memberships belong to sockets. Not here: ports without a twin, which Linux
//! does not know.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::Ipv6Addr;
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};

/// Memberships per socket. Kernels before 6.7 allow a socket 20,480 bytes (`net.core.optmem_max`): 320 memberships of
/// 64 bytes.
const PER_SOCKET: usize = 256;
/// Membership changes per turn. A change takes the kernel a few microseconds, and about ten with thousands of groups.
const PER_TURN: usize = 64;

/// The index of an interface, and a group on it.
pub(super) type Membership = (u32, Ipv6Addr);

/// The solicited-node group of an address, to which neighbour solicitations for it are sent (RFC 4291 section 2.7.1).
pub(super) fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c])
}

/// The memberships, the sockets that hold them, and the pending changes.
#[derive(Debug, Default)]
pub(super) struct GroupMemberships {
    /// The memberships, each with the index of its socket.
    joined: BTreeMap<Membership, usize>,
    sockets: Vec<MemberSocket>,
    to_leave: Vec<Membership>,
    to_join: Vec<Membership>,
    /// Linux refused a wanted membership.
    refused: bool,
    /// The refusal was logged.
    refusal_logged: bool,
}

#[derive(Debug)]
struct MemberSocket {
    socket: OwnedFd,
    count: usize,
}

impl GroupMemberships {
    /// Sets the wanted memberships. Those that Linux refused are tried again.
    pub(super) fn set_wanted(&mut self, wanted: &BTreeSet<Membership>) {
        (self.refusal_logged, self.refused) = (self.refused, false);
        self.to_leave = self.joined.keys().filter(|membership| !wanted.contains(membership)).copied().collect();
        self.to_join = wanted.iter().filter(|membership| !self.joined.contains_key(membership)).copied().collect();
    }

    /// Whether changes are pending.
    pub(super) fn is_pending(&self) -> bool {
        !self.to_leave.is_empty() || !self.to_join.is_empty()
    }

    /// Whether Linux refused a membership.
    pub(super) fn is_refused(&self) -> bool {
        self.refused
    }

    /// Makes the next pending changes.
    pub(super) fn advance(&mut self) {
        for _ in 0..PER_TURN {
            if let Some(membership) = self.to_leave.pop() {
                self.leave(membership);
            } else if let Some(membership) = self.to_join.pop() {
                if let Err(error) = self.join(membership) {
                    self.refuse(membership, &error);
                }
            } else {
                return;
            }
        }
    }

    fn refuse(&mut self, (interface, group): Membership, error: &io::Error) {
        self.refused = true;
        if !std::mem::replace(&mut self.refusal_logged, true) {
            tracing::warn!(
                %group,
                interface,
                %error,
                "Linux does not join the solicited-node group of an IPv6 address of ours; behind a switch that snoops MLD the \
                 address may be unreachable; is IPv6 disabled on the port's interface (net.ipv6.conf.NAME.disable_ipv6)?"
            );
        }
    }

    fn join(&mut self, membership: Membership) -> io::Result<()> {
        let number = match self.sockets.iter().position(|socket| socket.count < PER_SOCKET) {
            Some(number) => number,
            None => {
                // Not bound, so it receives nothing.
                let socket = socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
                self.sockets.push(MemberSocket { socket, count: 0 });
                self.sockets.len() - 1
            }
        };
        let (interface, group) = membership;
        sockopt::set_ipv6_add_membership(&self.sockets[number].socket, &group, interface)?;
        self.sockets[number].count += 1;
        self.joined.insert(membership, number);
        Ok(())
    }

    fn leave(&mut self, membership: Membership) {
        let Some(number) = self.joined.remove(&membership) else { return };
        let (interface, group) = membership;
        self.sockets[number].count -= 1;
        // If the interface is gone, so is the membership.
        if let Err(error) = sockopt::set_ipv6_drop_membership(&self.sockets[number].socket, &group, interface) {
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
        let mut groups = GroupMemberships::default();
        groups.set_wanted(&all(1000));
        let mut turns = 0;
        while groups.is_pending() {
            groups.advance();
            turns += 1;
        }
        if groups.is_refused() {
            eprintln!("skipped: this machine has no IPv6 on its loopback interface");
            return;
        }
        assert_eq!((turns, groups.joined.len(), groups.sockets.len()), (16, 1000, 4));
        groups.set_wanted(&all(10));
        while groups.is_pending() {
            groups.advance();
        }
        assert_eq!((groups.joined.len(), groups.sockets.iter().map(|socket| socket.count).sum::<usize>()), (10, 10));
    }
}
