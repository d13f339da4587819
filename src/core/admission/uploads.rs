//! The part of the door through which policies come and go.

mod pieces;

pub use pieces::Pieces;

use super::Door;
use super::recorder::aside;
use crate::keeper::{Applied, AskError};
use crate::spans;
use crate::trust::{self, SignatureError};
use berth_kernel::command::Command;
use berth_kernel::ledger::Ledger;
use berth_kernel::names::Digest;
use berth_kernel::policy::PolicyVersion;
use berth_kernel::ports::InstallError;
use berth_kernel::refusal::Refusal;
use berth_kernel::trust::{Origin, Signature};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tracing::Instrument;

/// Longest wait of a deletion for uploads that are under way.
const DELETE_WAIT: Duration = Duration::from_secs(2);

/// Why a policy was not taken.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// It is not signed as this node wants it.
    #[error("{0}")]
    Signature(SignatureError),
    /// It is not one, or cannot be compiled here.
    #[error("{0}")]
    Install(InstallError),
    /// It could not be recorded.
    #[error("{0}")]
    Ask(AskError),
}

/// Why a policy was not deleted.
#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    /// Somebody needs the files of policies, perhaps those of this one.
    #[error("policies are in use by an upload, a compilation or a trial; try again in a few seconds")]
    AtWork,
    /// It is no longer what whoever deletes it has seen.
    #[error("the policy has changed since it was read; read it again")]
    Changed,
    /// It may not be, or that could not be recorded.
    #[error("{0}")]
    Ask(AskError),
}

/// What must still be so for a deletion.
pub type Still = Box<dyn FnOnce(&Ledger) -> bool + Send>;

/// A policy on its way in.
#[derive(Clone, Debug, Default)]
pub struct Upload {
    /// Its bytes.
    pub module: Vec<u8>,
    /// Whose signature came with it.
    pub signature: Option<Signature>,
    /// Who uploads it.
    pub by: String,
    /// Why, in their words.
    pub why: String,
}

impl Door {
    /// Takes a policy module: its signature checked where keys are trusted, then the module itself,
    /// compiled, described, kept, recorded.
    ///
    /// # Errors
    /// If it is none, is not signed as it must be, costs too much, or could not be recorded; nothing
    /// is kept then.
    pub async fn upload(&self, upload: Upload) -> Result<PolicyVersion, UploadError> {
        let door = self.clone();
        let span = spans::upload(upload.module.len());
        let taken = to_its_end(async move { door.take(upload).await }.instrument(span)).await;
        taken.unwrap_or(Err(UploadError::Ask(AskError::Stopping)))
    }

    async fn take(&self, upload: Upload) -> Result<PolicyVersion, UploadError> {
        let files = self.files.read().await;
        let (policies, now) = (Arc::clone(&self.policies), self.clock.now());
        let rules = Arc::clone(&self.rules);
        let Upload { module, signature, by, why } = upload;
        let install = move || {
            // Before a byte of it is compiled.
            let signed_by = trust::check(&rules.trusted_keys, &module, signature.as_ref());
            let signed_by = signed_by.map_err(UploadError::Signature)?;
            let span = spans::compile(module.len());
            let installed = span.in_scope(|| policies.install(&module, now));
            if installed.is_err() {
                spans::failed(&span);
            }
            Ok((installed.map_err(UploadError::Install)?, signed_by))
        };
        let installed = tokio::task::spawn_blocking(spans::carried(aside(install))).await;
        let (version, signed_by) = installed.unwrap_or(Err(UploadError::Ask(AskError::Stopping)))?;
        let origin = Origin { by, why, signature, signed_by, once_shipped: false };
        let known = self.snapshot().policies.get(&version.digest).cloned();
        let version = match known {
            None => PolicyVersion { origin, ..version },
            Some(known) => {
                let newest = again(&known, version, origin);
                if newest == *known {
                    return Ok(newest);
                }
                newest
            }
        };
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

    /// The bytes of a policy, piece by piece, once all of them were seen to be what they should be.
    ///
    /// # Errors
    /// If they are gone or changed.
    pub async fn module(&self, digest: Digest) -> Result<Pieces, InstallError> {
        let policies = Arc::clone(&self.policies);
        let seen = tokio::task::spawn_blocking(move || Pieces::of(policies, digest)).await;
        seen.unwrap_or(Err(InstallError::Stopping))
    }

    /// Deletes a policy version, if `still` holds once no upload is under way: one could sign it between a
    /// look and the deletion.
    ///
    /// # Errors
    /// If it is in use, a shadow, shipped, unknown, or `still` does not hold.
    pub async fn delete_policy(&self, digest: Digest, still: Still) -> Result<Applied, DeleteError> {
        let door = self.clone();
        let deleted = to_its_end(async move { door.delete(digest, still).await }).await;
        deleted.unwrap_or(Err(DeleteError::Ask(AskError::Stopping)))
    }

    async fn delete(&self, digest: Digest, still: Still) -> Result<Applied, DeleteError> {
        // Uploads and activations hold it while they compile.
        let alone = tokio::time::timeout(DELETE_WAIT, self.files.write()).await;
        let _alone = alone.map_err(|_| DeleteError::AtWork)?;
        if !still(&self.snapshot()) {
            return Err(DeleteError::Changed);
        }
        if let Some(shadow) = self.past.shadows().iter().find(|shadow| shadow.candidate.digest == digest) {
            let refusal = Refusal::PolicyShadows { digest, shadow: shadow.id };
            return Err(DeleteError::Ask(AskError::Refused(refusal)));
        }
        let command = Command::DeletePolicy { digest: digest.clone() };
        let applied = self.command(command).await.map_err(DeleteError::Ask)?;
        self.policies.remove(&digest);
        Ok(applied)
    }
}

/// Whoever asked may go before there is an answer. The work goes on then: half of it would leave files
/// without a record. `None` if the daemon stops.
async fn to_its_end<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Option<T> {
    tokio::spawn(work.instrument(spans::here())).await.ok()
}

/// Known bytes that come again keep their first record, but for an artifact that had to be made
/// anew, and a signature that counts for more than theirs.
fn again(known: &PolicyVersion, version: PolicyVersion, origin: Origin) -> PolicyVersion {
    let mut newest = PolicyVersion { artifact: version.artifact, ..known.clone() };
    // Of two that nobody has checked yet the newer counts.
    let better = origin.signed_by.is_some() || newest.origin.signed_by.is_none();
    if better && origin.signature.is_some() {
        newest.origin.signature = origin.signature;
        newest.origin.signed_by = origin.signed_by;
    }
    newest
}
