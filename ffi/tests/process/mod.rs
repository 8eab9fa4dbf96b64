//! Tests over a real EAL: it starts once per process, so each test runs in its own process, this program again, limited to
//! that test.

use std::process::Command;

use dpdk_sys::{Descriptors, Device, Eal, EalConfig, Hugepages, Mempool, MempoolConfig, PortConfig};

/// Names the test that this process is for.
pub(crate) const CHILD: &str = "SLUICE_EAL_TEST";

/// Runs `body` in a child process, under the name of the calling test.
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        return body();
    }
    let output = child(test).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{test} failed in its process: {}\n{}", output.status, String::from_utf8_lossy(&text));
}

/// The process of a test.
pub(crate) fn child(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--nocapture", test]).env(CHILD, test);
    command
}

/// EAL on ordinary pages, without PCI devices.
pub(crate) fn start() -> Eal {
    Eal::start(&EalConfig { hugepages: Hugepages::Off, memory_mb: 32, node: None, devices: vec![], cores: vec![] }).unwrap()
}

/// A small pool of packets.
pub(crate) fn pool(eal: Eal) -> Mempool {
    let config = pool_of(1023);
    assert!(config.memory_bytes(&[]) < 3 * 1024 * 1024);
    Mempool::new(eal, &config).unwrap()
}

/// A pool of so many packets.
pub(crate) fn pool_of(packets: u32) -> MempoolConfig {
    MempoolConfig { name: "test".into(), packets, frame_bytes: 1518, node: None }
}

/// A port of one queue pair, as the device has it.
pub(crate) fn port_of(device: Device) -> PortConfig {
    let descriptors = Descriptors::default();
    PortConfig { device, mtu_bytes: 1500, mac: None, queues: 1, spread: None, descriptors, wakes: false, fast_free: false }
}
