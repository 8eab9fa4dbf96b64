//! Records of flows: their starts, their ends with reason, what they carried, and what happens when nobody reads them.

use std::net::SocketAddr;
use std::time::Duration;

use dataplane::flow::{ACTIVE_TIMEOUT, FlowEnd, FlowEvent, FlowRecord, FlowRecords, FlowTraffic};
use dataplane::testing::Packet;
use dataplane::{Buffer as _, PacketOutcome, tcp_flags};
use proto::Mode;
use tcp_flags::{ACK, FIN, PSH, RST, SYN};

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK, ends};

const VIP: &str = "192.0.2.100:80";
const VIP_V6: &str = "[2001:db8::1:0]:80";
const DNS: &str = "192.0.2.101:53";
const CLIENT: &str = "198.51.100.7:5555";
const CLIENT_V6: &str = "[2001:db8:1::7]:5555";

/// A connection that counts what the gateway should have forwarded.
struct Connection {
    client: &'static str,
    vip: &'static str,
    snat: SocketAddr,
    backend: SocketAddr,
    to_backend: FlowTraffic,
    to_client: FlowTraffic,
}

/// Adds a frame without link header to the traffic of a direction.
fn add(traffic: &mut FlowTraffic, frame: &[u8]) {
    traffic.packets += 1;
    traffic.octets += frame.len() as u64 - 14;
}

impl Connection {
    /// Opens it, with the SYN-ACK and its acknowledgement.
    fn open(rig: &mut Rig, client: &'static str, vip: &'static str) -> Self {
        let syn = Packet::tcp(client, vip).flags(SYN).build();
        let (snat, backend) = ends(&rig.forward(UPLINK, &syn));
        let (to_backend, to_client) = (FlowTraffic::default(), FlowTraffic::default());
        let mut connection = Self { client, vip, snat, backend, to_backend, to_client };
        add(&mut connection.to_backend, &syn);
        connection.answer(rig, SYN | ACK, b"");
        connection.send(rig, ACK, b"");
        connection
    }

    fn send(&mut self, rig: &mut Rig, flags: u8, payload: &[u8]) {
        let frame = Packet::tcp(self.client, self.vip).flags(flags).payload(payload).build();
        rig.forward(UPLINK, &frame);
        add(&mut self.to_backend, &frame);
    }

    fn answer(&mut self, rig: &mut Rig, flags: u8, payload: &[u8]) {
        let frame = Packet::tcp(&self.backend.to_string(), &self.snat.to_string()).flags(flags).payload(payload).build();
        rig.forward(CLUSTER, &frame);
        add(&mut self.to_client, &frame);
    }

    /// Data in both directions.
    fn exchange(&mut self, rig: &mut Rig) {
        self.send(rig, ACK | PSH, b"GET / HTTP/1.1");
        self.answer(rig, ACK | PSH, &[b'x'; 700]);
        self.send(rig, ACK, b"");
    }

    fn traffic(&self) -> [FlowTraffic; 2] {
        [self.to_backend, self.to_client]
    }
}

fn idle(rig: &mut Rig, seconds: u64) {
    for _ in 0..seconds * 4 {
        rig.now += SECOND / 4;
        rig.worker.poll(rig.now);
    }
}

fn all(records: &FlowRecords) -> Vec<FlowRecord> {
    std::iter::from_fn(|| records.take()).collect()
}

fn traffic(record: &FlowRecord) -> [FlowTraffic; 2] {
    [record.to_backend, record.to_client]
}

