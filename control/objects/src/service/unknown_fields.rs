//! Fields of a manifest that no Service has. An API server would drop them and warn its client; the author of a file has
//! only sluice to tell.
//!
//! Invariant: a field that looks like a restriction of clients is never dropped: a Service that lacks one would admit
//! everybody (docs/internals/decisions/0155).
//! Deliberately not here: finding the fields (`documents`).

use serde_json::Value;

use super::{ReadService, SpecError};
use crate::note::{Cause, Remark};
use crate::spelling;

/// The field that says who may connect.
const SOURCE_RANGES: &str = "loadBalancerSourceRanges";

/// The fields of `spec` in Kubernetes 1.33.
const SPEC_FIELDS: [&str; 20] = [
    "allocateLoadBalancerNodePorts",
    "clusterIP",
    "clusterIPs",
    "externalIPs",
    "externalName",
    "externalTrafficPolicy",
    "healthCheckNodePort",
    "internalTrafficPolicy",
    "ipFamilies",
    "ipFamilyPolicy",
    "loadBalancerClass",
    "loadBalancerIP",
    SOURCE_RANGES,
    "ports",
    "publishNotReadyAddresses",
    "selector",
    "sessionAffinity",
    "sessionAffinityConfig",
    "trafficDistribution",
    "type",
];

/// The field of `spec` that an unknown one, by its path, may have been meant as. At another place than directly in `spec`
/// a field counts only if its name is right, or looks like the source ranges: wrong indentation moves it there.
fn meant(path: &str) -> Option<&'static str> {
    let found = path.rsplit('.').next().and_then(|last| last.split('[').next())?;
    let known = spelling::nearest(found, SPEC_FIELDS)?;
    (is_in_spec(path) || known == found || known == SOURCE_RANGES).then_some(known)
}

/// Whether this is the path of a field directly in `spec`.
fn is_in_spec(path: &str) -> bool {
    path.strip_prefix("spec.").is_some_and(|field| !field.contains(['.', '[']))
}

/// The field as its author should write it: with its place, unless the place is right.
fn shown(path: &str, known: &str) -> String {
    if is_in_spec(path) { known.to_owned() } else { format!("spec.{known}") }
}

/// Names an unknown field of a Service and what to do.
pub(crate) fn message(path: &str) -> String {
    match meant(path) {
        Some(known) => format!("field {path} is unknown and has no effect, did you mean `{}`?", shown(path, known)),
        None => format!("field {path} is unknown and has no effect; check its spelling"),
    }
}

/// Adds the paths of those fields in the value of an unknown field that look like the source ranges.
pub(crate) fn add_restrictions(value: &Value, path: &str, lost: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let path = format!("{path}.{key}");
                if meant(&path) == Some(SOURCE_RANGES) {
                    lost.push(path.clone());
                }
                add_restrictions(value, &path, lost);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                add_restrictions(item, &format!("{path}[{index}]"), lost);
            }
        }
        _ => {}
    }
}

impl ReadService {
    /// Takes note of unknown fields of its manifest, by their paths. With one that looks like the source ranges it is not
    /// served.
    pub fn note_unknown_fields(&mut self, paths: &[String]) {
        let Ok(candidate) = &mut self.candidate else { return };
        let Ok(spec) = &mut candidate.wanted else { return };
        if let Some(path) = paths.iter().find(|path| meant(path) == Some(SOURCE_RANGES)) {
            candidate.wanted = Err(SpecError::Misspelt { found: path.clone(), meant: shown(path, SOURCE_RANGES) });
            return;
        }
        spec.notes.extend(paths.iter().map(|path| Remark::new(Cause::FieldIgnored, message(path))));
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Service, ServiceSpec};

    use super::*;

    fn read(path: &str) -> ReadService {
        let service = serde_json::json!({"metadata": {"name": "web"}, "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]}});
        let mut read = ReadService::from(serde_json::from_value::<Service>(service).unwrap());
        read.note_unknown_fields(&[path.to_owned()]);
        read
    }

    #[test]
    fn a_misspelt_restriction_of_clients_refuses_the_service_and_any_other_field_is_noted() {
        for (path, meant) in [
            ("spec.loadBalancerSourceRange", "`loadBalancerSourceRanges`"),
            ("loadBalancerSourceRanges", "`spec.loadBalancerSourceRanges`"),
            ("loadBalancerSourceRange", "`spec.loadBalancerSourceRanges`"),
            ("metadata.loadBalancerSourceRanges", "`spec.loadBalancerSourceRanges`"),
            ("spec.ports[0].loadBalancerSourceRanges", "`spec.loadBalancerSourceRanges`"),
            ("spec.ports[0].loadbalancersourceranges", "`spec.loadBalancerSourceRanges`"),
        ] {
            let refused = read(path).candidate.unwrap().wanted.unwrap_err();
            let text = refused.refusal().message;
            assert!(text.contains(&format!("field {path} ")) && text.contains(meant), "{text}");
        }
        let rows = [
            ("spec.sessionAffinty", "did you mean `sessionAffinity`?"),
            ("spec.frobnicate", "check its spelling"),
            ("spec.ports[0].prot", "check its spelling"),
            ("spec.ports[0].sessionAffinity", "did you mean `spec.sessionAffinity`?"),
            ("loadBalancerIP", "did you mean `spec.loadBalancerIP`?"),
        ];
        for (path, expected) in rows {
            let notes = read(path).candidate.unwrap().wanted.unwrap().notes;
            assert_eq!(notes[0].cause, Cause::FieldIgnored);
            assert!(notes[0].text.contains(path) && notes[0].text.ends_with(expected), "{notes:?}");
        }
    }

    #[test]
    fn a_restriction_inside_of_an_unknown_field_is_found() {
        let value = serde_json::json!({"a": [{"loadBalancerSourceRanges": []}], "b": {"loadBalancerIP": ""}});
        let mut lost = Vec::new();
        add_restrictions(&value, "spec.x", &mut lost);
        assert_eq!(lost, ["spec.x.a[0].loadBalancerSourceRanges"]);
    }

    #[test]
    fn the_known_fields_are_those_of_kubernetes() {
        let set = serde_json::json!({
            "allocateLoadBalancerNodePorts": true, "clusterIP": "", "clusterIPs": [], "externalIPs": [], "externalName": "",
            "externalTrafficPolicy": "", "healthCheckNodePort": 1, "internalTrafficPolicy": "", "ipFamilies": [],
            "ipFamilyPolicy": "", "loadBalancerClass": "", "loadBalancerIP": "", "loadBalancerSourceRanges": [], "ports": [],
            "publishNotReadyAddresses": true, "selector": {}, "sessionAffinity": "", "sessionAffinityConfig": {},
            "trafficDistribution": "", "type": ""
        });
        let spec: ServiceSpec = serde_json::from_value(set).unwrap();
        let written = serde_json::to_value(spec).unwrap();
        let names: Vec<&str> = written.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(names, SPEC_FIELDS);
    }
}
