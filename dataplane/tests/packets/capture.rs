//! Captures: every packet is reported once with what became of it, packets leave as without a capture, and a worker
//! that is busy, or whose copies nobody takes, forwards all the same.

use std::sync::Arc;

use dataplane::forward::{
    CAPTURE_BATCHES, CaptureBatch, CaptureQueue, CapturedPacket, FlowUse, Inquired, ObservedEnd, PacketSource, WorkerCapture,
};
use dataplane::port::{FilterInstruction, PacketFilter};
use dataplane::tcp_flags::{ACK, FIN, SYN};
use dataplane::testing::{Packet, arp_request};
use dataplane::{BURST, DropReason, PacketOutcome, PortIndex};
use proptest::prelude::*;

use crate::rig::{self, CLUSTER, Rig, UPLINK};

const CLIENT: &str = "198.51.100.7:5555";
const WEB: &str = "192.0.2.100:80";
const WHOLE: usize = 65_535;

/// A filter for IPv4 packets with an address of this value as source or destination.
fn host(address: u32) -> PacketFilter {
    let row = |code, jump_true, jump_false, value| FilterInstruction { code, jump_true, jump_false, value };
    let program = [
        row(0x28, 0, 0, 12),
        row(0x15, 0, 4, 0x800),
        row(0x20, 0, 0, 26),
        row(0x15, 3, 0, address),
        row(0x20, 0, 0, 30),
        row(0x15, 1, 0, address),
        row(0x06, 0, 0, 0),
        row(0x06, 0, 0, 1),
    ];
    PacketFilter::new(&program).unwrap()
}

fn every() -> PacketFilter {
    PacketFilter::new(&[]).unwrap()
}

fn start(rig: &mut Rig, filter: PacketFilter, snap_bytes: usize) -> Arc<CaptureQueue> {
    let (capture, queue) = WorkerCapture::new(Arc::new(filter), snap_bytes);
    let answer = rig.ask(Inquired::Capture(Some(capture)));
    assert!(matches!(answer.inquired, Inquired::Capture(None)), "no capture ran before");
    queue
}

/// A packet, the frame that arrived, and those that left, each with its port and whether it went to the kernel.
type Report = (CapturedPacket, Vec<u8>, Vec<(PortIndex, bool, Vec<u8>)>);

/// The packets that were reported since the last call.
fn reports(queue: &CaptureQueue) -> Vec<Report> {
    let mut all = Vec::new();
    while let Some(batch) = queue.take() {
        all.extend(batch.packets().iter().map(|packet| {
            let sent = batch.sent(packet).iter();
            let sent = sent.map(|sent| (sent.port, sent.is_to_linux, batch.bytes(&sent.copy).to_vec()));
            (packet.clone(), batch.bytes(&packet.received).to_vec(), sent.collect())
        }));
        queue.give_back(batch);
    }
    all
}

/// Puts one frame in, and returns what is reported of it.
fn put(rig: &mut Rig, queue: &CaptureQueue, port: PortIndex, frame: &[u8]) -> CapturedPacket {
    rig.put(port, frame);
    rig.worker.poll(rig.now);
    let mut found = reports(queue);
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0).0
}

const fn outcome(outcome: PacketOutcome) -> ObservedEnd {
    ObservedEnd::Outcome(outcome)
}

