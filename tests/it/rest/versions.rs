//! Versions over time: earlier stacks, rollbacks, signatures, and suspended policies.

use crate::support::admin_fakes::module;
use crate::support::admin_node::{AdminNode, Answer};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_core::stack::FAULTS_TO_SUSPEND;
use berth_kernel::policy::version::TrustedKey;
use ring::signature::{Ed25519KeyPair, KeyPair};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

/// A key pair, made of a seed so that every run signs alike.
pub(crate) fn key(name: &str, seed: u8) -> (Ed25519KeyPair, TrustedKey) {
    let pair = Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap();
    let key = pair.public_key().as_ref().try_into().unwrap();
    (pair, TrustedKey { name: name.into(), key })
}

pub(crate) fn signature(pair: &Ed25519KeyPair, bytes: &[u8]) -> String {
    BASE64.encode(pair.sign(bytes).as_ref())
}

impl AdminNode {
    fn put_stack(&self, entries: &Value, why: &str) -> Value {
        let body = json!({ "entries": entries, "by": "alice", "reason": why });
        self.json("PUT", "/api/v1/stack", &body.to_string()).expect(200)
    }

    fn roll_back(&self, body: &Value) -> Answer {
        self.json("POST", "/api/v1/stack/rollback", &body.to_string())
    }

    fn history(&self) -> Vec<Value> {
        self.get("/api/v1/stack/history").expect(200)["items"].as_array().unwrap().clone()
    }

    fn upload_with(&self, module: &[u8], query: &str, headers: &[(&str, &str)]) -> Answer {
        let mut all = vec![("content-type", "application/wasm")];
        all.extend(headers);
        self.ask("POST", &format!("/api/v1/policies{query}"), &all, module)
    }
}

fn shares(count: u32) -> Value {
    json!([{ "policy": "share", "parameters": { "shares": count } }])
}

fn revisions(history: &[Value]) -> Vec<u64> {
    history.iter().map(|a| a["revision"].as_u64().unwrap()).collect()
}

#[test]
fn the_history_has_past_stacks_with_author_time_and_reason() {
    let node = AdminNode::new(1);
    let first = node.history();
    assert_eq!((first.len(), &first[0]["revision"], &first[0]["active"]), (1, &0.into(), &true.into()));
    assert_eq!(first[0].get("by"), None, "the first stack has no author");
    node.upload(&module("share", "1")).expect(201);
    node.put_stack(&shares(2), "two");
    node.json("PUT", "/api/v1/stack", &json!({ "entries": [] }).to_string()).expect(200);
    let history = node.history();
    assert_eq!(revisions(&history), [2, 1, 0]);
    assert_eq!((&history[0]["by"], history[0].get("why")), (&"admin".into(), None));
    let past = &history[1];
    assert_eq!((&past["by"], &past["why"]), (&"admin (for alice)".into(), &"two".into()));
    assert_eq!((&past["active"], &past["source"]), (&false.into(), &"api".into()));
    assert_eq!(past["entries"][0]["parameters"], json!({ "shares": 2 }));
    assert!(past["since"].as_str().unwrap().ends_with('Z'));
    assert_eq!(past.get("gone"), None);
    // Bounded, newest first.
    for i in 0..20 {
        node.put_stack(&shares(1 + i % 4), "again");
    }
    assert_eq!(revisions(&node.history()), (7..=22).rev().collect::<Vec<_>>());
}

