//! What packets may change that somebody off the path sends in the name of a client (FORWARDING 2): nothing but counters
//! and, at most, a timer that the genuine peer's next packet restores. One row for each protocol, state, mode and kind of
//! forged packet. Packets in the name of a backend arrive by another port than the backend's, and are dropped.

use std::net::SocketAddr;

use dataplane::testing::Packet;
use dataplane::{DropReason, PacketOutcome, tcp_flags};
use proto::Mode;

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, ends};

const ACK: u8 = tcp_flags::ACK;
const FIN: u8 = tcp_flags::FIN;
const PSH: u8 = tcp_flags::PSH;
const RST: u8 = tcp_flags::RST;
const SYN: u8 = tcp_flags::SYN;

const MINUTE: u64 = 60 * SECOND;
const MILLISECOND: u64 = SECOND / 1000;

/// Client, VIP of TCP, VIP of UDP.
const FAMILIES: [[&str; 3]; 2] = [
    ["198.51.100.7:5555", "192.0.2.100:80", "192.0.2.101:53"],
    ["[2001:db8:1::7]:5555", "[2001:db8::1:0]:80", "[2001:db8::1:1]:53"],
];

/// Sequence numbers of the genuine ends. The client's wraps soon.
const CLIENT_FIRST: u32 = u32::MAX - 20;
const BACKEND_FIRST: u32 = 0x1234_5678;

/// What forged segments have for numbers: far from those of the connection, in the window, and just before it. None has
/// the very number that the backend awaits: the backend itself believes that.
const NUMBERS: [(u32, u32); 3] = [
    (0x7777_7777, 0x8888_8888),
    (CLIENT_FIRST.wrapping_add(700), 3),
    (CLIENT_FIRST.wrapping_sub(5), BACKEND_FIRST.wrapping_add(500)),
];

/// What a stranger sends, one segment a millisecond.
const FORGED: [(&str, &[u8]); 12] = [
    ("a RST", &[RST]),
    ("a RST with ACK", &[RST | ACK]),
    ("a FIN", &[FIN | ACK]),
    ("a FIN without ACK", &[FIN]),
    ("a SYN", &[SYN]),
    ("two SYNs", &[SYN, SYN]),
    ("a SYN-ACK", &[SYN | ACK]),
    ("an ACK", &[ACK]),
    ("data", &[ACK | PSH]),
    ("a RST, then a SYN", &[RST, SYN]),
    ("a FIN, then a SYN", &[FIN | ACK, SYN]),
    ("a FIN, a RST, data, a SYN and another FIN", &[FIN | ACK, RST, ACK | PSH, SYN, FIN | ACK]),
];

/// How far a genuine TCP connection in a two-way mode is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Opening,
    Answered,
    Established,
    /// The client has sent a FIN.
    FinOfClient,
    /// The backend has acknowledged it.
    HalfClosedByClient,
    /// The backend has closed its half.
    HalfClosedByBackend,
}

const STAGES: [Stage; 6] = [
    Stage::Opening,
    Stage::Answered,
    Stage::Established,
    Stage::FinOfClient,
    Stage::HalfClosedByClient,
    Stage::HalfClosedByBackend,
];

/// A genuine connection through a gateway, as both ends see it.
struct Genuine {
    rig: Rig,
    client: SocketAddr,
    vip: SocketAddr,
    /// The client as the backend sees it, and the backend.
    seen: (SocketAddr, SocketAddr),
    client_next: u32,
    backend_next: u32,
    /// What the gateway had sent of its own before: announcements.
    announced: u64,
}

impl Genuine {
    fn begin(mode: Mode, [client, vip, _]: [&str; 3]) -> Self {
        let mut rig = Rig::with_mode(mode);
        let (client, vip) = (client.parse().unwrap(), vip.parse().unwrap());
        let seen = ends(&rig.forward(UPLINK, &segment(client, vip, SYN, CLIENT_FIRST, 0, b"")));
        let announced = rig.counters.originated.get();
        let [client_next, backend_next] = [CLIENT_FIRST, BACKEND_FIRST].map(|first| first.wrapping_add(1));
        Self { rig, client, vip, seen, client_next, backend_next, announced }
    }

