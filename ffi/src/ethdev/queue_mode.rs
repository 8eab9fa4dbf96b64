//! How the queues of a port move packets: the offloads in use, and the driver's own words for its receive and transmit
//! functions. For operators; nothing decides by it.

use std::ffi::CStr;

use super::owned_port::OwnedPort;
use crate::raw;

/// Bytes for a driver's text, terminated. Texts of DPDK 22.11 have at most 40.
const TEXT_BYTES: usize = 128;

/// The modes of a port's queues.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueModes {
    /// Of its receive queues.
    pub rx: QueueMode,
    /// Of its transmit queues.
    pub tx: QueueMode,
}

/// How the queues of one direction move packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueMode {
    /// The offloads in use, by DPDK's names: `RSS_HASH`, `MBUF_FAST_FREE`.
    pub offloads: Vec<String>,
    /// The driver's words for the function that it chose (`rte_eth_rx_burst_mode_get`): `Vector AVX2`, `Scalar`. None: it
    /// does not say.
    pub burst: Option<String>,
}

impl QueueModes {
    /// Reads them of a started port.
    pub(super) fn of(port: &OwnedPort) -> Self {
        Self { rx: QueueMode::of(port, raw::SLUICE_RECEIVE), tx: QueueMode::of(port, raw::SLUICE_TRANSMIT) }
    }
}

impl QueueMode {
    fn of(port: &OwnedPort, direction: u32) -> Self {
        let direction = i32::try_from(direction).unwrap_or_default();
        // SAFETY: the port is started.
        let offloads = unsafe { raw::sluice_port_offloads(port.id, direction) };
        let offloads = (0..u64::BITS).map(|bit| 1 << bit).filter(|bit| offloads & bit != 0);
        let mut text = [0; TEXT_BYTES];
        // SAFETY: the port is started; at most `TEXT_BYTES` bytes are written.
        let code = unsafe { raw::sluice_port_burst_mode(port.id, direction, text.as_mut_ptr(), text.len()) };
        // SAFETY: the text is terminated: `snprintf` wrote it, or it is still zero.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
        Self {
            offloads: offloads.map(|offload| name(offload, direction)).collect(),
            burst: (code == 0 && !text.is_empty()).then_some(text),
        }
    }
}

fn name(offload: u64, direction: i32) -> String {
    // SAFETY: returns a string literal.
    unsafe { CStr::from_ptr(raw::sluice_offload_name(offload, direction)) }.to_string_lossy().into_owned()
}
