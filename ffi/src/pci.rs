//! What sysfs says of a PCI device: whether DPDK can take it from its kernel driver, and the next step if not. `sluiced
//! doctor` and the error of a start say the same, because both ask here.
//!
//! Not here: whether DPDK has a driver for the card, which only a probe shows.

use std::fs;
use std::path::Path;

/// Kernel drivers that hand a device over by physical addresses, without an IOMMU.
const UIO: [&str; 2] = ["uio_pci_generic", "igb_uio"];
/// Kernel drivers that share their device with DPDK.
const SHARED: [&str; 3] = ["mlx4_core", "mlx5_core", "mana"];
const VFIO: &str = "vfio-pci";
/// The name of the groups that VFIO makes for devices without IOMMU (`vfio_noiommu_group_alloc` of Linux).
const FAKE_GROUP: &str = "vfio-noiommu";
const GROUPS: &str = "sys/kernel/iommu_groups";
const DEVICES: &str = "sys/bus/pci/devices";
/// Exists while the module is loaded, if the kernel was built with `CONFIG_VFIO_NOIOMMU`.
const UNSAFE_MODE: &str = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode";

/// What a device's binding to a kernel driver means for DPDK.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// DPDK can take the device, if it has a driver for it.
    pub is_usable: bool,
    /// What was found.
    pub found: String,
    /// The next step; empty if the device is usable.
    pub advice: String,
}

/// VFIO's mode without IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoIommuMode {
    /// It is on.
    On,
    /// It can be switched on.
    Off,
    /// The kernel was built without it.
    NotBuilt,
    /// The module `vfio` is not loaded, so the kernel does not say.
    Unknown,
}

/// The mode, on the machine below `root` (`/` except in tests).
#[must_use]
pub fn no_iommu_mode(root: &Path) -> NoIommuMode {
    match fs::read_to_string(root.join(UNSAFE_MODE)).as_deref().map(str::trim) {
        Ok("Y" | "1") => NoIommuMode::On,
        Ok(_) => NoIommuMode::Off,
        Err(_) if root.join("sys/module/vfio").exists() => NoIommuMode::NotBuilt,
        Err(_) => NoIommuMode::Unknown,
    }
}

/// What to do on a machine whose kernel uses no IOMMU, so that VFIO can hand devices over.
#[must_use]
pub fn without_iommu(root: &Path) -> String {
    let boot = "boot with intel_iommu=on or amd_iommu=on";
    match no_iommu_mode(root) {
        NoIommuMode::On => format!("VFIO runs without one; a device can write to any memory: {boot} where the machine has one"),
        NoIommuMode::Off => format!("{boot}; in a VM without one: echo 1 > /{UNSAFE_MODE}"),
        NoIommuMode::NotBuilt => format!(
            "{boot}; without one use uio_pci_generic (modprobe uio_pci_generic), because VFIO of this kernel was built without \
             CONFIG_VFIO_NOIOMMU"
        ),
        NoIommuMode::Unknown => format!(
            "{boot}; in a VM without one: modprobe vfio-pci and run `sluiced doctor` again, which only then can know whether VFIO of \
             this kernel runs without one"
        ),
    }
}

/// Whether the kernel uses an IOMMU. Groups that VFIO makes without one do not count.
#[must_use]
pub fn has_iommu(root: &Path) -> bool {
    let groups = fs::read_dir(root.join(GROUPS)).into_iter().flatten().flatten();
    groups.filter_map(|entry| entry.file_name().into_string().ok()).any(|group| is_real(root, &group))
}

/// Whether DPDK takes the device by I/O ports and physical addresses: with a UIO driver, or without an IOMMU. A device
/// that is absent will come with VFIO, and one that shares its kernel driver needs neither.
#[must_use]
pub fn needs_raw_io(root: &Path, address: &str) -> bool {
    let driver = driver(root, address).unwrap_or_default();
    if SHARED.contains(&driver.as_str()) {
        return false;
    }
    UIO.contains(&driver.as_str()) || !group(root, address).map_or_else(|| has_iommu(root), |group| is_real(root, &group))
}

