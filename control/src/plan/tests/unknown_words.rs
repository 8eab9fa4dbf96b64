//! Annotations with unknown words, and what a policy loses of a client's address.

use std::time::Instant;

use proto::{AffinityScope, Mode, Probe, Reason, Scheduler, Target};
use serde_json::{Value, json};

use super::{apply, endpoints, named, service, settings, texts};
use crate::plan::{Memory, Plan, plan};
use crate::world::World;
use crate::world::change::Change;
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
        assert!(status.is_partly_unread && status.ingress == before.statuses[&named("web")].ingress, "{name}");
        let note = after.notes.iter().find(|note| note.remark.cause == Cause::AnnotationIgnored);
        assert!(note.is_some_and(|note| note.remark.text.contains(name) && note.remark.text.contains("natt")), "{name}");
    }
    // All at once, and another leader: it has the words of the checkpoint only.
    apply(&mut world, annotated(&WORDS.map(|(name, _)| (name, "natt"))));
    let checkpoint = plan(&world, &settings(), &mut memory, now).checkpoint;
    let mut other = World::default();
    endpoints(&mut other, "web", &texts(&["10.0.0.1"]));
    apply(&mut other, annotated(&WORDS.map(|(name, _)| (name, "natt"))));
    let texts = checkpoint.to_texts(1, now, std::time::UNIX_EPOCH);
    let read = crate::world::checkpoint::Checkpoint::from_texts(&texts, now, std::time::UNIX_EPOCH);
    other.apply(Change::CheckpointReplaced(Box::new(read)));
    let after = plan(&other, &settings(), &mut Memory::default(), now);
    let web = &after.services[&named("web")];
    assert_eq!(*web, before.services[&named("web")]);
    assert_eq!((web.mode, web.target, web.scheduler), (Mode::Dnat, Target::Endpoint, Scheduler::RoundRobin));
    assert_eq!((web.affinity_scope, web.health.probe), (AffinityScope::Service, Probe::Http));
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
    assert!(first.statuses[&named("web")].loses_client_address);
    endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
    assert_eq!(causes(&plan(&world, &settings(), &mut memory, now)), []);
    apply(&mut world, local("dnat"));
    let second = plan(&world, &settings(), &mut memory, now);
    assert!(causes(&second).is_empty() && !second.statuses[&named("web")].loses_client_address);
}
