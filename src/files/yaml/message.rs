//! Error messages on values, in terms of the file.

use super::tree::Node;
use serde::de::{Error, Expected, Unexpected};
use std::fmt;

/// Most characters of a value that a message shows.
const SHOWN_CHARACTERS_MAX: usize = 60;
/// Most expected names that a message lists: all keys of a configuration.
const NAMES_MAX: usize = 40;

/// Why a value could not be deserialized.
#[derive(Debug)]
pub(super) struct Fault {
    /// The value or the key; `None` until [`Fault::at`].
    pub(super) node: Option<u32>,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    /// A mapping lacks a key.
    Missing(&'static str),
    /// Any other error, as a message.
    Other(String),
}

impl Fault {
    /// Adds the node, unless an inner value has been added.
    pub(super) fn at(mut self, node: &Node) -> Self {
        self.node.get_or_insert(node.id);
        self
    }

    pub(super) fn other(what: impl Into<String>) -> Self {
        Self { node: None, kind: Kind::Other(what.into()) }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(key) => write!(f, "the key `{key}` is missing"),
            Self::Other(what) => f.write_str(what),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}

impl std::error::Error for Fault {}

impl Error for Fault {
    fn custom<T: fmt::Display>(what: T) -> Self {
        Self::other(what.to_string())
    }
    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::other(format!("found {}; expected {}", found_text(&found), plain(&expected.to_string())))
    }
    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }
    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self::other(format!("found {length} values; expected {}", plain(&expected.to_string())))
    }
    fn unknown_variant(name: &str, known: &'static [&'static str]) -> Self {
        Self::other(format!("{} is not known{}", shown(name), suggestion(name, known)))
    }
    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        Self::other(format!("the key {} is not known{}", shown(key), suggestion(key, known)))
    }
    fn missing_field(key: &'static str) -> Self {
        Self { node: None, kind: Kind::Missing(key) }
    }
    fn duplicate_field(key: &'static str) -> Self {
        Self::other(format!("the key `{key}` is given twice"))
    }
}

/// A value in quotes, with control characters escaped, and truncated if it is long.
#[must_use]
pub fn shown(value: &str) -> String {
    let mut start: String = value.chars().take(SHOWN_CHARACTERS_MAX).collect();
    if start.len() == value.len() {
        return format!("{value:?}");
    }
    start = format!("{start:?}");
    format!("{start}... ({} bytes)", value.len())
}

/// The known name that was probably meant.
#[must_use]
pub fn nearest<'n>(name: &str, known: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    // No known name is longer, and the time of the comparison is the product of the lengths.
    if name.len() > SHOWN_CHARACTERS_MAX {
        return None;
    }
    let lower = name.to_lowercase();
    let distance = |other: &str| strsim::damerau_levenshtein(&lower, &other.to_lowercase());
    let candidates = known.into_iter().map(|other| (distance(other), other));
    // A third of the letters may differ.
    let similar = candidates.filter(|(distance, other)| *distance * 3 <= other.chars().count().max(3));
    similar.min_by_key(|(distance, _)| *distance).map(|(_, other)| other)
}

/// The known names that an unknown one could mean, as the end of a message.
pub(super) fn suggestion(name: &str, known: &[&str]) -> String {
    match nearest(name, known.iter().copied()) {
        Some(meant) => format!("; did you mean `{meant}`?"),
        None if known.is_empty() => "; no keys are allowed here".into(),
        None => format!("; expected one of {}", list(known)),
    }
}

/// Names for a message; a long list is truncated.
pub(super) fn list(names: &[&str]) -> String {
    let first: Vec<_> = names.iter().take(NAMES_MAX).map(|name| format!("`{name}`")).collect();
    let more = if names.len() > NAMES_MAX { ", ..." } else { "" };
    format!("{}{more}", first.join(", "))
}

/// The value that was found, as in the file.
fn found_text(found: &Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        Unexpected::Float(value) => value.to_string(),
        Unexpected::Str(text) => shown(text),
        Unexpected::Unit | Unexpected::Option => "nothing".into(),
        Unexpected::Seq => "a list".into(),
        Unexpected::Map => "a mapping".into(),
        other => other.to_string(),
    }
}

/// What a deserializer expects, in terms of YAML instead of serde's terms of Rust types.
#[must_use]
pub fn plain(expected: &str) -> String {
    let integer =
        |min: &dyn fmt::Display, max: &dyn fmt::Display| format!("a whole number from {min} to {max}");
    match expected {
        "f32" | "f64" => "a number".into(),
        "u8" => integer(&u8::MIN, &u8::MAX),
        "u16" => integer(&u16::MIN, &u16::MAX),
        "u32" => integer(&u32::MIN, &u32::MAX),
        "u64" | "usize" => integer(&u64::MIN, &u64::MAX),
        "i8" => integer(&i8::MIN, &i8::MAX),
        "i16" => integer(&i16::MIN, &i16::MAX),
        "i32" => integer(&i32::MIN, &i32::MAX),
        "i64" | "isize" => integer(&i64::MIN, &i64::MAX),
        "a boolean" => "true or false".into(),
        "a string" | "a borrowed string" | "string" => "text".into(),
        "path string" => "a path".into(),
        "a sequence" => "a list".into(),
        "a map" => "a mapping".into(),
        "variant identifier" | "field identifier" => "a keyword".into(),
        other if other.starts_with("struct ") || other.starts_with("enum ") => "a mapping".into(),
        other => other.to_owned(),
    }
}
