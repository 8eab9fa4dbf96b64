//! The lists of `sluicectl`: how the rows of each kind are fetched, compared and shown in a table. JSON and YAML show
//! the messages of `sluice.v1` themselves, whose fields and their order are those of DESIGN section 8.

use proto::v1;
use proto::v1::admin_client::AdminClient;
use serde::Serialize;
use serde_json::Value;
use tonic::Status;
use tonic::transport::Channel;

use super::selection::RowSubject;

/// Characters of a cell that lists frontends or Services: two frontends with IPv6 addresses and ports.
const CELL_CHARS_MAX: usize = 100;

/// The rows that were reported, and the gateways that did not answer.
pub(crate) type Listed<R> = (Vec<R>, Vec<v1::Silent>);

/// A row of a list.
pub(crate) trait Row: Serialize + Clone + PartialEq {
    /// Column titles of the table. A column shows the JSON field of its name: `RX-PACKETS` shows `rx_packets`.
    const TITLES: &'static [&'static str];
    /// Titles of the columns that `-o wide` adds.
    const WIDE: &'static [&'static str] = &[];

    /// Fetches all rows.
    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status>;

    /// Identifies the object of the row: rows with equal keys describe the same object, at different times.
    fn key(&self) -> impl PartialEq;

    /// What filters know of it.
    fn subject(&self) -> RowSubject;

    /// Whether every reason of the list has a row, also one that does not occur.
    const HAS_ALL_REASONS: bool = false;

    /// Whether the table has this row. JSON and YAML have all.
    fn is_shown(&self) -> bool {
        true
    }

    /// The JSON fields as the table shows them.
    fn shown(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}

impl Row for v1::ServiceStatus {
    const TITLES: &'static [&'static str] =
        &["NAMESPACE", "NAME", "FRONTENDS", "MODE", "TARGET", "SCHEDULER", "BACKENDS", "HEALTHY", "REASON"];
    const WIDE: &'static [&'static str] = &["PROXY-PROTOCOL"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let answer = client.list_services(v1::ListServicesRequest::default()).await?.into_inner();
        Ok((answer.services, answer.silent))
    }

    fn subject(&self) -> RowSubject {
        let (service, gateway) = (format!("{}/{}", self.namespace, self.name), self.gateway.clone());
        RowSubject { services: vec![service], gateways: vec![gateway], reason: self.reason.clone() }
    }

    fn key(&self) -> impl PartialEq {
        (&self.namespace, &self.name, &self.gateway)
    }

    fn shown(&self) -> Value {
        let mut fields = serde_json::to_value(self).unwrap_or_default();
        fields["frontends"] = some_of(&self.frontends).into();
        // "v2" where all frontends have it, else "tcp 192.0.2.100:443 v2".
        let mut versions: Vec<_> = self.proxy_protocols.values().collect();
        versions.dedup();
        fields["proxy_protocol"] = match versions.as_slice() {
            [one] if self.proxy_protocols.len() == self.frontends.len() => (*one).as_str().into(),
            _ => {
                let texts: Vec<_> =
                    self.proxy_protocols.iter().map(|(frontend, version)| format!("{frontend} {version}")).collect();
                some_of(&texts).into()
            }
        };
        if !self.message.is_empty() {
            fields["reason"] = format!("{}: {}", self.reason, self.message).into();
        }
        fields
    }
}

impl Row for v1::FrontendStatus {
    const TITLES: &'static [&'static str] = &[
        "SERVICE",
        "FRONTEND",
        "FLOWS",
        "NEW-FLOWS",
        "PACKETS-TO-BACKENDS",
        "PACKETS-TO-CLIENTS",
        "BYTES-TO-BACKENDS",
        "BYTES-TO-CLIENTS",
    ];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let answer = client.list_services(v1::ListServicesRequest { counters: true }).await?.into_inner();
        Ok((frontends_of(answer.services), answer.silent))
    }

    fn subject(&self) -> RowSubject {
        let (service, gateway) = (self.service.clone(), self.gateway.clone());
        RowSubject { services: vec![service], gateways: vec![gateway], ..Default::default() }
    }

    fn key(&self) -> impl PartialEq {
        (&self.service, &self.frontend, &self.gateway)
    }
}

