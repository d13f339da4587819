//! The result of a scenario, as text and JSON.

use super::expect::Difference;
use serde::Serialize;
use std::fmt::Write as _;

/// The result of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The file's path.
    pub name: String,
    /// The scenario's own description; empty if the file cannot be read.
    pub about: String,
    /// Whether all expectations were met.
    pub passed: bool,
    /// Steps with unmet expectations.
    pub failures: Vec<Failure>,
    /// The error with which reading or running it stopped, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// A step with unmet expectations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    /// Its number, from 1.
    pub step: usize,
    /// Its line in the file, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// Its verb.
    pub verb: String,
    /// The unmet expectations.
    pub differences: Vec<Difference>,
    /// The policy calls of the step, as lines.
    #[serde(rename = "told")]
    pub calls: Vec<String>,
}

impl Report {
    pub(super) fn with_error(name: &str, about: &str, error: String) -> Self {
        let (name, about) = (name.into(), about.into());
        Self { name, about, passed: false, failures: Vec::new(), trouble: Some(error) }
    }

    /// `ok NAME`, or `FAILED NAME` followed by the failures.
    #[must_use]
    pub fn text(&self) -> String {
        if self.passed {
            return format!("ok {}\n", self.name);
        }
        let mut text = format!("FAILED {}", self.name);
        if !self.about.is_empty() {
            text += &format!(": {}", self.about);
        }
        text.push('\n');
        for failure in &self.failures {
            failure.write(&mut text);
        }
        if let Some(error) = &self.trouble {
            // A parser's message may have several lines.
            text += &format!("  {}\n", error.trim_end().replace('\n', "\n  "));
        }
        text
    }
}

impl Failure {
    fn write(&self, text: &mut String) {
        let line = self.line.map_or(String::new(), |line| format!(", line {line}"));
        // Writing to a `String` cannot fail.
        let _ = writeln!(text, "  step {}{line}: {}", self.step, self.verb);
        let width = self.differences.iter().map(|d| d.what.len()).max().unwrap_or_default();
        for Difference { what, expected, got } in &self.differences {
            let _ = writeln!(text, "    {what:width$}  expected {expected}");
            let _ = writeln!(text, "    {:width$}       got {got}", "");
        }
        if !self.calls.is_empty() {
            let _ = writeln!(text, "    policy calls:");
        }
        for line in &self.calls {
            let _ = writeln!(text, "      {line}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_step_is_shown_with_line_differences_and_policy_calls() {
        let failure = Failure {
            step: 2,
            line: Some(7),
            verb: "place".into(),
            differences: vec![Difference::new("gpus", "[0, 0]", "[0, 1]")],
            calls: vec!["fill@abc place: GPU 0, GPU 1 (spread)".into(), "  log: hello".into()],
        };
        let report = Report {
            name: "a.yaml".into(),
            about: "Fills.".into(),
            passed: false,
            failures: vec![failure],
            trouble: None,
        };
        let text = "FAILED a.yaml: Fills.\n  step 2, line 7: place\n    gpus  expected [0, 0]\n               got [0, 1]\n    \
                    policy calls:\n      fill@abc place: GPU 0, GPU 1 (spread)\n        log: hello\n";
        assert_eq!(report.text(), text);
    }
}
