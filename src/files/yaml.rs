//! YAML files that people write. The text is parsed once into a tree that knows the line of each value; types are
//! read from the tree. Reading goes on after an error, so that all errors of a file are found at once, each with its
//! line and column. Messages name keys and values of the file and no types of the program.

mod message;
mod problem;
mod read;
mod tree;

pub use message::{nearest, plain, shown};
pub use problem::{Place, Problem, Problems};
pub use read::LeftOut;
pub use tree::Shape;

use message::Fault;
use serde::de::DeserializeOwned;
use tree::Node;

/// A file's text, parsed.
#[derive(Clone, Debug)]
pub struct Document {
    root: Node,
    /// Keys that occur twice; the later ones are not in the tree.
    repeated: Problems,
}

impl Document {
    /// Parses a text. An empty one is a document with nothing in it.
    ///
    /// # Errors
    /// If the text is not YAML or beyond the limits on depth, values and aliases; the first such place.
    pub fn parse(text: &str) -> Result<Self, Problems> {
        let mut repeated = Problems::default();
        let root = tree::parse(text, &mut repeated)?;
        Ok(Self { root, repeated })
    }

    /// What the document is as a whole.
    #[must_use]
    pub fn shape(&self) -> Shape<'_> {
        self.root.shape()
    }

    /// Reads a value and says all that is wrong with it. What cannot be read is left out of the value, as if the
    /// file did not have it, and so is what is left out from the beginning.
    #[must_use]
    pub fn read<T: DeserializeOwned>(&self, mut without: LeftOut) -> Reading<T> {
        let mut problems = self.repeated.clone();
        loop {
            let Fault { node, kind } = match read::value(&self.root, &without) {
                Ok(value) => return Reading { value: Some(value), problems, left_out: without },
                Err(fault) => fault,
            };
            // Faults come with a node; one without would be of the file as a whole.
            let (key, at) = self.root.find(node.unwrap_or_default()).unwrap_or((String::new(), &self.root));
            // A key that was left out is known to be there, and has been reported.
            if !read::follows(&kind, at, &without) {
                problems.push(Problem { place: Some(at.place), key, what: kind.to_string() });
            }
            if at.id == self.root.id || problems.is_full() || !without.add(at.id) {
                return Reading { value: None, problems, left_out: without };
            }
        }
    }

    /// The problem of a key such as `stack[0].policy`, with its place; where the key is not given, with that of what it
    /// belongs to. A list counts as it was read, so without the items that were left out.
    #[must_use]
    pub fn locate(&self, key: String, what: String, left_out: &LeftOut) -> Problem {
        let Some((seen, node)) = self.nearest(&key, left_out) else {
            return Problem { place: None, key, what };
        };
        let real = self.root.find(node.id).map_or(seen.clone(), |(real, _)| real);
        Problem { place: Some(node.place), key: real + &key[seen.len()..], what }
    }

    /// Leaves out the value of a key, or of the innermost that it belongs to. Whether there was one.
    pub fn leave_out(&self, key: &str, left_out: &mut LeftOut) -> bool {
        let id = self.nearest(key, left_out).map(|(_, node)| node.id);
        id.is_some_and(|id| left_out.add(id))
    }

    /// The value of a key, or of the innermost that it belongs to, with its key.
    fn nearest(&self, key: &str, left_out: &LeftOut) -> Option<(String, &Node)> {
        let mut best: Option<(usize, &Node)> = None;
        self.root.walk("", left_out, &mut |path, node| {
            let rest = key.strip_prefix(path);
            let within = !path.is_empty() && rest.is_some_and(|r| r.is_empty() || r.starts_with(['.', '[']));
            // A mapping comes before its keys, which have the same path.
            if within && best.is_none_or(|(length, _)| path.len() > length) {
                best = Some((path.len(), node));
            }
        });
        best.map(|(length, node)| (key[..length].to_owned(), node))
    }
}

/// What could be read.
#[derive(Debug)]
pub struct Reading<T> {
    /// The value, without what is left out; `None` if too little remains.
    pub value: Option<T>,
    /// All that is wrong.
    pub problems: Problems,
    /// What could not be read.
    pub left_out: LeftOut,
}

impl<T> Reading<T> {
    /// The value, if nothing is wrong.
    ///
    /// # Errors
    /// All that is wrong.
    pub fn whole(self) -> Result<T, Problems> {
        match self.value {
            Some(value) if self.problems.is_empty() => Ok(value),
            _ => Err(self.problems),
        }
    }
}

/// Reads a value from a text.
///
/// # Errors
/// All that is wrong with it.
pub fn from_str<T: DeserializeOwned>(text: &str) -> Result<T, Problems> {
    Document::parse(text)?.read(LeftOut::default()).whole()
}

/// Writes a value.
///
/// # Errors
/// If it has no form in YAML.
pub fn to_string<T: serde::Serialize>(value: &T) -> Result<String, serde_saphyr::ser::Error> {
    serde_saphyr::to_string(value)
}

#[cfg(test)]
mod tests;
