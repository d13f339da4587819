//! Every error as `application/problem+json` (RFC 9457). The kinds are a closed list.

use super::dto::Check;
use actix_web::http::{StatusCode, header};
use actix_web::{HttpResponse, ResponseError};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// Longest words of a problem, bytes: a policy's own of 3 KiB with ours around them. What a client sent may be
/// among them, and that has no limit but the head's.
const DETAIL_BYTES_MAX: usize = 4 * 1024;
/// The media type of problems.
pub const PROBLEM_JSON: &str = "application/problem+json";

/// What went wrong, as every error of this API says it (RFC 9457).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Names the kind for programs; stays the same over releases.
    #[serde(rename = "type")]
    #[schema(value_type = String, example = "/problems/unknown-gpu")]
    pub kind: Box<str>,
    /// The kind, for people.
    #[schema(value_type = String, example = "No such GPU")]
    pub title: Box<str>,
    /// The HTTP status.
    #[schema(example = 404)]
    pub status: u16,
    /// What happened here.
    #[schema(example = "no GPU GPU-1 on this node")]
    pub detail: String,
    /// What to do about it, where that is not plain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "GET /api/v1/gpus lists them")]
    pub hint: Option<String>,
    /// What readiness or life was held against; only `/readyz` and `/livez` have it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checks: Vec<Check>,
    /// Goes into headers.
    #[serde(skip)]
    #[schema(ignore)]
    extra: Option<Box<Extra>>,
}

/// What of a problem goes into headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Extra {
    /// Seconds after which a retry makes sense.
    retry_after_s: Option<u64>,
    /// The methods that would be taken.
    allow: Option<&'static str>,
    /// What to authenticate with.
    challenge: Option<&'static str>,
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $slug:literal, $status:ident, $title:literal;)+) => {
        /// The kinds of problem.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind { $($(#[$doc])* $kind,)+ }

        impl Kind {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$kind,)+];

            /// Type, status and title.
            pub(super) fn facts(self) -> (&'static str, StatusCode, &'static str) {
                match self {
                    $(Self::$kind => (concat!("/problems/", $slug), StatusCode::$status, $title),)+
                }
            }
        }
    };
}

kinds! {
    /// No such route.
    NoRoute = "no-such-route", NOT_FOUND, "No such route";
    /// The route has other methods.
    Method = "method-not-allowed", METHOD_NOT_ALLOWED, "Method not allowed";
    /// A part of the path is malformed.
    Path = "malformed-path", BAD_REQUEST, "Malformed path";
    /// The query is malformed or has an unknown key.
    Query = "malformed-query", BAD_REQUEST, "Malformed query";
    /// A header is malformed.
    Header = "malformed-header", BAD_REQUEST, "Malformed header";
    /// The body ended early or was sent wrongly.
    Body = "malformed-body", BAD_REQUEST, "Malformed body";
    /// The body is not JSON.
    Json = "malformed-json", BAD_REQUEST, "Malformed JSON";
    /// The body is JSON but not what is expected.
    Invalid = "invalid", UNPROCESSABLE_ENTITY, "Invalid value";
    /// The body is of another media type.
    MediaType = "unsupported-media-type", UNSUPPORTED_MEDIA_TYPE, "Unsupported media type";
    /// The body is too large.
    TooLarge = "too-large", PAYLOAD_TOO_LARGE, "Too large";
    /// The body came too slowly.
    Slow = "too-slow", REQUEST_TIMEOUT, "Body came too slowly";
    /// No token, or a wrong one.
    Unauthorized = "unauthorized", UNAUTHORIZED, "A valid token is needed";
    /// Known, and not allowed to do this.
    Forbidden = "forbidden", FORBIDDEN, "Not allowed";
    /// Asked too often.
    TooMany = "too-many-requests", TOO_MANY_REQUESTS, "Asked too often";
    /// The API server does not say who it is.
    NoReview = "review-failed", SERVICE_UNAVAILABLE, "The API server does not say who this is";
    /// The Host header names another machine.
    Host = "wrong-host", MISDIRECTED_REQUEST, "Wrong host";
    /// No such GPU.
    UnknownGpu = "unknown-gpu", NOT_FOUND, "No such GPU";
    /// No such allocation.
    UnknownAllocation = "unknown-allocation", NOT_FOUND, "No such allocation";
    /// No such policy.
    UnknownPolicy = "unknown-policy", NOT_FOUND, "No such policy";
    /// No such decision.
    UnknownDecision = "unknown-decision", NOT_FOUND, "No such decision";
    /// No such shadow.
    UnknownShadow = "unknown-shadow", NOT_FOUND, "No such shadow";
    /// No such device.
    UnknownDevice = "unknown-device", NOT_FOUND, "No such device";
    /// Another allocation holds it.
    Held = "held", CONFLICT, "Held by an allocation";
    /// A source shows that its pod runs.
    Running = "still-running", CONFLICT, "Its pod still runs";
    /// It has ended before.
    Ended = "already-ended", CONFLICT, "Already ended";
    /// Its state does not allow this.
    State = "wrong-state", CONFLICT, "Not in this state";
    /// Something needs an API server.
    NoApiServer = "no-api-server", CONFLICT, "No API server is configured";
    /// Something needs a journal of decisions.
    NoJournal = "no-journal", CONFLICT, "No journal is kept";
    /// Policies deny or fail.
    Denied = "denied", CONFLICT, "Denied by a policy";
    /// Somebody else changed it first.
    Changed = "changed-meanwhile", PRECONDITION_FAILED, "Changed meanwhile";
    /// In use.
    InUse = "in-use", CONFLICT, "In use";
    /// As many as there may be.
    Limit = "limit-reached", CONFLICT, "Limit reached";
    /// The upload is no policy.
    NotAPolicy = "not-a-policy", UNPROCESSABLE_ENTITY, "Not a policy";
    /// Compiling costs too much.
    TooCostly = "too-costly", UNPROCESSABLE_ENTITY, "Too costly to compile";
    /// A policy of the stack fails on this node.
    StackFails = "stack-fails", UNPROCESSABLE_ENTITY, "The stack fails on this node";
    /// No trusted key signed it.
    Untrusted = "untrusted", FORBIDDEN, "Not signed by a trusted key";
    /// No such activation.
    UnknownRevision = "unknown-revision", NOT_FOUND, "No such revision";
    /// No such entry of the stack.
    UnknownEntry = "unknown-entry", NOT_FOUND, "No such entry";
    /// Its files are gone.
    Lost = "lost", GONE, "Files are gone";
    /// Too much is waiting.
    Busy = "busy", SERVICE_UNAVAILABLE, "Busy";
    /// The daemon stops.
    Stopping = "stopping", SERVICE_UNAVAILABLE, "Stopping";
    /// The store does not take writes.
    Store = "store-failed", SERVICE_UNAVAILABLE, "The store failed";
    /// Not ready yet.
    NotReady = "not-ready", SERVICE_UNAVAILABLE, "Not ready";
    /// Something that has to move does not.
    NotAlive = "not-alive", SERVICE_UNAVAILABLE, "Not alive";
    /// As many event streams as there may be.
    Streams = "too-many-streams", SERVICE_UNAVAILABLE, "Too many event streams";
    /// Too much of answers lies unread.
    Unread = "answers-unread", SERVICE_UNAVAILABLE, "Too many answers are not read";
    /// An `Idempotency-Key` came again with another body.
    KeyReused = "key-reused", UNPROCESSABLE_ENTITY, "Idempotency key used before";
    /// The request of an `Idempotency-Key` is still at work.
    KeyBusy = "key-in-use", CONFLICT, "Idempotency key in use";
    /// No coding of the answer is acceptable.
    NotAcceptable = "not-acceptable", NOT_ACCEPTABLE, "Not acceptable";
    /// No answer in time.
    Late = "late", GATEWAY_TIMEOUT, "No answer in time";
    /// The daemon's own trouble.
    Internal = "internal", INTERNAL_SERVER_ERROR, "Internal error";
}

