//! Records: news of flows as bytes.
//!
//! A record is a byte of length, a byte of kind, and the rest by kind; all numbers in network order. Records of IPv4 have
//! 34 bytes, of IPv6 82; those of shifted flows two more, which have modes of their own: a version that does not know these
//! must not keep such a flow as one of `nat`. A kind, a mode or a state that this version does not know is skipped.
//!
//! **Invariant:** numbers never change their meaning, whatever becomes of the order of the engine's enums. Reading never
//! panics, whatever the bytes are. Not here: how records travel.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use dataplane::flow::{FlowMode, FlowReplica, FlowState, ReplicaEvent, ShiftReplica};
use proto::ProxyProtocol;

/// Length, kind, protocol, mode, state, whether there is a SNAT address, four ports, idle time.
const HEAD: usize = 18;
/// Bytes of a record of IPv4.
pub(super) const RECORD_V4: usize = HEAD + 4 * 4;
/// Bytes of a record of IPv6.
pub(super) const RECORD_V6: usize = HEAD + 4 * 16;

const HOLDS_V4: u8 = 1;
const ENDED_V4: u8 = 2;
const HOLDS_V6: u8 = 3;
const ENDED_V6: u8 = 4;

const MODES: [(u8, FlowMode); 5] =
    [(1, FlowMode::Nat), (2, FlowMode::Dnat), (3, FlowMode::Dsr), (4, FlowMode::Ipip), (5, FlowMode::Gue)];

/// The modes of flows that are shifted. Behind their addresses are the version of the PROXY header and its length.
const SHIFTED_MODES: [(u8, FlowMode); 2] = [(6, FlowMode::Nat), (7, FlowMode::Dnat)];
/// Bytes of a shift.
const SHIFT: usize = 2;
/// Bytes of the longest record.
pub(super) const RECORD_MAX: usize = RECORD_V6 + SHIFT;

const VERSIONS: [(u8, ProxyProtocol); 2] = [(1, ProxyProtocol::V1), (2, ProxyProtocol::V2)];

const STATES: [(u8, FlowState); 28] = [
    (1, FlowState::TcpOpening),
    (2, FlowState::TcpAnswered),
    (3, FlowState::TcpEstablished),
    (4, FlowState::TcpHalfClosedByClient),
    (5, FlowState::TcpHalfClosedByBackend),
    (6, FlowState::TcpClosing),
    (7, FlowState::TcpRefused),
    (8, FlowState::TcpAdopted),
    (9, FlowState::TcpOneWayNew),
    (10, FlowState::TcpOneWay),
    (11, FlowState::TcpOneWayHalfClosed),
    (12, FlowState::TcpOneWayReset),
    (13, FlowState::UdpUnreplied),
    (14, FlowState::UdpExchange),
    (15, FlowState::Udp),
    (16, FlowState::UdpOneWayNew),
    (17, FlowState::UdpOneWay),
    (18, FlowState::SctpOpening),
    (19, FlowState::Sctp),
    (20, FlowState::SctpClosing),
    (21, FlowState::TcpFinOfClient),
    (22, FlowState::TcpFinDoubted),
    (23, FlowState::TcpResetByClient),
    (24, FlowState::TcpResetByBackend),
    (25, FlowState::TcpFromBackend),
    (26, FlowState::UdpFromBackend),
    (27, FlowState::SctpFromBackend),
    (28, FlowState::SctpHalfClosed),
];

fn number<T: PartialEq>(table: &[(u8, T)], value: &T) -> Option<u8> {
    table.iter().find(|(_, known)| known == value).map(|(number, _)| *number)
}

fn value<T: Copy>(table: &[(u8, T)], number: u8) -> Option<T> {
    table.iter().find(|(known, _)| *known == number).map(|(_, value)| *value)
}

