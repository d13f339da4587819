//! Naming GPUs in parameters: by model, index or UUID.

use serde::Deserialize;

use crate::{Part, matches};

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

impl Selector {
    /// One that names nothing would fit every GPU, which nobody means. `key` is the parameter that
    /// held it.
    ///
    /// # Errors
    /// A sentence that names the parameter.
    pub fn check(&self, key: &str) -> Result<(), String> {
        if *self == Self::default() {
            return Err(format!("{key}: names no GPU; give `model`, `index` or `uuid`"));
        }
        Ok(())
    }

    /// Whether this is one of the GPUs that are meant.
    #[must_use]
    pub fn fits(&self, part: &Part) -> bool {
        self.model.as_deref().is_none_or(|model| matches(model, &part.model))
            && self.index.is_none_or(|index| part.gpu_index == index)
            && self.uuid.as_deref().is_none_or(|uuid| part.id == uuid)
    }
}

/// Checks a parameter that names the GPUs that a policy sees to, such as `only`.
///
/// # Errors
/// A sentence that names the parameter and the place in it.
pub fn check_selectors(key: &str, only: Option<&[Selector]>) -> Result<(), String> {
    let mut all = only.unwrap_or_default().iter().enumerate();
    all.try_for_each(|(n, selector)| selector.check(&format!("{key}[{n}]")))
}

/// Whether a part is a whole GPU that is cut into devices, and one of those that `only` names; all
/// are meant where it is missing. A GPU in MIG mode is not: its instances are offered.
#[must_use]
pub fn is_chosen(only: Option<&[Selector]>, part: &Part) -> bool {
    let named = only.is_none_or(|only| only.iter().any(|selector| selector.fits(part)));
    named && part.parent.is_none() && !part.mig_enabled
}
