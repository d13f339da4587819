//! Errors of installing or restoring a policy.

use crate::ids::names::Digest;
use std::error::Error;
use std::fmt;

/// A policy could not be installed or restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstallError {
    /// The module is too large.
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Not WebAssembly, another world, imports that are not provided, or a `describe` that breaks a rule.
    NotAPolicy {
        /// The rule that it breaks.
        what: String,
    },
    /// The compiler exceeded a limit of time or memory.
    TooCostly {
        /// The limit.
        what: String,
    },
    /// Another module is being compiled, and waiting for it timed out.
    Busy,
    /// Its files are missing or do not match the store's digests.
    Lost {
        /// The version.
        digest: Digest,
    },
    /// The daemon is stopping.
    Stopping,
    /// The daemon could not compile or store it: disk full, permission denied, no child process.
    Failed {
        /// The error, and how to fix it.
        what: String,
    },
}

impl InstallError {
    /// Whether the module itself is the cause, so that no retry succeeds.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        matches!(self, Self::TooLarge { .. } | Self::NotAPolicy { .. })
    }
}

impl fmt::Display for InstallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { bytes, limit } => {
                write!(f, "the module has {bytes} bytes; at most {limit} are allowed")
            }
            Self::NotAPolicy { what } => {
                write!(f, "this is not a policy of the world berth:policy@0.1.0: {what}")
            }
            Self::TooCostly { what } => write!(f, "compilation was stopped: {what}"),
            Self::Busy => f.write_str("another policy is being compiled; try again in a few seconds"),
            Self::Lost { digest } => {
                write!(
                    f,
                    "the files of policy {digest} are missing or changed: upload it again (`berth policy push FILE`)"
                )
            }
            Self::Stopping => f.write_str("the daemon is stopping"),
            Self::Failed { what } => write!(f, "cannot compile or store policies: {what}"),
        }
    }
}

impl Error for InstallError {}
