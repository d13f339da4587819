//! `answer`: whatever policies answer, only what was offered, free, permitted and within the counters
//! comes of it (I8), the stack always ends in an answer (I9), and the ledger stays right (I1 to I3).
//!
//! An input is a short history of one node: a stack, and questions with the answers that its policies
//! give to them.

use super::bytes::Bytes;
use super::hold;
use super::node::{baseline, entry, node, part, resources};
use crate::sim::simulation::{answers, state};
use berth_core::stack::{Evaluation, Faults};
use berth_kernel::drain::marks::{Author, Owners};
use berth_kernel::grants::allocation::Limits;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::judgement::TriagedReading;
use berth_kernel::hardware::triage::{Severity, TriageAnswer};
use berth_kernel::ids::names::{DeviceId, Digest, GpuId, PartId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::{Attempt, Command, StackAnswer};
use berth_kernel::node::decide::decide;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{Call, CallOutput, InstallError, PolicyRuntime};
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::hooks::{
    AdmitRequest, Answer, Fault, FaultKind, OfferAnswer, PlaceRequest, Placement, Question, REASON_BYTES_MAX,
    Terms,
};
use berth_kernel::policy::stack::Stack;
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use berth_kernel::sharing::placement::without_ungrantable;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Questions of one input.
const STEPS_MAX: usize = 24;

/// Plays one input.
pub fn run(data: &[u8]) {
    let bytes = &mut Bytes::new(data);
    let ledger = node(bytes);
    let overcommit_percent = bytes.pick(&[100, 100, 150, 50]);
    let rules = Rules { overcommit_percent, ..Rules::default() };
    let mut ledger = Arc::new(ledger.with_rules(&Arc::new(rules.clone())));
    let entries = ['a', 'b', 'c'][..1 + bytes.below(3)].iter().map(|letter| entry(bytes, *letter));
    let stack = Stack { entries: entries.collect(), ..Stack::default() };
    let mut faults = Faults::default();
    for step in 1..=STEPS_MAX {
        let now = Now { wall_ms: 1_800_000_000_000, mono_ms: step as u64 * 1_000 };
        let mut turn = Turn { ledger: &mut ledger, rules: &rules, stack: &stack, faults: &mut faults, now };
        match bytes.byte() % 8 {
            0 | 1 => turn.offers(bytes),
            2 | 3 => turn.admit(bytes),
            4 | 5 => turn.place(bytes),
            6 => turn.triage(bytes),
            _ => turn.operate(bytes),
        }
        hold(state::check(&ledger, &rules, now));
        if bytes.is_empty() {
            break;
        }
    }
}

struct Turn<'t> {
    ledger: &'t mut Arc<Ledger>,
    rules: &'t Rules,
    stack: &'t Stack,
    faults: &'t mut Faults,
    now: Now,
}

