//! Limits, ports, paths and names on which several crates must agree.

pub mod journal;

use std::time::Duration;

/// Default class of the Services that sluice serves.
pub const LOAD_BALANCER_CLASS: &str = "sluice.dev/gateway";
/// Prefix of all our annotations and conditions.
pub const ANNOTATION_PREFIX: &str = "sluice.dev/";
/// Field manager of all writes to the Kubernetes API.
pub const FIELD_MANAGER: &str = "sluice";
/// Finalizer of our Services: it keeps a Service until the gateways have removed its addresses.
pub const FINALIZER: &str = "sluice.dev/load-balancer-cleanup";
/// Annotation of our Services: the group of the installation that serves them. Several installations write the same
/// finalizer and conditions; each recognises its own by this annotation.
pub const GROUP_ANNOTATION: &str = "sluice.dev/group";
/// Annotation by which the owner of a Service asks for a group of gateways.
pub const GATEWAY_GROUP_ANNOTATION: &str = "sluice.dev/gateway-group";
/// Longest name of a group of gateways: the Lease `sluice-controller-<group>` is a DNS label, 63 - 18 bytes.
pub const GROUP_BYTES_MAX: usize = 45;
/// Default address of the admin API.
pub const ADMIN_LISTEN: &str = "unix:/run/sluice/admin.sock";
/// Default address of the admin API of a stand-alone controller. It differs from that of a gateway, which may run on
/// the same machine.
pub const CONTROLLER_ADMIN_LISTEN: &str = "unix:/run/sluice/controller.sock";
/// Default address of the configuration API.
pub const CONFIG_LISTEN: &str = "unix:/run/sluice/config.sock";

/// Suggested port of the replication of flows between gateways, UDP and TCP. 9435 and 9436 are those of metrics.
pub const REPLICATION_PORT: u16 = 9437;
/// Maximum gateways that replicate flows with one gateway: a fleet has about a dozen (16 in docs/internals/replication.md).
pub const PARTNERS_MAX: usize = 64;

/// Metadata key of FAILED_PRECONDITION on the configuration API: the URL of the leading controller.
pub const LEADER_METADATA: &str = "sluice-leader";

/// Heaviest flows, and clients, that are listed unless the request says otherwise: a screen of them.
pub const HEAVIEST: usize = 20;
/// Most of them that a request may ask for.
pub const HEAVIEST_MAX: usize = 100;

/// Possible sizes of a Maglev table, all prime (FORWARDING section 11; docs/internals/decisions/0081).
pub const MAGLEV_SIZES: [u32; 12] = [251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65537, 131_071, 262_139, 655_373];
/// Minimum entries per backend in a new table, as far as a size that large exists.
pub const MAGLEV_ENTRIES_AT_CREATION: u32 = 200;
/// A table grows if it has fewer entries per backend than this.
pub const MAGLEV_ENTRIES_AT_LEAST: u32 = 100;
/// Version of the hash that orders backends in a Maglev table. A gateway refuses a Service with another version.
pub const MAGLEV_HASH_VERSION: u32 = 1;

/// Maximum number of earlier tables of a port. A table that is replaced before long counts little, so these cover a
/// rolling update of any number of steps: they are spread over the time by the logarithm of their ages.
pub const EARLIER_TABLES_MAX: usize = 4;
/// A table that was replaced this long ago is no longer asked: the default idle limit of established connections.
pub const EARLIER_TABLES_HORIZON: Duration = Duration::from_secs(7200);
/// Ages below this count as one: about the time in which most connections of the web are over.
pub const EARLIER_TABLES_YOUNGEST: Duration = Duration::from_secs(10);
/// A controller sends earlier backends only of ports with at most this many: a change of one backend concerns one
/// connection in as many, and the lists make a message up to five times as long.
pub const EARLIER_BACKENDS_MAX: usize = 256;

/// Maximum groups of VIPs of which gateways elect the owners: each has a VRID of its own, of the 255 of a link.
pub const VIP_GROUPS_MAX: u8 = 64;
/// Maximum routing sessions of a report, and as many partners and VIPs with a second station: 64 routers, each with BGP
/// and BFD. A report stays below 100 kB.
pub const FLEET_ROWS_MAX: usize = 128;

/// First SNAT port. Servers may treat lower ports as privileged.
pub const SNAT_PORT_FIRST: u16 = 1024;
/// Last SNAT port.
pub const SNAT_PORT_LAST: u16 = 65535;
/// Time for which a SNAT port is not reused after the end of its flow: the server may hold the tuple in TIME_WAIT (60 s
/// on Linux).
pub const SNAT_PORT_REST: Duration = Duration::from_secs(60);

/// Maximum backends of a service port: 655,373 / 100, so that the largest table still balances within 1 %.
pub const BACKENDS_PER_PORT_MAX: usize = 6553;
/// Maximum Services of an installation.
pub const SERVICES_MAX: usize = 65_536;
/// Maximum addresses of a gateway itself, which are never VIPs: 32 ports with 32 addresses each, and as many next hops,
/// SNAT addresses and tunnel sources.
pub const RESERVED_MAX: usize = 4 * 32 * 32;
/// How long a gateway uses a state that no controller confirms, unless key `maxStateAge` says otherwise.
pub const MAX_STATE_AGE: Duration = Duration::from_secs(86_400);
/// Maximum size of a message on the configuration API, bytes: 10,000 backends of about 100 bytes, and headroom.
pub const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Maximum length of a refusal message of a gateway, bytes: with all Services refused the report still fits a message.
pub const REFUSAL_BYTES_MAX: usize = 512;
/// First source port of probes to VIPs: one port per backend probed this way. Linux uses ports up to 60,999 for its own
/// connections (`net.ipv4.ip_local_port_range`).
pub const PROBE_PORT_FIRST: u16 = 61_000;
/// Last source port of probes to VIPs: enough for 4,536 backends.
pub const PROBE_PORT_LAST: u16 = 65_535;
/// Port at which kube-proxy answers `GET /healthz` for its node (`--healthz-bind-address`, `healthzBindAddress`).
pub const KUBE_PROXY_HEALTH_PORT: u16 = 10_256;
/// Default time for which flows of a removed backend may continue.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(300);

/// Metric of the routes to VIPs of `routed` pools, in Linux's table. It tells them from other routes: no other program is
/// known to use it.
pub const VIP_ROUTE_METRIC: u32 = 15_000;
/// Metric of these routes while the gateway drains: routing daemons add the community GRACEFUL_SHUTDOWN (RFC 8326),
/// 65535:0, or announce the metric itself.
pub const VIP_ROUTE_DRAIN_METRIC: u32 = 65_535;

/// At most `max` bytes of a text, up to the end of a character.
#[must_use]
pub fn cut_bytes(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or_default()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_at_the_end_of_a_character() {
        assert_eq!([0, 1, 2, 3, 9].map(|max| cut_bytes("äö", max)), ["", "", "ä", "ä", "äö"]);
    }
}
