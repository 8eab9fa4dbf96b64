//! Steps over the package and its units: installation, preparation, restarts, state on disk, a power cut.

use std::time::Duration;

use serde_json::json;

use crate::Step;
use crate::lab::{Connections, Kind, Lab, VIP, until};

pub fn steps() -> Vec<Step> {
    vec![
        ("the package installs and starts nothing", false, installs),
        ("doctor names what a machine lacks, prepare brings it", false, prepares),
        ("connections live through restarts, reloads and wrong files", false, restarts),
        ("a gateway that dies or hangs comes back", false, comes_back),
        ("warnings have their priority in the journal", false, priorities),
        ("the sandbox denies nothing", false, sandbox),
        ("a broken unit, a missing capability and a driver that refuses are found", false, breaks),
    ]
}

/// Steps that cut the power, last.
pub fn last_steps() -> Vec<Step> {
    vec![
        ("a clock that jumps breaks no connection", false, clock),
        ("a full and a read-only disk break no connection", false, disk),
        ("a power cut loses no drain, and the gateway comes up alone", true, power_cut),
    ]
}

fn installs(lab: &mut Lab) {
    let machine = lab.gateway();
    machine.succeed("mkdir -p /opt/sluice && tar -xf /dev/vdb -C /opt/sluice");
    machine.succeed("dpkg --install /opt/sluice/target/debian/sluice_*.deb");
    for unit in ["sluiced", "sluiced-prepare", "sluice-controller"] {
        assert_eq!(machine.run(&format!("systemctl is-enabled {unit}")).text.trim(), "disabled");
        assert_eq!(machine.run(&format!("systemctl is-active {unit}")).text.trim(), "inactive");
        machine.succeed(&format!("systemd-analyze verify --man=no {unit}.service"));
    }
    machine.succeed("sluicectl --version && man sluiced-prepare | grep -q huge");
    machine.write("/etc/sluice/manifests/echo.yaml", include_str!("echo.yaml"));
    // A machine that hangs later is booted again from what is on its disk.
    machine.succeed("sync");
}

fn prepares(lab: &mut Lab) {
    let ports = Kind::first().ports();
    lab.configure(&ports, "");
    let machine = lab.gateway();
    let doctor = machine.run("sluiced doctor --config /etc/sluice/sluice.yaml");
    assert_eq!(doctor.code, 1, "{}", doctor.text);
    for missing in ["missing  hugepage memory", "which keeps it from DPDK"] {
        assert!(doctor.text.contains(missing), "{missing}: {}", doctor.text);
    }
    // An interface with an address may be the way by which somebody is logged in.
    let interface = machine.interface(Kind::first().index());
    machine.succeed(&format!("ip addr add 198.51.100.1/24 dev {interface} && ip link set {interface} up"));
    let refused = machine.run("sluiced prepare");
    assert_eq!(refused.code, 1, "{}", refused.text);
    assert!(refused.text.contains(&format!("its interface {interface} has addresses or routes")), "{}", refused.text);
    machine.succeed(&format!("ip addr flush dev {interface}"));
    let done = machine.succeed("sluiced prepare");
    assert!(done.contains(&format!("done     {}: bound to vfio-pci", ports[0])), "{done}");
    machine.succeed("sluiced doctor --config /etc/sluice/sluice.yaml");
    let again = machine.succeed("sluiced prepare");
    assert!(!again.contains("done"), "nothing is left to do: {again}");
    machine.succeed("systemctl enable --now --quiet sluiced-prepare sluiced");
    lab.wait_until_ready();
    lab.assert_serves();
}

