//! The bytes of shifted TCP segments: sequence and acknowledgement numbers, SACK blocks (RFC 2018, D-SACK of RFC 2883),
//! timestamps (RFC 7323), windows, and options that shifted connections cannot have.
//!
//! **Invariant:** the checksum changes by the difference of the words that change (RFC 1624): a right one stays right,
//! a wrong one stays wrong. A segment whose header does not fit its packet is not changed.
//!
//! Not here: by how much numbers change (`flow::state`), and bytes that are inserted (`prefix`).

use crate::flow::{ClockShift, Direction, NumberShift, SegmentHead, StreamShift};
use crate::wire::checksum::{apply, difference, sum};
use crate::wire::{Address, Headers, Tcp, Transport, take, take_mut, tcp_flags};

/// Kinds of TCP options (IANA's registry; those after SACK from RFC 7323, RFC 8684 and RFC 7413).
mod option_kind {
    pub(super) const END: u8 = 0;
    pub(super) const NO_OPERATION: u8 = 1;
    pub(super) const WINDOW_SCALE: u8 = 3;
    pub(super) const SACK: u8 = 5;
    pub(super) const TIMESTAMPS: u8 = 8;
    pub(super) const MULTIPATH: u8 = 30;
    pub(super) const FAST_OPEN: u8 = 34;
}

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
                [option_kind::SACK, _, ref mut blocks @ ..] => shift_blocks(blocks, acknowledged),
                [option_kind::TIMESTAMPS, 10, ref mut stamps @ ..] => shift_stamps(stamps, clocks, has_ack),
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
        let [option_kind::SACK, _, blocks @ ..] = option else { return };
        let kept = blocks.as_chunks::<8>().0.iter().take_while(|block| **block != [0; 8]).count() * 8;
        if kept == blocks.len() {
            return;
        }
        if kept == 0 {
            return option.fill(option_kind::NO_OPERATION);
        }
        option[1] = u8::try_from(2 + kept).unwrap_or(u8::MAX);
        option[2 + kept..].fill(option_kind::NO_OPERATION);
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
    while let Some(&kind) = header.get(at) {
        match kind {
            option_kind::END => return,
            option_kind::NO_OPERATION => at += 1,
            _ => {
                let len = header.get(at + 1).map_or(0, |len| usize::from(*len));
                let Some(option) = header.get_mut(at..at + len).filter(|option| option.len() >= 2) else { return };
                visit(option);
                at += len;
            }
        }
    }
}

/// The option of this kind and length in a header.
fn option_of(header: &[u8], wanted: u8, wanted_len: usize) -> Option<&[u8]> {
    let mut at = usize::from(Tcp::BYTES);
    loop {
        match *header.get(at)? {
            option_kind::END => return None,
            option_kind::NO_OPERATION => at += 1,
            kind => {
                let len = usize::from(*header.get(at + 1)?);
                let option = header.get(at..at + len).filter(|option| option.len() >= 2)?;
                if kind == wanted && len == wanted_len {
                    return Some(option);
                }
                at += len;
            }
        }
    }
}

/// The scale of windows that a SYN or SYN-ACK announces; 0 without the option.
#[must_use]
pub fn window_scale<A: Address>(frame: &[u8], headers: &Headers<A>) -> u8 {
    header_of(frame, headers).and_then(|header| option_of(header, option_kind::WINDOW_SCALE, 3)).map_or(0, |option| option[2])
}

/// The timestamps of a segment, if it has any.
#[must_use]
pub fn timestamps<A: Address>(frame: &[u8], headers: &Headers<A>) -> Option<Timestamps> {
    let option = header_of(frame, headers).and_then(|header| option_of(header, option_kind::TIMESTAMPS, 10))?;
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
    edit(frame, headers, |header| pad_options(header, &[option_kind::SACK]));
}

/// Turns the options of a SYN into padding by which a connection would begin with data (RFC 7413), whose place the header
/// has, or take further paths (RFC 8684), which number their data on their own.
pub fn remove_unshiftable<A: Address>(frame: &mut [u8], headers: &Headers<A>) {
    edit(frame, headers, |header| pad_options(header, &[option_kind::MULTIPATH, option_kind::FAST_OPEN]));
}

fn pad_options(header: &mut [u8], kinds: &[u8]) {
    for_each_option(header, |option| {
        if kinds.contains(&option[0]) {
            option.fill(option_kind::NO_OPERATION);
        }
    });
}
