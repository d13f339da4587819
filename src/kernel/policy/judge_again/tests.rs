use super::*;
use crate::hardware::gpu::{ECC, Inventory, Part, RECOVERED, RECOVERY, XID};
use crate::hardware::health::{Health, HealthState};
use crate::hardware::judgement::{DETAIL_BYTES_MAX, REASON_BYTES_MAX};
use crate::hardware::triage::{Severity, TriageAnswer, XidRules, baseline_triage};
use crate::ids::names::{Digest, GpuId};
use crate::node::change::Entry;
use crate::node::command::{Activation, Command, NewStack};
use crate::node::decide::decide;
use crate::node::record::records;
use crate::node::restore::restore;
use crate::node::test_node::{Node, gpu_id, part};
use crate::policy::stack::{OnFault, Permissions, StackOrigin};
use crate::policy::version::test_version;

const GPU: &str = "GPU-0";

fn digest(letter: char) -> Digest {
    Digest::parse(&letter.to_string().repeat(64)).unwrap()
}

/// A stack entry of the policy with this digest.
fn entry(letter: char, parameters: &str) -> StackEntry {
    StackEntry {
        name: "own".into(),
        digest: digest(letter),
        parameters: parameters.into(),
        permissions: Permissions::default(),
        on_fault: OnFault::Skip,
    }
}

fn bad() -> StackEntry {
    entry('a', "{}")
}

/// A node whose policies judge readings as a test says.
struct Judged {
    node: Node,
}

impl Judged {
    fn under(entries: &[StackEntry]) -> Self {
        let mut judged = Self { node: Node::new() };
        for letter in ['a', 'b'] {
            judged.turn(&Command::RecordUpload(test_version(letter)));
        }
        judged.activate(entries);
        judged
    }

    fn turn(&mut self, command: &Command) {
        let verdict = decide(&self.node.ledger, command, self.node.now);
        assert_eq!(verdict.refusal, None);
        self.node.ledger.apply(&verdict.entry);
    }

    /// Activates a stack that has no opinion about any reading.
    fn activate(&mut self, entries: &[StackEntry]) {
        let xids = XidRules::default();
        self.activate_with(entries, |reading| {
            let answer = baseline_triage(&reading, &xids, 300_000);
            TriagedReading { reading, answer, by: Decider::Baseline }
        });
    }

    fn activate_with(&mut self, entries: &[StackEntry], judge: impl Fn(Reading) -> TriagedReading) {
        let again = to_judge_again(&self.node.ledger, entries);
        let stack = NewStack {
            origin: StackOrigin::Api,
            failed: None,
            by: "ada".into(),
            why: String::new(),
            entries: entries.to_vec(),
        };
        let triage = again.into_iter().map(judge).collect();
        self.turn(&Command::Activate(Activation { stack, offers: Vec::new(), triage }));
    }

    fn read(&mut self, source: &str, code: u64, answer: Option<(&StackEntry, Severity, Option<u32>)>) {
        let reading = Reading { part: part(GPU), source: source.into(), code, detail: "it failed".into() };
        let (answer, by) = match answer {
            Some((entry, severity, again_after_s)) => {
                (TriageAnswer { severity, reason: "as I see it".into(), again_after_s }, entry.decider())
            }
            None => (baseline_triage(&reading, &XidRules::default(), 300_000), Decider::Baseline),
        };
        self.turn(&Command::ApplyTriage(TriagedReading { reading, answer, by }));
    }

    /// What a stack that has no opinion judges unhealthy because of policies alone.
    fn unhealthy_by_policy(&self) -> Option<&Judgement> {
        let xids = XidRules::default();
        self.health().unhealthy_by_policy(|reading| baseline_triage(reading, &xids, 300_000), self.node.now)
    }

    fn scan(&mut self, error: Option<&str>) {
        let of = |state: &crate::sharing::part_state::PartState| Part::clone(&state.part);
        let parts = self.node.ledger.parts.values().map(|state| of(state)).collect();
        let scan_errors = error.map(|why| (gpu_id(GPU), why.into())).into_iter().collect();
        self.turn(&Command::RecordScan(Inventory { parts, scan_errors, ..Inventory::default() }));
    }

    fn restart(&mut self) {
        self.node.now.mono_ms = 50;
        self.node.ledger = restore(records(&self.node.ledger), self.node.now);
    }

    fn health(&self) -> &Health {
        &self.node.ledger.gpus[&gpu_id(GPU)].health
    }

