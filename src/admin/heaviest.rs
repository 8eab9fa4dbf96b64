//! The flows and clients with most traffic, from samples of packets: Space-Saving (Metwally, Agrawal, El Abbadi 2005).
//!
//! Invariant: memory is bounded, whatever arrives. A summary of N entries misses nobody who sends more than one part in N
//! of the sampled bytes, and what it reports of anyone is at most what was sampled of it. Clients are counted at each
//! frontend apart, so that a filter by Service finds what they send to it.
//! Not here: the samples, which the workers take (`dataplane::forward`).

use std::collections::hash_map::Entry as Place;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, SocketAddr};

use dataplane::Snapshot;
use dataplane::flow::{FlowView, SampledPacket};
use proto::v1;

use super::flows::{is_of, protocol, service_of};

/// Entries of a summary: whoever has a thousandth of the bytes is in it. 1,024 entries of 0.3 KB.
const ENTRIES: usize = 1_024;

/// A flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FlowKey {
    protocol: u8,
    client: SocketAddr,
    frontend: SocketAddr,
}

/// A client at a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ClientKey {
    protocol: u8,
    client: IpAddr,
    frontend: SocketAddr,
}

/// Sums of samples.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    bytes: u64,
    packets: u64,
    samples: u64,
}

/// What was sampled under one key.
#[derive(Clone, Debug)]
struct Entry<K> {
    key: K,
    /// Bytes that decide whether the entry is kept: those of the key, and of others that had the entry before.
    weight: u64,
    sums: Sums,
    last: FlowView,
}

/// A summary.
#[derive(Clone, Debug)]
struct SpaceSaving<K> {
    entries: Vec<Entry<K>>,
    positions: HashMap<K, usize>,
    by_weight: BTreeSet<(u64, usize)>,
}

impl<K: Copy + Eq + Hash> SpaceSaving<K> {
    fn new() -> Self {
        Self { entries: Vec::new(), positions: HashMap::new(), by_weight: BTreeSet::new() }
    }

    fn add(&mut self, key: K, packet: SampledPacket, flow: FlowView) {
        let packets = u64::from(packet.stands_for);
        let bytes = packets * u64::from(packet.packet_len);
        let position = self.positions.get(&key).copied().unwrap_or_else(|| self.entry_for(key, flow));
        let Some(entry) = self.entries.get_mut(position) else { return };
        self.by_weight.remove(&(entry.weight, position));
        entry.weight += bytes;
        entry.sums.add(Sums { bytes, packets, samples: 1 });
        entry.last = flow;
        self.by_weight.insert((entry.weight, position));
    }

    /// A new entry, or that with the least weight, which it keeps.
    fn entry_for(&mut self, key: K, flow: FlowView) -> usize {
        let new = Entry { key, weight: 0, sums: Sums::default(), last: flow };
        let smallest = self.by_weight.first().filter(|_| self.entries.len() >= ENTRIES).copied();
        let position = match smallest {
            Some((weight, position)) => {
                let former = std::mem::replace(&mut self.entries[position], Entry { weight, ..new });
                self.positions.remove(&former.key);
                position
            }
            None => {
                self.entries.push(new);
                self.by_weight.insert((0, self.entries.len() - 1));
                self.entries.len() - 1
            }
        };
        self.positions.insert(key, position);
        position
    }
}

impl Sums {
    fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.packets += other.packets;
        self.samples += other.samples;
    }
}

/// What a client sends to a Service; an empty name if to several.
#[derive(Clone, Debug)]
struct ClientTraffic {
    client: IpAddr,
    service: String,
    sums: Sums,
}

/// One row for each client.
fn by_client(rows: impl Iterator<Item = ClientTraffic>) -> Vec<ClientTraffic> {
    let mut clients: HashMap<IpAddr, ClientTraffic> = HashMap::new();
    for row in rows {
        match clients.entry(row.client) {
            Place::Vacant(place) => _ = place.insert(row),
            Place::Occupied(mut place) => {
                let known = place.get_mut();
                known.sums.add(row.sums);
                if known.service != row.service {
                    known.service.clear();
                }
            }
        }
    }
    clients.into_values().collect()
}

/// The summaries of one interval.
#[derive(Clone, Debug)]
pub(super) struct HeaviestSummary {
    flows: SpaceSaving<FlowKey>,
    clients: SpaceSaving<ClientKey>,
}

impl HeaviestSummary {
    pub(super) fn new() -> Self {
        Self { flows: SpaceSaving::new(), clients: SpaceSaving::new() }
    }

    /// Adds a sampled packet.
    pub(super) fn add(&mut self, packet: SampledPacket, flow: FlowView) {
        let key = FlowKey { protocol: flow.protocol, client: flow.client, frontend: flow.frontend };
        self.flows.add(key, packet, flow);
        let key = ClientKey { protocol: flow.protocol, client: flow.client.ip(), frontend: flow.frontend };
        self.clients.add(key, packet, flow);
    }

