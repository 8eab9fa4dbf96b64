//! Lists, complete or in pages. All pages show the state at the version of the first page.

use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::Shared;
use super::request::ApiRequest;
use super::responses::ApiResponse;
use super::store::Store;

/// Position at which a list continues: its version (0: the current one) and the number of objects to skip.
struct Continue {
    revision: u64,
    skipped: usize,
}

impl Continue {
    fn parse(token: &str) -> Result<Self, ApiResponse> {
        let parts = token.split_once('-').and_then(|(revision, skipped)| Some((revision.parse().ok()?, skipped.parse().ok()?)));
        let (revision, skipped) = parts.ok_or_else(|| ApiResponse::bad_request("continue key is not valid".to_owned()))?;
        Ok(Self { revision, skipped })
    }

    fn token(&self) -> String {
        format!("{}-{}", self.revision, self.skipped)
    }
}

/// A list or one page of it. Its items have neither kind nor apiVersion.
pub fn list(request: &ApiRequest, shared: &Shared) -> Result<ApiResponse, ApiResponse> {
    let mut store = shared.store.lock().unwrap();
    let mut start = Continue { revision: 0, skipped: 0 };
    for (key, value) in &request.query {
        match (key.as_str(), value.as_str()) {
            ("continue", token) => start = Continue::parse(token)?,
            ("limit" | "pretty", _) | ("resourceVersionMatch", "NotOlderThan") => {}
            ("fieldSelector", _) if request.selected_name().is_some() => {}
            ("resourceVersion", text) => check_version(text, &store)?,
            (key, value) => return Err(ApiResponse::not_implemented(&format!("{key}={value} in a list"))),
        }
    }
    let current = store.revision();
    if start.revision != 0 && start.revision < store.compacted() {
        return Err(ApiResponse::expired_list(&Continue { revision: 0, skipped: start.skipped }.token()));
    }
    let shown = if start.revision == 0 { current } else { start.revision };
    let (kind, namespace) = (request.key.kind, request.key.namespace.as_str());
    let all = if shown == current { store.list(kind, namespace) } else { store.list_at(kind, namespace, shown) };
    let is_wanted = |object: &&&Value| request.selected_name().is_none_or(|name| object["metadata"]["name"] == name);
    let rest: Vec<_> = all.iter().filter(is_wanted).skip(start.skipped).collect();
    let limit = request.query.get("limit").and_then(|limit| limit.parse().ok()).filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let mut metadata = json!({"resourceVersion": shown.to_string()});
    if rest.len() > limit {
        metadata["continue"] = Continue { revision: shown, skipped: start.skipped + limit }.token().into();
        metadata["remainingItemCount"] = (rest.len() - limit).into();
    }
    let items: Vec<_> = rest.into_iter().take(limit).map(|object| store.texts.borrow_mut().of(object)).collect();
    let (kind, api_version) = (format!("{}List", kind.name()), kind.api_version());
    let has_more = metadata["continue"].is_string();
    let response = ApiResponse::json(200, &ListBody { kind, api_version, metadata, items });
    if has_more && std::mem::take(&mut store.compact_before_next_page) {
        store.compact();
    }
    Ok(response)
}

/// A list.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ListBody {
    kind: String,
    api_version: String,
    metadata: Value,
    items: Vec<Box<RawValue>>,
}

/// Checks the version that a list must at least have. A version in the future is an error.
fn check_version(text: &str, store: &Store) -> Result<(), ApiResponse> {
    let wanted = text.parse::<u64>();
    let wanted = wanted.map_err(|_| ApiResponse::bad_request(format!("invalid resource version: {}", not_a_version(text))))?;
    let current = store.revision();
    if wanted <= current {
        return Ok(());
    }
    let message = format!("Timeout: Too large resource version: {wanted}, current: {current}");
    let causes = json!([{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]);
    Err(ApiResponse::status(504, "Timeout", message, Some(json!({"causes": causes, "retryAfterSeconds": 1}))))
}

pub fn not_a_version(text: &str) -> String {
    format!("resourceVersion: Invalid value: \"{text}\": strconv.ParseUint: parsing \"{text}\": invalid syntax")
}
