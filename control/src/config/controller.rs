//! The keys of a controller, in the file of `sluice-controller` or, for an embedded controller, in the gateway's file.
//!
//! Invariant: [`key_values`] has every key, and reads back as the same settings.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::Selector;
use proto::limits::{CONTROLLER_ADMIN_LISTEN, DRAIN_TIMEOUT, GROUP_BYTES_MAX, LOAD_BALANCER_CLASS};
use proto::{AddressRange, GatewayProfile, HealthCheck, InitialHealth, Mode, Probe, Scheduler};

use super::key_values::KeyValues;
use super::logging::Logs;
use super::pools::LocatedRange;
use super::problem::{Invalid, Located};
use super::section::{Field, Reader, Section, alternatives};
use crate::config::settings::{AdminListen, ClaimClassless, ControllerSettings, Defaults, MaglevSeed, OwnershipRules, Source};
use objects::scalar::url::ServerUrl;
use objects::scalar::{CLASS_EXPECTED, DurationText, is_class, is_dns_label, scheduler};

/// Every top-level key that belongs to the controller and not to the gateway.
pub const KEYS: [&str; 17] = [
    "listen",
    "tls",
    "advertise",
    "group",
    "serveUnassigned",
    "kubernetes",
    "defaults",
    "health",
    "backends",
    "clusterCIDRs",
    "nodePortNamespaceSelector",
    "externalIPs",
    "pools",
    "poolSelector",
    "maglevSeed",
    "manifests",
    "statusDir",
];

/// Every top-level key of `sluiced` that a controller does not have.
pub const GATEWAY_KEYS: [&str; 18] = [
    "name",
    "ports",
    "workers",
    "memory",
    "snat",
    "tunnel",
    "nodePortAddresses",
    "flows",
    "limits",
    "zone",
    "stateDir",
    "maxStateAge",
    "flowRecords",
    "static",
    "announce",
    "drainOnStop",
    "fleet",
    "controller",
];

/// The file of `sluice-controller` unless given. A gateway on the same machine has a file of its own.
pub const CONFIG: &str = "/etc/sluice/controller.yaml";
/// Default of key `statusDir`.
pub const STATUS_DIR: &str = "/var/lib/sluice/status";
/// Longest name of a Namespace, a DNS label.
const NAMESPACE_BYTES_MAX: usize = 63;

/// The keys of a controller as read.
#[derive(Clone, Debug)]
pub struct ControllerKeys {
    /// The settings, with the source that the file names; without `profile` and `lock_dir`, which other keys decide.
    pub settings: ControllerSettings,
    /// Key `kubernetes.kubeconfig`.
    pub kubeconfig: Option<Located<PathBuf>>,
    /// Key `kubernetes.namespace`.
    pub namespace: Option<String>,
    /// Key `manifests`.
    pub manifests: Option<Located<PathBuf>>,
    /// Key `statusDir`.
    pub status_dir: PathBuf,
    /// Key `health.listen`.
    pub health_listen: Option<Located<SocketAddr>>,
    /// The ranges of all pools with their locations, for checks against other uses of addresses.
    pub ranges: Vec<LocatedRange>,
}

