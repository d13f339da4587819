//! Uploads, downloads and deletions of policies.

use super::signatures::{self, SignatureError};
use super::{ModuleChunks, PolicyService};
use crate::keeper::{Applied, CommandError};
use crate::priority::at_low_priority;
use berth_kernel::ids::names::Digest;
use berth_kernel::node::change::Change;
use berth_kernel::node::command::Command;
use berth_kernel::node::ports::InstallError;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::node::revision::Revision;
use berth_kernel::policy::version::{Origin, PolicyVersion, Signature};
use berth_observe::spans;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tracing::Instrument;

/// Longest wait of a deletion for uploads in progress.
const DELETE_WAIT: Duration = Duration::from_secs(2);

/// Error of an upload.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// The signature is missing or invalid.
    #[error("{0}")]
    Signature(SignatureError),
    /// The module is not a policy, or cannot be compiled here.
    #[error("{0}")]
    Install(InstallError),
    /// The policy could not be recorded.
    #[error("{0}")]
    Command(CommandError),
}

/// Error of a deletion.
#[derive(Debug, thiserror::Error)]
pub enum DeleteError {
    /// Another task uses policies' files, perhaps those of this one.
    #[error("an upload, a compilation or a trial is using the files of policies; try again in a few seconds")]
    AtWork,
    /// The deletion was refused, or could not be recorded.
    #[error("{0}")]
    Command(CommandError),
}

/// A policy to upload.
#[derive(Clone, Debug, Default)]
pub struct Upload {
    /// The module's bytes.
    pub module: Vec<u8>,
    /// The module's signature.
    pub signature: Option<Signature>,
    /// Name of the client.
    pub by: String,
    /// The client's reason.
    pub why: String,
}

/// A policy after its upload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uploaded {
    /// The version as it is recorded.
    pub version: PolicyVersion,
    /// Whether this upload added it: of several uploads of the same bytes, exactly one does.
    pub is_new: bool,
}

impl Uploaded {
    fn of(applied: &Applied, digest: &Digest) -> Option<Self> {
        let is_new = applied.entry.changes.iter().any(|change| matches!(change, Change::PolicyAdded(_)));
        let version = PolicyVersion::clone(applied.snapshot.policies.get(digest)?);
        Some(Self { version, is_new })
    }
}

impl PolicyService {
    /// Uploads a policy module: checks its signature if keys are trusted, compiles, describes, stores and records it.
    ///
    /// # Errors
    /// If the module is not a policy, its signature is missing or invalid, it costs too much, or it could not be
    /// recorded. Nothing is stored then.
    pub async fn upload(&self, upload: Upload) -> Result<Uploaded, UploadError> {
        let service = self.clone();
        let span = spans::upload(upload.module.len());
        let result = run_to_completion(async move { service.install(upload).await }.instrument(span)).await;
        if matches!(result, Some(Ok(_))) {
            self.uploads.send_replace(());
        }
        result.unwrap_or(Err(UploadError::Command(CommandError::Stopping)))
    }

    async fn install(&self, upload: Upload) -> Result<Uploaded, UploadError> {
        let guard = self.files_lock.read().await;
        let (files, now) = (Arc::clone(&self.files), self.kernel.now());
        let rules = Arc::clone(&self.kernel.snapshot().rules);
        let Upload { module, signature, by, why } = upload;
        let install = move || {
            // An untrusted module is never compiled.
            let signed_by = signatures::check(&rules.trusted_keys, &module, signature.as_ref());
            let signed_by = signed_by.map_err(UploadError::Signature)?;
            let span = spans::compile(module.len());
            let installed = span.in_scope(|| files.install(&module, now));
            if installed.is_err() {
                spans::failed(&span);
            }
            Ok((installed.map_err(UploadError::Install)?, signed_by))
        };
        let installed = tokio::task::spawn_blocking(spans::in_current_span(at_low_priority(install))).await;
        let (version, signed_by) = installed.unwrap_or(Err(UploadError::Command(CommandError::Stopping)))?;
        let origin = Origin { by, why, signature, signed_by, once_shipped: false };
        let digest = version.digest.clone();
        let command = Command::RecordUpload(PolicyVersion { origin, ..version });
        match self.kernel.execute(command).await {
            Ok(applied) => {
                Uploaded::of(&applied, &digest).ok_or(UploadError::Command(CommandError::Stopping))
            }
            Err(error) => {
                // After `Late` the version may still be recorded, and then needs its files.
                let not_recorded = !matches!(error, CommandError::Late(_));
                drop(guard);
                let _guard = self.files_lock.write().await;
                if not_recorded && !self.kernel.snapshot().policies.contains_key(&digest) {
                    self.files.remove(&digest);
                }
                Err(UploadError::Command(error))
            }
        }
    }

    /// The bytes of a policy in chunks, after all of them have been checked against the digest.
    ///
    /// # Errors
    /// If the bytes are missing or changed.
    pub async fn module(&self, digest: Digest) -> Result<ModuleChunks, InstallError> {
        let files = Arc::clone(&self.files);
        let chunks = tokio::task::spawn_blocking(move || ModuleChunks::open(files, digest)).await;
        chunks.unwrap_or(Err(InstallError::Stopping))
    }

    /// Deletes a policy version; with a condition, only if what the client has read is still so.
    ///
    /// # Errors
    /// If the version is in use, a shadow, shipped or unknown, or the condition does not hold.
    pub async fn delete_policy(
        &self,
        digest: Digest,
        expected: Option<Revision>,
    ) -> Result<Applied, DeleteError> {
        let service = self.clone();
        let result = run_to_completion(async move { service.delete(digest, expected).await }).await;
        result.unwrap_or(Err(DeleteError::Command(CommandError::Stopping)))
    }

    async fn delete(&self, digest: Digest, expected: Option<Revision>) -> Result<Applied, DeleteError> {
        // Uploads and activations hold the lock while they compile.
        let guard = tokio::time::timeout(DELETE_WAIT, self.files_lock.write()).await;
        let _guard = guard.map_err(|_| DeleteError::AtWork)?;
        if let Some(shadow) = self.shadows.all().iter().find(|shadow| shadow.candidate.digest == digest) {
            let refusal = Refusal::PolicyShadows { digest, shadow: shadow.id };
            return Err(DeleteError::Command(CommandError::Refused(refusal)));
        }
        let command = Command::DeletePolicy { digest: digest.clone() }.expecting(expected);
        let applied = self.kernel.execute(command).await.map_err(DeleteError::Command)?;
        self.files.remove(&digest);
        Ok(applied)
    }
}

/// Runs work in a task, so that it completes even if the caller is dropped: a partial upload would leave files
/// without a record. `None` if the daemon stops.
async fn run_to_completion<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Option<T> {
    tokio::spawn(work.instrument(spans::current())).await.ok()
}
