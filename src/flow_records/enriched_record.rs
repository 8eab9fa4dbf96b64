//! Enrichment of flow records: the Service of the backend, and times since 1970.
//!
//! Not here: formats.

use std::net::SocketAddr;
use std::time::SystemTime;

use dataplane::Snapshot;
use dataplane::flow::{FlowEvent, FlowRecord};

use crate::worker_threads::now_ns;

/// A flow record with the names of its Service, and times since 1970.
pub(super) struct EnrichedRecord {
    pub(super) record: FlowRecord,
    pub(super) worker: usize,
    /// The backend's address and port, and its Service; none of a backend that is gone.
    pub(super) backend: Option<(SocketAddr, String)>,
    /// Start and end of the interval, ms since 1970.
    pub(super) start_ms: u64,
    pub(super) end_ms: u64,
}

/// The present, and the offset from the monotonic clock of workers to the time since 1970.
#[derive(Clone, Copy)]
pub(super) struct WallClock {
    pub(super) offset_ns: u128,
    pub(super) monotonic_ns: u64,
}

impl WallClock {
    /// Smaller differences of the offset do not count, so that all records of a flow have the same start.
    const STEP_NS: u128 = 100_000_000;

    pub(super) fn now() -> Self {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let monotonic_ns = now_ns();
        Self { offset_ns: unix.as_nanos().saturating_sub(monotonic_ns.into()), monotonic_ns }
    }

    /// The present, by the same offset unless the clock was set.
    pub(super) fn follow(&mut self, now: Self) {
        let is_set = now.offset_ns.abs_diff(self.offset_ns) >= Self::STEP_NS;
        *self = Self { offset_ns: if is_set { now.offset_ns } else { self.offset_ns }, ..now };
    }

    /// ms since 1970.
    pub(super) fn ms_at(self, monotonic_ns: u64) -> u64 {
        u64::try_from((self.offset_ns + u128::from(monotonic_ns)) / 1_000_000).unwrap_or(u64::MAX)
    }

    /// s since 1970, until 2106 (RFC 7011 section 3.1).
    pub(super) fn seconds(self) -> u32 {
        u32::try_from((self.offset_ns + u128::from(self.monotonic_ns)) / 1_000_000_000).unwrap_or(u32::MAX)
    }
}

impl EnrichedRecord {
    pub(super) fn new(record: FlowRecord, worker: usize, snapshot: &Snapshot, clock: WallClock) -> Self {
        let backend = snapshot.backend(record.flow.backend);
        Self {
            record,
            worker,
            backend: backend.map(|backend| (backend.address, backend.service.to_string())),
            start_ms: clock.ms_at(record.start_ns),
            end_ms: clock.ms_at(record.end_ns),
        }
    }

    /// The backend. In one-way modes a flow does not know its port.
    pub(super) fn backend(&self) -> SocketAddr {
        match &self.backend {
            Some((address, _)) if !self.record.flow.mode.is_two_way() => *address,
            _ => self.record.flow.backend_address,
        }
    }
}

/// The words of a record: its event, and the reason of its end.
pub(super) const fn words(event: FlowEvent) -> (&'static str, &'static str) {
    match event {
        FlowEvent::Start => ("start", ""),
        FlowEvent::Interim => ("interim", ""),
        FlowEvent::End(why) => ("end", why.as_str()),
    }
}

#[cfg(test)]
pub(super) mod samples {
    use dataplane::BackendId;
    use dataplane::flow::{FlowMode, FlowState, FlowTraffic, FlowView, Ticks};

    use super::*;

    /// A record of a flow in mode `nat`.
    pub(in crate::flow_records) fn record(event: FlowEvent) -> EnrichedRecord {
        let flow = FlowView {
            protocol: 6,
            client: "192.0.2.10:40000".parse().unwrap(),
            frontend: "192.0.2.100:80".parse().unwrap(),
            backend: BackendId::default(),
            backend_address: "10.0.0.11:8080".parse().unwrap(),
            snat: Some("10.0.0.3:1025".parse().unwrap()),
            mode: FlowMode::Nat,
            state: FlowState::TcpClosing,
            age: Ticks(0),
            idle: Ticks(0),
            shift: None,
        };
        let record = FlowRecord {
            event,
            flow,
            to_backend: FlowTraffic { packets: 6, octets: 500 },
            to_client: FlowTraffic { packets: 4, octets: 100_000 },
            start_ns: 0,
            end_ns: 0,
        };
        let backend = Some((flow.backend_address, "default/web".to_owned()));
        EnrichedRecord { record, worker: 1, backend, start_ms: 1_700_000_000_000, end_ms: 1_700_000_002_500 }
    }

    /// A record of a flow in mode `gue`.
    pub(in crate::flow_records) fn one_way(event: FlowEvent) -> EnrichedRecord {
        let mut known = record(event);
        known.record.flow.mode = FlowMode::Gue;
        (known.record.flow.snat, known.record.to_client) = (None, FlowTraffic::default());
        known.record.flow.backend_address.set_port(0);
        known.backend = Some(("10.0.0.12:80".parse().unwrap(), "default/web".to_owned()));
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_workers_become_times_since_1970() {
        let mut clock = WallClock { offset_ns: 1_700_000_000_000_000_000, monotonic_ns: 5_000_000_000 };
        assert_eq!((clock.ms_at(4_998_500_000), clock.seconds()), (1_700_000_004_998, 1_700_000_005));
        clock.follow(WallClock { offset_ns: clock.offset_ns + 99_999_999, monotonic_ns: 6_000_000_000 });
        assert_eq!((clock.ms_at(4_998_500_000), clock.seconds()), (1_700_000_004_998, 1_700_000_006), "the same start");
        clock.follow(WallClock { offset_ns: clock.offset_ns - 3_600_000_000_000, monotonic_ns: 7_000_000_000 });
        assert_eq!(clock.ms_at(4_998_500_000), 1_699_996_404_998, "the clock was set");
    }
}
