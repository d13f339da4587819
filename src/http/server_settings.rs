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
