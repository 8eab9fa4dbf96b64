//! Metrics for Prometheus (DESIGN 10): those of a controller, and the formats that the gateway shares.
//!
//! Invariant: a metric is read from the state that it is about when it is asked for, and is not kept a second time.
//! Labels have values of this program, or names of pools and gateways, whose number is bounded.
//! Not here: HTTP (`healthz`), and counting.

mod exposition;
mod family;

use std::collections::BTreeMap;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::info::Info;
use proto::FleetStatus;

pub use exposition::TextFormat;
pub use family::{MetricFamily, MetricWriter, SizeCounts};

use crate::admin::View;
use crate::config::logging;
use crate::gateways::listener::KeyCertificates;
use crate::gateways::registry::Gateways;
use crate::healthz::{Pages, Probes, Unwell};
use crate::kubernetes::lease::Leadership;
use crate::plan::addresses::Figures;

/// Maximum number of pools with metrics of their own, in their order.
const POOLS_MAX: usize = 1_000;

const BUILD: MetricFamily = MetricFamily::info("sluice_build", "The program and its version.");
const CERTIFICATE_EXPIRATION: MetricFamily = MetricFamily::gauge(
    "sluice_certificate_expiration_timestamp",
    "seconds",
    "Unix time at which the certificates of a key expire: the first of their chain, or the last authority if that is earlier.",
);
const LOG_LOST: MetricFamily = MetricFamily::counter(
    "sluice_log_lost",
    "lines",
    "Log lines that were lost, because stderr was not read fast enough or could not be written.",
);
const LEADING: MetricFamily = MetricFamily::gauge("sluice_controller_leading", "", "1 while this replica leads.");
const TERMS: MetricFamily =
    MetricFamily::counter("sluice_controller", "terms", "How often this replica began to lead; 0 without an API server.");
const LEASE_FAILURES: MetricFamily =
    MetricFamily::counter("sluice_lease", "failures", "Failed attempts to get, create or renew the Lease.");
const GATEWAYS: MetricFamily =
    MetricFamily::gauge("sluice", "gateways", "Gateways by state; a gateway counts once in each state that applies.");
const VIP_GROUPS: MetricFamily = MetricFamily::gauge(
    "sluice_gateways_vip",
    "groups",
    "Groups of VIPs by the number of connected gateways that own them: none, one, several.",
);
const SESSIONS: MetricFamily = MetricFamily::gauge(
    "sluice_gateways_routing",
    "sessions",
    "Routing sessions of each connected gateway by state: up, down. Those that are switched off do not count.",
);
const PARTNERS: MetricFamily =
    MetricFamily::gauge("sluice_gateways", "partners", "Partners of each connected gateway by state: in_sync, behind.");
const GENERATION: MetricFamily = MetricFamily::gauge(
    "sluice_controller_generation",
    "",
    "Counter of the newest state for gateways; 0 while this replica does not lead.",
);
const GATEWAYS_GENERATION: MetricFamily = MetricFamily::gauge(
    "sluice_gateways_generation",
    "",
    "Counter of the newest state that every connected gateway has applied; 0 if none has or none is connected.",
);
const SERVICES: MetricFamily = MetricFamily::gauge("sluice_controller", "services", "Services in the newest state for gateways.");
const POOL_ADDRESSES: MetricFamily = MetricFamily::gauge(
    "sluice_pool",
    "addresses",
    "Addresses of each pool by family and state: total, used by Services, and available.",
);
const POOLS_OMITTED: MetricFamily =
    MetricFamily::gauge("sluice_metrics_omitted", "pools", "Pools without metrics, because there are more than 1,000.");
const PLANS: MetricFamily = MetricFamily::durations("sluice_plan_duration", "Durations of plans.");
const PROGRAMMING: MetricFamily = MetricFamily::durations(
    "sluice_network_programming_duration",
    "Time from a changed EndpointSlice, as this controller receives it, until all workers of all gateways forward by it.",
);
const QUEUE: MetricFamily = MetricFamily::gauge("sluice_queued", "writes", "Queued writes to the API server, by queue.");
const STATUS_WRITES: MetricFamily =
    MetricFamily::counter("sluice_status", "writes", "Answered writes of the status of Services, by result.");
const STATUS_WRITE_DURATION: MetricFamily = MetricFamily::durations(
    "sluice_status_write_duration",
    "Durations of writes of the status of Services, from the request to the answer.",
);
const EVENT_WRITES: MetricFamily = MetricFamily::counter("sluice_event", "writes", "Attempts to write an Event, by result.");
const WATCH_RESTARTS: MetricFamily =
    MetricFamily::counter("sluice_watch", "restarts", "Watches that failed or had to list again, by resource.");

