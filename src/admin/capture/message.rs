//! A copied packet as a message: names instead of numbers, and addresses of the frames that left.
//!
//! Invariant: no decision is made here; what became of a packet is what its worker reports.

use std::net::SocketAddr;

use control::admin::time_text;
use dataplane::forward::{
    CaptureBatch, CapturedPacket, FlowUse, FrameCopy, ObservedEnd, PacketEnds, PacketOutcome, PacketSource, SentFrame,
};
use dataplane::{Address, Headers, Parsed, PortIndex, Snapshot, parse};
use proto::{Protocol, v1};

use super::super::flows::header_stage;

/// Where the EtherType of a frame is, bytes.
const ETHER_TYPE_AT: usize = 12;
/// Bytes of a VLAN tag.
const TAG_BYTES: usize = 4;
/// EtherTypes of VLAN tags: IEEE 802.1Q and 802.1ad.
const TAGS: [[u8; 2]; 2] = [[0x81, 0x00], [0x88, 0xa8]];

/// Interfaces of a capture, and the clock of its times.
pub(super) struct Naming {
    /// The ports, then the twins of those that have one.
    interfaces: Vec<String>,
    ports: usize,
    /// What to add to workers' times for the time since 1970.
    clock_offset_ns: u64,
}

impl Naming {
    pub(super) fn new(snapshot: &Snapshot, clock_offset_ns: u64) -> Self {
        let ports = snapshot.ports();
        let twins = ports.iter().filter(|port| port.twin).map(|port| format!("linux-{}", port.name));
        let interfaces = ports.iter().map(|port| port.name.clone()).chain(twins).collect();
        Self { interfaces, ports: ports.len(), clock_offset_ns }
    }

    pub(super) fn interfaces(&self) -> &[String] {
        &self.interfaces
    }

    /// Name and position of a port, or of its twin.
    fn interface(&self, port: PortIndex, is_linux: bool) -> (&str, u32) {
        let at = usize::from(port.0);
        let name = self.interfaces.get(..self.ports).and_then(|ports| ports.get(at)).map_or("", String::as_str);
        let twins = self.interfaces.iter().enumerate().skip(self.ports);
        let twin = || twins.clone().find(|(_, twin)| twin.strip_prefix("linux-") == Some(name)).map(|(at, _)| at);
        let at = if is_linux { twin().unwrap_or(at) } else { at };
        (self.interfaces.get(at).map_or("", String::as_str), u32::try_from(at).unwrap_or(u32::MAX))
    }

    /// The message of a packet of a worker's batch.
    pub(super) fn message(
        &self,
        worker: u32,
        batch: &CaptureBatch,
        packet: &CapturedPacket,
        snapshot: &Snapshot,
    ) -> v1::CapturedPacket {
        let time_ns = packet.time_ns.saturating_add(self.clock_offset_ns);
        let (name, interface) = self.interface(packet.port, packet.source == PacketSource::Linux);
        let (protocol, source, destination) = match &packet.ends {
            Some(ends) => texts(ends),
            None => addresses(batch.bytes(&packet.received)),
        };
        let (service, frontend, backend) = belongs(packet, snapshot);
        let (verdict, reason) = verdict(packet.end);
        let sent = batch.sent(packet);
        let shift = packet.flow.and_then(|flow| Some((flow.shift?, flow.belongs.protocol)));
        let traced = v1::TracedPacket {
            time: time_text(time_ns),
            r#in: name.to_owned(),
            worker,
            from: from(packet.source).to_owned(),
            protocol,
            source,
            destination,
            bytes: length(&packet.received),
            flow: flow(packet.flow_use).to_owned(),
            service,
            frontend,
            backend,
            verdict: verdict.to_owned(),
            reason: reason.to_owned(),
            sent: sent.iter().map(|sent| self.sent(batch, sent)).collect(),
            proxy_header: shift.map_or("", |(shift, protocol)| header_stage(&shift, protocol)).to_owned(),
            shift: shift.map_or(0, |(shift, _)| shift.header_len().into()),
        };
        let frame = |interface, copy: &FrameCopy| v1::CapturedFrame {
            interface,
            frame_len: length(copy),
            bytes: batch.bytes(copy).to_vec(),
        };
        let frames = sent.iter().map(|sent| frame(self.interface(sent.port, sent.is_to_linux).1, &sent.copy));
        v1::CapturedPacket {
            time_ns,
            packet: Some(traced),
            received: Some(frame(interface, &packet.received)),
            sent: frames.collect(),
        }
    }

    fn sent(&self, batch: &CaptureBatch, sent: &SentFrame) -> v1::SentPacket {
        let (protocol, source, destination) = addresses(batch.bytes(&sent.copy));
        let out = self.interface(sent.port, sent.is_to_linux).0.to_owned();
        v1::SentPacket { out, protocol, source, destination, bytes: length(&sent.copy) }
    }
}

fn length(copy: &FrameCopy) -> u32 {
    u32::try_from(copy.frame_len).unwrap_or(u32::MAX)
}

