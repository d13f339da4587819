//! The file of `berth policy activate`: a list of entries, or any file with such a list under
//! `stack` (a configuration) or `entries` (what the API takes).

use crate::admin::dto::NewStackEntry;
use anyhow::{anyhow, bail};
use serde::Deserialize;
use serde_norway::Value;

/// How it looks, for whoever wrote something else.
const SHAPE: &str = "a list of entries such as `- policy: timeslice`, or such a list under `stack:`";

#[derive(Deserialize)]
struct Whole {
    #[serde(alias = "entries")]
    stack: Vec<NewStackEntry>,
}

/// The entries of a file of this name, which is for errors, and this text.
///
/// # Errors
/// If it has another shape; says which field is wrong, where, and what is expected.
pub(super) fn parse(name: &str, text: &[u8]) -> anyhow::Result<Vec<NewStackEntry>> {
    let shape: Value = serde_norway::from_slice(text).map_err(|e| anyhow!("{name} is not YAML: {e}"))?;
    // The text is read once more as what it is meant to be: only then an error names field and line.
    let entries = match &shape {
        Value::Sequence(_) => serde_norway::from_slice(text),
        Value::Mapping(map) if map.contains_key("stack") || map.contains_key("entries") => {
            serde_norway::from_slice::<Whole>(text).map(|whole| whole.stack)
        }
        Value::Mapping(map) if map.contains_key("policy") => {
            bail!("{name} is no stack: it is one entry and not a list; put `- ` before `policy:`")
        }
        other => bail!("{name} is no stack: expected {SHAPE}; found {}", kind(other)),
    };
    entries.map_err(|error| {
        let error = error.to_string().replace("struct NewStackEntry", "an entry such as {policy: timeslice}");
        anyhow!("{name} is no stack: {error}")
    })
}

fn kind(value: &Value) -> String {
    match value {
        Value::Null => "nothing in it (an empty list is `[]`)".into(),
        Value::Mapping(map) => {
            let keys: Vec<_> = map.keys().filter_map(Value::as_str).take(8).collect();
            format!("a mapping with the keys {}", keys.join(", "))
        }
        Value::String(_) => "text".into(),
        _ => "a single value".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_a_configuration_and_a_body_are_taken() {
        for text in [
            "- policy: mixed\n- {policy: exclusive, onFault: deny}\n",
            "gpus: nvml\nstack: [{policy: mixed}, {policy: exclusive, parameters: {}}]\n",
            r#"{"entries": [{"policy": "mixed"}, {"policy": "exclusive"}]}"#,
        ] {
            let names: Vec<_> = parse("f", text.as_bytes()).unwrap().into_iter().map(|e| e.policy).collect();
            assert_eq!(names, ["mixed", "exclusive"]);
        }
        assert!(parse("f", b"[]").unwrap().is_empty());
    }

    #[test]
    fn what_is_wrong_is_named_with_what_was_expected() {
        for (text, says) in [
            (
                "- policy: mixed\n- policy: mixed\n  onFault: maybe\n",
                &["[1].onFault", "`skip` or `deny`", "line 3"][..],
            ),
            ("stack:\n- policy: mixed\n  parameters: 4\n", &["stack[0].parameters", "expected a map"]),
            ("- policy: mixed\n  permissions: {shareMax: lots}\n", &["permissions.shareMax", "u32"]),
            ("- polizy: mixed\n", &["`polizy`", "expected one of `policy`", "line 1"]),
            ("- onFault: skip\n", &["missing field `policy`"]),
            ("- mixed\n", &["[0]", "expected an entry such as {policy"]),
            ("stack: mixed\n", &["stack", "expected a sequence"]),
            ("policy: mixed\n", &["put `- ` before"]),
            ("gpus: nvml\n", &["keys gpus", "under `stack:`"]),
            ("hello", &["found text"]),
            ("", &["found nothing"]),
            ("a: [", &["not YAML", "line 2"]),
        ] {
            let said = parse("f.yaml", text.as_bytes()).unwrap_err().to_string();
            assert!(said.starts_with("f.yaml is no"), "{said}");
            for word in says {
                assert!(said.contains(word), "{text}: {word}: {said}");
            }
            assert!(!said.contains("untagged"), "{said}");
        }
    }
}
