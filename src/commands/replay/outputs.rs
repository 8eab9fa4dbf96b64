//! The capture files that are written: one per port, and one per Linux twin.

use std::fs;
use std::path::Path;

use dataplane::{PortConfig, PortIndex};

use super::capture::{CaptureError, CaptureWriter};
use super::error::ReplayError;

/// The side of a port on which a frame is transmitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OutputSide {
    /// Out of the port.
    Wire,
    /// To its Linux twin.
    Twin,
}

/// The output files: one per port and one per Linux twin.
pub(super) struct CaptureOutputs {
    ports: Vec<CaptureWriter>,
    twins: Vec<Option<CaptureWriter>>,
}

impl CaptureOutputs {
    pub(super) fn create(dir: &Path, ports: &[PortConfig]) -> Result<Self, ReplayError> {
        fs::create_dir_all(dir).map_err(|error| ReplayError::Directory { dir: dir.to_owned(), error })?;
        let twin_file = |port: &PortConfig| format!("linux-{}", port.name);
        for twin in ports.iter().filter(|port| port.twin) {
            if let Some(port) = ports.iter().find(|port| port.name == twin_file(twin)) {
                return Err(ReplayError::SameFile { port: port.name.clone(), twin: twin.name.clone() });
            }
        }
        let create = |name: &str| CaptureWriter::create(dir.join(format!("{name}.pcap")));
        let twin = |port: &PortConfig| port.twin.then(|| create(&twin_file(port))).transpose();
        Ok(Self {
            ports: ports.iter().map(|port| create(&port.name)).collect::<Result<_, _>>()?,
            twins: ports.iter().map(twin).collect::<Result<_, _>>()?,
        })
    }

    pub(super) fn finish(self) -> Result<(), ReplayError> {
        for output in self.ports.into_iter().chain(self.twins.into_iter().flatten()) {
            output.finish()?;
        }
        Ok(())
    }

    /// Writes a frame that leaves the gateway.
    pub(super) fn write(&mut self, time_ns: u64, port: PortIndex, side: OutputSide, frame: &[u8]) -> Result<(), CaptureError> {
        let at = usize::from(port.0);
        let output = match side {
            OutputSide::Wire => self.ports.get_mut(at),
            OutputSide::Twin => self.twins.get_mut(at).and_then(Option::as_mut),
        };
        output.map_or(Ok(()), |output| output.write(time_ns, frame))
    }
}
