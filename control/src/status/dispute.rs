//! Disputes: another program changes what sluice writes to a Service, again and again.
//!
//! Invariant: sluice rewrites at most [`REWRITES_MAX`] times within [`REWRITES_WITHIN`], then leaves the object alone for
//! the rest of that time: two programs that overwrite each other must not overload the API server.

use std::time::Duration;

use proto::Reason;
use proto::limits::{FINALIZER, GROUP_ANNOTATION};
use tokio::time::Instant;

use crate::plan::WantedStatus;
use objects::OwnedParts;
use objects::note::{Cause, Remark, quoted};

/// Maximum number of rewrites, per Service and desired status.
pub(super) const REWRITES_MAX: usize = 3;
/// Window in which these rewrites are counted. After it, sluice tries again.
pub(super) const REWRITES_WITHIN: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub(super) struct Dispute {
    rewritten_at: Vec<Instant>,
    left_alone_until: Option<Instant>,
}

impl Dispute {
    /// Counts a rewrite. Returns false if there were too many, so that the object is left alone.
    pub(super) fn rewrites(&mut self, now: Instant) -> bool {
        self.rewritten_at.retain(|at| now < *at + REWRITES_WITHIN);
        if let Some(first) = self.rewritten_at.first().filter(|_| self.rewritten_at.len() >= REWRITES_MAX) {
            self.left_alone_until = Some(*first + REWRITES_WITHIN);
            return false;
        }
        self.rewritten_at.push(now);
        true
    }

    /// Takes back the last rewrite, which was not sent.
    pub(super) fn was_not_sent(&mut self) {
        self.rewritten_at.pop();
    }

    /// Whether any rewrite still counts.
    pub(super) fn is_recent(&self, now: Instant) -> bool {
        self.rewritten_at.iter().any(|at| now < *at + REWRITES_WITHIN)
    }

    /// Whether the object is left alone at this time.
    pub(super) fn is_left_alone(&self, now: Instant) -> bool {
        self.left_alone_until.is_some_and(|until| now < until)
    }

    pub(super) const fn left_alone_until(&self) -> Option<Instant> {
        self.left_alone_until
    }

    /// The end of the time in which it was left alone; the next write is the first rewrite of a new window.
    pub(super) fn resume(&mut self, now: Instant) {
        if self.left_alone_until.is_some_and(|until| until <= now) {
            (self.left_alone_until, self.rewritten_at) = (None, vec![now]);
        }
    }
}

/// The note for the owner of an object that is left alone. `known` is what the object has, `goal` what sluice would write.
pub(super) fn remark(wanted: &WantedStatus, known: &OwnedParts, goal: &OwnedParts) -> Remark {
    let minutes = REWRITES_WITHIN.as_secs() / 60;
    let are_marks = known.has_ingress_of(goal) && (known.finalizer, &known.group) != (goal.finalizer, &goal.group);
    let manager = if are_marks { &wanted.object.object_manager } else { &wanted.object.foreign_manager };
    let program = manager.as_ref().map_or_else(|| "Another program".to_owned(), |manager| quoted(manager));
    let remedy = if are_marks {
        format!(
            "removes what sluice sets on the Service, finalizer {FINALIZER} or annotation {GROUP_ANNOTATION}; after \
             {REWRITES_MAX} attempts sluice leaves it alone for {minutes} minutes, and gateways go on forwarding. Let that \
             program ignore both: ignoreDifferences with RespectIgnoreDifferences=true in Argo CD, the annotation \
             kustomize.toolkit.fluxcd.io/ssa: Merge in Flux, a merge instead of a replacement in others"
        )
    } else {
        format!(
            "keeps changing the status of the Service, too; after {REWRITES_MAX} rewrites sluice leaves it alone for {minutes} \
             minutes, and gateways go on forwarding. Switch that program off for this Service, or let it ignore status; a \
             Service with another loadBalancerClass (a new object, the field is immutable) is not sluice's"
        )
    };
    Remark::new(Cause::Reason(Reason::ForeignStatusWriter), format!("{program} {remedy}"))
}

