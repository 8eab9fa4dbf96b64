//! Checks of what leaves: every field that `nat` rewrites, every checksum in full, and that no two flows look the same to
//! a backend. Flows are told apart by their sequence number, which no rewrite may touch.

use std::collections::HashMap;
use std::net::IpAddr;

use dataplane::testing::{Packet, Segment};
use proto::Family;

use super::BenchError;
use super::scenario::{BACKEND_PORT, VIP_PORT, backend, client, snat_addresses, vip};
use crate::cli::BenchArgs;

/// How a flow looks to its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Mapping {
    pub(super) snat: (IpAddr, u16),
    pub(super) backend: (IpAddr, u16),
}

/// What the sample showed.
pub(super) struct Verifier<'o> {
    options: &'o BenchArgs,
    family: Family,
    snat: Vec<IpAddr>,
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

/// A TCP packet as it left.
#[derive(Clone, Copy, Debug)]
struct Seen {
    source: (IpAddr, u16),
    destination: (IpAddr, u16),
    hop_limit: u8,
    sequence: u32,
    reset: bool,
}

/// Reads a TCP packet without options by fixed offsets and computes its checksums in full; shares no code with the
/// engine.
fn see(frame: &[u8]) -> Result<Seen, BenchError> {
    read(frame).ok_or_else(|| BenchError::Wrong(format!("no whole TCP packet with right checksums: {frame:02x?}")))
}

fn read(frame: &[u8]) -> Option<Seen> {
    let word = |at: usize| Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?));
    let is_v4 = word(12)? == 0x0800;
    let (l4, len, addresses, hop_limit) = if is_v4 {
        let header_holds = ones_sum(frame.get(14..34)?) == 0xffff;
        (34, usize::from(word(16)?).checked_sub(20)?, frame.get(26..34)?, header_holds.then_some(*frame.get(22)?)?)
    } else {
        (54, usize::from(word(18)?), frame.get(22..54)?, *frame.get(21)?)
    };
    let segment = frame.get(l4..l4 + len)?;
    let pseudo = [addresses, &[0, 6], &u16::try_from(len).ok()?.to_be_bytes(), segment].concat();
    if ones_sum(&pseudo) != 0xffff {
        return None;
    }
    let (source, destination) = addresses.split_at(addresses.len() / 2);
    Some(Seen {
        source: (address(source)?, word(l4)?),
        destination: (address(destination)?, word(l4 + 2)?),
        hop_limit,
        sequence: u32::from_be_bytes(segment.get(4..8)?.try_into().ok()?),
        reset: *segment.get(13)? == dataplane::tcp_flags::RST,
    })
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    <[u8; 4]>::try_from(bytes).map(IpAddr::from).or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// One's complement sum of 16-bit words (RFC 1071); 0xffff over what carries a right checksum.
fn ones_sum(bytes: &[u8]) -> u16 {
    let mut sum = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).copied().map_or(0, u32::from)).sum::<u32>();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(0)
}

fn wrong(what: &str, found: &impl std::fmt::Debug) -> BenchError {
    BenchError::Wrong(format!("{what}: found {found:?}"))
}

impl<'o> Verifier<'o> {
    pub(super) fn new(options: &'o BenchArgs, family: Family) -> Self {
        let snat = snat_addresses(options, family);
        Self { options, family, snat, flows: HashMap::new(), mappings: HashMap::new(), checked: 0 }
    }

    /// Checks a packet on its way to a backend.
    pub(super) fn at_backend(&mut self, bytes: &[u8]) -> Result<(), BenchError> {
        let seen = see(bytes)?;
        // What a flow leaves that yields to a new one: the gateway's own, with the number after that of its SYN.
        let yielded = seen.reset && self.comes_and_goes();
        let (flow, hop_limit) =
            if yielded { (seen.sequence.wrapping_sub(1), OWN_HOP_LIMIT) } else { (seen.sequence, SENT_HOP_LIMIT - 1) };
        let service = flow % self.options.services;
        let backends = self.options.backends;
        let known = (0..backends).any(|n| backend(self.family, service, n, backends) == seen.destination.0);
        if !known || seen.destination.1 != BACKEND_PORT {
            return Err(wrong("the destination is no backend of the service", &seen));
        }
        if !self.snat.contains(&seen.source.0) || seen.source.1 < 1024 {
            return Err(wrong("the source is no SNAT address and port", &seen));
        }
        if seen.hop_limit != hop_limit {
            return Err(wrong(&format!("expected a hop limit of {hop_limit}"), &seen));
        }
        self.checked += 1;
        self.remember(flow, Mapping { snat: seen.source, backend: seen.destination })
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
            return Err(wrong("a flow changed its backend or SNAT port", &mapping));
        }
        if *self.mappings.entry(mapping).or_insert(flow) != flow {
            return Err(wrong("two flows share a SNAT port at one backend", &mapping));
        }
        Ok(())
    }

    /// The packet that a backend would answer a flow with.
    pub(super) fn reply_frame(flow: u32, mapping: &Mapping) -> Vec<u8> {
        let ports = [mapping.backend.1, mapping.snat.1];
        let segment = Segment::Tcp { ports, flags: dataplane::tcp_flags::ACK, sequence: flow, acknowledgement: 1 };
        Packet::between(mapping.backend.0, mapping.snat.0, segment).build()
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
        self.checked += 1;
        Ok(())
    }
}
