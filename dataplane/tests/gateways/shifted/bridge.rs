//! One client and one backend on both sides of a gateway, and segments as values.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use dataplane::tcp_flags::{ACK, SYN};
use dataplane::testing::{Packet, Segment, assert_checksums, transport_checksum};
use dataplane::{DropReason, PortIndex};
use proto::{Family, Mode, ProxyProtocol, Service, ServiceName};

use crate::rig::{CLUSTER, Rig, UPLINK};

pub const MILLISECOND: u64 = 1_000_000;
/// The backend's initial sequence number.
pub const SERVER: u32 = 7_000;

/// A TCP segment, or the data of a datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seg {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub flags: u8,
    pub sequence: u32,
    pub acknowledgement: u32,
    pub window: u16,
    pub urgent: u16,
    pub options: Vec<u8>,
    pub data: Vec<u8>,
}

impl Seg {
    /// Sets the options, which must be a multiple of 4 bytes.
    pub fn with_options(mut self, options: &[u8]) -> Self {
        self.options = options.to_vec();
        self
    }

    pub fn with_data(mut self, data: &[u8]) -> Self {
        self.data = data.to_vec();
        self
    }

    pub fn with_window(mut self, window: u16) -> Self {
        self.window = window;
        self
    }

    /// The packet, with a correct checksum.
    pub fn packet(&self) -> Packet {
        let mut bytes = [self.from.port().to_be_bytes(), self.to.port().to_be_bytes()].concat();
        bytes.extend(self.sequence.to_be_bytes());
        bytes.extend(self.acknowledgement.to_be_bytes());
        let words = u8::try_from(5 + self.options.len() / 4).unwrap();
        bytes.extend([words << 4, self.flags]);
        bytes.extend(self.window.to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend(self.urgent.to_be_bytes());
        bytes.extend(&self.options);
        bytes.extend(&self.data);
        let sum = transport_checksum(self.from.ip(), self.to.ip(), 6, &bytes);
        bytes[16..18].copy_from_slice(&sum.to_be_bytes());
        Packet::between(self.from.ip(), self.to.ip(), Segment::Other { protocol: 6 }).payload(&bytes)
    }

    /// The segment in an untagged frame, whose checksums must be right.
    pub fn of(frame: &[u8]) -> Self {
        assert_checksums(frame);
        let is_v4 = frame[12..14] == [8, 0];
        let word = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        let long = |at: usize| u32::from(word(at)) << 16 | u32::from(word(at + 2));
        let (from, to, at, end) = if is_v4 {
            let address = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).unwrap());
            (address(26), address(30), 34, 14 + usize::from(word(16)))
        } else {
            let address = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&frame[at..at + 16]).unwrap());
            (address(22), address(38), 54, 54 + usize::from(word(18)))
        };
        let data_at = at + usize::from(frame[at + 12] >> 4) * 4;
        Self {
            from: SocketAddr::new(from, word(at)),
            to: SocketAddr::new(to, word(at + 2)),
            flags: frame[at + 13],
            sequence: long(at + 4),
            acknowledgement: long(at + 8),
            window: word(at + 14),
            urgent: word(at + 18),
            options: frame[at + 20..data_at].to_vec(),
            data: frame[data_at..end].to_vec(),
        }
    }
}

/// The PROXY header of a connection, by the specification.
pub fn header(version: ProxyProtocol, from: SocketAddr, to: SocketAddr, is_stream: bool) -> Vec<u8> {
    if version == ProxyProtocol::V1 && is_stream {
        let family = if from.is_ipv4() { "TCP4" } else { "TCP6" };
        return format!("PROXY {family} {} {} {} {}\r\n", from.ip(), to.ip(), from.port(), to.port()).into_bytes();
    }
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let transport = if is_stream { 1 } else { 2 };
    let (family, len) = if from.is_ipv4() { (0x10, 12) } else { (0x20, 36) };
    let mut header = b"\r\n\r\n\0\r\nQUIT\n".to_vec();
    header.extend([0x21, family | transport, 0, len]);
    header.extend([octets(from.ip()), octets(to.ip())].concat());
    header.extend([from.port().to_be_bytes(), to.port().to_be_bytes()].concat());
    header
}

