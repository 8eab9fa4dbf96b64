//! A worker with little traffic does not wait for a full burst: a single packet leaves in the poll that received it,
//! whichever way it leaves. A worker that has been idle for long may sleep after that poll.

use dataplane::testing::{Packet, arp_request};
use dataplane::{WorkerCounters, tcp_flags};

use crate::rig::{CLUSTER, Rig, UPLINK, ends};
use crate::team::{Team, clients};

#[test]
fn a_single_packet_leaves_in_the_poll_that_received_it() {
    let mut rig = Rig::new();
    rig.settle();
    rig.arrive(UPLINK, &Packet::tcp("198.51.100.7:5000", "192.0.2.100:80").flags(tcp_flags::SYN).build(), 1);
    assert_eq!(rig.worker.poll(rig.now), 1);
    let sent = rig.sent(CLUSTER);
    assert_eq!(sent.len(), 1, "to the backend");

    let (snat, backend) = ends(&sent[0]);
    let answer = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | tcp_flags::ACK).build();
    rig.arrive(CLUSTER, &answer, 2);
    assert_eq!(rig.worker.poll(rig.now), 1);
    assert_eq!(rig.sent(UPLINK).len(), 1, "to the client");

    let mut arp_reply = arp_request("10.0.0.11".parse().unwrap(), "10.0.0.2".parse().unwrap());
    arp_reply[21] = 2;
    rig.arrive(CLUSTER, &arp_reply, 3);
    assert_eq!(rig.worker.poll(rig.now), 1);
    assert_eq!(rig.to_linux(CLUSTER).len(), 1, "to Linux");

    // Polls once.
    rig.send_from_linux(CLUSTER, &Packet::tcp("10.0.0.2:40000", "10.0.0.11:8080").flags(tcp_flags::SYN).build());
    assert_eq!(rig.sent(CLUSTER).len(), 1, "from Linux");
    assert_eq!(rig.worker.poll(rig.now), 0, "nothing is left");
}

#[test]
fn a_single_packet_of_another_worker_is_handed_over_in_the_poll_that_received_it() {
    let mut team = Team::in_turn(2);
    team.settle();
    let mut handed = 0;
    for (from, to) in clients(40) {
        team.arrive(UPLINK, &[Packet::tcp(&from, to).flags(tcp_flags::SYN).build()]);
        let total = |team: &Team, counter: fn(&WorkerCounters) -> u64| team.sum(counter);
        let before = total(&team, |c| c.handed_out.get());
        // The packet is at one of the two: each polls once, and only an owner to which it was handed may poll again.
        let polled: Vec<usize> = team.workers.iter_mut().map(|worker| worker.poll(team.now)).collect();
        if total(&team, |c| c.handed_out.get()) > before {
            handed += 1;
            if polled == [0, 1] {
                assert_eq!(team.workers[0].poll(team.now), 1, "it is in the queue");
            } else {
                assert_eq!(polled, [1, 1], "it is in the queue");
            }
        }
        assert_eq!(team.sent(CLUSTER).len(), 1, "{from}");
    }
    assert!(handed >= 10, "{handed} of 40 packets belonged to the other worker");
}
