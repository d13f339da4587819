//! Front end 2: what operators see and change, as JSON over HTTP under `/api/v1`.
//!
//! Parses, asks the door, and shows snapshots. The routes are listed in `routes` and described in
//! `/openapi.json`; wire types end in [`berth_api`]. What is absent here: any rule about GPUs, and any
//! state but the count of requests under way.

mod allocation_cache;
mod event_feed;
mod failure;
mod node_facts;
mod openapi;
mod resources;
mod routes;
mod state;
mod survey;
mod upload_permits;

pub use node_facts::{Facts, FileStack, NodeFacts, Registration, Step};
pub use openapi::openapi_json;
pub use resources::stack_entries::{NoVersion, resolve_version};

use actix_web::web::{Data, ServiceConfig};
use berth_core::admission::KernelHandle;
use berth_http::{AdminError, Application, Running};
use state::State;
use std::future::Future;
use std::sync::Arc;

/// A server that listens but does not answer yet: connections wait in the system's queue.
pub struct Server(berth_http::Server);

impl Server {
    /// Listens, and reads the token or makes one. A taken port fails here, before anything else
    /// has begun.
    ///
    /// # Errors
    /// If an address or the token file cannot be used; says what to do.
    pub fn bind(settings: berth_http::Settings) -> Result<Self, AdminError> {
        berth_http::Server::bind(settings).map(Self)
    }

    /// Answers, on threads of its own.
    ///
    /// # Errors
    /// If the system gives no thread or socket; whatever was started ends again.
    pub fn run(self, kernel: KernelHandle, facts: Facts) -> Result<Running, AdminError> {
        let figures = Arc::clone(kernel.counters());
        self.0.run(figures, move |http| Api(Data::new(State::new(facts, http, kernel))))
    }
}

/// The routes of the API.
#[derive(Clone)]
struct Api(Data<State>);

impl Application for Api {
    fn admin(&self, config: &mut ServiceConfig) {
        config.app_data(self.0.clone());
        routes::admin(config);
    }

    fn health(&self, config: &mut ServiceConfig) {
        config.app_data(self.0.clone());
        routes::health(config);
    }

    /// Starts before the first request is answered, so that each change by a client is an event.
    fn background(&self) -> impl Future<Output = ()> + 'static {
        resources::events::run(self.0.clone())
    }

    fn stop(&self) {
        self.0.feed.close("the daemon stops");
    }
}
