//! What is listed: one type per command, whose fields are those of the JSON, in order.

mod group;

pub(super) use group::{Event, Gateway, Override, Pool};

use std::collections::BTreeMap;

use proto::v1;
use proto::v1::admin_client::AdminClient;
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;

/// Characters of a cell that lists things: two frontends with IPv6 addresses and ports.
const CELL_CHARS_MAX: usize = 100;

/// Objects of one kind.
pub(super) trait Row: Serialize + Clone + PartialEq {
    /// Column titles of the table.
    const TITLES: &'static [&'static str];

    /// Asks for all of them.
    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status>;

    /// Whether both tell of one object, at different times.
    fn same_object(&self, other: &Self) -> bool;

    /// One cell per title.
    fn cells(&self) -> Vec<String>;

    /// The gateway that tells of it; empty where none does.
    fn gateway(&self) -> &str {
        ""
    }
}

/// All objects of a kind.
#[derive(Clone, Debug)]
pub(super) struct Listed<R> {
    /// Those that were told of.
    pub(super) rows: Vec<R>,
    /// The gateways that told nothing.
    pub(super) silent: Vec<v1::Silent>,
}

impl<R> Listed<R> {
    fn of<S>(rows: Vec<S>, silent: Vec<v1::Silent>) -> Self
    where
        R: From<S>,
    {
        Self { rows: rows.into_iter().map(R::from).collect(), silent }
    }
}

/// A Service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Service {
    namespace: String,
    name: String,
    frontends: Vec<String>,
    mode: String,
    target: String,
    scheduler: String,
    backends: u32,
    healthy: u32,
    reason: String,
    /// By frontend, for those whose port has one: what clients and backends speak.
    app_protocols: BTreeMap<String, String>,
    gateway: String,
    /// For people only: DESIGN section 8 fixes the fields of the JSON.
    #[serde(skip)]
    message: String,
}

impl Row for Service {
    const TITLES: &'static [&'static str] =
        &["NAMESPACE", "NAME", "FRONTENDS", "MODE", "TARGET", "SCHEDULER", "BACKENDS", "HEALTHY", "REASON"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let v1::ListServicesResponse { services, silent } = client.list_services(v1::ListServicesRequest {}).await?.into_inner();
        Ok(Listed::of(services, silent))
    }

    fn same_object(&self, other: &Self) -> bool {
        (&self.namespace, &self.name, &self.gateway) == (&other.namespace, &other.name, &other.gateway)
    }

    fn cells(&self) -> Vec<String> {
        let reason = if self.message.is_empty() { self.reason.clone() } else { format!("{}: {}", self.reason, self.message) };
        vec![
            self.namespace.clone(),
            self.name.clone(),
            some_of(&self.frontends),
            self.mode.clone(),
            self.target.clone(),
            self.scheduler.clone(),
            self.backends.to_string(),
            self.healthy.to_string(),
            reason,
        ]
    }

    fn gateway(&self) -> &str {
        &self.gateway
    }
}

impl From<v1::ServiceStatus> for Service {
    fn from(status: v1::ServiceStatus) -> Self {
        Self {
            namespace: status.namespace,
            name: status.name,
            frontends: status.frontends,
            mode: status.mode,
            target: status.target,
            scheduler: status.scheduler,
            backends: status.backends,
            healthy: status.healthy,
            reason: status.reason,
            app_protocols: status.app_protocols,
            gateway: status.gateway,
            message: status.message,
        }
    }
}

/// As many as fit into a cell, at least one, and how many more there are: all of them stand in the JSON.
fn some_of(frontends: &[String]) -> String {
    let mut cell = String::new();
    for (shown, frontend) in frontends.iter().enumerate() {
        if shown > 0 && cell.chars().count() + frontend.chars().count() >= CELL_CHARS_MAX {
            return format!("{cell} +{}", frontends.len() - shown);
        }
        cell.push_str(if shown > 0 { "," } else { "" });
        cell.push_str(frontend);
    }
    cell
}

/// A backend of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Backend {
    service: String,
    address: String,
    state: String,
    healthy: bool,
    weight: u32,
    flows: u64,
    gateway: String,
}

