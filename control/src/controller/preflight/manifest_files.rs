//! Manifests: files that do not parse, what has no effect in them, and Services and pools that are refused.

use std::path::Path;
use std::time::Instant;

use objects::note::{Cause, Note};

use super::finding::{Finding, Level};
use crate::config::settings::ControllerSettings;
use crate::manifests::Directory;
use crate::plan::{Memory, plan};
use crate::world::World;

const KEY: &str = "manifests";

pub(super) fn examine(dir: &Path, settings: &ControllerSettings) -> Vec<Finding> {
    let mut directory = Directory::new(dir.to_owned());
    let (objects, notes) = match directory.read() {
        Ok(read) => read,
        Err(error) => {
            let text = format!("{}: {error}; not checked on this machine", dir.display());
            return vec![Finding::new(Level::Unseen, KEY, text)];
        }
    };
    let objects = objects.unwrap_or_default();
    let count = objects.services.len();
    let mut world = World::default();
    objects.into_changes().into_iter().for_each(|change| world.apply(change));
    let planned = plan(&world, settings, &mut Memory::default(), Instant::now());
    let refused = world.take_notes().into_iter().chain(planned.notes).filter(is_of_the_file);
    let refused = refused.map(|Note { subject, remark }| format!("{subject}: {}: {}", remark.cause.as_str(), remark.text));
    // A file that does not parse is a warning, too: `run` starts and serves the other files.
    let warning = |text: String| Finding::new(Level::Warning, KEY, text);
    let mut findings: Vec<_> = notes.into_iter().chain(refused).map(warning).collect();
    if findings.is_empty() {
        findings.push(Finding::new(Level::Ok, KEY, format!("{}: {count} Services", dir.display())));
    }
    findings
}

/// Whether the author of the file can mend it. That no gateway is connected is true of every check.
fn is_of_the_file(note: &Note) -> bool {
    !note.remark.cause.is_ordinary() && note.remark.cause != Cause::Reason(proto::Reason::NoGateway)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::config::controller::ControllerFile;

    const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n\
        spec: {type: LoadBalancer, loadBalancerClass: sluice.dev/gateway, ports: [{port: 80}]}\n---\n\
        apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: web-1, labels: {kubernetes.io/service-name: web}}\n\
        addressType: IPv4\nports: [{port: 80}]\nendpoints: [{addresses: [10.0.0.11]}]\n";

    #[test]
    fn each_mistake_in_a_manifest_has_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("controller.yaml");
        fs::write(&file, "pools: [{name: default, addresses: [192.0.2.100]}]\nmanifests: m\n").unwrap();
        let settings = ControllerFile::read(&file).unwrap().settings;
        let manifests = dir.path().join("m");
        assert_eq!(examine(&manifests, &settings)[0].level, Level::Unseen);
        fs::create_dir(&manifests).unwrap();
        let rows = [
            ("", "", Level::Ok, "1 Services"),
            ("port: 80}]}", "port: eighty}]}", Level::Warning, "nothing of the file is used until it is mended"),
            ("kind: Service\n", "kind: Servcie\n", Level::Warning, "did you mean `Service`?"),
            ("type: LoadBalancer", "type: Loadbalancer", Level::Warning, "default/web: Refused: spec.type is \"Loadbalancer\""),
            (
                "ports: [{port: 80}]}",
                "loadBalancerSourceRange: [192.0.2.0/24], ports: [{port: 80}]}",
                Level::Warning,
                "default/web: Refused: field spec.loadBalancerSourceRange is unknown, did you mean `loadBalancerSourceRanges`?",
            ),
            (
                "ports: [{port: 80}]}",
                "sessionAffinty: ClientIP, ports: [{port: 80}]}",
                Level::Warning,
                "FieldIgnored: field spec.sessionAffinty is unknown and has no effect, did you mean `sessionAffinity`?",
            ),
            (
                "{name: web}\nspec",
                "{name: web, annotations: {sluice.dev/addresses: 203.0.113.9}}\nspec",
                Level::Warning,
                "OutsidePools",
            ),
            (
                "{name: web}\nspec",
                "{name: web, annotations: {sluice.dev/proxy-protocol: v3}}\nspec",
                Level::Warning,
                "Refused: annotation sluice.dev/proxy-protocol: found \"v3\", expected v1 or v2",
            ),
            (
                "{name: web}\nspec",
                "{name: web, annotations: {sluice.dev/mode: gue, sluice.dev/proxy-protocol: v2}}\nspec",
                Level::Warning,
                "Unsupported: Mode gue cannot send the PROXY header that port 80 asks for",
            ),
        ];
        for (from, to, level, expected) in rows {
            fs::write(manifests.join("web.yaml"), SERVICE.replacen(from, to, 1)).unwrap();
            let findings = examine(&manifests, &settings);
            let found = findings.iter().find(|found| found.text.contains(expected));
            assert_eq!(found.map(|found| found.level), Some(level), "{expected}: {findings:?}");
            assert!(level != Level::Ok || findings.len() == 1, "{findings:?}");
        }
    }
}
