//! The caller of a request while it is handled. The authentication middleware sets it around the handler, so no
//! handler can omit it, and the audit line has what the handler reads of the request.

use super::rate_limit::Client;
use super::reviews::User;
use crate::settings::Right;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// An authenticated caller.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    /// The name of its token, its certificate or its user.
    pub(super) name: Arc<str>,
    /// Its right; `None` for a user of the cluster, each of whose requests is reviewed.
    pub(super) right: Option<Right>,
    /// How it is authenticated: `token`, `certificate`, `socket` or `kubernetes`.
    pub(super) by: &'static str,
    /// The user of the cluster, if it is one.
    pub(super) user: Option<Arc<User>>,
}

/// The statements of a request for the audit line.
#[derive(Debug)]
pub struct Said {
    caller: Caller,
    /// The person for whom the change is made, if stated.
    pub(super) by: RefCell<Option<String>>,
    /// The reason, if stated.
    pub(super) reason: RefCell<Option<String>>,
    /// Whether the request overrides a refusal.
    pub(super) forced: Cell<bool>,
}

tokio::task_local! {
    static SAID: Rc<Said>;
}

impl Said {
    pub(super) fn new(caller: Caller) -> Rc<Self> {
        Rc::new(Self { caller, by: RefCell::default(), reason: RefCell::default(), forced: Cell::new(false) })
    }
}

/// Runs a request's handler with this caller.
pub(super) async fn scope<F: Future>(said: Rc<Said>, work: F) -> F::Output {
    SAID.scope(said, work).await
}

/// Longest author of a record, bytes.
pub const BY_BYTES_MAX: usize = 128;
/// The name outside of an authenticated request.
const UNKNOWN: &str = "unknown";

impl Caller {
    /// The client whose limits count its requests.
    pub(super) fn client(&self) -> Client {
        Client::Named(self.by, Arc::clone(&self.name))
    }

    /// The author of its changes. A name that a CA or a cluster assigns has its source as a prefix, so that it cannot
    /// be that of one of the daemon's own tokens, or root's.
    fn signature(&self) -> String {
        let name = match self.by {
            "certificate" | "kubernetes" => format!("{}:{}", self.by, self.name),
            _ => self.name.to_string(),
        };
        if name.len() <= BY_BYTES_MAX {
            return name;
        }
        // Marks that the name was cut.
        let more = "...";
        format!("{}{more}", &name[..name.floor_char_boundary(BY_BYTES_MAX - more.len())])
    }
}

/// The caller's name, the author of its changes.
pub fn name() -> String {
    SAID.try_with(|said| said.caller.signature()).unwrap_or_else(|_| UNKNOWN.into())
}

/// The caller's identity: how it is authenticated, and its name. A token and a certificate may have the same name.
pub fn identity() -> String {
    SAID.try_with(|said| format!("{} {}", said.caller.by, said.caller.name)).unwrap_or_default()
}

/// Notes the reason for the audit line.
pub fn says_why(reason: &str) {
    let _ = SAID
        .try_with(|said| *said.reason.borrow_mut() = Some(reason.into()).filter(|r: &String| !r.is_empty()));
}

/// Marks the audit line as that of a change that overrides a refusal.
pub fn mark_forced() {
    let _ = SAID.try_with(|said| said.forced.set(true));
}

/// Notes the person for whom the change is made.
pub fn says_who(by: &str) {
    let _ = SAID.try_with(|said| *said.by.borrow_mut() = Some(by.into()));
}