    /// The rows of a request, of an interval of `seconds`.
    pub(super) fn rows(
        &self,
        request: &v1::ListHeaviestRequest,
        limit: usize,
        seconds: f64,
        snapshot: &Snapshot,
    ) -> v1::ListHeaviestResponse {
        let wanted = |name: &String| (!name.is_empty()).then_some(name.clone());
        let (service, namespace) = (wanted(&request.service), wanted(&request.namespace));
        let is_wanted = |found: &str| {
            let is_all = service.is_none() && namespace.is_none();
            is_all || is_of(found, service.as_deref(), namespace.as_deref())
        };
        let flows = self.flows.entries.iter().map(|entry| {
            let address = snapshot.backend(entry.last.backend).map_or(entry.last.backend_address, |backend| backend.address);
            v1::HeavyTraffic {
                protocol: protocol(entry.key.protocol),
                client: entry.key.client.to_string(),
                frontend: entry.key.frontend.to_string(),
                backend: address.to_string(),
                ..row(service_of(snapshot, entry.key.frontend, entry.key.protocol), entry.sums, seconds)
            }
        });
        let at_frontends = self.clients.entries.iter().filter_map(|Entry { key, sums, .. }| {
            let service = service_of(snapshot, key.frontend, key.protocol);
            is_wanted(&service).then_some(ClientTraffic { client: key.client, service, sums: *sums })
        });
        let clients = by_client(at_frontends).into_iter().map(|ClientTraffic { client, service, sums }| v1::HeavyTraffic {
            client: client.to_string(),
            ..row(service, sums, seconds)
        });
        let first = |rows: &mut dyn Iterator<Item = v1::HeavyTraffic>| {
            let mut rows: Vec<_> = rows.collect();
            rows.sort_by(|a, b| b.bits_per_second.cmp(&a.bits_per_second).then_with(|| a.client.cmp(&b.client)));
            rows.truncate(limit);
            rows
        };
        v1::ListHeaviestResponse {
            flows: first(&mut flows.filter(|row| is_wanted(&row.service))),
            clients: first(&mut { clients }),
            silent: Vec::new(),
        }
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // rates are positive, and far below 2^64
fn row(service: String, sums: Sums, seconds: f64) -> v1::HeavyTraffic {
    let rate = |count: u64| (count as f64 / seconds).round() as u64;
    v1::HeavyTraffic {
        service,
        packets_per_second: rate(sums.packets),
        bits_per_second: rate(sums.bytes * 8),
        samples: sums.samples,
        ..v1::HeavyTraffic::default()
    }
}

#[cfg(test)]
mod tests {
    use dataplane::flow::{BackendId, Direction, FlowMode, FlowState, Ticks};

    use super::*;

    fn flow(client: u32) -> FlowView {
        FlowView {
            protocol: 6,
            client: SocketAddr::new(IpAddr::from(client.to_be_bytes()), 5555),
            frontend: "192.0.2.100:80".parse().unwrap(),
            backend: BackendId::default(),
            backend_address: "10.0.0.11:8080".parse().unwrap(),
            snat: None,
            mode: FlowMode::Nat,
            state: FlowState::TcpEstablished,
            age: Ticks(0),
            idle: Ticks(0),
            shift: None,
        }
    }

    fn packet(packet_len: u16) -> SampledPacket {
        SampledPacket { direction: Direction::ToBackend, packet_len, stands_for: 10 }
    }

    #[test]
    fn who_sends_most_is_found_among_any_number_of_others_and_memory_is_bounded() {
        let mut summary = HeaviestSummary::new();
        for round in 0..20_000_u32 {
            // One heavy client among 20,000 that send one packet each, and one of middle weight.
            summary.add(packet(100), flow(0x0a00_0000 + round));
            if round % 10 == 0 {
                summary.add(packet(1_400), flow(0xc633_6407));
            }
            if round % 100 == 0 {
                summary.add(packet(1_400), flow(0xc633_6408));
            }
        }
        assert!(summary.flows.entries.len() <= ENTRIES && summary.clients.positions.len() <= ENTRIES);
        let inquiries = crate::worker_threads::inquiries::tests::without_workers();
        let rows = summary.rows(&v1::ListHeaviestRequest::default(), 2, 1.0, &inquiries.snapshot());
        let clients: Vec<_> = rows.clients.iter().map(|row| row.client.as_str()).collect();
        assert_eq!(clients, ["198.51.100.7", "198.51.100.8"]);
        let heaviest = &rows.flows[0];
        assert_eq!((heaviest.client.as_str(), heaviest.protocol.as_str()), ("198.51.100.7:5555", "tcp"));
        assert_eq!((heaviest.packets_per_second, heaviest.bits_per_second), (20_000, 20_000 * 1_400 * 8));
        let none = v1::ListHeaviestRequest { service: "other".to_owned(), ..Default::default() };
        assert!(summary.rows(&none, 5, 1.0, &inquiries.snapshot()).flows.is_empty());
    }

    #[test]
    fn a_client_is_counted_at_each_frontend_and_has_one_row() {
        let mut summary = HeaviestSummary::new();
        let to = |port| FlowView { frontend: SocketAddr::new([192, 0, 2, 100].into(), port), ..flow(0x0a00_0001) };
        summary.add(packet(100), to(80));
        summary.add(packet(1_400), to(81));
        let bytes: Vec<_> = summary.clients.entries.iter().map(|entry| entry.sums.bytes).collect();
        assert_eq!(bytes, [1_000, 14_000]);
        let sums = Sums { bytes: 100, packets: 2, samples: 1 };
        let row = |client: u8, service: &str| ClientTraffic {
            client: IpAddr::from([10, 0, 0, client]),
            service: service.to_owned(),
            sums,
        };
        let rows = [row(1, "shop/a"), row(1, "shop/b"), row(1, "shop/a"), row(2, "shop/a"), row(2, "shop/a")];
        let mut clients = by_client(rows.into_iter());
        clients.sort_by_key(|row| row.client);
        let found: Vec<_> = clients.iter().map(|row| (row.service.as_str(), row.sums.bytes, row.sums.samples)).collect();
        assert_eq!(found, [("", 300, 3), ("shop/a", 200, 2)]);
    }
}
