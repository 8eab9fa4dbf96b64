//! Messages of IPFIX as tshark decodes them, their sizes and numbers, and a collector that comes and goes.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tokio::net::UdpSocket;

use super::super::enriched_record::samples::{one_way, record};
use super::*;

const CLOCK: WallClock = WallClock { offset_ns: 1_700_000_010_000_000_000, monotonic_ns: 0 };

/// A capture file with these UDP payloads, of raw IPv4 packets to a port for IPFIX.
fn capture(payloads: &[Vec<u8>], path: &Path) {
    let mut file: Vec<u8> = Vec::new();
    for word in [0xa1b2_c3d4_u32, 2 << 16 | 4, 0, 0, 65_535, 101] {
        file.extend(word.to_be_bytes());
    }
    for payload in payloads {
        let udp_len = u16::try_from(payload.len() + 8).unwrap();
        let len = udp_len + 20;
        for word in [0, 0, u32::from(len), u32::from(len)] {
            file.extend(word.to_be_bytes());
        }
        file.extend([0x45, 0]);
        file.extend(len.to_be_bytes());
        file.extend([0, 0, 0, 0, 64, 17, 0, 0, 192, 0, 2, 2, 192, 0, 2, 9]);
        for half in [40_000, 4739, udp_len, 0] {
            file.extend(half.to_be_bytes());
        }
        file.extend(payload);
    }
    std::fs::write(path, file).unwrap();
}

/// What tshark decodes: for each packet, the fields of its protocol `cflow`; `None` without tshark.
fn decoded(payloads: &[Vec<u8>]) -> Option<Vec<Value>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ipfix.pcap");
    capture(payloads, &path);
    let mut tshark = Command::new("tshark");
    let output = tshark.args(["-d", "udp.port==4739,cflow", "-T", "json", "--no-duplicate-keys", "-r"]).arg(&path).output();
    let Ok(output) = output else {
        println!("skipped: tshark is missing");
        return None;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let packets: Value = serde_json::from_slice(&output.stdout).unwrap();
    Some(packets.as_array().unwrap().iter().map(|packet| packet["_source"]["layers"]["cflow"].clone()).collect())
}

/// All values of a field, wherever it is.
fn all<'v>(value: &'v Value, name: &str, found: &mut Vec<&'v str>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                if key == name {
                    match value {
                        Value::Array(values) => found.extend(values.iter().filter_map(Value::as_str)),
                        other => found.extend(other.as_str()),
                    }
                } else {
                    all(value, name, found);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| all(value, name, found)),
        _ => {}
    }
}

fn values<'v>(value: &'v Value, name: &str) -> Vec<&'v str> {
    let mut found = Vec::new();
    all(value, name, &mut found);
    found
}

fn ipv6(mut known: EnrichedRecord) -> EnrichedRecord {
    let flow = &mut known.record.flow;
    flow.client = "[2001:db8::10]:40000".parse().unwrap();
    flow.frontend = "[2001:db8::1:0]:80".parse().unwrap();
    flow.backend_address = "[fd00::11]:8080".parse().unwrap();
    flow.snat = flow.snat.map(|_| "[fd00::3]:1025".parse().unwrap());
    known
}

