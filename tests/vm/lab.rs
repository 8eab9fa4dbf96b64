//! The lab: two virtual machines beside the client and the servers of the test network.
//!
//! ```text
//! client 192.0.2.10 -- bridge uplinks -- [ gateway ] -- bridge nodes -- b11, b12, b13 (10.0.0.x)
//!                          |                          |
//!                          +--------- [ world ] ------+
//! ```
//!
//! Client and servers are network namespaces of the host. `gateway` has two cards of each kind, between bridges of the
//! host; `world` is a node with a whole kernel. Two more networks, `vuplinks` and `vnodes`, connect the machines as the
//! Vagrantfile does, and `members0` and `members1` are the cables of a bond.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::edge::peers::{Connection, request};
use crate::edge::{Edge, until_within};
use crate::machine::{Card, Machine, PATIENCE, Running, pci_address};

/// Kinds of cards of the gateway, in the order of their slots: an uplink and a cluster card of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Igb,
    E1000e,
    Virtio,
    Vmxnet3,
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Igb, Self::E1000e, Self::Virtio, Self::Vmxnet3];

    /// QEMU's device with its properties.
    fn device(self) -> &'static str {
        match self {
            Self::Igb => "igb",
            Self::E1000e => "e1000e",
            Self::Virtio => "virtio-net-pci,mq=on,vectors=10,rss=on,disable-legacy=on,iommu_platform=on",
            Self::Vmxnet3 => "vmxnet3",
        }
    }

    pub fn name(self) -> &'static str {
        self.device().split([',', '-']).next().unwrap()
    }

    /// Whether QEMU has such a card: igb came with QEMU 8.
    pub fn is_known(self) -> bool {
        let devices = Command::new("qemu-system-x86_64").args(["-device", "help"]).output().unwrap();
        let name = self.device().split(',').next().unwrap();
        String::from_utf8_lossy(&devices.stdout).contains(&format!("name \"{name}\""))
    }

    /// The first kind that QEMU has, by which steps go that need any card.
    pub fn first() -> Self {
        Self::ALL.into_iter().find(|kind| kind.is_known()).unwrap()
    }

    /// Linux's driver of the card.
    pub fn kernel_driver(self) -> &'static str {
        if self == Self::Virtio { "virtio-pci" } else { self.name() }
    }

    /// The index of its uplink card; that of its cluster card follows.
    pub fn index(self) -> usize {
        let known: Vec<_> = Self::ALL.into_iter().filter(|kind| kind.is_known()).collect();
        2 * known.iter().position(|kind| *kind == self).unwrap()
    }

    /// The tap of its card on a bridge.
    pub fn tap(self, bridge: &str) -> String {
        format!("{}{bridge}", self.name())
    }

    /// The devices of the two ports.
    pub fn ports(self) -> [String; 2] {
        [pci_address(self.index()), pci_address(self.index() + 1)]
    }
}

/// What the steps share.
pub struct Lab {
    pub edge: Edge,
    pub image: PathBuf,
    pub payload: PathBuf,
    /// The machine of the gateway; `None` while its power is cut.
    pub gateway: Option<Running>,
    pub world: Option<Running>,
}

/// What steps change of the gateway's configuration.
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    /// Devices of the uplink and of the cluster port.
    pub ports: &'a [String; 2],
    /// More keys of each port.
    pub keys: [&'a str; 2],
    /// Cores of workers.
    pub cores: &'a str,
    pub pools: &'a str,
    /// More lines.
    pub more: &'a str,
}

impl<'a> Settings<'a> {
    /// Two workers, and the pool of the steps.
    pub fn of(ports: &'a [String; 2]) -> Self {
        Self { ports, keys: [""; 2], cores: "[1, 2]", pools: POOL, more: "" }
    }
}

/// The pool of the steps.
pub const POOL: &str = r#"{name: default, addresses: [192.0.2.100-192.0.2.119, "2001:db8::1:0/112"]}"#;

/// The Service of the steps: HTTP and an echo server, over both families.
pub const VIP: &str = "192.0.2.110";
pub const VIP6: &str = "2001:db8::1:10";