impl ControllerKeys {
    /// Reads every key of [`KEYS`].
    pub fn take(top: &mut Section<'_>) -> Self {
        let (kubeconfig, namespace, load_balancer_class, classless) = take_kubernetes(top);
        let node_port_namespaces = top.selector("nodePortNamespaceSelector");
        let (external_ips_allowed, pools) = (take_external_ips(top), top.selector("poolSelector"));
        let (group, serves_unassigned) = (take_group(top), top.flag("serveUnassigned", true));
        let ownership = OwnershipRules { serves_unassigned, classless, node_port_namespaces, external_ips_allowed, pools };
        let location_of = top.field("manifests").map(|field| field.location);
        let manifests = location_of.zip(top.path_of("manifests")).map(|(location, value)| Located { location, value });
        let cluster_cidrs = take_nets(top, "clusterCIDRs");
        let (pools, ranges) = super::pools::take(top, &load_balancer_class, &group);
        for (located, net) in ranges.iter().flat_map(|located| cluster_cidrs.iter().map(move |net| (located, net))) {
            if AddressRange::new(net.network(), net.broadcast()).is_ok_and(|cidr| cidr.overlaps(&located.range)) {
                let message =
                    format!("found {}, which overlaps {net} of `clusterCIDRs`; take addresses outside it", located.range);
                top.reader.problem(&located.location, message);
            }
        }
        let (health, health_listen) = take_health(top);
        let listen = super::listen::take(top);
        let status_dir = top.path_of("statusDir").unwrap_or_else(|| STATUS_DIR.into());
        let source = match &manifests {
            Some(dir) => Source::Manifests { dir: dir.value.clone(), status_dir: status_dir.clone() },
            None => Source::Kubernetes {
                kubeconfig: kubeconfig.as_ref().map(|located| located.value.clone()),
                namespace: namespace.clone(),
            },
        };
        let settings = ControllerSettings {
            listen,
            group,
            source,
            load_balancer_class,
            ownership,
            defaults: take_defaults(top),
            health,
            backends_allowed: take_allowed(top),
            cluster_cidrs,
            pools,
            profile: GatewayProfile::default(),
            maglev_seed: take_maglev_seed(top),
            lock_dir: None,
        };
        Self { settings, kubeconfig, namespace, manifests, status_dir, health_listen, ranges }
    }
}

fn take_maglev_seed(top: &mut Section<'_>) -> MaglevSeed {
    let parse = |text: &str| match text {
        "kept" => Some(MaglevSeed::Kept),
        "random" => Some(MaglevSeed::Random),
        "public" => Some(MaglevSeed::Public),
        number => number.parse().ok().map(MaglevSeed::Given),
    };
    top.parse("maglevSeed", "kept, random, public, or a number from 0 to 18446744073709551615", parse).unwrap_or_default()
}

fn take_kubernetes(top: &mut Section<'_>) -> (Option<Located<PathBuf>>, Option<String>, String, ClaimClassless) {
    let mut section = top.section("kubernetes");
    let location = section.field("kubeconfig").filter(|field| !field.is_empty()).map(|field| field.location);
    let kubeconfig = location.and_then(|location| section.path_of("kubeconfig").map(|value| Located { location, value }));
    let namespace = section.text("namespace", "the name of a Namespace", |text| is_dns_label(text, NAMESPACE_BYTES_MAX));
    let class = section.text("loadBalancerClass", CLASS_EXPECTED, is_class);
    let mut claim = section.section("claimClassless");
    let classless = ClaimClassless {
        enabled: claim.flag("enabled", false),
        namespaces: claim.selector("namespaceSelector"),
        services: claim.selector("serviceSelector"),
    };
    claim.finish();
    section.finish();
    (kubeconfig, namespace, class.unwrap_or_else(|| LOAD_BALANCER_CLASS.to_owned()), classless)
}

/// Reads key `metrics` of `sluice-controller`.
fn take_metrics(top: &mut Section<'_>) -> Option<Located<SocketAddr>> {
    let mut section = top.section("metrics");
    let listen = section.listen_tcp("listen");
    section.finish();
    listen
}

fn take_group(top: &mut Section<'_>) -> String {
    let expected = format!("a name of lower-case letters, digits and `-`, at most {GROUP_BYTES_MAX}");
    top.text("group", expected, |text| is_dns_label(text, GROUP_BYTES_MAX)).unwrap_or_else(|| "default".to_owned())
}

fn take_defaults(top: &mut Section<'_>) -> Defaults {
    let mut section = top.section("defaults");
    let names: Vec<_> = Scheduler::ALL.iter().map(|scheduler| scheduler.as_str()).collect();
    let expected = format!("{}, or its name in IPVS", alternatives(&names));
    let chosen = section.parse("scheduler", expected, scheduler);
    let day = Duration::from_secs(86_400);
    let defaults = Defaults {
        mode: section.one_of("mode", Mode::ALL, Mode::Nat),
        scheduler: chosen.unwrap_or(Scheduler::Maglev),
        drain_timeout: section.duration("drainTimeout", Duration::ZERO..=day, DRAIN_TIMEOUT),
    };
    section.finish();
    defaults
}

