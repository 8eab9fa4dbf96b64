//! `sluiced replay`: runs the forwarding engine over capture files, without NIC, clock or randomness of its own. The
//! same input gives the same output, byte for byte.
//!
//! Invariant: each input packet gets one line with its final verdict, in the order of the input. Before the first
//! packet the gateway has started and announced its addresses. There are no probes, so every backend is usable; links,
//! routes and neighbours come from `static` in the configuration. Deliberately not here: the decision about packets.

mod capture;
mod error;
mod gateway;
mod outputs;
mod verdicts;

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use control::manifests::Directory;
use control::plan::{Memory, plan};
use control::world::World;
use dataplane::{Address, Mac, Parsed, PortConfig, PortIndex, parse};
use proto::{Generation, Protocol, State};

pub use capture::CaptureError;
pub use error::ReplayError;

use crate::agent::zone::Zone;
use crate::commands::cli::ReplayArgs;
use crate::settings::{Settings, SourceChoice, StateSource};
use capture::MergedCaptures;
use gateway::{Destination, Gateway};
use outputs::CaptureOutputs;
use verdicts::VerdictReport;

/// `--burst` goes up to what a port receives in one poll.
const _: () = assert!(dataplane::BURST == 128);

/// Replays the captures; writes transmitted packets to files and the verdicts to `out`.
///
/// # Errors
/// The configuration or the manifests are invalid; files cannot be read or written.
pub fn replay(args: &ReplayArgs, out: &mut impl Write) -> Result<(), ReplayError> {
    let settings = Settings::read(&args.config, &SourceChoice::Replay(args.manifests.clone()))?;
    let config =
        settings.engine(&(0..=u8::MAX).take(settings.ports.len()).map(|n| stand_in_mac(PortIndex(n))).collect::<Vec<_>>());
    let named = args.inputs.iter().map(|input| Ok((port_named(&config.ports, &input.port)?, input.file.as_path())));
    let inputs = named.collect::<Result<Vec<_>, ReplayError>>()?;
    let state = Arc::new(state_of(&settings, &args.manifests)?);
    let state = settings.zone.clone().map_or_else(|| Arc::clone(&state), |zone| Zone::new(zone).narrow(&state));
    let mut frames = MergedCaptures::open(inputs)?;
    let mut outputs = CaptureOutputs::create(&args.out, &config.ports)?;
    let ports = config.ports.clone();
    let mut gateway = Gateway::start(config, &state, &settings.fixed_network())?;
    let mut report = VerdictReport::new(&ports, gateway.refused(), args.output.is_some());
    // Number of packets that wait for the next poll, and their time.
    let (mut waiting, mut time_ns) = (0, 0);
    while let Some((port, mut frame)) = frames.next()? {
        if settings.ports.get(usize::from(port.0)).is_none_or(|port| port.mac.is_none()) {
            redirect(&mut frame.bytes, stand_in_mac(port));
        }
        if waiting > 0 && (waiting == args.burst || frame.time_ns != time_ns) {
            gateway.poll(&mut outputs)?;
            report.take(gateway.verdicts(), out)?;
            waiting = 0;
        }
        if waiting == 0 {
            time_ns = frame.time_ns;
            gateway.advance_to(time_ns, &mut outputs)?;
        }
        let packet = report.arrived(port, destination(&frame.bytes));
        gateway.put(port, packet, &frame);
        waiting += 1;
    }
    if waiting > 0 {
        gateway.poll(&mut outputs)?;
    }
    gateway.rest(&mut outputs)?;
    report.take(gateway.verdicts(), out)?;
    report.finish(out)?;
    outputs.finish()
}

/// The Ethernet address of a port without a configured one, because there is no device. It is locally administered and
/// the same in every replay.
fn stand_in_mac(PortIndex(n): PortIndex) -> Mac {
    Mac([0x02, 0, 0, 0, 0, n.saturating_add(1)])
}

/// Sets the destination of a frame to the port's Ethernet address. The captures of a port without a configured address
/// may come from any machine, so every unicast frame counts as addressed to the port.
fn redirect(frame: &mut [u8], mac: Mac) {
    if let Some(destination) = frame.first_chunk_mut().filter(|destination| destination[0] & 1 == 0) {
        *destination = mac.0;
    }
}

