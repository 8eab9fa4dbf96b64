//! Flows that an operator ends, and what a watch tells of flows, drops and packets.

use std::sync::Arc;

use dataplane::flow::{FlowEnd, FlowWatch, SampledPacket, Watched, WatchedEvent};
use dataplane::forward::{About, ENDS_PER_INQUIRY, EndedFlow, FamilyInquiry, FlowEnds, Inquired};
use dataplane::testing::{Packet, assert_checksums};
use dataplane::{DropReason, PacketOutcome, tcp_flags};
use proto::Mode;

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, ends};

const ACK: u8 = tcp_flags::ACK;
const RST: u8 = tcp_flags::RST;
const SYN: u8 = tcp_flags::SYN;
const CLIENTS: [(&str, &str); 2] = [("198.51.100.7:5555", "192.0.2.100:80"), ("[2001:db8:7::1]:5555", "[2001:db8::1:0]:80")];

/// Flags, sequence and acknowledgement number of a TCP frame.
fn segment(frame: &[u8]) -> (u8, u32, u32) {
    assert_checksums(frame);
    let tcp = if frame[12..14] == [8, 0] { 34 } else { 54 };
    let number = |at: usize| u32::from_be_bytes(frame[tcp + at..tcp + at + 4].try_into().unwrap());
    (frame[tcp + 13], number(4), number(8))
}

/// All flows, as an operator names them.
fn all_flows(rig: &mut Rig) -> Vec<EndedFlow> {
    let now = dataplane::flow::Tick::at(rig.now);
    let mut views = Vec::new();
    if let Inquired::V4(of) = &rig.ask(Inquired::V4(FamilyInquiry::new(About::Flows { from: 0 }))).inquired {
        views.extend(of.flows.iter().map(|flow| dataplane::flow::FlowView::of(flow, now)));
    }
    if let Inquired::V6(of) = &rig.ask(Inquired::V6(FamilyInquiry::new(About::Flows { from: 0 }))).inquired {
        views.extend(of.flows.iter().map(|flow| dataplane::flow::FlowView::of(flow, now)));
    }
    let ended = |view: dataplane::flow::FlowView| EndedFlow {
        protocol: view.protocol,
        client: view.client,
        frontend: view.frontend,
        backend: view.backend,
    };
    views.into_iter().map(ended).collect()
}

/// Ends flows; returns how many.
fn end(rig: &mut Rig, flows: &[EndedFlow]) -> u32 {
    let ends = FlowEnds { flows: flows.iter().copied().collect(), ended: 0 };
    let answer = rig.ask(Inquired::End(ends));
    let Inquired::End(ends) = &answer.inquired else { panic!("an answer to another question") };
    ends.ended
}

fn establish(rig: &mut Rig, client: &str, vip: &str) -> (String, String) {
    let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::tcp(client, vip).numbers(999, 0).build()));
    let (snat, backend) = (snat.to_string(), backend.to_string());
    let answer = Packet::tcp(&backend, &snat).flags(SYN | ACK).numbers(4_999, 1_000).build();
    rig.forward(CLUSTER, &answer);
    rig.forward(UPLINK, &Packet::tcp(client, vip).flags(ACK).numbers(1_000, 5_000).build());
    (snat, backend)
}