impl Problem {
    /// The kind behind a type such as `/problems/unknown-gpu`.
    #[must_use]
    pub fn kind_of(slug: &str) -> Option<Kind> {
        Kind::ALL.iter().copied().find(|kind| kind.facts().0 == slug)
    }

    /// A problem of this kind; `detail` says what happened here.
    #[must_use]
    pub fn new(kind: Kind, detail: impl fmt::Display) -> Self {
        let (slug, status, title) = kind.facts();
        let mut detail = detail.to_string();
        if detail.len() > DETAIL_BYTES_MAX {
            detail.truncate(detail.floor_char_boundary(DETAIL_BYTES_MAX));
            detail.push_str("...");
        }
        Self {
            kind: slug.into(),
            title: title.into(),
            status: status.as_u16(),
            detail,
            hint: None,
            checks: Vec::new(),
            extra: None,
        }
    }

    /// With what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    /// With the seconds after which a retry makes sense.
    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Self {
        self.extra.get_or_insert_default().retry_after_s = Some(seconds);
        self
    }

    /// With the methods that would be taken.
    #[must_use]
    pub fn allow(mut self, methods: &'static str) -> Self {
        self.extra.get_or_insert_default().allow = Some(methods);
        self
    }

    /// With what to authenticate with.
    #[must_use]
    pub fn challenge(mut self, challenge: &'static str) -> Self {
        self.extra.get_or_insert_default().challenge = Some(challenge);
        self
    }

    /// For a status that some layer below chose without words.
    #[must_use]
    pub fn of_status(status: StatusCode, detail: impl fmt::Display) -> Self {
        let kind = Kind::ALL.iter().find(|k| k.facts().1 == status);
        let mut problem = Self::new(kind.copied().unwrap_or(Kind::Internal), detail);
        problem.status = status.as_u16();
        problem
    }

    /// As a response.
    #[must_use]
    pub fn response(&self) -> HttpResponse {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = HttpResponse::build(status);
        response.content_type(PROBLEM_JSON);
        let extra = self.extra.as_deref().cloned().unwrap_or_default();
        if let Some(seconds) = extra.retry_after_s {
            response.insert_header((header::RETRY_AFTER, seconds.to_string()));
        }
        if let Some(allow) = extra.allow {
            response.insert_header((header::ALLOW, allow));
        }
        if let Some(challenge) = extra.challenge {
            response.insert_header((header::WWW_AUTHENTICATE, challenge));
        }
        // A struct of strings and numbers always becomes JSON.
        response.body(serde_json::to_vec(self).unwrap_or_default())
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.title, self.detail)
    }
}

impl std::error::Error for Problem {}

impl ResponseError for Problem {
    fn status_code(&self) -> StatusCode {
        StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn error_response(&self) -> HttpResponse {
        self.response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn kinds_have_types_of_their_own_and_statuses_of_errors() {
        let slugs: BTreeSet<_> = Kind::ALL.iter().map(|k| k.facts().0).collect();
        assert_eq!(slugs.len(), Kind::ALL.len());
        for kind in Kind::ALL {
            assert!(kind.facts().1.as_u16() >= 400, "{kind:?}");
        }
    }
}