fn restarts(lab: &mut Lab) {
    let mut connections = Connections::open(lab, 12);
    for _ in 0..2 {
        lab.restart();
        connections.assert_alive();
    }
    let before = lab.gateway().succeed("systemctl show -p MainPID sluiced");
    lab.gateway().succeed("cp /etc/sluice/sluice.yaml /root/good && echo 'ports: [' >>/etc/sluice/sluice.yaml");
    let refused = lab.gateway().run("systemctl reload sluiced");
    assert_ne!(refused.code, 0, "a broken file is refused: {}", refused.text);
    connections.assert_alive();
    lab.gateway().succeed("cp /root/good /etc/sluice/sluice.yaml && systemctl reload sluiced");
    connections.assert_alive();
    assert_eq!(lab.gateway().succeed("systemctl show -p MainPID sluiced"), before, "a reload starts nothing");
    // A second gateway with the same ports is refused, and takes nothing from the first.
    let second = lab.gateway().run("sluiced run --config /etc/sluice/sluice.yaml");
    assert_ne!(second.code, 0, "{}", second.text);
    connections.assert_alive();
}

fn comes_back(lab: &mut Lab) {
    lab.gateway().succeed("systemctl kill -s KILL sluiced");
    lab.gateway().until("systemd starts it again", "[ $(systemctl show -p NRestarts --value sluiced) -ge 1 ]");
    lab.wait_until_ready();
    lab.assert_serves();
    lab.gateway().write("/run/systemd/system/sluiced.service.d/lab.conf", "[Service]\nWatchdogSec=10s\n");
    lab.gateway().succeed("systemctl daemon-reload");
    lab.restart();
    let restarts = lab.gateway().succeed("systemctl show -p NRestarts --value sluiced");
    lab.gateway().succeed("systemctl kill -s STOP sluiced");
    let more = format!("[ $(systemctl show -p NRestarts --value sluiced) -gt {} ]", restarts.trim());
    lab.gateway().until("the watchdog ends a gateway that hangs", &more);
    lab.gateway().succeed("rm /run/systemd/system/sluiced.service.d/lab.conf && systemctl daemon-reload");
    lab.restart();
    lab.assert_serves();
}

fn priorities(lab: &mut Lab) {
    let lines = |lab: &mut Lab, priority: &str| {
        let code = format!("journalctl --no-pager -q -b -o cat -u sluiced -p {priority} | grep -c . || true");
        lab.gateway().succeed(&code).trim().parse::<u32>().unwrap()
    };
    // A manifest that cannot be read is a warning.
    lab.gateway().write("/etc/sluice/manifests/broken.yaml", "kind: [");
    until("the warning of a broken manifest has its priority", || (lines(lab, "warning") > 0).then_some(()));
    assert!(lines(lab, "info") > lines(lab, "warning"), "not everything is a warning");
    lab.gateway().succeed("rm /etc/sluice/manifests/broken.yaml");
}

fn sandbox(lab: &mut Lab) {
    let machine = lab.gateway();
    let denied = machine.run("journalctl --no-pager -q -b -o cat -u sluiced | grep -iE 'permitted|denied|EPERM'").text;
    assert_eq!(denied, "", "lines of the gateway");
    let kernel = machine.run("journalctl --no-pager -q -b -o cat -k | grep -iE 'audit:.*(sluice|SECCOMP)'").text;
    assert_eq!(kernel, "", "lines of the kernel");
    for (unit, limit) in [("sluiced", 5.0), ("sluice-controller", 3.0)] {
        let report = machine.run(&format!("systemd-analyze security --no-pager {unit}.service | tail -1")).text;
        let exposure = report.split(':').nth(1).and_then(|text| text.split_whitespace().next()?.parse::<f64>().ok());
        assert!(exposure.is_some_and(|exposure| exposure < limit), "{unit}: {report}");
    }
}

