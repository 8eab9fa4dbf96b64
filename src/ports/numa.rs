//! NUMA: a worker on another node than a port reads every packet over the link between processors.

use std::path::Path;

use crate::ports::dpdk;
use crate::settings::Settings;

/// Warns of workers whose core is on another node than a port that they poll.
pub(super) fn warn_of_distance(settings: &Settings) {
    for port in &settings.ports {
        let Some(port_node) = dpdk::device(port).ok().and_then(|device| device.node()) else { continue };
        for &core in &settings.cores {
            let core_node = of_core(Path::new("/sys"), core);
            if core_node.is_some_and(|node| node != port_node) {
                tracing::warn!(
                    port = port.name,
                    port_node,
                    core,
                    core_node,
                    "a worker is on another NUMA node than a port: each packet crosses the link between them; choose cores of the port's node"
                );
            }
        }
    }
}

/// The node of a core.
fn of_core(sys: &Path, core: usize) -> Option<u32> {
    let entries = std::fs::read_dir(sys.join(format!("devices/system/cpu/cpu{core}"))).ok()?;
    let node = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok();
    entries.flatten().find_map(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_has_the_node_that_linux_lists_it_under() {
        let sys = tempfile::tempdir().unwrap();
        for core in ["cpu3/node1", "cpu3/topology", "cpu4/topology"] {
            std::fs::create_dir_all(sys.path().join("devices/system/cpu").join(core)).unwrap();
        }
        assert_eq!([3, 4, 5].map(|core| of_core(sys.path(), core)), [Some(1), None, None]);
    }
}
