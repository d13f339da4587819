//! Callers of the admin API, their authentication and their limits.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

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
    pub const fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Change => "change",
        }
    }
}

/// The callers, besides those with the token of the first start.
#[derive(Clone, Debug, Default)]
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
