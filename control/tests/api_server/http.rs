//! HTTP requests: authentication, authorisation and responses.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use futures::StreamExt as _;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};

use super::accounts::{Account, Attributes};
use super::list::list;
use super::merge::Strategy;
use super::request::ApiRequest;
use super::responses::ApiResponse;
use super::store::{Change, Part};
use super::watch::watch;
use super::{Availability, Fault, Kind, LoggedRequest, Shared};

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
    let mut availability = shared.availability.subscribe();
    let service = service_fn(|request| respond(request, shared.clone()));
    let mut connection = pin!(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    shared.connections.send_modify(|connections| *connections += 1);
    tokio::select! {
        // Polled first, so that requests on new connections are no longer answered.
        biased;
        _ = availability.wait_for(|now| *now != Availability::Up) => {}
        _ = &mut connection => {}
    }
    shared.connections.send_modify(|connections| *connections -= 1);
    let is_silent = *availability.borrow() == Availability::Silent;
    if is_silent {
        // The connection stays open, so the other end does not notice.
        std::future::pending::<()>().await;
    }
}

async fn respond(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes().to_vec()).unwrap_or_default();
    let header = |name| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let account = shared.accounts.lock().unwrap().identify(&header("authorization")).cloned();
    let request = ApiRequest::parse(&head, body.clone());
    let logged = LoggedRequest {
        at: Instant::now(),
        user: account.as_ref().map(|account| account.name.clone()).unwrap_or_default(),
        attributes: request.as_ref().map(ApiRequest::attributes),
        method: head.method.to_string(),
        path: head.uri.path().to_owned(),
        query: head.uri.query().unwrap_or_default().to_owned(),
        content_type: header("content-type"),
        body: String::from_utf8_lossy(&body).into_owned(),
    };
    shared.log.lock().unwrap().push(logged.clone());
    let result = match (account, request) {
        (Err(refusal), _) => Err(refusal),
        (Ok(_), None) if head.method == hyper::Method::PATCH && head.uri.path().ends_with("/scale") => {
            Ok(to_http(scaled(&logged)))
        }
        (Ok(account), None) if head.uri.path() == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews" => {
            Ok(to_http(reviewed(&account, &body)))
        }
        (_, None) => Err(ApiResponse::not_implemented(head.uri.path())),
        (Ok(account), Some(request)) => match injected_fault(&shared, &logged) {
            Some(fault) => Err(fault_response(&fault, &request)),
            None => {
                let allowed = shared.accounts.lock().unwrap().check(&account, &request.attributes());
                allowed.and_then(|()| handle(&request, &shared))
            }
        },
    };
    Ok(result.unwrap_or_else(to_http))
}

/// The answer to a change of the scale of a Deployment. There are no Deployments: the test ends their Pods.
fn scaled(request: &LoggedRequest) -> ApiResponse {
    let wanted: Value = serde_json::from_str(&request.body).unwrap_or_default();
    let name = request.path.rsplit('/').nth(1).unwrap_or_default();
    let scale = serde_json::json!({"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {"name": name},
        "spec": wanted["spec"], "status": {"replicas": 0}});
    ApiResponse::json(200, &scale)
}

/// The answer to the question whether the user may do something.
fn reviewed(account: &Account, body: &[u8]) -> ApiResponse {
    let mut review: Value = serde_json::from_slice(body).unwrap_or_default();
    let asked = &review["spec"]["resourceAttributes"];
    let text = |field: &str| asked[field].as_str().unwrap_or_default().to_owned();
    let subresource = asked["subresource"].as_str().map(|name| format!("/{name}")).unwrap_or_default();
    let request = Attributes {
        verb: text("verb").leak(),
        group: text("group").leak(),
        resource: text("resource") + &subresource,
        namespace: text("namespace"),
        name: text("name"),
    };
    review["status"] = serde_json::json!({"allowed": account.check(&request).is_ok()});
    ApiResponse::json(201, &review)
}

fn injected_fault(shared: &Shared, logged: &LoggedRequest) -> Option<Fault> {
    let mut rules = shared.faults.lock().unwrap();
    let rule = rules.iter_mut().find(|rule| {
        rule.times > 0
            && rule.method == logged.method
            && rule.watch == logged.is_watch()
            && logged.path.contains(rule.path_contains)
    })?;
    rule.times -= 1;
    Some(rule.fault.clone())
}

fn fault_response(fault: &Fault, request: &ApiRequest) -> ApiResponse {
    match fault {
        Fault::TooMany { retry_after_s } => ApiResponse::too_many(*retry_after_s),
        Fault::Starting { retry_after_s } => ApiResponse::starting(*retry_after_s),
        Fault::Internal => ApiResponse::internal("etcdserver: leader changed"),
        Fault::PageNotFound => ApiResponse::page_not_found(),
        Fault::Expired => ApiResponse::expired("The resourceVersion for the provided list is too old."),
        Fault::Conflict => ApiResponse::conflict(request.key.kind, &request.key.name),
        Fault::Invalid(message) => ApiResponse::status(422, "Invalid", message.clone(), None),
        Fault::Forbidden => ApiResponse::forbidden("system:serviceaccount:sluice:sluice", &request.attributes()),
        Fault::Unauthorized => ApiResponse::unauthorized(),
    }
}

