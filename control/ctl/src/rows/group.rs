//! Rows that the controller reports about its group: gateways, overrides, events and pools.

use proto::v1;
use proto::v1::admin_client::AdminClient;
use tonic::Status;
use tonic::transport::Channel;

use super::{Listed, Row};

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
