//! A server with fixed answers.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proto::v1;
use proto::v1::admin_server::{Admin, AdminServer};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

/// The configuration of the gateway.
pub(super) const CONFIG: &str = "name: edge-1\nports: [{name: uplink, addresses: [192.0.2.2/24]}]\nannounce: {routeTable: 151, \
                      routeProtocol: 150}\n";

/// A server with fixed answers, except that packet counters grow by one per request.
#[derive(Default)]
pub(super) struct Canned {
    /// Answers without rows, and refuses reloads.
    pub(super) empty: bool,
    /// Answers as a controller with one gateway that does not answer.
    pub(super) of_several: bool,
    /// Requests whose answers differ from one to the next.
    pub(super) asked: AtomicU64,
    /// Whether gateway edge-1 is drained.
    pub(super) drained: AtomicBool,
}

#[tonic::async_trait]
impl Admin for Canned {
    async fn list_services(&self, _: Request<v1::ListServicesRequest>) -> Result<Response<v1::ListServicesResponse>, Status> {
        let web = v1::ServiceStatus {
            namespace: "default".into(),
            name: "web".into(),
            frontends: vec!["tcp 192.0.2.100:80".into(), "tcp [2001:db8::1:0]:80".into()],
            mode: "nat".into(),
            target: "endpoint".into(),
            scheduler: "maglev".into(),
            backends: 3,
            healthy: 2,
            app_protocols: [("tcp 192.0.2.100:80".into(), "kubernetes.io/h2c".into())].into(),
            ..Default::default()
        };
        let refused = v1::ServiceStatus {
            namespace: "default".into(),
            name: "sticky".into(),
            mode: "nat".into(),
            target: "endpoint".into(),
            scheduler: "maglev".into(),
            reason: "Unsupported".into(),
            message: "sessionAffinity".into(),
            ..Default::default()
        };
        let services = if self.empty { Vec::new() } else { vec![web, refused] };
        Ok(Response::new(v1::ListServicesResponse { services, ..Default::default() }))
    }

    async fn list_backends(&self, _: Request<v1::ListBackendsRequest>) -> Result<Response<v1::ListBackendsResponse>, Status> {
        let backend = |gateway: &str| v1::BackendStatus {
            gateway: gateway.into(),
            service: "default/web".into(),
            address: "10.0.0.11:8080".into(),
            protocol: "tcp".into(),
            state: "active".into(),
            healthy: true,
            weight: 1,
            flows: 7,
            ..Default::default()
        };
        if !self.of_several {
            return Ok(Response::new(v1::ListBackendsResponse { backends: vec![backend("edge-1")], silent: Vec::new() }));
        }
        let silent = vec![v1::Silent { gateway: "edge-3".into(), reason: "it gave no answer within 3 s".into() }];
        Ok(Response::new(v1::ListBackendsResponse { backends: vec![backend("edge-1"), backend("edge-2")], silent }))
    }

    async fn list_ports(&self, _: Request<v1::ListPortsRequest>) -> Result<Response<v1::ListPortsResponse>, Status> {
        let port = v1::PortStatus {
            name: "uplink".into(),
            device: "net_af_packet0,iface=eth1".into(),
            link: "up".into(),
            rx_packets: 18_446_744_073_709_551_615,
            tx_packets: 2,
            rx_missed: 0,
            speed_mbps: Some(10_000),
            steering: "single worker".into(),
            driver: "net_ice".into(),
            rx: Some(v1::QueueStatus {
                queues: 2,
                descriptors: 1024,
                burst_mode: "Vector AVX2".into(),
                offloads: vec!["RSS_HASH".into()],
            }),
            tx: Some(v1::QueueStatus {
                queues: 1,
                descriptors: 512,
                offloads: vec!["MBUF_FAST_FREE".into()],
                ..Default::default()
            }),
            rss_table: 512,
            ..v1::PortStatus::default()
        };
        Ok(Response::new(v1::ListPortsResponse { ports: vec![port], ..Default::default() }))
    }

