//! What a stack answers: where devices are preferred, on what terms it admits, how it judges a reading.

use super::*;
use crate::admission::baseline::BASELINE;
use berth_kernel::gpu::Reading;
use berth_kernel::policy::Severity;

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
fn a_reading_is_judged_by_the_first_that_answers_or_by_nvidias_list() {
    let reading = |code| Reading { part: gpu(0), source: "xid".into(), code, detail: "x".into() };
    let mut case = Case::new([('a', Ok(None))]);
    assert_eq!(case.walk().triage(&reading(13)).0.severity, Severity::Ignore);
    let (judged, by) = case.walk().triage(&reading(79));
    assert_eq!(by, BASELINE);
    assert_eq!((judged.severity, judged.again_after_s), (Severity::Unhealthy, Some(60)));
    assert!(judged.reason.contains("79"));
}