    fn at(mode: Mode, family: [&str; 3], stage: Stage) -> Self {
        let mut genuine = Self::begin(mode, family);
        let steps = STAGES.iter().take_while(|step| **step != stage).count();
        let half = stage == Stage::HalfClosedByBackend;
        for step in 0..if half { 2 } else { steps } {
            genuine.step(step);
        }
        if half {
            genuine.backend_says(FIN | ACK, b"");
        }
        genuine
    }

    /// The packet that leads from one stage to the next.
    fn step(&mut self, step: usize) {
        match step {
            0 => self.syn_ack(),
            1 => self.client_says(ACK, b""),
            2 => self.client_says(FIN | ACK, b"bye"),
            _ => self.backend_says(ACK, b""),
        }
    }

    fn syn_ack(&mut self) {
        let (snat, backend) = self.seen;
        let sent = self.rig.forward(CLUSTER, &segment(backend, snat, SYN | ACK, BACKEND_FIRST, self.client_next, b""));
        assert_eq!(ends(&sent), (self.vip, self.client));
    }

    /// A genuine segment of the client reaches the same backend from the same port.
    fn client_says(&mut self, flags: u8, data: &[u8]) {
        let sent = self.rig.forward(UPLINK, &segment(self.client, self.vip, flags, self.client_next, self.backend_next, data));
        assert_eq!(ends(&sent), self.seen);
        self.client_next = next(self.client_next, flags, data);
    }

    /// A genuine segment of the backend reaches the client.
    fn backend_says(&mut self, flags: u8, data: &[u8]) {
        let (snat, backend) = self.seen;
        let sent = self.rig.forward(CLUSTER, &segment(backend, snat, flags, self.backend_next, self.client_next, data));
        assert_eq!(ends(&sent), (self.vip, self.client));
        self.backend_next = next(self.backend_next, flags, data);
    }

    /// A stranger sends these segments. Nothing leaves but these, to the same backend from the same port.
    fn forge(&mut self, flags: &[u8], (sequence, acknowledgement): (u32, u32)) {
        for flags in flags {
            let data: &[u8] = if flags & PSH == 0 { b"" } else { b"forged" };
            let forged = segment(self.client, self.vip, *flags, sequence, acknowledgement, data);
            let outcome = self.rig.put(UPLINK, &forged);
            assert_eq!(outcome, Some(PacketOutcome::Forward(CLUSTER)));
            let sent: Vec<_> = self.rig.sent(CLUSTER).iter().map(|frame| ends(frame)).collect();
            assert_eq!((sent, self.rig.sent(UPLINK).len()), (vec![self.seen], 0));
            self.rig.now += MILLISECOND;
        }
        // Nor does anybody but the backend speak in its name.
        let (snat, backend) = self.seen;
        let of_backend = segment(backend, snat, RST | ACK, sequence, acknowledgement, b"");
        assert_eq!(self.rig.put(UPLINK, &of_backend), Some(PacketOutcome::Drop(DropReason::SnatWrongPort)));
        assert!(self.rig.sent(CLUSTER).is_empty() && self.rig.sent(UPLINK).is_empty());
    }

    /// The rest of the connection, from this stage on, with long pauses. Its flow ends within so many seconds after it.
    fn finish(&mut self, stage: Stage, ends_within: u64) {
        let step = STAGES.iter().position(|other| *other == stage).unwrap();
        if step < 2 {
            (step..2).for_each(|step| self.step(step));
        }
        if step <= 2 {
            self.backend_says(ACK | PSH, b"200 OK");
            self.rig.now += 124 * MINUTE;
            self.client_says(ACK, b"");
            self.backend_says(ACK, b"");
            self.rig.now += 124 * MINUTE;
            self.backend_says(ACK, b"");
            self.client_says(FIN | ACK, b"bye");
        }
        if stage == Stage::HalfClosedByBackend {
            self.client_says(ACK | PSH, b"more");
            self.backend_says(ACK, b"");
            self.rig.now += 4 * MINUTE;
            self.client_says(FIN | ACK, b"");
            self.backend_says(ACK, b"");
        } else {
            self.backend_says(ACK | PSH, b"more");
            self.rig.now += 4 * MINUTE;
            self.client_says(ACK, b"");
            self.backend_says(FIN | ACK, b"");
            self.client_says(ACK, b"");
        }
        let counters = &self.rig.counters;
        let originated = counters.originated.get() - self.announced;
        assert_eq!((counters.new_flows.get(), counters.flows.get(), originated), (1, 1, 0));
        // A normal end gives port and memory back soon.
        for _ in 0..ends_within * 4 {
            self.rig.now += SECOND / 4;
            self.rig.worker.poll(self.rig.now);
        }
        assert_eq!(self.rig.counters.flows.get(), 0, "it ended");
    }
}

