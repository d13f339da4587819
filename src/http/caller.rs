//! The caller of a request, which handlers take as an argument. The authentication middleware adds it to the request,
//! so no handler can omit it.
//!
//! Each request that would change something has an audit line, at target `audit`, whatever its outcome, with what the
//! handler reads of the request. It never contains a token, a certificate, a query or a body. Requests that exceed a
//! rate have no line: they changed nothing, and a flood of them would be a flood of lines. [`crate::rate_limit`] logs
//! their number once a minute.

use crate::failure::Failure;
use crate::peer::Peer;
use crate::rate_limit::Client;
use crate::reviewer::ClusterUser;
use crate::route;
use crate::settings::Right;
use actix_web::dev::{Payload, ServiceRequest};
use actix_web::http::StatusCode;
use actix_web::{FromRequest, HttpMessage, HttpRequest};
use berth_api::Kind;
use std::cell::{Cell, RefCell};
use std::future::{Ready, ready};
use std::rc::Rc;
use std::sync::Arc;

/// Longest name of a caller, or of a person for whom it acts, in a record, bytes.
const BY_BYTES_MAX: usize = 128;
/// Longest reason of a change, bytes: lists show that of a cordon, and a record has at most 16 KiB.
const REASON_BYTES_MAX: usize = 1024;

/// An authenticated client.
#[derive(Debug)]
pub(crate) struct Identity {
    /// The name of its token, its certificate or its user.
    pub(crate) name: Arc<str>,
    /// Its right; `None` for a user of the cluster, each of whose requests is reviewed.
    pub(crate) right: Option<Right>,
    /// How it is authenticated: `token`, `certificate`, `socket` or `kubernetes`.
    pub(crate) by: &'static str,
    /// The user of the cluster, if it is one.
    pub(crate) user: Option<Arc<ClusterUser>>,
}

/// The caller of a request, with the statements of the request for the audit line.
#[derive(Clone, Debug)]
pub struct Caller(Rc<Statements>);

#[derive(Debug)]
struct Statements {
    identity: Identity,
    /// The person for whom the change is made, if stated.
    by: RefCell<Option<String>>,
    /// The reason, if stated.
    reason: RefCell<Option<String>>,
    /// Whether the request overrides a refusal.
    forced: Cell<bool>,
}

impl FromRequest for Caller {
    type Error = Failure;
    type Future = Ready<Result<Self, Failure>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let caller = request.extensions().get::<Self>().cloned();
        ready(caller.ok_or_else(|| Failure::new(Kind::Internal, "the request was not authenticated")))
    }
}

impl Identity {
    /// A client with a right of the configuration, or root.
    pub(crate) fn with_right(by: &'static str, name: impl Into<Arc<str>>, right: Right) -> Self {
        Self { name: name.into(), right: Some(right), by, user: None }
    }

    /// The client whose limits count its requests.
    pub(crate) fn client(&self) -> Client {
        Client::Named(self.by, Arc::clone(&self.name))
    }
}

impl Caller {
    pub(crate) fn new(identity: Identity) -> Self {
        let (by, reason, forced) = (RefCell::default(), RefCell::default(), Cell::new(false));
        Self(Rc::new(Statements { identity, by, reason, forced }))
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.0.identity
    }

    /// Its name, the author of its changes. A name that a CA or a cluster assigns has its source as a prefix, so that
    /// it cannot be that of one of the daemon's own tokens, or root's.
    #[must_use]
    pub fn name(&self) -> String {
        let Identity { by, name, .. } = self.identity();
        let name = match *by {
            "certificate" | "kubernetes" => format!("{by}:{name}"),
            _ => name.to_string(),
        };
        if name.len() <= BY_BYTES_MAX {
            return name;
        }
        // Marks that the name was cut.
        let more = "...";
        format!("{}{more}", &name[..name.floor_char_boundary(BY_BYTES_MAX - more.len())])
    }

