//! Shifted flows go on after a restart, with other workers, and through partners; what cannot go on ends by RST.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::flow::{FlowView, HeaderStage, ReplicaEvent, ShiftReplica, Tick};
use dataplane::forward::{About, FamilyInquiry, Inquired, Inquiry, Mailbox};
use dataplane::tcp_flags::{ACK, PSH, RST, SYN};
use dataplane::workers::Steering;
use dataplane::{DropReason, FlowFate, SavedAt, SavedFlows};
use proto::{Mode, Protocol, ProxyProtocol, Service, State};

use super::bridge::{Bridge, Kind, MILLISECOND, SERVER, Seg, header, set_proxy_protocol};
use crate::fleet::{ALL, Gateway, take_over, take_over_now};
use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK};
use crate::team::{Delivery, SEED, Team};

const AT: SavedAt = SavedAt { boot: [5; 16], boottime_ns: 1_000 * SECOND };

/// The bytes of a file with these parts.
fn file(parts: &[Vec<u8>]) -> Vec<u8> {
    let header = SavedFlows::header(SEED, true, AT, parts);
    [header].iter().chain(parts).flatten().copied().collect()
}

/// The next process of a gateway.
fn restarted(bridge: &Bridge) -> Bridge {
    let bytes = file(&[bridge.rig.worker.save(bridge.rig.now)]);
    let mut rig = Rig::before_state(1024);
    rig.now = bridge.rig.now;
    let saved = Arc::new(SavedFlows::read(bytes, AT, rig.now).unwrap());
    rig.worker.restore(Arc::clone(&saved));
    (rig.state, rig.network) = (bridge.rig.state.clone(), rig::network());
    rig.publish();
    assert_eq!(saved.report().count(FlowFate::Restored), 1);
    set_proxy_protocol(&mut rig, bridge.kind);
    Bridge { inside: bridge.inside, ..Bridge::with_rig(rig, bridge.kind) }
}

#[test]
fn a_restart_at_any_stage_changes_no_packet() {
    for kind in Kind::all() {
        let mut owed = Bridge::new(kind);
        owed.open(&[]);
        let mut owed = restarted(&owed);
        let ack = owed.of_client(ACK, 0, 3).with_window(77);
        assert_eq!(owed.client_sends(&ack).only_to_backend(), [owed.header_alone(3, &[]).with_window(77)], "{kind:?}: owed");

        let mut sent = restarted(&owed);
        let missing = sent.of_backend(ACK, 0, 0);
        let again = sent.header_alone(3, &[]).with_window(77);
        assert_eq!(sent.backend_sends(&missing).only_to_backend(), [again], "{kind:?}: sent");
        let taken = sent.of_backend(ACK, 0, sent.h());
        sent.backend_sends(&taken);

        let mut taken = restarted(&sent);
        let data = taken.of_client(ACK | PSH, 0, 0).with_data(b"data");
        let sequence = data.sequence.wrapping_add(taken.h());
        let expected = taken.inside_of(Seg { sequence, ..data.clone() });
        assert_eq!(taken.client_sends(&data).only_to_backend(), [expected], "{kind:?}: taken");
        let answer = taken.of_backend(ACK | PSH, 0, taken.h() + 4).with_data(b"more");
        let acknowledgement = taken.first().wrapping_add(4);
        let expected = taken.outside_of(Seg { acknowledgement, ..answer.clone() });
        assert_eq!(taken.backend_sends(&answer).one_to_client(), expected, "{kind:?}: taken");
    }
}

/// The state of the rig, whose services `web` and `dns` give their backends a header.
fn state_of(mode: Mode) -> State {
    let mut state = rig::state();
    for (name, service) in state.services.clone().into_iter().filter(|(name, _)| name.name != "node-port") {
        let mut changed = Service { mode, ..Service::clone(&service) };
        for port in changed.ports.iter_mut().filter(|port| port.protocol != Protocol::Sctp) {
            port.proxy_protocol = Some(ProxyProtocol::V2);
        }
        state.services.insert(name, Arc::new(changed));
    }
    state
}

