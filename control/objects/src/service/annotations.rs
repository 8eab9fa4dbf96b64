//! The annotations that sluice reads: its own, and equivalent ones of other products, so that users can migrate without
//! editing. Our own annotation wins; a difference is a note.
//!
//! Invariant: an unsupported or invalid value that changes who may connect or what a backend sees is an error. Any
//! other invalid value is a note, and the previous value stays in force ([`Unread`]). Text of unlimited length never
//! leaves this module: it is parsed or truncated.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;
use proto::limits::ANNOTATION_PREFIX;
use proto::{Probe, Scheduler, StatusRanges};

use super::error::{STAYS, SpecError, Unread};
use super::foreign;
use super::source_ranges::source_ranges;
use super::spec::{HealthSpec, Namespaces, ServiceSpec, Sharing};
use crate::note::{self, Cause, Remark};
use crate::scalar::{DurationText, duration, is_dns_label, scheduler};
use crate::spelling;
use crate::status::IpMode;

const AWS: &str = "service.beta.kubernetes.io/aws-load-balancer-";
const SOURCE_RANGES: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";
const METALLB: [&str; 2] = ["metallb.io/", "metallb.universe.tf/"];
/// The second is the prefix before Cilium 1.15.
const CILIUM: [&str; 2] = ["lbipam.cilium.io/", "io.cilium/lb-ipam-"];
const KUBE_VIP: &str = "kube-vip.io/";

/// Our annotations that are read elsewhere: two by `owned`, and one by [`refuse_unbuilt`].
const READ_ELSEWHERE: [&str; 3] = ["gateway-group", "group", "proxy-protocol"];
/// Maximum length of a label key.
const SHARING_KEY_CHARS_MAX: usize = 253;
/// Maximum length of an object name.
const POOL_CHARS_MAX: usize = 253;
/// Maximum number of addresses: one per family.
const ADDRESSES_MAX: usize = 2;
/// Maximum length of the path of a probe.
const PATH_CHARS_MAX: usize = 1024;
/// Maximum length of a DNS name, with a port.
const HOST_CHARS_MAX: usize = 260;
/// Maximum length of an enumerated value, in characters.
const WORD_CHARS_MAX: usize = 80;
/// Maximum number of remarks on the annotations of one Service, which may have 256 KiB.
const REMARKS_MAX: usize = 16;
/// Maximum number of namespaces with which one Service shares an address; use `*` for more.
const SHARING_NAMESPACES_MAX: usize = 64;
/// At most ten probes a second, so that a tenant cannot flood backends through us; at least one an hour.
const INTERVAL: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3600);
/// A timeout of more than a minute makes a probe useless.
const TIMEOUT: RangeInclusive<Duration> = Duration::from_millis(10)..=Duration::from_secs(60);
/// An hour of probes at the default interval.
const THRESHOLD: RangeInclusive<u32> = 1..=3600;
/// A day; a longer drain is a leak.
const DRAIN: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(86_400);
/// At most a week, as for the gateways' own limits; below a second a flow would end between two of its packets.
const IDLE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(7 * 86_400);

/// Parses `annotations` into a specification that has nothing else; `load_balancer_ip` is the deprecated field that
/// requests an address.
pub(super) fn read(annotations: &BTreeMap<String, String>, load_balancer_ip: Option<&str>) -> Result<ServiceSpec, SpecError> {
    refuse_unbuilt(annotations)?;
    let notes = foreign::remarks(annotations)?;
    let mut reader = Reader { annotations, known: Vec::new(), unread: BTreeSet::new(), notes };
    let spec = ServiceSpec {
        addresses: reader.addresses(load_balancer_ip),
        pool: reader.pool(),
        internal: reader.internal()?,
        readdress: reader.readdress(),
        sharing: reader.sharing(),
        mode: reader.must_be("mode")?,
        target: reader.must_be("target")?,
        scheduler: reader.scheduler(),
        ip_mode: reader.ip_mode(),
        source_ranges: reader.source_ranges()?,
        health: reader.health(),
        drain_timeout: reader.drain_timeout(),
        idle_timeout: reader.time(Unread::IdleTimeout, &ours("idle-timeout"), &aws("connection-idle-timeout"), IDLE),
        ..ServiceSpec::default()
    };
    // Unknown annotations come last, because the last remarks are omitted if there are too many.
    reader.note_unknown();
    Ok(ServiceSpec { unread: reader.unread, notes: note::bounded(reader.notes, REMARKS_MAX), ..spec })
}

