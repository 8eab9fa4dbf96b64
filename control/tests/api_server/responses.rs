//! HTTP responses, most of them a `Status`, with the texts of the recordings.

use serde::Serialize;
use serde_json::{Value, json};

use super::accounts::Attributes;
use super::kind::Kind;

/// A complete response.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiResponse {
    pub code: u16,
    pub content_type: &'static str,
    pub retry_after_s: Option<u32>,
    pub body: String,
}

impl ApiResponse {
    pub fn json(code: u16, body: &impl Serialize) -> Self {
        let body = serde_json::to_string(body).unwrap() + "\n";
        Self { code, content_type: "application/json", retry_after_s: None, body }
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

    /// A response about an object: its name is in the message, its identity in the details.
    fn about(code: u16, reason: &str, kind: Kind, name: &str, message: impl FnOnce(&str) -> String) -> Self {
        let qualified = qualified(kind.group(), kind.plural());
        let details = details(&[("name", name), ("group", kind.group()), ("kind", kind.plural())]);
        Self::status(code, reason, message(&format!("{qualified} \"{name}\"")), Some(details))
    }

    pub fn not_found(kind: Kind, name: &str) -> Self {
        Self::about(404, "NotFound", kind, name, |object| format!("{object} not found"))
    }

    /// 404: the kind is not installed.
    pub fn page_not_found() -> Self {
        let body = "404 page not found\n".to_owned();
        Self { code: 404, content_type: "text/plain; charset=utf-8", retry_after_s: None, body }
    }

    pub fn already_exists(kind: Kind, name: &str) -> Self {
        Self::about(409, "AlreadyExists", kind, name, |object| format!("{object} already exists"))
    }

    pub fn conflict(kind: Kind, name: &str) -> Self {
        Self::about(409, "Conflict", kind, name, |object| {
            format!(
                "Operation cannot be fulfilled on {object}: the object has been modified; please apply your changes to the latest \
                 version and try again"
            )
        })
    }

    /// 409: the object has another UID than the precondition in the request.
    pub fn other_uid(kind: Kind, name: &str, expected: &str, found: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} \"{name}\": the UID in the precondition ({expected}) does not match the UID in record \
             ({found}). The object might have been deleted and then recreated",
            kind.name()
        );
        Self::status(409, "Conflict", message, Some(json!({"name": name, "kind": kind.name()})))
    }

    /// 403: the namespace is being deleted.
    pub fn terminating(kind: Kind, name: &str, namespace: &str) -> Self {
        let message = format!(
            "{} \"{name}\" is forbidden: unable to create new content in namespace {namespace} because it is being terminated",
            qualified(kind.group(), kind.plural())
        );
        let cause = json!({
            "reason": "NamespaceTerminating", "message": format!("namespace {namespace} is being terminated"),
            "field": "metadata.namespace",
        });
        let mut details = details(&[("name", name), ("group", kind.group()), ("kind", kind.plural())]);
        details["causes"] = json!([cause]);
        Self::status(403, "Forbidden", message, Some(details))
    }

    /// 422 with one cause. The message repeats the cause after the field.
    pub fn invalid(kind: &str, name: &str, reason: &str, field: &str, message: &str) -> Self {
        Self::invalid_with(kind, name, field, message, &[json!({"reason": reason, "message": message, "field": field})])
    }

    /// 422 with the cause twice, because the server validates metadata twice.
    pub fn invalid_metadata(kind: Kind, name: &str, reason: &str, field: &str, message: &str) -> Self {
        let cause = json!({"reason": reason, "message": message, "field": field});
        Self::invalid_with(kind.name(), name, field, message, &[cause.clone(), cause])
    }

    fn invalid_with(kind: &str, name: &str, field: &str, message: &str, causes: &[Value]) -> Self {
        let details = json!({"name": name, "kind": kind, "causes": causes});
        Self::status(422, "Invalid", format!("{kind} \"{name}\" is invalid: {field}: {message}"), Some(details))
    }

    /// 422: required fields are missing.
    pub fn missing(kind: &str, name: &str, fields: &[&str]) -> Self {
        let cause = |field: &&str| json!({"reason": "FieldValueRequired", "message": "Required value", "field": field});
        let causes: Vec<_> = fields.iter().map(cause).collect();
        let listed = fields.iter().map(|field| format!("{field}: Required value")).collect::<Vec<_>>().join(", ");
        let listed = if fields.len() > 1 { format!("[{listed}]") } else { listed };
        let details = json!({"name": name, "kind": kind, "causes": causes});
        Self::status(422, "Invalid", format!("{kind} \"{name}\" is invalid: {listed}"), Some(details))
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

    /// 503 from a server that is still starting.
    pub fn starting(retry_after_s: u32) -> Self {
        let body = "the apiserver is starting\n".to_owned();
        Self { code: 503, content_type: "text/plain; charset=utf-8", retry_after_s: Some(retry_after_s), body }
    }

    pub fn internal(message: &str) -> Self {
        let details = json!({"causes": [{"message": message}]});
        Self::status(500, "InternalError", format!("Internal error occurred: {message}"), Some(details))
    }

    /// 403 with the text of RBAC.
    pub fn forbidden(user: &str, request: &Attributes) -> Self {
        let Attributes { verb, group, resource, namespace, name } = request;
        let plural = resource.split('/').next().unwrap_or_default();
        let qualified = qualified(group, plural);
        let subject = if name.is_empty() { qualified } else { format!("{qualified} \"{name}\"") };
        let scope =
            if namespace.is_empty() { "at the cluster scope".to_owned() } else { format!("in the namespace \"{namespace}\"") };
        let message = format!(
            "{subject} is forbidden: User \"{user}\" cannot {verb} resource \"{resource}\" in API group \"{group}\" {scope}"
        );
        let details = details(&[("name", name), ("group", group), ("kind", plural)]);
        Self::status(403, "Forbidden", message, Some(details))
    }

    /// 422: a ValidatingAdmissionPolicy refuses the object.
    pub fn refused_by_policy(kind: Kind, name: &str, message: &str) -> Self {
        Self::about(422, "Invalid", kind, name, |object| {
            format!("{object} is forbidden: ValidatingAdmissionPolicy 'test' with binding 'test' denied request: {message}")
        })
    }

    pub fn unauthorized() -> Self {
        Self::status(401, "Unauthorized", "Unauthorized".to_owned(), None)
    }

    pub fn unsupported_media(message: &str) -> Self {
        Self::status(415, "UnsupportedMediaType", message.to_owned(), Some(json!({})))
    }

    /// 200 for a completed deletion of any kind except Services.
    pub fn deleted(kind: Kind, object: &Value) -> Self {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let mut details = details(&[("name", name), ("group", kind.group()), ("kind", kind.plural())]);
        details["uid"] = object["metadata"]["uid"].clone();
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details});
        Self::json(200, &status)
    }

    /// 410 for a continued list whose version was compacted. The returned token continues the list at the current
    /// version.
    pub fn expired_list(token: &str) -> Self {
        let message = "The provided continue parameter is too old to display a consistent list result. You can start a new list \
                       without the continue parameter, or use the continue token in this response to retrieve the remainder of the \
                       results. Continuing with the provided token results in an inconsistent list - objects that were created, \
                       modified, or deleted between the time the first chunk was returned and now may show up in the list.";
        let mut status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {"continue": token}, "status": "Failure"});
        status["message"] = message.into();
        status["reason"] = "Expired".into();
        status["code"] = 410.into();
        Self::json(410, &status)
    }

    pub fn not_implemented(what: &str) -> Self {
        Self::status(501, "", format!("the test server does not know {what}"), None)
    }
}

fn qualified(group: &str, plural: &str) -> String {
    if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") }
}

/// Leaves empty values out.
fn details(pairs: &[(&str, &str)]) -> Value {
    let given = pairs.iter().filter(|(_, value)| !value.is_empty());
    Value::Object(given.map(|(key, value)| ((*key).to_owned(), (*value).into())).collect())
}
