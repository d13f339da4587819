//! The state that all requests of all listeners share, and a stop that lets requests in progress finish.

use super::access::Access;
use super::failure::Failure;
use super::response_budget::Budget;
use actix_web::Error;
use actix_web::dev::ServiceRequest;
use actix_web::web::Data;
use berth_api::Kind;
use berth_core::counters::Counters;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The state that all requests of all listeners share.
pub struct Context {
    /// Authentication and its limits.
    pub access: Access,
    /// The memory of responses that are not read yet.
    pub(super) budget: Budget,
    pub(super) gate: Gate,
    /// Counters of responses.
    pub(super) figures: Arc<Counters>,
}

impl Context {
    pub(super) fn new(access: Access, figures: Arc<Counters>) -> Self {
        Self { access, budget: Budget::default(), gate: Gate::default(), figures }
    }
}

/// Counts requests, so that a stop can let them finish.
#[derive(Default)]
pub(super) struct Gate {
    inside: AtomicUsize,
    closed: AtomicBool,
}

impl Gate {
    /// Admits a request; `None` once closed.
    pub(super) fn enter(&self) -> Option<GateGuard<'_>> {
        // Counted before the check, so that a close either sees the request or is seen by it.
        self.inside.fetch_add(1, Ordering::SeqCst);
        let inside = GateGuard(self);
        (!self.closed.load(Ordering::SeqCst)).then_some(inside)
    }

    /// Admits no request any more.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Whether no request is in progress.
    pub(super) fn is_empty(&self) -> bool {
        self.inside.load(Ordering::SeqCst) == 0
    }
}

/// One request in progress.
pub(super) struct GateGuard<'a>(&'a Gate);

impl Drop for GateGuard<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

pub(super) fn context(request: &ServiceRequest) -> Result<Data<Context>, Error> {
    let context = request.app_data::<Data<Context>>().cloned();
    context.ok_or_else(|| Failure::new(Kind::Internal, "the server has no context").into())
}
