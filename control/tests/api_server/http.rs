//! HTTP requests: authentication, authorisation and answers.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};

use super::answer::Answer;
use super::list::list;
use super::merge::Strategy;
use super::request::Asked;
use super::store::{Change, Part};
use super::watch::watch;
use super::{Fault, Kind, Logged, Presence, Shared};

type Body = BoxBody<Bytes, std::io::Error>;

/// Accepted media types for a patch of a custom resource.
const PATCHES_OF_CUSTOM_KINDS: &str = "the body of the request was in an unknown format - accepted media types include: \
                                       application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";

/// Serves until the runtime ends.
pub async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        // A real server does the same: otherwise the second of two consecutive events waits until the first is
        // acknowledged.
        stream.set_nodelay(true).ok();
        tokio::spawn(serve_connection(stream, shared.clone()));
    }
}

async fn serve_connection(stream: TcpStream, shared: Arc<Shared>) {
    let mut presence = shared.presence.subscribe();
    let service = service_fn(|request| respond(request, shared.clone()));
    let mut connection = pin!(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    shared.open.send_modify(|open| *open += 1);
    tokio::select! {
        // Polled first, so that requests on new connections are no longer answered.
        biased;
        _ = presence.wait_for(|now| *now != Presence::There) => {}
        _ = &mut connection => {}
    }
    shared.open.send_modify(|open| *open -= 1);
    let is_silent = *presence.borrow() == Presence::Silent;
    if is_silent {
        // The connection stays open for ever, whatever the server does later: the other end does not notice.
        std::future::pending::<()>().await;
    }
}

async fn respond(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes().to_vec()).unwrap_or_default();
    let header = |name| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let asker = shared.people.lock().unwrap().identify(&header("authorization")).cloned();
    let asked = Asked::read(&head, body.clone());
    let logged = Logged {
        at: Instant::now(),
        user: asker.as_ref().map(|person| person.name.clone()).unwrap_or_default(),
        asked: asked.as_ref().map(Asked::attributes),
        method: head.method.to_string(),
        path: head.uri.path().to_owned(),
        query: head.uri.query().unwrap_or_default().to_owned(),
        content_type: header("content-type"),
        body: String::from_utf8_lossy(&body).into_owned(),
    };
    shared.log.lock().unwrap().push(logged.clone());
    let result = match (asker, asked) {
        (Err(refusal), _) => Err(refusal),
        (_, None) => Err(Answer::not_built(head.uri.path())),
        (Ok(person), Some(asked)) => match caught(&shared, &logged) {
            Some(fault) => Err(faulty(&fault, &asked)),
            None => {
                let allowed = shared.people.lock().unwrap().check(&person, &asked.attributes());
                allowed.and_then(|()| answer(&asked, &shared))
            }
        },
    };
    Ok(result.unwrap_or_else(whole))
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
        Fault::Starting { retry_after_s } => Answer::starting(*retry_after_s),
        Fault::Internal => Answer::internal("etcdserver: leader changed"),
        Fault::NoSuchPage => Answer::no_such_page(),
        Fault::Expired => Answer::expired("The resourceVersion for the provided list is too old."),
        Fault::Conflict => Answer::conflict(asked.place.kind, &asked.place.name),
        Fault::Invalid(message) => Answer::status(422, "Invalid", message.clone(), None),
        Fault::Forbidden => Answer::forbidden("system:serviceaccount:sluice:sluice", &asked.attributes()),
        Fault::Unauthorized => Answer::unauthorized(),
    }
}

