//! Output of verdicts: a line of JSON per packet, or counts at the end.
//!
//! Invariant: lines are in the order of the packets, even if a held packet gets its verdict after later packets.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Write};

use dataplane::{PacketOutcome, PortConfig, PortIndex};
use serde::Serialize;

use super::gateway::{Destination, RefusedService, RefusedServices, Verdict};

/// A line of output (DESIGN section 8).
#[derive(Debug, Serialize)]
struct VerdictLine<'a> {
    packet: u64,
    #[serde(rename = "in")]
    in_port: &'a str,
    verdict: &'static str,
    drop: Option<&'static str>,
    service: Option<String>,
    frontend: Option<String>,
    backend: Option<String>,
    out: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<&'a RefusedService>,
}

/// Packets without a verdict, in order, and the verdicts so far.
pub(super) struct VerdictReport {
    names: Vec<String>,
    json: bool,
    refused: RefusedServices,
    /// Packets from number `next` on.
    waiting: VecDeque<WaitingPacket>,
    next: u64,
    counts: BTreeMap<(&'static str, &'static str), u64>,
    /// Packets that were not forwarded, by the Service that is refused at their destination.
    refused_counts: BTreeMap<RefusedService, u64>,
}

/// A packet without a line.
#[derive(Debug)]
struct WaitingPacket {
    port: PortIndex,
    to: Option<Destination>,
    verdict: Option<Verdict>,
}

impl VerdictReport {
    /// With `json`, prints a line for each packet instead of counts at the end.
    pub(super) fn new(ports: &[PortConfig], refused: RefusedServices, json: bool) -> Self {
        let names = ports.iter().map(|port| port.name.clone()).collect();
        let (waiting, counts, refused_counts) = (VecDeque::new(), BTreeMap::new(), BTreeMap::new());
        Self { names, json, refused, waiting, next: 1, counts, refused_counts }
    }

    /// Records a packet and returns its number.
    pub(super) fn arrived(&mut self, port: PortIndex, to: Option<Destination>) -> u64 {
        self.waiting.push_back(WaitingPacket { port, to, verdict: None });
        self.next + self.waiting.len() as u64 - 1
    }

    /// Records verdicts and writes complete lines.
    pub(super) fn take(&mut self, verdicts: impl Iterator<Item = Verdict>, out: &mut impl Write) -> io::Result<()> {
        for verdict in verdicts {
            let position = verdict.packet.checked_sub(self.next).and_then(|at| usize::try_from(at).ok());
            if let Some(packet) = position.and_then(|at| self.waiting.get_mut(at)) {
                packet.verdict = Some(verdict);
            }
        }
        while let Some(packet) = self.waiting.front_mut() {
            let Some(verdict) = packet.verdict.take() else { return Ok(()) };
            let (port, to) = (packet.port, packet.to);
            self.waiting.pop_front();
            self.next += 1;
            self.write_line(port, to, &verdict, out)?;
        }
        Ok(())
    }

    fn write_line(
        &mut self,
        port: PortIndex,
        to: Option<Destination>,
        verdict: &Verdict,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let (word, drop, out_port) = match verdict.outcome {
            PacketOutcome::Forward(port) => ("forward", None, Some(port)),
            PacketOutcome::Linux(port) => ("linux", None, Some(port)),
            PacketOutcome::Reply(port) => ("reply", None, Some(port)),
            PacketOutcome::Drop(reason) => ("drop", Some(reason.as_str()), None),
        };
        *self.counts.entry((word, drop.unwrap_or_default())).or_default() += 1;
        let refused = to.filter(|_| word != "forward").and_then(|to| self.refused.get(&to));
        if !self.json {
            refused.cloned().into_iter().for_each(|refused| *self.refused_counts.entry(refused).or_default() += 1);
            return Ok(());
        }
        let name = |port: PortIndex| self.names.get(usize::from(port.0)).map(String::as_str);
        let flow = verdict.flow.as_ref();
        let line = VerdictLine {
            packet: verdict.packet,
            in_port: name(port).unwrap_or_default(),
            verdict: word,
            drop,
            service: flow.map(|flow| flow.service.to_string()),
            frontend: flow.map(|flow| flow.frontend.to_string()),
            backend: flow.map(|flow| flow.backend.to_string()),
            out: out_port.and_then(name),
            refused,
        };
        serde_json::to_writer(&mut *out, &line)?;
        out.write_all(b"\n")
    }

