//! Verification of packets that left. A packet is read, the few fields that are the gateway's choice are taken from it
//! and checked (backend, SNAT address and port, next hop, entropy of a tunnel, identification of what may be fragmented),
//! and then all its bytes must be those of the packet that is expected with these choices. Also: a flow keeps the choices,
//! and no two flows look the same to a backend. Each part of the traffic has a verifier of its own; the number of the flow,
//! which each packet carries, tells which.
//!
//! **Invariant:** no code is shared with the engine, and each bit of a packet is checked but for its padding.
//!
//! Not here: which packets are verified (`harness`).

use std::net::IpAddr;

use dataplane::tcp_flags::{FIN, RST};
use dataplane::{GUE_PORT, Mac};
use proto::{Family, Mode};

use super::error::BenchError;
use super::frame::{self, Content, FrameFields, Hop, Piece, TunnelHeaders};
use super::scenario::{BACKEND_PORT, Part, Scenario, Side, router_mac};
use super::traffic::{self, Stage};

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
pub(super) struct Verifiers {
    scenario: Scenario,
    /// By part.
    parts: Vec<Verifier>,
    /// Number of packets verified.
    pub(super) checked: u64,
    written: Vec<u8>,
}

impl Verifiers {
    /// None in mode `none`, which has no Services.
    pub(super) fn new(scenario: &Scenario) -> Option<Self> {
        let of_part = |part: &Part| Verifier::new(scenario, part);
        let parts = scenario.parts.iter().map(of_part).collect::<Option<_>>()?;
        Some(Self { scenario: scenario.clone(), parts, checked: 0, written: Vec::new() })
    }

