//! The explanation of a packet as a message: names instead of slots, and why a backend takes no new flows.
//!
//! Invariant: no decision is made here; all facts come from the engine's explanation and the snapshot's views.

use std::net::{IpAddr, SocketAddr};

use dataplane::flow::BackendId;
use dataplane::forward::{
    ExplainError, ExplainedFrontend, ExplainedPacket, Explanation, FlowEffect, Leaves, Outcome, PacketKind, TunnelEnds,
};
use dataplane::snapshot::{BackendView, RouteTo};
use dataplane::{Link, PortIndex, Snapshot};
use proto::{Protocol, Scheduler, v1};
use tonic::Status;

use super::flows::row;
use crate::worker_threads::inquiries::Inquiries;

/// Explains the packet of a request. Waits for a worker.
pub(super) fn explain(gateway: &str, inquiries: &Inquiries, request: &v1::ExplainRequest) -> Result<v1::Explanation, Status> {
    let packet = packet(request, &inquiries.snapshot()).map_err(Status::invalid_argument)?;
    let (explained, snapshot) = inquiries.explain(&packet).map_err(|error| match &error {
        ExplainError::Families => Status::invalid_argument(error.to_string()),
        ExplainError::Asking(_) => Status::unavailable(error.to_string()),
        ExplainError::NoMemory => Status::resource_exhausted(error.to_string()),
    })?;
    Ok(message(gateway, &packet, &explained, &snapshot))
}

fn packet(request: &v1::ExplainRequest, snapshot: &Snapshot) -> Result<ExplainedPacket, String> {
    let protocol: Protocol =
        request.protocol.parse().map_err(|_| format!("protocol: found {:?}, expected tcp, udp or sctp", request.protocol))?;
    let address = |key, text: &str| {
        text.parse::<SocketAddr>().map_err(|_| format!("{key}: found {text:?}, expected ADDRESS:PORT or [ADDRESS]:PORT"))
    };
    let kind = match request.packet.as_str() {
        "" => None,
        "first" => Some(PacketKind::First),
        "later" => Some(PacketKind::Later),
        other => return Err(format!("packet: found {other:?}, expected first or later")),
    };
    let link = match request.port.as_str() {
        "" => None,
        name => {
            let ports = snapshot.ports();
            let index = ports.iter().position(|port| port.name == name).and_then(|index| u8::try_from(index).ok());
            let names = || ports.iter().map(|port| port.name.as_str()).collect::<Vec<_>>().join(", ");
            let index = index.ok_or_else(|| format!("port: found {name:?}, expected one of {}", names()))?;
            Some(Link::from(PortIndex(index)))
        }
    };
    let (source, destination) = (address("source", &request.source)?, address("destination", &request.destination)?);
    Ok(ExplainedPacket { protocol, source, destination, kind, link })
}

fn message(gateway: &str, packet: &ExplainedPacket, explained: &Explanation, snapshot: &Snapshot) -> v1::Explanation {
    let (verdict, reason) = verdict(explained.outcome, snapshot);
    let leaves = explained.leaves.as_ref();
    let takes_flow = matches!(explained.effect, FlowEffect::Continues);
    v1::Explanation {
        protocol: packet.protocol.to_string(),
        source: packet.source.to_string(),
        destination: packet.destination.to_string(),
        packet: match explained.kind {
            PacketKind::First => "first",
            PacketKind::Later => "later",
        }
        .to_owned(),
        r#in: link(explained.link, snapshot),
        worker: u32::try_from(explained.worker).unwrap_or(u32::MAX),
        verdict: verdict.to_owned(),
        reason,
        flow_effect: match explained.effect {
            FlowEffect::None => "none",
            FlowEffect::Continues => "continues",
            FlowEffect::Begins => "begins",
            FlowEffect::Ends => "ends",
            FlowEffect::Replaces => "replaces",
        }
        .to_owned(),
        flow: explained.flow.as_ref().map(|flow| row(gateway, explained.worker, flow, snapshot)),
        frontend: explained.frontend.as_ref().map(|frontend| of_frontend(frontend, takes_flow, snapshot)),
        backends: explained.frontend.as_ref().map(|frontend| backends(frontend, packet.protocol, snapshot)).unwrap_or_default(),
        rewrite: leaves.map(rewrite),
        next_hop: leaves.and_then(|leaves| leaves.next_hop).map_or_else(String::new, |hop| hop.to_string()),
        next_hop_mac: leaves.map_or_else(String::new, |leaves| leaves.mac.to_string()),
        out: leaves.map_or_else(String::new, |leaves| link(leaves.link, snapshot)),
        gateway: gateway.to_owned(),
        reset: matches!(explained.outcome, Outcome::Reset(_)),
        no_route: no_route(packet, explained, snapshot),
        no_way_back: no_way_back(packet, explained, snapshot),
        refused: refused(packet, explained, snapshot),
    }
}