/// Protocol, address and port that a frame is sent to.
fn destination(frame: &[u8]) -> Option<Destination> {
    let (number, address, port) = match parse(frame).ok()? {
        Parsed::V4(headers) => (headers.tuple.protocol, headers.tuple.destination.ip(), headers.tuple.destination_port),
        Parsed::V6(headers) => (headers.tuple.protocol, headers.tuple.destination.ip(), headers.tuple.destination_port),
        Parsed::Arp | Parsed::Other => return None,
    };
    Some((Protocol::from_number(number)?, SocketAddr::new(address, port)))
}

fn port_named(ports: &[PortConfig], name: &str) -> Result<PortIndex, ReplayError> {
    let position = ports.iter().position(|port| port.name == name).and_then(|i| u8::try_from(i).ok());
    position.map(PortIndex).ok_or_else(|| ReplayError::UnknownPort {
        found: name.to_owned(),
        configured: ports.iter().map(|port| port.name.clone()).collect(),
    })
}

/// The plan of a controller for these manifests at its first start, without VIPs of earlier runs.
fn state_of(settings: &Settings, dir: &Path) -> Result<State, ReplayError> {
    let StateSource::Embedded(controller, _) = &settings.source else { return Ok(State::default()) };
    let read = Directory::new(dir.to_owned()).read();
    let (objects, notes) = read.map_err(|error| ReplayError::Manifests { dir: dir.to_owned(), error })?;
    for note in notes {
        tracing::warn!("{note}");
    }
    let objects = objects.unwrap_or_default();
    let mut world = World::default();
    objects.into_changes().into_iter().for_each(|change| world.apply(change));
    // The time matters only to a plan that follows another one.
    let plan = plan(&world, controller, &mut Memory::default(), Instant::now());
    for note in plan.notes {
        tracing::warn!(subject = %note.subject, "{}", note.remark.text);
    }
    let generation = Generation { epoch: "replay".to_owned(), counter: 1 };
    Ok(State { generation, services: plan.services, pools: plan.pools })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::fs;

    use dataplane::tcp_flags::{ACK, RST, SYN};
    use dataplane::testing::{OUR_MAC, Packet, Segment, arp_request, arriving_at, assert_checksums, fragments, reassembled};
    use serde_json::Value;

    use super::*;
    use crate::commands::cli::{CaptureInput, OutputFormat};

    const CONFIG: &str = r#"
name: edge-1
ports:
  - {name: uplink, device: net_null0, addresses: [192.0.2.2/24], mac: "02:00:00:00:aa:01"}
  - {name: cluster, device: net_null1, addresses: [10.0.0.2/24], mac: "02:00:00:00:aa:02"}
snat: {addresses: [10.0.0.3]}
flows: {maxPerWorker: 1024}
static:
  routes: [{to: 0.0.0.0/0, via: 192.0.2.1, port: uplink}]
  neighbours:
    - {address: 192.0.2.1, mac: "02:00:00:00:00:01", port: uplink}
    - {address: 10.0.0.11, mac: "02:00:00:00:01:0b", port: cluster}
pools: [{name: default, addresses: [192.0.2.100-192.0.2.109], announce: l2}]
"#;

    /// Service `web` has a backend with a neighbour entry, `away` has one without.
    const MANIFESTS: &str = r"
apiVersion: v1
kind: Service
metadata: {name: away, namespace: default}
spec: {type: LoadBalancer, loadBalancerClass: sluice.dev/gateway, ports: [{port: 81, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec: {type: LoadBalancer, loadBalancerClass: sluice.dev/gateway, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.0.0.11], conditions: {ready: true}}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: away-1, namespace: default, labels: {kubernetes.io/service-name: away}}
addressType: IPv4
ports: [{port: 8080, protocol: TCP}]
endpoints: [{addresses: [10.0.0.12], conditions: {ready: true}}]
";

    const SECOND: u64 = 1_000_000_000;
    const CLIENT: &str = "198.51.100.7:5555";
    const CLUSTER_MAC: Mac = Mac([2, 0, 0, 0, 0xaa, 2]);

    struct Bench {
        dir: tempfile::TempDir,
        inputs: Vec<CaptureInput>,
        burst: u8,
    }

    impl Bench {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("sluice.yaml"), CONFIG).unwrap();
            fs::create_dir(dir.path().join("manifests")).unwrap();
            fs::write(dir.path().join("manifests/web.yaml"), MANIFESTS).unwrap();
            Self { dir, inputs: Vec::new(), burst: 1 }
        }

        fn input(&mut self, port: &str, frames: &[(u64, Vec<u8>)]) {
            let file = self.dir.path().join(format!("in-{}.pcap", self.inputs.len()));
            let mut output = capture::CaptureWriter::create(file.clone()).unwrap();
            let mac = if port == "cluster" { CLUSTER_MAC } else { OUR_MAC };
            for (time_ns, frame) in frames {
                output.write(*time_ns, &arriving_at(mac, frame)).unwrap();
            }
            output.finish().unwrap();
            self.inputs.push(CaptureInput { port: port.into(), file });
        }

        fn run(&self, out: &str) -> Result<String, ReplayError> {
            let args = ReplayArgs {
                config: self.dir.path().join("sluice.yaml"),
                manifests: self.dir.path().join("manifests"),
                inputs: self.inputs.clone(),
                out: self.dir.path().join(out),
                burst: self.burst,
                output: Some(OutputFormat::Json),
            };
            let mut lines = Vec::new();
            replay(&args, &mut lines)?;
            Ok(String::from_utf8(lines).unwrap())
        }

        fn frames(&self, file: &str) -> Vec<(u64, Vec<u8>)> {
            let mut merged = MergedCaptures::open([(PortIndex(0), self.dir.path().join(file).as_path())]).unwrap();
            std::iter::from_fn(|| merged.next().unwrap()).map(|(_, frame)| (frame.time_ns, frame.bytes)).collect()
        }
    }

    fn verdicts(lines: &str) -> Vec<String> {
        let line = |line: &str| {
            let line: Value = serde_json::from_str(line).unwrap();
            let text = |key: &str| line[key].as_str().unwrap_or("-").to_owned();
            format!("{} {} {} {} {}", line["packet"], text("in"), text("verdict"), text("drop"), text("out"))
        };
        lines.lines().map(line).collect()
    }

    /// The VIP of each Service, by the frontend of a packet that is forwarded or held.
    fn vips() -> HashMap<&'static str, &'static str> {
        // Services of manifests get addresses by namespace and name, beginning with the first address of the pool.
        HashMap::from([("away", "192.0.2.100:81"), ("web", "192.0.2.101:80")])
    }

    #[test]
    fn packets_go_the_way_of_the_gateway_and_each_has_its_line() {
        let mut bench = Bench::new();
        let web = vips()["web"];
        let start = 1_700_000_000 * SECOND;
        bench.input(
            "uplink",
            &[
                (start, Packet::tcp(CLIENT, web).build()),
                (start + 1, arp_request([192, 0, 2, 1].into(), [192, 0, 2, 101].into())),
                (start + 2, Packet::tcp(CLIENT, "192.0.2.2:22").build()),
                (start + 3, Packet::tcp(CLIENT, "192.0.2.109:80").build()),
                (start + 4, Packet::tcp(CLIENT, web).flags(ACK).build()),
            ],
        );
        let lines = bench.run("out").unwrap();
        let expected = [
            "1 uplink forward - cluster",
            "2 uplink reply - uplink",
            "3 uplink linux - uplink",
            "4 uplink drop unknown_vip -",
            "5 uplink forward - cluster",
        ];
        assert_eq!(verdicts(&lines), expected, "{lines}");
        let first: Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
        assert_eq!(
            (&first["service"], &first["frontend"], &first["backend"]),
            (&"default/web".into(), &web.into(), &"10.0.0.11:8080".into())
        );
        let out = bench.frames("out/cluster.pcap");
        assert_eq!(out.iter().map(|(time, _)| time - start).collect::<Vec<_>>(), [0, 4]);
        out.iter().for_each(|(_, frame)| assert_checksums(frame));
        let (uplink, linux) = (bench.frames("out/uplink.pcap"), bench.frames("out/linux-uplink.pcap"));
        assert_eq!((uplink.len(), linux.len()), (1, 1), "no announcements");
        assert!(bench.frames("out/linux-cluster.pcap").is_empty());
    }

    #[test]
    fn a_packet_to_a_service_that_the_gateway_refuses_names_it_and_says_why() {
        let mut bench = Bench::new();
        let config = CONFIG.replacen("snat: {addresses: [10.0.0.3]}\n", "", 1);
        fs::write(bench.dir.path().join("sluice.yaml"), config).unwrap();
        let web = vips()["web"];
        bench.input("uplink", &[(1, Packet::tcp(CLIENT, web).build()), (2, Packet::tcp(CLIENT, "192.0.2.109:80").build())]);
        let lines = bench.run("out").unwrap();
        assert_eq!(verdicts(&lines), ["1 uplink drop unknown_vip -", "2 uplink drop unknown_vip -"]);
        let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let refused = &lines[0]["refused"];
        assert_eq!((&refused["service"], &refused["reason"]), (&"default/web".into(), &"Refused".into()), "{lines:?}");
        let message = refused["message"].as_str().unwrap();
        assert!(message.contains("no SNAT address for IPv4 serves the port"), "{message}");
        assert!(lines[1].get("refused").is_none(), "nobody asks for it: {lines:?}");
    }

    #[test]
    fn replies_find_their_way_back_through_a_second_capture() {
        let mut bench = Bench::new();
        bench.input("uplink", &[(1, Packet::tcp(CLIENT, vips()["web"]).build())]);
        bench.run("first").unwrap();
        let (_, forwarded) = bench.frames("first/cluster.pcap").remove(0);
        let snat_port = u16::from_be_bytes([forwarded[34], forwarded[35]]);
        let reply = Packet::tcp("10.0.0.11:8080", &format!("10.0.0.3:{snat_port}")).flags(SYN | ACK);
        bench.input("cluster", &[(2, reply.build())]);
        let lines = bench.run("second").unwrap();
        assert_eq!(verdicts(&lines), ["1 uplink forward - cluster", "2 cluster forward - uplink"]);
        assert_eq!(bench.frames("second/uplink.pcap").len(), 1);
    }

    #[test]
    fn a_frame_for_another_station_is_not_the_gateways_unless_nobody_says_which_is() {
        let mut bench = Bench::new();
        let other = Mac([2, 0, 0, 0, 0, 0x77]);
        let to = |mac, to: &str| Packet { destination_mac: mac, ..Packet::tcp(CLIENT, to) }.build();
        let web = vips()["web"];
        let frames =
            [to(other, web), to(OUR_MAC, web), to(Mac([0xff; 6]), web), to(other, "192.0.2.101:82"), to(other, "192.0.2.2:22")];
        bench.input("uplink", &frames.into_iter().zip(1..).map(|(frame, n)| (n, frame)).collect::<Vec<_>>());
        let not_ours = |n: u64| format!("{n} uplink drop not_our_mac -");
        let ours = "2 uplink forward - cluster".to_owned();
        let to_all = "3 uplink drop malformed -".to_owned();
        let expected = [not_ours(1), ours.clone(), to_all.clone(), not_ours(4), not_ours(5)];
        assert_eq!(verdicts(&bench.run("named").unwrap()), expected);
        let without = CONFIG.replacen(", mac: \"02:00:00:00:aa:01\"", "", 1);
        fs::write(bench.dir.path().join("sluice.yaml"), without).unwrap();
        let expected =
            ["1 uplink forward - cluster", ours.as_str(), to_all.as_str(), "4 uplink reply - uplink", "5 uplink linux - uplink"];
        assert_eq!(verdicts(&bench.run("unnamed").unwrap()), expected);
        let (_, answer) = bench.frames("unnamed/uplink.pcap").remove(0);
        assert_eq!(answer[6..12], stand_in_mac(PortIndex(0)).0);
    }

    /// A frame with these tag bytes.
    fn tagged(tags: &[u8], frame: &[u8]) -> Vec<u8> {
        [&frame[..12], tags, &frame[12..]].concat()
    }

    #[test]
    fn a_capture_with_tags_is_replayed_over_static_links() {
        let mut bench = Bench::new();
        let (clients, backends): (&[u8], &[u8]) = (&[0x81, 0, 0, 100], &[0x88, 0xa8, 0, 7, 0x81, 0, 0, 200]);
        let config = CONFIG
            .replace("addresses: [192.0.2.2/24],", "")
            .replace("addresses: [10.0.0.2/24],", "")
            .replace("port: uplink}", "port: uplink, tags: [100]}")
            .replace("port: cluster}", "port: cluster, tags: [802.1ad:7, 200]}")
            .replace(
                "static:\n",
                "static:\n  links:\n    - {port: uplink, tags: [100], addresses: [192.0.2.2/24], mtu: 1400}\n    \
                 - {port: cluster, tags: [802.1ad:7, 200], addresses: [10.0.0.2/24]}\n",
            );
        fs::write(bench.dir.path().join("sluice.yaml"), config).unwrap();
        let web = vips()["web"];
        let frames = [
            tagged(clients, &Packet::tcp(CLIENT, web).build()),
            Packet::tcp("198.51.100.8:1", web).build(),
            tagged(&[0x81, 0, 0, 101], &Packet::tcp(CLIENT, web).build()),
            tagged(clients, &arp_request([192, 0, 2, 1].into(), [192, 0, 2, 101].into())),
            tagged(clients, &Packet::tcp(CLIENT, "192.0.2.2:22").build()),
        ];
        bench.input("uplink", &frames.into_iter().zip(1..).map(|(frame, n)| (n, frame)).collect::<Vec<_>>());
        let expected = [
            "1 uplink forward - cluster",
            "2 uplink forward - cluster",
            "3 uplink drop unknown_vip -",
            "4 uplink reply - uplink",
            "5 uplink linux - uplink",
        ];
        assert_eq!(verdicts(&bench.run("first").unwrap()), expected);
        let out = bench.frames("first/cluster.pcap");
        assert!(out.iter().all(|(_, frame)| frame[12..20] == *backends), "with the tags of the backends' link");
        let port = |frame: &[u8]| u16::from_be_bytes([frame[42], frame[43]]);
        let snat = |n: usize| format!("10.0.0.3:{}", port(&out[n].1));
        let reply = |n| Packet::tcp("10.0.0.11:8080", &snat(n)).flags(SYN | ACK).build();
        let replies = [(SECOND, tagged(backends, &reply(0))), (SECOND + 1, reply(1))];
        bench.input("cluster", &replies);
        let lines = bench.run("second").unwrap();
        assert_eq!(verdicts(&lines)[5..], ["6 cluster forward - uplink", "7 cluster drop snat_wrong_port -"]);
        let uplink = bench.frames("second/uplink.pcap");
        assert!(uplink.iter().all(|(_, frame)| frame[12..16] == *clients), "answer and reply, with the tag of the clients' link");
        assert_eq!(uplink.len(), 2);
    }

    #[test]
    fn a_held_packet_is_printed_at_its_place_with_its_final_verdict() {
        let mut bench = Bench::new();
        let frames = [
            (SECOND, Packet::tcp(CLIENT, vips()["away"]).build()),
            (SECOND + 1, Packet::tcp(CLIENT, vips()["web"]).build()),
            (3 * SECOND, Packet::tcp("198.51.100.8:1", vips()["away"]).build()),
        ];
        bench.input("uplink", &frames);
        let expected =
            ["1 uplink drop neighbour_unresolved -", "2 uplink forward - cluster", "3 uplink drop neighbour_unresolved -"];
        assert_eq!(verdicts(&bench.run("out").unwrap()), expected);
    }

    #[test]
    fn fragments_and_icmp_errors_have_their_lines() {
        let mut bench = Bench::new();
        let segment = Packet::tcp(CLIENT, vips()["web"]).payload(&[7; 1000]).build();
        let mut frames = fragments(&segment, 400, 5);
        let lonely = fragments(&segment, 400, 6).remove(1);
        frames.swap(0, 1); // the second waits for the first
        let frames: Vec<_> = frames.into_iter().chain([lonely]).zip(1..).map(|(frame, n)| (n * SECOND / 10, frame)).collect();
        bench.input("uplink", &frames);
        let first = bench.run("first").unwrap();
        let expected = [
            "1 uplink forward - cluster",
            "2 uplink forward - cluster",
            "3 uplink forward - cluster",
            "4 uplink drop fragment_timeout -",
        ];
        assert_eq!(verdicts(&first), expected);
        let out: Vec<_> = bench.frames("first/cluster.pcap").into_iter().map(|(_, frame)| frame).collect();
        assert_checksums(&reassembled(&out));
        // A router before the backend reports that the first packet is too big.
        let error = Segment::Icmp { kind: 3, code: 4, rest: 1300 };
        let first = &out.iter().find(|frame| frame[20..22] == [0x20, 0]).unwrap()[14..];
        let error = Packet::between([10, 0, 0, 99].into(), [10, 0, 0, 3].into(), error).payload(first);
        bench.input("cluster", &[(SECOND, error.build())]);
        let second = bench.run("second").unwrap();
        assert_eq!(verdicts(&second)[4], "5 cluster forward - uplink");
        let line: Value = serde_json::from_str(second.lines().last().unwrap()).unwrap();
        assert_eq!((&line["frontend"], &line["backend"]), (&vips()["web"].into(), &"10.0.0.11:8080".into()));
    }

    #[test]
    fn the_same_input_gives_the_same_output() {
        let mut bench = Bench::new();
        let client = |n: u64| format!("198.51.100.{}:{}", n % 200 + 1, 1024 + n);
        let frames: Vec<_> = (0..500).map(|n| (n * SECOND / 3, Packet::tcp(&client(n), vips()["web"]).build())).collect();
        bench.input("uplink", &frames);
        assert_eq!(bench.run("a").unwrap(), bench.run("b").unwrap());
        for file in ["uplink", "cluster", "linux-uplink", "linux-cluster"] {
            let read = |dir: &str| fs::read(bench.dir.path().join(dir).join(format!("{file}.pcap"))).unwrap();
            assert_eq!(read("a"), read("b"), "{file}");
        }
    }

    #[test]
    fn every_scheduler_and_affinity_chooses_the_same_for_the_same_input() {
        let mut bench = Bench::new();
        let client = |n: u64| format!("198.51.100.{}:{}", n % 60 + 1, 1024 + n);
        let frames: Vec<_> = (0..300).map(|n| (n * SECOND / 3, Packet::tcp(&client(n), vips()["web"]).build())).collect();
        bench.input("uplink", &frames);
        let config = CONFIG.replace(
            "    - {address: 10.0.0.11,",
            "    - {address: 10.0.0.12, mac: \"02:00:00:00:01:0c\", port: cluster}\n    - {address: 10.0.0.11,",
        );
        fs::write(bench.dir.path().join("sluice.yaml"), config).unwrap();
        let schedulers = proto::Scheduler::ALL.iter().map(|scheduler| (scheduler.as_str(), "None"));
        for (scheduler, affinity) in schedulers.chain([("round-robin", "ClientIP")]) {
            let name = format!("{{name: web, namespace: default, annotations: {{sluice.dev/scheduler: {scheduler}}}}}");
            let manifests = MANIFESTS
                .replace("{name: web, namespace: default}", &name)
                .replace("ports: [{port: 80,", &format!("sessionAffinity: {affinity}, ports: [{{port: 80,"))
                .replace(
                    "[{addresses: [10.0.0.11],",
                    "[{addresses: [10.0.0.12], conditions: {ready: true}}, {addresses: [10.0.0.11],",
                );
            fs::write(bench.dir.path().join("manifests/web.yaml"), manifests).unwrap();
            let lines = bench.run("a").unwrap();
            assert_eq!(lines, bench.run("b").unwrap(), "{scheduler}, affinity {affinity}");
            let to = |backend: &str| lines.lines().filter(|line| line.contains(backend)).count();
            let (one, other) = (to("10.0.0.11:8080"), to("10.0.0.12:8080"));
            assert_eq!(one + other, 300, "{scheduler}, affinity {affinity}");
            match (scheduler, affinity) {
                ("round-robin" | "least-connections", "None") => assert_eq!(one, other, "{scheduler}"),
                ("destination-hash", _) => assert!(one == 0 || other == 0, "{scheduler}"),
                _ => assert!(one > 50 && other > 50, "{scheduler}, affinity {affinity}: {one} and {other}"),
            }
        }
    }

    /// Replays the packets of one connection twice with Service `web` in a mode, and checks that both results are
    /// equal. Returns the packets transmitted on the cluster port, without Ethernet headers.
    fn in_mode(bench: &mut Bench, mode: &str, backend_port: u16) -> Vec<Vec<u8>> {
        let name =
            format!("{{name: web, namespace: default, annotations: {{sluice.dev/mode: {mode}, sluice.dev/target: endpoint}}}}");
        let manifests = MANIFESTS.replace("{name: web, namespace: default}", &name).replace("8080", &backend_port.to_string());
        fs::write(bench.dir.path().join("manifests/web.yaml"), manifests).unwrap();
        let packets = [SYN, ACK].map(|flags| Packet::tcp(CLIENT, vips()["web"]).flags(flags).build());
        bench.input("uplink", &[(SECOND, packets[0].clone()), (3 * SECOND, packets[1].clone())]);
        let lines = bench.run("out").unwrap();
        assert_eq!(lines, bench.run("again").unwrap(), "{mode}");
        for file in ["uplink", "cluster", "linux-uplink", "linux-cluster"] {
            let read = |dir: &str| fs::read(bench.dir.path().join(dir).join(format!("{file}.pcap"))).unwrap();
            assert_eq!(read("out"), read("again"), "{mode}: {file}");
        }
        for (line, n) in lines.lines().zip([1, 2]) {
            let expected = format!(
                "{{\"packet\":{n},\"in\":\"uplink\",\"verdict\":\"forward\",\"drop\":null,\"service\":\"default/web\",\
                 \"frontend\":\"{}\",\"backend\":\"10.0.0.11:{backend_port}\",\"out\":\"cluster\"}}",
                vips()["web"]
            );
            assert_eq!(line, expected, "{mode}");
        }
        let out = bench.frames("out/cluster.pcap");
        assert_eq!(out.iter().map(|(time, _)| *time).collect::<Vec<_>>(), [SECOND, 3 * SECOND], "{mode}");
        let packet = |(_, frame): (u64, Vec<u8>)| {
            assert_checksums(&frame);
            assert_eq!(frame[..12], [2, 0, 0, 0, 1, 0x0b, 2, 0, 0, 0, 0xaa, 2], "{mode}: to the backend, from the port");
            frame[14..].to_vec()
        };
        out.into_iter().map(packet).collect()
    }

    /// The packets of the client to this destination after one router, without Ethernet headers.
    fn one_hop_on(to: &str) -> Vec<Vec<u8>> {
        [SYN, ACK].map(|flags| Packet::tcp(CLIENT, to).flags(flags).hop_limit(62).build()[14..].to_vec()).into()
    }

    #[test]
    fn dnat_rewrites_the_destination_and_the_source_of_replies() {
        let mut bench = Bench::new();
        let out = in_mode(&mut bench, "dnat", 8080);
        assert_eq!(out, one_hop_on("10.0.0.11:8080"));
        let reply = Packet::tcp("10.0.0.11:8080", CLIENT).flags(SYN | ACK).build();
        bench.input("cluster", &[(2 * SECOND, reply)]);
        let lines = bench.run("replied").unwrap();
        assert_eq!(verdicts(&lines)[1], "2 cluster forward - uplink");
        let line: Value = serde_json::from_str(lines.lines().nth(1).unwrap()).unwrap();
        assert_eq!((&line["frontend"], &line["backend"]), (&vips()["web"].into(), &"10.0.0.11:8080".into()));
        let (_, replied) = bench.frames("replied/uplink.pcap").remove(0);
        let expected = Packet::tcp(vips()["web"], CLIENT).flags(SYN | ACK).hop_limit(62).build();
        assert_eq!(replied[14..], expected[14..]);
    }

    #[test]
    fn dsr_leaves_the_packet_as_it_is() {
        let out = in_mode(&mut Bench::new(), "dsr", 80);
        assert_eq!(out, one_hop_on(vips()["web"]));
    }

    #[test]
    fn tunnels_carry_the_packet_whole() {
        for (mode, protocol, outer_len) in [("ipip", 4, 20), ("gue", 17, 28)] {
            let out = in_mode(&mut Bench::new(), mode, 80);
            let inner: Vec<_> = out.iter().map(|packet| packet[outer_len..].to_vec()).collect();
            assert_eq!(inner, one_hop_on(vips()["web"]), "{mode}");
            for packet in &out {
                assert_eq!(packet[9], protocol, "{mode}");
                assert_eq!(packet[12..20], [10, 0, 0, 2, 10, 0, 0, 11], "{mode}: from the port to the backend");
            }
            let ports = |packet: &Vec<u8>| packet[20..24].to_vec();
            if mode == "gue" {
                assert_eq!(out[0][22..24], 6080u16.to_be_bytes());
                assert_eq!(ports(&out[0]), ports(&out[1]), "a flow keeps to its path");
            }
        }
    }

    #[test]
    fn packets_of_one_time_are_processed_together_and_leave_in_order() {
        let mut bench = Bench::new();
        let web = vips()["web"];
        let (start, later) = (SECOND, 2 * SECOND);
        let data = |number: u8| Packet::tcp(CLIENT, web).flags(ACK).payload(&[number; 20]);
        let odd = |number: u8| Packet { options: vec![1; 4], ..data(number) };
        let mut frames = vec![(start, Packet::tcp(CLIENT, web).build())];
        frames.extend((0..8).map(|n| (later, if n % 3 == 1 { odd(n).build() } else { data(n).build() })));
        // Before the packets that open its flow, in the merged input; behind them by the order of ports.
        let reply = |snat_port: u16| Packet::tcp("10.0.0.11:8080", &format!("10.0.0.3:{snat_port}")).flags(SYN | ACK).build();
        bench.input("uplink", &frames);
        bench.run("first").unwrap();
        let snat_port =
            bench.frames("first/cluster.pcap").first().map(|(_, syn)| u16::from_be_bytes([syn[34], syn[35]])).unwrap();
        bench.input("cluster", &[(start, reply(snat_port))]);
        bench.inputs.reverse();
        // Only the client's data: neither its SYN, nor the RST for a reply that comes too early.
        let numbers = |frames: &[(u64, Vec<u8>)]| {
            let data = frames.iter().filter_map(|(_, frame)| frame.last_chunk::<20>());
            data.filter(|data| data.iter().all(|byte| *byte == data[0])).map(|data| data[0]).collect::<Vec<_>>()
        };
        for (burst, is_forwarded) in [(1, false), (2, true), (7, true), (128, true)] {
            bench.burst = burst;
            let out = format!("burst-{burst}");
            let lines = verdicts(&bench.run(&out).unwrap());
            assert_eq!(lines.len(), 10);
            let reply = if is_forwarded { "1 cluster forward - uplink" } else { "1 cluster drop no_flow -" };
            assert_eq!(lines[0], reply, "--burst {burst}");
            let frames = bench.frames(&format!("{out}/cluster.pcap"));
            assert_eq!(numbers(&frames), [0, 1, 2, 3, 4, 5, 6, 7], "--burst {burst}");
            let is_reset = frames[0].1[47] & RST != 0;
            assert_eq!((is_reset, frames.len()), if is_forwarded { (false, 9) } else { (true, 10) }, "--burst {burst}");
        }
    }

    #[test]
    fn flows_expire_by_the_times_of_the_capture() {
        let mut bench = Bench::new();
        let web = vips()["web"];
        let syn = || Packet::tcp(CLIENT, web).build();
        let ack = || Packet::tcp(CLIENT, web).flags(ACK).build();
        bench.input("uplink", &[(0, syn()), (20 * SECOND, ack()), (100_000_000 * SECOND, ack())]);
        let expected = ["1 uplink forward - cluster", "2 uplink forward - cluster", "3 uplink drop no_flow -"];
        assert_eq!(verdicts(&bench.run("out").unwrap()), expected);
    }

    #[test]
    fn a_capture_that_is_none_is_wrong_usage() {
        let mut bench = Bench::new();
        for text in [None, Some("no capture")] {
            bench.input("uplink", &[]);
            let file = bench.inputs[0].file.clone();
            text.map_or_else(|| fs::remove_file(&file), |text| fs::write(&file, text)).unwrap();
            let error = bench.run("out").unwrap_err();
            assert!(error.is_usage() && error.to_string().contains(&file.display().to_string()), "{error}");
            bench.inputs.clear();
        }
    }

    #[test]
    fn a_port_that_is_not_configured_is_named() {
        let mut bench = Bench::new();
        bench.input("upling", &[]);
        let error = bench.run("out").unwrap_err();
        assert!(error.is_usage());
        assert_eq!(error.to_string(), r#"--in upling=...: expected one of the configured ports uplink, cluster, found "upling""#);
    }
}