/// Appends the record of an event. False: its addresses are of two families, and nothing is appended.
pub(super) fn encode(event: &ReplicaEvent, into: &mut Vec<u8>) -> bool {
    let (flow, is_end) = match event {
        ReplicaEvent::Holds(flow) => (flow, false),
        ReplicaEvent::Ended(flow) => (flow, true),
    };
    let is_v4 = flow.client.is_ipv4();
    let ends = [Some(flow.client), Some(flow.frontend), Some(flow.backend), flow.snat];
    let modes = if flow.shift.is_some() { &SHIFTED_MODES[..] } else { &MODES[..] };
    let (Some(mode), Some(state)) = (number(modes, &flow.mode), number(&STATES, &flow.state)) else { return false };
    let shift = flow.shift.and_then(|shift| Some([number(&VERSIONS, &shift.version)?, shift.header_len]));
    if ends.iter().flatten().any(|end| end.is_ipv4() != is_v4) {
        return false;
    }
    let (length, kind) = match (is_v4, is_end) {
        (true, false) => (RECORD_V4, HOLDS_V4),
        (true, true) => (RECORD_V4, ENDED_V4),
        (false, false) => (RECORD_V6, HOLDS_V6),
        (false, true) => (RECORD_V6, ENDED_V6),
    };
    let Ok(length) = u8::try_from(length + shift.map_or(0, |shift| shift.len())) else { return false };
    into.extend([length, kind, flow.protocol, mode, state, u8::from(flow.snat.is_some())]);
    for end in ends {
        into.extend(end.map_or(0, |end| end.port()).to_be_bytes());
    }
    into.extend(u32::try_from(flow.idle.as_millis()).unwrap_or(u32::MAX).to_be_bytes());
    for end in ends {
        match end.map(|end| end.ip()) {
            Some(IpAddr::V4(address)) => into.extend(address.octets()),
            Some(IpAddr::V6(address)) => into.extend(address.octets()),
            None if is_v4 => into.extend([0; 4]),
            None => into.extend([0; 16]),
        }
    }
    into.extend(shift.into_iter().flatten());
    true
}

/// The events of records that were appended to each other, without those of unknown kinds, modes and states. Bytes that
/// make no record end them.
pub(super) fn decode(mut bytes: &[u8]) -> impl Iterator<Item = ReplicaEvent> {
    std::iter::from_fn(move || {
        loop {
            let length = usize::from(*bytes.first()?);
            // A length of 0 would never end.
            let (record, rest) = bytes.split_at_checked(length).filter(|_| length > 0)?;
            bytes = rest;
            if let Some(event) = event(record) {
                return Some(event);
            }
        }
    })
}

