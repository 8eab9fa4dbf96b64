//! DPDK's log, passed on to `tracing` with target `dpdk`.
//!
//! DPDK calls things errors that are a choice here (no hugepages, say), and a call that really fails returns an error of our
//! own. So its errors are warnings, and are also kept until [`take_complaints`] so that they can explain that error.

use std::sync::Mutex;

use crate::raw;

/// Lines kept for the next error message, the latest.
const COMPLAINTS_MAX: usize = 4;
/// DPDK's level "error"; lower is worse.
const LEVEL_ERROR: u32 = 4;
/// What EAL adds to every refusal of a driver, and explains nothing.
const REPETITIONS: [&str; 2] = ["Driver cannot attach the device", "Failed to attach device on primary process"];

static COMPLAINTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Sends everything that DPDK logs from now on to `tracing`.
pub(crate) fn capture() {
    // SAFETY: `receive` has the type that the shim calls, and lives as long as the program.
    if unsafe { raw::sluice_log_to(Some(receive)) } != 0 {
        tracing::warn!("DPDK's log cannot be captured and goes to stderr");
    }
}

/// The errors logged since the last call, oldest first.
pub(crate) fn take_complaints() -> Vec<String> {
    COMPLAINTS.lock().map(|mut lines| std::mem::take(&mut *lines)).unwrap_or_default()
}

/// Called by the C library with each message, on whatever thread logs. An unwinding panic would abort here, as it must.
extern "C" fn receive(level: u32, text: *const std::ffi::c_char, length: usize) {
    // SAFETY: the shim passes `length` initialized bytes that stay valid for this call.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    for line in String::from_utf8_lossy(bytes).lines().map(str::trim).filter(|line| !line.is_empty()) {
        pass_on(level, line);
    }
}

fn pass_on(level: u32, line: &str) {
    match level {
        0..=5 => tracing::warn!(target: "dpdk", "{line}"),
        6 | 7 => tracing::debug!(target: "dpdk", "{line}"),
        _ => tracing::trace!(target: "dpdk", "{line}"),
    }
    if level <= LEVEL_ERROR
        && !REPETITIONS.iter().any(|repetition| line.contains(repetition))
        && let Ok(mut lines) = COMPLAINTS.lock()
    {
        if lines.len() == COMPLAINTS_MAX {
            lines.remove(0);
        }
        lines.push(line.to_owned());
    }
}