#[test]
fn both_ends_of_a_silent_connection_are_asked_for_their_numbers_and_reset_by_them() {
    for mode in [Mode::Nat, Mode::Dnat] {
        for (client, vip) in CLIENTS {
            for first_is_client in [true, false] {
                let mut rig = Rig::with_mode(mode);
                let (snat, backend) = establish(&mut rig, client, vip);
                rig.now += 60 * SECOND;
                let flows = all_flows(&mut rig);
                assert_eq!(end(&mut rig, &flows), 1, "{mode:?} {client}");
                let (to_client, to_backend) = (rig.sent(UPLINK), rig.sent(CLUSTER));
                assert_eq!((to_client.len(), to_backend.len()), (1, 1));
                let addresses = |frame: &[u8]| (ends(frame).0.to_string(), ends(frame).1.to_string());
                assert_eq!(addresses(&to_client[0]), (vip.to_owned(), client.to_owned()));
                assert_eq!(addresses(&to_backend[0]), (snat.clone(), backend.clone()));
                assert_eq!((segment(&to_client[0]).0, segment(&to_backend[0]).0), (ACK, ACK), "neither carries data");
                // One end answers with its numbers.
                let (port, answer) = match first_is_client {
                    true => (UPLINK, Packet::tcp(client, vip).flags(ACK).numbers(1_000, 5_000).build()),
                    false => (CLUSTER, Packet::tcp(&backend, &snat).flags(ACK).numbers(5_000, 1_000).build()),
                };
                assert_eq!(rig.put(port, &answer), Some(PacketOutcome::Drop(DropReason::NoFlow)));
                let (to_client, to_backend) = (rig.sent(UPLINK), rig.sent(CLUSTER));
                assert_eq!((to_client.len(), to_backend.len()), (1, 1), "{mode:?} {client} {first_is_client}");
                let (at_client, at_backend) = (segment(&to_client[0]), segment(&to_backend[0]));
                assert!(at_client.0 & RST != 0 && at_backend.0 & RST != 0);
                assert_eq!((at_client.1, at_backend.1), (5_000, 1_000), "the numbers that they expect next");
                assert_eq!((rig.counters.flows.get(), rig.counters.ended_on_request.get()), (0, 1));
            }
        }
    }
}

#[test]
fn an_end_that_never_answers_does_not_keep_its_flow() {
    let mut rig = Rig::new();
    establish(&mut rig, CLIENTS[0].0, CLIENTS[0].1);
    let records = all_flows(&mut rig);
    assert_eq!(end(&mut rig, &records), 1);
    assert_eq!(end(&mut rig, &records), 0, "it ends already");
    assert_eq!(rig.counters.flows.get(), 1, "its next packet ends it");
    for _ in 0..30 * 4 {
        rig.now += SECOND / 4;
        rig.worker.poll(rig.now);
    }
    assert_eq!((rig.counters.flows.get(), rig.counters.ended_on_request.get()), (0, 1));
}

#[test]
fn a_handshake_is_reset_at_both_ends_at_once() {
    for is_answered in [false, true] {
        let mut rig = Rig::new();
        let (client, vip) = CLIENTS[0];
        let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::tcp(client, vip).numbers(999, 0).build()));
        if is_answered {
            let answer = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(SYN | ACK).numbers(4_999, 1_000).build();
            rig.forward(CLUSTER, &answer);
        }
        let flows = all_flows(&mut rig);
        assert_eq!(end(&mut rig, &flows), 1);
        let (to_client, to_backend) = (rig.sent(UPLINK), rig.sent(CLUSTER));
        assert_eq!((to_client.len(), to_backend.len()), (1, 1));
        assert_eq!(segment(&to_backend[0]), (RST, 1_000, 0));
        assert_eq!(segment(&to_client[0]), (RST | ACK, if is_answered { 5_000 } else { 0 }, 1_000));
        assert_eq!(rig.counters.flows.get(), 0);
    }
}

#[test]
fn what_has_no_resets_ends_at_once_and_its_port_rests() {
    let mut rig = Rig::new();
    let frame = Packet::udp("198.51.100.7:5555", "192.0.2.101:53").build();
    let before = ends(&rig.forward(UPLINK, &frame)).0;
    let flows = all_flows(&mut rig);
    assert_eq!(end(&mut rig, &flows), 1);
    assert!(rig.sent(UPLINK).is_empty() && rig.sent(CLUSTER).is_empty());
    assert_eq!((rig.counters.flows.get(), rig.counters.snat_ports.get()), (0, 0));
    assert_ne!(ends(&rig.forward(UPLINK, &frame)).0, before, "the next packet begins another flow, by another port");
    let mut rig = Rig::with_mode(Mode::Dsr);
    rig.set_backend_ports();
    rig.publish();
    rig.forward(UPLINK, &Packet::tcp("198.51.100.7:5555", "192.0.2.100:80").build());
    let flows = all_flows(&mut rig);
    assert_eq!((end(&mut rig, &flows), rig.counters.flows.get()), (1, 0));
}