impl Lab {
    /// Makes the network, and starts the servers of the steps.
    pub fn new(image: PathBuf) -> Self {
        let edge = Edge::new("the lab", "vm").expect("namespaces");
        edge.script(
            "in_ns gw bash -c 'for pair in uplinks=uplink0 nodes=cluster0; do
               ip link add ${pair%=*} type bridge mcast_snooping 0
               ip link set ${pair%=*} up
               ip link set ${pair#*=} master ${pair%=*}
             done
             for bridge in vuplinks vnodes members0 members1; do ip link add $bridge type bridge mcast_snooping 0; ip link set $bridge up; done'",
        );
        for server in ["b11", "b12", "b13"] {
            edge.echo_server(server, 7000);
            edge.echo_server_at(server, &server.replace('b', "fd00::"), 7000);
            edge.udp_echo_server(server, 9000);
        }
        Self { edge, image, payload: PathBuf::new(), gateway: None, world: None }
    }

    fn boot(&self, machine: &Machine) -> Running {
        let dir = self.edge.path(machine.name);
        machine.boot(&self.edge.namespace("gw"), &self.image, &self.payload, &dir)
    }

    /// The machine of the gateway.
    pub fn gateway(&mut self) -> &mut Running {
        if self.gateway.is_none() {
            self.gateway = Some(self.boot(&gateway("")));
        }
        self.gateway.as_mut().unwrap()
    }

    /// Boots the gateway's machine anew with more words of the kernel's command line, and with or without an IOMMU.
    pub fn boot_gateway(&mut self, kernel: &str, iommu: bool) {
        self.gateway = None;
        self.gateway = Some(self.boot(&Machine { iommu, ..gateway(kernel) }));
    }

    /// Drops machines that do not answer any more, so that they are booted anew when they are wanted. Returns whether there
    /// were any.
    pub fn drop_silent(&mut self) -> bool {
        let silent = |machine: &mut Option<Running>| machine.take_if(|running| running.is_silent()).is_some();
        silent(&mut self.gateway) | silent(&mut self.world)
    }

    /// The machine of nodes.
    pub fn world(&mut self) -> &mut Running {
        if self.world.is_none() {
            self.world = Some(self.boot(&world()));
        }
        self.world.as_mut().unwrap()
    }

    /// Writes the gateway's configuration, with its two ports on these devices and more lines.
    pub fn configure(&mut self, ports: &[String; 2], more: &str) {
        self.write_settings(&Settings { more, ..Settings::of(ports) });
    }

    /// Writes the gateway's configuration.
    pub fn write_settings(&mut self, settings: &Settings) {
        let Settings { cores, ports: [uplink, cluster], keys: [uplink_keys, cluster_keys], pools, more } = settings;
        let text = format!(
            r#"name: lab
ports:
  - {{name: uplink, device: "{uplink}", addresses: [192.0.2.2/24, "2001:db8::2/64"]{uplink_keys}}}
  - {{name: cluster, device: "{cluster}", addresses: [10.0.0.2/24, "fd00::2/64"]{cluster_keys}}}
workers: {{cores: {cores}, poll: adaptive}}
flows: {{maxPerWorker: 16384}}
snat: {{addresses: [10.0.0.3, "fd00::3"]}}
nodePortAddresses: [192.0.2.2]
pools: [{pools}]
manifests: /etc/sluice/manifests
{more}"#
        );
        self.gateway().write("/etc/sluice/sluice.yaml", &text);
    }

    /// Writes the configuration, binds its devices, and restarts the gateway with it.
    pub fn apply(&mut self, settings: &Settings) {
        self.write_settings(settings);
        self.gateway().succeed("sluiced prepare");
        self.restart();
    }

    /// (Re)starts the gateway, and waits until it serves.
    pub fn restart(&mut self) {
        self.gateway().succeed("systemctl restart sluiced");
        self.wait_until_ready();
    }

    /// Lets the gateway use the cards of a kind, with more lines of its configuration.
    pub fn use_card(&mut self, kind: Kind, more: &str) {
        self.apply(&Settings { more, ..Settings::of(&kind.ports()) });
    }

    /// Checks that the Service of the steps answers: HTTP over both families, and UDP.
    pub fn assert_serves(&mut self) {
        for vip in [VIP.to_owned(), format!("[{VIP6}]")] {
            let url = format!("http://{vip}/");
            until(&format!("{url} answers"), || self.edge.curl(&url));
        }
        let socket = self.edge.udp(&format!("{VIP}:9000"));
        until("a datagram is answered", || request(&socket, "hello"));
    }

    /// Waits until the gateway serves.
    pub fn wait_until_ready(&mut self) {
        self.gateway().until("the gateway serves", "curl -sf http://127.0.0.1:9435/metrics | grep -q '^sluice_ready 1'");
    }

    /// A table of `sluicectl` as JSON.
    pub fn table(&mut self, what: &str) -> Value {
        let text = self.gateway().succeed(&format!("sluicectl {what} -o json"));
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("sluicectl {what}: {error}: {text}"))
    }

