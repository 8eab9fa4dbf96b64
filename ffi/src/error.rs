//! Errors of DPDK, with messages that say what to do next.

use std::io;

use crate::device::BadDevice;

/// An error of DPDK or of a resource that it needs.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `Eal::start` was called twice.
    #[error("DPDK is already running in this process; it can be started once")]
    AlreadyStarted,
    /// EAL did not start.
    #[error("DPDK (EAL) did not start: {reason}{}; run `sluiced doctor`", explanation(.logged))]
    Start {
        /// The text of `rte_strerror`.
        reason: String,
        /// Errors that DPDK logged during the call.
        logged: Vec<String>,
    },
    /// Hugepages are required, and too few are free.
    #[error(
        "hugepages are required (a PCI port, or `memory.hugepages: require`): {needed_mb} MB are needed, {free_mb} MB are free; \
         reserve them with `sysctl vm.nr_hugepages={}` (2 MB each)", needed_mb.div_ceil(2)
    )]
    Hugepages {
        /// Required memory, MB.
        needed_mb: u64,
        /// Free hugepage memory of all nodes and sizes, MB.
        free_mb: u64,
    },
    /// The thread's CPU mask could not be read or set.
    #[error("the CPU affinity of the starting thread cannot be {step}: {source}")]
    Affinity {
        /// `read` or `set`.
        step: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// EAL cannot register another thread.
    #[error("a thread cannot be registered with DPDK: {reason}")]
    Thread {
        /// The text of `rte_strerror`.
        reason: String,
    },
    /// The text is neither a PCI address nor a virtual device.
    #[error(transparent)]
    BadDevice(#[from] BadDevice),
    /// The PCI device does not exist or has no driver that DPDK can use.
    #[error("device {device}: {found}{}", explanation(.logged))]
    NoSuchDevice {
        /// The device as configured.
        device: String,
        /// The state found, and what to do.
        found: String,
        /// Errors that DPDK logged during the call.
        logged: Vec<String>,
    },
    /// The interface of a virtual device does not exist.
    #[error("device {device}: there is no interface {interface:?} in this network namespace; see `ip link`")]
    NoInterface {
        /// The device as configured.
        device: String,
        /// The interface.
        interface: String,
    },
    /// A device with this name is already a port.
    #[error("device {device}: {name} is in use by another port; number the devices, as in net_null0, net_null1")]
    DeviceInUse {
        /// The device as configured.
        device: String,
        /// Its DPDK name.
        name: String,
    },
    /// A driver refused, and the process lacks a privilege that the driver needs.
    #[error("device {device}: this process lacks {capability}; run as root or grant it{}", explanation(.logged))]
    Privilege {
        /// The device as configured.
        device: String,
        /// The missing capability.
        capability: &'static str,
        /// Errors that DPDK logged during the call.
        logged: Vec<String>,
    },
    /// A driver refused.
    #[error("device {device}: cannot {step}: {reason}{}", explanation(.logged))]
    Device {
        /// The device as configured.
        device: String,
        /// The failed step.
        step: &'static str,
        /// The text of `rte_strerror`.
        reason: String,
        /// Errors that DPDK logged during the call.
        logged: Vec<String>,
    },
    /// A mempool could not be created.
    #[error("packet pool {name:?} of {packets} packets x {frame_bytes} bytes cannot be made: {reason}{}", explanation(.logged))]
    Mempool {
        /// Its name.
        name: String,
        /// Requested number of packets.
        packets: u32,
        /// Size of each packet, bytes.
        frame_bytes: u16,
        /// The text of `rte_strerror`.
        reason: String,
        /// Errors that DPDK logged during the call.
        logged: Vec<String>,
    },
}

/// DPDK's log lines, to be appended to the message.
fn explanation(lines: &[String]) -> String {
    if lines.is_empty() { String::new() } else { format!(" (DPDK says: {})", lines.join("; ")) }
}