fn ours(name: &str) -> String {
    format!("{ANNOTATION_PREFIX}{name}")
}

/// The values as a sentence lists them.
fn one_of<T: Display>(values: &[T]) -> String {
    let names: Vec<_> = values.iter().map(ToString::to_string).collect();
    format!("one of {}", names.join(", "))
}

fn metallb(name: &str) -> Vec<String> {
    METALLB.map(|prefix| format!("{prefix}{name}")).into()
}

fn cilium(name: &str) -> Vec<String> {
    CILIUM.map(|prefix| format!("{prefix}{name}")).into()
}

fn aws(name: &str) -> String {
    format!("{AWS}{name}")
}

/// The error for an unsupported value that changes who may connect or what a backend receives.
fn refuse_unbuilt(annotations: &BTreeMap<String, String>) -> Result<(), SpecError> {
    let none = [ours("proxy-protocol"), aws("proxy-protocol")];
    for key in none {
        if let Some(value) = annotations.get(&key).filter(|value| !value.trim().is_empty()) {
            return Err(SpecError::unsupported(&format!("annotation {key}"), value, "remove it"));
        }
    }
    Ok(())
}

fn sharing_namespaces(value: &str) -> Option<Namespaces> {
    if value == "*" {
        return Some(Namespaces::All);
    }
    let names: BTreeSet<String> = value.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect();
    let are_names = names.iter().all(|name| is_dns_label(name, 63));
    (are_names && names.len() <= SHARING_NAMESPACES_MAX).then_some(Namespaces::Named(names))
}

struct Reader<'a> {
    annotations: &'a BTreeMap<String, String>,
    /// The keys that were looked up.
    known: Vec<String>,
    unread: BTreeSet<Unread>,
    notes: Vec<Remark>,
}

