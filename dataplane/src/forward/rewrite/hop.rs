//! The part of a rewrite that every router does, and the whole of it in mode `dsr`.
//!
//! **Invariant:** nothing else in the packet changes.
//!
//! Not here: packets whose hop limit is used up.

use crate::snapshot::Exit;
use crate::wire::{Address, Ethernet, Headers, lower_hop_limit, take_mut};

/// Sets the MACs of the next hop and decrements the hop limit, which must be at least 2. A frame that does not match
/// `headers` is not changed.
pub fn hop<A: Address>(frame: &mut [u8], headers: &Headers<A>, exit: &Exit) {
    let Some((link, packet)) = frame.split_at_mut_checked(usize::from(headers.network_offset)) else { return };
    let Some((ethernet, _)) = take_mut::<Ethernet>(link) else { return };
    if lower_hop_limit::<A>(packet).is_some() {
        ethernet.set_addresses(exit.source_mac(), exit.destination_mac());
    }
}
