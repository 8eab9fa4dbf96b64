//! Conversions between `sluice.v1` messages and the domain types, and the messages for a changed state.
//!
//! Invariant: a domain value converted from a message satisfies every rule that its type documents (ordered backends,
//! one family per port, known words), so no other module checks again. If a message of a newer version uses a feature
//! that this program does not know, only that Service fails, not the whole stream or file, whose readers put a
//! [`refused_service`] in its place. Not here: the stream and the file.

use std::time::Duration;

use ipnet::IpNet;
use prost::Message;
use sha2::{Digest, Sha256};

mod arbitration;
mod backends;
mod changes;
mod error;
mod fields;
mod fleet_status;
mod gateway_profile;
mod membership;
mod refusal;

pub use backends::{node_set, node_sets};
pub use changes::{difference, difference_by_hashes, full};
pub use error::ConvertError;
pub use fields::{address, address_bytes, service_name};
pub use fleet_status::fleet_status;
pub use gateway_profile::{profile, with_profile};
pub use membership::membership;
pub use refusal::{read_reported_refusal, refused_service, reported_refusal};

use fields::{address_of, family, family_number, milliseconds, optional_duration, optional_port, port};

use crate::{
    AddressRange, AffinityScope, Announce, Backend, BackendState, EarlierBackends, Family, Generation, HealthCheck,
    InitialHealth, MaglevSpec, Mode, NodeSets, Pool, PoolBgp, Protocol, ProxyProtocol, Refusal, Service, ServicePort,
    StatusRanges, ZoneBackends, limits, v1,
};

/// Bytes of the content hash of a Service: the probability of a collision among 65,536 Services is 2^-97.
const HASH_BYTES: usize = 16;

/// Follows the mode of a Service with a PROXY header.
const PROXY_PROTOCOL_SUFFIX: &str = "+proxy-protocol";

/// The content hash of a Service: the first 16 bytes of the SHA-256 of its encoding with `hash` empty.
#[must_use]
pub fn hash(service: &v1::Service) -> Vec<u8> {
    let digest = if service.hash.is_empty() {
        Sha256::digest(service.encode_to_vec())
    } else {
        Sha256::digest(v1::Service { hash: Vec::new(), ..service.clone() }.encode_to_vec())
    };
    digest[..HASH_BYTES].to_vec()
}

impl From<&Generation> for v1::Generation {
    fn from(generation: &Generation) -> Self {
        Self { epoch: generation.epoch.clone(), counter: generation.counter }
    }
}

impl From<v1::Generation> for Generation {
    fn from(message: v1::Generation) -> Self {
        Self { epoch: message.epoch, counter: message.counter }
    }
}

impl From<&Pool> for v1::Pool {
    fn from(pool: &Pool) -> Self {
        let announce = match pool.announce {
            Announce::L2 => v1::Announce::L2,
            Announce::Routed => v1::Announce::Routed,
        };
        let range = |r: &AddressRange| v1::AddressRange { first: address_bytes(r.first()), last: address_bytes(r.last()) };
        let bgp = (pool.bgp != PoolBgp::default()).then(|| v1::Bgp::from(&pool.bgp));
        Self { name: pool.name.clone(), ranges: pool.ranges.iter().map(range).collect(), announce: announce.into(), bgp }
    }
}

impl TryFrom<v1::Pool> for Pool {
    type Error = ConvertError;

    fn try_from(message: v1::Pool) -> Result<Self, ConvertError> {
        let announce = match v1::Announce::try_from(message.announce) {
            Ok(v1::Announce::L2) => Announce::L2,
            Ok(v1::Announce::Routed) => Announce::Routed,
            Ok(v1::Announce::Unspecified) | Err(_) => {
                return Err(ConvertError::Announce { pool: message.name, found: message.announce });
            }
        };
        let range = |r: &v1::AddressRange| {
            AddressRange::new(address(&r.first)?, address(&r.last)?)
                .map_err(|error| ConvertError::Range { pool: message.name.clone(), error })
        };
        let ranges: Vec<_> = message.ranges.iter().map(range).collect::<Result<_, _>>()?;
        let bgp = pool_bgp(&message.name, message.bgp.unwrap_or_default(), &ranges)?;
        Ok(Self { name: message.name, ranges, announce, bgp })
    }
}