    async fn list_drops(&self, _: Request<v1::ListDropsRequest>) -> Result<Response<v1::ListDropsResponse>, Status> {
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        if asked == 3 {
            return Err(Status::failed_precondition("enough"));
        }
        let fixed = v1::DropCount { reason: "malformed".into(), worker: 0, packets: 5, gateway: "edge-1".into() };
        let growing = v1::DropCount { reason: "no_flow".into(), worker: 0, packets: asked, gateway: "edge-1".into() };
        Ok(Response::new(v1::ListDropsResponse { drops: vec![fixed, growing], ..Default::default() }))
    }

    /// Two pages; the second has the flow that the first one's token asks for.
    async fn list_flows(&self, request: Request<v1::ListFlowsRequest>) -> Result<Response<v1::ListFlowsResponse>, Status> {
        let request = request.into_inner();
        // A Service without flows, and one that there is not.
        if ["sticky", "default/wbe"].contains(&request.service.as_str()) {
            let silent = v1::Silent { gateway: "edge-3".into(), reason: "it gave no answer".into() };
            let silent = self.of_several.then_some(silent).into_iter().collect();
            return Ok(Response::new(v1::ListFlowsResponse { silent, ..Default::default() }));
        }
        let port = if request.page_token.is_empty() { 5555 } else { 5556 };
        let flow = v1::FlowStatus {
            protocol: "tcp".into(),
            client: format!("198.51.100.7:{port}"),
            frontend: "192.0.2.100:80".into(),
            backend: "10.0.0.11:8080".into(),
            mode: "nat".into(),
            state: "established".into(),
            age_s: 61,
            idle_s: 2,
            service: request.service,
            ..Default::default()
        };
        let next_page_token = if port == 5555 { "0.4.64".into() } else { String::new() };
        Ok(Response::new(v1::ListFlowsResponse { flows: vec![flow], next_page_token, silent: Vec::new() }))
    }

    async fn list_explanations(
        &self,
        request: Request<v1::ExplainRequest>,
    ) -> Result<Response<v1::ListExplanationsResponse>, Status> {
        let first = self.explain(request).await?.into_inner();
        if !self.of_several {
            return Ok(Response::new(v1::ListExplanationsResponse { explanations: vec![first], silent: Vec::new() }));
        }
        let second = v1::Explanation { gateway: "edge-2".into(), ..first.clone() };
        let silent = v1::Silent { gateway: "edge-3".into(), reason: "it gave no answer".into() };
        Ok(Response::new(v1::ListExplanationsResponse { explanations: vec![first, second], silent: vec![silent] }))
    }

    async fn explain(&self, request: Request<v1::ExplainRequest>) -> Result<Response<v1::Explanation>, Status> {
        let v1::ExplainRequest { protocol, source, destination, packet, port, .. } = request.into_inner();
        let backend = |address: &str, chosen, why_not: &str| v1::ExplainedBackend {
            address: address.into(),
            chosen,
            state: "active".into(),
            healthy: why_not.is_empty(),
            weight: 1,
            why_not: why_not.into(),
            ..Default::default()
        };
        let frontend = v1::ExplainedFrontend {
            service: "default/web".into(),
            address: destination.clone(),
            mode: "nat".into(),
            scheduler: "maglev".into(),
            source: "allowed".into(),
            table_entry: Some(17),
            table_size: 1021,
            table_backend: "10.0.0.11:8080".into(),
            chosen_by: "table".into(),
            backend: "10.0.0.11:8080".into(),
            ..Default::default()
        };
        let rewrite =
            v1::ExplainedRewrite { source: "10.0.0.3:1024".into(), destination: "10.0.0.11:8080".into(), ..Default::default() };
        Ok(Response::new(v1::Explanation {
            protocol,
            source,
            destination,
            packet: if packet.is_empty() { "first".into() } else { packet },
            r#in: if port.is_empty() { "uplink".into() } else { port },
            worker: 1,
            verdict: "forward".into(),
            flow_effect: "begins".into(),
            frontend: Some(frontend),
            backends: vec![backend("10.0.0.11:8080", true, ""), backend("10.0.0.12:8080", false, "unhealthy")],
            rewrite: Some(rewrite),
            next_hop: "10.0.0.11".into(),
            next_hop_mac: "02:00:00:00:01:0b".into(),
            out: "cluster".into(),
            gateway: "edge-1".into(),
            ..Default::default()
        }))
    }

