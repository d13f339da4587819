//! Policies and the stack over HTTP: upload, activation, conflict, fallback.

use crate::support::admin_fakes::module;
use crate::support::admin_node::{AdminNode, ask, baseline};
use crate::support::gpus::{SHARED, WHOLE};
use crate::support::wait::until;
use berth_core::stack::Baseline;
use berth_core::{FileStack, Reconfiguration};
use berth_kernel::node::command::NewStack;
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::stack::{OnFault, Permissions, StackEntry};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

fn activate(node: &AdminNode, entries: &Value, if_match: Option<&str>) -> crate::support::admin_node::Answer {
    let mut headers = vec![("content-type", "application/json")];
    headers.extend(if_match.map(|etag| ("if-match", etag)));
    node.ask("PUT", "/api/v1/stack", &headers, json!({ "entries": entries }).to_string().as_bytes())
}

#[test]
fn a_policy_is_uploaded_once_downloaded_and_deleted() {
    let node = AdminNode::new(1);
    let bytes = module("share", "1");
    let taken = node.upload(&bytes);
    let shown = taken.expect(201);
    let digest = shown["digest"].as_str().unwrap();
    assert_eq!(taken.headers["location"], format!("/api/v1/policies/{digest}"));
    assert_eq!((&shown["name"], &shown["shipped"]), (&"share".into(), &false.into()));
    assert_eq!(shown["parametersSchema"]["type"], "object");
    assert_eq!(node.upload(&bytes).expect(200), shown, "the same bytes again");

    let path = format!("/api/v1/policies/{digest}");
    assert_eq!(node.get(&path).expect(200), shown);
    assert_eq!(node.get("/api/v1/policies").expect(200)["items"].as_array().unwrap().len(), 1);
    let fetched = node.get(&format!("{path}/module"));
    assert_eq!((fetched.status, &fetched.body), (200, &bytes));
    assert_eq!(fetched.headers["content-type"], "application/wasm");

    activate(&node, &json!([{"policy": "share", "parameters": {"shares": 2}}]), None).expect(200);
    assert_eq!(node.get(&path).expect(200)["active"], true);
    node.delete(&path).problem(409, "in-use");
    activate(&node, &json!([]), None).expect(200);
    assert_eq!(node.delete(&path).status, 204);
    node.delete(&path).problem(404, "unknown-policy");
    node.get(&path).problem(404, "unknown-policy");
    node.get(&format!("{path}/module")).problem(404, "unknown-policy");
    let shipped = node.record_shipped(b"x", "shipped", 1);
    node.delete(&format!("/api/v1/policies/{}", shipped.digest)).problem(409, "in-use");
    let lost = format!("/api/v1/policies/{}/module", shipped.digest);
    node.get(&lost).problem(410, "lost");
}

#[test]
fn random_bytes_are_not_a_policy_and_leave_no_files() {
    let node = AdminNode::new(1);
    let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
    let bytes: Vec<u8> = (0..100_000)
        .map(|_| {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            noise.to_le_bytes()[0]
        })
        .collect();
    node.upload(&bytes).problem(422, "not-a-policy");
    node.ask("POST", "/api/v1/policies", &[("content-type", "application/wasm")], b"")
        .problem(422, "not-a-policy");
    assert!(node.get("/api/v1/policies").expect(200)["items"].as_array().unwrap().is_empty());
    node.upload(&module("share", "1")).expect(201);
}

#[test]
fn a_stack_changes_offers_and_its_etag_guards_it() {
    let node = AdminNode::new(2);
    let first = node.get("/api/v1/stack");
    assert_eq!(first.expect(200)["source"], "file");
    let etag = first.headers["etag"].clone();
    node.upload(&module("share", "1")).expect(201);
    let entries = json!([{"policy": "share", "parameters": {"shares": 3}, "onFault": "deny",
        "permissions": {"shareMax": 8}}]);
    let active = activate(&node, &entries, Some(&etag));
    let stack = active.expect(200);
    assert_eq!((&stack["source"], &stack["by"]), (&"api".into(), &"admin".into()));
    let entry = &stack["entries"][0];
    assert_eq!((&entry["onFault"], &entry["permissions"]["shareMax"]), (&"deny".into(), &8.into()));
    assert_eq!(entry["permissions"]["deny"], true, "what is not given is the default");
    assert_eq!(entry["record"]["suspended"], false);
    assert_ne!(active.headers["etag"], etag);
    let gpu = node.get("/api/v1/gpus/GPU-1").expect(200);
    let shared = gpu["resources"].as_array().unwrap().iter().find(|r| r["resource"] == SHARED).unwrap();
    assert_eq!((&shared["devices"], &shared["free"]), (&3.into(), &3.into()));

    let says = activate(&node, &json!([]), Some(&etag)).problem(412, "changed-meanwhile");
    assert!(says.contains("read the active stack"), "{says}");
    assert_eq!(node.get("/api/v1/stack").expect(200)["entries"].as_array().unwrap().len(), 1);
    for bad in ["abc", "1", "\"1", ""] {
        activate(&node, &json!([]), Some(bad)).problem(400, "malformed-header");
    }
    activate(&node, &json!([]), Some("*")).expect(200);
}

