//! `berth policy try`: a policy is evaluated on the present node, without effect.

use crate::support::admin_fakes::module;
use crate::support::admin_node::AdminNode;
use crate::support::gpus::{SHARED, WHOLE};
use crate::support::process_node::ProcessNode;
use crate::support::wait::SOON;
use berth_kernel::policy::hooks::Hook;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::Instant;

impl AdminNode {
    fn tries(&self, body: &Value) -> crate::support::admin_node::Answer {
        self.json("POST", "/api/v1/trials", &body.to_string())
    }
}

#[test]
fn a_trial_shows_offers_and_a_grant_and_changes_nothing() {
    let node = AdminNode::new(2);
    node.upload(&module("share", "1")).expect(201);
    node.allocate(0);
    let before = node.get("/api/v1/node").expect(200)["generation"].clone();
    // Offers are evaluated again automatically, a moment after the grant.
    let counted = || {
        let mut tally = node.kernel.call_counters();
        tally.decisions.retain(|(hook, _), _| *hook != Hook::Offer);
        (tally.policies, tally.decisions)
    };
    let before_it = counted();
    let request = json!({"resource": SHARED, "count": 3, "namespace": "team-a", "pod": "trainer-0"});
    let trial = json!({"policy": "share", "parameters": {"shares": 4}, "request": request});
    let report = node.tries(&trial).expect(200);
    assert_eq!(report.get("refused"), None, "{report}");
    assert_eq!((&report["generation"], report["stack"].as_array().unwrap().len()), (&before, 1));
    let label = report["policy"].as_str().unwrap();
    assert!(label.starts_with("share@"), "{label}");
    for (at, offer) in report["offers"].as_array().unwrap().iter().enumerate() {
        assert_eq!(offer["name"], format!("GPU {at}"));
        assert_eq!(
            (&offer["offered"][0]["count"], &offer["offered"][0]["resource"]),
            (&4.into(), &SHARED.into())
        );
        assert_eq!((&offer["by"], &offer["differs"]), (&label.into(), &true.into()));
        assert_eq!(
            (&offer["offeredNow"][0]["resource"], &offer["byNow"]),
            (&WHOLE.into(), &"baseline".into())
        );
    }
    // GPU 0 is held whole, so none of its shares could be had.
    let shared = report["resources"].as_array().unwrap().iter().find(|r| r["resource"] == SHARED).unwrap();
    let of = |key: &str| shared[key].as_u64().unwrap();
    assert_eq!((of("devices"), of("free"), of("devicesNow"), of("freeNow")), (8, 4, 0, 0));
    let request = &report["request"];
    assert_eq!(
        (&request["outcome"], &request["candidates"]),
        (&"granted".into(), &json!(["team-a/trainer-0"]))
    );
    assert_eq!(request["names"], json!(["GPU 1 share 0", "GPU 1 share 1", "GPU 1 share 2"]));
    assert_eq!((&request["placedBy"], &request["by"]), (&"baseline".into(), &json!(["baseline"])));
    let call = &report["calls"][0];
    assert_eq!((&call["hook"], &call["said"]), (&"offer".into(), &"answer".into()), "{call}");
    assert!(call["words"].as_str().unwrap().starts_with("GPU 0 GPU 1: 4 x"), "{call}");

    // More than is free is refused, as the kubelet would.
    let request = json!({"resource": SHARED, "count": 5});
    let report =
        node.tries(&json!({"policy": "share", "parameters": {"shares": 4}, "request": request})).expect(200);
    assert_eq!(
        (&report["request"]["outcome"], &report["request"]["devices"]),
        (&"refused".into(), &json!([]))
    );
    assert!(report["request"]["reason"].as_str().unwrap().starts_with("4 of "), "{report}");

    assert_eq!(node.get("/api/v1/node").expect(200)["generation"], before, "the ledger did not move");
    assert_eq!(counted(), before_it, "and nothing was counted");
    assert_eq!(node.get("/api/v1/stack").expect(200)["entries"], json!([]));
}

