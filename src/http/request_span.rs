//! A span for each request to the API, in its caller's trace if the request names one.

use actix_web::Error;
use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::Method;
use actix_web::middleware::Next;
use berth_core::spans;
use tracing::Instrument;

/// Runs an authenticated request in a span: other requests must not write into traces, and probes and pages have no
/// span. What follows the response's head, such as an event stream, is not part of the span.
pub(super) async fn call<B: MessageBody>(
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<B>, Error> {
    if !spans::is_on() {
        return next.call(request).await;
    }
    // The template of the route table, never a text of the client.
    let route = request.match_pattern().map(|pattern| pattern.replace(":.*}", "}"));
    let tls = request.app_config().secure();
    let span = spans::http(method(request.method()), route.as_deref(), request.path(), tls);
    let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    spans::set_parent(&span, header("traceparent"), header("tracestate"));
    let answered = next.call(request).instrument(span.clone()).await;
    let status = match &answered {
        Ok(response) => response.status(),
        Err(error) => error.as_response_error().status_code(),
    };
    spans::http_answered(&span, status.as_u16());
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
