//! YAML files that people write. The text is parsed once into a tree with the position of each value;
//! types are deserialized from the tree. Reading continues after an error, so that all errors of a file
//! are reported at once, each with its line and column. Messages name keys and values of the file and no
//! Rust types.

mod kubernetes;
mod problem;
mod read;
mod tree;

pub use problem::{Position, Problem, Problems, nearest, plain, shown};
pub use tree::{LeftOut, RootType};

use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use tree::Node;

/// A file's text, parsed.
#[derive(Clone, Debug)]
pub struct Document {
    root: Node,
    /// Problems of repeated keys; only the first of each is in the tree.
    repeated: Problems,
}

impl Document {
    /// Parses a text. An empty text is an empty document.
    ///
    /// # Errors
    /// The first error, if the text is not YAML, exceeds the limits on depth, values and aliases, or is a Kubernetes
    /// object, such as a ConfigMap that was pasted whole: no file that this reads is one.
    pub fn parse(text: &str) -> Result<Self, Problems> {
        let mut repeated = Problems::default();
        let root = tree::parse(text, &mut repeated)?;
        if let Some(problem) = kubernetes::problem(&root, text) {
            return Err(Problems::from_iter([problem]));
        }
        Ok(Self { root, repeated })
    }

    /// The type of the document's root.
    #[must_use]
    pub fn root_type(&self) -> RootType<'_> {
        self.root.root_type()
    }

    /// Deserializes a value and collects all its problems. Invalid parts are left out, as if the file did
    /// not have them, in addition to those in `left_out`.
    #[must_use]
    pub fn read<T: DeserializeOwned>(&self, mut left_out: LeftOut) -> ReadResult<T> {
        let mut problems = self.repeated.clone();
        loop {
            let fault = match read::value(&self.root, &left_out) {
                Ok(value) => return ReadResult { value: Some(value), problems, left_out },
                Err(fault) => fault,
            };
            // Faults have a node; one without would be of the whole file.
            let (key, at) =
                self.root.find(fault.node.unwrap_or_default()).unwrap_or((String::new(), &self.root));
            // A missing key whose value was left out has been reported already.
            if !fault.is_of_left_out(at, &left_out) {
                problems.push(Problem { place: Some(at.place), key, what: fault.what });
            }
            if at.id == self.root.id || problems.is_full() || !left_out.add(at.id) {
                return ReadResult { value: None, problems, left_out };
            }
        }
    }

    /// The problem of a key such as `stack[0].policy`, with its position, or with that of its innermost
    /// parent in the file. List indices do not count items that were left out.
    #[must_use]
    pub fn locate(&self, key: String, what: String, left_out: &LeftOut) -> Problem {
        let Some((known, node)) = self.innermost(&key, left_out) else {
            return Problem { place: None, key, what };
        };
        let path = self.root.find(node.id).map_or(known.clone(), |(path, _)| path);
        Problem { place: Some(node.place), key: path + &key[known.len()..], what }
    }

    /// Every scalar as text, by its path; an empty list is `[]` and an empty mapping is `{}`.
    #[must_use]
    pub fn scalars(&self) -> BTreeMap<String, String> {
        let mut scalars = BTreeMap::new();
        self.root.collect_scalars("", &mut scalars);
        scalars
    }

    /// Leaves out the value of a key, or of its innermost parent in the file. Returns whether one was added.
    pub fn leave_out(&self, key: &str, left_out: &mut LeftOut) -> bool {
        let id = self.innermost(key, left_out).map(|(_, node)| node.id);
        id.is_some_and(|id| left_out.add(id))
    }

    /// The value of a key, or of its innermost parent in the file, with the path of that value.
    fn innermost(&self, key: &str, left_out: &LeftOut) -> Option<(String, &Node)> {
        let mut best: Option<(usize, &Node)> = None;
        self.root.visit("", left_out, &mut |path, node| {
            let suffix = key.strip_prefix(path);
            let is_prefix =
                !path.is_empty() && suffix.is_some_and(|s| s.is_empty() || s.starts_with(['.', '[']));
            // A mapping is visited before its keys, which have the same path.
            if is_prefix && best.is_none_or(|(length, _)| path.len() > length) {
                best = Some((path.len(), node));
            }
        });
        best.map(|(length, node)| (key[..length].to_owned(), node))
    }
}

/// The result of [`Document::read`].
#[derive(Debug)]
pub struct ReadResult<T> {
    /// The value, without the parts that are left out; `None` if too little remains.
    pub value: Option<T>,
    /// All problems.
    pub problems: Problems,
    /// The parts that are left out.
    pub left_out: LeftOut,
}

impl<T> ReadResult<T> {
    /// The value, if there are no problems.
    ///
    /// # Errors
    /// All problems.
    pub fn whole(self) -> Result<T, Problems> {
        match self.value {
            Some(value) if self.problems.is_empty() => Ok(value),
            _ => Err(self.problems),
        }
    }
}

/// Deserializes a value from a text.
///
/// # Errors
/// All problems of the text.
pub fn from_str<T: DeserializeOwned>(text: &str) -> Result<T, Problems> {
    Document::parse(text)?.read(LeftOut::default()).whole()
}

/// Serializes a value.
///
/// # Errors
/// If YAML cannot represent it.
pub fn to_string<T: serde::Serialize>(value: &T) -> Result<String, serde_saphyr::ser::Error> {
    serde_saphyr::to_string(value)
}

#[cfg(test)]
mod tests;
