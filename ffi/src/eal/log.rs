//! Forwards DPDK's log to `tracing` with target `dpdk`.
//!
//! DPDK logs some deliberate choices as errors (no hugepages, for example), and a call that really fails returns an
//! error of ours. So DPDK's errors are logged as warnings. They are also kept until [`take_errors`], to explain that
//! error.

use std::sync::Mutex;

use crate::raw;

/// Number of lines kept for the next error message: the latest.
const RECENT_ERRORS_MAX: usize = 4;
/// DPDK's level "error"; lower levels are more severe.
const LEVEL_ERROR: u32 = 4;
/// Lines that EAL adds to every error of a driver and that explain nothing.
const REPETITIONS: [&str; 2] = ["Driver cannot attach the device", "Failed to attach device on primary process"];

static RECENT_ERRORS: Mutex<Vec<String>> = Mutex::new(Vec::new());
static LAST_MESSAGE: Mutex<String> = Mutex::new(String::new());

/// Redirects DPDK's log to `tracing`.
pub(crate) fn capture() {
    // SAFETY: `receive` has the type that the shim calls, and lives as long as the program.
    if unsafe { raw::sluice_log_to(Some(receive)) } != 0 {
        tracing::warn!("DPDK's log cannot be captured and goes to stderr");
    }
}

/// The errors logged since the last call, oldest first.
pub(crate) fn take_errors() -> Vec<String> {
    RECENT_ERRORS.lock().map(|mut lines| std::mem::take(&mut *lines)).unwrap_or_default()
}

/// See [`crate::last_message`].
pub(super) fn last_message() -> String {
    LAST_MESSAGE.lock().map(|message| message.clone()).unwrap_or_default()
}

/// Called by the C library for each message, on the thread that logs. A panic here aborts the process, as it must.
extern "C" fn receive(level: u32, text: *const std::ffi::c_char, length: usize) {
    // SAFETY: the shim passes `length` initialized bytes that stay valid for this call.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    for line in String::from_utf8_lossy(bytes).lines().map(str::trim).filter(|line| !line.is_empty()) {
        forward(level, line);
    }
}

fn forward(level: u32, line: &str) {
    match level {
        0..=5 => tracing::warn!(target: "dpdk", "{line}"),
        6 | 7 => tracing::debug!(target: "dpdk", "{line}"),
        _ => tracing::trace!(target: "dpdk", "{line}"),
    }
    if let Ok(mut message) = LAST_MESSAGE.lock() {
        line.clone_into(&mut message);
    }
    if level <= LEVEL_ERROR
        && !REPETITIONS.iter().any(|repetition| line.contains(repetition))
        && let Ok(mut lines) = RECENT_ERRORS.lock()
    {
        if lines.len() == RECENT_ERRORS_MAX {
            lines.remove(0);
        }
        lines.push(line.to_owned());
    }
}
