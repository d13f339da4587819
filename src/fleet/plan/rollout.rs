//! The rollout of one SharingPolicy: which of its nodes are assigned which revision, and its status.

use super::conditions::Outcome;
use super::members::{Member, Progress};
use super::{Assignment, Key, Now, Plan, Resolution};
use crate::gpu_node::{EntrySpec, StackSpec};
use crate::revision::revision;
use crate::sharing_policy::{
    ATTEMPT, GoodStack, HALTED_MAX, HaltedRevision, OnHalt, PAUSED, RESOLVE, ResolvedStack, RolloutPhase,
    RolloutStatus, SharingPolicy, SharingPolicyStatus, Step, UNDO,
};
use std::collections::{BTreeMap, BTreeSet};

/// The longest reason, bytes.
const REASON_BYTES_MAX: usize = 512;

/// One SharingPolicy with its nodes.
pub(super) struct Rollout<'v> {
    pub(super) name: &'v str,
    pub(super) policy: &'v SharingPolicy,
    pub(super) resolution: Option<&'v Resolution>,
    pub(super) members: Vec<Member>,
    pub(super) overlapped_by: Option<&'v str>,
    pub(super) invalid: Option<&'v str>,
}

/// The nodes of a rollout, counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) total: usize,
    pub(super) assigned: usize,
    pub(super) settled: usize,
    pub(super) failed: usize,
    pub(super) away: usize,
    /// Those that are not away, were assigned the revision, and have neither settled nor failed.
    pub(super) working: usize,
    /// Those that went away while they tried the revision.
    pub(super) lost: usize,
    /// One of those that have failed, and why.
    pub(super) failure: Option<String>,
}

impl Counts {
    fn of(members: &[Member], key: &Key) -> Self {
        let mut counts = Self { total: members.len(), ..Self::default() };
        for member in members {
            let progress = member.progress(key);
            counts.assigned += usize::from(progress.is_some());
            counts.away += usize::from(member.is_away);
            match progress {
                Some(Progress::Failed(why)) => {
                    counts.failed += 1;
                    counts.failure.get_or_insert_with(|| format!("{}: {why}", member.name));
                }
                Some(Progress::Working { tries }) if member.is_away => counts.lost += usize::from(*tries),
                Some(Progress::Working { .. }) => counts.working += 1,
                Some(Progress::Settled) if !member.is_away => counts.settled += 1,
                _ => {}
            }
        }
        counts
    }
}

/// The nodes that a step adds, in the order in which they are assigned the revision.
struct StepNodes<'m> {
    to_assign: Vec<&'m Member>,
    /// Whether all nodes of the step that are not away were assigned the revision.
    all_assigned: bool,
}

