//! The revision of a stack: its entries with digests in place of tags, and their hash.

use crate::gpu_node::{ENTRIES_BYTES_MAX, EntrySpec};
use crate::sharing_policy::StackEntry;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// The artifact that a `ref` stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedReference {
    /// The repository, without tag and digest.
    pub repository: String,
    /// `sha256:` and the digest of its manifest.
    pub manifest: String,
    /// `sha256:` and the digest of its layer.
    pub layer: String,
}

/// The entries of a GPUNode for the stack of a SharingPolicy. `references` has what each `ref` stands for.
///
/// # Errors
/// If a `ref` is missing in `references`, or the entries are too long for a GPUNode.
pub fn entries(
    stack: &[StackEntry],
    references: &BTreeMap<String, ResolvedReference>,
) -> Result<Vec<EntrySpec>, String> {
    let entry = |(place, given): (usize, &StackEntry)| {
        let StackEntry { name, reference, shipped, parameters, permissions, on_fault } = given;
        let found = match reference {
            None => None,
            Some(reference) => Some(
                references
                    .get(reference)
                    .ok_or_else(|| format!("stack[{place}]: {reference} is not resolved"))?,
            ),
        };
        Ok(EntrySpec {
            name: name.clone(),
            layer: found.map(|found| found.layer.clone()),
            shipped: shipped.filter(|_| found.is_none()),
            repository: found.map(|found| found.repository.clone()),
            manifest: found.map(|found| found.manifest.clone()),
            parameters: parameters.as_ref().map(|parameters| Value::from(parameters.clone()).to_string()),
            permissions: permissions.clone(),
            on_fault: *on_fault,
        })
    };
    let entries: Vec<EntrySpec> = stack.iter().enumerate().map(entry).collect::<Result<_, String>>()?;
    let bytes = canonical(&entries).len();
    if bytes > ENTRIES_BYTES_MAX {
        return Err(format!(
            "stack: its entries have {bytes} bytes of JSON; at most {ENTRIES_BYTES_MAX}: shorten the parameters"
        ));
    }
    Ok(entries)
}

/// The first 12 hexadecimal digits of the SHA-256 of the entries.
#[must_use]
pub fn revision(entries: &[EntrySpec]) -> String {
    let mut hex = format!("{:x}", Sha256::digest(canonical(entries)));
    hex.truncate(12);
    hex
}

/// JSON without spaces, whose keys are sorted.
fn canonical(entries: &[EntrySpec]) -> String {
    serde_json::to_value(entries).map(|value| value.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn stack(value: Value) -> Vec<StackEntry> {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_revision_follows_the_digests_and_the_parameters_but_not_their_order() {
        let of = |value: Value, digit: &str| {
            let found = ResolvedReference {
                repository: "reg.example/a".into(),
                manifest: format!("sha256:{}", digit.repeat(64)),
                layer: format!("sha256:{}", "b".repeat(64)),
            };
            revision(&entries(&stack(value), &[("reg.example/a:1".to_owned(), found)].into()).unwrap())
        };
        let one =
            json!([{"name": "a", "ref": "reg.example/a:1", "parameters": {"x": 1, "y": {"b": 1, "a": 2}}}]);
        let other: Value = serde_json::from_str(
            r#"[{"parameters":{"y":{"a":2,"b":1},"x":1},"ref":"reg.example/a:1","name":"a"}]"#,
        )
        .unwrap();
        assert_eq!(of(one.clone(), "1"), of(other, "1"));
        assert_ne!(of(one.clone(), "1"), of(one.clone(), "2"));
        let mut changed = one.clone();
        changed[0]["parameters"]["x"] = 2.into();
        assert_ne!(of(one.clone(), "1"), of(changed, "1"));
        assert_eq!(of(one, "1").len(), 12);
    }

    #[test]
    fn a_shipped_policy_has_no_digest_and_long_parameters_are_refused() {
        let shipped =
            entries(&stack(json!([{"name": "exclusive", "shipped": true}])), &BTreeMap::new()).unwrap();
        assert_eq!(serde_json::to_value(&shipped).unwrap(), json!([{"name": "exclusive", "shipped": true}]));
        let long = json!([{"name": "a", "shipped": true, "parameters": {"x": "y".repeat(4000)}}]);
        assert!(entries(&stack(long), &BTreeMap::new()).unwrap_err().contains("shorten the parameters"));
    }
}