#[test]
fn a_stack_that_fails_on_this_node_changes_nothing() {
    let node = AdminNode::new(1);
    node.upload(&module("share", "1")).expect(201);
    activate(&node, &json!([{"policy": "share", "parameters": {"shares": 2}}]), None).expect(200);
    let before = node.get("/api/v1/stack").expect(200)["revision"].clone();
    let fails = json!([{"policy": "share", "parameters": {"fail": true}}]);
    let says = activate(&node, &fails, None).problem(422, "stack-fails");
    assert!(says.contains("unreachable") && says.contains("fix the policy, its"), "{says}");
    let slow = json!([{"policy": "share", "parameters": {"slow": true}}]);
    let says = activate(&node, &slow, None).problem(422, "stack-fails");
    assert!(says.contains("ran longer than 500 ms") && says.contains("repeat the request"), "{says}");
    let beyond = json!([{"policy": "share", "parameters": {"shares": 4}, "permissions": {"shareMax": 2}}]);
    let says = activate(&node, &beyond, None).problem(422, "stack-fails");
    assert!(says.contains("permissions.shareMax"), "{says}");
    assert_eq!(node.get("/api/v1/stack").expect(200)["revision"], before);
}

#[test]
fn entries_are_checked_before_any_policy_is_called() {
    let node = AdminNode::new(1);
    let known = node.upload(&module("share", "1")).expect(201)["digest"].clone();
    node.upload(&module("share", "2")).expect(201);
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
        let message = activate(&node, &entries, None).problem(422, "invalid");
        assert!(message.contains(says), "{entries}: {message}");
    }
    assert_eq!(node.get("/api/v1/stack").expect(200)["revision"], 0);
    activate(&node, &json!([{"policy": "share", "digest": known}]), None).expect(200);
}

#[test]
fn a_name_means_the_newest_version_that_came_with_the_daemon() {
    let node = AdminNode::new(1);
    node.upload(&module("share", "uploaded")).expect(201);
    node.record_shipped(b"old", "share", 5);
    let newest = node.record_shipped(b"new", "share", 9);
    let stack = activate(&node, &json!([{"policy": "share"}]), None).expect(200);
    assert_eq!(stack["entries"][0]["digest"], newest.digest.to_string());
}

/// A stack of the configuration file: one shipped policy that cuts each GPU into shares.
fn of_file(node: &AdminNode, module: &[u8], name: &str, shares: u32) -> FileStack {
    let shipped = node.record_shipped(module, name, 1);
    let entry = StackEntry {
        name: shipped.name.clone(),
        digest: shipped.digest,
        parameters: json!({ "shares": shares }).to_string(),
        permissions: Permissions::default(),
        on_fault: OnFault::Skip,
    };
    FileStack { entries: vec![entry], error: None }
}

/// Gives the node another stack of the file, as a changed file does.
fn change_file(node: &AdminNode, file_stack: FileStack) {
    let active = node.kernel.snapshot();
    let new = Reconfiguration {
        rules: Rules::clone(&node.kernel.snapshot().rules),
        baseline: baseline(),
        file_stack,
        stack: None,
        revision: active.stack.revision,
    };
    node.runtime.block_on(node.core.policies.reconfigure(new)).unwrap();
}

#[test]
fn a_reset_while_the_file_changes_activates_the_new_stack_of_the_file() {
    let node = AdminNode::new(1);
    node.core.policies.set_file_stack(of_file(&node, b"old", "of-the-old-file", 5));
    activate(&node, &json!([]), None).expect(200);
    // The reset has read the old file, and waits in a call of its policy.
    let calls = node.policies.calls.lock().unwrap();
    let asked = node.policies.asked.load(Ordering::SeqCst);
    let (address, bearer) = (node.address(), format!("Bearer {}", node.token));
    let reset = std::thread::spawn(move || {
        let headers = [("authorization", bearer.as_str())];
        ask(address, "DELETE", "/api/v1/stack/override", &headers, b"")
    });
    until("the old policy is called", || node.policies.asked.load(Ordering::SeqCst) > asked);
    change_file(&node, of_file(&node, b"new", "of-the-new-file", 3));
    drop(calls);
    let stack = reset.join().unwrap().expect(200);
    assert_eq!(
        (&stack["source"], &stack["entries"][0]["policy"]),
        (&"file".into(), &"of-the-new-file".into())
    );
    let file = node.get("/api/v1/stack").expect(200)["fileStack"]["entries"].clone();
    assert_eq!(stack["entries"][0]["digest"], file[0]["digest"], "{stack}");
}

