//! The file of `berth policy activate`: a list of entries, or any file with such a list under
//! `stack` (a configuration) or `entries` (what the API takes).

use anyhow::{anyhow, bail};
use berth_api::NewStackEntry;
use berth_files::yaml::{Document, LeftOut, Problems, Shape};
use serde::Deserialize;

/// The expected form, for errors.
const SHAPE: &str = "a list of entries such as `- policy: timeslice`, or such a list under `stack:`";

/// A configuration file or a body of the API; other keys are not read.
#[derive(Deserialize)]
struct Whole {
    #[serde(alias = "entries")]
    stack: Vec<NewStackEntry>,
}

/// Parses the entries of a file; `name` is for errors.
///
/// # Errors
/// If it has another form; the message has the wrong fields, their positions, and the expected form.
pub(super) fn parse(name: &str, text: &[u8]) -> anyhow::Result<Vec<NewStackEntry>> {
    let wrong = |problems: Problems| anyhow!("{name} is not a stack: {problems}");
    let text =
        std::str::from_utf8(text).map_err(|e| anyhow!("{name} is not a stack: it is not UTF-8: {e}"))?;
    let document = Document::parse(text).map_err(wrong)?;
    let entries = match document.shape() {
        Shape::List => document.read(LeftOut::default()).whole(),
        Shape::Map(keys) if keys.contains(&"stack") || keys.contains(&"entries") => {
            document.read::<Whole>(LeftOut::default()).whole().map(|whole| whole.stack)
        }
        Shape::Map(keys) if keys.contains(&"policy") => {
            bail!("{name} is not a stack: it is one entry and not a list; put `- ` before `policy:`")
        }
        other => bail!("{name} is not a stack: expected {SHAPE}; found {}", kind(&other)),
    };
    entries.map_err(wrong)
}

fn kind(shape: &Shape<'_>) -> String {
    match shape {
        Shape::Nothing => "an empty file (an empty list is `[]`)".into(),
        Shape::Map(keys) => {
            let keys: Vec<_> = keys.iter().copied().take(8).collect();
            format!("a mapping with the keys {}", keys.join(", "))
        }
        Shape::Text => "text".into(),
        Shape::List | Shape::Scalar => "a single value".into(),
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
    fn an_error_names_the_key_and_what_was_expected() {
        for (text, says) in [
            (
                "- policy: mixed\n- policy: mixed\n  onFault: maybe\n",
                &["line 3", "[1].onFault", "expected one of `skip`, `deny`"][..],
            ),
            ("stack:\n- policy: mixed\n  parameters: 4\n", &["stack[0].parameters", "expected a mapping"]),
            (
                "- policy: mixed\n  permissions: {shareMax: lots}\n",
                &["permissions.shareMax", "a whole number from 0 to 4294967295"],
            ),
            ("- polizy: mixed\n", &["\"polizy\"", "did you mean `policy`?", "line 1"]),
            ("- onFault: skip\n", &["the key `policy` is missing"]),
            ("- mixed\n", &["[0]", "expected a mapping with keys such as `policy`"]),
            ("stack: mixed\n", &["stack", "expected a list"]),
            ("policy: mixed\n", &["put `- ` before"]),
            ("gpus: nvml\n", &["keys gpus", "under `stack:`"]),
            ("hello", &["found text"]),
            ("", &["found nothing"]),
            ("a: [", &["not YAML", "line 1"]),
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
