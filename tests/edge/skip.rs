//! Reports that a test cannot run here, on standard output and in the summary of `make test`.

use std::io::Write;

/// Reports why `test` is skipped. The caller then returns.
pub fn skip(test: &str, why: &str) {
    println!("skipped: {test}: {why}");
    if let Some(path) = std::env::var_os("SLUICE_SKIPPED") {
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        writeln!(file, "{test}: {why}").unwrap();
    }
}

/// Capabilities that `ip netns` and interfaces in namespaces need, with their numbers in linux/capability.h.
const NEEDED: [(u32, &str); 2] = [(12, "CAP_NET_ADMIN"), (21, "CAP_SYS_ADMIN")];

/// Needed capabilities that a process lacks, by its `/proc/PID/status`; all of them if that has no such line. The user
/// ID is not enough: root in a container has only some capabilities.
pub fn missing_capabilities(status: &str) -> Vec<&'static str> {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    NEEDED.iter().filter(|(number, _)| effective & (1 << number) == 0).map(|(_, name)| *name).collect()
}

/// Whether this process can create namespaces. If not, reports the test as skipped.
pub fn can_create_namespaces(test: &str) -> bool {
    let missing = missing_capabilities(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    if !missing.is_empty() {
        skip(test, &format!("needs {} for network namespaces", missing.join(" and ")));
    }
    missing.is_empty()
}
