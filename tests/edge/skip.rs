//! Says that a test cannot run here, on standard output and in the summary of `make test`.

use std::io::Write;

/// Says once why `test` is skipped; the caller returns then.
pub fn skip(test: &str, why: &str) {
    println!("skipped: {test}: {why}");
    if let Some(path) = std::env::var_os("SLUICE_SKIPPED") {
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        writeln!(file, "{test}: {why}").unwrap();
    }
}

/// Whether namespaces can be made; says so when not.
pub fn may_make_namespaces(test: &str) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let is_root = status.lines().any(|line| line.starts_with("Uid:") && line.split_whitespace().nth(2) == Some("0"));
    if !is_root {
        skip(test, "needs root for network namespaces");
    }
    is_root
}
