//! Requests over HTTP: lists with pages, watches as endless lines, and writes.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::channel::mpsc;
use futures::sink::SinkExt;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};

use super::answer::Answer;
use super::merge::Strategy;
use super::store::{Kind, Part};
use super::{Cut, Fault, Logged, Presence, Shared};

type Body = BoxBody<Bytes, std::io::Error>;
type Lines = mpsc::Sender<Result<Frame<Bytes>, std::io::Error>>;

/// Serves until the runtime ends.
pub async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(serve_connection(stream, shared.clone()));
    }
}

async fn serve_connection(stream: TcpStream, shared: Arc<Shared>) {
    let mut presence = shared.presence.subscribe();
    let service = service_fn(|request| respond(request, shared.clone()));
    let mut connection = pin!(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    shared.open.send_modify(|open| *open += 1);
    tokio::select! {
        _ = &mut connection => {}
        _ = presence.wait_for(|now| *now != Presence::There) => {}
    }
    shared.open.send_modify(|open| *open -= 1);
    let is_silent = *presence.borrow() == Presence::Silent;
    if is_silent {
        // Held for ever, whatever the server does later: the other end never learns of it.
        std::future::pending::<()>().await;
    }
}

/// A request, taken apart.
struct Asked {
    method: Method,
    kind: Kind,
    namespace: String,
    name: String,
    is_status: bool,
    query: BTreeMap<String, String>,
    content_type: String,
    body: Vec<u8>,
}

impl Asked {
    fn is_watch(&self) -> bool {
        matches!(self.query.get("watch").map(String::as_str), Some("1" | "true"))
    }

    fn verb(&self) -> &'static str {
        match self.method {
            Method::GET if self.is_watch() => "watch",
            Method::GET if self.name.is_empty() => "list",
            Method::GET => "get",
            Method::POST => "create",
            Method::DELETE => "delete",
            _ => "patch",
        }
    }
}

async fn respond(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes().to_vec()).unwrap_or_default();
    let content_type = head.headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let logged = Logged {
        method: head.method.to_string(),
        path: head.uri.path().to_owned(),
        query: head.uri.query().unwrap_or_default().to_owned(),
        content_type: content_type.clone(),
        body: String::from_utf8_lossy(&body).into_owned(),
    };
    shared.log.lock().unwrap().push(logged.clone());
    let Some((kind, namespace, name, is_status)) = route(head.uri.path()) else {
        return Ok(whole(Answer::not_built(head.uri.path())));
    };
    let query = parse_query(&logged.query);
    let asked = Asked { method: head.method, kind, namespace, name, is_status, query, content_type, body };
    if let Some(fault) = caught(&shared, &logged) {
        return Ok(whole(faulty(&fault, &asked)));
    }
    if asked.is_watch() && asked.method == Method::GET && asked.name.is_empty() {
        return Ok(watch(&asked, &shared));
    }
    Ok(whole(answer(&asked, &shared).unwrap_or_else(|refusal| refusal)))
}

/// Kind, namespace, name, and whether the status is meant.
fn route(path: &str) -> Option<(Kind, String, String, bool)> {
    let prefixes = ["/api/v1/", "/apis/discovery.k8s.io/v1/", "/apis/sluice.dev/v1beta1/"];
    let rest = prefixes.into_iter().find_map(|prefix| path.strip_prefix(prefix))?;
    let parts: Vec<_> = rest.split('/').collect();
    let (namespace, parts) = match parts.as_slice() {
        ["namespaces", namespace, rest @ ..] if !rest.is_empty() && rest[0] != "status" => (*namespace, rest),
        rest => ("", rest),
    };
    let kind = Kind::ALL.into_iter().find(|kind| parts.first() == Some(&kind.plural()))?;
    let (name, is_status) = match parts {
        [_] => ("", false),
        [_, name] => (*name, false),
        [_, name, "status"] => (*name, true),
        _ => return None,
    };
    Some((kind, namespace.to_owned(), name.to_owned(), is_status))
}

fn parse_query(query: &str) -> BTreeMap<String, String> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

fn caught(shared: &Shared, logged: &Logged) -> Option<Fault> {
    let mut traps = shared.traps.lock().unwrap();
    let trap = traps.iter_mut().find(|trap| {
        trap.times > 0
            && trap.method == logged.method
            && trap.watch == logged.is_watch()
            && logged.path.contains(trap.path_contains)
    })?;
    trap.times -= 1;
    Some(trap.fault.clone())
}

