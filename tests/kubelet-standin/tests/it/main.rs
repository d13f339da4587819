//! The stand-in kubelet itself, driven by a tiny plugin.

// The helpers of a test binary are tests, too.
#![allow(clippy::unwrap_used)]

mod admission;
mod checkpoint;
mod pod_resources;
mod pods_api;
mod registration;

use kubelet_standin::{Kubelet, Options, TinyPlugin};
use std::time::Duration;
use tempfile::TempDir;

pub(crate) const GPU: &str = "nvidia.com/gpu";
pub(crate) const SHARED: &str = "nvidia.com/gpu.shared";
/// Far above what anything here needs, far below a test's patience.
pub(crate) const SOON: Duration = Duration::from_secs(30);

pub(crate) struct Bench {
    pub(crate) kubelet: Kubelet,
    pub(crate) folder: TempDir,
}

impl Bench {
    pub(crate) async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub(crate) async fn with(change: impl FnOnce(&mut Options)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut options = Options::new(folder.path());
        change(&mut options);
        let kubelet = Kubelet::new(options);
        kubelet.start().await.unwrap();
        Self { kubelet, folder }
    }

    pub(crate) fn plugins(&self) -> std::path::PathBuf {
        self.folder.path().join("device-plugins")
    }

    /// A plugin that serves, has registered and was listed.
    pub(crate) async fn plugin(&self, socket: &str, resource: &str, ids: &[&str]) -> TinyPlugin {
        let plugin = TinyPlugin::serve(&self.plugins(), socket, resource, ids).unwrap();
        plugin.register().await.unwrap();
        self.kubelet.wait_allocatable(resource, ids.len(), SOON).await.unwrap();
        plugin
    }
}

pub(crate) fn set<const N: usize>(ids: [&str; N]) -> std::collections::BTreeSet<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}
