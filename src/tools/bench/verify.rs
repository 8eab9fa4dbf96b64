//! Checks of what leaves: every field that a mode rewrites or puts in front, every checksum in full, and that no two flows
//! look the same to a backend. Flows are told apart by their sequence number, which no mode may touch.

use std::collections::HashMap;
use std::net::IpAddr;

use dataplane::testing::{Packet, Segment};
use dataplane::{GUE_PORT, Mac};
use proto::{Family, Mode};

use super::BenchError;
use super::scenario::{
    BACKEND_PORT, CLUSTER_MAC, ROUTER_MAC, UPLINK_MAC, VIP_PORT, backend, backend_mac, client, snat_addresses, tunnel_source, vip,
};
use super::seen::{Seen, Tunnel, see};
use crate::cli::BenchArgs;

/// How a flow looks to its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Mapping {
    pub(super) source: (IpAddr, u16),
    /// What routers on the way may spread tunnels by included: a flow keeps to its path.
    pub(super) tunnel: Option<Tunnel>,
    pub(super) backend: (IpAddr, u16),
}

/// What the sample showed.
pub(super) struct Verifier<'o> {
    options: &'o BenchArgs,
    mode: Mode,
    family: Family,
    snat: Vec<IpAddr>,
    tunnel_source: Option<IpAddr>,
    /// Flows seen so far.
    pub(super) flows: HashMap<u32, Mapping>,
    mappings: HashMap<Mapping, u32>,
    /// Packets checked.
    pub(super) checked: u64,
}

/// Hop limit of the frames of a trace.
const SENT_HOP_LIMIT: u8 = 63;
/// That of what the gateway itself begins.
const OWN_HOP_LIMIT: u8 = 64;
/// The least source port of a GUE datagram: the ephemeral ones (RFC 6335 section 6).
const GUE_SOURCE_PORT: u16 = 49_152;

fn wrong(what: &str, found: &impl std::fmt::Debug) -> BenchError {
    BenchError::Wrong(format!("{what}: found {found:?}"))
}

impl<'o> Verifier<'o> {
    pub(super) fn new(options: &'o BenchArgs, mode: Mode, family: Family) -> Self {
        Self {
            options,
            mode,
            family,
            snat: snat_addresses(options, family),
            tunnel_source: tunnel_source(options.mode, family),
            flows: HashMap::new(),
            mappings: HashMap::new(),
            checked: 0,
        }
    }

    /// Checks a packet on its way to a backend.
    pub(super) fn at_backend(&mut self, bytes: &[u8]) -> Result<(), BenchError> {
        let seen = see(bytes)?;
        // What a flow leaves that yields to a new one: the gateway's own, with the number after that of its SYN.
        let yielded = seen.reset && self.comes_and_goes();
        let (flow, hop_limit) =
            if yielded { (seen.sequence.wrapping_sub(1), OWN_HOP_LIMIT) } else { (seen.sequence, SENT_HOP_LIMIT - 1) };
        if seen.hop_limit != hop_limit || seen.label != 0 {
            return Err(wrong(&format!("expected a hop limit of {hop_limit} and no flow label"), &seen));
        }
        let destination = self.expect_backend(flow % self.options.services, &seen)?;
        self.expect_tunnel(&seen)?;
        self.expect_source(flow, &seen)?;
        self.checked += 1;
        self.remember(flow, Mapping { source: seen.source, tunnel: seen.tunnel, backend: destination })
    }

    /// The backend that a packet reaches, by what says it in this mode, if it is one of the service and all else that
    /// leads there is right.
    fn expect_backend(&self, service: u32, seen: &Seen) -> Result<(IpAddr, u16), BenchError> {
        let each = self.options.backends;
        let mac = |n| if self.mode == Mode::Dsr { backend_mac(service, n, each) } else { ROUTER_MAC };
        let reaches = |n: &u32| {
            let address = backend(self.family, service, *n, each);
            match self.mode {
                Mode::Nat | Mode::Dnat => seen.destination.0 == address,
                Mode::Dsr => Mac(seen.destination_mac) == mac(*n),
                Mode::Ipip | Mode::Gue => seen.tunnel.is_some_and(|tunnel| tunnel.destination == address),
            }
        };
        let Some(n) = (0..each).find(reaches) else { return Err(wrong("it goes to no backend of the service", seen)) };
        let address = backend(self.family, service, n, each);
        let backend_port = if self.mode.is_two_way() { BACKEND_PORT } else { VIP_PORT };
        let destination = if self.mode.is_two_way() { address } else { vip(self.family, service) };
        if seen.destination != (destination, backend_port) {
            return Err(wrong(&format!("expected the destination {destination}, port {backend_port}"), seen));
        }
        if (Mac(seen.destination_mac), Mac(seen.source_mac)) != (mac(n), CLUSTER_MAC) {
            return Err(wrong("the Ethernet addresses lead to another than the next hop", seen));
        }
        Ok((address, backend_port))
    }