/// What leaves after a packet.
#[derive(Debug, Default)]
pub struct Sent {
    pub to_backend: Vec<Vec<u8>>,
    pub to_client: Vec<Vec<u8>>,
}

impl Sent {
    /// Segments to the backend; nothing else may have left.
    pub fn only_to_backend(self) -> Vec<Seg> {
        assert_eq!(self.to_client, Vec::<Vec<u8>>::new());
        self.to_backend.iter().map(|frame| Seg::of(frame)).collect()
    }

    /// The only segment, to the client.
    pub fn one_to_client(self) -> Seg {
        assert_eq!((self.to_client.len(), self.to_backend.len()), (1, 0), "to the client, to the backend");
        Seg::of(&self.to_client[0])
    }
}

/// What a connection has to do with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    pub version: ProxyProtocol,
    pub family: Family,
    pub mode: Mode,
    /// The client's initial sequence number.
    pub initial: u32,
}

impl Kind {
    pub const V2: Self = Self { version: ProxyProtocol::V2, family: Family::V4, mode: Mode::Nat, initial: 0x1000_0000 };

    /// Both versions, families and modes, each with numbers that wrap somewhere else: inside the header, behind it, or
    /// far away.
    pub fn all() -> impl Iterator<Item = Self> {
        let initials = [0x1000_0000, 0xffff_fff0, 0xffff_ff80].into_iter().cycle();
        let versions = [ProxyProtocol::V1, ProxyProtocol::V2].into_iter();
        let kinds = versions.flat_map(|version| {
            [Family::V4, Family::V6]
                .into_iter()
                .flat_map(move |family| [Mode::Nat, Mode::Dnat].map(|mode| Self { version, family, mode, initial: 0 }))
        });
        kinds.zip(initials).map(|(kind, initial)| Self { initial, ..kind })
    }
}

/// A gateway with one client and, once the client has sent, one backend.
pub struct Bridge {
    pub rig: Rig,
    pub kind: Kind,
    pub client: SocketAddr,
    pub vip: SocketAddr,
    /// The client as the backend sees it, and the backend.
    pub inside: Option<(SocketAddr, SocketAddr)>,
    /// The header that the backend gets.
    pub header: Vec<u8>,
}

/// Gives the services of a rig a PROXY header, and a mode.
pub fn set_proxy_protocol(rig: &mut Rig, kind: Kind) {
    for name in ["web", "dns"] {
        let name = ServiceName::new("default", name);
        let service = rig.state.services.get_mut(&name).unwrap();
        let mut changed = Service { mode: kind.mode, ..Service::clone(service) };
        for port in changed.ports.iter_mut().filter(|port| port.protocol != proto::Protocol::Sctp) {
            let is_stream = port.protocol == proto::Protocol::Tcp;
            port.proxy_protocol = Some(if is_stream { kind.version } else { ProxyProtocol::V2 });
        }
        *service = Arc::new(changed);
    }
    rig.publish();
}

impl Bridge {
    pub fn new(kind: Kind) -> Self {
        let mut rig = Rig::new();
        set_proxy_protocol(&mut rig, kind);
        Self::with_rig(rig, kind)
    }

    /// The same with a gateway that has such services.
    pub fn with_rig(rig: Rig, kind: Kind) -> Self {
        let (client, vip) = match kind.family {
            Family::V4 => ("198.51.100.7:5555", "192.0.2.100:80"),
            Family::V6 => ("[2001:db8:1::7]:5555", "[2001:db8::1:0]:80"),
        };
        let (client, vip) = (client.parse().unwrap(), vip.parse().unwrap());
        Self { rig, kind, client, vip, inside: None, header: header(kind.version, client, vip, true) }
    }

    /// Bytes of the header.
    pub fn h(&self) -> u32 {
        u32::try_from(self.header.len()).unwrap()
    }

    /// The number of the client's first byte.
    pub fn first(&self) -> u32 {
        self.kind.initial.wrapping_add(1)
    }

    /// A segment of the client, with numbers counted from its first byte and from the byte after the backend's SYN.
    pub fn of_client(&self, flags: u8, sequence: u32, acknowledgement: u32) -> Seg {
        let sequence = self.first().wrapping_add(sequence);
        let acknowledgement = if flags & ACK == 0 { 0 } else { (SERVER + 1).wrapping_add(acknowledgement) };
        self.between(self.client, self.vip, flags, [sequence, acknowledgement])
    }