/// The refusal of the Service at the packet's destination: of the frontend, or of what would be one.
fn refused(packet: &ExplainedPacket, explained: &Explanation, snapshot: &Snapshot) -> Option<v1::ExplainedRefusal> {
    let at = explained.frontend.as_ref().map_or(packet.destination, |frontend| frontend.address);
    let view = snapshot.refused_at(packet.protocol, at)?;
    let refusal = view.refusal.as_ref()?;
    let (service, reason, message) = (view.name.to_string(), refusal.reason.as_str().to_owned(), refusal.message.clone());
    Some(v1::ExplainedRefusal { service, reason, message })
}

/// The verdict in the words of `replay`, and what it depends on.
fn verdict(outcome: Outcome, snapshot: &Snapshot) -> (&'static str, String) {
    match outcome {
        Outcome::Forward => ("forward", String::new()),
        Outcome::Wait(at, neighbour) => ("wait", format!("neighbour {neighbour} on {} is not resolved", link(at, snapshot))),
        Outcome::Linux(at) => ("linux", format!("twin of {}", link(at, snapshot))),
        Outcome::RefusedByReset => ("reply", "reset".to_owned()),
        Outcome::RefusedByIcmp => ("reply", "port_unreachable".to_owned()),
        Outcome::OtherIcmp => ("reply", "icmp".to_owned()),
        Outcome::Reset(reason) | Outcome::Drop(reason) => ("drop", reason.as_str().to_owned()),
    }
}

/// Of the ends of a packet those to which Linux sends by a device that packets of the gateway cannot take.
fn no_route(packet: &ExplainedPacket, explained: &Explanation, snapshot: &Snapshot) -> Vec<String> {
    let backend = explained.frontend.as_ref().and_then(|frontend| snapshot.backend(frontend.backend?));
    let ends = [Some(packet.source.ip()), backend.map(|backend| backend.address.ip())].into_iter().flatten();
    ends.filter_map(|end| Some(format!("{end} by {}", snapshot.device_to(end)?))).collect()
}

/// Why replies of the gateway do not reach the source of a packet to a frontend. In one-way modes they pass it by.
fn no_way_back(packet: &ExplainedPacket, explained: &Explanation, snapshot: &Snapshot) -> String {
    let client = packet.source.ip();
    let route = match client {
        IpAddr::V4(client) => snapshot.route(u32::from(client)),
        IpAddr::V6(client) => snapshot.route(u128::from(client)),
    };
    let replies = explained.frontend.as_ref().is_some_and(|frontend| frontend.mode.is_two_way());
    let has_none = replies && route == RouteTo::None && snapshot.device_to(client).is_none();
    if has_none { format!("Linux has no route to {client}") } else { String::new() }
}

/// A link as port and VLAN.
fn link(link: Link, snapshot: &Snapshot) -> String {
    let port = &snapshot.port(link.port()).name;
    if link.is_tagged() { format!("{port}.{}", link.vlan()) } else { port.clone() }
}

fn address(id: Option<BackendId>, snapshot: &Snapshot) -> String {
    id.and_then(|id| snapshot.backend(id)).map_or_else(String::new, |backend| backend.address.to_string())
}

fn of_frontend(frontend: &ExplainedFrontend, takes_flow: bool, snapshot: &Snapshot) -> v1::ExplainedFrontend {
    let refused = frontend.refused_source.map(dataplane::DropReason::as_str);
    let source = refused.unwrap_or(if frontend.is_allowed { "allowed" } else { "source_range" });
    let is_by_table = matches!(frontend.scheduler, Scheduler::Maglev | Scheduler::SourceHash | Scheduler::DestinationHash);
    let chosen_by = match frontend.backend {
        None => "",
        Some(_) if takes_flow => "flow",
        Some(_) if frontend.has_affinity && frontend.remembered == frontend.backend => "affinity",
        Some(_) if frontend.has_affinity || is_by_table => "table",
        Some(_) => "scheduler",
    };
    v1::ExplainedFrontend {
        service: frontend.service.to_string(),
        address: frontend.address.to_string(),
        mode: frontend.mode.as_str().to_owned(),
        scheduler: frontend.scheduler.as_str().to_owned(),
        source: source.to_owned(),
        source_ranges: frontend.has_source_ranges,
        affinity: frontend.has_affinity,
        remembered: address(frontend.remembered, snapshot),
        table_entry: frontend.entry.map(|(entry, ..)| entry),
        table_size: frontend.entry.map_or(0, |(_, size, _)| size),
        table_backend: address(frontend.entry.map(|(.., backend)| backend), snapshot),
        chosen_by: chosen_by.to_owned(),
        backend: address(frontend.backend, snapshot),
        proxy_protocol: frontend.proxy_protocol.map(|version| version.to_string()).unwrap_or_default(),
    }
}

