//! Gateways that replicate flows: what they tell, what they keep of each other, and how connections go on through
//! another gateway after VIP groups have moved (docs/internals/decisions/0060-shadow-flows.md).

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dataplane::flow::{FlowEnd, FlowEvent, FlowState, FlowWatch, ReplicaEvent, WatchedEvent};
use dataplane::forward::{Inquired, Inquiry, Mailbox};
use dataplane::testing::{Packet, arp_request};
use dataplane::{DropReason, tcp_flags};
use proto::{Announce, Mode, Service, ServiceName, State, vip_group};

use crate::fleet::{ALL, DATA, FIN, GROUPS, Gateway, NONE, SNAT, new_clients, take_over};
use crate::rig::{CLUSTER, SECOND, UPLINK, ends, ip, service, state};
use crate::team::clients;

type Ends = HashMap<String, (SocketAddr, SocketAddr)>;

#[test]
fn connections_go_on_through_the_next_owner_from_the_first_packet_and_back_again() {
    let clients = clients(90);
    for (first, second) in [((1, false), (1, false)), ((1, false), (4, false)), ((3, true), (2, true)), ((4, true), (3, false))] {
        let case = format!("{first:?} to {second:?}");
        let mut a = Gateway::new(state(), first.0, first.1, 7, 4096);
        let mut b = Gateway::new(state(), second.0, second.1, 8, 4096);
        a.own(ALL);
        let seen = a.team.establish(&clients);
        a.pass(3);
        let events = a.sent();
        assert_eq!(events.len(), 90, "each flow once: {case}");
        b.receive(&events);
        assert_eq!(b.count(|replication| replication.refused().get()), 0);
        assert!(b.flows() >= 90 && b.count(|replication| replication.applied().get()) == b.flows());
        take_over(&mut a, &mut b);
        assert_eq!(b.team.towards_backends(&clients, DATA), seen, "{case}");
        b.team.answered(&seen, DATA);
        // The new owner tells what it has made itself. The roles have changed.
        let more = new_clients(20);
        let later = b.team.establish(&more);
        assert!(later.values().all(|ends| !seen.values().any(|other| other == ends)), "{case}");
        b.pass(3);
        let events = b.sent();
        assert_eq!(events.len(), 20, "{case}");
        a.receive(&events);
        take_over(&mut b, &mut a);
        assert_eq!(a.team.towards_backends(&clients, DATA), seen, "{case}");
        assert_eq!(a.team.towards_backends(&more, DATA), later, "{case}");
        a.team.answered(&seen, DATA);
        a.team.answered(&later, DATA);
    }
}

#[test]
fn streams_of_udp_and_connections_of_mode_dnat_go_on() {
    for mode in [Mode::Nat, Mode::Dnat] {
        let mut state = state();
        for (name, service) in state.services.clone() {
            state.services.insert(name, Arc::new(Service { mode, ..Service::clone(&service) }));
        }
        let (mut a, mut b) = (Gateway::new(state.clone(), 2, false, 7, 4096), Gateway::new(state, 3, false, 8, 4096));
        a.own(ALL);
        let clients = clients(20);
        let seen = a.team.establish(&clients);
        let datagrams: Vec<_> =
            (0..20).map(|n| Packet::udp(&format!("198.51.100.{}:{}", n + 1, 4000 + n), "192.0.2.101:53").build()).collect();
        let send = |gateway: &mut Gateway| {
            gateway.team.put(UPLINK, &datagrams);
            gateway.team.sent(CLUSTER).iter().map(|frame| ends(frame)).collect::<HashSet<_>>()
        };
        let streams = send(&mut a);
        let replies: Vec<_> =
            streams.iter().map(|(snat, backend)| Packet::udp(&backend.to_string(), &snat.to_string()).build()).collect();
        a.team.put(CLUSTER, &replies);
        assert_eq!((a.team.sent(UPLINK).len(), send(&mut a).len()), (20, 20));
        a.pass(3);
        b.receive(&a.sent());
        take_over(&mut a, &mut b);
        assert_eq!(send(&mut b), streams, "{mode:?}");
        b.team.put(CLUSTER, &replies);
        assert_eq!(b.team.sent(UPLINK).len(), 20, "{mode:?}");
        assert_eq!(b.team.towards_backends(&clients, DATA), seen, "{mode:?}");
        b.team.answered(&seen, DATA);
    }
}

