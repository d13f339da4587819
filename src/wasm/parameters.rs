//! Rewrites faults about parameters for operators.
//!
//! A policy of the Rust SDK logs the error of its JSON parser: `parameters: invalid type: string "four", expected
//! u32 at line 1 column 18`. The position is one in generated JSON, since operators write stacks in YAML. It is
//! replaced by the path of the parameter, and the parser's type names by descriptions.

use super::fault::{EARLIER_LINES, PARAMETERS_PREFIX};
use berth_kernel::policy::hooks::{Fault, FaultKind, REASON_BYTES_MAX};

/// Type names of the parser and their descriptions.
const TYPES: [(&str, &str); 11] = [
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

/// Replaces the position in a fault about `parameters` by the parameter's path. Other faults are returned unchanged.
pub(super) fn locate(fault: Fault, parameters: &str) -> Fault {
    if fault.kind != FaultKind::Parameters {
        return fault;
    }
    let mut detail = rewrite(&fault.detail, parameters);
    detail.truncate(detail.floor_char_boundary(REASON_BYTES_MAX));
    Fault { detail, ..fault }
}

fn rewrite(detail: &str, parameters: &str) -> String {
    let message = detail.strip_prefix(PARAMETERS_PREFIX).unwrap_or(detail);
    let Some((error, offset, rest)) = split_position(message) else { return detail.to_owned() };
    let path = path_at(parameters, offset);
    format!("parameters{path}: {}{rest}", describe(error))
}

/// Splits a message into the error before ` at line 1 column 18`, the column (a byte offset) and the rest. `None`
/// without such a position; parameters have only one line.
fn split_position(message: &str) -> Option<(&str, usize, &str)> {
    const POSITION: &str = " at line 1 column ";
    // Earlier log lines and the value in the error may contain such a text, too.
    let error = message.split(EARLIER_LINES).next().unwrap_or(message);
    let start = error.rfind(POSITION)?;
    let column = &message[start + POSITION.len()..];
    let end = column.find(|c: char| !c.is_ascii_digit()).unwrap_or(column.len());
    Some((&message[..start], column[..end].parse().ok()?, &column[end..]))
}

fn describe(error: &str) -> String {
    let error = error.replace("unknown field `", "unknown parameter `");
    let error = error.replace("missing field `", "missing parameter `");
    let (found, expected) = match error.split_once(", expected ") {
        Some((found, expected)) => (found, Some(expected)),
        None => (error.as_str(), None),
    };
    if found.starts_with("data did not match any variant of untagged enum ") {
        return "it has none of the accepted forms".to_owned();
    }
    let Some(expected) = expected else { return found.to_owned() };
    let described = TYPES.iter().find(|(name, _)| *name == expected).map_or(expected, |(_, text)| text);
    let described = if described.starts_with("struct ") { "a mapping" } else { described };
    format!("{found}, expected {described}")
}

/// An object or a list that is open at an offset of JSON.
enum Level {
    /// An object, with the key of the present value; `None`: no colon was read.
    Object(Option<String>),
    /// A list, with the index of the present item.
    List(usize),
}

/// The path of the value in which, or at which, the first `end` bytes of this JSON end: `.overrides[0].replicas`.
/// Empty for the outermost value. An error at a key, such as an unknown one, is about the object.
fn path_at(json: &str, end: usize) -> String {
    let mut open = Vec::new();
    let mut last_string = "";
    let mut at = 0;
    while at < json.len().min(end) {
        let start = at;
        at += 1;
        match json.as_bytes()[start] {
            b'{' => open.push(Level::Object(None)),
            b'[' => open.push(Level::List(0)),
            b'}' | b']' => drop(open.pop()),
            b'"' => {
                at = string_end(json, start);
                last_string = &json[start..at];
            }
            b':' => {
                if let Some(Level::Object(key)) = open.last_mut() {
                    *key = serde_json::from_str(last_string).ok();
                }
            }
            b',' => match open.last_mut() {
                Some(Level::Object(key)) => *key = None,
                Some(Level::List(index)) => *index += 1,
                None => {}
            },
            _ => {}
        }
    }
    let segment = |level: &Level| match level {
        Level::Object(None) => String::new(),
        Level::Object(Some(key)) => format!(".{}", key.replace(char::is_control, "\u{fffd}")),
        Level::List(index) => format!("[{index}]"),
    };
    open.iter().map(segment).collect()
}

/// The offset behind the string that starts at `at`.
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
    #[allow(dead_code)] // only deserialized
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

    /// The rewritten error of the parser, logged as a policy of the SDK logs it.
    fn located(parameters: &str) -> String {
        let error = serde_json::from_str::<Shares>(parameters).unwrap_err();
        let detail = format!("{PARAMETERS_PREFIX}{error}");
        locate(Fault { kind: FaultKind::Parameters, detail }, parameters).to_string()
    }

    #[test]
    fn an_error_has_the_path_of_the_parameter_and_no_position() {
        for (parameters, message) in [
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
            assert_eq!(located(parameters), message, "{parameters}");
        }
        let message = located(r#"{"replica":2}"#);
        assert!(
            message.starts_with("parameters: unknown parameter `replica`, expected one of `replicas`, "),
            "{message}"
        );
        assert!(!message.contains("column"), "{message}");
    }

    #[test]
    fn other_texts_are_unchanged() {
        for detail in
            ["parameters: replicas: 0 is out of range: 1 to 128", "parameters: no; logged before: a"]
        {
            assert_eq!(rewrite(detail, "{}"), detail);
        }
        let detail = "parameters: invalid type: null, expected f64 at line 1 column 5; logged before: hm";
        assert_eq!(
            rewrite(detail, r#"{"a":1}"#),
            "parameters.a: invalid type: null, expected a number; logged before: hm"
        );
        let trap = Fault { kind: FaultKind::Trap, detail: "x at line 1 column 2".into() };
        assert_eq!(locate(trap.clone(), "{}"), trap);
    }
}
