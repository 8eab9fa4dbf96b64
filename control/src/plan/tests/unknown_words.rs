//! Annotations with unknown words, and what a policy loses of a client's address.

use std::time::{Instant, UNIX_EPOCH};

use proto::{AffinityScope, Mode, Probe, Reason, Scheduler, Target};
use serde_json::{Value, json};

use super::{apply, endpoints, named, service, settings, texts};
use crate::plan::service_life::Limitation;
use crate::plan::{Memory, Plan, plan};
use crate::world::World;
use crate::world::change::Change;
use crate::world::checkpoint::Checkpoint;
use objects::note::Cause;

fn annotated(annotations: &[(&str, &str)]) -> Value {
    let mut web = service("web", json!({}));
    for (name, value) in annotations {
        web["metadata"]["annotations"][format!("sluice.dev/{name}")] = (*value).into();
    }
    web
}

fn causes(plan: &Plan) -> Vec<Cause> {
    plan.notes.iter().map(|note| note.remark.cause).collect()
}

const WORDS: [(&str, &str); 6] = [
    ("mode", "dnat"),
    ("target", "endpoint"),
    ("scheduler", "rr"),
    ("ip-mode", "Proxy"),
    ("session-affinity-scope", "service"),
    ("health-check", "http"),
];

#[test]
fn an_unknown_word_of_a_live_service_keeps_what_is_in_force_also_over_a_change_of_leader() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
    apply(&mut world, annotated(&WORDS));
    let before = plan(&world, &settings(), &mut memory, now);
    for (name, _) in WORDS {
        let typo: Vec<_> = WORDS.into_iter().map(|(known, word)| (known, if known == name { "natt" } else { word })).collect();
        apply(&mut world, annotated(&typo));
        let after = plan(&world, &settings(), &mut memory, now);
        let web = &after.services[&named("web")];
        assert_eq!(*web, before.services[&named("web")], "{name}");
        let status = &after.statuses[&named("web")];
        assert_eq!(status.limitations, [Limitation::Unread], "{name}");
        assert_eq!(status.ingress, before.statuses[&named("web")].ingress, "{name}");
        let note = after.notes.iter().find(|note| note.remark.cause == Cause::AnnotationIgnored);
        assert!(note.is_some_and(|note| note.remark.text.contains(name) && note.remark.text.contains("natt")), "{name}");
    }
    // All at once, and another leader: it has the words of the checkpoint only.
    apply(&mut world, annotated(&WORDS.map(|(name, _)| (name, "natt"))));
    let checkpoint = plan(&world, &settings(), &mut memory, now).checkpoint;
    let mut other = successor(&checkpoint, now);
    endpoints(&mut other, "web", &texts(&["10.0.0.1"]));
    apply(&mut other, annotated(&WORDS.map(|(name, _)| (name, "natt"))));
    let after = plan(&other, &settings(), &mut Memory::default(), now);
    let web = &after.services[&named("web")];
    assert_eq!(*web, before.services[&named("web")]);
    assert_eq!((web.mode, web.target, web.scheduler), (Mode::Dnat, Target::Endpoint, Scheduler::RoundRobin));
    assert_eq!((web.affinity_scope, web.health.probe), (AffinityScope::Service, Probe::Http));
}

/// The world of the next leader, which has read the checkpoint of the last one, before it has any object.
fn successor(checkpoint: &Checkpoint, now: Instant) -> World {
    let mut world = World::default();
    let read = Checkpoint::from_texts(&checkpoint.to_texts(1, now, UNIX_EPOCH), now, UNIX_EPOCH);
    world.apply(Change::CheckpointReplaced(Box::new(read)));
    world
}

#[test]
fn a_typo_that_only_the_next_leader_sees_keeps_what_was_in_force() {
    for words in [&WORDS[..], &[]] {
        let (mut world, now) = (World::default(), Instant::now());
        endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
        apply(&mut world, annotated(words));
        let before = plan(&world, &settings(), &mut Memory::default(), now);
        for name in WORDS.map(|(name, _)| name) {
            let mut typo: Vec<_> = words.iter().copied().filter(|(known, _)| *known != name).collect();
            typo.push((name, "natt"));
            let mut next = successor(&before.checkpoint, now);
            endpoints(&mut next, "web", &texts(&["10.0.0.1"]));
            apply(&mut next, annotated(&typo));
            let mut changed = settings();
            if name == "mode" {
                changed.defaults.mode = Mode::Gue;
            }
            let after = plan(&next, &changed, &mut Memory::default(), now);
            assert_eq!(after.services[&named("web")], before.services[&named("web")], "{words:?} {name}");
        }
    }
}