impl Turn<'_> {
    /// One walk over the stack, whose answers come from the input.
    fn walk<R>(&mut self, bytes: &mut Bytes<'_>, ask: impl FnOnce(Evaluation<'_>) -> R) -> R {
        let answers = self.stack.entries.iter().map(|entry| {
            let answer = if bytes.one_in(8) { None } else { Some(answer(bytes, self.ledger)) };
            let fails = bytes.one_in(16);
            let fault =
                Fault { kind: bytes.pick(&[FaultKind::Trap, FaultKind::Time]), detail: String::new() };
            (entry.digest.clone(), if fails { Err(fault) } else { Ok(answer) })
        });
        let policies = ScriptedAnswers { answers: answers.collect(), asked: Mutex::default() };
        let before = self.faults.clone();
        let answer = ask(Evaluation {
            stack: self.stack,
            policies: &policies,
            node: self.ledger,
            now: self.now,
            faults: self.faults,
            baseline: &baseline(),
            calls: &mut Vec::new(),
            time_factor: 1,
        });
        hold(answers::asked(self.stack, &before, &policies.asked.into_inner().unwrap()));
        answer
    }

    fn turn(&mut self, command: &Command) -> bool {
        let verdict = decide(self.ledger, command, self.now);
        Arc::make_mut(self.ledger).apply(&verdict.entry);
        verdict.refusal.is_none()
    }

    fn offers(&mut self, bytes: &mut Bytes<'_>) {
        let offers = self.walk(bytes, |walk| walk.offers());
        hold(answers::offers(self.ledger, self.stack, self.rules.overcommit_percent, &offers));
        self.turn(&Command::Offer(offers.parts));
    }

    fn admit(&mut self, bytes: &mut Bytes<'_>) {
        let resource = bytes.pick(&resources());
        let mut devices = self.listed(&resource);
        devices.retain(|_| !bytes.one_in(4));
        if bytes.one_in(16) {
            devices.push(DeviceId::share(&part("GPU-0"), 9_999));
        }
        devices.sort();
        if devices.is_empty() {
            return;
        }
        let request = AdmitRequest { resource, devices, claim: None };
        let answer = self.walk(bytes, |walk| walk.admit(&request));
        hold(answers::admit(self.stack, &answer));
        if let StackAnswer::Allow { terms, .. } = &answer {
            self.within(&request, terms);
        }
        let next = self.ledger.next_number;
        let allowed = matches!(answer, StackAnswer::Allow { .. });
        let command = Command::Allocate {
            request: request.clone(),
            answer,
            evaluated: (!bytes.flag()).then_some(self.ledger.generation),
            attempt: if bytes.flag() { Attempt::First } else { Attempt::Last { asked_mono_ms: 0 } },
        };
        let granted = self.turn(&command);
        assert!(allowed || !granted, "I8: what was denied is granted");
        assert_eq!(self.ledger.next_number - next, u64::from(granted), "I5: one grant, one record");
        if granted {
            let newest = self.ledger.live.values().next_back().unwrap();
            assert_eq!(newest.devices, request.devices, "I8: what is granted is what was asked for");
        }
    }

    /// Limits that a GPU of the request could keep, counted again, and texts for a terminal.
    fn within(&self, request: &AdmitRequest, terms: &Terms) {
        let mut most = (0, 100);
        for id in &request.devices {
            let Some(part) = self.ledger.part(&id.part) else { continue };
            let of_part = |other: &&DeviceId| other.part == id.part;
            let mut sum = (0_u64, 0_u32);
            for other in request.devices.iter().filter(of_part) {
                if let Some(Consumes::Slice { memory_mib, compute_percent }) =
                    self.ledger.device(&request.resource, other).map(|device| device.consumes)
                {
                    sum = (sum.0.saturating_add(memory_mib), sum.1.saturating_add(compute_percent));
                }
            }
            let has = part.part.memory_mib * u64::from(self.rules.overcommit_percent) / 100;
            most = (most.0.max(has).max(sum.0), most.1.max(sum.1));
        }
        let Limits { memory_mib, compute_percent } = terms.limits;
        assert!(memory_mib.is_none_or(|said| said <= most.0), "I8: a limit of {memory_mib:?} MiB");
        assert!(compute_percent.is_none_or(|said| said <= most.1), "I8: a limit of {compute_percent:?} %");
        assert!(!terms.reason.chars().any(char::is_control), "I8: {:?}", terms.reason);
    }

    fn place(&mut self, bytes: &mut Bytes<'_>) {
        let resource = bytes.pick(&resources());
        let mut available = self.listed(&resource);
        available.retain(|_| !bytes.one_in(8));
        let mut required = available.clone();
        required.retain(|_| bytes.byte() % 8 == 1);
        let size = required.len().max(bytes.below(available.len() + 2));
        let request = PlaceRequest { resource, available, required, size };
        let (placement, by) = self.walk(bytes, |walk| walk.place(&request));
        let shown = without_ungrantable(self.ledger, &request);
        // The kubelet asks for no more than is available; who does gets what there is.
        if request.size <= shown.available.len() {
            hold(answers::place(&shown, &placement.devices));
        }
        let words =
            placement.reason.len() <= REASON_BYTES_MAX && !placement.reason.chars().any(char::is_control);
        assert!(words, "I8: {by} gives the reason {:?}", placement.reason);
    }

    fn triage(&mut self, bytes: &mut Bytes<'_>) {
        let reading = Reading {
            part: part("GPU-0"),
            source: bytes.pick(&["xid", "ecc", "lost"]).to_owned(),
            code: u64::from(bytes.byte()),
            detail: String::new(),
        };
        let triaged = self.walk(bytes, |walk| walk.triage(&reading));
        let TriagedReading { answer, by, .. } = &triaged;
        let words = answer.reason.len() <= REASON_BYTES_MAX && !answer.reason.chars().any(char::is_control);
        assert!(words, "I8: {by} gives the reason {:?}", answer.reason);
        self.turn(&Command::ApplyTriage(triaged));
    }

    /// What else changes what may be granted.
    fn operate(&mut self, bytes: &mut Bytes<'_>) {
        let gpu = GpuId::of_whole(&part(bytes.pick(&["GPU-0", "GPU-1"])));
        let command = match bytes.byte() % 4 {
            0 => Command::Cordon { gpu, author: Author::api("x".into(), String::new()) },
            1 => Command::Uncordon { gpu, owners: Owners::All },
            2 => match self.ledger.live.keys().next() {
                Some(id) => Command::End { id: *id, force: true },
                None => Command::Tick,
            },
            _ => Command::MarkHealthy { gpu, by: "x".into(), why: String::new() },
        };
        self.turn(&command);
    }

    fn listed(&self, resource: &Resource) -> Vec<DeviceId> {
        devices(self.ledger, resource)
    }
}