/// The kernel driver that a device is bound to.
#[must_use]
pub fn driver(root: &Path, address: &str) -> Option<String> {
    link(&root.join(DEVICES).join(address).join("driver"))
}

/// Whether a device needs VFIO: it is bound to it, or to nothing that DPDK can use instead.
#[must_use]
pub fn needs_vfio(root: &Path, address: &str) -> bool {
    driver(root, address).is_none_or(|driver| !UIO.contains(&driver.as_str()) && !SHARED.contains(&driver.as_str()))
}

/// Whether DPDK can take a device, on the machine below `root`.
#[must_use]
pub fn judge(root: &Path, address: &str) -> Verdict {
    let unusable = |found: String, advice: String| Verdict { is_usable: false, found, advice };
    let usable = |found: String| Verdict { is_usable: true, found, advice: String::new() };
    if !root.join(DEVICES).join(address).exists() {
        return unusable("not on the PCI bus".into(), "see `lspci -D`".into());
    }
    let Some(driver) = driver(root, address) else {
        return unusable("bound to no kernel driver".into(), bind(root, address));
    };
    let group = group(root, address);
    match driver.as_str() {
        VFIO if group.as_ref().is_some_and(|group| !is_real(root, group)) => {
            usable(format!("bound to {driver}, without an IOMMU"))
        }
        name if UIO.contains(&name) && group.as_ref().is_some_and(|group| translates(root, group)) => unusable(
            format!("bound to {driver}, which works by physical addresses, while the IOMMU translates the device's"),
            format!("{}; or boot with iommu=pt", bind(root, address)),
        ),
        name if UIO.contains(&name) => usable(format!("bound to {driver}, which needs no IOMMU")),
        name if name == VFIO || SHARED.contains(&name) => usable(format!("bound to {driver}")),
        _ => unusable(
            format!("bound to {driver}, which keeps it from DPDK"),
            format!("{} (its Linux interface goes away)", bind(root, address)),
        ),
    }
}

/// Why no driver of DPDK took a device, and the next step. `logged` is what DPDK said; `has_addresses`: the process may
/// learn physical addresses.
pub(crate) fn refusal(root: &Path, address: &str, logged: &[String], has_addresses: bool) -> String {
    let Verdict { is_usable, found, advice } = judge(root, address);
    let is_refused = |addresses: &str| logged.iter().any(|line| line.contains(&format!("Expecting '{addresses}' IOVA mode")));
    if !is_usable {
        return format!("it is {found}; {advice}");
    }
    let next = match (is_refused("PA"), is_refused("VA")) {
        (true, _) if !has_addresses => {
            "DPDK takes it by physical addresses, for which this process lacks CAP_SYS_ADMIN and CAP_SYS_RAWIO: under systemd add the \
             lines for PCI without IOMMU of docs/operate/privileges.md (\"The units\")"
        }
        (true, _) => {
            "DPDK takes it by physical addresses and other ports by those of the IOMMU, which excludes each other: bind all ports to \
             vfio-pci, or all to the same UIO driver"
        }
        (_, true) => "its driver of DPDK needs the addresses of an IOMMU: bind it to vfio-pci with the IOMMU on",
        _ => "no driver of DPDK took it: `sluiced doctor` shows where drivers are looked for",
    };
    format!("it is {found}, and {next}")
}

/// How to bind a device so that DPDK can take it.
fn bind(root: &Path, address: &str) -> String {
    let to = |driver: &str| format!("dpdk-devbind.py -b {driver} {address}");
    if has_iommu(root) || no_iommu_mode(root) == NoIommuMode::On {
        return to(VFIO);
    }
    if no_iommu_mode(root) == NoIommuMode::NotBuilt {
        return format!("{}; then {}", without_iommu(root), to("vfio-pci, or uio_pci_generic,"));
    }
    format!("{}; then {}", without_iommu(root), to(VFIO))
}

fn group(root: &Path, address: &str) -> Option<String> {
    link(&root.join(DEVICES).join(address).join("iommu_group"))
}

fn is_real(root: &Path, group: &str) -> bool {
    let name = fs::read_to_string(root.join(GROUPS).join(group).join("name"));
    name.map_or(true, |name| name.trim() != FAKE_GROUP)
}

