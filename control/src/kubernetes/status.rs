//! Writes `status.loadBalancer.ingress`: one strategic-merge PATCH of `services/status` (CONTROL section 5).
//!
//! **Invariant.** A write applies to exactly the object version that it was decided on, or not at all: `uid` and
//! `resourceVersion` go with it. Deliberately not here: whether to write, and when.

use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::api::{Patch, PatchParams};
use proto::limits::FIELD_MANAGER;
use serde_json::{Value, json};
use thiserror::Error;

use super::Outage;
use super::outage::truncated;
use crate::source::{IpMode, StatusWrite};

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The status is as it should be.
    Written,
    /// The object has changed since: decide again once the newer one is seen (409).
    Stale,
    /// The Service does not exist any more (404).
    Gone,
}

/// Why a write failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StatusError {
    /// The server will never accept this write (400, 422): do not repeat it until the object changes.
    #[error("the API server refuses the status of {service} ({code}: {message}); not tried again until the Service changes")]
    Refused {
        /// The Service.
        service: String,
        /// HTTP status.
        code: u16,
        /// What the server said, at most 1,000 characters.
        message: String,
    },
    /// Trouble that passes: repeat the write later.
    #[error(transparent)]
    Later(#[from] Outage),
}

/// Sends one write, once.
pub async fn patch(client: &kube::Client, write: &StatusWrite) -> Result<Outcome, StatusError> {
    let api = Api::<Service>::namespaced(client.clone(), &write.service.namespace);
    let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
    match api.patch_status(&write.service.name, &params, &Patch::Strategic(body(write))).await {
        // It was accepted; that the answer cannot be decoded is the reader's trouble.
        Ok(_) | Err(kube::Error::SerdeError(_)) => Ok(Outcome::Written),
        Err(kube::Error::Api(status)) => match status.code {
            404 => Ok(Outcome::Gone),
            409 => Ok(Outcome::Stale),
            code @ (400 | 422) => {
                Err(StatusError::Refused { service: write.service.to_string(), code, message: truncated(&status.message) })
            }
            _ => Err(StatusError::Later(status.as_ref().into())),
        },
        Err(error) => Err(StatusError::Later(Outage::from(&error))),
    }
}

/// `null` removes the list; a list replaces it whole, as the API declares it atomic.
fn body(write: &StatusWrite) -> Value {
    let ingress = write.ingress.iter().map(|entry| {
        let mode = match entry.ip_mode {
            IpMode::Vip => "VIP",
            IpMode::Proxy => "Proxy",
        };
        json!({"ip": entry.ip.to_string(), "ipMode": mode})
    });
    let ingress = if write.ingress.is_empty() { Value::Null } else { ingress.collect() };
    json!({
        "metadata": {"uid": write.uid, "resourceVersion": write.resource_version},
        "status": {"loadBalancer": {"ingress": ingress}},
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Ingress;
    use proto::ServiceName;

    fn write(ingress: Vec<Ingress>) -> StatusWrite {
        StatusWrite { service: ServiceName::new("a", "web"), uid: "u".into(), resource_version: "7".into(), ingress }
    }

    #[test]
    fn a_write_names_the_version_it_was_decided_on_and_every_mode() {
        let ingress = vec![
            Ingress { ip: "192.0.2.1".parse().unwrap(), ip_mode: IpMode::Proxy },
            Ingress { ip: "2001:db8::1".parse().unwrap(), ip_mode: IpMode::Vip },
        ];
        let expected = json!({
            "metadata": {"uid": "u", "resourceVersion": "7"},
            "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1", "ipMode": "Proxy"}, {"ip": "2001:db8::1", "ipMode": "VIP"}]}},
        });
        assert_eq!(body(&write(ingress)), expected);
    }

    #[test]
    fn no_address_clears_the_status() {
        assert_eq!(body(&write(Vec::new()))["status"]["loadBalancer"], json!({"ingress": null}));
    }
}
