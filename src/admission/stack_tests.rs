//! I8 and I9: whatever a policy answers, only what was offered, free and permitted comes of it; a
//! faulty policy costs its turn, and the next one or the baseline answers instead.

use super::baseline::{BASELINE, Baseline};
use super::faults::{FAULTS_TO_SUSPEND, Faults};
use super::stack::{CALL_MS_MAX, Offers, Walk};
use crate::kernel::allocation::Limits;
use crate::kernel::change::{Change, Entry};
use crate::kernel::command::StackAnswer;
use crate::kernel::decision::CallNote;
use crate::kernel::gpu::{Mig, Part, Reading};
use crate::kernel::ledger::Ledger;
use crate::kernel::mig::MigStrategy;
use crate::kernel::names::{DeviceId, Digest, PartId, Resource};
use crate::kernel::offer::{Consumes, OfferLine, PartOffer};
use crate::kernel::policy::{
    AdmitRequest, Answer, Call, Fault, FaultKind, OfferAnswer, PlaceRequest, Placement, PolicyVersion,
    REASON_BYTES_MAX, Severity, Terms,
};
use crate::kernel::stack::{OnFault, Stack, StackEntry};
use crate::kernel::time::Now;
use crate::ports::{InstallError, Policies};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

type Answered = Result<Option<Answer>, Fault>;

/// Policies whose answers are given, by the first letter of their digest.
#[derive(Default)]
struct Scripted {
    answers: BTreeMap<char, Answered>,
    /// How long each takes over its answer.
    pace: Duration,
    /// Who was asked, and the milliseconds that he was given.
    asked: Mutex<Vec<(char, u64)>>,
}

impl Policies for Scripted {
    fn install(&self, _: &[u8], _: Now) -> Result<PolicyVersion, InstallError> {
        Err(InstallError::Busy)
    }
    fn restore(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        Ok(version.clone())
    }
    fn module(&self, _: &Digest) -> Result<Vec<u8>, InstallError> {
        Err(InstallError::Busy)
    }
    fn remove(&self, _: &Digest) {}
    fn ask(&self, call: Call<'_>) -> Answered {
        let letter = call.digest.as_str().chars().next().unwrap();
        self.asked.lock().unwrap().push((letter, call.wall_ms_max));
        std::thread::sleep(self.pace);
        self.answers.get(&letter).cloned().unwrap_or(Ok(None))
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
        Change::PartFound(Part {
            id: gpu(i),
            parent: None,
            vendor: "nvidia".into(),
            model: String::new(),
            gpu_index: u32::try_from(i).unwrap(),
            minor: None,
            memory_mib: 1000,
            pci_bus: String::new(),
            numa_node: None,
            mig_enabled: false,
            mig: None,
            attributes: BTreeMap::new(),
        })
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
        permissions: crate::kernel::stack::Permissions::default(),
        on_fault: OnFault::Skip,
    }
}

struct Case {
    node: Arc<Ledger>,
    stack: Stack,
    policies: Scripted,
    faults: Faults,
    baseline: Baseline,
    calls: Vec<CallNote>,
}

impl Case {
    fn new(answers: impl IntoIterator<Item = (char, Answered)>) -> Self {
        let answers: BTreeMap<char, Answered> = answers.into_iter().collect();
        let entries = answers.keys().map(|letter| entry(*letter)).collect();
        Self {
            node: Arc::new(node()),
            stack: Stack { entries, ..Stack::default() },
            policies: Scripted { answers, ..Scripted::default() },
            faults: Faults::default(),
            calls: Vec::new(),
            baseline: Baseline {
                resource: resource("nvidia.com/gpu"),
                mig: MigStrategy::None,
                mps_sockets: BTreeMap::new(),
                ignored_xids: vec![13],
                quiet_ms: 60_000,
            },
        }
    }

    /// Puts a GPU into MIG mode, with one instance.
    fn split(&mut self, n: usize) {
        let whole = Part { mig_enabled: true, ..self.node.part(&gpu(n)).unwrap().part.clone() };
        let instance = Part {
            id: PartId::parse(&format!("MIG-{n}")).unwrap(),
            parent: Some(whole.id.clone()),
            mig_enabled: false,
            mig: Some(Mig { profile: "1g.10gb+me".into(), gpu_instance: 7, compute_instance: 0 }),
            ..whole.clone()
        };
        let changes = vec![Change::PartFound(whole), Change::PartFound(instance)];
        Arc::make_mut(&mut self.node).apply(&Entry { at: Now::default(), changes });
    }

