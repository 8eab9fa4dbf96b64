//! ICMP errors about packets inside tunnels, built from errors about the tunnel packets (RFC 2003 section 4, RFC 2473
//! section 8).

use std::ops::Range;

use proto::Family;

use super::error::{quoted_len_max, write};
use super::{IcmpError, network_len};
use crate::checksum::{HOP_DELTA, apply};
use crate::snapshot::Exit;
use crate::wire::{Ethernet, Icmp, Ipv4, Ipv6, ether_type, take_mut};
use crate::{Address, Buffer, Tuple};

/// Turns the frame into an ICMP error to the sender of the inner packet, whose beginning is at `quoted`, after the
/// headers of an ICMP error and of a tunnel. The error comes from the destination of the inner packet, which has the
/// tuple `inner`, and quotes it with the hop limit that it had before the tunnel. Returns false when there are no such
/// bytes.
#[must_use]
pub fn icmp_error_about_inner<I: Address>(
    buffer: &mut impl Buffer,
    quoted: Range<usize>,
    inner: &Tuple<I>,
    error: IcmpError,
    exit: &Exit,
) -> bool {
    let quoted = quoted.start..quoted.end.min(quoted.start + quoted_len_max::<I>());
    let quoted_to = usize::from(Ethernet::BYTES + network_len::<I>() + Icmp::BYTES);
    // The headers of an error and of a tunnel precede it; they are at least as long as these.
    if quoted.end > buffer.bytes().len() || quoted_to > quoted.start || quoted.is_empty() {
        return false;
    }
    let frame_len = quoted_to + quoted.len();
    buffer.bytes_mut().copy_within(quoted, quoted_to);
    buffer.resize(frame_len) && finish(buffer.bytes_mut(), quoted_to, inner, error, exit).is_some()
}

fn finish<I: Address>(frame: &mut [u8], quoted_at: usize, inner: &Tuple<I>, error: IcmpError, exit: &Exit) -> Option<()> {
    raise_hop_limit::<I>(frame.get_mut(quoted_at..)?)?;
    write(frame, inner.source, inner.destination, error, exit.source_mac)?;
    let (ethernet, _) = take_mut::<Ethernet>(frame)?;
    ethernet.destination = exit.destination_mac.0;
    ethernet.ether_type.set(match I::FAMILY {
        Family::V4 => ether_type::IPV4,
        Family::V6 => ether_type::IPV6,
    });
    Some(())
}

/// Restores the hop limit that [`crate::encapsulate`] decremented. No packet of the gateway had 255.
fn raise_hop_limit<I: Address>(packet: &mut [u8]) -> Option<()> {
    match I::FAMILY {
        Family::V4 => {
            let (ip, _) = take_mut::<Ipv4>(packet)?;
            if let Some(ttl) = ip.ttl.checked_add(1) {
                ip.ttl = ttl;
                ip.checksum.set(apply(ip.checksum.get(), !HOP_DELTA));
            }
        }
        Family::V6 => {
            let (ip, _) = take_mut::<Ipv6>(packet)?;
            ip.hop_limit = ip.hop_limit.saturating_add(1);
        }
    }
    Some(())
}
