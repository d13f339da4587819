//! Who asks, for as long as their request is at work. The door sets it around the handler, so that no
//! handler can forget to hand it on, and the audit line knows what the handler was told.

use super::rate_limit::Client;
use super::reviews::User;
use crate::settings::Right;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// Somebody whom the door let in.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    /// Their name: of a token, a certificate, a user of the cluster.
    pub(super) name: Arc<str>,
    /// What they may do; `None` of a user of the cluster, where each request is reviewed.
    pub(super) right: Option<Right>,
    /// How they are known: `token`, `certificate`, `socket` or `kubernetes`.
    pub(super) by: &'static str,
    /// A user of the cluster.
    pub(super) user: Option<Arc<User>>,
}

/// What a request said of itself, for the audit line.
#[derive(Debug)]
pub struct Said {
    caller: Caller,
    /// Who they say it is for, where they do.
    pub(super) by: RefCell<Option<String>>,
    /// Why, where they say so.
    pub(super) reason: RefCell<Option<String>>,
    /// Whether it overrides a refusal.
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

/// Runs a request's handler as this caller's.
pub(super) async fn scope<F: Future>(said: Rc<Said>, work: F) -> F::Output {
    SAID.scope(said, work).await
}

/// Longest name of whoever signs a record, bytes.
pub const BY_BYTES_MAX: usize = 128;
/// Nobody who is known.
const UNKNOWN: &str = "unknown";

impl Caller {
    /// Whom to count what they ask for by.
    pub(super) fn client(&self) -> Client {
        Client::Named(self.by, Arc::clone(&self.name))
    }

    /// What a record is signed with. Names that others give away, a CA or a cluster, have before them how
    /// they are known: none of them is that of one of the daemon's own tokens, or root's.
    fn signature(&self) -> String {
        let name = match self.by {
            "certificate" | "kubernetes" => format!("{}:{}", self.by, self.name),
            _ => self.name.to_string(),
        };
        if name.len() <= BY_BYTES_MAX {
            return name;
        }
        // That it was cut is told.
        let more = "...";
        format!("{}{more}", &name[..name.floor_char_boundary(BY_BYTES_MAX - more.len())])
    }
}

/// The name of whoever asks; what their change is signed with.
pub fn name() -> String {
    SAID.try_with(|said| said.caller.signature()).unwrap_or_else(|_| UNKNOWN.into())
}

/// Tells callers apart: how they are known, and their name. A token and a certificate may share a name.
pub fn identity() -> String {
    SAID.try_with(|said| format!("{} {}", said.caller.by, said.caller.name)).unwrap_or_default()
}

/// Takes down why they do it.
pub fn says_why(reason: &str) {
    let _ = SAID
        .try_with(|said| *said.reason.borrow_mut() = Some(reason.into()).filter(|r: &String| !r.is_empty()));
}

/// Marks the audit line as that of a change which overrides a refusal.
pub fn mark_forced() {
    let _ = SAID.try_with(|said| said.forced.set(true));
}

/// Takes down who they say it is for.
pub fn says_who(by: &str) {
    let _ = SAID.try_with(|said| *said.by.borrow_mut() = Some(by.into()));
}
