//! The result of a scenario, as text and JSON, and policy calls as lines for authors of policies.

use super::expect::Mismatch;
use berth_core::stack::RecordedCall;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::describe;
use berth_kernel::policy::hooks::Hook;
use serde::Serialize;
use std::collections::VecDeque;
use std::fmt::Write as _;

/// The result of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ScenarioReport {
    /// The file's path.
    pub name: String,
    /// The scenario's own description; empty if the file cannot be read.
    pub about: String,
    /// Whether all expectations were met.
    pub passed: bool,
    /// Steps with unmet expectations.
    pub failures: Vec<FailedStep>,
    /// The error with which reading or running it stopped, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// A step with unmet expectations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FailedStep {
    /// Its number, from 1.
    pub step: usize,
    /// Its line in the file, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// Its verb.
    pub verb: String,
    /// The unmet expectations.
    pub differences: Vec<Mismatch>,
    /// The policy calls of the step, as lines.
    #[serde(rename = "told")]
    pub calls: Vec<String>,
}

impl ScenarioReport {
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

impl FailedStep {
    fn write(&self, text: &mut String) {
        let line = self.line.map_or(String::new(), |line| format!(", line {line}"));
        // Writing to a `String` cannot fail.
        let _ = writeln!(text, "  step {}{line}: {}", self.step, self.verb);
        let width = self.differences.iter().map(|d| d.what.len()).max().unwrap_or_default();
        for Mismatch { what, expected, got } in &self.differences {
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

/// The policy, the hook and the answer, followed by the lines that the policy logged. GPUs have their index on `node`.
fn lines_of_call(call: &RecordedCall, node: &Ledger) -> Vec<String> {
    let answer = match &call.answer {
        Ok(None) => "pass".into(),
        Ok(Some(answer)) => describe::answer(answer, node),
        Err(fault) => format!("fault: {fault}"),
    };
    let log = call.log_lines.iter().map(|line| format!("  log: {line}"));
    std::iter::once(format!("{} {}: {answer}", call.policy, call.hook)).chain(log).collect()
}

/// The lines of one step's calls. `offer` is called until the ledger no longer changes, so an offer that repeats the
/// policy's last one is left out.
pub(super) fn call_lines(calls: &VecDeque<RecordedCall>, node: &Ledger) -> Vec<String> {
    let is_repeated = |(index, call): &(usize, &RecordedCall)| {
        let mut earlier = calls.range(..index).rev();
        let last = earlier.find(|other| other.hook == call.hook && other.policy == call.policy);
        call.hook == Hook::Offer && last == Some(call)
    };
    let shown = calls.iter().enumerate().filter(|call| !is_repeated(call));
    shown.flat_map(|(_, call)| lines_of_call(call, node)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::ids::names::Digest;
    use berth_kernel::policy::hooks::{Answer, OfferAnswer};

    #[test]
    fn a_failed_step_is_shown_with_line_differences_and_policy_calls() {
        let failure = FailedStep {
            step: 2,
            line: Some(7),
            verb: "place".into(),
            differences: vec![Mismatch::new("gpus", "[0, 0]", "[0, 1]")],
            calls: vec!["fill@abc place: GPU 0, GPU 1 (spread)".into(), "  log: hello".into()],
        };
        let report = ScenarioReport {
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

    #[test]
    fn a_repeated_offer_is_shown_once() {
        let call = |policy: &str, hook, answer| RecordedCall {
            digest: Digest::parse(&"a".repeat(64)).unwrap(),
            policy: policy.into(),
            hook,
            answer: Ok(answer),
            log_lines: Vec::new(),
        };
        let offer = |again_after_s| {
            call(
                "a@1",
                Hook::Offer,
                Some(Answer::Offer(OfferAnswer { again_after_s, ..OfferAnswer::default() })),
            )
        };
        let by_other = |call: RecordedCall| RecordedCall { policy: "b@2".into(), ..call };
        let place = call("a@1", Hook::Place, None);
        let calls = VecDeque::from([
            place.clone(),
            place,
            offer(None),
            by_other(offer(None)),
            offer(None),
            by_other(offer(None)),
            offer(Some(3)),
            offer(None),
        ]);
        let first = "a@1 offer: no GPU named";
        assert_eq!(
            call_lines(&calls, &Ledger::default()),
            [
                "a@1 place: pass",
                "a@1 place: pass",
                first,
                "b@2 offer: no GPU named",
                "a@1 offer: again after 3 s",
                first
            ]
        );
    }
}