impl Reader<'_> {
    fn note(&mut self, cause: Cause, text: String) {
        self.notes.push(Remark::new(cause, text));
    }

    fn note_unknown(&mut self) {
        for key in self.annotations.keys() {
            let Some(name) = key.strip_prefix(ANNOTATION_PREFIX) else { continue };
            if READ_ELSEWHERE.contains(&name) || self.known.contains(key) {
                continue;
            }
            let ours = self.known.iter().filter_map(|known| known.strip_prefix(ANNOTATION_PREFIX));
            let advice = match spelling::nearest(name, ours.chain(READ_ELSEWHERE.iter().copied())) {
                Some(known) => format!("did you mean {ANNOTATION_PREFIX}{known}?"),
                None => "check its spelling".to_owned(),
            };
            self.note(Cause::AnnotationIgnored, format!("annotation {key} is unknown and has no effect; {advice}"));
        }
    }

    /// The trimmed value of the first of `keys` that is set. Later ones that differ become notes.
    fn first(&mut self, keys: &[String]) -> Option<(String, String)> {
        self.known.extend_from_slice(keys);
        let annotations = self.annotations;
        let value = |key: &String| annotations.get(key).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let mut set = keys.iter().filter_map(|key| value(key).map(|value| (key.clone(), value)));
        let chosen = set.next()?;
        for (key, value) in set.filter(|(_, value)| *value != chosen.1) {
            let (winner, used, value) = (&chosen.0, note::quoted(&chosen.1), note::quoted(&value));
            self.note(Cause::AnnotationsDiffer, format!("annotations {winner} and {key} differ; {used} is used, {value} is not"));
        }
        Some(chosen)
    }

    /// The value of `keys` if `parse` accepts it; otherwise adds a note with the expected format.
    fn parsed<T>(&mut self, what: Unread, keys: &[String], expected: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let (key, value) = self.first(keys)?;
        let parsed = parse(&value);
        if parsed.is_none() {
            self.misread(what, &format!("annotation {key}"), &value, expected);
        }
        parsed
    }

    fn misread(&mut self, what: Unread, place: &str, found: &str, expected: &str) {
        self.unread.insert(what);
        self.note(Cause::AnnotationIgnored, format!("{place}: found {}, expected {expected}; {STAYS}", note::quoted(found)));
    }

    /// The requested addresses.
    fn addresses(&mut self, load_balancer_ip: Option<&str>) -> Vec<IpAddr> {
        let of_kube_vip = vec![format!("{KUBE_VIP}loadbalancerIPs")];
        let keys = [vec![ours("addresses")], metallb("loadBalancerIPs"), cilium("ips"), of_kube_vip].concat();
        let field = load_balancer_ip.map(str::trim).filter(|ip| !ip.is_empty());
        let (place, text) = match (self.first(&keys), field) {
            (Some((key, value)), field) => {
                if let Some(ip) = field.filter(|ip| *ip != value) {
                    let (used, ip) = (note::quoted(&value), note::quoted(ip));
                    let text = format!("annotation {key} and spec.loadBalancerIP differ; {used} is used, {ip} is not");
                    self.note(Cause::AnnotationsDiffer, text);
                }
                (format!("annotation {key}"), value)
            }
            (None, Some(ip)) => ("spec.loadBalancerIP".to_owned(), ip.to_owned()),
            (None, None) => return Vec::new(),
        };
        let mut addresses: Vec<IpAddr> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let read = part.parse().ok().filter(|address| addresses.contains(address) || addresses.len() < ADDRESSES_MAX);
            match read {
                // kube-vip's value for an address by DHCP.
                Some(any) if any.is_unspecified() => {
                    let text = format!("{place}: {any} requests no particular address; it gets one of a pool");
                    self.note(Cause::AnnotationIgnored, text);
                }
                Some(address) if !addresses.contains(&address) => addresses.push(address),
                Some(_) => {}
                None => {
                    self.misread(Unread::Addresses, &place, part, "IP addresses with commas between them, at most one a family");
                    return Vec::new();
                }
            }
        }
        addresses
    }

    /// Parses an object name.
    fn pool(&mut self) -> Option<String> {
        let keys = [vec![ours("address-pool")], metallb("address-pool")].concat();
        let expected = format!("the name of a pool, of at most {POOL_CHARS_MAX} characters");
        let name = |value: &str| (value.chars().count() <= POOL_CHARS_MAX).then(|| value.to_owned());
        self.parsed(Unread::Pool, &keys, &expected, name)
    }

    /// Whether the load balancer is internal. This changes who may connect, so any unknown value is an error.
    fn internal(&mut self) -> Result<bool, SpecError> {
        let value =
            |key: &str| self.annotations.get(key).map(|value| value.trim().to_ascii_lowercase()).filter(|v| !v.is_empty());
        let (scheme, internal) = (aws("scheme"), aws("internal"));
        match (value(&scheme).as_deref(), value(&internal).as_deref()) {
            (Some("internal"), _) => Ok(true),
            (Some("internet-facing"), _) | (None, None | Some("false")) => Ok(false),
            (Some(found), _) => {
                let expected = format!("found {}, expected internal or internet-facing", note::quoted(found));
                Err(SpecError::Annotation { key: scheme, expected })
            }
            // Former versions used a range such as 0.0.0.0/0 instead of true.
            (None, Some(_)) => Ok(true),
        }
    }

    fn readdress(&mut self) -> bool {
        self.parsed(Unread::Readdress, &[ours("readdress")], "true or false", |value| value.parse().ok()).unwrap_or(false)
    }

    /// Sharing of addresses. With an invalid key the Service gets an address that it does not share.
    fn sharing(&mut self) -> Option<Sharing> {
        let expected = format!("a key of at most {SHARING_KEY_CHARS_MAX} characters");
        let of_metallb = metallb("allow-shared-ip");
        let keys = [vec![ours("sharing-key")], of_metallb.clone(), cilium("sharing-key")].concat();
        let chosen = keys.iter().find(|key| self.annotations.get(*key).is_some_and(|value| !value.trim().is_empty()));
        let is_metallb = chosen.is_some_and(|key| of_metallb.contains(key));
        let fits = |value: &str| (value.chars().count() <= SHARING_KEY_CHARS_MAX).then(|| value.to_owned());
        let key = self.parsed(Unread::Sharing, &keys, &expected, fits);
        let named = [vec![ours("sharing-namespaces")], cilium("sharing-cross-namespace")].concat();
        let expected = format!("`*` or at most {SHARING_NAMESPACES_MAX} names of namespaces, with commas between them");
        let namespaces = self.parsed(Unread::Sharing, &named, &expected, sharing_namespaces);
        let Some(key) = key else {
            if namespaces.is_some() {
                let text = "annotation sharing-namespaces has no effect without sharing-key; add one, the same on all sharers";
                self.note(Cause::AnnotationIgnored, text.to_owned());
            }
            return None;
        };
        Some(Sharing { key, is_metallb, namespaces: namespaces.unwrap_or(Namespaces::Named(BTreeSet::new())) })
    }

    /// Settings that change what a backend receives: any unknown value is an error.
    fn must_be<T>(&mut self, name: &str) -> Result<Option<T>, SpecError>
    where
        T: FromStr<Err = String>,
    {
        let Some((key, value)) = self.first(&[ours(name)]) else { return Ok(None) };
        let word: String = value.to_ascii_lowercase().chars().take(WORD_CHARS_MAX).collect();
        let parsed = word.parse();
        parsed.map(Some).map_err(|expected| SpecError::Annotation { key, expected })
    }

    fn scheduler(&mut self) -> Option<Scheduler> {
        let names: Vec<_> = Scheduler::ALL.iter().map(|known| known.as_str()).collect();
        let expected = format!("one of {}, or the IPVS name of one", names.join(", "));
        self.parsed(Unread::Scheduler, &[ours("scheduler")], &expected, |value| scheduler(&value.to_ascii_lowercase()))
    }

    /// Source ranges from the annotation that cloud providers read if the field of the Service is empty.
    fn source_ranges(&mut self) -> Result<Option<Vec<IpNet>>, SpecError> {
        let Some((key, value)) = self.first(&[SOURCE_RANGES.to_owned()]) else { return Ok(None) };
        source_ranges(&format!("annotation {key}"), value.split(',')).map(Some)
    }

    fn ip_mode(&mut self) -> Option<IpMode> {
        self.parsed(Unread::IpMode, &[ours("ip-mode")], "VIP or Proxy", |value| match value.to_ascii_lowercase().as_str() {
            "vip" => Some(IpMode::Vip),
            "proxy" => Some(IpMode::Proxy),
            _ => None,
        })
    }

    fn health(&mut self) -> HealthSpec {
        let health = |name: &str| ours(&format!("health-check{name}"));
        let probe_keys = [health(""), aws("healthcheck-protocol")];
        HealthSpec {
            probe: self.parsed(Unread::Probe, &probe_keys, &one_of(Probe::ALL), |value| value.to_ascii_lowercase().parse().ok()),
            port: self.health_port(&[health("-port"), aws("healthcheck-port")]),
            path: self.health_text(Unread::HealthPath, &[health("-path"), aws("healthcheck-path")], PATH_CHARS_MAX, |_| true),
            host: self.health_text(Unread::HealthHost, &[health("-host")], HOST_CHARS_MAX, |c| !b"/?@\\,".contains(&c)),
            status: self.health_status(&[health("-status"), aws("healthcheck-success-codes")]),
            tls_verify: self.parsed(Unread::TlsVerify, &[health("-tls-verify")], "true or false", |value| {
                value.to_ascii_lowercase().parse().ok()
            }),
            interval: self.time(Unread::Interval, &health("-interval"), &aws("healthcheck-interval"), INTERVAL),
            timeout: self.time(Unread::Timeout, &health("-timeout"), &aws("healthcheck-timeout"), TIMEOUT),
            rise: self.threshold(Unread::Rise, &[health("-rise"), aws("healthcheck-healthy-threshold")]),
            fall: self.threshold(Unread::Fall, &[health("-fall"), aws("healthcheck-unhealthy-threshold")]),
        }
    }

    /// `traffic-port` is AWS's value for the backend's own port.
    fn health_port(&mut self, keys: &[String]) -> Option<u16> {
        let parse = |value: &str| match value {
            "traffic-port" => Some(None),
            number => number.parse().ok().filter(|port| *port != 0).map(Some),
        };
        self.parsed(Unread::HealthPort, keys, "a port from 1 to 65535", parse).flatten()
    }

    /// A path, host or service name: visible ASCII, since it becomes a line of a request.
    fn health_text(&mut self, what: Unread, keys: &[String], chars_max: usize, is_legal: fn(u8) -> bool) -> Option<String> {
        let expected = format!("at most {chars_max} visible ASCII characters that may stand there, percent-encoded if need be");
        let is_text =
            |value: &str| value.len() <= chars_max && value.bytes().all(|c| c.is_ascii_graphic() && c != b'#' && is_legal(c));
        self.parsed(what, keys, &expected, |value| is_text(value).then(|| value.to_owned()))
    }

    fn health_status(&mut self, keys: &[String]) -> Option<StatusRanges> {
        let expected = "statuses from 100 to 599 such as 200-299,404";
        self.parsed(Unread::HealthStatus, keys, expected, |value| value.parse().ok())
    }

    fn threshold(&mut self, what: Unread, keys: &[String]) -> Option<u32> {
        let expected = format!("a number from {} to {}", THRESHOLD.start(), THRESHOLD.end());
        self.parsed(what, keys, &expected, |value| value.parse().ok().filter(|n| THRESHOLD.contains(n)))
    }

    /// A duration: ours with a unit, the alias in whole seconds.
    fn time(&mut self, what: Unread, key: &str, alias: &str, limits: RangeInclusive<Duration>) -> Option<Duration> {
        let range = format!("from {} to {}", DurationText(*limits.start()), DurationText(*limits.end()));
        let within = |time: Duration| limits.contains(&time).then_some(time);
        if !self.annotations.contains_key(key) {
            let seconds = |value: &str| value.parse().ok().map(Duration::from_secs).and_then(within);
            return self.parsed(what, &[alias.to_owned()], &format!("a number of seconds, {range}"), seconds);
        }
        if self.annotations.contains_key(alias) {
            self.note(Cause::AnnotationsDiffer, format!("annotation {alias} is not used, because {key} is set"));
        }
        let expected = format!("a duration such as 500ms, 5s or 2m, {range}");
        self.parsed(what, &[key.to_owned()], &expected, |value| duration(value).and_then(within))
    }

    fn drain_timeout(&mut self) -> Option<Duration> {
        let enabled = aws("connection-draining-enabled");
        if self.annotations.get(&enabled).is_some_and(|v| v.trim() == "false")
            && !self.annotations.contains_key(&ours("drain-timeout"))
        {
            return Some(Duration::ZERO);
        }
        self.time(Unread::DrainTimeout, &ours("drain-timeout"), &aws("connection-draining-timeout"), DRAIN)
    }
}

