//! The settings of the server: its listeners, callers, their authentication and limits; and why it cannot start.

use crate::reviewer::Reviewer;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Longest name of a token or of a client certificate, bytes: each change has it as its author.
pub const NAME_BYTES_MAX: usize = 64;
/// Default of reads a second of one client. Two processors serve some 5,000, and no client needs more.
const READS_PER_SECOND: u32 = 6_000;
/// Default of changes a second of one client. The thread that answers the kubelet writes each to disk in about 0.2
/// ms, so 100 of them take a fiftieth of its time.
const CHANGES_PER_SECOND: u32 = 100;

/// The right of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// GET and HEAD.
    Read,
    /// All methods.
    Change,
}

impl Right {
    /// The name in the configuration file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Change => "change",
        }
    }
}

/// The callers, besides those with the token of the first start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdminAccess {
    /// Further tokens.
    pub tokens: Vec<NamedToken>,
    /// TLS on the admin listener; `None`: plain HTTP, on loopback.
    pub tls: Option<TlsFiles>,
    /// A Unix socket for root of this node.
    pub socket: Option<PathBuf>,
    /// The limits of one client.
    pub limits: RateLimits,
    /// Authentication by the API server; `None`: not used.
    pub kubernetes: Option<KubernetesReviews>,
}

/// A further token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedToken {
    /// The name of its owner.
    pub name: String,
    /// The right of its owner.
    pub right: Right,
    /// Its source.
    pub source: TokenSource,
}

/// The source of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The file that contains it; read again when it changes.
    File(PathBuf),
    /// Its SHA-256: the token itself is not on this node.
    Sha256([u8; 32]),
}

/// The TLS files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate and its intermediate ones, PEM.
    pub cert: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// The CA of client certificates, PEM; `None`: client certificates are not used.
    pub client_ca: Option<PathBuf>,
    /// Whether a handshake without a client certificate fails.
    pub require_client_cert: bool,
    /// The right of each name (CN).
    pub clients: Option<BTreeMap<String, Right>>,
    /// The right of certificates with other names; `None`: none.
    pub others_may: Option<Right>,
}

/// The limits of one client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimits {
    /// Reads a second.
    pub reads_per_second: u32,
    /// Changes a second.
    pub changes_per_second: u32,
}

impl Default for RateLimits {
    fn default() -> Self {
        Self { reads_per_second: READS_PER_SECOND, changes_per_second: CHANGES_PER_SECOND }
    }
}

/// Callers that the API server authenticates: TokenReview finds the user, SubjectAccessReview the user's rights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesReviews {
    /// A token must be intended for one of these; empty: for the API server itself.
    pub audiences: Vec<String>,
}

/// The settings of the server.
#[derive(Clone)]
pub struct Settings {
    /// The address of the API; loopback, unless there is TLS.
    pub listen: SocketAddr,
    /// The address that serves only probes and scrapes, if any.
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

/// Why the API cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// Another process listens there.
    #[error(
        "{address} is in use by another process: stop it (`ss -ltnp` shows which), or choose another address with {flag}"
    )]
    Taken {
        /// The address.
        address: SocketAddr,
        /// The flag that chooses another one.
        flag: &'static str,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: choose another address with {flag}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The flag that chooses another one.
        flag: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The token can be neither read nor created.
    #[error("the token file {path} cannot be used: {rule}")]
    Token {
        /// The file.
        path: PathBuf,
        /// What to do.
        rule: &'static str,
        /// The system's error, if there is one.
        #[source]
        source: Option<io::Error>,
    },
    /// A TLS file cannot be used.
    #[error("the TLS file {path} {rule} (admin.tls in the configuration)")]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        rule: String,
        /// The system's error, if there is one.
        #[source]
        source: Option<io::Error>,
    },
    /// The Unix socket cannot be listened on.
    #[error("the admin socket {path} cannot be used: {rule}")]
    Socket {
        /// The file.
        path: PathBuf,
        /// What to do.
        rule: &'static str,
        /// The system's error, if there is one.
        #[source]
        source: Option<io::Error>,
    },
    /// The system refused a thread or a socket.
    #[error("cannot start the admin API's threads")]
    Threads(#[source] io::Error),
}
