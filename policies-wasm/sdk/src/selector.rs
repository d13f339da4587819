//! Naming GPUs in parameters: by model, index or UUID.

use serde::Deserialize;
use std::fmt;

use crate::{Node, Part, matches, warn};

/// A GPU that fits all keys that are given.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Selector {
    /// The model as NVML names it; a `*` stands for any text.
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

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let index = self.index.map(|index| index.to_string());
        let keys = [("model", &self.model), ("index", &index), ("uuid", &self.uuid)];
        let given = keys.into_iter().filter_map(|(key, value)| Some((key, value.as_ref()?)));
        for (n, (key, value)) in given.enumerate() {
            let and = if n == 0 { "" } else { ", " };
            write!(f, "{and}{key}: {value}")?;
        }
        Ok(())
    }
}

/// Warns of a selector that no GPU of the node fits, since what it was written for then happens
/// nowhere. For `offer`; `key` is the parameter that holds the selector.
pub fn warn_if_unused(key: &str, selector: &Selector, node: &Node) {
    let mut gpus = node.parts.iter().filter(|part| part.parent.is_none()).peekable();
    if gpus.peek().is_some() && !gpus.any(|gpu| selector.fits(gpu)) {
        warn(&format!("{key}: no GPU of this node fits {{{selector}}}"));
    }
}

/// The same of each selector of a parameter such as `only`.
pub fn warn_if_any_unused(key: &str, only: Option<&[Selector]>, node: &Node) {
    for (n, selector) in only.unwrap_or_default().iter().enumerate() {
        warn_if_unused(&format!("{key}[{n}]"), selector, node);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{NodeBuilder, logged};

    #[test]
    fn a_selector_that_fits_no_gpu_is_warned_of() {
        let node = NodeBuilder::new().gpus(2, "NVIDIA A100-SXM4-40GB", 40_960).mig(1, "1g.5gb", 1, 4_864);
        let node = node.build().node;
        let only: Vec<Selector> = serde_json::from_str(
            r#"[{"model": "*A100*"}, {"model": "H100*", "index": 0}, {"uuid": "GPU-7"}, {"uuid": "MIG-1-0"}]"#,
        )
        .unwrap();
        let expected = [
            "warning: only[1]: no GPU of this node fits {model: H100*, index: 0}",
            "warning: only[2]: no GPU of this node fits {uuid: GPU-7}",
            "warning: only[3]: no GPU of this node fits {uuid: MIG-1-0}",
        ];
        assert_eq!(logged(|| warn_if_any_unused("only", Some(&only), &node)).1, expected);
        // Before the first scan there is nothing to fit.
        let empty = NodeBuilder::new().build().node;
        assert_eq!(logged(|| warn_if_any_unused("only", Some(&only), &empty)).1, Vec::<String>::new());
    }
}
