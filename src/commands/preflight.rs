//! What a configuration names outside of itself, for `check` and `doctor`: what its controller names
//! (`control::controller::preflight`), the certificates of the gateway, and the MTUs of its ports and of what is behind
//! them.
//!
//! Invariant: it only reads.
//! Deliberately not here: devices, cores and memory of this machine (`doctor`).

mod veth;

use std::io;

use control::controller::preflight::{self, Bearer, Finding, Level};
use proto::Mode;
use tokio::runtime;

use super::doctor;
use crate::machine::Root;
use crate::settings::{Settings, StateSource};

/// What a tunnel adds at most, bytes: IPv6, UDP and GUE's header of variant 1, which is the inner packet itself.
const TUNNEL_BYTES_MAX: u16 = 48;

/// Looks at what these settings name. Takes a few seconds at most.
///
/// # Errors
/// If the system has no room for the timers and sockets that it takes.
pub fn examine(settings: &Settings) -> io::Result<Vec<Finding>> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let mut findings = match &settings.source {
        StateSource::Embedded(controller, _) => runtime.block_on(preflight::examine(controller)),
        StateSource::Remote(..) => Vec::new(),
    };
    findings.extend(runtime.block_on(certificates(settings)));
    // A plugin of a kubeconfig may hang; nobody waits for its thread.
    runtime.shutdown_background();
    findings.extend(mtus(settings));
    Ok(findings)
}

/// The same without the source of Services.
fn examine_without_source(settings: &Settings) -> io::Result<Vec<Finding>> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let text = "the file alone names no valid source of Services: manifests and the API server are not looked at; \
                `sluiced check` with the flags of `run` looks at them";
    let mut findings = vec![Finding::new(Level::Note, "source", text)];
    if let StateSource::Embedded(controller, _) = &settings.source {
        findings.extend(runtime.block_on(preflight::examine_listener(controller)));
    }
    findings.extend(runtime.block_on(certificates(settings)));
    findings.extend(mtus(settings));
    Ok(findings)
}

/// The same as lines of `doctor`, on the machine that runs the gateway: what is not here is missing. `settings` are those
/// of the file whatever its source, `with_source` those with the source that it names, if it names one.
///
/// # Errors
/// See [`examine`].
pub fn of_this_machine(settings: Option<&Settings>, with_source: Option<&Settings>) -> io::Result<Vec<doctor::Finding>> {
    let named = match (with_source, settings) {
        (Some(settings), _) => examine(settings)?,
        (None, Some(settings)) => examine_without_source(settings)?,
        (None, None) => Vec::new(),
    };
    let line = |Finding { level, key, text }| match level {
        Level::Ok => doctor::Finding::ok(key, text),
        Level::Note | Level::Warning => doctor::Finding::note(key, text, ""),
        Level::Unseen | Level::Fault => doctor::Finding::missing(key, text, ""),
    };
    let veths = settings.map(|settings| veth::examine(&Root::new("/"), settings, veth::offloads_of));
    Ok(named.into_iter().map(line).chain(veths.into_iter().flatten()).collect())
}

/// The certificates of the gateway itself.
async fn certificates(settings: &Settings) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (StateSource::Embedded(_, files) | StateSource::Remote(_, files)) = &settings.source;
    if let Some(files) = files {
        let bearer = Bearer::Gateway(&settings.name);
        findings.push(preflight::examine_certificates("controller.tls", files, bearer).await);
    }
    findings.extend(preflight::examine_admin(&settings.admin_listen).await);
    findings
}

