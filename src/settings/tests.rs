//! Configuration files as people write them, and the errors they get.

use super::*;
use std::collections::BTreeSet;

use control::config::controller::{GATEWAY_KEYS, KEYS};
use control::config::settings::{MaglevSeed, Source};
use control::config::yaml_tree::Value;
use dataplane::{Link, Mac, PortIndex, TagKind, Vlan};
use objects::scalar::url::ServerUrl;

/// A valid file with two ports; tests replace and append lines.
const BASE: &str = "\
name: edge-1
ports:
  - name: uplink
    device: net_af_packet0,iface=eth1
    addresses: [192.0.2.2/24, '2001:db8::2/64']
  - name: cluster
    device: net_af_packet1,iface=eth2
    addresses: [10.0.0.2/24]
snat: {addresses: [10.0.0.3]}
manifests: /m
";

fn read_with(text: &str, choice: &SourceChoice) -> Result<Settings, String> {
    let (reader, root) = Reader::parse(Path::new("/etc/f.yaml"), text).map_err(|e| e.to_string())?;
    Settings::take(reader, &root, choice).map_err(|invalid| invalid.to_string())
}

fn read(text: &str) -> Result<Settings, String> {
    read_with(text, &SourceChoice::File)
}

#[test]
fn a_small_file_gets_the_defaults_of_the_contract() {
    let settings = read(BASE).unwrap();
    assert_eq!((settings.cores.as_slice(), settings.poll, settings.hugepages), (&[1][..], Poll::Busy, Hugepages::Auto));
    assert_eq!(settings.ports[0].mtu_bytes, 1500);
    assert_eq!((settings.ports[0].twin, settings.ports[0].mac), (Twin::Tap, None));
    assert_eq!(settings.flows.max_per_worker, 1_048_576);
    let contract = "flows: {tcpEstablished: 2h5m, tcpOneWay: 15m, tcpOpening: 30s, tcpHalfClosed: 5m, tcpReset: 4m, \
                    tcpClosing: 10s, udp: 2m, udpExchange: 2m, udpUnreplied: 1m, sctp: 1h, tableGrace: 60s}\n";
    assert_eq!(read(&format!("{BASE}{contract}")).unwrap().flows, settings.flows);
    assert_eq!(settings.state_dir, Path::new("/var/lib/sluice"));
    assert_eq!(settings.admin_listen, AdminListen::unix("/run/sluice/admin.sock".into()));
    assert_eq!(settings.max_state_age, Duration::from_secs(86_400));
    assert_eq!(settings.node_port_addresses, Vec::<IpAddr>::new());
    let StateSource::Embedded(controller, _) = settings.source else { panic!("not embedded") };
    assert_eq!(controller.source, Source::Manifests { dir: "/m".into(), status_dir: "/var/lib/sluice/status".into() });
}

#[test]
fn room_for_targets_is_all_that_there_is_unless_it_is_limited() {
    assert_eq!(read(BASE).unwrap().targets_max, 131_072);
    assert_eq!(read(&format!("{BASE}limits: {{targets: 64}}\n")).unwrap().engine(&[]).targets_max, 64);
    for targets in ["63", "131073", "many"] {
        let error = read(&format!("{BASE}limits: {{targets: {targets}}}\n")).unwrap_err();
        assert!(error.contains("limits.targets") && error.contains(targets), "{error}");
    }
}

#[test]
fn what_the_gateway_uses_is_reserved() {
    let text = format!(
        "{BASE}nodePortAddresses: [192.0.2.0/24]\nstatic: {{routes: [{{to: 0.0.0.0/0, via: 192.0.2.1, port: uplink}}]}}\n"
    );
    let settings = read(&text).unwrap();
    assert_eq!(settings.node_port_addresses, ["192.0.2.2".parse::<IpAddr>().unwrap()]);
    let text = format!("{text}tunnel: {{sources: [10.0.0.4]}}\n");
    let settings = read(&text).unwrap();
    let StateSource::Embedded(controller, _) = settings.source else { panic!("not embedded") };
    assert_eq!(controller.profile, settings.profile);
    let texts = |addresses: &[IpAddr]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(texts(&controller.profile.own), ["10.0.0.2", "10.0.0.3", "10.0.0.4", "192.0.2.2", "2001:db8::2"]);
    assert_eq!(texts(&controller.profile.next_hops), ["192.0.2.1"]);
    assert_eq!(controller.profile.serves_node_ports, Some(true));
    assert!(controller.profile.prefixes.contains(&"192.0.2.2/24".parse().unwrap()), "{:?}", controller.profile);
}

