use super::*;
use berth_policy_sdk::parse;
use berth_policy_sdk::testing::{NodeBuilder, assert_schema_matches};

fn triage_xid(json: &str) -> Result<TriageXid, String> {
    parse(json).and_then(TriageXid::new)
}

fn judged(json: &str, source: &str, code: u64) -> Option<TriageAnswer> {
    let node = NodeBuilder::new().gpus(1, "NVIDIA H100 80GB HBM3", 81_559).build().node;
    let reading = Reading { part: 0, source: source.into(), code, detail: "the daemon's description".into() };
    triage_xid(json).unwrap().triage(&node, &reading)
}

fn xid(code: u64) -> Option<(Severity, Option<u32>)> {
    judged("{}", "xid", code).map(|answer| (answer.severity, answer.again_after_seconds))
}

fn reason(json: &str, source: &str, code: u64) -> String {
    judged(json, source, code).expect("an answer").reason
}

#[test]
fn errors_of_applications_are_ignored() {
    for code in [8, 11, 13, 31, 39, 43, 45, 60, 68, 69, 77, 86, 104, 135, 137, 139] {
        assert_eq!(xid(code), Some((Severity::Ignore, None)), "{code}");
    }
    assert_eq!(reason("{}", "xid", 31), "XID 31: GPU memory page fault, by an application");
}

#[test]
fn xids_that_nvidias_device_plugin_ignores_do_not_make_a_gpu_unhealthy() {
    for code in [13, 31, 43, 45, 68, 109] {
        assert_ne!(xid(code).unwrap().0, Severity::Unhealthy, "{code}");
    }
}

#[test]
fn errors_after_which_the_gpu_works_on_degrade_it_for_an_hour() {
    for code in [32, 63, 74, 92, 94, 109, 144, 150, 155, 157] {
        assert_eq!(xid(code), Some((Severity::Degraded, Some(3600))), "{code}");
    }
    let brief = judged(r#"{"degradedSeconds": 60}"#, "xid", 63).unwrap();
    assert_eq!(brief.again_after_seconds, Some(60));
}

#[test]
fn errors_that_need_a_reset_wait_for_mark_healthy() {
    for code in [46, 48, 62, 64, 95, 110, 119, 120, 136, 140, 143, 156, 158, 171, 172] {
        assert_eq!(xid(code), Some((Severity::Unhealthy, None)), "{code}");
    }
    let expected = "XID 48: double bit ECC error: reset the GPU, then `berth gpu mark-healthy`";
    assert_eq!(reason("{}", "xid", 48), expected);
}

#[test]
fn reset_seconds_makes_a_gpu_healthy_by_time_alone() {
    let answer = judged(r#"{"resetSeconds": 900}"#, "xid", 119).unwrap();
    assert_eq!((answer.severity, answer.again_after_seconds), (Severity::Unhealthy, Some(900)));
    assert!(!answer.reason.contains("mark-healthy"), "{}", answer.reason);
    // Errors that need manual work still wait for `mark-healthy`.
    assert_eq!(judged(r#"{"resetSeconds": 900}"#, "xid", 54).unwrap().again_after_seconds, None);
}

#[test]
fn a_gpu_off_the_bus_is_healthy_after_it_has_answered_for_300_seconds() {
    assert_eq!(xid(79), Some((Severity::Unhealthy, Some(300))));
    assert_eq!(reason("{}", "xid", 79), "XID 79: the GPU fell off the bus: reboot the node");
    let lost = judged("{}", "lost", 0).unwrap();
    assert_eq!((lost.severity, lost.again_after_seconds), (Severity::Unhealthy, Some(300)));
}

#[test]
fn readings_that_are_not_in_the_table_are_passed_on() {
    for code in [0, 1, 78, 166, 167, 169, 173, 500, u64::MAX] {
        assert_eq!(xid(code), None, "{code}");
    }
    assert_eq!(judged("{}", "thermal", 1), None);
}

#[test]
fn a_recovery_action_is_judged_by_its_number() {
    for code in 1..=7 {
        let answer = judged("{}", "recovery", code).unwrap();
        let severity = if code == 5 { Severity::Degraded } else { Severity::Unhealthy };
        assert_eq!((answer.severity, answer.again_after_seconds), (severity, Some(60)), "{code}");
        assert!(answer.reason.ends_with(&format!("(recovery action {code})")), "{}", answer.reason);
        assert_eq!(judged("{}", "recovery-action", code), Some(answer));
    }
    assert_eq!(judged("{}", "recovery", 0).unwrap().severity, Severity::Ignore);
    assert_eq!(judged("{}", "recovery", 8), None);
}

#[test]
fn rows_that_wait_for_a_reset_degrade_and_a_failed_remapping_is_unhealthy() {
    assert_eq!(judged("{}", "rows", 1).unwrap().severity, Severity::Degraded);
    assert_eq!(judged("{}", "rows", 2).unwrap().severity, Severity::Unhealthy);
    assert_eq!(judged("{}", "rows", 3), None);
}

#[test]
fn an_ecc_error_alone_degrades() {
    let answer = judged("{}", "ecc", 2).unwrap();
    assert_eq!((answer.severity, answer.again_after_seconds), (Severity::Degraded, Some(3600)));
}

#[test]
fn parameters_replace_judgements_of_other_sources() {
    let json = r#"{"sources": [
        {"source": "ecc", "severity": "unhealthy", "againAfterSeconds": 60},
        {"source": "recovery", "code": 3, "severity": "degraded"},
        {"source": "thermal", "severity": "ignore"}]}"#;
    let of = |source, code| judged(json, source, code).map(|a| (a.severity, a.again_after_seconds));
    assert_eq!(of("ecc", 7), Some((Severity::Unhealthy, Some(60))));
    assert_eq!(of("recovery", 3), Some((Severity::Degraded, None)));
    assert_eq!(of("recovery", 1), Some((Severity::Unhealthy, Some(60))));
    assert_eq!(of("thermal", 1), Some((Severity::Ignore, None)));
    let expected = "ecc 7: the daemon's description (judged by the parameters of triage-xid)";
    assert_eq!(reason(json, "ecc", 7), expected);
    let twice =
        r#"{"sources": [{"source": "ecc", "severity": "ignore"}, {"source": "ecc", "severity": "ignore"}]}"#;
    assert!(triage_xid(twice).unwrap_err().contains("sources[1]: \"ecc\" has more than one judgement"));
    let xid = r#"{"sources": [{"source": "xid", "severity": "ignore"}]}"#;
    assert!(triage_xid(xid).unwrap_err().contains("judged by `xids`"));
}

#[test]
fn parameters_replace_judgements_of_the_table() {
    let json = r#"{"ignore": [74, 400], "xids": [
        {"code": 79, "severity": "unhealthy"},
        {"code": 94, "severity": "unhealthy", "againAfterSeconds": 120},
        {"code": 300, "severity": "degraded", "againAfterSeconds": 10},
        {"code": 48, "severity": "ignore", "againAfterSeconds": null}]}"#;
    let of = |code| {
        let answer = judged(json, "xid", code).unwrap();
        (answer.severity, answer.again_after_seconds)
    };
    assert_eq!(of(74), (Severity::Ignore, None));
    assert_eq!(of(400), (Severity::Ignore, None));
    assert_eq!(of(79), (Severity::Unhealthy, None));
    assert_eq!(of(94), (Severity::Unhealthy, Some(120)));
    assert_eq!(of(300), (Severity::Degraded, Some(10)));
    assert_eq!(of(48), (Severity::Ignore, None));
    let expected = "XID 300: not in the table (judged by the parameters of triage-xid)";
    assert_eq!(reason(json, "xid", 300), expected);
    assert_eq!(
        judged(json, "recovery", 1).unwrap().severity,
        Severity::Unhealthy,
        "only XIDs have overrides"
    );
}

