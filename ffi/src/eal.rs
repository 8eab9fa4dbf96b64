//! Starts DPDK's environment abstraction layer (EAL) once per process from typed settings. It is never shut down.
//!
//! Invariants: no file is shared with another process (`--no-shconf`, or `--in-memory` with hugepages), so a crash
//! leaves no files. When [`Eal::start`] returns, with success or an error, the caller's CPU mask is unchanged.
//!
//! Not here: EAL's worker lcores (threads are ours, see [`Eal::register_thread`]), multi-process mode, telemetry.

use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::marker::PhantomData;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

pub(crate) mod device_requests;
pub(crate) mod log;
mod runtime_dir;

use crate::device::Device;
use crate::error::Error;
use crate::raw;

/// Use of hugepages for packet memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hugepages {
    /// Hugepages if enough are free; otherwise ordinary pages, with one warning. A PCI port requires hugepages.
    Auto,
    /// Only hugepages.
    Require,
    /// Only ordinary pages.
    Off,
}

/// Configuration of EAL.
#[derive(Clone, Debug)]
pub struct EalConfig {
    /// Use of hugepages.
    pub hugepages: Hugepages,
    /// Memory for all pools, rings and drivers, MB. See [`crate::MempoolConfig::memory_bytes`].
    pub memory_mb: u64,
    /// The NUMA node whose hugepages are to be used: that of the devices. None: any.
    pub node: Option<u32>,
    /// The devices to be attached. The PCI bus is probed only for those in this list, and af_xdp constrains the layout
    /// of packet memory.
    pub devices: Vec<Device>,
    /// Cores for EAL's own threads, which keeps them off the workers' cores. Empty: the cores of the caller.
    pub cores: Vec<usize>,
}

/// Proof that EAL runs in this process.
#[derive(Clone, Copy, Debug)]
pub struct Eal {
    hugepages: bool,
    packs_packets: bool,
}

/// rte_eal_init may be called only once.
static STARTED: AtomicBool = AtomicBool::new(false);

impl Eal {
    /// Starts EAL. Threads started later inherit the CPU mask that the caller had; existing threads are not affected.
    ///
    /// # Errors
    /// On a second call, if hugepages are required and too few are free, and if EAL fails to start.
    pub fn start(config: &EalConfig) -> Result<Self, Error> {
        let hugepages = choose_memory(config, free_hugepages_mb(Path::new("/sys/kernel/mm/hugepages")))?;
        let node =
            config.node.filter(|node| hugepages && has_memory(Path::new("/sys/devices/system/node"), *node, config.memory_mb));
        let affinity = Affinity::narrow_to(&config.cores)?;
        if STARTED.swap(true, Ordering::SeqCst) {
            return Err(Error::AlreadyStarted);
        }
        log::capture();
        let arguments = arguments(config, hugepages, node, &affinity.cores());
        tracing::debug!(arguments = arguments.join(" "), "starting EAL");
        let started = start(&arguments);
        drop(affinity);
        if started < 0 {
            return Err(Error::Start { reason: raw::error_text(raw::errno()), logged: log::take_errors() });
        }
        // SAFETY: EAL has started, so this is a terminated string in static memory.
        let directory = unsafe { CStr::from_ptr(raw::rte_eal_get_runtime_dir()) };
        runtime_dir::remove(Path::new(&*directory.to_string_lossy()));
        log::take_errors();
        device_requests::watch();
        start_timers(config);
        let packs_packets = !hugepages && !config.devices.iter().any(Device::shares_packet_memory);
        Ok(Self { hugepages, packs_packets })
    }

    /// Whether packet memory is in hugepages.
    #[must_use]
    pub fn uses_hugepages(self) -> bool {
        self.hugepages
    }

    /// Whether packets may cross page boundaries: on ordinary pages, unless a device forbids it.
    pub(crate) fn packs_packets(self) -> bool {
        self.packs_packets
    }

    /// Rate of [`crate::cycles()`], cycles per second.
    #[must_use]
    pub fn cycles_per_second(self) -> u64 {
        // SAFETY: reads a variable that EAL set when it started.
        unsafe { raw::sluice_tsc_hz() }
    }

    /// Gives the calling thread its own cache in every pool. A thread may use pools and ports without it, but then each
    /// burst uses the pool's shared ring. A pinned thread registers after it is pinned.
    ///
    /// # Errors
    /// When there are more threads than DPDK was built for (128).
    pub fn register_thread(self) -> Result<RegisteredThread, Error> {
        // SAFETY: EAL runs. The call is for the calling thread, and the guard, which cannot leave this thread, ends it.
        if unsafe { raw::rte_thread_register() } < 0 {
            return Err(Error::Thread { reason: raw::error_text(raw::errno()) });
        }
        Ok(RegisteredThread { not_send: PhantomData })
    }
}

