//! Generates the messages and services of `sluice.v1` if feature `grpc` is enabled. Needs `protoc` (Debian: protobuf-compiler).

fn main() -> Result<(), Box<dyn std::error::Error>> {
    #[cfg(feature = "grpc")]
    {
        let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
        tonic_prost_build::configure().file_descriptor_set_path(out.join("sluice.v1.bin")).btree_map(".").compile_protos(
            &["proto/sluice/v1/config.proto", "proto/sluice/v1/admin.proto", "proto/sluice/v1/fleet.proto"],
            &["proto"],
        )?;
    }
    println!("cargo::rerun-if-changed=proto");
    Ok(())
}
