//! The steering rules of a snapshot, on which the owner of a packet depends: whether the destination is a SNAT address
//! or a frontend of mode `dnat`, or the source a backend of one.
//!
//! Not here: the owner function itself.

use hashbrown::HashSet;

use crate::wire::{Address, FrontendKey, TableHash, Tuple};

/// The kind of destination of a packet, as far as its owner depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketTarget {
    /// From a client to a frontend, or any other packet: steered by its tuple.
    Frontend,
    /// From a client to a frontend of mode `dnat`: steered by the client's address, its source.
    FrontendOfAddress,
    /// From a backend to a SNAT address: steered by the port.
    Snat,
    /// From a backend of mode `dnat` to a client: steered by the client's address, its destination.
    Client,
}

/// The steering rules of one family.
#[derive(Clone, Debug)]
pub(crate) struct SteeringTable<A> {
    /// The SNAT addresses; there are few.
    pub(crate) snat: Box<[A]>,
    /// Frontends of mode `dnat`, and former ones that may still have flows.
    pub(crate) frontends: HashSet<FrontendKey<A>, TableHash>,
    /// The backends of these frontends, as source of their replies.
    pub(crate) backends: HashSet<FrontendKey<A>, TableHash>,
    /// The addresses of these backends.
    pub(crate) backend_addresses: HashSet<A, TableHash>,
}

impl<A: Address> SteeringTable<A> {
    /// Rules without any `dnat`, from the SNAT addresses.
    pub(crate) fn new(snat: impl Iterator<Item = A>) -> Self {
        let mut addresses: Vec<A> = snat.collect();
        addresses.sort_unstable();
        addresses.dedup();
        let (frontends, backends, backend_addresses) = (HashSet::default(), HashSet::default(), HashSet::default());
        Self { snat: addresses.into(), frontends, backends, backend_addresses }
    }

    /// The kind of destination of a packet with this tuple. A packet of a `dnat` backend to an address of the gateway
    /// is that of a client.
    #[inline(always)]
    pub(crate) fn towards(&self, tuple: &Tuple<A>, is_ours: impl FnOnce(A) -> bool) -> PacketTarget {
        let is_snat = match &*self.snat {
            [only] => *only == tuple.destination,
            // Not `contains`, which takes longer where there are few.
            all => all.iter().fold(false, |is_one, address| is_one | (*address == tuple.destination)),
        };
        if is_snat {
            PacketTarget::Snat
        } else if self.backends.is_empty() && self.frontends.is_empty() {
            PacketTarget::Frontend
        } else {
            self.towards_dnat(tuple, is_ours)
        }
    }

    /// Whether an address is that of a backend of mode `dnat`, whose packets to clients are rewritten.
    pub(crate) fn is_backend(&self, address: A) -> bool {
        !self.backend_addresses.is_empty() && self.backend_addresses.contains(&address)
    }

    /// The remaining rules, used when a service is of mode `dnat`.
    #[inline(never)]
    fn towards_dnat(&self, tuple: &Tuple<A>, is_ours: impl FnOnce(A) -> bool) -> PacketTarget {
        let protocol = tuple.protocol;
        if self.frontends.contains(&FrontendKey { address: tuple.destination, port: tuple.destination_port, protocol }) {
            return PacketTarget::FrontendOfAddress;
        }
        let source = FrontendKey { address: tuple.source, port: tuple.source_port, protocol };
        if self.backends.contains(&source) && !is_ours(tuple.destination) { PacketTarget::Client } else { PacketTarget::Frontend }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: u32 = 0xc633_6407;
    const VIP: u32 = 0xc000_0264;
    const SNAT: u32 = 0x0a00_0003;
    const BACKEND: u32 = 0x0a00_000b;

    fn key(address: u32, port: u16) -> FrontendKey<u32> {
        FrontendKey { address, port, protocol: 6 }
    }

    fn towards(table: &SteeringTable<u32>, source: (u32, u16), destination: (u32, u16)) -> PacketTarget {
        let tuple = Tuple {
            source: source.0,
            destination: destination.0,
            source_port: source.1,
            destination_port: destination.1,
            protocol: 6,
        };
        table.towards(&tuple, |address| [VIP, SNAT].contains(&address))
    }

    #[test]
    fn packets_are_classified_by_our_addresses_and_ports() {
        let nat = SteeringTable::new([SNAT].into_iter());
        let dnat = SteeringTable {
            frontends: [key(VIP, 80)].into_iter().collect(),
            backends: [key(BACKEND, 8080)].into_iter().collect(),
            ..nat.clone()
        };
        let rows = [
            ("a client to a frontend", (CLIENT, 5555), (VIP, 443), PacketTarget::Frontend, PacketTarget::Frontend),
            ("a client to a dnat frontend", (CLIENT, 5555), (VIP, 80), PacketTarget::Frontend, PacketTarget::FrontendOfAddress),
            ("a backend to a SNAT address", (BACKEND, 8080), (SNAT, 1024), PacketTarget::Snat, PacketTarget::Snat),
            ("a dnat backend to a client", (BACKEND, 8080), (CLIENT, 5555), PacketTarget::Frontend, PacketTarget::Client),
            (
                "a dnat backend as a client of another frontend",
                (BACKEND, 8080),
                (VIP, 443),
                PacketTarget::Frontend,
                PacketTarget::Frontend,
            ),
            ("a backend's other port", (BACKEND, 22), (CLIENT, 5555), PacketTarget::Frontend, PacketTarget::Frontend),
        ];
        for (sentence, source, destination, without, with) in rows {
            assert_eq!(towards(&nat, source, destination), without, "{sentence}, no dnat");
            assert_eq!(towards(&dnat, source, destination), with, "{sentence}");
        }
    }
}