#[test]
fn a_follower_that_saw_the_word_before_the_typo_keeps_it_without_a_checkpoint() {
    for (name, _) in WORDS {
        let (mut world, now) = (World::default(), Instant::now());
        apply(&mut world, annotated(&WORDS));
        let expected = plan(&world, &settings(), &mut Memory::default(), now);
        let typo: Vec<_> = WORDS.into_iter().map(|(known, word)| (known, if known == name { "natt" } else { word })).collect();
        apply(&mut world, annotated(&typo));
        let first = plan(&world, &settings(), &mut Memory::default(), now);
        assert_eq!(first.services[&named("web")], expected.services[&named("web")], "{name}");
    }
}

#[test]
fn a_service_that_was_never_served_is_new_to_the_next_leader_too() {
    let (mut world, now) = (World::default(), Instant::now());
    apply(&mut world, annotated(&[("scheduler", "natt")]));
    let first = plan(&world, &settings(), &mut Memory::default(), now);
    assert!(first.services[&named("web")].refusal.is_some());
    let mut next = successor(&first.checkpoint, now);
    apply(&mut next, annotated(&[("scheduler", "natt")]));
    assert!(plan(&next, &settings(), &mut Memory::default(), now).services[&named("web")].refusal.is_some());
}

#[test]
fn a_node_port_service_with_a_table_of_an_earlier_version_counts_as_served() {
    let ports = json!([{"port": 80, "nodePort": 30080}]);
    let rows = [("scheduler", false), ("health-check", false), ("mode", true), ("target", true)];
    for (name, is_refused) in rows {
        let (mut world, now) = (World::default(), Instant::now());
        let read = Checkpoint::from_texts(&["v1\nshop/web tcp/80/IPv4=509\n".to_owned()], now, UNIX_EPOCH);
        world.apply(Change::CheckpointReplaced(Box::new(read)));
        let mut web = service("web", json!({"type": "NodePort", "loadBalancerClass": null, "ports": ports}));
        web["metadata"]["annotations"][format!("sluice.dev/{name}")] = "natt".into();
        apply(&mut world, web);
        let plan = plan(&world, &settings(), &mut Memory::default(), now);
        assert_eq!(plan.services[&named("web")].refusal.is_some(), is_refused, "{name}");
    }
}

#[test]
fn a_new_service_with_an_unknown_word_is_not_served_until_it_is_corrected() {
    for (name, word) in WORDS {
        let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
        apply(&mut world, annotated(&[(name, "natt")]));
        let first = plan(&world, &settings(), &mut memory, now);
        let refusal = first.services[&named("web")].refusal.clone().unwrap();
        assert!(refusal.reason == Reason::Refused && refusal.message.contains("natt"), "{name}: {refusal:?}");
        assert_eq!(causes(&first), [Cause::Reason(Reason::Refused)], "{name}");
        // Another change of it makes it no older.
        apply(&mut world, annotated(&[(name, "natt"), ("drain-timeout", "5s")]));
        assert!(plan(&world, &settings(), &mut memory, now).services[&named("web")].refusal.is_some(), "{name}");
        apply(&mut world, annotated(&[(name, word)]));
        assert_eq!(plan(&world, &settings(), &mut memory, now).services[&named("web")].refusal, None, "{name}");
    }
}

#[test]
fn a_word_that_earlier_versions_ignored_withdraws_no_published_address() {
    let mut world = World::default();
    let mut web = annotated(&[("scheduler", "dice")]);
    web["status"] = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.100", "ipMode": "Proxy"}]}});
    apply(&mut world, web);
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    assert_eq!(plan.services[&named("web")].refusal, None);
}

#[test]
fn a_service_whose_clients_lose_their_address_in_mode_nat_is_told_once() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    let local = |mode: &str| {
        let mut web = annotated(&[("mode", mode)]);
        web["spec"]["externalTrafficPolicy"] = "Local".into();
        web
    };
    apply(&mut world, local("nat"));
    let first = plan(&world, &settings(), &mut memory, now);
    assert_eq!(causes(&first), [Cause::ClientAddressLost]);
    let text = &first.notes[0].remark.text;
    assert!(["dnat", "dsr", "ipip", "gue"].iter().all(|mode| text.contains(mode)), "{text}");
    assert_eq!(first.statuses[&named("web")].limitations, [Limitation::ClientAddressLost]);
    endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
    assert_eq!(causes(&plan(&world, &settings(), &mut memory, now)), []);
    apply(&mut world, local("dnat"));
    let second = plan(&world, &settings(), &mut memory, now);
    assert!(causes(&second).is_empty() && second.statuses[&named("web")].limitations.is_empty());
}