/// The frontends of Services, of the gateways of the Services: a controller names there who has answered.
fn frontends_of(services: Vec<v1::ServiceStatus>) -> Vec<v1::FrontendStatus> {
    let of = |v1::ServiceStatus { gateway, traffic, .. }| {
        traffic.into_iter().map(move |row| v1::FrontendStatus { gateway: String::clone(&gateway), ..row })
    };
    services.into_iter().flat_map(of).collect()
}

/// The JSON field that a column shows.
pub(crate) fn field_of(title: &str) -> String {
    title.to_lowercase().replace('-', "_")
}

/// As many texts as fit into a cell, at least one, and the number of the others. JSON shows all of them.
fn some_of(texts: &[String]) -> String {
    let mut cell = String::new();
    for (shown, text) in texts.iter().enumerate() {
        if shown > 0 && cell.chars().count() + text.chars().count() >= CELL_CHARS_MAX {
            return format!("{cell} +{}", texts.len() - shown);
        }
        cell.push_str(if shown > 0 { "," } else { "" });
        cell.push_str(text);
    }
    cell
}

impl Row for v1::BackendStatus {
    const TITLES: &'static [&'static str] = &["SERVICE", "PROTOCOL", "ADDRESS", "STATE", "HEALTHY", "WEIGHT", "FLOWS", "REASON"];
    const WIDE: &'static [&'static str] = &["SINCE"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let answer = client.list_backends(v1::ListBackendsRequest::default()).await?.into_inner();
        Ok((answer.backends, answer.silent))
    }

    fn subject(&self) -> RowSubject {
        let (service, gateway) = (self.service.clone(), self.gateway.clone());
        RowSubject { services: vec![service], gateways: vec![gateway], ..Default::default() }
    }

    fn key(&self) -> impl PartialEq {
        (&self.service, &self.protocol, &self.address, &self.gateway)
    }
}

impl Row for v1::FlowStatus {
    const TITLES: &'static [&'static str] =
        &["PROTOCOL", "CLIENT", "FRONTEND", "BACKEND", "MODE", "STATE", "AGE-S", "IDLE-S", "WORKER"];
    const WIDE: &'static [&'static str] = &["SNAT", "PROXY-HEADER", "SHIFT"];

    /// The first page without filters.
    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        Ok((client.list_flows(v1::ListFlowsRequest::default()).await?.into_inner().flows, Vec::new()))
    }

    fn subject(&self) -> RowSubject {
        let (service, gateway) = (self.service.clone(), self.gateway.clone());
        RowSubject { services: vec![service], gateways: vec![gateway], ..Default::default() }
    }

    fn key(&self) -> impl PartialEq {
        (&self.protocol, &self.client, &self.frontend, &self.backend, &self.gateway)
    }
}

