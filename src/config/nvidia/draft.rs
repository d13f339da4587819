//! Reads an NVIDIA file as NVIDIA's parser does (keys in any case, text from any scalar), and drafts the Berth file,
//! with comments for settings without an equal.

use crate::file::FileConfig;
use berth_files::yaml::{Document, LeftOut, Problems};
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt;
use std::sync::LazyLock;

/// The key of a YAML merge.
pub(super) const MERGE: &str = "<<";
/// Longest resource name of NVIDIA's plugin, with its domain, bytes.
const RESOURCE_BYTES_MAX: usize = 63;

static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);

/// A setting without an equal in Berth.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its key in the file, such as `flags.mpsRoot`.
    pub key: String,
    /// Why it is not used, and what to do instead.
    pub note: String,
    /// Whether a daemon refuses to start with it, since containers would lack something that they need.
    pub refused: bool,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let effect = if self.refused { "not supported" } else { "set, not used" };
        write!(f, "{effect}: {}: {}", self.key, self.note)
    }
}

/// An NVIDIA file as a Berth file.
#[derive(Clone, Debug)]
pub struct Translated {
    /// Berth's YAML, with each finding as a comment in place of its setting.
    pub yaml: String,
    /// The same, parsed.
    pub file: FileConfig,
    /// Settings without an equal, in the file's order.
    pub findings: Vec<Finding>,
    /// The findings with which a daemon does not start.
    pub refusal: Problems,
}

/// The part of the file to which lines are added.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum FilePart {
    #[default]
    Top,
    Edits,
    Stack,
}

#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) part: FilePart,
    /// The lines of each [`FilePart`].
    lines: [Vec<String>; 3],
    findings: Vec<Finding>,
    /// Keys, and the errors of their values.
    errors: Vec<(String, String)>,
}

impl Draft {
    /// Adds an error with which NVIDIA's plugin would not start either.
    pub(super) fn error(&mut self, key: &str, rule: &str) {
        self.errors.push((key.to_owned(), rule.to_owned()));
    }

    pub(super) fn unused(&mut self, key: &str, note: &str) {
        self.add_finding(key, note, false);
    }

    /// Adds a finding for a setting that containers need.
    pub(super) fn refuse(&mut self, key: &str, note: &str) {
        self.add_finding(key, note, true);
    }

    fn add_finding(&mut self, key: &str, note: &str, refused: bool) {
        // A key may contain line ends; a comment is one line.
        let key = key.replace(char::is_control, " ");
        let finding = Finding { key, note: note.to_owned(), refused };
        self.push_line(format!("# {finding}"));
        self.findings.push(finding);
    }

    pub(super) fn set(&mut self, key: &str, value: &impl Serialize) {
        // JSON is valid YAML, with quotes where they are needed.
        let value = serde_json::to_string(value).unwrap_or_default();
        self.push_line(format!("{key}: {value}"));
    }

    /// Adds a stack entry, with its parameters line by line.
    pub(super) fn add_policy(&mut self, name: &str, parameters: &[String]) {
        let stack = &mut self.lines[FilePart::Stack as usize];
        stack.push(format!("- policy: {name}"));
        if !parameters.is_empty() {
            stack.push("  parameters:".into());
        }
        stack.extend(parameters.iter().map(|line| format!("    {line}")));
    }

    fn push_line(&mut self, line: String) {
        self.lines[self.part as usize].push(line);
    }

    /// The translation. `document` is NVIDIA's, for the lines of errors.
    pub(super) fn finish(self, document: &Document) -> Result<Translated, Problems> {
        let locate = |(key, what)| document.locate(key, what, &LeftOut::default());
        let refused = self.findings.iter().filter(|finding| finding.refused);
        let refused = refused.map(|finding| (finding.key.clone(), finding.note.clone()));
        if !self.errors.is_empty() {
            return Err(self.errors.into_iter().chain(refused).map(locate).collect());
        }
        let refusal = refused.map(locate).collect();
        let [top, edits, stack] = self.lines;
        let mut yaml = top.iter().map(|line| format!("{line}\n")).collect::<String>();
        for (key, lines) in [("containerEdits", edits), ("stack", stack)] {
            let only_comments = lines.iter().all(|line| line.starts_with('#'));
            if !only_comments {
                yaml += &format!("{key}:\n");
            }
            let indent = if only_comments { "" } else { "  " };
            yaml.extend(lines.iter().map(|line| format!("{indent}{line}\n")));
        }
        let file = FileConfig::parse(&yaml)?;
        Ok(Translated { yaml, file, findings: self.findings, refusal })
    }
}

