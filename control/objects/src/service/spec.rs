//! The specification of a Service, as its fields and annotations request it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use proto::limits::ANNOTATION_PREFIX;
use proto::{AffinityScope, Family, HealthCheck, Mode, Probe, Protocol, ProxyProtocol, Scheduler, StatusRanges, Target};

use super::error::{SpecError, Unread};
use crate::note::{Cause, Remark};
use crate::status::IpMode;

/// The specification of a Service that can be served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceSpec {
    /// In the order of `spec.ipFamilies`; one or two.
    pub families: Vec<Family>,
    /// Whether the address of the second family is optional (`PreferDualStack`).
    pub second_family_optional: bool,
    /// At least one.
    pub ports: Vec<PortSpec>,
    /// Requested addresses, at most one per family.
    pub addresses: Vec<IpAddr>,
    /// `spec.externalIPs`, without invalid addresses.
    pub external_ips: Vec<IpAddr>,
    /// Requested pool.
    pub pool: Option<String>,
    /// Whether it requests an address of an internal pool.
    pub internal: bool,
    /// `readdress`: whether an address outside the requested pool or list is to be exchanged.
    pub readdress: bool,
    /// Whether and with whom it shares its addresses.
    pub sharing: Option<Sharing>,
    /// Requested mode.
    pub mode: Option<Mode>,
    /// Requested target.
    pub target: Option<Target>,
    /// Requested scheduler.
    pub scheduler: Option<Scheduler>,
    /// Requested `ipMode`.
    pub ip_mode: Option<IpMode>,
    /// `sessionAffinity: ClientIP`: how long a client keeps its backend.
    pub affinity: Option<Duration>,
    /// Over what the affinity is shared.
    pub affinity_scope: Option<AffinityScope>,
    /// Clients that may connect; `None` means all.
    pub source_ranges: Option<Vec<IpNet>>,
    /// `externalTrafficPolicy: Local`.
    pub local: bool,
    /// Port at which nodes report whether they have ready endpoints: `healthCheckNodePort`.
    pub node_health_port: Option<u16>,
    /// Name of the proxy that serves it on nodes instead of kube-proxy: `service.kubernetes.io/service-proxy-name`.
    pub proxy_name: Option<String>,
    /// Requested health check.
    pub health: HealthSpec,
    /// Requested drain timeout.
    pub drain_timeout: Option<Duration>,
    /// Requested idle timeout.
    pub idle_timeout: Option<Duration>,
    /// Why its request for an address or a pool cannot be parsed; `None` if it can, or if a previous one stays in force.
    pub unread_request: Option<String>,
    /// Settings that cannot be parsed; their previous values stay in force.
    pub unread: BTreeSet<Unread>,
    /// Why it is not served unless it is served already: an annotation of ours has an unknown word.
    pub refused_if_new: Option<SpecError>,
    /// Remarks about settings that the author may have meant differently.
    pub notes: Vec<Remark>,
}

impl ServiceSpec {
    /// Whether any of its ports gets a PROXY header.
    #[must_use]
    pub fn has_proxy_header(&self) -> bool {
        self.ports.iter().any(|port| port.proxy_protocol.is_some())
    }

    /// Copies settings that cannot be parsed from the previous specification.
    pub fn keep(&mut self, before: &Self) {
        for what in self.unread.clone() {
            match what {
                Unread::Addresses => self.addresses.clone_from(&before.addresses),
                Unread::Pool => self.pool.clone_from(&before.pool),
                Unread::Readdress => self.readdress = before.readdress,
                Unread::Sharing => self.sharing.clone_from(&before.sharing),
                Unread::Mode => self.mode = before.mode,
                Unread::Target => self.target = before.target,
                Unread::Scheduler => self.scheduler = before.scheduler,
                Unread::IpMode => self.ip_mode = before.ip_mode,
                Unread::Probe => self.health.probe = before.health.probe,
                Unread::HealthPort => self.health.port = before.health.port,
                Unread::HealthPath => self.health.path.clone_from(&before.health.path),
                Unread::HealthHost => self.health.host.clone_from(&before.health.host),
                Unread::HealthStatus => self.health.status.clone_from(&before.health.status),
                Unread::TlsVerify => self.health.tls_verify = before.health.tls_verify,
                Unread::Interval => self.health.interval = before.health.interval,
                Unread::Timeout => self.health.timeout = before.health.timeout,
                Unread::Rise => self.health.rise = before.health.rise,
                Unread::Fall => self.health.fall = before.health.fall,
                Unread::DrainTimeout => self.drain_timeout = before.drain_timeout,
                Unread::IdleTimeout => self.idle_timeout = before.idle_timeout,
                Unread::AffinityScope => self.affinity_scope = before.affinity_scope,
            }
        }
        // The Service may have lost a family in the meantime.
        self.addresses.retain(|address| self.families.contains(&Family::of(*address)));
        // Without a request to fall back on, any address would be another one than requested.
        let lacks_addresses = self.unread.contains(&Unread::Addresses) && self.addresses.is_empty();
        let lacks_pool = self.unread.contains(&Unread::Pool) && self.pool.is_none();
        if !lacks_addresses && !lacks_pool {
            self.unread_request = None;
        }
        // The words of a readable specification are known, whoever leads.
        if before.refused_if_new.is_none() {
            self.refused_if_new = None;
        }
    }
}

