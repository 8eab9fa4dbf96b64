//! Session affinity: whether and for how long a client keeps its backend.

use std::time::Duration;

use k8s_openapi::api::core::v1::ServiceSpec as ServiceFields;

use super::error::{SpecError, word};
use crate::note::{Cause, Remark};

/// The API server's default for `sessionAffinityConfig.clientIP.timeoutSeconds`.
const AFFINITY_DEFAULT_S: i32 = 10_800;
/// The longest that the API server takes: a day.
const AFFINITY_MAX_S: i32 = 86_400;

/// `sessionAffinity: ClientIP` and how long a client keeps its backend.
pub(super) fn affinity(fields: &ServiceFields, notes: &mut Vec<Remark>) -> Result<Option<Duration>, SpecError> {
    match fields.session_affinity.as_deref() {
        None | Some("" | "None") => return Ok(None),
        Some("ClientIP") => {}
        Some(other) => return Err(word("spec.sessionAffinity", other, "None or ClientIP")),
    }
    let client_ip = fields.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
    let requested = client_ip.and_then(|config| config.timeout_seconds).unwrap_or(AFFINITY_DEFAULT_S);
    let seconds = if (1..=AFFINITY_MAX_S).contains(&requested) {
        requested
    } else {
        let place = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
        let text = format!("{place} is {requested}, expected 1 to {AFFINITY_MAX_S}; {AFFINITY_DEFAULT_S} is used");
        notes.push(Remark::new(Cause::FieldIgnored, text));
        AFFINITY_DEFAULT_S
    };
    Ok(Some(Duration::from_secs(seconds.unsigned_abs().into())))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn fields(value: Value) -> ServiceFields {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn affinity_has_the_api_servers_default_and_bounds() {
        let with =
            |seconds| json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}});
        let rows = [
            (json!({}), None, 0),
            (json!({"sessionAffinity": "None"}), None, 0),
            (json!({"sessionAffinity": "ClientIP"}), Some(10_800), 0),
            (with(60), Some(60), 0),
            (with(86_400), Some(86_400), 0),
            (with(0), Some(10_800), 1),
            (with(86_401), Some(10_800), 1),
        ];
        for (value, seconds, noted) in rows {
            let mut notes = Vec::new();
            let affinity = affinity(&fields(value.clone()), &mut notes).unwrap();
            assert_eq!((affinity, notes.len()), (seconds.map(Duration::from_secs), noted), "{value}");
        }
        assert!(affinity(&fields(json!({"sessionAffinity": "Cookie"})), &mut Vec::new()).is_err());
    }
}
