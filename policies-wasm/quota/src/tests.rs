use super::*;
use berth_policy_sdk::testing::{Built, NodeBuilder, assert_schema_matches};
use berth_policy_sdk::{Claim, Consumes, Slice, parse};

const WHOLE: &str = "nvidia.com/gpu";
const SHARED: &str = "nvidia.com/gpu.shared";
const TWO: &str = r#"{"namespaces": [{"namespace": "team-a", "devices": 2}]}"#;
const A: [(&str, &str); 1] = [("team-a", "new")];

fn quota(json: &str) -> Result<Quota, String> {
    parse(json).and_then(Quota::new)
}

/// GPUs of 16000 MiB: devices 0 to 3 are shares of GPU 0, 4 to 7 of GPU 1, 8 and 9 are GPUs 2 and 3.
fn node() -> NodeBuilder {
    let share = Consumes::Slice(Slice { memory_mib: 4_000, compute_percent: 25 });
    NodeBuilder::new()
        .gpus(4, "Tesla T4", 16_000)
        .devices(0, SHARED, 4, share)
        .devices(1, SHARED, 4, share)
        .devices(2, WHOLE, 1, Consumes::Whole)
        .devices(3, WHOLE, 1, Consumes::Whole)
}

/// `Ok` with the reason of a grant, `Err` with that of a denial, `None` for a pass.
fn judged(
    json: &str,
    built: &Built,
    devices: &[u32],
    candidates: &[(&str, &str)],
) -> Option<Result<String, String>> {
    let verdict = quota(json).unwrap().admit(&built.node, &built.admit_request(devices, candidates))?;
    Some(match verdict {
        Verdict::Allow(terms) => Ok(terms.reason),
        Verdict::Deny(reason) => Err(reason),
    })
}

fn allowed(json: &str, built: &Built, devices: &[u32], candidates: &[(&str, &str)]) -> String {
    judged(json, built, devices, candidates).expect("an answer").expect("allowed")
}

fn denied(json: &str, built: &Built, devices: &[u32], candidates: &[(&str, &str)]) -> String {
    judged(json, built, devices, candidates).expect("an answer").expect_err("denied")
}

#[test]
fn devices_are_counted_up_to_the_limit() {
    let built = node().hold_as(&[0], Some(("team-a", "p"))).hold_as(&[1], Some(("team-b", "q"))).build();
    assert_eq!(allowed(TWO, &built, &[2], &A), "namespace team-a holds 2 of 2 devices");
    let denial = denied(TWO, &built, &[2, 3], &A);
    let expected = "namespace team-a holds 1 of the 2 devices that it may have on this node, and 2 more are \
                    requested: request 1 at most, wait until pods of the namespace end, or use another node";
    assert_eq!(denial, expected);
}

#[test]
fn without_devices_left_the_denial_advises_to_wait() {
    let built = node().hold_as(&[0, 1], Some(("team-a", "p"))).build();
    let denial = denied(TWO, &built, &[8], &A);
    assert!(
        denial.contains("holds 2 of the 2 devices") && denial.contains("1 more are requested: wait"),
        "{denial}"
    );
}

#[test]
fn a_share_counts_with_its_memory_and_a_whole_gpu_with_all_memory() {
    let json = r#"{"namespaces": [{"namespace": "team-a", "memoryMiB": 20000}]}"#;
    let built = node().hold_as(&[8], Some(("team-a", "p"))).build();
    assert_eq!(allowed(json, &built, &[0], &A), "namespace team-a holds 20000 of 20000 MiB");
    let denial = denied(json, &built, &[0, 1], &A);
    assert!(denial.contains("holds 16000 of the 20000 MiB"), "{denial}");
    assert!(denial.contains("8000 MiB more are requested: request 4000 MiB at most"), "{denial}");
    let denial = denied(json, &built, &[9], &A);
    assert!(denial.contains("16000 MiB more"), "{denial}");
}