fn next(number: u32, flags: u8, data: &[u8]) -> u32 {
    number.wrapping_add(u32::try_from(data.len()).unwrap()).wrapping_add(u32::from(flags & FIN != 0))
}

fn segment(from: SocketAddr, to: SocketAddr, flags: u8, sequence: u32, acknowledgement: u32, data: &[u8]) -> Vec<u8> {
    Packet::tcp(&from.to_string(), &to.to_string()).flags(flags).numbers(sequence, acknowledgement).payload(data).build()
}

/// Whether a SYN begins a new flow, since the backend has closed: the only forged packet that may.
fn begins_anew(stage: Stage, flags: &[u8]) -> bool {
    stage == Stage::HalfClosedByBackend && flags.contains(&SYN)
}

#[test]
fn tcp_whatever_is_forged_at_whatever_stage_the_connection_goes_on_by_the_same_flow_and_port_to_its_end() {
    for (mode, family) in [Mode::Nat, Mode::Dnat].into_iter().flat_map(|mode| FAMILIES.map(|family| (mode, family))) {
        for stage in STAGES {
            for (sentence, flags) in FORGED.into_iter().filter(|(_, flags)| !begins_anew(stage, flags)) {
                for numbers in NUMBERS {
                    println!("{mode} {stage:?}: {sentence} {numbers:x?}");
                    let mut genuine = Genuine::at(mode, family, stage);
                    genuine.forge(flags, numbers);
                    // A forged FIN between that of the client and its acknowledgement hides it: the flow lasts longer.
                    let is_hidden = stage == Stage::FinOfClient && flags.iter().any(|flags| flags & FIN != 0);
                    genuine.finish(stage, if is_hidden { 311 } else { 21 });
                }
            }
        }
    }
}

#[test]
fn tcp_a_forged_end_of_a_silent_connection_leaves_four_minutes_for_either_side_to_go_on() {
    for (mode, family) in [Mode::Nat, Mode::Dnat].into_iter().flat_map(|mode| FAMILIES.map(|family| (mode, family))) {
        for (sentence, flags) in FORGED {
            println!("{mode}: {sentence}");
            for by_client in [false, true] {
                let mut genuine = Genuine::at(mode, family, Stage::Established);
                genuine.forge(flags, NUMBERS[0]);
                genuine.rig.now += 239 * SECOND;
                if by_client {
                    genuine.client_says(ACK | PSH, b"still here");
                }
                genuine.backend_says(ACK, b"");
                genuine.finish(Stage::Established, 21);
            }
        }
    }
}

/// A keep-alive that finds no gateway's flow any more would be answered by our RST.
#[test]
fn tcp_a_keep_alive_that_linux_sends_after_two_hours_finds_its_connection() {
    for by_client in [false, true] {
        let mut genuine = Genuine::at(Mode::Nat, FAMILIES[0], Stage::Established);
        for _ in 0..3 {
            for _ in 0..7_211 {
                genuine.rig.now += SECOND;
                genuine.rig.worker.poll(genuine.rig.now);
            }
            if by_client {
                genuine.client_says(ACK, b"");
            } else {
                genuine.backend_says(ACK, b"");
            }
        }
    }
}

