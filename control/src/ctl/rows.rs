//! What is listed: one type per command, whose fields are those of the JSON, in order.

use std::collections::BTreeMap;

use proto::v1;
use proto::v1::admin_client::AdminClient;
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;

/// Objects of one kind.
pub(super) trait Row: Serialize + Clone + PartialEq {
    /// Column titles of the table.
    const TITLES: &'static [&'static str];

    /// Asks for all of them.
    async fn list(client: &mut AdminClient<Channel>) -> Result<Vec<Self>, Status>;

    /// Whether both tell of one object, at different times.
    fn same_object(&self, other: &Self) -> bool;

    /// One cell per title.
    fn cells(&self) -> Vec<String>;
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
    /// For people only: DESIGN section 8 fixes the fields of the JSON.
    #[serde(skip)]
    message: String,
}

impl Row for Service {
    const TITLES: &'static [&'static str] =
        &["NAMESPACE", "NAME", "FRONTENDS", "MODE", "TARGET", "SCHEDULER", "BACKENDS", "HEALTHY", "REASON"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Vec<Self>, Status> {
        let services = client.list_services(v1::ListServicesRequest {}).await?.into_inner().services;
        Ok(services.into_iter().map(Self::from).collect())
    }

    fn same_object(&self, other: &Self) -> bool {
        (&self.namespace, &self.name) == (&other.namespace, &other.name)
    }

    fn cells(&self) -> Vec<String> {
        let reason = if self.message.is_empty() { self.reason.clone() } else { format!("{}: {}", self.reason, self.message) };
        vec![
            self.namespace.clone(),
            self.name.clone(),
            self.frontends.join(","),
            self.mode.clone(),
            self.target.clone(),
            self.scheduler.clone(),
            self.backends.to_string(),
            self.healthy.to_string(),
            reason,
        ]
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
            message: status.message,
        }
    }
}

/// A backend of a Service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Backend {
    service: String,
    address: String,
    state: String,
    healthy: bool,
    weight: u32,
    flows: u64,
}

impl Row for Backend {
    const TITLES: &'static [&'static str] = &["SERVICE", "ADDRESS", "STATE", "HEALTHY", "WEIGHT", "FLOWS"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Vec<Self>, Status> {
        let backends = client.list_backends(v1::ListBackendsRequest {}).await?.into_inner().backends;
        Ok(backends.into_iter().map(Self::from).collect())
    }

    fn same_object(&self, other: &Self) -> bool {
        (&self.service, &self.address) == (&other.service, &other.address)
    }

    fn cells(&self) -> Vec<String> {
        let healthy = if self.healthy { "yes" } else { "no" };
        let (weight, flows) = (self.weight.to_string(), self.flows.to_string());
        vec![self.service.clone(), self.address.clone(), self.state.clone(), healthy.to_owned(), weight, flows]
    }
}

impl From<v1::BackendStatus> for Backend {
    fn from(status: v1::BackendStatus) -> Self {
        let v1::BackendStatus { service, address, state, healthy, weight, flows } = status;
        Self { service, address, state, healthy, weight, flows }
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
}

impl Row for Port {
    const TITLES: &'static [&'static str] = &["NAME", "DEVICE", "LINK", "RX-PACKETS", "TX-PACKETS", "RX-MISSED", "STEERING"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Vec<Self>, Status> {
        let ports = client.list_ports(v1::ListPortsRequest {}).await?.into_inner().ports;
        Ok(ports.into_iter().map(Self::from).collect())
    }

    fn same_object(&self, other: &Self) -> bool {
        self.name == other.name
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
        }
    }
}

/// Packets that one worker dropped for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Drop {
    reason: String,
    worker: u32,
    packets: u64,
}

impl Row for Drop {
    const TITLES: &'static [&'static str] = &["REASON", "WORKER", "PACKETS"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Vec<Self>, Status> {
        let drops = client.list_drops(v1::ListDropsRequest {}).await?.into_inner().drops;
        Ok(drops.into_iter().map(|v1::DropCount { reason, worker, packets }| Self { reason, worker, packets }).collect())
    }

    fn same_object(&self, other: &Self) -> bool {
        (&self.reason, self.worker) == (&other.reason, other.worker)
    }

    fn cells(&self) -> Vec<String> {
        vec![self.reason.clone(), self.worker.to_string(), self.packets.to_string()]
    }
}
