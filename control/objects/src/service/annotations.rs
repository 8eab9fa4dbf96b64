//! The annotations that sluice reads: its own, and equivalent ones of other products, so that users can migrate without
//! editing. Our own annotation wins; a difference is a note.
//!
//! Invariant: an unsupported or invalid value that changes who may connect is an error. Any other invalid value is a
//! note, and the previous value stays in force ([`Unread`]); a new Service with an unknown word is not served. Text of unlimited length never
//! leaves this module: it is parsed or truncated.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use ipnet::IpNet;
use proto::limits::ANNOTATION_PREFIX;
use proto::{AffinityScope, Mode, Probe, Scheduler, StatusRanges, Target};

use super::error::{STAYS, SpecError, Unread, WAITS};
use super::foreign;
use super::source_ranges::source_ranges;
use super::spec::{HealthSpec, Namespaces, ServiceSpec, Sharing};
use crate::note::{self, Cause, Remark};
use crate::scalar::{DurationText, duration, is_dns_label, scheduler};
use crate::spelling;
use crate::status::IpMode;

const SOURCE_RANGES: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";

/// The key of an annotation of ours, by its name. Keys are constants, because all of them are looked up for each Service.
macro_rules! ours {
    ($name:literal) => {
        concat!("sluice.dev/", $name)
    };
}

const _: () = assert!(matches!(ANNOTATION_PREFIX.as_bytes(), b"sluice.dev/"));

/// The same for MetalLB, with both of its prefixes.
macro_rules! metallb {
    ($name:literal) => {
        [concat!("metallb.io/", $name), concat!("metallb.universe.tf/", $name)]
    };
}

/// For Cilium. The second prefix is that before 1.15.
macro_rules! cilium {
    ($name:literal) => {
        [concat!("lbipam.cilium.io/", $name), concat!("io.cilium/lb-ipam-", $name)]
    };
}

/// For the load balancers of AWS.
macro_rules! aws {
    ($name:literal) => {
        concat!("service.beta.kubernetes.io/aws-load-balancer-", $name)
    };
}

/// Our annotations that are read elsewhere: by the modules `owned` and `proxy_protocol`.
const READ_ELSEWHERE: [&str; 4] = ["gateway-group", "group", "proxy-protocol", "proxy-protocol-ports"];
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

/// Parses `annotations` into a specification that has nothing else, not even source ranges; `load_balancer_ip` is the
/// deprecated field that requests an address.
pub(super) fn read(annotations: &BTreeMap<String, String>, load_balancer_ip: Option<&str>) -> Result<ServiceSpec, SpecError> {
    let notes = foreign::remarks(annotations)?;
    let mut reader =
        Reader { annotations, known: Vec::new(), unread: BTreeSet::new(), unread_request: None, refused_if_new: None, notes };
    let spec = ServiceSpec {
        addresses: reader.addresses(load_balancer_ip),
        pool: reader.pool(),
        internal: reader.internal()?,
        readdress: reader.readdress(),
        sharing: reader.sharing(),
        mode: reader.word(Unread::Mode, &[ours!("mode")], &OneOf(Mode::ALL), |word| word.parse().ok()),
        target: reader.word(Unread::Target, &[ours!("target")], &OneOf(Target::ALL), |word| word.parse().ok()),
        scheduler: reader.scheduler(),
        affinity_scope: reader.affinity_scope(),
        ip_mode: reader.ip_mode(),
        health: reader.health(),
        drain_timeout: reader.drain_timeout(),
        idle_timeout: reader.time(Unread::IdleTimeout, [ours!("idle-timeout"), aws!("connection-idle-timeout")], IDLE),
        ..ServiceSpec::default()
    };
    // Unknown annotations come last, because the last remarks are omitted if there are too many.
    reader.note_unknown();
    let Reader { unread, unread_request, refused_if_new, notes, .. } = reader;
    Ok(ServiceSpec { unread, unread_request, refused_if_new, notes: note::bounded(notes, REMARKS_MAX), ..spec })
}

