//! Watches: an endless stream of events, with bookmarks in between, and the ways in which the stream ends.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::channel::mpsc;
use futures::sink::SinkExt;
use hyper::body::{Bytes, Frame};
use serde_json::{Value, json};

use super::answer::Answer;
use super::kinds::Kind;
use super::list::not_a_version;
use super::request::Asked;
use super::{Cut, Shared};

/// A piece of a body, or its end without a last chunk.
pub type Piece = Result<Frame<Bytes>, std::io::Error>;
type Lines = mpsc::Sender<Piece>;

/// Starts a watch; returns the stream of its events.
pub fn watch(asked: &Asked, shared: &Arc<Shared>) -> Result<mpsc::Receiver<Piece>, Answer> {
    for (key, value) in &asked.query {
        let is_known = ["watch", "allowWatchBookmarks", "resourceVersion", "timeoutSeconds"].contains(&key.as_str())
            || (key == "fieldSelector" && asked.selected_name().is_some());
        if !is_known {
            return Err(Answer::not_built(&format!("{key}={value} in a watch")));
        }
    }
    let text = asked.query.get("resourceVersion").map_or("0", String::as_str);
    let from = text.parse::<u64>().map_err(|_| Answer::status(500, "", not_a_version(text), None))?;
    let seconds = asked.query.get("timeoutSeconds").and_then(|text| text.parse().ok()).unwrap_or(1_800);
    let watched = Watched {
        kind: asked.place.kind,
        namespace: asked.place.namespace.clone(),
        name: asked.selected_name().map(str::to_owned),
        from,
        has_bookmarks: asked.query.get("allowWatchBookmarks").is_some_and(|text| text == "true" || text == "1"),
        timeout: Duration::from_secs(seconds),
    };
    let (lines, pieces) = mpsc::channel(16);
    tokio::spawn(deliver(watched, lines, shared.clone()));
    Ok(pieces)
}

struct Watched {
    kind: Kind,
    namespace: String,
    /// `None`: all objects of the kind.
    name: Option<String>,
    from: u64,
    has_bookmarks: bool,
    timeout: Duration,
}

/// Writes events to a watch until it ends or its reader is gone.
async fn deliver(watched: Watched, mut lines: Lines, shared: Arc<Shared>) {
    let mut revision = shared.revision.subscribe();
    let (mut cut, mut bookmarks) = (shared.cut.subscribe(), shared.bookmarks.subscribe());
    cut.borrow_and_update();
    bookmarks.borrow_and_update();
    let mut timeout = pin!(tokio::time::sleep(watched.timeout));
    let (mut seen, mut is_open, mut wants_bookmark) = (watched.from, false, false);
    loop {
        revision.borrow_and_update();
        let (events, current) = next_events(&shared, &watched, seen, std::mem::replace(&mut is_open, true));
        for (event, object) in events {
            let is_error = event == "ERROR";
            if !say(&mut lines, event, &object).await || is_error {
                return;
            }
        }
        seen = seen.max(current);
        if std::mem::take(&mut wants_bookmark) && !say(&mut lines, "BOOKMARK", &bookmark(watched.kind, current)).await {
            return;
        }
        tokio::select! {
            biased;
            changed = revision.changed() => if changed.is_err() { return },
            _ = bookmarks.changed() => {
                bookmarks.borrow_and_update();
                wants_bookmark = watched.has_bookmarks;
            }
            _ = cut.changed() => {
                let how = *cut.borrow_and_update();
                match how {
                    Some(Cut::Abort) => { lines.send(Err(std::io::Error::other("killed"))).await.ok(); }
                    Some(Cut::Expired) => { say(&mut lines, "ERROR", &expired(seen, current)).await; }
                    Some(Cut::Clean) | None => {}
                }
                return;
            }
            () = &mut timeout => {
                if watched.has_bookmarks {
                    say(&mut lines, "BOOKMARK", &bookmark(watched.kind, current)).await;
                }
                return;
            }
        }
    }
}

/// The events that a watch has to deliver next, and its version after them. Version 0 starts with all existing objects.
/// Only a new watch can be expired.
fn next_events(shared: &Shared, watched: &Watched, seen: u64, is_open: bool) -> (Vec<(&'static str, Value)>, u64) {
    let Watched { kind, namespace, name, .. } = watched;
    let is_wanted = |object: &Value| name.as_ref().is_none_or(|name| object["metadata"]["name"] == name.as_str());
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
    let answer = Answer::expired(&format!("too old resource version: {from} ({compacted})"));
    serde_json::from_str(&answer.body).unwrap()
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

/// False if the reader is gone.
async fn say(lines: &mut Lines, event: &str, object: &Value) -> bool {
    let line = format!("{}\n", json!({"type": event, "object": object}));
    lines.send(Ok(Frame::data(Bytes::from(line)))).await.is_ok()
}
