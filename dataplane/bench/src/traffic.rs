//! The packets of a flow, as clients and backends send them and as they should arrive. Their numbers identify the flow:
//! TCP's sequence number, and four bytes of UDP data.
//!
//! Not here: frames in memory (`trace`), and the choices that are the gateway's (`verify`).

use std::net::IpAddr;

use dataplane::tcp_flags::{ACK, FIN, SYN};
use proto::Family;

use super::frame::{Content, FIRST_DATA, FrameFields, Hop, LATER_DATA, Piece};
use super::scenario::{BACKEND_PORT, Part, Side, router_mac};
use crate::args::{BenchProtocol, FrameSize};

/// The packets of a flow in their order; of UDP all are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The client's first packet.
    Syn,
    /// The backend's answer.
    SynAck,
    /// The client's answer to it, and all later packets of both.
    Ack,
    /// The client's last packet.
    Fin,
}

/// Hop limit of packets that are sent.
const SENT_HOP_LIMIT: u8 = 63;
/// Identification of packets that are sent, of IPv4 or fragments.
const SENT_IDENTIFICATION: u32 = 0x1234;
/// Window of segments that are sent.
const WINDOW: u16 = 0x2000;
/// Ethernet header, and frame check sequence.
const ETHERNET_AND_FCS: usize = 14 + 4;
/// The smallest frame with frame check sequence. Its TCP segments carry no data.
const SMALLEST: u16 = 64;
/// Sizes of the frames of twelve flows.
const IMIX: [u16; 12] = [64, 594, 64, 64, 594, 64, 1518, 64, 594, 64, 64, 594];

/// Bytes of data of a flow's packets.
fn data_len(part: &Part, content: Content, flow: u32) -> usize {
    let size = match part.size {
        FrameSize::Each(size) => size,
        FrameSize::Imix => IMIX[flow as usize % IMIX.len()],
    };
    let ip = if part.family == Family::V4 { 20 } else { 40 };
    let transport = match content {
        Content::Tcp { .. } if size == SMALLEST => return 0,
        Content::Tcp { .. } | Content::Rest { .. } => 20,
        Content::Udp { .. } => 8,
    };
    usize::from(size).saturating_sub(ETHERNET_AND_FCS + ip + transport).max(content.data_min())
}

fn content(part: &Part, stage: Stage, flow: u32) -> Content {
    let (flags, acknowledgement) = match stage {
        Stage::Syn => (SYN, 0),
        Stage::SynAck => (SYN | ACK, flow.wrapping_add(1)),
        Stage::Ack => (ACK, flow.wrapping_add(1)),
        Stage::Fin => (FIN | ACK, flow.wrapping_add(1)),
    };
    match part.protocol {
        BenchProtocol::Tcp => Content::Tcp { flags, sequence: flow, acknowledgement, window: WINDOW },
        BenchProtocol::Udp => Content::Udp { flow },
    }
}

/// The number of the flow that a packet belongs to.
pub(super) const fn flow_of(content: Content) -> u32 {
    match content {
        Content::Tcp { sequence, .. } => sequence,
        Content::Udp { flow } | Content::Rest { flow } => flow,
    }
}

fn hop(part: &Part) -> Hop {
    let identification = if part.family == Family::V4 { SENT_IDENTIFICATION } else { 0 };
    Hop { limit: SENT_HOP_LIMIT, identification, dont_fragment: part.dont_fragment, label: 0 }
}

/// A packet from one end to the other, as it is sent into a side of the gateway.
fn sent(part: &Part, stage: Stage, flow: u32, side: Side, [source, destination]: [(IpAddr, u16); 2]) -> FrameFields {
    let content = content(part, stage, flow);
    FrameFields {
        destination_mac: part.own_mac(side),
        source_mac: router_mac(0),
        vlan: part.vlan(side),
        tunnel: None,
        source,
        destination,
        hop: hop(part),
        piece: None,
        content,
        data_len: data_len(part, content, flow),
    }
}

/// A packet that the client of a flow sends.
pub(super) fn from_client(part: &Part, stage: Stage, flow: u32) -> FrameFields {
    sent(part, stage, flow, Side::Uplink, [part.client(flow), part.frontend(flow)])
}

/// A packet that a backend of the flow's service sends to where the client's packets come from.
pub(super) fn from_backend(part: &Part, stage: Stage, flow: u32, backend: IpAddr, to: (IpAddr, u16)) -> FrameFields {
    sent(part, stage, flow, Side::Cluster, [(backend, BACKEND_PORT), to])
}

/// The packet of the client as a router sends it on.
pub(super) fn forwarded(part: &Part, side: Side, frame: FrameFields) -> FrameFields {
    let hop = Hop { limit: SENT_HOP_LIMIT - 1, ..frame.hop };
    FrameFields { source_mac: part.own_mac(side), vlan: part.vlan(side), hop, ..frame }
}

/// The packet of the backend as the client should get it.
pub(super) fn to_client(part: &Part, stage: Stage, flow: u32) -> FrameFields {
    let ends = [part.frontend(flow), part.client(flow)];
    forwarded(part, Side::Uplink, sent(part, stage, flow, Side::Cluster, ends))
}

/// A fragment of a TCP segment with the headers of this packet.
pub(super) fn fragment(whole: FrameFields, piece: Piece) -> FrameFields {
    let hop = Hop { dont_fragment: false, identification: SENT_IDENTIFICATION, ..whole.hop };
    let fragment = FrameFields { hop, piece: Some(piece), data_len: FIRST_DATA, ..whole };
    match piece {
        Piece::First => fragment,
        Piece::Later => FrameFields {
            source: (whole.source.0, 0),
            destination: (whole.destination.0, 0),
            content: Content::Rest { flow: flow_of(whole.content) },
            data_len: LATER_DATA,
            ..fragment
        },
    }
}