impl Row for Backend {
    const TITLES: &'static [&'static str] = &["SERVICE", "ADDRESS", "STATE", "HEALTHY", "WEIGHT", "FLOWS"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let v1::ListBackendsResponse { backends, silent } = client.list_backends(v1::ListBackendsRequest {}).await?.into_inner();
        Ok(Listed::of(backends, silent))
    }

    fn same_object(&self, other: &Self) -> bool {
        (&self.service, &self.address, &self.gateway) == (&other.service, &other.address, &other.gateway)
    }

    fn cells(&self) -> Vec<String> {
        let healthy = if self.healthy { "yes" } else { "no" };
        let (weight, flows) = (self.weight.to_string(), self.flows.to_string());
        vec![self.service.clone(), self.address.clone(), self.state.clone(), healthy.to_owned(), weight, flows]
    }

    fn gateway(&self) -> &str {
        &self.gateway
    }
}

impl From<v1::BackendStatus> for Backend {
    fn from(status: v1::BackendStatus) -> Self {
        let v1::BackendStatus { service, address, state, healthy, weight, flows, gateway } = status;
        Self { service, address, state, healthy, weight, flows, gateway }
    }
}

/// A network port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Port {
    name: String,
    device: String,
    link: String,
    rx_packets: u64,
    tx_packets: u64,
    rx_missed: u64,
    steering: String,
    rx_bytes: u64,
    tx_bytes: u64,
    rx_errors: u64,
    tx_errors: u64,
    speed_mbps: Option<u32>,
    mtu: Option<u32>,
    gateway: String,
}

impl Row for Port {
    const TITLES: &'static [&'static str] = &["NAME", "DEVICE", "LINK", "RX-PACKETS", "TX-PACKETS", "RX-MISSED", "STEERING"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let v1::ListPortsResponse { ports, silent } = client.list_ports(v1::ListPortsRequest {}).await?.into_inner();
        Ok(Listed::of(ports, silent))
    }

    fn same_object(&self, other: &Self) -> bool {
        (&self.name, &self.gateway) == (&other.name, &other.gateway)
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.name.clone(),
            self.device.clone(),
            self.link.clone(),
            self.rx_packets.to_string(),
            self.tx_packets.to_string(),
            self.rx_missed.to_string(),
            self.steering.clone(),
        ]
    }

    fn gateway(&self) -> &str {
        &self.gateway
    }
}

impl From<v1::PortStatus> for Port {
    fn from(status: v1::PortStatus) -> Self {
        Self {
            name: status.name,
            device: status.device,
            link: status.link,
            rx_packets: status.rx_packets,
            tx_packets: status.tx_packets,
            rx_missed: status.rx_missed,
            steering: status.steering,
            rx_bytes: status.rx_bytes,
            tx_bytes: status.tx_bytes,
            rx_errors: status.rx_errors,
            tx_errors: status.tx_errors,
            speed_mbps: status.speed_mbps,
            mtu: status.mtu,
            gateway: status.gateway,
        }
    }
}

/// Packets that one worker dropped for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Drop {
    reason: String,
    worker: u32,
    packets: u64,
    gateway: String,
}

impl Row for Drop {
    const TITLES: &'static [&'static str] = &["REASON", "WORKER", "PACKETS"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let v1::ListDropsResponse { drops, silent } = client.list_drops(v1::ListDropsRequest {}).await?.into_inner();
        Ok(Listed::of(drops, silent))
    }

    fn same_object(&self, other: &Self) -> bool {
        (&self.reason, self.worker, &self.gateway) == (&other.reason, other.worker, &other.gateway)
    }

    fn cells(&self) -> Vec<String> {
        vec![self.reason.clone(), self.worker.to_string(), self.packets.to_string()]
    }

    fn gateway(&self) -> &str {
        &self.gateway
    }
}

impl From<v1::DropCount> for Drop {
    fn from(v1::DropCount { reason, worker, packets, gateway }: v1::DropCount) -> Self {
        Self { reason, worker, packets, gateway }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_three_hundred_frontends_a_table_shows_some_and_says_how_many_more() {
        let frontends: Vec<String> = (0..300).map(|port| format!("tcp 192.0.2.100:{}", 10_000 + port)).collect();
        let row = Service::from(v1::ServiceStatus { frontends: frontends.clone(), ..Default::default() });
        let cell = &row.cells()[2];
        assert!(cell.chars().count() < CELL_CHARS_MAX + 10 && cell.ends_with(" +296"), "{cell}");
        assert_eq!(row.frontends, frontends, "all of them in the JSON");
        assert_eq!(some_of(&frontends[..1]), frontends[0]);
    }
}