impl Row for v1::PortStatus {
    const TITLES: &'static [&'static str] = &["NAME", "DEVICE", "LINK", "RX-PACKETS", "TX-PACKETS", "RX-MISSED", "STEERING"];
    const WIDE: &'static [&'static str] = &["DRIVER", "QUEUES", "DESCRIPTORS", "RX-MODE", "TX-MODE", "OFFLOADS", "RSS-TABLE"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let answer = client.list_ports(v1::ListPortsRequest {}).await?.into_inner();
        Ok((answer.ports, answer.silent))
    }

    fn subject(&self) -> RowSubject {
        RowSubject { gateways: vec![self.gateway.clone()], ..Default::default() }
    }

    fn key(&self) -> impl PartialEq {
        (&self.name, &self.gateway)
    }

    /// What receives stands before what sends: `2/2`. Empty cells where there is no device.
    fn shown(&self) -> Value {
        let mut fields = serde_json::to_value(self).unwrap_or_default();
        let (rx, tx) = (self.rx.clone().unwrap_or_default(), self.tx.clone().unwrap_or_default());
        let pair = |rx: u32, tx: u32| if (rx, tx) == (0, 0) { String::new() } else { format!("{rx}/{tx}") };
        fields["queues"] = pair(rx.queues, tx.queues).into();
        fields["descriptors"] = pair(rx.descriptors, tx.descriptors).into();
        fields["rx_mode"] = rx.burst_mode.into();
        fields["tx_mode"] = tx.burst_mode.into();
        fields["offloads"] = [rx.offloads, tx.offloads].concat().into();
        if self.rss_table == 0 {
            fields["rss_table"] = "".into();
        }
        fields
    }
}

impl Row for v1::DropCount {
    const TITLES: &'static [&'static str] = &["REASON", "WORKER", "PACKETS"];
    const HAS_ALL_REASONS: bool = true;

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let answer = client.list_drops(v1::ListDropsRequest {}).await?.into_inner();
        Ok((answer.drops, answer.silent))
    }

    fn subject(&self) -> RowSubject {
        RowSubject { gateways: vec![self.gateway.clone()], reason: self.reason.clone(), ..Default::default() }
    }

    fn key(&self) -> impl PartialEq {
        (&self.reason, self.worker, &self.gateway)
    }

    /// Among 60 reasons of each worker those that occurred are not found.
    fn is_shown(&self) -> bool {
        self.packets > 0
    }
}

impl Row for v1::GatewayStatus {
    const TITLES: &'static [&'static str] = &[
        "NAME",
        "READY",
        "GENERATION",
        "DRAINING",
        "LAST-SEEN",
        "VERSION",
        "FLOWS",
        "GROUPS",
        "SHADOWS",
        "LAG",
        "SESSIONS",
        "AWAITED-BY",
    ];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        Ok((client.list_gateways(v1::ListGatewaysRequest {}).await?.into_inner().gateways, Vec::new()))
    }

    fn subject(&self) -> RowSubject {
        RowSubject { gateways: vec![self.name.clone()], ..Default::default() }
    }

    fn key(&self) -> impl PartialEq {
        &self.name
    }

    /// Empty cells where there is no election, no partner and no routing session.
    fn shown(&self) -> Value {
        let mut fields = serde_json::to_value(self).unwrap_or_default();
        let count = |status: &str| self.sessions.iter().filter(|session| session.status == status).count();
        let (up, should) = (count("up"), count("up") + count("down"));
        let unless = |is_missing: bool, text: String| if is_missing { String::new() } else { text };
        fields["groups"] = unless(self.groups == 0, format!("{}/{}", self.groups_owned, self.groups)).into();
        let has_partners = !self.partners.is_empty() || self.shadow_flows > 0;
        fields["shadows"] = unless(!has_partners, self.shadow_flows.to_string()).into();
        fields["lag"] = self.lag_ms.map_or_else(String::new, |lag_ms| format!("{lag_ms}ms")).into();
        fields["sessions"] = unless(self.sessions.is_empty(), format!("{up}/{should}")).into();
        fields
    }
}

impl Row for v1::VipStatus {
    const TITLES: &'static [&'static str] = &["VIP", "POOL", "ANNOUNCE", "GROUP", "GATEWAYS", "SERVICES", "STATIONS"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        Ok((client.list_vips(v1::ListVipsRequest {}).await?.into_inner().vips, Vec::new()))
    }

    fn subject(&self) -> RowSubject {
        RowSubject { services: self.services.clone(), gateways: self.gateways.clone(), ..Default::default() }
    }

    fn key(&self) -> impl PartialEq {
        &self.vip
    }

    fn shown(&self) -> Value {
        let mut fields = serde_json::to_value(self).unwrap_or_default();
        fields["services"] = some_of(&self.services).into();
        fields
    }
}

