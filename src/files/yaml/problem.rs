//! Problems of a document, with their positions.

use std::fmt;

/// Most characters of one problem's message; values are already truncated, but paths and names may be long.
const MESSAGE_CHARACTERS_MAX: usize = 1000;

/// Most problems that are listed for one file.
const PROBLEMS_MAX: usize = 50;

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

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self(vec![problem])
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
