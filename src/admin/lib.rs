//! Front end 2: what operators see and change, as JSON over HTTP under `/api/v1`.
//!
//! Parses, asks the door, and shows snapshots. The routes are listed in `routes` and described in
//! `/openapi.json`; wire types end in [`berth_api`]. What is absent here: any rule about GPUs, and any
//! state but the count of requests under way.

mod access;
mod allocations;
mod audit;
mod auth;
mod body;
mod budget;
mod call_records;
mod caller;
mod certificate;
mod clock_guard;
mod counting;
mod decisions;
mod drain;
mod draining;
mod entries;
mod events;
mod explain;
mod facts;
pub mod failure;
mod gpus;
mod gzip;
mod host;
mod idempotency;
mod live;
mod malformed;
mod node;
mod openapi;
mod packed;
mod page;
mod paging;
mod peer;
mod places;
mod policies;
mod problem_pages;
mod problem_words;
mod processes;
mod query;
mod rate;
mod refusals;
mod reviews;
mod routes;
mod scrape;
mod seat;
mod seats;
mod server;
mod settings;
mod shape;
mod sight;
mod socket;
mod stack;
mod stack_history;
mod state;
mod survey;
mod swagger;
mod tag;
mod tls;
mod token;
mod traced;
mod trials;
mod tried;
mod unique;
mod unread;
mod view;
mod wire;
mod word;
mod written;

pub use auth::check_token_file;
pub use body::JSON_BYTES_MAX;
pub use entries::{NoVersion, resolve_version};
pub use facts::{FileStack, NodeFacts, Registration, Step};
pub use openapi::openapi_json;
pub use reviews::{ReviewError, Reviewer, User};
pub use server::{AdminError, Running, Server};
pub use settings::{
    AdminAccess, KubernetesReviews, NAME_BYTES_MAX, NamedToken, RateLimits, Right, TlsFiles, TokenSource,
};
pub use tls::TLS_LOOK;
pub use token::rotate_token;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Reads the files that the door reads at a start, tokens' and TLS', and says of them what a start would. It
/// makes none, and the first start's token may be missing.
///
/// Answers with the key and the error of each that cannot be used.
#[must_use]
pub fn check_files(token_file: &Path, access: &AdminAccess) -> Vec<(String, AdminError)> {
    let own = ("tokenFile".to_owned(), token::Tokens::check(token_file, &[]));
    let named = access.tokens.iter().enumerate();
    let named = named.map(|(at, token)| (format!("admin.tokens[{at}].file"), token::check_given(token)));
    let tls = ("admin.tls".to_owned(), access.tls.clone().map(tls::Tls::open).transpose().map(drop));
    let all = std::iter::once(own).chain(named).chain([tls]);
    all.filter_map(|(key, checked)| Some((key, checked.err()?))).collect()
}

/// What the daemon tells of itself when a request asks; it must not wait for anything.
pub type Facts = Arc<dyn Fn() -> NodeFacts + Send + Sync>;

/// What this room needs to start.
#[derive(Clone)]
pub struct Settings {
    /// Where the API listens; loopback, unless there is TLS.
    pub listen: SocketAddr,
    /// Where only `/livez`, `/readyz` and `/metrics` are served, if anywhere.
    pub health_listen: Option<SocketAddr>,
    /// The bearer token's file; made if it is not there.
    pub token_file: PathBuf,
    /// Who else may ask, and by which ways.
    pub access: AdminAccess,
    /// Who asks the API server about callers that the daemon does not know; `None`: they are nobody.
    pub reviewer: Option<Arc<dyn Reviewer>>,
    /// How often the files of TLS are looked at.
    pub tls_look: Duration,
    /// What the ledger does not know.
    pub facts: Facts,
}
