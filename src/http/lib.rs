//! The HTTP server of the admin API: listeners, connections, TLS, authentication, and the conventions of all routes.
//! It has no code about GPUs and names no route: an [`Application`] of another crate brings both.

mod access;
pub mod body;
mod caller;
mod certificate;
mod clock_guard;
mod compress;
mod connection;
mod connection_slots;
pub mod etag;
mod failure;
mod gate;
mod guarded;
mod listeners;
mod on_demand;
mod peer;
pub mod query;
mod rate_limit;
mod request_body;
mod response_budget;
mod reviewer;
mod reviews;
mod route;
mod route_table;
mod settings;
mod tls;
mod token;
mod unix_socket;

pub use access::{AccessControl, check_files};
pub use caller::Caller;
pub use compress::{CompressedFile, accepts_gzip};
pub use failure::{Failure, HandlerResult, PROBLEM_JSON, excerpt};
pub use gate::{Context, may_have_details};
pub use listeners::{Application, RunningServer, Server};
pub use response_budget::Weight;
pub use reviewer::{ClusterUser, Reviewer, ReviewerError};
pub use route::IDENTITY;
pub use route_table::{Audience, QueryRule, RouteRow, RouteTable, Verb};
pub use settings::{
    AdminAccess, AdminError, KubernetesReviews, NAME_BYTES_MAX, NamedToken, RateLimits, Right, Settings,
    TlsFiles, TokenSource,
};
pub use tls::{TLS_POLL_INTERVAL, Tls};
pub use token::{check_token_file, rotate_token};
