//! ETags and conditional requests.
//!
//! A weak tag (`W/"..."`) is a hash of a response's body, for `If-None-Match` only: a client that polls gets 304
//! instead of the same body again. A strong tag is a revision of an operator's setting, for `If-Match`, so that no
//! change overwrites another one unseen.

use crate::failure::{Failure, excerpt};
use crate::query;
use crate::route::IDENTITY;
use crate::route_table::{Matched, RouteRow, Verb};
use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{
    CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, ETAG, HeaderMap, HeaderName, HeaderValue, IF_MATCH,
    IF_NONE_MATCH,
};
use actix_web::http::{Method, StatusCode};
use actix_web::middleware::Next;
use actix_web::{Error, HttpRequest, HttpResponse};
use berth_api::Kind;
use serde::Serialize;
use std::hash::{DefaultHasher, Hasher};

/// Most tags in one condition: a client keeps one, a cache a few.
const TAGS_MAX: usize = 16;

/// 200 with a body and its weak tag, or 304 if the request has that tag.
pub fn fresh<T: Serialize>(request: &HttpRequest, shown: &T) -> Result<HttpResponse, Failure> {
    let body = bytes(shown)?;
    let tag = format!("W/\"{:016x}\"", hash_of(&body));
    Ok(response_unless_current(request, tag, body))
}

/// As [`fresh`], with a strong tag, for what changes by requests only.
pub fn revised<T: Serialize>(request: &HttpRequest, shown: &T) -> Result<HttpResponse, Failure> {
    let body = bytes(shown)?;
    let tag = strong(&body);
    Ok(response_unless_current(request, tag, body))
}

/// The strong tag of this body.
pub fn of<T: Serialize>(shown: &T) -> Result<String, Failure> {
    Ok(strong(&bytes(shown)?))
}

/// The tags of a condition.
#[derive(Debug, PartialEq, Eq)]
pub enum Tags {
    /// `*`, or no `If-Match`: any state.
    Any,
    /// One of these.
    These(Vec<String>),
}

impl Tags {
    /// Whether it matches any state.
    pub fn is_any(&self) -> bool {
        *self == Self::Any
    }

    /// Whether an `If-Match` with these matches this tag. A weak tag never matches (RFC 9110, 13.1.1).
    pub fn names(&self, present: &str) -> bool {
        match self {
            Self::Any => true,
            Self::These(tags) => tags.iter().any(|tag| tag == present),
        }
    }
}

/// The request's `If-Match`; without one, any state matches.
///
/// # Errors
/// [`Kind::Header`] if it is malformed.
pub fn if_match(request: &HttpRequest) -> Result<Tags, Failure> {
    let given = tags(request.headers(), &IF_MATCH).unwrap_or(Ok(Tags::Any));
    given.map_err(|rule| Failure::new(Kind::Header, format!("If-Match: {rule}")))
}

/// What the turn of a command has to check once more, after the request's `If-Match` was compared with the present tag:
/// what `read` returns; `None` without a condition.
///
/// # Errors
/// As [`check`].
pub fn expected<T>(
    request: &HttpRequest,
    present: &str,
    read: impl FnOnce() -> T,
) -> Result<Option<T>, Failure> {
    check(request, present)?;
    Ok((!if_match(request)?.is_any()).then(read))
}

/// Compares the request's `If-Match`, if it has one, with the present tag.
///
/// # Errors
/// [`Kind::Changed`] if it has other tags, [`Kind::Header`] if it is malformed.
pub fn check(request: &HttpRequest, present: &str) -> Result<(), Failure> {
    if if_match(request)?.names(present) {
        return Ok(());
    }
    Err(Failure::new(Kind::Changed, format!("its ETag is now {present}, and If-Match has another"))
        .hint("read it again before you repeat the request"))
}

/// The middleware around all guarded routes for queries and conditions. It refuses an unknown key of a query, and a
/// condition that the operation would ignore, since the client relies on the condition. A response with a strong tag is
/// never compressed, since the tag stands for its exact bytes (RFC 9110, 8.8.3).
pub(crate) async fn check_conditions(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let row = Matched::of(request.request())?.row(request.method());
    let refused =
        row.and_then(|row| query::refused(row, &request).or_else(|| unsupported_condition(row, &request)));
    if let Some(problem) = refused {
        return Ok(request.into_response(problem.response()));
    }
    let mut response = next.call(request).await?.map_into_boxed_body();
    if response.headers().get(ETAG).is_some_and(|tag| tag.as_bytes().starts_with(b"\"")) {
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(IDENTITY));
    }
    Ok(response)
}

/// Turns a 200 into 304 for a read with `If-None-Match: *`, which matches every existing representation (RFC 9110,
/// 13.1.2).
pub(crate) fn not_modified_if_any(mut response: ServiceResponse<BoxBody>) -> ServiceResponse<BoxBody> {
    let request = response.request();
    let reads = matches!(*request.method(), Method::GET | Method::HEAD);
    if !reads || response.status() != StatusCode::OK || !has_if_none_match_any(request.headers()) {
        return response;
    }
    *response.response_mut().status_mut() = StatusCode::NOT_MODIFIED;
    for name in [CONTENT_TYPE, CONTENT_LENGTH, CONTENT_ENCODING] {
        response.headers_mut().remove(name);
    }
    response.map_body(|_, _| BoxBody::new(()))
}

fn has_if_none_match_any(headers: &HeaderMap) -> bool {
    tags(headers, &IF_NONE_MATCH) == Some(Ok(Tags::Any))
}