#[test]
fn more_addresses_than_a_controller_takes_are_refused_by_check() {
    let with = |count: u16| {
        let addresses: Vec<_> = (0..count).map(|number| format!("'fd00::1:{number:x}/64'")).collect();
        read(&BASE.replace("10.0.0.2/24", &addresses.join(", ")))
    };
    // Beside two of the other port and one of SNAT.
    let most = u16::try_from(proto::limits::RESERVED_MAX - 3).unwrap();
    with(most).unwrap();
    let error = with(most + 1).unwrap_err();
    assert!(error.contains("key `ports`: found 4097 addresses") && error.contains("at most 4096; give"), "{error}");
}

#[test]
fn more_snat_addresses_than_are_used_are_refused() {
    let with = |v4: u8, v6: u8| {
        let v4 = (0..v4).map(|number| format!("10.0.0.{}", 3 + number));
        let addresses: Vec<_> = v4.chain((0..v6).map(|number| format!("'fd00::{number}:1'"))).collect();
        read(&BASE.replace("10.0.0.3", &addresses.join(", ")))
    };
    assert_eq!(with(8, 8).unwrap().snat.len(), 16);
    for (v4, v6, found) in [(9, 1, "9 IPv4"), (1, 12, "12 IPv6")] {
        let error = with(v4, v6).unwrap_err();
        assert!(error.contains(&format!("key `snat.addresses`: found {found} addresses, expected at most 8")), "{error}");
    }
}

#[test]
fn the_engine_gets_the_devices_ethernet_addresses_unless_configured() {
    let text = BASE.replacen("    addresses", "    mac: 02:00:00:00:aa:01\n    addresses", 1);
    let settings = read(&text).unwrap();
    let config = settings.engine(&[Mac([2; 6]), Mac([4; 6])]);
    assert_eq!(config.ports[0].mac, Mac([2, 0, 0, 0, 0xaa, 1]));
    assert_eq!(config.ports[1].mac, Mac([4; 6]));
    assert!(config.ports[1].twin);
    assert_eq!(config.snat, settings.snat);
}

#[test]
fn static_routes_and_neighbours_name_ports() {
    let text = format!(
        "{BASE}static:\n  routes: [{{to: 10.0.0.0/8, port: cluster}}]\n  neighbours: [{{address: 10.0.0.9, mac: '02:00:00:00:00:09', port: cluster}}]\n"
    );
    let network = read(&text).unwrap().fixed_network();
    assert_eq!(network.routes, [Route { to: "10.0.0.0/8".parse().unwrap(), via: None, link: PortIndex(1).into(), weight: 1 }]);
    assert_eq!(network.neighbours[0].link, PortIndex(1).into());
    assert_eq!(network.addresses.len(), 3);
}

/// Two links, a route and a neighbour on them.
const LINKS: &str = "static:
  links:
    - {port: uplink, tags: [100], addresses: [203.0.113.2/24], mtu: 1400}
    - {port: cluster, tags: [802.1ad:7, 200], addresses: [10.9.0.2/24, 'fd09::2/64']}
  routes: [{to: 0.0.0.0/0, via: 203.0.113.1, port: uplink, tags: [100]}, {to: 10.9.0.0/24, via: 10.0.0.9, port: cluster}]
  neighbours: [{address: 10.9.0.11, mac: '02:00:00:00:00:09', port: cluster, tags: [802.1ad:7, 200]}]
";

#[test]
fn static_links_are_what_vlan_devices_are() {
    let settings = read(&format!("{BASE}{LINKS}pools: [{{name: a, addresses: [203.0.113.100-203.0.113.110]}}]\n")).unwrap();
    let network = settings.fixed_network();
    let clients = Link::new(PortIndex(0), Vlan::NONE.with(TagKind::Customer, 100).unwrap());
    let both = Vlan::NONE.with(TagKind::Service, 7).and_then(|outer| outer.with(TagKind::Customer, 200)).unwrap();
    let backends = Link::new(PortIndex(1), both);
    let vlans: Vec<_> = network.vlans.iter().map(|vlan| (vlan.link, vlan.mtu, vlan.addresses.len())).collect();
    assert_eq!(vlans, [(clients, 1400, 1), (backends, 1500, 2)]);
    let routes: Vec<_> = network.routes.iter().map(|route| (route.to.to_string(), route.link)).collect();
    let expected = [
        ("0.0.0.0/0", clients),
        ("10.9.0.0/24", PortIndex(1).into()), // it names the prefix of a link, and so counts instead
        ("203.0.113.0/24", clients),
        ("fd09::/64", backends),
    ];
    assert_eq!(routes, expected.map(|(to, link)| (to.to_owned(), link)));
    assert_eq!(network.neighbours[0].link, backends);
    assert_eq!(network.addresses.len(), 6);
    assert!(settings.profile.own.contains(&"203.0.113.2".parse().unwrap()), "never a VIP, never a backend");
    let effective = settings.effective();
    assert_eq!(read(&effective).as_ref(), Ok(&settings), "{effective}");
}