    fn state(&self) -> HealthState {
        self.health().state
    }
}

#[test]
fn a_rollback_judges_again_what_the_removed_policy_had_judged() {
    for restarts in [false, true] {
        let mut node = Judged::under(&[bad()]);
        node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
        assert_eq!(node.state(), HealthState::Unhealthy);
        if restarts {
            node.restart();
            node.scan(None);
            assert_eq!(node.state(), HealthState::Unhealthy);
        }
        node.activate(&[]);
        assert_eq!(node.state(), HealthState::Healthy, "an application's error, after a restart: {restarts}");
        assert_eq!(node.health().judgements, []);
    }
}

#[test]
fn what_berth_itself_judges_bad_stays_bad() {
    for restarts in [false, true] {
        let mut node = Judged::under(&[bad()]);
        node.read(XID, 48, None);
        node.read(XID, 13, Some((&bad(), Severity::Unhealthy, Some(86_400))));
        if restarts {
            node.restart();
            node.scan(None);
        }
        node.activate(&[]);
        let health = node.health();
        assert_eq!((health.state, health.quiet_ms), (HealthState::Unhealthy, None), "XID 48 needs a reset");
        node.read(RECOVERY, RECOVERED, None);
        node.scan(None);
        assert_eq!(node.state(), HealthState::Healthy, "a reset ends it as if no policy had been there");
    }
}

#[test]
fn an_error_of_a_scan_is_not_healed_by_a_rollback() {
    let mut node = Judged::under(&[bad()]);
    node.scan(Some("NVML says that it is lost"));
    node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
    node.activate(&[]);
    assert_eq!(node.state(), HealthState::Unhealthy);
    node.scan(None);
    assert_eq!(node.state(), HealthState::Unhealthy, "its quiet time runs");
    node.node.pass(300);
    node.scan(None);
    assert_eq!(node.state(), HealthState::Healthy);
    // A GPU that vanished and returns is judged without the policy, too.
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
    node.turn(&Command::RecordScan(Inventory::default()));
    node.activate(&[]);
    assert_eq!(node.state(), HealthState::Vanished);
    let returned = Node::new().ledger.parts.values().map(|state| state.part.clone()).collect();
    node.turn(&Command::RecordScan(Inventory { parts: returned, ..Inventory::default() }));
    assert_eq!(node.state(), HealthState::Healthy);
}

#[test]
fn an_event_that_is_judged_again_has_the_quiet_time_since_it_came() {
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 79, Some((&bad(), Severity::Unhealthy, Some(86_400))));
    node.node.pass(100);
    node.activate(&[]);
    let health = node.health();
    assert_eq!((health.state, health.quiet_ms), (HealthState::Unhealthy, Some(300_000)));
    assert_eq!(health.reason, "XID 79: it failed");
    node.node.pass(199);
    node.scan(None);
    assert_eq!(node.state(), HealthState::Unhealthy);
    node.node.pass(1);
    node.scan(None);
    assert_eq!(node.state(), HealthState::Healthy);
    // The quiet time of Berth's own rules was over before the rollback.
    let mut node = Judged::under(&[bad()]);
    node.read(ECC, 1, Some((&bad(), Severity::Unhealthy, None)));
    node.node.pass(300);
    node.activate(&[]);
    assert_eq!(node.state(), HealthState::Healthy);
    // Berth's own rules are milder, and their quiet time runs.
    let mut node = Judged::under(&[bad()]);
    node.read(ECC, 1, Some((&bad(), Severity::Unhealthy, None)));
    node.activate(&[]);
    assert_eq!(node.state(), HealthState::Degraded);
}

#[test]
fn an_event_that_a_removed_policy_ignored_stands_until_the_reset_that_it_needs() {
    for is_reset in [false, true] {
        let mut node = Judged::under(&[bad()]);
        node.read(XID, 48, Some((&bad(), Severity::Ignore, None)));
        node.read(XID, 79, Some((&bad(), Severity::Ignore, None)));
        assert_eq!((node.state(), node.health().judgements.len()), (HealthState::Healthy, 1));
        if is_reset {
            node.read(RECOVERY, RECOVERED, None);
        }
        node.restart();
        node.scan(None);
        node.activate(&[]);
        let expected = if is_reset { HealthState::Healthy } else { HealthState::Unhealthy };
        assert_eq!(node.state(), expected);
    }
}

