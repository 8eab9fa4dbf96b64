//! Flow records as IPFIX over UDP (RFC 7011), flows of both directions as biflows (RFC 5103).
//!
//! A worker is an observation domain, 1 for the first. Templates are sent first, every [`TEMPLATES_EVERY`], and after
//! each failure, since the collector may have lost them (RFC 7011 section 8.4). The information elements are in
//! docs/operate/flow-records.md.
//!
//! Invariant: a message has at most [`MESSAGE_MAX`] bytes, and sequence numbers count records also when a message is lost
//! (RFC 7011 section 3.1).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use dataplane::flow::{FlowEnd, FlowEvent};
use objects::scalar::url::HostPort;
use tokio::net::{UdpSocket, lookup_host};

use super::enriched_record::{EnrichedRecord, WallClock};

/// Largest message: the smallest MTU of IPv6, 1,280, less the headers of IPv6 and UDP, so that it needs no fragments (RFC
/// 7011 section 10.3.3).
const MESSAGE_MAX: usize = 1_280 - 40 - 8;
/// Interval of templates. Collectors keep them for at least three (RFC 7011 section 8.4): `nfcapd` for good.
const TEMPLATES_EVERY: Duration = Duration::from_secs(60);
/// A collector that failed is tried again after this time: a name is not looked up for every message.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// IPFIX (RFC 7011 section 3.1).
const VERSION: u16 = 10;
const HEADER: usize = 16;
/// The set of templates (RFC 7011 section 3.3.2), and the number of the first template (section 3.4.1).
const TEMPLATE_SET: u16 = 2;
const FIRST_TEMPLATE: u16 = 256;
/// Marks an element of an enterprise (RFC 7011 section 3.2), and the one of reverse elements (RFC 5103 section 6.1).
const ENTERPRISE: u16 = 1 << 15;
const REVERSE_PEN: u32 = 29_305;

/// An information element of a record: its number, its bytes, and whether it is of the reverse direction.
#[derive(Clone, Copy)]
struct Element {
    id: u16,
    bytes: u16,
    is_reverse: bool,
}

const fn element(id: u16, bytes: u16) -> Element {
    Element { id, bytes, is_reverse: false }
}

const fn reverse(id: u16, bytes: u16) -> Element {
    Element { id, bytes, is_reverse: true }
}

const PROTOCOL: Element = element(4, 1);
const SOURCE_PORT: Element = element(7, 2);
const DESTINATION_PORT: Element = element(11, 2);
const START_MS: Element = element(152, 8);
const END_MS: Element = element(153, 8);
const FIREWALL_EVENT: Element = element(233, 1);
/// What records have that carry traffic.
const OCTETS: Element = element(1, 8);
const PACKETS: Element = element(2, 8);
const TCP_FLAGS: Element = element(6, 1);
const END_REASON: Element = element(136, 1);
const REVERSE_OCTETS: Element = reverse(1, 8);
const REVERSE_PACKETS: Element = reverse(2, 8);
/// What flows have whose addresses are translated.
const NAT_SOURCE_PORT: Element = element(227, 2);
const NAT_DESTINATION_PORT: Element = element(228, 2);

/// The kind of a record, which decides about its template.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind {
    /// Whether it is about a start.
    is_start: bool,
    /// Whether both directions are seen and rewritten.
    is_two_way: bool,
    is_ipv6: bool,
    /// In one-way modes, the family of the backend: a tunnel may lead to another one.
    is_backend_ipv6: bool,
}

impl Kind {
    const COUNT: u16 = 16;

    fn of(known: &EnrichedRecord) -> Self {
        let flow = &known.record.flow;
        let (is_two_way, is_ipv6) = (flow.mode.is_two_way(), flow.client.is_ipv6());
        let is_backend_ipv6 = if is_two_way { is_ipv6 } else { known.backend().is_ipv6() };
        Self { is_start: known.record.event == FlowEvent::Start, is_two_way, is_ipv6, is_backend_ipv6 }
    }

