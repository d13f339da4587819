//! The middleware of all requests: host, rate, counters, the headers of all responses, and what a client of another
//! machine gets of probes and scrapes.

use crate::access::AccessControl;
use crate::connection_slots::{Slot, Work};
use crate::failure::{Failure, PROBLEM_JSON, excerpt};
use crate::peer::Peer;
use crate::request_body::{self, RequestBody};
use crate::response_budget::{Budget, is_small};
use crate::route::{IDENTITY, path};
use crate::route_table::{Audience, Matched, RouteTable};
use crate::{etag, query};
use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HOST, HeaderMap, HeaderValue,
    REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use actix_web::middleware::Next;
use actix_web::web::{Data, PathConfig, QueryConfig, ServiceConfig};
use actix_web::{Error, HttpMessage, HttpRequest};
use berth_api::Kind;
use berth_observe::counters::{Counters, Method};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// Makes malformed paths and queries problems.
pub(crate) fn problems(config: &mut ServiceConfig) {
    config.app_data(PathConfig::default().error_handler(|e, _| Failure::new(Kind::Path, e).into()));
    config.app_data(QueryConfig::default().error_handler(|e, _| Failure::new(Kind::Query, e).into()));
}

/// The middleware of the admin listener.
pub(crate) async fn admin_gate(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let begun = StartedRequest::by(&mut request);
    let context = context(&request)?;
    let matched = Matched::find(context.routes, &request)?;
    let admitted = admit(&context.access, matched, &request).await;
    pass(request, next, begun, admitted.err()).await
}

async fn admit(access: &AccessControl, matched: Matched, request: &ServiceRequest) -> Result<(), Failure> {
    match request.conn_data::<Peer>() {
        // A page of another origin cannot connect to a Unix socket. Over TLS, if it points its own name to this
        // address, the certificate has another name and the connection ends.
        Some(Peer::Unix { .. } | Peer::Tls { .. }) => {}
        _ => check_host(request.headers())?,
    }
    // Guarded requests are counted by caller, in their own middleware.
    if !matched.table().is_guarded(path(request.request())) {
        access.limit_public(request)?;
    }
    check_other_machine(access, matched, request).await
}

/// The middleware of the health listener. Probes have the pod's address as host.
pub(crate) async fn health_gate(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let begun = StartedRequest::by(&mut request);
    let context = context(&request)?;
    let found = Matched::find(context.routes, &request)?.endpoint();
    let is_scrape = found.is_some_and(|found| found.audience == Audience::Scrape);
    let refused = if is_scrape { context.access.limit_scrapes(&request) } else { Ok(()) };
    pass(request, next, begun, refused.err()).await
}

/// A request in progress. It begins before anything waits: until then the HTTP library reads the requests behind it.
struct StartedRequest {
    at: Instant,
    work: Option<Work>,
    unread: Option<RequestBody>,
}

impl StartedRequest {
    fn by(request: &mut ServiceRequest) -> Self {
        let work = request.conn_data::<Arc<Slot>>().map(Slot::work);
        Self { at: Instant::now(), work, unread: RequestBody::of(request) }
    }
}

async fn pass(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
    StartedRequest { at, work, unread }: StartedRequest,
    refused: Option<Failure>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let context = context(&request)?;
    let inside = context.gate.enter();
    let refused = match &inside {
        Some(_) => refused,
        None => Some(Failure::new(Kind::Stopping, "the daemon is stopping")),
    };
    // Guarded operations are checked once the caller is known.
    let row = Matched::of(request.request())?.row(request.method());
    let open = row.filter(|row| row.audience != Audience::Guarded);
    let refused = refused.or_else(|| open.and_then(|row| query::refused(row, &request)));
    let response = match refused {
        Some(problem) => request.into_response(problem.response()),
        None => next.call(request).await?.map_into_boxed_body(),
    };
    let response = etag::not_modified_if_any(response);
    let (response, share) = context.budget.within(response);
    let response = finish(response);
    count(&context, response.request(), response.status().as_u16(), at);
    if let Some((work, bytes)) =
        work.as_ref().zip(request_body::bytes(response.response().body(), share.as_ref()))
    {
        work.must_be_taken(bytes);
    }
    let kept = unread.is_some() || share.is_some() || !is_small(response.response().body());
    Ok(match kept {
        true => response.map_body(|_, body| request_body::holding(body, unread, work, share)),
        false => response,
    })
}