/// The registration of a thread, which has its own pool caches until this is dropped.
#[derive(Debug)]
pub struct RegisteredThread {
    not_send: PhantomData<*const ()>,
}

impl Drop for RegisteredThread {
    fn drop(&mut self) {
        // SAFETY: this thread registered, and the guard is neither Send nor Clone.
        unsafe { raw::rte_thread_unregister() }
    }
}

/// Cycles of the time stamp counter. For their rate see [`Eal::cycles_per_second`].
#[inline]
#[must_use]
pub fn cycles() -> u64 {
    // SAFETY: reads a register.
    unsafe { raw::sluice_rdtsc() }
}

/// The version of the linked DPDK.
#[must_use]
pub fn version() -> String {
    // SAFETY: returns a terminated static string, whether EAL runs or not.
    unsafe { CStr::from_ptr(raw::rte_version()) }.to_string_lossy().into_owned()
}

/// The last message of DPDK, whatever its level: while a call does not return, what the driver did last. Empty before EAL
/// starts.
#[must_use]
pub fn last_message() -> String {
    log::last_message()
}

/// Whether to use hugepages.
fn choose_memory(config: &EalConfig, free_mb: u64) -> Result<bool, Error> {
    let has_pci = config.devices.iter().any(Device::is_pci);
    let required = has_pci || config.hugepages == Hugepages::Require;
    if free_mb >= config.memory_mb && (required || config.hugepages == Hugepages::Auto) {
        return Ok(true);
    }
    if required {
        return Err(Error::Hugepages { needed_mb: config.memory_mb, free_mb });
    }
    if config.hugepages == Hugepages::Auto {
        tracing::warn!(
            needed_mb = config.memory_mb,
            free_mb,
            "too few free hugepages: packets live in ordinary pages, which is slower"
        );
    }
    Ok(false)
}

/// Free memory in hugepages of all sizes, MB.
fn free_hugepages_mb(root: &Path) -> u64 {
    let sizes = fs::read_dir(root).into_iter().flatten().flatten();
    sizes
        .filter_map(|entry| {
            let name = entry.file_name();
            let page_kb: u64 = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            let free: u64 = fs::read_to_string(entry.path().join("free_hugepages")).ok()?.trim().parse().ok()?;
            Some(page_kb * free / 1024)
        })
        .sum()
}

/// Starts DPDK's timer library where a card may need it ([`crate::Port::needs_timers`]); it takes 2 MB.
fn start_timers(config: &EalConfig) {
    if !config.devices.iter().any(Device::is_pci) {
        return;
    }
    // SAFETY: EAL runs.
    let code = unsafe { raw::sluice_timers_start() };
    if code != 0 {
        let reason = raw::error_text(code);
        tracing::warn!(reason, "DPDK's timers cannot be started: cards that watch themselves by timers (ena) cannot be opened");
    }
}

/// Whether a NUMA node has enough free hugepages. EAL does not start with a node that has fewer.
fn has_memory(nodes: &Path, node: u32, needed_mb: u64) -> bool {
    let free_mb = free_hugepages_mb(&nodes.join(format!("node{node}/hugepages")));
    if free_mb < needed_mb {
        tracing::warn!(
            node,
            needed_mb,
            free_mb,
            "too few free hugepages on the NUMA node of the ports: packets live on another node, and each of them crosses the link between processors; \
             reserve hugepages there (/sys/devices/system/node/node<N>/hugepages)"
        );
    }
    free_mb >= needed_mb
}

/// EAL's command line.
fn arguments(config: &EalConfig, hugepages: bool, node: Option<u32>, cores: &[usize]) -> Vec<String> {
    let cores = cores.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let mut arguments: Vec<String> = ["sluice", "--no-telemetry", "--file-prefix"].map(str::to_owned).into();
    arguments.push(runtime_dir::file_prefix());
    // One lcore, the caller, on any of the cores.
    arguments.extend(["--lcores".into(), format!("0@({cores})")]);
    arguments.extend(match node {
        // A list by node: 0,0,64 are 64 MB of node 2.
        Some(node) => ["--socket-mem".into(), format!("{}{}", "0,".repeat(node as usize), config.memory_mb)],
        None => ["-m".into(), config.memory_mb.to_string()],
    });
    // --in-memory needs no hugetlbfs mount; DPDK 22.11 refuses it together with --no-huge.
    let memory: &[&str] = if hugepages { &["--in-memory"] } else { &["--no-huge", "--no-shconf"] };
    arguments.extend(memory.iter().map(|&argument| argument.to_owned()));
    let pci: Vec<_> = config.devices.iter().filter(|device| device.is_pci()).collect();
    if pci.is_empty() {
        // Virtual devices use virtual addresses; with PCI devices the IOMMU decides.
        arguments.extend(["--no-pci".into(), "--iova-mode=va".into()]);
    }
    for device in pci {
        arguments.extend(["-a".into(), device.to_string()]);
    }
    arguments
}