    /// Every kind that occurs.
    fn all() -> impl Iterator<Item = Self> {
        let with = |bits: u16| Self {
            is_start: bits & 8 != 0,
            is_two_way: bits & 4 != 0,
            is_ipv6: bits & 2 != 0,
            is_backend_ipv6: bits & 1 != 0,
        };
        (0..Self::COUNT).map(with).filter(|kind| !kind.is_two_way || kind.is_ipv6 == kind.is_backend_ipv6)
    }

    fn template(self) -> u16 {
        let bits = [self.is_start, self.is_two_way, self.is_ipv6, self.is_backend_ipv6];
        FIRST_TEMPLATE + bits.iter().fold(0, |number, bit| number << 1 | u16::from(*bit))
    }

    /// Its elements, in the order in which [`Self::write`] writes them.
    fn elements(self) -> Vec<Element> {
        let address = |v4: u16, v6: u16, is_ipv6: bool| if is_ipv6 { element(v6, 16) } else { element(v4, 4) };
        let mut all = vec![START_MS, END_MS, FIREWALL_EVENT, PROTOCOL, SOURCE_PORT, DESTINATION_PORT];
        all.extend([address(8, 27, self.is_ipv6), address(12, 28, self.is_ipv6)]);
        if self.is_two_way {
            all.extend([address(225, 281, self.is_ipv6), address(226, 282, self.is_ipv6)]);
            all.extend([NAT_SOURCE_PORT, NAT_DESTINATION_PORT]);
        } else {
            all.push(address(15, 62, self.is_backend_ipv6));
        }
        if !self.is_start {
            all.extend([END_REASON, TCP_FLAGS, OCTETS, PACKETS]);
            if self.is_two_way {
                all.extend([REVERSE_OCTETS, REVERSE_PACKETS]);
            }
        }
        all
    }

    /// Writes a record of this kind.
    fn write(self, known: &EnrichedRecord, to: &mut Vec<u8>) {
        let (record, flow) = (&known.record, &known.record.flow);
        to.extend(known.start_ms.to_be_bytes());
        to.extend(known.end_ms.to_be_bytes());
        to.extend([firewall_event(record.event), flow.protocol]);
        to.extend(flow.client.port().to_be_bytes());
        to.extend(flow.frontend.port().to_be_bytes());
        put_address(to, flow.client.ip(), self.is_ipv6);
        put_address(to, flow.frontend.ip(), self.is_ipv6);
        if self.is_two_way {
            // In mode `dnat` the backend sees the client.
            let source = flow.snat.unwrap_or(flow.client);
            put_address(to, source.ip(), self.is_ipv6);
            put_address(to, flow.backend_address.ip(), self.is_ipv6);
            to.extend(source.port().to_be_bytes());
            to.extend(flow.backend_address.port().to_be_bytes());
        } else {
            put_address(to, known.backend().ip(), self.is_backend_ipv6);
        }
        if !self.is_start {
            to.extend([end_reason(record.event), tcp_flags(record.event)]);
            to.extend(record.to_backend.octets.to_be_bytes());
            to.extend(u64::from(record.to_backend.packets).to_be_bytes());
            if self.is_two_way {
                to.extend(record.to_client.octets.to_be_bytes());
                to.extend(u64::from(record.to_client.packets).to_be_bytes());
            }
        }
    }
}

/// An address; all zeros of the other family, which does not occur.
fn put_address(to: &mut Vec<u8>, address: IpAddr, is_ipv6: bool) {
    match (address, is_ipv6) {
        (IpAddr::V4(address), false) => to.extend(address.octets()),
        (IpAddr::V6(address), true) => to.extend(address.octets()),
        (_, false) => to.extend(Ipv4Addr::UNSPECIFIED.octets()),
        (_, true) => to.extend(Ipv6Addr::UNSPECIFIED.octets()),
    }
}

