//! Every error of the API, as `application/problem+json` (RFC 9457). The kinds are a closed list.

use crate::action::Action;
use crate::node::Check;
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// Longest words of a problem, bytes: a policy's own of 3 KiB with ours around them. What a client sent may be
/// among them, and that has no limit but the head's.
const DETAIL_BYTES_MAX: usize = 4 * 1024;
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
    #[schema(example = "list the GPUs with their UUIDs")]
    pub hint: Option<String>,
    /// The operation of this API that helps, if one does.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "known_action")]
    pub action: Option<Action>,
    /// What readiness or life was held against; only `/readyz` and `/livez` have it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checks: Vec<Check>,
}

/// The action of a problem; none if it is an operation of a later release, so that the problem can still be read.
fn known_action<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Action>, D::Error> {
    Ok(serde_json::from_value(Deserialize::deserialize(deserializer)?).ok())
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $slug:literal, $status:literal, $title:literal;)+) => {
        /// The kinds of problem.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind { $($(#[$doc])* $kind,)+ }

        impl Kind {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$kind,)+];

            /// Type, HTTP status and title.
            #[must_use]
            pub fn facts(self) -> (&'static str, u16, &'static str) {
                match self {
                    $(Self::$kind => (concat!("/problems/", $slug), $status, $title),)+
                }
            }
        }
    };
}

kinds! {
    /// No such route.
    NoRoute = "no-such-route", 404, "No such route";
    /// The route has other methods.
    Method = "method-not-allowed", 405, "Method not allowed";
    /// A part of the path is malformed.
    Path = "malformed-path", 400, "Malformed path";
    /// The query is malformed or has an unknown key.
    Query = "malformed-query", 400, "Malformed query";
    /// A header is malformed.
    Header = "malformed-header", 400, "Malformed header";
    /// The body ended early or was sent wrongly.
    Body = "malformed-body", 400, "Malformed body";
    /// The body is not JSON.
    Json = "malformed-json", 400, "Malformed JSON";
    /// The body is JSON but not what is expected.
    Invalid = "invalid", 422, "Invalid value";
    /// The body is of another media type.
    MediaType = "unsupported-media-type", 415, "Unsupported media type";
    /// The body is too large.
    TooLarge = "too-large", 413, "Too large";
    /// The body came too slowly.
    Slow = "too-slow", 408, "Body came too slowly";
    /// No token, or a wrong one.
    Unauthorized = "unauthorized", 401, "A valid token is needed";
    /// Known, and not allowed to do this.
    Forbidden = "forbidden", 403, "Not allowed";
    /// Asked too often.
    TooMany = "too-many-requests", 429, "Asked too often";
    /// The API server does not say who it is.
    NoReview = "review-failed", 503, "The API server does not say who this is";
    /// The Host header names another machine.
    Host = "wrong-host", 421, "Wrong host";
    /// No such GPU.
    UnknownGpu = "unknown-gpu", 404, "No such GPU";
    /// No such allocation.
    UnknownAllocation = "unknown-allocation", 404, "No such allocation";
    /// No such policy.
    UnknownPolicy = "unknown-policy", 404, "No such policy";
    /// No such decision.
    UnknownDecision = "unknown-decision", 404, "No such decision";
    /// No such shadow.
    UnknownShadow = "unknown-shadow", 404, "No such shadow";
    /// No such device.
    UnknownDevice = "unknown-device", 404, "No such device";
    /// Another allocation holds it.
    Held = "held", 409, "Held by an allocation";
    /// A source shows that its pod runs.
    Running = "still-running", 409, "Its pod still runs";
    /// It has ended before.
    Ended = "already-ended", 409, "Already ended";
    /// Its state does not allow this.
    State = "wrong-state", 409, "Not in this state";
    /// Something needs an API server.
    NoApiServer = "no-api-server", 409, "No API server is configured";
    /// Something needs a journal of decisions.
    NoJournal = "no-journal", 409, "No journal is kept";
    /// Policies deny or fail.
    Denied = "denied", 409, "Denied by a policy";
    /// Another client changed it first.
    Changed = "changed-meanwhile", 412, "Changed meanwhile";
    /// In use.
    InUse = "in-use", 409, "In use";
    /// As many as there may be.
    Limit = "limit-reached", 409, "Limit reached";
    /// The upload is no policy.
    NotAPolicy = "not-a-policy", 422, "Not a policy";
    /// Compiling costs too much.
    TooCostly = "too-costly", 422, "Too costly to compile";
    /// A policy of the stack fails on this node.
    StackFails = "stack-fails", 422, "The stack fails on this node";
    /// No trusted key signed it.
    Untrusted = "untrusted", 403, "Not signed by a trusted key";
    /// No such activation.
    UnknownRevision = "unknown-revision", 404, "No such revision";
    /// No such entry of the stack.
    UnknownEntry = "unknown-entry", 404, "No such entry";
    /// Its files are gone.
    Lost = "lost", 410, "Files are gone";
    /// Too much is waiting.
    Busy = "busy", 503, "Busy";
    /// The daemon stops.
    Stopping = "stopping", 503, "Stopping";
    /// The store does not take writes.
    Store = "store-failed", 503, "The store failed";
    /// Not ready yet.
    NotReady = "not-ready", 503, "Not ready";
    /// Something that has to move does not.
    NotAlive = "not-alive", 503, "Not alive";
    /// As many event streams as there may be.
    Streams = "too-many-streams", 503, "Too many event streams";
    /// Too much of answers lies unread.
    Unread = "answers-unread", 503, "Too many answers are not read";
    /// No coding of the answer is acceptable.
    NotAcceptable = "not-acceptable", 406, "Not acceptable";
    /// No answer in time.
    Late = "late", 504, "No answer in time";
    /// The daemon's own trouble.
    Internal = "internal", 500, "Internal error";
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
            status,
            detail,
            hint: None,
            action: None,
            checks: Vec::new(),
        }
    }

    /// A problem for an HTTP status that the HTTP server chose itself.
    #[must_use]
    pub fn of_status(status: u16, detail: impl fmt::Display) -> Self {
        let kind = Kind::ALL.iter().find(|kind| kind.facts().1 == status);
        Self { status, ..Self::new(kind.copied().unwrap_or(Kind::Internal), detail) }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.title, self.detail)
    }
}

impl std::error::Error for Problem {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::Operation;
    use std::collections::BTreeSet;

    #[test]
    fn a_problem_with_an_action_of_a_later_release_can_be_read() {
        let mut problem = Problem::new(Kind::Busy, "wait");
        problem.action = Some(Operation::ListGpus.into());
        let text = serde_json::to_string(&problem).unwrap();
        assert_eq!(serde_json::from_str::<Problem>(&text).unwrap(), problem);
        let later: Problem = serde_json::from_str(&text.replace("listGpus", "resetGpu")).unwrap();
        assert_eq!(later, Problem { action: None, ..problem });
    }

    #[test]
    fn kinds_have_types_of_their_own_and_statuses_of_errors() {
        let slugs: BTreeSet<_> = Kind::ALL.iter().map(|k| k.facts().0).collect();
        assert_eq!(slugs.len(), Kind::ALL.len());
        for kind in Kind::ALL {
            assert!((400..600).contains(&kind.facts().1), "{kind:?}");
        }
    }
}