/// A connection as both of its ends see it.
struct Connection {
    client: SocketAddr,
    vip: SocketAddr,
    inside: (SocketAddr, SocketAddr),
}

impl Connection {
    fn of_client(&self, flags: u8, sequence: u32) -> Seg {
        let (options, data, urgent) = (Vec::new(), Vec::new(), 0);
        let acknowledgement = if flags & ACK == 0 { 0 } else { SERVER + 1 };
        Seg { from: self.client, to: self.vip, flags, sequence, acknowledgement, window: 502, urgent, options, data }
    }

    fn of_backend(&self, flags: u8, sequence: u32, acknowledgement: u32) -> Seg {
        let (options, data, urgent) = (Vec::new(), Vec::new(), 0);
        Seg { from: self.inside.1, to: self.inside.0, flags, sequence, acknowledgement, window: 502, urgent, options, data }
    }
}

/// Packets that leave by the uplink and to the backends, for one that arrives.
fn put(team: &mut Team, port: dataplane::PortIndex, segment: &Seg) -> [Vec<Seg>; 2] {
    team.put(port, &[segment.packet().build()]);
    [UPLINK, CLUSTER].map(|port| team.sent(port).iter().map(|frame| Seg::of(frame)).collect())
}

const H: u32 = 28;

/// Connections of IPv4 clients, whose streams begin with number 1. `is_taken`: their backends have the header.
fn connections(team: &mut Team, count: u16, is_taken: bool) -> Vec<Connection> {
    let vip: SocketAddr = "192.0.2.100:80".parse().unwrap();
    let connect = |n: u16| {
        let client = SocketAddr::from(([198, 51, 100, 7], 5_000 + n));
        let mut connection = Connection { client, vip, inside: (client, vip) };
        let [_, syn] = put(team, UPLINK, &connection.of_client(SYN, 0));
        connection.inside = (syn[0].from, syn[0].to);
        put(team, CLUSTER, &connection.of_backend(SYN | ACK, SERVER, 1));
        let [_, ack] = put(team, UPLINK, &connection.of_client(ACK, 1));
        assert_eq!(ack[0].data, header(ProxyProtocol::V2, client, vip, true));
        if is_taken {
            let [acknowledged, _] = put(team, CLUSTER, &connection.of_backend(ACK, SERVER + 1, 1 + H));
            assert_eq!(acknowledged[0].acknowledgement, 1);
        }
        connection
    };
    (0..count).map(connect).collect()
}

/// Data goes both ways, with the numbers of its receivers.
fn go_on(team: &mut Team, connections: &[Connection], case: &str) {
    for connection in connections {
        let data = connection.of_client(ACK | PSH, 1).with_data(b"question");
        let [_, seen] = put(team, UPLINK, &data);
        let (from, to) = connection.inside;
        assert_eq!(seen, [Seg { from, to, sequence: 1 + H, ..data }], "{case}");
        let answer = connection.of_backend(ACK | PSH, SERVER + 1, 1 + H + 8).with_data(b"answer");
        let [seen, _] = put(team, CLUSTER, &answer);
        let (from, to) = (connection.vip, connection.client);
        assert_eq!(seen, [Seg { from, to, acknowledgement: 1 + 8, ..answer }], "{case}");
    }
}

fn workers(state: State, workers: u8) -> Team {
    Team::serving(state, Steering::own_hash(workers, SEED), Delivery::InTurn, workers)
}

#[test]
fn other_workers_go_on_with_what_backends_have() {
    for mode in [Mode::Nat, Mode::Dnat] {
        for (before, after) in [(1, 4), (4, 1), (3, 3)] {
            let case = format!("{mode:?}: {before} to {after}");
            let mut old = workers(state_of(mode), before);
            old.publish();
            old.settle();
            let taken = connections(&mut old, 40, true);
            let parts: Vec<_> = old.workers.iter().map(|worker| worker.save(old.now)).collect();
            let mut new = workers(state_of(mode), after);
            new.now = old.now;
            let saved = Arc::new(SavedFlows::read(file(&parts), AT, new.now).unwrap());
            new.workers.iter_mut().for_each(|worker| worker.restore(Arc::clone(&saved)));
            new.publish();
            new.settle();
            assert!(saved.report().count(FlowFate::Restored) >= 40, "{case}");
            go_on(&mut new, &taken, &case);
        }
    }
}