#[test]
fn tshark_decodes_what_was_encoded() {
    let mut domain = Domain { number: 2, sequence: 7 };
    let end = FlowEvent::End(FlowEnd::Rst);
    let records = [record(FlowEvent::Start), record(end), ipv6(record(FlowEvent::Interim)), one_way(end), ipv6(one_way(end))];
    let templates = domain.templates(CLOCK.seconds());
    let (data, taken) = domain.data(&records, CLOCK.seconds());
    assert_eq!((taken, domain.sequence), (5, 12));
    let (next, _) = domain.data(&records[..1], CLOCK.seconds());
    let Some(packets) = decoded(&[templates, data, next]) else { return };
    let elements: usize = Kind::all().map(|kind| kind.elements().len()).sum();
    assert_eq!(values(&packets[0], "cflow.template_field_count").len(), Kind::all().count());
    let types = values(&packets[0], "cflow.template_ipfix_field_type").len();
    assert!(types + values(&packets[0], "cflow.template_ipfix_field_type_enterprise").len() >= elements, "{}", packets[0]);
    let data = &packets[1];
    assert_eq!(values(data, "cflow.od_id"), ["2"]);
    assert_eq!(values(data, "cflow.sequence"), ["7"]);
    assert_eq!(values(&packets[2], "cflow.sequence"), ["12"]);
    let rows: [(&str, &[&str]); 12] = [
        ("cflow.srcaddr", &["192.0.2.10", "192.0.2.10", "192.0.2.10"]),
        ("cflow.dstaddr", &["192.0.2.100", "192.0.2.100", "192.0.2.100"]),
        ("cflow.srcaddrv6", &["2001:db8::10", "2001:db8::10"]),
        ("cflow.post_natsource_ipv4_address", &["10.0.0.3", "10.0.0.3"]),
        ("cflow.post_natdestination_ipv4_address", &["10.0.0.11", "10.0.0.11"]),
        ("cflow.post_naptsource_transport_port", &["1025", "1025", "1025"]),
        ("cflow.post_naptdestination_transport_port", &["8080", "8080", "8080"]),
        ("cflow.nexthop", &["10.0.0.12", "10.0.0.12"]),
        ("cflow.srcport", &["40000"; 5]),
        // Forward and reverse; only forward in one-way modes.
        ("cflow.octets", &["500", "100000", "500", "100000", "500", "500"]),
        ("cflow.packets", &["6", "4", "6", "4", "6", "6"]),
        ("cflow.flow_end_reason", &["3", "2", "3", "3"]),
    ];
    for (name, expected) in rows {
        assert_eq!(values(data, name), expected, "{name}: {data:#}");
    }
}

#[test]
fn a_message_takes_as_many_records_as_fit_and_counts_them() {
    let mut domain = Domain { number: 1, sequence: u32::MAX };
    let records: Vec<_> =
        (0..50).map(|n| if n % 2 == 0 { record(FlowEvent::Start) } else { ipv6(record(FlowEvent::Interim)) }).collect();
    let (mut at, mut sequence) = (0, u32::MAX);
    while at < records.len() {
        let (message, taken) = domain.data(&records[at..], 0);
        assert!(taken > 0 && message.len() <= MESSAGE_MAX);
        assert_eq!(message[2..4], u16::try_from(message.len()).unwrap().to_be_bytes());
        assert_eq!(message[8..12], sequence.to_be_bytes(), "the number of records before");
        sequence = sequence.wrapping_add(u32::try_from(taken).unwrap());
        at += taken;
    }
    assert!(domain.templates(0).len() <= MESSAGE_MAX);
    for kind in Kind::all() {
        let expected: usize = kind.elements().iter().map(|element| usize::from(element.bytes)).sum();
        let mut known = if kind.is_two_way { record(FlowEvent::Interim) } else { one_way(FlowEvent::Interim) };
        known = if kind.is_ipv6 { ipv6(known) } else { known };
        let mut written = Vec::new();
        kind.write(&known, &mut written);
        assert_eq!(written.len(), expected, "template {}", kind.template());
    }
}

#[tokio::test]
async fn a_collector_that_comes_late_gets_templates_first_and_lost_records_are_counted() {
    let late = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = late.local_addr().unwrap();
    drop(late);
    let mut collector = Collector::new(HostPort::new("127.0.0.1", address.port()).unwrap(), 2);
    let records = [record(FlowEvent::Start), record(FlowEvent::Interim)];
    // A later message reports the refusal of this one.
    let (mut lost, mut failure) = (0, None);
    for _ in 0..10 {
        let (more, error) = collector.send(&records, CLOCK).await;
        (lost, failure) = (lost + more, failure.or(error));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(failure.map(|error| error.kind()), Some(io::ErrorKind::ConnectionRefused));
    assert!(lost > 0);
    let socket = UdpSocket::bind(address).await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while collector.send(&records, CLOCK).await.0 > 0 {
        assert!(Instant::now() < deadline, "it does not recover");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut message = [0; MESSAGE_MAX];
    for (domain, set) in [(1, TEMPLATE_SET), (2, TEMPLATE_SET)] {
        let len = socket.recv(&mut message).await.unwrap();
        assert!(len > HEADER);
        assert_eq!((message[15], u16::from_be_bytes([message[16], message[17]])), (domain, set));
    }
    let _ = socket.recv(&mut message).await.unwrap();
    assert!(u16::from_be_bytes([message[16], message[17]]) >= FIRST_TEMPLATE);
    assert_eq!(message[15], 2, "the worker's domain");
}