    fn walk(&mut self) -> Walk<'_> {
        Walk {
            stack: &self.stack,
            policies: &self.policies,
            node: &self.node,
            now: Now::default(),
            faults: &mut self.faults,
            baseline: &self.baseline,
            overcommit_percent: 100,
            calls: &mut self.calls,
        }
    }

    fn admit(&mut self) -> StackAnswer {
        let request =
            AdmitRequest { resource: resource("nvidia.com/gpu"), devices: vec![DeviceId::whole(&gpu(0))] };
        self.walk().admit(&request)
    }

    fn place(&mut self, required: &[usize], size: usize) -> (Placement, String) {
        let whole = |i: &usize| DeviceId::whole(&gpu(*i));
        let request = PlaceRequest {
            resource: resource("nvidia.com/gpu"),
            available: [0, 1].iter().map(whole).collect(),
            required: required.iter().map(whole).collect(),
            size,
        };
        self.walk().place(&request)
    }
}

fn offer(part: usize, name: &str, count: u32, memory_mib: u64) -> PartOffer {
    let consumes = Consumes::Slice { memory_mib, compute_percent: 1 };
    PartOffer { part: gpu(part), lines: vec![OfferLine { resource: resource(name), count, consumes }] }
}

fn offers(parts: Vec<PartOffer>, again_after_s: Option<u32>) -> Answered {
    Ok(Some(Answer::Offer(OfferAnswer { parts, again_after_s })))
}

fn allow(environment: &[(&str, &str)], memory_mib: Option<u64>) -> Answered {
    Ok(Some(Answer::Allow(Terms {
        environment: environment.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect(),
        limits: Limits { memory_mib, compute_percent: None },
        reason: "fine".into(),
    })))
}

fn trap() -> Answered {
    Err(Fault { kind: FaultKind::Trap, detail: "unreachable".into() })
}

#[test]
fn offers_go_gpu_by_gpu_to_the_first_that_answers_and_the_rest_to_the_baseline() {
    let shared = "nvidia.com/gpu.shared";
    let mut case = Case::new([
        ('a', offers(vec![offer(1, shared, 4, 250)], Some(60))),
        ('b', offers(vec![offer(1, shared, 2, 500)], Some(7))),
    ]);
    let Offers { mut parts, again_after_s, faults, .. } = case.walk().offers();
    parts.sort_by_key(|(o, _)| o.part.clone());
    assert_eq!(parts.len(), 2);
    assert_eq!(parts[0].1, "baseline");
    assert_eq!(parts[0].0.lines[0].resource, resource("nvidia.com/gpu"));
    assert_eq!((parts[1].0.lines[0].count, parts[1].1.as_str()), (4, "a@aaaaaaaaaaaa"));
    assert_eq!((again_after_s, faults.len()), (Some(7), 0));
}

#[test]
fn the_baseline_offers_mig_as_its_strategy_says_and_policies_go_first() {
    let named = |case: &mut Case| -> Vec<(String, String)> {
        let parts = case.walk().offers().parts;
        let lines = parts.iter().flat_map(|(o, _)| o.lines.iter().map(|l| (&o.part, &l.resource)));
        let mut all: Vec<_> = lines.map(|(part, r)| (part.to_string(), r.to_string())).collect();
        all.sort();
        all
    };
    let pair = |part: &str, resource: &str| (part.to_owned(), format!("nvidia.com/{resource}"));
    let mut case = Case::new([('a', Ok(None))]);
    case.split(1);
    assert_eq!(named(&mut case), [pair("GPU-0", "gpu"), pair("GPU-1", "gpu")], "none");
    case.baseline.mig = MigStrategy::Mixed;
    assert_eq!(named(&mut case), [pair("GPU-0", "gpu"), pair("MIG-1", "mig-1g.10gb.me")]);
    case.baseline.mig = MigStrategy::Single;
    assert!(case.walk().offers().mig.refusal.unwrap().contains("GPU 0"));
    assert_eq!(named(&mut case), []);
    // A policy shares the GPU that stood in the way.
    let mut case = Case::new([('a', offers(vec![offer(0, "nvidia.com/gpu.shared", 2, 500)], None))]);
    case.split(1);
    case.baseline.mig = MigStrategy::Single;
    assert_eq!(named(&mut case), [pair("GPU-0", "gpu.shared"), pair("MIG-1", "gpu")]);
    // A policy speaks for the instance, so its GPU is not offered whole beside it.
    let instance =
        OfferLine { resource: resource("nvidia.com/mig-1g.10gb"), count: 1, consumes: Consumes::Whole };
    let part = PartId::parse("MIG-1").unwrap();
    let mut case = Case::new([('a', offers(vec![PartOffer { part, lines: vec![instance] }], None))]);
    case.split(1);
    assert_eq!(named(&mut case), [pair("GPU-0", "gpu"), pair("MIG-1", "mig-1g.10gb")]);
}