#[test]
fn what_waits_in_the_queue_when_a_group_moves_is_applied_before() {
    let (mut a, mut b) = (Gateway::small(7), Gateway::small(8));
    a.own(ALL);
    let clients = clients(500);
    let seen = a.team.establish(&clients);
    a.pass(3);
    b.team.now = a.team.now;
    for event in a.sent() {
        assert!(b.replications[0].give(event));
    }
    assert_eq!(b.flows(), 0);
    a.own(NONE);
    b.own(ALL);
    assert_eq!(b.team.towards_backends(&clients, DATA), seen);
    // A gateway that was stopped finds what the next owner has told meanwhile.
    let (mut a, mut b) = (Gateway::small(7), Gateway::small(8));
    a.own(ALL);
    b.own(ALL);
    let seen = b.team.establish(&clients);
    b.pass(3);
    a.team.now = b.team.now;
    for event in b.sent() {
        assert!(a.replications[0].give(event));
    }
    (0..GROUPS).for_each(|group| a.ownership.end(group));
    a.own(NONE);
    assert_eq!(a.count(|replication| replication.refused().get()), 0);
    take_over(&mut b, &mut a);
    assert_eq!(a.team.towards_backends(&clients, DATA), seen);
}

#[test]
fn a_flow_has_records_where_it_carries_packets() {
    let (mut a, mut b) = (Gateway::small(7), Gateway::small(8));
    a.own(ALL);
    let clients = clients(6);
    let (silent, going_on) = clients.split_at(2);
    let seen = a.team.establish(&clients);
    a.pass(3);
    b.receive(&a.sent());
    a.team.abort(silent);
    a.pass(22);
    b.receive(&a.sent());
    assert_eq!((b.flows(), b.records()), (4, Vec::new()), "neither that they began nor that two have ended");
    take_over(&mut a, &mut b);
    b.team.towards_backends(going_on, DATA);
    b.team.abort(&going_on[1..]);
    b.pass(22);
    let records = b.records();
    assert_eq!(records.len(), 3);
    for record in records {
        let (snat, backend) = seen[&record.flow.client.to_string()];
        assert_eq!((record.flow.snat, record.flow.backend_address), (Some(snat), backend));
        assert_eq!((record.event, record.to_backend.packets), (FlowEvent::End(FlowEnd::Rst), 2));
    }
}

#[test]
fn a_watch_tells_of_flows_of_the_gateway_alone() {
    let (mut a, mut b) = (Gateway::small(7), Gateway::small(8));
    let (watch, mailbox) = (Arc::new(FlowWatch::default()), Arc::new(Mailbox::new(None)));
    let worker = b.team.workers.remove(0).answering(Arc::clone(&mailbox));
    b.team.workers.push(worker);
    mailbox.ask(Box::new(Inquiry::new(0, Inquired::Watch(Some(Arc::clone(&watch)))))).unwrap();
    b.team.poll();
    watch.want_events(true);
    a.own(ALL);
    let clients = new_clients(10);
    a.team.establish(&clients);
    a.pass(3);
    let events = a.sent();
    b.team.now = a.team.now;
    b.receive(&events);
    assert_eq!(b.flows(), 10);
    let ends: Vec<_> = events[..5].iter().map(|event| ReplicaEvent::Ended(*event.flow())).collect();
    b.receive(&ends);
    assert_eq!(b.flows(), 5);
    assert_eq!(watch.take(), None, "flows of a partner");
    // From now on they are its own.
    take_over(&mut a, &mut b);
    let is_end = |event: &WatchedEvent| matches!(event, WatchedEvent::End(..));
    let left: Vec<_> = events[5..].iter().map(|event| (event.flow().client.to_string(), "192.0.2.100:80")).collect();
    b.team.abort(&left);
    b.pass(60);
    assert_eq!(b.flows(), 0);
    assert_eq!(std::iter::from_fn(|| watch.take()).filter(|one| is_end(&one.event)).count(), 5);
}

#[test]
fn a_flow_is_told_once_it_is_confirmed_and_a_second_old() {
    let mut a = Gateway::small(7);
    a.own(ALL);
    let opening: Vec<_> = new_clients(5);
    a.team.towards_backends(&opening, tcp_flags::SYN);
    a.team.establish(&clients(6));
    (0..7).for_each(|_| {
        a.team.now += SECOND / 8;
        a.team.poll();
    });
    assert_eq!(a.sent(), [], "none is a second old");
    a.pass(1);
    let told = a.sent();
    assert_eq!(told.len(), 6, "handshakes are not told");
    let established =
        |event: &ReplicaEvent| matches!(event, ReplicaEvent::Holds(flow) if flow.state == FlowState::TcpEstablished);
    assert!(told.iter().all(established), "{told:?}");
    assert_eq!(a.count(|replication| replication.sent().get()), 6);
    a.pass(20);
    assert_eq!(a.sent(), [], "nothing has changed");
}

