//! Selection of the endpoints that serve one port of a Service.
//!
//! Invariant: new flows go to ready endpoints if there are any, else to those that are serving while they terminate; such
//! endpoints beside ready ones keep the flows that they have. No endpoint is selected twice, and none that a tenant must
//! not reach through the gateway. `internalTrafficPolicy` does not apply, because traffic through a gateway always comes
//! from outside the cluster. Deliberately not here: health, which each gateway determines by its own probes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use proto::{Backend, BackendState, Family, NodesAt, ZoneBackends, limits};

use crate::config::settings::ControllerSettings;
use crate::plan::forbidden::Forbidden;
use crate::plan::pools::Pools;
use objects::note::{Cause, Remark};
use objects::{EndpointSpec, PortSpec, SliceSpec};

mod deleted_slices;
mod missing_backends;
pub mod nodes;
pub mod source;

pub use deleted_slices::{DeletedSlices, SLICE_KEPT};
pub use missing_backends::MissingBackends;

/// Maximum number of excluded backends named in a message; beyond it the message has only their number.
const FENCED_NAMED_MAX: usize = 5;

/// The inputs that decide which addresses must not be backends.
#[derive(Clone, Copy)]
pub struct Fence<'a> {
    /// The configuration: Service CIDRs, and the networks of backends.
    pub settings: &'a ControllerSettings,
    /// The pools in use.
    pub pools: &'a Pools,
    /// Addresses of gateways and nodes.
    pub forbidden: &'a Forbidden,
    /// VIPs outside every pool, of ours and of other groups, in order.
    pub vips_outside_pools: &'a [IpAddr],
}

/// The backends of one port and family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Ordered by address.
    pub backends: Vec<Backend>,
    /// The shared set, if the backends are all eligible nodes; then `backends` is empty.
    pub nodes: Option<NodesAt>,
    /// Why some backends were excluded.
    pub notes: Vec<Remark>,
    /// Number of backends excluded because their addresses are forbidden.
    pub fenced: usize,
    /// Why no node is eligible; `None` for endpoints.
    pub ineligible: Option<String>,
    /// Which backends gateways of each zone use.
    pub zones: Vec<ZoneBackends>,
}

impl Fence<'_> {
    /// Why `address` must not be a backend.
    #[must_use]
    pub fn refuses(&self, address: IpAddr) -> Option<String> {
        let within = |nets: &[IpNet]| nets.iter().find(|net| net.contains(&address)).copied();
        if let Some(what) = special(address) {
            return Some(format!("it is {what}"));
        }
        if let Some(why) = self.forbidden.of_gateway(address) {
            return Some(why);
        }
        if let Some(pool) = self.pools.holding(address) {
            return Some(format!("it lies in pool {}", pool.name));
        }
        if let Some(pool) = self.pools.elsewhere(address) {
            return Some(format!("it lies in pool {pool} of another installation"));
        }
        if self.is_vip_outside_pools(address) {
            return Some("it is a VIP".to_owned());
        }
        if let Some(net) = within(&self.settings.cluster_cidrs) {
            return Some(format!("it lies in {net} of clusterCIDRs"));
        }
        match &self.settings.backends_allowed {
            Some(allowed) if within(allowed).is_none() => Some("it lies outside backends.allowed".to_owned()),
            _ => None,
        }
    }

    /// Whether `address` is a VIP outside every pool.
    #[must_use]
    pub fn is_vip_outside_pools(&self, address: IpAddr) -> bool {
        self.vips_outside_pools.binary_search(&address).is_ok()
    }
}

/// Loopback, link-local, multicast and unspecified addresses. An IPv4-mapped IPv6 address counts as its IPv4 address.
#[must_use]
pub fn special(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => Some("an IPv4 address in IPv6 form"),
        a if a.is_loopback() => Some("a loopback address"),
        a if a.is_multicast() => Some("a multicast address"),
        a if a.is_unspecified() => Some("the unspecified address"),
        IpAddr::V4(v4) if v4.is_broadcast() => Some("the broadcast address"),
        IpAddr::V4(v4) if v4.octets()[0] == 0 => Some("an address of this network"),
        IpAddr::V4(v4) if v4.is_link_local() => Some("a link-local address"),
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Some("a link-local address"),
        _ => None,
    }
}