#[test]
fn a_rollback_is_an_activation_of_a_past_stack() {
    let node = AdminNode::new(1);
    let says = node.roll_back(&json!({})).problem(409, "wrong-state");
    assert!(says.contains("nothing to roll back to: no stack was activated before revision 0"), "{says}");
    node.upload(&module("share", "1")).expect(201);
    node.put_stack(&shares(2), "two");
    node.put_stack(&shares(3), "three");
    let back = node.roll_back(&json!({ "by": "bob", "reason": "three were too many" }));
    let stack = back.expect(200);
    assert_eq!((&stack["revision"], &stack["by"]), (&3.into(), &"admin (for bob)".into()));
    assert_eq!(stack["why"], "three were too many");
    assert_eq!(stack["entries"][0]["parameters"], json!({ "shares": 2 }));
    assert_eq!(back.headers["etag"], "\"3\"");
    // A second rollback, without a body, reverts the first.
    let again = node.ask("POST", "/api/v1/stack/rollback", &[], b"").expect(200);
    assert_eq!(again["entries"][0]["parameters"], json!({ "shares": 3 }));
    assert_eq!((&again["by"], &again["why"]), (&"admin".into(), &"rolled back to revision 2".into()));
    // The rollback to the stack from before the first activation.
    let first = node.roll_back(&json!({ "revision": 0 })).expect(200);
    assert_eq!((&first["entries"], &first["source"]), (&json!([]), &"file".into()));

    let stale = [("content-type", "application/json"), ("if-match", "\"3\"")];
    node.ask("POST", "/api/v1/stack/rollback", &stale, b"{}").problem(412, "changed-meanwhile");
    node.roll_back(&json!({ "revision": 99 })).problem(404, "unknown-revision");
    node.roll_back(&json!({ "revision": 5 })).problem(409, "wrong-state");
    node.roll_back(&json!({ "revison": 1 })).problem(422, "invalid");
    node.roll_back(&json!({ "reason": "a\nb" })).problem(422, "invalid");
    node.roll_back(&json!({ "by": " " })).problem(422, "invalid");
    assert_eq!(node.get("/api/v1/stack").expect(200)["revision"], 5);
}

#[test]
fn stacks_with_deleted_or_failing_versions_cannot_be_rolled_back_to() {
    let node = AdminNode::new(1);
    let share = module("share", "1");
    let digest = node.upload(&share).expect(201)["digest"].as_str().unwrap().to_owned();
    node.put_stack(&shares(2), "two");
    node.put_stack(&json!([]), "none");
    let path = format!("/api/v1/policies/{digest}");
    assert_eq!(node.delete(&path).status, 204, "it is in the history only");
    let label = format!("share@{}", &digest[..12]);
    assert_eq!(node.history()[1]["gone"], json!([label]));
    let says = node.roll_back(&json!({ "revision": 1 })).problem(409, "wrong-state");
    assert!(says.contains(&label) && says.contains("revision 1") && says.contains("upload"), "{says}");
    // The same bytes again bring it back.
    node.upload(&share).expect(201);
    assert_eq!(node.history()[1].get("gone"), None);
    node.policies.broken.store(true, Ordering::SeqCst);
    node.roll_back(&json!({ "revision": 1 })).problem(422, "stack-fails");
    node.policies.broken.store(false, Ordering::SeqCst);
    assert_eq!(node.get("/api/v1/stack").expect(200)["revision"], 2, "nothing changed");
    node.roll_back(&json!({ "revision": 1 })).expect(200);
    node.delete(&path).problem(409, "in-use");
}

#[test]
fn versions_have_their_uploader_and_reason() {
    let node = AdminNode::new(1);
    let named = node.upload_with(&module("named", "1"), "?by=alice&reason=packs%20batch%20jobs", &[]);
    let named = named.expect(201);
    assert_eq!((&named["by"], &named["why"]), (&"admin (for alice)".into(), &"packs batch jobs".into()));
    assert!(named["since"].as_str().unwrap().ends_with('Z'));
    let plain = node.upload(&module("plain", "1")).expect(201);
    assert_eq!((&plain["by"], plain.get("why"), plain.get("signedBy")), (&"admin".into(), None, None));
    let again = node.upload_with(&module("named", "1"), "?by=bob", &[]).expect(200);
    assert_eq!(again, named, "the first word counts");
    let shipped = node.record_shipped(b"x", "shipped", 1);
    let shown = node.get(&format!("/api/v1/policies/{}", shipped.digest)).expect(200);
    assert_eq!(shown.get("by"), None);
    node.upload_with(&module("odd", "1"), "?who=alice", &[]).problem(400, "malformed-query");
    node.upload_with(&module("odd", "1"), "?by=", &[]).problem(422, "invalid");
    let reset = node.ask("DELETE", "/api/v1/stack/override?by=carol&reason=done", &[], b"");
    assert_eq!(reset.expect(200)["revision"], 0, "nothing was to be undone");
    node.put_stack(&json!([]), "");
    let reset = node.ask("DELETE", "/api/v1/stack/override?by=carol&reason=done", &[], b"").expect(200);
    assert_eq!(
        (&reset["by"], &reset["why"], &reset["source"]),
        (&"admin (for carol)".into(), &"done".into(), &"file".into())
    );
}

