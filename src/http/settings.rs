//! Who may use the admin API, in which ways, and how often.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Longest name of a token or of a client certificate, bytes: it stands beside every change.
pub const NAME_BYTES_MAX: usize = 64;
/// Reads a second of one client. Two processors answer some 5,000; more than that no client needs.
const READS_PER_SECOND: u32 = 6_000;
/// Changes a second of one client. Each is written to disk in about 0.2 ms by the thread that answers
/// the kubelet, so 100 of them take a fiftieth of its time.
const CHANGES_PER_SECOND: u32 = 100;

/// What a caller may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    /// GET and HEAD.
    Read,
    /// All methods.
    Change,
}

impl Right {
    /// As it is written in the file.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Change => "change",
        }
    }
}

/// Who may ask, beside whoever has the token that the first start made.
#[derive(Clone, Debug, Default)]
pub struct AdminAccess {
    /// Further tokens.
    pub tokens: Vec<NamedToken>,
    /// TLS on the admin listener; `None`: plain HTTP, on loopback.
    pub tls: Option<TlsFiles>,
    /// A Unix socket for root of this node.
    pub socket: Option<PathBuf>,
    /// How often one client may ask.
    pub limits: RateLimits,
    /// Callers that the API server knows; `None`: none of them.
    pub kubernetes: Option<KubernetesReviews>,
}

/// A further token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedToken {
    /// Who has it.
    pub name: String,
    /// What they may do.
    pub right: Right,
    /// Where it is known from.
    pub source: TokenSource,
}

/// Where a token is known from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The file that holds it; read again when it changes.
    File(PathBuf),
    /// The SHA-256 of it: the token itself is not on this node.
    Sha256([u8; 32]),
}

/// The files of TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate and those between it and its root, PEM.
    pub cert: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// Whose client certificates are taken, PEM; `None`: nobody's.
    pub client_ca: Option<PathBuf>,
    /// Whoever has no client certificate does not get as far as a request.
    pub require_client_cert: bool,
    /// What each name (CN) may do.
    pub clients: Option<BTreeMap<String, Right>>,
    /// What certificates with other names may do; `None`: nothing.
    pub others_may: Option<Right>,
}

/// How often one client may ask.
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

/// Callers that the API server knows: TokenReview says who they are, SubjectAccessReview what they may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesReviews {
    /// A token must be meant for one of these; empty: for the API server itself.
    pub audiences: Vec<String>,
}
