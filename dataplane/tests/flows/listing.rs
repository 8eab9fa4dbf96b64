//! A listing of flows: a bounded part of a worker's table per poll, and each flow that lives throughout exactly once.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use dataplane::flow::FlowView;
use dataplane::forward::{About, FLOWS_PER_INQUIRY, FamilyInquiry, INQUIRIES_MAX, Inquired, Inquiry};
use dataplane::testing::Packet;

use crate::rig::{self, Rig, UPLINK};

fn client(number: u32) -> String {
    format!("198.51.{}.{}:{}", number / 10_000, number / 100 % 100, 10_000 + number % 100)
}

fn poll(rig: &mut Rig, times: usize) {
    for _ in 0..times {
        rig.worker.poll(rig.now);
    }
}

/// A flow of UDP begins.
fn begin(rig: &mut Rig, number: u32) {
    rig.forward(UPLINK, &Packet::udp(&client(number), "192.0.2.101:53").build());
}

fn flows_from(rig: &mut Rig, from: u32) -> (Vec<SocketAddr>, Option<u32>) {
    let answer = rig.ask(Inquired::V4(FamilyInquiry::new(About::Flows { from })));
    let Inquired::V4(answered) = &answer.inquired else { panic!("an answer of the other family") };
    let now = dataplane::flow::Tick::at(answer.now_ns);
    (answered.flows.iter().map(|flow| FlowView::of(flow, now).client).collect(), answered.next)
}

#[test]
fn flows_that_live_throughout_a_listing_are_listed_exactly_once_however_others_come_and_go() {
    let mut rig = Rig::with_flows(4096);
    (0..600).for_each(|number| begin(&mut rig, number));
    // Flows 0 to 299 end; their entries are used again.
    rig.now += 50 * rig::SECOND;
    (300..600).for_each(|number| begin(&mut rig, number));
    rig.now += 15 * rig::SECOND;
    poll(&mut rig, 100);
    assert_eq!(rig.counters.flows.get(), 300);
    let (mut listed, mut from, mut parts) = (BTreeMap::new(), Some(0), 0);
    while let Some(position) = from {
        let (flows, next) = flows_from(&mut rig, position);
        assert!(flows.len() <= FLOWS_PER_INQUIRY);
        assert!(
            next.is_none_or(|next| next == position + u32::try_from(FLOWS_PER_INQUIRY).unwrap()),
            "a part is bounded, however few flows it has"
        );
        flows.into_iter().for_each(|client| *listed.entry(client).or_insert(0) += 1);
        (from, parts) = (next, parts + 1);
        (0..5).for_each(|number| begin(&mut rig, 1000 + 5 * parts + number));
    }
    assert!((600_u32.div_ceil(64)..20).contains(&parts), "{parts}");
    for number in 300..600 {
        assert_eq!(listed.get(&client(number).parse().unwrap()), Some(&1), "flow {number}");
    }
}

#[test]
fn a_worker_answers_one_inquiry_per_poll_and_bounds_what_waits() {
    let mut rig = Rig::new();
    let inquiry = |id| Box::new(Inquiry::new(id, Inquired::V6(FamilyInquiry::new(About::Flows { from: 0 }))));
    (0..INQUIRIES_MAX as u64).for_each(|id| rig.mailbox.ask(inquiry(id)).unwrap());
    assert_eq!(rig.mailbox.ask(inquiry(99)).unwrap_err().id, 99, "no more than {INQUIRIES_MAX} wait");
    assert!(rig.mailbox.take_answer().is_none());
    for id in 0..3 {
        rig.worker.poll(rig.now);
        assert_eq!(rig.mailbox.take_answer().unwrap().id, id);
        assert!(rig.mailbox.take_answer().is_none(), "one per poll");
    }
    poll(&mut rig, 2 * INQUIRIES_MAX);
    let answers = std::iter::from_fn(|| rig.mailbox.take_answer()).count();
    assert_eq!(answers, INQUIRIES_MAX - 3);
    rig.mailbox.ask(inquiry(7)).unwrap();
    rig.worker.poll(rig.now);
    assert_eq!(rig.mailbox.take_answer().unwrap().room, 1024);
}
