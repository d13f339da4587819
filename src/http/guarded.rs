//! The routes of a listener, and the middleware around guarded ones: authentication, the span, and the audit line of
//! each change.

use crate::access::{mark_authenticated, needed};
use crate::caller::{AuditLine, Caller};
use crate::etag;
use crate::failure::Failure;
use crate::gate::{Context, context};
use crate::rate_limit::Counted;
use crate::response_budget::AuthenticatedClient;
use crate::route_table::{Audience, Listener, Matched, RouteTable, resource};
use crate::settings::Right;
use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::{Method, StatusCode};
use actix_web::middleware::{Next, from_fn};
use actix_web::web::{self, ServiceConfig};
use actix_web::{Error, HttpMessage, HttpRequest};
use berth_observe::spans;
use tracing::Instrument;

/// Adds the routes of a listener.
pub(crate) fn register(table: &'static RouteTable, config: &mut ServiceConfig, listener: Listener) {
    let nowhere =
        move |request: HttpRequest| async move { table.nothing_at(request.path(), listener).response() };
    let served = table.endpoints.iter().filter(|endpoint| listener.serves(endpoint.audience));
    let (guarded, open): (Vec<_>, Vec<_>) =
        served.partition(|endpoint| endpoint.audience == Audience::Guarded);
    if listener == Listener::Admin {
        let scope = web::scope(table.guarded);
        let scope = scope.wrap(from_fn(etag::check_conditions)).wrap(from_fn(authenticate));
        let mut scope = scope.default_service(web::to(nowhere));
        for endpoint in guarded {
            let below = endpoint.path.strip_prefix(table.guarded).unwrap_or(endpoint.path);
            scope = scope.service(resource(below, endpoint));
        }
        config.service(scope);
    }
    for endpoint in open {
        config.service(resource(endpoint.path, endpoint));
    }
    config.default_service(web::to(nowhere));
}

/// The middleware around all guarded paths, unknown ones included.
async fn authenticate(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let context = context(&request)?;
    let mut line = (needed(request.method()) == Right::Change).then(|| AuditLine::of(&request));
    let answered = match admit(&context, &request, line.as_mut()).await {
        Err(problem) => Ok(request.into_response(problem.response())),
        Ok(caller) => {
            let client = caller.identity().client();
            request.extensions_mut().insert(caller);
            call_in_span(request, next).await.map(|response| {
                let mut response = response.map_into_boxed_body();
                response.response_mut().extensions_mut().insert(AuthenticatedClient(client));
                response
            })
        }
    };
    if let Some(mut line) = line {
        line.status = Some(status(&answered));
    }
    answered
}

/// The caller of a request that it may make. `line`: its audit line, which gets the caller even if it may not.
async fn admit(
    context: &Context,
    request: &ServiceRequest,
    line: Option<&mut AuditLine>,
) -> Result<Caller, Failure> {
    let caller = Caller::new(context.access.identify(request.request(), Counted::Yes).await?);
    if let Some(line) = line {
        line.caller = Some(caller.clone());
    }
    context.access.check_right(caller.identity(), request).await?;
    mark_authenticated(request);
    context.budget.has_room(&caller.identity().client(), request.request())?;
    Ok(caller)
}

fn status<B>(answered: &Result<ServiceResponse<B>, Error>) -> StatusCode {
    match answered {
        Ok(response) => response.status(),
        Err(error) => error.as_response_error().status_code(),
    }
}

/// Runs an authenticated request in a span, in its caller's trace if the request names one: other requests must not
/// write into traces, and probes and pages have no span. What follows the response's head, such as an event stream, is
/// not part of the span.
async fn call_in_span<B: MessageBody>(
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<B>, Error> {
    if !spans::is_on() {
        return next.call(request).await;
    }
    // The label of the route table, never a text of the client.
    let endpoint = Matched::of(request.request())?.endpoint();
    let label = endpoint.map(|endpoint| endpoint.label.as_str());
    let tls = request.app_config().secure();
    let span = spans::http(method(request.method()), label, request.path(), tls);
    let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    spans::set_parent(&span, header("traceparent"), header("tracestate"));
    let answered = next.call(request).instrument(span.clone()).await;
    spans::http_answered(&span, status(&answered).as_u16());
    answered
}

/// One of a closed list: a client may send any token as its method.
fn method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::PUT => "PUT",
        Method::POST => "POST",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "_OTHER",
    }
}