/// The note for the owner of an object that is not ours, and to which another program adds our marks again and again.
pub(super) fn returning_marks() -> Remark {
    let minutes = REWRITES_WITHIN.as_secs() / 60;
    let text = format!(
        "Another program puts back what sluice removes from the Service, which sluice no longer serves: finalizer {FINALIZER}, \
         annotation {GROUP_ANNOTATION}, or conditions; after {REWRITES_MAX} removals sluice leaves it alone for {minutes} \
         minutes. Remove them from the manifest that this program applies"
    );
    Remark::new(Cause::Reason(Reason::ForeignStatusWriter), text)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::plan::LeftBy;
    use crate::status::Statuses;
    use crate::status::tests::{Lab, held, ingress, leftover};
    use objects::ConditionType;
    use objects::status::IpMode;

    /// Changes the object `times` times, as another writer does, and counts how often the addresses are written again.
    fn contested(lab: &mut Lab, times: usize, change: impl Fn(&mut OwnedParts)) -> usize {
        let rewrites = |lab: &mut Lab| {
            change(lab.held());
            lab.version += 1;
            lab.plan(4);
            let mut is_written = false;
            while let Some(write) = lab.due() {
                is_written |= write.ingress.is_some() || write.finalizer.is_some() || write.group.is_some();
                lab.see(&write, 4);
            }
            is_written
        };
        (0..times).filter(|_| rewrites(lab)).count()
    }

    #[test]
    fn a_foreign_writer_is_overwritten_three_times_in_ten_minutes_and_then_left_alone() {
        let (mut lab, _gateway) = Lab::programmed();
        assert_eq!(contested(&mut lab, 9, |held| held.ingress.clear()), REWRITES_MAX);
        assert_eq!(lab.condition(ConditionType::Programmed), Some((false, "ForeignStatusWriter")));
        assert_eq!(lab.causes.iter().filter(|cause| **cause == Cause::Reason(Reason::ForeignStatusWriter)).count(), 1);
        assert_eq!(lab.queue.next_due(), Some(lab.now + REWRITES_WITHIN));
        lab.pass(REWRITES_WITHIN);
        let again = lab.due().unwrap();
        assert_eq!(again.ingress, Some(vec![ingress(1, IpMode::Vip)]));
        lab.see(&again, 4);
        assert_eq!(lab.condition(ConditionType::Programmed), Some((true, "Programmed")));
        assert_eq!(contested(&mut lab, 9, |held| held.ingress.clear()), REWRITES_MAX - 1, "the new attempt counts");
        lab.wanted.ingress = vec![ingress(2, IpMode::Vip)];
        lab.settle(4);
        assert_eq!(lab.wanted.object.held.ingress, [ingress(2, IpMode::Vip)], "another desired status");
    }

    #[test]
    fn an_entry_without_an_address_that_another_writer_appends_is_removed_three_times_and_then_reported() {
        let (mut lab, _gateway) = Lab::programmed();
        assert_eq!(contested(&mut lab, 9, |held| held.ingress_without_ip = 1), REWRITES_MAX);
        assert_eq!(lab.condition(ConditionType::Programmed), Some((false, "ForeignStatusWriter")));
        assert_eq!(lab.wanted.object.held.ingress_without_ip, 1, "it is left alone");
    }

    #[test]
    fn a_foreign_status_that_was_there_first_counts_as_rewritten() {
        let mut lab = Lab::new(&[ingress(1, IpMode::Vip)]);
        let gateway = lab.connect("edge-1");
        gateway.acknowledge(4);
        *lab.held() = held(&[ingress(9, IpMode::Vip)]);
        lab.object().status_is_ours = false;
        lab.settle(4);
        assert_eq!(lab.wanted.object.held.ingress, [ingress(1, IpMode::Vip)]);
        let foreign = |held: &mut OwnedParts| held.ingress = vec![ingress(9, IpMode::Vip)];
        assert_eq!(contested(&mut lab, 9, foreign), REWRITES_MAX - 1);
    }

    #[test]
    fn a_tool_that_puts_our_marks_back_is_answered_three_times_in_ten_minutes_and_then_told() {
        let (mut lab, gateway) = Lab::programmed();
        lab.pass(Duration::from_secs(60));
        let removals = |lab: &mut Lab, times: u64| {
            let is_removed = |version: u64, lab: &mut Lab| {
                gateway.acknowledge(5);
                let mut left = leftover(LeftBy::Us, false);
                Arc::make_mut(&mut left.left).resource_version = (lab.version + version).to_string();
                lab.leave(5, left);
                lab.pass(Duration::from_secs(1));
                let write = lab.due();
                // Without marks the object is no longer one that sluice releases.
                lab.queue.set_plan(&Statuses::default(), lab.now);
                write.is_some_and(|write| write.finalizer == Some(false))
            };
            let count = (0..times).filter(|version| is_removed(*version, lab)).count();
            lab.version += times;
            count
        };
        assert_eq!(removals(&mut lab, 9), REWRITES_MAX);
        let told = lab.texts.iter().filter(|text| text.contains("puts back") && text.contains(FINALIZER)).count();
        assert_eq!(told, 1, "{:?}", lab.texts);
        lab.pass(REWRITES_WITHIN);
        assert_eq!(removals(&mut lab, 1), 1, "it tries again");
        lab.pass(REWRITES_WITHIN);
        lab.settle(6);
        assert!(!lab.queue.remembers_released(), "it is forgotten");
    }

    #[test]
    fn a_removal_that_the_server_refuses_or_of_a_deleted_object_is_tried_without_such_a_limit() {
        for is_deleted in [false, true] {
            let (mut lab, gateway) = Lab::programmed();
            lab.pass(Duration::from_secs(60));
            gateway.acknowledge(5);
            for version in 0..9 {
                let mut left = leftover(LeftBy::Us, is_deleted);
                Arc::make_mut(&mut left.left).resource_version = format!("9{version}");
                lab.leave(5, left);
                assert!(lab.due_unless(is_deleted).is_some(), "{is_deleted} {version}");
            }
        }
    }

    #[test]
    fn a_tool_that_takes_the_marks_away_is_named_with_a_remedy_that_can_be_followed() {
        let (mut lab, _gateway) = Lab::programmed();
        let strip = |held: &mut OwnedParts| (held.finalizer, held.group) = (false, None);
        assert_eq!(contested(&mut lab, 9, strip), REWRITES_MAX);
        let text = lab.texts.last().unwrap();
        assert!(text.starts_with("\"argocd-controller\" removes") && text.contains("ignoreDifferences"), "{text}");
        assert!(text.contains("sluice.dev/group") && !text.contains("class"), "{text}");
        let (mut lab, _gateway) = Lab::programmed();
        contested(&mut lab, 9, |held| held.ingress.clear());
        let text = lab.texts.last().unwrap();
        assert!(text.starts_with("\"rival\" keeps changing the status"), "{text}");
        assert!(lab.texts.iter().all(|text| text.chars().count() < 900));
    }
}