/// Has the file's stack active, as after a start.
fn start_with_file(node: &AdminNode, file: FileStack) {
    let entries = file.entries.clone();
    node.core.policies.set_file_stack(file);
    let stack = NewStack {
        origin: berth_kernel::policy::stack::StackOrigin::File,
        failed: None,
        by: "config".into(),
        why: String::new(),
        entries,
    };
    node.runtime.block_on(node.core.policies.activate(stack, None)).unwrap();
}

#[test]
fn a_configuration_that_cannot_be_applied_changes_nothing() {
    let node = AdminNode::new(1);
    let file = of_file(&node, b"file", "of-the-file", 5);
    start_with_file(&node, file.clone());
    let (policies, before) = (&node.core.policies, node.kernel.snapshot());
    let rules = Rules { overcommit_percent: 200, ..Rules::clone(&before.rules) };
    let quiet_ms = baseline().quiet_ms + 1;
    let new = |parameters: &Value, revision| {
        let mut file_stack = file.clone();
        file_stack.entries[0].parameters = parameters.to_string();
        let entries = file_stack.entries.clone();
        let stack = NewStack {
            origin: berth_kernel::policy::stack::StackOrigin::File,
            failed: None,
            by: "config".into(),
            why: String::new(),
            entries,
        };
        let baseline = Baseline { quiet_ms, ..baseline() };
        Reconfiguration { rules: rules.clone(), baseline, file_stack, stack: Some(stack), revision }
    };
    let reconfigure = |new| node.runtime.block_on(policies.reconfigure(new));
    let (fails, works) = (json!({"fail": true}), json!({"shares": 3}));
    let revision = before.stack.revision;
    for (why, new, store_fails) in [
        ("its policy fails", new(&fails, revision), false),
        ("another stack is active", new(&works, revision + 1), false),
        ("it cannot be recorded", new(&works, revision), true),
    ] {
        node.store_fails.store(store_fails, Ordering::SeqCst);
        assert!(reconfigure(new).is_err(), "{why}");
        node.store_fails.store(false, Ordering::SeqCst);
        let after = node.kernel.snapshot();
        assert_eq!((&after.rules, &after.stack), (&before.rules, &before.stack), "{why}");
        assert_eq!(policies.file_stack().entries, file.entries, "{why}");
        assert_eq!(policies.baseline().quiet_ms, baseline().quiet_ms, "{why}");
    }
    until("the store works again", || reconfigure(new(&works, revision)).is_ok());
    let after = node.kernel.snapshot();
    assert_eq!((&*after.rules, after.stack.revision), (&rules, revision + 1));
    assert_eq!(policies.file_stack().entries, after.stack.entries);
    assert_eq!(policies.baseline().quiet_ms, quiet_ms);
}

#[test]
fn a_rollback_needs_an_activation_before_the_active_stack() {
    let node = AdminNode::new(1);
    start_with_file(&node, of_file(&node, b"file", "of-the-file", 5));
    for query in ["", "?dryRun=true"] {
        let path = format!("/api/v1/stack/rollback{query}");
        let says = node.ask("POST", &path, &[], b"").problem(409, "wrong-state");
        assert!(says.contains("nothing to roll back to") && says.contains("revision 0"), "{says}");
    }
    let stack = node.get("/api/v1/stack").expect(200);
    assert_eq!((&stack["revision"], &stack["source"]), (&1.into(), &"file".into()), "{stack}");
}

#[test]
fn a_rollback_to_the_stack_of_the_file_gives_the_file_its_place_back() {
    let node = AdminNode::new(1);
    start_with_file(&node, of_file(&node, b"file", "of-the-file", 5));
    activate(&node, &json!([]), None).expect(200);
    let back = node.ask("POST", "/api/v1/stack/rollback", &[], b"").expect(200);
    assert_eq!((&back["source"], &back["fileStack"]["shadowed"]), (&"file".into(), &false.into()), "{back}");
    // The file decides again: its next stack is active at once, and the one before it is of the file no more.
    let next = of_file(&node, b"file", "of-the-file", 3);
    let entries = next.entries.clone();
    let active = node.kernel.snapshot().stack.revision;
    let stack = NewStack {
        origin: berth_kernel::policy::stack::StackOrigin::File,
        failed: None,
        by: "config".into(),
        why: String::new(),
        entries,
    };
    let new = Reconfiguration {
        rules: Rules::clone(&node.kernel.snapshot().rules),
        baseline: baseline(),
        file_stack: next,
        stack: Some(stack),
        revision: active,
    };
    node.runtime.block_on(node.core.policies.reconfigure(new)).unwrap();
    let old = node.ask("POST", "/api/v1/stack/rollback", &[], b"").expect(200);
    assert_eq!((&old["source"], &old["fileStack"]["shadowed"]), (&"api".into(), &true.into()), "{old}");
    assert_eq!(old["entries"][0]["parameters"]["shares"], 5);
}