    fn expect_tunnel(&self, seen: &Seen) -> Result<(), BenchError> {
        let is_right = match (self.mode, &seen.tunnel) {
            (Mode::Nat | Mode::Dnat | Mode::Dsr, tunnel) => tunnel.is_none(),
            (Mode::Ipip | Mode::Gue, None) => false,
            (mode, Some(tunnel)) => {
                let ports_are_right = match tunnel.ports {
                    None => mode == Mode::Ipip,
                    Some((from, to)) => mode == Mode::Gue && from >= GUE_SOURCE_PORT && to == GUE_PORT,
                };
                ports_are_right && Some(tunnel.source) == self.tunnel_source && tunnel.hop_limit == OWN_HOP_LIMIT
            }
        };
        if is_right { Ok(()) } else { Err(wrong(&format!("the headers in front are not those of mode {}", self.mode), seen)) }
    }

    fn expect_source(&self, flow: u32, seen: &Seen) -> Result<(), BenchError> {
        match self.mode {
            Mode::Nat if !self.snat.contains(&seen.source.0) || seen.source.1 < 1024 => {
                Err(wrong("the source is no SNAT address and port", seen))
            }
            Mode::Dnat | Mode::Dsr | Mode::Ipip | Mode::Gue if seen.source != client(self.family, flow) => {
                Err(wrong("the source is not the client", seen))
            }
            _ => Ok(()),
        }
    }

    /// Whether flows begin and yield all the time.
    fn comes_and_goes(&self) -> bool {
        self.options.new_flows || self.options.flood
    }

    /// One flow keeps its mapping, and no two share one; where flows come and go there is nothing to remember.
    fn remember(&mut self, flow: u32, mapping: Mapping) -> Result<(), BenchError> {
        if self.comes_and_goes() {
            return Ok(());
        }
        if *self.flows.entry(flow).or_insert(mapping) != mapping {
            return Err(wrong("a flow changed its backend, its source or its tunnel", &mapping));
        }
        if *self.mappings.entry(mapping).or_insert(flow) != flow {
            return Err(wrong("two flows look the same to one backend", &mapping));
        }
        Ok(())
    }

    /// The packet that a backend would answer a flow with.
    pub(super) fn reply_frame(flow: u32, mapping: &Mapping) -> Vec<u8> {
        let ports = [mapping.backend.1, mapping.source.1];
        let segment = Segment::Tcp { ports, flags: dataplane::tcp_flags::ACK, sequence: flow, acknowledgement: 1 };
        let packet = Packet::between(mapping.backend.0, mapping.source.0, segment).hop_limit(SENT_HOP_LIMIT);
        Packet { destination_mac: CLUSTER_MAC, ..packet }.build()
    }

    /// Checks a packet on its way back to a client.
    pub(super) fn at_client(&mut self, bytes: &[u8]) -> Result<(), BenchError> {
        let seen = see(bytes)?;
        let flow = seen.sequence;
        if seen.destination != client(self.family, flow) {
            return Err(wrong("a reply goes to the wrong client", &seen));
        }
        if seen.source != (vip(self.family, flow % self.options.services), VIP_PORT) {
            return Err(wrong("a reply does not come from the VIP", &seen));
        }
        let macs = (Mac(seen.destination_mac), Mac(seen.source_mac));
        if macs != (ROUTER_MAC, UPLINK_MAC) || seen.tunnel.is_some() || seen.hop_limit != SENT_HOP_LIMIT - 1 {
            return Err(wrong("a reply is not as a router would send it on", &seen));
        }
        self.checked += 1;
        Ok(())
    }
}
