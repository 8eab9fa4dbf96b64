//! Exchanges that Linux has begun through a port and whose answers it needs, and sessions of its routing daemons.
//!
//! **Invariant:** no packet from outside makes an entry, and neither does a reply of Linux to such a packet: only an
//! exchange that Linux begins by itself does, or a packet of a routing daemon to a peer that it has accepted.
//!
//! Shared by the workers: one sees what the kernel sends, another may receive the answer. A slot is one word, written
//! whole; of two exchanges in one slot the later one is remembered, and the other is treated like any packet.
//!
//! Not here: the classes of packets (`twin_rate`).

use std::sync::atomic::{AtomicU32, Ordering};

use crate::wire::{Address, Headers, Transport, Tuple, icmpv4, icmpv6, sctp_chunk, split_mix, tcp_flags, transport_bytes};

/// Number of remembered exchanges per port: 16,384 * 4 bytes = 64 KiB. At 1,000 probes a second an entry is overwritten
/// after 16 s, long after its answer.
const BEGUN: usize = 16_384;
/// Number of exchanges that others have begun lately, per port: 64 KiB. Linux gets at most 18,000 such packets a
/// second, so one is overwritten after 0.9 s; it counts until the reply of Linux, which comes within milliseconds.
const HEARD: usize = 16_384;
/// Number of routing sessions per port: 4 KiB. Only Linux makes entries, a few for each peer.
const SESSIONS: usize = 1_024;

/// BGP (RFC 4271).
pub(super) const BGP: u16 = 179;
/// LDP (RFC 5036).
pub(super) const LDP: u16 = 646;
/// BFD over several hops (RFC 5883).
pub(super) const BFD_MULTIHOP: u16 = 4784;
/// Protocols of routing over IP itself, besides VRRP: EIGRP, OSPF, PIM.
pub(super) const ROUTING_PROTOCOLS: [u8; 3] = [88, 89, 103];
/// Bytes of the marker of a BGP message (RFC 4271 section 4.1), which is followed by length and type.
const BGP_MARKER: usize = 16;
/// Types of BGP messages that only an accepted peer gets: UPDATE and KEEPALIVE (RFC 4271 section 8.2.2: KEEPALIVE
/// answers an acceptable OPEN).
const BGP_ACCEPTED: [u8; 2] = [2, 4];

/// An exchange that another station has begun, to be passed to [`KernelExchanges::heard`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ForeignExchange(u64);

/// The latest exchanges that the kernel has begun: TCP connections, SCTP associations, UDP exchanges and echo requests
/// whose first packet it sent; and sessions of its routing daemons. An outsider cannot guess their tuples, so packets
/// of a flood do not belong to any of them.
#[derive(Debug)]
pub(crate) struct KernelExchanges {
    seed: u64,
    begun: Box<[AtomicU32]>,
    heard: Box<[AtomicU32]>,
    sessions: Box<[AtomicU32]>,
}

impl Default for KernelExchanges {
    fn default() -> Self {
        Self::new(0)
    }
}

impl KernelExchanges {
    /// No exchanges yet. `seed` is a random number of the process, so that no sender can choose tuples that displace
    /// others.
    pub(crate) fn new(seed: u64) -> Self {
        let tags = |count| (0..count).map(|_| AtomicU32::new(0)).collect();
        Self { seed, begun: tags(BEGUN), heard: tags(HEARD), sessions: tags(SESSIONS) }
    }

