//! Whether systemd's unit lets the gateway do what its PCI ports need. `doctor`, run by hand, may do more than the unit.

use super::finding::Finding;
use crate::machine::{Needs, Root};

const UNIT: &str = "sluiced.service";
/// Where systemd looks for units and drop-ins.
const DIRECTORIES: [&str; 4] = ["/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];
/// What the unit leaves out, and PCI devices without an IOMMU need.
const RIGHTS: [&str; 3] = ["CAP_SYS_RAWIO", "CAP_SYS_ADMIN", "@raw-io"];

/// A finding if the unit is installed and a port's device comes without an IOMMU.
pub(super) fn examine(root: &Root, needs: &Needs) -> Option<Finding> {
    let texts = texts(root);
    if texts.is_empty() || !needs.raw_io(root) {
        return None;
    }
    let is_allowed =
        |right: &&str| texts.iter().flat_map(|text| text.lines()).any(|line| !line.starts_with('#') && line.contains(*right));
    let lacking: Vec<_> = RIGHTS.into_iter().filter(|right| !is_allowed(right)).collect();
    if lacking.is_empty() {
        return Some(Finding::ok(UNIT, "allows PCI devices without an IOMMU"));
    }
    let found = format!("lacks {} for PCI devices without an IOMMU", lacking.join(" "));
    let advice = "systemctl edit sluiced, with the lines of docs/operate/privileges.md (The units)";
    Some(Finding::lacking(is_enabled(root), UNIT, found, advice))
}

/// The texts of the unit and of its drop-ins.
fn texts(root: &Root) -> Vec<String> {
    let drop_ins = |directory: &str| {
        let directory = format!("{directory}/{UNIT}.d");
        root.names(&directory).into_iter().filter_map(move |name| root.text(&format!("{directory}/{name}"))).collect::<Vec<_>>()
    };
    let unit = DIRECTORIES.iter().find_map(|directory| root.text(&format!("{directory}/{UNIT}")));
    unit.map(|unit| std::iter::once(unit).chain(DIRECTORIES.iter().flat_map(|directory| drop_ins(directory))).collect())
        .unwrap_or_default()
}

/// Whether the unit starts with the machine.
fn is_enabled(root: &Root) -> bool {
    root.link(&format!("/etc/systemd/system/multi-user.target.wants/{UNIT}")).is_some()
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;
    use crate::machine::Machine;

    const UIO: (&str, &str) = ("/sys/bus/pci/devices/0000:3b:00.0/driver", "-> ../../drivers/uio_pci_generic");
    const SHIPPED: (&str, &str) = ("/usr/lib/systemd/system/sluiced.service", include_str!("../../../deploy/sluiced.service"));
    const ENABLED: (&str, &str) =
        ("/etc/systemd/system/multi-user.target.wants/sluiced.service", "-> /usr/lib/systemd/system/sluiced.service");
    const DROP_IN: (&str, &str) = (
        "/etc/systemd/system/sluiced.service.d/override.conf",
        "[Service]\nCapabilityBoundingSet=CAP_SYS_RAWIO CAP_SYS_ADMIN\nSystemCallFilter=@raw-io\n",
    );

    #[test]
    fn the_shipped_unit_needs_a_drop_in_for_a_device_without_an_iommu() {
        let needs = Needs { devices: vec!["0000:3b:00.0".parse().unwrap()], ..Needs::default() };
        let level = |files: &[(&str, &str)]| examine(&Machine::new(files).root(), &needs).map(|finding| finding.level);
        assert_eq!(level(&[UIO, SHIPPED, ENABLED]), Some(Level::Missing));
        assert_eq!(level(&[UIO, SHIPPED]), Some(Level::Note), "it may be started by hand");
        assert_eq!(level(&[UIO, SHIPPED, ENABLED, DROP_IN]), Some(Level::Ok));
        assert_eq!(level(&[UIO]), None, "no unit");
        let iommu = ("/sys/kernel/iommu_groups/1/type", "DMA\n");
        assert_eq!(level(&[iommu, SHIPPED, ENABLED]), None);
    }
}
