//! Why a policy was not taken, or cannot be had back.

use crate::kernel::names::Digest;

/// A policy that could not be installed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstallError {
    /// More bytes than are taken.
    #[error("the module has {bytes} bytes; at most {limit} are taken")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Not WebAssembly, not this world, imports that are not given, or a `describe` that breaks a
    /// rule.
    #[error("this is no policy of the world berth:policy@0.1.0: {what}")]
    NotAPolicy {
        /// Which rule it breaks.
        what: String,
    },
    /// The compiler used more time or memory than it may.
    #[error("compiling was stopped: {what}")]
    TooCostly {
        /// Which limit.
        what: String,
    },
    /// Another module is being compiled and the wait for it was too long.
    #[error("another policy is being compiled; try again in a few seconds")]
    Busy,
    /// Its files are not what the store knows.
    #[error("the files of policy {digest} are gone or changed: upload it again")]
    Lost {
        /// Which version.
        digest: Digest,
    },
    /// The daemon ends.
    #[error("the daemon is stopping")]
    Stopping,
    /// The daemon's own trouble: no room, no right, no child process.
    #[error("cannot compile or keep policies here: {what}")]
    Trouble {
        /// What, and what to do.
        what: String,
    },
}