    /// The same; `None` where the gateway does not answer.
    pub fn table_if_any(&mut self, what: &str) -> Option<Value> {
        serde_json::from_str(&self.gateway().run(&format!("sluicectl {what} -o json")).text).ok()
    }

    /// The log of the gateway since its last start.
    pub fn log(&mut self) -> String {
        self.gateway().run("journalctl --no-pager -o cat -u sluiced _SYSTEMD_INVOCATION_ID=$(systemctl show -p InvocationID --value sluiced)").text
    }
}

/// The machine with two cards of each kind, and two for the way of the Vagrantfile.
fn gateway(kernel: &str) -> Machine {
    let mut cards: Vec<_> = Kind::ALL
        .into_iter()
        .filter(|kind| kind.is_known())
        .flat_map(|kind| ["uplinks", "nodes"].map(|bridge| (kind, bridge)))
        .map(|(kind, bridge)| Card {
            device: kind.device().into(),
            tap: kind.tap(bridge),
            queues: if kind == Kind::Virtio { 4 } else { 1 },
            bridge,
        })
        .collect();
    cards.extend(["vuplinks", "vnodes"].map(|bridge| Card {
        device: "virtio-net-pci".into(),
        tap: format!("gw{bridge}"),
        queues: 1,
        bridge,
    }));
    Machine { name: "gateway", cores: 3, memory_mb: 2560, cards, kernel: kernel.into(), iommu: true, patience: PATIENCE }
}

/// The index of the gateway's first card for the way of the Vagrantfile.
pub fn vagrant_index() -> usize {
    2 * Kind::ALL.into_iter().filter(|kind| kind.is_known()).count()
}

/// A machine that needs no card of its own kind: eth0 and eth1 as in the Vagrantfile, then one on each side, then the
/// members of a bond, which needs their speed.
pub fn world() -> Machine {
    let card = |bridge| Card { device: WORLD_CARD.into(), tap: format!("w{bridge}"), queues: 1, bridge };
    let cards = ["vuplinks", "vnodes", "uplinks", "nodes", "members0", "members1"].map(card).to_vec();
    Machine { name: "world", cores: 2, memory_mb: 1024, cards, kernel: String::new(), iommu: false, patience: PATIENCE }
}

const WORLD_CARD: &str = "virtio-net-pci,speed=1000,duplex=full";

/// Connections of the client through the gateway, over both families.
pub struct Connections(Vec<Connection>);

impl Connections {
    /// Opens as many over each family.
    pub fn open(lab: &Lab, each: usize) -> Self {
        let open = |vip: &str| {
            let address = format!("{vip}:7000");
            until(&format!("a connection to {address}"), || lab.edge.connect(&address))
        };
        let six = format!("[{VIP6}]");
        Self((0..each).flat_map(|_| [VIP, six.as_str()]).map(open).collect())
    }

    /// Checks that each still carries data.
    pub fn assert_alive(&mut self) {
        for (n, connection) in self.0.iter_mut().enumerate() {
            connection.assert_alive(&format!("line {n}"));
        }
    }
}

/// Waits until `condition` returns `Some`. What machines do takes long on a busy host.
pub fn until<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    until_within(PATIENCE, what, condition)
}

/// An archive of what a machine needs of the repository, and the package.
pub fn make_payload(root: &Path, package: &Path, path: &Path) {
    let folder = path.with_extension("d");
    let debian = folder.join("target/debian");
    std::fs::create_dir_all(&debian).unwrap();
    std::fs::copy(package, debian.join(package.file_name().unwrap())).unwrap();
    let mut tar = Command::new("tar");
    tar.arg("-cf").arg(path).arg("-C").arg(root).args([".ci", "demo", "deploy", "Makefile", "tests/edge"]);
    assert!(tar.arg("-C").arg(&folder).arg("target").status().unwrap().success(), "an archive");
}