#[test]
fn a_connection_has_a_start_and_an_end_with_all_its_packets() {
    for (mode, client, vip) in [(Mode::Nat, CLIENT, VIP), (Mode::Nat, CLIENT_V6, VIP_V6), (Mode::Dnat, CLIENT, VIP)] {
        for (flags, expected) in [(FIN | ACK, FlowEnd::Fin), (RST, FlowEnd::Rst)] {
            let mut rig = Rig::with_mode(mode);
            let records = rig.record(16);
            let start_ns = rig.now;
            let mut connection = Connection::open(&mut rig, client, vip);
            rig.now += 50_000_000;
            connection.exchange(&mut rig);
            connection.answer(&mut rig, flags, b"");
            if flags & FIN != 0 {
                connection.send(&mut rig, flags, b"");
            }
            let end_ns = rig.now;
            idle(&mut rig, if expected == FlowEnd::Rst { 255 } else { 25 });
            let [start, end] = all(&records)[..] else { panic!("{mode} {expected:?}") };
            assert_eq!((start.event, traffic(&start)), (FlowEvent::Start, Default::default()));
            assert_eq!(end.event, FlowEvent::End(expected), "{mode} {client}");
            assert_eq!(traffic(&end), connection.traffic(), "{mode} {client}");
            assert_eq!((end.flow.client.to_string(), end.flow.frontend.to_string()), (client.to_owned(), vip.to_owned()));
            assert_eq!(
                (end.flow.backend_address, end.flow.snat),
                (connection.backend, (mode == Mode::Nat).then_some(connection.snat))
            );
            let near = |found: u64, expected: u64| expected - found <= 1 << 20;
            assert!(near(end.start_ns, start_ns) && near(end.end_ns, end_ns), "{end:?} {start_ns} {end_ns}");
        }
    }
}

#[test]
fn a_forged_reset_that_data_undoes_is_no_reason() {
    let mut rig = Rig::new();
    let records = rig.record(16);
    let mut connection = Connection::open(&mut rig, CLIENT, VIP);
    connection.send(&mut rig, RST, b"");
    connection.exchange(&mut rig);
    rig.worker.record_stop(rig.now);
    assert_eq!(all(&records).last().unwrap().event, FlowEvent::End(FlowEnd::Stopped));
}

#[test]
fn datagrams_end_idle_and_flows_that_yield_are_reclaimed() {
    let mut rig = Rig::with_flows(8);
    let records = rig.record(64);
    rig.forward(UPLINK, &Packet::udp(CLIENT, DNS).payload(b"?").build());
    idle(&mut rig, 75);
    let [_, end] = all(&records)[..] else { panic!("one flow") };
    let expected = FlowTraffic { packets: 1, octets: 29 };
    assert_eq!((end.event, traffic(&end)), (FlowEvent::End(FlowEnd::Idle), [expected, FlowTraffic::default()]));
    for n in 0..9 {
        let syn = Packet::tcp(&format!("198.51.100.7:{}", 1000 + n), VIP).build();
        assert!(matches!(rig.put(UPLINK, &syn), Some(PacketOutcome::Forward(_))));
    }
    let ends: Vec<_> = all(&records).into_iter().filter(|record| record.event != FlowEvent::Start).collect();
    assert_eq!(ends.len(), 1);
    assert_eq!((ends[0].event, ends[0].flow.client.port()), (FlowEvent::End(FlowEnd::Reclaimed), 1000), "the oldest");
}

#[test]
fn a_client_that_comes_back_and_a_backend_that_goes_are_reasons_too() {
    let mut rig = Rig::new();
    let records = rig.record(64);
    let syn = |sequence| Packet::tcp("198.51.100.8:1", VIP).flags(SYN).numbers(sequence, 0).build();
    let (_, backend) = ends(&rig.forward(UPLINK, &syn(1)));
    rig.health.failing.insert((proto::Protocol::Tcp, backend));
    rig.publish();
    // Its backend fails and has not answered. A RST to it precedes the second SYN, which goes to another.
    assert!(matches!(rig.put(UPLINK, &syn(2)), Some(PacketOutcome::Forward(_))));
    assert_eq!(rig.sent(CLUSTER).len(), 2);
    let events: Vec<_> = all(&records).iter().map(|record| record.event).collect();
    assert_eq!(events, [FlowEvent::Start, FlowEvent::End(FlowEnd::Replaced), FlowEvent::Start]);
    rig.health.failing.clear();
    rig.publish();
    let mut connection = Connection::open(&mut rig, CLIENT, VIP);
    connection.exchange(&mut rig);
    let others: Vec<u8> = rig::BACKENDS.into_iter().filter(|n| *n != rig::last_byte(connection.backend.ip())).collect();
    rig.keep_backends("web", &others);
    all(&records);
    // The time to drain passes, and the next snapshot does not know the backend any longer.
    idle(&mut rig, 400);
    rig.publish();
    idle(&mut rig, 400);
    assert_eq!(all(&records).last().unwrap().event, FlowEvent::End(FlowEnd::Drained));
}