#[test]
fn each_packet_is_reported_with_its_flow_and_its_end() {
    let mut rig = Rig::new();
    let queue = start(&mut rig, every(), WHOLE);
    let syn = Packet::tcp(CLIENT, WEB);
    rig.put(UPLINK, &syn.build());
    rig.worker.poll(rig.now);
    let (opened, received, sent) = reports(&queue).remove(0);
    assert_eq!((opened.flow_use, opened.source, opened.port), (FlowUse::New, PacketSource::Port, UPLINK));
    assert_eq!(opened.end, outcome(PacketOutcome::Forward(CLUSTER)));
    assert_eq!(opened.ends, Some((CLIENT.parse().unwrap(), WEB.parse().unwrap(), 6)));
    let flow = opened.flow.unwrap();
    assert_eq!((flow.belongs.vip, flow.belongs.port), (rig::ip("192.0.2.100"), 80));
    let forwarded = rig.sent(CLUSTER).remove(0);
    assert_eq!((received[14..].to_vec(), sent), (syn.build()[14..].to_vec(), vec![(CLUSTER, false, forwarded.clone())]));

    let (source, backend) = rig::ends(&forwarded);
    let reply = Packet::tcp(&backend.to_string(), &source.to_string()).flags(SYN | ACK);
    let replied = put(&mut rig, &queue, CLUSTER, &reply.build());
    assert_eq!((replied.flow_use, replied.flow), (FlowUse::Known, Some(flow)));
    assert_eq!(replied.end, outcome(PacketOutcome::Forward(UPLINK)));

    let rows = [
        (Packet::tcp(CLIENT, "192.0.2.110:80").build(), outcome(PacketOutcome::Drop(DropReason::UnknownVip))),
        (Packet::udp(CLIENT, "192.0.2.101:54").build(), outcome(PacketOutcome::Reply(UPLINK))),
        (Packet::tcp(CLIENT, "192.0.2.2:22").build(), outcome(PacketOutcome::Linux(UPLINK))),
        (arp_request([192, 0, 2, 1].into(), [192, 0, 2, 100].into()), outcome(PacketOutcome::Reply(UPLINK))),
        (Packet::tcp("127.0.0.1:1", WEB).build(), outcome(PacketOutcome::Drop(DropReason::MartianSource))),
    ];
    for (frame, expected) in rows {
        let found = put(&mut rig, &queue, UPLINK, &frame);
        assert_eq!((found.end, found.flow_use == FlowUse::New, found.flow), (expected, false, None));
    }
    rig.send_from_linux(UPLINK, &Packet::tcp("192.0.2.2:22", CLIENT).build());
    rig.worker.poll(rig.now);
    let (from_linux, _, sent) = reports(&queue).remove(0);
    assert_eq!((from_linux.source, from_linux.end), (PacketSource::Linux, outcome(PacketOutcome::Forward(UPLINK))));
    assert_eq!(sent.len(), 1);
    assert_eq!((queue.counts.matched.get(), queue.counts.unseen.get(), queue.counts.lost.get()), (8, 0, 0));
}

#[test]
fn a_reset_about_a_dropped_packet_is_shown_with_it() {
    let mut rig = Rig::new();
    let queue = start(&mut rig, every(), WHOLE);
    rig.put(UPLINK, &Packet::tcp(CLIENT, WEB).flags(ACK).build());
    rig.worker.poll(rig.now);
    let (packet, _, sent) = reports(&queue).remove(0);
    assert_eq!(packet.end, outcome(PacketOutcome::Drop(DropReason::NoFlow)));
    assert_eq!(sent, vec![(UPLINK, false, rig.sent(UPLINK).remove(0))]);
}

#[test]
fn a_packet_that_waits_is_reported_when_it_begins_and_when_it_ends() {
    let mut rig = Rig::new();
    rig.network.neighbours.retain(|neighbour| neighbour.link != CLUSTER.into());
    rig.publish();
    let queue = start(&mut rig, every(), WHOLE);
    let waits = put(&mut rig, &queue, UPLINK, &Packet::tcp(CLIENT, WEB).build());
    assert_eq!(waits.end, ObservedEnd::Waits);
    rig.network = rig::network();
    rig.publish();
    let found: Vec<_> = reports(&queue).into_iter().map(|(packet, _, sent)| (packet.source, packet.end, sent.len())).collect();
    let expired = outcome(PacketOutcome::Drop(DropReason::NeighbourUnresolved));
    let forwarded = outcome(PacketOutcome::Forward(CLUSTER));
    assert!(matches!(found.as_slice(), [(PacketSource::Waited, end, _)] if *end == forwarded || *end == expired), "{found:?}");
}

#[test]
fn a_filter_selects_by_the_frame_that_arrives_or_leaves() {
    let mut rig = Rig::new();
    let client = u32::from_be_bytes([198, 51, 100, 7]);
    let queue = start(&mut rig, host(client), WHOLE);
    let forwarded = rig.forward(UPLINK, &Packet::tcp(CLIENT, WEB).build());
    rig.put(UPLINK, &Packet::tcp("198.51.100.8:5555", WEB).build());
    rig.worker.poll(rig.now);
    assert_eq!(reports(&queue).len(), 1, "the other client does not match");
    let (source, backend) = rig::ends(&forwarded);
    let reply = Packet::tcp(&backend.to_string(), &source.to_string()).flags(SYN | ACK).build();
    let found = put(&mut rig, &queue, CLUSTER, &reply);
    assert_eq!(found.port, CLUSTER, "the reply has the client's address only when it leaves");
    assert_eq!((queue.counts.seen.get(), queue.counts.matched.get()), (3, 2));
}

#[test]
fn copies_are_as_long_as_asked_for() {
    let mut rig = Rig::new();
    let queue = start(&mut rig, every(), 60);
    let frame = Packet::tcp(CLIENT, WEB).payload(&[7; 1000]).build();
    rig.put(UPLINK, &frame);
    rig.worker.poll(rig.now);
    let (packet, received, sent) = reports(&queue).remove(0);
    assert_eq!((packet.received.frame_len, received.len(), sent[0].2.len()), (frame.len(), 60, 60));
}

