//! Flow records as lines of JSON in a file.
//!
//! The file is opened again when its name no longer leads to it: whoever rotates logs renames it, and needs no signal. A
//! failed write drops its records, and the next one begins on a line of its own.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use dataplane::flow::{FlowEvent, FlowTraffic};
use proto::Protocol;
use serde::Serialize;
use tokio::fs::{File, OpenOptions, metadata};
use tokio::io::AsyncWriteExt as _;

use super::enriched_record::{EnrichedRecord, words};

/// The file.
pub(super) struct LinesFile {
    path: PathBuf,
    gateway: String,
    open: Option<File>,
    /// Whether the last line may be incomplete.
    is_torn: bool,
}

/// A line. Text that does not apply is left out.
#[derive(Serialize)]
struct Line<'a> {
    event: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'static str,
    gateway: &'a str,
    worker: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    service: Option<&'a str>,
    protocol: String,
    mode: &'static str,
    client: String,
    frontend: String,
    backend: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    snat: Option<String>,
    start_ms: u64,
    #[serde(flatten)]
    carried: Option<Carried>,
}

/// What a flow has carried.
#[derive(Serialize)]
struct Carried {
    end_ms: u64,
    duration_ms: u64,
    to_backend_packets: u32,
    to_backend_bytes: u64,
    to_client_packets: u32,
    to_client_bytes: u64,
}

impl<'a> Line<'a> {
    fn new(known: &'a EnrichedRecord, gateway: &'a str) -> Self {
        let EnrichedRecord { record, worker, backend, start_ms, end_ms } = known;
        let (event, reason) = words(record.event);
        let flow = &record.flow;
        let protocol = Protocol::from_number(flow.protocol);
        let FlowTraffic { packets: to_client_packets, octets: to_client_bytes } = record.to_client;
        let FlowTraffic { packets: to_backend_packets, octets: to_backend_bytes } = record.to_backend;
        let carried = Carried {
            end_ms: *end_ms,
            duration_ms: end_ms.saturating_sub(*start_ms),
            to_backend_packets,
            to_backend_bytes,
            to_client_packets,
            to_client_bytes,
        };
        Self {
            event,
            reason,
            gateway,
            worker: *worker,
            service: backend.as_ref().map(|(_, service)| service.as_str()),
            protocol: protocol.map_or_else(|| flow.protocol.to_string(), |protocol| protocol.to_string()),
            mode: flow.mode.as_str(),
            client: flow.client.to_string(),
            frontend: flow.frontend.to_string(),
            backend: known.backend().to_string(),
            snat: flow.snat.map(|snat| snat.to_string()),
            start_ms: *start_ms,
            carried: (record.event != FlowEvent::Start).then_some(carried),
        }
    }
}

impl LinesFile {
    /// The file at a path, which need not exist; `gateway` is named in each line.
    pub(super) const fn new(path: PathBuf, gateway: String) -> Self {
        Self { path, gateway, open: None, is_torn: false }
    }

    /// Appends a line for each record.
    pub(super) async fn append(&mut self, records: &[EnrichedRecord]) -> io::Result<()> {
        let written = self.try_append(records).await;
        if written.is_err() {
            self.open = None;
            self.is_torn = true;
        }
        written
    }

    async fn try_append(&mut self, records: &[EnrichedRecord]) -> io::Result<()> {
        let mut text = Vec::with_capacity(records.len() * 400);
        if self.is_torn {
            text.push(b'\n');
        }
        for record in records {
            serde_json::to_writer(&mut text, &Line::new(record, &self.gateway))?;
            text.push(b'\n');
        }
        let file = self.file().await?;
        file.write_all(&text).await?;
        file.flush().await?;
        self.is_torn = false;
        Ok(())
    }

    /// The open file, if its name still leads to it; opened again otherwise.
    async fn file(&mut self) -> io::Result<&mut File> {
        let is_there = match &self.open {
            Some(file) => {
                let (open, named) = (file.metadata().await?, metadata(&self.path).await);
                named.is_ok_and(|named| (named.dev(), named.ino()) == (open.dev(), open.ino()))
            }
            None => false,
        };
        let kept = self.open.take().filter(|_| is_there);
        let file = match kept {
            Some(file) => file,
            None => OpenOptions::new().append(true).create(true).mode(0o640).open(&self.path).await?,
        };
        Ok(self.open.insert(file))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use dataplane::flow::FlowEnd;

    use super::super::enriched_record::samples::{one_way, record};
    use super::*;

    #[tokio::test]
    async fn a_line_has_what_is_known_and_a_renamed_file_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("flows.jsonl");
        let mut file = LinesFile::new(path.clone(), "edge".to_owned());
        file.append(&[record(FlowEvent::Start), record(FlowEvent::End(FlowEnd::Fin))]).await.unwrap();
        let moved = dir.path().join("flows.jsonl.1");
        fs::rename(&path, &moved).unwrap();
        file.append(&[one_way(FlowEvent::Interim)]).await.unwrap();
        let lines = |path| -> Vec<serde_json::Value> {
            fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        };
        let before = lines(&moved);
        assert_eq!(before.len(), 2);
        assert_eq!(before[0]["event"], "start");
        assert!(before[0].get("end_ms").is_none() && before[0].get("reason").is_none(), "{}", before[0]);
        let expected = serde_json::json!({
            "event": "end", "reason": "fin", "gateway": "edge", "worker": 1, "service": "default/web", "protocol": "tcp",
            "mode": "nat", "client": "192.0.2.10:40000", "frontend": "192.0.2.100:80", "backend": "10.0.0.11:8080",
            "snat": "10.0.0.3:1025", "start_ms": 1_700_000_000_000_u64, "end_ms": 1_700_000_002_500_u64,
            "duration_ms": 2500, "to_backend_packets": 6, "to_backend_bytes": 500, "to_client_packets": 4,
            "to_client_bytes": 100_000,
        });
        assert_eq!(before[1], expected);
        let after = lines(&path);
        assert_eq!((after.len(), &after[0]["event"]), (1, &"interim".into()));
        assert_eq!((&after[0]["mode"], &after[0]["backend"]), (&"gue".into(), &"10.0.0.12:80".into()));
    }

    #[tokio::test]
    async fn after_a_failed_write_records_are_on_lines_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("away/flows.jsonl");
        let mut file = LinesFile::new(path.clone(), "edge".to_owned());
        assert!(file.append(&[record(FlowEvent::Start)]).await.is_err());
        fs::create_dir(dir.path().join("away")).unwrap();
        fs::write(&path, "{\"event\":\"sta").unwrap();
        file.append(&[record(FlowEvent::Start)]).await.unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(serde_json::from_str::<serde_json::Value>(text.lines().nth(1).unwrap()).is_ok(), "{text}");
    }
}
