//! Answers, most of them a `Status`, in the words of the recordings.

use serde_json::{Value, json};

/// Who the server believes us to be.
const USER: &str = "system:serviceaccount:sluice:sluice";

/// A whole response.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub code: u16,
    pub content_type: &'static str,
    pub retry_after_s: Option<u32>,
    pub body: String,
}

impl Answer {
    pub fn json(code: u16, body: &Value) -> Self {
        Self { code, content_type: "application/json", retry_after_s: None, body: format!("{body}\n") }
    }

    pub fn status(code: u16, reason: &str, message: String, details: Option<Value>) -> Self {
        let mut status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message});
        if !reason.is_empty() {
            status["reason"] = reason.into();
        }
        if let Some(details) = details {
            status["details"] = details;
        }
        status["code"] = code.into();
        Self::json(code, &status)
    }

    pub fn not_found(plural: &str, name: &str) -> Self {
        Self::status(404, "NotFound", format!("{plural} \"{name}\" not found"), Some(json!({"name": name, "kind": plural})))
    }

    pub fn already_exists(plural: &str, name: &str) -> Self {
        let message = format!("{plural} \"{name}\" already exists");
        Self::status(409, "AlreadyExists", message, Some(json!({"name": name, "kind": plural})))
    }

    pub fn conflict(plural: &str, name: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {plural} \"{name}\": the object has been modified; please apply your changes to the \
             latest version and try again"
        );
        Self::status(409, "Conflict", message, Some(json!({"name": name, "kind": plural})))
    }

    /// 422 with one cause. Its message repeats the cause behind the field.
    pub fn invalid(name: &str, reason: &str, field: &str, message: &str) -> Self {
        let causes = json!([{"reason": reason, "message": message, "field": field}]);
        let details = json!({"name": name, "kind": "Service", "causes": causes});
        Self::status(422, "Invalid", format!("Service \"{name}\" is invalid: {field}: {message}"), Some(details))
    }

    pub fn bad_request(message: String) -> Self {
        Self::status(400, "BadRequest", message, None)
    }

    pub fn expired(message: &str) -> Self {
        Self::status(410, "Expired", message.to_owned(), None)
    }

    pub fn too_many(retry_after_s: u32) -> Self {
        Self {
            code: 429,
            content_type: "text/plain; charset=utf-8",
            retry_after_s: Some(retry_after_s),
            body: "Too many requests, please try again later.\n".to_owned(),
        }
    }

    pub fn internal(message: &str) -> Self {
        let details = json!({"causes": [{"message": message}]});
        Self::status(500, "InternalError", format!("Internal error occurred: {message}"), Some(details))
    }

    /// As RBAC says it. `name` is empty for lists and watches.
    pub fn forbidden(group: &str, plural: &str, subresource: &str, verb: &str, namespace: &str, name: &str) -> Self {
        let qualified = if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") };
        let subject = if name.is_empty() { qualified } else { format!("{qualified} \"{name}\"") };
        let resource = if subresource.is_empty() { plural.to_owned() } else { format!("{plural}/{subresource}") };
        let scope =
            if namespace.is_empty() { "at the cluster scope".to_owned() } else { format!("in the namespace \"{namespace}\"") };
        let message = format!(
            "{subject} is forbidden: User \"{USER}\" cannot {verb} resource \"{resource}\" in API group \"{group}\" {scope}"
        );
        let mut details = json!({});
        for (key, value) in [("name", name), ("group", group), ("kind", plural)] {
            if !value.is_empty() {
                details[key] = value.into();
            }
        }
        Self::status(403, "Forbidden", message, Some(details))
    }

    pub fn not_built(what: &str) -> Self {
        Self::status(501, "", format!("the test server does not know {what}"), None)
    }
}