#[test]
fn a_trial_replaces_its_namesake_or_is_called_first_and_reports_failures() {
    let node = AdminNode::new(1);
    for name in ["share", "other"] {
        node.upload(&module(name, "1")).expect(201);
    }
    let permissions = json!({"shareMax": 2});
    let entries = json!([{"policy": "other"}, {"policy": "share", "parameters": {"shares": 2}, "permissions": permissions}]);
    node.json("PUT", "/api/v1/stack", &json!({"entries": entries}).to_string()).expect(200);
    let labels = |report: &Value| -> Vec<String> {
        let name = |label: &Value| label.as_str().unwrap().split('@').next().unwrap().to_owned();
        report["stack"].as_array().unwrap().iter().map(name).collect()
    };

    let report = node.tries(&json!({"policy": "share", "parameters": {"shares": 1}})).expect(200);
    assert_eq!(labels(&report), ["other", "share"]);
    assert!(report["insteadOf"].as_str().unwrap().starts_with("share@"), "{report}");
    // What its entry may not, it may not here; nothing is lost, and the fault is reported as at an activation.
    let report = node.tries(&json!({"policy": "share", "parameters": {"shares": 4}})).expect(200);
    let refused = report["refused"].as_str().unwrap();
    let activation =
        json!({"entries": [{"policy": "share", "parameters": {"shares": 4}, "permissions": permissions}]});
    let answer = node.json("PUT", "/api/v1/stack", &activation.to_string()).problem(422, "stack-fails");
    let fault = refused.split("node: ").nth(1).unwrap();
    assert!(answer.contains(fault), "{answer} does not say {fault}");
    assert_eq!(report["calls"][1]["fault"].as_str(), Some(fault));
    assert_eq!(report["offers"][0]["differs"], false, "{report}");
    let wider = json!({"policy": "share", "parameters": {"shares": 4}, "permissions": {"shareMax": 4}});
    assert_eq!(node.tries(&wider).expect(200).get("refused"), None);

    let report =
        node.tries(&json!({"policy": "share", "parameters": {"fail": true}, "alone": true})).expect(200);
    assert_eq!((labels(&report), report.get("insteadOf")), (vec!["share".into()], None));
    assert!(
        report["refused"].as_str().unwrap().ends_with("fails on this node: unreachable (trap)"),
        "{report}"
    );
    assert_eq!(report["calls"][0]["words"], "fault: unreachable (trap)");
    assert_eq!(node.get("/api/v1/stack").expect(200)["entries"][1]["record"]["faults"]["byKind"], json!({}));

    node.upload(&module("third", "1")).expect(201);
    let report = node.tries(&json!({"policy": "third", "parameters": {"shares": 1}})).expect(200);
    assert_eq!(labels(&report), ["third", "other", "share"]);
}

#[test]
fn a_whole_stack_is_tried_as_its_activation_takes_it() {
    let node = AdminNode::new(1);
    for name in ["share", "other"] {
        node.upload(&module(name, "1")).expect(201);
    }
    let share = |shares: u32| json!({"policy": "share", "parameters": {"shares": shares}});
    let both = json!({"entries": [{"policy": "other"}, share(2)]});
    node.json("PUT", "/api/v1/stack", &both.to_string()).expect(200);
    let labels = |report: &Value| -> Vec<String> {
        let name = |label: &Value| label.as_str().unwrap().split('@').next().unwrap().to_owned();
        report["stack"].as_array().unwrap().iter().map(name).collect()
    };
    // Another order, and one entry fewer: a policy alone beside the active ones could be neither.
    let moved =
        json!({"entries": [share(4), {"policy": "other"}], "request": {"resource": SHARED, "count": 3}});
    let report = node.tries(&moved).expect(200);
    assert_eq!((labels(&report), report.get("refused")), (vec!["share".into(), "other".into()], None));
    assert_eq!(report["offers"][0]["offered"][0]["count"], 4);
    assert_eq!(report["request"]["outcome"], "granted", "{report}");
    let report = node.tries(&json!({"entries": [{"policy": "other"}]})).expect(200);
    assert_eq!((labels(&report), report.get("insteadOf")), (vec!["other".into()], None));
    let report = node.tries(&json!({"entries": []})).expect(200);
    assert_eq!((labels(&report), &report["policy"]), (Vec::new(), &"".into()));
    assert_eq!(
        report["offers"][0]["offered"][0]["resource"], WHOLE,
        "the baseline offers GPUs whole: {report}"
    );
    assert_eq!(node.get("/api/v1/stack").expect(200)["revision"], 1, "nothing was activated");
    for body in [
        json!({"entries": [], "policy": "share"}),
        json!({"entries": [], "parameters": {"shares": 1}}),
        json!({"entries": [], "alone": true}),
        json!({"entries": [{"policy": "unknown"}]}),
    ] {
        assert!(node.tries(&body).problem(422, "invalid").contains("entries"), "{body}");
    }
    assert!(node.tries(&json!({})).problem(422, "invalid").contains("policy: missing"));
}

