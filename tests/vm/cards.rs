//! Steps over cards: traffic through each kind, what `sluicectl ports` says of it, and what goes wrong with cards.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::Step;
use crate::lab::{Connections, Kind, Lab, Settings, VIP, until, vagrant_index, world as spare};
use crate::links;
use crate::machine::{Machine, pci_address};
use crate::world;

pub fn steps() -> Vec<Step> {
    vec![
        ("igb forwards over two workers", false, |lab| forwards(lab, Kind::Igb)),
        ("e1000e forwards over two workers", false, |lab| forwards(lab, Kind::E1000e)),
        ("virtio forwards over two workers", false, |lab| forwards(lab, Kind::Virtio)),
        ("vmxnet3 forwards over two workers", false, |lab| forwards(lab, Kind::Vmxnet3)),
        ("a cable that is pulled and put in again", false, cable),
        ("a card that is unplugged and plugged in again", false, unplug),
        ("a card that is unbound by hand", false, unbind),
        ("a card whose driver hangs fails alone", true, hangs),
        ("a machine that hangs is booted again, and fails its step by name", true, machine_hangs),
    ]
}

/// Steps that boot the machine anew.
pub fn last_steps() -> Vec<Step> {
    vec![
        ("every mode over each card, and the table of docs/reference/ports.md", true, matrix),
        ("cards without an IOMMU: VFIO's mode for that, and UIO", true, without_iommu),
    ]
}

/// Both families, TCP and UDP, over two workers. Connections live on while the card's RSS is proven or refused, and
/// `sluicectl ports` says what this card does.
fn forwards(lab: &mut Lab, kind: Kind) {
    if !kind.is_known() {
        return crate::edge::skip(&format!("lab: {}", kind.name()), "this QEMU has no such card");
    }
    lab.use_card(kind, "");
    let mut connections = Connections::open(lab, 24);
    connections.assert_alive();
    lab.assert_serves();
    let many = lab.edge.run("client", &["ab", "-q", "-n", "400", "-c", "4", &format!("http://{VIP}/")]);
    let report = String::from_utf8_lossy(&many.stdout).into_owned();
    assert!(report.contains("Complete requests:      400") && report.contains("Failed requests:        0"), "{report}");
    connections.assert_alive();
    let uplink = until("the port says what the card does", || {
        let uplink = lab.table("ports")[0].clone();
        assert_eq!(uplink["link"], "up", "{uplink:#}");
        steering(kind).iter().all(|part| uplink.to_string().contains(part)).then_some(uplink)
    });
    println!("{}: {}", kind.name(), uplink["steering"].as_str().unwrap_or_default());
    let drops = lab.table("drops");
    let of = |reason: &str| -> u64 {
        let rows = drops.as_array().unwrap().iter().filter(|row| row["reason"] == reason);
        rows.map(|row| row["packets"].as_u64().unwrap()).sum()
    };
    for reason in ["no_flow", "malformed", "truncated", "not_our_mac", "handover_full", "tx_full"] {
        assert_eq!(of(reason), 0, "{reason}: {drops}");
    }
}

/// What a virtual card's ports say of its RSS, in JSON. Only igb hashes packets by the ports' key: those of IPv4.
fn steering(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::Igb => &[
            r#"{"agreed":64,"family":"ipv4","protocol":"tcp","reason":"","state":"proven"}"#,
            r#""family":"ipv6","protocol":"tcp","reason":"the device reports no RSS hash with some packets","state":"refuted"}"#,
        ],
        Kind::E1000e => &["own hash: net_e1000_em offers no Toeplitz hash over TCP and UDP"],
        Kind::Virtio => &[r#""protocol":"tcp","reason":"the device reports no RSS hash with some packets","state":"refuted"}"#],
        Kind::Vmxnet3 => &["own hash: net_vmxnet3 does not take the RSS key: Operation not supported"],
    }
}

