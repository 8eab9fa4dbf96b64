//! Tests: the release of Services that are deleted, or no longer ours.

use super::*;

#[test]
fn a_deleted_service_is_released_once_gateways_have_removed_it_or_after_ten_seconds() {
    let mut lab = Lab::new(&[ingress(1, IpMode::Proxy)]);
    let gateway = lab.connect("edge-1");
    gateway.acknowledge(4);
    lab.settle(4);
    lab.pass(FLEET_HEARD_AFTER);
    lab.leave(5, leftover(LeftBy::Us, true));
    assert!(lab.due().is_none());
    assert_eq!(lab.queue.next_due(), Some(lab.now + GATEWAYS_WAITED_FOR));
    gateway.acknowledge(5);
    let write = lab.due().unwrap();
    assert_eq!((write.ingress.as_deref(), write.finalizer), (Some(&[][..]), Some(false)));
    assert_eq!(write.conditions[&ConditionType::Programmed], None);
    assert_ne!(lab.causes.last(), Some(&Cause::Released), "no note about a deleted Service");
    assert!(lab.due().is_none(), "once");
    let mut lab = Lab::new(&[]);
    let _silent = lab.connect("edge-1");
    lab.leave(5, leftover(LeftBy::Us, true));
    assert!(lab.due().is_none());
    lab.pass(GATEWAYS_WAITED_FOR);
    assert!(lab.due().is_some());
}

/// A gateway was connected in this term, and is no longer.
fn without_gateway() -> Lab {
    let mut lab = Lab::new(&[ingress(1, IpMode::Proxy)]);
    let gateway = lab.connect("edge-1");
    assert!(lab.due().is_none());
    drop(gateway);
    lab.pass(FLEET_HEARD_AFTER);
    lab
}

#[test]
fn a_disconnected_gateway_delays_no_deletion() {
    let mut lab = without_gateway();
    lab.leave(5, leftover(LeftBy::Us, true));
    assert!(lab.due().is_some());
}

#[test]
fn a_service_deleted_while_no_controller_ran_keeps_its_finalizer_until_gateways_were_heard() {
    let mut lab = Lab::new(&[]);
    lab.leave(5, leftover(LeftBy::Us, true));
    assert!(lab.due().is_none(), "no gateway has dialled yet, and any may forward for it");
    let fast = lab.connect("edge-1");
    fast.acknowledge(5);
    assert!(lab.due().is_none(), "another one may dial in a moment");
    assert_eq!(lab.queue.next_due(), Some(lab.now + FLEET_HEARD_AFTER));
    let slow = lab.connect("edge-2");
    lab.pass(FLEET_HEARD_AFTER);
    assert!(lab.due().is_none(), "the second one still forwards for it");
    slow.acknowledge(5);
    assert_eq!(lab.due().unwrap().finalizer, Some(false));
    let mut lab = Lab::new(&[]);
    lab.leave(5, leftover(LeftBy::Us, true));
    lab.pass(GATEWAYS_WAITED_FOR);
    assert_eq!(lab.due().unwrap().finalizer, Some(false), "without any gateway it waits ten seconds");
}

#[test]
fn a_service_that_lost_its_class_may_belong_to_another_installation_unless_it_was_ours() {
    let mut lab = without_gateway();
    lab.settle(4);
    lab.leave(5, leftover(LeftBy::UsOrAnother, false));
    let write = lab.due().unwrap();
    assert_eq!((write.ingress, write.finalizer), (None, Some(false)), "only a load balancer has addresses in its status");
    assert_eq!(lab.causes.last(), Some(&Cause::Released));
    let mut lab = Lab::new(&[]);
    lab.leave(5, leftover(LeftBy::UsOrAnother, false));
    assert!(lab.due().is_none());
    lab.pass(GATEWAYS_WAITED_FOR);
    assert!(lab.due().is_some());
}

#[test]
fn content_of_another_installation_is_removed_only_if_that_one_does_not_release_a_deleted_service() {
    let mut lab = Lab::new(&[]);
    lab.leave(5, leftover(LeftBy::Another, false));
    lab.pass(Duration::from_secs(3_600));
    assert!(lab.due().is_none() && lab.queue.next_due().is_none());
    lab.leave(6, leftover(LeftBy::Another, true));
    assert!(lab.due().is_none());
    lab.pass(OTHERS_WAITED_FOR);
    assert_eq!(lab.due().unwrap().ingress, None, "its addresses are not ours");
}