/// Source ranges from the annotation that cloud providers read if the field of the Service is empty.
pub(super) fn annotated_source_ranges(annotations: &BTreeMap<String, String>) -> Result<Option<Vec<IpNet>>, SpecError> {
    let value = annotations.get(SOURCE_RANGES).map(|value| value.trim()).filter(|value| !value.is_empty());
    value.map(|value| source_ranges(&format!("annotation {SOURCE_RANGES}"), value.split(','))).transpose()
}

/// The values as a sentence lists them.
struct OneOf<'v, T>(&'v [T]);

impl<T: Display> Display for OneOf<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        write!(f, "one of {}", names.join(", "))
    }
}

fn sharing_namespaces(value: &str) -> Option<Namespaces> {
    if value == "*" {
        return Some(Namespaces::All);
    }
    let names: BTreeSet<String> = value.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect();
    let are_names = names.iter().all(|name| is_dns_label(name, 63));
    (are_names && names.len() <= SHARING_NAMESPACES_MAX).then_some(Namespaces::Named(names))
}

/// The addresses of a list, each once. On error the part that is not one, or is one too many.
fn address_list(text: &str) -> Result<Vec<IpAddr>, &str> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        match part.parse() {
            Ok(address) if addresses.contains(&address) => {}
            Ok(address) if addresses.len() < ADDRESSES_MAX => addresses.push(address),
            _ => return Err(part),
        }
    }
    Ok(addresses)
}

/// One annotation for a setting.
struct Notation<'n, T> {
    key: &'static str,
    /// The format of its value.
    expected: &'n dyn Display,
    parse: &'n dyn Fn(&str) -> Option<T>,
}

struct Reader<'a> {
    annotations: &'a BTreeMap<String, String>,
    /// The keys that were looked up.
    known: Vec<&'static str>,
    unread: BTreeSet<Unread>,
    unread_request: Option<String>,
    /// The first unknown word of an annotation of ours.
    refused_if_new: Option<SpecError>,
    notes: Vec<Remark>,
}

impl<'a> Reader<'a> {
    fn note(&mut self, cause: Cause, text: String) {
        self.notes.push(Remark::new(cause, text));
    }

