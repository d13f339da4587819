//! The path of a request, the page that it comes from, and the mark of a response that is not compressed.

use crate::failure::Failure;
use actix_web::HttpRequest;
use actix_web::http::header::HeaderMap;
use berth_api::Kind;

/// Set by a handler whose response must not be compressed; it is removed before the response is sent.
pub const IDENTITY: &str = "identity";

/// The path by which a request is routed: without escapes, except those of `%`, `/` and `+`.
pub(crate) fn path(request: &HttpRequest) -> &str {
    request.match_info().as_str()
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
