//! The status page of a gateway: `/`, one HTML document without anything from elsewhere, and `/status.json`, which it
//! asks every 2 s.
//!
//! Invariant: it only reads. A browser runs no script but the page's own, whose hash the header
//! `Content-Security-Policy` names, and no page of another origin can read the answers. One pass over all Services is
//! made at most once a second, however many browsers ask.
//! Not here: HTTP (`control::healthz`), and the rows (`admin::tables`).

mod document;
mod lines;
mod query;
mod reading;

use std::net::IpAddr;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use control::healthz::MISDIRECTED;
use dataplane::DropReason;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Bytes;
use sha2::{Digest as _, Sha256};
use tokio::time::{MissedTickBehavior, interval};

use crate::admin::Sources;

use super::WorkerLoads;
use document::Known;
use lines::{POINT_EVERY, StatusLines};
use query::StatusQuery;
use reading::Reading;

const STYLE: &str = include_str!("status_page/page.css");
/// The parts of the script share one scope.
const SCRIPT: &str = concat!(
    "\"use strict\";\n",
    include_str!("status_page/elements.js"),
    include_str!("status_page/rates.js"),
    include_str!("status_page/picture.js"),
    include_str!("status_page/tables.js"),
    include_str!("status_page/page.js"),
);

/// The document, and the policy that allows its style and its script.
static PAGE: LazyLock<(String, Option<HeaderValue>)> = LazyLock::new(|| {
    let html = include_str!("status_page/page.html").replace("/*STYLE*/", STYLE).replace("/*SCRIPT*/", SCRIPT);
    let hash = |text: &str| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)));
    let policy = format!(
        "default-src 'none'; style-src {}; script-src {}; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        hash(STYLE),
        hash(SCRIPT)
    );
    (html, HeaderValue::from_str(&policy).ok())
});

/// Headers of every answer.
const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (header::CACHE_CONTROL, "no-store"),
];

/// What is kept between two requests of the page.
#[derive(Debug)]
pub struct StatusPage {
    /// The names of the gateway and of its machine, which are hosts of the page's URL.
    names: Vec<String>,
    /// The origin of the document's times.
    started: Instant,
    reading: Mutex<Reading>,
    lines: Mutex<StatusLines>,
}

impl StatusPage {
    /// The page of a gateway. Browsers may ask for it by `names`, beside addresses and `localhost`.
    #[must_use]
    pub fn new(names: Vec<String>) -> Self {
        Self { names, started: Instant::now(), reading: Mutex::default(), lines: Mutex::default() }
    }

    /// Takes a point of each line.
    fn take_point(&self, sources: &Sources) {
        let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let (services, now) = (sources.served.borrow().services.clone(), self.started.elapsed());
        reading.refresh(now, &services, &sources.workers.counters);
        let counters = &sources.workers.counters;
        let drops = DropReason::ALL.iter().flat_map(|reason| counters.iter().map(|worker| worker.drops(*reason).get())).sum();
        let figures = reading.totals.figures(drops, counters.iter().map(|worker| worker.flows.get()).sum());
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).take(now, figures, &reading);
    }

    /// Takes points for ever.
    pub(super) async fn take_points(self: Arc<Self>, sources: Sources) {
        let mut points = interval(POINT_EVERY);
        points.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            points.tick().await;
            let (page, sources) = (Arc::clone(&self), sources.clone());
            // A pass over 10,000 Services takes some milliseconds. It cannot fail but by a panic, which the log has.
            let _ = tokio::task::spawn_blocking(move || page.take_point(&sources)).await;
        }
    }

    /// The answer to a GET request; `None` if the path is not of this page.
    pub(super) fn answer(&self, request: &Parts, sources: &Sources, workers: &WorkerLoads) -> Option<Response<Full<Bytes>>> {
        let path = request.uri.path();
        if !matches!(path, "/" | "/status.json") {
            return None;
        }
        Some(if !self.is_addressed_directly(&request.headers) {
            text(StatusCode::MISDIRECTED_REQUEST, MISDIRECTED)
        } else if path == "/" {
            let (html, policy) = &*PAGE;
            let mut page = response(StatusCode::OK, "text/html; charset=utf-8", html.as_str());
            if let Some(policy) = policy {
                page.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy.clone());
            }
            page
        } else {
            match request.uri.query().unwrap_or_default().parse::<StatusQuery>() {
                Ok(query) => self.json(&query, sources, workers),
                Err(error) => text(StatusCode::BAD_REQUEST, &error.to_string()),
            }
        })
    }

    fn json(&self, query: &StatusQuery, sources: &Sources, workers: &WorkerLoads) -> Response<Full<Bytes>> {
        // Held while the document is made, so that many requests take one core at most.
        let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let services = sources.served.borrow().services.clone();
        reading.refresh(self.started.elapsed(), &services, &sources.workers.counters);
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let known = Known { reading: &reading, lines: &lines, services: &services };
        let document = document::make(query, self.started.elapsed(), &known, sources, workers);
        match serde_json::to_vec(&document) {
            Ok(json) => response(StatusCode::OK, "application/json", json),
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, &format!("the document cannot be written: {error}")),
        }
    }

    /// Whether the host is an address, `localhost` or one of the names. A foreign site whose name resolves to this
    /// gateway is of the same origin as the page for a browser (DNS rebinding), but cannot change the name that the
    /// browser sends. The names are fixed at the start and do not come from a DNS.
    pub(super) fn is_addressed_directly(&self, headers: &HeaderMap) -> bool {
        let Some(authority) = headers.get(header::HOST).and_then(|host| host.to_str().ok()?.parse::<http::uri::Authority>().ok())
        else {
            return false;
        };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let is_name = |name: &str| host.eq_ignore_ascii_case(name);
        is_name("localhost") || self.names.iter().any(|name| is_name(name)) || host.parse::<IpAddr>().is_ok()
    }
}

fn text(code: StatusCode, text: &str) -> Response<Full<Bytes>> {
    response(code, "text/plain; charset=utf-8", format!("{text}\n"))
}

fn response(code: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests;
