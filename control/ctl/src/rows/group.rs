//! Rows of what a controller knows of its group.

use proto::v1;
use proto::v1::admin_client::AdminClient;
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;

use super::{Listed, Row};

/// A gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Gateway {
    name: String,
    ready: bool,
    generation: String,
    draining: bool,
    last_seen: String,
    version: String,
}

impl Row for Gateway {
    const TITLES: &'static [&'static str] = &["NAME", "READY", "GENERATION", "DRAINING", "LAST-SEEN", "VERSION"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let gateways = client.list_gateways(v1::ListGatewaysRequest {}).await?.into_inner().gateways;
        Ok(Listed::of(gateways, Vec::new()))
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

impl From<v1::GatewayStatus> for Gateway {
    fn from(status: v1::GatewayStatus) -> Self {
        let v1::GatewayStatus { name, ready, generation, draining, last_seen, version } = status;
        Self { name, ready, generation, draining, last_seen, version }
    }
}

/// Something that an operator set by hand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Override {
    kind: String,
    name: String,
    service: String,
    weight: Option<u32>,
    by: String,
    at: String,
}

impl Row for Override {
    const TITLES: &'static [&'static str] = &["KIND", "NAME", "SERVICE", "WEIGHT", "BY", "AT"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let overrides = client.list_overrides(v1::ListOverridesRequest {}).await?.into_inner().overrides;
        Ok(Listed::of(overrides, Vec::new()))
    }

    fn same_object(&self, other: &Self) -> bool {
        (&self.kind, &self.name, &self.service) == (&other.kind, &other.name, &other.service)
    }

    fn cells(&self) -> Vec<String> {
        let weight = self.weight.map_or_else(String::new, |weight| weight.to_string());
        vec![self.kind.clone(), self.name.clone(), self.service.clone(), weight, self.by.clone(), self.at.clone()]
    }
}

impl From<v1::Override> for Override {
    fn from(set: v1::Override) -> Self {
        let v1::Override { kind, name, service, weight, by, at } = set;
        Self { kind, name, service, weight, by, at }
    }
}

/// What the owner of an object was told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Event {
    time: String,
    r#type: String,
    reason: String,
    object: String,
    message: String,
}

impl Row for Event {
    const TITLES: &'static [&'static str] = &["TIME", "TYPE", "REASON", "OBJECT", "MESSAGE"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let events = client.list_events(v1::ListEventsRequest {}).await?.into_inner().events;
        Ok(Listed::of(events, Vec::new()))
    }

    /// What was told once does not change.
    fn same_object(&self, other: &Self) -> bool {
        self == other
    }

    fn cells(&self) -> Vec<String> {
        vec![self.time.clone(), self.r#type.clone(), self.reason.clone(), self.object.clone(), self.message.clone()]
    }
}

impl From<v1::EventStatus> for Event {
    fn from(v1::EventStatus { time, r#type, reason, object, message }: v1::EventStatus) -> Self {
        Self { time, r#type, reason, object, message }
    }
}

/// A pool. The figures are texts: there are pools of more addresses than a number in JSON can tell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Pool {
    name: String,
    addresses: Vec<String>,
    total: String,
    used: String,
    available: String,
    conflict: String,
}

impl Row for Pool {
    const TITLES: &'static [&'static str] = &["NAME", "ADDRESSES", "TOTAL", "USED", "AVAILABLE", "CONFLICT"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let pools = client.list_pools(v1::ListPoolsRequest {}).await?.into_inner().pools;
        Ok(Listed::of(pools, Vec::new()))
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

impl From<v1::PoolStatus> for Pool {
    fn from(status: v1::PoolStatus) -> Self {
        let v1::PoolStatus { name, addresses, total, used, available, conflict } = status;
        Self { name, addresses, total, used, available, conflict }
    }
}