/// The stages of the headers of all flows, by client: two of a flow whose directions two workers own.
fn stages(team: &mut Team) -> HashMap<SocketAddr, Vec<HeaderStage>> {
    let mailboxes: Vec<_> = team.workers.iter().map(|_| Arc::new(Mailbox::new(None))).collect();
    let workers = std::mem::take(&mut team.workers).into_iter().zip(&mailboxes);
    team.workers = workers.map(|(worker, mailbox)| worker.answering(Arc::clone(mailbox))).collect();
    let question = || Inquired::V4(FamilyInquiry::new(About::Flows { from: 0 }));
    mailboxes.iter().for_each(|mailbox| mailbox.ask(Box::new(Inquiry::new(0, question()))).unwrap());
    team.poll();
    let mut stages = HashMap::<_, Vec<_>>::new();
    for mailbox in mailboxes {
        let answer = mailbox.take_answer().unwrap();
        let Inquired::V4(answered) = &answer.inquired else { panic!("an answer of the other family") };
        for view in answered.flows.iter().map(|flow| FlowView::of(flow, Tick::at(answer.now_ns))) {
            stages.entry(view.client).or_default().push(view.shift.unwrap().stage());
        }
    }
    stages
}

#[test]
fn the_halves_of_a_flow_whose_directions_two_workers_own_are_settled() {
    let mut old = workers(state_of(Mode::Nat), 1);
    old.publish();
    old.settle();
    connections(&mut old, 40, true);
    let parts: Vec<_> = old.workers.iter().map(|worker| worker.save(old.now)).collect();
    let mut new = workers(state_of(Mode::Nat), 4);
    new.now = old.now;
    let saved = Arc::new(SavedFlows::read(file(&parts), AT, new.now).unwrap());
    new.workers.iter_mut().for_each(|worker| worker.restore(Arc::clone(&saved)));
    new.publish();
    let stages = stages(&mut new);
    assert_eq!(stages.len(), 40);
    let (whole, halves): (Vec<_>, Vec<_>) = stages.values().partition(|stages| stages.len() == 1);
    assert!(!whole.is_empty() && !halves.is_empty(), "{stages:?}");
    assert!(whole.iter().all(|stages| ***stages == [HeaderStage::Taken]), "{stages:?}");
    assert!(halves.iter().all(|stages| ***stages == [HeaderStage::Settled; 2]), "{stages:?}");
}

#[test]
fn of_a_header_on_its_way_two_workers_know_nothing_and_reset_the_connection() {
    let mut old = workers(state_of(Mode::Nat), 1);
    old.publish();
    old.settle();
    let sent = connections(&mut old, 40, false);
    let parts: Vec<_> = old.workers.iter().map(|worker| worker.save(old.now)).collect();
    let mut new = workers(state_of(Mode::Nat), 4);
    new.now = old.now;
    let saved = Arc::new(SavedFlows::read(file(&parts), AT, new.now).unwrap());
    new.workers.iter_mut().for_each(|worker| worker.restore(Arc::clone(&saved)));
    new.publish();
    new.settle();
    assert!(saved.report().count(FlowFate::PortGone) > 0, "some would have two owners");
    let mut ends = HashMap::from([(true, 0), (false, 0)]);
    for connection in &sent {
        new.now += 20 * MILLISECOND;
        let [to_client, to_backend] = put(&mut new, UPLINK, &connection.of_client(ACK, 1));
        let is_reset = to_backend.is_empty();
        assert!(if is_reset { to_client[0].flags & RST != 0 } else { to_backend[0].sequence == 1 }, "{to_client:?}");
        *ends.get_mut(&is_reset).unwrap() += 1;
    }
    assert!(ends[&true] > 0 && ends[&false] > 0, "{ends:?}");
}