#[test]
fn a_dry_run_shows_what_a_change_of_the_stack_would_do_and_changes_nothing() {
    let node = AdminNode::new(2);
    node.upload(&module("share", "1")).expect(201);
    let shares = |count: u32| json!([{"policy": "share", "parameters": {"shares": count}}]);
    activate(&node, &shares(4), None).expect(200);
    activate(&node, &shares(2), None).expect(200);
    let devices = |answer: &Value, name: &str| {
        let resources = answer["preview"]["resources"].as_array().unwrap();
        let resource = resources.iter().find(|resource| resource["resource"] == name);
        resource
            .map(|resource| (resource["devicesNow"].as_u64().unwrap(), resource["devices"].as_u64().unwrap()))
    };
    let json_type = [("content-type", "application/json")];
    let body = |entries: &Value| json!({ "entries": entries }).to_string().into_bytes();
    let put = |entries: &Value| node.ask("PUT", "/api/v1/stack?dryRun=true", &json_type, &body(entries));
    let shown = put(&shares(1)).expect(200);
    assert_eq!(devices(&shown, SHARED), Some((4, 2)), "{shown}");
    assert_eq!(shown["preview"]["entries"][0]["parameters"]["shares"], 1);
    assert_eq!((&shown["revision"], &shown["entries"][0]["parameters"]["shares"]), (&2.into(), &2.into()));
    let rolled = node.ask("POST", "/api/v1/stack/rollback?dryRun=true", &[], b"").expect(200);
    assert_eq!(devices(&rolled, SHARED), Some((4, 8)), "{rolled}");
    let reset = node.ask("DELETE", "/api/v1/stack/override?dryRun=true", &[], b"").expect(200);
    assert_eq!((devices(&reset, SHARED), devices(&reset, WHOLE)), (Some((4, 0)), Some((0, 2))), "{reset}");
    assert_eq!(reset["preview"]["source"], "file");
    // It is refused as the activation would be.
    put(&json!([{"policy": "share", "parameters": {"fail": true}}])).problem(422, "stack-fails");
    let stale = [json_type[0], ("if-match", "\"1\"")];
    node.ask("PUT", "/api/v1/stack?dryRun=true", &stale, &body(&shares(1))).problem(412, "changed-meanwhile");
    node.ask("PUT", "/api/v1/stack?dryrun=true", &json_type, &body(&shares(1)))
        .problem(400, "malformed-query");
    let after = node.get("/api/v1/stack").expect(200);
    assert_eq!((&after["revision"], after.get("preview")), (&2.into(), None));
}

#[test]
fn an_override_is_shown_and_reset() {
    let node = AdminNode::new(1);
    node.core.policies.set_file_stack(of_file(&node, b"file", "of-the-file", 5));
    let reset = |headers: &[(&str, &str)]| node.ask("DELETE", "/api/v1/stack/override", headers, b"");
    let untouched = reset(&[]).expect(200);
    assert_eq!((&untouched["revision"], &untouched["fileStack"]["shadowed"]), (&0.into(), &false.into()));

    activate(&node, &json!([]), None).expect(200);
    let shown = node.get("/api/v1/stack").expect(200);
    assert_eq!(shown["fileStack"]["shadowed"], true);
    assert_eq!(shown["fileStack"]["entries"][0]["parameters"]["shares"], 5);
    reset(&[("if-match", "\"0\"")]).problem(412, "changed-meanwhile");
    let back = reset(&[]).expect(200);
    assert_eq!((&back["source"], &back["fileStack"]["shadowed"]), (&"file".into(), &false.into()));
    assert_eq!(back["entries"][0]["policy"], "of-the-file");

    activate(&node, &json!([]), None).expect(200);
    let broken = FileStack { entries: Vec::new(), error: Some("no such policy".into()) };
    node.core.policies.set_file_stack(broken);
    let says = reset(&[]).problem(409, "wrong-state");
    assert!(says.contains("no such policy"), "{says}");
    assert_eq!(node.get("/api/v1/stack").expect(200)["source"], "api");
}
