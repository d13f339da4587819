//! The settings of the server, and a check of the files that they name.

use super::error::AdminError;
use super::reviews::Reviewer;
use super::settings::AdminAccess;
use super::{tls, token};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The settings of the server.
#[derive(Clone)]
pub struct Settings {
    /// The address of the API; loopback, unless there is TLS.
    pub listen: SocketAddr,
    /// The address that serves only `/livez`, `/readyz` and `/metrics`, if any.
    pub health_listen: Option<SocketAddr>,
    /// The file of the bearer token; created if it is missing.
    pub token_file: PathBuf,
    /// Further callers, and the ways of authentication.
    pub access: AdminAccess,
    /// The client of the API server for callers that the daemon does not know; `None`: they are refused.
    pub reviewer: Option<Arc<dyn Reviewer>>,
    /// How often the TLS files are checked.
    pub tls_poll_interval: Duration,
}

/// Reads the files that authentication reads at a start, tokens' and TLS', and reports the errors of a start. It
/// creates none, and the token of the first start may be missing.
///
/// Returns the key and the error of each file that cannot be used.
#[must_use]
pub fn check_files(token_file: &Path, access: &AdminAccess) -> Vec<(String, AdminError)> {
    let own = ("tokenFile".to_owned(), token::Tokens::check(token_file, &[]));
    let named = access.tokens.iter().enumerate();
    let named = named.map(|(at, token)| (format!("admin.tokens[{at}].file"), token::check_given(token)));
    let tls = ("admin.tls".to_owned(), access.tls.clone().map(tls::Tls::open).transpose().map(drop));
    let all = std::iter::once(own).chain(named).chain([tls]);
    all.filter_map(|(key, checked)| Some((key, checked.err()?))).collect()
}
