//! Problems of a document, with their positions, and the texts of messages in terms of the file.

use std::fmt;

/// Most characters of one problem's message; values are already truncated, but paths and names may be long.
const MESSAGE_CHARACTERS_MAX: usize = 1000;
/// Most problems that are listed for one file.
const PROBLEMS_MAX: usize = 50;
/// Most characters of a value that a message shows.
const SHOWN_CHARACTERS_MAX: usize = 60;
/// Most expected names that a message lists: all keys of a configuration.
const NAMES_MAX: usize = 40;

/// A position in a file; columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Line, from 1.
    pub line: u64,
    /// Column, from 1.
    pub column: u64,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// One problem of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Its position; `None` if it has none in the file.
    pub place: Option<Position>,
    /// The key, such as `stack[0].onFault`; empty for the file as a whole.
    pub key: String,
    /// The message.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = self.place {
            write!(f, "{place}: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.what)
    }
}

/// The problems of a file, in the order of their positions; never empty as an error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(Vec<Problem>);

impl Problems {
    /// Whether there are no problems.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a problem; beyond 50, further ones are dropped.
    pub fn push(&mut self, mut problem: Problem) {
        if self.0.len() < PROBLEMS_MAX {
            if let Some((end, _)) = problem.what.char_indices().nth(MESSAGE_CHARACTERS_MAX) {
                problem.what.truncate(end);
                problem.what += "...";
            }
            self.0.push(problem);
            self.0.sort_by_key(|problem| problem.place);
        }
    }

    /// The problems in the order of their positions.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.0.iter()
    }

    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= PROBLEMS_MAX
    }
}

impl FromIterator<Problem> for Problems {
    fn from_iter<I: IntoIterator<Item = Problem>>(list: I) -> Self {
        let mut problems = Self::default();
        list.into_iter().for_each(|problem| problems.push(problem));
        problems
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [problem] => problem.fmt(f),
            problems => {
                let more = if self.is_full() { " or more" } else { "" };
                write!(f, "{}{more} errors", problems.len())?;
                problems.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}

impl std::error::Error for Problems {}

/// A value in quotes, with control characters escaped, and truncated if it is long.
#[must_use]
pub fn shown(value: &str) -> String {
    match value.char_indices().nth(SHOWN_CHARACTERS_MAX) {
        None => format!("{value:?}"),
        Some((end, _)) => format!("{:?}... ({} bytes)", &value[..end], value.len()),
    }
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
