//! The caller of a request, which handlers take as an argument. The authentication middleware adds it to the request, so
//! no handler can omit it, and the audit line has what the handler reads of the request.

use super::failure::Failure;
use super::rate_limit::Client;
use super::reviews::User;
use crate::settings::Right;
use actix_web::dev::Payload;
use actix_web::{FromRequest, HttpMessage, HttpRequest};
use berth_api::Kind;
use std::cell::{Cell, RefCell};
use std::future::{Ready, ready};
use std::rc::Rc;
use std::sync::Arc;

/// Longest author of a record, bytes.
pub const BY_BYTES_MAX: usize = 128;

/// An authenticated client.
#[derive(Debug)]
pub(super) struct Identity {
    /// The name of its token, its certificate or its user.
    pub(super) name: Arc<str>,
    /// Its right; `None` for a user of the cluster, each of whose requests is reviewed.
    pub(super) right: Option<Right>,
    /// How it is authenticated: `token`, `certificate`, `socket` or `kubernetes`.
    pub(super) by: &'static str,
    /// The user of the cluster, if it is one.
    pub(super) user: Option<Arc<User>>,
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
    /// The client whose limits count its requests.
    pub(super) fn client(&self) -> Client {
        Client::Named(self.by, Arc::clone(&self.name))
    }
}

impl Caller {
    pub(super) fn new(identity: Identity) -> Self {
        let (by, reason, forced) = (RefCell::default(), RefCell::default(), Cell::new(false));
        Self(Rc::new(Statements { identity, by, reason, forced }))
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.0.identity
    }

    /// Its name, the author of its changes. A name that a CA or a cluster assigns has its source as a prefix, so that it
    /// cannot be that of one of the daemon's own tokens, or root's.
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

    /// Notes the reason for the audit line.
    pub fn note_reason(&self, reason: &str) {
        *self.0.reason.borrow_mut() = Some(reason.into()).filter(|r: &String| !r.is_empty());
    }

    /// Notes the person that the request names as its author (`by`).
    pub fn note_person(&self, by: &str) {
        *self.0.by.borrow_mut() = Some(by.into());
    }

    /// Marks the audit line as that of a change that overrides a refusal.
    pub fn mark_forced(&self) {
        self.0.forced.set(true);
    }

    /// The noted person and reason, and whether the request overrides a refusal.
    pub(super) fn statements(&self) -> (Option<String>, Option<String>, bool) {
        (self.0.by.borrow().clone(), self.0.reason.borrow().clone(), self.0.forced.get())
    }
}
