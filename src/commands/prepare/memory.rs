//! Huge pages for packet memory.
//!
//! Invariant: pages that a running gateway of the same configuration holds count as free, because its successor gets them.
//! Pages of other programs do not.

use std::path::Path;

use clap::Parser as _;

use super::step::PrepareStep;
use crate::commands::cli::{Cli, Command};
use crate::machine::{HUGEPAGES, Needs, Root, free_hugepages_mb};

/// Size of the huge pages that are reserved, MB: the only size that can be reserved after a boot without much luck.
const PAGE_MB: u64 = 2;
const PAGES: &str = "hugepages-2048kB/nr_hugepages";

/// Reserves as many huge pages as are still needed: on the NUMA node of the ports, or anywhere if that has too few.
pub(super) fn reserve(root: &Root, needs: &Needs, config: &Path) -> PrepareStep {
    let wanted_mb = needs.memory_mb.saturating_sub(held_mb(root, config));
    let on_node = needs.node.map(|node| (node, format!("/sys/devices/system/node/node{node}/hugepages")));
    let Some((node, directory)) = on_node.filter(|(_, directory)| root.exists(directory)) else {
        return reserve_in(root, HUGEPAGES, needs.memory_mb, wanted_mb);
    };
    match reserve_in(root, &directory, needs.memory_mb, wanted_mb) {
        PrepareStep::Failed(_) => {}
        PrepareStep::Kept(text) => return PrepareStep::Kept(format!("{text} (NUMA node {node})")),
        PrepareStep::Done(text) => return PrepareStep::Done(format!("{text} (NUMA node {node})")),
    }
    let elsewhere = format!("not all on NUMA node {node} of the ports, which is slower");
    match reserve_in(root, HUGEPAGES, needs.memory_mb, wanted_mb) {
        PrepareStep::Kept(text) => PrepareStep::Kept(format!("{text}; {elsewhere}")),
        PrepareStep::Done(text) => PrepareStep::Done(format!("{text}; {elsewhere}")),
        failed @ PrepareStep::Failed(_) => failed,
    }
}

/// As [`reserve`], below one directory of the kernel. Of `needed_mb`, `wanted_mb` must be free.
fn reserve_in(root: &Root, directory: &str, needed_mb: u64, wanted_mb: u64) -> PrepareStep {
    let file = format!("{directory}/{PAGES}");
    let read = || root.number::<u64>(&file).unwrap_or(0);
    let (free_mb, total) = (free_hugepages_mb(root, directory), read());
    if free_mb >= wanted_mb {
        let held = if wanted_mb < needed_mb { ", the running gateway holds the rest" } else { "" };
        return PrepareStep::Kept(format!("huge pages: {free_mb} MB are free, {needed_mb} MB are needed{held}"));
    }
    let asked = total + (wanted_mb - free_mb).div_ceil(PAGE_MB);
    if let Err(error) = root.write(&file, &asked.to_string()) {
        return PrepareStep::Failed(format!("huge pages: {needed_mb} MB are needed, and cannot be reserved: {error}"));
    }
    let now = read();
    if now < asked {
        return PrepareStep::Failed(format!(
            "huge pages: {asked} of 2 MB were asked for, memory in one piece was left for {now}; reserve them by the kernel's \
             command line: hugepages={asked}"
        ));
    }
    PrepareStep::Done(format!("huge pages: {asked} of 2 MB, before {total}"))
}

/// Huge pages that a running gateway of this configuration holds, MB.
fn held_mb(root: &Root, config: &Path) -> u64 {
    let processes = root.names("/proc").into_iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()));
    let kb = |process: String| {
        if !runs(&root.text(&format!("/proc/{process}/cmdline"))?, config) {
            return None;
        }
        let status = root.text(&format!("/proc/{process}/status"))?;
        status.lines().find_map(|line| line.strip_prefix("HugetlbPages:"))?.trim().trim_end_matches(" kB").parse::<u64>().ok()
    };
    processes.filter_map(kb).sum::<u64>() / 1024
}

