//! The middleware of all requests: host, rate, counters, and the headers of all responses.

use super::access;
use super::context::context;
use super::failure::{Failure, PROBLEM_JSON};
use super::peer::Peer;
use super::request_body::{self, RequestBody};
use super::route::{API, IDENTITY, path};
use super::slot::{Slot, Work};
use super::{counting, etag, host, probe_details, query};
use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceFactory, ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::http::header::{
    CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HeaderValue, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use actix_web::middleware::{Next, from_fn};
use actix_web::web::{PathConfig, QueryConfig, ServiceConfig};
use actix_web::{Error, Scope, web};
use berth_api::Kind;
use std::sync::Arc;
use std::time::Instant;

/// Whether the path is below /api/v1, whose own middleware limits the rate.
fn is_api(path: &str) -> bool {
    path.strip_prefix(API).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether the path is for probes and scrapes. Requests of a browser may have any query.
fn is_probe(request: &ServiceRequest) -> bool {
    matches!(path(request), "/livez" | "/readyz" | "/metrics")
}

/// The scope of all routes that need a token.
#[must_use]
pub fn api() -> Scope<
    impl ServiceFactory<
        ServiceRequest,
        Config = (),
        Response = ServiceResponse<impl MessageBody>,
        Error = Error,
        InitError = (),
    >,
> {
    web::scope(API).wrap(from_fn(etag::check_conditions)).wrap(from_fn(access::kernel))
}

/// Makes malformed paths and queries problems.
pub(super) fn problems(config: &mut ServiceConfig) {
    config.app_data(PathConfig::default().error_handler(|e, _| Failure::new(Kind::Path, e).into()));
    config.app_data(QueryConfig::default().error_handler(|e, _| Failure::new(Kind::Query, e).into()));
}

/// The middleware of the admin listener.
pub(super) async fn admin_gate(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let begun = StartedRequest::by(&mut request);
    let refused = match request.conn_data::<Peer>() {
        // A page of another origin cannot connect to a Unix socket. Over TLS, if it points its own name to this
        // address, the certificate has another name and the connection ends.
        Some(Peer::Unix { .. } | Peer::Tls { .. }) => Ok(()),
        _ => host::check(request.headers()),
    };
    // Below /api/v1 requests are counted by caller, in its own middleware.
    let context = context(&request)?;
    let refused = match is_api(path(&request)) {
        true => refused,
        false => refused.and_then(|()| context.access.limit_public(&request)),
    };
    let refused = match refused {
        Ok(()) => probe_details::check_daemon_routes(&context, &request).await,
        refused => refused,
    };
    pass(request, next, begun, refused.err()).await
}

/// The middleware of the health listener. Probes have the pod's address as host.
pub(super) async fn health_gate(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let begun = StartedRequest::by(&mut request);
    let refused = context(&request)?.access.limit_scrapes(&request);
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
    let refused = refused.or_else(|| is_probe(&request).then(|| query::refused(&request)).flatten());
    let response = match refused {
        Some(problem) => request.into_response(problem.response()),
        None => next.call(request).await?.map_into_boxed_body(),
    };
    let response = etag::not_modified_if_any(response);
    let (response, share) = context.budget.within(response);
    let response = finish(response);
    counting::count(&context, response.request(), response.status().as_u16(), at);
    if let Some((work, bytes)) =
        work.as_ref().zip(request_body::bytes(response.response().body(), share.as_ref()))
    {
        work.must_be_taken(bytes);
    }
    let kept = unread.is_some() || share.is_some() || !request_body::is_small(response.response().body());
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
