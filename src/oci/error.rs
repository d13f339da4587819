//! Errors of pulls and pushes.

use berth_kernel::ids::names::Digest;
use std::path::PathBuf;

/// Error of a pull.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The settings do not allow the repository.
    #[error("policies may not be pulled from {repository}: {}", describe(.allowed))]
    NotAllowed {
        /// The repository.
        repository: String,
        /// The repositories that are allowed.
        allowed: Vec<String>,
    },
    /// A file that the settings name cannot be used.
    #[error("{0}")]
    Settings(String),
    /// The registry cannot be reached, or refuses.
    #[error("{0}")]
    Registry(#[from] RegistryError),
    /// A file of a layout cannot be read.
    #[error("{}: {error}", .path.display())]
    Layout {
        /// The file.
        path: PathBuf,
        /// The error.
        error: std::io::Error,
    },
    /// What was read has another digest than it should have: the answer or the file is damaged or incomplete.
    #[error("the digest of {what} is {actual}, not {expected}")]
    DigestMismatch {
        /// What was read.
        what: String,
        /// The digest that was asked for.
        expected: Digest,
        /// The digest of the bytes.
        actual: Digest,
    },
    /// The artifact has another layer than it should have.
    #[error("the layer of the manifest is {actual}, not {expected}")]
    OtherLayer {
        /// The digest that was asked for.
        expected: Digest,
        /// The digest in the manifest.
        actual: Digest,
    },
    /// The artifact is not a policy.
    #[error("the artifact is not a policy: {0}")]
    WrongMediaType(String),
    /// The policy is larger than it may be.
    #[error("the layer has more than {max} bytes")]
    TooLarge {
        /// The limit.
        max: usize,
    },
    /// An answer of the registry is longer than it may be.
    #[error("{what} has more than {max} bytes")]
    LongAnswer {
        /// What was read.
        what: String,
        /// The limit.
        max: usize,
    },
}

impl PullError {
    /// Whether the same pull may succeed later.
    #[must_use]
    pub fn may_succeed_later(&self) -> bool {
        match self {
            Self::Registry(_)
            | Self::Layout { .. }
            | Self::Settings(_)
            | Self::DigestMismatch { .. }
            | Self::LongAnswer { .. } => true,
            Self::NotAllowed { .. }
            | Self::OtherLayer { .. }
            | Self::WrongMediaType(_)
            | Self::TooLarge { .. } => false,
        }
    }
}

fn describe(allowed: &[String]) -> String {
    let has = match allowed {
        [] => "is empty".to_owned(),
        allowed => format!("has only {}", allowed.join(", ")),
    };
    format!(
        "`fleet.repositories` in the configuration file {has}; add the repository there and restart Berth"
    )
}

/// Error of a request to a registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// No answer.
    #[error("the request to {url} failed: {error}")]
    Unreachable {
        /// What was requested.
        url: String,
        /// The error.
        error: String,
    },
    /// The registry demands credentials that it does not get, or refuses those that it gets.
    #[error("{url}: the registry answers {status}{message}: {hint}")]
    Unauthorized {
        /// What was requested.
        url: String,
        /// The HTTP status.
        status: u16,
        /// What can be done.
        hint: &'static str,
        /// The registry's own words, after a colon.
        message: String,
    },
    /// Another status than the expected one.
    #[error("{url}: the registry answers {status}{message}")]
    Status {
        /// What was requested.
        url: String,
        /// The HTTP status.
        status: u16,
        /// The registry's own words, after a colon.
        message: String,
    },
    /// The answer is not as the OCI distribution specification has it.
    #[error("{url}: {why}")]
    Answer {
        /// What was requested.
        url: String,
        /// The rule that it breaks.
        why: String,
    },
}