/// The backends of `port` in `family`.
pub fn select<'a>(slices: impl Iterator<Item = &'a SliceSpec>, port: &PortSpec, family: Family, fence: &Fence<'_>) -> Selection {
    let endpoints = endpoints(slices, port, family);
    let is_any_ready = endpoints.values().any(|endpoint| endpoint.ready);
    let of_terminating = if is_any_ready { BackendState::Draining } else { BackendState::Active };
    let state = |endpoint: &EndpointSpec| match endpoint {
        _ if endpoint.ready => Some(BackendState::Active),
        _ if endpoint.serving && endpoint.terminating => Some(of_terminating),
        _ => None,
    };
    let chosen =
        endpoints.iter().filter_map(|(&address, endpoint)| Some(Backend { address, weight: 1, state: state(endpoint)? }));
    let mut selection = admit(chosen, port, fence);
    if is_any_ready {
        selection.zones = zones(&endpoints, &selection.backends);
    }
    selection
}

/// Zone hints count as in kube-proxy: only if every ready endpoint has one, and only in zones that some hint names.
/// Node hints do not count, because a gateway is not a node. Terminating endpoints are used in all zones, and keep their
/// flows in all.
fn zones(endpoints: &BTreeMap<SocketAddr, &EndpointSpec>, backends: &[Backend]) -> Vec<ZoneBackends> {
    if endpoints.values().any(|endpoint| endpoint.ready && endpoint.zones.is_empty()) {
        return Vec::new();
    }
    let mut zones: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for (place, backend) in (0..).zip(backends).filter(|(_, backend)| backend.state == BackendState::Active) {
        let hinted: BTreeSet<&str> =
            endpoints.get(&backend.address).into_iter().flat_map(|e| &e.zones).map(|zone| &**zone).collect();
        for zone in hinted {
            zones.entry(zone).or_default().push(place);
        }
    }
    zones.into_iter().map(|(zone, backends)| ZoneBackends { zone: zone.to_owned(), backends }).collect()
}

/// The permitted candidates, ordered by address, at most as many as one table can hold: those that take new flows first.
fn admit(candidates: impl Iterator<Item = Backend>, port: &PortSpec, fence: &Fence<'_>) -> Selection {
    let mut selection = Selection::default();
    let mut refused = Vec::new();
    for backend in candidates {
        match fence.refuses(backend.address.ip()) {
            Some(why) => refused.push((backend.address, why)),
            None => selection.backends.push(backend),
        }
    }
    let found = selection.backends.len();
    if found > limits::BACKENDS_PER_PORT_MAX {
        selection.backends.sort_by_key(|backend| (backend.state == BackendState::Draining, backend.address));
        selection.backends.truncate(limits::BACKENDS_PER_PORT_MAX);
        selection.backends.sort_by_key(|backend| backend.address);
    }
    selection.note_excluded(refused.iter().map(|(address, why)| (*address, why.as_str())), found, port);
    selection
}

impl Selection {
    /// Adds notes on excluded backends: the forbidden ones, each with the reason, and those of `found` that exceed the
    /// size of a table.
    fn note_excluded<'r>(
        &mut self,
        forbidden: impl ExactSizeIterator<Item = (SocketAddr, &'r str)>,
        found: usize,
        port: &PortSpec,
    ) {
        let mut note = |text: String| self.notes.push(Remark::new(Cause::BackendRefused, text));
        self.fenced = forbidden.len();
        for (address, why) in forbidden.take(FENCED_NAMED_MAX) {
            note(format!("backend {address} is left out: {why}"));
        }
        if self.fenced > FENCED_NAMED_MAX {
            note(format!("{} backends in all are left out for such reasons", self.fenced));
        }
        if found > limits::BACKENDS_PER_PORT_MAX {
            let max = limits::BACKENDS_PER_PORT_MAX;
            note(format!("port {} {} has {found} backends, of which the first {max} are used", port.protocol, port.port));
        }
    }

    /// How many backends there are, without endpoints that take no new flows because they terminate.
    #[must_use]
    pub fn count(&self) -> usize {
        let listed = self.backends.iter().filter(|backend| backend.state == BackendState::Active).count();
        listed + self.nodes.as_ref().map_or(0, |at| at.set.nodes.len())
    }
}

