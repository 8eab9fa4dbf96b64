//! Builds `net_card`, a driver of DPDK for tests, and has the gateway load it.
//!
//! Invariant: the gateway's program is the one that users run. The driver is loaded by `LD_PRELOAD`, because `sluiced`
//! has no setting for EAL's option `-d`, which would load code into a gateway by its configuration.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::edge::{Edge, skip};

/// The libraries that a driver of an Ethernet device on the virtual bus calls.
const LIBRARIES: [&str; 7] = ["ethdev", "bus_vdev", "kvargs", "mempool", "mbuf", "ring", "eal"];

/// The network of the demo, whose gateway knows the driver. Linux does not see the frames of its interfaces. `None`: this
/// machine cannot have it, and `test` is reported as skipped.
pub(crate) fn edge(test: &str, name: &str) -> Option<Edge> {
    static LIBRARY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let library = match LIBRARY.get_or_init(build) {
        Ok(library) => library.clone(),
        Err(why) => {
            skip(test, why);
            return None;
        }
    };
    let mut edge = Edge::new(test, name)?;
    edge.environment.push(("LD_PRELOAD", library));
    edge.script(
        "set -e
         for port in uplink0 cluster0; do
           in_ns gw sysctl -qw net.ipv6.conf.$port.disable_ipv6=1
           in_ns gw tc qdisc add dev $port clsact
           in_ns gw tc filter add dev $port ingress bpf da bytecode '1,6 0 0 2'
         done",
    );
    Some(edge)
}

/// Builds the driver, or says what is missing. A driver that does not compile fails the test.
fn build() -> Result<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let headers = Command::new(root.join(".ci/driver-headers")).arg("--cached").output().unwrap();
    if !headers.status.success() {
        return Err("needs the headers of DPDK's drivers (.ci/driver-headers)".to_owned());
    }
    let headers = String::from_utf8(headers.stdout).unwrap();
    let flags = Command::new("pkg-config").args(["--cflags", "libdpdk"]).output().unwrap();
    let flags = String::from_utf8(flags.stdout).unwrap();
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("net_card.{}.so", std::process::id()));
    let sources = ["net_card.c", "profile.c", "rss.c"].map(|name| root.join("tests/card/driver").join(name));
    let output = Command::new("cc")
        .args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-isystem", headers.trim()])
        .args(flags.split_whitespace())
        .arg("-o")
        .arg(&library)
        .args(sources)
        .args(LIBRARIES.map(|library| format!("-lrte_{library}")))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(library)
}