impl Rollout<'_> {
    pub(super) fn plan(self, now: &Now, plan: &mut Plan) {
        let generation = self.policy.metadata.generation.unwrap_or(0);
        let before = self.policy.status.clone().unwrap_or_default();
        let mut status = SharingPolicyStatus { observed_generation: Some(generation), ..before.clone() };
        let resolved = match self.resolve(&before) {
            Ok(resolved) => {
                status.resolved = Some(resolved.clone());
                Some(resolved)
            }
            Err(None) => {
                plan.unresolved.push(self.name.to_owned());
                None
            }
            Err(Some(_)) => None,
        };
        let mut assignments = Vec::new();
        let outcome = match (self.invalid, &resolved) {
            (Some(why), _) => Outcome::Stalled("InvalidSelector", why.to_owned()),
            (None, None) => {
                self.assign_good(&before, &mut assignments);
                match self.resolution.and_then(|found| found.entries.as_ref().err()) {
                    Some(why) => Outcome::Stalled("Unresolved", cut(why)),
                    None => Outcome::Reconciling("Resolving", "the tags of the stack are resolved".into()),
                }
            }
            (None, Some(resolved)) => self.roll_out(resolved, &before, &mut status, &mut assignments),
        };
        let outcome = match self.overlapped_by {
            Some(other) if !matches!(outcome, Outcome::Stalled(..)) => Outcome::Stalled(
                "Overlapped",
                format!(
                    "SharingPolicy {other} has the same priority and decides the stack of nodes that both match: set different \
                     priorities, or change a nodeSelector"
                ),
            ),
            _ => outcome,
        };
        let old = before.conditions.as_deref().unwrap_or_default();
        status.conditions = Some(outcome.conditions(old, generation, &now.wall));
        if status != before {
            plan.statuses.push((self.name.to_owned(), status));
        }
        assignments.truncate(self.policy.spec.per_second() as usize);
        plan.assignments.extend(assignments);
    }

    /// The resolved stack of the specification; `Err(None)` if its tags must be resolved, and `Err(Some)` with the reason if that has
    /// failed.
    fn resolve(&self, before: &SharingPolicyStatus) -> Result<ResolvedStack, Option<String>> {
        let of = (self.policy.metadata.generation.unwrap_or(0), self.annotation(RESOLVE).map(str::to_owned));
        if let Some(known) = &before.resolved
            && (known.generation, &known.resolve) == (of.0, &of.1)
        {
            return Ok(known.clone());
        }
        let found = self.resolution.filter(|found| found.of == of).ok_or(None)?;
        let entries = found.entries.clone().map_err(Some)?;
        let (generation, resolve) = of;
        Ok(ResolvedStack { generation, resolve, revision: revision(&entries), entries })
    }

    fn annotation(&self, key: &str) -> Option<&str> {
        self.policy.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// The attempt of a revision. It never goes back, also if the annotation is removed.
    fn attempt(&self, revision: &str, before: &SharingPolicyStatus) -> u32 {
        let asked = self
            .annotation(ATTEMPT)
            .and_then(|text| text.strip_prefix(revision)?.strip_prefix('/')?.parse().ok());
        let rollout = before.rollout.iter().map(|one| (&one.revision, one.attempt));
        let good = before.good.iter().map(|one| (&one.revision, one.attempt));
        let known = rollout.chain(good).filter(|(known, _)| *known == revision).map(|(_, attempt)| attempt);
        known.chain(asked).max().unwrap_or(1)
    }

    fn key(&self, revision: &str, attempt: u32) -> Key {
        Key { policy: self.name.to_owned(), revision: revision.to_owned(), attempt }
    }

    fn roll_out(
        &self,
        resolved: &ResolvedStack,
        before: &SharingPolicyStatus,
        status: &mut SharingPolicyStatus,
        assignments: &mut Vec<Assignment>,
    ) -> Outcome {
        let key = self.key(&resolved.revision, self.attempt(&resolved.revision, before));
        let counts = Counts::of(&self.members, &key);
        let is_of_key =
            |one: &RolloutStatus| (one.revision.as_str(), one.attempt) == (&key.revision, key.attempt);
        // What the API server has: nothing is assigned that it does not name.
        let stored = before.rollout.clone().filter(is_of_key);
        let first = RolloutStatus {
            revision: key.revision.clone(),
            attempt: key.attempt,
            step: 1,
            ..RolloutStatus::default()
        };
        let mut rollout = RolloutStatus { ..stored.clone().unwrap_or(first) };
        let steps = self.policy.spec.steps();
        // The specification may have fewer steps by now, or more.
        let last = u32::try_from(steps.len()).unwrap_or(u32::MAX);
        rollout.step = match rollout.phase {
            RolloutPhase::Complete => last,
            _ => rollout.step.clamp(1, last),
        };
        let step = &steps[rollout.step as usize - 1];
        let is_paused = self.annotation(PAUSED) == Some("true");
        let nodes = self.step_nodes(step, &key);
        let halted = before
            .halted
            .iter()
            .flatten()
            .find(|one| (one.revision.as_str(), one.attempt) == (&key.revision, key.attempt));
        let halt = match halted {
            Some(halted) => Some(halted.reason.clone()),
            None if rollout.phase == RolloutPhase::Complete => None,
            None => self.halt_reason(&counts, &key),
        };
        if let Some(reason) = &halt {
            rollout.phase = RolloutPhase::Halted;
            if halted.is_none() {
                let mut all = before.halted.clone().unwrap_or_default();
                all.push(HaltedRevision {
                    revision: key.revision.clone(),
                    attempt: key.attempt,
                    reason: reason.clone(),
                });
                let excess = all.len().saturating_sub(HALTED_MAX);
                status.halted = Some(all.split_off(excess));
            }
        } else if rollout.phase != RolloutPhase::Complete {
            rollout.phase = if nodes.all_assigned { RolloutPhase::Soaking } else { RolloutPhase::Assigning };
            let is_done = stored.is_some() && nodes.all_assigned && counts.working == 0 && counts.settled > 0;
            if is_done && !is_paused {
                if (rollout.step as usize) < steps.len() {
                    rollout.step += 1;
                    rollout.phase = RolloutPhase::Assigning;
                } else {
                    rollout.phase = RolloutPhase::Complete;
                    status.good = Some(GoodStack {
                        revision: key.revision.clone(),
                        attempt: key.attempt,
                        entries: resolved.entries.clone(),
                    });
                }
            }
        }
        let stack = |step: &Step| self.stack(&key, &resolved.entries, step);
        match &stored {
            // Written first.
            None => {}
            Some(stored) if stored.phase == RolloutPhase::Halted => {
                if self.policy.spec.on_halt() == OnHalt::Undo {
                    self.undo(before, assignments);
                }
                self.assign_good(before, assignments);
            }
            Some(_) if halt.is_some() || is_paused => {}
            Some(stored) => {
                let may_assign = stored.phase != RolloutPhase::Complete || !self.is_failing(&counts);
                if may_assign {
                    assignments.extend(nodes.to_assign.iter().map(|member| assignment(member, stack(step))));
                }
                self.assign_good(before, assignments);
            }
        }
        let count = |counted: usize| u32::try_from(counted).unwrap_or(u32::MAX);
        (rollout.total, rollout.assigned, rollout.settled) =
            (count(counts.total), count(counts.assigned), count(counts.settled));
        (rollout.failed, rollout.away) = (count(counts.failed), count(counts.away));
        let outcome = self.outcome(&rollout, &counts, halt, is_paused, status.good.as_ref());
        status.rollout = Some(rollout);
        outcome
    }

    /// The nodes that a step adds.
    fn step_nodes(&self, step: &Step, key: &Key) -> StepNodes<'_> {
        let is_assigned = |member: &&Member| member.progress(key).is_some();
        let mut unassigned: Vec<&Member> =
            self.members.iter().filter(|member| !is_assigned(member)).collect();
        unassigned.sort_by_cached_key(|member| (member.is_away, member.rank(key)));
        let present: Vec<&Member> = self.members.iter().filter(|member| !member.is_away).collect();
        let candidates = unassigned.iter().copied().filter(|member| !member.is_away);
        let to_assign: Vec<&Member> = if let Some(per_model) = step.nodes_per_model {
            let mut assigned: BTreeMap<String, u32> = BTreeMap::new();
            for member in present.iter().copied().filter(is_assigned) {
                *assigned.entry(member.model.clone()).or_default() += 1;
            }
            let is_needed = |member: &&Member| {
                let assigned = assigned.entry(member.model.clone()).or_default();
                *assigned += 1;
                *assigned <= per_model
            };
            candidates.filter(is_needed).collect()
        } else {
            match step.percent.unwrap_or(100) {
                100.. => {
                    let all_assigned = unassigned.iter().all(|member| member.is_away);
                    return StepNodes { to_assign: unassigned, all_assigned };
                }
                percent => {
                    let needed = (present.len() * percent as usize).div_ceil(100);
                    let assigned = present.iter().copied().filter(is_assigned).count();
                    candidates.take(needed.saturating_sub(assigned)).collect()
                }
            }
        };
        StepNodes { all_assigned: to_assign.is_empty(), to_assign }
    }

    /// Whether as many nodes have failed as halt a rollout.
    fn is_failing(&self, counts: &Counts) -> bool {
        let (nodes, percent) = self.policy.spec.halt_at();
        let share = (counts.assigned * percent as usize).div_ceil(100).max(1);
        // One node may restart for another reason.
        counts.failed + counts.lost.saturating_sub(1) >= share.min(nodes as usize)
    }

    /// Why the rollout is to be halted; `None` if it is not.
    fn halt_reason(&self, counts: &Counts, key: &Key) -> Option<String> {
        if self.annotation(UNDO) == Some(&format!("{}/{}", key.revision, key.attempt)) {
            return Some("the rollout was undone by the annotation fleet.berth.dev/undo".to_owned());
        }
        if !self.is_failing(counts) {
            return None;
        }
        let lost = match counts.lost {
            0 => String::new(),
            lost => format!(", and {lost} went away while they tried the revision"),
        };
        let failure = counts.failure.as_deref().map_or_else(String::new, |failure| format!("; {failure}"));
        Some(cut(&format!(
            "{} of {} nodes with the revision have failed{lost}{failure}",
            counts.failed, counts.assigned
        )))
    }

    /// Assigns the good stack to the nodes that have another one of this policy.
    fn undo(&self, before: &SharingPolicyStatus, assignments: &mut Vec<Assignment>) {
        let Some(good) = &before.good else { return };
        let key = self.key(&good.revision, good.attempt);
        let others = self.members.iter().filter(|member| {
            member.assigned.as_ref().is_some_and(|assigned| assigned.policy == self.name && *assigned != key)
        });
        let last = self.policy.spec.steps().pop().unwrap_or_default();
        assignments.extend(others.map(|member| assignment(member, self.stack(&key, &good.entries, &last))));
    }

    /// Assigns the good stack to the nodes that have none of this policy, and are not assigned the new one at present.
    fn assign_good(&self, before: &SharingPolicyStatus, assignments: &mut Vec<Assignment>) {
        let Some(good) = &before.good else { return };
        let key = self.key(&good.revision, good.attempt);
        let last = self.policy.spec.steps().pop().unwrap_or_default();
        let assigned_now: BTreeSet<String> =
            assignments.iter().map(|assignment| assignment.node.clone()).collect();
        let is_new =
            |member: &&Member| member.assigned.as_ref().is_none_or(|assigned| assigned.policy != self.name);
        let new = self.members.iter().filter(is_new).filter(|member| !assigned_now.contains(&member.name));
        assignments.extend(new.map(|member| assignment(member, self.stack(&key, &good.entries, &last))));
    }

    fn stack(&self, key: &Key, entries: &[EntrySpec], step: &Step) -> StackSpec {
        StackSpec {
            policy: key.policy.clone(),
            revision: key.revision.clone(),
            attempt: Some(key.attempt).filter(|attempt| *attempt > 1),
            soak: step.soak.clone(),
            gate: self.policy.spec.gate.clone(),
            entries: entries.to_vec(),
        }
    }

    fn outcome(
        &self,
        rollout: &RolloutStatus,
        counts: &Counts,
        halt: Option<String>,
        is_paused: bool,
        good: Option<&GoodStack>,
    ) -> Outcome {
        let steps = self.policy.spec.steps().len();
        if let Some(reason) = halt {
            let then = match (self.policy.spec.on_halt(), good) {
                (OnHalt::Hold, _) => "no node is assigned another revision".to_owned(),
                (OnHalt::Undo, None) => {
                    "no earlier revision of this policy was complete, so nothing is undone: nodes that have settled keep this one"
                        .to_owned()
                }
                (OnHalt::Undo, Some(good)) => {
                    let others = self.members.iter().filter_map(|member| member.assigned.as_ref());
                    let left = others.filter(|assigned| assigned.policy == self.name && assigned.revision != good.revision);
                    match left.count() {
                        0 => format!("all nodes are assigned revision {} again", good.revision),
                        left => format!("{left} nodes are still to be assigned revision {} again", good.revision),
                    }
                }
            };
            return Outcome::Stalled("Halted", format!("revision {}: {reason}; {then}", rollout.revision));
        }
        if counts.total == 0 {
            let message =
                "no node that nodeSelector matches, and no policy of a higher priority has, has a GPUNode";
            return Outcome::Ready("NoNodes", message.to_owned());
        }
        let unassigned = counts.total - counts.assigned;
        let progress = format!(
            "revision {}: {} of {} nodes are assigned it, {} have settled, {} have failed, {} are away",
            rollout.revision, counts.assigned, counts.total, counts.settled, counts.failed, counts.away
        );
        if rollout.phase == RolloutPhase::Complete {
            if counts.settled + counts.away >= counts.total {
                return Outcome::Ready("Settled", progress);
            }
            if counts.working == 0 && counts.failed > 0 && (unassigned == 0 || self.is_failing(counts)) {
                let failure = counts.failure.clone().unwrap_or_default();
                return Outcome::Stalled("NodesFailed", cut(&format!("{progress}; {failure}")));
            }
        }
        let message = format!("step {} of {steps}: {progress}", rollout.step);
        match (is_paused, rollout.phase) {
            (true, _) => Outcome::Reconciling("Paused", message),
            (false, RolloutPhase::Assigning) => Outcome::Reconciling("Assigning", message),
            (false, _) => Outcome::Reconciling("Soaking", message),
        }
    }
}

fn assignment(member: &Member, stack: StackSpec) -> Assignment {
    Assignment { node: member.name.clone(), stack }
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(REASON_BYTES_MAX)].to_owned()
}
