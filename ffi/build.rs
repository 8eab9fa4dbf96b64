//! Finds DPDK, compiles the shim and generates the bindings.
//!
//! Linking: `pkg-config` finds DPDK; this script contains no directory, and only the oldest version.
//! - Shared (a distribution's package): the linker needs only the libraries of the functions that we call. EAL loads
//!   drivers from the directory compiled into it (`.../dpdk/pmds-*`), so only the drivers whose functions we call are
//!   named: ring (`rte_eth_from_rings`) and bonding.
//! - Static (`LIBDPDK_STATIC=1`): drivers register themselves in constructors that nothing refers to. The linker keeps
//!   them only inside `--whole-archive`, in the order that `pkg-config --static` prints, which `rustc-link-lib` would
//!   change. So that output is passed to the linker unchanged. (Debian 12 lacks one of its dependencies: apt-get
//!   install libsystemd-dev.)
//! - `rustc-link-arg` of this script applies to the tests of this package only. It is therefore exported as
//!   `DEP_DPDK_LINK_ARGS` (`links = "dpdk"`), and the build script of the root package prints it again for the
//!   programs.

use std::path::PathBuf;
use std::process::Command;

/// 22.11: the first LTS release with a stable `rte_thread_register` and with `rxmode.mtu`.
const OLDEST: &str = "22.11";
/// The libraries of the functions that we call.
const LIBRARIES: [&str; 8] =
    ["rte_net_bond", "rte_net_ring", "rte_ethdev", "rte_timer", "rte_mbuf", "rte_mempool", "rte_ring", "rte_eal"];
/// The functions called directly: exported ones with the same signature since [`OLDEST`].
const FUNCTIONS: [&str; 22] = [
    "sluice_.*",
    "rte_dev_probe",
    "rte_dev_remove",
    "rte_eal_get_runtime_dir",
    "rte_eal_init",
    "rte_eth_dev_close",
    "rte_eth_dev_get_mtu",
    "rte_eth_dev_get_port_by_name",
    "rte_eth_dev_start",
    "rte_eth_dev_stop",
    "rte_eth_from_rings",
    "rte_eth_allmulticast_disable",
    "rte_eth_allmulticast_enable",
    "rte_eth_promiscuous_disable",
    "rte_eth_promiscuous_enable",
    "rte_mempool_avail_count",
    "rte_pktmbuf_free_bulk",
    "rte_ring_create",
    "rte_strerror",
    "rte_thread_register",
    "rte_thread_unregister",
    "rte_version",
];

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    for input in ["build.rs", "shim/shim.h", "shim/shim.c"] {
        println!("cargo::rerun-if-changed={input}");
    }
    println!("cargo::rerun-if-env-changed=LIBDPDK_STATIC");
    let dpdk =
        pkg_config::Config::new().atleast_version(OLDEST).cargo_metadata(false).probe("libdpdk").map_err(|error| {
            format!("DPDK {OLDEST} or later is needed to build (Debian: apt-get install libdpdk-dev): {error}")
        })?;
    let flags = compiler_flags()?;
    compile_shim(&flags);
    generate_bindings(&flags)?;
    link(&dpdk)
}

/// The whole output of `pkg-config --cflags`: `-include rte_config.h` and `-march` determine the layout of DPDK's
/// structs, and the crate `pkg-config` keeps only include paths.
fn compiler_flags() -> Result<Vec<String>, Failure> {
    pkg_config(&["--cflags", "libdpdk"])
}

fn pkg_config(arguments: &[&str]) -> Result<Vec<String>, Failure> {
    let program = std::env::var("PKG_CONFIG").unwrap_or_else(|_| "pkg-config".into());
    let output = Command::new(&program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(String::from_utf8(output.stdout)?.split_whitespace().map(str::to_owned).collect())
}

fn compile_shim(flags: &[String]) {
    let mut build = cc::Build::new();
    build.file("shim/shim.c").std("gnu11").opt_level(2).warnings(true);
    for flag in flags {
        build.flag(flag);
    }
    build.compile("sluice_shim");
}

fn generate_bindings(flags: &[String]) -> Result<(), Failure> {
    let mut builder = bindgen::Builder::default()
        .header("shim/shim.h")
        .clang_args(flags)
        .use_core()
        .allowlist_var("SLUICE_.*|RING_F_S[PC]_(ENQ|DEQ)")
        .blocklist_type("(rte|RTE)_.*")
        .merge_extern_blocks(true)
        .derive_default(true)
        .generate_comments(false)
        .layout_tests(true);
    for function in FUNCTIONS {
        builder = builder.allowlist_function(function);
    }
    let out = PathBuf::from(std::env::var("OUT_DIR")?).join("bindings.rs");
    Ok(builder.generate()?.write_to_file(out)?)
}

fn link(dpdk: &pkg_config::Library) -> Result<(), Failure> {
    let is_static = std::env::var("LIBDPDK_STATIC").is_ok_and(|value| value != "0");
    if !is_static {
        for path in &dpdk.link_paths {
            println!("cargo::rustc-link-search=native={}", path.display());
        }
        for library in LIBRARIES {
            println!("cargo::rustc-link-lib={library}");
        }
        println!("cargo::metadata=LINK_ARGS=");
        return Ok(());
    }
    let arguments = pkg_config(&["--libs", "--static", "libdpdk"])?;
    for argument in &arguments {
        println!("cargo::rustc-link-arg={argument}");
    }
    println!("cargo::metadata=LINK_ARGS={}", arguments.join(" "));
    Ok(())
}
