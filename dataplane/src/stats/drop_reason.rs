//! The reasons for which packets are dropped. Their names are part of the contract and never change.
//!
//! Not here: which packets are dropped.

/// Declares the reasons, each with its name in metrics and commands.
macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $variant:ident = $text:literal),+ $(,)?) => {
        /// A named kind of drop (DESIGN section 10). The discriminant indexes counters.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DropReason { $($(#[$doc])* $variant),+ }

        impl DropReason {
            /// Every reason, in the order of the discriminants.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The stable name.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }
    };
}

/// One value for each reason.
#[derive(Clone, Debug)]
pub(super) struct ByReason<T>([T; DropReason::ALL.len()]);

impl<T: Default> Default for ByReason<T> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| T::default()))
    }
}

impl<T> ByReason<T> {
    pub(super) fn of(&self, reason: DropReason) -> &T {
        &self.0[reason as usize]
    }

    pub(super) fn of_mut(&mut self, reason: DropReason) -> &mut T {
        &mut self.0[reason as usize]
    }

    /// The values, in the order of [`DropReason::ALL`].
    pub(super) fn all(&self) -> &[T] {
        &self.0
    }
}

drop_reasons! {
    /// A frame for another station, or from a group address.
    NotOurMac = "not_our_mac",
    /// A frame or header that cannot be parsed.
    Malformed = "malformed",
    /// A frame with fewer bytes than the length in its IP header.
    Truncated = "truncated",
    /// Wrong IPv4 header checksum.
    Ipv4Checksum = "ipv4_checksum",
    /// Loose or strict source route, or IPv6 routing header type 0 (RFC 5095).
    SourceRoute = "source_route",
    /// Source address that no packet may have (RFC 6890: this network, loopback, multicast, broadcast).
    MartianSource = "martian_source",
    /// An address of the gateway as source.
    OwnSource = "own_source",
    /// Source equals destination.
    SameSourceDestination = "same_source_destination",
    /// A reply to a SNAT address on a port other than that of the backend's route.
    SnatWrongPort = "snat_wrong_port",
    /// An address of a pool that no frontend uses.
    UnknownVip = "unknown_vip",
    /// The client is outside the service's source ranges.
    SourceRange = "source_range",
    /// `externalTrafficPolicy: Local`, and this gateway has no backend.
    NoLocalBackend = "no_local_backend",
    /// Mid-stream without a flow.
    NoFlow = "no_flow",
    /// Mid-stream without a flow, which a partner may still tell.
    FlowAwaited = "flow_awaited",
    /// No room for a new flow.
    FlowTableFull = "flow_table_full",
    /// No SNAT port left for the backend.
    SnatExhausted = "snat_exhausted",
    /// The Service has its share of a flow table that is nearly full.
    FlowShare = "flow_share",
    /// The client has its share of SNAT ports towards the backend, most of which are in use.
    SnatShare = "snat_share",
    /// Mode `dnat`: the client uses its port towards every backend already, through other frontends.
    DnatPortInUse = "dnat_port_in_use",
    /// No route to the destination.
    NoRoute = "no_route",
    /// The next hop did not answer in time, or too many packets wait for it.
    NeighbourUnresolved = "neighbour_unresolved",
    /// The packet would leave for a VIP or a pool address.
    VipLoop = "vip_loop",
    /// Larger than the outgoing port's MTU.
    TooBig = "too_big",
    /// A fragment, where fragments are not handled.
    FragmentUnsupported = "fragment_unsupported",
    /// Fragments of a datagram whose others did not arrive in time.
    FragmentTimeout = "fragment_timeout",
    /// No room for fragments.
    FragmentTableFull = "fragment_table_full",
    /// A fragmented SCTP packet through a port rewrite.
    SctpFragment = "sctp_fragment",
    /// A transport protocol that is not handled.
    UnsupportedProtocol = "unsupported_protocol",
    /// An ICMP error about a packet without flow.
    IcmpUnmatched = "icmp_unmatched",
    /// Its answer exceeded the rate limit.
    AnswerLimited = "answer_limited",
    /// The owner's hand-over queue is full.
    HandoverFull = "handover_full",
    /// Exceeds the rate limit of packets to the kernel.
    TwinRate = "twin_rate",
    /// The kernel does not take packets fast enough.
    TwinFull = "twin_full",
    /// The port refused to transmit.
    TxFull = "tx_full",
    /// A bare acknowledgement of a backend that lacks the PROXY header of the connection: the gateway answers it in the
    /// client's place.
    HeaderAwaited = "header_awaited",
    /// A VRRP advertisement of Linux, an answer or an announcement for a VIP group whose lease has ended.
    StaleAdvertisement = "stale_advertisement",
}
