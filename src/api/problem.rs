//! The errors of the API, as `application/problem+json` (RFC 9457), and what a client can do about them: an operation of
//! this API. The list of kinds is closed.

use crate::node::Check;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use utoipa::ToSchema;

/// Longest detail of a problem, bytes: a policy's message of 3 KiB within one of the daemon. It may quote the
/// request, which is limited by the size of the request head only.
const DETAIL_BYTES_MAX: usize = 4 * 1024;
/// An error of this API (RFC 9457).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// The kind of problem, for programs. It does not change between releases.
    #[serde(rename = "type")]
    #[schema(value_type = String, example = "/problems/unknown-gpu")]
    pub kind: Box<str>,
    /// The kind of problem, as a text.
    #[schema(value_type = String, example = "No such GPU")]
    pub title: Box<str>,
    /// The HTTP status.
    #[schema(example = 404)]
    pub status: u16,
    /// What happened in this request.
    #[schema(example = "no GPU GPU-1 on this node")]
    pub detail: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "list the GPUs with their UUIDs")]
    pub hint: Option<String>,
    /// The operation of this API that helps, if one does.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "known_action")]
    pub action: Option<Action>,
    /// The checks of readiness or liveness; only in responses of `/readyz` and `/livez`.
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
            /// All kinds.
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
    /// The route does not support the method.
    Method = "method-not-allowed", 405, "Method not allowed";
    /// A part of the path is malformed.
    Path = "malformed-path", 400, "Malformed path";
    /// The query is malformed or has an unknown key.
    Query = "malformed-query", 400, "Malformed query";
    /// A header is malformed.
    Header = "malformed-header", 400, "Malformed header";
    /// The body ended early or was sent incorrectly.
    Body = "malformed-body", 400, "Malformed body";
    /// The body is not JSON.
    Json = "malformed-json", 400, "Malformed JSON";
    /// The body is JSON with an invalid value.
    Invalid = "invalid", 422, "Invalid value";
    /// The media type of the body is not supported.
    MediaType = "unsupported-media-type", 415, "Unsupported media type";
    /// The body is too large.
    TooLarge = "too-large", 413, "Too large";
    /// The body was sent too slowly.
    Slow = "too-slow", 408, "Body not received in time";
    /// No token, or an invalid one.
    Unauthorized = "unauthorized", 401, "A valid token is needed";
    /// The caller is authenticated, but not authorized to do this.
    Forbidden = "forbidden", 403, "Not allowed";
    /// Too many requests of the caller.
    TooMany = "too-many-requests", 429, "Too many requests";
    /// The API server could not review the caller's token or access.
    NoReview = "review-failed", 503, "The API server could not review the caller";
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
    /// Another allocation holds the device.
    Held = "held", 409, "Held by an allocation";
    /// A source shows that the allocation's pod is running.
    Running = "still-running", 409, "Its pod still runs";
    /// The allocation has already ended.
    Ended = "already-ended", 409, "Already ended";
    /// The object's state does not permit the change.
    State = "wrong-state", 409, "Not in this state";
    /// The request requires an API server.
    NoApiServer = "no-api-server", 409, "No API server is configured";
    /// The request requires a journal of decisions.
    NoJournal = "no-journal", 409, "No journal is kept";
    /// A policy denied the request or failed.
    Denied = "denied", 409, "Denied by a policy";
    /// Another client changed it first.
    Changed = "changed-meanwhile", 412, "Changed meanwhile";
    /// The object is in use.
    InUse = "in-use", 409, "In use";
    /// The maximum number of objects exists already.
    Limit = "limit-reached", 409, "Limit reached";
    /// The upload is not a policy.
    NotAPolicy = "not-a-policy", 422, "Not a policy";
    /// Compilation exceeds its limits.
    TooCostly = "too-costly", 422, "Too costly to compile";
    /// A policy of the stack fails on this node.
    StackFails = "stack-fails", 422, "The stack fails on this node";
    /// The policy is not signed by a trusted key.
    Untrusted = "untrusted", 403, "Not signed by a trusted key";
    /// No such activation.
    UnknownRevision = "unknown-revision", 404, "No such revision";
    /// No such entry of the stack.
    UnknownEntry = "unknown-entry", 404, "No such entry";
    /// The policy's files are missing.
    Lost = "lost", 410, "Files are missing";
    /// Too many requests are waiting.
    Busy = "busy", 503, "Busy";
    /// The daemon is stopping.
    Stopping = "stopping", 503, "Stopping";
    /// The store cannot be written.
    Store = "store-failed", 503, "The store failed";
    /// The daemon is not ready yet.
    NotReady = "not-ready", 503, "Not ready";
    /// A thread or task of the daemon makes no progress.
    NotAlive = "not-alive", 503, "Not alive";
    /// The maximum number of event streams is open.
    Streams = "too-many-streams", 503, "Too many event streams";
    /// Clients have not read too many bytes of responses.
    Unread = "answers-unread", 503, "Too many unread responses";
    /// No available content coding of the response is acceptable.
    NotAcceptable = "not-acceptable", 406, "Not acceptable";
    /// The daemon did not answer in time.
    Late = "late", 504, "No answer in time";
    /// An internal error of the daemon.
    Internal = "internal", 500, "Internal error";
}