#[test]
fn i8_a_policy_may_not_offer_a_gpu_in_mig_mode() {
    let whole = OfferLine { resource: resource("nvidia.com/gpu"), count: 1, consumes: Consumes::Whole };
    let mut case = Case::new([('a', offers(vec![PartOffer { part: gpu(1), lines: vec![whole] }], None))]);
    case.split(1);
    assert!(case.walk().offers().faults[0].1.detail.contains("MIG mode"));
}

#[test]
fn i8_an_offer_outside_the_permissions_or_the_part_is_a_fault() {
    let bad = [
        offer(0, "amd.com/gpu", 1, 1),
        offer(0, "nvidia.com/gpu.shared", 129, 1),
        offer(0, "nvidia.com/gpu.shared", 0, 1),
        offer(0, "nvidia.com/gpu.shared", 2, 1001),
        offer(7, "nvidia.com/gpu.shared", 2, 1),
        PartOffer {
            part: gpu(0),
            lines: [offer(0, "nvidia.com/gpu", 1, 1).lines, offer(0, "nvidia.com/gpu", 1, 1).lines].concat(),
        },
        PartOffer {
            part: gpu(0),
            lines: vec![OfferLine {
                resource: resource("nvidia.com/gpu"),
                count: 2,
                consumes: Consumes::Whole,
            }],
        },
    ];
    for offer in bad {
        let mut case = Case::new([('a', offers(vec![offer.clone()], None))]);
        let found = case.walk().offers();
        assert_eq!(found.faults[0].1.kind, FaultKind::Answer, "{offer:?}");
        assert!(found.parts.iter().all(|(_, by)| by == "baseline"), "I9: the baseline answers: {offer:?}");
    }
}

#[test]
fn i8_a_placement_that_is_not_of_the_available_is_a_fault() {
    let placed = |devices: &[usize]| {
        let devices = devices.iter().map(|i| DeviceId::whole(&gpu(*i))).collect();
        Ok(Some(Answer::Place(Placement { devices, reason: String::new() })))
    };
    for bad in [placed(&[7]), placed(&[0, 1]), placed(&[]), placed(&[1])] {
        let mut case = Case::new([('a', bad.clone())]);
        let (placement, by) = case.place(&[0], 1);
        assert_eq!((by.as_str(), placement.devices), ("baseline", vec![DeviceId::whole(&gpu(0))]), "{bad:?}");
    }
    let mut case = Case::new([('a', placed(&[1, 1]))]);
    assert_eq!(case.place(&[], 2).1, "baseline");
    let mut case = Case::new([('a', placed(&[1]))]);
    assert_eq!(case.place(&[], 1).1, "a@aaaaaaaaaaaa");
}

#[test]
fn all_must_allow_and_the_stricter_limit_holds() {
    let mut case = Case::new([('a', allow(&[], Some(500))), ('b', Ok(None)), ('c', allow(&[], Some(300)))]);
    let StackAnswer::Allow { by, terms } = case.admit() else { panic!() };
    assert_eq!((by.len(), terms.limits.memory_mib), (2, Some(300)));
    let mut case = Case::new([('a', allow(&[], None)), ('b', Ok(Some(Answer::Deny("no".into()))))]);
    assert_eq!(case.admit(), StackAnswer::Deny { policy: "b@bbbbbbbbbbbb".into(), reason: "no".into() });
    let mut case = Case::new([('a', Ok(None))]);
    assert!(matches!(case.admit(), StackAnswer::Allow { by, .. } if by == ["baseline"]));
}

