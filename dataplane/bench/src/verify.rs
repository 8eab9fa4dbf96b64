//! Verification of packets that left. A packet is read, the few fields that are the gateway's choice are taken from it
//! and checked (backend, SNAT address and port, next hop, entropy of a tunnel, IPv4 identification without DF), and then
//! all its bytes must be those of the packet that is expected with these choices. Also: a flow keeps the choices, and no
//! two flows look the same to a backend.
//!
//! **Invariant:** no code is shared with the engine, and each bit of a packet is checked but for its padding.
//!
//! Not here: which packets are verified (`harness`).

use std::net::IpAddr;

use dataplane::tcp_flags::RST;
use dataplane::{GUE_PORT, Mac};
use proto::{Family, Mode};

use super::error::BenchError;
use super::frame::{self, Content, FrameFields, Hop, TunnelHeaders};
use super::scenario::{BACKEND_PORT, CLUSTER_MAC, backend_mac, router_mac, snat_addresses, tunnel_source};
use super::traffic::{self, Side, Stage};
use crate::args::BenchArgs;

/// What the gateway chose for a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choice {
    /// Number of the backend in its service.
    backend: u32,
    /// Flow label of the tunnel.
    label: u32,
    /// SNAT port, or source port of the tunnel.
    port: u16,
    /// Index of the SNAT address.
    snat: u8,
    /// Number of the next hop towards the backend.
    hop: u8,
}

impl Choice {
    const NONE: Self = Self { backend: u32::MAX, label: 0, port: 0, snat: 0, hop: 0 };
}

/// No next hop towards the client was seen yet.
const NO_HOP: u8 = u8::MAX;
/// Hop limit of packets that the gateway originates.
const OWN_HOP_LIMIT: u8 = 64;
/// Lowest source port of a GUE datagram: ephemeral ports (RFC 6335 section 6).
const GUE_SOURCE_PORT: u16 = 49_152;
/// Lowest SNAT port.
const SNAT_PORT: u16 = 1024;

/// The expectations of a run.
#[derive(Debug)]
pub(super) struct Verifier {
    options: BenchArgs,
    mode: Mode,
    family: Family,
    snat: Vec<IpAddr>,
    tunnel_source: Option<IpAddr>,
    /// By flow.
    choices: Vec<Choice>,
    /// Number of the next hop towards the client, by flow.
    hops_to_clients: Vec<u8>,
    /// Number of packets verified.
    pub(super) checked: u64,
    written: Vec<u8>,
}

fn wrong(what: &str, found: &impl std::fmt::Debug) -> BenchError {
    BenchError::Wrong(format!("{what}: found {found:?}"))
}

impl Verifier {
    /// Expects packets of flows with numbers below `flows`.
    pub(super) fn new(options: &BenchArgs, mode: Mode, family: Family, flows: u32) -> Self {
        let flows = if traffic::comes_and_goes(options) && options.snat_load.is_none() { 0 } else { flows as usize };
        Self {
            options: options.clone(),
            mode,
            family,
            snat: snat_addresses(options, family),
            tunnel_source: tunnel_source(options.mode, family),
            choices: vec![Choice::NONE; flows],
            hops_to_clients: vec![NO_HOP; flows],
            checked: 0,
            written: Vec::new(),
        }
    }

    /// Verifies a packet that left by a side.
    pub(super) fn verify(&mut self, side: Side, stage: Stage, bytes: &[u8]) -> Result<(), BenchError> {
        let seen = frame::read(bytes).ok_or_else(|| wrong("a packet ends within its headers", &bytes))?;
        let expected = match side {
            Side::Cluster => self.at_backend(stage, &seen)?,
            Side::Uplink => self.at_client(stage, &seen)?,
        };
        if seen != expected {
            return Err(wrong(&format!("expected {expected:?}"), &seen));
        }
        expected.write(&mut self.written);
        if !frame::written_like(bytes, &expected, &self.written) {
            return Err(wrong(&format!("{expected:?} is expected as the bytes {:02x?}", self.written), &format!("{bytes:02x?}")));
        }
        self.checked += 1;
        Ok(())
    }

