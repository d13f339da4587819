//! The gate of a stack: its new policies answer recorded admissions again, then live ones, without effect. The stack may be activated
//! only if they deny few of those that were granted.

use super::comparison::{Candidate, Counts, CountsByHook, Difference};
use super::shadow::Shadow;
use super::{Lab, LabError};
use crate::jobs::ActivateError;
use berth_kernel::node::command::NewStack;
use berth_kernel::policy::decision::Filter;
use berth_kernel::policy::hooks::Hook;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until};

/// How often it is checked whether the shadows still run.
const SHADOWS_CHECKED_EVERY: Duration = Duration::from_secs(5);
/// Longest part of a policy's own words in an error, characters.
const EXAMPLE_CHARACTERS_MAX: usize = 200;

/// What the new policies of a stack must pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GateRules {
    /// How many recorded admissions each policy answers again, the newest first; 0 for none.
    pub replay_decisions: u64,
    /// How long each policy answers live admissions in addition to the active stack; zero for none.
    pub shadow_for: Duration,
    /// How many per cent of the recorded and of the live admissions each policy may deny that were granted, or fail on.
    pub new_denials_percent_max: u64,
}

/// What the new policies of a stack have answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GateReport {
    /// Answers to recorded admissions.
    pub replayed: u64,
    /// Answers to live admissions.
    pub shadowed: u64,
}

/// Why a stack has not passed its gate.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The stack cannot be activated at all.
    #[error("{0}")]
    Activation(ActivateError),
    /// One of its policies denies too much, or fails too often.
    #[error("{0}")]
    Failed(String),
    /// The policies could not be tried.
    #[error("the gate could not be completed: {0}")]
    Lab(LabError),
    /// A caller has ended a shadow of the gate.
    #[error(
        "a caller stopped a shadow of the gate (`berth policy shadow stop`) before `shadowFor` had passed; the daemon begins the \
         gate again"
    )]
    ShadowEnded,
}

impl From<LabError> for GateError {
    fn from(error: LabError) -> Self {
        Self::Lab(error)
    }
}

impl Lab {
    /// Tries a stack on the live node, then its new entries on recorded and on live admissions. An entry is new if the active stack
    /// does not have the same one. Takes as long as the replays and [`GateRules::shadow_for`]. If the caller drops the future, the
    /// shadows end.
    ///
    /// # Errors
    /// If the stack cannot be activated, a policy denies too much or fails too often, or the policies could not be tried.
    pub async fn pass_gate(&self, stack: &NewStack, rules: &GateRules) -> Result<GateReport, GateError> {
        self.policies.preview(stack.clone(), None).await.map_err(GateError::Activation)?;
        let node = self.policies.kernel.snapshot();
        let new = stack.entries.iter().filter(|entry| {
            let version = node.policies.get(&entry.digest);
            let admits = version.is_none_or(|version| version.hooks.contains(&Hook::Admit));
            admits && !node.stack.entries.contains(entry)
        });
        let candidates: Vec<Candidate> = new
            .map(|entry| Candidate {
                policy: entry.label(),
                digest: entry.digest.clone(),
                parameters: entry.parameters.clone(),
                permissions: Some(entry.permissions.clone()),
            })
            .collect();
        let mut report = GateReport::default();
        // Also if the caller drops the future during a replay.
        let running = GateShadows { lab: self, ids: Vec::new() };
        if candidates.is_empty() {
            return Ok(report);
        }
        if rules.replay_decisions > 0 {
            for candidate in &candidates {
                report.replayed += self.replay_admissions(candidate, rules).await?;
            }
        }
        if !rules.shadow_for.is_zero() {
            report.shadowed = self.shadow_admissions(running, candidates, rules).await?;
        }
        Ok(report)
    }

    /// Returns how many recorded admissions the candidate has answered.
    async fn replay_admissions(&self, candidate: &Candidate, rules: &GateRules) -> Result<u64, GateError> {
        let mut filter = Filter { hook: Some(Hook::Admit), ..Filter::default() };
        let (mut counts, mut first, mut left) = (Counts::default(), None, rules.replay_decisions);
        loop {
            // Waits for the end of a caller's replay.
            let permit = Arc::clone(&self.replays).acquire_owned().await.map_err(|_| LabError::Stopping)?;
            let report = self.replay_with(permit, candidate.clone(), filter.clone(), left).await?;
            let more = of_admissions(&report.counts);
            counts.same += more.same;
            counts.differs += more.differs;
            counts.denies += more.denies;
            counts.passes += more.passes;
            counts.fails += more.fails;
            counts.skipped += report.unreadable;
            first = first.or_else(|| report.differences.into_iter().find(counts_as_denial));
            left = left.saturating_sub(report.decisions);
            match report.next {
                Some(next) if left > 0 => filter.before = Some(next),
                _ => return judge(candidate, "recorded", &counts, first.as_ref(), rules),
            }
        }
    }