    fn note_unknown(&mut self) {
        for key in self.annotations.keys() {
            let Some(name) = key.strip_prefix(ANNOTATION_PREFIX) else { continue };
            if READ_ELSEWHERE.contains(&name) || self.known.contains(&key.as_str()) {
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

    /// The trimmed value of an annotation; an empty one counts as absent.
    fn value(&mut self, key: &'static str) -> Option<&'a str> {
        self.known.push(key);
        self.annotations.get(key).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    /// The value of the first of `keys` that is set, if `parse` accepts it.
    fn parsed<T: PartialEq>(
        &mut self,
        what: Unread,
        keys: &[&'static str],
        expected: &dyn Display,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let values = keys.iter().filter_map(|key| Some((Notation { key, expected, parse: &parse }, self.value(key)?)));
        let set: Vec<_> = values.collect();
        self.chosen(what, &set)
    }

    /// The first of the values that are set; if it cannot be parsed, a note has the expected format. Later ones that mean
    /// something else become notes.
    fn chosen<T: PartialEq>(&mut self, what: Unread, set: &[(Notation<'_, T>, &str)]) -> Option<T> {
        let ((first, used), others) = set.split_first()?;
        let (parsed, place) = ((first.parse)(used), format!("annotation {}", first.key));
        for (other, value) in others {
            let is_same = match (&parsed, (other.parse)(value)) {
                (Some(used), Some(other)) => *used == other,
                (None, None) => used == value,
                _ => false,
            };
            if !is_same {
                self.note_difference(&place, used, &format!("annotation {}", other.key), value);
            }
        }
        if parsed.is_none() {
            self.misread(what, &place, used, first.expected);
        }
        parsed
    }

    /// Adds a note: the value `used` at `place` comes before `value` at `other`.
    fn note_difference(&mut self, place: &str, used: &str, other: &str, value: &str) {
        let (used, value) = (note::quoted(used), note::quoted(value));
        self.note(Cause::AnnotationsDiffer, format!("{place} and {other} differ; {used} counts, {value} does not"));
    }

    fn misread(&mut self, what: Unread, place: &str, found: &str, expected: &dyn Display) {
        self.unread.insert(what);
        let why = format!("{place}: found {}, expected {expected}", note::quoted(found));
        let is_request = matches!(what, Unread::Addresses | Unread::Pool);
        let effect = if is_request { WAITS } else { STAYS };
        self.note(Cause::AnnotationIgnored, format!("{why}; {effect}"));
        if is_request {
            self.unread_request.get_or_insert(why);
        }
    }

    /// The requested addresses.
    fn addresses(&mut self, load_balancer_ip: Option<&str>) -> Vec<IpAddr> {
        let ([metallb, metallb_before], [cilium, cilium_before]) = (metallb!("loadBalancerIPs"), cilium!("ips"));
        let keys = [ours!("addresses"), metallb, metallb_before, cilium, cilium_before, "kube-vip.io/loadbalancerIPs"];
        let annotations = keys.iter().filter_map(|key| Some((format!("annotation {key}"), self.value(key)?)));
        let mut set: Vec<(String, &str)> = annotations.collect();
        let field = load_balancer_ip.map(str::trim).filter(|ip| !ip.is_empty());
        set.extend(field.map(|ip| ("spec.loadBalancerIP".to_owned(), ip)));
        let Some(((place, text), others)) = set.split_first() else { return Vec::new() };
        let addresses = address_list(text);
        for (other, value) in others {
            let is_same = match (&addresses, address_list(value)) {
                (Ok(used), Ok(other)) => used.iter().collect::<BTreeSet<_>>() == other.iter().collect(),
                _ => text == value,
            };
            if !is_same {
                self.note_difference(place, text, other, value);
            }
        }
        match addresses {
            Err(part) => {
                let expected = "IP addresses with commas between them, at most one a family";
                self.misread(Unread::Addresses, place, part, &expected);
                Vec::new()
            }
            Ok(mut addresses) => {
                // kube-vip's value for an address by DHCP.
                for any in addresses.extract_if(.., |address| address.is_unspecified()) {
                    let text = format!("{place}: {any} requests no particular address; it gets one of a pool");
                    self.note(Cause::AnnotationIgnored, text);
                }
                addresses
            }
        }
    }

    /// Parses an object name.
    fn pool(&mut self) -> Option<String> {
        let [metallb, metallb_before] = metallb!("address-pool");
        let keys = [ours!("address-pool"), metallb, metallb_before];
        let name = |value: &str| (value.chars().count() <= POOL_CHARS_MAX).then(|| value.to_owned());
        self.parsed(Unread::Pool, &keys, &format_args!("the name of a pool, of at most {POOL_CHARS_MAX} characters"), name)
    }

    /// Whether the load balancer is internal. This changes who may connect, so any unknown value is an error.
    fn internal(&mut self) -> Result<bool, SpecError> {
        let value =
            |key: &str| self.annotations.get(key).map(|value| value.trim().to_ascii_lowercase()).filter(|v| !v.is_empty());
        let scheme = aws!("scheme");
        let by_others = foreign::asks_for_internal(self.annotations);
        match (value(scheme).as_deref(), value(aws!("internal")).as_deref()) {
            (Some("internal"), _) => Ok(true),
            (Some("internet-facing"), _) | (None, None | Some("false")) => Ok(by_others),
            (Some(found), _) => {
                let expected = format!("found {}, expected internal or internet-facing", note::quoted(found));
                Err(SpecError::Annotation { key: scheme.to_owned(), expected })
            }
            // Former versions used a range such as 0.0.0.0/0 instead of true.
            (None, Some(_)) => Ok(true),
        }
    }

    fn readdress(&mut self) -> bool {
        self.parsed(Unread::Readdress, &[ours!("readdress")], &"true or false", |value| value.parse().ok()).unwrap_or(false)
    }

    /// Sharing of addresses. With an invalid key the Service gets an address that it does not share.
    fn sharing(&mut self) -> Option<Sharing> {
        let ([metallb, metallb_before], [cilium, cilium_before]) = (metallb!("allow-shared-ip"), cilium!("sharing-key"));
        let keys = [ours!("sharing-key"), metallb, metallb_before, cilium, cilium_before];
        let chosen = keys.iter().find(|key| self.value(key).is_some());
        let is_metallb = chosen.is_some_and(|key| [metallb, metallb_before].contains(key));
        let fits = |value: &str| (value.chars().count() <= SHARING_KEY_CHARS_MAX).then(|| value.to_owned());
        let key = self.parsed(Unread::Sharing, &keys, &format_args!("a key of at most {SHARING_KEY_CHARS_MAX} characters"), fits);
        let [cilium, cilium_before] = cilium!("sharing-cross-namespace");
        let namespaces = self.parsed(
            Unread::Sharing,
            &[ours!("sharing-namespaces"), cilium, cilium_before],
            &format_args!("`*` or at most {SHARING_NAMESPACES_MAX} names of namespaces, with commas between them"),
            sharing_namespaces,
        );
        let Some(key) = key else {
            if namespaces.is_some() {
                let text = "annotation sharing-namespaces has no effect without sharing-key; add one, the same on all sharers";
                self.note(Cause::AnnotationIgnored, text.to_owned());
            }
            return None;
        };
        Some(Sharing { key, is_metallb, namespaces: namespaces.unwrap_or(Namespaces::Named(BTreeSet::new())) })
    }

    /// A setting with a few words as values. With an unknown word in our own annotation, the first of `keys`, a new Service
    /// is not served: its owner has to choose.
    fn word<T: PartialEq>(
        &mut self,
        what: Unread,
        keys: &[&'static str],
        expected: &dyn Display,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let parsed = self.parsed(what, keys, expected, |value| parse(&value.to_ascii_lowercase()));
        let ours = keys.first().and_then(|key| Some((*key, self.value(key)?)));
        if let Some((key, found)) = ours.filter(|_| parsed.is_none()) {
            let expected = format!("found {}, expected {expected}", note::quoted(found));
            self.refused_if_new.get_or_insert(SpecError::Annotation { key: key.to_owned(), expected });
        }
        parsed
    }

    fn scheduler(&mut self) -> Option<Scheduler> {
        let expected = format_args!("{}, or the IPVS name of one", OneOf(Scheduler::ALL));
        self.word(Unread::Scheduler, &[ours!("scheduler")], &expected, scheduler)
    }

    fn affinity_scope(&mut self) -> Option<AffinityScope> {
        let (key, expected) = (ours!("session-affinity-scope"), OneOf(AffinityScope::ALL));
        self.word(Unread::AffinityScope, &[key], &expected, |word| word.parse().ok())
    }

    fn ip_mode(&mut self) -> Option<IpMode> {
        self.word(Unread::IpMode, &[ours!("ip-mode")], &"VIP or Proxy", |word| match word {
            "vip" => Some(IpMode::Vip),
            "proxy" => Some(IpMode::Proxy),
            _ => None,
        })
    }

    fn health(&mut self) -> HealthSpec {
        let probe_keys = [ours!("health-check"), aws!("healthcheck-protocol")];
        HealthSpec {
            probe: self.word(Unread::Probe, &probe_keys, &OneOf(Probe::ALL), |word| word.parse().ok()),
            port: self.health_port(&[ours!("health-check-port"), aws!("healthcheck-port")]),
            path: self.health_text(
                Unread::HealthPath,
                &[ours!("health-check-path"), aws!("healthcheck-path")],
                PATH_CHARS_MAX,
                |_| true,
            ),
            host: self
                .health_text(Unread::HealthHost, &[ours!("health-check-host")], HOST_CHARS_MAX, |c| !b"/?@\\,".contains(&c)),
            status: self.health_status(&[ours!("health-check-status"), aws!("healthcheck-success-codes")]),
            tls_verify: self.parsed(Unread::TlsVerify, &[ours!("health-check-tls-verify")], &"true or false", |value| {
                value.to_ascii_lowercase().parse().ok()
            }),
            interval: self.time(Unread::Interval, [ours!("health-check-interval"), aws!("healthcheck-interval")], INTERVAL),
            timeout: self.time(Unread::Timeout, [ours!("health-check-timeout"), aws!("healthcheck-timeout")], TIMEOUT),
            rise: self.threshold(Unread::Rise, &[ours!("health-check-rise"), aws!("healthcheck-healthy-threshold")]),
            fall: self.threshold(Unread::Fall, &[ours!("health-check-fall"), aws!("healthcheck-unhealthy-threshold")]),
        }
    }

    /// `traffic-port` is AWS's value for the backend's own port.
    fn health_port(&mut self, keys: &[&'static str]) -> Option<u16> {
        let parse = |value: &str| match value {
            "traffic-port" => Some(None),
            number => number.parse().ok().filter(|port| *port != 0).map(Some),
        };
        self.parsed(Unread::HealthPort, keys, &"a port from 1 to 65535", parse).flatten()
    }

    /// A path, host or service name: visible ASCII, since it becomes a line of a request.
    fn health_text(&mut self, what: Unread, keys: &[&'static str], chars_max: usize, is_legal: fn(u8) -> bool) -> Option<String> {
        let expected =
            format_args!("at most {chars_max} visible ASCII characters that may stand there, percent-encoded if need be");
        let is_text =
            |value: &str| value.len() <= chars_max && value.bytes().all(|c| c.is_ascii_graphic() && c != b'#' && is_legal(c));
        self.parsed(what, keys, &expected, |value| is_text(value).then(|| value.to_owned()))
    }

    fn health_status(&mut self, keys: &[&'static str]) -> Option<StatusRanges> {
        let expected = "statuses from 100 to 599 such as 200-299,404";
        self.parsed(Unread::HealthStatus, keys, &expected, |value| value.parse().ok())
    }

    fn threshold(&mut self, what: Unread, keys: &[&'static str]) -> Option<u32> {
        let expected = format_args!("a number from {} to {}", THRESHOLD.start(), THRESHOLD.end());
        self.parsed(what, keys, &expected, |value| value.parse().ok().filter(|n| THRESHOLD.contains(n)))
    }

    /// A duration: ours with a unit, the alias in whole seconds.
    fn time(&mut self, what: Unread, keys: [&'static str; 2], limits: RangeInclusive<Duration>) -> Option<Duration> {
        let seconds = |value: &str| value.parse().ok().map(Duration::from_secs);
        self.time_or(what, keys, limits, seconds)
    }

    /// AWS has two annotations for it, and without draining the timeout has no effect.
    fn drain_timeout(&mut self) -> Option<Duration> {
        let (key, enabled) = (ours!("drain-timeout"), aws!("connection-draining-enabled"));
        if self.value(enabled).is_some_and(|value| value.eq_ignore_ascii_case("false")) {
            return self.time_or(Unread::DrainTimeout, [key, enabled], DRAIN, |_| Some(Duration::ZERO));
        }
        self.time(Unread::DrainTimeout, [key, aws!("connection-draining-timeout")], DRAIN)
    }

    /// A duration: ours with a unit, or the alias as its own function parses it.
    fn time_or(
        &mut self,
        what: Unread,
        [key, alias]: [&'static str; 2],
        limits: RangeInclusive<Duration>,
        parse: impl Fn(&str) -> Option<Duration>,
    ) -> Option<Duration> {
        let (from, to) = (DurationText(*limits.start()), DurationText(*limits.end()));
        let of_ours = format_args!("a duration such as 500ms, 5s or 2m, from {from} to {to}");
        let of_alias = format_args!("a number of seconds, from {from} to {to}");
        let is_within = |time: &Duration| limits.contains(time);
        let ours = |value: &str| duration(value).filter(is_within);
        let theirs = |value: &str| parse(value).filter(is_within);
        let ours = self.value(key).map(|value| (Notation { key, expected: &of_ours, parse: &ours }, value));
        let theirs = self.value(alias).map(|value| (Notation { key: alias, expected: &of_alias, parse: &theirs }, value));
        let set: Vec<_> = ours.into_iter().chain(theirs).collect();
        self.chosen(what, &set)
    }
}

#[cfg(test)]
mod tests;