#[test]
fn partners_go_on_with_what_backends_have() {
    for mode in [Mode::Nat, Mode::Dnat] {
        let (mut a, mut b) = (gateway(mode, 7), gateway(mode, 8));
        a.own(ALL);
        let taken = connections(&mut a.team, 20, true);
        let case = format!("{mode:?}");
        a.pass(3);
        let events = a.sent();
        assert_eq!(events.len(), 20, "{case}");
        b.receive(&events);
        assert_eq!(b.flows(), 20, "{case}");
        take_over(&mut a, &mut b);
        go_on(&mut b.team, &taken, &case);
    }
}

fn gateway(mode: Mode, seed: u64) -> Gateway {
    Gateway::new(state_of(mode), 1, false, seed, 4096)
}

#[test]
fn partners_reset_what_they_do_not_know_and_are_told_nothing_of_a_header_on_its_way() {
    for mode in [Mode::Nat, Mode::Dnat] {
        let (mut a, mut b) = (gateway(mode, 7), gateway(mode, 8));
        a.own(ALL);
        let sent = connections(&mut a.team, 5, false);
        a.pass(30);
        assert_eq!(a.sent(), [], "{mode:?}");
        take_over(&mut a, &mut b);
        // A partner may still tell a flow for a while.
        b.pass(5);
        for connection in &sent {
            let [to_client, to_backend] = put(&mut b.team, UPLINK, &connection.of_client(ACK, 1));
            assert_eq!((to_client[0].flags, to_backend.len()), (RST, 0), "{mode:?}");
            let [to_client, to_backend] = put(&mut b.team, CLUSTER, &connection.of_backend(ACK, SERVER + 1, 1));
            assert_eq!((to_client.len(), to_backend[0].flags), (0, RST), "{mode:?}");
        }
    }
}

#[test]
fn a_gateway_resets_nothing_that_a_partner_may_know() {
    for mode in [Mode::Nat, Mode::Dnat] {
        let (mut a, mut b) = (gateway(mode, 7), gateway(mode, 8));
        b.replications.iter().for_each(|replication| replication.set_partners(true));
        a.own(ALL);
        let connections = connections(&mut a.team, 5, false);
        b.team.now = a.team.now;
        let of_both = |b: &mut Gateway, connection: &Connection| {
            let of_backend = put(&mut b.team, CLUSTER, &connection.of_backend(ACK, SERVER + 1, 1));
            let of_client = put(&mut b.team, UPLINK, &connection.of_client(ACK, 1));
            [of_backend, of_client].concat().concat()
        };
        for connection in &connections {
            assert_eq!(of_both(&mut b, connection), [], "{mode:?}: it owns nothing");
        }
        assert_eq!(b.team.drops(DropReason::NoFlow), 10, "{mode:?}");
        take_over_now(&mut a, &mut b);
        for connection in &connections {
            assert_eq!(of_both(&mut b, connection), [], "{mode:?}: it took the group a moment ago");
        }
        assert_eq!(b.team.drops(DropReason::FlowAwaited), 10, "{mode:?}");
    }
}

#[test]
fn numbers_are_right_after_a_group_returns() {
    for mode in [Mode::Nat, Mode::Dnat] {
        let (mut a, mut b) = (gateway(mode, 7), gateway(mode, 8));
        a.own(ALL);
        let taken = connections(&mut a.team, 5, true);
        a.pass(3);
        let events = a.sent();
        b.receive(&events);
        take_over(&mut a, &mut b);
        go_on(&mut b.team, &taken, "at the partner");
        // The partner sends them again as they carry packets.
        a.receive(&events);
        take_over(&mut b, &mut a);
        // Most of 4 GB went up meanwhile.
        let far = 3 << 30;
        for connection in &taken {
            let [seen, _] = put(&mut a.team, CLUSTER, &connection.of_backend(ACK, SERVER + 7, 1 + H + far));
            assert_eq!(seen[0].acknowledgement, 1 + far, "{mode:?}");
        }
    }
}

