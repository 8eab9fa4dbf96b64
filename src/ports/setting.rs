//! Settings of Linux interfaces below `/proc/sys/net`.

use std::io;
use std::path::{Path, PathBuf};

/// Where the settings are, by preference. A container may only read its own `/proc/sys`. There the node's directory is
/// mounted beside it, through which a process sees the settings of its own network namespace.
pub const SETTING_ROOTS: [&str; 2] = ["/host/proc/sys/net", "/proc/sys/net"];

/// A setting of an interface could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step} {}: {source}", path.display())]
pub struct SettingError {
    path: PathBuf,
    /// `read`, or the value as in `write 1 to`.
    step: String,
    source: io::Error,
}

/// The file of a setting, such as `disable_ipv6` of family `ipv6`.
pub(super) fn path(family: &str, interface: &str, setting: &str) -> PathBuf {
    let root = SETTING_ROOTS.into_iter().find(|root| Path::new(root).is_dir()).unwrap_or(SETTING_ROOTS[1]);
    PathBuf::from(format!("{root}/{family}/conf/{interface}/{setting}"))
}

/// Writes a setting, unless the kernel lacks it, as one without IPv6 does.
pub(super) fn write(family: &str, interface: &str, setting: &str, value: &'static str) -> Result<(), SettingError> {
    let path = path(family, interface, setting);
    match std::fs::write(&path, value) {
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.map_err(|source| SettingError { path, step: format!("write {value} to"), source }),
    }
}

/// Reads a setting; none if the kernel lacks it. An error is not such a kernel.
pub(super) fn read(family: &str, interface: &str, setting: &str) -> Result<Option<String>, SettingError> {
    let path = path(family, interface, setting);
    match std::fs::read_to_string(&path) {
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        outcome => outcome.map(Some).map_err(|source| SettingError { path, step: "read".to_owned(), source }),
    }
}