impl From<&PoolBgp> for v1::Bgp {
    fn from(bgp: &PoolBgp) -> Self {
        Self {
            communities: bgp.communities.iter().map(ToString::to_string).collect(),
            med: bgp.med,
            local_pref: bgp.local_pref,
            aggregation_length: bgp.aggregation_length.into(),
            aggregation_length_v6: bgp.aggregation_length_v6.into(),
        }
    }
}

/// Converts how the VIPs of `pool`, which has `ranges`, are announced by BGP.
fn pool_bgp(pool: &str, message: v1::Bgp, ranges: &[AddressRange]) -> Result<PoolBgp, ConvertError> {
    let community = |text: &String| {
        text.parse().map_err(|error| ConvertError::Community { pool: pool.to_owned(), found: text.clone(), error })
    };
    let default = PoolBgp::default();
    let length = |found: u32, default: u8| if found == 0 { default } else { u8::try_from(found).unwrap_or(u8::MAX) };
    let bgp = PoolBgp {
        communities: message.communities.iter().map(community).collect::<Result<_, _>>()?,
        med: message.med,
        local_pref: message.local_pref,
        aggregation_length: length(message.aggregation_length, default.aggregation_length),
        aggregation_length_v6: length(message.aggregation_length_v6, default.aggregation_length_v6),
    };
    bgp.check(ranges).map_err(|error| ConvertError::Aggregation { pool: pool.to_owned(), error: Box::new(error) })?;
    Ok(bgp)
}

impl From<&Service> for v1::Service {
    /// The message, including its content hash.
    fn from(service: &Service) -> Self {
        let mut message = Self {
            namespace: service.name.namespace.clone(),
            name: service.name.name.clone(),
            mode: mode_text(service),
            target: service.target.as_str().to_owned(),
            scheduler: service.scheduler.as_str().to_owned(),
            health: Some(v1::HealthCheck::from(&service.health)),
            drain_timeout_ms: milliseconds(service.drain_timeout),
            refusal: service.refusal.as_ref().map(v1::Refusal::from),
            ports: service.ports.iter().map(v1::ServicePort::from).collect(),
            hash: Vec::new(),
            affinity_timeout_ms: service.affinity.map_or(0, milliseconds),
            source_ranges: service.source_ranges.as_deref().map(source_ranges_message),
            idle_timeout_ms: service.idle_timeout.map_or(0, milliseconds),
            local: service.local,
            affinity_of_service: service.affinity_scope == AffinityScope::Service,
        };
        message.hash = hash(&message);
        message
    }
}

impl TryFrom<v1::Service> for Service {
    type Error = ConvertError;

    /// Converts a Service whose ports refer to no node sets.
    fn try_from(message: v1::Service) -> Result<Self, ConvertError> {
        service(message, &NodeSets::new())
    }
}

/// Converts a Service whose ports may refer to `sets`.
///
/// # Errors
/// When the message is not a valid Service.
pub fn service(message: v1::Service, sets: &NodeSets) -> Result<Service, ConvertError> {
    let mode = message.mode.strip_suffix(PROXY_PROTOCOL_SUFFIX).unwrap_or(&message.mode);
    let mode: Mode = mode.parse().map_err(ConvertError::Mode)?;
    Ok(Service {
        name: service_name(&format!("{}/{}", message.namespace, message.name))?,
        mode,
        target: message.target.parse().map_err(ConvertError::Target)?,
        scheduler: message.scheduler.parse().map_err(ConvertError::Scheduler)?,
        health: message.health.ok_or(ConvertError::HealthCheckMissing)?.try_into()?,
        drain_timeout: Duration::from_millis(message.drain_timeout_ms),
        affinity: optional_duration(message.affinity_timeout_ms),
        affinity_scope: if message.affinity_of_service { AffinityScope::Service } else { AffinityScope::Port },
        source_ranges: message.source_ranges.as_ref().map(|ranges| networks(&ranges.prefixes)).transpose()?,
        idle_timeout: optional_duration(message.idle_timeout_ms),
        local: message.local,
        refusal: message.refusal.map(Refusal::try_from).transpose()?,
        ports: message.ports.into_iter().map(|port| service_port(port, mode, sets)).collect::<Result<_, _>>()?,
    })
}