/// Service, frontend and backend of a packet: those of its flow, or the frontend that it was sent to.
fn belongs(packet: &CapturedPacket, snapshot: &Snapshot) -> (String, String, String) {
    if let Some(flow) = packet.flow.map(|flow| flow.belongs) {
        let backend = snapshot.backend(flow.backend);
        let service = backend.map_or_else(String::new, |backend| backend.service.to_string());
        let frontend = SocketAddr::new(flow.vip, flow.port).to_string();
        return (service, frontend, backend.map_or_else(String::new, |backend| backend.address.to_string()));
    }
    let frontend = packet.ends.and_then(|(_, destination, protocol)| {
        let found = match destination {
            SocketAddr::V4(to) => snapshot.frontend(u32::from(*to.ip()), protocol, to.port()),
            SocketAddr::V6(to) => snapshot.frontend(u128::from(*to.ip()), protocol, to.port()),
        };
        found.map(|frontend| (frontend.service.to_string(), destination.to_string()))
    });
    let (service, frontend) = frontend.unwrap_or_default();
    (service, frontend, String::new())
}

const fn from(source: PacketSource) -> &'static str {
    match source {
        PacketSource::Port => "port",
        PacketSource::Worker => "worker",
        PacketSource::Waited => "waited",
        PacketSource::Linux => "linux",
    }
}

const fn flow(flow_use: FlowUse) -> &'static str {
    match flow_use {
        FlowUse::None => "none",
        FlowUse::Known => "known",
        FlowUse::New => "new",
    }
}

/// The verdict, and the drop reason.
const fn verdict(end: ObservedEnd) -> (&'static str, &'static str) {
    match end {
        ObservedEnd::Outcome(PacketOutcome::Forward(_)) => ("forward", ""),
        ObservedEnd::Outcome(PacketOutcome::Linux(_)) => ("linux", ""),
        ObservedEnd::Outcome(PacketOutcome::Reply(_)) => ("reply", ""),
        ObservedEnd::Outcome(PacketOutcome::Drop(reason)) => ("drop", reason.as_str()),
        ObservedEnd::Waits => ("wait", ""),
    }
}

/// Protocol, source and destination of a frame, as far as its copy shows them.
fn addresses(frame: &[u8]) -> (String, String, String) {
    fn ends<A: Address>(headers: &Headers<A>) -> PacketEnds {
        let tuple = &headers.tuple;
        let end = |address: A, port| SocketAddr::new(address.ip(), port);
        (end(tuple.source, tuple.source_port), end(tuple.destination, tuple.destination_port), tuple.protocol)
    }
    match parse(&without_tags(frame)) {
        Ok(Parsed::V4(headers)) => texts(&ends(&headers)),
        Ok(Parsed::V6(headers)) => texts(&ends(&headers)),
        Ok(Parsed::Arp) => ("arp".to_owned(), String::new(), String::new()),
        Ok(Parsed::Other) | Err(_) => Default::default(),
    }
}

fn texts((source, destination, protocol): &PacketEnds) -> (String, String, String) {
    let end = |end: &SocketAddr| match Protocol::from_number(*protocol) {
        Some(_) => end.to_string(),
        None => end.ip().to_string(),
    };
    let name = match *protocol {
        1 => "icmp".to_owned(),
        58 => "icmpv6".to_owned(),
        number => Protocol::from_number(number).map_or_else(|| number.to_string(), |protocol| protocol.to_string()),
    };
    (name, end(source), end(destination))
}

/// The frame without its VLAN tags, at most two.
fn without_tags(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    for _ in 0..2 {
        let is_tagged = frame.get(ETHER_TYPE_AT..ETHER_TYPE_AT + 2).is_some_and(|found| TAGS.iter().any(|tag| tag == found));
        if is_tagged && frame.len() >= ETHER_TYPE_AT + TAG_BYTES {
            frame.drain(ETHER_TYPE_AT..ETHER_TYPE_AT + TAG_BYTES);
        }
    }
    frame
}

#[cfg(test)]
mod tests {
    use dataplane::testing::{Packet, arp_request};

    use super::*;

    #[test]
    fn a_frame_has_the_addresses_of_its_packet_with_or_without_tags() {
        let texts =
            |protocol: &str, source: &str, destination: &str| (protocol.to_owned(), source.to_owned(), destination.to_owned());
        let web = Packet::tcp("[2001:db8::7]:5555", "[2001:db8::1:0]:80").build();
        let both_tags = [&web[..12], &[0x88, 0xa8, 0, 7, 0x81, 0, 0, 8], &web[12..]].concat();
        let expected = texts("tcp", "[2001:db8::7]:5555", "[2001:db8::1:0]:80");
        assert_eq!((addresses(&web), addresses(&both_tags)), (expected.clone(), expected));
        let echo = Packet::echo_request("198.51.100.7", "192.0.2.100").build();
        assert_eq!(addresses(&echo), texts("icmp", "198.51.100.7", "192.0.2.100"));
        assert_eq!(addresses(&arp_request([192, 0, 2, 1].into(), [192, 0, 2, 2].into())).0, "arp");
        assert_eq!(addresses(&web[..30]), texts("", "", ""), "too short a copy");
    }

    #[test]
    fn interfaces_are_the_ports_and_the_twins_of_those_that_have_one() {
        let interfaces = ["uplink", "cluster", "linux-cluster"].map(str::to_owned).to_vec();
        let naming = Naming { interfaces, ports: 2, clock_offset_ns: 0 };
        assert_eq!(naming.interface(PortIndex(1), false), ("cluster", 1));
        assert_eq!(naming.interface(PortIndex(1), true), ("linux-cluster", 2));
        assert_eq!(naming.interface(PortIndex(0), false), ("uplink", 0));
    }
}
