//! The HTTP server of the admin API: listeners, connections, TLS, authentication, and the conventions of all routes.
//! It knows no GPUs: the routes are an [`Application`] of another crate.

pub mod access;
mod audit;
mod auth;
pub mod body;
pub mod caller;
mod certificate;
mod clock_guard;
mod compress;
mod connection;
mod connection_slots;
pub mod context;
mod counting;
mod error;
pub mod etag;
mod failure;
pub mod gate;
mod host;
mod listeners;
mod malformed;
pub mod packed;
pub mod paging;
mod peer;
pub mod probe_details;
pub mod query;
mod rate_limit;
mod request_body;
mod request_span;
pub mod response_budget;
mod reviews;
pub mod route;
mod server_settings;
mod settings;
mod slot;
mod tls;
mod token;
mod unique_keys;
mod unix_socket;

pub use auth::check_token_file;
pub use error::AdminError;
pub use failure::{Failure, PROBLEM_JSON};
pub use listeners::{Application, Running, Server};
pub use reviews::{ReviewError, Reviewer, User};
pub use server_settings::{Settings, check_files};
pub use settings::{
    AdminAccess, KubernetesReviews, NAME_BYTES_MAX, NamedToken, RateLimits, Right, TlsFiles, TokenSource,
};
pub use tls::TLS_POLL_INTERVAL;
pub use token::rotate_token;