fn unsupported_condition(row: &RouteRow, request: &ServiceRequest) -> Option<Failure> {
    if row.verb == Verb::Get {
        return None;
    }
    // The resource of every operation that changes something exists; otherwise its handler answers that it does not.
    if has_if_none_match_any(request.headers()) {
        let words = "the resource exists, and `If-None-Match: *` allows the change only if it does not";
        return Some(Failure::new(Kind::Changed, words).hint("repeat the request without If-None-Match"));
    }
    let condition = if_match(request.request());
    // Malformed conditions included.
    if row.takes_if_match || condition.is_ok_and(|condition| condition.is_any()) {
        return None;
    }
    let (method, path) = (request.method(), row.path);
    let rule = format!("If-Match: {method} of {path} has no ETag to compare it with");
    Some(Failure::new(Kind::Header, rule).hint("repeat the request without If-Match"))
}

fn response_unless_current(request: &HttpRequest, tag: String, body: Vec<u8>) -> HttpResponse {
    let same = |given: &String| opaque(given) == opaque(&tag);
    let known = match tags(request.headers(), &IF_NONE_MATCH) {
        Some(Ok(Tags::Any)) => true,
        Some(Ok(Tags::These(tags))) => tags.iter().any(same),
        // An unreadable condition is ignored: the complete response is always right.
        Some(Err(_)) | None => false,
    };
    if known {
        return HttpResponse::NotModified().insert_header((ETAG, tag)).finish();
    }
    HttpResponse::Ok().insert_header((ETAG, tag)).content_type("application/json").body(body)
}

/// Initial size of a response's buffer, bytes: most fit. Starting at zero, a list would be copied eight times.
const ROOM_BYTES: usize = 16 * 1024;

fn bytes<T: Serialize>(shown: &T) -> Result<Vec<u8>, Failure> {
    let mut body = Vec::with_capacity(ROOM_BYTES);
    serde_json::to_writer(&mut body, shown).map_err(|error| unwritten(&error))?;
    Ok(body)
}

/// The error of a response that cannot be serialized.
pub fn unwritten(error: &serde_json::Error) -> Failure {
    Failure::new(Kind::Internal, format!("the response cannot be written: {error}"))
}

fn strong(body: &[u8]) -> String {
    format!("\"{:016x}\"", hash_of(body))
}

/// The keys are constant, so a tag stays valid over a restart of the same release.
fn hash_of(body: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(body);
    hasher.finish()
}

fn opaque(tag: &str) -> &str {
    tag.strip_prefix("W/").unwrap_or(tag)
}

/// The tags of a condition; `None` without one.
fn tags(headers: &HeaderMap, name: &HeaderName) -> Option<Result<Tags, String>> {
    let mut given = headers.get_all(name).peekable();
    given.peek()?;
    let mut all = Vec::new();
    for value in given {
        let Ok(text) = value.to_str() else { return Some(Err("visible ASCII characters".into())) };
        if text.trim() == "*" {
            return Some(Ok(Tags::Any));
        }
        for tag in text.split(',').map(str::trim) {
            let quoted = opaque(tag).strip_prefix('"').and_then(|t| t.strip_suffix('"'));
            if quoted.is_none_or(|t| t.contains('"')) {
                return Some(Err(format!("an ETag in its quotes, not {:?}", excerpt(tag))));
            }
            if all.len() == TAGS_MAX {
                return Some(Err(format!("at most {TAGS_MAX} ETags")));
            }
            all.push(tag.to_owned());
        }
    }
    Some(Ok(Tags::These(all)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::test::TestRequest;

    fn asked(name: &HeaderName, values: &[&str]) -> HttpRequest {
        let mut request = TestRequest::default();
        for value in values {
            request = request.append_header((name.clone(), *value));
        }
        request.to_http_request()
    }

    #[test]
    fn an_answer_that_is_known_is_not_sent_again() {
        let body = serde_json::json!({"a": 1});
        let tag_of = |response: &HttpResponse| {
            response.headers().get(ETAG).and_then(|tag| tag.to_str().ok()).unwrap_or_default().to_owned()
        };
        let first = fresh(&asked(&ETAG, &[]), &body).unwrap();
        let tag = tag_of(&first);
        assert!(first.status() == 200 && tag.starts_with("W/\""), "{tag}");
        let strong = opaque(&tag).to_owned();
        let several = format!("W/\"y\", \"z\", {tag}");
        let known: [&[&str]; 4] = [&[&tag], &["\"x\"", &strong], &["*"], &[&several]];
        for known in known {
            let again = fresh(&asked(&IF_NONE_MATCH, known), &body).unwrap();
            assert_eq!((again.status().as_u16(), tag_of(&again)), (304, tag.clone()), "{known:?}");
            let other = fresh(&asked(&IF_NONE_MATCH, known), &serde_json::json!({"a": 2})).unwrap();
            assert_eq!(other.status() == 200, known != ["*"]);
        }
        for odd in ["", "x", "\"", "W/", "\"a\"b\""] {
            assert_eq!(fresh(&asked(&IF_NONE_MATCH, &[odd]), &body).unwrap().status(), 200, "{odd}");
        }
    }

    #[test]
    fn if_match_holds_for_the_very_revision_alone() {
        let check = |given: &[&str]| check(&asked(&IF_MATCH, given), "\"3\"").map_err(|p| p.problem.status);
        for holds in [&[][..], &["\"3\""], &["*"], &["\"2\", \"3\""], &["\"2\"", "\"3\""]] {
            assert_eq!(check(holds), Ok(()), "{holds:?}");
        }
        for moved in ["\"4\"", "W/\"3\"", "\"\""] {
            assert_eq!(check(&[moved]), Err(412), "{moved}");
        }
        let many = vec!["\"9\""; TAGS_MAX + 1].join(",");
        for malformed in ["3", "", "\"3", &many] {
            assert_eq!(check(&[malformed]), Err(400), "{malformed}");
        }
    }
}