/// A backend in TIME_WAIT answers a SYN with an older number by a bare ACK. The client answers that by a RST, which ends
/// TIME_WAIT, and repeats its SYN after 10 ms (RFC 9293 section 3.10.7.3).
#[test]
fn tcp_on_a_port_that_was_reused_early_the_syn_that_follows_the_clients_reset_leaves_by_the_same_flow_and_port() {
    for mode in [Mode::Nat, Mode::Dnat] {
        for family in FAMILIES {
            let mut genuine = Genuine::begin(mode, family);
            let (snat, backend) = genuine.seen;
            let challenge = segment(backend, snat, ACK, 0x9999_0000, 0x1111_0000, b"");
            assert_eq!(ends(&genuine.rig.forward(CLUSTER, &challenge)), (genuine.vip, genuine.client));
            let reset = segment(genuine.client, genuine.vip, RST, 0x1111_0000, 0, b"");
            assert_eq!(ends(&genuine.rig.forward(UPLINK, &reset)), genuine.seen);
            genuine.rig.now += 10 * MILLISECOND;
            let again = segment(genuine.client, genuine.vip, SYN, CLIENT_FIRST, 0, b"");
            assert_eq!(ends(&genuine.rig.forward(UPLINK, &again)), genuine.seen);
            genuine.finish(Stage::Opening, 21);
        }
    }
}

/// A client that was killed, and comes back from its port: its backend answers its SYN by a challenge ACK, it answers that
/// by a RST, and its next SYN opens a connection (RFC 9293 section 3.5.1).
#[test]
fn tcp_a_client_that_comes_back_from_the_port_of_a_connection_that_it_has_forgotten_is_served_by_the_same_flow() {
    for stage in [Stage::Established, Stage::FinOfClient, Stage::HalfClosedByClient] {
        for mode in [Mode::Nat, Mode::Dnat] {
            let mut genuine = Genuine::at(mode, FAMILIES[0], stage);
            let (number, syn_of) =
                (0x4242_0000, |genuine: &Genuine| segment(genuine.client, genuine.vip, SYN, 0x4242_0000, 0, b""));
            let syn = syn_of(&genuine);
            assert_eq!(ends(&genuine.rig.forward(UPLINK, &syn)), genuine.seen);
            genuine.backend_says(ACK, b"");
            let reset = segment(genuine.client, genuine.vip, RST, genuine.client_next, 0, b"");
            assert_eq!(ends(&genuine.rig.forward(UPLINK, &reset)), genuine.seen);
            assert_eq!(ends(&genuine.rig.forward(UPLINK, &syn)), genuine.seen, "{stage:?}");
            genuine.client_next = number + 1;
            genuine.backend_next = BACKEND_FIRST.wrapping_add(1);
            genuine.finish(Stage::Opening, 21);
        }
    }
}

#[test]
fn tcp_after_its_backend_has_ended_it_the_clients_next_syn_begins_a_new_flow() {
    let rows: [(&str, &[(bool, u8)]); 4] = [
        ("a RST of the backend", &[(false, RST | ACK)]),
        ("a FIN of the backend", &[(false, FIN | ACK)]),
        ("the FINs of both, the client first", &[(true, FIN | ACK), (false, FIN | ACK), (true, ACK)]),
        ("the FINs of both, the backend first", &[(false, FIN | ACK), (true, FIN | ACK), (false, ACK)]),
    ];
    for (sentence, packets) in rows {
        let mut genuine = Genuine::at(Mode::Nat, FAMILIES[0], Stage::Established);
        for (by_client, flags) in packets {
            if *by_client { genuine.client_says(*flags, b"") } else { genuine.backend_says(*flags, b"") }
        }
        let again = segment(genuine.client, genuine.vip, SYN, 99, 0, b"");
        assert_ne!(ends(&genuine.rig.forward(UPLINK, &again)).0, genuine.seen.0, "{sentence}");
        assert_eq!((genuine.rig.counters.new_flows.get(), genuine.rig.counters.flows.get()), (2, 1));
    }
}

