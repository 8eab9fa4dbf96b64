//! Hands on to the programs what the linker needs for a static DPDK; see `ffi/build.rs`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DEP_DPDK_LINK_ARGS");
    for argument in std::env::var("DEP_DPDK_LINK_ARGS").unwrap_or_default().split_whitespace() {
        println!("cargo::rustc-link-arg={argument}");
    }
}
