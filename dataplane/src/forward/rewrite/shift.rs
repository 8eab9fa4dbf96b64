//! The bytes of shifted TCP segments: sequence and acknowledgement numbers, SACK blocks (RFC 2018, D-SACK of RFC 2883),
//! timestamps (RFC 7323), windows, and options that shifted connections cannot have.
//!
//! **Invariant:** the checksum changes by the difference of the words that change (RFC 1624): a right one stays right,
//! a wrong one stays wrong. A segment whose header does not fit its packet is not changed.
//!
//! Not here: by how much numbers change (`flow::state`), and bytes that are inserted (`prefix`).

use crate::flow::{ClockShift, Direction, NumberShift, SegmentHead, StreamShift};
use crate::wire::checksum::{apply, difference, sum};
use crate::wire::{Address, Headers, Tcp, Transport, take, take_mut, tcp_flags, tcp_option};

/// The timestamps of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timestamps {
    /// The sender's.
    pub value: u32,
    /// The receiver's, echoed.
    pub echo: u32,
}

/// The TCP header of a packet with its options, without data.
fn header_of<'a, A: Address>(frame: &'a [u8], headers: &Headers<A>) -> Option<&'a [u8]> {
    let end = usize::from(headers.network_offset) + usize::from(headers.packet_len);
    let segment = frame.get(usize::from(headers.transport_offset)..end)?;
    let (tcp, _) = take::<Tcp>(segment)?;
    segment.get(..usize::from(tcp.header_len().max(Tcp::BYTES)))
}

/// The fields of a segment by which it is decided on; `None` if the packet is no whole TCP segment.
#[must_use]
pub fn segment_head<A: Address>(frame: &[u8], headers: &Headers<A>) -> Option<SegmentHead> {
    let Transport::Tcp { .. } = headers.transport else { return None };
    let header = header_of(frame, headers)?;
    let (tcp, _) = take::<Tcp>(header)?;
    let before_data =
        headers.transport_offset.checked_sub(headers.network_offset)?.checked_add(u16::try_from(header.len()).ok()?)?;
    Some(SegmentHead {
        flags: tcp.flags,
        sequence: tcp.sequence.get(),
        acknowledgement: tcp.acknowledgement.get(),
        window: tcp.window.get(),
        data_len: headers.packet_len.checked_sub(before_data)?,
    })
}

/// Changes a TCP header and its checksum by what that changes. `edit` must not change the length or the checksum.
fn edit<A: Address>(frame: &mut [u8], headers: &Headers<A>, change: impl FnOnce(&mut [u8])) {
    let Some(len) = header_of(frame, headers).map(<[u8]>::len) else { return };
    let start = usize::from(headers.transport_offset);
    let Some(header) = frame.get_mut(start..start + len) else { return };
    let before = sum(header);
    change(header);
    let after = sum(header);
    if let Some((tcp, _)) = take_mut::<Tcp>(header)
        && before != after
    {
        tcp.checksum.set(apply(tcp.checksum.get(), difference(before, after)));
    }
}

/// Shifts the numbers of a segment in a direction. A SYN keeps its sequence number: it stands before all that is inserted.
pub fn renumber<A: Address>(frame: &mut [u8], headers: &Headers<A>, numbers: &NumberShift, direction: Direction) {
    let (carried, acknowledged) = (numbers.carried(direction), numbers.acknowledged(direction));
    let clocks = numbers.clocks(direction);
    edit(frame, headers, |header| {
        let Some((tcp, _)) = take_mut::<Tcp>(header) else { return };
        if tcp.flags & tcp_flags::SYN == 0 {
            tcp.sequence.set(carried.to_receiver(tcp.sequence.get()));
        }
        if tcp.flags & tcp_flags::ACK != 0 {
            tcp.acknowledgement.set(acknowledged.to_sender(tcp.acknowledgement.get()));
        }
        let has_ack = tcp.flags & tcp_flags::ACK != 0;
        if acknowledged != StreamShift::default() || clocks != ClockShift::default() {
            for_each_option(header, |option| match *option {
                [tcp_option::SACK, _, ref mut blocks @ ..] => shift_blocks(blocks, acknowledged),
                [tcp_option::TIMESTAMPS, 10, ref mut stamps @ ..] => shift_stamps(stamps, clocks, has_ack),
                _ => {}
            });
            pad_empty_sack(header);
        }
    });
}