/// Endpoints ordered by address and port. Of two with the same address and port, one that is not terminating counts
/// first, then a ready one.
fn endpoints<'a>(
    slices: impl Iterator<Item = &'a SliceSpec>,
    port: &PortSpec,
    family: Family,
) -> BTreeMap<SocketAddr, &'a EndpointSpec> {
    let mut found: BTreeMap<SocketAddr, &EndpointSpec> = BTreeMap::new();
    let rank = |endpoint: &EndpointSpec| (!endpoint.terminating, endpoint.ready, endpoint.serving);
    for slice in slices.filter(|slice| slice.family == family) {
        let matching = slice.ports.iter().filter(|p| p.name == port.name && p.protocol == port.protocol);
        for number in matching.map(|p| p.port) {
            for endpoint in &slice.endpoints {
                let kept = found.entry(SocketAddr::new(endpoint.address, number)).or_insert(endpoint);
                if rank(endpoint) > rank(kept) {
                    *kept = endpoint;
                }
            }
        }
    }
    found
}

#[cfg(test)]
pub(crate) mod tests {
    use proto::{Protocol, ServiceName};

    use super::*;
    use crate::plan::tests::settings;
    use objects::SlicePort;

    /// Inputs of a fence.
    pub(crate) struct Fenced {
        pools: Pools,
        forbidden: Forbidden,
    }

    impl Fenced {
        pub(crate) fn of(settings: &ControllerSettings) -> Self {
            let forbidden = Forbidden::new(&[(None, &settings.profile)], [].iter(), &settings.cluster_cidrs);
            Self { pools: crate::plan::addresses::tests::pools(&settings.pools), forbidden }
        }