/// Reads key `health`: how backends are probed, and the address of this program's own health endpoints.
fn take_health(top: &mut Section<'_>) -> (HealthCheck, Option<Located<SocketAddr>>) {
    let default = HealthCheck::default();
    let mut section = top.section("health");
    let listen = section.listen_tcp("listen");
    let health = HealthCheck {
        // At most ten probes a second for each target, a load that a backend should not notice.
        interval: section.duration("interval", Duration::from_millis(100)..=Duration::from_secs(600), default.interval),
        timeout: section.duration("timeout", Duration::from_millis(10)..=Duration::from_secs(60), default.timeout),
        rise: section.number("rise", 1..=100, default.rise),
        fall: section.number("fall", 1..=100, default.fall),
        fail_open: section.flag("failOpen", default.fail_open),
        initial: section.one_of("initial", InitialHealth::ALL, default.initial),
        probe: section.one_of("check", Probe::ALL, default.probe),
        path: section.text("path", "a path such as /healthz", is_path).filter(|path| path != "/"),
        status: section.parse("status", "statuses such as 200-299,404", |text| text.parse().ok()).unwrap_or(default.status),
        tls_verify: section.flag("tlsVerify", default.tls_verify),
        port: None,
        host: None,
        node_health_port: None,
    };
    if health.timeout > health.interval {
        let (timeout, interval) = (DurationText(health.timeout), DurationText(health.interval));
        let message = format!("timeout {timeout} is longer than interval {interval}; expected it to be at most as long");
        section.problem(message);
    }
    section.finish();
    (health, listen)
}

fn is_path(text: &str) -> bool {
    text.starts_with('/') && text.bytes().all(|c| c.is_ascii_graphic() && c != b'#')
}

fn take_allowed(top: &mut Section<'_>) -> Option<Vec<IpNet>> {
    let mut section = top.section("backends");
    let allowed = section.field("allowed");
    if let Some(field) = allowed.as_ref().filter(|field| field.is_empty()) {
        field.problem("found nothing, which would allow no backend at all; leave the key out to allow all, or list CIDRs");
    }
    let nets = allowed.map(|field| nets_of(&field));
    section.finish();
    nets
}

fn take_nets(top: &mut Section<'_>, key: &'static str) -> Vec<IpNet> {
    top.field(key).map(|field| nets_of(&field)).unwrap_or_default()
}

fn nets_of(field: &Field<'_>) -> Vec<IpNet> {
    field.items("CIDRs").iter().filter_map(|item| item.try_parse("a CIDR such as 10.0.0.0/8", proto::network)).collect()
}

fn take_external_ips(top: &mut Section<'_>) -> Vec<IpNet> {
    let mut section = top.section("externalIPs");
    let allowed = take_nets(&mut section, "allowed");
    section.finish();
    allowed
}

/// The file of `sluice-controller`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerFile {
    /// The settings of the controller.
    pub settings: ControllerSettings,
    /// Key `admin`: where `sluice.v1.Admin` is served.
    pub admin_listen: AdminListen,
    /// Key `health.listen`: the address of `/livez` and `/readyz`.
    pub health_listen: Option<SocketAddr>,
    /// Key `metrics.listen`: the address of `/metrics`.
    pub metrics_listen: Option<SocketAddr>,
    /// Key `logs`.
    pub logs: Logs,
}

