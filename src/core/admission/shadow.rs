//! Shadows: policies that are asked every question of the live node beside the active stack, without
//! effect. They are counted against what came of it. They live as long as the daemon.

use super::replay::Candidate;
use super::stack::CALL_MS_MAX;
use berth_kernel::compare::{Compared, compare};
use berth_kernel::decision::Note;
use berth_kernel::policy::{Call, Hook};
use berth_kernel::ports::Policies;
use berth_kernel::time::Now;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, VecDeque};

/// Most shadows at a time: each is asked whatever the stack is asked.
pub const SHADOWS_MAX: usize = 4;
/// Differences that are kept of each, newest last.
const DIFFERENCES_MAX: usize = 32;

/// One that is asked beside the stack.
#[derive(Clone, Debug)]
pub struct Shadow {
    /// Counts from 1.
    pub id: u64,
    /// Who.
    pub candidate: Candidate,
    /// Since when.
    pub since: Now,
    /// By hook.
    pub counts: BTreeMap<Hook, Counts>,
    /// The newest of what was different or failed.
    pub differences: VecDeque<Difference>,
}

/// How its answers stood to what came of the questions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// To the same effect.
    pub same: u64,
    /// Otherwise.
    pub differs: u64,
    /// It left the answer to others.
    pub passes: u64,
    /// It failed.
    pub fails: u64,
    /// It was not asked: the daemon had better things to do.
    pub skipped: u64,
}

impl Counts {
    /// Takes one in. Answers the words of what is worth showing.
    pub(super) fn add(&mut self, compared: Compared) -> Option<(bool, String)> {
        match compared {
            Compared::Same => self.same += 1,
            Compared::Passes => self.passes += 1,
            Compared::Differs(words) => {
                self.differs += 1;
                return Some((false, words));
            }
            Compared::Fails(words) => {
                self.fails += 1;
                return Some((true, words));
            }
        }
        None
    }
}

/// One answer that was different.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The decision's number, where it is on the record: an offer like the one before is not put down again.
    pub seq: Option<u64>,
    /// When the question was asked, milliseconds since 1970.
    pub at_wall_ms: u64,
    /// Which hook.
    pub hook: Hook,
    /// Whether the candidate failed.
    pub failed: bool,
    /// How it differs, or fails.
    pub words: String,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Shadows(Mutex<(u64, Vec<Shadow>)>);

impl Shadows {
    fn lock(&self) -> MutexGuard<'_, (u64, Vec<Shadow>)> {
        self.0.lock()
    }

    pub(super) fn all(&self) -> Vec<Shadow> {
        self.lock().1.clone()
    }

    /// Adds one. `None` if there are too many.
    pub(super) fn add(&self, candidate: Candidate, since: Now) -> Option<Shadow> {
        let mut all = self.lock();
        if all.1.len() >= SHADOWS_MAX {
            return None;
        }
        all.0 += 1;
        let shadow =
            Shadow { id: all.0, candidate, since, counts: BTreeMap::new(), differences: VecDeque::new() };
        all.1.push(shadow.clone());
        Some(shadow)
    }

    /// Whether there was one of this number.
    pub(super) fn remove(&self, id: u64) -> Option<Shadow> {
        let mut all = self.lock();
        let at = all.1.iter().position(|shadow| shadow.id == id)?;
        Some(all.1.remove(at))
    }

    /// Asks each what the stack was asked, of which the record has the number `seq`. Readers do not wait
    /// for it.
    pub(super) fn consider(&self, note: &Note, seq: Option<u64>, policies: &dyn Policies, busy: bool) {
        for shadow in self.all() {
            let compared = (!busy).then(|| judged(&shadow.candidate, note, policies));
            let mut all = self.lock();
            // It may have gone meanwhile.
            let Some(shadow) = all.1.iter_mut().find(|s| s.id == shadow.id) else { continue };
            let hook = note.asked.hook();
            let counts = shadow.counts.entry(hook).or_default();
            let Some(compared) = compared else {
                counts.skipped += 1;
                continue;
            };
            if let Some((failed, words)) = counts.add(compared) {
                if shadow.differences.len() >= DIFFERENCES_MAX {
                    shadow.differences.pop_front();
                }
                let at_wall_ms = note.now.wall_ms;
                shadow.differences.push_back(Difference { seq, at_wall_ms, hook, failed, words });
            }
        }
    }
}

fn judged(candidate: &Candidate, note: &Note, policies: &dyn Policies) -> Compared {
    let hook = note.asked.hook();
    let asked = note.node.policies.get(&candidate.digest).is_none_or(|v| v.hooks.contains(&hook));
    if !asked {
        return Compared::Passes;
    }
    let told = policies.ask(Call {
        digest: &candidate.digest,
        parameters: &candidate.parameters,
        node: &note.node,
        now: note.now,
        question: note.asked.question(),
        wall_ms_max: CALL_MS_MAX,
    });
    compare(&note.asked, &note.calls, &note.outcome, candidate.name(), &told)
}
