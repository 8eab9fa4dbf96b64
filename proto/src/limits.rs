//! Limits, ports, paths and names that two crates must agree on.

use std::time::Duration;

/// The class of Services that sluice serves unless configured otherwise.
pub const LOAD_BALANCER_CLASS: &str = "sluice.dev/gateway";
/// Prefix of every annotation and condition of ours.
pub const ANNOTATION_PREFIX: &str = "sluice.dev/";
/// Field manager of every write to the Kubernetes API.
pub const FIELD_MANAGER: &str = "sluice";
/// Finalizer of Services that are ours: it keeps them until gateways took their addresses out.
pub const FINALIZER: &str = "sluice.dev/load-balancer-cleanup";
/// Annotation of Services that are ours: the group of the installation that serves them. Several installations write the
/// same finalizer and conditions; by this each knows its own.
pub const GROUP_ANNOTATION: &str = "sluice.dev/group";
/// Default address of the admin API.
pub const ADMIN_LISTEN: &str = "unix:/run/sluice/admin.sock";
/// Default address of the admin API of a controller that is a program of its own: a gateway may run on the same machine.
pub const CONTROLLER_ADMIN_LISTEN: &str = "unix:/run/sluice/controller.sock";
/// Default address of the configuration API.
pub const CONFIG_LISTEN: &str = "unix:/run/sluice/config.sock";

/// Metadata of FAILED_PRECONDITION on the configuration API: the URL of the controller that leads.
pub const LEADER_METADATA: &str = "sluice-leader";

/// Candidates for the size of a Maglev table, all prime (FORWARDING section 11).
pub const MAGLEV_SIZES: [u32; 10] = [251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65537, 655_373];
/// A new table has at least this many entries per backend, while a size that large exists.
pub const MAGLEV_ENTRIES_AT_CREATION: u32 = 200;
/// A table grows when it has fewer entries per backend than this.
pub const MAGLEV_ENTRIES_AT_LEAST: u32 = 100;
/// Version of the hash that orders backends in a Maglev table. A gateway refuses a service with another one.
pub const MAGLEV_HASH_VERSION: u32 = 1;

/// First SNAT port. Below lie the ports that servers may treat as privileged.
pub const SNAT_PORT_FIRST: u16 = 1024;
/// Last SNAT port.
pub const SNAT_PORT_LAST: u16 = 65535;
/// A SNAT port rests this long after its flow ended: the server may hold the tuple in TIME_WAIT (60 s on Linux).
pub const SNAT_PORT_REST: Duration = Duration::from_secs(60);

/// Backends of one service port: 655,373 / 100, so that the largest table still balances within 1 %.
pub const BACKENDS_PER_PORT_MAX: usize = 6553;
/// Services of one installation.
pub const SERVICES_MAX: usize = 65_536;
/// Addresses of a gateway itself, which are never VIPs: 32 ports with 32 addresses each, and as many next hops, SNAT addresses
/// and sources of tunnels.
pub const RESERVED_MAX: usize = 4 * 32 * 32;
/// Largest message on the configuration API, bytes: 10,000 backends at about 100 bytes, times ten for headroom.
pub const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Longest sentence with which a gateway refuses a Service, bytes: with all Services refused the report still fits a message.
pub const REFUSAL_BYTES_MAX: usize = 512;
/// First source port of probes to VIPs: one for each backend that is probed so. Linux gives ports up to 60,999 to
/// connections of its own (`net.ipv4.ip_local_port_range`).
pub const PROBE_PORT_FIRST: u16 = 61_000;
/// Last source port of probes to VIPs: 4,536 backends.
pub const PROBE_PORT_LAST: u16 = 65_535;
/// Default time that flows of a removed backend may go on.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(300);
