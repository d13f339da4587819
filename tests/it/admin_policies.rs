//! Policies and the stack over HTTP: upload, activation, conflict, fallback.

use crate::admin_bench::{Bench, SHARED};
use crate::admin_fakes::module;
use berth_admin::FileStack;
use berth_kernel::stack::{OnFault, Permissions, StackEntry};
use serde_json::{Value, json};

fn activate(bench: &Bench, entries: &Value, if_match: Option<&str>) -> crate::admin_bench::Answer {
    let mut headers = vec![("content-type", "application/json")];
    headers.extend(if_match.map(|etag| ("if-match", etag)));
    bench.ask("PUT", "/api/v1/stack", &headers, json!({ "entries": entries }).to_string().as_bytes())
}

#[test]
fn a_policy_is_uploaded_once_downloaded_and_deleted() {
    let bench = Bench::new(1);
    let bytes = module("share", "1");
    let taken = bench.upload(&bytes);
    let shown = taken.expect(201);
    let digest = shown["digest"].as_str().unwrap();
    assert_eq!(taken.headers["location"], format!("/api/v1/policies/{digest}"));
    assert_eq!((&shown["name"], &shown["shipped"]), (&"share".into(), &false.into()));
    assert_eq!(shown["parametersSchema"]["type"], "object");
    assert_eq!(bench.upload(&bytes).expect(200), shown, "the same bytes again");

    let path = format!("/api/v1/policies/{digest}");
    assert_eq!(bench.get(&path).expect(200), shown);
    assert_eq!(bench.get("/api/v1/policies").expect(200)["items"].as_array().unwrap().len(), 1);
    let fetched = bench.get(&format!("{path}/module"));
    assert_eq!((fetched.status, &fetched.body), (200, &bytes));
    assert_eq!(fetched.headers["content-type"], "application/wasm");

    activate(&bench, &json!([{"policy": "share", "parameters": {"shares": 2}}]), None).expect(200);
    assert_eq!(bench.get(&path).expect(200)["active"], true);
    bench.delete(&path).problem(409, "in-use");
    activate(&bench, &json!([]), None).expect(200);
    assert_eq!(bench.delete(&path).status, 204);
    bench.delete(&path).problem(404, "unknown-policy");
    bench.get(&path).problem(404, "unknown-policy");
    bench.get(&format!("{path}/module")).problem(404, "unknown-policy");
    let shipped = bench.ship(b"x", "shipped", 1);
    bench.delete(&format!("/api/v1/policies/{}", shipped.digest)).problem(409, "in-use");
    let lost = format!("/api/v1/policies/{}/module", shipped.digest);
    bench.get(&lost).problem(410, "lost");
}

#[test]
fn random_bytes_are_not_a_policy_and_leave_no_files() {
    let bench = Bench::new(1);
    let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
    let bytes: Vec<u8> = (0..100_000)
        .map(|_| {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            noise.to_le_bytes()[0]
        })
        .collect();
    bench.upload(&bytes).problem(422, "not-a-policy");
    bench
        .ask("POST", "/api/v1/policies", &[("content-type", "application/wasm")], b"")
        .problem(422, "not-a-policy");
    assert!(bench.get("/api/v1/policies").expect(200)["items"].as_array().unwrap().is_empty());
    bench.upload(&module("share", "1")).expect(201);
}

#[test]
fn a_stack_changes_offers_and_its_etag_guards_it() {
    let bench = Bench::new(2);
    let first = bench.get("/api/v1/stack");
    assert_eq!(first.expect(200)["source"], "file");
    let etag = first.headers["etag"].clone();
    bench.upload(&module("share", "1")).expect(201);
    let entries = json!([{"policy": "share", "parameters": {"shares": 3}, "onFault": "deny",
        "permissions": {"shareMax": 8}}]);
    let active = activate(&bench, &entries, Some(&etag));
    let stack = active.expect(200);
    assert_eq!((&stack["source"], &stack["by"]), (&"api".into(), &"admin".into()));
    let entry = &stack["entries"][0];
    assert_eq!((&entry["onFault"], &entry["permissions"]["shareMax"]), (&"deny".into(), &8.into()));
    assert_eq!(entry["permissions"]["deny"], true, "what is not given is the default");
    assert_eq!(entry["record"]["suspended"], false);
    assert_ne!(active.headers["etag"], etag);
    let gpu = bench.get("/api/v1/gpus/GPU-1").expect(200);
    let shared = gpu["resources"].as_array().unwrap().iter().find(|r| r["resource"] == SHARED).unwrap();
    assert_eq!((&shared["devices"], &shared["free"]), (&3.into(), &3.into()));

    let says = activate(&bench, &json!([]), Some(&etag)).problem(412, "changed-meanwhile");
    assert!(says.contains("read the active stack"), "{says}");
    assert_eq!(bench.get("/api/v1/stack").expect(200)["entries"].as_array().unwrap().len(), 1);
    for bad in ["abc", "1", "\"1", ""] {
        activate(&bench, &json!([]), Some(bad)).problem(400, "malformed-header");
    }
    activate(&bench, &json!([]), Some("*")).expect(200);
}