/// Shifts the edges of SACK blocks and removes those that became empty: they were about inserted bytes alone. What is left
/// of the option after the last block is filled with zeros, which [`pad_empty_sack`] removes.
fn shift_blocks(blocks: &mut [u8], stream: StreamShift) {
    let (mut kept, mut at) = (0, 0);
    while let Some(&edges) = blocks.get(at..).and_then(<[u8]>::first_chunk::<8>) {
        let [a, b, c, d, e, f, g, h] = edges;
        let left = stream.to_sender(u32::from_be_bytes([a, b, c, d]));
        let right = stream.to_sender(u32::from_be_bytes([e, f, g, h]));
        if left != right
            && let Some(to) = blocks.get_mut(kept..).and_then(<[u8]>::first_chunk_mut::<8>)
        {
            let (left, right) = (left.to_be_bytes(), right.to_be_bytes());
            to[..4].copy_from_slice(&left);
            to[4..].copy_from_slice(&right);
            kept += 8;
        }
        at += 8;
    }
    if let Some(rest) = blocks.get_mut(kept..at) {
        rest.fill(0);
    }
}

/// Shortens the SACK option to its blocks that are not empty, and pads what gets free.
fn pad_empty_sack(header: &mut [u8]) {
    for_each_option(header, |option| {
        let [tcp_option::SACK, _, blocks @ ..] = option else { return };
        let kept = blocks.as_chunks::<8>().0.iter().take_while(|block| **block != [0; 8]).count() * 8;
        if kept == blocks.len() {
            return;
        }
        if kept == 0 {
            return option.fill(tcp_option::NO_OPERATION);
        }
        option[1] = u8::try_from(2 + kept).unwrap_or(u8::MAX);
        option[2 + kept..].fill(tcp_option::NO_OPERATION);
    });
}

fn shift_stamps(stamps: &mut [u8], clocks: ClockShift, has_ack: bool) {
    let Some(stamps) = stamps.first_chunk_mut::<8>() else { return };
    let [a, b, c, d, e, f, g, h] = *stamps;
    let value = u32::from_be_bytes([a, b, c, d]).wrapping_add(clocks.added);
    // Without ACK it is no echo (RFC 7323 section 3.2).
    let echo = u32::from_be_bytes([e, f, g, h]).wrapping_sub(if has_ack { clocks.subtracted } else { 0 });
    stamps[..4].copy_from_slice(&value.to_be_bytes());
    stamps[4..].copy_from_slice(&echo.to_be_bytes());
}

/// Calls `visit` with each option that has a length, kind and length included, until one does not fit.
fn for_each_option(header: &mut [u8], mut visit: impl FnMut(&mut [u8])) {
    let mut at = usize::from(Tcp::BYTES);
    while let Some(range) = tcp_option::next(header, at) {
        at = range.end;
        if let Some(option) = header.get_mut(range) {
            visit(option);
        }
    }
}

/// The option of this kind and length in a header.
fn option_of(header: &[u8], wanted: u8, wanted_len: usize) -> Option<&[u8]> {
    let options = tcp_option::all(header).filter_map(|option| header.get(option));
    options.filter(|option| option.len() == wanted_len).find(|option| option.first() == Some(&wanted))
}

/// The scale of windows that a SYN or SYN-ACK announces; 0 without the option.
#[must_use]
pub fn window_scale<A: Address>(frame: &[u8], headers: &Headers<A>) -> u8 {
    header_of(frame, headers).and_then(|header| option_of(header, tcp_option::WINDOW_SCALE, 3)).map_or(0, |option| option[2])
}

/// The timestamps of a segment, if it has any.
#[must_use]
pub fn timestamps<A: Address>(frame: &[u8], headers: &Headers<A>) -> Option<Timestamps> {
    let option = header_of(frame, headers).and_then(|header| option_of(header, tcp_option::TIMESTAMPS, 10))?;
    let stamps = option.get(2..)?.first_chunk::<8>()?;
    let [a, b, c, d, e, f, g, h] = *stamps;
    Some(Timestamps { value: u32::from_be_bytes([a, b, c, d]), echo: u32::from_be_bytes([e, f, g, h]) })
}

/// Shrinks the window of a segment by so many units, to 0 at least.
pub fn shrink_window<A: Address>(frame: &mut [u8], headers: &Headers<A>, units: u16) {
    edit(frame, headers, |header| {
        if let Some((tcp, _)) = take_mut::<Tcp>(header) {
            tcp.window.set(tcp.window.get().saturating_sub(units));
        }
    });
}

/// Turns the SACK option of a segment into padding.
pub fn remove_sack<A: Address>(frame: &mut [u8], headers: &Headers<A>) {
    edit(frame, headers, |header| pad_options(header, &[tcp_option::SACK]));
}

