//! The status write: one strategic-merge PATCH of `services/status` with addresses, conditions and finalizer (CONTROL
//! section 5).
//!
//! Invariant: a write applies only to the object version for which it was decided, because it contains `uid` and
//! `resourceVersion`.
//! Deliberately not here: whether and when to write.

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::Patch;
use proto::limits::{FINALIZER, GROUP_ANNOTATION};
use serde_json::{Value, json};
use thiserror::Error;

use super::api_error::truncated;
use super::backoff::REFUSED_WAIT_MAX;
use crate::kubernetes::api_error::ApiError;
use crate::kubernetes::client::patch_params;
use objects::status::{Ingress, PortStatus, StatusWrite};
use objects::{Condition, ConditionType};

/// Part of the server's message if the role of the controller lacks the right.
const MISSING_RIGHT: &str = "cannot patch resource";

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchOutcome {
    /// The write was accepted.
    Written,
    /// Conflict (409): the object has changed; decide again when the newer version arrives.
    Stale,
    /// The Service no longer exists (404).
    Gone,
}

/// Why a write failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StatusError {
    /// The server refuses this write (400, 422). Admission policies answer so, too, and may change.
    #[error("the API server refuses the status of {service} ({code}: {message})")]
    Refused {
        /// The Service.
        service: String,
        /// HTTP status.
        code: u16,
        /// Message of the server, at most 1,000 characters.
        message: String,
    },
    /// A temporary error: retry later.
    #[error(transparent)]
    Later(#[from] ApiError),
}

impl StatusError {
    /// What the owner of the Service is told, if the server refuses the status of this Service. A right that the
    /// controller lacks concerns all Services, and is reported to the operator instead.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        let (code, message) = match self {
            Self::Refused { code, message, .. } => (*code, message),
            Self::Later(ApiError::Forbidden(message)) if !message.contains(MISSING_RIGHT) => (403, message),
            Self::Later(_) => return None,
        };
        Some(format!(
            "The API server refuses the status of the Service ({code}: {message}). sluice tries again, every \
             {} minutes at last: let the admission policy or webhook accept writes of services/status by the controller",
            REFUSED_WAIT_MAX.as_secs() / 60
        ))
    }
}

/// Sends one write, once.
pub async fn patch(client: &kube::Client, write: &StatusWrite) -> Result<PatchOutcome, StatusError> {
    let api = Api::<Service>::namespaced(client.clone(), &write.service.namespace);
    match api.patch_status(&write.service.name, &patch_params(), &Patch::Strategic(body(write, Timestamp::now()))).await {
        // The write was accepted, even though its answer cannot be decoded.
        Ok(_) | Err(kube::Error::SerdeError(_)) => Ok(PatchOutcome::Written),
        Err(kube::Error::Api(status)) => match status.code {
            404 => Ok(PatchOutcome::Gone),
            409 => Ok(PatchOutcome::Stale),
            code @ (400 | 422) => {
                Err(StatusError::Refused { service: write.service.to_string(), code, message: truncated(&status.message) })
            }
            _ => Err(StatusError::Later(status.as_ref().into())),
        },
        Err(error) => Err(StatusError::Later(ApiError::from(&error))),
    }
}

/// Unchanged fields are omitted. `null` removes the list of addresses, and a list replaces it as a whole, because the
/// API declares it atomic. Conditions and finalizers are merged with those of other controllers.
fn body(write: &StatusWrite, now: Timestamp) -> Value {
    let mut metadata = json!({"uid": write.uid, "resourceVersion": write.resource_version});
    match write.finalizer {
        Some(true) => metadata["finalizers"] = json!([FINALIZER]),
        Some(false) => metadata["$deleteFromPrimitiveList/finalizers"] = json!([FINALIZER]),
        None => {}
    }
    if let Some(group) = &write.group {
        let value = if group.is_empty() { Value::Null } else { group.as_str().into() };
        metadata["annotations"] = json!({GROUP_ANNOTATION: value});
    }
    let mut status = json!({});
    if let Some(ingress) = &write.ingress {
        let ingress = if ingress.is_empty() { Value::Null } else { ingress.iter().map(entry).collect() };
        status["loadBalancer"] = json!({"ingress": ingress});
    }
    if !write.conditions.is_empty() {
        status["conditions"] = write.conditions.iter().map(|(kind, change)| condition(*kind, change.as_ref(), now)).collect();
    }
    let mut body = json!({"metadata": metadata});
    if status != json!({}) {
        body["status"] = status;
    }
    body
}