#[cfg(test)]
mod tests {
    use proto::{Mode, Probe, Target};

    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<ServiceSpec, SpecError> {
        super::read(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(), None)
    }

    #[test]
    fn no_annotations_request_nothing() {
        assert_eq!(read(&[("example.com/other", "x")]), Ok(ServiceSpec::default()));
    }

    #[test]
    fn our_annotation_wins_over_an_alias_and_the_difference_is_noted() {
        let wishes =
            read(&[("metallb.universe.tf/loadBalancerIPs", "192.0.2.9"), ("sluice.dev/addresses", "192.0.2.8, 2001:db8::8")]);
        let wishes = wishes.unwrap();
        assert_eq!(wishes.addresses, ["192.0.2.8".parse::<IpAddr>().unwrap(), "2001:db8::8".parse().unwrap()]);
        assert_eq!(wishes.notes.len(), 1, "{:?}", wishes.notes);
    }

    #[test]
    fn an_internal_load_balancer_is_requested_by_our_values_and_those_of_aws_only() {
        let aws = |name: &str, value: &str| read(&[(&aws(name), value)]).map(|wishes| wishes.internal);
        let rows = [("scheme", "internal", true), ("scheme", "internet-facing", false), ("internal", "true", true)];
        for (name, value, expected) in rows.into_iter().chain([("internal", "0.0.0.0/0", true), ("internal", "false", false)]) {
            assert_eq!(aws(name, value), Ok(expected), "{name}: {value}");
        }
        let error = aws("scheme", "intern").unwrap_err().to_string();
        assert!(error.contains("aws-load-balancer-scheme") && error.contains("expected internal or internet-facing"), "{error}");
    }