/// Turns the options of a SYN into padding by which a connection would begin with data (RFC 7413), whose place the header
/// has, or take further paths (RFC 8684), which number their data on their own.
pub fn remove_unshiftable<A: Address>(frame: &mut [u8], headers: &Headers<A>) {
    edit(frame, headers, |header| pad_options(header, &[tcp_option::MULTIPATH, tcp_option::FAST_OPEN]));
}

fn pad_options(header: &mut [u8], kinds: &[u8]) {
    for_each_option(header, |option| {
        if kinds.contains(&option[0]) {
            option.fill(tcp_option::NO_OPERATION);
        }
    });
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::*;
    use crate::forward::rewrite::{cut_data, prefix};
    use crate::testing::{Bytes, Packet, Segment, assert_checksums, transport_checksum, v4, v6};
    use crate::wire::Buffer;

    /// A segment with these options (a multiple of 4 bytes), with a correct checksum.
    fn packet(is_v4: bool, flags: u8, numbers: [u32; 2], options: &[u8], data: &[u8]) -> Packet {
        let (from, to) = if is_v4 { ("198.51.100.7", "192.0.2.100") } else { ("2001:db8::7", "2001:db8::100") };
        let (from, to): (IpAddr, IpAddr) = (from.parse().unwrap(), to.parse().unwrap());
        let words = u8::try_from(5 + options.len() / 4).unwrap();
        let mut bytes = [&[0x15, 0xb3, 0, 80][..], &numbers[0].to_be_bytes(), &numbers[1].to_be_bytes()].concat();
        bytes.extend([words << 4, flags, 0x20, 0, 0, 0, 0, 9]);
        bytes.extend(options.iter().chain(data));
        let sum = transport_checksum(from, to, 6, &bytes);
        bytes[16..18].copy_from_slice(&sum.to_be_bytes());
        Packet::between(from, to, Segment::Other { protocol: 6 }).payload(&bytes)
    }

    /// The frame after a change of it.
    fn changed(packet: &Packet, change: impl Fn(&mut Bytes, Ends<'_>)) -> Vec<u8> {
        let mut buffer = Bytes::new(packet.build());
        let frame = buffer.frame.clone();
        if packet.source.is_ipv4() {
            change(&mut buffer, Ends::V4(&v4(&frame)))
        } else {
            change(&mut buffer, Ends::V6(&v6(&frame)))
        }
        buffer.frame
    }

    enum Ends<'h> {
        V4(&'h Headers<u32>),
        V6(&'h Headers<u128>),
    }

    fn renumbered(packet: &Packet, numbers: &NumberShift, direction: Direction) -> Vec<u8> {
        changed(packet, |buffer, headers| match headers {
            Ends::V4(headers) => renumber(buffer.bytes_mut(), headers, numbers, direction),
            Ends::V6(headers) => renumber(buffer.bytes_mut(), headers, numbers, direction),
        })
    }

    const ACK: u8 = tcp_flags::ACK;

    /// A shift of both streams and both clocks.
    fn shift() -> NumberShift {
        NumberShift {
            client: StreamShift { offset: 28, begins: Some(0xffff_fff0) },
            backend: StreamShift { offset: 1_000, begins: None },
            client_clock: 5,
            backend_clock: 0xffff_ffff,
        }
    }

    #[test]
    fn streams_and_clocks_of_both_sides_shift_in_both_directions() {
        let stamps = |value: u32, echo: u32| [&[1, 1, 8, 10][..], &value.to_be_bytes(), &echo.to_be_bytes()].concat();
        let sack = |left: u32, right: u32| [&[1, 1, 5, 10][..], &left.to_be_bytes(), &right.to_be_bytes()].concat();
        for is_v4 in [true, false] {
            let sent = packet(is_v4, ACK, [0xffff_fff0, 5_000], &[stamps(7, 9), sack(6_000, 7_000)].concat(), b"x");
            let seen = packet(is_v4, ACK, [12, 4_000], &[stamps(12, 10), sack(5_000, 6_000)].concat(), b"x");
            assert_eq!(renumbered(&sent, &shift(), Direction::ToBackend), seen.build());
            let sent = packet(is_v4, ACK, [5_000, 12], &[stamps(9, 12), sack(40, 60)].concat(), b"x");
            let seen = packet(is_v4, ACK, [6_000, 0xffff_fff0], &[stamps(8, 7), sack(12, 32)].concat(), b"x");
            assert_eq!(renumbered(&sent, &shift(), Direction::ToClient), seen.build());
            // Without ACK nothing is acknowledged or echoed; a SYN is before all that is inserted.
            let sent = packet(is_v4, tcp_flags::RST, [5_000, 12], &stamps(9, 12), b"");
            let seen = packet(is_v4, tcp_flags::RST, [6_000, 12], &stamps(8, 12), b"");
            assert_eq!(renumbered(&sent, &shift(), Direction::ToClient), seen.build());
            let sent = packet(is_v4, tcp_flags::SYN | ACK, [5_000, 0xffff_fff0], &[], b"");
            assert_eq!(renumbered(&sent, &shift(), Direction::ToClient), sent.build());
        }
    }

    #[test]
    fn options_that_are_cut_off_or_malformed_stay() {
        for options in [&[5, 10, 0, 0][..], &[5, 1, 1, 1], &[8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[0, 0, 5, 10], &[1, 1, 1, 5]]
        {
            let sent = packet(true, ACK, [0, 0], options, b"data");
            let frame = renumbered(&sent, &NumberShift { client_clock: 1, ..NumberShift::default() }, Direction::ToBackend);
            assert_eq!(frame, sent.build(), "{options:?}");
        }
    }

    proptest! {
        /// Checksums after any change equal those of a full computation.
        #[test]
        fn whatever_changes_the_checksum_is_right(
            is_v4 in any::<bool>(), flags in any::<u8>(), numbers in any::<[u32; 2]>(), words in 0_usize..10,
            noise in prop::collection::vec(any::<u8>(), 40), data in prop::collection::vec(any::<u8>(), 0..300),
            header in prop::collection::vec(any::<u8>(), 1..108), padding in 0_usize..8,
        ) {
            let mut sent = packet(is_v4, flags, numbers, &noise[..4 * words], &data);
            sent.padding = padding;
            assert_checksums(&renumbered(&sent, &shift(), Direction::ToBackend));
            assert_checksums(&renumbered(&sent, &shift(), Direction::ToClient));
            let prefixed = changed(&sent, |buffer, headers| match headers {
                Ends::V4(headers) => assert!(prefix(buffer, headers, &header).is_some()),
                Ends::V6(headers) => assert!(prefix(buffer, headers, &header).is_some()),
            });
            assert_checksums(&prefixed);
            let network = if is_v4 { 34 } else { 54 };
            let at = network + 20 + 4 * words;
            prop_assert_eq!(&prefixed[at..at + header.len()], &header[..]);
            prop_assert_eq!(&prefixed[at + header.len()..at + header.len() + data.len()], &data[..]);
            let cut = changed(&sent, |buffer, headers| match headers {
                Ends::V4(headers) => assert!(cut_data(buffer, headers).is_some()),
                Ends::V6(headers) => assert!(cut_data(buffer, headers).is_some()),
            });
            assert_checksums(&cut);
            for change in [remove_sack::<u32>, remove_unshiftable::<u32>] {
                if is_v4 {
                    let mut frame = sent.build();
                    let headers = v4(&frame);
                    change(&mut frame, &headers);
                    assert_checksums(&frame);
                }
            }
        }

        #[test]
        fn a_wrong_checksum_stays_wrong(wrong in 1_u16..0xffff, header in prop::collection::vec(any::<u8>(), 1..108)) {
            let mut frame = packet(true, ACK, [7, 8], &[], b"some data").build();
            let right = u16::from_be_bytes([frame[50], frame[51]]);
            frame[50..52].copy_from_slice(&apply(right, wrong).to_be_bytes());
            let headers = v4(&frame);
            renumber(&mut frame, &headers, &shift(), Direction::ToBackend);
            let mut buffer = Bytes::new(frame);
            prefix(&mut buffer, &headers, &header).unwrap();
            let transport = &buffer.frame[34..];
            let sum = transport_checksum("198.51.100.7".parse().unwrap(), "192.0.2.100".parse().unwrap(), 6, transport);
            prop_assert_ne!(sum, 0);
        }

        #[test]
        fn arbitrary_bytes_cause_no_panic(mut noise in prop::collection::vec(any::<u8>(), 60..200), header_len in 0_u8..16) {
            let mut frame = packet(true, ACK, [7, 8], &[1; 8], &noise).build();
            noise.truncate(28);
            frame[34..62].copy_from_slice(&noise);
            frame[46] = header_len << 4 | frame[46] & 15;
            let headers = v4(&packet(true, ACK, [7, 8], &[1; 8], b"").build());
            renumber(&mut frame, &headers, &shift(), Direction::ToBackend);
            let _ = (segment_head(&frame, &headers), timestamps(&frame, &headers), window_scale(&frame, &headers));
            let mut buffer = Bytes::new(frame);
            let _ = prefix(&mut buffer, &headers, b"PROXY");
            let _ = cut_data(&mut buffer, &headers);
        }
    }
}
