//! A packet as text, a line for each stage.

use proto::v1;

/// Width of the names of the lines.
const NAME_CHARS: usize = 10;

/// The lines of a packet.
pub(super) fn text(packet: &v1::TracedPacket) -> String {
    let v1::TracedPacket { time, r#in, worker, from, protocol, source, destination, bytes, .. } = packet;
    let came = match from.as_str() {
        "worker" => format!("on {in}, by another worker, which handed it to worker {worker}, its owner"),
        "waited" => format!("on {in}, by worker {worker}; it has waited for its next hop or for the first fragment"),
        "linux" => format!("from the kernel by {in}, by worker {worker}"),
        _ => format!("on {in}, by worker {worker}"),
    };
    let mut lines = vec![("received", came), ("flow", flow(packet)), ("verdict", verdict(packet))];
    lines.extend(packet.sent.iter().map(|sent| {
        let v1::SentPacket { out, protocol, source, destination, bytes } = sent;
        ("sent", format!("by {out}: {}", ends(protocol, source, destination, *bytes)))
    }));
    let head = format!("{time} {}\n", ends(protocol, source, destination, *bytes));
    head + &lines.iter().map(|(name, text)| format!("  {name:<NAME_CHARS$}{text}\n")).collect::<String>()
}

fn ends(protocol: &str, source: &str, destination: &str, bytes: u32) -> String {
    match (protocol, source) {
        ("", _) => format!("a frame of another protocol, or malformed, {bytes} bytes"),
        (protocol, "") => format!("{protocol}, {bytes} bytes"),
        _ => format!("{protocol} {source} -> {destination}, {bytes} bytes"),
    }
}

fn flow(packet: &v1::TracedPacket) -> String {
    let v1::TracedPacket { flow, service, frontend, backend, .. } = packet;
    let mut text = flow.clone();
    if !frontend.is_empty() {
        let service = if service.is_empty() { "a service that was removed" } else { service };
        text += &format!(", frontend {frontend} of {service}");
    }
    if !backend.is_empty() {
        text += &format!(", backend {backend}");
    }
    if !packet.proxy_header.is_empty() {
        text += &format!(", PROXY header {}, {} bytes", packet.proxy_header.replace('_', " "), packet.shift);
    }
    text
}

fn verdict(packet: &v1::TracedPacket) -> String {
    match (packet.verdict.as_str(), packet.reason.as_str()) {
        ("wait", _) => "wait: for its next hop, or for the first fragment of its datagram".to_owned(),
        (verdict, "") => verdict.to_owned(),
        (verdict, reason) => format!("{verdict}: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_has_a_line_for_each_stage() {
        let sent = v1::SentPacket {
            out: "cluster".into(),
            protocol: "tcp".into(),
            source: "10.0.0.3:1024".into(),
            destination: "10.0.0.11:8080".into(),
            bytes: 74,
        };
        let packet = v1::TracedPacket {
            time: "2026-01-31T12:00:00.123456Z".into(),
            r#in: "uplink".into(),
            worker: 1,
            from: "port".into(),
            protocol: "tcp".into(),
            source: "198.51.100.7:5555".into(),
            destination: "192.0.2.100:80".into(),
            bytes: 74,
            flow: "new".into(),
            service: "default/web".into(),
            frontend: "192.0.2.100:80".into(),
            backend: "10.0.0.11:8080".into(),
            verdict: "forward".into(),
            reason: String::new(),
            sent: vec![sent],
            ..Default::default()
        };
        let expected = "2026-01-31T12:00:00.123456Z tcp 198.51.100.7:5555 -> 192.0.2.100:80, 74 bytes\n  \
                        received  on uplink, by worker 1\n  \
                        flow      new, frontend 192.0.2.100:80 of default/web, backend 10.0.0.11:8080\n  \
                        verdict   forward\n  \
                        sent      by cluster: tcp 10.0.0.3:1024 -> 10.0.0.11:8080, 74 bytes\n";
        assert_eq!(text(&packet), expected);
        let headed = v1::TracedPacket { proxy_header: "sent".into(), shift: 28, ..packet.clone() };
        assert!(text(&headed).contains(", backend 10.0.0.11:8080, PROXY header sent, 28 bytes\n"), "{}", text(&headed));
        let dropped = v1::TracedPacket {
            protocol: String::new(),
            flow: "none".into(),
            from: "worker".into(),
            frontend: String::new(),
            backend: String::new(),
            verdict: "drop".into(),
            reason: "malformed".into(),
            sent: Vec::new(),
            ..packet
        };
        let expected = "2026-01-31T12:00:00.123456Z a frame of another protocol, or malformed, 74 bytes\n  \
                        received  on uplink, by another worker, which handed it to worker 1, its owner\n  \
                        flow      none\n  \
                        verdict   drop: malformed\n";
        assert_eq!(text(&dropped), expected);
    }
}
