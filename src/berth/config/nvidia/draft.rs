//! Berth's file while it is being written, with comments where there is no equal.

use super::{Finding, Translated};
use crate::config::file::FileConfig;
use berth_files::yaml::{Document, LeftOut, Problems};
use serde::Serialize;

/// The part of the file that is being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Place {
    #[default]
    Top,
    Edits,
    Stack,
}

#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) place: Place,
    top: Vec<String>,
    edits: Vec<String>,
    stack: Vec<String>,
    findings: Vec<Finding>,
    /// Keys, and what is wrong with their values.
    errors: Vec<(String, String)>,
}

impl Draft {
    /// What NVIDIA's plugin would not start with either.
    pub(super) fn error(&mut self, key: &str, rule: &str) {
        self.errors.push((key.to_owned(), rule.to_owned()));
    }

    pub(super) fn unused(&mut self, key: &str, note: &str) {
        self.found(key, note, false);
    }

    /// A setting without which containers would lack what they ask for.
    pub(super) fn refuse(&mut self, key: &str, note: &str) {
        self.found(key, note, true);
    }

    fn found(&mut self, key: &str, note: &str, refused: bool) {
        // A key may be any text of the file; a comment is one line.
        let key = key.replace(char::is_control, " ");
        let finding = Finding { key, note: note.to_owned(), refused };
        self.line(format!("# {finding}"));
        self.findings.push(finding);
    }

    pub(super) fn set(&mut self, key: &str, value: &impl Serialize) {
        // JSON is YAML, and quotes what must be quoted.
        let value = serde_json::to_string(value).unwrap_or_default();
        self.line(format!("{key}: {value}"));
    }

    /// An entry of the stack, its parameters line by line.
    pub(super) fn policy(&mut self, name: &str, parameters: &[String]) {
        self.stack.push(format!("- policy: {name}"));
        if !parameters.is_empty() {
            self.stack.push("  parameters:".into());
        }
        self.stack.extend(parameters.iter().map(|line| format!("    {line}")));
    }

    fn line(&mut self, line: String) {
        match self.place {
            Place::Top => self.top.push(line),
            Place::Edits => self.edits.push(line),
            Place::Stack => self.stack.push(line),
        }
    }

    /// `document` is NVIDIA's, for the lines of what is wrong with it.
    pub(super) fn finish(self, document: &Document) -> Result<Translated, Problems> {
        let problems = |wrong: Vec<(String, String)>| {
            let mut problems = Problems::default();
            for (key, what) in wrong {
                problems.push(document.locate(key, what, &LeftOut::default()));
            }
            problems
        };
        let refused = self.findings.iter().filter(|finding| finding.refused);
        let refused = refused.map(|f| (f.key.clone(), f.note.clone()));
        if !self.errors.is_empty() {
            return Err(problems(self.errors.into_iter().chain(refused).collect()));
        }
        let refusal = problems(refused.collect());
        let mut yaml = self.top.iter().map(|line| format!("{line}\n")).collect::<String>();
        for (key, lines) in [("containerEdits", &self.edits), ("stack", &self.stack)] {
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