fn faulty(fault: &Fault, asked: &Asked) -> Answer {
    match fault {
        Fault::TooMany { retry_after_s } => Answer::too_many(*retry_after_s),
        Fault::Internal => Answer::internal("etcdserver: leader changed"),
        Fault::Expired => Answer::expired("The resourceVersion for the provided list is too old."),
        Fault::Conflict => Answer::conflict(asked.kind.plural(), &asked.name),
        Fault::Invalid(message) => Answer::status(422, "Invalid", message.clone(), None),
        Fault::Forbidden => {
            let subresource = if asked.is_status { "status" } else { "" };
            let kind = asked.kind;
            Answer::forbidden(kind.group(), kind.plural(), subresource, asked.verb(), &asked.namespace, &asked.name)
        }
    }
}

fn answer(asked: &Asked, shared: &Shared) -> Result<Answer, Answer> {
    let (kind, namespace, name) = (asked.kind, asked.namespace.as_str(), asked.name.as_str());
    match asked.method {
        Method::GET if name.is_empty() => list(asked, shared),
        Method::GET => Ok(Answer::json(200, shared.store.lock().unwrap().get(kind, namespace, name)?)),
        Method::POST => {
            let mut object: Value = parse(&asked.body)?;
            object["metadata"]["namespace"] = namespace.into();
            Ok(Answer::json(201, &shared.change(|store| store.create(kind, object))?))
        }
        Method::DELETE => Ok(Answer::json(200, &shared.change(|store| store.delete(kind, namespace, name))?)),
        Method::PATCH => {
            let strategy = match asked.content_type.as_str() {
                "application/merge-patch+json" => Strategy::Merge,
                "application/strategic-merge-patch+json" => Strategy::Strategic,
                "application/json" => {
                    let message = "415: Unsupported Media Type".to_owned();
                    return Err(Answer::status(415, "UnsupportedMediaType", message, Some(json!({}))));
                }
                other => return Err(Answer::not_built(other)),
            };
            let patch = parse(&asked.body)?;
            let part = if asked.is_status { Part::Status } else { Part::Main };
            Ok(Answer::json(200, &shared.change(|store| store.patch(kind, namespace, name, &patch, strategy, part))?))
        }
        _ => Err(Answer::not_built(asked.method.as_str())),
    }
}

fn parse(body: &[u8]) -> Result<Value, Answer> {
    serde_json::from_slice(body).map_err(|_| Answer::bad_request("error decoding patch: unexpected end of JSON input".to_owned()))
}

/// A list, or a page of one. Its items have neither kind nor apiVersion.
fn list(asked: &Asked, shared: &Shared) -> Result<Answer, Answer> {
    let store = shared.store.lock().unwrap();
    let revision = store.revision();
    let mut items: Vec<Value> = store.list(asked.kind, &asked.namespace).into_iter().cloned().collect();
    let mut metadata = json!({"resourceVersion": revision.to_string()});
    let mut first = 0;
    for (key, value) in &asked.query {
        match (key.as_str(), value.as_str()) {
            ("continue", token) => {
                let (at, start) =
                    token.split_once('-').ok_or_else(|| Answer::bad_request("continue key is not valid".to_owned()))?;
                if at.parse::<u64>().unwrap_or(0) < store.compacted() {
                    return Err(Answer::expired(
                        "The provided continue parameter is too old to display a consistent list result.",
                    ));
                }
                metadata["resourceVersion"] = at.into();
                first = start.parse().unwrap_or(0);
            }
            ("limit" | "pretty", _) | ("resourceVersion", "0") | ("resourceVersionMatch", "NotOlderThan") => {}
            ("resourceVersion", text) if text.parse::<u64>().is_err() => {
                return Err(Answer::bad_request(format!("invalid resource version: {}", not_a_version(text))));
            }
            (key, value) => return Err(Answer::not_built(&format!("{key}={value} in a list"))),
        }
    }
    items.drain(..first.min(items.len()));
    let limit = asked.query.get("limit").and_then(|limit| limit.parse().ok()).filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    if items.len() > limit {
        metadata["continue"] = format!("{}-{}", metadata["resourceVersion"].as_str().unwrap_or_default(), first + limit).into();
        metadata["remainingItemCount"] = (items.len() - limit).into();
        items.truncate(limit);
    }
    for item in &mut items {
        item.as_object_mut().map(|item| (item.remove("kind"), item.remove("apiVersion")));
    }
    let (kind, api_version) = (format!("{}List", asked.kind.name()), asked.kind.api_version());
    Ok(Answer::json(200, &json!({"kind": kind, "apiVersion": api_version, "metadata": metadata, "items": items})))
}

