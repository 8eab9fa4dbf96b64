//! The lists of `sluicectl`: how the rows of each kind are fetched, compared and shown in a table. JSON and YAML show the
//! messages of `sluice.v1` themselves, whose fields and their order are those of DESIGN section 8.

use proto::v1;
use proto::v1::admin_client::AdminClient;
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;

/// Characters of a cell that lists things: two frontends with IPv6 addresses and ports.
const CELL_CHARS_MAX: usize = 100;

/// A row of a list.
pub(super) trait Row: Serialize + Clone + PartialEq {
    /// Column titles of the table.
    const TITLES: &'static [&'static str];

    /// Fetches all rows.
    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status>;

    /// Whether both rows describe the same object, at different times.
    fn same_object(&self, other: &Self) -> bool;

    /// One cell per title.
    fn cells(&self) -> Vec<String>;

    /// The gateway that reported the row; empty for rows of the controller.
    fn gateway(&self) -> &str {
        ""
    }
}

/// All rows of a list.
#[derive(Clone, Debug)]
pub(super) struct Listed<R> {
    /// The rows that were reported.
    pub(super) rows: Vec<R>,
    /// The gateways that did not answer.
    pub(super) silent: Vec<v1::Silent>,
}

impl Row for v1::ServiceStatus {
    const TITLES: &'static [&'static str] =
        &["NAMESPACE", "NAME", "FRONTENDS", "MODE", "TARGET", "SCHEDULER", "BACKENDS", "HEALTHY", "REASON"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let v1::ListServicesResponse { services, silent } = client.list_services(v1::ListServicesRequest {}).await?.into_inner();
        Ok(Listed { rows: services, silent })
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

/// As many frontends as fit into a cell, at least one, and the number of the others. JSON shows all of them.
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

impl Row for v1::BackendStatus {
    const TITLES: &'static [&'static str] = &["SERVICE", "ADDRESS", "STATE", "HEALTHY", "WEIGHT", "FLOWS"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let v1::ListBackendsResponse { backends, silent } = client.list_backends(v1::ListBackendsRequest {}).await?.into_inner();
        Ok(Listed { rows: backends, silent })
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

impl Row for v1::PortStatus {
    const TITLES: &'static [&'static str] = &["NAME", "DEVICE", "LINK", "RX-PACKETS", "TX-PACKETS", "RX-MISSED", "STEERING"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let v1::ListPortsResponse { ports, silent } = client.list_ports(v1::ListPortsRequest {}).await?.into_inner();
        Ok(Listed { rows: ports, silent })
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

impl Row for v1::DropCount {
    const TITLES: &'static [&'static str] = &["REASON", "WORKER", "PACKETS"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let v1::ListDropsResponse { drops, silent } = client.list_drops(v1::ListDropsRequest {}).await?.into_inner();
        Ok(Listed { rows: drops, silent })
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

impl Row for v1::GatewayStatus {
    const TITLES: &'static [&'static str] = &["NAME", "READY", "GENERATION", "DRAINING", "LAST-SEEN", "VERSION"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let gateways = client.list_gateways(v1::ListGatewaysRequest {}).await?.into_inner().gateways;
        Ok(Listed { rows: gateways, silent: Vec::new() })
    }

    fn same_object(&self, other: &Self) -> bool {
        self.name == other.name
    }

    fn cells(&self) -> Vec<String> {
        let yes = |is_so| if is_so { "yes" } else { "no" }.to_owned();
        let (ready, draining) = (yes(self.ready), yes(self.draining));
        vec![self.name.clone(), ready, self.generation.clone(), draining, self.last_seen.clone(), self.version.clone()]
    }
}

impl Row for v1::Override {
    const TITLES: &'static [&'static str] = &["KIND", "NAME", "SERVICE", "WEIGHT", "BY", "AT"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let overrides = client.list_overrides(v1::ListOverridesRequest {}).await?.into_inner().overrides;
        Ok(Listed { rows: overrides, silent: Vec::new() })
    }

    fn same_object(&self, other: &Self) -> bool {
        (&self.kind, &self.name, &self.service) == (&other.kind, &other.name, &other.service)
    }

    fn cells(&self) -> Vec<String> {
        let weight = self.weight.map_or_else(String::new, |weight| weight.to_string());
        vec![self.kind.clone(), self.name.clone(), self.service.clone(), weight, self.by.clone(), self.at.clone()]
    }
}

impl Row for v1::EventStatus {
    const TITLES: &'static [&'static str] = &["TIME", "TYPE", "REASON", "OBJECT", "MESSAGE"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let events = client.list_events(v1::ListEventsRequest {}).await?.into_inner().events;
        Ok(Listed { rows: events, silent: Vec::new() })
    }

    /// An event does not change once it is recorded.
    fn same_object(&self, other: &Self) -> bool {
        self == other
    }

    fn cells(&self) -> Vec<String> {
        vec![self.time.clone(), self.r#type.clone(), self.reason.clone(), self.object.clone(), self.message.clone()]
    }
}

impl Row for v1::PoolStatus {
    const TITLES: &'static [&'static str] = &["NAME", "ADDRESSES", "TOTAL", "USED", "AVAILABLE", "CONFLICT"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let pools = client.list_pools(v1::ListPoolsRequest {}).await?.into_inner().pools;
        Ok(Listed { rows: pools, silent: Vec::new() })
    }

    fn same_object(&self, other: &Self) -> bool {
        self.name == other.name
    }

    fn cells(&self) -> Vec<String> {
        let addresses = self.addresses.join(",");
        let figures = [&self.total, &self.used, &self.available, &self.conflict].map(Clone::clone);
        [self.name.clone(), addresses].into_iter().chain(figures).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_three_hundred_frontends_a_table_shows_some_and_says_how_many_more() {
        let frontends: Vec<String> = (0..300).map(|port| format!("tcp 192.0.2.100:{}", 10_000 + port)).collect();
        let row = v1::ServiceStatus { frontends: frontends.clone(), ..Default::default() };
        let cell = &row.cells()[2];
        assert!(cell.chars().count() < CELL_CHARS_MAX + 10 && cell.ends_with(" +296"), "{cell}");
        assert_eq!(row.frontends, frontends, "all of them in the JSON");
        assert_eq!(some_of(&frontends[..1]), frontends[0]);
    }
}
