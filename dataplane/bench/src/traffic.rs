//! The packets of a flow, as clients and backends send them and as they should arrive. Their numbers identify the flow:
//! TCP's sequence number, and four bytes of UDP data.
//!
//! Not here: frames in memory (`trace`), and the choices that are the gateway's (`verify`).

use std::net::IpAddr;

use dataplane::tcp_flags::{ACK, SYN};
use proto::Family;

use super::frame::{Content, FrameFields, Hop};
use super::scenario::{
    self, BACKEND_PORT, CLUSTER_MAC, CLUSTER_VLAN, UPLINK_MAC, UPLINK_VLAN, VIP_PORT, client, router_mac, vip,
};
use crate::args::{BenchArgs, BenchDirection, BenchProtocol, BenchState, FrameSize};

/// A side of the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The side of the clients.
    Uplink,
    /// The side of the backends.
    Cluster,
}

impl Side {
    pub(super) const BOTH: [Self; 2] = [Self::Uplink, Self::Cluster];
}

/// The packets of a flow in their order; of UDP all are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The client's first packet.
    Syn,
    /// The backend's answer.
    SynAck,
    /// The client's answer to it, and all later packets of both.
    Ack,
}

/// Hop limit of packets that are sent.
const SENT_HOP_LIMIT: u8 = 63;
/// IPv4 identification of packets that are sent.
const SENT_IDENTIFICATION: u16 = 0x1234;
/// Window of segments that are sent.
const WINDOW: u16 = 0x2000;
/// Ethernet header, and frame check sequence.
const ETHERNET_AND_FCS: usize = 14 + 4;
/// The smallest frame with frame check sequence. Its TCP segments carry no data.
const SMALLEST: u16 = 64;
/// Sizes of the frames of twelve flows.
const IMIX: [u16; 12] = [64, 594, 64, 64, 594, 64, 1518, 64, 594, 64, 64, 594];

/// The directions that are measured.
pub(super) fn direction(options: &BenchArgs) -> BenchDirection {
    let is_two_way = options.mode.of_services().is_none_or(proto::Mode::is_two_way);
    let have_replies = is_two_way && options.state == BenchState::Established && !comes_and_goes(options);
    options.direction.unwrap_or(if have_replies { BenchDirection::Both } else { BenchDirection::ToBackend })
}

/// The sides that packets are fed into, in turn.
pub(super) fn sides(options: &BenchArgs) -> &'static [Side] {
    match direction(options) {
        BenchDirection::ToBackend => &[Side::Uplink],
        BenchDirection::ToClient => &[Side::Cluster],
        BenchDirection::Both => &Side::BOTH,
    }
}

/// Whether flows are opened and reclaimed all the time.
pub(super) const fn comes_and_goes(options: &BenchArgs) -> bool {
    options.new_flows || options.flood
}

/// Bytes of data of a flow's packets.
fn data_len(options: &BenchArgs, family: Family, content: Content, flow: u32) -> usize {
    let size = match options.size {
        FrameSize::Each(size) => size,
        FrameSize::Imix => IMIX[flow as usize % IMIX.len()],
    };
    let ip = if family == Family::V4 { 20 } else { 40 };
    let transport = match content {
        Content::Tcp { .. } if size == SMALLEST => return 0,
        Content::Tcp { .. } => 20,
        Content::Udp { .. } => 8,
    };
    usize::from(size).saturating_sub(ETHERNET_AND_FCS + ip + transport).max(content.data_min())
}

fn content(options: &BenchArgs, stage: Stage, flow: u32) -> Content {
    let (flags, acknowledgement) = match stage {
        Stage::Syn => (SYN, 0),
        Stage::SynAck => (SYN | ACK, flow.wrapping_add(1)),
        Stage::Ack => (ACK, flow.wrapping_add(1)),
    };
    match options.protocol {
        BenchProtocol::Tcp => Content::Tcp { flags, sequence: flow, acknowledgement, window: WINDOW },
        BenchProtocol::Udp => Content::Udp { flow },
    }
}

/// The number of the flow that a packet belongs to.
pub(super) const fn flow_of(content: Content) -> u32 {
    match content {
        Content::Tcp { sequence, .. } => sequence,
        Content::Udp { flow } => flow,
    }
}

/// The VLAN of a side.
pub(super) fn vlan(options: &BenchArgs, side: Side) -> Option<u16> {
    options.vlan.then_some(if side == Side::Uplink { UPLINK_VLAN } else { CLUSTER_VLAN })
}

fn hop(options: &BenchArgs, family: Family) -> Hop {
    let identification = if family == Family::V4 { SENT_IDENTIFICATION } else { 0 };
    Hop { limit: SENT_HOP_LIMIT, identification, dont_fragment: !options.no_df, label: 0 }
}

/// A packet from one end to the other, as it is sent into a side of the gateway.
fn sent(options: &BenchArgs, stage: Stage, flow: u32, side: Side, ends: [(IpAddr, u16); 2]) -> FrameFields {
    let [source, destination] = ends;
    let family = if source.0.is_ipv4() { Family::V4 } else { Family::V6 };
    let content = content(options, stage, flow);
    FrameFields {
        destination_mac: if side == Side::Uplink { UPLINK_MAC } else { CLUSTER_MAC },
        source_mac: router_mac(0),
        vlan: vlan(options, side),
        tunnel: None,
        source,
        destination,
        hop: hop(options, family),
        content,
        data_len: data_len(options, family, content, flow),
    }
}

/// The frontend of a flow.
fn frontend(options: &BenchArgs, family: Family, flow: u32) -> (IpAddr, u16) {
    (vip(family, flow % options.services), VIP_PORT)
}

/// A packet that the client of a flow sends.
pub(super) fn from_client(options: &BenchArgs, family: Family, stage: Stage, flow: u32) -> FrameFields {
    sent(options, stage, flow, Side::Uplink, [client(family, flow), frontend(options, family, flow)])
}

/// A packet that a backend of the flow's service sends to where the client's packets come from.
pub(super) fn from_backend(options: &BenchArgs, stage: Stage, flow: u32, backend: IpAddr, to: (IpAddr, u16)) -> FrameFields {
    sent(options, stage, flow, Side::Cluster, [(backend, BACKEND_PORT), to])
}

/// The packet of the client as a router sends it on.
pub(super) fn forwarded(options: &BenchArgs, side: Side, frame: FrameFields) -> FrameFields {
    let source_mac = if side == Side::Uplink { UPLINK_MAC } else { CLUSTER_MAC };
    FrameFields { source_mac, vlan: vlan(options, side), hop: Hop { limit: SENT_HOP_LIMIT - 1, ..frame.hop }, ..frame }
}

/// The packet of the backend as the client should get it.
pub(super) fn to_client(options: &BenchArgs, family: Family, stage: Stage, flow: u32) -> FrameFields {
    let ends = [frontend(options, family, flow), client(family, flow)];
    forwarded(options, Side::Uplink, sent(options, stage, flow, Side::Cluster, ends))
}

/// Address of a backend of the flow's service.
pub(super) fn backend(options: &BenchArgs, family: Family, flow: u32, n: u32) -> IpAddr {
    scenario::backend(family, flow % options.services, n, options.backends)
}