    /// Returns how many live admissions the candidates have answered.
    async fn shadow_admissions(
        &self,
        mut running: GateShadows<'_>,
        candidates: Vec<Candidate>,
        rules: &GateRules,
    ) -> Result<u64, GateError> {
        for candidate in candidates {
            running.ids.push(self.start_shadow(candidate, true).await?.id);
        }
        let end = Instant::now() + rules.shadow_for;
        loop {
            let shadows = self.shadows();
            let of_gate = |id: &u64| shadows.iter().find(|shadow| shadow.id == *id);
            let of_gate: Option<Vec<&Shadow>> = running.ids.iter().map(of_gate).collect();
            let of_gate = of_gate.ok_or(GateError::ShadowEnded)?;
            let now = Instant::now();
            if now < end {
                sleep_until(end.min(now + SHADOWS_CHECKED_EVERY)).await;
                continue;
            }
            let judge = |shadow: &Shadow| {
                let first = shadow.differences.iter().find(|difference| counts_as_denial(difference));
                judge(&shadow.candidate, "live", &of_admissions(&shadow.counts), first, rules)
            };
            return of_gate.into_iter().map(judge).sum();
        }
    }
}

/// The shadows of a gate, which end with it.
struct GateShadows<'l> {
    lab: &'l Lab,
    ids: Vec<u64>,
}

impl Drop for GateShadows<'_> {
    fn drop(&mut self) {
        for id in &self.ids {
            self.lab.policies.shadows.remove(*id);
        }
        // While the runtime ends there may be none.
        if Handle::try_current().is_ok() {
            self.lab.policies.unload_unused();
        }
    }
}

fn of_admissions(counts: &CountsByHook) -> Counts {
    counts.get(&Hook::Admit).copied().unwrap_or_default()
}

/// Whether the candidate denied what was granted, or failed.
fn counts_as_denial(difference: &Difference) -> bool {
    difference.hook == Hook::Admit && (difference.failed || difference.is_denial)
}

/// Returns how many admissions the candidate has answered.
fn judge(
    candidate: &Candidate,
    which: &str,
    counts: &Counts,
    first: Option<&Difference>,
    rules: &GateRules,
) -> Result<u64, GateError> {
    let Counts { same, differs, denies, passes, fails, skipped, .. } = *counts;
    let calls = same + differs + passes + fails;
    let policy = &candidate.policy;
    if skipped > calls {
        return Err(GateError::Failed(format!(
            "the stack did not pass the gate: policy {policy} could answer only {calls} of {} {which} admissions, since the node was \
             too busy, or another release of Berth has recorded them; change `gate`, or try again with a higher `attempt`",
            calls + skipped
        )));
    }
    if (denies + fails) * 100 <= rules.new_denials_percent_max * calls {
        return Ok(calls);
    }
    let example = first.map_or_else(String::new, |difference| {
        let seq = difference.seq.map_or_else(String::new, |seq| format!(", decision {seq}"));
        // A policy's own words.
        let words = difference.message.chars().filter(|c| !c.is_control()).take(EXAMPLE_CHARACTERS_MAX);
        format!("; for example{seq}: {}", words.collect::<String>())
    });
    Err(GateError::Failed(format!(
        "the stack did not pass the gate: of {calls} {which} admissions, policy {policy} denies {denies} that were granted and fails \
         on {fails}; `maxNewDenialsPercent` allows {} %{example}",
        rules.new_denials_percent_max
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::ids::names::Digest;

    fn judged(counts: Counts, new_denials_percent_max: u64) -> Result<u64, String> {
        let digest = Digest::parse(&"a".repeat(64)).unwrap();
        let candidate = Candidate {
            policy: "quota@aaaaaaaaaaaa".into(),
            digest,
            parameters: "{}".into(),
            permissions: None,
        };
        let rules = GateRules { new_denials_percent_max, ..GateRules::default() };
        let first = Difference {
            seq: Some(7),
            at_wall_ms: 0,
            hook: Hook::Admit,
            failed: false,
            is_denial: true,
            message: "denies: too many".into(),
        };
        judge(&candidate, "recorded", &counts, Some(&first), &rules).map_err(|error| error.to_string())
    }

    #[test]
    fn only_denials_of_what_was_granted_and_failures_count() {
        let counts = Counts { same: 50, differs: 30, passes: 20, ..Counts::default() };
        assert_eq!(judged(counts, 0), Ok(100));
        assert_eq!(judged(Counts::default(), 0), Ok(0), "a node without admissions");
        let counts = Counts { denies: 1, fails: 1, passes: 19, ..counts };
        assert_eq!(judged(counts, 2), Ok(100));
        let why = judged(counts, 1).unwrap_err();
        assert_eq!(
            why,
            "the stack did not pass the gate: of 100 recorded admissions, policy quota@aaaaaaaaaaaa denies 1 that were granted and \
             fails on 1; `maxNewDenialsPercent` allows 1 %; for example, decision 7: denies: too many"
        );
        assert!(judged(Counts { fails: 1, ..Counts::default() }, 99).is_err());
        let why = judged(Counts { same: 2, skipped: 3, ..Counts::default() }, 100).unwrap_err();
        assert!(why.contains("could answer only 2 of 5 recorded admissions"), "{why}");
        assert_eq!(judged(Counts { fails: 1, ..Counts::default() }, 100), Ok(1));
    }
}