/// All backends of the frontend's port.
fn backends(frontend: &ExplainedFrontend, protocol: Protocol, snapshot: &Snapshot) -> Vec<v1::ExplainedBackend> {
    let Some(service) = snapshot.services().get(&frontend.service) else { return Vec::new() };
    let of_frontend = service.ports.iter().find(|port| port.protocol == protocol && port.frontends.contains(&frontend.address));
    let backend = |backend: &BackendView| v1::ExplainedBackend {
        address: backend.address.to_string(),
        chosen: Some(backend.id) == frontend.backend,
        state: if backend.draining { "draining" } else { "active" }.to_owned(),
        healthy: backend.healthy,
        weight: backend.weight.into(),
        why_not: why_not(backend).to_owned(),
        fails_open: backend.accepts_new && !backend.healthy,
    };
    of_frontend.map(|port| port.backends.iter().map(backend).collect()).unwrap_or_default()
}

/// Why no new flow goes to a backend.
fn why_not(backend: &BackendView) -> &'static str {
    match backend {
        BackendView { accepts_new: true, weight: 1.., .. } => "",
        BackendView { draining: true, .. } => "draining",
        BackendView { healthy: false, .. } => "unhealthy",
        BackendView { weight: 0, .. } => "weight 0",
        BackendView { .. } => "takes no new flows",
    }
}

fn rewrite(leaves: &Leaves) -> v1::ExplainedRewrite {
    let end = |address: std::net::IpAddr, port: Option<u16>| {
        port.map_or_else(|| address.to_string(), |port| SocketAddr::new(address, port).to_string())
    };
    let tunnel = leaves.tunnel.map(|TunnelEnds { source, destination, ports }| {
        (end(source, ports.map(|(source, _)| source)), end(destination, ports.map(|(_, destination)| destination)))
    });
    let (tunnel_source, tunnel_destination) = tunnel.unwrap_or_default();
    v1::ExplainedRewrite {
        source: leaves.source.to_string(),
        destination: leaves.destination.to_string(),
        tunnel_source,
        tunnel_destination,
        snat_port_early: leaves.is_port_early,
    }
}

#[cfg(test)]
mod tests {
    use dataplane::DropReason;

    use super::*;

    fn view(draining: bool, healthy: bool, weight: u16) -> BackendView {
        let accepts_new = !draining && healthy && weight > 0;
        let address = "10.0.0.11:8080".parse().unwrap();
        BackendView { address, id: BackendId::default(), weight, healthy, draining, accepts_new }
    }

    #[test]
    fn a_backend_says_why_it_takes_no_new_flows() {
        let rows = [
            ((true, false, 0), "draining"),
            ((false, false, 1), "unhealthy"),
            ((false, true, 0), "weight 0"),
            ((false, true, 2), ""),
        ];
        for ((draining, healthy, weight), expected) in rows {
            assert_eq!(why_not(&view(draining, healthy, weight)), expected);
        }
    }

    #[test]
    fn the_reason_of_a_drop_is_its_name_alone() {
        let snapshot = crate::worker_threads::inquiries::tests::without_workers().snapshot();
        for outcome in [Outcome::Reset(DropReason::NoFlow), Outcome::Drop(DropReason::NoFlow)] {
            assert_eq!(verdict(outcome, &snapshot), ("drop", "no_flow".to_owned()));
        }
    }

    #[test]
    fn a_request_that_is_no_packet_says_what_is_expected() {
        let inquiries = crate::worker_threads::inquiries::tests::without_workers();
        let good = v1::ExplainRequest {
            protocol: "tcp".to_owned(),
            source: "198.51.100.7:5555".to_owned(),
            destination: "192.0.2.100:80".to_owned(),
            ..Default::default()
        };
        let error = |request: v1::ExplainRequest| explain("edge-1", &inquiries, &request).unwrap_err().message().to_owned();
        assert!(error(v1::ExplainRequest { protocol: "icmp".to_owned(), ..good.clone() }).contains("expected tcp, udp or sctp"));
        assert!(error(v1::ExplainRequest { source: "here".to_owned(), ..good.clone() }).contains("source: found \"here\""));
        assert!(error(v1::ExplainRequest { packet: "syn".to_owned(), ..good.clone() }).contains("first or later"));
        assert!(error(v1::ExplainRequest { port: "wan".to_owned(), ..good.clone() }).contains("port: found \"wan\""));
        let families = v1::ExplainRequest { destination: "[2001:db8::1]:80".to_owned(), ..good.clone() };
        assert!(error(families).contains("different families"));
        assert!(error(good).contains("worker 0 gave no answer"));
    }
}
