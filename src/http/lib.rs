//! The HTTP server of the admin API: listeners, connections, TLS, who may do what, and the conventions that all
//! routes share. It knows no GPU: routes are an [`Application`] of another crate.

pub mod access;
mod audit;
mod auth;
pub mod body;
pub mod caller;
mod certificate;
mod clock_guard;
mod compress;
mod connection_slots;
mod counting;
pub mod etag;
mod failure;
pub mod gate;
mod host;
mod listeners;
mod malformed;
pub mod packed;
pub mod paging;
mod peer;
pub mod query;
mod rate_limit;
pub mod response_budget;
mod reviews;
mod settings;
pub mod sight;
mod slot;
mod tls;
mod token;
mod traced;
mod unique;
mod unix_socket;
mod unread;
mod wire;

pub use auth::check_token_file;
pub use failure::{Failure, PROBLEM_JSON};
pub use listeners::{AdminError, Application, Running, Server};
pub use reviews::{ReviewError, Reviewer, User};
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

/// The settings of the server.
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
}