    #[test]
    fn an_exchange_of_the_address_is_requested_by_true() {
        assert!(read(&[("sluice.dev/readdress", "true")]).unwrap().readdress);
        let wishes = read(&[("sluice.dev/readdress", "yes")]).unwrap();
        assert!(!wishes.readdress && wishes.notes.len() == 1, "{:?}", wishes.notes);
    }

    #[test]
    fn every_alias_of_an_address_request_is_read() {
        let keys = [
            "metallb.io/loadBalancerIPs",
            "metallb.universe.tf/loadBalancerIPs",
            "lbipam.cilium.io/ips",
            "io.cilium/lb-ipam-ips",
            "kube-vip.io/loadbalancerIPs",
        ];
        for key in keys {
            assert_eq!(read(&[(key, "192.0.2.9")]).unwrap().addresses, ["192.0.2.9".parse::<IpAddr>().unwrap()], "{key}");
        }
        assert_eq!(read(&[("metallb.io/address-pool", "edge")]).unwrap().pool.as_deref(), Some("edge"));
    }

    #[test]
    fn every_annotation_of_others_that_counts_as_read_is() {
        for key in foreign::READ {
            let is_read = |value| read(&[(key, value)]) != Ok(ServiceSpec::default());
            assert!(is_read("false") || is_read("true"), "{key}");
        }
    }