    /// How it is authenticated, and its name. A token and a certificate may have the same name.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{} {}", self.identity().by, self.identity().name)
    }

    /// Its right; `None` for a user of the cluster, each of whose requests the API server reviews.
    #[must_use]
    pub fn right(&self) -> Option<Right> {
        self.identity().right
    }

    /// Checks the reason of a change, and notes it for the audit line.
    ///
    /// # Errors
    /// If it is too long, or contains control characters.
    pub fn check_reason(&self, reason: &str) -> Result<(), Failure> {
        if reason.len() > REASON_BYTES_MAX || reason.chars().any(char::is_control) {
            let rule = format!("reason: at most {REASON_BYTES_MAX} bytes, no control characters");
            return Err(Failure::new(Kind::Invalid, rule));
        }
        *self.0.reason.borrow_mut() = (!reason.is_empty()).then(|| reason.to_owned());
        Ok(())
    }

    /// The author of a change with this reason: the caller, and the person for whom it acts, if the request names one
    /// (`by`). So a record has at most twice `BY_BYTES_MAX` bytes of it and eight more, and no caller can sign with
    /// another's name alone. Both are noted for the audit line.
    ///
    /// # Errors
    /// If the name or the reason is too long, or contains control characters.
    pub fn author(&self, by: Option<String>, reason: &str) -> Result<String, Failure> {
        self.check_reason(reason)?;
        let name = self.name();
        let Some(by) = by else { return Ok(name) };
        if by.trim().is_empty() || by.len() > BY_BYTES_MAX || by.chars().any(char::is_control) {
            let rule = format!("by: 1 to {BY_BYTES_MAX} bytes, no control characters");
            return Err(Failure::new(Kind::Invalid, rule));
        }
        *self.0.by.borrow_mut() = Some(by.clone());
        Ok(if by == name { name } else { format!("{name} (for {by})") })
    }

    /// Marks the audit line as that of a change that overrides a refusal.
    pub fn mark_forced(&self) {
        self.0.forced.set(true);
    }
}

/// Longest logged path, bytes: that of a policy version's module has 90.
const PATH_BYTES_MAX: usize = 200;
/// Longest logged method, bytes: a client may send any token as its method.
const METHOD_BYTES_MAX: usize = 16;

fn cut(text: &str, most: usize) -> String {
    text[..text.floor_char_boundary(most)].to_owned()
}

/// An audit line. It is written when it is dropped, so a request whose client disconnected, or whose handler
/// panicked, has one too: its change may have been made.
pub(crate) struct AuditLine {
    method: String,
    path: String,
    from: String,
    /// The authenticated caller.
    pub(crate) caller: Option<Caller>,
    /// The status of the response.
    pub(crate) status: Option<StatusCode>,
}

impl AuditLine {
    pub(crate) fn of(request: &ServiceRequest) -> Self {
        Self {
            method: cut(request.method().as_str(), METHOD_BYTES_MAX),
            // The path as it is routed, so that no escape hides it.
            path: cut(route::path(request.request()), PATH_BYTES_MAX),
            from: request.conn_data::<Peer>().map_or_else(|| "unknown".into(), ToString::to_string),
            caller: None,
            status: None,
        }
    }
}

impl Drop for AuditLine {
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
        let stated = self.caller.as_ref().map(|caller| &*caller.0);
        let (who, right, known_by) = match stated.map(|stated| &stated.identity) {
            Some(caller) => (&*caller.name, caller.right.map_or("reviewed", Right::as_str), caller.by),
            None => ("nobody", "none", "nothing"),
        };
        tracing::info!(
            target: "audit",
            who, right, known_by,
            method = self.method,
            path = self.path,
            from = self.from,
            status = self.status.map(|s| s.as_u16()),
            outcome,
            by = stated.and_then(|stated| stated.by.borrow().clone()),
            reason = stated.and_then(|stated| stated.reason.borrow().clone()),
            force = stated.filter(|stated| stated.forced.get()).map(|_| true),
            "change"
        );
    }
}