    /// The packet that a backend should get, with the choices of the packet that it got.
    fn at_backend(&mut self, stage: Stage, seen: &FrameFields) -> Result<FrameFields, BenchError> {
        // The RST of a reclaimed flow: originated by the gateway, with the sequence number after that of its SYN.
        let comes_and_goes = traffic::comes_and_goes(&self.options);
        let reset = matches!(seen.content, Content::Tcp { flags: RST, .. }) && comes_and_goes;
        let flow = traffic::flow_of(seen.content).wrapping_sub(u32::from(reset));
        let choice = self.choice(flow, seen)?;
        self.remember(flow, choice)?;
        let options = &self.options;
        let sent = traffic::forwarded(options, Side::Cluster, traffic::from_client(options, self.family, stage, flow));
        let sent = if reset { as_reset(sent) } else { sent };
        let backend = traffic::backend(options, self.family, flow, choice.backend);
        let source = match self.mode {
            Mode::Nat => (self.snat.get(usize::from(choice.snat)).copied().unwrap_or(backend), choice.port),
            Mode::Dnat | Mode::Dsr | Mode::Ipip | Mode::Gue => sent.source,
        };
        let destination = if self.mode.is_two_way() { (backend, BACKEND_PORT) } else { sent.destination };
        let tunnel = self.tunnel(&sent, backend, &choice, seen)?;
        let destination_mac = self.backend_mac(flow, choice);
        Ok(FrameFields {
            destination_mac,
            source_mac: CLUSTER_MAC,
            source,
            destination,
            tunnel,
            hop: chosen(sent.hop, seen.hop),
            ..sent
        })
    }

    /// The next hop towards a backend.
    fn backend_mac(&self, flow: u32, choice: Choice) -> Mac {
        match self.mode {
            Mode::Dsr => backend_mac(flow % self.options.services, choice.backend, self.options.backends),
            _ => router_mac(choice.hop),
        }
    }

    /// The choices of the gateway for a packet to a backend, if they are allowed.
    fn choice(&self, flow: u32, seen: &FrameFields) -> Result<Choice, BenchError> {
        let options = &self.options;
        let address = |n: u32| traffic::backend(options, self.family, flow, n);
        let mac = |n: u32| backend_mac(flow % options.services, n, options.backends);
        let reaches = |n: &u32| match self.mode {
            Mode::Nat | Mode::Dnat => seen.destination.0 == address(*n),
            Mode::Dsr => seen.destination_mac == mac(*n),
            Mode::Ipip | Mode::Gue => seen.tunnel.is_some_and(|tunnel| tunnel.destination == address(*n)),
        };
        let near = self.choices.get(flow as usize).map(|choice| choice.backend).filter(|n| *n != u32::MAX && reaches(n));
        let backend = near.or_else(|| (0..options.backends).find(reaches));
        let Some(backend) = backend else { return Err(wrong("it goes to no backend of the service", seen)) };
        let hop = if self.mode == Mode::Dsr { Some(0) } else { self.router(seen.destination_mac) };
        let Some(hop) = hop else { return Err(wrong("it goes to no next hop", seen)) };
        let (port, snat) = match (self.mode, seen.tunnel) {
            (Mode::Nat, _) => {
                let snat = self.snat.iter().position(|address| *address == seen.source.0).filter(|_| seen.source.1 >= SNAT_PORT);
                let Some(snat) = snat else { return Err(wrong("the source is no SNAT address and port", seen)) };
                (seen.source.1, u8::try_from(snat).unwrap_or(u8::MAX))
            }
            (_, Some(tunnel)) => (tunnel.ports.map_or(0, |ports| ports.0), 0),
            _ => (0, 0),
        };
        Ok(Choice { backend, label: seen.tunnel.map_or(0, |tunnel| tunnel.hop.label), port, snat, hop })
    }

    /// Number of a router by its Ethernet address.
    fn router(&self, mac: Mac) -> Option<u8> {
        (0..self.options.ecmp).find(|n| router_mac(*n) == mac)
    }

    /// The headers that should be in front.
    fn tunnel(
        &self,
        sent: &FrameFields,
        backend: IpAddr,
        choice: &Choice,
        seen: &FrameFields,
    ) -> Result<Option<TunnelHeaders>, BenchError> {
        let ports = match self.mode {
            Mode::Nat | Mode::Dnat | Mode::Dsr => return Ok(None),
            Mode::Ipip => None,
            Mode::Gue if choice.port < GUE_SOURCE_PORT => return Err(wrong("expected an ephemeral port in front", seen)),
            Mode::Gue => Some((choice.port, GUE_PORT)),
        };
        let label = if self.family == Family::V6 { choice.label } else { 0 };
        let own = Hop { limit: OWN_HOP_LIMIT, identification: 0, dont_fragment: sent.hop.dont_fragment, label };
        let Some(source) = self.tunnel_source else { return Err(wrong("there is no source of tunnels", seen)) };
        let hop = seen.tunnel.map_or(own, |tunnel| chosen(own, tunnel.hop));
        Ok(Some(TunnelHeaders { source, destination: backend, hop, ports }))
    }

