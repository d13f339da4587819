//! I9: what a fault costs the policy, and what it does not cost the node.

use super::*;
use crate::admission::activation::Trial;
use crate::admission::faults::FAULTS_TO_SUSPEND;
use crate::admission::stack::CALL_MS_MAX;
use berth_kernel::command::{NewStack, Rules};
use berth_kernel::policy::REASON_BYTES_MAX;

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
        let asked = case.policies.asked.lock().clone();
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
    let asked = case.policies.asked.lock();
    assert!(asked.iter().all(|(letter, _)| *letter != 'c'), "{asked:?}");
}

#[test]
fn a_stack_that_is_tried_where_no_kubelet_waits_may_take_its_time() {
    let mut case = Case::new(['a', 'b', 'c'].map(|letter| (letter, Ok(None))));
    case.policies.pace = SLOW;
    let entries = case.stack.entries.clone();
    let stack = NewStack { from_api: true, by: "admin".into(), why: String::new(), entries };
    let tried = |leisure| {
        let (now, rules) = (Now::default(), &Rules::default());
        let (policies, node, baseline) = (&case.policies, &case.node, &case.baseline);
        Trial { stack: &stack, policies, node, now, baseline, rules, leisure }.run()
    };
    assert_eq!(tried(1).unwrap_err().1.kind, FaultKind::Time);
    assert_eq!(tried(10).unwrap().parts.len(), 2);
    let asked = case.policies.asked.lock();
    assert_eq!(asked.iter().map(|(letter, _)| *letter).collect::<String>(), "ababc");
    assert!(asked[2].1 > CALL_MS_MAX, "{asked:?}");
}
