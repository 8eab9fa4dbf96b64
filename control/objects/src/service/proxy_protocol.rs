//! The ports of a Service whose backends get a PROXY header, by our annotations or by those of other load balancers.
//!
//! Invariant: a header is never guessed. A value or a port that cannot be read is an error, because a backend would
//! receive something else than it expects. Our annotations win; an alias that asks for something else becomes a remark.
//! Deliberately not here: the modes in which a header is possible (the plan), and annotations by which a cloud sends a
//! header to other connections than these, such as Azure's Private Link Service ([`super::foreign`] refuses them).

use std::collections::BTreeMap;

use proto::{Protocol, ProxyProtocol};
use serde_json::Value;

use super::error::SpecError;
use super::spec::PortSpec;
use crate::note::{Cause, Remark, quoted};

type Annotations = BTreeMap<String, String>;

const OURS: &str = "sluice.dev/proxy-protocol";
const OUR_PORTS: &str = "sluice.dev/proxy-protocol-ports";
const AWS_ALL: &str = "service.beta.kubernetes.io/aws-load-balancer-proxy-protocol";
const AWS_PORTS: &str = "service.beta.kubernetes.io/aws-load-balancer-proxy-protocol-per-target-group";
/// With a suffix `.PORT` it is for one port, and overrides what it has without.
const AWS_ATTRIBUTES: &str = "service.beta.kubernetes.io/aws-load-balancer-target-group-attributes";
/// Prefix of the attributes of PROXY protocol. `client_to_server.header_placement` has two values, both of which the
/// gateway satisfies: the header is sent with the first segment and again until it is acknowledged.
const AWS_ATTRIBUTE: &str = "proxy_protocol_v2.";
/// See [`AWS_ATTRIBUTE`].
const AWS_PLACEMENT: &str = "client_to_server.header_placement";
/// Linode's settings of one port: a JSON object.
const LINODE_PORT: &str = "service.beta.kubernetes.io/linode-loadbalancer-port-";
/// The key in it.
const LINODE_KEY: &str = "proxy-protocol";
/// Maximum number of ports that a message lists.
const LISTED_MAX: usize = 8;

use ProxyProtocol::{V1, V2};

/// How an annotation of another product asks for headers. Keys, words and versions are those of the vendors' controllers.
enum Format {
    /// One word for all TCP ports.
    Words(&'static [(&'static str, Option<ProxyProtocol>)]),
    /// One word for all TCP and UDP ports.
    WordsWithUdp(&'static [(&'static str, Option<ProxyProtocol>)]),
    /// `true` or `*` for all TCP ports, `false`, or numbers of ports with commas between.
    Ports(ProxyProtocol),
    /// The key is followed by the number of a port.
    LinodePort,
}

struct Alias {
    key: &'static str,
    format: Format,
}