#[test]
fn wrong_links_say_what_is_allowed() {
    let rows = [
        ("tags: [100], addresses", "addresses", "key `static.links[0].tags`: missing, expected a list of one VLAN tag or two"),
        (
            "tags: [100], addresses",
            "tags: [], addresses",
            "found a list, expected a list of one VLAN tag or two, the outer first",
        ),
        ("tags: [100], addresses", "tags: [0], addresses", "key `static.links[0].tags[0]`: found `0`, expected one VLAN tag"),
        ("tags: [100], addresses", "tags: [4095], addresses", "found `4095`, expected one VLAN tag"),
        ("tags: [100], addresses", "tags: [802.1q:5], addresses", "found `802.1q:5`, expected one VLAN tag"),
        (
            "tags: [100], addresses",
            "tags: [1, 2, 3], addresses",
            "key `static.links[0].tags`: found 3 tags, expected a list of one",
        ),
        (
            "port: uplink, tags: [100], addresses",
            "port: up, tags: [100], addresses",
            "expected the name of a port: uplink or cluster",
        ),
        ("203.0.113.2/24", "192.0.2.2/24", "found 192.0.2.2 a second time; an address belongs to one port"),
        ("10.9.0.2/24", "203.0.113.2/25", "found 203.0.113.2 a second time"),
        ("mtu: 1400", "mtu: 60", "key `static.links[0].mtu`: found `60`, expected a number from 68 to 9216"),
        ("'fd09::2/64']}", "'fd09::2/64'], mtu: 1000}", "mtu 1000 is too small for IPv6 (fd09::2/64), expected at least 1280"),
        (
            "via: 203.0.113.1, port: uplink, tags: [100]",
            "port: uplink, tags: [101]",
            "found tags 101 of a link that is not in `static.links`",
        ),
        (
            "port: cluster, tags: [802.1ad:7, 200], addresses",
            "port: uplink, tags: [100], addresses",
            "found the link with tags 100 of this port a second time",
        ),
        (
            "10.9.0.2/24",
            "10.0.0.3/24",
            "key `snat.addresses[0]`: found 10.0.0.3, which is an address of a link in `static.links`",
        ),
    ];
    for (from, to, message) in rows {
        assert!(LINKS.contains(from), "{from}");
        let error = read(&format!("{BASE}{}", LINKS.replacen(from, to, 1))).unwrap_err();
        assert!(error.contains(message), "{to}: {error}");
    }
    let pool = "pools: [{name: a, addresses: [203.0.113.2]}]\n";
    let error = read(&format!("{BASE}{LINKS}{pool}")).unwrap_err();
    assert!(error.contains("holds 203.0.113.2, an address of a link in `static.links`"), "{error}");
}

#[test]
fn what_check_prints_reads_back_as_the_same_settings() {
    let rich = format!(
        "{BASE}{}",
        "workers: {cores: [3], poll: adaptive}\nmemory: {hugepages: off}\nnodePortAddresses: [192.0.2.2, '2001:db8::2']\n\
         flows: {maxPerWorker: 5, tcpEstablished: 90s, tcpHalfClosed: 70s, tcpReset: 50s, udp: 1500ms, udpExchange: 4s}\nlimits: {targets: 500}\nzone: rack-7\nstateDir: state\nmaxStateAge: 1h\n\
         logs: {format: json, level: warn}\nadmin: {listen: 'unix:admin.sock'}\nstatusDir: s\n\
         pools: [{name: default, addresses: [192.0.2.100-192.0.2.199, '2001:db8::1:0/112']}]\n\
         static:\n  routes: [{to: 0.0.0.0/0, via: 192.0.2.1, port: uplink}]\n  neighbours: [{address: 192.0.2.1, mac: '02:00:00:00:00:01', port: uplink}]\n"
    );
    let remote = BASE.replace("manifests: /m", "controller: {urls: ['unix:/c.sock']}");
    let kubernetes = BASE.replace("manifests: /m", "kubernetes: {kubeconfig: k}");
    for text in [BASE.to_owned(), rich, remote, kubernetes] {
        let settings = read(&text).unwrap();
        let effective = settings.effective();
        assert_eq!(read(&effective).as_ref(), Ok(&settings), "{effective}");
    }
}