#[test]
fn i8_terms_outside_the_permissions_are_a_fault() {
    let long = "x".repeat(1025);
    let many: Vec<(String, String)> = (0..17).map(|i| (format!("MY_{i}"), String::new())).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    let kib = "x".repeat(1024);
    let heavy =
        [("MY_A", &*kib), ("MY_B", &kib), ("MY_C", &kib), ("MY_D", &kib), ("MY_E", &kib), ("MY_F", &kib)];
    for bad in [
        &[("LD_PRELOAD", "x")][..],
        &heavy,
        &[("MY_A", "\u{1b}[31m")],
        &[("OTHER", "x")],
        &[("MY_A", "a\nb")],
        &[("MY_A", "a\0b")],
        &[("MY_A", &long)],
        &[("MY_A", "1"), ("MY_A", "1")],
        &many,
    ] {
        let mut case = Case::new([('a', allow(bad, None))]);
        case.stack.entries[0].permissions.environment = vec!["MY_*".into(), "LD_*".into()];
        let StackAnswer::Allow { by, terms } = case.admit() else { panic!() };
        assert_eq!((by, terms.environment), (vec!["baseline".to_owned()], vec![]), "{bad:?}");
        assert_eq!(case.faults.record(0, &case.stack.entries[0]).faults()[&FaultKind::Answer], 1);
    }
}

#[test]
fn i8_limits_beyond_what_the_gpu_has_are_a_fault() {
    let told = |limits| Ok(Some(Answer::Allow(Terms { limits, ..Terms::default() })));
    // The GPUs here have 1000 MiB.
    for (memory_mib, compute_percent, taken) in [
        (Some(1000), Some(100), true),
        (Some(1001), None, false),
        (Some(u64::MAX), None, false),
        (None, Some(101), false),
    ] {
        let limits = Limits { memory_mib, compute_percent };
        let mut case = Case::new([('a', told(limits))]);
        let StackAnswer::Allow { by, terms } = case.admit() else { panic!() };
        let expected = if taken { limits } else { Limits::default() };
        assert_eq!((terms.limits, by == [BASELINE]), (expected, !taken), "{limits:?}");
    }
}

#[test]
fn a_fault_quotes_no_more_of_the_guest_than_a_reason_may_have() {
    let key = "\u{e9}".repeat(100_000);
    let mut case = Case::new([('a', allow(&[(&key, "x")], None))]);
    case.stack.entries[0].on_fault = OnFault::Deny;
    let StackAnswer::Faulted { detail, .. } = case.admit() else { panic!() };
    assert!(
        detail.len() <= REASON_BYTES_MAX && detail.starts_with("its stack entry may not set"),
        "{detail}"
    );
}

#[test]
fn i8_a_reason_that_speaks_to_a_terminal_is_a_fault() {
    let reason = "fine\u{1b}[2J".to_owned();
    let answer = Placement { devices: vec![DeviceId::whole(&gpu(1))], reason };
    let mut case = Case::new([('a', Ok(Some(Answer::Place(answer))))]);
    assert_eq!(case.place(&[], 1).1, BASELINE);
}

#[test]
fn two_that_set_a_key_differently_are_a_fault_of_the_later() {
    let mut case = Case::new([('a', allow(&[("MY_A", "1")], None)), ('b', allow(&[("MY_A", "2")], None))]);
    case.stack.entries.iter_mut().for_each(|e| e.permissions.environment = vec!["MY_*".into()]);
    let StackAnswer::Allow { by, terms } = case.admit() else { panic!() };
    assert_eq!((by.len(), terms.environment), (1, vec![("MY_A".to_owned(), "1".to_owned())]));
    assert_eq!(case.faults.record(1, &case.stack.entries[1]).in_a_row, 1);
}

#[test]
fn i9_a_fault_denies_only_where_the_entry_says_so() {
    let mut case = Case::new([('a', trap())]);
    assert!(matches!(case.admit(), StackAnswer::Allow { .. }));
    case.stack.entries[0].on_fault = OnFault::Deny;
    assert!(matches!(case.admit(), StackAnswer::Faulted { kind: FaultKind::Trap, .. }));
    let mut case = Case::new([('a', Ok(Some(Answer::Deny("no".into()))))]);
    case.stack.entries[0].permissions.deny = false;
    assert!(matches!(case.admit(), StackAnswer::Allow { .. }), "it may not deny");
}

#[test]
fn i9_several_faults_in_a_row_suspend_and_a_slow_machine_does_not() {
    let mut case = Case::new([('a', trap())]);
    case.stack.entries[0].on_fault = OnFault::Deny;
    for _ in 0..FAULTS_TO_SUSPEND {
        assert!(matches!(case.admit(), StackAnswer::Faulted { .. }));
    }
    assert!(case.faults.suspended(0, &case.stack.entries[0]));
    assert!(matches!(case.admit(), StackAnswer::Allow { .. }), "a suspended entry is not asked");
    case.faults.reset();
    assert!(matches!(case.admit(), StackAnswer::Faulted { .. }));

    let slow = Err(Fault { kind: FaultKind::Time, detail: String::new() });
    let mut case = Case::new([('a', slow)]);
    for _ in 0..3 * FAULTS_TO_SUSPEND {
        case.admit();
    }
    assert!(!case.faults.suspended(0, &case.stack.entries[0]));
}

