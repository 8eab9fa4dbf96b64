//! Earlier backends, which gateways that join need in one-way modes.

use std::time::SystemTime;

use super::*;

fn in_mode(mode: &str) -> World {
    let mut world = World::default();
    let mut object = service("web", json!({"ports": [{"port": 8080}]}));
    object["metadata"]["annotations"] = json!({"sluice.dev/mode": mode, "sluice.dev/target": "endpoint"});
    apply(&mut world, object);
    endpoints(&mut world, "web", &texts(&["10.0.0.1", "10.0.0.2"]));
    world
}

#[test]
fn the_backends_that_a_port_of_a_one_way_mode_had_are_sent_with_the_time_of_their_end() {
    for (mode, is_one_way) in [("dsr", true), ("ipip", true), ("gue", true), ("nat", false), ("dnat", false)] {
        let (mut world, mut memory, start) = (in_mode(mode), Memory::default(), Instant::now());
        memory.set_time_of_day(start, SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000));
        let mut earlier = |world: &World, after_s| {
            let plan = plan(world, &settings(), &mut memory, start + Duration::from_secs(after_s));
            let port = plan.services[&named("web")].ports[0].clone();
            let ends = port.earlier.iter().map(|one| (one.until_s - 1_700_000_000, one.backends.len()));
            ends.collect::<Vec<_>>()
        };
        assert_eq!(earlier(&world, 0), []);
        endpoints(&mut world, "web", &texts(&["10.0.0.1", "10.0.0.2", "10.0.0.3"]));
        let first = if is_one_way { vec![(60, 2)] } else { vec![] };
        assert_eq!(earlier(&world, 60), first, "{mode}");
        assert_eq!(earlier(&world, 90), first, "{mode}: no change");
        endpoints(&mut world, "web", &texts(&["10.0.0.3"]));
        let both = if is_one_way { vec![(120, 3), (60, 2)] } else { vec![] };
        assert_eq!(earlier(&world, 120), both, "{mode}");
    }
}

#[test]
fn without_the_time_of_day_no_earlier_backends_are_sent() {
    let (mut world, mut memory, now) = (in_mode("gue"), Memory::default(), Instant::now());
    plan(&world, &settings(), &mut memory, now);
    endpoints(&mut world, "web", &texts(&["10.0.0.3"]));
    assert_eq!(plan(&world, &settings(), &mut memory, now).services[&named("web")].ports[0].earlier, []);
}
