//! Pulls a policy that a GPUNode names and the node does not have, and uploads it as a caller would: its signature is checked before it
//! is compiled.

use berth_core::PolicyService;
use berth_core::keeper::CommandError;
use berth_core::policies::{Upload, UploadError};
use berth_fleet::gpu_node::EntrySpec;
use berth_kernel::ids::names::Digest;
use berth_kernel::node::ports::InstallError;
use berth_kernel::node::refusal::Refusal;
use berth_oci::{PullError, Puller, Repository, Source};
use std::sync::Arc;
use tokio::sync::Mutex;

/// A policy to pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PolicyPull {
    name: String,
    source: Source,
    stack_name: String,
}

/// Why a policy is not on the node.
#[derive(Debug, thiserror::Error)]
#[error("policy {name} from {from}: {cause}")]
pub(super) struct PolicyPullError {
    name: String,
    from: String,
    cause: Cause,
}

/// What failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Cause {
    #[error("{0}")]
    Pull(#[from] PullError),
    #[error("{0}")]
    Upload(#[from] UploadError),
    #[error("the daemon is stopping")]
    Stopping,
}

impl PolicyPull {
    /// How to get the policy of an entry; `None` if the entry has no `ref`.
    ///
    /// # Errors
    /// If its `ref` or one of its digests is invalid.
    pub(super) fn of(entry: &EntrySpec, stack_name: &str) -> Result<Option<Self>, String> {
        let (repository, manifest, layer) = match (&entry.repository, &entry.manifest, &entry.layer) {
            (None, None, _) => return Ok(None),
            (Some(repository), Some(manifest), Some(layer)) => (repository, manifest, layer),
            _ => return Err("set ref, manifest and layer, or neither ref nor manifest".to_owned()),
        };
        let repository: Repository = repository.parse().map_err(|why| format!("ref: {why}"))?;
        let digest = |key: &str, text: &str| Digest::parse(text).map_err(|why| format!("{key}: {why}"));
        let source =
            Source { repository, manifest: digest("manifest", manifest)?, layer: digest("layer", layer)? };
        Ok(Some(Self { name: entry.name.clone(), source, stack_name: stack_name.to_owned() }))
    }

    pub(super) fn failed(&self, cause: impl Into<Cause>) -> PolicyPullError {
        PolicyPullError { name: self.name.clone(), from: self.reference(), cause: cause.into() }
    }

    /// Where the policy comes from.
    pub(super) fn reference(&self) -> String {
        format!("{}@sha256:{}", self.source.repository, self.source.manifest)
    }

    /// Pulls the policy and uploads it. `pull_lock` is held until the pull has ended, also if the caller drops the future: one pull runs at a
    /// time.
    pub(super) async fn run(
        self,
        puller: &Puller,
        pull_lock: &Arc<Mutex<()>>,
        policies: &PolicyService,
    ) -> Result<(), PolicyPullError> {
        let from = self.reference();
        let guard = Arc::clone(pull_lock).lock_owned().await;
        let (puller, source) = (puller.clone(), self.source.clone());
        let pull = move || {
            let _guard = guard;
            puller.pull(&source)
        };
        let pulled = tokio::task::spawn_blocking(pull).await.map_err(|_| self.failed(Cause::Stopping))?;
        let pulled = pulled.map_err(|error| self.failed(error))?;
        let upload = Upload {
            module: pulled.module,
            signature: pulled.signature,
            by: self.stack_name.clone(),
            why: format!("pulled from {from}"),
        };
        let uploaded = policies.upload(upload).await.map_err(|error| self.failed(error))?;
        tracing::info!(
            policy = uploaded.version.label(),
            from,
            "a policy of the stack that the GPUNode names was pulled"
        );
        Ok(())
    }
}

impl PolicyPullError {
    /// Whether the same pull may succeed later.
    pub(super) fn may_succeed_later(&self) -> bool {
        match &self.cause {
            Cause::Pull(error) => error.may_succeed_later(),
            Cause::Upload(UploadError::Signature(_)) => false,
            Cause::Upload(UploadError::Install(error)) => {
                !error.is_permanent() && !matches!(error, InstallError::TooCostly { .. })
            }
            Cause::Upload(UploadError::Command(CommandError::Refused(Refusal::TooManyVersions {
                ..
            }))) => false,
            Cause::Upload(UploadError::Command(_)) | Cause::Stopping => true,
        }
    }

    /// The reason of the condition `PolicyPulled`.
    pub(super) fn reason(&self) -> &'static str {
        match &self.cause {
            Cause::Pull(PullError::NotAllowed { .. }) => "RepositoryNotAllowed",
            Cause::Pull(PullError::Settings(_)) => "SettingsInvalid",
            Cause::Pull(PullError::Registry(_)) => "RegistryUnavailable",
            Cause::Pull(PullError::Layout { .. }) => "LayoutUnavailable",
            Cause::Pull(PullError::DigestMismatch { .. } | PullError::OtherLayer { .. }) => "DigestMismatch",
            Cause::Pull(PullError::WrongMediaType(_)) => "WrongMediaType",
            Cause::Pull(PullError::TooLarge { .. } | PullError::LongAnswer { .. }) => "TooLarge",
            Cause::Upload(UploadError::Signature(_)) => "SignatureInvalid",
            Cause::Upload(UploadError::Install(_)) => "CannotCompile",
            Cause::Upload(UploadError::Command(_)) | Cause::Stopping => "NotRecorded",
        }
    }
}