fn cable(lab: &mut Lab) {
    lab.use_card(Kind::first(), "");
    let mut connections = Connections::open(lab, 6);
    let index = Kind::first().index();
    for is_up in [false, true] {
        lab.gateway().set_link(index, is_up);
        let link = if is_up { "up" } else { "down" };
        until("the link follows", || (lab.table("ports")[0]["link"] == link).then_some(()));
        let twin = format!("[ $(cat /sys/class/net/uplink/carrier) = {} ]", u8::from(is_up));
        lab.gateway().until("the twin follows the link", &twin);
    }
    connections.assert_alive();
}

fn unplug(lab: &mut Lab) {
    lab.use_card(Kind::first(), "");
    let mut connections = Connections::open(lab, 6);
    let index = Kind::first().index();
    lab.gateway().unplug(index);
    until("the kernel gets its card back", || lab.gateway().is_unplugged(index).then_some(()));
    until("the port is absent", || (lab.table("ports")[0]["link"] == "absent").then_some(()));
    // The host does not hang: a bus that is scanned again takes the same lock.
    lab.gateway().succeed("timeout 20 bash -c 'echo 1 >/sys/bus/pci/rescan' && timeout 20 journalctl --sync");
    lab.gateway().plug(index).unwrap();
    lab.gateway().until("the card is there again", &format!("[ -e /sys/bus/pci/devices/{} ]", Kind::first().ports()[0]));
    lab.gateway().succeed("sluiced prepare");
    until("the port is attached again", || (lab.table("ports")[0]["link"] == "up").then_some(()));
    connections.assert_alive();
}

fn unbind(lab: &mut Lab) {
    lab.use_card(Kind::first(), "");
    let mut connections = Connections::open(lab, 6);
    let [uplink, _] = Kind::first().ports();
    lab.gateway().succeed(&format!("timeout 60 bash -c 'echo {uplink} >/sys/bus/pci/drivers/vfio-pci/unbind'"));
    until("the port is not up", || (lab.table("ports")[0]["link"] != "up").then_some(()));
    lab.gateway().succeed("sluiced prepare");
    until("the port is attached again", || (lab.table("ports")[0]["link"] == "up").then_some(()));
    connections.assert_alive();
}