/// Whether a command line, with a NUL after each argument, is that of a gateway of this configuration.
fn runs(command_line: &str, config: &Path) -> bool {
    let arguments: Vec<&str> = command_line.trim_end_matches('\0').split('\0').collect();
    let is_gateway = arguments.first().is_some_and(|program| Path::new(program).ends_with("sluiced"));
    // Other programs are not parsed, which takes longer.
    is_gateway
        && matches!(Cli::try_parse_from(arguments), Ok(Cli { command: Command::Run(args) }) if args.config.config == config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;

    const TOTAL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    const NODE: &str = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages";
    const FILES: [(&str, &str); 2] = [(TOTAL, "10\n"), ("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "4\n")];

    fn reserve_on(files: &[(&str, &str)], needs: &Needs) -> (PrepareStep, Machine) {
        let machine = Machine::new(&[&FILES, files].concat());
        (reserve(&machine.root(), needs, Path::new("/etc/sluice/sluice.yaml")), machine)
    }

    fn needs(memory_mb: u64, node: Option<u32>) -> Needs {
        Needs { memory_mb, node, ..Needs::default() }
    }

    #[test]
    fn pages_of_others_are_not_counted_and_those_of_all_sizes_are() {
        let (step, _) = reserve_on(&[], &needs(100, None));
        assert_eq!(step, PrepareStep::Done("huge pages: 56 of 2 MB, before 10".into()));
        let large = ("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", "1\n");
        let (step, machine) = reserve_on(&[large], &needs(1030, None));
        assert_eq!(step, PrepareStep::Kept("huge pages: 1032 MB are free, 1030 MB are needed".into()));
        assert_eq!(machine.root().number::<u64>(TOTAL), Some(10));
        assert!(matches!(reserve(&Machine::new(&[]).root(), &needs(8, None), Path::new("F")), PrepareStep::Failed(_)));
    }

    #[test]
    fn pages_of_the_running_gateway_count_as_free() {
        let status = ("/proc/71/status", "Name:\tsluiced\nHugetlbPages:\t  204800 kB\n");
        let with = |line: &str, memory_mb| reserve_on(&[("/proc/71/cmdline", line), status], &needs(memory_mb, None)).0;
        let ours = "/usr/bin/sluiced\0run\0--config\0/etc/sluice/sluice.yaml\0";
        for line in [ours, "sluiced\0run\0", "sluiced\0run\0--config=/etc/sluice/sluice.yaml\0--no-sandbox\0"] {
            let kept = "huge pages: 8 MB are free, 200 MB are needed, the running gateway holds the rest";
            assert_eq!(with(line, 200), PrepareStep::Kept(kept.into()), "{line}");
        }
        assert_eq!(with(ours, 220), PrepareStep::Done("huge pages: 16 of 2 MB, before 10".into()), "what a change adds");
        for line in ["sluiced\0run\0--config\0/etc/other.yaml\0", "sluiced\0check\0", "vim\0run\0"] {
            assert_eq!(with(line, 200), PrepareStep::Done("huge pages: 106 of 2 MB, before 10".into()), "{line}");
        }
    }

    #[test]
    fn pages_are_reserved_on_the_node_of_the_ports() {
        let node = [(NODE, "0\n"), ("/sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages", "0\n")];
        let (step, machine) = reserve_on(&node, &needs(8, Some(1)));
        assert_eq!(step, PrepareStep::Done("huge pages: 4 of 2 MB, before 0 (NUMA node 1)".into()));
        assert_eq!((machine.root().number::<u64>(NODE), machine.root().number::<u64>(TOTAL)), (Some(4), Some(10)));
        // A node that takes no pages.
        let (step, _) = reserve_on(&node[1..], &needs(8, Some(1)));
        let elsewhere = "huge pages: 8 MB are free, 8 MB are needed; not all on NUMA node 1 of the ports, which is slower";
        assert_eq!(step, PrepareStep::Kept(elsewhere.into()));
        let (step, _) = reserve_on(&[], &needs(100, Some(1)));
        assert_eq!(step, PrepareStep::Done("huge pages: 56 of 2 MB, before 10".into()), "a kernel without nodes");
    }
}