/// Element `firewallEvent`: created, deleted, updated.
const fn firewall_event(event: FlowEvent) -> u8 {
    match event {
        FlowEvent::Start => 1,
        FlowEvent::End(_) => 2,
        FlowEvent::Interim => 5,
    }
}

/// Element `flowEndReason`: idle timeout, active timeout, end of the flow, forced end, lack of resources.
const fn end_reason(event: FlowEvent) -> u8 {
    match event {
        FlowEvent::End(FlowEnd::Idle) => 1,
        FlowEvent::Start | FlowEvent::Interim => 2,
        FlowEvent::End(FlowEnd::Fin | FlowEnd::Rst) => 3,
        FlowEvent::End(FlowEnd::Drained | FlowEnd::Replaced | FlowEnd::Stopped | FlowEnd::Requested) => 4,
        FlowEvent::End(FlowEnd::Reclaimed) => 5,
    }
}

/// Element `tcpControlBits`: the flag that closed the flow. Others are not collected.
const fn tcp_flags(event: FlowEvent) -> u8 {
    match event {
        FlowEvent::End(FlowEnd::Fin) => dataplane::tcp_flags::FIN,
        FlowEvent::End(FlowEnd::Rst) => dataplane::tcp_flags::RST,
        _ => 0,
    }
}

/// The messages of one observation domain.
struct Domain {
    number: u32,
    /// Number of records sent before, modulo 2^32.
    sequence: u32,
}

impl Domain {
    /// A message header; its length is written at the end.
    fn begin(&self, seconds: u32) -> Vec<u8> {
        let mut message = Vec::with_capacity(MESSAGE_MAX);
        message.extend(VERSION.to_be_bytes());
        message.extend([0; 2]);
        for word in [seconds, self.sequence, self.number] {
            message.extend(word.to_be_bytes());
        }
        message
    }

    /// The message with all templates. It has no data records, so it does not change the sequence number.
    fn templates(&self, seconds: u32) -> Vec<u8> {
        let mut message = self.begin(seconds);
        let start = begin_set(&mut message, TEMPLATE_SET);
        for kind in Kind::all() {
            let elements = kind.elements();
            message.extend(kind.template().to_be_bytes());
            message.extend(u16::try_from(elements.len()).unwrap_or(u16::MAX).to_be_bytes());
            for Element { id, bytes, is_reverse } in elements {
                message.extend((id | if is_reverse { ENTERPRISE } else { 0 }).to_be_bytes());
                message.extend(bytes.to_be_bytes());
                if is_reverse {
                    message.extend(REVERSE_PEN.to_be_bytes());
                }
            }
        }
        end_set(&mut message, start);
        end(message)
    }

    /// The next message: as many of the records as fit, and how many these are.
    fn data(&mut self, records: &[EnrichedRecord], seconds: u32) -> (Vec<u8>, usize) {
        let mut message = self.begin(seconds);
        let mut set: Option<(Kind, usize)> = None;
        let mut taken = 0;
        let mut record = Vec::new();
        for known in records {
            let kind = Kind::of(known);
            record.clear();
            kind.write(known, &mut record);
            let is_same = set.is_some_and(|(before, _)| before == kind);
            if message.len() + record.len() + if is_same { 0 } else { SET_HEADER } > MESSAGE_MAX {
                break;
            }
            if !is_same {
                if let Some((_, start)) = set {
                    end_set(&mut message, start);
                }
                set = Some((kind, begin_set(&mut message, kind.template())));
            }
            message.extend(&record);
            taken += 1;
        }
        if let Some((_, start)) = set {
            end_set(&mut message, start);
        }
        self.sequence = self.sequence.wrapping_add(u32::try_from(taken).unwrap_or(u32::MAX));
        (end(message), taken)
    }
}

const SET_HEADER: usize = 4;

/// Begins a set; returns where.
fn begin_set(message: &mut Vec<u8>, id: u16) -> usize {
    let start = message.len();
    message.extend(id.to_be_bytes());
    message.extend([0; 2]);
    start
}