    /// Records a packet that the kernel sends.
    pub(crate) fn sent<A: Address>(&self, frame: &[u8], headers: &Headers<A>) {
        let hash = self.hash(&headers.tuple);
        let begins = match headers.transport {
            Transport::Tcp { flags } => flags & (tcp_flags::SYN | tcp_flags::ACK) == tcp_flags::SYN,
            Transport::Sctp { chunk } => chunk == sctp_chunk::INIT,
            Transport::Icmp { kind, .. } => matches!(kind, icmpv4::ECHO_REQUEST | icmpv6::ECHO_REQUEST),
            Transport::Udp => !has(&self.heard, hash),
            _ => false,
        };
        if begins {
            put(&self.begun, hash);
        }
        let tuple = &headers.tuple;
        let is_session = match headers.transport {
            Transport::Tcp { .. } => {
                [BGP, LDP].iter().any(|port| [tuple.source_port, tuple.destination_port].contains(port))
                    && (begins || is_for_accepted_peer(frame, headers))
            }
            Transport::Udp => begins && tuple.destination_port == BFD_MULTIHOP,
            _ => ROUTING_PROTOCOLS.contains(&tuple.protocol),
        };
        if is_session {
            put(&self.sessions, self.hash(&session(*tuple)));
        }
    }

    /// Whether a received packet belongs to an exchange that the kernel has begun; otherwise what to tell
    /// [`KernelExchanges::heard`] if it is passed on.
    pub(crate) fn knows<A: Address>(&self, headers: &Headers<A>) -> Result<(), ForeignExchange> {
        let hash = self.hash(&headers.tuple.reversed());
        if has(&self.begun, hash) { Ok(()) } else { Err(ForeignExchange(hash)) }
    }

    /// Records that another station has begun an exchange with the kernel: packets of the kernel in it are replies.
    pub(crate) fn heard(&self, exchange: ForeignExchange) {
        put(&self.heard, exchange.0);
    }

    /// Whether a received packet belongs to a routing session of the kernel.
    pub(crate) fn has_session<A: Address>(&self, headers: &Headers<A>) -> bool {
        has(&self.sessions, self.hash(&session(headers.tuple.reversed())))
    }

    /// The hash of an exchange, from the tuple of the packets that the kernel sends.
    #[allow(clippy::cast_possible_truncation)] // halves are folded
    fn hash<A: Address>(&self, tuple: &Tuple<A>) -> u64 {
        let (to, from) = (tuple.destination.wide(), tuple.source.wide());
        let ports = u64::from(tuple.source_port) << 32 | u64::from(tuple.destination_port) << 16 | u64::from(tuple.protocol);
        let to = split_mix((to ^ to >> 64) as u64 ^ self.seed ^ ports);
        split_mix(to ^ (from ^ from >> 64) as u64 ^ self.seed.rotate_left(32))
    }
}

/// The tuple by which a session is known. The ports of BFD over several hops are each end's own, and those of protocols
/// over IP none.
fn session<A: Address>(tuple: Tuple<A>) -> Tuple<A> {
    let ports = [tuple.source_port, tuple.destination_port];
    if ports.contains(&BGP) || ports.contains(&LDP) { tuple } else { Tuple { source_port: 0, destination_port: 0, ..tuple } }
}

/// Whether a segment begins with a message of BGP that only an accepted peer gets.
fn is_for_accepted_peer<A: Address>(frame: &[u8], headers: &Headers<A>) -> bool {
    let message = transport_bytes(frame, headers).and_then(|tcp| tcp.get(usize::from(tcp.get(12)? >> 4) * 4..));
    message.and_then(|message| message.split_at_checked(BGP_MARKER)).is_some_and(|(marker, rest)| {
        marker.iter().all(|&byte| byte == 0xff) && rest.get(2).is_some_and(|kind| BGP_ACCEPTED.contains(kind))
    })
}

/// Slot and tag of a hash. The tag is not 0.
#[allow(clippy::cast_possible_truncation)] // taken apart
fn entry_of(tags: &[AtomicU32], hash: u64) -> Option<(&AtomicU32, u32)> {
    Some((tags.get((hash >> 32) as usize % tags.len().max(1))?, hash as u32 | 1))
}

fn put(tags: &[AtomicU32], hash: u64) {
    if let Some((known, tag)) = entry_of(tags, hash).filter(|(known, tag)| known.load(Ordering::Relaxed) != *tag) {
        known.store(tag, Ordering::Relaxed);
    }
}

fn has(tags: &[AtomicU32], hash: u64) -> bool {
    entry_of(tags, hash).is_some_and(|(known, tag)| known.load(Ordering::Relaxed) == tag)
}