#[test]
fn only_a_policy_that_is_gone_or_has_other_parameters_is_judged_again() {
    let judged = |before: &[StackEntry], after: &[StackEntry]| {
        let mut node = Judged::under(before);
        node.read(XID, 13, Some((&before[0], Severity::Unhealthy, None)));
        node.activate(after);
        node.state() == HealthState::Healthy
    };
    let (other, changed) = (entry('b', "{}"), entry('a', "{\"x\":1}"));
    assert!(!judged(&[bad()], &[bad()]), "the same policy");
    assert!(!judged(&[bad()], &[other.clone(), bad()]), "the same policy at another place");
    assert!(judged(&[bad(), other.clone()], std::slice::from_ref(&other)), "the policy was removed");
    assert!(judged(&[bad()], std::slice::from_ref(&changed)), "the same version with other parameters");
    assert!(judged(&[bad(), changed.clone()], &[changed]), "one of two entries of the same version");
    // Through other stacks the policy stays, until it goes.
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
    for _ in 0..2 * crate::policy::stack::ACTIVATIONS_MAX {
        node.activate_with(&[bad(), other.clone()], |reading| {
            let answer = TriageAnswer {
                severity: Severity::Unhealthy,
                reason: "as I see it".into(),
                again_after_s: None,
            };
            TriagedReading { reading, answer, by: bad().decider() }
        });
        assert_eq!(node.state(), HealthState::Unhealthy);
    }
    node.activate(&[other]);
    assert_eq!(node.state(), HealthState::Healthy);
}

#[test]
fn the_new_stack_judges_what_the_removed_policy_had_judged() {
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
    let other = entry('b', "{}");
    node.activate_with(std::slice::from_ref(&other), |reading| {
        let reason = "shown only".into();
        let answer = TriageAnswer { severity: Severity::Degraded, reason, again_after_s: None };
        TriagedReading { reading, answer, by: other.decider() }
    });
    assert_eq!((node.state(), node.health().reason.as_str()), (HealthState::Degraded, "shown only"));
    node.activate(&[]);
    assert_eq!(node.state(), HealthState::Healthy);
}

#[test]
fn an_operators_word_is_not_undone_by_a_rollback() {
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 48, Some((&bad(), Severity::Unhealthy, None)));
    node.turn(&Command::MarkHealthy { gpu: gpu_id(GPU), by: "ada".into(), why: String::new() });
    node.activate(&[]);
    assert_eq!(node.state(), HealthState::Healthy);
}

#[test]
fn a_record_without_judgements_is_of_no_policy() {
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
    let mut all = records(&node.node.ledger);
    for record in &mut all {
        if let crate::node::record::Record::Health(health) = record {
            health.judgements.clear();
        }
    }
    node.node.ledger = restore(all, node.node.now);
    node.scan(None);
    node.activate(&[]);
    assert_eq!(node.state(), HealthState::Unhealthy);
}

#[test]
fn a_policy_alone_makes_a_gpu_unhealthy_until_berth_judges_it_so_too() {
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
    assert_eq!(node.unhealthy_by_policy().map(|one| one.by.clone()), Some(bad().decider()));
    node.read(XID, 79, None);
    assert_eq!(node.unhealthy_by_policy(), None);
    node.node.pass(300);
    assert!(node.unhealthy_by_policy().is_some(), "the other is over");
}

#[test]
fn a_policy_is_not_to_blame_for_an_error_that_berth_would_judge_unhealthy_too() {
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 48, Some((&bad(), Severity::Unhealthy, None)));
    assert_eq!(node.unhealthy_by_policy(), None, "it needs a reset without the policy, too");
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 79, Some((&bad(), Severity::Unhealthy, None)));
    assert_eq!(node.unhealthy_by_policy(), None);
    node.node.pass(300);
    assert!(node.unhealthy_by_policy().is_some(), "without the policy its quiet time would be over");
    // The policy ignores another error. Without the policy the GPU would wait for a reset after it.
    node.read(XID, 48, Some((&bad(), Severity::Ignore, None)));
    assert_eq!(node.unhealthy_by_policy(), None);
}

