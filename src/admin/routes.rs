//! The route table. What is not in it is a problem, too.

use super::failure::{Failure, PROBLEM_JSON};
use super::packed::Packed;
use super::peer::Peer;
use super::seat::{Seat, Work};
use super::state::State;
use super::unread::{self, Unread};
use super::{
    access, allocations, counting, decisions, drain, events, gpus, host, live, node, openapi, page, policies,
    problem_pages, processes, query, scrape, sight, stack, stack_history, swagger, tag, trials, tried,
};
use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::http::header::{
    CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HeaderValue, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use actix_web::middleware::{Next, from_fn};
use actix_web::web::{Data, PathConfig, QueryConfig, ServiceConfig};
use actix_web::{Error, HttpRequest, HttpResponse, Resource, Route, guard, web};
use berth_api::Kind;
use std::sync::{Arc, LazyLock};
use std::time::Instant;

/// Where everything is that needs a token.
pub(super) const API: &str = "/api/v1";
/// Said by a handler so that nothing compresses its answer; it is no coding to be named, and leaves none.
pub(super) const IDENTITY: &str = "identity";

/// The path by which a request is routed: its escapes are undone, but for those of `%`, `/` and `+`.
pub(super) fn path(request: &ServiceRequest) -> &str {
    request.match_info().as_str()
}

/// Whether the door of the API counts it.
fn is_api(path: &str) -> bool {
    path.strip_prefix(API).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether it is for probes and scrapes. What a browser opens may have any query.
fn is_probe(request: &ServiceRequest) -> bool {
    matches!(path(request), "/livez" | "/readyz" | "/metrics")
}

/// The routes of the admin listener.
pub(super) fn admin(config: &mut ServiceConfig) {
    let api = web::scope(API)
        .wrap(from_fn(tag::heed))
        .wrap(from_fn(access::door))
        .service(resource("/node", "GET, HEAD").route(read().to(node::show)))
        .service(resource("/gpus", "GET, HEAD").route(read().to(gpus::list)))
        .service(
            resource("/gpus/{uuid}", "GET, HEAD, DELETE")
                .route(read().to(gpus::show))
                .route(web::delete().to(gpus::forget)),
        )
        .service(
            resource("/gpus/{uuid}/cordon", "PUT, DELETE")
                .route(web::put().to(gpus::cordon))
                .route(web::delete().to(gpus::uncordon)),
        )
        .service(
            resource("/gpus/{uuid}/drain", "GET, HEAD, PUT, DELETE")
                .route(read().to(drain::show))
                .route(web::put().to(drain::start))
                .route(web::delete().to(drain::stop)),
        )
        .service(resource("/gpus/{uuid}/health", "PUT").route(web::put().to(drain::mark_healthy)))
        .service(resource("/gpus/{uuid}/processes", "GET, HEAD").route(read().to(processes::list)))
        .service(resource("/bypass", "GET, HEAD").route(read().to(processes::bypass)))
        .service(resource("/events", "GET, HEAD").route(read().to(events::follow)))
        .service(resource("/allocations", "GET, HEAD").route(read().to(allocations::list)))
        .service(
            resource("/allocations/{id}", "GET, HEAD, DELETE")
                .route(read().to(allocations::show))
                .route(web::delete().to(allocations::end)),
        )
        .service(resource("/allocations/{id}/explanation", "GET, HEAD").route(read().to(decisions::explain)))
        .service(resource("/decisions", "GET, HEAD").route(read().to(decisions::list)))
        .service(resource("/decisions/{seq}", "GET, HEAD").route(read().to(decisions::show)))
        .service(resource("/decisions/{seq}/input", "GET, HEAD").route(read().to(decisions::input)))
        .service(resource("/replays", "POST").route(web::post().to(trials::replay)))
        .service(resource("/trials", "POST").route(web::post().to(tried::add)))
        .service(
            resource("/shadows", "GET, HEAD, POST")
                .route(read().to(trials::list))
                .route(web::post().to(trials::add)),
        )
        .service(
            resource("/shadows/{id}", "GET, HEAD, DELETE")
                .route(read().to(trials::show))
                .route(web::delete().to(trials::end)),
        )
        .service(
            resource("/policies", "GET, HEAD, POST")
                .route(read().to(policies::list))
                .route(web::post().to(policies::upload)),
        )
        .service(
            resource("/policies/{digest}", "GET, HEAD, DELETE")
                .route(read().to(policies::show))
                .route(web::delete().to(policies::delete)),
        )
        .service(resource("/policies/{digest}/module", "GET, HEAD").route(read().to(policies::module)))
        .service(
            resource("/stack", "GET, HEAD, PUT")
                .route(read().to(stack::show))
                .route(web::put().to(stack::activate)),
        )
        .service(resource("/stack/history", "GET, HEAD").route(read().to(stack_history::list)))
        .service(resource("/stack/rollback", "POST").route(web::post().to(stack_history::roll_back)))
        .service(
            resource("/stack/entries/{place}/suspension", "DELETE")
                .route(web::delete().to(stack_history::end_suspension)),
        )
        .service(resource("/stack/override", "DELETE").route(web::delete().to(stack::reset)))
        .default_service(web::to(no_route));
    config.service(api);
    config.service(resource("/", "GET, HEAD").route(read().to(page::start)));
    config.service(resource("/page/{file}", "GET, HEAD").route(read().to(page::file)));
    config.service(resource("/swagger-ui", "GET, HEAD").route(read().to(swagger::start)));
    config.service(resource("/swagger-ui/{file:.*}", "GET, HEAD").route(read().to(swagger::file)));
    config.service(resource("/openapi.json", "GET, HEAD").route(read().to(document)));
    for index in ["/problems", "/problems/"] {
        config.service(resource(index, "GET, HEAD").route(read().to(problem_pages::index)));
    }
    config.service(resource("/problems/{word}", "GET, HEAD").route(read().to(problem_pages::show)));
    health(config);
}

/// The routes of the health listener.
pub(super) fn health(config: &mut ServiceConfig) {
    config.app_data(PathConfig::default().error_handler(|e, _| Failure::new(Kind::Path, e).into()));
    config.app_data(QueryConfig::default().error_handler(|e, _| Failure::new(Kind::Query, e).into()));
    config.service(resource("/livez", "GET, HEAD").route(read().to(live::livez)));
    config.service(resource("/readyz", "GET, HEAD").route(read().to(node::readyz)));
    config.service(resource("/metrics", "GET, HEAD").route(read().to(scrape::metrics)));
    config.default_service(web::to(no_route));
}

/// Wraps everything that the admin listener answers.
pub(super) async fn admin_gate(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let begun = Begun::by(&mut request);
    let refused = match request.conn_data::<Peer>() {
        // A page of another origin cannot connect to a Unix socket; and where it had its own name lead
        // here, the certificate, which is another's, would end the connection.
        Some(Peer::Unix { .. } | Peer::Tls { .. }) => Ok(()),
        _ => host::check(request.headers()),
    };
    // Below /api/v1 the door counts, by name.
    let state = state(&request)?;
    let refused = match is_api(path(&request)) {
        true => refused,
        false => refused.and_then(|()| state.access.limit_public(&request)),
    };
    let refused = match refused {
        Ok(()) => sight::of_the_daemon(&state, &request).await,
        refused => refused,
    };
    pass(request, next, begun, refused.err()).await
}

/// Wraps everything that the health listener answers. Probes name the pod's address as host.
pub(super) async fn health_gate(
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let begun = Begun::by(&mut request);
    let refused = state(&request)?.access.limit_scrapes(&request);
    pass(request, next, begun, refused.err()).await
}

/// A request under way. It begins before anything is waited for: until then the HTTP library takes in what comes
/// behind it.
struct Begun {
    at: Instant,
    work: Option<Work>,
    unread: Option<Unread>,
}

impl Begun {
    fn by(request: &mut ServiceRequest) -> Self {
        let work = request.conn_data::<Arc<Seat>>().map(Seat::work);
        Self { at: Instant::now(), work, unread: Unread::of(request) }
    }
}

async fn pass(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
    Begun { at, work, unread }: Begun,
    refused: Option<Failure>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let state = state(&request)?;
    let inside = state.gate.enter();
    let refused = match &inside {
        Some(_) => refused,
        None => Some(Failure::new(Kind::Stopping, "the daemon is stopping")),
    };
    let refused = refused.or_else(|| is_probe(&request).then(|| query::refused(&request)).flatten());
    let response = match refused {
        Some(problem) => request.into_response(problem.response()),
        None => next.call(request).await?.map_into_boxed_body(),
    };
    let response = tag::not_modified_if_any(response);
    let (response, share) = state.budget.within(response);
    let response = finish(response);
    counting::count(&state, response.request(), response.status().as_u16(), at);
    if let Some((work, bytes)) = work.as_ref().zip(unread::bytes(response.response().body(), share.as_ref()))
    {
        work.must_be_taken(bytes);
    }
    let kept = unread.is_some() || share.is_some() || !unread::is_small(response.response().body());
    Ok(match kept {
        true => response.map_body(|_, body| unread::holding(body, unread, work, share)),
        false => response,
    })
}

pub(super) fn state(request: &ServiceRequest) -> Result<Data<State>, Error> {
    let state = request.app_data::<Data<State>>().cloned();
    state.ok_or_else(|| Failure::new(Kind::Internal, "the server has no state").into())
}

/// Headers that all answers have, and words for errors that some layer made without any.
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
            // The layer that compresses names codings, and not what forbids the answer as it is.
            StatusCode::NOT_ACCEPTABLE => {
                Failure::new(Kind::NotAcceptable, "Accept-Encoding takes neither gzip nor an answer as it is")
                    .hint("send `Accept-Encoding: gzip`, or leave it out")
            }
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

/// A resource that names its methods to whoever uses another one.
fn resource(path: &str, allow: &'static str) -> Resource {
    web::resource(path).default_service(web::to(move |request: HttpRequest| async move {
        let detail = format!("{} is not a method of {}; it has {allow}", request.method(), request.path());
        Failure::new(Kind::Method, detail).allow(allow).response()
    }))
}

/// GET, and HEAD with it.
fn read() -> Route {
    web::route().guard(guard::Any(guard::Get()).or(guard::Head()))
}

async fn no_route(request: HttpRequest) -> HttpResponse {
    nothing_at(request.path()).response()
}

/// The API's description: half a megabyte of mostly the same words.
async fn document(request: HttpRequest) -> HttpResponse {
    static DOCUMENT: LazyLock<Packed> =
        LazyLock::new(|| Packed::new("application/json", openapi::openapi_json()));
    DOCUMENT.answer(&request)
}

/// The problem of a path without a route.
pub(super) fn nothing_at(path: &str) -> Failure {
    let path: String = path.chars().take(200).collect();
    Failure::new(Kind::NoRoute, format!("nothing is at {path}")).hint("/swagger-ui/ shows what there is")
}
