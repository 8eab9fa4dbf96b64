//! What can go wrong between sluice and DPDK, said so that the reader knows what to do next.

use std::io;

use crate::device::BadDevice;

/// A failure of DPDK or of what it needs.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `Eal::start` was called twice.
    #[error("DPDK is already running in this process; it can be started once")]
    AlreadyStarted,
    /// EAL did not start.
    #[error("DPDK (EAL) did not start: {reason}{}; run `sluiced doctor`", explanation(.said))]
    Start {
        /// The words of `rte_strerror`.
        reason: String,
        /// What DPDK logged meanwhile.
        said: Vec<String>,
    },
    /// Hugepages are required, and there are too few.
    #[error(
        "hugepages are required (a PCI port, or `memory.hugepages: require`): {needed_mb} MB are needed, {free_mb} MB are free; \
         reserve them with `sysctl vm.nr_hugepages={}` (2 MB each)", needed_mb.div_ceil(2)
    )]
    Hugepages {
        /// Needed, MB.
        needed_mb: u64,
        /// Free on all nodes and of all sizes, MB.
        free_mb: u64,
    },
    /// The thread's CPU mask could not be read or set.
    #[error("the CPU affinity of the starting thread cannot be {step}: {source}")]
    Affinity {
        /// `read` or `set`.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
    /// No more thread can be registered with EAL.
    #[error("a thread cannot be registered with DPDK: {reason}")]
    Thread {
        /// The words of `rte_strerror`.
        reason: String,
    },
    /// Neither a PCI address nor a virtual device.
    #[error(transparent)]
    BadDevice(#[from] BadDevice),
    /// A PCI device that does not exist or has no driver that DPDK can use.
    #[error("device {device}: {found}")]
    NoSuchDevice {
        /// The device as configured.
        device: String,
        /// What was found, and what to do.
        found: String,
    },
    /// A virtual device over an interface that does not exist.
    #[error("device {device}: there is no interface {interface:?} in this network namespace; see `ip link`")]
    NoInterface {
        /// The device as configured.
        device: String,
        /// The interface.
        interface: String,
    },
    /// A device of that name is a port already.
    #[error("device {device}: {name} is in use by another port; number the devices, as in net_null0, net_null1")]
    DeviceInUse {
        /// The device as configured.
        device: String,
        /// Its DPDK name.
        name: String,
    },
    /// A driver refused, and this process lacks a privilege that the driver needs.
    #[error("device {device}: this process lacks {capability}; run as root or grant it{}", explanation(.said))]
    Privilege {
        /// The device as configured.
        device: String,
        /// The missing capability.
        capability: &'static str,
        /// What DPDK logged meanwhile.
        said: Vec<String>,
    },
    /// A driver refused.
    #[error("device {device}: cannot {step}: {reason}{}", explanation(.said))]
    Device {
        /// The device as configured.
        device: String,
        /// What was being done.
        step: &'static str,
        /// The words of `rte_strerror`.
        reason: String,
        /// What DPDK logged meanwhile.
        said: Vec<String>,
    },
    /// A mempool could not be made.
    #[error("packet pool {name:?} of {packets} packets x {frame_bytes} bytes cannot be made: {reason}{}", explanation(.said))]
    Mempool {
        /// Its name.
        name: String,
        /// Packets asked for.
        packets: u32,
        /// Bytes of each.
        frame_bytes: u16,
        /// The words of `rte_strerror`.
        reason: String,
        /// What DPDK logged meanwhile.
        said: Vec<String>,
    },
}

/// What DPDK logged, to be put after the message.
fn explanation(lines: &[String]) -> String {
    if lines.is_empty() { String::new() } else { format!(" (DPDK says: {})", lines.join("; ")) }
}