#[test]
fn a_flow_that_carries_packets_is_told_again_and_lives_on_at_the_partner() {
    let mut a = Gateway::small(7);
    let mut b = Gateway::small(8);
    a.own(ALL);
    let clients = clients(4);
    let seen = a.team.establish(&clients);
    let one = &clients[..1];
    // The limit of 2 hours and the interval of 10 minutes: the others are silent, and end.
    for _ in 0..16 {
        a.pass(600);
        b.pass(600);
        a.team.towards_backends(one, DATA);
        b.receive(&a.sent());
    }
    assert_eq!((a.flows(), b.flows()), (1, 1), "the others have ended at the owner and then here");
    take_over(&mut a, &mut b);
    assert_eq!(b.team.towards_backends(one, DATA)[&one[0].0], seen[&one[0].0]);
}

#[test]
fn a_flow_ends_at_the_partner_with_its_state_and_with_itself() {
    let mut a = Gateway::small(7);
    let mut b = Gateway::small(8);
    a.own(ALL);
    let clients = clients(8);
    let seen = a.team.establish(&clients);
    a.pass(3);
    b.receive(&a.sent());
    assert_eq!(b.flows(), 8);
    a.team.towards_backends(&clients, FIN);
    a.team.answered(&seen, FIN);
    a.pass(9);
    let events = a.sent();
    let states: HashSet<FlowState> = events.iter().map(|event| event.flow().state).collect();
    assert!(states.contains(&FlowState::TcpClosing), "{states:?}");
    b.receive(&events);
    a.pass(12);
    let events = a.sent();
    assert_eq!(events.iter().filter(|event| matches!(event, ReplicaEvent::Ended(_))).count(), 8);
    b.receive(&events);
    assert_eq!((a.flows(), b.flows()), (0, 0));
}

#[test]
fn a_shadow_of_an_owner_that_tells_no_more_ends_after_its_limit_and_an_interval() {
    let mut a = Gateway::small(7);
    let mut b = Gateway::small(8);
    a.own(ALL);
    a.team.establish(&clients(8));
    a.pass(3);
    b.receive(&a.sent());
    b.pass(7500 + 500);
    assert_eq!(b.flows(), 8, "the owner may have seen packets up to 10 minutes ago");
    b.pass(200);
    assert_eq!(b.flows(), 0);
}

#[test]
fn nobody_but_the_owner_decides_about_a_flow() {
    let mut a = Gateway::small(7);
    let mut b = Gateway::small(8);
    a.own(ALL);
    let clients = clients(30);
    a.team.establish(&clients);
    a.pass(3);
    let events = a.sent();
    // A gateway that was stopped resumes and tells what it still believes.
    b.team.now = a.team.now;
    b.own(ALL);
    let seen = b.team.establish(&clients);
    b.receive(&events);
    let ended: Vec<_> = events.iter().map(|event| ReplicaEvent::Ended(*event.flow())).collect();
    b.receive(&ended);
    assert_eq!(b.count(|replication| replication.refused().get()), 60);
    assert_eq!(b.team.towards_backends(&clients, DATA), seen);
    b.team.answered(&seen, DATA);
    // The other way round the partner's flows replace those of before.
    b.pass(3);
    a.own(NONE);
    a.receive(&b.sent());
    take_over(&mut b, &mut a);
    assert_eq!(a.team.towards_backends(&clients, DATA), seen);
    assert_eq!(a.flows(), 30);
}