fn not_a_version(text: &str) -> String {
    format!("resourceVersion: Invalid value: \"{text}\": strconv.ParseUint: parsing \"{text}\": invalid syntax")
}

fn watch(asked: &Asked, shared: &Arc<Shared>) -> Response<Body> {
    for (key, value) in &asked.query {
        if !["watch", "allowWatchBookmarks", "resourceVersion", "timeoutSeconds"].contains(&key.as_str()) {
            return whole(Answer::not_built(&format!("{key}={value} in a watch")));
        }
    }
    let text = asked.query.get("resourceVersion").map_or("0", String::as_str);
    let Ok(from) = text.parse::<u64>() else {
        return whole(Answer::status(500, "", not_a_version(text), None));
    };
    let seconds = asked.query.get("timeoutSeconds").and_then(|text| text.parse().ok()).unwrap_or(1_800);
    let watched = Watched {
        kind: asked.kind,
        namespace: asked.namespace.clone(),
        from,
        has_bookmarks: asked.query.get("allowWatchBookmarks").is_some_and(|text| text == "true" || text == "1"),
        timeout: Duration::from_secs(seconds),
    };
    let (lines, body) = mpsc::channel(16);
    tokio::spawn(deliver(watched, lines, shared.clone()));
    Response::builder().header("content-type", "application/json").body(BoxBody::new(StreamBody::new(body))).unwrap()
}

struct Watched {
    kind: Kind,
    namespace: String,
    from: u64,
    has_bookmarks: bool,
    timeout: Duration,
}

/// Writes events into a watch until it ends or nobody reads it.
async fn deliver(watched: Watched, mut lines: Lines, shared: Arc<Shared>) {
    let mut revision = shared.revision.subscribe();
    let mut cut = shared.cut.subscribe();
    cut.borrow_and_update();
    let mut timeout = pin!(tokio::time::sleep(watched.timeout));
    let (kind, namespace, mut seen) = (watched.kind, watched.namespace.as_str(), watched.from);
    loop {
        revision.borrow_and_update();
        let (events, current) = next_events(&shared, kind, namespace, seen);
        for (event, object) in events {
            let is_error = event == "ERROR";
            if !say(&mut lines, event, &object).await || is_error {
                return;
            }
        }
        seen = seen.max(current);
        tokio::select! {
            changed = revision.changed() => if changed.is_err() { return },
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
                    say(&mut lines, "BOOKMARK", &bookmark(kind, current)).await;
                }
                return;
            }
        }
    }
}

/// What a watch has to deliver, and the version it is then at. A version of 0 starts with everything there is.
fn next_events(shared: &Shared, kind: Kind, namespace: &str, seen: u64) -> (Vec<(&'static str, Value)>, u64) {
    let store = shared.store.lock().unwrap();
    let current = store.revision();
    let events = if seen == 0 {
        store.list(kind, namespace).into_iter().map(|object| ("ADDED", object.clone())).collect()
    } else if seen < store.compacted() {
        vec![("ERROR", expired(seen, store.compacted()))]
    } else {
        store.since(kind, namespace, seen).into_iter().map(|record| (record.event, record.object)).collect()
    };
    (events, current)
}

fn expired(from: u64, compacted: u64) -> Value {
    let answer = Answer::expired(&format!("too old resource version: {from} ({compacted})"));
    serde_json::from_str(&answer.body).unwrap()
}

/// Bookmarks look like an object of which only the version is known.
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
        Kind::Node | Kind::Namespace => {
            object["spec"] = json!({});
            object["status"] = json!({});
        }
        Kind::AddressPool => object["spec"] = json!({"addresses": []}),
    }
    object
}

/// False when nobody reads any more.
async fn say(lines: &mut Lines, event: &str, object: &Value) -> bool {
    let line = format!("{}\n", json!({"type": event, "object": object}));
    lines.send(Ok(Frame::data(Bytes::from(line)))).await.is_ok()
}

fn whole(answer: Answer) -> Response<Body> {
    let mut response = Response::builder().status(answer.code).header("content-type", answer.content_type);
    if let Some(seconds) = answer.retry_after_s {
        response = response.header("retry-after", seconds);
    }
    response.body(Full::new(Bytes::from(answer.body)).map_err(|never| match never {}).boxed()).unwrap()
}