fn event(record: &[u8]) -> Option<ReplicaEvent> {
    let [length, kind, protocol, mode, state, has_snat, ..] = *record else { return None };
    let is_v4 = matches!(kind, HOLDS_V4 | ENDED_V4);
    let plain = if is_v4 { RECORD_V4 } else { RECORD_V6 };
    let is_shifted = usize::from(length) == plain + SHIFT;
    if !is_shifted && usize::from(length) != plain || !matches!(kind, HOLDS_V4..=ENDED_V6) {
        return None;
    }
    let (head, addresses) = record.split_at_checked(HEAD)?;
    let shift = match *record.last_chunk::<SHIFT>()? {
        [version, header_len] if is_shifted => Some(ShiftReplica { version: value(&VERSIONS, version)?, header_len }),
        _ => None,
    };
    let end = |index: usize| {
        let port = u16::from_be_bytes(head.get(6 + 2 * index..)?.first_chunk().copied()?);
        let ip = if is_v4 {
            IpAddr::from(Ipv4Addr::from(*addresses.get(4 * index..)?.first_chunk::<4>()?))
        } else {
            IpAddr::from(Ipv6Addr::from(*addresses.get(16 * index..)?.first_chunk::<16>()?))
        };
        Some(SocketAddr::new(ip, port))
    };
    let idle_ms = u32::from_be_bytes(*head.last_chunk()?);
    let flow = FlowReplica {
        protocol,
        mode: value(if is_shifted { &SHIFTED_MODES[..] } else { &MODES[..] }, mode)?,
        state: value(&STATES, state)?,
        client: end(0)?,
        frontend: end(1)?,
        backend: end(2)?,
        snat: if has_snat == 0 { None } else { Some(end(3)?) },
        idle: Duration::from_millis(idle_ms.into()),
        shift,
    };
    // What the engine never says.
    if flow.state.protocol() != protocol {
        return None;
    }
    Some(if matches!(kind, HOLDS_V4 | HOLDS_V6) { ReplicaEvent::Holds(flow) } else { ReplicaEvent::Ended(flow) })
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A flow with this client port.
    pub(in super::super) fn flow(port: u16) -> FlowReplica {
        FlowReplica {
            protocol: 6,
            mode: FlowMode::Nat,
            state: FlowState::TcpEstablished,
            client: SocketAddr::from(([198, 51, 100, 7], port)),
            frontend: "192.0.2.100:80".parse().unwrap(),
            backend: "10.0.0.11:8080".parse().unwrap(),
            snat: Some("10.0.0.3:1024".parse().unwrap()),
            idle: Duration::from_millis(1234),
            shift: None,
        }
    }

    pub(in super::super) fn encoded(events: &[ReplicaEvent]) -> Vec<u8> {
        let mut bytes = Vec::new();
        assert!(events.iter().all(|event| encode(event, &mut bytes)));
        bytes
    }

    #[test]
    fn a_record_of_ipv4_has_these_bytes() {
        let bytes = encoded(&[ReplicaEvent::Holds(flow(5555))]);
        let expected = [
            &[34, 1, 6, 1, 3, 1][..],
            &[0x15, 0xb3, 0, 80, 0x1f, 0x90, 4, 0],
            &[0, 0, 4, 0xd2],
            &[198, 51, 100, 7, 192, 0, 2, 100, 10, 0, 0, 11, 10, 0, 0, 3],
        ];
        assert_eq!(bytes, expected.concat());
        assert_eq!((RECORD_V4, RECORD_V6), (34, 82));
    }

    #[test]
    fn a_record_of_a_shifted_flow_is_none_of_its_mode() {
        let shift = ShiftReplica { version: ProxyProtocol::V2, header_len: 28 };
        let bytes = encoded(&[ReplicaEvent::Holds(FlowReplica { shift: Some(shift), ..flow(5555) })]);
        assert_eq!((bytes.len(), &bytes[..6], &bytes[34..]), (36, &[36, 1, 6, 6, 3, 1][..], &[2, 28][..]));
    }

    #[test]
    fn every_state_and_mode_has_a_number_of_its_own() {
        for state in FlowState::ALL {
            let known = number(&STATES, &state).unwrap();
            assert_eq!(value(&STATES, known), Some(state));
        }
        for (index, (known, mode)) in MODES.iter().enumerate() {
            assert_eq!((usize::from(*known), value(&MODES, *known)), (index + 1, Some(*mode)));
        }
        assert!(STATES.iter().enumerate().all(|(index, (known, _))| usize::from(*known) == index + 1));
    }

    #[test]
    fn what_is_unknown_is_skipped_and_mixed_families_are_not_told() {
        let known = ReplicaEvent::Ended(flow(1));
        let mut bytes = encoded(&[ReplicaEvent::Holds(flow(2))]);
        for (position, value) in [(1, 9), (3, 99), (4, 99), (2, 17)] {
            let mut changed = bytes[..RECORD_V4].to_vec();
            changed[position] = value;
            let all = [changed, encoded(&[known])].concat();
            assert_eq!(decode(&all).collect::<Vec<_>>(), [known], "byte {position}");
        }
        // A longer record of a later version.
        let later = [&[7, 200, 1, 2, 3, 4, 5][..], &encoded(&[known])].concat();
        assert_eq!(decode(&later).collect::<Vec<_>>(), [known]);
        let before = bytes.clone();
        let mixed = FlowReplica { backend: "[2001:db8::1]:80".parse().unwrap(), ..flow(3) };
        assert!(!encode(&ReplicaEvent::Holds(mixed), &mut bytes));
        assert_eq!(bytes, before);
    }

    fn any_event() -> impl Strategy<Value = ReplicaEvent> {
        let ends = (any::<bool>(), any::<[u128; 4]>(), any::<[u16; 4]>());
        (ends, 0..STATES.len(), 0..MODES.len(), any::<(bool, bool, u32, Option<(bool, u8)>)>()).prop_map(
            |((is_v4, ips, ports), state, mode, (has_snat, is_end, idle_ms, shift))| {
                let end = |n: usize| {
                    let low = u32::try_from(ips[n] >> 96).unwrap();
                    let ip = if is_v4 { IpAddr::from(Ipv4Addr::from(low)) } else { Ipv6Addr::from(ips[n]).into() };
                    SocketAddr::new(ip, ports[n])
                };
                let state = STATES[state].1;
                let flow = FlowReplica {
                    protocol: state.protocol(),
                    mode: MODES[mode].1,
                    state,
                    client: end(0),
                    frontend: end(1),
                    backend: end(2),
                    snat: has_snat.then(|| end(3)),
                    idle: Duration::from_millis(idle_ms.into()),
                    shift: shift.filter(|_| mode < 2).map(|(is_v2, header_len)| {
                        let version = if is_v2 { ProxyProtocol::V2 } else { ProxyProtocol::V1 };
                        ShiftReplica { version, header_len }
                    }),
                };
                if is_end { ReplicaEvent::Ended(flow) } else { ReplicaEvent::Holds(flow) }
            },
        )
    }

    proptest! {
        #[test]
        fn events_read_back(events in proptest::collection::vec(any_event(), 0..40)) {
            prop_assert_eq!(decode(&encoded(&events)).collect::<Vec<_>>(), events);
        }

        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(decode(&bytes).count() <= bytes.len());
        }

        #[test]
        fn records_cut_short_lose_only_the_last(events in proptest::collection::vec(any_event(), 1..9), cut in 1..30_usize) {
            let bytes = encoded(&events);
            let read: Vec<_> = decode(&bytes[..bytes.len() - cut]).collect();
            prop_assert_eq!(&read[..], &events[..events.len() - 1]);
        }
    }
}