fn handle(request: &ApiRequest, shared: &Arc<Shared>) -> Result<Response<Body>, ApiResponse> {
    let (key, kind) = (&request.key, request.key.kind);
    if shared.not_installed.lock().unwrap().contains(&kind) {
        return Err(ApiResponse::page_not_found());
    }
    admit(request, shared)?;
    let response = match (request.method.as_str(), key.name.is_empty()) {
        ("GET", true) if request.is_watch() => {
            let (events, shared) = (watch(request, shared)?, Arc::clone(shared));
            let sent = move |_: &_| _ = shared.events_sent.lock().unwrap().insert(kind, SystemTime::now());
            let body = BoxBody::new(StreamBody::new(events.inspect(sent)));
            return Ok(Response::builder().header("content-type", "application/json").body(body).unwrap());
        }
        ("GET", true) => list(request, shared)?,
        ("GET", false) => ApiResponse::json(200, shared.store.lock().unwrap().get(key)?),
        ("POST", true) => {
            let mut object: Value = parse(&request.body)?;
            if kind.is_namespaced() {
                object["metadata"]["namespace"] = key.namespace.as_str().into();
            }
            ApiResponse::json(201, &shared.change(|store| store.create(kind, object, &request.manager))?)
        }
        ("DELETE", false) => delete(request, shared)?,
        ("PATCH" | "PUT", false) => write(request, shared)?,
        (method, _) => return Err(ApiResponse::not_implemented(&format!("{method} of {}", kind.plural()))),
    };
    if kind == Kind::CustomResourceDefinition {
        install(request, shared);
    }
    Ok(to_http(response))
}

/// Refuses writes of the objects that the test named.
fn admit(request: &ApiRequest, shared: &Shared) -> Result<(), ApiResponse> {
    let (kind, created) = (request.key.kind, request.option("/metadata/name"));
    let name = match request.method.as_str() {
        "POST" => created.as_ref().and_then(Value::as_str).unwrap_or_default(),
        "PATCH" | "PUT" => &request.key.name,
        _ => return Ok(()),
    };
    match shared.refused.lock().unwrap().get(&(kind, name.to_owned())) {
        Some(message) => Err(ApiResponse::refused_by_policy(kind, name, message)),
        None => Ok(()),
    }
}

/// Installs or removes a kind after its definition was created or deleted.
fn install(request: &ApiRequest, shared: &Shared) {
    let name = match request.method.as_str() {
        "POST" => request.option("/metadata/name").and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default(),
        "DELETE" => request.key.name.clone(),
        _ => return,
    };
    let defined = Kind::ALL.into_iter().find(|kind| kind.is_custom() && name == format!("{}.{}", kind.plural(), kind.group()));
    if let Some(kind) = defined {
        shared.set_installed(kind, request.method == "POST");
    }
}

fn delete(request: &ApiRequest, shared: &Shared) -> Result<ApiResponse, ApiResponse> {
    let (key, kind) = (&request.key, request.key.kind);
    let has_grace = request.option("/gracePeriodSeconds").and_then(|grace| grace.as_u64()) != Some(0);
    let deleted = shared.change(|store| {
        let found = store.get(key)?["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        match request.option("/preconditions/uid") {
            Some(Value::String(expected)) if expected != found => Err(ApiResponse::other_uid(kind, &key.name, &expected, &found)),
            _ => store.delete(key, has_grace),
        }
    })?;
    let is_gone = shared.store.lock().unwrap().get(key).is_err();
    let shows_object = !is_gone || matches!(kind, Kind::Service | Kind::Pod | Kind::Namespace);
    Ok(if shows_object { ApiResponse::json(200, &deleted) } else { ApiResponse::deleted(kind, &deleted) })
}

fn write(request: &ApiRequest, shared: &Shared) -> Result<ApiResponse, ApiResponse> {
    let strategy = match (request.method.as_str(), request.content_type.as_str()) {
        ("PUT", _) => None,
        (_, "application/merge-patch+json") => Some(Strategy::Merge),
        (_, "application/strategic-merge-patch+json") if request.key.kind.is_custom() => {
            return Err(ApiResponse::unsupported_media(PATCHES_OF_CUSTOM_KINDS));
        }
        (_, "application/strategic-merge-patch+json") => Some(Strategy::Strategic),
        (_, "application/json") => return Err(ApiResponse::unsupported_media("415: Unsupported Media Type")),
        (_, other) => return Err(ApiResponse::not_implemented(other)),
    };
    let body = parse(&request.body)?;
    let part = if request.is_status { Part::Status } else { Part::Main };
    let change = Change { body: &body, strategy, part, manager: &request.manager };
    Ok(ApiResponse::json(200, &shared.change(|store| store.change(&request.key, &change))?))
}

fn parse(body: &[u8]) -> Result<Value, ApiResponse> {
    serde_json::from_slice(body)
        .map_err(|_| ApiResponse::bad_request("error decoding patch: unexpected end of JSON input".to_owned()))
}

fn to_http(api: ApiResponse) -> Response<Body> {
    let mut response = Response::builder().status(api.code).header("content-type", api.content_type);
    if let Some(seconds) = api.retry_after_s {
        response = response.header("retry-after", seconds);
    }
    response.body(Full::new(Bytes::from(api.body)).map_err(|never| match never {}).boxed()).unwrap()
}
