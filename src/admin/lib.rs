//! The admin API: JSON over HTTP under `/api/v1`.
//!
//! Handlers parse requests, submit commands to the kernel's handle, and show snapshots. The routes are listed in
//! `routes` and described in `/openapi.json`; the wire types are those of [`berth_api`]. This crate has no rule about
//! GPUs, and no state except caches and counts.

mod allocation_cache;
mod event_feed;
mod failure;
mod openapi;
mod past_events;
mod resources;
mod routes;
mod row;
mod state;
mod survey;

pub use state::{EvictionDryRun, FactsSource, GpuBackend, NodeFacts, StartStep};

use actix_web::web::{Data, ServiceConfig};
use berth_core::Core;
use berth_core::transition_stream::Batches;
use berth_http::{AdminError, Application, RouteTable, RunningServer};
use state::State;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};

/// The OpenAPI document.
#[must_use]
pub fn openapi_json() -> &'static str {
    static JSON: LazyLock<String> = LazyLock::new(|| openapi::written(&routes::ROWS));
    &JSON
}

/// A server that listens but does not respond yet: connections wait in the system's queue.
pub struct AdminServer {
    http: berth_http::Server,
    eviction_dry_run: Option<EvictionDryRun>,
}

impl AdminServer {
    /// Listens, and reads or creates the token. A port in use fails here, before anything else has started.
    ///
    /// # Errors
    /// If an address or the token file cannot be used; the error names the remedy.
    pub fn bind(settings: berth_http::Settings) -> Result<Self, AdminError> {
        Ok(Self { http: berth_http::Server::bind(settings)?, eviction_dry_run: None })
    }

    /// With an API server that is asked about evictions for the preview of a drain.
    #[must_use]
    pub fn with_eviction_dry_run(self, dry_run: EvictionDryRun) -> Self {
        Self { eviction_dry_run: Some(dry_run), ..self }
    }

    /// The address of the API, with the port that the system chose if 0 was requested.
    ///
    /// # Errors
    /// If the system does not know it.
    pub fn address(&self) -> Result<SocketAddr, AdminError> {
        self.http.address()
    }

    /// Serves requests, on threads of its own; `/events` has the transitions of `batches`.
    ///
    /// # Errors
    /// If the system refuses a thread or socket; everything that was started ends again.
    pub fn run(self, core: Core, facts: FactsSource, batches: Batches) -> Result<RunningServer, AdminError> {
        let counters = Arc::clone(core.kernel.counters());
        self.http.run(counters, move |http| {
            let state = Data::new(State::new(facts, http, core, self.eviction_dry_run));
            // It starts before the first request is answered, so that each change by a client is an event.
            let background = resources::events::run(state.clone(), batches);
            (Api { state }, background)
        })
    }
}

/// The application of the server.
#[derive(Clone)]
struct Api {
    state: Data<State>,
}

impl Application for Api {
    fn routes() -> &'static RouteTable {
        &routes::TABLE
    }

    fn data(&self, config: &mut ServiceConfig) {
        config.app_data(self.state.clone());
    }

    fn stop(&self) {
        self.state.feed.ring.close("the daemon stops");
    }
}