#[test]
fn a_worker_whose_copies_nobody_takes_forwards_every_packet() {
    let mut rig = Rig::with_flows(8192);
    let queue = start(&mut rig, every(), WHOLE);
    let frame = |n: u32| Packet::udp(&format!("198.51.{}.{}:5555", 100 + n / 200, 1 + n % 200), "192.0.2.101:53").build();
    let count = 6000;
    for n in 0..count {
        rig.now += 100_000;
        rig.forward(UPLINK, &frame(n));
        rig.worker.poll(rig.now);
    }
    let counts = &queue.counts;
    assert_eq!(counts.seen.get() + counts.unseen.get(), u64::from(count));
    assert!(counts.lost.get() > 0, "{counts:?}");
    let kept = counts.matched.get() - counts.lost.get();
    let taken: Vec<Box<CaptureBatch>> = std::iter::from_fn(|| queue.take()).collect();
    assert!(taken.len() <= CAPTURE_BATCHES, "memory is bounded");
    let last = rig.ask(Inquired::Capture(None));
    assert!(matches!(last.inquired, Inquired::Capture(Some(_))), "the capture comes back with its memory");
    assert_eq!(taken.iter().map(|batch| batch.packets().len() as u64).sum::<u64>(), kept);
}

#[test]
fn a_busy_worker_leaves_most_bursts_unobserved_and_forwards_all() {
    let mut rig = Rig::with_flows(64);
    let syn = Packet::udp(CLIENT, "192.0.2.101:53").build();
    rig.forward(UPLINK, &syn);
    let queue = start(&mut rig, every(), WHOLE);
    let bursts = 2_000;
    for _ in 0..bursts {
        (0..BURST).for_each(|_| rig.arrive(UPLINK, &syn, 0));
        rig.now += 1_000;
        rig.worker.poll(rig.now);
        assert_eq!(rig.sent(CLUSTER).len(), BURST);
        while let Some(batch) = queue.take() {
            queue.give_back(batch);
        }
    }
    let seen = queue.counts.seen.get();
    assert_eq!(seen, 2 * 64, "of one burst, and of one in 1,024");
    assert_eq!(seen + queue.counts.unseen.get(), bursts * BURST as u64);
    queue.close();
    rig.put(UPLINK, &syn);
    assert_eq!(queue.counts.seen.get(), seen, "a closed capture looks at nothing");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn packets_leave_as_without_a_capture(packets in prop::collection::vec((0..6_u8, 0..4_u8, any::<bool>(), 1..4_usize), 1..40)) {
        let mut plain = Rig::new();
        let mut captured = Rig::new();
        let queue = start(&mut captured, every(), WHOLE);
        let mut replies: Vec<Vec<u8>> = Vec::new();
        for (kind, client, is_reply, burst) in packets {
            let from = format!("198.51.100.{}:5555", client + 1);
            let frame = match kind {
                0 => Packet::tcp(&from, WEB).build(),
                1 => Packet::tcp(&from, WEB).flags(ACK).build(),
                2 => Packet::tcp(&from, WEB).flags(FIN | ACK).build(),
                3 => Packet::udp(&from, "192.0.2.101:53").payload(&[0; 300]).build(),
                4 => Packet::tcp(&from, "192.0.2.2:22").build(),
                _ => Packet::udp(&from, "192.0.2.110:53").build(),
            };
            let (port, frame) = match replies.pop().filter(|_| is_reply) {
                Some(reply) => (CLUSTER, reply),
                None => (UPLINK, frame),
            };
            let mut both = [&mut plain, &mut captured].map(|rig| {
                (0..burst).for_each(|_| rig.arrive(port, &frame, 0));
                rig.now += 10_000_000;
                rig.worker.poll(rig.now);
                [(rig.sent(UPLINK), rig.to_linux(UPLINK)), (rig.sent(CLUSTER), rig.to_linux(CLUSTER))]
            });
            prop_assert_eq!(&both[0], &both[1]);
            for sent in both[0][1].0.drain(..) {
                let (source, backend) = rig::ends(&sent);
                let reply = Packet::tcp(&backend.to_string(), &source.to_string()).flags(SYN | ACK);
                replies.push(reply.build());
            }
        }
        let account = |rig: &Rig| rig.counters.account();
        prop_assert_eq!(format!("{:?}", account(&plain)), format!("{:?}", account(&captured)));
        prop_assert_eq!(queue.counts.unseen.get(), 0);
    }
}
