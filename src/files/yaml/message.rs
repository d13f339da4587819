//! What is wrong with a value, in the words of the file.

use super::tree::Node;
use serde::de::{Error, Expected, Unexpected};
use std::fmt;

/// Most characters of a value that a message shows.
const SHOWN_CHARACTERS_MAX: usize = 60;
/// Most words that a message offers: all keys of a configuration.
const WORDS_MAX: usize = 40;

/// Why a value could not be read.
#[derive(Debug)]
pub(super) struct Fault {
    /// The value or the key; `None` until the reader that has it adds it.
    pub(super) node: Option<u32>,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    /// A mapping lacks a key.
    Missing(&'static str),
    /// All else, in words.
    Other(String),
}

impl Fault {
    /// The innermost value that could not be read is the one to blame.
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
        Self::other(format!("found {}; expected {}", given(&found), plain(&expected.to_string())))
    }
    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }
    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self::other(format!("found {length} values; expected {}", plain(&expected.to_string())))
    }
    fn unknown_variant(word: &str, known: &'static [&'static str]) -> Self {
        Self::other(format!("{} is not known{}", shown(word), suggestion(word, known)))
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

/// A value between quotes, without control characters, and cut where it is long.
#[must_use]
pub fn shown(value: &str) -> String {
    let mut start: String = value.chars().take(SHOWN_CHARACTERS_MAX).collect();
    if start.len() == value.len() {
        return format!("{value:?}");
    }
    start = format!("{start:?}");
    format!("{start}... ({} bytes)", value.len())
}

/// The word of a list that was probably meant.
#[must_use]
pub fn nearest<'w>(word: &str, known: impl IntoIterator<Item = &'w str>) -> Option<&'w str> {
    // A word of more than this is none of ours, and the distance takes the product of the lengths.
    if word.len() > SHOWN_CHARACTERS_MAX {
        return None;
    }
    let lower = word.to_lowercase();
    let distance = |other: &str| strsim::damerau_levenshtein(&lower, &other.to_lowercase());
    let near = known.into_iter().map(|other| (distance(other), other));
    // A third of the letters may differ.
    let near = near.filter(|(distance, other)| *distance * 3 <= other.chars().count().max(3));
    near.min_by_key(|(distance, _)| *distance).map(|(_, other)| other)
}

/// What could have been meant by a word.
pub(super) fn suggestion(word: &str, known: &[&str]) -> String {
    match nearest(word, known.iter().copied()) {
        Some(meant) => format!("; did you mean `{meant}`?"),
        None if known.is_empty() => "; no keys are allowed here".into(),
        None => format!("; expected one of {}", list(known)),
    }
}

/// Words for a message, not all of a long list.
pub(super) fn list(words: &[&str]) -> String {
    let first: Vec<_> = words.iter().take(WORDS_MAX).map(|word| format!("`{word}`")).collect();
    let more = if words.len() > WORDS_MAX { ", ..." } else { "" };
    format!("{}{more}", first.join(", "))
}

/// What was found, as the file has it.
fn given(found: &Unexpected<'_>) -> String {
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

/// What serde's readers of Rust's types say that they expect, in plain words.
#[must_use]
pub fn plain(expected: &str) -> String {
    let whole =
        |least: &dyn fmt::Display, most: &dyn fmt::Display| format!("a whole number from {least} to {most}");
    match expected {
        "f32" | "f64" => "a number".into(),
        "u8" => whole(&u8::MIN, &u8::MAX),
        "u16" => whole(&u16::MIN, &u16::MAX),
        "u32" => whole(&u32::MIN, &u32::MAX),
        "u64" | "usize" => whole(&u64::MIN, &u64::MAX),
        "i8" => whole(&i8::MIN, &i8::MAX),
        "i16" => whole(&i16::MIN, &i16::MAX),
        "i32" => whole(&i32::MIN, &i32::MAX),
        "i64" | "isize" => whole(&i64::MIN, &i64::MAX),
        "a boolean" => "true or false".into(),
        "a string" | "a borrowed string" | "string" => "text".into(),
        "path string" => "a path".into(),
        "a sequence" => "a list".into(),
        "a map" => "a mapping".into(),
        "variant identifier" | "field identifier" => "a word".into(),
        other if other.starts_with("struct ") || other.starts_with("enum ") => "a mapping".into(),
        other => other.to_owned(),
    }
}
