//! Selectors of GPUs in parameters: by model, index or UUID.

use serde::Deserialize;
use std::fmt;

use crate::{Node, Part, matches, warn};

/// Selects the GPUs that match all given keys.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Selector {
    /// The model as NVML reports it; a `*` matches any text.
    pub model: Option<String>,
    /// The GPU's index on the node.
    pub index: Option<u32>,
    /// The GPU's UUID.
    pub uuid: Option<String>,
}

impl Selector {
    /// Refuses a selector without keys: it would match every GPU, which cannot be intended. `key` is the
    /// parameter that contains the selector.
    ///
    /// # Errors
    /// A sentence that names the parameter.
    pub fn check(&self, key: &str) -> Result<(), String> {
        if *self == Self::default() {
            return Err(format!("{key}: selects no GPU; give `model`, `index` or `uuid`"));
        }
        Ok(())
    }

    /// Whether a part matches the selector.
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

/// Warns of a selector that has no effect, since it matches no GPU of the node, or only GPUs in MIG mode. To be called
/// in `offer`; `key` is the parameter that contains the selector.
pub fn warn_if_unused(key: &str, selector: &Selector, node: &Node) {
    let mut gpus = node.parts.iter().filter(|part| part.parent.is_none()).peekable();
    if gpus.peek().is_none() {
        return;
    }
    let mut fitting = gpus.filter(|gpu| selector.fits(gpu)).peekable();
    if fitting.peek().is_none() {
        warn(&format!("{key}: no GPU of this node matches {{{selector}}}"));
    } else if fitting.all(|gpu| gpu.mig_enabled) {
        warn(&format!(
            "{key}: all GPUs that match {{{selector}}} are in MIG mode, and this policy leaves those out"
        ));
    }
}

/// Warns if all GPUs of the node are in MIG mode, so that a policy for GPUs that are not has no effect. To be called in
/// `offer`; `instead` is what to do about it.
pub fn warn_if_all_mig(node: &Node, instead: &str) {
    let mut gpus = node.parts.iter().filter(|part| part.parent.is_none()).peekable();
    if gpus.peek().is_some() && gpus.all(|gpu| gpu.mig_enabled) {
        warn(&format!("all GPUs of this node are in MIG mode, and this policy leaves those out{instead}"));
    }
}

/// Like [`warn_if_unused`], for each selector of a parameter such as `only`.
pub fn warn_if_any_unused(key: &str, only: Option<&[Selector]>, node: &Node) {
    for (n, selector) in only.unwrap_or_default().iter().enumerate() {
        warn_if_unused(&format!("{key}[{n}]"), selector, node);
    }
}

/// Checks a parameter with the GPUs that a policy applies to, such as `only`.
///
/// # Errors
/// A sentence with the name of the parameter and the position in its list.
pub fn check_selectors(key: &str, only: Option<&[Selector]>) -> Result<(), String> {
    let mut all = only.unwrap_or_default().iter().enumerate();
    all.try_for_each(|(n, selector)| selector.check(&format!("{key}[{n}]")))
}

/// Whether a part is a whole GPU that matches `only`, or any whole GPU if `only` is missing. GPUs in MIG
/// mode are excluded: their instances are offered.
#[must_use]
pub fn is_chosen(only: Option<&[Selector]>, part: &Part) -> bool {
    let selected = only.is_none_or(|only| only.iter().any(|selector| selector.fits(part)));
    selected && part.parent.is_none() && !part.mig_enabled
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{NodeBuilder, logged};

    #[test]
    fn a_selector_that_matches_no_gpu_causes_a_warning() {
        let node = NodeBuilder::new().gpus(2, "NVIDIA A100-SXM4-40GB", 40_960).mig(1, "1g.5gb", 1, 4_864);
        let node = node.build().node;
        let only: Vec<Selector> = serde_json::from_str(
            r#"[{"model": "*A100*"}, {"model": "H100*", "index": 0}, {"uuid": "GPU-7"}, {"uuid": "MIG-1-0"}]"#,
        )
        .unwrap();
        let expected = [
            "warning: only[1]: no GPU of this node matches {model: H100*, index: 0}",
            "warning: only[2]: no GPU of this node matches {uuid: GPU-7}",
            "warning: only[3]: no GPU of this node matches {uuid: MIG-1-0}",
        ];
        assert_eq!(logged(|| warn_if_any_unused("only", Some(&only), &node)).1, expected);
        let in_mig = [Selector { index: Some(1), ..Selector::default() }];
        let left_out = "warning: only[0]: all GPUs that match {index: 1} are in MIG mode, and this policy leaves those out";
        assert_eq!(logged(|| warn_if_any_unused("only", Some(&in_mig), &node)).1, [left_out]);
        assert_eq!(logged(|| warn_if_all_mig(&node, "")).1, Vec::<String>::new());
        let all = NodeBuilder::new().gpus(1, "NVIDIA A100-SXM4-40GB", 40_960).mig(0, "1g.5gb", 1, 4_864);
        let left_out =
            "warning: all GPUs of this node are in MIG mode, and this policy leaves those out; instead";
        assert_eq!(logged(|| warn_if_all_mig(&all.build().node, "; instead")).1, [left_out]);
        // Before the first scan the node has no GPUs to match.
        let empty = NodeBuilder::new().build().node;
        assert_eq!(logged(|| warn_if_any_unused("only", Some(&only), &empty)).1, Vec::<String>::new());
    }
}
