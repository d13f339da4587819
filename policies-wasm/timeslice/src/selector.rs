//! Naming GPUs in parameters: by model, index or UUID.

use berth_policy_sdk::Part;
use serde::Deserialize;

/// A GPU that fits all keys that are given.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Selector {
    /// The model as NVML names it; a `*` at the end stands for any rest.
    pub model: Option<String>,
    /// The GPU's index on the node.
    pub index: Option<u32>,
    /// The GPU's UUID.
    pub uuid: Option<String>,
}

/// A number of shares for the GPUs that fit.
// Not `flatten`: serde cannot refuse unknown keys beside it.
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

impl Selector {
    /// One that names nothing would fit every GPU, which nobody means.
    pub(crate) fn check(&self, key: &str) -> Result<(), String> {
        if *self == Self::default() {
            return Err(format!("{key}: names no GPU; give `model`, `index` or `uuid`"));
        }
        Ok(())
    }

    pub(crate) fn fits(&self, part: &Part) -> bool {
        let model = self.model.as_deref().is_none_or(|model| match model.strip_suffix('*') {
            Some(start) => part.model.starts_with(start),
            None => part.model == model,
        });
        model
            && self.index.is_none_or(|index| part.gpu_index == index)
            && self.uuid.as_deref().is_none_or(|uuid| part.id == uuid)
    }
}