/// One port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSpec {
    /// Its name, possibly empty; EndpointSlice ports match by name and protocol.
    pub name: String,
    /// Protocol of the frontend and the endpoints.
    pub protocol: Protocol,
    /// Port at the VIPs.
    pub port: u16,
    /// Port at the node port addresses of gateways; only for type `NodePort`.
    pub node_port: Option<u16>,
    /// Port at the cluster's nodes, where kube-proxy listens; `None` if none is allocated.
    pub port_of_nodes: Option<u16>,
    /// Application protocol, for display only.
    pub app_protocol: Option<String>,
    /// The PROXY header that its backends expect.
    pub proxy_protocol: Option<ProxyProtocol>,
}

/// Health check settings of a Service; the rest comes from the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthSpec {
    /// Protocol of the probe.
    pub probe: Option<Probe>,
    /// Port to probe instead of the backend's own.
    pub port: Option<u16>,
    /// Path of a request, or service of gRPC.
    pub path: Option<String>,
    /// Host of a request.
    pub host: Option<String>,
    /// Statuses that pass.
    pub status: Option<StatusRanges>,
    /// Whether certificates are verified.
    pub tls_verify: Option<bool>,
    /// Time between two probes.
    pub interval: Option<Duration>,
    /// Timeout of a probe.
    pub timeout: Option<Duration>,
    /// Number of passed probes that make a target healthy.
    pub rise: Option<u32>,
    /// Number of failed probes that make a target unhealthy.
    pub fall: Option<u32>,
}

impl HealthSpec {
    /// The health check of the Service, completed from `defaults`.
    #[must_use]
    pub fn over(&self, defaults: &HealthCheck) -> HealthCheck {
        HealthCheck {
            probe: self.probe.unwrap_or(defaults.probe),
            port: self.port.or(defaults.port),
            path: self.path.clone().or_else(|| defaults.path.clone()),
            host: self.host.clone().or_else(|| defaults.host.clone()),
            status: self.status.clone().unwrap_or_else(|| defaults.status.clone()),
            tls_verify: self.tls_verify.unwrap_or(defaults.tls_verify),
            node_health_port: None,
            interval: self.interval.unwrap_or(defaults.interval),
            timeout: self.timeout.unwrap_or(defaults.timeout),
            rise: self.rise.unwrap_or(defaults.rise),
            fall: self.fall.unwrap_or(defaults.fall),
            fail_open: defaults.fail_open,
            initial: defaults.initial,
        }
    }

    /// Remarks about settings that have no effect on a probe of this protocol.
    pub fn remarks(&self, probe: Probe) -> impl Iterator<Item = Remark> {
        let set = [
            ("path", self.path.is_some(), probe.is_http() || probe == Probe::Grpc),
            ("host", self.host.is_some(), probe.is_http() || probe == Probe::Grpc),
            ("status", self.status.is_some(), probe.is_http()),
            ("tls-verify", self.tls_verify.is_some(), probe == Probe::Https),
            ("port", self.port.is_some(), !matches!(probe, Probe::Icmp | Probe::None)),
        ];
        set.into_iter().filter(|(_, is_set, has_effect)| *is_set && !has_effect).map(move |(name, ..)| {
            let text = format!("annotation {ANNOTATION_PREFIX}health-check-{name} has no effect on health check {probe}");
            Remark::new(Cause::AnnotationIgnored, text)
        })
    }
}

/// What a Service declares about sharing its address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sharing {
    /// `sharing-key`: Services with equal keys share.
    pub key: String,
    /// Whether it comes from MetalLB's annotation, which has no list of namespaces.
    pub is_metallb: bool,
    /// `sharing-namespaces`: other namespaces with which it shares.
    pub namespaces: Namespaces,
}

/// Other namespaces with which a Service shares an address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Namespaces {
    /// The listed ones; none by default.
    Named(BTreeSet<String>),
    /// `*`: all.
    All,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_cannot_be_read_stays_open_unless_there_is_one_to_fall_back_on() {
        let address: IpAddr = [192, 0, 2, 9].into();
        let with = |addresses: &[IpAddr], pool: Option<&str>| ServiceSpec {
            families: vec![Family::V4],
            addresses: addresses.to_vec(),
            pool: pool.map(str::to_owned),
            ..ServiceSpec::default()
        };
        let unread = |unread: &[Unread]| ServiceSpec {
            unread: unread.iter().copied().collect(),
            unread_request: Some("found nonsense".to_owned()),
            ..with(&[], None)
        };
        let rows = [
            (&[Unread::Addresses][..], with(&[], None), true),
            (&[Unread::Addresses], with(&[], Some("edge")), true),
            (&[Unread::Addresses], with(&[address], None), false),
            (&[Unread::Addresses], with(&["2001:db8::1".parse().unwrap()], None), true),
            (&[Unread::Pool], with(&[address], None), true),
            (&[Unread::Pool], with(&[], Some("edge")), false),
            (&[Unread::Addresses, Unread::Pool], with(&[address], None), true),
            (&[Unread::Addresses, Unread::Pool], with(&[address], Some("edge")), false),
        ];
        for (what, before, is_open) in rows {
            let mut spec = unread(what);
            spec.keep(&before);
            assert_eq!(spec.unread_request.is_some(), is_open, "{what:?} {before:?}");
            // The next event of the object changes nothing.
            let mut again = unread(what);
            again.keep(&spec);
            assert_eq!(again.unread_request.is_some(), is_open, "{what:?} {before:?}");
        }
    }
}
