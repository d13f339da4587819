//! Errors of the system and of sled as [`StoreError`]s, with advice on how to fix them.

use super::codec::{DecodeError, FORMAT};
use berth_kernel::node::ports::StoreError;
use std::any::Any;
use std::io::{self, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Makes the errors of the store at one path.
#[derive(Clone, Debug)]
pub(super) struct ErrorFactory {
    path: String,
}

impl ErrorFactory {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.display().to_string() }
    }

    pub(super) fn locked(&self) -> StoreError {
        StoreError::Locked { path: self.path.clone() }
    }

    pub(super) fn damaged(&self, what: impl Into<String>) -> StoreError {
        StoreError::Damaged { path: self.path.clone(), what: what.into() }
    }

    pub(super) fn failed(&self, what: impl Into<String>) -> StoreError {
        StoreError::Io { path: self.path.clone(), what: what.into() }
    }

    /// For an append after a failed one, before [`berth_kernel::node::ports::Store::load`] has read the store again.
    pub(super) fn not_reloaded(&self) -> StoreError {
        self.failed("an earlier write failed and the store is not yet read back")
    }

    /// A system error during `doing`.
    pub(super) fn io(&self, doing: &str, error: &io::Error) -> StoreError {
        if is_full(error) {
            let what = format!("{doing}: {error}: free some space");
            return StoreError::Full { path: self.path.clone(), what };
        }
        let advice = match error.kind() {
            ErrorKind::FileTooLarge => ": raise the limit on file sizes (ulimit -f)",
            ErrorKind::ReadOnlyFilesystem => ": mount it writable",
            ErrorKind::PermissionDenied => {
                ": make the user that runs berth the owner of the folder and all its files"
            }
            ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
                ": a file of another kind has that name; choose another --state-dir"
            }
            _ => "",
        };
        self.failed(format!("{doing}: {error}{advice}"))
    }

    /// Calls sled to read. All its errors but I/O errors mean damage, and so does a panic.
    pub(super) fn reading<T>(&self, read: impl FnOnce() -> ::sled::Result<T>) -> Result<T, StoreError> {
        match catch_unwind(AssertUnwindSafe(read)) {
            Ok(Ok(read)) => Ok(read),
            // A short read means a truncated file, not a failing disk.
            Ok(Err(::sled::Error::Io(e))) if e.kind() != ErrorKind::UnexpectedEof => {
                Err(self.io("opening it", &e))
            }
            Ok(Err(other)) => Err(self.damaged(other.to_string())),
            Err(panic) => Err(self.damaged(panic_message(&*panic))),
        }
    }

    /// Calls sled to write.
    pub(super) fn writing<T>(&self, write: impl FnOnce() -> ::sled::Result<T>) -> Result<T, StoreError> {
        match catch_unwind(AssertUnwindSafe(write)) {
            Ok(Ok(written)) => Ok(written),
            Ok(Err(::sled::Error::Io(e))) => Err(self.io("appending", &e)),
            Ok(Err(other)) => Err(self.failed(format!("appending: {other}"))),
            Err(panic) => Err(self.failed(panic_message(&*panic))),
        }
    }

    pub(super) fn decode_error(&self, error: DecodeError) -> StoreError {
        match error {
            DecodeError::Newer(found) => {
                StoreError::Newer { path: self.path.clone(), found: found.into(), known: FORMAT.into() }
            }
            DecodeError::Malformed(what) => self.damaged(what),
        }
    }
}

/// The message of a panic of sled.
pub(super) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let message = payload
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| payload.downcast_ref::<&str>().copied());
    format!("sled panicked: {}", message.unwrap_or("no message"))
}

/// Whether an error shows that the disk, or the quota on it, is full.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}
