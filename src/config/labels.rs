//! `labels`: whether the node is labelled with what its GPUs are, and how.

use super::{ConfigError, bad};
use serde::Deserialize;
use std::path::PathBuf;

/// How the node is labelled. By default not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSettings {
    /// The file from which node-feature-discovery takes labels.
    pub nfd_file: Option<PathBuf>,
    /// Whether the node object is patched.
    pub node: bool,
}

impl LabelSettings {
    /// Whether the node is labelled in any way.
    #[must_use]
    pub fn wanted(&self) -> bool {
        self.node || self.nfd_file.is_some()
    }
}

/// The section of the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)]
pub struct LabelsFile {
    pub nfd_file: Option<PathBuf>,
    pub node: Option<bool>,
}

impl LabelsFile {
    pub(super) fn checked(self) -> Result<LabelSettings, ConfigError> {
        if let Some(path) =
            self.nfd_file.as_ref().filter(|path| !path.is_absolute() || path.file_name().is_none())
        {
            let rule = "the absolute path of a file, such as /etc/kubernetes/node-feature-discovery/features.d/berth";
            return Err(bad("labels.nfdFile", &path.display().to_string(), rule));
        }
        if let (Some(path), Some(true)) = (&self.nfd_file, self.node) {
            let rule = "one of labels.nfdFile and labels.node: both write the same labels, and would take each other \
                        for somebody else";
            return Err(bad("labels.nfdFile", &path.display().to_string(), rule));
        }
        Ok(LabelSettings { nfd_file: self.nfd_file, node: self.node.unwrap_or(false) })
    }
}
