//! Pages of flows: filters, tokens and rows.
//!
//! Invariant: filters are applied here, not by workers, so a filter costs a worker no more than none.

use std::net::{IpAddr, SocketAddr};

use dataplane::Snapshot;
use dataplane::flow::{FlowState, FlowView, HeaderStage, Shift};
use ipnet::IpNet;
use proto::{Family, Protocol, v1};
use tonic::Status;

use crate::worker_threads::inquiries::{FlowPosition, Inquiries};

/// Rows of a page if the client does not say.
const PAGE_ROWS: u32 = 1_000;
/// Maximum number of rows of a page: 5,063 x 600 B with the longest names stay below the 4 MiB that clients accept.
const PAGE_ROWS_MAX: u32 = 5_000;

/// Filters of a listing; a flow must match all.
#[derive(Debug, Default)]
pub(super) struct Filter {
    service: Option<String>,
    namespace: Option<String>,
    backend: Option<(IpAddr, Option<u16>)>,
    client: Option<(IpNet, Option<u16>)>,
    protocol: Option<u8>,
    state: Option<String>,
}

/// A page of the gateway's flows. Waits for workers.
pub(super) fn page(
    gateway: &str,
    inquiries: &Inquiries,
    request: &v1::ListFlowsRequest,
) -> Result<v1::ListFlowsResponse, Status> {
    let filter = Filter::try_from(request).map_err(Status::invalid_argument)?;
    let from = position(&request.page_token).map_err(Status::invalid_argument)?;
    let rows = if request.page_size == 0 { PAGE_ROWS } else { request.page_size.min(PAGE_ROWS_MAX) };
    let mut flows = Vec::new();
    let next = inquiries.flows(from, rows as usize, |worker, flow| {
        let row = row(gateway, worker, flow, &inquiries.snapshot());
        let matches = filter.matches(flow, &row);
        if matches {
            flows.push(row);
        }
        matches
    });
    let next = next.map_err(|error| Status::unavailable(error.to_string()))?;
    Ok(v1::ListFlowsResponse { flows, next_page_token: next.map_or_else(String::new, token), silent: Vec::new() })
}

/// The row of a flow.
pub(super) fn row(gateway: &str, worker: usize, flow: &FlowView, snapshot: &Snapshot) -> v1::FlowStatus {
    let backend = snapshot.backend(flow.backend);
    v1::FlowStatus {
        protocol: protocol(flow.protocol),
        client: flow.client.to_string(),
        frontend: flow.frontend.to_string(),
        backend: backend.map_or(flow.backend_address, |backend| backend.address).to_string(),
        mode: flow.mode.as_str().to_owned(),
        state: flow.state.as_str().to_owned(),
        age_s: flow.age.nanoseconds() / 1_000_000_000,
        idle_s: flow.idle.nanoseconds() / 1_000_000_000,
        worker: u32::try_from(worker).unwrap_or(u32::MAX),
        service: backend.map_or_else(String::new, |backend| backend.service.to_string()),
        snat: flow.snat.map_or_else(String::new, |snat| snat.to_string()),
        gateway: gateway.to_owned(),
        proxy_header: flow.shift.map_or("", |shift| header_stage(&shift, flow.protocol)).to_owned(),
        shift: flow.shift.map_or(0, |shift| shift.header_len().into()),
    }
}

/// How far the PROXY header of a flow has come. Of what the engine forgets about one that was taken operators need to know
/// nothing.
pub(super) fn header_stage(shift: &Shift, protocol: u8) -> &'static str {
    match (Protocol::from_number(protocol), shift.stage()) {
        (Some(Protocol::Udp), _) => "each_datagram",
        (_, HeaderStage::Settled) => HeaderStage::Taken.as_str(),
        (_, stage) => stage.as_str(),
    }
}

/// The Service of a frontend; empty: none.
pub(super) fn service_of(snapshot: &Snapshot, frontend: SocketAddr, protocol: u8) -> String {
    let found = match frontend.ip() {
        IpAddr::V4(ip) => snapshot.frontend(u32::from(ip), protocol, frontend.port()),
        IpAddr::V6(ip) => snapshot.frontend(u128::from(ip), protocol, frontend.port()),
    };
    found.map_or_else(String::new, |frontend| frontend.service.to_string())
}

/// The name of a protocol.
pub(super) fn protocol(number: u8) -> String {
    Protocol::from_number(number).map_or_else(|| number.to_string(), |protocol| protocol.to_string())
}