fn answer(asked: &Asked, shared: &Arc<Shared>) -> Result<Response<Body>, Answer> {
    let (place, kind) = (&asked.place, asked.place.kind);
    if shared.absent.lock().unwrap().contains(&kind) {
        return Err(Answer::no_such_page());
    }
    let answer = match (asked.method.as_str(), place.name.is_empty()) {
        ("GET", true) if asked.is_watch() => {
            let body = BoxBody::new(StreamBody::new(watch(asked, shared)?));
            return Ok(Response::builder().header("content-type", "application/json").body(body).unwrap());
        }
        ("GET", true) => list(asked, shared)?,
        ("GET", false) => Answer::json(200, shared.store.lock().unwrap().get(place)?),
        ("POST", true) => {
            let mut object: Value = parse(&asked.body)?;
            if kind.is_namespaced() {
                object["metadata"]["namespace"] = place.namespace.as_str().into();
            }
            Answer::json(201, &shared.change(|store| store.create(kind, object, &asked.manager))?)
        }
        ("DELETE", false) => delete(asked, shared)?,
        ("PATCH" | "PUT", false) => write(asked, shared)?,
        (method, _) => return Err(Answer::not_built(&format!("{method} of {}", kind.plural()))),
    };
    if kind == Kind::CustomResourceDefinition {
        install(asked, shared);
    }
    Ok(whole(answer))
}

/// Installs or removes a kind after its definition was created or deleted.
fn install(asked: &Asked, shared: &Shared) {
    let name = match asked.method.as_str() {
        "POST" => asked.option("/metadata/name").and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default(),
        "DELETE" => asked.place.name.clone(),
        _ => return,
    };
    let defined = Kind::ALL.into_iter().find(|kind| kind.is_custom() && name == format!("{}.{}", kind.plural(), kind.group()));
    if let Some(kind) = defined {
        shared.set_installed(kind, asked.method == "POST");
    }
}

fn delete(asked: &Asked, shared: &Shared) -> Result<Answer, Answer> {
    let (place, kind) = (&asked.place, asked.place.kind);
    let has_grace = asked.option("/gracePeriodSeconds").and_then(|grace| grace.as_u64()) != Some(0);
    let deleted = shared.change(|store| {
        let found = store.get(place)?["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        match asked.option("/preconditions/uid") {
            Some(Value::String(meant)) if meant != found => Err(Answer::other_uid(kind, &place.name, &meant, &found)),
            _ => store.delete(place, has_grace),
        }
    })?;
    let is_gone = shared.store.lock().unwrap().get(place).is_err();
    let shows_object = !is_gone || matches!(kind, Kind::Service | Kind::Pod | Kind::Namespace);
    Ok(if shows_object { Answer::json(200, &deleted) } else { Answer::deleted(kind, &deleted) })
}

fn write(asked: &Asked, shared: &Shared) -> Result<Answer, Answer> {
    let strategy = match (asked.method.as_str(), asked.content_type.as_str()) {
        ("PUT", _) => None,
        (_, "application/merge-patch+json") => Some(Strategy::Merge),
        (_, "application/strategic-merge-patch+json") if asked.place.kind.is_custom() => {
            return Err(Answer::unsupported_media(PATCHES_OF_CUSTOM_KINDS));
        }
        (_, "application/strategic-merge-patch+json") => Some(Strategy::Strategic),
        (_, "application/json") => return Err(Answer::unsupported_media("415: Unsupported Media Type")),
        (_, other) => return Err(Answer::not_built(other)),
    };
    let body = parse(&asked.body)?;
    let part = if asked.is_status { Part::Status } else { Part::Main };
    let change = Change { body: &body, strategy, part, manager: &asked.manager };
    Ok(Answer::json(200, &shared.change(|store| store.change(&asked.place, &change))?))
}

fn parse(body: &[u8]) -> Result<Value, Answer> {
    serde_json::from_slice(body).map_err(|_| Answer::bad_request("error decoding patch: unexpected end of JSON input".to_owned()))
}

fn whole(answer: Answer) -> Response<Body> {
    let mut response = Response::builder().status(answer.code).header("content-type", answer.content_type);
    if let Some(seconds) = answer.retry_after_s {
        response = response.header("retry-after", seconds);
    }
    response.body(Full::new(Bytes::from(answer.body)).map_err(|never| match never {}).boxed()).unwrap()
}
