//! Watches: an endless stream of events, with bookmarks in between, and the kinds of end of the stream.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::channel::mpsc;
use futures::sink::SinkExt;
use hyper::body::{Bytes, Frame};
use serde_json::{Value, json};

use super::kind::Kind;
use super::list::not_a_version;
use super::request::ApiRequest;
use super::responses::ApiResponse;
use super::{Shared, WatchEnd};

/// A piece of a body, or its end without a last chunk.
pub type BodyChunk = Result<Frame<Bytes>, std::io::Error>;
type Lines = mpsc::Sender<BodyChunk>;

/// Starts a watch; returns the stream of its events.
pub fn watch(request: &ApiRequest, shared: &Arc<Shared>) -> Result<mpsc::Receiver<BodyChunk>, ApiResponse> {
    for (key, value) in &request.query {
        let is_known = ["watch", "allowWatchBookmarks", "resourceVersion", "timeoutSeconds"].contains(&key.as_str())
            || (key == "fieldSelector" && request.selected_name().is_some());
        if !is_known {
            return Err(ApiResponse::not_implemented(&format!("{key}={value} in a watch")));
        }
    }
    let text = request.query.get("resourceVersion").map_or("0", String::as_str);
    let from = text.parse::<u64>().map_err(|_| ApiResponse::status(500, "", not_a_version(text), None))?;
    let seconds = request.query.get("timeoutSeconds").and_then(|text| text.parse().ok()).unwrap_or(1_800);
    let watched = WatchParameters {
        kind: request.key.kind,
        namespace: request.key.namespace.clone(),
        name: request.selected_name().map(str::to_owned),
        from,
        has_bookmarks: request.query.get("allowWatchBookmarks").is_some_and(|text| text == "true" || text == "1"),
        timeout: Duration::from_secs(seconds),
    };
    let (lines, pieces) = mpsc::channel(16);
    tokio::spawn(deliver(watched, lines, shared.clone()));
    Ok(pieces)
}

struct WatchParameters {
    kind: Kind,
    namespace: String,
    /// `None`: all objects of the kind.
    name: Option<String>,
    from: u64,
    has_bookmarks: bool,
    timeout: Duration,
}

/// Writes events to a watch until it ends or its client has disconnected.
async fn deliver(watched: WatchParameters, mut lines: Lines, shared: Arc<Shared>) {
    let mut revision = shared.revision.subscribe();
    let (mut watch_end, mut bookmarks) = (shared.watch_end.subscribe(), shared.bookmarks.subscribe());
    watch_end.borrow_and_update();
    bookmarks.borrow_and_update();
    let mut timeout = pin!(tokio::time::sleep(watched.timeout));
    let (mut seen, mut is_open, mut wants_bookmark) = (watched.from, false, false);
    loop {
        revision.borrow_and_update();
        let (events, current) = next_events(&shared, &watched, seen, std::mem::replace(&mut is_open, true));
        for (event, object) in events {
            let is_error = event == "ERROR";
            if !send_event(&mut lines, event, &object).await || is_error {
                return;
            }
        }
        seen = seen.max(current);
        if std::mem::take(&mut wants_bookmark) && !send_event(&mut lines, "BOOKMARK", &bookmark(watched.kind, current)).await {
            return;
        }
        tokio::select! {
            biased;
            changed = revision.changed() => if changed.is_err() { return },
            _ = bookmarks.changed() => {
                bookmarks.borrow_and_update();
                wants_bookmark = watched.has_bookmarks;
            }
            _ = watch_end.changed() => {
                let how = *watch_end.borrow_and_update();
                match how {
                    Some(WatchEnd::Aborted) => { lines.send(Err(std::io::Error::other("killed"))).await.ok(); }
                    Some(WatchEnd::Expired) => { send_event(&mut lines, "ERROR", &expired(seen, current)).await; }
                    Some(WatchEnd::Complete) | None => {}
                }
                return;
            }
            () = &mut timeout => {
                if watched.has_bookmarks {
                    send_event(&mut lines, "BOOKMARK", &bookmark(watched.kind, current)).await;
                }
                return;
            }
        }
    }
}

/// The events that a watch has to deliver next, and its version after them. Version 0 starts with all existing objects.
/// Only a new watch can be expired.
fn next_events(shared: &Shared, watched: &WatchParameters, seen: u64, is_open: bool) -> (Vec<(&'static str, Value)>, u64) {
    let WatchParameters { kind, namespace, name, .. } = watched;
    let is_wanted = |object: &Value| name.as_ref().is_none_or(|name| object["metadata"]["name"] == name.as_str());
    if shared.held_back.lock().unwrap().contains(kind) {
        return (Vec::new(), seen);
    }
    let store = shared.store.lock().unwrap();
    let current = store.revision();
    let events = if seen == 0 {
        let all = store.list(*kind, namespace).into_iter().filter(|object| is_wanted(object));
        all.map(|object| ("ADDED", object.clone())).collect()
    } else if seen < store.compacted() && !is_open {
        vec![("ERROR", expired(seen, store.compacted()))]
    } else {
        let all = store.since(*kind, namespace, seen).filter(|record| is_wanted(&record.object));
        all.map(|record| (record.event, record.object.clone())).collect()
    };
    (events, current)
}

fn expired(from: u64, compacted: u64) -> Value {
    let response = ApiResponse::expired(&format!("too old resource version: {from} ({compacted})"));
    serde_json::from_str(&response.body).unwrap()
}

/// A bookmark looks like an object with a version and empty fields.
fn bookmark(kind: Kind, revision: u64) -> Value {
    let mut object =
        json!({"kind": kind.name(), "apiVersion": kind.api_version(), "metadata": {"resourceVersion": revision.to_string()}});
    match kind {
        Kind::Service => {
            object["spec"] = json!({});
            object["status"] = json!({"loadBalancer": {}});
        }
        Kind::EndpointSlice => {
            object["addressType"] = "".into();
            object["endpoints"] = Value::Null;
            object["ports"] = Value::Null;
        }
        Kind::Node | Kind::Namespace | Kind::Pod => {
            object["spec"] = json!({});
            object["status"] = json!({});
        }
        Kind::Lease => object["spec"] = json!({}),
        // A bookmark of a custom resource has only a version: its spec is absent even if it is required.
        Kind::CustomResourceDefinition | Kind::AddressPool | Kind::EdgeGateway | Kind::ConfigMap | Kind::Secret | Kind::Event => {
        }
    }
    object
}

/// False if the client has disconnected.
async fn send_event(lines: &mut Lines, event: &str, object: &Value) -> bool {
    let line = format!("{}\n", json!({"type": event, "object": object}));
    lines.send(Ok(Frame::data(Bytes::from(line)))).await.is_ok()
}
