//! Rows of a sentence, a packet, and what becomes of the header and the numbers; properties of the numbers.

use proptest::prelude::*;

use super::*;
use crate::wire::tcp_flags::PSH;

/// The client's initial sequence number of most rows, and the first byte after it.
const INITIAL: u32 = 0x1000_0000;
const FIRST: u32 = INITIAL + 1;
const HEADER: u8 = 28;
/// A time far from the wrap of the clock, and far from the beginning.
const NOW: u32 = 1_000_000;

fn head(flags: u8, sequence: u32, acknowledgement: u32, data_len: u16) -> SegmentHead {
    SegmentHead { flags, sequence, acknowledgement, window: 502, data_len }
}

/// A flow whose backend has accepted the connection, with windows of this scale.
fn accepted(initial: u32, scale: u8) -> Shift {
    let mut shift = Shift::new(ProxyProtocol::V2, HEADER, HeaderStage::Owed, initial);
    let syn_ack = SegmentHead { window: 64_240, ..head(SYN | ACK, 7, initial.wrapping_add(1), 0) };
    let step = shift.of_backend(&syn_ack, scale, NOW);
    assert_eq!(step, BackendStep::Passes { window_less: 28, without_sack: false });
    assert_eq!(shift.stage(), HeaderStage::Owed);
    shift
}

/// The same after the client's ACK, which carries the header.
fn sent(initial: u32) -> Shift {
    let mut shift = accepted(initial, 7);
    assert_eq!(shift.of_client(&head(ACK, initial.wrapping_add(1), 8, 0), true, NOW), ClientStep::Prefixed);
    shift
}

fn taken(initial: u32) -> Shift {
    let mut shift = sent(initial);
    shift.of_backend(&head(ACK, 8, initial.wrapping_add(1 + 28), 0), 0, NOW);
    assert_eq!(shift.stage(), HeaderStage::Taken);
    shift
}

#[test]
fn the_header_leads_until_the_backend_has_it() {
    use ClientStep::{BehindHeader, Prefixed, Shifted, Twice, Unchanged};
    type Flow = fn(u32) -> Shift;
    let owed: Flow = |initial| accepted(initial, 7);
    let rows: [(&str, Flow, SegmentHead, bool, ClientStep, HeaderStage); 19] = [
        ("an ACK alone", owed, head(ACK, FIRST, 8, 0), true, Prefixed, HeaderStage::Sent),
        ("again, as after a repeated SYN-ACK", sent, head(ACK, FIRST, 8, 0), true, Prefixed, HeaderStage::Sent),
        ("data before the acknowledgement", sent, head(ACK | PSH, FIRST, 8, 100), true, Prefixed, HeaderStage::Sent),
        ("data with FIN", sent, head(ACK | FIN, FIRST, 8, 100), true, Prefixed, HeaderStage::Sent),
        ("data that leaves no room", owed, head(ACK, FIRST, 8, 1460), false, BehindHeader, HeaderStage::Sent),
        ("data that overtook the first", owed, head(ACK, FIRST + 100, 8, 100), true, BehindHeader, HeaderStage::Sent),
        ("a FIN alone", owed, head(ACK | FIN, FIRST, 8, 0), true, BehindHeader, HeaderStage::Sent),
        ("a keep-alive", owed, head(ACK, INITIAL, 8, 0), true, BehindHeader, HeaderStage::Sent),
        ("a keep-alive behind the header", sent, head(ACK, INITIAL, 8, 1), true, BehindHeader, HeaderStage::Sent),
        ("a SYN", owed, head(SYN, INITIAL, 0, 20), true, Unchanged, HeaderStage::Owed),
        ("a SYN on a live connection", taken, head(SYN, 77, 0, 0), true, Unchanged, HeaderStage::Taken),
        ("a RST of a client that never answered", owed, head(RST, FIRST, 0, 0), true, Unchanged, HeaderStage::Owed),
        ("a RST with ACK behind the header", sent, head(RST | ACK, FIRST, 8, 0), true, BehindHeader, HeaderStage::Sent),
        ("a RST without ACK", sent, head(RST, FIRST, 0, 0), true, Twice, HeaderStage::Sent),
        ("what receivers discard", owed, head(PSH, FIRST, 0, 5), true, Unchanged, HeaderStage::Owed),
        ("the same behind the header", sent, head(PSH, FIRST, 0, 5), true, Shifted, HeaderStage::Sent),
        ("data of a backend that has it", taken, head(ACK, FIRST, 8, 100), true, Shifted, HeaderStage::Taken),
        ("a RST to a backend that has it", taken, head(RST, FIRST, 0, 0), true, Shifted, HeaderStage::Taken),
        ("a FIN to a backend that has it", taken, head(ACK | FIN, FIRST, 8, 0), true, Shifted, HeaderStage::Taken),
    ];
    for (sentence, flow, packet, has_room, step, stage) in rows {
        for wrapped in [0, 0xffff_fff0_u32.wrapping_sub(INITIAL)] {
            let mut shift = flow(INITIAL.wrapping_add(wrapped));
            let packet = SegmentHead { sequence: packet.sequence.wrapping_add(wrapped), ..packet };
            assert_eq!((shift.of_client(&packet, has_room, NOW), shift.stage()), (step, stage), "{sentence}, {wrapped:#x}");
        }
    }
}

