//! Defaults and validation of all kinds except Services.

use serde_json::{Value, json};

use super::kind::Kind;
use super::responses::ApiResponse;
use super::service;

/// Sets the defaults that a server sets at creation. `number` makes allocated values unique.
pub fn set_defaults(kind: Kind, object: &mut Value, number: u64) {
    match kind {
        Kind::Service => service::set_defaults(object, number),
        Kind::Namespace => {
            let name = object["metadata"]["name"].clone();
            object["metadata"]["labels"]["kubernetes.io/metadata.name"] = name;
            object["spec"] = json!({"finalizers": ["kubernetes"]});
            object["status"] = json!({"phase": "Active"});
        }
        Kind::CustomResourceDefinition => {
            object["status"] =
                json!({"conditions": [{"type": "Established", "status": "True", "reason": "InitialNamesAccepted"}]});
        }
        Kind::Pod => object["status"] = json!({"phase": "Pending", "qosClass": "BestEffort"}),
        Kind::AddressPool | Kind::EdgeGateway => {
            object.as_object_mut().map(|object| object.remove("status"));
        }
        Kind::Event => {
            for (field, value) in [
                ("deprecatedSource", json!({})),
                ("deprecatedFirstTimestamp", Value::Null),
                ("deprecatedLastTimestamp", Value::Null),
            ] {
                object[field] = value;
            }
        }
        Kind::EndpointSlice | Kind::Node | Kind::ConfigMap | Kind::Secret | Kind::Lease => {}
    }
    if kind.has_generation() {
        object["metadata"]["generation"] = 1.into();
    }
}

/// Validates objects that are created or replaced.
pub fn check(kind: Kind, object: &Value) -> Result<(), ApiResponse> {
    match kind {
        Kind::Event => check_event(object),
        Kind::Lease => check_times(object).map_err(|cause| ApiResponse::bad_request(cause_of_object(kind, &cause))),
        _ => Ok(()),
    }
}

/// Validates patched objects. An unreadable time has another error than at creation, because the patched text does not
/// decode to an object.
pub fn check_patched(kind: Kind, object: &Value) -> Result<(), ApiResponse> {
    match kind {
        Kind::Lease => check_times(object).map_err(|cause| {
            let message = format!("Invalid value: \"{}\": {cause}", object.to_string().replace('"', "\\\""));
            let details = json!({"causes": [{"reason": "FieldValueInvalid", "message": message, "field": "patch"}]});
            ApiResponse::status(422, "Invalid", format!(" \"\" is invalid: patch: {message}"), Some(details))
        }),
        kind => check(kind, object),
    }
}

fn cause_of_object(kind: Kind, cause: &str) -> String {
    format!("{} in version \"v1\" cannot be handled as a {}: {cause}", kind.name(), kind.name())
}

fn check_event(event: &Value) -> Result<(), ApiResponse> {
    let name = event["metadata"]["name"].as_str().unwrap_or_default();
    let is_empty = |field: &&str| event[*field].as_str().is_none_or(str::is_empty);
    let missing: Vec<_> = ["reportingController", "reportingInstance", "action", "reason"].into_iter().filter(is_empty).collect();
    if !missing.is_empty() {
        return Err(ApiResponse::missing(Kind::Event.name(), name, &missing));
    }
    let note = event["note"].as_str().unwrap_or_default();
    if note.len() > 1_024 {
        let message = "Invalid value: \"\": can have at most 1024 characters";
        return Err(ApiResponse::invalid(Kind::Event.name(), name, "FieldValueInvalid", "note", message));
    }
    if let Err(cause) =
        check_micro_time(&event["eventTime"]).and_then(|()| check_micro_time(&event["series"]["lastObservedTime"]))
    {
        return Err(ApiResponse::bad_request(cause_of_object(Kind::Event, &cause)));
    }
    Ok(())
}

fn check_times(lease: &Value) -> Result<(), String> {
    check_micro_time(&lease["spec"]["acquireTime"])?;
    check_micro_time(&lease["spec"]["renewTime"])
}

/// A `MicroTime` has a fraction of six digits.
fn check_micro_time(time: &Value) -> Result<(), String> {
    let Some(text) = time.as_str() else { return Ok(()) };
    let digits = text.split_once('.').map_or(0, |(_, rest)| rest.chars().take_while(char::is_ascii_digit).count());
    if digits == 6 {
        return Ok(());
    }
    let rest = text.get(19..).unwrap_or_default();
    Err(format!("parsing time \"{text}\" as \"2006-01-02T15:04:05.000000Z07:00\": cannot parse \"{rest}\" as \".000000\""))
}