#[test]
fn a_reading_is_judged_by_the_first_that_answers_or_by_nvidias_list() {
    let reading = |code| Reading { part: gpu(0), source: "xid".into(), code, detail: "x".into() };
    let mut case = Case::new([('a', Ok(None))]);
    assert_eq!(case.walk().triage(&reading(13)).0.severity, Severity::Ignore);
    let (judged, by) = case.walk().triage(&reading(79));
    assert_eq!(by, BASELINE);
    assert_eq!((judged.severity, judged.again_after_s), (Severity::Unhealthy, Some(60)));
    assert!(judged.reason.contains("79"));
}

#[test]
fn i9_a_policy_that_fails_goes_on_offering_what_it_offers() {
    let shared = "nvidia.com/gpu.shared";
    let mut case = Case::new([('a', trap())]);
    let now = offer(1, shared, 4, 250);
    let change = Change::Offered {
        part: now.part.clone(),
        by: case.stack.entries[0].label(),
        lines: now.lines.clone(),
        ranges: Vec::new(),
        devices: BTreeMap::new(),
    };
    Arc::make_mut(&mut case.node).apply(&Entry { at: Now::default(), changes: vec![change] });
    // As long as it fails, and once it is suspended.
    for _ in 0..=FAULTS_TO_SUSPEND {
        let found = case.walk().offers();
        let kept = found.parts.iter().find(|(o, _)| o.part == gpu(1)).unwrap();
        assert_eq!(kept, &(now.clone(), "a@aaaaaaaaaaaa".to_owned()));
        assert!(found.parts.iter().any(|(o, by)| o.part == gpu(0) && by == "baseline"));
    }
    assert!(case.faults.suspended(0, &case.stack.entries[0]));
}

/// Two such calls are more than a stack may take.
const SLOW: Duration = Duration::from_millis(600);

#[test]
fn i9_a_stack_whose_time_is_used_up_asks_nobody_more() {
    for (on_fault, denied) in [(OnFault::Skip, false), (OnFault::Deny, true)] {
        let mut case = Case::new(['a', 'b', 'c', 'd'].map(|letter| (letter, Ok(None))));
        case.stack.entries[2].on_fault = on_fault;
        case.policies.pace = SLOW;
        let answer = case.admit();
        let asked = case.policies.asked.lock().unwrap().clone();
        // The first has the limit of one call, the second what is left of the stack's.
        let within = |(letter, ms): &(char, u64)| match letter {
            'a' => *ms <= CALL_MS_MAX,
            'b' => *ms <= 400,
            _ => false,
        };
        assert!(asked.iter().all(within), "{asked:?}");
        let late = case.faults.record(2, &case.stack.entries[2]);
        assert_eq!(late.faults()[&FaultKind::Time], 1);
        assert!(late.last.unwrap().contains("used up its 1 s"));
        match answer {
            StackAnswer::Faulted { kind: FaultKind::Time, policy, .. } if denied => {
                assert_eq!(policy, "c@cccccccccccc");
            }
            StackAnswer::Allow { by, .. } if !denied => assert_eq!(by, ["baseline"]),
            other => panic!("{on_fault:?}: {other:?}"),
        }
    }
}

#[test]
fn i9_a_stack_whose_time_is_used_up_still_offers_and_places() {
    let mut case = Case::new(['a', 'b', 'c'].map(|letter| (letter, Ok(None))));
    case.policies.pace = SLOW;
    let offers = case.walk().offers();
    assert!(offers.parts.len() == 2 && offers.parts.iter().all(|(_, by)| by == "baseline"));
    assert_eq!(offers.faults.last().unwrap().0, "c@cccccccccccc");
    assert_eq!(offers.again_after_s, Some(1), "asked again soon");
    let (placement, by) = case.place(&[1], 1);
    assert_eq!((placement.devices, by.as_str()), (vec![DeviceId::whole(&gpu(1))], "baseline"));
    let asked = case.policies.asked.lock().unwrap();
    assert!(asked.iter().all(|(letter, _)| *letter != 'c'), "{asked:?}");
}