#[test]
fn a_flow_that_has_begun_anew_at_another_backend_and_those_of_others_go_on() {
    let mut rig = Rig::new();
    establish(&mut rig, CLIENTS[0].0, CLIENTS[0].1);
    establish(&mut rig, "198.51.100.8:5555", CLIENTS[0].1);
    let flows = all_flows(&mut rig);
    let mut other = flows[0];
    other.backend.slot += 1;
    assert_eq!(end(&mut rig, &[other]), 0);
    assert_eq!(end(&mut rig, &flows[..1]), 1);
    rig.sent(UPLINK);
    rig.sent(CLUSTER);
    let data = |client: &str| Packet::tcp(client, CLIENTS[0].1).flags(ACK).numbers(1_000, 5_000).payload(b"x").build();
    let outcomes = ["198.51.100.7:5555", "198.51.100.8:5555"].map(|client| rig.put(UPLINK, &data(client)));
    let dropped = Some(PacketOutcome::Drop(DropReason::NoFlow));
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == dropped).count(), 1, "{outcomes:?}");
    assert!(flows.len() <= ENDS_PER_INQUIRY);
}

#[test]
fn a_record_says_that_an_operator_ended_the_flow() {
    let mut rig = Rig::new();
    let records = rig.record(64);
    establish(&mut rig, CLIENTS[0].0, CLIENTS[0].1);
    let flows = all_flows(&mut rig);
    end(&mut rig, &flows);
    rig.put(UPLINK, &Packet::tcp(CLIENTS[0].0, CLIENTS[0].1).flags(ACK).numbers(1_000, 5_000).build());
    let ends: Vec<_> = std::iter::from_fn(|| records.take()).map(|record| record.event).collect();
    assert_eq!(ends.last(), Some(&dataplane::flow::FlowEvent::End(FlowEnd::Requested)), "{ends:?}");
}

/// A watch of the worker.
fn watch(rig: &mut Rig) -> Arc<FlowWatch> {
    let watch = Arc::new(FlowWatch::default());
    rig.ask(Inquired::Watch(Some(Arc::clone(&watch))));
    watch
}

fn taken(watch: &FlowWatch) -> Vec<Watched> {
    std::iter::from_fn(|| watch.take()).collect()
}

#[test]
fn a_watch_tells_of_starts_ends_and_drops_until_it_is_taken_away() {
    let mut rig = Rig::new();
    let watch = watch(&mut rig);
    let frame = Packet::udp("198.51.100.7:5555", "192.0.2.101:53").build();
    rig.forward(UPLINK, &frame);
    assert!(taken(&watch).is_empty(), "nobody wants events yet");
    watch.want_events(true);
    rig.now += SECOND;
    rig.forward(UPLINK, &Packet::udp("198.51.100.8:5555", "192.0.2.101:53").build());
    establish(&mut rig, CLIENTS[0].0, CLIENTS[0].1);
    assert!(rig.put(UPLINK, &Packet::tcp("198.51.100.9:1", "192.0.2.101:99").build()).is_some());
    rig.put(UPLINK, &Packet::tcp("198.51.100.9:1", "192.0.2.100:80").flags(ACK).build());
    rig.now += SECOND;
    let flows = all_flows(&mut rig);
    let udp: Vec<_> = flows.iter().filter(|flow| flow.protocol == 17).copied().collect();
    assert_eq!(end(&mut rig, &udp), 2);
    let events: Vec<_> = taken(&watch).into_iter().map(|watched| watched.event).collect();
    let starts = events.iter().filter(|event| matches!(event, WatchedEvent::Start(_))).count();
    let ended = events.iter().filter(|event| matches!(event, WatchedEvent::End(FlowEnd::Requested, _))).count();
    assert_eq!((starts, ended), (2, 2), "{events:?}");
    let client = "198.51.100.9:1".parse().unwrap();
    let is_drop =
        |event: &&WatchedEvent| matches!(event, WatchedEvent::Drop(DropReason::NoFlow, Some(ends)) if ends.source == client);
    assert_eq!(events.iter().filter(is_drop).count(), 1, "{events:?}");
    rig.ask(Inquired::Watch(None));
    rig.forward(UPLINK, &Packet::udp("198.51.100.10:5555", "192.0.2.101:53").build());
    assert!(taken(&watch).is_empty());
}

