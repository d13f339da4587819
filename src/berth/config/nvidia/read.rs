//! Reads an NVIDIA file as NVIDIA's parser does: keys in any case, text from any scalar.

use super::draft::Draft;
use serde_json::{Map, Value};
use std::sync::LazyLock;

/// The key of a YAML merge.
pub(super) const MERGE: &str = "<<";
/// Longest resource name of NVIDIA's plugin, with its domain, bytes.
const RESOURCE_BYTES_MAX: usize = 63;

static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);

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
        self.read.push(key);
        let mut named = self.keys.iter().filter(|(name, _)| name.eq_ignore_ascii_case(key));
        named.next().map(|(_, value)| value).filter(|value| !value.is_null())
    }

    /// Whether the key is present, even with `null`.
    pub(super) fn has(&self, key: &str) -> bool {
        self.keys.keys().any(|name| name.eq_ignore_ascii_case(key))
    }

    pub(super) fn section(&mut self, key: &'static str, draft: &mut Draft) -> Option<Self> {
        let value = self.value(key)?;
        Some(Self::new(&self.path(key), value, draft))
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