    #[test]
    fn sharing_is_read_from_our_annotations_or_those_of_others() {
        let shares = |pairs: &[(&str, &str)]| {
            let wishes = read(pairs).unwrap();
            let sharing = wishes.sharing.map(|sharing| (sharing.key, sharing.is_metallb, sharing.namespaces));
            (sharing, wishes.notes.len())
        };
        let named = |names: &[&str]| Namespaces::Named(names.iter().map(|name| (*name).to_owned()).collect());
        let of = |is_metallb, namespaces| Some(("k".to_owned(), is_metallb, namespaces));
        let rows: [(&[(&str, &str)], _); 8] = [
            (&[("sluice.dev/sharing-key", " k ")], (of(false, named(&[])), 0)),
            (&[("metallb.io/allow-shared-ip", "k")], (of(true, named(&[])), 0)),
            (&[("metallb.universe.tf/allow-shared-ip", "k")], (of(true, named(&[])), 0)),
            (
                &[("lbipam.cilium.io/sharing-key", "k"), ("lbipam.cilium.io/sharing-cross-namespace", "*")],
                (of(false, Namespaces::All), 0),
            ),
            (&[("sluice.dev/sharing-key", "k"), ("metallb.io/allow-shared-ip", "l")], (of(false, named(&[])), 1)),
            (&[("sluice.dev/sharing-key", "k"), ("sluice.dev/sharing-namespaces", "b, a")], (of(false, named(&["a", "b"])), 0)),
            (&[("sluice.dev/sharing-key", "k"), ("sluice.dev/sharing-namespaces", "A_b")], (of(false, named(&[])), 1)),
            (&[("sluice.dev/sharing-namespaces", "*")], (None, 1)),
        ];
        for (pairs, expected) in rows {
            assert_eq!(shares(pairs), expected, "{pairs:?}");
        }
        let long = "k".repeat(SHARING_KEY_CHARS_MAX + 1);
        assert_eq!(shares(&[("sluice.dev/sharing-key", &long)]), (None, 1));
    }

