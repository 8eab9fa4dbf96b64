//! The messages and services of `sluice.v1`, generated from `proto/sluice/v1/*.proto`.
#![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used, clippy::too_many_lines)]

tonic::include_proto!("sluice.v1");

impl std::fmt::Debug for GroupKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GroupKey(..)")
    }
}

/// The descriptors, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/sluice.v1.bin"));