#[test]
fn a_backend_that_lacks_the_header_gets_it_again_once_in_10_ms() {
    let mut shift = sent(INITIAL);
    let missing = head(ACK, 8, FIRST, 0);
    let at = |shift: &mut Shift, ms| shift.of_backend(&missing, 0, NOW + ms);
    assert_eq!(at(&mut shift, 0), BackendStep::Consumed { is_repeated: true });
    assert_eq!(at(&mut shift, 9), BackendStep::Consumed { is_repeated: false });
    assert_eq!(at(&mut shift, 10), BackendStep::Consumed { is_repeated: true });
    // Later data of the client waits for the same limit, its first byte does not.
    assert_eq!(shift.of_client(&head(ACK, FIRST + 9, 8, 9), true, NOW + 12), ClientStep::Shifted);
    assert_eq!(shift.of_client(&head(ACK, FIRST, 8, 9), true, NOW + 12), ClientStep::Prefixed);
    assert_eq!(shift.of_client(&head(ACK, FIRST + 9, 8, 9), true, NOW + 20), ClientStep::BehindHeader);
    assert_eq!(shift.stage(), HeaderStage::Sent);
    assert_eq!(shift.last_said(), LastSaid { acknowledgement: 8, window: 502 });
}

#[test]
fn acknowledgements_inside_the_header_go_on_only_with_something_else() {
    let passes = |window_less, without_sack| BackendStep::Passes { window_less, without_sack };
    let consumed = BackendStep::Consumed { is_repeated: true };
    let rows = [
        ("of nothing", head(ACK, 8, FIRST, 0), consumed, HeaderStage::Sent),
        ("of half of it", head(ACK, 8, FIRST + 14, 0), consumed, HeaderStage::Sent),
        ("of all but a byte", head(ACK, 8, FIRST + 27, 0), consumed, HeaderStage::Sent),
        ("with data", head(ACK | PSH, 8, FIRST, 5), passes(1, true), HeaderStage::Sent),
        ("with FIN", head(ACK | FIN, 8, FIRST, 0), passes(1, true), HeaderStage::Sent),
        ("with RST", head(ACK | RST, 8, FIRST, 0), passes(1, true), HeaderStage::Sent),
        ("of all", head(ACK, 8, FIRST + 28, 0), passes(0, false), HeaderStage::Taken),
        ("of data too", head(ACK, 8, FIRST + 128, 0), passes(0, false), HeaderStage::Taken),
        ("of the SYN alone, as in a keep-alive", head(ACK, 8, INITIAL, 0), passes(0, false), HeaderStage::Sent),
        ("none, in a RST", head(RST, 8, 0, 0), passes(0, false), HeaderStage::Sent),
    ];
    for (sentence, packet, step, stage) in rows {
        let mut shift = sent(INITIAL);
        assert_eq!((shift.of_backend(&packet, 0, NOW), shift.stage()), (step, stage), "{sentence}");
    }
    // Without a scale each byte of the header that is missing counts; one that came late is no news.
    let mut unscaled = accepted(INITIAL, 0);
    unscaled.of_client(&head(ACK, FIRST, 8, 0), true, NOW);
    assert_eq!(unscaled.of_backend(&head(ACK | PSH, 8, FIRST + 8, 5), 0, NOW), passes(20, true));
    assert_eq!(taken(INITIAL).of_backend(&head(ACK, 8, FIRST, 0), 0, NOW), passes(1, true));
}

#[test]
fn windows_of_a_syn_ack_leave_room_for_the_header() {
    let mut shift = Shift::new(ProxyProtocol::V1, 45, HeaderStage::Owed, INITIAL);
    let mut less = |window| shift.of_backend(&SegmentHead { window, ..head(SYN | ACK, 7, FIRST, 0) }, 7, NOW);
    for (window, window_less) in [(64_240, 45), (46, 45), (45, 0), (0, 0)] {
        assert_eq!(less(window), BackendStep::Passes { window_less, without_sack: false }, "{window}");
    }
}

#[test]
fn another_connection_on_the_same_ports_begins_anew() {
    let mut shift = taken(INITIAL);
    shift.of_backend(&head(SYN | ACK, 7, FIRST, 0), 7, NOW);
    assert_eq!(shift.stage(), HeaderStage::Taken, "a SYN-ACK that came late");
    shift.of_backend(&head(SYN | ACK, 7, 0x7777_0001, 0), 7, NOW);
    assert_eq!((shift.stage(), shift.first()), (HeaderStage::Owed, 0x7777_0001));
}