#[test]
fn an_event_that_needs_a_reset_is_not_forgotten_after_others() {
    for severity in [Severity::Ignore, Severity::Unhealthy] {
        let mut node = Judged::under(&[bad()]);
        node.read(XID, 48, Some((&bad(), severity, None)));
        for (source, code) in [(XID, 13), (XID, 31), (XID, 43), (XID, 45), (XID, 63), (ECC, 1), (ECC, 2)] {
            node.node.pass(1);
            node.read(source, code, Some((&bad(), Severity::Unhealthy, None)));
        }
        node.activate(&[]);
        let health = node.health();
        assert_eq!((health.state, health.until_reset), (HealthState::Unhealthy, true), "{severity:?}");
    }
    // The code of an ECC reading is a count: each is another reading of the same error.
    let mut node = Judged::under(&[bad()]);
    (1..10).for_each(|count| node.read(ECC, count, Some((&bad(), Severity::Degraded, None))));
    assert_eq!(node.health().judgements.len(), 1);
}

#[test]
fn events_that_need_a_reset_do_not_displace_other_judgements() {
    // A failing GPU reports many such events; one of them is enough for it to wait for a reset.
    let resets = [48, 64, 95, 140, 171];
    let mut node = Judged::under(&[bad()]);
    for code in resets {
        node.node.pass(1);
        node.read(XID, code, None);
    }
    node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
    node.read(RECOVERY, RECOVERED, None);
    assert_eq!(node.state(), HealthState::Unhealthy, "the policy's judgement stands");
    node.activate(&[]);
    assert_eq!(node.state(), HealthState::Healthy);

    let mut node = Judged::under(&[bad()]);
    for code in resets {
        node.read(XID, code, Some((&bad(), Severity::Ignore, None)));
    }
    node.read(XID, 79, None);
    let other = entry('b', "{}");
    node.activate_with(std::slice::from_ref(&other), |reading| {
        let answer = TriageAnswer { severity: Severity::Ignore, reason: String::new(), again_after_s: None };
        TriagedReading { reading, answer, by: other.decider() }
    });
    assert_eq!(node.state(), HealthState::Unhealthy, "it fell off the bus");
}

#[test]
fn marking_a_healthy_gpu_healthy_removes_the_events_that_a_policy_ignored() {
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 48, Some((&bad(), Severity::Unhealthy, Some(60))));
    node.node.pass(60);
    node.scan(None);
    assert_eq!(node.state(), HealthState::Healthy);
    node.turn(&Command::MarkHealthy { gpu: gpu_id(GPU), by: "ada".into(), why: String::new() });
    node.activate(&[]);
    assert_eq!(node.state(), HealthState::Healthy);
}

#[test]
fn a_judgement_that_is_over_is_not_valid_again_after_a_restart() {
    let (other, changed) = (entry('b', "{}"), entry('a', "{\"x\":1}"));
    let mut node = Judged::under(&[bad(), other.clone()]);
    node.read(XID, 48, Some((&bad(), Severity::Unhealthy, Some(60))));
    node.node.pass(100_000);
    node.scan(None);
    // The new version's quiet time since the event is over, too.
    node.activate_with(&[changed.clone(), other.clone()], |reading| {
        let reason = "as I see it".into();
        let answer = TriageAnswer { severity: Severity::Unhealthy, reason, again_after_s: Some(86_400) };
        TriagedReading { reading, answer, by: changed.decider() }
    });
    assert_eq!(node.state(), HealthState::Healthy);
    node.read(XID, 13, Some((&other, Severity::Degraded, None)));
    node.restart();
    node.activate(&[changed]);
    node.scan(None);
    assert_eq!(node.state(), HealthState::Healthy);
}

#[test]
fn a_gpu_with_a_lasting_sign_does_not_heal_between_scans_that_are_far_apart() {
    let mut node = Judged::under(&[]);
    let sign = Reading { part: part(GPU), source: RECOVERY.into(), code: 1, detail: "reset it".into() };
    let scan = |node: &mut Judged, signs: &[&Reading]| {
        let parts = node.node.ledger.parts.values().map(|state| state.part.clone()).collect();
        let signs = signs.iter().map(|&sign| sign.clone()).collect();
        node.turn(&Command::RecordScan(Inventory { parts, signs, ..Inventory::default() }));
    };
    node.read(RECOVERY, 1, None);
    assert_eq!(node.health().quiet_ms, Some(300_000));
    for _ in 0..3 {
        node.node.pass(600);
        scan(&mut node, &[&sign]);
        assert_eq!(node.state(), HealthState::Unhealthy, "the sign is judged after the scan");
        node.read(RECOVERY, 1, None);
    }
    node.node.pass(600);
    scan(&mut node, &[]);
    assert_eq!(node.state(), HealthState::Healthy);
    // A sign that a policy ignores does not keep the GPU unhealthy, even if it counted before, for example before the
    // first activation.
    for counted_before in [false, true] {
        let mut node = Judged::under(&[bad()]);
        if counted_before {
            node.read(RECOVERY, 1, None);
        }
        node.read(RECOVERY, 1, Some((&bad(), Severity::Ignore, None)));
        node.read(XID, 79, None);
        node.node.pass(300);
        scan(&mut node, &[&sign]);
        assert_eq!(node.state(), HealthState::Healthy, "counted before: {counted_before}");
    }
}