    /// Verifies a packet that left by the port of a side, while packets of this stage are fed.
    pub(super) fn verify(&mut self, left_by: Side, stage: Stage, bytes: &[u8]) -> Result<(), BenchError> {
        let seen =
            frame::read(bytes).ok_or_else(|| wrong("a packet is no whole packet, nor a fragment that was sent", &bytes))?;
        let flow = flow_of(&seen, self.scenario.comes_and_goes());
        let part = self.scenario.part_of(flow).and_then(|part| self.parts.get_mut(part));
        let Some(verifier) = part else { return Err(wrong("there is no such flow", &seen)) };
        let side = verifier.side(flow, &seen);
        if self.scenario.feeds(side) != left_by {
            return Err(wrong("it left by the other port", &seen));
        }
        let stage = verifier.stage(flow, stage, &seen);
        let expected = match side {
            Side::Cluster => verifier.at_backend(flow, stage, &seen)?,
            Side::Uplink => verifier.at_client(flow, stage, &seen)?,
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

    /// A packet that the backend of a part's flow sends in reply. None before the flow's first packet was verified.
    pub(super) fn reply(&self, part: usize, stage: Stage, flow: u32) -> Option<FrameFields> {
        self.parts.get(part)?.reply(stage, flow)
    }

    /// Checks that all flows were forwarded, and that no two look the same to a backend.
    pub(super) fn check_flows(&self) -> Result<(), BenchError> {
        self.parts.iter().try_for_each(Verifier::check_flows)
    }
}

/// The number of the flow that a packet belongs to. The RST of a reclaimed flow, which the gateway originates, has the
/// sequence number after that of its SYN.
fn flow_of(seen: &FrameFields, is_reclaimed: bool) -> u32 {
    traffic::flow_of(seen.content).wrapping_sub(u32::from(is_reclaimed && is_reset(seen)))
}

const fn is_reset(seen: &FrameFields) -> bool {
    matches!(seen.content, Content::Tcp { flags: RST, .. })
}

/// The expectations of a part.
#[derive(Debug)]
struct Verifier {
    part: Part,
    mode: Mode,
    is_reclaimed: bool,
    snat: Vec<IpAddr>,
    tunnel_source: Option<IpAddr>,
    /// Of the flows that stay, then of those that come and go: without what differs from one life to the next.
    choices: Vec<Choice>,
    /// Number of the next hop towards the client, of the flows that stay.
    hops_to_clients: Vec<u8>,
}

fn wrong(what: &str, found: &impl std::fmt::Debug) -> BenchError {
    BenchError::Wrong(format!("{what}: found {found:?}"))
}

impl Verifier {
    fn new(scenario: &Scenario, part: &Part) -> Option<Self> {
        Some(Self {
            mode: part.mode_of_services()?,
            is_reclaimed: scenario.comes_and_goes(),
            snat: scenario.snat_addresses(part.family),
            tunnel_source: scenario.tunnel_source(part.family),
            choices: vec![Choice::NONE; part.flows.len() + part.short_flows.len()],
            hops_to_clients: vec![NO_HOP; part.flows.len()],
            part: part.clone(),
        })
    }

    /// Where a packet goes: what comes from the frontend goes to the client.
    fn side(&self, flow: u32, seen: &FrameFields) -> Side {
        if seen.source == self.part.frontend(flow) { Side::Uplink } else { Side::Cluster }
    }

    /// The stage of a packet while packets of a stage are fed: flows that come and go begin and end meanwhile.
    fn stage(&self, flow: u32, fed: Stage, seen: &FrameFields) -> Stage {
        match seen.content {
            _ if !self.part.short_flows.contains(&flow) => fed,
            Content::Tcp { flags, .. } if flags & FIN != 0 => Stage::Fin,
            _ => Stage::Syn,
        }
    }

    /// The position of a flow among those that stay.
    fn position(&self, flow: u32) -> Option<usize> {
        self.part.flows.contains(&flow).then(|| (flow - self.part.flows.start) as usize)
    }

    /// The position of the choices of a flow. Those that come and go have new SNAT ports each time.
    fn position_of_choice(&self, flow: u32) -> Option<usize> {
        let short = || (flow.checked_sub(self.part.short_flows.start)? as usize).checked_add(self.part.flows.len());
        self.position(flow).or_else(short)
    }

    /// The packet that a backend should get, with the choices of the packet that it got.
    fn at_backend(&mut self, flow: u32, stage: Stage, seen: &FrameFields) -> Result<FrameFields, BenchError> {
        let choice = self.choice(flow, seen)?;
        self.remember(flow, choice)?;
        let part = &self.part;
        let sent = traffic::forwarded(part, Side::Cluster, traffic::from_client(part, stage, flow));
        let sent = if self.is_reclaimed && is_reset(seen) { as_reset(sent) } else { sent };
        let backend = part.backend(part.service_of(flow), choice.backend);
        let source = match self.mode {
            Mode::Nat => (self.snat.get(usize::from(choice.snat)).copied().unwrap_or(backend), choice.port),
            Mode::Dnat | Mode::Dsr | Mode::Ipip | Mode::Gue => sent.source,
        };
        let destination = if self.mode.is_two_way() { (backend, BACKEND_PORT) } else { sent.destination };
        let whole = FrameFields {
            destination_mac: self.backend_mac(flow, choice),
            source_mac: part.own_mac(Side::Cluster),
            source,
            destination,
            ..sent
        };
        let is_fragmented = part.fragmented.contains(&flow);
        let packet = seen.piece.filter(|_| is_fragmented).map_or(whole, |piece| traffic::fragment(whole, piece));
        let tunnel = self.tunnel(&packet, backend, &choice, seen)?;
        // Who rewrites no address gives no other identification.
        let hop = if self.mode.is_two_way() { chosen(packet.hop, seen.hop) } else { packet.hop };
        Ok(FrameFields { tunnel, hop, ..packet })
    }

    /// The next hop towards a backend.
    fn backend_mac(&self, flow: u32, choice: Choice) -> Mac {
        if self.part.is_on_link {
            return self.part.backend_mac(self.part.service_of(flow), choice.backend);
        }
        router_mac(choice.hop)
    }

    /// The choices of the gateway for a packet to a backend, if they are allowed.
    fn choice(&self, flow: u32, seen: &FrameFields) -> Result<Choice, BenchError> {
        let (part, service) = (&self.part, self.part.service_of(flow));
        let reaches = |n: &u32| match self.mode {
            Mode::Nat | Mode::Dnat => seen.destination.0 == part.backend(service, *n),
            Mode::Dsr => seen.destination_mac == part.backend_mac(service, *n),
            Mode::Ipip | Mode::Gue => seen.tunnel.is_some_and(|tunnel| tunnel.destination == part.backend(service, *n)),
        };
        let known = self.position_of_choice(flow).and_then(|at| self.choices.get(at)).filter(|choice| **choice != Choice::NONE);
        let near = known.map(|choice| choice.backend).filter(reaches);
        let backend = near.or_else(|| (0..part.backends).find(reaches));
        let Some(backend) = backend else { return Err(wrong("it goes to no backend of the service", seen)) };
        let hop = if part.is_on_link { Some(0) } else { self.router(seen.destination_mac) };
        let Some(hop) = hop else { return Err(wrong("it goes to no next hop", seen)) };
        let (port, snat) = match (self.mode, seen.tunnel) {
            (Mode::Nat, _) => {
                // A later fragment has no ports.
                let port = if seen.piece == Some(Piece::Later) { known.map_or(0, |choice| choice.port) } else { seen.source.1 };
                let snat = self.snat.iter().position(|address| *address == seen.source.0).filter(|_| port >= SNAT_PORT);
                let Some(snat) = snat else { return Err(wrong("the source is no SNAT address and port", seen)) };
                (port, u8::try_from(snat).unwrap_or(u8::MAX))
            }
            (_, Some(tunnel)) => (tunnel.ports.map_or(0, |ports| ports.0), 0),
            _ => (0, 0),
        };
        Ok(Choice { backend, label: seen.tunnel.map_or(0, |tunnel| tunnel.hop.label), port, snat, hop })
    }

    /// Number of a router by its Ethernet address.
    fn router(&self, mac: Mac) -> Option<u8> {
        (0..self.part.next_hops).find(|n| router_mac(*n) == mac)
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
        let is_v6 = self.part.family == Family::V6;
        let (label, dont_fragment) = (if is_v6 { choice.label } else { 0 }, is_v6 || sent.hop.dont_fragment);
        let own = Hop { limit: OWN_HOP_LIMIT, identification: 0, dont_fragment, label };
        let Some(source) = self.tunnel_source else { return Err(wrong("there is no source of tunnels", seen)) };
        let hop = seen.tunnel.map_or(own, |tunnel| chosen(own, tunnel.hop));
        Ok(Some(TunnelHeaders { source, destination: backend, hop, ports }))
    }

    /// Checks that a flow keeps its choice.
    fn remember(&mut self, flow: u32, choice: Choice) -> Result<(), BenchError> {
        let has_new_ports = self.mode == Mode::Nat && !self.part.flows.contains(&flow);
        let choice = if has_new_ports { Choice { port: 0, snat: 0, ..choice } } else { choice };
        let known = self.position_of_choice(flow).and_then(|at| self.choices.get_mut(at));
        let Some(known) = known else { return Err(wrong("there is no such flow", &flow)) };
        if *known == Choice::NONE {
            *known = choice;
        }
        if *known == choice { Ok(()) } else { Err(wrong(&format!("flow {flow} changed from {known:?}"), &choice)) }
    }

    /// The packet that a client should get.
    fn at_client(&mut self, flow: u32, stage: Stage, seen: &FrameFields) -> Result<FrameFields, BenchError> {
        let Some(hop) = self.router(seen.destination_mac) else { return Err(wrong("it goes to no next hop", seen)) };
        let known = self.position(flow).and_then(|at| self.hops_to_clients.get_mut(at));
        let Some(known) = known else { return Err(wrong("nobody has replied to this flow", seen)) };
        if *known == NO_HOP {
            *known = hop;
        }
        if *known != hop {
            return Err(wrong("the packets of a flow to its client take several paths", seen));
        }
        let sent = traffic::to_client(&self.part, stage, flow);
        Ok(FrameFields { destination_mac: router_mac(hop), hop: chosen(sent.hop, seen.hop), ..sent })
    }

    fn reply(&self, stage: Stage, flow: u32) -> Option<FrameFields> {
        let choice = self.choices.get(self.position(flow)?).filter(|choice| **choice != Choice::NONE)?;
        let backend = self.part.backend(self.part.service_of(flow), choice.backend);
        let to = match self.mode {
            Mode::Nat => (*self.snat.get(usize::from(choice.snat))?, choice.port),
            _ => self.part.client(flow),
        };
        Some(traffic::from_backend(&self.part, stage, flow, backend, to))
    }

    fn check_flows(&self) -> Result<(), BenchError> {
        let choices = self.choices.get(..self.part.flows.len()).unwrap_or(&[]);
        if let Some(flow) = choices.iter().position(|choice| *choice == Choice::NONE) {
            let flow = self.part.flows.start as usize + flow;
            return Err(BenchError::Wrong(format!("the first packet of flow {flow} did not leave")));
        }
        if self.mode != Mode::Nat {
            return Ok(()); // backends see the clients' own addresses and ports
        }
        let part = &self.part;
        let key = |(flow, choice): (u32, &Choice)| {
            let backend = u64::from(part.service_of(flow)) * u64::from(part.backends) + u64::from(choice.backend);
            backend << 24 | u64::from(choice.snat) << 16 | u64::from(choice.port)
        };
        let mut keys: Vec<u64> = part.flows.clone().zip(choices).map(key).collect();
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