    type CaptureStream = tokio_stream::Iter<std::vec::IntoIter<Result<v1::CaptureReply, Status>>>;

    /// Three packets, and then the end of the gateway.
    async fn capture(&self, request: Request<v1::CaptureRequest>) -> Result<Response<Self::CaptureStream>, Status> {
        let request = request.into_inner();
        let traced = |port: usize| v1::TracedPacket {
            protocol: "tcp".into(),
            source: "198.51.100.7:5555".into(),
            destination: format!("192.0.2.100:{port}"),
            flow: "none".into(),
            verdict: "drop".into(),
            reason: "no_flow".into(),
            ..Default::default()
        };
        let received = v1::CapturedFrame { interface: 0, frame_len: 60, bytes: vec![0; request.snap_bytes.min(60) as usize] };
        let packet =
            |port| v1::CapturedPacket { packet: Some(traced(port)), received: Some(received.clone()), ..Default::default() };
        let progress = Some(v1::CaptureProgress { seen: 4, unseen: 6, matched: 4, lost: 1 });
        let first = v1::CaptureReply { interfaces: vec!["uplink".into()], progress, ..Default::default() };
        let packets = v1::CaptureReply { packets: (1..=3).map(packet).collect(), progress, ..Default::default() };
        let end = Err(Status::unavailable("the gateway ends"));
        Ok(Response::new(tokio_stream::iter(vec![Ok(first), Ok(packets), end])))
    }

    type WatchFlowsStream = tokio_stream::Iter<std::vec::IntoIter<Result<v1::WatchFlowsReply, Status>>>;

    /// Two drops, one event that is lost, and then the end of the gateway.
    async fn watch_flows(&self, request: Request<v1::WatchFlowsRequest>) -> Result<Response<Self::WatchFlowsStream>, Status> {
        let v1::WatchFlowsRequest { service, verdicts, .. } = request.into_inner();
        let event = |source: &str| v1::WatchEvent {
            verdict: verdicts.concat(),
            reason: "no_flow".into(),
            protocol: "tcp".into(),
            source: source.into(),
            destination: "192.0.2.100:80".into(),
            service: service.clone(),
            ..Default::default()
        };
        let events = vec![event("198.51.100.7:1"), event("198.51.100.7:2")];
        let end = Err(Status::unavailable("the gateway ends"));
        let replies = vec![Ok(v1::WatchFlowsReply::default()), Ok(v1::WatchFlowsReply { events, lost: 1 }), end];
        Ok(Response::new(tokio_stream::iter(replies)))
    }

    async fn list_heaviest(
        &self,
        request: Request<v1::ListHeaviestRequest>,
    ) -> Result<Response<v1::ListHeaviestResponse>, Status> {
        let row = |client: &str| v1::HeavyTraffic {
            client: client.into(),
            service: request.get_ref().service.clone(),
            packets_per_second: u64::from(request.get_ref().limit),
            bits_per_second: 12_000,
            ..Default::default()
        };
        let flow = v1::HeavyTraffic {
            protocol: "tcp".into(),
            frontend: "192.0.2.100:80".into(),
            backend: "10.0.0.11:8080".into(),
            ..row("198.51.100.7:5555")
        };
        let (flows, clients) = (vec![flow], vec![row("198.51.100.7")]);
        Ok(Response::new(v1::ListHeaviestResponse { flows, clients, silent: Vec::new() }))
    }

    /// Two pages of two flows, of which one has ended already.
    async fn end_flows(&self, request: Request<v1::EndFlowsRequest>) -> Result<Response<v1::EndFlowsResponse>, Status> {
        let v1::EndFlowsRequest { flows, count_only, .. } = request.into_inner();
        let flows = flows.unwrap_or_default();
        if flows == v1::ListFlowsRequest::default() {
            return Err(Status::invalid_argument("flows: found no filter"));
        }
        if flows.service == "default/wbe" {
            return Ok(Response::new(v1::EndFlowsResponse::default()));
        }
        let is_first = flows.page_token.is_empty();
        let ended = if count_only { 0 } else { 1 + u64::from(is_first) };
        let next_page_token = if is_first { "0.4.64".into() } else { String::new() };
        Ok(Response::new(v1::EndFlowsResponse { matched: 2, ended, next_page_token, silent: Vec::new() }))
    }

