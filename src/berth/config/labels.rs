//! `labels`: whether and how the node is labelled with its GPUs.

use super::checks::{Checks, bad};
use serde::Deserialize;
use std::path::PathBuf;

/// How the node is labelled. Off by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSettings {
    /// The file from which node-feature-discovery reads labels.
    pub nfd_file: Option<PathBuf>,
    /// Whether the node object is patched.
    pub node: bool,
}

impl LabelSettings {
    /// Whether the node is labelled.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.node || self.nfd_file.is_some()
    }
}

/// `labels` in the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)]
pub struct LabelsFile {
    pub nfd_file: Option<PathBuf>,
    pub node: Option<bool>,
}

impl LabelsFile {
    pub(super) fn resolve(self, checks: &mut Checks) -> LabelSettings {
        let nfd_file = self.nfd_file.map(|path| checks.plain_path("labels.nfdFile", path));
        let shown = || nfd_file.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        if nfd_file.as_ref().is_some_and(|path| !path.is_absolute() || path.file_name().is_none()) {
            let rule = "the absolute path of a file, such as /etc/kubernetes/node-feature-discovery/features.d/berth";
            checks.add(bad("labels.nfdFile", &shown(), rule));
        }
        if nfd_file.is_some() && self.node == Some(true) {
            let rule = "only one of labels.nfdFile and labels.node: both write the same labels, and each \
                        would mistake the other for another writer";
            checks.add(bad("labels.nfdFile", &shown(), rule));
        }
        LabelSettings { nfd_file, node: self.node.unwrap_or(false) }
    }
}