/// The daemon keeps at most 256 bytes of a health reason.
#[test]
fn every_reason_is_short_enough_and_printable() {
    for code in 0..1000 {
        if let Some(answer) = judged("{}", "xid", code) {
            let text = &answer.reason;
            assert!(text.len() <= 256 && text.chars().all(|c| c.is_ascii() && !c.is_control()), "{text}");
            assert!(text.starts_with(&format!("XID {code}: ")), "{text}");
        }
    }
}

#[test]
fn wrong_parameters_are_refused_by_name() {
    let cases = [
        (r#"{"xids": [{"code": 1}]}"#, "missing field `severity`"),
        (
            r#"{"xids": [{"code": 1, "severity": "bad"}]}"#,
            "expected one of `ignore`, `degraded`, `unhealthy`",
        ),
        (r#"{"xids": [{"code": -1, "severity": "ignore"}]}"#, "expected u64"),
        (
            r#"{"ignore": [79], "xids": [{"code": 79, "severity": "ignore"}]}"#,
            "xids[0].code: 79 has more than one judgement",
        ),
        (
            r#"{"xids": [{"code": 1, "severity": "ignore", "againAfterSeconds": 5}]}"#,
            "xids[0].againAfterSeconds: an XID with severity `ignore` needs no time",
        ),
        (r#"{"degradedSeconds": 0}"#, "degradedSeconds: 0 is out of range; write 1 to 604800"),
        (r#"{"resetSeconds": 604801}"#, "resetSeconds: 604801 is out of range"),
        (r#"{"severity": 1}"#, "unknown field `severity`"),
    ];
    for (json, expected) in cases {
        let error = triage_xid(json).unwrap_err();
        assert!(error.contains(expected), "{json}: {error}");
    }
}

#[test]
fn the_schema_names_exactly_the_parameters() {
    let example = r#"{"xids": [], "ignore": [], "sources": [], "degradedSeconds": 60, "resetSeconds": null}"#;
    triage_xid(example).unwrap();
    assert_schema_matches(&TriageXid::describe().parameters_schema, example);
}