#[test]
fn more_events_than_the_rate_are_lost_and_counted_and_drops_do_not_displace_starts() {
    let mut rig = Rig::with_flows(4096);
    let watch = watch(&mut rig);
    watch.want_events(true);
    rig.now += SECOND;
    for port in 1..=500 {
        rig.put(UPLINK, &Packet::tcp(&format!("198.51.100.9:{port}"), "192.0.2.100:80").flags(ACK).build());
    }
    rig.forward(UPLINK, &Packet::udp("198.51.100.8:5555", "192.0.2.101:53").build());
    let events = taken(&watch);
    let starts = events.iter().filter(|one| matches!(one.event, WatchedEvent::Start(_))).count();
    assert_eq!((starts, events.len() as u64 + watch.lost().get()), (1, 501));
    assert!(watch.lost().get() >= 300, "{}", watch.lost().get());
}

#[test]
fn samples_are_bounded_before_the_rate_is_known_and_none_of_them_is_a_lost_event() {
    let mut rig = Rig::new();
    let watch = watch(&mut rig);
    watch.want_packets(true);
    let frame = Packet::udp("198.51.100.7:5555", "192.0.2.101:53").build();
    let put = |rig: &mut Rig, times: usize| {
        for _ in 0..times {
            rig.arrive(UPLINK, &frame, 1);
            rig.worker.poll(rig.now);
            rig.sent(CLUSTER);
            rig.worker.observer_mut().0.clear();
        }
    };
    rig.now += SECOND;
    put(&mut rig, 2_000);
    let samples = taken(&watch).len();
    assert!((300..=400).contains(&samples), "{samples}: the first packet has no flow yet, and 400 are the limit");
    // Nobody takes them: the queue is full.
    for _ in 0..30 {
        rig.now += SECOND / 100;
        put(&mut rig, 400);
    }
    assert_eq!(watch.lost().get(), 0);
    assert!(taken(&watch).len() >= 4_096);
}

#[test]
fn sampled_packets_stand_for_all_and_leave_as_they_came() {
    let mut rig = Rig::new();
    let watch = watch(&mut rig);
    let frames: Vec<_> = [("198.51.100.7:5555", 3), ("198.51.100.8:5555", 1)]
        .into_iter()
        .flat_map(|(client, times)| vec![Packet::udp(client, "192.0.2.101:53").payload(&[7; 100]).build(); times])
        .collect();
    watch.want_packets(true);
    let (mut packets, rounds) = (std::collections::BTreeMap::new(), 5_000_u32);
    for round in 0..rounds {
        frames.iter().for_each(|frame| rig.arrive(UPLINK, frame, 1));
        // 400 packets in 10 ms: twice as many as are sampled.
        rig.now += if round % 100 == 0 { SECOND / 100 } else { 0 };
        rig.worker.poll(rig.now);
        assert_eq!(rig.sent(CLUSTER).len(), frames.len(), "a sampled packet leaves as any other");
        rig.worker.observer_mut().0.clear();
        for one in taken(&watch) {
            let WatchedEvent::Packet(SampledPacket { packet_len, stands_for, .. }, flow) = one.event else { panic!("{one:?}") };
            assert_eq!(packet_len, 128);
            let (sampled, stood_for) = packets.entry(flow.client.ip().to_string()).or_insert((0, 0));
            (*sampled, *stood_for) = (*sampled + 1, *stood_for + stands_for);
        }
    }
    // They come in turns of four.
    for (client, sent) in [("198.51.100.7", 3 * rounds), ("198.51.100.8", rounds)] {
        let (sampled, stood_for) = packets[client];
        assert!((sent / 20 * 19..=sent / 20 * 21).contains(&stood_for), "{client}: {packets:?}");
        assert!(sampled < sent / 5 * 3, "{client}: {packets:?}");
    }
    assert_eq!(watch.lost().get(), 0);
}