    /// Checks that a flow keeps its choice. Skipped for flows that come and go.
    fn remember(&mut self, flow: u32, choice: Choice) -> Result<(), BenchError> {
        let comes_and_goes = traffic::comes_and_goes(&self.options);
        let Some(known) = self.choices.get_mut(flow as usize) else {
            return if comes_and_goes { Ok(()) } else { Err(wrong("there is no such flow", &flow)) };
        };
        if *known == Choice::NONE {
            *known = choice;
        }
        if *known == choice { Ok(()) } else { Err(wrong(&format!("flow {flow} changed from {known:?}"), &choice)) }
    }

    /// The packet that a client should get.
    fn at_client(&mut self, stage: Stage, seen: &FrameFields) -> Result<FrameFields, BenchError> {
        let flow = traffic::flow_of(seen.content);
        let Some(hop) = self.router(seen.destination_mac) else { return Err(wrong("it goes to no next hop", seen)) };
        let Some(known) = self.hops_to_clients.get_mut(flow as usize) else { return Err(wrong("there is no such flow", seen)) };
        if *known == NO_HOP {
            *known = hop;
        }
        if *known != hop {
            return Err(wrong("the packets of a flow to its client take several paths", seen));
        }
        let sent = traffic::to_client(&self.options, self.family, stage, flow);
        Ok(FrameFields { destination_mac: router_mac(hop), hop: chosen(sent.hop, seen.hop), ..sent })
    }

    /// A packet that the flow's backend sends in reply. None before the flow's first packet was verified.
    pub(super) fn reply(&self, stage: Stage, flow: u32) -> Option<FrameFields> {
        let choice = self.choices.get(flow as usize).filter(|choice| **choice != Choice::NONE)?;
        let backend = traffic::backend(&self.options, self.family, flow, choice.backend);
        let to = match self.mode {
            Mode::Nat => (*self.snat.get(usize::from(choice.snat))?, choice.port),
            _ => super::scenario::client(self.family, flow),
        };
        Some(traffic::from_backend(&self.options, stage, flow, backend, to))
    }

    /// Checks that all flows were forwarded, and that no two look the same to a backend.
    pub(super) fn check_flows(&self) -> Result<(), BenchError> {
        if let Some(flow) = self.choices.iter().position(|choice| *choice == Choice::NONE) {
            return Err(BenchError::Wrong(format!("the first packet of flow {flow} did not leave")));
        }
        if self.mode != Mode::Nat {
            return Ok(()); // backends see the clients' own addresses and ports
        }
        let services = u64::from(self.options.services);
        let key = |(flow, choice): (usize, &Choice)| {
            let backend = flow as u64 % services * u64::from(self.options.backends) + u64::from(choice.backend);
            backend << 24 | u64::from(choice.snat) << 16 | u64::from(choice.port)
        };
        let mut keys: Vec<u64> = self.choices.iter().enumerate().map(key).collect();
        keys.sort_unstable();
        match keys.windows(2).find(|pair| pair.first() == pair.last()) {
            Some(keys) => Err(wrong("two flows look the same to one backend", &keys)),
            None => Ok(()),
        }
    }
}

/// The hop fields of an expected packet with what the gateway may choose: the identification of a packet that may be
/// fragmented.
const fn chosen(expected: Hop, seen: Hop) -> Hop {
    if expected.dont_fragment { expected } else { Hop { identification: seen.identification, ..expected } }
}

/// The RST that ends the flow of a SYN.
fn as_reset(syn: FrameFields) -> FrameFields {
    let sequence = traffic::flow_of(syn.content).wrapping_add(1);
    let content = Content::Tcp { flags: RST, sequence, acknowledgement: 0, window: 0 };
    let hop = Hop { limit: OWN_HOP_LIMIT, identification: 0, dont_fragment: true, label: 0 };
    FrameFields { hop, content, data_len: 0, ..syn }
}
