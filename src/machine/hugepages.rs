//! Huge pages by size, as the kernel counts them.

use super::root::Root;

/// The kernel's directory of huge pages of the whole machine.
pub(crate) const HUGEPAGES: &str = "/sys/kernel/mm/hugepages";

/// Free memory in huge pages of all sizes, MB, by a directory of the kernel: that of the machine or of a NUMA node.
pub(crate) fn free_hugepages_mb(root: &Root, directory: &str) -> u64 {
    let free = |size: &str| root.number::<u64>(&format!("{directory}/{size}/free_hugepages")).unwrap_or(0);
    hugepage_sizes(root, directory).into_iter().map(|(size, page_kb)| free(&size) * page_kb / 1024).sum()
}

/// Directory names like `hugepages-2048kB`, each with the size of a page in KB.
pub(crate) fn hugepage_sizes(root: &Root, directory: &str) -> Vec<(String, u64)> {
    let parse = |name: String| {
        let size = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        Some((name, size))
    };
    root.names(directory).into_iter().filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;

    #[test]
    fn pages_of_all_sizes_count() {
        let machine = Machine::new(&[
            ("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "3\n"),
            ("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "2\n"),
            ("/sys/kernel/mm/hugepages/demote", "1\n"),
        ]);
        assert_eq!(free_hugepages_mb(&machine.root(), HUGEPAGES), 2 * 1024 + 3 * 2);
        assert_eq!(free_hugepages_mb(&machine.root(), "/sys/devices/system/node/node0/hugepages"), 0);
    }
}
