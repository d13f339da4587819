//! Paths, methods and templates of routes.

use crate::failure::Failure;
use actix_web::dev::ServiceRequest;
use actix_web::http::header::HeaderMap;
use actix_web::{HttpRequest, HttpResponse, Resource, Route, guard, web};
use berth_api::Kind;

/// The prefix of all routes that need a token.
pub const API: &str = "/api/v1";
/// Set by a handler whose response must not be compressed; it is removed before the response is sent.
pub const IDENTITY: &str = "identity";

/// The path by which a request is routed: without escapes, except those of `%`, `/` and `+`.
pub(crate) fn path(request: &ServiceRequest) -> &str {
    request.match_info().as_str()
}

/// A resource that answers other methods with the allowed ones.
pub fn resource(path: &str, allow: &'static str) -> Resource {
    web::resource(path).default_service(web::to(move |request: HttpRequest| async move {
        let detail = format!("{} is not a method of {}; it has {allow}", request.method(), request.path());
        Failure::new(Kind::Method, detail).allow(allow).response()
    }))
}

/// GET, and HEAD with it.
#[must_use]
pub fn read() -> Route {
    web::route().guard(guard::Any(guard::Get()).or(guard::Head()))
}

/// Answers a path without a route.
pub async fn no_route(request: HttpRequest) -> HttpResponse {
    nothing_at(request.path()).response()
}

/// Answers a path without a route on the health listener, which has only three routes.
pub async fn no_health_route(request: HttpRequest) -> HttpResponse {
    let hint = "this address serves only /livez, /readyz and /metrics; the admin API has another address";
    without_route(request.path()).hint(hint).response()
}

/// The problem of a path without a route.
#[must_use]
pub fn nothing_at(path: &str) -> Failure {
    without_route(path).hint("/swagger-ui/ shows all routes")
}

fn without_route(path: &str) -> Failure {
    let path: String = path.chars().take(200).collect();
    Failure::new(Kind::NoRoute, format!("there is no route {path}"))
}

/// Checks that a browser that sends its certificate does so for a page of this API. Other programs send neither
/// header.
pub(crate) fn same_site(headers: &HeaderMap) -> Result<(), Failure> {
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let own = match (text("sec-fetch-site"), text("origin")) {
        (Some(site), _) => matches!(site, "same-origin" | "none"),
        (None, Some(origin)) => text("host").is_some_and(|host| origin == format!("https://{host}")),
        (None, None) => true,
    };
    match own {
        true => Ok(()),
        false => Err(Failure::new(
            Kind::Forbidden,
            "the request for this change comes from a page of another site",
        )
        .hint("open the daemon's own page for it")),
    }
}

/// The template of the route table that a request matches.
pub(crate) fn route(request: &HttpRequest) -> Option<String> {
    request.match_pattern().map(|pattern| pattern.replace(":.*}", "}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::http::header::{HeaderName, HeaderValue};

    #[test]
    fn a_page_of_another_site_changes_nothing_with_a_browsers_certificate() {
        let may = |given: &[(&str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in given {
                let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
                headers.insert(name, HeaderValue::from_str(value).unwrap());
            }
            same_site(&headers).is_ok()
        };
        let host = ("host", "gpu-1:9470");
        assert!(may(&[host]));
        assert!(may(&[host, ("origin", "https://gpu-1:9470")]));
        assert!(may(&[host, ("sec-fetch-site", "same-origin"), ("origin", "https://gpu-1:9470")]));
        for closed in [
            [host, ("origin", "https://evil.example")],
            [host, ("origin", "http://gpu-1:9470")],
            [host, ("origin", "null")],
            [host, ("sec-fetch-site", "cross-site")],
            [host, ("sec-fetch-site", "same-site")],
        ] {
            assert!(!may(&closed), "{closed:?}");
        }
    }
}