const fn words(key: &'static str, words: &'static [(&'static str, Option<ProxyProtocol>)]) -> Alias {
    Alias { key, format: Format::Words(words) }
}

const VERSIONS: &[(&str, Option<ProxyProtocol>)] = &[("v1", Some(V1)), ("v2", Some(V2)), ("none", None)];
const TRUE_IS_V1: &[(&str, Option<ProxyProtocol>)] = &[("true", Some(V1)), ("false", None)];
const TRUE_IS_V2: &[(&str, Option<ProxyProtocol>)] = &[("true", Some(V2)), ("false", None)];
const ON_IS_V2: &[(&str, Option<ProxyProtocol>)] = &[("on", Some(V2)), ("off", None)];

/// The annotations of each product. The first that speaks for a port counts for it.
const PRODUCTS: [&[Alias]; 9] = [
    &[words("loxilb.io/useproxyprotov2", &[("yes", Some(V2)), ("no", None)])],
    &[words(
        "loadbalancer.openstack.org/proxy-protocol",
        &[("true", Some(V1)), ("v1", Some(V1)), ("v2", Some(V2)), ("false", None)],
    )],
    &[words("service.beta.kubernetes.io/do-loadbalancer-enable-proxy-protocol", TRUE_IS_V1)],
    &[
        Alias { key: "service.beta.kubernetes.io/scw-loadbalancer-proxy-protocol-v1", format: Format::Ports(V1) },
        Alias { key: "service.beta.kubernetes.io/scw-loadbalancer-proxy-protocol-v2", format: Format::Ports(V2) },
        Alias { key: "service.beta.kubernetes.io/scw-loadbalancer-send-proxy-v2", format: Format::Ports(V2) },
    ],
    &[words("load-balancer.hetzner.cloud/uses-proxyprotocol", TRUE_IS_V1)],
    &[
        Alias { key: LINODE_PORT, format: Format::LinodePort },
        words("service.beta.kubernetes.io/linode-loadbalancer-default-proxy-protocol", VERSIONS),
        words("service.beta.kubernetes.io/linode-loadbalancer-proxy-protocol", VERSIONS),
    ],
    &[words("service.beta.kubernetes.io/vultr-loadbalancer-proxy-protocol", TRUE_IS_V1)],
    &[
        Alias {
            key: "service.beta.kubernetes.io/alibaba-cloud-loadbalancer-proxy-protocol",
            format: Format::WordsWithUdp(ON_IS_V2),
        },
        Alias { key: "service.beta.kubernetes.io/alicloud-loadbalancer-proxy-protocol", format: Format::WordsWithUdp(ON_IS_V2) },
    ],
    &[
        words(
            "service.beta.kubernetes.io/oci-load-balancer-connection-proxy-protocol-version",
            &[("1", Some(V1)), ("2", Some(V2))],
        ),
        words("oci-network-load-balancer.oraclecloud.com/is-ppv2-enabled", TRUE_IS_V2),
    ],
];

/// How much of an annotation of another product is read here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// Nothing.
    None,
    /// A part of its value.
    Part,
    /// All of it.
    All,
}

/// How much of an annotation is read here.
pub(super) fn reading(key: &str, value: &str) -> Reading {
    let is_attribute = |pair: &str| pair.trim().is_empty() || pair.trim().starts_with(AWS_ATTRIBUTE);
    if key.strip_prefix(AWS_ATTRIBUTES).is_some_and(|port| port.is_empty() || port.starts_with('.')) {
        return match (value.split(',').all(is_attribute), value.contains(AWS_ATTRIBUTE)) {
            (true, _) => Reading::All,
            (false, true) => Reading::Part,
            (false, false) => Reading::None,
        };
    }
    if key.starts_with(LINODE_PORT) {
        let object = serde_json::from_str::<BTreeMap<String, Value>>(value).unwrap_or_default();
        return match (object.contains_key(LINODE_KEY), object.len()) {
            (true, 1) => Reading::All,
            (true, _) => Reading::Part,
            (false, _) => Reading::None,
        };
    }
    let is_alias = PRODUCTS.iter().flat_map(|aliases| aliases.iter()).any(|alias| alias.key == key);
    if is_alias || [AWS_ALL, AWS_PORTS].contains(&key) { Reading::All } else { Reading::None }
}

/// What one set of annotations asks for.
struct Asked {
    /// The annotation to name.
    place: String,
    /// The header of each port of the Service.
    headers: Vec<Option<ProxyProtocol>>,
}

/// Gives each of `ports` the header that the annotations ask for.
///
/// # Errors
/// If a value cannot be read, a port that ours name does not exist, or ours ask for a header on a port that cannot have it.
pub(super) fn apply(annotations: &Annotations, ports: &mut [PortSpec], notes: &mut Vec<Remark>) -> Result<(), SpecError> {
    let mut asked: Vec<Asked> = ours(annotations, ports)?.into_iter().collect();
    asked.extend(aws(annotations, ports)?);
    for aliases in PRODUCTS {
        asked.extend(of_product(annotations, aliases, ports)?);
    }
    notes.extend(annotations.iter().filter_map(|(key, value)| absent_port(key, value.trim(), ports)));
    let Some((used, others)) = asked.split_first() else { return Ok(()) };
    for other in others.iter().filter(|other| other.headers != used.headers) {
        let (place, other) = (&used.place, &other.place);
        let text = format!("annotation {place} and annotation {other} ask for different PROXY headers; {place} counts");
        notes.push(Remark::new(Cause::AnnotationsDiffer, text));
    }
    for (port, header) in ports.iter_mut().zip(&used.headers) {
        port.proxy_protocol = *header;
    }
    Ok(())
}

fn value<'a>(annotations: &'a Annotations, key: &str) -> Option<&'a str> {
    annotations.get(key).map(|value| value.trim()).filter(|value| !value.is_empty())
}

