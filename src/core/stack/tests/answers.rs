//! Answers of a stack: placements, admissions and judgements of readings.

use super::*;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::judgement::TriagedReading;
use berth_kernel::hardware::triage::Severity;
use berth_kernel::policy::decider::Decider;

#[test]
fn i8_a_placement_outside_the_available_devices_is_a_fault() {
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
    assert_eq!(case.place(&[], 2).1, Decider::Baseline);
    let mut case = Case::new([('a', placed(&[1]))]);
    assert_eq!(case.place(&[], 1).1.as_str(), "a@aaaaaaaaaaaa");
}

#[test]
fn all_policies_must_allow_and_the_stricter_limit_applies() {
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
        assert_eq!((by, terms.environment), (vec![Decider::Baseline], vec![]), "{bad:?}");
        assert_eq!(case.faults.record(0, &case.stack.entries[0]).faults()[&FaultKind::Answer], 1);
    }
}

#[test]
fn i8_limits_above_the_gpus_memory_or_compute_are_a_fault() {
    let allow_with = |limits| Ok(Some(Answer::Allow(Terms { limits, ..Terms::default() })));
    // The GPUs have 1000 MiB.
    for (memory_mib, compute_percent, accepted) in [
        (Some(1000), Some(100), true),
        (Some(1001), None, false),
        (Some(u64::MAX), None, false),
        (None, Some(101), false),
    ] {
        let limits = Limits { memory_mib, compute_percent };
        let mut case = Case::new([('a', allow_with(limits))]);
        let StackAnswer::Allow { by, terms } = case.admit() else { panic!() };
        let expected = if accepted { limits } else { Limits::default() };
        assert_eq!((terms.limits, by == [Decider::Baseline]), (expected, !accepted), "{limits:?}");
    }
}

#[test]
fn i8_a_reason_with_terminal_escapes_is_a_fault() {
    let reason = "fine\u{1b}[2J".to_owned();
    let answer = Placement { devices: vec![DeviceId::whole(&gpu(1))], reason };
    let mut case = Case::new([('a', Ok(Some(Answer::Place(answer))))]);
    assert_eq!(case.place(&[], 1).1, Decider::Baseline);
}

#[test]
fn a_policy_that_sets_a_key_of_an_earlier_one_differently_is_at_fault() {
    let mut case = Case::new([('a', allow(&[("MY_A", "1")], None)), ('b', allow(&[("MY_A", "2")], None))]);
    case.stack.entries.iter_mut().for_each(|e| e.permissions.environment = vec!["MY_*".into()]);
    let StackAnswer::Allow { by, terms } = case.admit() else { panic!() };
    assert_eq!((by.len(), terms.environment), (1, vec![("MY_A".to_owned(), "1".to_owned())]));
    assert_eq!(case.faults.record(1, &case.stack.entries[1]).most_in_a_row(), 1);
}

#[test]
fn a_reading_is_judged_by_the_first_policy_that_answers_or_by_the_baseline() {
    let reading = |code| Reading { part: gpu(0), source: "xid".into(), code, detail: "x".into() };
    let mut case = Case::new([('a', Ok(None))]);
    assert_eq!(case.evaluation().triage(&reading(13)).answer.severity, Severity::Ignore);
    let TriagedReading { answer, by, .. } = case.evaluation().triage(&reading(79));
    assert_eq!(by, Decider::Baseline);
    assert_eq!((answer.severity, answer.again_after_s), (Severity::Unhealthy, Some(60)));
    assert!(answer.reason.contains("79"));
}