/// The keys of a mapping of the tree.
fn keys_of(node: &Node) -> BTreeSet<&str> {
    let Value::Map(entries) = &node.value else { panic!("{node:?}") };
    entries.iter().map(|entry| entry.key.as_str()).collect()
}

#[test]
fn check_prints_every_key_that_is_read() {
    let effective = read(BASE).unwrap().effective();
    let (tree, _) = control::config::yaml_tree::parse(&effective).unwrap();
    let Value::Map(top) = &tree.value else { panic!("{effective}") };
    // The message about an unknown key names the known ones, which are those that are read.
    let read_beside = |text: &str| read(text).unwrap_err().split_once("known here are ").unwrap().1.replace(", ", "\n");
    let known = read_beside(&format!("{effective}zzz: 1\n"));
    assert_eq!(known.lines().collect::<BTreeSet<_>>(), keys_of(&tree));
    let listed: BTreeSet<_> = KEYS.into_iter().chain(GATEWAY_KEYS).chain(["logs", "admin", "metrics"]).collect();
    assert_eq!(listed, keys_of(&tree), "what belongs in which file");
    let sections = [
        "workers",
        "memory",
        "snat",
        "tunnel",
        "flows",
        "limits",
        "flowRecords",
        "admin",
        "metrics",
        "announce",
        "fleet",
        "health",
        "defaults",
    ];
    for section in sections {
        let printed = keys_of(&top.iter().find(|entry| entry.key == section).unwrap().node);
        let known = read_beside(&effective.replace(&format!("{section}: {{"), &format!("{section}: {{zzz: 1, ")));
        assert_eq!(known.lines().collect::<BTreeSet<_>>(), printed, "{section}");
    }
}

#[test]
fn paths_of_the_file_are_taken_from_its_directory() {
    let settings = read(&BASE.replace("/m", "./manifests")).unwrap();
    let StateSource::Embedded(controller, _) = settings.source else { panic!("not embedded") };
    assert!(matches!(controller.source, Source::Manifests { dir, .. } if dir == Path::new("/etc/manifests")));
}

#[test]
fn gateways_with_manifests_that_may_share_vips_draw_no_maglev_seed() {
    let seed = |text: &str| {
        let StateSource::Embedded(controller, _) = read(text).unwrap().source else { panic!("not embedded") };
        controller.maglev_seed
    };
    let election = format!("{BASE}announce: {{election: keepalived}}\n");
    let routed = format!("{BASE}pools: [{{name: a, addresses: [203.0.113.0/24], announce: routed}}]\n");
    assert_eq!([BASE, &election, &routed].map(seed), [MaglevSeed::Kept, MaglevSeed::Public, MaglevSeed::Public]);
    assert_eq!(seed(&format!("{election}maglevSeed: 7\n")), MaglevSeed::Given(7));
}