    /// Writes the counts, unless lines were requested.
    pub(super) fn finish(self, out: &mut impl Write) -> io::Result<()> {
        if !self.json {
            writeln!(out, "{:<10}{:<24}{:>12}", "VERDICT", "REASON", "PACKETS")?;
            for ((verdict, reason), packets) in self.counts {
                writeln!(out, "{verdict:<10}{reason:<24}{packets:>12}")?;
            }
            for (RefusedService { service, reason, message }, packets) in self.refused_counts {
                writeln!(out, "{packets} of them to {service}, which is refused ({reason}): {message}")?;
            }
        }
        out.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use dataplane::{DropReason, Mac};
    use proto::{Protocol, ServiceName};

    use super::*;
    use crate::commands::replay::gateway::Flow;

    fn report(json: bool) -> VerdictReport {
        let port = |name: &str| PortConfig { name: name.into(), mac: Mac::default(), mtu: 1500, addresses: vec![], twin: true };
        let refused = RefusedService { service: "default/shop".to_owned(), reason: "Refused", message: "no way".to_owned() };
        let refused = HashMap::from([((Protocol::Tcp, "192.0.2.101:80".parse().unwrap()), refused)]);
        VerdictReport::new(&[port("uplink"), port("cluster")], refused, json)
    }

    fn verdict(packet: u64, outcome: PacketOutcome) -> Verdict {
        Verdict { packet, outcome, flow: None }
    }

    const FORWARD: PacketOutcome = PacketOutcome::Forward(PortIndex(1));
    const UNRESOLVED: PacketOutcome = PacketOutcome::Drop(DropReason::NeighbourUnresolved);

    #[test]
    fn a_line_tells_all_that_is_known() {
        let mut report = report(true);
        let mut out = Vec::new();
        assert_eq!(report.arrived(PortIndex(0), None), 1);
        let flow = Flow {
            service: Arc::new(ServiceName::new("default", "web")),
            frontend: "192.0.2.100:80".parse().unwrap(),
            backend: "10.0.0.11:8080".parse().unwrap(),
        };
        report.take([Verdict { packet: 1, outcome: FORWARD, flow: Some(flow) }].into_iter(), &mut out).unwrap();
        let expected = concat!(
            r#"{"packet":1,"in":"uplink","verdict":"forward","drop":null,"service":"default/web","#,
            r#""frontend":"192.0.2.100:80","backend":"10.0.0.11:8080","out":"cluster"}"#,
            "\n"
        );
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn a_held_packet_keeps_its_place() {
        let mut report = report(true);
        let mut out = Vec::new();
        assert_eq!((report.arrived(PortIndex(0), None), report.arrived(PortIndex(0), None)), (1, 2));
        report.take([verdict(2, FORWARD)].into_iter(), &mut out).unwrap();
        assert!(out.is_empty());
        assert_eq!(report.arrived(PortIndex(1), None), 3);
        report.take([verdict(1, UNRESOLVED), verdict(3, FORWARD)].into_iter(), &mut out).unwrap();
        let numbers: Vec<u64> = String::from_utf8(out)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["packet"].as_u64().unwrap())
            .collect();
        assert_eq!(numbers, [1, 2, 3]);
        assert_eq!(report.arrived(PortIndex(0), None), 4);
    }

    #[test]
    fn without_lines_there_are_counts() {
        let mut report = report(false);
        let mut out = Vec::new();
        for outcome in [FORWARD, FORWARD, UNRESOLVED] {
            let packet = report.arrived(PortIndex(0), Some((Protocol::Tcp, "192.0.2.101:80".parse().unwrap())));
            report.take([verdict(packet, outcome)].into_iter(), &mut out).unwrap();
        }
        report.finish(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.ends_with("\n1 of them to default/shop, which is refused (Refused): no way\n"), "{text}");
        let rows: Vec<Vec<&str>> = text.lines().skip(1).take(2).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows, [vec!["drop", "neighbour_unresolved", "1"], vec!["forward", "2"]]);
    }
}