pub(super) fn token(position: FlowPosition) -> String {
    let family = if position.family == Family::V4 { 4 } else { 6 };
    format!("{}.{family}.{}", position.worker, position.entry)
}

/// The position of a token.
pub(super) fn position(token: &str) -> Result<FlowPosition, String> {
    if token.is_empty() {
        return Ok(FlowPosition::FIRST);
    }
    let mut parts = token.split('.');
    let mut read = || {
        let worker = parts.next()?.parse().ok()?;
        let family = match parts.next()? {
            "4" => Family::V4,
            "6" => Family::V6,
            _ => return None,
        };
        let position = FlowPosition { worker, family, entry: parts.next()?.parse().ok()? };
        parts.next().is_none().then_some(position)
    };
    read().ok_or_else(|| format!("page_token: found {token:?}, expected the next_page_token of an earlier page"))
}

impl TryFrom<&v1::ListFlowsRequest> for Filter {
    type Error = String;

    fn try_from(request: &v1::ListFlowsRequest) -> Result<Self, String> {
        let state = text(&request.state);
        if let Some(state) = state.as_deref().filter(|state| FlowState::ALL.iter().all(|known| known.as_str() != *state)) {
            let mut known: Vec<_> = FlowState::ALL.iter().map(|state| state.as_str()).collect();
            known.sort_unstable();
            known.dedup();
            return Err(format!("state: found {state:?}, expected one of {}", known.join(", ")));
        }
        let protocol = match text(&request.protocol) {
            Some(name) => {
                Some(name.parse::<Protocol>().map_err(|_| format!("protocol: found {name:?}, expected tcp, udp or sctp"))?)
            }
            None => None,
        };
        Ok(Self {
            service: text(&request.service),
            namespace: text(&request.namespace),
            backend: text(&request.backend).map(|text| address(&text)).transpose()?,
            client: text(&request.client).map(|text| client(&text)).transpose()?,
            protocol: protocol.map(Protocol::number),
            state,
        })
    }
}