impl Row for v1::Override {
    const TITLES: &'static [&'static str] = &["KIND", "NAME", "SERVICE", "WEIGHT", "FLOWS", "BY", "AT"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        let answer = client.list_overrides(v1::ListOverridesRequest {}).await?.into_inner();
        Ok((answer.overrides, answer.silent))
    }

    fn subject(&self) -> RowSubject {
        RowSubject { services: vec![self.service.clone()], ..Default::default() }
    }

    fn key(&self) -> impl PartialEq {
        (&self.kind, &self.name, &self.service)
    }
}

impl Row for v1::EventStatus {
    const TITLES: &'static [&'static str] = &["TIME", "TYPE", "REASON", "OBJECT", "MESSAGE"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        Ok((client.list_events(v1::ListEventsRequest {}).await?.into_inner().events, Vec::new()))
    }

    fn subject(&self) -> RowSubject {
        let service = self.object.strip_prefix("Service ").unwrap_or_default().to_owned();
        RowSubject { services: vec![service], reason: self.reason.clone(), ..Default::default() }
    }

    /// An event does not change once it is recorded.
    fn key(&self) -> impl PartialEq {
        self
    }
}

impl Row for v1::PoolStatus {
    const TITLES: &'static [&'static str] =
        &["NAME", "ADDRESSES", "TOTAL", "USED", "AVAILABLE", "CONFLICT", "UNANNOUNCED-BY", "AWAITED"];

    async fn list(client: &mut AdminClient<Channel>) -> Result<Listed<Self>, Status> {
        Ok((client.list_pools(v1::ListPoolsRequest {}).await?.into_inner().pools, Vec::new()))
    }

    fn subject(&self) -> RowSubject {
        RowSubject::default()
    }

    fn key(&self) -> impl PartialEq {
        &self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frontends_are_listed_with_the_gateway_of_their_service() {
        let traffic = v1::FrontendStatus { frontend: "tcp node port 30080".into(), port: 80, ..Default::default() };
        let service = v1::ServiceStatus { gateway: "edge-2".into(), traffic: vec![traffic], ..Default::default() };
        let rows = frontends_of(vec![v1::ServiceStatus::default(), service]);
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!((rows.len(), &json[0]["gateway"], &json[0]["port"]), (1, &"edge-2".into(), &80.into()));
        for title in v1::FrontendStatus::TITLES {
            assert!(!json[0][field_of(title)].is_null(), "{title}");
        }
    }

    #[test]
    fn of_three_hundred_frontends_a_table_shows_some_and_the_number_of_the_others() {
        let frontends: Vec<String> = (0..300).map(|port| format!("tcp 192.0.2.100:{}", 10_000 + port)).collect();
        let row = v1::ServiceStatus { frontends: frontends.clone(), ..Default::default() };
        let fields = row.shown();
        let cell = fields["frontends"].as_str().unwrap();
        assert!(cell.chars().count() < CELL_CHARS_MAX + 10 && cell.ends_with(" +296"), "{cell}");
        assert_eq!(row.frontends, frontends, "all of them in the JSON");
        assert_eq!(some_of(&frontends[..1]), frontends[0]);
    }

    #[test]
    fn every_column_shows_a_field() {
        fn check<R: Row + Default>() {
            let fields = R::default().shown();
            for title in R::TITLES.iter().chain(R::WIDE) {
                assert!(fields.get(field_of(title)).is_some(), "{title}: {fields}");
            }
        }
        check::<v1::ServiceStatus>();
        check::<v1::BackendStatus>();
        check::<v1::FlowStatus>();
        check::<v1::PortStatus>();
        check::<v1::DropCount>();
        check::<v1::GatewayStatus>();
        check::<v1::VipStatus>();
        check::<v1::Override>();
        check::<v1::EventStatus>();
        check::<v1::PoolStatus>();
    }
}
