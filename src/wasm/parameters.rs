//! A policy's complaint about its parameters, for whoever wrote them.
//!
//! The kit for Rust says what its JSON parser says: `parameters: invalid type: string "four", expected u32
//! at line 1 column 18`. That position is one in JSON that nobody wrote, since a stack is YAML; the
//! parameter that lies there is what its author looks for.

use super::fault::{ABOUT_PARAMETERS, EARLIER};
use berth_kernel::policy::{Fault, FaultKind, REASON_BYTES_MAX};

/// What a parser of Rust calls things, and what an operator does. Whole words only.
const WORDS: [(&str, &str); 11] = [
    ("u8", "a whole number from 0 to 255"),
    ("u16", "a whole number from 0 to 65535"),
    ("u32", "a whole number, 0 or more"),
    ("u64", "a whole number, 0 or more"),
    ("usize", "a whole number, 0 or more"),
    ("i32", "a whole number"),
    ("i64", "a whole number"),
    ("f32", "a number"),
    ("f64", "a number"),
    ("a sequence", "a list"),
    ("a map", "a mapping"),
];

/// A fault about `parameters` names the one that is wrong, in place of a position in their JSON.
/// Other faults stay as they are.
pub(super) fn told(fault: Fault, parameters: &str) -> Fault {
    if fault.kind != FaultKind::Parameters {
        return fault;
    }
    let mut detail = plain(&fault.detail, parameters);
    detail.truncate(detail.floor_char_boundary(REASON_BYTES_MAX));
    Fault { detail, ..fault }
}

fn plain(detail: &str, parameters: &str) -> String {
    let words = detail.strip_prefix(ABOUT_PARAMETERS).unwrap_or(detail);
    let Some((what, at, rest)) = positioned(words) else { return detail.to_owned() };
    let path = path_at(parameters, at);
    format!("parameters{path}: {}{rest}", in_plain_words(what))
}

/// The words before ` at line 1 column 18`, how many bytes that is from the beginning, and the words
/// behind it. `None` where there is no position, or not in the only line that parameters have.
fn positioned(words: &str) -> Option<(&str, usize, &str)> {
    const BEFORE: &str = " at line 1 column ";
    // What it said before is quoted behind it, and the value in front may hold these words, too.
    let own = words.split(EARLIER).next().unwrap_or(words);
    let start = own.rfind(BEFORE)?;
    let number = &words[start + BEFORE.len()..];
    let end = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
    Some((&words[..start], number[..end].parse().ok()?, &number[end..]))
}

fn in_plain_words(what: &str) -> String {
    let what = what.replace("unknown field `", "unknown parameter `");
    let what = what.replace("missing field `", "missing parameter `");
    let (found, expected) = match what.split_once(", expected ") {
        Some((found, expected)) => (found, Some(expected)),
        None => (what.as_str(), None),
    };
    if found.starts_with("data did not match any variant of untagged enum ") {
        return "it has none of the forms that are taken here".to_owned();
    }
    let Some(expected) = expected else { return found.to_owned() };
    let plain = WORDS.iter().find(|(word, _)| *word == expected).map_or(expected, |(_, plain)| plain);
    let plain = if plain.starts_with("struct ") { "a mapping" } else { plain };
    format!("{found}, expected {plain}")
}

/// Where the value is that the first `end` bytes of this JSON end in or at: `.overrides[0].replicas`.
/// Nothing for the whole.
fn path_at(json: &str, end: usize) -> String {
    let mut walk = Walk::default();
    let mut at = 0;
    while at < json.len().min(end) {
        at = walk.step(json, at);
    }
    walk.path()
}

/// What is open at some place of a JSON text that is known to be one.
#[derive(Default)]
struct Walk {
    open: Vec<Step>,
}

enum Step {
    /// In an object: the key whose value comes, once it is known.
    Key { key: Option<String>, value: bool },
    /// In a list: the number of the item.
    Item(usize),
}

impl Walk {
    /// Takes the token at `at`, and answers where the next one is.
    fn step(&mut self, json: &str, at: usize) -> usize {
        match json.as_bytes()[at] {
            b'{' => self.open.push(Step::Key { key: None, value: false }),
            b'[' => self.open.push(Step::Item(0)),
            b'}' | b']' => {
                self.open.pop();
            }
            b':' => {
                if let Some(Step::Key { value, .. }) = self.open.last_mut() {
                    *value = true;
                }
            }
            b',' => match self.open.last_mut() {
                Some(Step::Item(number)) => *number += 1,
                Some(step) => *step = Step::Key { key: None, value: false },
                None => {}
            },
            b'"' => {
                let end = string_end(json, at);
                if let Some(Step::Key { key, value: false }) = self.open.last_mut() {
                    *key = serde_json::from_str(&json[at..end]).ok();
                }
                return end;
            }
            _ => {}
        }
        at + 1
    }

