//! `sluicectl explain`: what a gateway, or each gateway of a controller, does with a packet, as text, JSON or YAML.
//!
//! Not here: the explanation itself, which the gateway gives.

use std::io::Write;

use proto::v1;

use crate::args::{ExplainArguments, ExplainOutput};
use crate::client::{Server, ask};
use crate::error::CtlError;
use crate::list::{format_error, silent_text, write_yaml};

/// Why a backend takes no new flows.
const UNHEALTHY: &str = "unhealthy";
/// Width of the names of the lines.
const NAME_CHARS: usize = 10;

/// Fetches an explanation and prints it.
pub(super) async fn print(server: &Server, arguments: &ExplainArguments, out: &mut impl Write) -> Result<(), CtlError> {
    let request = v1::ExplainRequest {
        protocol: arguments.protocol.clone(),
        source: arguments.source.to_string(),
        destination: arguments.destination.to_string(),
        packet: arguments.packet.clone().unwrap_or_default(),
        port: arguments.port.clone(),
        gateway: arguments.gateway.clone(),
    };
    let v1::ListExplanationsResponse { explanations, silent } =
        ask(server, async |mut admin| admin.list_explanations(request).await).await?;
    for (index, explanation) in explanations.iter().enumerate() {
        let is_next = index > 0;
        match arguments.output {
            ExplainOutput::Text => {
                let gap = if is_next { "\n" } else { "" };
                let of_several = explanations.len() + silent.len() > 1;
                let name = if of_several { line("gateway", &explanation.gateway) } else { String::new() };
                write!(out, "{gap}{name}{}", text(explanation))?;
            }
            ExplainOutput::Json => writeln!(out, "{}", serde_json::to_string_pretty(explanation).map_err(format_error)?)?,
            ExplainOutput::Yaml => {
                if is_next {
                    writeln!(out, "---")?;
                }
                write_yaml(explanation, out)?;
            }
        }
    }
    out.flush()?;
    match (explanations.as_slice(), silent.as_slice()) {
        ([], []) => Err(CtlError::Silent("no gateway is connected to this controller".to_owned())),
        (_, []) => Ok(()),
        (_, silent) => Err(CtlError::Silent(silent_text(silent))),
    }
}

fn line(name: &str, text: &str) -> String {
    format!("{name:<NAME_CHARS$}{text}\n")
}

