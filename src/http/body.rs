//! Request bodies: read up to a limit and a deadline, then parsed. Content-Length is not trusted.

use crate::failure::{Failure, excerpt};
use actix_web::HttpRequest;
use actix_web::error::PayloadError;
use actix_web::http::header::{CONTENT_ENCODING, CONTENT_LENGTH};
use actix_web::web::Payload;
use berth_api::{Kind, MODULE_BYTES_MAX, Shape};
use berth_files::yaml::{plain, shown};
use futures_util::StreamExt;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

/// Largest JSON body, bytes: a stack of 16 entries with parameters of 6 KiB, escaped twice.
pub const JSON_BYTES_MAX: usize = 256 * 1024;
/// Deadline of a JSON body.
const JSON_WAIT: Duration = Duration::from_secs(10);
/// Deadline of a policy: the largest one at half a megabyte a second.
const MODULE_WAIT: Duration = Duration::from_secs(60);
/// The content type of a policy.
pub const WASM: &str = "application/wasm";
/// The content type of a policy from a client whose generator knows no `application/wasm`.
pub const BYTES: &str = "application/octet-stream";

/// Reads a JSON body; an empty one is the default value, and so is `null`, which generated clients send for a body that
/// their caller left out.
pub async fn json_or_default<T: Shape + Default>(
    request: &HttpRequest,
    payload: Payload,
) -> Result<T, Failure> {
    let bytes = read(request, payload, JSON_BYTES_MAX, JSON_WAIT).await?;
    if bytes.is_empty() {
        return Ok(T::default());
    }
    media_type(request, &["application/json"])?;
    if bytes.trim_ascii() == b"null" { Ok(T::default()) } else { parse(&bytes) }
}

/// Reads a JSON body.
pub async fn json<T: Shape>(request: &HttpRequest, payload: Payload) -> Result<T, Failure> {
    media_type(request, &["application/json"])?;
    parse(&read(request, payload, JSON_BYTES_MAX, JSON_WAIT).await?)
}

/// Reads the bytes of a policy.
pub async fn module(request: &HttpRequest, payload: Payload) -> Result<Vec<u8>, Failure> {
    media_type(request, &[WASM, BYTES])?;
    read(request, payload, MODULE_BYTES_MAX, MODULE_WAIT).await
}

/// Refuses a body of another content type than `wanted`, of which the first is the usual one.
fn media_type(request: &HttpRequest, wanted: &[&str]) -> Result<(), Failure> {
    use actix_web::HttpMessage;
    // Compressed bodies are refused: the size of their content has no limit.
    let encoding = request.headers().get_all(CONTENT_ENCODING).find(|c| *c != "identity");
    if let Some(encoding) = encoding {
        let given = String::from_utf8_lossy(encoding.as_bytes());
        return Err(Failure::new(Kind::MediaType, format!("the body is encoded as {:?}", excerpt(&given)))
            .hint("send it without Content-Encoding"));
    }
    if wanted.iter().any(|wanted| request.content_type().eq_ignore_ascii_case(wanted)) {
        return Ok(());
    }
    let wanted = wanted[0];
    let given = excerpt(request.content_type());
    Err(Failure::new(Kind::MediaType, format!("the body must be {wanted}, but was sent as {given:?}"))
        .hint(format!("send `Content-Type: {wanted}`")))
}

fn too_large(limit: usize) -> Failure {
    Failure::new(Kind::TooLarge, format!("the body is larger than {limit} bytes, the maximum of this route"))
}

async fn read(
    request: &HttpRequest,
    payload: Payload,
    limit: usize,
    wait: Duration,
) -> Result<Vec<u8>, Failure> {
    // Refused before any byte is read.
    let declared = request.headers().get(CONTENT_LENGTH);
    let declared: Option<u64> = declared.and_then(|l| l.to_str().ok()?.parse().ok());
    if declared.is_some_and(|l| l > u64::try_from(limit).unwrap_or(u64::MAX)) {
        return Err(too_large(limit));
    }
    let declared = declared.and_then(|l| usize::try_from(l).ok()).unwrap_or(0);
    match tokio::time::timeout(wait, collect(payload, declared, limit)).await {
        Ok(bytes) => bytes,
        Err(_) => {
            Err(Failure::new(Kind::Slow, format!("the body was not received within {} s", wait.as_secs())))
        }
    }
}