impl Problem {
    /// The kind of a `type` such as `/problems/unknown-gpu`.
    #[must_use]
    pub fn kind_of(slug: &str) -> Option<Kind> {
        Kind::ALL.iter().copied().find(|kind| kind.facts().0 == slug)
    }

    /// A problem of this kind. A `detail` that is too long is truncated.
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

    /// A problem for an HTTP status that the HTTP server chose.
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

/// An operation of this API that helps with a problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Action {
    /// The operation.
    pub operation: Operation,
    /// Its parameters of path and query, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(example = json!({"id": "5eed0001-17"}))]
    pub parameters: BTreeMap<String, String>,
    /// Its method and path, with the parameters filled in.
    #[schema(example = "DELETE /api/v1/allocations/5eed0001-17")]
    pub request: String,
}

/// The operations that problems name, by their ids in the API's description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum Operation {
    /// Lists the GPUs.
    ListGpus,
    /// Shows a GPU with its marks: `uuid`.
    GetGpu,
    /// Lists the allocations.
    ListAllocations,
    /// Ends an allocation: `id`, and `force` to end it although its pod runs.
    EndAllocation,
    /// Lists the policies.
    ListPolicies,
    /// Uploads a policy.
    UploadPolicy,
    /// Shows the active stack.
    GetStack,
    /// Activates a stack.
    ActivateStack,
    /// Lists the earlier stacks.
    ListActivations,
    /// Lists the shadows.
    ListShadows,
    /// Ends a shadow: `id`.
    EndShadow,
}

impl Operation {
    /// All kinds.
    pub const ALL: &[Self] = &[
        Self::ListGpus,
        Self::GetGpu,
        Self::ListAllocations,
        Self::EndAllocation,
        Self::ListPolicies,
        Self::UploadPolicy,
        Self::GetStack,
        Self::ActivateStack,
        Self::ListActivations,
        Self::ListShadows,
        Self::EndShadow,
    ];

    /// Its method and path in the API's description.
    #[must_use]
    pub fn route(self) -> (&'static str, &'static str) {
        match self {
            Self::ListGpus => ("GET", "/api/v1/gpus"),
            Self::GetGpu => ("GET", "/api/v1/gpus/{uuid}"),
            Self::ListAllocations => ("GET", "/api/v1/allocations"),
            Self::EndAllocation => ("DELETE", "/api/v1/allocations/{id}"),
            Self::ListPolicies => ("GET", "/api/v1/policies"),
            Self::UploadPolicy => ("POST", "/api/v1/policies"),
            Self::GetStack => ("GET", "/api/v1/stack"),
            Self::ActivateStack => ("PUT", "/api/v1/stack"),
            Self::ListActivations => ("GET", "/api/v1/stack/history"),
            Self::ListShadows => ("GET", "/api/v1/shadows"),
            Self::EndShadow => ("DELETE", "/api/v1/shadows/{id}"),
        }
    }
}

impl From<Operation> for Action {
    fn from(operation: Operation) -> Self {
        Self::new(operation, &[])
    }
}

impl Action {
    /// This operation with these parameters. A parameter that the path does not name is one of the query.
    #[must_use]
    pub fn new(operation: Operation, parameters: &[(&str, &str)]) -> Self {
        let (method, path) = operation.route();
        let (mut path, mut separator) = (path.to_owned(), '?');
        for (name, value) in parameters {
            let placeholder = format!("{{{name}}}");
            if path.contains(&placeholder) {
                path = path.replace(&placeholder, value);
            } else {
                path += &format!("{separator}{name}={value}");
                separator = '&';
            }
        }
        let parameters = parameters.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Self { operation, parameters: parameters.collect(), request: format!("{method} {path}") }
    }

    /// The value of a parameter.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.get(name).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Operation;
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

    #[test]
    fn a_request_has_its_parameters_in_path_and_query() {
        assert_eq!(Action::from(Operation::ListGpus).request, "GET /api/v1/gpus");
        let forced = Action::new(Operation::EndAllocation, &[("id", "7-1"), ("force", "true")]);
        assert_eq!(forced.request, "DELETE /api/v1/allocations/7-1?force=true");
        let text = serde_json::to_string(&Action::new(Operation::EndShadow, &[("id", "3")])).unwrap();
        let expected =
            r#"{"operation":"endShadow","parameters":{"id":"3"},"request":"DELETE /api/v1/shadows/3"}"#;
        assert_eq!(text, expected);
    }
}