#[test]
fn a_denial_requires_candidates_of_one_namespace() {
    let built = node().hold_as(&[0, 1], Some(("team-a", "p"))).build();
    let reason = allowed(TWO, &built, &[2], &[]);
    assert_eq!(reason, "quota not checked: no source shows the requesting pod");
    let reason = allowed(TWO, &built, &[2], &[("team-a", "x"), ("team-b", "y")]);
    assert_eq!(reason, "quota not checked: the request may be from a pod of team-a or team-b");
    denied(TWO, &built, &[2], &[("team-a", "x"), ("team-a", "y")]);
}

#[test]
fn a_list_of_candidates_that_may_be_incomplete_causes_no_denial() {
    let built = node().hold_as(&[0, 1], Some(("team-a", "p"))).build();
    let candidates = [("team-a", "x"); CANDIDATES_SHOWN_MAX];
    let reason = allowed(TWO, &built, &[2], &candidates);
    assert_eq!(reason, "quota not checked: the request may be from any of 64 or more pods");
    denied(TWO, &built, &[2], &candidates[1..]);
}

#[test]
fn a_claim_names_its_namespace() {
    let built = node().hold_as(&[0, 1], Some(("team-a", "p"))).build();
    let mut request = built.admit_request(&[2], &[("team-b", "x")]);
    request.request.claim = Some(Claim {
        namespace: "team-a".into(),
        name: "c".into(),
        uid: "u".into(),
        request: "gpu".into(),
        share_id: None,
        consumed_capacity: Vec::new(),
    });
    let verdict = quota(TWO).unwrap().admit(&built.node, &request);
    assert!(matches!(verdict, Some(Verdict::Deny(_))), "{verdict:?}");
}

#[test]
fn the_container_after_an_init_container_is_not_counted_twice() {
    let held = node().hold_as(&[0, 1], Some(("team-a", "p")));
    let built = held.clone().build();
    assert_eq!(allowed(TWO, &built, &[0, 1], &A), "namespace team-a holds 2 of 2 devices");
    // With both allocations in the ledger they are still two devices, with or without a known second holder.
    for holder in [Some(("team-a", "p")), None] {
        let built = held.clone().hold_as(&[0, 1], holder).build();
        assert_eq!(allowed(TWO, &built, &[0, 1], &A), "namespace team-a holds 2 of 2 devices");
        denied(TWO, &built, &[2], &A);
    }
}

#[test]
fn held_devices_are_never_denied_even_after_the_limit_was_lowered() {
    let one = r#"{"namespaces": [{"namespace": "team-a", "devices": 1, "memoryMiB": 100}]}"#;
    let built = node().hold_as(&[0, 1], Some(("team-a", "p"))).build();
    let reason = allowed(one, &built, &[0, 1], &A);
    assert_eq!(reason, "namespace team-a holds 2 of 1 devices and 8000 of 100 MiB");
    denied(one, &built, &[0, 2], &A);
}

#[test]
fn a_device_counts_for_its_newest_known_holder() {
    let built =
        node().hold_as(&[0, 1], Some(("team-a", "p"))).hold_as(&[0, 1], Some(("team-b", "q"))).build();
    assert_eq!(allowed(TWO, &built, &[2, 3], &A), "namespace team-a holds 2 of 2 devices");
}

#[test]
fn unknown_holders_count_only_if_configured() {
    let built = node().hold_as(&[0, 1], None).hold_as(&[2], Some(("", "nameless"))).build();
    assert_eq!(allowed(TWO, &built, &[3], &A), "namespace team-a holds 1 of 2 devices");
    let strict = r#"{"countUnknown": true, "namespaces": [{"namespace": "team-a", "devices": 2}]}"#;
    assert!(denied(strict, &built, &[3], &A).contains("holds 3 of the 2 devices"));
}

