//! Clamping of the maximum segment size: lowers the value that a SYN or SYN-ACK announces (RFC 9293 section 3.7.1) to
//! what fits the links of both sides when their MTUs differ.
//!
//! The option limits what its receiver sends, in the opposite direction. In modes in which only the client's packets
//! pass the gateway, clamping would therefore not help (FORWARDING 12).
//!
//! **Invariant:** the announced size is never raised, and a wrong checksum stays wrong.
//!
//! Not here: which MTUs count.

use crate::wire::checksum::{apply, word_delta};
use crate::wire::{Address, Headers, Tcp, Transport, network_len, take, take_mut, tcp_flags, tcp_option};

/// Lowers the announced size of a SYN or SYN-ACK to what fits the smaller of two MTUs. Other packets, and packets
/// between links of the same MTU, are not changed.
#[inline]
pub(crate) fn clamp_between<A: Address>(frame: &mut [u8], headers: &Headers<A>, mtus: [u16; 2]) {
    if matches!(headers.transport, Transport::Tcp { flags } if flags & tcp_flags::SYN != 0) && mtus[0] != mtus[1] {
        clamp_to_mtu(frame, headers, mtus[0].min(mtus[1]));
    }
}

#[cold]
fn clamp_to_mtu<A: Address>(frame: &mut [u8], headers: &Headers<A>, mtu: u16) {
    if let Some(segment) = frame.get_mut(usize::from(headers.transport_offset)..) {
        let _ = clamp(segment, mtu.saturating_sub(network_len::<A>() + Tcp::BYTES));
    }
}

/// Lowers the option in a TCP header to at most `largest` bytes, and updates the checksum. A segment without the
/// option, or with invalid options, is not changed: `None`.
fn clamp(segment: &mut [u8], largest: u16) -> Option<()> {
    let (tcp, _) = take::<Tcp>(segment)?;
    let at = option(segment.get(..usize::from(tcp.header_len()))?)?;
    let field = segment.get_mut(at..)?.first_chunk_mut::<2>()?;
    let offered = u16::from_be_bytes(*field);
    if offered <= largest {
        return None;
    }
    *field = largest.to_be_bytes();
    // At an odd offset the two bytes belong to two words, each in the other half.
    let delta = if at % 2 == 0 { word_delta(offered, largest) } else { word_delta(offered.swap_bytes(), largest.swap_bytes()) };
    let (tcp, _) = take_mut::<Tcp>(segment)?;
    tcp.checksum.set(apply(tcp.checksum.get(), delta));
    Some(())
}

/// Offset of the option's value in a header.
fn option(header: &[u8]) -> Option<usize> {
    let mut of_kind = tcp_option::all(header).filter(|at| header.get(at.start) == Some(&tcp_option::MAXIMUM_SEGMENT_SIZE));
    of_kind.next().filter(|at| at.len() == 4).map(|at| at.start + 2)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::checksum::{finish, sum};

    /// A SYN with these options, padded with zeros, and a correct checksum without pseudo header.
    fn syn(options: &[u8]) -> Vec<u8> {
        let words = u8::try_from(options.len().div_ceil(4)).unwrap();
        let mut segment = vec![0; 20 + usize::from(words) * 4];
        segment[..20].copy_from_slice(&[0x15, 0xb3, 0, 80, 0, 0, 3, 0xe8, 0, 0, 0, 0, 0, 2, 0x20, 0, 0, 0, 0, 0]);
        segment[12] = (5 + words) << 4;
        segment[20..20 + options.len()].copy_from_slice(options);
        let checksum = finish(sum(&segment));
        segment[16..18].copy_from_slice(&checksum.to_be_bytes());
        segment
    }

    fn clamped(options: &[u8], largest: u16) -> Vec<u8> {
        let mut segment = syn(options);
        clamp(&mut segment, largest);
        segment
    }

    #[test]
    fn only_a_larger_offer_is_lowered() {
        let rows: [(&str, &[u8], &[u8]); 8] = [
            ("a larger one", &[2, 4, 5, 0xb4], &[2, 4, 5, 0x8c]),
            ("a smaller one", &[2, 4, 2, 0x18], &[2, 4, 2, 0x18]),
            ("behind others", &[4, 2, 1, 2, 4, 5, 0xb4, 0], &[4, 2, 1, 2, 4, 5, 0x8c, 0]),
            ("none", &[4, 2, 1, 1], &[4, 2, 1, 1]),
            ("after the end of options", &[0, 0, 0, 0, 2, 4, 5, 0xb4], &[0, 0, 0, 0, 2, 4, 5, 0xb4]),
            ("of another length", &[2, 3, 5, 0xb4], &[2, 3, 5, 0xb4]),
            ("cut off", &[1, 2, 4, 5], &[1, 2, 4, 5]),
            ("behind an option without length", &[9, 0, 2, 4, 5, 0xb4], &[9, 0, 2, 4, 5, 0xb4]),
        ];
        for (sentence, before, after) in rows {
            assert_eq!(clamped(before, 0x58c), syn(after), "{sentence}");
        }
    }

    proptest! {
        #[test]
        fn the_checksum_is_the_one_of_a_full_computation(
            nops in 0_usize..8, offered in any::<u16>(), largest in any::<u16>(),
        ) {
            let option = |value: u16| [vec![1; nops], vec![2, 4], value.to_be_bytes().to_vec()].concat();
            prop_assert_eq!(clamped(&option(offered), largest), syn(&option(offered.min(largest))));
        }

        #[test]
        fn arbitrary_bytes_cause_no_panic(mut segment in prop::collection::vec(any::<u8>(), 0..80), largest in any::<u16>()) {
            let len = segment.len();
            clamp(&mut segment, largest);
            prop_assert_eq!(segment.len(), len);
        }
    }
}