#[test]
fn with_trusted_keys_only_signed_policies_are_accepted() {
    let ((own, own_key), (stranger, _)) = (key("release", 1), key("stranger", 2));
    let node = AdminNode::trusting(1, vec![own_key]);
    let share = module("share", "1");
    let says = node.upload(&share).problem(403, "untrusted");
    assert!(says.contains("release") && says.contains("openssl pkeyutl -sign -rawin"), "{says}");
    let sent = |text: &str, module: &[u8]| node.upload_with(module, "", &[("berth-signature", text)]);
    sent(&signature(&stranger, &share), &share).problem(403, "untrusted");
    sent(&signature(&own, &module("share", "2")), &share).problem(403, "untrusted");
    for malformed in ["", "abc", &BASE64.encode([0; 63]), &BASE64.encode([0; 65]), "\u{e4}"] {
        sent(malformed, &share).problem(400, "malformed-header");
    }
    assert!(node.get("/api/v1/policies").expect(200)["items"].as_array().unwrap().is_empty());
    let taken = sent(&signature(&own, &share), &share).expect(201);
    assert_eq!(taken["signedBy"], "release");
    node.put_stack(&shares(2), "signed");
    // What comes with the daemon is not signed, and needs not be.
    node.record_shipped(b"file", "of-the-file", 1);
    node.put_stack(&json!([{ "policy": "of-the-file" }]), "shipped");
    node.roll_back(&json!({})).expect(200);
}

#[test]
fn an_unsigned_version_is_not_activated_until_it_is_signed() {
    let (own, own_key) = key("release", 1);
    let node = AdminNode::trusting(1, vec![own_key]);
    let share = module("share", "1");
    // The version was uploaded before the node had keys.
    let version = node.record_upload(&share, "share");
    let body = json!({ "entries": shares(2) }).to_string();
    let says = node.json("PUT", "/api/v1/stack", &body).problem(403, "untrusted");
    assert!(says.contains(&version.label()), "{says}");
    let signed = signature(&own, &share);
    let known = node.upload_with(&share, "", &[("berth-signature", &signed)]).expect(200);
    assert_eq!(
        (&known["signedBy"], &known["since"]),
        (&"release".into(), &"1970-01-01T00:00:00.001Z".into())
    );
    node.json("PUT", "/api/v1/stack", &body).expect(200);
    // It stays signed when its bytes come again unsigned, which is refused.
    node.upload(&share).problem(403, "untrusted");
    let shown = node.get(&format!("/api/v1/policies/{}", version.digest)).expect(200);
    assert_eq!(shown["signedBy"], "release");
}

#[test]
fn a_suspended_policy_is_called_again_after_unsuspend() {
    let node = AdminNode::new(1);
    node.upload(&module("share", "1")).expect(201);
    let etag = node.put_stack(&shares(2), "two")["revision"].clone();
    let record = |answer: &Value| answer["entries"][0]["record"].clone();
    let stack = || node.get("/api/v1/stack").expect(200);
    let end = |place: &str, headers: &[(&str, &str)]| {
        node.ask("DELETE", &format!("/api/v1/stack/entries/{place}/suspension"), headers, b"")
    };
    assert_eq!(record(&end("0", &[]).expect(200))["suspended"], false, "it was not suspended");

    node.policies.broken.store(true, Ordering::SeqCst);
    for _ in 0..FAULTS_TO_SUSPEND {
        node.runtime.block_on(node.kernel.reoffer()).unwrap();
    }
    let suspended = record(&stack());
    assert_eq!(suspended["suspended"], true, "{suspended}");
    let faults = suspended["faults"]["byKind"]["trap"].as_u64().unwrap();
    node.policies.broken.store(false, Ordering::SeqCst);
    node.runtime.block_on(node.kernel.reoffer()).unwrap();
    assert_eq!(record(&stack())["suspended"], true, "mending it is not enough");

    let stale = end("0", &[("if-match", "\"7\"")]);
    stale.problem(412, "changed-meanwhile");
    end("1", &[]).problem(404, "unknown-entry");
    end("x", &[]).problem(400, "malformed-path");
    let calls = suspended["calls"]["offer"].as_u64().unwrap();
    let shown = end("0", &[]).expect(200);
    let again = record(&shown);
    assert_eq!((&again["suspended"], &again["faults"]["inARow"]), (&false.into(), &0.into()));
    assert_eq!(again["faults"]["byKind"]["trap"], faults, "its counts stay");
    assert!(again["calls"]["offer"].as_u64().unwrap() > calls, "it was asked");
    assert_eq!(shown["revision"], etag, "without another activation");
}
