//! Landlock: writes only below directories that the configuration names, and programs only of the system.
//!
//! Invariant: reading is not restricted, because certificates, kubeconfigs and libraries may lie anywhere. Nothing can be
//! executed from a directory that is writable here.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use control::config::settings::{ControllerSettings, Source};
use dpdk_sys::Device;
use landlock::{ABI, AccessFs, BitFlags, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, path_beneath_rules};
use rustix::fs::{Mode, OFlags, open};

use super::needs::{PortNeeds, embedded};
use crate::ports::SETTING_ROOTS;
use crate::settings::{RecordTarget, Settings};

/// The newest rights that are used: truncation. Debian 12 has those of version 2.
const RIGHTS: ABI = ABI::V3;
/// The directory of DPDK, of root alone, unless systemd names another.
const DPDK: &str = "/run/dpdk";
/// Files of `/proc` that are written. They are kept open, because a rule is for an inode, and that of a file of `/proc`
/// changes when nobody uses it.
const PROC: [&str; 3] = [SETTING_ROOTS[0], SETTING_ROOTS[1], "/proc/self"];
/// Devices that are written: taps, VFIO, RDMA, hugepages.
const DEVICES: [&str; 5] = ["/dev/null", "/dev/net", "/dev/vfio", "/dev/infiniband", "/dev/hugepages"];
/// The settings of devices in `/sys`, for PCI and af_xdp.
const SYS: [&str; 2] = ["/sys/devices", "/sys/fs/bpf"];
/// Where programs are: `ethtool`, and programs that a kubeconfig names beside those in `PATH`.
const PROGRAMS: [&str; 6] = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt"];

/// Restricts the calling thread and those that it starts.
pub(super) fn restrict(settings: &Settings, needs: PortNeeds) -> Result<(), String> {
    let (written, executed) = (written(settings, needs), executed());
    for path in PROC {
        if let Ok(kept) = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            std::mem::forget(kept);
        }
    }
    let status = Ruleset::default()
        .handle_access(AccessFs::from_write(RIGHTS) | AccessFs::Execute)
        .and_then(Ruleset::create)
        .and_then(|rules| rules.add_rules(path_beneath_rules(&written, write_rights())))
        .and_then(|rules| rules.add_rules(path_beneath_rules(&executed, AccessFs::Execute)))
        .and_then(landlock::RulesetCreated::restrict_self)
        .map_err(|error| error.to_string())?;
    match status.ruleset {
        RulesetStatus::NotEnforced => Err("the kernel has no Landlock, or it is switched off (lsm=)".to_owned()),
        RulesetStatus::PartiallyEnforced | RulesetStatus::FullyEnforced => Ok(()),
    }
}

/// All but new device files.
fn write_rights() -> BitFlags<AccessFs> {
    AccessFs::from_write(RIGHTS) & !(AccessFs::MakeChar | AccessFs::MakeBlock)
}

/// What is written. Directories of the configuration are created, because a rule needs an inode.
fn written(settings: &Settings, needs: PortNeeds) -> BTreeSet<PathBuf> {
    let mut paths: BTreeSet<PathBuf> = directories(settings).into_iter().map(Path::to_owned).collect();
    match env::var_os("RUNTIME_DIRECTORY") {
        Some(directories) => paths.extend(env::split_paths(&directories)),
        None => paths.extend([DPDK.into()].into_iter().chain(env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from))),
    }
    for path in &paths {
        let mode = if path == Path::new(DPDK) { 0o700 } else { 0o755 };
        if let Err(error) = fs::DirBuilder::new().recursive(true).mode(mode).create(path) {
            tracing::debug!(path = %path.display(), %error, "a directory cannot be created; nothing can be written there");
        }
    }
    paths.extend(PROC.iter().chain(&DEVICES).map(PathBuf::from));
    paths.extend(of_plugins(settings).into_iter().chain(of_devices(settings)));
    if needs.pinned_memory {
        paths.extend(SYS.map(PathBuf::from));
    }
    // UIO's devices, and those of VFIO before its module is loaded, have no directory of their own.
    if needs.raw_io || (needs.pinned_memory && !Path::new("/dev/vfio").exists()) {
        paths.insert("/dev".into());
    }
    paths
}