/// Notes about ports whose MTUs differ, and about tunnels for which they do not.
fn mtus(settings: &Settings) -> Vec<Finding> {
    let ports = &settings.ports;
    let note = |text: String| vec![Finding::new(Level::Note, "ports", text)];
    let (Some(small), Some(large)) =
        (ports.iter().min_by_key(|port| port.mtu_bytes), ports.iter().max_by_key(|port| port.mtu_bytes))
    else {
        return Vec::new();
    };
    if let StateSource::Embedded(controller, _) = &settings.source
        && matches!(controller.defaults.mode, Mode::Ipip | Mode::Gue)
        && large.mtu_bytes - small.mtu_bytes < TUNNEL_BYTES_MAX
    {
        return note(format!(
            "no MTU is larger than another by {TUNNEL_BYTES_MAX} bytes, and mode {} adds up to as many: packets of clients that fill \
             {} bytes do not fit (docs/guide/modes.md, MTU)",
            controller.defaults.mode.as_str(),
            small.mtu_bytes
        ));
    }
    if small.mtu_bytes == large.mtu_bytes {
        return Vec::new();
    }
    note(format!(
        "{} has MTU {}, {} has {}: in `nat` and `dnat` TCP gets the smaller one, longer datagrams are fragmented or their senders get \
         an ICMP error",
        small.name, small.mtu_bytes, large.name, large.mtu_bytes
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::settings::SourceChoice;

    const BASE: &str = "name: edge-1\nports:\n  - {name: uplink, device: net_tap0, addresses: [192.0.2.2/24]}\n\
        \x20 - {name: cluster, device: net_tap1, addresses: [10.0.0.2/24]}\nsnat: {addresses: [10.0.0.3]}\nmanifests: m\n";

    /// The settings of a file in a directory that has manifests, none, in `m`.
    fn settings(dir: &tempfile::TempDir, text: &str) -> Settings {
        fs::create_dir(dir.path().join("m")).unwrap();
        let file = dir.path().join("sluice.yaml");
        fs::write(&file, text).unwrap();
        Settings::read(&file, &SourceChoice::File).unwrap()
    }

    fn texts(text: &str) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let findings = examine(&settings(&dir, text)).unwrap();
        findings.iter().filter(|found| found.level != Level::Ok).map(ToString::to_string).collect()
    }

    #[test]
    fn each_thing_that_a_file_names_and_that_is_not_right_has_its_line() {
        let tcp = "admin: {listen: ['unix:/run/a.sock', '0.0.0.0:9438'], tls: {ca: ca.pem, cert: cert.pem, key: key.pem}}\n";
        let remote = "controller: {urls: ['https://192.0.2.9:9433'], tls: {ca: ca.pem, cert: cert.pem, key: key.pem}}\n";
        let without_source = BASE.replace("manifests: m\n", "");
        let rows = [
            (BASE.replace("manifests: m", "manifests: none"), "note: manifests: "),
            (format!("{BASE}{tcp}"), "note: admin.tls: "),
            (format!("{without_source}{remote}"), "note: controller.tls: "),
            (format!("{without_source}kubernetes: {{kubeconfig: none}}\n"), "note: kubernetes.kubeconfig: "),
            (BASE.replace("[10.0.0.2/24]", "[10.0.0.2/24], mtu: 9000"), "note: ports: uplink has MTU 1500, cluster has 9000"),
            (format!("{BASE}defaults: {{mode: gue}}\n"), "note: ports: no MTU is larger than another by 48 bytes, and mode gue"),
        ];
        for (text, expected) in rows {
            let found = texts(&text);
            assert!(found.len() == 1 && found[0].starts_with(expected), "{expected}: {found:?}");
        }
        assert_eq!(texts(BASE), Vec::<String>::new());
        let roomy = BASE.replace("[10.0.0.2/24]", "[10.0.0.2/24], mtu: 1548") + "defaults: {mode: ipip}\n";
        assert!(texts(&roomy)[0].contains("TCP gets the smaller one"), "the tunnel fits");
    }

    #[test]
    fn without_a_source_in_the_file_the_doctor_still_looks_at_all_else() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sluice.yaml");
        let tls = "tls: {ca: ca.pem, cert: cert.pem, key: key.pem}";
        let text = BASE.replace("manifests: m\n", "").replace("[10.0.0.2/24]", "[10.0.0.2/24], mtu: 9000");
        let listens = format!("admin: {{listen: ['unix:/run/a.sock', '0.0.0.0:9438'], {tls}}}\ncontroller: {{{tls}}}\n");
        fs::write(&file, format!("{text}{listens}listen: ['unix:/run/c.sock', '0.0.0.0:9433']\n{tls}\n")).unwrap();
        assert!(Settings::read(&file, &SourceChoice::File).is_err());
        let settings = Settings::read(&file, &SourceChoice::Replay("/".into())).unwrap();
        let findings = of_this_machine(Some(&settings), None).unwrap();
        let found: Vec<_> = findings.iter().map(|found| (found.level, found.subject.as_str())).collect();
        let missing = |key| (doctor::Level::Missing, key);
        let note = |key| (doctor::Level::Note, key);
        assert_eq!(found, [note("source"), missing("tls"), missing("controller.tls"), missing("admin.tls"), note("ports")]);
        assert!(findings[0].found.contains("manifests and the API server are not looked at"), "{findings:?}");
    }

    #[test]
    fn an_api_server_that_cannot_be_reached_is_a_note_elsewhere_and_missing_on_the_gateway() {
        let dir = tempfile::tempdir().unwrap();
        // Port 9 of this machine, where nobody listens.
        let kubeconfig = "apiVersion: v1\nkind: Config\ncurrent-context: a\nusers: [{name: a, user: {token: t}}]\n\
            clusters: [{name: a, cluster: {server: 'http://127.0.0.1:9'}}]\n\
            contexts: [{name: a, context: {cluster: a, user: a}}]\n";
        fs::write(dir.path().join("kubeconfig"), kubeconfig).unwrap();
        let settings = settings(&dir, &BASE.replace("manifests: m", "kubernetes: {kubeconfig: kubeconfig}"));
        let found = examine(&settings).unwrap();
        assert!(found.len() == 1 && found[0].level == Level::Unseen, "{found:?}");
        let lines = of_this_machine(None, Some(&settings)).unwrap();
        assert!(lines.len() == 1 && lines[0].level == doctor::Level::Missing, "{lines:?}");
        assert!(lines[0].found.contains("cannot be asked from this machine"), "{lines:?}");
    }
}