/// Adds the headers of all responses, and a problem to errors without a body.
fn finish(response: ServiceResponse<BoxBody>) -> ServiceResponse<BoxBody> {
    let status = response.status();
    let kind = response.headers().get(CONTENT_TYPE);
    let has_words = kind.is_some_and(|k| k == PROBLEM_JSON);
    let mut response = if (status.is_client_error() || status.is_server_error()) && !has_words {
        let detail = match response.response().error() {
            Some(error) => error.to_string(),
            None => status.canonical_reason().unwrap_or("error").to_owned(),
        };
        let problem = match status {
            // The layer that compresses lists encodings, but not the reason.
            StatusCode::NOT_ACCEPTABLE => Failure::new(
                Kind::NotAcceptable,
                "Accept-Encoding allows neither gzip nor an uncompressed response",
            )
            .hint("send `Accept-Encoding: gzip`, or omit it"),
            _ => Failure::of_status(status, detail),
        };
        response.into_response(problem.response())
    } else {
        response
    };
    let headers = response.headers_mut();
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    if headers.get(CONTENT_ENCODING).is_some_and(|coding| coding == IDENTITY) {
        headers.remove(CONTENT_ENCODING);
    }
    if !headers.contains_key(CACHE_CONTROL) {
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
    response
}

/// The state that all requests of all listeners share.
pub struct Context {
    /// Authentication and its limits.
    pub access: AccessControl,
    /// The routes of the application.
    pub(crate) routes: &'static RouteTable,
    /// The memory of responses that are not read yet.
    pub(crate) budget: Budget,
    pub(crate) gate: Gate,
    /// Counters of responses.
    pub(crate) counters: Arc<Counters>,
}

impl Context {
    pub(crate) fn new(access: AccessControl, routes: &'static RouteTable, counters: Arc<Counters>) -> Self {
        Self { access, routes, budget: Budget::default(), gate: Gate::default(), counters }
    }
}

/// Counts requests, so that a stop can let them finish.
#[derive(Default)]
pub(crate) struct Gate {
    inside: AtomicUsize,
    closed: AtomicBool,
}

impl Gate {
    /// Admits a request; `None` once closed.
    pub(crate) fn enter(&self) -> Option<GateGuard<'_>> {
        // Counted before the check, so that a close either sees the request or is seen by it.
        self.inside.fetch_add(1, Ordering::SeqCst);
        let inside = GateGuard(self);
        (!self.closed.load(Ordering::SeqCst)).then_some(inside)
    }

    /// Admits no request any more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Whether no request is in progress.
    pub(crate) fn is_empty(&self) -> bool {
        self.inside.load(Ordering::SeqCst) == 0
    }
}

/// One request in progress.
pub(crate) struct GateGuard<'a>(&'a Gate);

impl Drop for GateGuard<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

pub(crate) fn context(request: &ServiceRequest) -> Result<Data<Context>, Error> {
    let context = request.app_data::<Data<Context>>().cloned();
    context.ok_or_else(|| Failure::new(Kind::Internal, "the server has no context").into())
}

/// Checks that the request names this machine by a name that means only itself, against DNS rebinding: a page of
/// another origin can make a browser resolve its own name to 127.0.0.1, but cannot send another name than its own.
fn check_host(headers: &HeaderMap) -> Result<(), Failure> {
    let mut given = headers.get_all(HOST);
    let (first, second) = (given.next(), given.next());
    let host = first.and_then(|h| h.to_str().ok());
    match (host, second) {
        (Some(host), None) if is_loopback(host) => Ok(()),
        _ => {
            let host = excerpt(host.unwrap_or_default());
            let rule = format!("this listener answers to localhost, 127.0.0.1 and [::1], not to {host:?}");
            let hint = "reach it on the node itself, or by `kubectl port-forward`";
            Err(Failure::new(Kind::Host, rule).hint(hint))
        }
    }
}

fn is_loopback(host: &str) -> bool {
    let (name, rest) = match host.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once(']').unwrap_or(("", "")),
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    let names_this_machine =
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    names_this_machine && (rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port))
}

/// Counts a response with this status for the metrics. The route is the label of the route table, never the path,
/// which the client chooses.
fn count(context: &Context, request: &HttpRequest, status: u16, began: Instant) {
    let endpoint = Matched::of(request).ok().and_then(Matched::endpoint);
    let route = endpoint.map_or("unmatched", |endpoint| endpoint.label.as_str());
    let method = Method::of(request.method().as_str());
    context.counters.http.answered(route, method, status, began.elapsed());
}

/// Marks a request whose response has no details.
struct WithoutDetails;

/// Checks what a client of the admin listener gets of scrapes and probes. From this node: everything. From the network,
/// over TLS: metrics and details name resources, GPUs, policies and addresses, so they need the right to read; other
/// clients get the result and the names of the checks.
///
/// # Errors
/// If the client may not have the metrics.
async fn check_other_machine(
    access: &AccessControl,
    matched: Matched,
    request: &ServiceRequest,
) -> Result<(), Failure> {
    let certified = match request.conn_data::<Peer>() {
        Some(Peer::Tls { from, certificate }) if !from.ip().to_canonical().is_loopback() => {
            certificate.is_some()
        }
        // Without TLS the listener is on loopback.
        _ => return Ok(()),
    };
    match matched.endpoint().map(|endpoint| endpoint.audience) {
        Some(Audience::Scrape) => access.may_read(request).await,
        Some(Audience::Probe) => {
            // A probe without credentials does not count as a failed authentication.
            let shows = certified || request.headers().contains_key(AUTHORIZATION);
            if !shows || access.may_read(request).await.is_err() {
                request.extensions_mut().insert(WithoutDetails);
            }
            Ok(())
        }
        Some(Audience::Open | Audience::Guarded) | None => Ok(()),
    }
}

/// Whether the client of a probe may have the details of its checks.
#[must_use]
pub fn may_have_details(request: &HttpRequest) -> bool {
    request.extensions().get::<WithoutDetails>().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_taken() {
        for host in ["localhost", "LocalHost:9470", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:9470"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:9470",
            "10.0.0.1",
            "::1",
            "[::1]x",
            "localhost:",
            "localhost:x",
            "[::2]",
            "localhost:1:2",
            "0.0.0.0",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
