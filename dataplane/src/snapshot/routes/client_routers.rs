//! The routers of IPv4 clients by range: the addresses with the same upper 16 bits. The route of a flow is stored in a
//! cache line of its own. A reply to a client whose whole range is behind one router finds its next hop here and does
//! not read that line.
//!
//! **Invariant:** for each client this table has the next hop of the routing table, or no entry.
//!
//! Not here: clients on a link, clients behind several routers, and ranges that several routes share. Flows store the
//! next hops of these clients (`flow::storage`).

use crate::flow::UNRESOLVED;

/// Ranges of addresses with the same upper half.
const RANGES: usize = 1 << 16;
/// Numbers of routers, where 0 is none.
pub(super) const NUMBERS: usize = 1 << 8;

/// For each upper half of an address, the number of a router: 64 KiB, of which clients use few lines.
#[derive(Clone, Debug)]
pub(crate) struct ClientRouters {
    numbers: Box<[u8; RANGES]>,
    /// Slots of next hops by their numbers; [`UNRESOLVED`] for none.
    slots: [u32; NUMBERS],
}

impl Default for ClientRouters {
    fn default() -> Self {
        Self { numbers: Box::new([0; RANGES]), slots: [UNRESOLVED; NUMBERS] }
    }
}

impl ClientRouters {
    /// The routers in these slots, each with the first and the last address of the prefix behind it.
    pub(crate) fn new(behind: impl Iterator<Item = ((u32, u32), u32)>) -> Self {
        let mut routers = Self::default();
        for ((first, last), slot) in behind {
            // The ranges that lie completely between `first` and `last`.
            let begin = (first >> 16) + u32::from(first & 0xffff != 0);
            let end = (last >> 16) + u32::from(last & 0xffff == 0xffff);
            if begin < end
                && let Some(number) = routers.number_of(slot)
            {
                routers.numbers[begin as usize..end as usize].fill(number);
            }
        }
        routers
    }

    /// The number of the next hop in a slot, perhaps a new one; `None` if there are too many.
    fn number_of(&mut self, slot: u32) -> Option<u8> {
        let number = (1..NUMBERS).find(|&number| matches!(self.slots[number], known if known == slot || known == UNRESOLVED))?;
        self.slots[number] = slot;
        u8::try_from(number).ok()
    }

    /// The numbers of the routers of all clients.
    pub(super) fn numbers(&self) -> RouterNumbers<'_> {
        RouterNumbers(&self.numbers)
    }

    /// Slots of the next hops by the numbers of the routers; [`UNRESOLVED`] for none.
    pub(super) fn slots(&self) -> &[u32; NUMBERS] {
        &self.slots
    }
}

/// The numbers of the routers of clients.
#[derive(Clone, Copy)]
pub(super) struct RouterNumbers<'s>(&'s [u8; RANGES]);

impl RouterNumbers<'_> {
    /// The number of the router of a client, by its address in wire order; 0 if the router is not known.
    #[inline(always)]
    pub(super) fn of(self, client: u32) -> u8 {
        let [a, b, ..] = client.to_ne_bytes();
        self.0[usize::from(u16::from_be_bytes([a, b]))]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::snapshot::{Prefix, Prefixes};

    /// The routers of a table in which prefixes are behind the next hop in a slot, or not behind a router.
    fn routers(table: &Prefixes<u32, Option<u32>>) -> ClientRouters {
        ClientRouters::new(table.ranges().filter_map(|(range, slot)| Some((range, slot??))))
    }

    /// The slot of the next hop towards a client; [`UNRESOLVED`] if its router is not known.
    fn slot_towards(routers: &ClientRouters, client: u32) -> u32 {
        routers.slots()[usize::from(routers.numbers().of(client.to_be()))]
    }

    proptest! {
        #[test]
        fn a_router_is_that_of_the_routes(routes in proptest::collection::vec((any::<u32>(), 0..=32u8, prop::option::weighted(0.8, 0..300_u32)), 0..40), others in proptest::collection::vec(any::<u32>(), 20)) {
            let prefixes: Vec<_> = routes.iter().map(|&(address, len, value)| Prefix { address, len, value }).collect();
            let table = Prefixes::new(prefixes);
            let routers = routers(&table);
            let edges = routes.iter().flat_map(|&(address, len, _)| {
                let mask = u32::MAX.checked_shr(len.into()).unwrap_or(0);
                [address & !mask, address | mask].into_iter().flat_map(|edge| [edge.wrapping_sub(1), edge, edge.wrapping_add(1)])
            });
            for address in edges.chain(others) {
                let slot = slot_towards(&routers, address);
                prop_assert!(slot == UNRESOLVED || table.get(address) == Some(Some(slot)), "{address:#x}: {slot}");
            }
        }
    }

    #[test]
    fn clients_behind_one_router_are_known_unless_another_route_is_nearer() {
        let prefix = |address, len, value| Prefix { address, len, value };
        let table = Prefixes::new(vec![prefix(0, 0, Some(7)), prefix(0x0a01_0000, 16, None), prefix(0x0a02_8000, 17, Some(8))]);
        let routers = routers(&table);
        for (address, slot) in [
            (0x0102_0304, 7),
            (0xffff_ffff, 7),
            (0x0a00_ffff, 7),
            (0x0a01_0001, UNRESOLVED),
            (0x0a02_0001, UNRESOLVED),
            (0x0a03_0001, 7),
        ] {
            assert_eq!(slot_towards(&routers, address), slot, "{address:#x}");
        }
    }

    #[test]
    fn routers_of_small_prefixes_leave_the_numbers_to_those_of_large_ones() {
        let small = (0..1000_u32).map(|n| Prefix { address: 0x0a00_0000 + (n << 8), len: 24, value: Some(n) });
        let table = Prefixes::new(small.chain([Prefix { address: 0, len: 0, value: Some(5000) }]).collect());
        let routers = routers(&table);
        assert_eq!(slot_towards(&routers, 0xc633_6407), 5000);
        assert_eq!(slot_towards(&routers, 0x0a00_0001), UNRESOLVED);
    }
}
