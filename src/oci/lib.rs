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
pub use reference::{Reference, Repository, RepositoryPrefix, Target, Version, is_tag};

use berth_kernel::ids::names::Digest;
use registry::Registry;
use std::path::{Path, PathBuf};

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
        let allowed = self.allowed(repository)?;
        let found = self.search_layouts(|folder| layout::read(folder, manifest, layer));
        found.or_else(|failure| {
            let pulled = self.registry(allowed)?.pull(repository, manifest, layer);
            pulled.map_err(|error| failure.unwrap_or(error))
        })
    }

    /// The digests of an artifact, from the registry; those of one that is named by its digest also from the layouts. Blocks for at most
    /// some minutes.
    ///
    /// # Errors
    /// As of [`Self::pull`].
    pub fn resolve(&self, reference: &Reference) -> Result<Source, PullError> {
        let Reference { repository, version } = reference;
        let allowed = self.allowed(repository)?;
        let found = self.search_layouts(|folder| match version {
            Version::Digest(manifest) => {
                let layer = layout::layer_of(folder, manifest)?;
                Ok(layer.map(|layer| Source {
                    repository: repository.clone(),
                    manifest: manifest.clone(),
                    layer,
                }))
            }
            Version::Tag(_) => Ok(None),
        });
        found.or_else(|failure| {
            self.registry(allowed)?.resolve(reference).map_err(|error| failure.unwrap_or(error))
        })
    }

    fn allowed(&self, repository: &Repository) -> Result<&RepositoryPrefix, PullError> {
        let allowed = self.settings.repositories.iter().filter(|prefix| prefix.includes(repository));
        allowed.max_by_key(|prefix| prefix.name().len()).ok_or_else(|| PullError::NotAllowed {
            repository: repository.to_string(),
            allowed: self.settings.repositories.iter().map(ToString::to_string).collect(),
        })
    }

    /// What the first layout that has it returns; if none does, the first error.
    fn search_layouts<T>(
        &self,
        mut read: impl FnMut(&Path) -> Result<Option<T>, PullError>,
    ) -> Result<T, Option<PullError>> {
        let mut failure = None;
        for folder in &self.settings.layouts {
            match read(folder) {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => {}
                // Another folder, or the registry, may have what this one lacks.
                Err(error) => {
                    tracing::warn!(%error, folder = %folder.display(), "a policy cannot be read from a layout");
                    failure.get_or_insert(error);
                }
            }
        }
        Err(failure)
    }

    fn registry(&self, allowed: &RepositoryPrefix) -> Result<Registry, PullError> {
        let credentials = self.settings.credentials_file.as_deref().map(Credentials::read).transpose();
        let credentials = credentials.map_err(PullError::Settings)?.unwrap_or_default();
        Registry::new(allowed.is_plain_http(), credentials, self.settings.ca_file.as_deref())
            .map_err(PullError::Settings)
    }
}