#[test]
fn a_gateway_tells_and_keeps_flows_by_the_groups_that_each_owns() {
    let mut a = Gateway::new(state(), 2, false, 7, 4096);
    let mut b = Gateway::new(state(), 3, false, 8, 4096);
    let (web, dns) = (vip_group(ip("192.0.2.100"), GROUPS), vip_group(ip("192.0.2.101"), GROUPS));
    assert_ne!(web, dns, "the VIPs of the test are in different groups");
    a.own(1 << web);
    b.own(1 << dns);
    let clients = new_clients(40);
    let seen = a.team.establish(&clients);
    let expected = ip(SNAT[usize::from(web)]);
    assert!(seen.values().all(|(snat, _)| snat.ip() == expected), "the SNAT address of the same group");
    let wrong = Packet::tcp("203.0.113.9:999", "192.0.2.100:80").flags(tcp_flags::SYN).build();
    let middle = Packet::tcp("203.0.113.9:999", "192.0.2.100:80").flags(DATA).build();
    b.team.put(UPLINK, &[wrong, middle]);
    let reply = Packet::tcp("10.0.0.11:8080", &format!("{expected}:5000")).flags(DATA).build();
    b.team.put(CLUSTER, &[reply]);
    assert_eq!(b.team.drops(DropReason::NoFlow), 3, "another gateway knows the connections");
    assert!(b.team.sent(UPLINK).is_empty() && b.team.sent(CLUSTER).is_empty(), "no RST breaks them");
    a.pass(3);
    b.receive(&a.sent());
    assert_eq!(b.count(|replication| replication.refused().get()), 0);
    // Packets that reach the partner nevertheless are forwarded, which changes nothing about who owns the flow.
    assert_eq!(b.team.towards_backends(&clients, DATA), seen);
    b.pass(10);
    let shadows = b.count(|replication| replication.shadows().get());
    assert!(shadows == b.flows() && shadows > 40, "all, also where two workers have a half each: {shadows} {}", b.flows());
    assert_eq!((b.sent(), a.count(|replication| replication.shadows().get())), (Vec::new(), 0));
    b.own(ALL);
    b.pass(10);
    assert_eq!(b.count(|replication| replication.shadows().get()), 0);
}

#[test]
fn a_gateway_that_takes_over_ports_gives_none_of_them_to_another_connection() {
    // With the same seed both begin with the same ports.
    let mut a = Gateway::small(7);
    let mut b = Gateway::small(7);
    a.own(ALL);
    let old: Vec<_> = (0..600_u16).map(|n| (format!("198.51.100.7:{}", 2000 + n), "192.0.2.100:80")).collect();
    let seen = a.team.establish(&old);
    a.pass(3);
    b.receive(&a.sent());
    take_over(&mut a, &mut b);
    let mut given = HashSet::new();
    let mut repeated = 0;
    for (client, vip) in (0..1200_u16).map(|n| (format!("203.0.113.7:{}", 2000 + n), "192.0.2.100:80")) {
        let syn = Packet::tcp(&client, vip).flags(tcp_flags::SYN).build();
        let sent = loop {
            b.team.put(UPLINK, std::slice::from_ref(&syn));
            let sent = b.team.sent(CLUSTER);
            if !sent.is_empty() {
                break sent;
            }
            repeated += 1;
        };
        assert!(given.insert(ends(&sent[0])));
    }
    let held: HashSet<_> = seen.values().copied().collect();
    assert_eq!(held.intersection(&given).count(), 0);
    assert!(repeated > 0 && repeated < 12, "64 ports are tried for each SYN: {repeated}");
    assert_eq!(b.team.towards_backends(&old, DATA), seen);
    assert_eq!(b.team.sum(|counters| counters.snat_port_reused_early.get()), 0);
}

#[test]
fn gateways_begin_with_ports_of_their_own() {
    let ports = |seed| {
        let mut gateway = Gateway::small(seed);
        gateway.own(ALL);
        let seen: Ends = gateway.team.establish(&new_clients(30));
        seen.into_values().map(|(snat, _)| snat.port()).collect::<HashSet<_>>()
    };
    assert!(ports(7).is_disjoint(&ports(8)));
    assert_eq!(ports(7), ports(7));
}

#[test]
fn shadows_leave_room_for_new_flows() {
    let mut a = Gateway::small(7);
    let mut b = Gateway::of_web(8, 80);
    a.own(ALL);
    a.team.establish(&clients(100));
    a.pass(3);
    b.receive(&a.sent());
    assert_eq!((b.flows(), b.count(|replication| replication.refused().get())), (70, 30));
    b.own(ALL);
    assert_eq!(b.team.establish(&new_clients(10)).len(), 10);
}

