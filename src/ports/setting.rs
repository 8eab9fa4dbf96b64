//! Settings of Linux interfaces below `/proc/sys/net`.

use std::io;
use std::path::PathBuf;

/// A setting of an interface could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {value} to {}: {source}", path.display())]
pub struct SettingError {
    path: PathBuf,
    value: &'static str,
    source: io::Error,
}

/// The file of a setting, such as `disable_ipv6` of family `ipv6`.
pub(super) fn path(family: &str, interface: &str, setting: &str) -> PathBuf {
    PathBuf::from(format!("/proc/sys/net/{family}/conf/{interface}/{setting}"))
}

/// Writes a setting, unless the kernel lacks it, as one without IPv6 does.
pub(super) fn write(family: &str, interface: &str, setting: &str, value: &'static str) -> Result<(), SettingError> {
    let path = path(family, interface, setting);
    match std::fs::write(&path, value) {
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.map_err(|source| SettingError { path, value, source }),
    }
}