/// The metrics of a controller.
#[derive(Clone, Debug)]
pub struct ControllerMetrics(pub View);

impl ControllerMetrics {
    /// Writes all of them, without the one that names the program.
    ///
    /// # Errors
    /// If the exposition cannot be written.
    pub fn write(&self, writer: &mut MetricWriter<'_>) -> fmt::Result {
        let Self(view) = self;
        writer.gauge(&LEADING, u64::from(matches!(*view.leadership.borrow(), Leadership::Leading { .. })))?;
        writer.metric(&TERMS, &view.activity.leader_terms)?;
        writer.metric(&LEASE_FAILURES, &view.activity.lease_failures)?;
        self.write_gateways(writer)?;
        self.write_pools(writer)?;
        writer.metric(&PLANS, &view.programming.plans)?;
        writer.metric(&PROGRAMMING, &view.programming.changes)?;
        let statuses = view.status_writer.borrow().as_ref().map_or(0, |queue| queue.waiting());
        let events = view.recorder.events().map_or(0, |queue| queue.waiting());
        writer.gauges(&QUEUE, [([("queue", "status")], statuses), ([("queue", "events")], events)])?;
        writer.metric(&STATUS_WRITES, &view.activity.status_writes)?;
        writer.metric(&STATUS_WRITE_DURATION, &view.activity.status_write_duration)?;
        writer.metric(&EVENT_WRITES, &view.activity.event_writes)?;
        writer.metric(&WATCH_RESTARTS, &view.activity.watch_restarts)
    }

    fn write_gateways(&self, writer: &mut MetricWriter<'_>) -> fmt::Result {
        let gateways = self.0.gateways.borrow();
        let count = |state: fn(bool) -> bool| gateways.iter().filter(|gateway| state(gateway.ready)).count();
        let drained = gateways.iter().filter(|gateway| gateways.is_drained(&gateway.name)).count();
        let states = [
            ("connected", count(|_| true)),
            ("ready", count(|ready| ready)),
            ("drained", drained),
            ("disconnected", gateways.disconnected().len()),
        ];
        writer.gauges(&GATEWAYS, states.map(|(state, count)| ([("state", state)], count)))?;
        writer.gauge(&GATEWAYS_GENERATION, gateways.reached_by_all().unwrap_or(0))?;
        write_fleet(writer, &gateways)?;
        drop(gateways);
        let published = self.0.states.borrow().clone();
        writer.gauge(&GENERATION, published.as_ref().map_or(0, |published| published.state.generation.counter))?;
        writer.gauge(&SERVICES, published.map_or(0, |published| published.state.services.len() as u64))
    }

    #[allow(clippy::cast_precision_loss)] // as every sample of Prometheus
    fn write_pools(&self, writer: &mut MetricWriter<'_>) -> fmt::Result {
        let pools = self.0.pools.borrow().uses.clone();
        let figures = pools.iter().take(POOLS_MAX).flat_map(|pool| pool.families.iter().map(move |of| (&pool.state.name, of)));
        let samples = figures.flat_map(|(pool, (family, figures))| {
            let Figures { total, used, available, .. } = *figures;
            [("total", total), ("used", used), ("available", available)].map(|(state, count)| {
                ([("pool", pool.clone()), ("family", family.to_string()), ("state", state.to_owned())], count as f64)
            })
        });
        writer.gauges(&POOL_ADDRESSES, samples)?;
        writer.gauge(&POOLS_OMITTED, pools.len().saturating_sub(POOLS_MAX) as u64)
    }
}