/// The mode as it is sent: a gateway that does not know PROXY headers must not forward to backends that expect them, and
/// an unknown mode is what makes it refuse the Service.
fn mode_text(service: &Service) -> String {
    let has_header = service.ports.iter().any(|port| port.proxy_protocol.is_some());
    format!("{}{}", service.mode, if has_header { PROXY_PROTOCOL_SUFFIX } else { "" })
}

/// Networks as they are sent.
#[must_use]
pub fn prefixes(nets: &[IpNet]) -> Vec<v1::Prefix> {
    nets.iter().map(|net| v1::Prefix { address: address_bytes(net.addr()), length: net.prefix_len().into() }).collect()
}

/// Networks as they were received.
///
/// # Errors
/// If one of them is none.
pub fn networks(prefixes: &[v1::Prefix]) -> Result<Vec<IpNet>, ConvertError> {
    let network = |prefix: &v1::Prefix| {
        let length = u8::try_from(prefix.length).map_err(|_| ConvertError::PrefixLength(prefix.length))?;
        IpNet::new(address(&prefix.address)?, length).map_err(|_| ConvertError::PrefixLength(prefix.length))
    };
    prefixes.iter().map(network).collect()
}

fn source_ranges_message(ranges: &[IpNet]) -> v1::SourceRanges {
    v1::SourceRanges { prefixes: prefixes(ranges) }
}

impl From<&HealthCheck> for v1::HealthCheck {
    fn from(health: &HealthCheck) -> Self {
        Self {
            probe: health.probe.as_str().to_owned(),
            port: health.port.map_or(0, u32::from),
            interval_ms: milliseconds(health.interval),
            timeout_ms: milliseconds(health.timeout),
            rise: health.rise,
            fall: health.fall,
            fail_open: health.fail_open,
            initially_unhealthy: health.initial == InitialHealth::Unhealthy,
            node_health_port: health.node_health_port.map_or(0, u32::from),
            path: health.path.clone().unwrap_or_default(),
            host: health.host.clone().unwrap_or_default(),
            status: if health.status == StatusRanges::default() { String::new() } else { health.status.to_string() },
            tls_verify: health.tls_verify,
        }
    }
}

impl TryFrom<v1::HealthCheck> for HealthCheck {
    type Error = ConvertError;

    fn try_from(message: v1::HealthCheck) -> Result<Self, ConvertError> {
        let numbers = [
            ("interval", message.interval_ms),
            ("timeout", message.timeout_ms),
            ("rise", message.rise.into()),
            ("fall", message.fall.into()),
        ];
        if let Some((field, _)) = numbers.into_iter().find(|(_, value)| *value == 0) {
            return Err(ConvertError::HealthCheckZero(field));
        }
        Ok(Self {
            probe: message.probe.parse().map_err(ConvertError::Probe)?,
            port: optional_port("health check port", message.port)?,
            path: Some(message.path).filter(|path| !path.is_empty()),
            host: Some(message.host).filter(|host| !host.is_empty()),
            status: status_ranges(&message.status)?,
            tls_verify: message.tls_verify,
            node_health_port: optional_port("node health port", message.node_health_port)?,
            interval: Duration::from_millis(message.interval_ms),
            timeout: Duration::from_millis(message.timeout_ms),
            rise: message.rise,
            fall: message.fall,
            fail_open: message.fail_open,
            initial: if message.initially_unhealthy { InitialHealth::Unhealthy } else { InitialHealth::Healthy },
        })
    }
}

fn status_ranges(text: &str) -> Result<StatusRanges, ConvertError> {
    if text.is_empty() { Ok(StatusRanges::default()) } else { text.parse().map_err(ConvertError::Status) }
}