/// A mapping of the file, with the keys that were read so far.
pub(super) struct Section<'v> {
    path: String,
    keys: &'v Map<String, Value>,
    read: Vec<&'static str>,
}

impl<'v> Section<'v> {
    /// `null` is an empty section.
    pub(super) fn new(path: &str, value: &'v Value, draft: &mut Draft) -> Self {
        let keys = match value {
            Value::Object(keys) => keys,
            Value::Null => &*EMPTY,
            _ => {
                draft.error(path, "must be a mapping");
                &*EMPTY
            }
        };
        Self { path: path.to_owned(), keys, read: Vec::new() }
    }

    pub(super) fn path(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The key's value; `null` counts as absent.
    pub(super) fn value(&mut self, key: &'static str) -> Option<&'v Value> {
        self.value_or_null(key).filter(|value| !value.is_null())
    }

    /// The key's value, if it is present.
    pub(super) fn value_or_null(&mut self, key: &'static str) -> Option<&'v Value> {
        self.read.push(key);
        self.keys.iter().find(|(name, _)| name.eq_ignore_ascii_case(key)).map(|(_, value)| value)
    }

    /// The section of this key; an empty one if it is absent.
    pub(super) fn section(&mut self, key: &'static str, draft: &mut Draft) -> Self {
        let value = self.value(key).unwrap_or(&Value::Null);
        Self::new(&self.path(key), value, draft)
    }

    pub(super) fn text(&mut self, key: &'static str, draft: &mut Draft) -> Option<String> {
        let text = scalar(self.value(key)?);
        if text.is_none() {
            draft.error(&self.path(key), "must be text");
        }
        text
    }

    pub(super) fn bool(&mut self, key: &'static str, draft: &mut Draft) -> Option<bool> {
        let value = match self.value(key)? {
            Value::Bool(value) => Some(*value),
            // NVIDIA's plugin accepts the booleans of YAML 1.1.
            Value::String(text) => match text.to_ascii_lowercase().as_str() {
                "y" | "yes" | "on" => Some(true),
                "n" | "no" | "off" => Some(false),
                _ => None,
            },
            _ => None,
        };
        if value.is_none() {
            draft.error(&self.path(key), "must be true or false");
        }
        value
    }

    /// The entries of a list with their paths.
    pub(super) fn list(&mut self, key: &'static str, draft: &mut Draft) -> Vec<(String, &'v Value)> {
        let path = self.path(key);
        match self.value(key) {
            None => Vec::new(),
            Some(Value::Array(entries)) => {
                entries.iter().enumerate().map(|(n, entry)| (format!("{path}[{n}]"), entry)).collect()
            }
            Some(_) => {
                draft.error(&path, "must be a list");
                Vec::new()
            }
        }
    }

    /// Reports the keys that were not read.
    pub(super) fn report_unread(&self, draft: &mut Draft) {
        let read = |name: &str| self.read.iter().any(|key| name.eq_ignore_ascii_case(key));
        // Merges were reported before.
        for name in self.keys.keys().filter(|name| !read(name) && *name != MERGE) {
            draft.unused(
                &self.path(name),
                "unknown key, also ignored by NVIDIA's plugin v0.20: correct or remove it",
            );
        }
    }
}

pub(super) fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(value) => Some(value.to_string()),
        _ => None,
    }
}

/// The full resource name, completed and checked as by NVIDIA's plugin.
pub(super) fn resource_name(path: &str, name: &str, draft: &mut Draft) -> Option<String> {
    let full = if name.starts_with("nvidia.com/") { name.to_owned() } else { format!("nvidia.com/{name}") };
    let name_part = &full["nvidia.com/".len()..];
    let is_alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let is_valid = name_part.split('.').all(|label| {
        label.starts_with(is_alphanumeric)
            && label.ends_with(is_alphanumeric)
            && label.chars().all(|c| is_alphanumeric(c) || c == '-')
    });
    if !is_valid || full.len() > RESOURCE_BYTES_MAX {
        draft.error(
            path,
            &format!("{name:?} is not a resource name; expected lowercase letters, digits, `-` and `.`, at most {RESOURCE_BYTES_MAX} with nvidia.com/"),
        );
        return None;
    }
    Some(full)
}