fn text(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn address(text: &str) -> Result<(IpAddr, Option<u16>), String> {
    let with_port = text.parse::<SocketAddr>().map(|address| (address.ip(), Some(address.port())));
    with_port
        .or_else(|_| text.parse().map(|address: IpAddr| (address, None)))
        .map_err(|_| format!("backend: found {text:?}, expected ADDRESS or ADDRESS:PORT"))
}

fn client(text: &str) -> Result<(IpNet, Option<u16>), String> {
    if let Ok(net) = text.parse::<IpNet>() {
        return Ok((net, None));
    }
    address(text)
        .map(|(address, port)| (address.into(), port))
        .map_err(|_| format!("client: found {text:?}, expected ADDRESS, ADDRESS:PORT or a network"))
}

/// Whether a Service (`NAMESPACE/NAME`) has this name, which may be that without its namespace, and is in this namespace.
pub(super) fn is_of(service: &str, name: Option<&str>, namespace: Option<&str>) -> bool {
    let (of, own) = service.split_once('/').unwrap_or(("", service));
    name.is_none_or(|name| name == service || name == own) && namespace.is_none_or(|namespace| namespace == of)
}

impl Filter {
    /// Whether every flow matches.
    pub(super) fn is_empty(&self) -> bool {
        let Self { service, namespace, backend, client, protocol, state } = self;
        let has_name = service.is_some() || namespace.is_some() || state.is_some();
        !has_name && backend.is_none() && client.is_none() && protocol.is_none()
    }

    pub(super) fn matches(&self, flow: &FlowView, row: &v1::FlowStatus) -> bool {
        let backend = row.backend.parse::<SocketAddr>().unwrap_or(flow.backend_address);
        is_of(&row.service, self.service.as_deref(), self.namespace.as_deref())
            && self.backend.is_none_or(|(ip, port)| backend.ip() == ip && port.is_none_or(|port| port == backend.port()))
            && self
                .client
                .is_none_or(|(net, port)| net.contains(&flow.client.ip()) && port.is_none_or(|port| port == flow.client.port()))
            && self.protocol.is_none_or(|protocol| protocol == flow.protocol)
            && self.state.as_deref().is_none_or(|state| state == flow.state.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dataplane::flow::{BackendId, FlowMode, Ticks};
    use proto::ProxyProtocol;

    fn flow() -> FlowView {
        FlowView {
            protocol: 6,
            client: "198.51.100.7:5555".parse().unwrap(),
            frontend: "192.0.2.100:80".parse().unwrap(),
            backend: BackendId::default(),
            backend_address: "10.0.0.11:8080".parse().unwrap(),
            snat: Some("10.0.0.3:1024".parse().unwrap()),
            mode: FlowMode::Nat,
            state: FlowState::TcpEstablished,
            age: Ticks(80),
            idle: Ticks(8),
            shift: None,
        }
    }

    #[test]
    fn the_stage_of_a_header_is_one_that_operators_know() {
        let of = |protocol, stage| header_stage(&Shift::new(ProxyProtocol::V2, 28, stage, 1), protocol);
        let of_tcp = [HeaderStage::Owed, HeaderStage::Sent, HeaderStage::Taken, HeaderStage::Settled].map(|stage| of(6, stage));
        assert_eq!(of_tcp, ["owed", "sent", "taken", "taken"]);
        assert_eq!(of(17, HeaderStage::Settled), "each_datagram");
    }

    fn matches(change: impl FnOnce(&mut v1::ListFlowsRequest)) -> bool {
        let mut request = v1::ListFlowsRequest::default();
        change(&mut request);
        let row = v1::FlowStatus {
            service: "default/web".to_owned(),
            backend: "10.0.0.11:8080".to_owned(),
            ..v1::FlowStatus::default()
        };
        Filter::try_from(&request).unwrap().matches(&flow(), &row)
    }

    #[test]
    fn a_flow_matches_all_filters_or_is_left_out() {
        assert!(matches(|_| {}));
        for service in ["web", "default/web"] {
            assert!(matches(|request| request.service = service.to_owned()));
        }
        assert!(!matches(|request| request.service = "default".to_owned()));
        for (backend, is) in [("10.0.0.11", true), ("10.0.0.11:8080", true), ("10.0.0.11:80", false), ("10.0.0.1", false)] {
            assert_eq!(matches(|request| request.backend = backend.to_owned()), is, "{backend}");
        }
        let clients = [("198.51.100.7", true), ("198.51.100.0/24", true), ("198.51.100.7:5555", true), ("198.51.100.7:1", false)];
        for (client, is) in clients {
            assert_eq!(matches(|request| request.client = client.to_owned()), is, "{client}");
        }
        assert!(
            matches(|request| request.protocol = "tcp".to_owned()) && !matches(|request| request.protocol = "udp".to_owned())
        );
        assert!(
            matches(|request| request.state = "established".to_owned())
                && !matches(|request| request.state = "stream".to_owned())
        );
    }

    #[test]
    fn a_bad_filter_or_token_says_what_is_expected() {
        let error = |request: v1::ListFlowsRequest| Filter::try_from(&request).unwrap_err();
        let state = error(v1::ListFlowsRequest { state: "open".to_owned(), ..Default::default() });
        assert!(state.contains("found \"open\"") && state.contains("established"), "{state}");
        assert!(error(v1::ListFlowsRequest { client: "me".to_owned(), ..Default::default() }).contains("or a network"));
        assert!(error(v1::ListFlowsRequest { protocol: "icmp".to_owned(), ..Default::default() }).contains("tcp, udp or sctp"));
        for bad in ["x", "1.5.0", "1.4", "1.4.0.0", "1.4.-1"] {
            assert!(position(bad).unwrap_err().contains("next_page_token"), "{bad}");
        }
        let at = FlowPosition { worker: 3, family: Family::V6, entry: 70_000 };
        assert_eq!(position(&token(at)), Ok(at));
    }

    #[test]
    fn a_row_has_the_text_of_addresses_and_whole_seconds() {
        let inquiries = crate::worker_threads::inquiries::tests::without_workers();
        let row = row("edge-1", 2, &flow(), &inquiries.snapshot());
        assert_eq!(
            (row.protocol.as_str(), row.client.as_str(), row.frontend.as_str()),
            ("tcp", "198.51.100.7:5555", "192.0.2.100:80")
        );
        assert_eq!((row.backend.as_str(), row.service.as_str(), row.worker), ("10.0.0.11:8080", "", 2), "its backend is gone");
        assert_eq!((row.age_s, row.idle_s, row.state.as_str()), (10, 1, "established"));
    }
}
