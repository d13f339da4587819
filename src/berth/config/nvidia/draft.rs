//! The Berth file that a translation writes, with comments for settings without an equal.

use super::{Finding, Translated};
use crate::config::file::FileConfig;
use berth_files::yaml::{Document, LeftOut, Problems};
use serde::Serialize;

/// The part of the file to which lines are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum FilePart {
    #[default]
    Top,
    Edits,
    Stack,
}

#[derive(Debug, Default)]
pub(super) struct Draft {
    pub(super) part: FilePart,
    top: Vec<String>,
    edits: Vec<String>,
    stack: Vec<String>,
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
        self.stack.push(format!("- policy: {name}"));
        if !parameters.is_empty() {
            self.stack.push("  parameters:".into());
        }
        self.stack.extend(parameters.iter().map(|line| format!("    {line}")));
    }

    fn push_line(&mut self, line: String) {
        match self.part {
            FilePart::Top => self.top.push(line),
            FilePart::Edits => self.edits.push(line),
            FilePart::Stack => self.stack.push(line),
        }
    }

    /// The translation. `document` is NVIDIA's, for the lines of errors.
    pub(super) fn finish(self, document: &Document) -> Result<Translated, Problems> {
        let problems = |errors: Vec<(String, String)>| {
            let mut problems = Problems::default();
            for (key, what) in errors {
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
