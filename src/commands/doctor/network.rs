//! Requirements of the Linux side: privileges, taps, size of the neighbour table.

use super::finding::Finding;
use crate::machine::{Needs, Root};

/// Neighbour table size below which there is a note: every on-link client and backend needs an entry, and beyond the
/// limit Linux drops silently.
const NEIGHBOURS_AMPLE: u64 = 8192;

/// A capability, its number in `linux/capability.h`, and what it is for.
struct Capability {
    name: &'static str,
    bit: u32,
    purpose: &'static str,
    /// Whether the configuration needs it on this machine.
    needed: fn(&Root, &Needs) -> bool,
}

const CAPABILITIES: [Capability; 7] = [
    Capability {
        name: "CAP_NET_ADMIN",
        bit: 12,
        purpose: "twins, addresses, neighbours, tap and af_xdp",
        needed: |_, needs| needs.twins || needs.has_driver("net_tap") || needs.has_driver("net_af_"),
    },
    Capability { name: "CAP_NET_RAW", bit: 13, purpose: "af_packet and af_xdp", needed: |_, needs| needs.has_driver("net_af_") },
    Capability { name: "CAP_IPC_LOCK", bit: 14, purpose: "memory of PCI devices", needed: |_, needs| needs.has_pci_device() },
    Capability { name: "CAP_BPF", bit: 39, purpose: "af_xdp", needed: |_, needs| needs.has_driver("net_af_xdp") },
    Capability {
        name: "CAP_SYS_ADMIN",
        bit: 21,
        purpose: "physical addresses of PCI devices without IOMMU, and af_xdp",
        needed: needs_sys_admin,
    },
    Capability { name: "CAP_SYS_RAWIO", bit: 17, purpose: "PCI devices without IOMMU", needed: |root, needs| needs.raw_io(root) },
    Capability { name: "CAP_SYS_NICE", bit: 23, purpose: "NUMA placement of memory", needed: |_, _| false },
];

fn needs_sys_admin(root: &Root, needs: &Needs) -> bool {
    needs.raw_io(root) || needs.has_driver("net_af_xdp")
}

pub(super) fn examine(root: &Root, needs: &Needs) -> Vec<Finding> {
    let mut findings = capabilities(root, needs);
    findings.push(tun(root, needs));
    findings.extend(["ipv4", "ipv6"].map(|family| neighbours(root, family)));
    findings
}

fn capabilities(root: &Root, needs: &Needs) -> Vec<Finding> {
    let status = root.text("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let held = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let judge = |capability: &Capability| {
        if held & (1 << capability.bit) != 0 {
            return Finding::ok(capability.name, "held");
        }
        let found = format!("not held (for {})", capability.purpose);
        let advice = format!("run as root, or grant it: AmbientCapabilities={} (systemd)", capability.name);
        Finding::lacking((capability.needed)(root, needs), capability.name, found, advice)
    };
    CAPABILITIES.iter().map(judge).collect()
}

fn tun(root: &Root, needs: &Needs) -> Finding {
    if root.exists("/dev/net/tun") {
        return Finding::ok("tap", "/dev/net/tun");
    }
    let needed = needs.twins || needs.has_driver("net_tap");
    Finding::lacking(needed, "tap", "no /dev/net/tun", "modprobe tun; give a container the device")
}

fn neighbours(root: &Root, family: &str) -> Finding {
    let subject = format!("{family} neighbours");
    let read = |n: u8| root.number::<u64>(&format!("/proc/sys/net/{family}/neigh/default/gc_thresh{n}"));
    let (Some(first), Some(second), Some(third)) = (read(1), read(2), read(3)) else {
        if !root.exists(&format!("/proc/sys/net/{family}")) {
            return Finding::note(subject, format!("this kernel has no {family}"), "fine if no port has such an address");
        }
        let advice = "only the network namespace of the machine shows gc_thresh, and its limits hold in all: look there";
        return Finding::note(subject, "gc_thresh cannot be read in this network namespace", advice);
    };
    let found = format!("gc_thresh1-3 {first} {second} {third}");
    if third >= NEIGHBOURS_AMPLE {
        return Finding::ok(subject, found);
    }
    let advice = format!(
        "beyond {third} neighbours (on-link clients, backends) Linux refuses new ones; sysctl net.{family}.neigh.default.gc_thresh3={NEIGHBOURS_AMPLE}, \
         gc_thresh2 half, gc_thresh1 a quarter"
    );
    Finding::note(subject, found, advice)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;
    use crate::machine::Machine;

    fn level(machine: &Machine, devices: &[&str], subject: &str) -> Level {
        let needs =
            Needs { devices: devices.iter().map(|&device| device.parse().unwrap()).collect(), twins: true, ..Needs::default() };
        let findings = examine(&machine.root(), &needs);
        findings.iter().find(|finding| finding.subject == subject).unwrap().level
    }

    #[test]
    fn a_capability_is_missing_only_where_a_device_needs_it() {
        // CAP_NET_ADMIN only.
        let machine = Machine::new(&[("/proc/self/status", "CapInh:\t0\nCapEff:\t0000000000001000\n")]);
        assert_eq!(level(&machine, &["net_tap0"], "CAP_NET_ADMIN"), Level::Ok);
        assert_eq!(level(&machine, &["net_tap0"], "CAP_NET_RAW"), Level::Note);
        assert_eq!(level(&machine, &["net_af_packet0,iface=a"], "CAP_NET_RAW"), Level::Missing);
        assert_eq!(level(&machine, &["net_af_packet0,iface=a"], "CAP_BPF"), Level::Note);
        assert_eq!(level(&machine, &["net_af_xdp0,iface=a"], "CAP_BPF"), Level::Missing);
    }

    #[test]
    fn the_tun_device_is_needed_by_twins() {
        assert_eq!(level(&Machine::new(&[]), &["net_null0"], "tap"), Level::Missing);
        assert_eq!(level(&Machine::new(&[("/dev/net/tun", "")]), &["net_null0"], "tap"), Level::Ok);
    }

    #[test]
    fn a_family_that_the_kernel_lacks_is_told_from_limits_that_a_namespace_does_not_show() {
        let machine = Machine::new(&[("/proc/sys/net/ipv4/ip_forward", "0\n")]);
        let findings = examine(&machine.root(), &Needs::default());
        let found = |subject: &str| findings.iter().find(|found| found.subject == subject).unwrap().found.clone();
        assert_eq!(found("ipv4 neighbours"), "gc_thresh cannot be read in this network namespace");
        assert_eq!(found("ipv6 neighbours"), "this kernel has no ipv6");
    }

    #[test]
    fn the_kernels_default_room_for_neighbours_is_a_note() {
        let thresholds = |third: &str| {
            Machine::new(&[
                ("/proc/sys/net/ipv4/neigh/default/gc_thresh1", "128\n"),
                ("/proc/sys/net/ipv4/neigh/default/gc_thresh2", "512\n"),
                ("/proc/sys/net/ipv4/neigh/default/gc_thresh3", third),
            ])
        };
        assert_eq!(level(&thresholds("1024\n"), &[], "ipv4 neighbours"), Level::Note);
        assert_eq!(level(&thresholds("8192\n"), &[], "ipv4 neighbours"), Level::Ok);
    }
}
