//! I8 and I9: whatever a policy answers, only offered, free and permitted devices are used; a faulty
//! policy is skipped, and the next one or the baseline answers instead.

mod answers;
mod faults;
mod offers;

use super::baseline::Baseline;
use super::evaluate::Evaluation;
use super::faults::Faults;
use berth_kernel::grants::allocation::Limits;
use berth_kernel::hardware::gpu::{Mig, Part};
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::hardware::triage::XidRules;
use berth_kernel::ids::names::{DeviceId, Digest, GpuId, PartId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::change::{Change, Entry};
use berth_kernel::node::command::StackAnswer;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{Call, CallOutput, InstallError, PolicyRuntime};
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::decision::{CallRecord, Cost};
use berth_kernel::policy::hooks::{
    AdmitRequest, Answer, Fault, FaultKind, OfferAnswer, PlaceRequest, Placement, Terms,
};
use berth_kernel::policy::stack::{OnFault, Stack, StackEntry};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

type PolicyAnswer = Result<Option<Answer>, Fault>;

/// Policies with scripted answers, by the first letter of their digest.
#[derive(Default)]
struct ScriptedPolicies {
    answers: BTreeMap<char, PolicyAnswer>,
    /// Lines that each policy logs.
    lines: Vec<String>,
    /// Duration of each call.
    delay: Duration,
    /// Durations of the calls of single policies, instead.
    delays: BTreeMap<char, Duration>,
    /// The policies that were called, with the wall time limit of the call, milliseconds.
    calls: Mutex<Vec<(char, u64)>>,
}

impl PolicyRuntime for ScriptedPolicies {
    fn load(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        Ok(version.clone())
    }
    fn call(&self, call: Call<'_>) -> CallOutput {
        let letter = call.digest.as_str().chars().next().unwrap();
        self.calls.lock().push((letter, call.wall_ms_max));
        std::thread::sleep(self.delays.get(&letter).copied().unwrap_or(self.delay));
        let answer = self.answers.get(&letter).cloned().unwrap_or(Ok(None));
        CallOutput { answer, cost: Cost::default(), log_lines: self.lines.clone() }
    }
}

fn gpu(i: usize) -> PartId {
    PartId::parse(&format!("GPU-{i}")).unwrap()
}

fn resource(name: &str) -> Resource {
    Resource::parse(name).unwrap()
}

fn node() -> Ledger {
    let changes = (0..2).map(|i| {
        let gpu = Part::whole_gpu(GpuId::of_whole(&gpu(i)), u32::try_from(i).unwrap());
        Change::PartFound(Part { memory_mib: 1000, ..gpu })
    });
    let mut ledger = Ledger::default();
    ledger.apply(&Entry { at: Now::default(), changes: changes.collect() });
    ledger
}

fn entry(letter: char) -> StackEntry {
    StackEntry {
        name: letter.to_string(),
        digest: Digest::parse(&letter.to_string().repeat(64)).unwrap(),
        parameters: "{}".into(),
        permissions: berth_kernel::policy::stack::Permissions::default(),
        on_fault: OnFault::Skip,
    }
}

struct Case {
    node: Arc<Ledger>,
    stack: Stack,
    policies: ScriptedPolicies,
    faults: Faults,
    baseline: Baseline,
    calls: Vec<CallRecord>,
}

impl Case {
    fn new(answers: impl IntoIterator<Item = (char, PolicyAnswer)>) -> Self {
        let answers: BTreeMap<char, PolicyAnswer> = answers.into_iter().collect();
        let entries = answers.keys().map(|letter| entry(*letter)).collect();
        Self {
            node: Arc::new(node()),
            stack: Stack { entries, ..Stack::default() },
            policies: ScriptedPolicies { answers, ..ScriptedPolicies::default() },
            faults: Faults::default(),
            calls: Vec::new(),
            baseline: Baseline {
                resource: resource("nvidia.com/gpu"),
                mig: MigStrategy::None,
                mps_sockets: BTreeMap::new(),
                xids: XidRules { ignored: vec![13], counted: Vec::new() },
                quiet_ms: 60_000,
            },
        }
    }

    /// Puts a GPU into MIG mode, with one instance.
    fn enable_mig(&mut self, n: usize) {
        let whole = Part { mig_enabled: true, ..self.node.part(&gpu(n)).unwrap().part.clone() };
        let instance = Part {
            id: PartId::parse(&format!("MIG-{n}")).unwrap(),
            gpu: whole.gpu.clone(),
            mig_enabled: false,
            mig: Some(Mig { profile: "1g.10gb+me".into(), gpu_instance: 7, compute_instance: 0 }),
            ..whole.clone()
        };
        let changes = vec![Change::PartFound(whole), Change::PartFound(instance)];
        Arc::make_mut(&mut self.node).apply(&Entry { at: Now::default(), changes });
    }

    fn evaluation(&mut self) -> Evaluation<'_> {
        Evaluation {
            stack: &self.stack,
            policies: &self.policies,
            node: &self.node,
            now: Now::default(),
            faults: &mut self.faults,
            baseline: &self.baseline,
            calls: &mut self.calls,
            time_factor: 1,
        }
    }

    fn admit(&mut self) -> StackAnswer {
        let request = AdmitRequest {
            resource: resource("nvidia.com/gpu"),
            devices: vec![DeviceId::whole(&gpu(0))],
            claim: None,
        };
        self.evaluation().admit(&request)
    }

    fn place(&mut self, required: &[usize], size: usize) -> (Placement, Decider) {
        let whole = |i: &usize| DeviceId::whole(&gpu(*i));
        let request = PlaceRequest {
            resource: resource("nvidia.com/gpu"),
            available: [0, 1].iter().map(whole).collect(),
            required: required.iter().map(whole).collect(),
            size,
        };
        self.evaluation().place(&request)
    }
}

fn offer(part: usize, name: &str, count: u32, memory_mib: u64) -> PartOffer {
    let consumes = Consumes::Slice { memory_mib, compute_percent: 1 };
    PartOffer { part: gpu(part), lines: vec![OfferLine { resource: resource(name), count, consumes }] }
}

fn offers(parts: Vec<PartOffer>, again_after_s: Option<u32>) -> PolicyAnswer {
    Ok(Some(Answer::Offer(OfferAnswer { parts, again_after_s })))
}

fn allow(environment: &[(&str, &str)], memory_mib: Option<u64>) -> PolicyAnswer {
    Ok(Some(Answer::Allow(Terms {
        environment: environment.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
        limits: Limits { memory_mib, compute_percent: None },
        reason: "fine".into(),
    })))
}

fn trap() -> PolicyAnswer {
    Err(Fault { kind: FaultKind::Trap, detail: "unreachable".into() })
}
