//! What came of a scenario, for people and for programs.

use super::expect::Difference;
use serde::Serialize;
use std::fmt::Write as _;

/// What came of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// The file, as it was named.
    pub name: String,
    /// What it shows, by its own word; empty where it cannot be read.
    pub about: String,
    /// Whether all was as expected.
    pub passed: bool,
    /// Steps that went otherwise.
    pub failures: Vec<Failure>,
    /// What kept it from being read or from going on, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// One step that went otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    /// Which, from 1.
    pub step: usize,
    /// Its line in the file, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// What it does.
    pub verb: String,
    /// What was not as expected.
    pub differences: Vec<Difference>,
    /// What policies were asked meanwhile and said, in lines.
    pub told: Vec<String>,
}

impl Report {
    pub(super) fn trouble(name: &str, about: &str, trouble: String) -> Self {
        let (name, about) = (name.into(), about.into());
        Self { name, about, passed: false, failures: Vec::new(), trouble: Some(trouble) }
    }

    /// `ok NAME`, or `FAILED NAME` and below it what differs.
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
        if let Some(trouble) = &self.trouble {
            // A parser's words may have several lines.
            text += &format!("  {}\n", trouble.trim_end().replace('\n', "\n  "));
        }
        text
    }
}

impl Failure {
    fn write(&self, text: &mut String) {
        let line = self.line.map_or(String::new(), |line| format!(", line {line}"));
        // Writing to a text cannot fail.
        let _ = writeln!(text, "  step {}{line}: {}", self.step, self.verb);
        let width = self.differences.iter().map(|d| d.what.len()).max().unwrap_or_default();
        for Difference { what, expected, got } in &self.differences {
            let _ = writeln!(text, "    {what:width$}  expected {expected}");
            let _ = writeln!(text, "    {:width$}       got {got}", "");
        }
        if !self.told.is_empty() {
            let _ = writeln!(text, "    the policies said:");
        }
        for line in &self.told {
            let _ = writeln!(text, "      {line}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_step_is_shown_with_line_difference_and_the_policys_words() {
        let failure = Failure {
            step: 2,
            line: Some(7),
            verb: "place".into(),
            differences: vec![Difference::of("gpus", "[0, 0]", "[0, 1]")],
            told: vec!["fill@abc place: GPU 0, GPU 1 (spread)".into(), "  log: hello".into()],
        };
        let report = Report {
            name: "a.yaml".into(),
            about: "Fills.".into(),
            passed: false,
            failures: vec![failure],
            trouble: None,
        };
        let text = "FAILED a.yaml: Fills.\n  step 2, line 7: place\n    gpus  expected [0, 0]\n               got [0, 1]\n    \
                    the policies said:\n      fill@abc place: GPU 0, GPU 1 (spread)\n        log: hello\n";
        assert_eq!(report.text(), text);
    }
}