#[test]
fn numbers_of_acknowledgements_and_blocks() {
    let numbers = taken(INITIAL).numbers();
    let back = |number: u32| numbers.acknowledged(Direction::ToClient).to_sender(number);
    assert_eq!([FIRST + 129, FIRST + 200, FIRST + 300].map(back), [FIRST + 101, FIRST + 172, FIRST + 272]);
    assert_eq!([INITIAL, FIRST, FIRST + 14, FIRST + 27, FIRST + 28].map(back), [INITIAL, FIRST, FIRST, FIRST, FIRST]);
    assert_eq!(numbers.carried(Direction::ToBackend).to_receiver(FIRST), FIRST + 28);
    assert_eq!(numbers.carried(Direction::ToClient), StreamShift::default());
    assert_eq!(numbers.acknowledged(Direction::ToBackend), StreamShift::default());
    assert_eq!(accepted(INITIAL, 7).numbers(), NumberShift::default());
    let mut far = taken(INITIAL);
    far.of_backend(&head(ACK, 8, FIRST.wrapping_add(1 << 30), 0), 0, NOW);
    assert_eq!(far.stage(), HeaderStage::Settled);
    assert_eq!(far.numbers().client.to_sender(FIRST + 14), FIRST.wrapping_sub(14), "4 GB on, it is a byte as any other");
}

#[test]
fn a_backend_that_ends_the_connection_before_it_answers_refuses_the_header_once() {
    let mut shift = taken(INITIAL);
    let (fin, reset) = (head(ACK | FIN, 8, FIRST + 28, 0), head(RST, 8, 0, 0));
    assert!(!shift.is_refusal(&head(ACK, 8, FIRST + 28, 0)));
    assert_eq!([fin, reset].map(|head| shift.is_refusal(&head)), [true, false]);
    let mut answered = taken(INITIAL);
    answered.of_backend(&head(ACK | PSH, 8, FIRST + 28, 3), 0, NOW);
    assert!(!answered.is_refusal(&fin));
    assert!(!accepted(INITIAL, 7).is_refusal(&reset), "it has not seen the header");
    answered.of_backend(&head(SYN | ACK, 7, FIRST, 0), 7, NOW);
    assert!(!answered.is_refusal(&fin), "a SYN-ACK that came late changes nothing");
}

#[test]
fn a_saved_shift_is_restored() {
    for shift in [accepted(INITIAL, 9), sent(0xffff_fff0), taken(3)] {
        assert_eq!(Shift::restored(shift.saved()), Shift { repeated_ms: 0, ..shift });
    }
}

proptest! {
    /// By a model that writes the stream down.
    #[test]
    fn numbers_of_a_stream_with_inserted_bytes(begins in any::<u32>(), offset in 1..200_u32, at in 0..100_000_u32) {
        let stream = StreamShift { offset, begins: Some(begins) };
        // What the sender knows of the receiver's stream: bytes before, the inserted ones, bytes behind.
        let expected = if at < offset { begins } else { begins.wrapping_add(at - offset) };
        prop_assert_eq!(stream.to_sender(begins.wrapping_add(at)), expected);
        prop_assert_eq!(stream.to_sender(begins.wrapping_sub(at)), begins.wrapping_sub(at));
        prop_assert_eq!(stream.to_sender(stream.to_receiver(begins.wrapping_add(at))), begins.wrapping_add(at));
        let settled = StreamShift { offset, begins: None };
        prop_assert_eq!(settled.to_sender(settled.to_receiver(at)), at);
    }

    /// Whatever a stranger sends, nothing panics, and an acknowledgement never covers more than the backend says.
    #[test]
    fn any_packets_in_any_order(packets in prop::collection::vec(any::<(bool, u8, u32, u32, u16, u16)>(), 1..60)) {
        let mut shift = Shift::new(ProxyProtocol::V2, HEADER, HeaderStage::Owed, INITIAL);
        for (is_client, flags, sequence, acknowledgement, window, data_len) in packets {
            let near = |number: u32| FIRST.wrapping_add(number % 64).wrapping_sub(16);
            let (sequence, acknowledgement) = (near(sequence), near(acknowledgement));
            let head = SegmentHead { flags: flags & 0x1f, sequence, acknowledgement, window, data_len: data_len % 2 };
            if is_client {
                shift.of_client(&head, data_len % 3 > 0, sequence);
            } else {
                shift.of_backend(&head, flags >> 4, sequence);
                let told = shift.numbers().client.to_sender(acknowledgement);
                prop_assert!(acknowledgement.wrapping_sub(told) <= HEADER.into());
            }
        }
    }
}
