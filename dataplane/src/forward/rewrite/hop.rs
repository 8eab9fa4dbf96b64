//! The part of a rewrite that every router does, and the whole of it in mode `dsr`.
//!
//! **Invariant:** nothing else in the packet changes.
//!
//! Not here: packets whose hop limit is used up.

use proto::Family;

use crate::snapshot::Exit;
use crate::wire::checksum::{HOP_DELTA, apply};
use crate::wire::{Address, Ethernet, Headers, Ipv4, Ipv6, take_mut};

/// Sets the MACs of the next hop and decrements the hop limit, which must be at least 2. A frame that does not match
/// `headers` is not changed.
pub fn hop<A: Address>(frame: &mut [u8], headers: &Headers<A>, exit: &Exit) {
    let Some((link, packet)) = frame.split_at_mut_checked(usize::from(headers.network_offset)) else { return };
    let Some((ethernet, _)) = take_mut::<Ethernet>(link) else { return };
    if lower_hop_limit::<A>(packet).is_some() {
        ethernet.destination = exit.destination_mac.0;
        ethernet.source = exit.source_mac.0;
    }
}

/// Decrements the hop limit of an IP packet; `None` when it is too short to be one.
pub(crate) fn lower_hop_limit<A: Address>(packet: &mut [u8]) -> Option<()> {
    match A::FAMILY {
        Family::V4 => {
            let (ip, _) = take_mut::<Ipv4>(packet)?;
            ip.ttl = ip.ttl.wrapping_sub(1);
            ip.checksum.set(apply(ip.checksum.get(), HOP_DELTA));
        }
        Family::V6 => {
            let (ip, _) = take_mut::<Ipv6>(packet)?;
            ip.hop_limit = ip.hop_limit.wrapping_sub(1);
        }
    }
    Some(())
}