#[test]
fn invalid_trials_are_refused_with_advice() {
    let node = AdminNode::new(1);
    node.upload(&module("share", "1")).expect(201);
    node.upload(&module("more", "1")).expect(201);
    let refused = |body: Value| node.tries(&body).problem(422, "invalid");
    assert!(refused(json!({"policy": "unknown"})).contains("it has"));
    assert!(refused(json!({"policy": "share", "permissions": {"shareMax": 0}})).contains("shareMax"));
    for (request, words) in [
        (json!({"resource": "gpu", "count": 1}), "request.resource"),
        (json!({"resource": WHOLE, "count": 0}), "1 to 2048"),
        (json!({"resource": WHOLE, "count": 2049}), "1 to 2048"),
        (json!({"resource": WHOLE, "count": 1, "namespace": "Team"}), "request.namespace"),
        (json!({"resource": WHOLE, "count": 1, "pod": ""}), "request.pod"),
        (json!({"resource": WHOLE, "count": 1, "node": "n"}), "unknown field"),
        (json!({"resource": WHOLE, "count": 1, "labels": {"": "x"}}), "request.labels: \"\""),
        (json!({"resource": WHOLE, "count": 1, "labels": {"a b": "x"}}), "request.labels: \"a b\""),
        (json!({"resource": WHOLE, "count": 1, "labels": {"Example.com/a": "x"}}), "\"Example.com/a\""),
        (json!({"resource": WHOLE, "count": 1, "labels": {"a": "-x"}}), "\"-x\" is not a valid value"),
    ] {
        let message = refused(json!({"policy": "share", "request": request}));
        assert!(message.contains(words), "{words} is missing in {message}");
    }
    node.json("POST", "/api/v1/trials", "{").problem(400, "malformed-json");
    node.ask("POST", "/api/v1/trials", &[], b"{}").problem(415, "unsupported-media-type");
    node.get("/api/v1/trials").problem(405, "method-not-allowed");

    let entries: Vec<_> = (0..16).map(|_| json!({"policy": "more"})).collect();
    node.json("PUT", "/api/v1/stack", &json!({"entries": entries}).to_string()).expect(200);
    assert!(node.tries(&json!({"policy": "share"})).problem(409, "limit-reached").contains("alone"));
    node.tries(&json!({"policy": "share", "alone": true})).expect(200);
}

