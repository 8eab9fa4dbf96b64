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

/// What namespaces and what is in them need: interfaces, and `ip netns` itself. Numbers of linux/capability.h.
const NEEDED: [(u32, &str); 2] = [(12, "CAP_NET_ADMIN"), (21, "CAP_SYS_ADMIN")];

/// Which capabilities a process lacks whose `/proc/PID/status` this is; all where that does not tell. Being root says nothing:
/// root in a container has but some of them.
pub fn lacks(status: &str) -> Vec<&'static str> {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    NEEDED.iter().filter(|(number, _)| effective & (1 << number) == 0).map(|(_, name)| *name).collect()
}

/// Whether namespaces can be made; says so when not.
pub fn may_make_namespaces(test: &str) -> bool {
    let lacks = lacks(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    if !lacks.is_empty() {
        skip(test, &format!("needs {} for network namespaces", lacks.join(" and ")));
    }
    lacks.is_empty()
}
