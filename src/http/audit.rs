//! The audit line of each request that would change something, at target `audit`, whatever its outcome. It never
//! contains a token, a certificate, a query or a body.
//!
//! Requests that exceed a rate have no line: they changed nothing, and a flood of them would be a flood of lines.
//! [`super::rate_limit`] logs their number once a minute.

use super::caller::Caller;
use super::peer::Peer;
use super::route;
use crate::settings::Right;
use actix_web::dev::ServiceRequest;
use actix_web::http::StatusCode;

/// Longest logged path, bytes: that of a policy version's module has 90.
const PATH_BYTES_MAX: usize = 200;
/// Longest logged method, bytes: a client may send any token as its method.
const METHOD_BYTES_MAX: usize = 16;

fn cut(text: &str, most: usize) -> String {
    text[..text.floor_char_boundary(most)].to_owned()
}

/// An audit line. It is written when it is dropped, so a request whose client disconnected, or whose handler
/// panicked, has one too: its change may have been made.
pub(super) struct Line {
    method: String,
    path: String,
    from: String,
    caller: Option<Caller>,
    status: Option<StatusCode>,
}

impl Line {
    pub(super) fn of(request: &ServiceRequest) -> Self {
        Self {
            method: cut(request.method().as_str(), METHOD_BYTES_MAX),
            // The path as it is routed, so that no escape hides it.
            path: cut(route::path(request), PATH_BYTES_MAX),
            from: request.conn_data::<Peer>().map_or_else(|| "unknown".into(), ToString::to_string),
            caller: None,
            status: None,
        }
    }

    /// Sets the authenticated caller.
    pub(super) fn caller(&mut self, caller: &Caller) {
        self.caller = Some(caller.clone());
    }

    /// Sets the status of the response, and writes the line.
    pub(super) fn answered(mut self, status: StatusCode) {
        self.status = Some(status);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.status == Some(StatusCode::TOO_MANY_REQUESTS) {
            return;
        }
        let outcome = match self.status {
            Some(status) if status.is_success() => "done",
            Some(status) if status.is_server_error() => "failed",
            Some(_) => "refused",
            None => "unanswered",
        };
        let (who, right, known_by) = match self.caller.as_ref().map(Caller::identity) {
            Some(caller) => (&*caller.name, caller.right.map_or("reviewed", Right::word), caller.by),
            None => ("nobody", "none", "nothing"),
        };
        let (by, reason, forced) = self.caller.as_ref().map(Caller::statements).unwrap_or_default();
        tracing::info!(
            target: "audit",
            who, right, known_by,
            method = self.method,
            path = self.path,
            from = self.from,
            status = self.status.map(|s| s.as_u16()),
            outcome,
            by, reason,
            force = forced.then_some(true),
            "change"
        );
    }
}