impl From<&ServicePort> for v1::ServicePort {
    fn from(port: &ServicePort) -> Self {
        let backend = |b: &Backend| v1::Backend {
            address: address_bytes(b.address.ip()),
            port: b.address.port().into(),
            weight: b.weight.into(),
            draining: b.state == BackendState::Draining,
        };
        let zone = |z: &ZoneBackends| v1::ZoneBackends { zone: z.zone.clone(), backends: z.backends.clone() };
        let earlier = |e: &EarlierBackends| v1::EarlierBackends {
            until_s: e.until_s,
            maglev_size: e.maglev_size,
            backends: e.backends.iter().map(backend).collect(),
        };
        Self {
            name: port.name.clone(),
            protocol: port.protocol.number().into(),
            family: family_number(port.family),
            vips: port.vips.iter().copied().map(address_bytes).collect(),
            port: port.port.into(),
            node_port: port.node_port.map_or(0, u32::from),
            maglev_size: port.maglev.size,
            maglev_seed: port.maglev.seed,
            maglev_hash_version: port.maglev.hash_version,
            backends: port.backends.iter().map(backend).collect(),
            zones: port.zones.iter().map(zone).collect(),
            app_protocol: port.app_protocol.clone().unwrap_or_default(),
            node_set: port.nodes.as_ref().map(|at| at.set.name.clone()).unwrap_or_default(),
            port_at_nodes: port.nodes.as_ref().map_or(0, |at| at.port.into()),
            earlier: port.earlier.iter().map(earlier).collect(),
            proxy_protocol: port.proxy_protocol.map(|version| version.as_str().to_owned()).unwrap_or_default(),
        }
    }
}

fn service_port(message: v1::ServicePort, mode: Mode, sets: &NodeSets) -> Result<ServicePort, ConvertError> {
    let family = family(message.family)?;
    let protocol = u8::try_from(message.protocol).ok().and_then(Protocol::from_number);
    if !limits::MAGLEV_SIZES.contains(&message.maglev_size) {
        return Err(ConvertError::MaglevSize(message.maglev_size));
    }
    if message.maglev_hash_version != limits::MAGLEV_HASH_VERSION {
        return Err(ConvertError::MaglevHashVersion(message.maglev_hash_version));
    }
    let maglev = MaglevSpec { size: message.maglev_size, seed: message.maglev_seed, hash_version: message.maglev_hash_version };
    let family_of_backends = (!mode.is_tunnel()).then_some(family);
    let nodes = backends::nodes_at(&message, family_of_backends, sets)?;
    let listed = backends::listed(family_of_backends, &message.backends)?;
    let earlier = message.earlier.iter().map(|one| earlier(one, family_of_backends)).collect::<Result<Vec<_>, _>>()?;
    let protocol = protocol.ok_or(ConvertError::Protocol(message.protocol))?;
    Ok(ServicePort {
        name: message.name,
        protocol,
        family,
        vips: message.vips.iter().map(|bytes| address_of(Some(family), bytes)).collect::<Result<_, _>>()?,
        port: port("port", message.port)?,
        node_port: optional_port("node port", message.node_port)?,
        maglev,
        zones: message.zones.into_iter().map(|zone| backends::of_zone(zone, listed.len())).collect::<Result<_, _>>()?,
        backends: listed,
        nodes,
        app_protocol: Some(message.app_protocol).filter(|text| !text.is_empty()),
        earlier: earlier.into_iter().take(limits::EARLIER_TABLES_MAX).collect(),
        proxy_protocol: proxy_protocol(&message.proxy_protocol, mode, protocol)?,
    })
}

fn proxy_protocol(text: &str, mode: Mode, protocol: Protocol) -> Result<Option<ProxyProtocol>, ConvertError> {
    if text.is_empty() {
        return Ok(None);
    }
    let version: ProxyProtocol = text.parse().map_err(ConvertError::ProxyProtocol)?;
    let fits = mode.is_two_way() && version.fits(protocol);
    if fits { Ok(Some(version)) } else { Err(ConvertError::ProxyProtocolUnfit { version, mode, protocol }) }
}

