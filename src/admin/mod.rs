//! Front end 2: what operators see and change, as JSON over HTTP under `/api/v1`.
//!
//! Parses, asks the door, and shows snapshots. Wire types end in this room's `dto`. The routes are
//! listed in `routes`, and described in `/openapi.json`.

mod facts;
mod server;

pub use facts::{FileStack, NodeFacts, Registration, Step};
pub use server::{AdminError, Running, Server};

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// What the daemon tells of itself when a request asks.
pub type Facts = Arc<dyn Fn() -> NodeFacts + Send + Sync>;

/// What this room needs to start.
#[derive(Clone)]
pub struct Settings {
    /// Where the API listens; loopback.
    pub listen: SocketAddr,
    /// Where only `/livez` and `/readyz` are served, if anywhere.
    pub health_listen: Option<SocketAddr>,
    /// The bearer token's file; made if it is not there.
    pub token_file: PathBuf,
    /// What the ledger does not know.
    pub facts: Facts,
}