#[test]
fn a_long_flow_is_recorded_in_parts_that_sum_up() {
    let mut rig = Rig::new();
    let records = rig.record(64);
    let mut connection = Connection::open(&mut rig, CLIENT, VIP);
    let parts = 3;
    for _ in 0..ACTIVE_TIMEOUT.as_secs() / 60 * parts {
        idle(&mut rig, 60);
        connection.exchange(&mut rig);
    }
    rig.worker.record_stop(rig.now);
    let all = all(&records);
    let interim = all.iter().filter(|record| record.event == FlowEvent::Interim).count();
    assert!((2..=3).contains(&interim), "{interim}");
    assert!(all.windows(2).skip(1).all(|two| two[0].end_ns <= two[1].start_ns), "intervals do not overlap");
    let sum = |at: usize| {
        all.iter().map(|record| traffic(record)[at]).fold(FlowTraffic::default(), |sum, more| FlowTraffic {
            packets: sum.packets + more.packets,
            octets: sum.octets + more.octets,
        })
    };
    assert_eq!([sum(0), sum(1)], connection.traffic());
    let mut silent = Rig::new();
    let records = silent.record(64);
    Connection::open(&mut silent, CLIENT, VIP);
    idle(&mut silent, Duration::from_secs(6000).as_secs());
    let interim = std::iter::from_fn(|| records.take()).filter(|record| record.event == FlowEvent::Interim).count();
    assert_eq!(interim, 1, "later intervals carried nothing");
}

#[test]
fn in_one_way_modes_what_the_client_sends_is_counted() {
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        let mut rig = Rig::with_mode(mode);
        rig.set_backend_ports();
        rig.publish();
        let records = rig.record(16);
        let mut sent = FlowTraffic::default();
        for flags in [SYN, ACK, ACK | PSH, ACK | PSH, ACK, FIN | ACK, ACK] {
            rig.now += SECOND;
            let frame = Packet::tcp(CLIENT, VIP).flags(flags).payload(b"data").build();
            rig.forward(UPLINK, &frame);
            add(&mut sent, &frame);
        }
        rig.worker.record_stop(rig.now);
        let [start, end] = all(&records)[..] else { panic!("{mode}") };
        assert_eq!((start.event, end.event), (FlowEvent::Start, FlowEvent::End(FlowEnd::Fin)), "{mode}");
        assert_eq!(traffic(&end), [sent, FlowTraffic::default()], "{mode}");
    }
}

#[test]
fn a_full_queue_costs_records_and_no_packet() {
    let mut rig = Rig::new();
    let records = rig.record(8);
    let mut confirmed = Connection::open(&mut rig, CLIENT, VIP);
    for n in 0..100 {
        let frame = Packet::tcp(&format!("198.51.100.8:{}", 1000 + n), VIP).build();
        assert!(matches!(rig.put(UPLINK, &frame), Some(PacketOutcome::Forward(_))), "packet {n}");
        assert_eq!(rig.sent(CLUSTER).len(), 1);
    }
    // Starts take half of the room: the end of a connection that was real has a place.
    assert_eq!((records.written().get(), records.dropped().get()), (4, 97));
    confirmed.exchange(&mut rig);
    confirmed.send(&mut rig, RST, b"");
    idle(&mut rig, 255);
    let found = all(&records);
    let ends: Vec<_> = found.iter().filter(|record| record.event == FlowEvent::End(FlowEnd::Rst)).collect();
    assert_eq!(ends.len(), 1, "{found:?}");
    assert_eq!(traffic(ends[0]), confirmed.traffic());
}

#[test]
fn a_burst_is_counted_packet_by_packet() {
    let mut rig = Rig::new();
    let records = rig.record(16);
    let mut connection = Connection::open(&mut rig, CLIENT, VIP);
    let frame = Packet::tcp(CLIENT, VIP).flags(ACK).payload(&[7; 100]).build();
    for n in 0..32 {
        rig.arrive(UPLINK, &frame, n);
        add(&mut connection.to_backend, &frame);
    }
    rig.worker.poll(rig.now);
    let sent: Vec<_> = rig.worker.port_mut(CLUSTER).unwrap().sent.drain(..).collect();
    assert!(sent.len() == 32 && sent.iter().all(|buffer| buffer.bytes().len() == frame.len()));
    rig.worker.record_stop(rig.now);
    assert_eq!(traffic(all(&records).last().unwrap()), connection.traffic());
}