#[test]
fn a_socket_of_a_routing_daemon_names_the_daemon() {
    assert_eq!(read(BASE).unwrap().daemon_sockets, DaemonSockets::default());
    let settings = read(&format!("{BASE}announce: {{daemon: frr, daemonSocket: run}}\n")).unwrap();
    assert_eq!(settings.daemon_sockets, DaemonSockets { daemon: RoutingDaemon::Frr, socket: Some("/etc/run".into()) });
    assert_eq!(read(&settings.effective()).unwrap(), settings);
    let rows = [
        ("daemon: gobgp", "/etc/f.yaml:11: key `announce.daemon`: found `gobgp`, expected auto, none, bird or frr"),
        (
            "daemonSocket: /run/bird.ctl",
            "/etc/f.yaml:11: key `announce.daemonSocket`: found /run/bird.ctl; say whose it is by `daemon: bird` or `daemon: frr`",
        ),
    ];
    for (line, expected) in rows {
        let error = read(&format!("{BASE}announce: {{{line}}}\n")).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn exactly_one_source_is_named() {
    let none = BASE.replace("manifests: /m\n", "");
    assert!(read(&none).unwrap_err().contains("found no source of Services"));
    let two = format!("{none}kubernetes: {{kubeconfig: k}}\nmanifests: /m\n");
    assert!(read(&two).unwrap_err().contains("key `kubernetes.kubeconfig`: found a second source beside `manifests`"));
    let remote = format!("{none}controller: {{urls: ['unix:/c']}}\nmanifests: /m\npools: []\n");
    let error = read(&remote).unwrap_err();
    assert!(error.contains("key `manifests`: found a second source beside `controller`"), "{error}");
    assert!(error.contains("key `pools`: belongs in the controller's own file"), "{error}");
    let remote = remote.replace("manifests: /m", "kubernetes: {namespace: a}");
    let error = read(&remote).unwrap_err();
    assert!(error.contains("key `kubernetes`: belongs in the controller's own file"), "{error}");
    let error = read(&remote.replace("{namespace: a}", "{kubeconfig: k}")).unwrap_err();
    assert!(error.contains("key `kubernetes.kubeconfig`: found a second source beside `controller`"), "{error}");
}

#[test]
fn a_source_with_a_mistake_is_not_called_missing() {
    let none = BASE.replace("manifests: /m\n", "");
    let mistakes = [
        "manifests: [m]",
        "manifests: ''",
        "kubernetes: {kubeconfig: [k]}",
        "kubernetes: {kubconfig: k}",
        "controller: {url: 'unix:/c'}",
    ];
    for line in mistakes {
        let error = read(&format!("{none}{line}\n")).unwrap_err();
        assert_eq!(error.lines().count(), 1, "{line}: {error}");
    }
    assert!(read(&format!("{none}kubernetes: {{namespace: a}}\n")).unwrap_err().contains("found no source of Services"));
}

#[test]
fn missing_certificates_of_a_remote_controller_are_reported_where_it_is_named() {
    let remote = BASE.replace("manifests: /m", "controller:\n  urls: ['https://c.example:9440']");
    let line = 1 + remote.lines().position(|line| line == "controller:").unwrap();
    let error = read(&remote).unwrap_err();
    assert!(error.starts_with(&format!("/etc/f.yaml:{line}: key `controller.tls`: missing")), "{error}");
}

#[test]
fn keys_of_one_port_exclude_each_other() {
    let admin = "admin: {listen: ['unix:/a.sock', '127.0.0.1:9435'], tls: {ca: a, cert: b, key: c}}";
    let listen = |address: &str| format!("listen: ['unix:/c.sock', '{address}']\ntls: {{ca: a, cert: b, key: c}}");
    let rows = [
        (admin.to_owned(), "key `admin.listen`: found 127.0.0.1:9435, the port of `metrics.listen` (127.0.0.1:9435)"),
        (listen("0.0.0.0:9435"), "key `listen`: found 0.0.0.0:9435, the port of `metrics.listen` (127.0.0.1:9435)"),
        (
            format!("{}\nmetrics: {{listen: '[::]:9436'}}", listen("192.0.2.2:9436")),
            "key `listen`: found 192.0.2.2:9436, the port of `metrics.listen` ([::]:9436); give each a port of its own",
        ),
        (
            format!("{}\n{admin}\nmetrics: {{listen: ''}}", listen("[::]:9435")),
            "key `admin.listen`: found 127.0.0.1:9435, the port of `listen` ([::]:9435)",
        ),
        (
            "announce: {election: keepalived, groups: 1}\nfleet: {listen: '10.0.0.2:9437'}\nmetrics: {listen: '0.0.0.0:9437'}"
                .to_owned(),
            "key `fleet.listen`: found 10.0.0.2:9437, the port of `metrics.listen` (0.0.0.0:9437)",
        ),
    ];
    for (lines, expected) in rows {
        let error = read(&format!("{BASE}{lines}\n")).unwrap_err();
        assert!(error.contains(expected) && error.lines().count() == 1, "{lines}: {error}");
    }
    for apart in [listen("192.0.2.2:9435"), listen("[::1]:9435"), listen("127.0.0.1:9436")] {
        read(&format!("{BASE}{apart}\n")).unwrap();
    }
}

#[test]
fn a_flag_overrides_its_key_and_clashes_with_another() {
    let flag = SourceChoice::Manifests("/flag".into());
    let StateSource::Embedded(controller, _) = read_with(BASE, &flag).unwrap().source else { panic!("not embedded") };
    assert!(matches!(controller.source, Source::Manifests { dir, .. } if dir == Path::new("/flag")));
    let error = read_with(BASE, &SourceChoice::Kubeconfig("/k".into())).unwrap_err();
    assert!(error.contains("key `manifests`: found a second source beside the flag --kubeconfig"), "{error}");
    assert!(
        read_with(BASE, &SourceChoice::Controller(ServerUrl::Unix("/c".into()))).unwrap_err().contains("found a second source")
    );
    let remote = BASE.replace("manifests: /m", "controller: {urls: ['unix:/c.sock']}");
    let error = read_with(&remote, &flag).unwrap_err();
    assert!(error.contains("key `controller.urls`: found a second source beside the flag --manifests"), "{error}");
    let settings = read_with(&remote, &SourceChoice::Controller(ServerUrl::Unix("/flag".into()))).unwrap();
    assert_eq!(settings.source, StateSource::Remote(vec![ServerUrl::Unix("/flag".into())], None));
    assert!(read_with(&remote, &SourceChoice::Replay("/flag".into())).is_ok());
}

#[test]
fn what_is_not_built_is_refused_by_key() {
    let error = read(&format!("{BASE}health: {{listen: '127.0.0.1:9440'}}\n")).unwrap_err();
    assert!(error.contains("key `health.listen`: found 127.0.0.1:9440, which only sluice-controller serves"), "{error}");
    let twin = BASE.replacen("    addresses", "    twin: virtio-user\n    addresses", 1);
    assert!(read(&twin).unwrap_err().contains("key `ports[0].twin`: not built in this version"));
}

#[test]
fn metrics_are_served_on_the_machine_itself_unless_the_key_says_otherwise() {
    let rows = [("", Some("127.0.0.1:9435")), ("metrics: {listen: ''}", None), ("metrics: {listen: '[::]:1'}", Some("[::]:1"))];
    for (line, expected) in rows {
        let settings = read(&format!("{BASE}{line}\n")).unwrap();
        assert_eq!(settings.metrics_listen, expected.map(|text| text.parse().unwrap()), "{line}");
        assert_eq!(read(&settings.effective()).unwrap(), settings, "{line}");
    }
    let error = read(&format!("{BASE}metrics: {{listen: 9435}}\n")).unwrap_err();
    assert!(error.contains("key `metrics.listen`: found `9435`, expected IP:PORT or [IP]:PORT"), "{error}");
}

#[test]
fn wrong_values_say_what_is_allowed() {
    let rows = [
        ("name: edge-1", "name: 'a b'", "key `name`: found `a b`, expected a name of letters"),
        (
            "name: uplink",
            "name: a-name-of-16-abc",
            "key `ports[0].name`: found `a-name-of-16-abc`, expected an interface name: 1 to 15",
        ),
        ("name: cluster", "name: a/b", "key `ports[1].name`: found `a/b`, expected an interface name"),
        ("name: cluster", "name: uplink", "key `ports[1].name`: found `uplink` a second time"),
        ("net_af_packet1", "net_af_packet0", "key `ports[1].device`: found net_af_packet0, which port `uplink` has already"),
        ("iface=eth2", "iface=eth1", "key `ports[1].device`: found interface eth1, which port `uplink` has already"),
        ("iface=eth2", "iface=uplink", "uses interface uplink, and a port's Linux twin would have that name too"),
        ("net_af_packet1,iface=eth2", "eth2", "key `ports[1].device`: found `eth2`, expected a PCI address such as"),
        (
            "10.0.0.2/24",
            "10.0.0.2",
            "key `ports[1].addresses[0]`: found `10.0.0.2`, expected an interface's address with its prefix",
        ),
        ("10.0.0.2/24", "10.0.0.255/24", "found `10.0.0.255/24`, expected an interface's address"),
        ("10.0.0.2/24", "192.0.2.2/25", "found 192.0.2.2 a second time; an address belongs to one port"),
        (
            "10.0.0.2/24]",
            "10.0.0.2/24]\n    mtu: abc",
            "f.yaml:9: key `ports[1].mtu`: found `abc`, expected a number from 68 to 9216",
        ),
        (
            "64']",
            "64']\n    mtu: 1279",
            "key `ports[0]`: mtu 1279 is too small for IPv6 (2001:db8::2/64), expected at least 1280",
        ),
        ("10.0.0.2/24]", "10.0.0.2/24]\n    mac: 'ff:ff:ff:ff:ff:ff'", "key `ports[1].mac`: found `ff:ff:ff:ff:ff:ff`"),
        ("[10.0.0.3]", "[10.0.0.2]", "key `snat.addresses[0]`: found 10.0.0.2, which is an address of port `cluster` (line 8)"),
        ("[10.0.0.3]", "[10.0.0.3, 10.0.0.3]", "key `snat.addresses[1]`: found 10.0.0.3 a second time"),
        ("snat:", "snatt:", "f.yaml:9: unknown key `snatt`, did you mean `snat`?"),
    ];
    for (from, to, message) in rows {
        let error = read(&BASE.replacen(from, to, 1)).unwrap_err();
        assert!(error.contains(message) && error.lines().count() == 1, "{to}: {error}");
    }
}

#[test]
fn a_wrong_address_of_a_port_is_one_error_whatever_refers_to_it() {
    let all = "nodePortAddresses: [10.0.0.2]\nannounce: {election: keepalived, groups: 2, port: cluster}\n\
               fleet: {listen: '10.0.0.2:9437'}\n";
    let text = format!("{BASE}{all}").replacen("[10.0.0.3]", "[10.0.0.3, 192.0.2.3]", 1);
    let error = read(&text.replacen("10.0.0.2/24", "10.0.0.400/24", 1)).unwrap_err();
    assert!(error.contains("`ports[1].addresses[0]`: found `10.0.0.400/24`") && error.lines().count() == 1, "{error}");
    let error = read(&text).unwrap_err();
    assert!(error.contains("192.0.2.3, which belongs to VIP group 1") && error.lines().count() == 1, "{error}");
}

#[test]
fn no_device_is_given_twice_as_a_port_or_a_member_of_a_bond() {
    let with = |uplink: &str, cluster: &str| {
        let text = BASE.replacen("net_af_packet0,iface=eth1", uplink, 1).replacen("net_af_packet1,iface=eth2", cluster, 1);
        read(&text).err()
    };
    let bond = "net_bonding0,mode=1,slave=3b:00.0,slave=(net_tap1,iface=a)";
    assert_eq!(with(bond, "net_bonding1,mode=4,slave=3b:00.1,slave=(net_tap2,iface=b)"), None);
    let taken =
        |what: &str| format!("key `ports[1].device`: found {what}, which port `uplink` has already; give each port its own");
    let rows = [
        (bond, "0000:3b:00.0", taken("0000:3b:00.0")),
        ("3b:00.0", "net_bonding0,mode=1,slave=0000:3b:00.0", taken("0000:3b:00.0")),
        (bond, "net_bonding1,mode=1,slave=0000:3b:00.0", taken("0000:3b:00.0")),
        (bond, "net_bonding0,mode=1,slave=3b:00.1", taken("net_bonding0")),
        (bond, "net_tap1,iface=b", taken("net_tap1")),
        (bond, "net_tap2,iface=a", taken("interface a")),
        ("3b:00.0", "net_bonding0,mode=1,slave=net_tap1,slave=net_tap1", "found net_tap1 twice in one bond".into()),
        ("3b:00.0", "net_bonding0,mode=1,slave=(net_tap1,iface=uplink)", "uses interface uplink, and a port's Linux twin".into()),
        ("3b:00.0", "net_bonding0,mode=1,slave=(net_af_packet1,iface=eth2)", "bond such interfaces in Linux".into()),
        ("3b:00.0", "net_bonding0,mode=1", "a bond has members".into()),
        ("3b:00.0", "net_bonding0,mode=0,slave=net_tap1", "a bond has mode=1 (active backup) or mode=4 (802.3ad)".into()),
    ];
    for (uplink, cluster, message) in rows {
        let error = with(uplink, cluster).unwrap_or_default();
        assert!(error.contains(&message) && error.lines().count() == 1, "{uplink} and {cluster}: {error}");
    }
}

#[test]
fn keys_must_agree_with_each_other() {
    let pool = |range: &str| format!("pools: [{{name: a, addresses: [{range}]}}]");
    let rows = [
        (pool("192.0.2.0-192.0.2.9"), "holds 192.0.2.2, an address of port `uplink`"),
        (pool("10.0.0.3"), "holds 10.0.0.3, a SNAT address"),
        (
            format!("{}\nstatic: {{routes: [{{to: 0.0.0.0/0, via: 192.0.2.9, port: uplink}}]}}", pool("192.0.2.9")),
            "the next hop of `static.routes[0]`",
        ),
        ("nodePortAddresses: [192.0.2.3]".into(), "found 192.0.2.3/32, which holds no port's address"),
        ("nodePortAddresses: [192.0.2.7/24]".into(), "expected 192.0.2.0/24 for the network, or 192.0.2.7 for the address"),
        ("static: {routes: [{to: 10.1.2.3/8, port: cluster}]}".into(), "expected 10.0.0.0/8 for the network"),
        ("nodePortAddresses: [192.0.2.2, 192.0.2.0/24]".into(), "found 192.0.2.2 a second time"),
        ("workers: {cores: [1, 1]}".into(), "found core 1 a second time"),
        (format!("workers: {{cores: {:?}}}", (0..65).collect::<Vec<_>>()), "found 65 cores, expected at most 64"),
        ("workers: {cores: []}".into(), "expected core numbers"),
        ("static: {routes: [{to: 0.0.0.0/0, port: x}]}".into(), "found `x`, expected the name of a port: uplink or cluster"),
        (
            "static: {routes: [{to: 0.0.0.0/0, via: '::2', port: uplink}]}".into(),
            "found ::2, expected an address of the family of 0.0.0.0/0",
        ),
        (
            "admin: {listen: 'unix:/run/sluice/config.sock'}".into(),
            "found unix:/run/sluice/config.sock, which is `admin.listen` too",
        ),
        (format!("admin: {{listen: 'unix:/{}'}}", "x".repeat(107)), "108 bytes; expected a path of at most 107 bytes"),
    ];
    for (lines, message) in rows {
        let error = read(&format!("{BASE}{lines}\n")).unwrap_err();
        assert!(error.contains(message), "{lines}: {error}");
    }
}

/// A VLAN device of Linux may have a prefix that the file does not show.
#[test]
fn an_l2_pool_outside_the_prefixes_of_the_file_is_a_warning_that_names_vlan_devices() {
    let warnings = |ranges: &str| {
        let text = format!("{BASE}{LINKS}pools: [{{name: a, addresses: [{ranges}]}}]\n");
        let of_edges = |warning: &String| warning.contains("no Service gets this address");
        read(&text).unwrap().warnings.into_iter().filter(|warning| !of_edges(warning)).collect::<Vec<_>>()
    };
    assert_eq!(warnings("192.0.2.100, 203.0.113.100-203.0.113.110"), Vec::<String>::new(), "of a port, and of a static link");
    for range in ["198.18.0.0-198.18.0.255", "192.0.2.250-192.0.3.1"] {
        let found = warnings(&format!("192.0.2.100, {range}"));
        let [warning] = found.as_slice() else { panic!("{found:?}") };
        let location = "key `pools[0].addresses[1]`: found ";
        assert!(warning.contains(location) && warning.contains(range), "{warning}");
        assert!(warning.contains("lies in no port's prefix") && warning.contains("VLAN device"), "{warning}");
    }
}

#[test]
fn addresses_of_a_pool_that_no_host_of_a_link_has_are_a_warning() {
    let text = format!("{BASE}pools: [{{name: a, addresses: [192.0.2.240/28, '2001:db8::-2001:db8::1', 192.0.2.100]}}]\n");
    let found = read(&text).unwrap().warnings;
    let [v4, v6] = found.as_slice() else { panic!("{found:?}") };
    let expected = "which holds 192.0.2.255, the broadcast address of 192.0.2.0/24; no Service gets this address";
    assert!(v4.contains("key `pools[0].addresses[0]`") && v4.contains(expected), "{v4}");
    assert!(v6.contains("2001:db8::, the subnet-router anycast address of 2001:db8::/64"), "{v6}");
}

#[test]
fn a_pci_device_needs_hugepages() {
    let text = format!("{}memory: {{hugepages: off}}\n", BASE.replace("net_af_packet0,iface=eth1", "'0000:3b:00.0'"));
    assert!(read(&text).unwrap_err().contains("key `ports[0].device`: found 0000:3b:00.0, a PCI device, which needs hugepages"));
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let error = read("ports: []\nworkers: {poll: x}\nzone: 'z z'\n").unwrap_err();
    let lines: Vec<_> = error.lines().collect();
    assert_eq!(lines.len(), 4, "{error}");
    assert!(lines[3].contains("key `zone`: found `z z`, expected a zone as Nodes have it"), "{error}");
    assert!(lines[0].contains("found no source"), "{error}");
    assert!(lines[1].contains("key `ports`: found a list, expected a list of at least one port"), "{error}");
    assert!(lines[2].contains("key `workers.poll`: found `x`, expected busy or adaptive"), "{error}");
}

#[test]
fn the_example_is_valid_and_names_every_key() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/sluice.example.yaml");
    let settings = Settings::read(&file, &SourceChoice::File).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    for line in settings.effective().lines() {
        let key = line.split(':').next().unwrap_or_default();
        let top_level = !key.starts_with([' ', '-']);
        assert!(
            !top_level || text.lines().any(|l| l.trim_start_matches(['#', ' ']).starts_with(&format!("{key}:"))),
            "{key} is missing"
        );
    }
}

proptest::proptest! {
    #[test]
    fn a_file_with_lines_lost_or_repeated_is_refused_or_reads_back(kept in proptest::collection::vec(0..3_usize, 120)) {
        let example = include_str!("../../deploy/sluice.example.yaml");
        // Mostly once, so that some files stay valid.
        let times = |index: usize| if index.is_multiple_of(7) { kept.get(index).copied().unwrap_or(1) } else { 1 };
        let text: String = example.lines().enumerate().flat_map(|(i, line)| std::iter::repeat_n(format!("{line}\n"), times(i))).collect();
        if let Ok(settings) = read(&text) {
            proptest::prop_assert_eq!(read(&settings.effective()), Ok(settings));
        }
    }
}