fn entry(ingress: &Ingress) -> Value {
    let mut entry = json!({"ip": ingress.ip.to_string(), "ipMode": ingress.ip_mode.as_str()});
    if !ingress.ports.is_empty() {
        entry["ports"] = ingress.ports.iter().map(port).collect();
    }
    entry
}

fn port(status: &PortStatus) -> Value {
    let mut port = json!({"port": status.port, "protocol": status.protocol.to_string().to_uppercase()});
    if let Some(error) = &status.error {
        port["error"] = json!(error);
    }
    port
}

fn condition(kind: ConditionType, change: Option<&Condition>, now: Timestamp) -> Value {
    let Some(condition) = change else { return json!({"type": kind.as_str(), "$patch": "delete"}) };
    json!({
        "type": kind.as_str(),
        "status": if condition.holds { "True" } else { "False" },
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": Time(condition.since.unwrap_or(now)),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use objects::status::IpMode;
    use proto::{Protocol, ServiceName};

    fn write(ingress: Option<Vec<Ingress>>) -> StatusWrite {
        StatusWrite {
            service: ServiceName::new("a", "web"),
            uid: "u".into(),
            resource_version: "7".into(),
            ingress,
            conditions: BTreeMap::new(),
            finalizer: None,
            group: None,
        }
    }

    #[test]
    fn a_write_names_the_version_it_was_decided_on_and_every_mode() {
        let ingress = vec![
            Ingress::new("192.0.2.1".parse().unwrap(), IpMode::Proxy),
            Ingress::new("2001:db8::1".parse().unwrap(), IpMode::Vip),
        ];
        let expected = json!({
            "metadata": {"uid": "u", "resourceVersion": "7"},
            "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1", "ipMode": "Proxy"}, {"ip": "2001:db8::1", "ipMode": "VIP"}]}},
        });
        assert_eq!(body(&write(Some(ingress)), Timestamp::UNIX_EPOCH), expected);
    }

    #[test]
    fn ports_have_their_protocol_and_unserved_ports_an_error() {
        let port = |port, protocol, error: Option<&'static str>| PortStatus { port, protocol, error: error.map(Into::into) };
        let ports = vec![port(80, Protocol::Tcp, None), port(53, Protocol::Udp, Some("sluice.dev/NoMatchingPort"))];
        let written = entry(&Ingress { ports, ..Ingress::new("192.0.2.1".parse().unwrap(), IpMode::Vip) });
        let expected = json!([{"port": 80, "protocol": "TCP"},
            {"port": 53, "protocol": "UDP", "error": "sluice.dev/NoMatchingPort"}]);
        assert_eq!(written["ports"], expected);
    }

    #[test]
    fn no_address_clears_the_status() {
        assert_eq!(body(&write(Some(Vec::new())), Timestamp::UNIX_EPOCH)["status"]["loadBalancer"], json!({"ingress": null}));
    }

    #[test]
    fn a_condition_and_the_finalizer_merge_with_those_of_others() {
        let mut write = write(None);
        (write.finalizer, write.group) = (Some(true), Some("east".to_owned()));
        write.conditions.insert(ConditionType::Programmed, Some(Condition::new(false, "NoGateway", "none")));
        write.conditions.insert(ConditionType::BackendsHealthy, None);
        let expected = json!({
            "metadata": {"uid": "u", "resourceVersion": "7", "finalizers": ["sluice.dev/load-balancer-cleanup"],
                "annotations": {"sluice.dev/group": "east"}},
            "status": {"conditions": [
                {"type": "sluice.dev/Programmed", "status": "False", "reason": "NoGateway", "message": "none",
                 "lastTransitionTime": "1970-01-01T00:00:00Z"},
                {"type": "sluice.dev/BackendsHealthy", "$patch": "delete"},
            ]},
        });
        assert_eq!(body(&write, Timestamp::UNIX_EPOCH), expected);
        write = StatusWrite { finalizer: Some(false), group: Some(String::new()), conditions: BTreeMap::new(), ..write };
        let none: Option<&str> = None;
        let expected = json!({"metadata": {"uid": "u", "resourceVersion": "7", "annotations": {"sluice.dev/group": none},
            "$deleteFromPrimitiveList/finalizers": ["sluice.dev/load-balancer-cleanup"]}});
        assert_eq!(body(&write, Timestamp::UNIX_EPOCH), expected);
    }
}