    #[test]
    fn unsupported_annotations_that_change_who_may_connect_are_refused_by_name() {
        let rows = [("sluice.dev/proxy-protocol", "v2"), ("service.beta.kubernetes.io/aws-load-balancer-proxy-protocol", "*")];
        for (key, value) in rows {
            let error = read(&[(key, value)]).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains(value), "{error}");
        }
    }

    #[test]
    fn mode_target_and_scheduler_are_read_by_our_names_and_those_of_ipvs() {
        let wishes =
            read(&[("sluice.dev/mode", " dsr"), ("sluice.dev/target", "Node"), ("sluice.dev/scheduler", "wlc")]).unwrap();
        let expected = (Some(Mode::Dsr), Some(Target::Node), Some(Scheduler::LeastConnections));
        assert_eq!((wishes.mode, wishes.target, wishes.scheduler), expected);
        for known in Scheduler::ALL {
            assert_eq!(read(&[("sluice.dev/scheduler", known.as_str())]).unwrap().scheduler, Some(*known));
        }
    }

    #[test]
    fn an_invalid_value_that_decides_who_may_connect_or_what_a_backend_sees_is_an_error() {
        let rows = [
            ("sluice.dev/mode", "teleport"),
            ("sluice.dev/target", "moon"),
            ("service.beta.kubernetes.io/load-balancer-source-ranges", "10.0.0.0/8,"),
            ("service.beta.kubernetes.io/load-balancer-source-ranges", "10.0.0.0/8,10.0.0.300/32"),
        ];
        for (key, value) in rows {
            let error = read(&[(key, value)]).unwrap_err();
            assert!(error.to_string().contains(key), "{error}");
            assert_eq!(error.refusal().reason, proto::Reason::Refused);
        }
    }

    #[test]
    fn source_ranges_of_the_annotation_are_trimmed_and_an_empty_one_is_ignored() {
        let key = "service.beta.kubernetes.io/load-balancer-source-ranges";
        let ranges = read(&[(key, " 10.1.2.3/8 ,2001:db8::/32")]).unwrap().source_ranges.unwrap();
        assert_eq!(ranges, ["10.0.0.0/8".parse::<IpNet>().unwrap(), "2001:db8::/32".parse().unwrap()]);
        assert_eq!(read(&[(key, " ")]).unwrap().source_ranges, None);
    }

    #[test]
    fn an_idle_timeout_is_read_in_our_units_and_in_seconds() {
        for (key, value) in
            [("sluice.dev/idle-timeout", "1h"), ("service.beta.kubernetes.io/aws-load-balancer-connection-idle-timeout", "3600")]
        {
            assert_eq!(read(&[(key, value)]).unwrap().idle_timeout, Some(Duration::from_secs(3600)), "{key}");
        }
    }

    #[test]
    fn a_health_check_is_read_in_our_units_and_in_seconds() {
        let wishes = read(&[
            ("sluice.dev/health-check", "tcp"),
            ("sluice.dev/health-check-interval", "2s"),
            ("sluice.dev/health-check-port", "9000"),
            ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-timeout", "3"),
            ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-unhealthy-threshold", "4"),
            ("sluice.dev/drain-timeout", "10m"),
        ])
        .unwrap();
        let expected = HealthSpec {
            probe: Some(Probe::Tcp),
            port: Some(9000),
            interval: Some(Duration::from_secs(2)),
            timeout: Some(Duration::from_secs(3)),
            fall: Some(4),
            ..HealthSpec::default()
        };
        assert_eq!((wishes.health, wishes.drain_timeout), (expected, Some(Duration::from_secs(600))));
    }

    #[test]
    fn what_a_probe_requests_is_read_from_our_annotations_and_those_of_aws() {
        let expected = HealthSpec {
            probe: Some(Probe::Https),
            path: Some("/healthz?full=1".to_owned()),
            status: Some("200-299,404".parse().unwrap()),
            ..HealthSpec::default()
        };
        let ours = [("", "https"), ("-path", "/healthz?full=1"), ("-status", "200-299,404")];
        let ours = ours.map(|(name, value)| (format!("sluice.dev/health-check{name}"), value.to_owned()));
        assert_eq!(super::read(&ours.into(), None).unwrap().health, expected);
        let theirs = [("protocol", "HTTPS"), ("path", "/healthz?full=1"), ("success-codes", "200-299,404")];
        let theirs = theirs.map(|(name, value)| (aws(&format!("healthcheck-{name}")), value.to_owned()));
        assert_eq!(super::read(&theirs.into(), None).unwrap().health, expected);
        let more = read(&[("sluice.dev/health-check-host", "shop.example:8443"), ("sluice.dev/health-check-tls-verify", "True")]);
        let more = more.unwrap();
        assert_eq!((more.health.host.as_deref(), more.health.tls_verify), (Some("shop.example:8443"), Some(true)));
        for probe in Probe::ALL {
            assert_eq!(read(&[("sluice.dev/health-check", probe.as_str())]).unwrap().health.probe, Some(*probe));
        }
    }

    #[test]
    fn settings_without_effect_on_a_probe_are_named() {
        let keys = ["path", "host", "status", "tls-verify", "port"];
        let all = keys.iter().zip(["/a", "b", "200", "true", "80"]);
        let all = all.map(|(key, value)| (format!("sluice.dev/health-check-{key}"), value.to_owned())).collect();
        let health = super::read(&all, None).unwrap().health;
        let rows: [(Probe, &[&str]); 6] = [
            (Probe::Tcp, &["path", "host", "status", "tls-verify"]),
            (Probe::Http, &["tls-verify"]),
            (Probe::Https, &[]),
            (Probe::Grpc, &["status", "tls-verify"]),
            (Probe::Icmp, &keys),
            (Probe::None, &keys),
        ];
        for (probe, expected) in rows {
            let named: Vec<_> = health.remarks(probe).map(|remark| remark.text).collect();
            assert_eq!(named.len(), expected.len(), "{named:?}");
            assert!(named.iter().zip(expected).all(|(text, name)| text.contains(&format!("health-check-{name} "))), "{named:?}");
        }
    }

    #[test]
    fn an_invalid_value_of_a_harmless_setting_is_noted_and_recorded_as_unread() {
        for (key, value, what) in [
            ("sluice.dev/addresses", "192.0.2.300", Some(Unread::Addresses)),
            ("sluice.dev/addresses", "192.0.2.1,192.0.2.2,192.0.2.3", Some(Unread::Addresses)),
            ("sluice.dev/health-check", "telepathy", Some(Unread::Probe)),
            ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-protocol", "UDP", Some(Unread::Probe)),
            ("sluice.dev/health-check-path", "/a b", Some(Unread::HealthPath)),
            ("sluice.dev/health-check-path", "/\u{e4}", Some(Unread::HealthPath)),
            ("sluice.dev/health-check-host", "a/b", Some(Unread::HealthHost)),
            ("sluice.dev/health-check-status", "2xx", Some(Unread::HealthStatus)),
            ("sluice.dev/health-check-tls-verify", "maybe", Some(Unread::TlsVerify)),
            ("sluice.dev/health-check-interval", "1ms", Some(Unread::Interval)),
            ("sluice.dev/health-check-rise", "0", Some(Unread::Rise)),
            ("sluice.dev/health-check-port", "70000", Some(Unread::HealthPort)),
            ("sluice.dev/drain-timeout", "soon", Some(Unread::DrainTimeout)),
            ("sluice.dev/ip-mode", "hostname", Some(Unread::IpMode)),
            ("sluice.dev/scheduler", "dice", Some(Unread::Scheduler)),
            ("sluice.dev/idle-timeout", "0s", Some(Unread::IdleTimeout)),
            ("sluice.dev/adresses", "192.0.2.1", None),
        ] {
            let wishes = read(&[(key, value)]).unwrap();
            assert_eq!(wishes.notes.len(), 1, "{key}: {:?}", wishes.notes);
            assert!(wishes.notes[0].text.contains(key), "{:?}", wishes.notes);
            let (notes, unread) = (wishes.notes.clone(), what.into_iter().collect());
            assert_eq!(wishes, ServiceSpec { notes, unread, ..ServiceSpec::default() });
        }
    }

    #[test]
    fn an_unknown_annotation_has_the_most_similar_known_one_in_its_note() {
        for (key, advice) in [
            ("mod", "did you mean sluice.dev/mode?"),
            ("helth-check", "did you mean sluice.dev/health-check?"),
            ("colour", "check its spelling"),
        ] {
            let notes = read(&[(&format!("sluice.dev/{key}"), "nat")]).unwrap().notes;
            assert_eq!(notes[0].text, format!("annotation sluice.dev/{key} is unknown and has no effect; {advice}"));
        }
    }

    #[test]
    fn an_address_by_dhcp_is_one_of_a_pool() {
        let wishes = read(&[("kube-vip.io/loadbalancerIPs", "0.0.0.0")]).unwrap();
        assert_eq!((wishes.addresses.len(), wishes.unread.len(), wishes.notes.len()), (0, 0, 1));
    }

    #[test]
    fn a_value_of_256_kib_is_truncated_in_messages_so_that_the_advice_fits() {
        let long = "x".repeat(256 * 1024);
        for key in ["addresses", "address-pool", "sharing-key", "sharing-namespaces", "scheduler", "health-check", "idle-timeout"]
        {
            let wishes = read(&[(&format!("sluice.dev/{key}"), &long)]).unwrap();
            assert!(wishes.notes[0].text.len() < 400 && wishes.notes[0].text.ends_with(STAYS), "{key}: {:?}", wishes.notes);
            assert!(wishes.pool.is_none() && wishes.sharing.is_none());
        }
        let refused = read(&[("sluice.dev/mode", &long)]).unwrap_err().to_string();
        assert!(refused.len() < 400 && refused.ends_with("gue"), "{refused}");
        let differing = read(&[("sluice.dev/addresses", "192.0.2.1"), ("metallb.io/loadBalancerIPs", &long)]).unwrap();
        assert!(differing.notes[0].text.len() < 400, "{:?}", differing.notes);
    }

    #[test]
    fn of_ten_thousand_unknown_annotations_a_few_are_named() {
        let many = (0..10_000).map(|number| (format!("sluice.dev/x-{number}"), String::new())).collect();
        let notes = super::read(&many, None).unwrap().notes;
        assert!(notes.len() == REMARKS_MAX && notes.last().unwrap().text.contains("9985"), "{notes:?}");
    }

    #[test]
    fn messages_give_limits_of_durations_in_the_units_of_the_annotation() {
        let text = read(&[("sluice.dev/drain-timeout", "25h")]).unwrap().notes[0].text.clone();
        assert!(text.contains("from 0ms to 24h"), "{text}");
    }
}