fn error(key: &str, found: &str, expected: &str) -> SpecError {
    SpecError::Annotation { key: key.to_owned(), expected: format!("found {}, expected {expected}", quoted(found)) }
}

/// The parts of a list with commas that are not empty.
fn parts(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim).filter(|part| !part.is_empty())
}

fn ours(annotations: &Annotations, ports: &[PortSpec]) -> Result<Option<Asked>, SpecError> {
    let list = value(annotations, OUR_PORTS);
    let Some(found) = value(annotations, OURS) else {
        let without = |list| error(OUR_PORTS, list, "annotation sluice.dev/proxy-protocol with v1 or v2 beside it");
        return list.map_or(Ok(None), |list| Err(without(list)));
    };
    let version: ProxyProtocol = found.to_ascii_lowercase().parse().map_err(|_| error(OURS, found, "v1 or v2"))?;
    let chosen = list.map_or_else(|| Ok(vec![true; ports.len()]), |list| named(list, ports))?;
    let mut unfit = ports.iter().zip(&chosen).filter(|(port, chosen)| **chosen && !version.fits(port.protocol));
    if let Some((PortSpec { protocol, port, .. }, _)) = unfit.next() {
        let what = if version == V1 { "TCP" } else { "TCP and UDP" };
        let expected = format!(
            "{version} is for {what} only, and {protocol} port {port} would get it; name other ports in {OUR_PORTS}{}",
            if version == V1 && *protocol == Protocol::Udp { ", or use v2" } else { "" }
        );
        return Err(SpecError::Annotation { key: OURS.to_owned(), expected });
    }
    let headers = chosen.into_iter().map(|chosen| chosen.then_some(version)).collect();
    Ok(Some(Asked { place: OURS.to_owned(), headers }))
}

/// The ports that a list of numbers and names chooses. A number chooses the ports of all protocols.
fn named(list: &str, ports: &[PortSpec]) -> Result<Vec<bool>, SpecError> {
    let is = |port: &PortSpec, part: &str| (!port.name.is_empty() && port.name == part) || part.parse() == Ok(port.port);
    let mut chosen = vec![false; ports.len()];
    for part in parts(list) {
        let mut any = false;
        for (chosen, _) in chosen.iter_mut().zip(ports).filter(|(_, port)| is(port, part)) {
            (*chosen, any) = (true, true);
        }
        if !any {
            return Err(error(OUR_PORTS, part, &expected_ports(ports)));
        }
    }
    if chosen.contains(&true) { Ok(chosen) } else { Err(error(OUR_PORTS, list, &expected_ports(ports))) }
}

fn expected_ports(ports: &[PortSpec]) -> String {
    let text = |port: &PortSpec| match port.name.as_str() {
        "" => port.port.to_string(),
        name => format!("{} ({name})", port.port),
    };
    let listed: Vec<_> = ports.iter().take(LISTED_MAX).map(text).collect();
    let more = if ports.len() > LISTED_MAX { ", ..." } else { "" };
    format!("numbers or names of ports of the Service, with commas between: {}{more}", listed.join(", "))
}