/// Writes what connected gateways report about the fleet.
fn write_fleet(writer: &mut MetricWriter<'_>, gateways: &Gateways) -> fmt::Result {
    // A gateway that reconnects appears twice; the last connection is in use.
    let by_name: BTreeMap<_, _> = gateways.iter().filter_map(|one| Some((one.name.as_str(), one.fleet.as_deref()?))).collect();
    let elections: Vec<_> = by_name.values().filter_map(|fleet| fleet.election.as_ref()).collect();
    let owners = |group: u8| elections.iter().filter(|election| election.owned >> group & 1 == 1).count();
    let groups = elections.iter().map(|election| election.groups).max().unwrap_or(0);
    let count = |is_so: fn(usize) -> bool| (0..groups).filter(|group| is_so(owners(*group))).count();
    let by_owners =
        [("none", count(|owners| owners == 0)), ("one", count(|owners| owners == 1)), ("several", count(|owners| owners > 1))];
    writer.gauges(&VIP_GROUPS, by_owners.map(|(owners, groups)| ([("owners", owners)], groups)))?;
    let of_each = |figures: fn(&FleetStatus) -> [(&'static str, usize); 2]| {
        by_name.iter().flat_map(move |(name, fleet)| {
            figures(fleet).map(|(state, count)| ([("gateway", (*name).to_owned()), ("state", state.to_owned())], count))
        })
    };
    let sessions = of_each(|fleet| {
        let (up, all) = fleet.sessions_up();
        [("up", up), ("down", all - up)]
    });
    writer.gauges(&SESSIONS, sessions)?;
    let partners = of_each(|fleet| {
        let in_sync = fleet.partners_in_sync();
        [("in_sync", in_sync), ("behind", fleet.partners.len() - in_sync)]
    });
    writer.gauges(&PARTNERS, partners)
}

impl Collector for ControllerMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut writer = MetricWriter::new(encoder);
        write_program(&mut writer, "sluice-controller", env!("CARGO_PKG_VERSION"))?;
        write_certificates(&mut writer, &self.0.certificates)?;
        self.write(&mut writer)
    }
}

/// Writes the metric that names the program.
///
/// # Errors
/// If the exposition cannot be written.
pub fn write_program(writer: &mut MetricWriter<'_>, program: &'static str, version: &str) -> fmt::Result {
    writer.metric(&LOG_LOST, &ConstCounter::new(logging::lost_lines()))?;
    writer.metric(&BUILD, &Info::new([("program", program.to_owned()), ("version", version.to_owned())]))
}

/// Writes when certificates expire. Those that cannot be read have no sample: the log says why.
///
/// # Errors
/// If the exposition cannot be written.
pub fn write_certificates<'a>(
    writer: &mut MetricWriter<'_>,
    certificates: impl IntoIterator<Item = &'a KeyCertificates>,
) -> fmt::Result {
    let ends = certificates.into_iter().filter_map(|one| Some(([("key", one.key)], one.validity()?.until_s)));
    writer.gauges(&CERTIFICATE_EXPIRATION, ends)
}

/// What `sluice-controller` serves on `metrics.listen`: its metrics and its probes.
#[derive(Clone, Debug)]
pub struct ControllerPages {
    /// The probes.
    pub probes: Probes,
    /// The metrics.
    pub metrics: ControllerMetrics,
}

impl Pages for ControllerPages {
    fn live(&self) -> Result<(), Unwell> {
        self.probes.live()
    }

    async fn ready(&self) -> Result<(), Unwell> {
        self.probes.ready().await
    }

    fn metrics(&self, accept: Option<&str>) -> Option<(&'static str, Result<String, fmt::Error>)> {
        let format = TextFormat::accepted(accept);
        Some((format.content_type(), format.text(self.metrics.clone())))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::settings::CertificateFiles;
    use crate::gateways::listener::ShownBy;
    use crate::gateways::tls::tests::Authority;

    #[derive(Debug)]
    struct CertificateCollector(Vec<KeyCertificates>);

    impl Collector for CertificateCollector {
        fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
            write_certificates(&mut MetricWriter::new(encoder), &self.0)
        }
    }

    #[test]
    fn the_expiration_of_certificates_follows_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let files = CertificateFiles { ca: dir.path().join("ca"), cert: dir.path().join("cert"), key: dir.path().join("key") };
        let key = |key, files: &CertificateFiles| KeyCertificates { key, shown_by: ShownBy::Client(files.clone()) };
        let text = || TextFormat::Prometheus.text(CertificateCollector(vec![key("tls", &files)])).unwrap();
        assert!(!text().lines().any(|line| line.starts_with("sluice_certificate")), "no file, no sample");
        let authority = Authority::new();
        for until_s in [1_900_000_000, 1_950_000_000] {
            let issued = authority.issue_until_unix(&["sluice://east/controller"], Duration::from_secs(until_s));
            std::fs::write(&files.ca, &issued.ca).unwrap();
            std::fs::write(&files.cert, &issued.certificate).unwrap();
            let line = format!("sluice_certificate_expiration_timestamp_seconds{{key=\"tls\"}} {until_s}");
            assert!(text().lines().any(|other| other == line), "{}", text());
        }
    }
}
