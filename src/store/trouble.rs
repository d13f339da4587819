//! Errors of the system and of sled, in words that say what to do.

use super::codec::{DecodeError, FORMAT};
use berth_kernel::ports::StoreError;
use std::any::Any;
use std::io::{self, ErrorKind};
use std::path::Path;

/// Turns what went wrong into the port's errors, for the store at one path.
#[derive(Clone, Debug)]
pub(super) struct Trouble {
    path: String,
}

impl Trouble {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.display().to_string() }
    }

    pub(super) fn locked(&self) -> StoreError {
        StoreError::Locked { path: self.path.clone() }
    }

    pub(super) fn slow(&self, wait: std::time::Duration) -> StoreError {
        StoreError::Slow { path: self.path.clone(), ms: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX) }
    }

    pub(super) fn damaged(&self, what: impl Into<String>) -> StoreError {
        StoreError::Damaged { path: self.path.clone(), what: what.into() }
    }

    pub(super) fn failed(&self, what: impl Into<String>) -> StoreError {
        StoreError::Io { path: self.path.clone(), what: what.into() }
    }

    /// An append after one that failed, before anybody knows what the store holds.
    pub(super) fn unread(&self) -> StoreError {
        self.failed("it failed before and was not yet read back")
    }

    /// An error of the system while `doing` something.
    pub(super) fn io(&self, doing: &str, error: &io::Error) -> StoreError {
        let advice = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ": free some space",
            ErrorKind::FileTooLarge => ": raise the limit on file sizes (ulimit -f)",
            ErrorKind::ReadOnlyFilesystem => ": mount it writable",
            ErrorKind::PermissionDenied => ": let the user that runs berth own the folder and all in it",
            ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
                ": something else has that name; give another --state-dir"
            }
            _ => "",
        };
        self.failed(format!("{doing}: {error}{advice}"))
    }

    /// An error of sled while reading: what it cannot make sense of is damage.
    pub(super) fn reading(&self, error: ::sled::Error) -> StoreError {
        match error {
            // Short reads are a file that was cut, not a failing disk.
            ::sled::Error::Io(e) if e.kind() != ErrorKind::UnexpectedEof => self.io("opening it", &e),
            other => self.damaged(other.to_string()),
        }
    }

    /// An error of sled while writing.
    pub(super) fn writing(&self, error: ::sled::Error) -> StoreError {
        match error {
            ::sled::Error::Io(e) => self.io("appending", &e),
            other => self.failed(format!("appending: {other}")),
        }
    }

    pub(super) fn decoding(&self, error: DecodeError) -> StoreError {
        match error {
            DecodeError::Newer(found) => {
                StoreError::Newer { path: self.path.clone(), found: found.into(), known: FORMAT.into() }
            }
            DecodeError::Malformed(what) => self.damaged(what),
        }
    }
}

/// What a panic said.
pub(super) fn panicked(payload: &(dyn Any + Send)) -> String {
    let said = payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied());
    format!("sled panicked: {}", said.unwrap_or("without a word"))
}
