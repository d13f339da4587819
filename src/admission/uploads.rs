//! The part of the door through which policies come and go.

use super::Door;
use crate::keeper::{Applied, AskError};
use crate::kernel::command::Command;
use crate::kernel::names::Digest;
use crate::kernel::policy::PolicyVersion;
use crate::kernel::stack::StackEntry;
use crate::ports::InstallError;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait of a deletion for uploads that are under way.
const DELETE_WAIT: Duration = Duration::from_secs(2);

/// Why a policy was not taken.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// It is not one, or cannot be compiled here.
    #[error("{0}")]
    Install(InstallError),
    /// It could not be recorded.
    #[error("{0}")]
    Ask(AskError),
}

impl Door {
    /// Takes a policy module: checked, compiled, described, kept, recorded.
    ///
    /// # Errors
    /// If it is none, costs too much, or could not be recorded; nothing is kept then.
    pub async fn upload(&self, module: Vec<u8>) -> Result<PolicyVersion, UploadError> {
        let files = self.files.read().await;
        let (policies, now) = (Arc::clone(&self.policies), self.clock.now());
        let installed = tokio::task::spawn_blocking(move || policies.install(&module, now)).await;
        let version = match installed {
            Ok(result) => result.map_err(UploadError::Install)?,
            Err(_) => return Err(UploadError::Ask(AskError::Stopping)),
        };
        // Known bytes keep their first record.
        if let Some(known) = self.snapshot().policies.get(&version.digest)
            && known.artifact == version.artifact
        {
            return Ok(PolicyVersion::clone(known));
        }
        match self.command(Command::KeepPolicy(version.clone())).await {
            Ok(_) => Ok(version),
            Err(error) => {
                // After `Late` it may still be recorded, and then needs its files.
                let certain = !matches!(error, AskError::Late(_));
                drop(files);
                let _alone = self.files.write().await;
                if certain && !self.snapshot().policies.contains_key(&version.digest) {
                    self.policies.remove(&version.digest);
                }
                Err(UploadError::Ask(error))
            }
        }
    }

    /// The bytes of a policy.
    ///
    /// # Errors
    /// If they are gone or changed.
    pub async fn module(&self, digest: Digest) -> Result<Vec<u8>, InstallError> {
        let policies = Arc::clone(&self.policies);
        let read = tokio::task::spawn_blocking(move || policies.module(&digest)).await;
        read.unwrap_or_else(|_| Err(InstallError::Trouble { what: "the daemon is stopping".into() }))
    }

    /// Deletes a policy version.
    ///
    /// # Errors
    /// If it is in use, shipped, or unknown.
    pub async fn delete_policy(&self, digest: Digest) -> Result<Applied, AskError> {
        // An upload holds it while it compiles.
        let alone = tokio::time::timeout(DELETE_WAIT, self.files.write()).await;
        let _alone = alone.map_err(|_| AskError::Busy)?;
        let applied = self.command(Command::DeletePolicy { digest: digest.clone() }).await?;
        self.policies.remove(&digest);
        Ok(applied)
    }

    /// Makes the policies of a stack callable, in a thread that may read and compile: the policy thread
    /// must not. What cannot be made so shows when it is asked.
    pub(super) async fn prepare(&self, entries: &[StackEntry]) {
        let ledger = self.snapshot();
        let versions: Vec<_> =
            entries.iter().filter_map(|entry| ledger.policies.get(&entry.digest).map(Arc::clone)).collect();
        let (policies, door) = (Arc::clone(&self.policies), self.clone());
        let work = move || {
            for version in versions {
                match policies.restore(&version) {
                    Ok(restored) if restored != *version => drop(door.keep(restored)),
                    Ok(_) => {}
                    Err(error) => tracing::warn!(policy = version.label(), "{error}"),
                }
            }
        };
        // It ends early only with the daemon.
        let _ = tokio::task::spawn_blocking(work).await;
    }
}