/// Whether the IOMMU translates the addresses of a group: its type is `DMA` or `DMA-FQ`, not `identity`.
fn translates(root: &Path, group: &str) -> bool {
    let kind = fs::read_to_string(root.join(GROUPS).join(group).join("type"));
    is_real(root, group) && kind.is_ok_and(|kind| kind.starts_with("DMA"))
}

/// The last part of the target of a symbolic link.
fn link(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    target.file_name().and_then(|name| name.to_str()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: &str = "0000:3b:00.0";
    type File<'a> = (&'a str, &'a str);
    const BUS: File<'_> = ("sys/bus/pci/devices/0000:3b:00.0/class", "0x020000\n");
    /// The group of no IOMMU, which the device is in.
    const FAKE: [File<'_>; 2] = [
        ("sys/kernel/iommu_groups/0/name", "vfio-noiommu\n"),
        ("sys/bus/pci/devices/0000:3b:00.0/iommu_group", "-> ../../../kernel/iommu_groups/0"),
    ];
    /// Groups of an IOMMU. Some have a name, most have none. The device is in the first.
    const REAL: [File<'_>; 3] = [
        ("sys/kernel/iommu_groups/1/type", "DMA\n"),
        ("sys/kernel/iommu_groups/2/name", "isolated\n"),
        ("sys/bus/pci/devices/0000:3b:00.0/iommu_group", "-> ../../../kernel/iommu_groups/1"),
    ];
    /// As with `iommu=pt`.
    const IDENTITY: [File<'_>; 2] = [
        ("sys/kernel/iommu_groups/1/type", "identity\n"),
        ("sys/bus/pci/devices/0000:3b:00.0/iommu_group", "-> ../../../kernel/iommu_groups/1"),
    ];
    const UNSAFE_ON: [File<'_>; 1] = [("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y\n")];
    const UNSAFE_OFF: [File<'_>; 1] = [("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "N\n")];
    const NOT_BUILT: [File<'_>; 1] = [("sys/module/vfio/srcversion", "1\n")];

    /// A machine of files; contents that begin with `-> ` make a symbolic link.
    fn machine(files: &[File<'_>], driver: Option<&str>) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let driver = driver.map(|driver| ("sys/bus/pci/devices/0000:3b:00.0/driver", format!("-> ../../drivers/{driver}")));
        let driver = driver.iter().map(|(path, target)| (*path, target.as_str()));
        for (path, contents) in files.iter().copied().chain(driver) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match contents.strip_prefix("-> ") {
                Some(target) => std::os::unix::fs::symlink(target, path).unwrap(),
                None => fs::write(path, contents).unwrap(),
            }
        }
        root
    }

    #[test]
    fn raw_access_is_needed_without_an_iommu_or_with_a_uio_driver() {
        type Row<'a> = (&'a [&'a [File<'a>]], Option<&'a str>, bool, bool);
        let rows: [Row<'_>; 10] = [
            (&[], None, false, true),
            (&[&FAKE], Some("vfio-pci"), false, true),
            (&[&REAL], None, true, false),
            (&[&REAL[1..2]], None, true, false),
            (&[&REAL], Some("vfio-pci"), true, false),
            (&[&REAL], Some("uio_pci_generic"), true, true),
            (&[&REAL], Some("igb_uio"), true, true),
            (&[], Some("mlx5_core"), false, false),
            (&[], Some("uio_pci_generic"), false, true),
            // An IOMMU for other devices than this one.
            (&[&REAL[..2], &FAKE], Some("vfio-pci"), true, true),
        ];
        for (files, driver, iommu, raw_io) in rows {
            let machine = machine(&files.concat(), driver);
            let found = (has_iommu(machine.path()), needs_raw_io(machine.path(), DEVICE));
            assert_eq!(found, (iommu, raw_io), "{files:?} {driver:?}");
        }
    }

    #[test]
    fn each_driver_that_can_be_bound_has_its_verdict_and_the_next_step() {
        type Row<'a> = (&'a [&'a [File<'a>]], Option<&'a str>, bool, &'a str, &'a str);
        let rows: [Row<'_>; 16] = [
            (&[&REAL], Some("vfio-pci"), true, "bound to vfio-pci", ""),
            (&[&FAKE, &UNSAFE_ON], Some("vfio-pci"), true, "bound to vfio-pci, without an IOMMU", ""),
            (&[], Some("uio_pci_generic"), true, "bound to uio_pci_generic, which needs no IOMMU", ""),
            (&[], Some("igb_uio"), true, "bound to igb_uio, which needs no IOMMU", ""),
            (&[&IDENTITY], Some("uio_pci_generic"), true, "bound to uio_pci_generic, which needs no IOMMU", ""),
            (&[&REAL], Some("uio_pci_generic"), false, "the IOMMU translates", "-b vfio-pci 0000:3b:00.0; or boot with iommu=pt"),
            (&[], Some("mlx5_core"), true, "bound to mlx5_core", ""),
            (&[], Some("mana"), true, "bound to mana", ""),
            (&[], Some("uio_hv_generic"), false, "bound to uio_hv_generic, which keeps it from DPDK", "only then can know"),
            (
                &[&REAL],
                Some("ixgbe"),
                false,
                "bound to ixgbe, which keeps it from DPDK",
                "dpdk-devbind.py -b vfio-pci 0000:3b:00.0 (its",
            ),
            (&[&REAL], None, false, "bound to no kernel driver", "dpdk-devbind.py -b vfio-pci 0000:3b:00.0"),
            (&[&UNSAFE_ON], None, false, "bound to no kernel driver", "dpdk-devbind.py -b vfio-pci 0000:3b:00.0"),
            (&[&UNSAFE_OFF], None, false, "bound to no kernel driver", "echo 1 > /sys/module/vfio/parameters/enable_unsafe"),
            (&[&NOT_BUILT], None, false, "bound to no kernel driver", "modprobe uio_pci_generic"),
            (&[], None, false, "bound to no kernel driver", "only then can know"),
            (&[], Some("igb"), false, "bound to igb, which keeps it from DPDK", "only then can know"),
        ];
        for (files, driver, is_usable, found, advice) in rows {
            let mut files = files.concat();
            files.push(BUS);
            let machine = machine(&files, driver);
            let verdict = judge(machine.path(), DEVICE);
            assert_eq!(
                (verdict.is_usable, verdict.advice.is_empty()),
                (is_usable, is_usable),
                "{files:?} {driver:?} {verdict:?}"
            );
            assert!(verdict.found.contains(found) && verdict.advice.contains(advice), "{files:?} {driver:?} {verdict:?}");
            let modes = if files.iter().any(|(path, _)| path.ends_with("noiommu_mode")) { 1 } else { 0 };
            let advises_mode = verdict.advice.contains("echo 1 >");
            assert!(!advises_mode || modes == 1, "a mode that the kernel may not have: {verdict:?}");
        }
        assert_eq!(judge(machine(&[], None).path(), DEVICE).found, "not on the PCI bus");
    }

    #[test]
    fn the_error_of_a_start_agrees_with_the_verdict_and_names_what_the_process_lacks() {
        let expecting =
            |addresses| vec![format!("Expecting '{addresses}' IOVA mode but current mode is another, not initializing")];
        let uio = machine(&[BUS], Some("uio_pci_generic"));
        let text = refusal(uio.path(), DEVICE, &expecting("PA"), false);
        assert!(text.contains("lacks CAP_SYS_ADMIN") && !text.contains("vfio"), "{text}");
        let text = refusal(uio.path(), DEVICE, &expecting("PA"), true);
        assert!(text.contains("excludes each other"), "{text}");
        let text = refusal(machine(&[BUS], Some("vfio-pci")).path(), DEVICE, &expecting("VA"), true);
        assert!(text.contains("with the IOMMU on"), "{text}");
        let text = refusal(uio.path(), DEVICE, &[], true);
        assert!(text.contains("no driver of DPDK took it"), "{text}");
        let kernel = machine(&[BUS, REAL[0], REAL[2]], Some("ixgbe"));
        let Verdict { found, advice, .. } = judge(kernel.path(), DEVICE);
        assert_eq!(refusal(kernel.path(), DEVICE, &[], true), format!("it is {found}; {advice}"));
    }
}