#[test]
fn a_policy_that_heals_an_event_early_is_overruled_by_its_rollback() {
    for is_reset in [None, Some(false), Some(true)] {
        let mut node = Judged::under(&[bad()]);
        node.read(XID, 48, Some((&bad(), Severity::Unhealthy, Some(60))));
        let reset = |node: &mut Judged| node.read(RECOVERY, RECOVERED, None);
        if is_reset == Some(false) {
            reset(&mut node);
        }
        node.node.pass(60);
        node.scan(None);
        assert_eq!(node.state(), HealthState::Healthy);
        if is_reset == Some(true) {
            reset(&mut node);
        }
        node.activate(&[]);
        let expected = if is_reset.is_some() { HealthState::Healthy } else { HealthState::Unhealthy };
        assert_eq!(node.state(), expected, "reset after it healed: {is_reset:?}");
    }
}

#[test]
fn a_reset_beside_a_judgement_that_an_operator_ends_is_not_waited_for_again() {
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
    node.read(XID, 48, None);
    node.read(RECOVERY, RECOVERED, None);
    assert_eq!(node.state(), HealthState::Unhealthy, "the policy's judgement stands");
    node.activate(&[]);
    assert_eq!(node.state(), HealthState::Healthy);
}

#[test]
fn the_reason_is_not_that_of_a_policy_that_is_gone() {
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 79, None);
    node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
    assert_eq!(node.health().reason, "as I see it");
    node.activate(&[]);
    assert_eq!(node.health().reason, "XID 79: it failed");
}

#[test]
fn a_judgement_is_of_its_policy_after_any_number_of_activations() {
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
    for _ in 0..2 * crate::policy::stack::ACTIVATIONS_MAX {
        node.activate(&[bad()]);
        assert_eq!(node.state(), HealthState::Unhealthy);
    }
    assert_eq!(node.health().judgements[0].revision, node.node.ledger.stack.revision);
}

#[test]
fn the_judgements_of_a_gpu_are_bounded_and_the_worst_are_kept() {
    let mut judgements = Vec::new();
    for (code, severity) in
        (0..40).map(|code| (code, if code % 2 == 0 { Severity::Degraded } else { Severity::Unhealthy }))
    {
        let reading = Reading { part: part(GPU), source: XID.into(), code, detail: "x".repeat(500) };
        let answer = TriageAnswer { severity, reason: "\n".repeat(900), again_after_s: None };
        let triaged = TriagedReading { reading, answer, by: Decider::Baseline };
        add(&mut judgements, Judgement::of_reading(&triaged, 1, code).unwrap());
    }
    let codes: Vec<_> = judgements.iter().map(|one| one.reading.as_ref().unwrap().code).collect();
    assert_eq!(codes, [31, 33, 35, 37, 39]);
    let one = &judgements[0];
    assert!(one.reason == " ".repeat(REASON_BYTES_MAX));
    assert_eq!(one.reading.as_ref().unwrap().detail.len(), DETAIL_BYTES_MAX);
}

#[test]
fn health_that_is_judged_again_is_written_with_the_stack() {
    let mut node = Judged::under(&[bad()]);
    node.read(XID, 13, Some((&bad(), Severity::Unhealthy, None)));
    let before = node.node.ledger.clone();
    node.activate(&[]);
    let entry = Entry {
        at: node.node.now,
        changes: vec![Change::StackActivated(node.node.ledger.stack.as_ref().clone())],
    };
    let written = crate::node::record::writes(&before, &entry, &node.node.ledger);
    let health = |write: &crate::node::record::Write| match write {
        crate::node::record::Write::Put(crate::node::record::Record::Health(health)) => {
            Some(health.gpu.clone())
        }
        _ => None,
    };
    assert_eq!(written.iter().filter_map(health).collect::<Vec<GpuId>>(), [gpu_id(GPU)]);
}