#[test]
fn a_stack_that_fails_on_this_node_changes_nothing() {
    let bench = Bench::new(1);
    bench.upload(&module("share", "1")).expect(201);
    activate(&bench, &json!([{"policy": "share", "parameters": {"shares": 2}}]), None).expect(200);
    let before = bench.get("/api/v1/stack").expect(200)["revision"].clone();
    let fails = json!([{"policy": "share", "parameters": {"fail": true}}]);
    let says = activate(&bench, &fails, None).problem(422, "stack-fails");
    assert!(says.contains("unreachable") && says.contains("fix the policy, its"), "{says}");
    let slow = json!([{"policy": "share", "parameters": {"slow": true}}]);
    let says = activate(&bench, &slow, None).problem(422, "stack-fails");
    assert!(says.contains("ran longer than 500 ms") && says.contains("repeat the request"), "{says}");
    let beyond = json!([{"policy": "share", "parameters": {"shares": 4}, "permissions": {"shareMax": 2}}]);
    let says = activate(&bench, &beyond, None).problem(422, "stack-fails");
    assert!(says.contains("permissions.shareMax"), "{says}");
    assert_eq!(bench.get("/api/v1/stack").expect(200)["revision"], before);
}

#[test]
fn entries_are_checked_before_any_policy_is_called() {
    let bench = Bench::new(1);
    let known = bench.upload(&module("share", "1")).expect(201)["digest"].clone();
    bench.upload(&module("share", "2")).expect(201);
    let long = "x".repeat(7000);
    for (entries, says) in [
        (json!([{"policy": "unknown"}]), "has no policy"),
        (json!([{"policy": "share"}]), "several versions"),
        (json!([{"policy": "other", "digest": known}]), "is of policy share"),
        (json!([{"policy": "share", "digest": "0".repeat(64)}]), "upload it first"),
        (json!([{"policy": "share", "digest": "short"}]), "64 lower-case hex digits"),
        (json!([{"policy": "share", "digest": known, "permissions": {"shareMax": 0}}]), "shareMax"),
        (json!([{"policy": "share", "digest": known, "permissions": {"shareMax": 129}}]), "shareMax"),
        (json!([{"policy": "share", "digest": known, "permissions": {"resources": ["a*b"]}}]), "resources"),
        (json!([{"policy": "share", "digest": known, "permissions": {"environment": [""]}}]), "environment"),
        (json!([{"policy": "share", "digest": known, "parameters": {"long": long}}]), "at most 6144"),
        (json!([{"policy": "share", "digest": known, "parameterz": {}}]), "parameterz"),
        (json!([{"policy": "share", "digest": known, "onFault": "maybe"}]), "maybe"),
        (json!(vec![json!({"policy": "share", "digest": known}); 17]), "at most 16"),
    ] {
        let said = activate(&bench, &entries, None).problem(422, "invalid");
        assert!(said.contains(says), "{entries}: {said}");
    }
    assert_eq!(bench.get("/api/v1/stack").expect(200)["revision"], 0);
    activate(&bench, &json!([{"policy": "share", "digest": known}]), None).expect(200);
}

#[test]
fn a_name_means_the_newest_version_that_came_with_the_daemon() {
    let bench = Bench::new(1);
    bench.upload(&module("share", "uploaded")).expect(201);
    bench.ship(b"old", "share", 5);
    let newest = bench.ship(b"new", "share", 9);
    let stack = activate(&bench, &json!([{"policy": "share"}]), None).expect(200);
    assert_eq!(stack["entries"][0]["digest"], newest.digest.to_string());
}

#[test]
fn an_override_is_shown_and_reset() {
    let bench = Bench::new(1);
    let shipped = bench.ship(b"file", "of-the-file", 1);
    let entry = StackEntry {
        name: shipped.name.clone(),
        digest: shipped.digest,
        parameters: r#"{"shares":5}"#.into(),
        permissions: Permissions::default(),
        on_fault: OnFault::Skip,
    };
    bench.facts.lock().unwrap().file_stack = FileStack { entries: vec![entry], error: None };
    let reset = |headers: &[(&str, &str)]| bench.ask("DELETE", "/api/v1/stack/override", headers, b"");
    let untouched = reset(&[]).expect(200);
    assert_eq!((&untouched["revision"], &untouched["fileStack"]["shadowed"]), (&0.into(), &false.into()));

    activate(&bench, &json!([]), None).expect(200);
    let shown = bench.get("/api/v1/stack").expect(200);
    assert_eq!(shown["fileStack"]["shadowed"], true);
    assert_eq!(shown["fileStack"]["entries"][0]["parameters"]["shares"], 5);
    reset(&[("if-match", "\"0\"")]).problem(412, "changed-meanwhile");
    let back = reset(&[]).expect(200);
    assert_eq!((&back["source"], &back["fileStack"]["shadowed"]), (&"file".into(), &false.into()));
    assert_eq!(back["entries"][0]["policy"], "of-the-file");

    activate(&bench, &json!([]), None).expect(200);
    bench.facts.lock().unwrap().file_stack.error = Some("no such policy".into());
    let says = reset(&[]).problem(409, "wrong-state");
    assert!(says.contains("no such policy"), "{says}");
    assert_eq!(bench.get("/api/v1/stack").expect(200)["source"], "api");
}