/// The lab finds what is broken on purpose.
fn breaks(lab: &mut Lab) {
    let drop_in = "/run/systemd/system/sluiced.service.d/lab.conf";
    // A unit that starts another program than the package has.
    lab.gateway().write(drop_in, "[Service]\nExecStart=\nExecStart=/usr/bin/sluicedd run\n");
    lab.gateway().succeed("systemctl daemon-reload");
    assert_ne!(lab.gateway().run("systemctl restart sluiced").code, 0, "a broken unit does not start");
    // Without CAP_NET_ADMIN there is no twin.
    let without = "[Service]\nCapabilityBoundingSet=\nCapabilityBoundingSet=CAP_NET_RAW CAP_IPC_LOCK CAP_BPF CAP_DAC_OVERRIDE\n";
    lab.gateway().write(drop_in, &format!("{without}Restart=no\n"));
    lab.gateway().succeed("systemctl daemon-reload && systemctl reset-failed sluiced");
    assert_ne!(lab.gateway().run("systemctl restart sluiced").code, 0, "a missing capability is found");
    let log = lab.log();
    assert!(log.contains("Operation not permitted") || log.contains("CAP_NET_ADMIN"), "{log}");
    // A device whose kernel driver keeps it.
    let [uplink, _] = Kind::first().ports();
    lab.gateway().succeed(&format!("rm {drop_in} && systemctl daemon-reload && systemctl reset-failed sluiced"));
    lab.gateway().succeed("systemctl stop sluiced");
    lab.gateway().bind(&uplink, Kind::first().kernel_driver());
    lab.gateway().run("systemctl start sluiced");
    let state = until("the port says why it is not there", || {
        let ports = lab.table_if_any("ports")?;
        let uplink = ports.as_array()?.iter().find(|port| port["name"] == "uplink")?.clone();
        (uplink["link"] != json!("up")).then_some(uplink)
    });
    assert!(state.to_string().contains("failed") || state.to_string().contains("absent"), "{state}");
    lab.gateway().succeed("sluiced prepare");
    lab.restart();
    lab.assert_serves();
}

fn clock(lab: &mut Lab) {
    let mut connections = Connections::open(lab, 12);
    lab.gateway().succeed("systemctl stop sluiced && date -s '+3 hours' && systemctl start sluiced");
    lab.wait_until_ready();
    connections.assert_alive();
    lab.gateway().succeed("date -s '-3 hours'");
    lab.restart();
    connections.assert_alive();
}

fn disk(lab: &mut Lab) {
    // A disk of its own, so that the journal is not full as well.
    lab.gateway().succeed("systemctl stop sluiced && mkdir -p /root/state && cp -a /var/lib/sluice/. /root/state/");
    lab.gateway().succeed(
        "mount -t tmpfs -o size=1M,mode=700 lab /var/lib/sluice && cp -a /root/state/overrides.yaml /var/lib/sluice/ || true",
    );
    lab.gateway().succeed("systemctl start sluiced");
    lab.wait_until_ready();
    let mut connections = Connections::open(lab, 12);
    lab.gateway().succeed("head -c 2M /dev/zero >/var/lib/sluice/full || true");
    lab.restart();
    connections.assert_alive();
    lab.gateway().succeed("rm /var/lib/sluice/full && mount -o remount,ro /var/lib/sluice");
    lab.restart();
    connections.assert_alive();
    lab.gateway().succeed("systemctl stop sluiced && umount /var/lib/sluice && systemctl start sluiced");
    lab.wait_until_ready();
    lab.assert_serves();
}

fn power_cut(lab: &mut Lab) {
    lab.gateway().succeed("sluicectl drain 10.0.0.12");
    std::thread::sleep(Duration::from_secs(2));
    lab.gateway = None;
    lab.wait_until_ready();
    lab.assert_serves();
    let overrides = lab.table("overrides").to_string();
    assert!(overrides.contains("10.0.0.12"), "the drain is in force: {overrides}");
    for _ in 0..20 {
        let answer = lab.edge.curl(&format!("http://{VIP}/"));
        assert!(answer.as_deref().is_some_and(|server| server != "b12"), "{answer:?}");
    }
    lab.gateway().succeed("sluicectl undrain 10.0.0.12");
}
