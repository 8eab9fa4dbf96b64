//! Fields of a manifest that no Service has. An API server would drop them and warn its client; the author of a file has
//! only sluice to tell.
//!
//! Invariant: a field that looks like a restriction of clients is never dropped: a Service that lacks one would admit
//! everybody (docs/internals/decisions/0155).
//! Deliberately not here: finding the fields (`documents`).

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

/// The field of `spec` that an unknown one, by its path, may have been meant as.
fn meant(path: &str) -> Option<&'static str> {
    let field = path.strip_prefix("spec.").filter(|field| !field.contains(['.', '[']))?;
    spelling::nearest(field, SPEC_FIELDS)
}

/// Names an unknown field of a Service and what to do.
pub(crate) fn message(path: &str) -> String {
    match meant(path) {
        Some(known) => format!("field {path} is unknown and has no effect, did you mean `{known}`?"),
        None => format!("field {path} is unknown and has no effect; check its spelling"),
    }
}

impl ReadService {
    /// Takes note of unknown fields of its manifest, by their paths. With one that looks like the source ranges it is not
    /// served.
    pub fn note_unknown_fields(&mut self, paths: &[String]) {
        let Ok(candidate) = &mut self.candidate else { return };
        let Ok(spec) = &mut candidate.wanted else { return };
        if let Some(path) = paths.iter().find(|path| meant(path) == Some(SOURCE_RANGES)) {
            candidate.wanted = Err(SpecError::Misspelt { found: path.clone(), meant: SOURCE_RANGES });
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
        let refused = read("spec.loadBalancerSourceRange").candidate.unwrap().wanted.unwrap_err();
        let text = refused.refusal().message;
        assert!(text.contains("spec.loadBalancerSourceRange") && text.contains("`loadBalancerSourceRanges`"), "{text}");
        let rows = [
            ("spec.sessionAffinty", "did you mean `sessionAffinity`?"),
            ("spec.frobnicate", "check its spelling"),
            ("spec.ports[0].prot", "check its spelling"),
        ];
        for (path, expected) in rows {
            let notes = read(path).candidate.unwrap().wanted.unwrap().notes;
            assert_eq!(notes[0].cause, Cause::FieldIgnored);
            assert!(notes[0].text.contains(path) && notes[0].text.ends_with(expected), "{notes:?}");
        }
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
