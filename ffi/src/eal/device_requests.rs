//! Devices that the kernel asks this process to release, because they are unplugged or unbound from VFIO.
//!
//! The kernel waits for the release in the program that unplugs or unbinds, and holds a lock of the PCI bus meanwhile. It
//! repeats the request every 10 s.
//!
//! Not here: the release (`ethdev`).

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::raw;

/// Devices that may be recorded: those that are attached ask, and DPDK has at most 32 ports (`RTE_MAX_ETHPORTS`).
const REQUESTS_MAX: usize = 32;

/// Names of devices on their bus.
static REQUESTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn requested() -> MutexGuard<'static, BTreeSet<String>> {
    REQUESTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Follows the requests from now on. EAL runs.
pub(super) fn watch() {
    // SAFETY: `receive` has the type that the shim calls, and lives as long as the program.
    let code = unsafe { raw::sluice_watch_requests(Some(receive)) };
    if code != 0 {
        let reason = raw::error_text(code);
        tracing::warn!(
            reason,
            "requests of the kernel to release a device are not followed: unplugging one waits for the end of the gateway"
        );
    }
}

/// Called by DPDK's interrupt thread. A panic here aborts the process, as it must.
extern "C" fn receive(device: *const c_char) {
    // SAFETY: the shim passes a terminated string that stays valid for this call.
    let name = unsafe { CStr::from_ptr(device) }.to_string_lossy();
    record(&mut requested(), &name);
}

fn record(requested: &mut BTreeSet<String>, name: &str) {
    if requested.len() < REQUESTS_MAX && requested.insert(name.to_owned()) {
        tracing::info!(device = name, "the kernel asks for the device");
    }
}

/// Whether the kernel asked for the device and has not got it yet.
pub(crate) fn contains(name: &str) -> bool {
    requested().contains(name)
}

/// The device was released, or is attached anew.
pub(crate) fn forget(name: &str) {
    requested().remove(name);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_kept_until_they_are_answered_and_are_bounded() {
        receive(c"0000:3b:00.0".as_ptr());
        receive(c"0000:3b:00.0".as_ptr());
        assert!(contains("0000:3b:00.0") && !contains("0000:3b:00.1"));
        forget("0000:3b:00.0");
        assert!(!contains("0000:3b:00.0"));
        let mut requested = BTreeSet::new();
        (0..100).for_each(|n| record(&mut requested, &format!("0000:3b:{n:02x}.0")));
        assert_eq!(requested.len(), REQUESTS_MAX);
    }
}