        pub(crate) fn fence<'a>(&'a self, settings: &'a ControllerSettings, vips: &'a [IpAddr]) -> Fence<'a> {
            Fence { settings, pools: &self.pools, forbidden: &self.forbidden, vips_outside_pools: vips }
        }
    }

    pub(crate) fn port() -> PortSpec {
        PortSpec {
            name: "http".to_owned(),
            protocol: Protocol::Tcp,
            port: 80,
            node_port: None,
            port_of_nodes: None,
            app_protocol: None,
            proxy_protocol: None,
        }
    }

    /// The selection for [`port`] as sent to gateways.
    pub(crate) fn service_port(family: Family, backends: Vec<Backend>) -> proto::ServicePort {
        let maglev = proto::MaglevSpec { size: limits::MAGLEV_SIZES[0], seed: 0, hash_version: limits::MAGLEV_HASH_VERSION };
        let PortSpec { name, protocol, port, node_port, app_protocol, .. } = port();
        let new = proto::ServicePort::new(protocol, family, port, maglev);
        proto::ServicePort { name, node_port, backends, app_protocol, ..new }
    }

    pub(crate) fn slice(ports: &[(&str, Protocol, u16)], endpoints: &[EndpointSpec]) -> SliceSpec {
        let named = |(name, protocol, port): &(&str, Protocol, u16)| SlicePort {
            name: (*name).to_owned(),
            protocol: *protocol,
            port: *port,
        };
        SliceSpec {
            name: ServiceName::new("shop", "web-1"),
            service: ServiceName::new("shop", "web"),
            family: Family::V4,
            is_managed: true,
            ports: ports.iter().map(named).collect(),
            endpoints: endpoints.to_vec(),
            notes: Vec::new(),
        }
    }

    /// The API's conditions by letter: r ready, s serving, t terminating.
    pub(crate) fn endpoint(last: u8, conditions: &str) -> EndpointSpec {
        let has = |c| conditions.contains(c);
        let address = [10, 0, 0, last].into();
        EndpointSpec { address, ready: has('r'), serving: has('s'), terminating: has('t'), node: None, zones: Box::default() }
    }

    fn selected(slices: &[SliceSpec]) -> Vec<String> {
        let settings = settings();
        let fenced = Fenced::of(&settings);
        let selection = select(slices.iter(), &port(), Family::V4, &fenced.fence(&settings, &[]));
        let state = |backend: &Backend| if backend.state == BackendState::Draining { " draining" } else { "" };
        selection.backends.iter().map(|backend| format!("{}{}", backend.address, state(backend))).collect()
    }

    #[test]
    fn selection_follows_the_conditions() {
        let rows = [
            ("ready ones", "1rs 2rs", "1 2"),
            ("beside a ready one, those that serve while they terminate keep their flows", "1rs 2st 3t", "1 2d"),
            ("without a ready one, those that serve while they terminate", "1st 2t 3", "1"),
            ("not ready and not terminating is never used", "1s 2", ""),
            ("publishNotReadyAddresses arrives as ready, serving or not", "1r", "1"),
            ("ready and terminating (publishNotReadyAddresses) counts as ready", "1rst 2s", "1"),
            ("terminating without serving is never used", "1t", ""),
            ("nothing", "", ""),
        ];
        for (sentence, endpoints, expected) in rows {
            let list = endpoints.split_whitespace().map(|text| endpoint(text[..1].parse().unwrap(), &text[1..]));
            let text = |last: &str| match last.strip_suffix('d') {
                Some(last) => format!("10.0.0.{last}:8080 draining"),
                None => format!("10.0.0.{last}:8080"),
            };
            let expected: Vec<_> = expected.split_whitespace().map(text).collect();
            let slice = slice(&[("http", Protocol::Tcp, 8080)], &list.collect::<Vec<_>>());
            assert_eq!(selected(&[slice]), expected, "{sentence}");
        }
    }

    /// `1rs a,b`: endpoint 10.0.0.1, ready and serving, hinted to zones a and b.
    fn hinted(text: &str) -> EndpointSpec {
        let (first, zones) = text.split_once(' ').unwrap_or((text, ""));
        let zones = zones.split(',').filter(|zone| !zone.is_empty()).map(Box::from).collect();
        EndpointSpec { zones, ..endpoint(first[..1].parse().unwrap(), &first[1..]) }
    }

    #[test]
    fn hints_count_for_zones_when_every_ready_endpoint_has_one() {
        type Row<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, &'a [u32])]);
        let rows: [Row<'_>; 8] = [
            ("no hints", &["1rs", "2rs"], &[]),
            ("each to its own zone", &["1rs a", "2rs b", "3rs a"], &[("a", &[0, 2]), ("b", &[1])]),
            ("to several zones", &["1rs a,b", "2rs b,b"], &[("a", &[0]), ("b", &[0, 1])]),
            ("one ready endpoint without", &["1rs a", "2rs"], &[]),
            ("only one that is not ready without", &["1rs a", "2s"], &[("a", &[0])]),
            ("one that terminates beside ready ones does not count", &["1rs a", "2st b"], &[("a", &[0])]),
            ("terminating ones are used wherever they are", &["1st a", "2st b"], &[]),
            ("publishNotReadyAddresses arrives as ready", &["1r a", "2rt b"], &[("a", &[0]), ("b", &[1])]),
        ];
        let settings = settings();
        for (sentence, endpoints, expected) in rows {
            let list: Vec<_> = endpoints.iter().map(|text| hinted(text)).collect();
            let slice = slice(&[("http", Protocol::Tcp, 8080)], &list);
            let selection = select([slice].iter(), &port(), Family::V4, &Fenced::of(&settings).fence(&settings, &[]));
            let zones: Vec<_> = selection.zones.iter().map(|hint| (hint.zone.as_str(), hint.backends.as_slice())).collect();
            assert_eq!(zones, expected, "{sentence}");
        }
    }

    /// The rule of kube-proxy as its documentation states it, without optimisations.
    fn naive(endpoints: &[EndpointSpec], zone: &str) -> BTreeSet<IpAddr> {
        let addresses = |wanted: &dyn Fn(&EndpointSpec) -> bool| -> BTreeSet<IpAddr> {
            endpoints.iter().filter(|e| wanted(e)).map(|e| e.address).collect()
        };
        let ready: Vec<_> = endpoints.iter().filter(|e| e.ready).collect();
        let names_zone = |e: &EndpointSpec| e.zones.iter().any(|hint| **hint == *zone);
        let by_zone = !ready.is_empty() && ready.iter().all(|e| !e.zones.is_empty()) && ready.iter().any(|e| names_zone(e));
        let cluster = addresses(&|e| e.ready && (!by_zone || names_zone(e)));
        if cluster.is_empty() { addresses(&|e| e.serving && e.terminating) } else { cluster }
    }

    proptest::proptest! {
        #[test]
        fn a_gateway_in_any_zone_uses_what_kube_proxy_would(
            list in proptest::collection::vec(("r?s?t?", "(a|b|a,b)?"), 0..6),
            zone in "a|b|c",
        ) {
            let one = |(last, (conditions, zones)): (u8, &(String, String))| hinted(&format!("{last}{conditions} {zones}"));
            let endpoints: Vec<EndpointSpec> = (1..).zip(&list).map(one).collect();
            let slice = slice(&[("http", Protocol::Tcp, 8080)], &endpoints);
            let settings = settings();
            let fenced = Fenced::of(&settings);
            let Selection { backends, zones, .. } = select([slice].iter(), &port(), Family::V4, &fenced.fence(&settings, &[]));
            let near = zones.iter().find(|hint| hint.zone == zone);
            let takes_new = (0..).zip(&backends).filter(|(_, backend)| backend.state == BackendState::Active);
            let used = takes_new.filter(|(place, _)| near.is_none_or(|hint| hint.backends.contains(place)));
            let used: BTreeSet<IpAddr> = used.map(|(_, backend)| backend.address.ip()).collect();
            proptest::prop_assert_eq!(used, naive(&endpoints, &zone));
        }
    }

    #[test]
    fn a_zone_with_only_forbidden_endpoints_uses_those_of_other_zones() {
        let fenced = EndpointSpec { address: [127, 0, 0, 1].into(), ..hinted("1rs a") };
        let slice = slice(&[("http", Protocol::Tcp, 8080)], &[fenced, hinted("2rs b")]);
        let settings = settings();
        let selection = select([slice].iter(), &port(), Family::V4, &Fenced::of(&settings).fence(&settings, &[]));
        assert_eq!(selection.zones, [ZoneBackends { zone: "b".to_owned(), backends: vec![0] }]);
    }

    #[test]
    fn ports_match_by_name_and_protocol() {
        let rows = [("http", Protocol::Udp), ("", Protocol::Tcp), ("https", Protocol::Tcp)];
        for (name, protocol) in rows {
            assert!(selected(&[slice(&[(name, protocol, 8080)], &[endpoint(1, "rs")])]).is_empty(), "{name} {protocol}");
        }
    }

    #[test]
    fn a_named_target_port_may_have_another_number_in_each_slice() {
        let one = slice(&[("http", Protocol::Tcp, 8080)], &[endpoint(1, "rs")]);
        let two = slice(&[("http", Protocol::Tcp, 9090)], &[endpoint(2, "rs")]);
        assert_eq!(selected(&[one, two]), ["10.0.0.1:8080", "10.0.0.2:9090"]);
    }

    #[test]
    fn of_two_equal_endpoints_the_one_that_does_not_terminate_counts() {
        let terminating = slice(&[("http", Protocol::Tcp, 8080)], &[endpoint(1, "st")]);
        let staying = slice(&[("http", Protocol::Tcp, 8080)], &[endpoint(1, "rs")]);
        assert_eq!(selected(&[terminating.clone(), staying.clone()]), ["10.0.0.1:8080"]);
        assert_eq!(selected(&[staying, terminating]), ["10.0.0.1:8080"]);
    }

    #[test]
    fn slices_of_the_other_family_are_not_used() {
        let mut other = slice(&[("http", Protocol::Tcp, 8080)], &[endpoint(1, "rs")]);
        other.family = Family::V6;
        assert!(selected(&[other]).is_empty());
    }

    #[test]
    fn the_fence_names_the_excluded_addresses() {
        let mut settings = settings();
        settings.cluster_cidrs = vec!["10.96.0.0/16".parse().unwrap()];
        settings.profile = vec!["10.0.0.3".parse().unwrap()].into();
        let vips = ["203.0.113.7".parse().unwrap()];
        let rows = [
            ("127.0.0.1", "loopback"),
            ("169.254.169.254", "link-local"),
            ("fe80::1", "link-local"),
            ("224.0.0.1", "multicast"),
            ("0.0.0.0", "unspecified"),
            ("0.1.2.3", "this network"),
            ("255.255.255.255", "broadcast"),
            ("::ffff:127.0.0.1", "IPv4"),
            ("10.0.0.3", "gateway"),
            ("192.0.2.100", "pool default"),
            ("203.0.113.7", "VIP"),
            ("10.96.0.1", "clusterCIDRs"),
        ];
        for (address, expected) in rows {
            let why = Fenced::of(&settings).fence(&settings, &vips).refuses(address.parse().unwrap()).unwrap();
            assert!(why.contains(expected), "{address}: {why}");
        }
        settings.backends_allowed = Some(vec!["10.0.0.0/8".parse().unwrap()]);
        let fenced = Fenced::of(&settings);
        let fence = fenced.fence(&settings, &vips);
        assert_eq!(fence.refuses("10.0.0.1".parse().unwrap()), None);
        assert!(fence.refuses("172.16.0.1".parse().unwrap()).unwrap().contains("backends.allowed"));
    }
}
