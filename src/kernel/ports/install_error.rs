//! Why a policy was not taken, or cannot be had back.

use crate::names::Digest;
use std::error::Error;
use std::fmt;

/// A policy that could not be installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstallError {
    /// More bytes than are taken.
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Not WebAssembly, not this world, imports that are not given, or a `describe` that breaks a
    /// rule.
    NotAPolicy {
        /// Which rule it breaks.
        what: String,
    },
    /// The compiler used more time or memory than it may.
    TooCostly {
        /// Which limit.
        what: String,
    },
    /// Another module is being compiled and the wait for it was too long.
    Busy,
    /// Its files are not what the store knows.
    Lost {
        /// Which version.
        digest: Digest,
    },
    /// The daemon ends.
    Stopping,
    /// The daemon's own trouble: no room, no right, no child process.
    Trouble {
        /// What, and what to do.
        what: String,
    },
}

impl fmt::Display for InstallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { bytes, limit } => {
                write!(f, "the module has {bytes} bytes; at most {limit} are taken")
            }
            Self::NotAPolicy { what } => {
                write!(f, "this is no policy of the world berth:policy@0.1.0: {what}")
            }
            Self::TooCostly { what } => write!(f, "compiling was stopped: {what}"),
            Self::Busy => f.write_str("another policy is being compiled; try again in a few seconds"),
            Self::Lost { digest } => {
                write!(f, "the files of policy {digest} are gone or changed: upload it again")
            }
            Self::Stopping => f.write_str("the daemon is stopping"),
            Self::Trouble { what } => write!(f, "cannot compile or keep policies here: {what}"),
        }
    }
}

impl Error for InstallError {}
