//! The workers' cores: existing, permitted and isolated.

use super::finding::Finding;
use crate::machine::{Needs, Root, show_list};

/// `refused` are the cores to which the kernel refuses to pin threads, with the reason. The CPU mask does not show
/// this: `isolcpus` removes cores from it to which workers can be pinned.
pub(super) fn examine(root: &Root, needs: &Needs, refused: &[(usize, String)]) -> Vec<Finding> {
    let online = root.list("/sys/devices/system/cpu/online");
    let mut findings = vec![Finding::ok("cores online", show_list(&online))];
    for &core in &needs.cores {
        if !online.contains(&core) {
            findings.push(Finding::missing(format!("core {core}"), "not online", "choose from the cores that are online"));
        } else if let Some((_, why)) = refused.iter().find(|(refused, _)| *refused == core) {
            let found = format!("no thread may be pinned to it: {why}");
            findings.push(Finding::missing(format!("core {core}"), found, "widen the cpuset or the container's limits"));
        }
    }
    if needs.polls_busy && !needs.cores.is_empty() && online.iter().all(|core| needs.cores.contains(core)) {
        let advice = "leave a core to Linux, the probes and the twin thread, or set workers.poll: adaptive";
        findings.push(Finding::note("cores for the rest", "none: busy workers have all", advice));
    }
    findings.push(set_aside(
        root,
        needs,
        "isolated cores",
        "isolated",
        "the scheduler puts other work on them; boot with isolcpus=",
    ));
    findings.push(set_aside(root, needs, "nohz_full cores", "nohz_full", "the timer interrupts them; boot with nohz_full="));
    findings
}

/// Whether a boot parameter isolates the workers' cores.
fn set_aside(root: &Root, needs: &Needs, subject: &str, file: &str, why: &str) -> Finding {
    let listed = root.list(&format!("/sys/devices/system/cpu/{file}"));
    let outside: Vec<usize> = needs.cores.iter().copied().filter(|core| !listed.contains(core)).collect();
    if outside.is_empty() {
        return Finding::ok(subject, show_list(&listed));
    }
    let cores = show_list(&outside);
    Finding::note(subject, format!("{}; of the workers' cores {cores} not", show_list(&listed)), format!("{why}{cores}"))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;
    use crate::machine::Machine;

    fn machine() -> Machine {
        Machine::new(&[
            ("/sys/devices/system/cpu/online", "0-3\n"),
            ("/sys/devices/system/cpu/isolated", "2-3\n"),
            ("/sys/devices/system/cpu/nohz_full", "\n"),
            // As `isolcpus=2-3` leaves it.
            ("/proc/self/status", "Name:\tsluiced\nCpus_allowed_list:\t0-1\n"),
        ])
    }

    fn findings(cores: Vec<usize>) -> Vec<Finding> {
        let refused = [(3, "Invalid argument".to_owned())];
        examine(&machine().root(), &Needs { cores, polls_busy: true, ..Needs::default() }, &refused)
    }

    #[test]
    fn a_core_that_is_absent_or_refused_is_missing_and_an_isolated_one_is_not() {
        let findings = findings(vec![2, 3, 9]);
        let missing: Vec<_> = findings.iter().filter(|finding| finding.level == Level::Missing).collect();
        assert_eq!(missing.len(), 2);
        assert_eq!(
            (missing[0].subject.as_str(), missing[0].found.as_str()),
            ("core 3", "no thread may be pinned to it: Invalid argument")
        );
        assert_eq!((missing[1].subject.as_str(), missing[1].found.as_str()), ("core 9", "not online"));
    }

    #[test]
    fn a_core_that_is_not_isolated_is_a_note_with_the_boot_parameter() {
        let findings = findings(vec![1, 2]);
        let isolated = findings.iter().find(|finding| finding.subject == "isolated cores").unwrap();
        assert_eq!(isolated.found, "2-3; of the workers' cores 1 not");
        assert!(isolated.advice.ends_with("isolcpus=1"));
        let nohz = findings.iter().find(|finding| finding.subject == "nohz_full cores").unwrap();
        assert!(nohz.advice.ends_with("nohz_full=1-2"));
    }

    #[test]
    fn busy_workers_on_every_core_are_a_note() {
        assert!(findings(vec![0, 1, 2, 3]).iter().any(|finding| finding.subject == "cores for the rest"));
        assert!(!findings(vec![0, 1, 2]).iter().any(|finding| finding.subject == "cores for the rest"));
    }
}
