//! What sysfs says of PCI devices: their drivers, and whether an IOMMU protects memory from them.
//!
//! Not here: findings (`devices`).

use super::root::Root;

/// The name of the groups that VFIO makes for devices without IOMMU (`vfio_noiommu_group_alloc` of Linux).
const FAKE_GROUP: &str = "vfio-noiommu";
const GROUPS: &str = "/sys/kernel/iommu_groups";

/// Whether the kernel uses an IOMMU. Groups that VFIO makes without one do not count.
pub(super) fn has_iommu(root: &Root) -> bool {
    root.names(GROUPS).iter().any(|group| is_real(root, group))
}

/// Whether DPDK takes the device by I/O ports and physical addresses: with a UIO driver, or without an IOMMU. A device
/// that is absent will come with VFIO.
#[must_use]
pub fn needs_raw_io(root: &Root, address: &str) -> bool {
    let is_uio = driver(root, address).is_some_and(|driver| driver.starts_with("uio_") || driver.ends_with("_uio"));
    let group = root.link(&format!("/sys/bus/pci/devices/{address}/iommu_group"));
    is_uio || !group.map_or_else(|| has_iommu(root), |group| is_real(root, &group))
}

/// The kernel driver that a device is bound to.
pub(in crate::tools) fn driver(root: &Root, address: &str) -> Option<String> {
    root.link(&format!("/sys/bus/pci/devices/{address}/driver"))
}

fn is_real(root: &Root, group: &str) -> bool {
    root.text(&format!("{GROUPS}/{group}/name")).as_deref() != Some(FAKE_GROUP)
}

#[cfg(test)]
mod tests {
    use super::super::root::tests::Machine;
    use super::*;

    const DEVICE: &str = "0000:3b:00.0";
    /// The group of no IOMMU, which the device is in.
    const FAKE: [(&str, &str); 2] = [
        ("/sys/kernel/iommu_groups/0/name", "vfio-noiommu\n"),
        ("/sys/bus/pci/devices/0000:3b:00.0/iommu_group", "-> ../../../kernel/iommu_groups/0"),
    ];
    /// Groups of an IOMMU. Some have a name, most have none.
    const REAL: [(&str, &str); 2] =
        [("/sys/kernel/iommu_groups/1/type", "DMA\n"), ("/sys/kernel/iommu_groups/2/name", "isolated\n")];
    const DRIVER: &str = "/sys/bus/pci/devices/0000:3b:00.0/driver";

    #[test]
    fn raw_access_is_needed_without_an_iommu_or_with_a_uio_driver() {
        let vfio = [(DRIVER, "-> ../../drivers/vfio-pci")];
        let (uio, igb_uio) = ([(DRIVER, "-> ../../drivers/uio_pci_generic")], [(DRIVER, "-> ../../drivers/igb_uio")]);
        type Row<'a> = (&'a [&'a [(&'a str, &'a str)]], bool, bool);
        let rows: [Row<'_>; 8] = [
            (&[], false, true),
            (&[&FAKE, &vfio], false, true),
            (&[&REAL], true, false),
            (&[&REAL[1..]], true, false),
            (&[&REAL, &vfio], true, false),
            (&[&REAL, &uio], true, true),
            (&[&REAL, &igb_uio], true, true),
            // An IOMMU for other devices than this one.
            (&[&REAL, &FAKE, &vfio], true, true),
        ];
        for (files, iommu, raw_io) in rows {
            let machine = Machine::new(&files.concat());
            let root = machine.root();
            assert_eq!((has_iommu(&root), needs_raw_io(&root, DEVICE)), (iommu, raw_io), "{files:?}");
        }
    }
}
