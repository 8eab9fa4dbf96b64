//! Hugepages, per size and NUMA node, and transparent huge pages.

use super::finding::Finding;
use crate::machine::{HUGEPAGES, Needs, Root, free_hugepages_mb, hugepage_sizes};

pub(super) fn examine(root: &Root, needs: &Needs) -> Vec<Finding> {
    let mut findings = hugepages(root, needs);
    findings.push(transparent(root));
    findings
}

fn hugepages(root: &Root, needs: &Needs) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (size, page_kb) in hugepage_sizes(root, HUGEPAGES) {
        let read = |name: &str| root.number::<u64>(&format!("{HUGEPAGES}/{size}/{name}")).unwrap_or(0);
        let (free, total) = (read("free_hugepages"), read("nr_hugepages"));
        let found = format!("{free} of {total} free{}", by_node(root, &size));
        findings.push(Finding::ok(format!("hugepages of {}", page_size(page_kb)), found));
    }
    let free_mb = free_hugepages_mb(root, HUGEPAGES);
    let required = needs.hugepages_required || needs.has_pci_device();
    let wanted_mb = needs.memory_mb.max(1);
    let found =
        if needs.memory_mb == 0 { format!("{free_mb} MB free") } else { format!("{free_mb} MB free, {wanted_mb} MB needed") };
    let subject = "hugepage memory";
    findings.push(if free_mb >= wanted_mb {
        Finding::ok(subject, found)
    } else if required {
        Finding::missing(subject, found, format!("sysctl vm.nr_hugepages={} (2 MB each)", wanted_mb.div_ceil(2)))
    } else {
        Finding::note(subject, found, "without them, packets live in ordinary pages, which is slower; PCI ports do not work")
    });
    findings
}

fn page_size(page_kb: u64) -> String {
    match page_kb {
        1_048_576.. => format!("{} GB", page_kb / 1_048_576),
        1024.. => format!("{} MB", page_kb / 1024),
        _ => format!("{page_kb} KB"),
    }
}

/// Free pages by node, on machines with more than one.
fn by_node(root: &Root, size: &str) -> String {
    let nodes: Vec<String> = root.names("/sys/devices/system/node").into_iter().filter(|name| is_node(name)).collect();
    if nodes.len() < 2 {
        return String::new();
    }
    let free = |node: &String| {
        let path = format!("/sys/devices/system/node/{node}/hugepages/{size}/free_hugepages");
        format!("{node}: {}", root.number::<u64>(&path).unwrap_or(0))
    };
    format!(" ({})", nodes.iter().map(free).collect::<Vec<_>>().join(", "))
}

/// `node0`, not `online`.
fn is_node(name: &str) -> bool {
    name.strip_prefix("node").is_some_and(|number| number.parse::<u16>().is_ok())
}

fn transparent(root: &Root) -> Finding {
    let subject = "transparent huge pages";
    match root.text("/sys/kernel/mm/transparent_hugepage/enabled") {
        Some(modes) if modes.contains("[always]") || modes.contains("[madvise]") => Finding::ok(subject, modes),
        Some(modes) => Finding::note(
            subject,
            modes,
            "flow tables miss the TLB at each packet; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        None => Finding::note(subject, "not in this kernel", "flow tables miss the TLB at each packet"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;

    use super::*;
    use crate::machine::Machine;

    fn machine(free: &str) -> Machine {
        Machine::new(&[
            ("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512\n"),
            ("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", free),
            ("/sys/devices/system/node/online", "0-1\n"),
            ("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", "7\n"),
            ("/sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages", "9\n"),
            ("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        ])
    }

    #[test]
    fn free_pages_are_shown_by_size_and_node() {
        let findings = examine(&machine("16\n").root(), &Needs { memory_mb: 32, ..Needs::default() });
        assert_eq!(findings[0], Finding::ok("hugepages of 2 MB", "16 of 512 free (node0: 7, node1: 9)"));
        assert_eq!(findings[1], Finding::ok("hugepage memory", "32 MB free, 32 MB needed"));
        assert_eq!(findings[2].level, Level::Ok);
    }

    #[test]
    fn too_few_are_missing_for_a_pci_port_and_a_note_otherwise() {
        let needs = |device: &str| Needs { devices: vec![device.parse().unwrap()], memory_mb: 100, ..Needs::default() };
        let with_pci = examine(&machine("16\n").root(), &needs("0000:3b:00.0"));
        assert_eq!((with_pci[1].level, with_pci[1].advice.as_str()), (Level::Missing, "sysctl vm.nr_hugepages=50 (2 MB each)"));
        assert_eq!(examine(&machine("16\n").root(), &needs("net_null0"))[1].level, Level::Note);
    }
}