/// Reads the body into one buffer of the declared size. Without a declared size the buffer doubles, up to the limit.
/// Declared bytes that are never sent are address space that is never touched.
async fn collect(mut payload: Payload, declared: usize, limit: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes: Vec<u8> = Vec::with_capacity(declared.min(limit));
    while let Some(chunk) = payload.next().await {
        let chunk = chunk.map_err(|error| match error {
            PayloadError::Overflow => too_large(limit),
            other => Failure::new(Kind::Body, format!("the body could not be read: {other}")),
        })?;
        if bytes.len() + chunk.len() > limit {
            return Err(too_large(limit));
        }
        if bytes.capacity() - bytes.len() < chunk.len() {
            let room = bytes.len().min(limit - bytes.len()).max(chunk.len());
            bytes.reserve_exact(room);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

fn parse<T: Shape>(bytes: &[u8]) -> Result<T, Failure> {
    let invalid =
        |words| Failure::new(Kind::Invalid, words).hint(format!("expected a body such as {}", T::EXAMPLE));
    let other = other_than_object(bytes);
    // serde would accept a list as the values of an object's keys, in the order of the source.
    if other == Some("a list") {
        return Err(invalid(not_an_object::<T>("a list")));
    }
    let parsed =
        serde_json::from_slice(bytes).and_then(|body| serde_json::from_slice(bytes).map(|UniqueKeys| body));
    parsed.map_err(|error| {
        if error.is_data() {
            invalid(other.map_or_else(|| message(&error), not_an_object::<T>))
        } else {
            Failure::new(Kind::Json, format!("the body is not JSON: {error}"))
        }
    })
}

/// Most characters of a received value that an error shows.
const FOUND_CHARACTERS_MAX: usize = 200;

/// The text of a serde_json error, without types of the program and with long values cut.
fn message(error: &serde_json::Error) -> String {
    let whole = error.to_string();
    let (what, at) = whole.rfind(" at line ").map_or((whole.as_str(), ""), |at| whole.split_at(at));
    let (found, expected) = what.rsplit_once(", expected ").unwrap_or((what, ""));
    let mut text: String = found.chars().take(FOUND_CHARACTERS_MAX).collect();
    if text.len() < found.len() {
        text += "...";
    }
    if !expected.is_empty() {
        text = format!("{text}, expected {}", plain(expected));
    }
    text + at
}

/// The kind of a body that is not an object, from its first byte.
fn other_than_object(bytes: &[u8]) -> Option<&'static str> {
    match bytes.iter().find(|b| !b.is_ascii_whitespace())? {
        b'{' => None,
        b'[' => Some("a list"),
        b'"' => Some("a string"),
        b'n' => Some("null"),
        b't' | b'f' => Some("a boolean"),
        _ => Some("a number"),
    }
}

fn not_an_object<T: Shape>(what: &str) -> String {
    // The key between the first two quotes.
    let key = T::EXAMPLE.split('"').nth(1).unwrap_or_default();
    format!("the body is {what}; expected an object with keys such as `{key}`")
}

/// Any JSON value whose objects have unique keys. serde_json keeps the last value of a repeated key in a free map, such
/// as the parameters of a policy, and the caller would not learn which one is used.
struct UniqueKeys;

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = UniqueKeys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }
    fn visit_unit<E>(self) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
    fn visit_bool<E>(self, _: bool) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
    fn visit_i64<E>(self, _: i64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
    fn visit_u64<E>(self, _: u64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
    fn visit_f64<E>(self, _: f64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
    fn visit_str<E>(self, _: &str) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<UniqueKeys, A::Error> {
        while list.next_element::<UniqueKeys>()?.is_some() {}
        Ok(UniqueKeys)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueKeys, A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if keys.contains(&key) {
                return Err(Error::custom(format!("the key {} is given twice", shown(&key))));
            }
            keys.insert(key);
            map.next_value::<UniqueKeys>()?;
        }
        Ok(UniqueKeys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::FromRequest;
    use actix_web::test::TestRequest;
    use berth_api::{Candidate, Cordon, DrainOrder, MarkHealthy, NewStack, NewTrial, ReleaseOrder, Rollback};

    async fn collected(body: Vec<u8>, declared: usize, limit: usize) -> Result<Vec<u8>, Failure> {
        let (request, mut payload) = TestRequest::default().set_payload(body).to_http_parts();
        collect(Payload::from_request(&request, &mut payload).await.unwrap(), declared, limit).await
    }

    #[tokio::test]
    async fn a_body_reserves_its_declared_length_up_to_the_limit() {
        let limit = 1_000_000;
        for size in [0, 1, 700_000, limit] {
            let body = vec![7; size];
            let declared = collected(body.clone(), size, limit).await.unwrap();
            assert_eq!((declared.capacity(), &declared), (size, &body));
            let undeclared = collected(body.clone(), 0, limit).await.unwrap();
            assert!(undeclared.capacity() <= limit && undeclared == body, "{}", undeclared.capacity());
            // A body longer than declared is read on; one shorter than declared is accepted.
            assert_eq!(collected(body.clone(), size / 2, limit).await.unwrap(), body);
            assert!(collected(body, usize::MAX, limit).await.unwrap().capacity() <= limit);
        }
        let refused = collected(vec![7; limit + 1], 0, limit).await.unwrap_err();
        assert_eq!(refused.problem.status, 413);
    }

    /// The error of a body, with its hint.
    fn wrong<T: Shape>(body: &str) -> String {
        let problem = parse::<T>(body.as_bytes()).err().unwrap();
        assert_eq!(problem.problem.status, 422, "{problem}");
        format!("{}; {}", problem.problem.detail, problem.problem.hint.unwrap())
    }

    /// The example of a type is accepted, and shown in the error of another body.
    fn check_example<T: Shape>() {
        assert!(parse::<T>(T::EXAMPLE.as_bytes()).is_ok(), "{}", T::EXAMPLE);
        for other in ["[]", " [{}]", "\"word\"", "17", "true", "null", "{\"no such key\": 1}"] {
            assert!(
                wrong::<T>(other).ends_with(&format!("expected a body such as {}", T::EXAMPLE)),
                "{other}"
            );
        }
    }

    #[test]
    fn the_error_of_a_malformed_body_shows_an_example() {
        check_example::<Candidate>();
        check_example::<Cordon>();
        check_example::<DrainOrder>();
        check_example::<MarkHealthy>();
        check_example::<NewStack>();
        check_example::<NewTrial>();
        check_example::<ReleaseOrder>();
        check_example::<Rollback>();
        let text = wrong::<NewStack>("[{\"policy\": \"mixed\"}]");
        assert!(
            text.starts_with("the body is a list; expected an object with keys such as `entries`;"),
            "{text}"
        );
        assert!(wrong::<NewStack>("\"mixed\"").starts_with("the body is a string; "));
        assert!(wrong::<NewStack>("{\"entry\": []}").starts_with("unknown field `entry`"));
        assert_eq!(parse::<NewStack>(b"{").err().unwrap().problem.status, 400);
    }

    #[tokio::test]
    async fn an_optional_body_may_be_left_out_or_null() {
        for body in ["", "null", " null\n"] {
            let (request, mut payload) = TestRequest::default()
                .insert_header(("Content-Type", "application/json"))
                .set_payload(body)
                .to_http_parts();
            let payload = Payload::from_request(&request, &mut payload).await.unwrap();
            let order: DrainOrder = json_or_default(&request, payload).await.unwrap();
            assert_eq!((order.reason.as_str(), order.evict), ("", false), "{body:?}");
        }
    }

    #[test]
    fn a_wrong_value_is_answered_without_types_of_the_program_and_cut() {
        let of = |max: &str| {
            format!(r#"{{"entries": [{{"policy": "mixed", "permissions": {{"shareMax": {max}}}}}]}}"#)
        };
        let text = wrong::<NewStack>(&of("-1"));
        assert!(
            text.contains("`-1`, expected a whole number from 0 to 4294967295 at line 1 column "),
            "{text}"
        );
        let text = wrong::<NewStack>(&of(&format!("\"{}\"", "x".repeat(5000))));
        assert!(text.contains("x..., expected a whole number") && text.len() < 1000, "{text}");
    }

    #[test]
    fn a_key_that_is_given_twice_is_refused_however_deep() {
        for parameters in [r#"{"replicas": 4, "replicas": 5}"#, r#"{"a": [{"b": {"c": 1, "c": 1}}]}"#] {
            let body = format!(r#"{{"entries": [{{"policy": "mixed", "parameters": {parameters}}}]}}"#);
            let text = wrong::<NewStack>(&body);
            assert!(text.contains("is given twice at line 1 column "), "{text}");
        }
        let twice = r#"{"entries": [{"policy": "mixed", "parameters": {"a": {"b": 1}, "b": {"b": 1}}}]}"#;
        assert!(parse::<NewStack>(twice.as_bytes()).is_ok(), "two objects may have the same key");
    }
}