    /// A segment of the backend, with numbers counted likewise; those of the client's stream include the header.
    pub fn of_backend(&self, flags: u8, sequence: u32, acknowledgement: u32) -> Seg {
        let (source, backend) = self.inside.unwrap();
        let acknowledgement = if flags & ACK == 0 { 0 } else { self.first().wrapping_add(acknowledgement) };
        self.between(backend, source, flags, [(SERVER + 1).wrapping_add(sequence), acknowledgement])
    }

    fn between(&self, from: SocketAddr, to: SocketAddr, flags: u8, [sequence, acknowledgement]: [u32; 2]) -> Seg {
        let (options, data) = (Vec::new(), Vec::new());
        Seg { from, to, flags, sequence, acknowledgement, window: 502, urgent: 0, options, data }
    }

    /// Puts a frame in; what leaves by both ports.
    pub fn put(&mut self, port: PortIndex, frame: &[u8]) -> Sent {
        self.rig.arrive(port, frame, 1);
        self.rig.worker.poll(self.rig.now);
        let sent = Sent { to_backend: self.rig.sent(CLUSTER), to_client: self.rig.sent(UPLINK) };
        self.rig.assert_account();
        sent
    }

    pub fn client_sends(&mut self, segment: &Seg) -> Sent {
        let sent = self.put(UPLINK, &segment.packet().build());
        if let (None, Some(frame)) = (self.inside, sent.to_backend.first()) {
            let first = Seg::of(frame);
            self.inside = Some((first.from, first.to));
        }
        sent
    }

    pub fn backend_sends(&mut self, segment: &Seg) -> Sent {
        self.put(CLUSTER, &segment.packet().build())
    }

    /// SYN and SYN-ACK with these options, as far as the client's ACK.
    pub fn open(&mut self, options: &[u8]) {
        let syn = Seg { acknowledgement: 0, ..self.of_client(SYN, u32::MAX, 0) }.with_options(options);
        let seen = self.client_sends(&syn).only_to_backend();
        let (source, backend) = self.inside.unwrap();
        assert_eq!(seen, [Seg { from: source, to: backend, ..syn }]);
        let answer = self.of_backend(SYN | ACK, u32::MAX, 0).with_options(options).with_window(64_240);
        let seen = self.backend_sends(&answer).one_to_client();
        let window = 64_240 - u16::try_from(self.h()).unwrap();
        assert_eq!(seen, Seg { from: self.vip, to: self.client, window, ..answer });
    }

    /// A segment of the client as the backend shall get it.
    pub fn inside_of(&self, segment: Seg) -> Seg {
        let (from, to) = self.inside.unwrap();
        Seg { from, to, ..segment }
    }

    /// A segment of the backend as the client shall get it.
    pub fn outside_of(&self, segment: Seg) -> Seg {
        Seg { from: self.vip, to: self.client, ..segment }
    }

    /// The segment that carries the header alone, with these options.
    pub fn header_alone(&self, acknowledgement: u32, options: &[u8]) -> Seg {
        let segment = self.of_client(ACK | dataplane::tcp_flags::PSH, 0, acknowledgement);
        self.inside_of(segment.with_options(options).with_data(&self.header.clone()))
    }

    /// The handshake to its end: the backend has the header.
    pub fn establish(&mut self) {
        self.open(&[]);
        let seen = self.client_sends(&self.of_client(ACK, 0, 0)).only_to_backend();
        assert_eq!(seen, [self.header_alone(0, &[])]);
        let taken = self.of_backend(ACK, 0, self.h());
        let seen = self.backend_sends(&taken).one_to_client();
        assert_eq!(seen, self.outside_of(Seg { acknowledgement: self.first(), ..taken }));
    }

    /// Headers sent first, sent again, and refused.
    pub fn headers(&self) -> [u64; 3] {
        let counters = &self.rig.counters;
        [&counters.proxy_headers_sent, &counters.proxy_headers_again, &counters.proxy_headers_refused].map(|of| of.get())
    }

    pub fn drops(&self, reason: DropReason) -> u64 {
        self.rig.drops(reason)
    }
}
