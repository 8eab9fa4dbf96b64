//! Removes EAL's runtime directory, which EAL creates at start under a prefix per process. It is empty, because no
//! files are shared.
//!
//! A process that dies between the creation and the removal leaves its directory, so the next start also removes those
//! of dead processes. Only directories with our prefix are touched.

use std::fs;
use std::path::Path;

/// Start of the file prefix of every gateway.
const PREFIX: &str = "sluice-";

/// The `--file-prefix` of this process.
pub(crate) fn file_prefix() -> String {
    format!("{PREFIX}{}", std::process::id())
}

/// Removes the directory of this process, and those of dead processes next to it.
pub(crate) fn remove(own: &Path) {
    remove_one(own);
    if let Some(parent) = own.parent() {
        remove_stale(parent, |pid| !Path::new("/proc").join(pid).exists());
    }
}

fn remove_stale(parent: &Path, is_dead: impl Fn(&str) -> bool) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        if pid.is_some_and(|pid| pid.bytes().all(|byte| byte.is_ascii_digit()) && is_dead(pid)) {
            remove_one(&entry.path());
        }
    }
}

fn remove_one(path: &Path) {
    if let Err(error) = fs::remove_dir_all(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "a DPDK runtime directory cannot be removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_of_dead_gateways_are_removed() {
        let parent = std::env::temp_dir().join(format!("sluice-runtime-dir-{}", std::process::id()));
        for name in ["sluice-1", "sluice-2", "sluice-", "sluice-x", "rte", "rte-2"] {
            fs::create_dir_all(parent.join(name)).unwrap();
        }
        fs::write(parent.join("sluice-2/left"), "over").unwrap();
        remove_stale(&parent, |pid| pid == "2");
        let mut left: Vec<_> =
            fs::read_dir(&parent).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        fs::remove_dir_all(&parent).unwrap();
        assert_eq!(left, ["rte", "rte-2", "sluice-", "sluice-1", "sluice-x"]);
    }
}