/// Version 2 for the ports for which `is_asked`, as far as they can have it.
fn second(place: &str, ports: &[PortSpec], is_asked: impl Fn(&PortSpec) -> bool) -> Asked {
    let header = |port: &PortSpec| Some(V2).filter(|version| is_asked(port) && version.fits(port.protocol));
    Asked { place: place.to_owned(), headers: ports.iter().map(header).collect() }
}

/// AWS's annotations, in the order in which they override each other.
fn aws(annotations: &Annotations, ports: &[PortSpec]) -> Result<Vec<Asked>, SpecError> {
    let mut asked = Vec::new();
    if let Some(found) = value(annotations, AWS_ALL) {
        if found != "*" {
            return Err(error(AWS_ALL, found, "*"));
        }
        asked.push(second(AWS_ALL, ports, |_| true));
    }
    if let Some(list) = value(annotations, AWS_PORTS) {
        let numbers = numbers(AWS_PORTS, list, "numbers of ports, with commas between")?;
        asked.push(second(AWS_PORTS, ports, |port| numbers.contains(&port.port)));
    }
    asked.extend(aws_attributes(annotations, ports)?);
    Ok(asked)
}

fn numbers(key: &str, list: &str, expected: &str) -> Result<Vec<u16>, SpecError> {
    let number = |part: &str| part.parse().ok().filter(|number| *number != 0).ok_or_else(|| error(key, part, expected));
    parts(list).map(number).collect()
}

fn aws_attributes(annotations: &Annotations, ports: &[PortSpec]) -> Result<Option<Asked>, SpecError> {
    let all = enabled(annotations, AWS_ATTRIBUTES)?;
    let mut of_ports = Vec::with_capacity(ports.len());
    for port in ports {
        of_ports.push((port.port, enabled(annotations, &format!("{AWS_ATTRIBUTES}.{}", port.port))?));
    }
    let is_asked = |port: &PortSpec| {
        let own = of_ports.iter().find(|(number, _)| *number == port.port).and_then(|(_, enabled)| *enabled);
        own.or(all).unwrap_or_default()
    };
    let says = all.is_some() || of_ports.iter().any(|(_, enabled)| enabled.is_some());
    Ok(says.then(|| second(AWS_ATTRIBUTES, ports, is_asked)))
}

/// The value of the attribute in one of AWS's lists `a=b,c=d`.
fn enabled(annotations: &Annotations, key: &str) -> Result<Option<bool>, SpecError> {
    let mut enabled = None;
    for pair in value(annotations, key).into_iter().flat_map(parts) {
        let (name, text) = pair.split_once('=').map_or((pair, None), |(name, text)| (name.trim(), Some(text.trim())));
        let Some(attribute) = name.strip_prefix(AWS_ATTRIBUTE) else { continue };
        let found = match (attribute, text) {
            ("enabled", Some(text)) => text.to_ascii_lowercase().parse().ok(),
            (AWS_PLACEMENT, Some(_)) => continue,
            _ => None,
        };
        let expected = format!("{AWS_ATTRIBUTE}enabled=true or =false, or {AWS_ATTRIBUTE}{AWS_PLACEMENT}=...");
        enabled = enabled.or(Some(found.ok_or_else(|| error(key, pair, &expected))?));
    }
    Ok(enabled)
}

/// A remark if an annotation of another product names a port that the Service does not have.
fn absent_port(key: &str, value: &str, ports: &[PortSpec]) -> Option<Remark> {
    let absent = named_by_others(key, value).into_iter().find(|part| !ports.iter().any(|port| part.parse() == Ok(port.port)))?;
    let text = format!("annotation {key}: the Service has no port {absent}; it is left out");
    Some(Remark::new(Cause::AnnotationIgnored, text))
}