fn start(arguments: &[String]) -> c_int {
    // EAL keeps pointers to its arguments, so they live as long as the process: a few hundred bytes, once.
    let mut pointers: Vec<*mut c_char> = arguments.iter().map(|argument| raw::c_string(argument).into_raw()).collect();
    let count = c_int::try_from(pointers.len()).unwrap_or(c_int::MAX);
    pointers.push(ptr::null_mut());
    // SAFETY: `count` terminated strings and a null, none of which is ever freed; EAL may reorder the array itself.
    unsafe { raw::rte_eal_init(count, pointers.leak().as_mut_ptr()) }
}

/// The caller's CPU mask, restored when dropped: `rte_eal_init` pins its caller, and threads started later would
/// inherit that.
struct Affinity {
    before: CpuSet,
    narrowed: CpuSet,
}

impl Affinity {
    /// Runs this thread on `cores` for now: EAL's service threads inherit the mask of the caller.
    fn narrow_to(cores: &[usize]) -> Result<Self, Error> {
        let before = sched_getaffinity(None).map_err(|error| Error::Affinity { step: "read", source: error.into() })?;
        let mut narrowed = before;
        if !cores.is_empty() {
            narrowed.clear();
            cores.iter().filter(|&&core| core < CpuSet::MAX_CPU).for_each(|&core| narrowed.set(core));
            sched_setaffinity(None, &narrowed).map_err(|error| Error::Affinity { step: "set", source: error.into() })?;
        }
        Ok(Self { before, narrowed })
    }

    fn cores(&self) -> Vec<usize> {
        (0..CpuSet::MAX_CPU).filter(|&core| self.narrowed.is_set(core)).collect()
    }
}

impl Drop for Affinity {
    fn drop(&mut self) {
        if let Err(error) = sched_setaffinity(None, &self.before) {
            tracing::warn!(%error, "the CPU mask of the starting thread cannot be restored; threads started later share one core");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(hugepages: Hugepages, devices: &[&str]) -> EalConfig {
        let devices = devices.iter().map(|device| device.parse().unwrap()).collect();
        EalConfig { hugepages, memory_mb: 64, node: None, devices, cores: vec![] }
    }

    #[test]
    fn hugepages_are_used_when_enough_are_free() {
        assert!(choose_memory(&config(Hugepages::Auto, &["net_null0"]), 64).unwrap());
        assert!(!choose_memory(&config(Hugepages::Auto, &["net_null0"]), 63).unwrap());
        assert!(!choose_memory(&config(Hugepages::Off, &["net_null0"]), 64).unwrap());
    }

    #[test]
    fn a_pci_port_requires_hugepages_and_the_message_says_how_many() {
        let error = choose_memory(&config(Hugepages::Auto, &["0000:3b:00.0"]), 2).unwrap_err();
        assert!(error.to_string().contains("64 MB are needed, 2 MB are free"), "{error}");
        assert!(error.to_string().contains("vm.nr_hugepages=32"), "{error}");
    }

    #[test]
    fn the_pci_bus_is_probed_only_for_pci_ports() {
        let without = arguments(&config(Hugepages::Auto, &["net_null0"]), false, None, &[0, 1]).join(" ");
        assert!(without.contains("--no-pci") && without.contains("--lcores 0@(0,1) -m 64 --no-huge --no-shconf"), "{without}");
        let with = arguments(&config(Hugepages::Auto, &["3b:00.0,dv_flow_en=2", "net_null0"]), true, None, &[0]).join(" ");
        assert!(with.ends_with("--in-memory -a 0000:3b:00.0,dv_flow_en=2"), "{with}");
    }

    #[test]
    fn memory_comes_from_the_node_of_the_ports_where_it_has_enough() {
        let nodes = tempfile::tempdir().unwrap();
        for (node, pages) in [("node0", "8"), ("node2", "32")] {
            let pages_of = nodes.path().join(node).join("hugepages/hugepages-2048kB");
            fs::create_dir_all(&pages_of).unwrap();
            fs::write(pages_of.join("free_hugepages"), pages).unwrap();
        }
        assert_eq!([0, 1, 2].map(|node| has_memory(nodes.path(), node, 64)), [false, false, true]);
        let on_two = arguments(&config(Hugepages::Auto, &["3b:00.0"]), true, Some(2), &[0]).join(" ");
        assert!(on_two.contains("--socket-mem 0,0,64") && !on_two.contains("-m "), "{on_two}");
    }

    #[test]
    fn the_affinity_guard_restores_the_mask() {
        let before = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|&core| before.is_set(core)).unwrap();
        let guard = Affinity::narrow_to(&[first]).unwrap();
        assert_eq!(guard.cores(), [first]);
        assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
        drop(guard);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