/// Writes the length of a set that began at `start`.
fn end_set(message: &mut [u8], start: usize) {
    let len = u16::try_from(message.len() - start).unwrap_or(u16::MAX);
    message[start + 2..start + SET_HEADER].copy_from_slice(&len.to_be_bytes());
}

/// Writes the length of a message.
fn end(mut message: Vec<u8>) -> Vec<u8> {
    debug_assert!((HEADER..=MESSAGE_MAX).contains(&message.len()));
    let len = u16::try_from(message.len()).unwrap_or(u16::MAX);
    message[2..4].copy_from_slice(&len.to_be_bytes());
    message
}

/// The connection to a collector.
enum Connection {
    /// Templates were sent at this time.
    Open(UdpSocket, Instant),
    /// It failed at this time, or was never tried.
    Closed(Option<Instant>),
}

/// A collector and what was sent to it.
pub(super) struct Collector {
    at: HostPort,
    domains: Vec<Domain>,
    connection: Connection,
}

impl Collector {
    /// A collector for this number of workers.
    pub(super) fn new(at: HostPort, workers: usize) -> Self {
        let numbers = 1..=u32::try_from(workers).unwrap_or(u32::MAX);
        let domains = numbers.map(|number| Domain { number, sequence: 0 }).collect();
        Self { at, domains, connection: Connection::Closed(None) }
    }

    /// Connects and sends templates, where they are due.
    ///
    /// # Errors
    /// The collector cannot be reached, or could not be a moment ago.
    pub(super) async fn refresh(&mut self, clock: WallClock) -> io::Result<()> {
        let socket = match &self.connection {
            Connection::Open(_, sent) if sent.elapsed() < TEMPLATES_EVERY => return Ok(()),
            Connection::Closed(Some(failed)) if failed.elapsed() < RETRY_AFTER => return Err(io::ErrorKind::NotConnected.into()),
            _ => match std::mem::replace(&mut self.connection, Connection::Closed(Some(Instant::now()))) {
                Connection::Open(socket, _) if is_at(&socket, &self.at).await => socket,
                _ => connect(&self.at).await?,
            },
        };
        for domain in &self.domains {
            socket.send(&domain.templates(clock.seconds())).await?;
        }
        self.connection = Connection::Open(socket, Instant::now());
        Ok(())
    }

    /// Sends the records of one worker. Returns how many were lost, and why.
    pub(super) async fn send(&mut self, records: &[EnrichedRecord], clock: WallClock) -> (usize, Option<io::Error>) {
        let mut failure = self.refresh(clock).await.err();
        let (mut at, mut lost) = (0, 0);
        while let Some(first) = records.get(at) {
            let Some(domain) = self.domains.get_mut(first.worker) else { break };
            let (message, taken) = domain.data(&records[at..], clock.seconds());
            at += taken;
            let sent = match &self.connection {
                Connection::Open(socket, _) => socket.send(&message).await.map(drop),
                Connection::Closed(_) => Err(io::ErrorKind::NotConnected.into()),
            };
            if let Err(error) = sent {
                lost += taken;
                if matches!(self.connection, Connection::Open(..)) {
                    self.connection = Connection::Closed(Some(Instant::now()));
                }
                failure.get_or_insert(error);
            }
        }
        (lost + records.len() - at, failure)
    }
}

/// Whether the host still has the address that a socket is connected to.
async fn is_at(socket: &UdpSocket, at: &HostPort) -> bool {
    let (Ok(peer), Ok(mut addresses)) = (socket.peer_addr(), lookup_host((at.host(), at.port())).await) else { return false };
    addresses.any(|address| address == peer)
}

/// A socket to the first address of a host that has a route.
async fn connect(at: &HostPort) -> io::Result<UdpSocket> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{} has no address", at.host()));
    for address in lookup_host((at.host(), at.port())).await? {
        let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let connected = async {
            let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
            socket.connect(address).await.map(|()| socket)
        };
        match connected.await {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests;
