//! Policies as OCI artifacts: [`artifact`] has their form, [`registry`] pulls them from a registry and pushes them, [`layout`] reads
//! and writes them in a folder.
//!
//! A daemon pulls by digest only, from the repositories that its own configuration names ([`Puller`]): a user who may name an artifact
//! for a node cannot choose the registries, and the policy that was tested is the one that runs.

pub mod artifact;
mod credentials;
mod error;
pub mod layout;
mod reference;
pub mod registry;

pub use artifact::{Artifact, PulledPolicy, SIGNATURE_ANNOTATION};
pub use credentials::Credentials;
pub use error::{PullError, RegistryError};
pub use reference::{Repository, RepositoryPrefix, Target, is_tag};

use berth_kernel::ids::names::Digest;
use registry::Registry;
use std::path::PathBuf;

/// Where policies may be pulled from, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PullSettings {
    /// The repositories, without which nothing is pulled.
    pub repositories: Vec<RepositoryPrefix>,
    /// Folders of OCI image layouts, which are searched before the registry.
    pub layouts: Vec<PathBuf>,
    /// A file with the credentials of registries (`config.json` of Docker, `.dockerconfigjson` of a Secret).
    pub credentials_file: Option<PathBuf>,
    /// A file with certificates in PEM that are trusted in place of the system's.
    pub ca_file: Option<PathBuf>,
}

/// A policy in a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The repository.
    pub repository: Repository,
    /// The digest of the artifact's manifest.
    pub manifest: Digest,
    /// The digest of the policy's module.
    pub layer: Digest,
}

/// Pulls policies.
#[derive(Clone, Debug)]
pub struct Puller {
    settings: PullSettings,
}

impl Puller {
    /// With these settings.
    #[must_use]
    pub fn new(settings: PullSettings) -> Self {
        Self { settings }
    }

    /// Reads a policy from the layouts or from its registry, and checks its digests, types and size. Blocks for at most some minutes.
    ///
    /// # Errors
    /// If the repository is not among those of the settings, the registry cannot be reached or refuses, or the artifact is not what
    /// `source` says.
    pub fn pull(&self, source: &Source) -> Result<PulledPolicy, PullError> {
        let Source { repository, manifest, layer } = source;
        let allowed = self.settings.repositories.iter().filter(|prefix| prefix.includes(repository));
        let allowed = allowed.max_by_key(|prefix| prefix.name().len());
        let allowed = allowed.ok_or_else(|| PullError::NotAllowed {
            repository: repository.to_string(),
            allowed: self.settings.repositories.iter().map(ToString::to_string).collect(),
        })?;
        let mut failure = None;
        for folder in &self.settings.layouts {
            match layout::read(folder, manifest, layer) {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => {}
                // Another folder, or the registry, may have what this one lacks.
                Err(error) => {
                    tracing::warn!(%error, folder = %folder.display(), "a policy cannot be read from a layout");
                    failure.get_or_insert(error);
                }
            }
        }
        self.pull_from_registry(allowed, source).map_err(|error| failure.unwrap_or(error))
    }

    fn pull_from_registry(
        &self,
        allowed: &RepositoryPrefix,
        source: &Source,
    ) -> Result<PulledPolicy, PullError> {
        let Source { repository, manifest, layer } = source;
        let credentials = self.settings.credentials_file.as_deref().map(Credentials::read).transpose();
        let credentials = credentials.map_err(PullError::Settings)?.unwrap_or_default();
        let registry = Registry::new(allowed.is_plain_http(), credentials, self.settings.ca_file.as_deref())
            .map_err(PullError::Settings)?;
        registry.pull(repository, manifest, layer)
    }
}
