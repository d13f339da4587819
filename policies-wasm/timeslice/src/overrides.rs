//! Other numbers of shares for some GPUs.

use berth_policy_sdk::Selector;
use serde::Deserialize;

/// A number of shares for the GPUs that match.
// Without `flatten`, since serde cannot refuse unknown keys in combination with it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Override {
    /// Shares of the GPU.
    pub replicas: u32,
    /// As [`Selector::model`].
    pub model: Option<String>,
    /// As [`Selector::index`].
    pub index: Option<u32>,
    /// As [`Selector::uuid`].
    pub uuid: Option<String>,
}

impl Override {
    pub(crate) fn selector(&self) -> Selector {
        Selector { model: self.model.clone(), index: self.index, uuid: self.uuid.clone() }
    }
}
