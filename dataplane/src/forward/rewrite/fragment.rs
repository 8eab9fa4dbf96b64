//! Rewriting of fragments: later fragments have no ports, and all fragments get an identification of the gateway.

use proto::Family;
use zerocopy::network_endian::U32;

use super::nat::{Rewrite, ipv4, ipv6};
use crate::wire::checksum::{apply, word_delta};
use crate::wire::{Address, Ethernet, Headers, Ipv4, Ipv6, take_mut};

/// Rewrites a later fragment: MACs, addresses, hop limit. The transport checksum, which covers all fragments and the
/// addresses, is in the first fragment and is rewritten there. The hop limit must be at least 2. A frame that does not
/// match `headers` is not changed.
pub fn later_fragment<A: Address>(frame: &mut [u8], headers: &Headers<A>, rewrite: &Rewrite<A>) {
    let _ = try_later_fragment(frame, headers, rewrite);
}

fn try_later_fragment<A: Address>(frame: &mut [u8], headers: &Headers<A>, rewrite: &Rewrite<A>) -> Option<()> {
    let (link, network) = frame.split_at_mut_checked(usize::from(headers.network_offset))?;
    let (ethernet, _) = take_mut::<Ethernet>(link)?;
    match A::FAMILY {
        Family::V4 => ipv4(take_mut::<Ipv4>(network)?.0, rewrite),
        Family::V6 => ipv6(take_mut::<Ipv6>(network)?.0, rewrite),
    }
    ethernet.destination = rewrite.destination_mac.0;
    ethernet.source = rewrite.source_mac.0;
    Some(())
}

/// Changes the identification of a datagram or fragment. It is at `offset`, in bytes from the start of the frame: in
/// the IPv4 header, or in IPv6's fragment header. Nothing changes if that is outside the frame.
pub fn renumber<A: Address>(frame: &mut [u8], headers: &Headers<A>, offset: u16, identification: u32) {
    match A::FAMILY {
        Family::V4 => {
            let Some(network) = frame.get_mut(usize::from(headers.network_offset)..) else { return };
            let Some((ip, _)) = take_mut::<Ipv4>(network) else { return };
            let identification = (identification & 0xffff) as u16;
            ip.checksum.set(apply(ip.checksum.get(), word_delta(ip.identification.get(), identification)));
            ip.identification.set(identification);
        }
        Family::V6 => {
            if let Some((number, _)) = frame.get_mut(usize::from(offset)..).and_then(take_mut::<U32>) {
                number.set(identification);
            }
        }
    }
}
