//! The other ends of veths under ports over Linux interfaces: their MTUs and offloads count as much as those of the near
//! end, and Linux tells nobody when they do not fit.
//!
//! Deliberately not here: an end in another network namespace, which cannot be looked at from here.

use crate::commands::doctor::Finding;
use crate::machine::Root;
use crate::ports::af_packet;
use crate::settings::Settings;

/// Examines the veths of the ports on the machine below `root`. `offloads` are those of an interface that make frames
/// that cannot be forwarded, if they can be read ([`offloads_of`] except in tests).
pub(super) fn examine(root: &Root, settings: &Settings, offloads: impl Fn(&str) -> Option<Vec<String>>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for port in &settings.ports {
        let parts = port.device.parts();
        let interfaces = parts.iter().filter(|part| part.has_driver("net_af_packet") || part.has_driver("net_af_xdp"));
        for near in interfaces.filter_map(|part| part.interface().map(str::to_owned)) {
            let ends = match other_end(root, &near) {
                OtherEnd::None => vec![near],
                OtherEnd::Elsewhere => {
                    let advice = "look there: its MTU, and its offloads by `ethtool -k`";
                    let found = format!("the other end of veth {near} is in another network namespace");
                    findings.push(Finding::note(port.name.clone(), found, advice));
                    vec![near]
                }
                OtherEnd::Here(far) => {
                    findings.extend(short_mtu(root, &port.name, port.mtu_bytes, &far));
                    vec![near, far]
                }
            };
            findings.extend(ends.iter().filter_map(|end| disturbed(&port.name, end, offloads(end))));
        }
    }
    findings
}

/// A finding if the other end takes no packets of the port's MTU.
fn short_mtu(root: &Root, port: &str, mtu_bytes: u16, far: &str) -> Option<Finding> {
    let taken: u32 = root.number(&format!("/sys/class/net/{far}/mtu"))?;
    let found = format!("MTU {mtu_bytes}, and {far}, the other end of its veth, has {taken}: longer packets are lost");
    let advice = format!("ip link set {far} mtu {mtu_bytes}, or lower `mtu` of the port");
    (taken < mtu_bytes.into()).then(|| Finding::missing(port, found, advice))
}

fn disturbed(port: &str, end: &str, offloads: Option<Vec<String>>) -> Option<Finding> {
    let Some(on) = offloads else {
        return Some(Finding::note(port, format!("offloads of {end} cannot be read"), "install ethtool"));
    };
    let found = format!("offloads of {end} make frames that cannot be forwarded: {}", on.join(", "));
    let advice = format!("ethtool -K {end} tx off tso off gso off gro off lro off");
    (!on.is_empty()).then(|| Finding::missing(port, found, advice))
}

/// Where the other end of a veth is.
#[derive(Debug, PartialEq, Eq)]
enum OtherEnd {
    /// The interface is no veth.
    None,
    Here(String),
    Elsewhere,
}

/// A veth has the index of its other end as link, unlike VLANs and macvlans no interface below, and no device.
fn other_end(root: &Root, near: &str) -> OtherEnd {
    let number = |name: &str, file: &str| root.number::<u32>(&format!("/sys/class/net/{name}/{file}"));
    let (Some(index), Some(link)) = (number(near, "ifindex"), number(near, "iflink")) else { return OtherEnd::None };
    let entries = root.names(&format!("/sys/class/net/{near}"));
    if index == link || entries.iter().any(|entry| entry.starts_with("lower_") || entry == "device") {
        return OtherEnd::None;
    }
    let is_far = |name: &String| number(name, "ifindex") == Some(link) && number(name, "iflink") == Some(index);
    root.names("/sys/class/net").into_iter().find(is_far).map_or(OtherEnd::Elsewhere, OtherEnd::Here)
}

/// The harmful offloads of an interface of this machine; `None` without `ethtool`.
pub(super) fn offloads_of(interface: &str) -> Option<Vec<String>> {
    af_packet::harmful_offloads(interface)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::commands::doctor::Level;
    use crate::machine::Machine;
    use crate::settings::SourceChoice;

    fn settings() -> Settings {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "ports: [{name: uplink, device: 'net_af_packet0,iface=eth1', addresses: [192.0.2.2/24], mtu: 1400}]\n\
                    snat: {addresses: [192.0.2.3]}\n";
        fs::write(file.path(), text).unwrap();
        Settings::read(file.path(), &SourceChoice::Replay("/".into())).unwrap()
    }

    #[test]
    fn each_way_in_which_a_veth_does_not_fit_has_its_line() {
        const NEAR: [(&str, &str); 2] = [("/sys/class/net/eth1/ifindex", "2\n"), ("/sys/class/net/eth1/iflink", "7\n")];
        let far = |mtu| {
            vec![("/sys/class/net/br1/ifindex", "7\n"), ("/sys/class/net/br1/iflink", "2\n"), ("/sys/class/net/br1/mtu", mtu)]
        };
        let whole: fn(&str) -> Option<Vec<String>> = |_| Some(Vec::new());
        let tso_far: fn(&str) -> Option<Vec<String>> =
            |end| Some(if end == "br1" { vec!["tcp-segmentation-offload".into()] } else { Vec::new() });
        let unread_far: fn(&str) -> Option<Vec<String>> = |end| (end != "br1").then(Vec::new);
        let rows = [
            (far("1500\n"), whole, None),
            (far("1280\n"), whole, Some((Level::Missing, "MTU 1400, and br1, the other end of its veth, has 1280"))),
            (far("1500\n"), tso_far, Some((Level::Missing, "offloads of br1 make frames that cannot be forwarded: tcp-segm"))),
            (far("1500\n"), unread_far, Some((Level::Note, "offloads of br1 cannot be read"))),
            (Vec::new(), whole, Some((Level::Note, "the other end of veth eth1 is in another network namespace"))),
            (vec![("/sys/class/net/eth1/lower_eth0", "")], whole, None),
            (vec![("/sys/class/net/eth1/device", "")], whole, None),
        ];
        for (files, offloads, expected) in rows {
            let machine = Machine::new(&[&NEAR[..], &files].concat());
            let findings = examine(&machine.root(), &settings(), offloads);
            let found = findings.first().map(|found| (found.level, found.found.as_str()));
            let fits = match (found, expected) {
                (Some((level, text)), Some((wanted, start))) => level == wanted && text.starts_with(start),
                (found, expected) => found.is_none() && expected.is_none(),
            };
            assert!(fits && findings.len() <= 1, "{expected:?}: {findings:?}");
        }
    }
}