/// A virtio card that the IOMMU does not know never answers a driver behind it.
fn hangs(lab: &mut Lab) {
    lab.configure(&Kind::first().ports(), "");
    let address = pci_address(vagrant_index());
    let line = format!("  - {{name: late, device: \"{address}\"}}");
    lab.gateway().succeed(&format!("sed -i '/name: cluster/a\\{line}' /etc/sluice/sluice.yaml"));
    // Pages for a third port; `prepare` would bind its card as well.
    lab.gateway().succeed("sysctl -qw vm.nr_hugepages=120");
    lab.restart();
    lab.gateway().bind(&address, "vfio-pci");
    let port = until("the port fails", || {
        let ports = lab.table("ports");
        let late = ports.as_array()?.iter().find(|port| port["name"] == "late")?.clone();
        (late["link"] == "failed").then_some(late)
    });
    assert!(port["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{port:#}");
    lab.assert_serves();
    lab.gateway().succeed("timeout 60 systemctl stop sluiced");
    lab.gateway().bind(&address, "virtio-pci");
    lab.use_card(Kind::first(), "");
    lab.assert_serves();
}

fn without_iommu(lab: &mut Lab) {
    lab.boot_gateway("", false);
    let drop_in = "[Service]\nCapabilityBoundingSet=CAP_SYS_RAWIO CAP_SYS_ADMIN\nSystemCallFilter=@raw-io\n";
    let serves = |lab: &mut Lab, driver: &str| {
        lab.gateway().succeed(&format!("sluiced prepare --driver {driver}"));
        let doctor = lab.gateway().run("sluiced doctor --config /etc/sluice/sluice.yaml");
        assert!(!doctor.text.contains("missing  0000"), "{}", doctor.text);
        lab.restart();
        lab.assert_serves();
    };
    lab.configure(&Kind::first().ports(), "");
    lab.gateway().succeed("systemctl stop sluiced; modprobe vfio-pci");
    let refused = lab.gateway().run("sluiced prepare --driver vfio-pci");
    assert_eq!(refused.code, 1, "{}", refused.text);
    lab.gateway().write("/etc/systemd/system/sluiced.service.d/lab.conf", drop_in);
    lab.gateway().succeed("systemctl daemon-reload");
    if lab.gateway().run("echo 1 >/sys/module/vfio/parameters/enable_unsafe_noiommu_mode").code == 0 {
        serves(lab, "vfio-pci");
        lab.gateway().succeed("systemctl stop sluiced");
    } else {
        // Debian's kernel: nobody is sent to a mode that it does not have.
        let doctor = lab.gateway().run("sluiced doctor --config /etc/sluice/sluice.yaml").text;
        assert!(doctor.contains("built without CONFIG_VFIO_NOIOMMU") && !doctor.contains("enable_unsafe"), "{doctor}");
        println!("VFIO of this kernel has no mode without an IOMMU");
    }
    serves(lab, "uio_pci_generic");
}

/// A machine whose processors stand still, by SIGSTOP of QEMU: at its boot, and under a command.
fn machine_hangs(lab: &mut Lab) {
    const SECOND: Duration = Duration::from_secs(1);
    let machine = Machine { name: "spare", cores: 1, memory_mb: 512, cards: Vec::new(), patience: 90 * SECOND, ..spare() };
    let dir = lab.edge.path("spare");
    std::fs::create_dir_all(&dir).unwrap();
    let pid = || std::fs::read_to_string(dir.join("pid")).ok()?.trim().parse::<i32>().ok().and_then(Pid::from_raw);
    let first = std::thread::scope(|scope| {
        let stopper = scope.spawn(|| {
            let first = until("QEMU runs", pid);
            kill_process(first, Signal::STOP).unwrap();
            first
        });
        let mut running = machine.boot(&lab.edge.namespace("gw"), &lab.image, &lab.payload, &dir);
        let first = stopper.join().unwrap();
        assert_ne!(pid(), Some(first), "the machine that stood still is another than the one that answers");
        running.succeed("true");
        running.machine.patience = 5 * SECOND;
        kill_process(pid().unwrap(), Signal::STOP).unwrap();
        for why in ["the machine spare hangs: no answer within 5s to: true", "the machine spare hangs, and is not asked again"] {
            let panic = catch_unwind(AssertUnwindSafe(|| running.run("true"))).unwrap_err();
            let text = panic.downcast_ref::<String>().unwrap();
            assert!(text.starts_with(why), "{text}");
        }
        assert!(running.is_silent());
        first
    });
    assert_ne!(kill_process(first, Signal::CONT), Ok(()), "the machine that stood still has ended");
}

/// One and two workers, every mode, large frames and sleeping workers over each card. Writes what it saw into the page of
/// ports.
fn matrix(lab: &mut Lab) {
    let mut rows = String::new();
    for kind in Kind::ALL.into_iter().filter(|kind| kind.is_known()) {
        let large = match links::assert_jumbo_frames(lab, kind) {
            Ok(()) => "yes".to_owned(),
            Err(why) => format!("no: {why}"),
        };
        let ports = kind.ports();
        lab.apply(&Settings { cores: "[1]", ..Settings::of(&ports) });
        lab.assert_serves();
        lab.apply(&Settings { cores: "[0, 1, 2]", ..Settings::of(&ports) });
        Connections::open(lab, 12).assert_alive();
        world::modes(lab, kind);
        let steering = lab.table("ports")[0]["steering"].as_str().unwrap_or_default().to_owned();
        let looks = lab.log().contains("packets of this driver cannot wake an adaptive worker");
        let woken = if looks { "nothing: it looks every 50 us" } else { "the interrupt" };
        rows += &format!("| {} | nat, dsr, ipip, gue; both families | {large} | {woken} | {steering} |\n", kind.name());
    }
    let page = crate::root().join("docs/reference/ports.md");
    let text = std::fs::read_to_string(&page).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the beginning of the table");
    let (_, after) = rest.split_once(END).expect("the end of the table");
    let head = "| card | modes | MTU 9000 | a sleeping worker is woken by | steering with two workers |\n|---|---|---|---|---|\n";
    std::fs::write(&page, format!("{before}{BEGIN}\n{head}{rows}{END}{after}")).unwrap();
}

const BEGIN: &str = "<!-- written by `make test-vm-matrix`: begin -->";
const END: &str = "<!-- end -->";