fn devices(ledger: &Ledger, resource: &Resource) -> Vec<DeviceId> {
    let keys = |part: &PartId| {
        let devices = ledger.part(part).into_iter().flat_map(|state| state.devices.keys());
        let own = devices.filter(|(name, _)| name == resource);
        own.map(|(_, share)| DeviceId { part: part.clone(), share: *share }).collect::<Vec<_>>()
    };
    // So few that an input can choose among them.
    ledger.parts.keys().flat_map(keys).take(16).collect()
}

/// Any answer, to whatever question.
fn answer(bytes: &mut Bytes<'_>, ledger: &Ledger) -> Answer {
    match bytes.byte() % 8 {
        0..=2 => Answer::Offer(OfferAnswer {
            parts: (0..bytes.below(5)).map(|_| part_offer(bytes, ledger)).collect(),
            again_after_s: bytes.flag().then(|| u32::from(bytes.byte())),
        }),
        3 | 4 => {
            let all = devices(ledger, &bytes.pick(&resources()));
            let mut devices = all;
            devices.retain(|_| bytes.flag());
            if bytes.one_in(8) {
                devices.push(DeviceId::whole(&part("GPU-nowhere")));
            }
            if bytes.one_in(8) {
                devices.extend(devices.first().cloned());
            }
            Answer::Place(Placement { devices, reason: bytes.text() })
        }
        5 => Answer::Allow(Terms {
            environment: (0..bytes.below(20)).map(|_| variable(bytes)).collect(),
            limits: Limits {
                memory_mib: bytes.flag().then(|| bytes.memory_mib()),
                compute_percent: bytes.flag().then(|| bytes.percent()),
            },
            reason: bytes.text(),
        }),
        6 => Answer::Deny(bytes.text()),
        _ => Answer::Triage(TriageAnswer {
            severity: bytes.pick(&[Severity::Ignore, Severity::Degraded, Severity::Unhealthy]),
            reason: bytes.text(),
            again_after_s: bytes.flag().then(|| u32::from(bytes.byte())),
        }),
    }
}

fn variable(bytes: &mut Bytes<'_>) -> (String, String) {
    let key = match bytes.byte() % 6 {
        0 => "LD_PRELOAD".to_owned(),
        1 => bytes.text(),
        2 => "A".to_owned(),
        _ => format!("MY_{}", bytes.byte()),
    };
    (key, bytes.text())
}

fn part_offer(bytes: &mut Bytes<'_>, ledger: &Ledger) -> PartOffer {
    let parts: Vec<PartId> = ledger.parts.keys().cloned().collect();
    let part = if bytes.one_in(16) { part("GPU-nowhere") } else { bytes.pick(&parts) };
    let lines = (0..bytes.below(4)).map(|_| {
        let whole = bytes.one_in(4);
        let consumes = if whole {
            Consumes::Whole
        } else {
            Consumes::Slice { memory_mib: bytes.memory_mib(), compute_percent: bytes.percent() }
        };
        let count = match bytes.byte() % 8 {
            0 => u32::from(bytes.byte()),
            1 => u32::MAX,
            _ if whole => 1,
            _ => 1 + u32::from(bytes.byte()) % 6,
        };
        OfferLine { resource: bytes.pick(&resources()), count, consumes }
    });
    PartOffer { part, lines: lines.collect() }
}

/// Policies whose answers are given.
struct ScriptedAnswers {
    answers: BTreeMap<Digest, Result<Option<Answer>, Fault>>,
    asked: Mutex<Vec<Digest>>,
}

impl ScriptedAnswers {
    fn answer(&self, call: Call<'_>) -> Result<Option<Answer>, Fault> {
        self.asked.lock().unwrap().push(call.digest.clone());
        // Any answer to any question, but for one: this hook has no other.
        let _: Question<'_> = call.question;
        self.answers[call.digest].clone()
    }
}

impl PolicyRuntime for ScriptedAnswers {
    fn load(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        Ok(version.clone())
    }

    fn call(&self, call: Call<'_>) -> CallOutput {
        self.answer(call).into()
    }
}