    async fn get_status(&self, _: Request<v1::GetStatusRequest>) -> Result<Response<v1::GetStatusResponse>, Status> {
        Ok(Response::new(v1::GetStatusResponse::default()))
    }

    /// The first answer is that of a gateway with a trouble, which is gone later unless `empty` is set.
    async fn list_troubles(&self, _: Request<v1::ListTroublesRequest>) -> Result<Response<v1::ListTroublesResponse>, Status> {
        let has_trouble = self.asked.fetch_add(1, Ordering::Relaxed) == 0 || self.empty;
        let trouble = v1::Trouble {
            severity: "critical".into(),
            kind: "port-down".into(),
            object: "Port uplink".into(),
            cause: "it has no link".into(),
            since: "2026-01-31T12:00:00Z".into(),
            remedy: "cable".into(),
            gateways: vec!["edge-1".into()],
        };
        let troubles = if has_trouble { vec![trouble] } else { Vec::new() };
        Ok(Response::new(v1::ListTroublesResponse { troubles, gateways: vec!["edge-1".into()], services: 3 }))
    }

    async fn reload(&self, _: Request<v1::ReloadRequest>) -> Result<Response<v1::ReloadResponse>, Status> {
        if self.empty {
            return Err(Status::invalid_argument("/etc/f.yaml:3: unknown key `snatt`, did you mean `snat`?"));
        }
        Ok(Response::new(v1::ReloadResponse { summary: "in effect: pools".into(), ..Default::default() }))
    }

    async fn list_gateways(&self, _: Request<v1::ListGatewaysRequest>) -> Result<Response<v1::ListGatewaysResponse>, Status> {
        let session = |status: &str| v1::SessionStatus { status: status.into(), ..Default::default() };
        let gateway = v1::GatewayStatus {
            name: "edge-1".into(),
            ready: true,
            generation: "1700/4".into(),
            draining: false,
            last_seen: "2026-01-31T12:00:00Z".into(),
            version: "0.1.0".into(),
            flows: 12,
            groups_owned: 5,
            groups: 16,
            partners_in_sync: 1,
            lag_ms: Some(4),
            shadow_flows: 9,
            sessions: vec![session("up"), session("down"), session("disabled")],
            ..Default::default()
        };
        let gone =
            v1::GatewayStatus { name: "edge-2".into(), draining: true, awaited_by: vec!["default".into()], ..Default::default() };
        Ok(Response::new(v1::ListGatewaysResponse { gateways: vec![gateway, gone] }))
    }

    async fn list_vips(&self, _: Request<v1::ListVipsRequest>) -> Result<Response<v1::ListVipsResponse>, Status> {
        let vip = |vip: &str, pool: &str, announce: &str, group| v1::VipStatus {
            vip: vip.into(),
            pool: pool.into(),
            announce: announce.into(),
            group,
            gateways: vec!["edge-1".into()],
            services: vec!["shop/a".into(), "shop/b".into()],
            stations: Vec::new(),
        };
        let vips = vec![vip("192.0.2.100", "link", "l2", Some(11)), vip("203.0.113.7", "far", "routed", None)];
        Ok(Response::new(v1::ListVipsResponse { vips }))
    }

    async fn list_pools(&self, _: Request<v1::ListPoolsRequest>) -> Result<Response<v1::ListPoolsResponse>, Status> {
        let pool = v1::PoolStatus {
            name: "default".into(),
            addresses: vec!["192.0.2.0/24".into(), "2001:db8::/64".into()],
            total: "18446744073709551872".into(),
            used: "1".into(),
            available: "18446744073709551871".into(),
            conflict: String::new(),
            unannounced_by: Vec::new(),
            awaiting: "1".into(),
            awaited: vec!["edge-2".into()],
        };
        Ok(Response::new(v1::ListPoolsResponse { pools: vec![pool] }))
    }

