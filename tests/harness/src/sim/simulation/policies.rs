//! Policies in this process with scripted answers, also invalid ones.

use super::event::{Mood, StackLine};
use super::lies;
use berth_kernel::grants::allocation::Limits;
use berth_kernel::hardware::triage::{Severity, TriageAnswer};
use berth_kernel::ids::names::{Digest, Resource};
use berth_kernel::node::ports::{Call, CallOutput, InstallError, PolicyRuntime};
use berth_kernel::policy::hooks::{Answer, Fault, FaultKind, Hook, OfferAnswer, Placement, Question, Terms};
use berth_kernel::policy::stack::{OnFault, Permissions, StackEntry};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use berth_kernel::sharing::part_state::PartState;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// How many policies there are.
pub(crate) const KINDS: u32 = 6;
/// The resources of a run.
pub(crate) const RESOURCES: [&str; 4] =
    ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mem", "nvidia.com/mig-1g.10gb"];

/// A resource by its place in [`RESOURCES`].
pub(crate) fn resource(which: u32) -> Resource {
    Resource::parse(RESOURCES[which as usize % RESOURCES.len()]).expect("a resource name")
}

/// The digest of a policy.
pub(crate) fn digest(kind: u32) -> Digest {
    let letter = char::from_digit(10 + kind % KINDS, 16).unwrap_or('a');
    Digest::parse(&letter.to_string().repeat(64)).expect("64 hex digits")
}

/// The version that uploading a policy gives.
pub(crate) fn version(kind: u32) -> PolicyVersion {
    PolicyVersion {
        name: format!("policy-{}", kind % KINDS),
        version: "1.0.0".into(),
        summary: "Answers by a script.".into(),
        hooks: vec![Hook::Offer, Hook::Place, Hook::Admit, Hook::Triage],
        parameters_schema: "{}".into(),
        digest: digest(kind),
        artifact: digest(kind),
        bytes: 1,
        shipped: false,
        since_wall_ms: 0,
        origin: berth_kernel::policy::version::Origin::default(),
    }
}

/// A stack entry as an operator would write it.
pub(crate) fn entry(line: StackLine) -> StackEntry {
    let everything = Permissions {
        resources: vec!["nvidia.com/*".into()],
        environment: vec!["SIM_*".into()],
        ..Permissions::default()
    };
    let permissions = match line.permissions % 4 {
        0 | 1 => everything,
        2 => Permissions { deny: false, share_max: 3, ..everything },
        _ => Permissions::default(),
    };
    StackEntry {
        name: format!("policy-{}", line.policy % KINDS),
        digest: digest(line.policy),
        parameters: "{}".into(),
        permissions,
        on_fault: if line.deny_on_fault { OnFault::Deny } else { OnFault::Skip },
    }
}

/// The policies.
#[derive(Default)]
pub(crate) struct ScriptedPolicies {
    moods: Mutex<BTreeMap<Digest, Mood>>,
    asked: Mutex<Vec<Digest>>,
}

impl ScriptedPolicies {
    pub(crate) fn set_mood(&self, kind: u32, mood: Mood) {
        self.moods.lock().unwrap_or_else(PoisonError::into_inner).insert(digest(kind), mood);
    }

    /// The policies that were called since the last time, in order.
    pub(crate) fn take_asked(&self) -> Vec<Digest> {
        std::mem::take(&mut *self.asked.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ScriptedPolicies {
    fn answer(&self, call: Call<'_>) -> Result<Option<Answer>, Fault> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).push(call.digest.clone());
        let moods = self.moods.lock().unwrap_or_else(PoisonError::into_inner);
        let mood = moods.get(call.digest).copied().unwrap_or_default();
        let fault = |kind| Err(Fault { kind, detail: "as scripted".into() });
        match mood {
            Mood::Pass => Ok(None),
            Mood::Trap => fault(FaultKind::Trap),
            Mood::Fuel => fault(FaultKind::Fuel),
            Mood::Time => fault(FaultKind::Time),
            Mood::Memory => fault(FaultKind::Memory),
            Mood::Missing => fault(FaultKind::Missing),
            Mood::Lie(which) => Ok(Some(lies::answer(&call, which))),
            Mood::Deny if matches!(call.question, Question::Admit(_)) => {
                Ok(Some(Answer::Deny("as scripted".into())))
            }
            Mood::Deny | Mood::Honest => Ok(honest(&call)),
        }
    }
}

impl PolicyRuntime for ScriptedPolicies {
    fn load(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        Ok(version.clone())
    }

    fn call(&self, call: Call<'_>) -> CallOutput {
        self.answer(call).into()
    }
}

fn honest(call: &Call<'_>) -> Option<Answer> {
    let kind = (0..KINDS).find(|kind| digest(*kind) == *call.digest)?;
    match call.question {
        Question::Offer => {
            let parts = call.node.parts.values().filter(|p| p.present);
            let offers = parts.filter_map(|p| offer(kind, p)).collect();
            Some(Answer::Offer(OfferAnswer { parts: offers, again_after_s: None }))
        }
        Question::Place(request) if kind == 3 => {
            let rest = request.available.iter().filter(|id| !request.required.contains(id));
            let chosen = request.required.iter().chain(rest).take(request.size);
            Some(Answer::Place(Placement { devices: chosen.cloned().collect(), reason: String::new() }))
        }
        Question::Admit(request) if kind == 4 => {
            let least = request.devices.iter().filter_map(|id| call.node.part(&id.part));
            let memory_mib = least.map(|p| p.part.memory_mib).min();
            Some(Answer::Allow(Terms {
                environment: vec![("SIM_DEVICES".into(), request.devices.len().to_string())],
                limits: Limits { memory_mib, compute_percent: Some(50) },
                reason: "it may".into(),
            }))
        }
        Question::Triage(reading) if kind == 5 => Some(Answer::Triage(TriageAnswer {
            severity: if reading.code == 94 { Severity::Degraded } else { Severity::Unhealthy },
            reason: "as read".into(),
            again_after_s: (reading.code != 95).then_some(30),
        })),
        Question::Place(_) | Question::Admit(_) | Question::Triage(_) => None,
    }
}

/// What a policy offers a part as; `None` passes.
fn offer(kind: u32, state: &PartState) -> Option<PartOffer> {
    let part = &state.part;
    if part.mig_enabled {
        return None;
    }
    let whole = OfferLine {
        resource: resource(if part.mig.is_some() { 3 } else { 0 }),
        count: 1,
        consumes: Consumes::Whole,
    };
    let shares = |which, count: u32, of: u64, compute_percent| OfferLine {
        resource: resource(which),
        count,
        consumes: Consumes::Slice { memory_mib: part.memory_mib / of, compute_percent },
    };
    let lines = match kind {
        0 => vec![whole],
        1 => vec![shares(1, 4, 4, 25)],
        2 => vec![whole, shares(1, 3, 3, 33)],
        // More than there is: of memory, or of compute only, so that some are not to be had.
        3 => vec![shares(1, 3, 5, 45), shares(2, 3, 2, 10), whole],
        // One mode at a time, whichever is held.
        5 if state.devices.iter().any(|((r, _), d)| d.held() && *r == resource(1)) => {
            vec![shares(1, 2, 2, 50)]
        }
        5 if state.held() => vec![whole],
        5 => vec![whole, shares(1, 2, 2, 50)],
        _ => return None,
    };
    Some(PartOffer { part: part.id.clone(), lines })
}