#[test]
fn a_replica_with_another_header_takes_the_place_of_a_shadow() {
    for before in [None, Some(ProxyProtocol::V1)] {
        let (mut a, mut b) = (gateway(Mode::Nat, 7), gateway(Mode::Nat, 8));
        a.own(ALL);
        let taken = connections(&mut a.team, 5, true);
        a.pass(3);
        let events = a.sent();
        for event in &events {
            let mut flow = *event.flow();
            let header = before.map(|version| header(version, flow.client, flow.frontend, true));
            let shift = before.zip(header).map(|(version, header)| (version, u8::try_from(header.len()).unwrap()));
            flow.shift = shift.map(|(version, header_len)| ShiftReplica { version, header_len });
            b.receive(&[ReplicaEvent::Holds(flow)]);
        }
        b.receive(&events);
        assert_eq!((b.flows(), b.count(|replication| replication.refused().get())), (5, 0), "{before:?}");
        take_over(&mut a, &mut b);
        go_on(&mut b.team, &taken, "with the header that its owner told last");
    }
}

#[test]
fn a_connection_that_begins_anew_is_not_sent_before_its_backend_has_the_header() {
    let mut a = gateway(Mode::Nat, 7);
    a.own(ALL);
    let connection = connections(&mut a.team, 1, true).remove(0);
    a.pass(3);
    assert_eq!(a.sent().len(), 1);
    let holds = |a: &Gateway| a.sent().iter().filter(|event| matches!(event, ReplicaEvent::Holds(_))).count();
    put(&mut a.team, UPLINK, &connection.of_client(RST, 1));
    a.pass(1);
    a.sent();
    let syn = Seg { acknowledgement: 0, ..connection.of_client(SYN, 0x100) };
    let [_, seen] = put(&mut a.team, UPLINK, &syn);
    assert_eq!((seen[0].from, seen[0].to), connection.inside);
    a.pass(1);
    // Until the backend answers the SYN, the flow is that of the connection before.
    a.sent();
    put(&mut a.team, CLUSTER, &connection.of_backend(SYN | ACK, SERVER, 0x101));
    a.pass(1);
    let [_, seen] = put(&mut a.team, UPLINK, &connection.of_client(ACK, 0x101));
    assert_eq!(seen[0].data.len(), H as usize);
    a.pass(20);
    assert_eq!(holds(&a), 0, "the header is on its way");
    put(&mut a.team, CLUSTER, &connection.of_backend(ACK, SERVER + 1, 0x101 + H));
    a.pass(20);
    assert!(holds(&a) > 0);
}

#[test]
fn a_replica_whose_header_cannot_be_that_of_its_flow_is_refused() {
    let (mut a, mut b) = (gateway(Mode::Nat, 7), gateway(Mode::Nat, 8));
    a.own(ALL);
    connections(&mut a.team, 1, true);
    a.pass(3);
    let events = a.sent();
    let ReplicaEvent::Holds(mut flow) = events[0] else { panic!("{events:?}") };
    flow.shift.as_mut().unwrap().header_len = 52;
    b.receive(&[ReplicaEvent::Holds(flow)]);
    assert_eq!((b.flows(), b.count(|replication| replication.refused().get())), (0, 1));
    b.receive(&events);
    assert_eq!(b.flows(), 1);
}

#[test]
fn the_header_of_a_flow_is_shown_with_it() {
    let shown = |bridge: &mut Bridge| {
        let answer = bridge.rig.ask(Inquired::V4(FamilyInquiry::new(About::Flows { from: 0 })));
        let Inquired::V4(answered) = &answer.inquired else { panic!("an answer of the other family") };
        let shift = FlowView::of(&answered.flows[0], Tick::at(answer.now_ns)).shift.unwrap();
        (shift.stage(), shift.header_len(), shift.version())
    };
    let mut bridge = Bridge::new(Kind::V2);
    bridge.open(&[]);
    assert_eq!(shown(&mut bridge), (HeaderStage::Owed, 28, ProxyProtocol::V2));
    bridge.client_sends(&bridge.of_client(ACK, 0, 0));
    assert_eq!(shown(&mut bridge), (HeaderStage::Sent, 28, ProxyProtocol::V2));
    bridge.backend_sends(&bridge.of_backend(ACK, 0, 28));
    assert_eq!(shown(&mut bridge), (HeaderStage::Taken, 28, ProxyProtocol::V2));
}