#[test]
fn a_client_with_affinity_keeps_its_backend_at_the_next_owner() {
    let with = |backends: &[&str], mode| {
        let mut state = state();
        let mut web = (*state.services[&ServiceName::new("default", "web")]).clone();
        (web.affinity, web.mode) = (Some(Duration::from_secs(600)), mode);
        web.ports.truncate(1);
        web.ports[0].backends.retain(|backend| backends.contains(&&*backend.address.ip().to_string()));
        if mode == Mode::Dsr {
            web.ports[0].backends.iter_mut().for_each(|backend| backend.address.set_port(80));
        }
        state.services.insert(web.name.clone(), Arc::new(web));
        state
    };
    let all = ["10.0.0.11", "10.0.0.12", "10.0.0.13"];
    for mode in [Mode::Nat, Mode::Dsr] {
        let mut a = Gateway::new(with(&all[..2], mode), 2, false, 7, 4096);
        let mut b = Gateway::new(with(&all, mode), 2, false, 8, 4096);
        a.own(ALL);
        let syns = |port: u16| {
            let syn = move |n: u16| Packet::tcp(&format!("198.51.100.{}:{port}", n + 1), "192.0.2.100:80");
            (0..40).map(syn).collect::<Vec<_>>()
        };
        let chosen = |gateway: &mut Gateway, port: u16, flags| {
            let choose = |packet: Packet| {
                gateway.team.put(UPLINK, &[packet.flags(flags).build()]);
                let sent = gateway.team.sent(CLUSTER).remove(0);
                if flags == tcp_flags::SYN && mode == Mode::Nat {
                    let (snat, backend) = ends(&sent);
                    let answer = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | tcp_flags::ACK);
                    gateway.team.put(CLUSTER, &[answer.build()]);
                }
                sent[..6].to_vec()
            };
            syns(port).into_iter().map(choose).collect::<Vec<_>>()
        };
        let backends = chosen(&mut a, 2000, tcp_flags::SYN);
        a.team.now += 2 * SECOND;
        for _ in 0..2 {
            assert_eq!(chosen(&mut a, 2000, tcp_flags::ACK), backends);
        }
        a.pass(3);
        let events = a.sent();
        b.team.now = a.team.now;
        b.receive(&events);
        b.own(ALL);
        assert_eq!(chosen(&mut b, 2001, tcp_flags::SYN), backends, "{mode:?}");
        let mut fresh = Gateway::new(with(&all, mode), 2, false, 9, 4096);
        fresh.own(ALL);
        assert_ne!(chosen(&mut fresh, 2001, tcp_flags::SYN), backends, "without memory some go to the third backend");
    }
}

#[test]
fn a_backend_that_drains_is_found_and_an_unknown_one_refuses_the_flow() {
    let without_12 = |removed: bool| {
        let mut state = state();
        if removed {
            let mut web = (*state.services[&ServiceName::new("default", "web")]).clone();
            web.ports[0].backends.retain(|backend| backend.address.to_string() != "10.0.0.12:8080");
            state.services.insert(web.name.clone(), Arc::new(web));
        }
        state
    };
    let mut a = Gateway::small(7);
    a.own(ALL);
    let clients = new_clients(30);
    let seen = a.team.establish(&clients);
    let of_12 = seen.values().filter(|(_, backend)| backend.to_string() == "10.0.0.12:8080").count() as u64;
    assert!(of_12 > 0);
    a.pass(3);
    let events = a.sent();
    let mut draining = Gateway::small(8);
    draining.team.state = without_12(true);
    draining.team.publish();
    draining.receive(&events);
    assert_eq!((draining.flows(), draining.count(|replication| replication.refused().get())), (30, 0));
    draining.team.now = draining.team.now.max(a.team.now);
    draining.own(ALL);
    assert_eq!(draining.team.towards_backends(&clients, DATA), seen);
    let mut unknown = Gateway::new(without_12(true), 1, false, 8, 4096);
    unknown.receive(&events);
    assert_eq!((unknown.flows(), unknown.count(|replication| replication.refused().get())), (30 - of_12, of_12));
    let mut none = Gateway::new(state(), 1, false, 8, 4096);
    none.team.state.services.insert(ServiceName::new("default", "web"), service("web", vec![]).1);
    none.team.publish();
    none.receive(&events);
    assert_eq!(none.flows(), 0);
}

#[test]
fn a_full_queue_costs_news_and_nothing_else() {
    let mut a = Gateway::of_web(7, 4096);
    a.own(ALL);
    let replication = Arc::clone(&a.replications[0]);
    let clients: Vec<_> = (0..4090_u16).map(|n| (format!("198.51.{}.7:{}", n % 200, 2000 + n), "192.0.2.100:80")).collect();
    for part in clients.chunks(1000) {
        a.team.establish(part);
        a.pass(2);
    }
    // Each flow changes its state, and nobody has taken the news of before.
    a.team.towards_backends(&clients, FIN);
    let first = a.sent();
    assert_eq!((first.len(), replication.dropped().get()), (4096, 4084));
    a.pass(10);
    let again: HashSet<SocketAddr> = a.sent().iter().map(|event| event.flow().client).collect();
    assert_eq!(again.len(), 4084, "the sweep tells those that found no room");
}