#[test]
fn tcp_a_syn_on_a_flow_that_only_its_client_has_closed_leaves_a_backend_that_takes_no_new_flows() {
    for flags in [&[][..], &[FIN | ACK], &[RST]] {
        let mut genuine = Genuine::at(Mode::Nat, FAMILIES[0], Stage::Established);
        let backend = genuine.seen.1;
        flags.iter().for_each(|flags| genuine.client_says(*flags, b""));
        let drain = |service: &mut proto::Service| {
            let backends = service.ports.iter_mut().flat_map(|port| &mut port.backends);
            backends.filter(|one| one.address == backend).for_each(|one| one.state = proto::BackendState::Draining);
        };
        genuine.rig.change_service(&proto::ServiceName::new("default", "web"), drain);
        let again = segment(genuine.client, genuine.vip, SYN, 99, 0, b"");
        let moved = ends(&genuine.rig.forward(UPLINK, &again)).1 != backend;
        assert_eq!(moved, !flags.is_empty(), "{flags:?}");
    }
}

/// In one-way modes the backend is never seen. A flow begins anew only when it has been silent for longer than its limit.
#[test]
fn tcp_in_one_way_modes_whatever_is_forged_the_clients_next_packet_restores_its_flow() {
    let [client, vip, _] = FAMILIES[0].map(|text| text.parse::<SocketAddr>().unwrap());
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        for (sentence, flags) in FORGED {
            for numbers in NUMBERS {
                let mut rig = Rig::with_mode(mode);
                let genuine = |rig: &mut Rig, flags, number: u32| {
                    rig.forward(UPLINK, &segment(client, vip, flags, CLIENT_FIRST.wrapping_add(number), 9, b""));
                };
                genuine(&mut rig, SYN, 0);
                rig.now += 2 * SECOND;
                genuine(&mut rig, ACK, 1);
                genuine(&mut rig, ACK, 1);
                for flags in flags {
                    rig.forward(UPLINK, &segment(client, vip, *flags, numbers.0, numbers.1, b""));
                }
                rig.now += 239 * SECOND;
                // Beyond what was forged within the window, as the client sends more.
                genuine(&mut rig, ACK, 1_000);
                rig.now += 14 * MINUTE;
                genuine(&mut rig, ACK, 1_000);
                assert_eq!((rig.counters.new_flows.get(), rig.counters.flows.get()), (1, 1), "{mode}: {sentence} {numbers:x?}");
            }
        }
    }
}

#[test]
fn udp_whatever_is_forged_datagrams_of_both_ends_keep_their_flow() {
    for (mode, [client, _, vip]) in [Mode::Nat, Mode::Dnat].into_iter().flat_map(|mode| FAMILIES.map(|family| (mode, family))) {
        // How often both ends have sent before.
        for rounds in 0..3 {
            let mut rig = Rig::with_mode(mode);
            let ask = |rig: &mut Rig, data: &[u8]| ends(&rig.forward(UPLINK, &Packet::udp(client, vip).payload(data).build()));
            let announced = rig.counters.originated.get();
            let seen = ask(&mut rig, b"genuine");
            let reply = Packet::udp(&seen.1.to_string(), &seen.0.to_string()).payload(b"answer").build();
            let back = |rig: &mut Rig| assert_eq!(ends(&rig.forward(CLUSTER, &reply)).1, client.parse().unwrap());
            for _ in 0..rounds {
                back(&mut rig);
                assert_eq!(ask(&mut rig, b"genuine"), seen);
            }
            for size in [0, 1, 8, 12, 1_000] {
                assert_eq!(ask(&mut rig, &vec![7; size]), seen, "{mode} {rounds}");
            }
            // Nobody but the backend answers.
            assert_eq!(rig.put(UPLINK, &reply), Some(PacketOutcome::Drop(DropReason::SnatWrongPort)));
            rig.now += 29 * SECOND;
            back(&mut rig);
            assert_eq!(ask(&mut rig, b"genuine"), seen);
            rig.now += 119 * SECOND;
            back(&mut rig);
            let counters = &rig.counters;
            assert_eq!((counters.new_flows.get(), counters.flows.get(), counters.originated.get() - announced), (1, 1, 0));
        }
    }
}