#[test]
fn one_trial_runs_at_a_time_and_blocks_no_other_request() {
    let node = AdminNode::new(1);
    node.upload(&module("share", "1")).expect(201);
    let trial = json!({"policy": "share", "parameters": {"shares": 2}});
    let turn = node.policies.calls.lock().unwrap();
    std::thread::scope(|scope| {
        let before = node.policies.asked.load(Ordering::SeqCst);
        let (address, token, body) = (node.address(), format!("Bearer {}", node.token), trial.to_string());
        let first = scope.spawn(move || {
            let headers = [("authorization", token.as_str()), ("content-type", "application/json")];
            crate::support::admin_node::ask(address, "POST", "/api/v1/trials", &headers, body.as_bytes())
        });
        let end = Instant::now() + SOON;
        while node.policies.asked.load(Ordering::SeqCst) == before {
            assert!(Instant::now() < end, "it was never asked");
            std::thread::yield_now();
        }
        let second = node.tries(&trial);
        assert!(second.problem(503, "busy").contains("another policy is being tried"));
        assert!(second.headers.contains_key("retry-after"));
        node.allocate(0);
        drop(turn);
        first.join().unwrap().expect(200);
    });
    node.tries(&trial).expect(200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shipped_policies_are_tried_on_a_busy_node() {
    let node =
        ProcessNode::new("gpus: sim:2xh100\nstack: [{ policy: timeslice, parameters: { replicas: 2 } }]")
            .await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    node.start("a", SHARED, 1).await.unwrap();
    daemon.until("its holder", |live| live.len() == 1 && live[0]["holder"]["pod"] == "a");

    let parameters = node.folder.path().join("four.json");
    std::fs::write(&parameters, r#"{"replicas": 4}"#).unwrap();
    let at = format!("@{}", parameters.display());
    let request = format!("{SHARED}=2");
    let (code, output) =
        daemon.run_client(&["policy", "try", "timeslice", "--parameters", &at, "--request", &request]);
    assert_eq!(code, Some(0), "{output}");
    for words in [
        "in place of timeslice@",
        "GPU 0-1  nvidia.com/gpu.shared  4        2    timeslice@",
        "2 x nvidia.com/gpu.shared",
        "6 of 8",
        "3 of 4",
        "would be         granted",
        "GPU 1",
        "nothing was changed",
    ] {
        assert!(output.contains(words), "{words} is missing in {output}");
    }
    assert_eq!(node.kubelet.capacity(SHARED), Some(4), "nothing reached the kubelet");

    // A quota depends on the requester: the pod of the first namespace has used it up.
    let quota =
        r#"{"namespaces": [{"namespace": "ns", "devices": 1}, {"namespace": "other", "devices": 2}]}"#;
    for (namespace, words, ends) in [("ns", "denied by quota@", 1), ("other", "granted by", 0)] {
        let args =
            ["policy", "try", "quota", "--parameters", quota, "--request", SHARED, "--namespace", namespace];
        let (code, output) = daemon.run_client(&args);
        assert!(code == Some(ends) && output.contains(words), "{words} is missing in {output}");
        assert!(output.contains("called before the active stack"), "{output}");
    }
    // Labels alone make a pod, too.
    let by_label = ["policy", "try", "quota", "--parameters", quota, "--request", SHARED];
    let labels = ["--label", "tier=gold", "--label", "example.com/team=a"];
    let (code, output) = daemon.run_client(&[&by_label[..], &labels].concat());
    assert!(code == Some(0) && output.contains("default/trial"), "{output}");
    for (label, words) in [("tier", "KEY=VALUE"), ("tier=-", "request.labels")] {
        let (code, output) = daemon.run_client(&[&by_label[..], &["--label", label]].concat());
        assert!(code != Some(0) && output.contains(words), "{output}");
    }
    // A fault has the guest's own message.
    let (code, output) =
        daemon.run_client(&["policy", "try", "timeslice", "--parameters", r#"{"replicas": 0}"#]);
    assert!(code == Some(1) && output.contains("would be refused") && output.contains("fault: "), "{output}");
    // A policy without the hook `offer` is checked as in an activation.
    let args = ["policy", "try", "quota", "--parameters", r#"{"namespaces": 3}"#];
    let (code, output) = daemon.run_client(&args);
    assert!(code == Some(1) && output.contains("would be refused: policy quota@"), "{output}");
    assert!(output.contains("error: this stack would not be activated"), "{output}");
    let args = ["policy", "try", "timeslice", "--request", "nvidia.com/gpu.shard=1"];
    let (code, output) = daemon.run_client(&args);
    let words = "no nvidia.com/gpu.shard would be offered; offered resources: nvidia.com/gpu.shared\n";
    assert!(code == Some(1) && output.contains(words), "{output}");
    assert!(output.contains("error: the request would be refused"), "{output}");
    let (code, output) = daemon.run_client(&["policy", "try", "./mine.wasm"]);
    assert!(code == Some(2) && output.contains("berth policy push ./mine.wasm"), "{output}");
    assert_eq!(daemon.live().len(), 1);
    assert!(!daemon.log().contains("a policy failed"), "a trial counts no fault: {}", daemon.log());
}