/// Directories of state, status, sockets and flow records.
fn directories(settings: &Settings) -> Vec<&Path> {
    let controller = embedded(settings);
    let status = controller.and_then(|controller| match &controller.source {
        Source::Manifests { status_dir, .. } => Some(status_dir.as_path()),
        Source::Kubernetes { .. } => None,
    });
    let socket = controller.and_then(|controller| controller.listen.unix.as_deref()).and_then(Path::parent);
    let records = match &settings.flow_records {
        Some(RecordTarget::File(path)) => path.parent().filter(|dir| !has_programs(dir)),
        _ => None,
    };
    let more = [status, socket, settings.admin_listen.unix.parent(), records];
    [settings.state_dir.as_path()].into_iter().chain(more.into_iter().flatten()).collect()
}

/// Where programs that a kubeconfig names keep temporary files and tokens. They are not created here.
fn of_plugins(settings: &Settings) -> Vec<PathBuf> {
    let kubeconfig =
        |controller: &ControllerSettings| matches!(controller.source, Source::Kubernetes { kubeconfig: Some(_), .. });
    if !embedded(settings).is_some_and(kubeconfig) {
        return Vec::new();
    }
    let in_home = |path| env::home_dir().map(|home| home.join(path));
    let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    [Some(env::temp_dir()), cache.or_else(|| in_home(".cache")), in_home(".kube/cache")].into_iter().flatten().collect()
}

/// What the arguments of devices name: a file of `/dev` itself, of a socket or a capture its directory, in which it is
/// made. A directory of programs stays read-only.
fn of_devices(settings: &Settings) -> Vec<PathBuf> {
    let parts: Vec<Device> = settings.ports.iter().flat_map(|port| port.device.parts()).collect();
    let written = |file: &Path| match file.parent() {
        Some(dir) if !dir.starts_with("/dev") && !has_programs(dir) => dir.to_owned(),
        _ => file.to_owned(),
    };
    parts.iter().flat_map(Device::files).map(written).collect()
}

/// Whether programs are in a directory, above it or below.
fn has_programs(dir: &Path) -> bool {
    executed().iter().any(|other| other.starts_with(dir) || dir.starts_with(other))
}

fn executed() -> BTreeSet<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    // A directory that anybody may write to must not be here; root's PATH has none.
    PROGRAMS.iter().map(PathBuf::from).chain(env::split_paths(&path).filter(|path| path.is_absolute())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::SourceChoice;

    fn settings(source: &str) -> Settings {
        with_device("net_tap0", source)
    }

    fn with_device(device: &str, source: &str) -> Settings {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sluice.yaml");
        fs::write(&file, format!("name: edge\nports: [{{name: uplink, device: \"{device}\"}}]\n{source}\n")).unwrap();
        Settings::read(&file, &SourceChoice::File).unwrap()
    }

    #[test]
    fn programs_of_a_kubeconfig_may_write_temporary_files_and_caches() {
        let dirs = of_plugins(&settings("kubernetes: {kubeconfig: k}"));
        assert!(dirs.contains(&env::temp_dir()) && dirs.iter().any(|dir| dir.ends_with(".kube/cache")), "{dirs:?}");
        assert!(dirs.iter().all(|dir| executed().iter().all(|programs| !dir.starts_with(programs))), "{dirs:?}");
        for source in ["manifests: m", "controller: {urls: [\"unix:/c.sock\"]}"] {
            assert_eq!(of_plugins(&settings(source)), Vec::<PathBuf>::new(), "{source}");
        }
    }

    #[test]
    fn devices_may_write_what_their_arguments_name() {
        let rows = [
            ("net_virtio_user0,path=/dev/vhost-net,iface=v0", "/dev/vhost-net"),
            ("net_memif0,role=server,socket=/run/memif/a.sock", "/run/memif"),
            ("net_vhost0,iface=/srv/vhost/a.sock", "/srv/vhost"),
            ("net_pcap0,tx_pcap=/srv/out.pcap", "/srv"),
            // Nothing that is executed is writable.
            ("net_pcap0,tx_pcap=/usr/lib/out.pcap", "/usr/lib/out.pcap"),
            ("net_pcap0,tx_pcap=/out.pcap", "/out.pcap"),
        ];
        for (device, path) in rows {
            assert_eq!(of_devices(&with_device(device, "manifests: m")), [Path::new(path)], "{device}");
        }
        assert_eq!(of_devices(&settings("manifests: m")), Vec::<PathBuf>::new());
    }
}