#[test]
fn only_the_resources_of_an_entry_count_and_all_entries_apply() {
    let json = r#"{"namespaces": [
        {"namespace": "team-a", "devices": 1, "resources": ["nvidia.com/gpu"]},
        {"namespace": "team-*", "devices": 3, "resources": ["nvidia.com/gpu.*"]},
        {"namespace": "team-a", "memoryMiB": 28000}]}"#;
    let built = node().hold_as(&[8], Some(("team-a", "p"))).build();
    let denial = denied(json, &built, &[9], &A);
    assert!(denial.contains("the 1 devices of nvidia.com/gpu that"), "{denial}");
    let reason = allowed(json, &built, &[0, 1, 2], &A);
    assert_eq!(reason, "namespace team-a holds 3 of 3 devices; namespace team-a holds 28000 of 28000 MiB");
    assert!(denied(json, &built, &[0, 1, 2, 3], &A).contains("of nvidia.com/gpu.*"));
}

#[test]
fn other_namespaces_have_the_default_and_without_one_no_limit() {
    let json = r#"{"namespaces": [{"namespace": "team-a", "devices": 8}], "default": {"devices": 1}}"#;
    let built = node().hold_as(&[0], Some(("guest", "p"))).build();
    assert!(denied(json, &built, &[1], &[("guest", "q")]).contains("namespace guest holds 1 of the 1"));
    assert_eq!(allowed(json, &built, &[1], &[("visitor", "q")]), "namespace visitor holds 1 of 1 devices");
    assert_eq!(allowed(json, &built, &[1, 2], &A), "namespace team-a holds 2 of 8 devices");
    assert_eq!(judged(TWO, &built, &[1], &[("guest", "q")]), None);
}

#[test]
fn resources_without_a_limit_are_passed_on() {
    let json = r#"{"namespaces": [{"namespace": "*", "devices": 1, "resources": ["nvidia.com/gpu"]}]}"#;
    let built = node().build();
    assert_eq!(judged(json, &built, &[0, 1], &[]), None, "without a note that the quota was not checked");
    assert_eq!(judged("{}", &built, &[8], &[]), None);
}

#[test]
fn many_entries_keep_the_reason_short() {
    let namespace = "n".repeat(63);
    let entry = format!(
        r#"{{"namespace": "{namespace}", "devices": 4294967295, "memoryMiB": 18446744073709551615}}"#
    );
    let json = format!(r#"{{"namespaces": [{}]}}"#, vec![entry; ENTRIES_MAX].join(","));
    let reason = allowed(&json, &node().build(), &[0], &[(&namespace, "p")]);
    assert!(reason.len() <= 1024, "{}", reason.len());
}

#[test]
fn wrong_parameters_are_refused_by_name() {
    let cases = [
        (r#"{"namespace": "a"}"#, "unknown field `namespace`"),
        (r#"{"namespaces": [{"devices": 1}]}"#, "missing field `namespace`"),
        (
            r#"{"namespaces": [{"namespace": "a"}]}"#,
            "namespaces[0]: limits nothing; give `devices` or `memoryMiB`",
        ),
        (r#"{"namespaces": [{"namespace": "", "devices": 1}]}"#, "namespaces[0].namespace: is empty"),
        (r#"{"namespaces": [{"namespace": "a", "device": 1}]}"#, "unknown field `device`"),
        (
            r#"{"namespaces": [{"namespace": "a", "devices": 1, "resources": []}]}"#,
            "resources: the list is empty",
        ),
        (r#"{"default": {}}"#, "default: limits nothing"),
    ];
    for (json, expected) in cases {
        let error = quota(json).unwrap_err();
        assert!(error.contains(expected), "{json}: {error}");
    }
    let many = vec![r#"{"namespace": "a", "devices": 1}"#; ENTRIES_MAX + 1].join(",");
    let error = quota(&format!(r#"{{"namespaces": [{many}]}}"#)).unwrap_err();
    assert_eq!(error, "namespaces: 257 entries; at most 256 are allowed");
}

#[test]
fn the_schema_names_exactly_the_parameters() {
    let example = r#"{"namespaces": [], "default": {"devices": 1}, "countUnknown": true}"#;
    quota(example).unwrap();
    assert_schema_matches(&Quota::describe().parameters_schema, example);
}