fn earlier(message: &v1::EarlierBackends, family: Option<Family>) -> Result<EarlierBackends, ConvertError> {
    let &v1::EarlierBackends { until_s, maglev_size, .. } = message;
    if !limits::MAGLEV_SIZES.contains(&maglev_size) {
        return Err(ConvertError::MaglevSize(maglev_size));
    }
    Ok(EarlierBackends { until_s, maglev_size, backends: backends::listed(family, &message.backends)? })
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, SocketAddr};
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::{Community, Probe, Reason, Scheduler, ServiceName, Services, State, Target};

    /// A newer reason reaches gateways as one of these.
    const REASONS_OF_EARLIER_GATEWAYS: &[Reason] = &[Reason::Refused, Reason::Conflict, Reason::Exhausted, Reason::Unsupported];

    fn any_address(family: Family) -> BoxedStrategy<IpAddr> {
        match family {
            Family::V4 => any::<[u8; 4]>().prop_map(IpAddr::from).boxed(),
            Family::V6 => any::<[u8; 16]>().prop_map(IpAddr::from).boxed(),
        }
    }

    fn any_backends(family: Family) -> impl Strategy<Value = Vec<Backend>> {
        let one = (any_address(family), 1u16.., any::<u16>(), any::<bool>());
        prop::collection::vec(one, 0..5).prop_map(|list| {
            let backend = |(ip, port, weight, draining)| Backend {
                address: SocketAddr::new(ip, port),
                weight,
                state: if draining { BackendState::Draining } else { BackendState::Active },
            };
            let mut backends: Vec<Backend> = list.into_iter().map(backend).collect();
            backends.sort_by_key(|b| b.address);
            backends.dedup_by_key(|b| b.address);
            backends
        })
    }

    fn any_port() -> impl Strategy<Value = ServicePort> {
        let family = prop::sample::select(vec![Family::V4, Family::V6]);
        let protocol = prop::sample::select(vec![Protocol::Tcp, Protocol::Udp, Protocol::Sctp]);
        family.prop_flat_map(move |family| {
            let vips = prop::collection::vec(any_address(family), 0..3);
            let ports = (1u16.., prop::option::of(1u16..));
            let maglev = (prop::sample::select(limits::MAGLEV_SIZES.to_vec()), any::<u64>());
            ("[a-z]{0,4}", protocol.clone(), vips, ports, maglev, any_backends(family)).prop_map(
                move |(name, protocol, vips, (port, node_port), (size, seed), backends)| ServicePort {
                    app_protocol: Some(format!("{name}x")).filter(|_| port % 2 == 0),
                    zones: (0..u32::try_from(backends.len()).unwrap())
                        .map(|place| ZoneBackends { zone: format!("z{place}"), backends: vec![place] })
                        .collect(),
                    name,
                    protocol,
                    family,
                    vips,
                    port,
                    node_port,
                    maglev: MaglevSpec { size, seed, hash_version: limits::MAGLEV_HASH_VERSION },
                    earlier: [EarlierBackends { until_s: seed >> 1, maglev_size: 251, backends: backends.clone() }]
                        .into_iter()
                        .filter(|_| port % 3 == 0)
                        .collect(),
                    backends,
                    nodes: None,
                    proxy_protocol: None,
                },
            )
        })
    }

    /// The port with a PROXY header where its name and mode allow one.
    fn with_header(mode: Mode, port: ServicePort) -> ServicePort {
        let version = ProxyProtocol::ALL[port.name.len() % 2];
        let proxy_protocol = Some(version).filter(|_| mode.is_two_way() && version.fits(port.protocol));
        ServicePort { proxy_protocol, ..port }
    }

    fn any_health() -> impl Strategy<Value = HealthCheck> {
        let times = (1u64..1 << 40, 1u64..1 << 40);
        let ports = (prop::option::of(1u16..), prop::option::of(1u16..));
        let status = (100u16..600, 100u16..600).prop_map(|(one, two)| format!("{}-{}", one.min(two), one.max(two)));
        let http = (prop::option::of("/[a-z]{0,4}"), prop::option::of("[a-z]{1,4}"), status, any::<bool>());
        let initial = prop::sample::select(InitialHealth::ALL);
        (prop::sample::select(Probe::ALL), ports, times, 1u32.., 1u32.., (any::<bool>(), initial), http).prop_map(
            |(probe, (port, node_health_port), (interval, timeout), rise, fall, (fail_open, initial), http)| HealthCheck {
                probe,
                port,
                path: http.0,
                host: http.1,
                status: http.2.parse().unwrap(),
                tls_verify: http.3,
                node_health_port,
                interval: Duration::from_millis(interval),
                timeout: Duration::from_millis(timeout),
                rise,
                fall,
                fail_open,
                initial,
            },
        )
    }

    fn any_net() -> impl Strategy<Value = IpNet> {
        let of = |family, bits: u8| (any_address(family), 0..=bits).prop_map(|(ip, len)| IpNet::new(ip, len).unwrap());
        prop_oneof![of(Family::V4, 32), of(Family::V6, 128)]
    }

    fn any_duration() -> impl Strategy<Value = Option<Duration>> {
        prop::option::of((1u64..1 << 40).prop_map(Duration::from_millis))
    }

    prop_compose! {
        fn any_service()(
            name in "[a-z]{1,3}",
            mode in prop::sample::select(Mode::ALL),
            target in prop::sample::select(Target::ALL),
            scheduler in prop::sample::select(Scheduler::ALL),
            health in any_health(),
            drain_ms in 0u64..1 << 40,
            refusal in prop::option::of((prop::sample::select(REASONS_OF_EARLIER_GATEWAYS), ".*")),
            ports in prop::collection::vec(any_port(), 0..3),
            (affinity, idle_timeout, local) in (any_duration(), any_duration(), any::<bool>()),
            source_ranges in prop::option::of(prop::collection::vec(any_net(), 0..4)),
            affinity_scope in prop::sample::select(AffinityScope::ALL),
        ) -> Service {
            let refusal = refusal.map(|(reason, message)| Refusal { reason, message });
            let ports = ports.into_iter().map(|port| with_header(mode, port)).collect();
            let drain_timeout = Duration::from_millis(drain_ms);
            Service {
                name: ServiceName::new("default", &name),
                mode,
                target,
                scheduler,
                health,
                drain_timeout,
                affinity,
                affinity_scope,
                source_ranges,
                idle_timeout,
                local,
                refusal,
                ports,
            }
        }
    }

    fn any_state() -> impl Strategy<Value = State> {
        (prop::collection::vec(any_service(), 0..6), any::<u64>()).prop_map(|(services, counter)| State {
            generation: Generation { epoch: "e".to_owned(), counter },
            services: services.into_iter().map(|s| (s.name.clone(), Arc::new(s))).collect(),
            pools: vec![Pool {
                name: "default".to_owned(),
                ranges: vec!["192.0.2.100-192.0.2.199".parse().unwrap(), "2001:db8::1:0/112".parse().unwrap()],
                announce: Announce::Routed,
                bgp: PoolBgp {
                    communities: vec![Community::Standard(65000, 100), Community::Large(65000, 1, 2)],
                    med: Some(0),
                    aggregation_length_v6: 112,
                    ..PoolBgp::default()
                },
            }],
        })
    }

    /// Applies a response like a gateway, in the simplest form.
    fn applied(state: &State, response: v1::WatchResponse) -> State {
        let mut services = if response.full { Services::new() } else { state.services.clone() };
        for name in &response.removed {
            services.remove(&service_name(name).unwrap());
        }
        for message in response.services {
            let service = Service::try_from(message).unwrap();
            services.insert(service.name.clone(), Arc::new(service));
        }
        let pools = response.pools.into_iter().map(|p| Pool::try_from(p).unwrap()).collect();
        State { generation: response.generation.unwrap().into(), services, pools }
    }

    proptest! {
        #[test]
        fn a_service_survives_the_wire(service in any_service()) {
            let bytes = v1::Service::from(&service).encode_to_vec();
            let message = v1::Service::decode(&*bytes).unwrap();
            prop_assert_eq!(message.hash.len(), HASH_BYTES);
            prop_assert_eq!(&message.hash, &hash(&message));
            prop_assert_eq!(Service::try_from(message).unwrap(), service);
        }

        #[test]
        fn full_and_both_differences_lead_to_the_new_state(old in any_state(), new in any_state()) {
            prop_assert_eq!(&applied(&old, full(&new)), &new);
            prop_assert_eq!(&applied(&old, difference(&old, &new)), &new);
            let hashes = full(&old).services.into_iter().map(|s| (format!("{}/{}", s.namespace, s.name), s.hash)).collect();
            prop_assert_eq!(&applied(&old, difference_by_hashes(&hashes, &new)), &new);
        }

        #[test]
        fn what_did_not_change_is_not_sent_again(state in any_state()) {
            let again = difference(&state, &state.clone());
            prop_assert!(again.services.is_empty() && again.removed.is_empty() && !again.full);
        }
    }

    fn good_port() -> v1::ServicePort {
        v1::ServicePort {
            protocol: 6,
            family: 4,
            vips: vec![vec![192, 0, 2, 100]],
            port: 80,
            maglev_size: 251,
            maglev_hash_version: 1,
            backends: vec![v1::Backend { address: vec![10, 0, 0, 11], port: 8080, weight: 1, draining: false }],
            ..v1::ServicePort::default()
        }
    }

    #[test]
    fn each_wrong_port_has_its_own_error() {
        let with = |change: fn(&mut v1::ServicePort)| {
            let mut message = good_port();
            change(&mut message);
            service_port(message, Mode::Nat, &NodeSets::new()).unwrap_err()
        };
        assert!(service_port(good_port(), Mode::Nat, &NodeSets::new()).is_ok());
        let other_family = v1::Backend { address: vec![0xfd; 16], port: 80, weight: 1, draining: false };
        let to_node = v1::ServicePort { backends: vec![other_family], ..good_port() };
        assert!(service_port(to_node.clone(), Mode::Gue, &NodeSets::new()).is_ok(), "a tunnel may lead to the other family");
        assert!(matches!(service_port(to_node, Mode::Dnat, &NodeSets::new()), Err(ConvertError::WrongFamily { .. })));
        assert_eq!(with(|p| p.protocol = 1), ConvertError::Protocol(1));
        assert_eq!(with(|p| p.family = 5), ConvertError::Family(5));
        assert_eq!(with(|p| p.vips[0].push(0)), ConvertError::AddressBytes(5));
        assert!(matches!(with(|p| p.vips[0] = vec![0; 16]), ConvertError::WrongFamily { .. }));
        assert_eq!(with(|p| p.port = 0), ConvertError::Port { field: "port", found: 0 });
        assert_eq!(with(|p| p.node_port = 65_536), ConvertError::Port { field: "node port", found: 65_536 });
        assert_eq!(with(|p| p.maglev_size = 250), ConvertError::MaglevSize(250));
        assert_eq!(with(|p| p.maglev_hash_version = 2), ConvertError::MaglevHashVersion(2));
        assert_eq!(with(|p| p.backends[0].weight = 65_536), ConvertError::Weight(65_536));
        assert!(matches!(with(|p| "v3".clone_into(&mut p.proxy_protocol)), ConvertError::ProxyProtocol(_)));
        let headed = |text: &str, protocol| v1::ServicePort { proxy_protocol: text.to_owned(), protocol, ..good_port() };
        let unfit = [(headed("v2", 6), Mode::Dsr), (headed("v1", 17), Mode::Nat), (headed("v2", 132), Mode::Dnat)];
        for (port, mode) in unfit {
            let error = service_port(port, mode, &NodeSets::new()).unwrap_err();
            assert!(matches!(error, ConvertError::ProxyProtocolUnfit { .. }), "{error}");
        }
        assert!(service_port(headed("v2", 17), Mode::Nat, &NodeSets::new()).is_ok());
        let earlier = |maglev_size| vec![v1::EarlierBackends { maglev_size, ..v1::EarlierBackends::default() }];
        let of_size = v1::ServicePort { earlier: earlier(252), ..good_port() };
        assert_eq!(service_port(of_size, Mode::Gue, &NodeSets::new()), Err(ConvertError::MaglevSize(252)));
        let many = v1::ServicePort { earlier: vec![earlier(251).remove(0); 9], ..good_port() };
        assert_eq!(service_port(many, Mode::Gue, &NodeSets::new()).unwrap().earlier.len(), limits::EARLIER_TABLES_MAX);
        assert_eq!(with(|p| p.backends = vec![p.backends[0].clone(); 6554]), ConvertError::TooManyBackends(6554));
        assert!(matches!(with(|p| p.backends = vec![p.backends[0].clone(); 2]), ConvertError::BackendOrder(_)));
    }

    #[test]
    fn a_gateway_that_does_not_know_the_proxy_protocol_does_not_know_the_mode() {
        let port = ServicePort {
            proxy_protocol: Some(ProxyProtocol::V2),
            ..service_port(good_port(), Mode::Nat, &NodeSets::new()).unwrap()
        };
        let service = Service::new(ServiceName::new("shop", "web"), vec![port]);
        let message = v1::Service::from(&service);
        assert!(message.mode.parse::<Mode>().is_err(), "{}", message.mode);
        assert_eq!(Service::try_from(message).unwrap(), service);
    }

    #[test]
    fn each_wrong_service_has_its_own_error() {
        let good = || v1::Service {
            namespace: "default".to_owned(),
            name: "web".to_owned(),
            mode: "nat".to_owned(),
            target: "endpoint".to_owned(),
            scheduler: "maglev".to_owned(),
            health: Some(v1::HealthCheck::from(&HealthCheck::default())),
            ..v1::Service::default()
        };
        let with = |change: fn(&mut v1::Service)| {
            let mut message = good();
            change(&mut message);
            Service::try_from(message).unwrap_err()
        };
        assert!(Service::try_from(good()).is_ok());
        assert!(matches!(with(|s| s.name.clear()), ConvertError::Name(_)));
        assert!(matches!(with(|s| "teleport".clone_into(&mut s.mode)), ConvertError::Mode(_)));
        assert!(matches!(with(|s| "moon".clone_into(&mut s.target)), ConvertError::Target(_)));
        assert!(matches!(with(|s| "dice".clone_into(&mut s.scheduler)), ConvertError::Scheduler(_)));
        assert_eq!(with(|s| s.health = None), ConvertError::HealthCheckMissing);
        assert!(matches!(with(|s| "telepathy".clone_into(&mut s.health.as_mut().unwrap().probe)), ConvertError::Probe(_)));
        assert_eq!(with(|s| s.health.as_mut().unwrap().fall = 0), ConvertError::HealthCheckZero("fall"));
        assert!(matches!(with(|s| s.refusal = Some(v1::Refusal::default())), ConvertError::Reason(_)));
    }

    #[test]
    fn each_wrong_pool_has_its_own_error() {
        let good = v1::Pool::from(&Pool {
            name: "p".to_owned(),
            ranges: vec!["10.0.0.1-10.0.0.9".parse().unwrap()],
            announce: Announce::L2,
            bgp: PoolBgp::default(),
        });
        let unknown = v1::Pool { announce: 9, ..good.clone() };
        assert_eq!(Pool::try_from(unknown), Err(ConvertError::Announce { pool: "p".to_owned(), found: 9 }));
        let with = |bgp| Pool::try_from(v1::Pool { bgp: Some(bgp), ..good.clone() });
        let community = v1::Bgp { communities: vec!["1".to_owned()], ..v1::Bgp::default() };
        assert!(matches!(with(community), Err(ConvertError::Community { .. })));
        for aggregation_length in [300, 24] {
            let aggregation = v1::Bgp { aggregation_length, ..v1::Bgp::default() };
            assert!(matches!(with(aggregation), Err(ConvertError::Aggregation { .. })), "{aggregation_length}");
        }
        assert_eq!(with(v1::Bgp { aggregation_length: 32, ..v1::Bgp::default() }).unwrap().bgp, PoolBgp::default());
        let mut reversed = good;
        reversed.ranges[0].last = vec![10, 0, 0, 0];
        assert!(matches!(Pool::try_from(reversed), Err(ConvertError::Range { .. })));
    }
}