    fn path(&self) -> String {
        let step = |step: &Step| match step {
            // At the key itself it is the object that has a wrong one.
            Step::Key { key: Some(key), value: true } => {
                format!(".{}", key.replace(char::is_control, "\u{fffd}"))
            }
            Step::Key { .. } => String::new(),
            Step::Item(number) => format!("[{number}]"),
        };
        self.open.iter().map(step).collect()
    }
}

/// Behind the string that begins at `at`.
fn string_end(json: &str, at: usize) -> usize {
    let bytes = json.as_bytes();
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != b'"' {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    (end + 1).min(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::collections::BTreeMap;

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "camelCase", deny_unknown_fields, default)]
    #[allow(dead_code)] // it is read, and never looked at
    struct Shares {
        replicas: u32,
        resource: String,
        settle: u8,
        only: Option<Vec<String>>,
        overrides: Vec<Override>,
        by_model: BTreeMap<String, i64>,
    }

    impl Default for Shares {
        fn default() -> Self {
            let (only, overrides, by_model) = (None, Vec::new(), BTreeMap::new());
            Self { replicas: 4, resource: "a/b".into(), settle: 0, only, overrides, by_model }
        }
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Override {
        model: String,
        replicas: u32,
    }

    /// What becomes of the parser's own words, as a policy of the kit logs them.
    fn said(parameters: &str) -> String {
        let error = serde_json::from_str::<Shares>(parameters).unwrap_err();
        let detail = format!("{ABOUT_PARAMETERS}{error}");
        told(Fault { kind: FaultKind::Parameters, detail }, parameters).to_string()
    }

    #[test]
    fn the_parameter_that_is_wrong_is_named_and_no_position() {
        for (parameters, words) in [
            (
                r#"{"resource":"x/y","replicas":"four"}"#,
                "parameters.replicas: invalid type: string \"four\", expected a whole number, 0 or more",
            ),
            (
                r#"{"replicas":-1}"#,
                "parameters.replicas: invalid value: integer `-1`, expected a whole number, 0 or more",
            ),
            (
                r#"{"settle":256}"#,
                "parameters.settle: invalid value: integer `256`, expected a whole number from 0 to 255",
            ),
            (r#"{"resource":true}"#, "parameters.resource: invalid type: boolean `true`, expected a string"),
            (r#"{"only":"all"}"#, "parameters.only: invalid type: string \"all\", expected a list"),
            (r#"{"only":["a",2]}"#, "parameters.only[1]: invalid type: integer `2`, expected a string"),
            (
                r#"{"byModel":{"a \"b\\":null}}"#,
                "parameters.byModel.a \"b\\: invalid type: null, expected a whole number",
            ),
            (
                r#"{"overrides":[{"model":"l4","replicas":2},{"model":"a","replicas":[]}]}"#,
                "parameters.overrides[1].replicas: invalid type: sequence, expected a whole number, 0 or more",
            ),
            (r#"{"overrides":[{"model":"l4"}]}"#, "parameters.overrides[0]: missing parameter `replicas`"),
            (
                r#"{"overrides":[{"model":"l4","x":1}]}"#,
                "parameters.overrides[0]: unknown parameter `x`, expected `model` or `replicas`",
            ),
        ] {
            assert_eq!(said(parameters), words, "{parameters}");
        }
        let words = said(r#"{"replica":2}"#);
        assert!(
            words.starts_with("parameters: unknown parameter `replica`, expected one of `replicas`, "),
            "{words}"
        );
        assert!(!words.contains("column"), "{words}");
    }

    #[test]
    fn what_the_policy_said_itself_stays() {
        for detail in
            ["parameters: replicas: 0 is out of range: 1 to 128", "parameters: no; before that it said: a"]
        {
            assert_eq!(plain(detail, "{}"), detail);
        }
        let detail =
            "parameters: invalid type: null, expected f64 at line 1 column 5; before that it said: hm";
        assert_eq!(
            plain(detail, r#"{"a":1}"#),
            "parameters.a: invalid type: null, expected a number; before that it said: hm"
        );
        let trap = Fault { kind: FaultKind::Trap, detail: "x at line 1 column 2".into() };
        assert_eq!(told(trap.clone(), "{}"), trap);
    }
}