    async fn list_events(&self, _: Request<v1::ListEventsRequest>) -> Result<Response<v1::ListEventsResponse>, Status> {
        let event = |time: &str| v1::EventStatus {
            time: time.into(),
            r#type: "Warning".into(),
            reason: "Refused".into(),
            object: "Service default/web".into(),
            message: "no".into(),
        };
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        let all = ["2026-01-31T12:00:00Z", "2026-01-31T12:00:00Z", "2026-01-31T12:00:05Z"].map(event);
        if asked == 2 {
            return Err(Status::failed_precondition("enough"));
        }
        Ok(Response::new(v1::ListEventsResponse { events: all[..2 + usize::try_from(asked).unwrap()].to_vec() }))
    }

    async fn list_overrides(&self, _: Request<v1::ListOverridesRequest>) -> Result<Response<v1::ListOverridesResponse>, Status> {
        let (by, at) = ("alice@edge".to_owned(), "2026-01-31T12:00:00Z".to_owned());
        let drain = |name: &str, flows| {
            let (kind, by, at) = ("node".into(), by.clone(), at.clone());
            v1::Override { kind, name: name.into(), by, at, flows, ..Default::default() }
        };
        let drain_of = drain("10.0.0.11:8080", None);
        let of_weight = v1::Override { kind: "weight".into(), service: "default/web".into(), weight: Some(0), ..drain_of };
        let mut overrides = vec![drain("worker-1", Some(12)), drain("worker-2", None), of_weight];
        // Its only flow begins after the first answer since it is drained. A new leader has not read all objects.
        if self.drained.load(Ordering::Relaxed) {
            let asked = self.asked.fetch_add(1, Ordering::Relaxed);
            if asked == 2 {
                return Err(Status::failed_precondition("this controller does not lead"));
            }
            overrides.push(v1::Override { kind: "node".into(), ..drain("edge-1", Some(0)) });
            overrides.push(v1::Override { kind: "gateway".into(), ..drain("edge-1", Some(u64::from(asked == 1))) });
        }
        let silent = v1::Silent { gateway: "edge-3".into(), reason: "it gave no answer".into() };
        let silent = self.of_several.then_some(silent).into_iter().collect();
        Ok(Response::new(v1::ListOverridesResponse { overrides, silent }))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        let v1::DrainRequest { target, by } = request.into_inner();
        match target.as_str() {
            "edge-1" => {
                self.drained.store(true, Ordering::Relaxed);
                let (summary, notes, target) = (format!("drained by {by}"), vec!["l2".into()], "gateway/edge-1".into());
                Ok(Response::new(v1::ChangeResponse { summary, notes, target }))
            }
            other => Err(Status::not_found(format!("{other} is neither a gateway (edge-1) nor a node (none)"))),
        }
    }

    async fn undrain(&self, request: Request<v1::UndrainRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        let summary = format!("{} is back", request.into_inner().target);
        Ok(Response::new(v1::ChangeResponse { summary, ..Default::default() }))
    }

    async fn set_weight(&self, request: Request<v1::SetWeightRequest>) -> Result<Response<v1::ChangeResponse>, Status> {
        let v1::SetWeightRequest { service, backend, weight, .. } = request.into_inner();
        Ok(Response::new(v1::ChangeResponse { summary: format!("{service} {backend} {weight:?}"), ..Default::default() }))
    }

    async fn get_config(&self, _: Request<v1::GetConfigRequest>) -> Result<Response<v1::GetConfigResponse>, Status> {
        // The first answer is that of a gateway that has just started.
        let has_state = self.asked.fetch_add(1, Ordering::Relaxed) > 0;
        let pool = v1::Pool { name: "a".into(), announce: v1::Announce::Routed.into(), ..Default::default() };
        let pools = if has_state { vec![pool] } else { Vec::new() };
        Ok(Response::new(v1::GetConfigResponse { yaml: CONFIG.into(), pools, has_state }))
    }
}

/// Starts a server on a socket.
pub(super) fn serve(socket: &Path, canned: Canned) {
    let incoming = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
    let server = tonic::transport::Server::builder().add_service(AdminServer::new(canned)).serve_with_incoming(incoming);
    tokio::spawn(server);
}