impl ControllerFile {
    /// Reads the file of `sluice-controller`.
    ///
    /// # Errors
    /// All problems of the file.
    pub fn read(file: &Path) -> Result<Self, Invalid> {
        let (reader, root) = Reader::open(file)?;
        let mut top = reader.section(&root);
        let keys = ControllerKeys::take(&mut top);
        let logs = Logs::take(&mut top);
        let admin_listen = super::listen::take_admin(&mut top, CONTROLLER_ADMIN_LISTEN);
        if keys.settings.listen.unix.as_ref() == Some(&admin_listen.unix) {
            let message =
                format!("found {}, which is `listen` too; give each its own", ServerUrl::Unix(admin_listen.unix.clone()));
            top.section("admin").problem(message);
        }
        let metrics = take_metrics(&mut top);
        let tcp = keys.settings.listen.tcp.as_ref().map(|tcp| tcp.address);
        let address_of = |located: &Option<Located<SocketAddr>>| located.as_ref().map(|located| located.value);
        let (health_listen, metrics_listen) = (address_of(&keys.health_listen), address_of(&metrics));
        let admin_tcp = admin_listen.tcp.as_ref().map(|(address, _)| *address);
        let listeners = [("listen", tcp), ("health.listen", health_listen), ("metrics.listen", metrics_listen)];
        super::listen::check_listeners(&mut top, &[&listeners[..], &[("admin.listen", admin_tcp)]].concat());
        top.refuse_keys(&GATEWAY_KEYS, |count| {
            let are = if count == 1 { "is a key" } else { "are keys" };
            format!("{are} of sluiced; this is the configuration of sluice-controller (give its file with --config)")
        });
        top.finish();
        if let (Some(manifests), Some(_)) = (&keys.manifests, &keys.kubeconfig) {
            reader.problem(&manifests.location, "found a second source beside `kubernetes.kubeconfig`; keep one of the two");
        }
        reader.finish()?;
        let settings = ControllerSettings { lock_dir: admin_listen.unix.parent().map(Path::to_owned), ..keys.settings };
        Ok(Self { settings, admin_listen, health_listen, metrics_listen, logs })
    }

    /// Every key with its value, as YAML that [`ControllerFile::read`] takes.
    #[must_use]
    pub fn effective(&self) -> String {
        let admin = super::listen::admin_key_values(&self.admin_listen);
        let metrics = KeyValues::default().with("listen", address_text(self.metrics_listen));
        let own = KeyValues::default().with("logs", self.logs).section("admin", admin).section("metrics", metrics);
        own.then(key_values(&self.settings, self.health_listen)).to_string()
    }
}

/// A TCP address to listen on as a value; empty if there is none.
#[must_use]
pub fn address_text(listen: Option<SocketAddr>) -> String {
    listen.map_or_else(String::new, |address| address.to_string())
}

/// The keys of a controller with their values; `health_listen` is the key `health.listen`.
#[must_use]
pub fn key_values(settings: &ControllerSettings, health_listen: Option<SocketAddr>) -> KeyValues {
    let selector = |selector: &Selector| LabelSelector::from(selector.clone());
    let (kubeconfig, namespace, manifests) = match &settings.source {
        Source::Manifests { dir, status_dir } => (None, None, Some((dir, status_dir))),
        Source::Kubernetes { kubeconfig, namespace } => (kubeconfig.as_ref(), namespace.as_ref(), None),
    };
    let (ownership, health, defaults) = (&settings.ownership, &settings.health, &settings.defaults);
    let claim_classless = KeyValues::default()
        .with("enabled", ownership.classless.enabled)
        .with("namespaceSelector", selector(&ownership.classless.namespaces))
        .with("serviceSelector", selector(&ownership.classless.services));
    let kubernetes = KeyValues::default()
        .with("kubeconfig", kubeconfig)
        .with("namespace", namespace)
        .with("loadBalancerClass", &settings.load_balancer_class)
        .section("claimClassless", claim_classless);
    let defaults = KeyValues::default()
        .with("mode", defaults.mode)
        .with("scheduler", defaults.scheduler)
        .with("drainTimeout", DurationText(defaults.drain_timeout));
    let health = KeyValues::default()
        .with("listen", address_text(health_listen))
        .with("interval", DurationText(health.interval))
        .with("timeout", DurationText(health.timeout))
        .with("rise", health.rise)
        .with("fall", health.fall)
        .with("failOpen", health.fail_open)
        .with("initial", health.initial)
        .with("check", health.probe)
        .with("path", health.path.as_deref().unwrap_or("/"))
        .with("status", health.status.to_string())
        .with("tlsVerify", health.tls_verify);
    let allowed = match &settings.backends_allowed {
        None => KeyValues::default().with("allowed", None::<&str>),
        Some(nets) => KeyValues::default().with_texts("allowed", nets),
    };
    super::listen::key_values(&settings.listen)
        .with("group", &settings.group)
        .with("serveUnassigned", ownership.serves_unassigned)
        .block("kubernetes", kubernetes)
        .section("defaults", defaults)
        .section("health", health)
        .section("backends", allowed)
        .with_texts("clusterCIDRs", &settings.cluster_cidrs)
        .with("nodePortNamespaceSelector", selector(&ownership.node_port_namespaces))
        .section("externalIPs", KeyValues::default().with_texts("allowed", &ownership.external_ips_allowed))
        .items("pools", settings.pools.iter().map(super::pools::key_values))
        .with("poolSelector", selector(&ownership.pools))
        .with("maglevSeed", maglev_seed(settings.maglev_seed))
        .with("manifests", manifests.map(|(dir, _)| dir))
        .with("statusDir", manifests.map_or(Path::new(STATUS_DIR), |(_, dir)| dir))
}

