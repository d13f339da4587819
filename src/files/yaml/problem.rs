//! What is wrong with a document, and where.

use std::fmt;

/// Most characters of what is said of one problem: a value is cut before, a path or a name may be long.
const WHAT_CHARACTERS_MAX: usize = 1000;

/// Most problems of one file that are listed.
const PROBLEMS_MAX: usize = 50;

/// A line and a column of a file, both from 1; columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Line, from 1.
    pub line: u64,
    /// Column, from 1.
    pub column: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

/// One thing that is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where; `None` if no place in the file is to blame.
    pub place: Option<Place>,
    /// The key, such as `stack[0].onFault`; empty for the file as a whole.
    pub key: String,
    /// What is wrong.
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

/// All that is wrong with a file, in the order of its lines; never empty as an error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problems(Vec<Problem>);

impl Problems {
    /// Whether nothing is wrong.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds one; beyond 50 they are dropped, since the first ones say enough.
    pub fn push(&mut self, mut problem: Problem) {
        if self.0.len() < PROBLEMS_MAX {
            if let Some((end, _)) = problem.what.char_indices().nth(WHAT_CHARACTERS_MAX) {
                problem.what.truncate(end);
                problem.what += "...";
            }
            self.0.push(problem);
            self.0.sort_by_key(|problem| problem.place);
        }
    }

    /// In the order of lines.
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
            [one] => one.fmt(f),
            several => {
                let more = if self.is_full() { " or more" } else { "" };
                write!(f, "{}{more} errors", several.len())?;
                several.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}

impl std::error::Error for Problems {}