/// The lines for people: name and text.
pub(super) fn text(explanation: &v1::Explanation) -> String {
    let v1::Explanation { protocol, source, destination, packet, r#in, worker, verdict, reason, flow_effect, .. } = explanation;
    let mut lines = vec![
        ("packet", format!("{protocol} {source} -> {destination}, the {packet} of its connection")),
        ("arrives", format!("on {in}, for worker {worker}", r#in = r#in)),
        ("flow", explanation.flow.as_ref().map_or_else(|| "none".to_owned(), flow)),
    ];
    match &explanation.frontend {
        None => lines.push(("frontend", "none".to_owned())),
        Some(frontend) => lines.extend(of_frontend(frontend)),
    }
    if let Some(v1::ExplainedRefusal { service, reason, message }) = &explanation.refused {
        lines.push(("refused", format!("{service}, {reason}: {message}")));
    }
    lines.extend(explanation.backends.iter().map(|one| ("", backend(one))));
    if let Some(rewrite) = &explanation.rewrite {
        lines.push(("rewrite", of_rewrite(rewrite)));
        let hop = [&explanation.next_hop, &explanation.next_hop_mac].map(String::as_str);
        let hop = hop.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(", ");
        lines.push(("leaves", format!("by {} to next hop {hop}", explanation.out)));
    }
    if !explanation.no_route.is_empty() {
        let ends = explanation.no_route.join(", ");
        lines.push(("no route", format!("Linux sends to {ends}, which the gateway cannot: no shorter prefix is used")));
    }
    if !explanation.no_way_back.is_empty() {
        lines.push(("no reply", format!("{}: replies cannot leave", explanation.no_way_back)));
    }
    let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let reset = if explanation.reset { " (its source gets a reset)" } else { "" };
    let effect = match flow_effect.as_str() {
        "none" => String::new(),
        effect => format!("; it {effect} {}", if effect == "begins" { "a flow" } else { "the flow" }),
    };
    lines.push(("verdict", format!("{verdict}{because}{reset}{effect}")));
    lines.iter().map(|(name, text)| line(name, text)).collect()
}

fn flow(flow: &v1::FlowStatus) -> String {
    let v1::FlowStatus { protocol, client, frontend, backend, state, mode, age_s, idle_s, snat, .. } = flow;
    let snat = if snat.is_empty() { String::new() } else { format!(" from {snat}") };
    let header = match flow.proxy_header.as_str() {
        "" => String::new(),
        "each_datagram" => format!(", PROXY header of {} bytes before each datagram", flow.shift),
        stage => format!(", PROXY header {stage}, numbers shifted by {}", flow.shift),
    };
    format!("{protocol} {client} -> {frontend} -> {backend}{snat}, {mode}, {state}, age {age_s}s, idle {idle_s}s{header}")
}

fn of_frontend(frontend: &v1::ExplainedFrontend) -> Vec<(&'static str, String)> {
    let v1::ExplainedFrontend { service, address, mode, scheduler, source, remembered, table_size, table_backend, .. } = frontend;
    let ranges = if frontend.source_ranges { "the Service has source ranges" } else { "the Service has no source ranges" };
    let header = match frontend.proxy_protocol.as_str() {
        "" => String::new(),
        version => format!(", PROXY protocol {version}"),
    };
    let mut lines = vec![
        ("frontend", format!("{address} of {service}, {mode}, {scheduler}{header}")),
        (
            "source",
            format!(
                "{}; {ranges}",
                if source == "allowed" { source.clone() } else { format!("new flows are dropped: {source}") }
            ),
        ),
        (
            "affinity",
            match (frontend.affinity, remembered.as_str()) {
                (false, _) => "off".to_owned(),
                (true, "") => "on; this client is not known".to_owned(),
                (true, backend) => format!("on; this client keeps {backend}"),
            },
        ),
    ];
    lines.push((
        "table",
        frontend.table_entry.map_or_else(
            || "empty: no backend takes new flows".to_owned(),
            |entry| format!("entry {entry} of {table_size}: {table_backend}"),
        ),
    ));
    let backend =
        if frontend.backend.is_empty() { "none".to_owned() } else { format!("{}, by {}", frontend.backend, frontend.chosen_by) };
    lines.push(("backend", backend));
    lines
}

fn backend(backend: &v1::ExplainedBackend) -> String {
    let v1::ExplainedBackend { address, chosen, weight, why_not, healthy, fails_open, .. } = backend;
    let mark = if *chosen { "*" } else { "-" };
    let takes = if why_not.is_empty() { format!("weight {weight}") } else { format!("takes no new flows: {why_not}") };
    let health = match (healthy, fails_open) {
        (_, true) => "; unhealthy, and used because all backends are (fail-open)",
        // A draining backend, for one.
        (false, false) if why_not != UNHEALTHY => "; unhealthy",
        (_, false) => "",
    };
    format!("{mark} {address}: {takes}{health}")
}

fn of_rewrite(rewrite: &v1::ExplainedRewrite) -> String {
    let v1::ExplainedRewrite { source, destination, tunnel_source, tunnel_destination, snat_port_early } = rewrite;
    let tunnel =
        if tunnel_source.is_empty() { String::new() } else { format!(", inside {tunnel_source} -> {tunnel_destination}") };
    let early = if *snat_port_early { " (ports are scarce: this one has not rested)" } else { "" };
    format!("{source} -> {destination}{tunnel}{early}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_has_its_protocol_and_a_reset_stands_beside_the_reason() {
        let text_of = |text: &str| text.to_owned();
        let flow = v1::FlowStatus {
            protocol: text_of("tcp"),
            client: text_of("198.51.100.7:5555"),
            frontend: text_of("192.0.2.100:80"),
            backend: text_of("10.0.0.11:8080"),
            mode: text_of("nat"),
            state: text_of("established"),
            ..Default::default()
        };
        let explanation = v1::Explanation {
            verdict: text_of("drop"),
            reason: text_of("no_flow"),
            reset: true,
            flow_effect: text_of("none"),
            no_route: vec![text_of("198.51.100.7 by over0")],
            flow: Some(flow),
            ..Default::default()
        };
        let text = text(&explanation);
        let flow = "flow      tcp 198.51.100.7:5555 -> 192.0.2.100:80 -> 10.0.0.11:8080, nat, established, age 0s, idle 0s\n";
        assert!(text.contains(flow), "{text}");
        assert!(text.contains("no route  Linux sends to 198.51.100.7 by over0, which"), "{text}");
        assert!(text.ends_with("verdict   drop: no_flow (its source gets a reset)\n"), "{text}");
        let json = serde_json::to_value(&explanation).unwrap();
        assert_eq!((&json["reason"], &json["reset"]), (&"no_flow".into(), &true.into()));
    }

    #[test]
    fn a_refused_service_is_named_with_the_reason() {
        let refused = v1::ExplainedRefusal {
            service: "default/web".to_owned(),
            reason: "Refused".to_owned(),
            message: "no SNAT address for IPv4 serves the port".to_owned(),
        };
        let (verdict, reason) = ("drop".to_owned(), "unknown_vip".to_owned());
        let explanation = v1::Explanation { verdict, reason, refused: Some(refused), ..Default::default() };
        let text = text(&explanation);
        let expected = "frontend  none\nrefused   default/web, Refused: no SNAT address for IPv4 serves the port\n";
        assert!(text.contains(expected), "{text}");
    }
}
