//! Tests of the stand-in kubelet, with a small plugin.

// All code of this binary is test code.
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
/// The limit of every wait; far above what any test needs.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);

pub(crate) struct Fixture {
    pub(crate) kubelet: Kubelet,
    pub(crate) folder: TempDir,
}

impl Fixture {
    pub(crate) async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub(crate) async fn with(change: impl FnOnce(&mut Options)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // A list that is late on a busy machine is no anomaly.
        let mut options = Options { first_list_limit: TIMEOUT, ..Options::new(folder.path()) };
        change(&mut options);
        let kubelet = Kubelet::new(options);
        kubelet.start().await.unwrap();
        Self { kubelet, folder }
    }

    pub(crate) fn plugins(&self) -> std::path::PathBuf {
        self.folder.path().join("device-plugins")
    }

    /// A plugin that is registered and whose list was received.
    pub(crate) async fn plugin(&self, socket: &str, resource: &str, ids: &[&str]) -> TinyPlugin {
        let plugin = TinyPlugin::serve(&self.plugins(), socket, resource, ids).unwrap();
        plugin.register().await.unwrap();
        self.kubelet.wait_allocatable(resource, ids.len(), TIMEOUT).await.unwrap();
        plugin
    }
}

pub(crate) fn set<const N: usize>(ids: [&str; N]) -> std::collections::BTreeSet<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}