#[test]
fn news_of_flows_that_end_wait_for_room_in_the_queue() {
    let mut a = Gateway::of_web(7, 4096);
    a.own(ALL);
    let clients: Vec<_> = (0..4090_u16).map(|n| (format!("198.51.{}.7:{}", n % 200, 2000 + n), "192.0.2.100:80")).collect();
    for part in clients.chunks(1000) {
        a.team.establish(part);
        a.pass(2);
    }
    assert_eq!(a.sent().len(), 4090);
    // The news of their resets fill the queue. They end, and nobody has taken these news.
    a.team.abort(&clients);
    a.pass(30);
    assert_eq!(a.flows(), 0);
    let again = &clients[..1];
    a.team.establish(again);
    a.pass(2);
    let mut events = Vec::new();
    for _ in 0..3 {
        events.extend(a.sent());
        a.pass(10);
    }
    let is_end = |event: &&ReplicaEvent| matches!(event, ReplicaEvent::Ended(_));
    let ended: HashSet<SocketAddr> = events.iter().filter(is_end).map(|event| event.flow().client).collect();
    assert_eq!(ended.len(), 4090);
    let last = events.iter().rfind(|event| event.flow().client.to_string() == again[0].0);
    assert!(matches!(last, Some(ReplicaEvent::Holds(_))), "an old end after the news of a new flow: {last:?}");
}

fn routed() -> State {
    let mut state = state();
    state.pools[0].announce = Announce::Routed;
    state
}

#[test]
fn flows_to_vips_of_routers_use_an_address_that_belongs_to_no_group() {
    let mut gateway = Gateway::with_own_snat(&["10.0.0.5"], routed(), 7);
    let arp = arp_request([10, 0, 0, 11].into(), [10, 0, 0, 5].into());
    for owned in [NONE, ALL] {
        gateway.own(owned);
        gateway.team.put(CLUSTER, std::slice::from_ref(&arp));
        assert_eq!(gateway.team.sent(CLUSTER).len(), 1, "it answers for its own address");
        let clients: Vec<_> = (0..10).map(|n| (format!("203.0.113.{}:{}", n + 1, 3000 + owned), "192.0.2.100:80")).collect();
        let seen = gateway.team.establish(&clients);
        assert!(seen.values().all(|(snat, _)| snat.ip() == ip("10.0.0.5")), "{seen:?}");
        gateway.team.answered(&seen, DATA);
        gateway.pass(12);
        assert_eq!((gateway.sent(), gateway.count(|replication| replication.shadows().get())), (Vec::new(), 0));
    }
    let mut elected = Gateway::with_own_snat(&["10.0.0.5"], state(), 7);
    elected.own(ALL);
    let seen = elected.team.establish(&new_clients(10));
    assert!(seen.values().all(|(snat, _)| SNAT.map(ip).contains(&snat.ip())), "{seen:?}");
}

#[test]
fn flows_of_mode_dnat_to_vips_of_routers_are_each_gateways_own() {
    let mut state = routed();
    for (name, service) in state.services.clone() {
        state.services.insert(name, Arc::new(Service { mode: Mode::Dnat, ..Service::clone(&service) }));
    }
    for owned in [NONE, ALL] {
        let mut gateway = Gateway::new(state.clone(), 1, false, 7, 4096);
        gateway.own(owned);
        let seen = gateway.team.establish(&new_clients(10));
        gateway.team.answered(&seen, DATA);
        gateway.pass(12);
        assert_eq!((gateway.sent(), gateway.count(|replication| replication.shadows().get())), (Vec::new(), 0));
        assert_eq!(gateway.flows(), 10);
    }
}

#[test]
fn without_an_address_of_its_own_flows_to_vips_of_routers_use_those_of_groups_that_the_gateway_owns() {
    let mut gateway = Gateway::new(routed(), 1, false, 7, 4096);
    let web = vip_group(ip("192.0.2.100"), GROUPS);
    let other = 1 - web;
    gateway.own(1 << other);
    let seen = gateway.team.establish(&new_clients(10));
    assert!(seen.values().all(|(snat, _)| snat.ip() == ip(SNAT[usize::from(other)])));
}
