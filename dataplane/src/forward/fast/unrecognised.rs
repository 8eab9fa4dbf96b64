//! Packets behind one that the fast path does not recognise. It cannot tell the flow of a fragment, of a packet with IP
//! options or extension headers, or of one that is shorter than the heads that it reads: such a packet is left, and must
//! not be overtaken. Later packets between the same addresses are left with it.
//!
//! **Invariant:** no packet is recognised that has an unrecognised packet of its flow and direction before it in the burst.
//! While all packets are recognised, nothing here runs.
//!
//! Not here: packets that are recognised and left (`hits`).

use super::plan::Plan;
use crate::wire::plain::head::{PlainFamily, tuple_at};
use crate::wire::{Address, Buffer, Ipv4, Ipv6, Shape, Tuple, behind, ether_type, protocol, split_mix, take};

/// The addresses of packets that were not recognised, each as a bit: a few more packets than necessary are left.
pub(super) struct UnrecognisedAddresses {
    bits: [u64; WORDS],
    has_any: bool,
}

/// 1,024 bits: with as many pairs as a burst has packets, one in eight other packets is left too.
const WORDS: usize = 16;

impl UnrecognisedAddresses {
    /// No addresses.
    pub(super) fn none() -> Self {
        Self { bits: [0; WORDS], has_any: false }
    }

    /// Leaves those packets of a part, of which some are not recognised, that are behind one between the same addresses in
    /// this part or before. Parts are to be passed in order.
    #[inline(never)]
    pub(super) fn hold_back<B: Buffer>(&mut self, part: &[B], plans: &mut [Plan]) {
        for (buffer, plan) in part.iter().zip(plans) {
            let frame = buffer.bytes();
            let bit = match plan.head.shape.family() {
                0 => bit_of_addresses(frame),
                _ if !self.has_any => None,
                Shape::V4 => bit_of_plain::<u32>(frame, plan.head.shape),
                _ => bit_of_plain::<u128>(frame, plan.head.shape),
            };
            let Some(bit) = bit else { continue };
            let Some(word) = self.bits.get_mut(bit / 64) else { continue };
            if plan.head.shape.family() == 0 {
                self.has_any = true;
                *word |= 1 << (bit % 64);
            } else if *word >> (bit % 64) & 1 != 0 {
                plan.forget();
            }
        }
    }
}

/// The bit of the addresses of a packet that is recognised.
#[inline(always)]
fn bit_of_plain<A: PlainFamily>(frame: &[u8], shape: Shape) -> Option<usize> {
    let Tuple { source, destination, .. } = tuple_at::<A>(frame, shape.network_offset.into(), shape.protocol())?;
    Some(bit_of(source, destination))
}

/// The bit of the addresses of a packet that may be of a flow as one that is recognised: of TCP, UDP, or behind extension
/// headers. Flows do not depend on VLANs, so tags do not count.
fn bit_of_addresses(frame: &[u8]) -> Option<usize> {
    let (kind, packet, _) = behind(frame)?;
    match kind {
        ether_type::IPV4 => {
            let (ip, _) = take::<Ipv4>(packet)?;
            let is_meant = matches!(ip.protocol, protocol::TCP | protocol::UDP);
            is_meant.then(|| bit_of(ip.source.get(), ip.destination.get()))
        }
        ether_type::IPV6 => {
            let (ip, _) = take::<Ipv6>(packet)?;
            let is_other = matches!(ip.next_header, protocol::ICMPV6 | protocol::SCTP);
            (!is_other).then(|| bit_of(ip.source.get(), ip.destination.get()))
        }
        _ => None,
    }
}

#[allow(clippy::cast_possible_truncation)] // a few bits
fn bit_of<A: Address>(source: A, destination: A) -> usize {
    let folded = |address: A| (address.wide() as u64) ^ (address.wide() >> 64) as u64;
    split_mix(split_mix(folded(source)) ^ folded(destination)) as usize % (64 * WORDS)
}
