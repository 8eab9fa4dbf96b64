//! Generates the messages and services of `sluice.v1` if feature `grpc` is enabled.
//! Needs `protoc` (Debian: protobuf-compiler).

/// The messages that `sluicectl` prints as JSON and YAML: field names and their order are those of `admin.proto`.
#[cfg(feature = "grpc")]
const ROWS: [&str; 28] = [
    "WatchEvent",
    "HeavyTraffic",
    "ServiceStatus",
    "FrontendStatus",
    "BackendStatus",
    "PortStatus",
    "QueueStatus",
    "RssStatus",
    "DropCount",
    "GatewayStatus",
    "DuplicateStatus",
    "PartnerStatus",
    "SessionStatus",
    "VipStatus",
    "PoolStatus",
    "EventStatus",
    "Override",
    "FlowStatus",
    "Explanation",
    "ExplainedFrontend",
    "ExplainedBackend",
    "ExplainedRewrite",
    "ExplainedRefusal",
    "TracedPacket",
    "SentPacket",
    "Trouble",
    "LastCheck",
    "BackendChange",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    #[cfg(feature = "grpc")]
    {
        let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
        let mut builder = tonic_prost_build::configure()
            .file_descriptor_set_path(out.join("sluice.v1.bin"))
            .btree_map(".")
            // Its own implementation shows no key.
            .skip_debug(["sluice.v1.GroupKey"])
            // For people only: DESIGN section 8 fixes the fields of the JSON.
            .field_attribute("sluice.v1.ServiceStatus.message", "#[serde(skip)]")
            .field_attribute("sluice.v1.ServiceStatus.fails_open", "#[serde(skip)]")
            // Counters that clients compute rates from; the lists do not ask for them.
            .field_attribute("sluice.v1.ServiceStatus.drops", "#[serde(skip)]")
            .field_attribute("sluice.v1.ServiceStatus.traffic", "#[serde(skip)]")
            .field_attribute("sluice.v1.BackendStatus.traffic", "#[serde(skip)]")
            // Of `sluicectl history` only.
            .field_attribute("sluice.v1.BackendStatus.down_today_s", "#[serde(skip_serializing_if = \"Option::is_none\")]")
            .field_attribute("sluice.v1.BackendStatus.last_check", "#[serde(skip_serializing_if = \"Option::is_none\")]")
            .field_attribute("sluice.v1.BackendStatus.changes", "#[serde(skip_serializing_if = \"Vec::is_empty\")]");
        for row in ROWS {
            builder = builder.message_attribute(format!("sluice.v1.{row}"), "#[derive(serde::Serialize)]");
        }
        builder.compile_protos(
            &["proto/sluice/v1/config.proto", "proto/sluice/v1/admin.proto", "proto/sluice/v1/fleet.proto"],
            &["proto"],
        )?;
    }
    println!("cargo::rerun-if-changed=proto");
    Ok(())
}