fn maglev_seed(seed: MaglevSeed) -> String {
    match seed {
        MaglevSeed::Kept => "kept".to_owned(),
        MaglevSeed::Random => "random".to_owned(),
        MaglevSeed::Public => "public".to_owned(),
        MaglevSeed::Given(seed) => seed.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use crate::config::settings::Listen;

    use super::*;

    fn read(text: &str) -> Result<ControllerFile, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("controller.yaml");
        std::fs::write(&file, text).unwrap();
        ControllerFile::read(&file).map_err(|invalid| invalid.to_string().replace(&format!("{}:", file.display()), ""))
    }

    #[test]
    fn an_empty_file_follows_the_cluster_it_runs_in_with_all_defaults() {
        let settings = read("").unwrap().settings;
        assert_eq!(settings.source, Source::Kubernetes { kubeconfig: None, namespace: None });
        assert_eq!(settings.listen, Listen::unix("/run/sluice/config.sock".into()));
        assert_eq!((settings.group.as_str(), settings.load_balancer_class.as_str()), ("default", "sluice.dev/gateway"));
        assert_eq!(settings.health, HealthCheck::default());
        assert_eq!(settings.defaults.drain_timeout, Duration::from_secs(300));
        assert_eq!((settings.backends_allowed, settings.pools.len()), (None, 0));
    }

    #[test]
    fn the_output_of_check_parses_to_the_same_settings() {
        let text = "\
                    health: {listen: '[::1]:9440', interval: 90s, timeout: 250ms, rise: 1, fall: 9, failOpen: false, initial: unhealthy,\n    \
                    check: https, path: /healthz, status: '200-299,404', tlsVerify: true}\n\
                    poolSelector: {sluice.dev/group: east}\n\
                    defaults: {mode: ipip, scheduler: wrr}\n\
                    backends: {allowed: [10.0.0.0/8, 'fd00::/8']}\nclusterCIDRs: [10.96.0.0/12]\ngroup: east\nserveUnassigned: false\n\
                    pools:\n  - name: a\n    addresses: [192.0.2.0/25, 2001:db8::1]\n  - {name: b, addresses: [192.0.2.128-192.0.2.130]}\n  \
                    - {name: c, addresses: [192.0.2.140], announce: routed, autoAssign: false, avoidBuggyIPs: true, priority: 7,\n    \
                    bgp: {communities: ['65000:100', '65000:1:2', no-export], med: 50, localPref: 200, aggregationLengthV6: 64},\n    \
                    namespaceSelector: {matchLabels: {team: a}}, serviceSelector: {matchExpressions: [{key: b, operator: Exists}]},\n    \
                    maxPerNamespace: 3, loadBalancerClass: a.b/c, gatewayGroup: east, allowCrossNamespaceSharing: true, internal: true}\n\
                    kubernetes: {kubeconfig: /k, namespace: edge, loadBalancerClass: a.b/c, claimClassless: {enabled: true, namespaceSelector: {team: edge}, serviceSelector: {matchExpressions: [{key: lb, operator: Exists}]}}}\n\
                    nodePortNamespaceSelector: {matchLabels: {nodeports: 'yes'}}\nexternalIPs: {allowed: [203.0.113.0/24]}\n\
                    metrics: {listen: 127.0.0.1:9436}\nlogs: {format: json, level: debug}\n\
                    admin: {listen: ['unix:/a b.sock', '[::1]:9444'], tls: {ca: /a, cert: /b, key: /c}}\n";
        let tcp =
            "listen: ['unix:/s', '[::]:9443']\ntls: {ca: /a, cert: /b, key: /c}\nadvertise: 'https://[2001:db8::1]:30443'\n";
        let secret = "listen: 0.0.0.0:9443\ntls: {secret: sluice-controller-tls}\n";
        let seeds = ["kept", "random", "public", "18446744073709551615"].map(|seed| format!("maglevSeed: {seed}\n"));
        for text in seeds.iter().map(String::as_str).chain([text, "manifests: /m\nstatusDir: /s\n", tcp, secret, ""]) {
            let file = read(text).unwrap();
            assert_eq!(read(&file.effective()).as_ref(), Ok(&file), "{}", file.effective());
        }
    }

    #[test]
    fn the_output_of_check_has_every_key() {
        let effective = read("").unwrap().effective();
        for key in KEYS {
            assert!(effective.lines().any(|line| line.starts_with(&format!("{key}:"))), "{key} is missing:\n{effective}");
        }
    }

    #[test]
    fn errors_for_invalid_values_say_what_is_allowed() {
        let rows = [
            ("listen: unix:/a\nadmin: {listen: unix:/a}", "key `admin`: found unix:/a, which is `listen` too"),
            (
                "admin: {listen: ['unix:/a', '0.0.0.0:9']}",
                "key `admin.tls`: missing, expected `ca`, `cert` and `key`, which 0.0.0.0:9 needs",
            ),
            ("admin: {listen: '[::]:9', tls: {ca: a, cert: b, key: c}}", "key `admin.listen`: found [::]:9 alone; add unix:PATH"),
            ("admin: {listen: ['unix:/a', '[::]:9'], tls: {ca: a}}", "key `admin.tls`: expected all of `ca`, `cert` and `key`"),
            ("admin: {tls: {ca: a, cert: b, key: c}}", "key `admin.tls`: found without a TCP address in `admin.listen`"),
            (
                "admin: {listen: ['unix:/a', '[::]:9'], tls: {ca: a, cert: b, key: c}}\nhealth: {listen: 127.0.0.1:9}",
                "key `admin.listen`: found [::]:9, the port of `health.listen` (127.0.0.1:9); give each a port of its own",
            ),
            ("listen: 0.0.0.0:9", "key `listen`: found 0.0.0.0:9, and no certificates; name them by `tls`"),
            ("listen: 'localhost:9'", "key `listen`: found `localhost:9`, expected unix:PATH, IP:PORT or [IP]:PORT"),
            ("listen: ['unix:/a', 'unix:/b']", "key `listen[1]`: found a second address of its kind"),
            ("tls: {ca: a, cert: b, key: c}", "key `tls`: found without a TCP address in `listen`"),
            ("advertise: 'https://a:9'", "key `advertise`: found without a TCP address in `listen`"),
            ("listen: '[::]:9'\ntls: {ca: a}", "key `tls`: expected all of `ca`, `cert` and `key`"),
            ("listen: '[::]:9'\ntls: {secret: a, ca: a}", "key `tls.ca`: found beside `tls.secret`"),
            (
                "listen: '[::]:9'\ntls: {secret: a}\nadvertise: 'unix:/a'",
                "key `advertise`: found `unix:/a`, expected https://HOST:PORT",
            ),
            ("defaults: {mode: x}", "key `defaults.mode`: found `x`, expected nat, dnat, dsr, ipip or gue"),
            ("defaults: {scheduler: x}", "key `defaults.scheduler`: found `x`, expected maglev, round-robin, least-connections"),
            ("backends: {allowed: []}", "key `backends.allowed`: found nothing, which would allow no backend"),
            ("health: {interval: 1s, timeout: 2s}", "key `health`: timeout 2s is longer than interval 1s"),
            (
                "kubernetes: {claimClassless: {enabled: yes}}",
                "key `kubernetes.claimClassless.enabled`: found `yes`, expected true or",
            ),
            ("externalIPs: {allowed: [10.0.0.0/33]}", "key `externalIPs.allowed[0]`: found `10.0.0.0/33`, expected a CIDR"),
            ("kubernetes: {namespace: A_b}", "key `kubernetes.namespace`: found `A_b`, expected the name of a Namespace"),
            ("health: {check: telepathy}", "key `health.check`: found `telepathy`"),
            ("health: {path: healthz}", "key `health.path`: found `healthz`, expected a path such as /healthz"),
            ("health: {status: 2xx}", "key `health.status`: found `2xx`, expected statuses such as 200-299,404"),
            ("health: {listen: 9440}", "key `health.listen`: found `9440`, expected IP:PORT or [IP]:PORT"),
            (
                "health: {listen: '[::]:1'}\nmetrics: {listen: 127.0.0.1:1}",
                "key `metrics.listen`: found 127.0.0.1:1, the port of `health.listen` ([::]:1); give each a port of its own",
            ),
            ("metrics: {listen: a}", "key `metrics.listen`: found `a`, expected IP:PORT or [IP]:PORT"),
            ("health: {listen: '[::]:0'}", "key `health.listen`: found `[::]:0`, expected IP:PORT or [IP]:PORT"),
            (
                "listen: '[::]:9'\ntls: {secret: a}\nhealth: {listen: 0.0.0.0:9}",
                "key `health.listen`: found 0.0.0.0:9, the port of `listen` ([::]:9); give each a port of its own",
            ),
            ("poolSelector: [a]", "key `poolSelector`"),
            ("group: A_b", "key `group`: found `A_b`, expected a name of lower-case letters"),
            ("serveUnassigned: never", "key `serveUnassigned`: found `never`, expected true or false"),
            ("manifests: a\nkubernetes: {kubeconfig: b}", "key `manifests`: found a second source"),
        ];
        assert_errors(&rows);
    }

    #[test]
    fn the_keys_of_a_gateway_are_named_as_such_in_one_line() {
        let error = read("ports: []\ngroup: a\nstateDir: /a\nsnat:\n").unwrap_err();
        let expected = "1: `ports`, `stateDir`, `snat` are keys of sluiced; this is the configuration of sluice-controller (give its \
                        file with --config)";
        assert_eq!(error, expected);
        let error = read("group: a\nports: []\nprots: []\n").unwrap_err();
        let lines: Vec<_> = error.lines().collect();
        assert!(lines.len() == 2 && lines[0].starts_with("2: `ports` is a key of sluiced; "), "{error}");
        assert!(lines[1].contains("unknown key `prots`"), "{error}");
    }

    #[test]
    fn addresses_that_can_be_listened_on_together_may_have_one_port() {
        for apart in ["192.0.2.2:1", "'[::1]:1'"] {
            read(&format!("health: {{listen: {apart}}}\nmetrics: {{listen: 127.0.0.1:1}}")).unwrap();
        }
    }

    #[test]
    fn errors_for_invalid_pools_say_what_is_allowed() {
        assert_errors(&[
            (
                "group: east\npools: [{name: a, addresses: [192.0.2.1], gatewayGroup: west}]",
                "key `pools[0].gatewayGroup`: found `west`, expected `east`, the group of this controller, or no key",
            ),
            ("pools: [{name: a}]", "key `pools[0].addresses`: missing, expected a list"),
            ("pools: [{name: a, addresses: []}]", "key `pools[0].addresses`: found a list, expected a list of addresses"),
            ("pools: [{name: a, addresses: [10.0.0.9-10.0.0.1]}]", "\"10.0.0.9-10.0.0.1\" is reversed"),
            ("pools: [{name: a, addresses: [0.0.0.0/0]}]", "which reaches into 0.0.0.0/8"),
            (
                "pools: [{name: a, addresses: [198.51.100.129/25]}]",
                "expected 198.51.100.128/25 for the network, or 198.51.100.129",
            ),
            ("clusterCIDRs: ['fd00::1/8']", "key `clusterCIDRs[0]`: found `fd00::1/8`, fd00::1/8 has bits set beyond /8"),
            ("backends: {allowed: [ten]}", "found `ten`, expected a CIDR such as 10.0.0.0/8"),
            ("maglevSeed: secret", "key `maglevSeed`: found `secret`, expected kept, random, public, or a number from 0 to"),
            ("clusterCIDRs: [10.0.0.0/8]\npools: [{name: a, addresses: [10.1.1.1]}]", "overlaps 10.0.0.0/8 of `clusterCIDRs`"),
        ]);
    }

    fn assert_errors(rows: &[(&str, &str)]) {
        for (text, message) in rows {
            let error = read(text).unwrap_err();
            assert!(error.contains(message) && error.lines().count() == 1, "{text}: {error}");
        }
    }

    #[test]
    fn settings_of_bgp_say_what_is_allowed() {
        let rows = [
            ("announce: l2, bgp: {}", "key `pools[0].bgp`: is for pools with `announce: routed`"),
            (
                "announce: routed, bgp: {communities: ['1:1', '65000']}",
                "key `pools[0].bgp.communities[1]`: found `65000`, expected A:B with numbers up to 65535, A:B:C",
            ),
            (
                "announce: routed, bgp: {communities: [no-export, '65535:65281']}",
                "key `pools[0].bgp.communities[1]`: found 65535:65281 a second time",
            ),
            (
                "announce: routed, bgp: {communities: [graceful-shutdown]}",
                "found `graceful-shutdown`, expected another one: this is GRACEFUL_SHUTDOWN",
            ),
            ("announce: routed, bgp: {med: -1}", "key `pools[0].bgp.med`: found `-1`, expected a number from 0 to 4294967295"),
            ("announce: routed, bgp: {localpref: 1}", "unknown key `localpref`, did you mean `localPref`?"),
            (
                "announce: routed, bgp: {aggregationLength: 33}",
                "key `pools[0].bgp.aggregationLength`: found `33`, expected a number from 1 to 32",
            ),
            (
                "announce: routed, bgp: {aggregationLength: 24}",
                "key `pools[0].bgp.aggregationLength`: found 24, but 192.0.2.0/24 has addresses outside of 192.0.2.0-192.0.2.127",
            ),
        ];
        for (keys, words) in rows {
            let error = read(&format!("pools: [{{name: a, addresses: [192.0.2.0/25], {keys}}}]")).unwrap_err();
            assert!(error.contains(words) && error.lines().count() == 1, "{keys}: {error}");
        }
    }

    #[test]
    fn pools_must_not_overlap_and_need_unique_names() {
        let error = read(
            "pools:\n  - {name: a, addresses: [192.0.2.0/24, 192.0.2.7]}\n  - {name: a, addresses: [192.0.2.200-192.0.3.9]}\n",
        )
        .unwrap_err();
        let lines: Vec<_> = error.lines().collect();
        assert_eq!(lines.len(), 3, "{error}");
        assert!(
            lines[0].starts_with("2: key `pools[0].addresses[1]`: found 192.0.2.7, which overlaps 192.0.2.0-192.0.2.255 of"),
            "{error}"
        );
        assert!(lines[1].starts_with("3: key `pools[1].addresses[0]`: found 192.0.2.200-192.0.3.9, which overlaps"), "{error}");
        assert!(lines[2].starts_with("3: key `pools[1].name`: found `a` a second time"), "{error}");
    }
}