/// The ports that an annotation of another product names, in its value or at the end of its key.
fn named_by_others<'a>(key: &'a str, value: &'a str) -> Vec<&'a str> {
    let of_aws = || key.strip_prefix(AWS_ATTRIBUTES)?.strip_prefix('.').filter(|_| value.contains(AWS_ATTRIBUTE));
    let of_linode = || key.strip_prefix(LINODE_PORT).filter(|_| value.contains(LINODE_KEY));
    let is_listed = |alias: &Alias| alias.key == key && matches!(alias.format, Format::Ports(_));
    if key == AWS_PORTS || PRODUCTS.iter().flat_map(|aliases| aliases.iter()).any(is_listed) {
        return parts(value).filter(|part| part.parse::<u16>().is_ok()).collect();
    }
    of_aws().or_else(of_linode).into_iter().collect()
}

/// What the annotations of a product ask for; `None` if for no header.
fn of_product(annotations: &Annotations, aliases: &[Alias], ports: &[PortSpec]) -> Result<Option<Asked>, SpecError> {
    let mut said: Vec<Option<Option<ProxyProtocol>>> = vec![None; ports.len()];
    let mut place = None;
    for alias in aliases {
        for (said, port) in said.iter_mut().zip(ports) {
            let says = alias.says(annotations, port)?;
            if said.is_none() && says.flatten().is_some() {
                place.get_or_insert_with(|| alias.key_for(port));
            }
            *said = said.or(says);
        }
    }
    let headers = said.into_iter().map(Option::flatten).collect();
    Ok(place.map(|place| Asked { place, headers }))
}

impl Alias {
    fn key_for(&self, port: &PortSpec) -> String {
        let number = if matches!(self.format, Format::LinodePort) { port.port.to_string() } else { String::new() };
        format!("{}{number}", self.key)
    }

    /// What it says of a port: nothing, no header, or a header.
    fn says(&self, annotations: &Annotations, port: &PortSpec) -> Result<Option<Option<ProxyProtocol>>, SpecError> {
        let key = self.key_for(port);
        let Some(found) = value(annotations, &key) else { return Ok(None) };
        let (says, with_udp) = match self.format {
            Format::Words(words) => (Some(word(&key, found, words)?), false),
            Format::WordsWithUdp(words) => (Some(word(&key, found, words)?), true),
            Format::Ports(version) => (listed(&key, found, port)?.then_some(Some(version)), false),
            Format::LinodePort => (linode(&key, found)?, false),
        };
        let can_have = port.protocol == Protocol::Tcp || (with_udp && port.protocol == Protocol::Udp);
        Ok(says.filter(|_| can_have))
    }
}

fn word(key: &str, found: &str, words: &[(&'static str, Option<ProxyProtocol>)]) -> Result<Option<ProxyProtocol>, SpecError> {
    let known = words.iter().find(|(word, _)| word.eq_ignore_ascii_case(found));
    let all = || words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
    known.map(|(_, version)| *version).ok_or_else(|| error(key, found, &format!("one of {}", all())))
}

/// Whether a list of Scaleway contains a port.
fn listed(key: &str, found: &str, port: &PortSpec) -> Result<bool, SpecError> {
    match found.to_ascii_lowercase().as_str() {
        "true" | "*" => Ok(true),
        "false" => Ok(false),
        list => Ok(numbers(key, list, "true, false, * or numbers of ports")?.contains(&port.port)),
    }
}

fn linode(key: &str, found: &str) -> Result<Option<Option<ProxyProtocol>>, SpecError> {
    match serde_json::from_str::<BTreeMap<String, Value>>(found) {
        Ok(object) => match object.get(LINODE_KEY) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
            Some(Value::String(text)) => word(key, text.trim(), VERSIONS).map(Some),
            Some(_) => Err(error(key, found, "proxy-protocol with one of v1, v2, none")),
        },
        // Its product may understand it.
        Err(_) if found.contains(LINODE_KEY) => Err(error(key, found, "a JSON object")),
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests;
